"""The contract of a modality: what kind of data an evaluation is about, and all that follows from it.

Images, masks, table rows and texts stand here, and what finds the modality of a configuration. Code that needs
to know the kind of data asks a modality; nobody else looks at the number of axes. Reading records loads this file, so
torch is imported only inside of methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ppbench.base.errors import shown, unknown
from ppbench.base.registry import load_all
from ppbench.base.vocabulary import PADDING, Vocabulary
from ppbench.metrics.image import DataRange, assigned, match
from ppbench.metrics.text import commonest_tokens, redraw_facts, share_in_place, tokens_of

if TYPE_CHECKING:
    from torch import Tensor


BLOCKS = 4
"""Blocks of places of a blank input without a grid; an image has quarters."""


@dataclass(frozen=True)
class Threshold:
    """A figure of a score, and the level above which it shows that the victim is rebuilt.

    figure: returns the figure, of a failed reconstruction its worst value, None where it was not measured; median: the
    name of its median over victims, of a metric or a new one; level: in the figure's unit; words: for documents.
    """

    figure: Callable[[Any], float | None]
    median: str
    level: float
    words: str

    def is_passed(self, score: Any) -> bool:
        """Return whether a victim lies above it."""
        figure = self.figure(score)
        return figure is not None and figure > self.level


class Modality(ABC):
    """One kind of data; an instance has no state. Scores are those of reconstructions (`ImageScore`).

    Class attributes a modality sets:
        name: the word for it.  noun: what inputs are called, as "rows".  inputs: the same in a sentence that says
            nothing else of them, as "table rows".
        content: what a finding about its inputs is listed under.
        headline: the metric that reconstructions are ranked by.  figure: its name in sentences.  title: its
            name in tables.  form: its format.
        broken: what is said of the share that is rebuilt of the undefended model.  rebuilt_title: its name in tables.
        meaning_rebuilt, meaning_recognizable: what these levels say of a setting.  glossary: what the page explains of
            this kind's figures, as (term, text).
        thresholds: a victim that passes one is rebuilt, and a setting whose median passes one with its whole interval;
            without any, a setting is rebuilt where half of the victims are.
        unmeasured_thresholds: the same where a figure of `thresholds` was not measured, as in older records.
        readers: metrics of what can be recognized without a rebuilt input.  parts: what they count.
        unmeasured: what is not known where no reader was measured.
        decibels: whether decibels beyond a blind guess say how far an input is rebuilt.  psnr_shown: whether flags
            compare decibels (of the budget, a blind guess, an oracle) and the page's table of cells has them.
        drawn: whether inputs [C, H, W] are pictures: they are kept, and drawn on the page.
        perceptual: whether inputs are compared by the eye: LPIPS, feature errors, and a gallery of others.
        continuous: whether an input that is moved a little is one, so that the loss has a slope by it.
        smooth: whether neighbouring values are alike: attacks may use total variation, smooth starts, shifted copies.
        masked: whether targets are masks of the inputs.
        canary_families: the families of `canaries`, which audits plant beside mislabelled examples.
        secret_family: the family whose canaries hold a secret (`redrawn`), "" for none.
        networks: by loss the network of data sets where none is named; that of "" for all other losses.  loss: their
            loss where none is named; "" for the preset's of either.
    """

    name: ClassVar[str]
    noun: ClassVar[str]
    inputs: ClassVar[str]
    content: ClassVar[str]
    headline: ClassVar[str]
    figure: ClassVar[str]
    title: ClassVar[str] = "places right"
    form: ClassVar[str] = ".2f"
    broken: ClassVar[str]
    rebuilt_title: ClassVar[str] = "Rebuilt"
    meaning_rebuilt: ClassVar[str] = "at least half of the victims come out right, the whole interval"
    meaning_recognizable: ClassVar[str] = "parts of inputs come out right well above chance"
    glossary: ClassVar[tuple[tuple[str, str], ...]] = ()
    thresholds: ClassVar[tuple[Threshold, ...]] = ()
    unmeasured_thresholds: ClassVar[tuple[Threshold, ...]] = ()
    readers: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[str] = "places"
    unmeasured: ClassVar[str] = "whether places come out right"
    decibels: ClassVar[bool] = False
    psnr_shown: ClassVar[bool] = False
    drawn: ClassVar[bool] = False
    perceptual: ClassVar[bool] = False
    continuous: ClassVar[bool] = True
    smooth: ClassVar[bool] = False
    masked: ClassVar[bool] = False
    canary_families: ClassVar[tuple[str, ...]] = ("blank", "out_of_distribution")
    secret_family: ClassVar[str] = ""
    networks: ClassVar[Mapping[str, str]] = {}
    loss: ClassVar[str] = ""

    def network(self, loss: str) -> str:
        """Return the network of `networks` under a loss, "" for none."""
        return self.networks.get(loss, self.networks.get("", ""))

    # -- judged --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def rebuilt(self, score: Any) -> bool:
        """Return whether the victim of a score is rebuilt: the one definition, which levels, controls, the self-test
        and tables ask. Nothing keeps the answer but the self-test, with its version.
        """

    def thresholds_of(self, scores: Sequence[Any]) -> tuple[Threshold, ...]:
        """Return `thresholds`, or `unmeasured_thresholds` if a score lacks a figure of them."""
        measured = all(one.figure(score) is not None for one in self.thresholds for score in scores)
        return self.thresholds if measured else self.unmeasured_thresholds

    @abstractmethod
    def amount(self, score: Any) -> float:
        """Return how much of a victim came out, larger being more: of several attacks the largest counts."""

    @abstractmethod
    def is_measured(self, score: Any) -> bool:
        """Return whether a score holds what `readers` are made of."""

    def worth(self, scores: Sequence[Any]) -> float:
        """Return how good answers on tuning victims are, larger being better. Default: the median amount."""
        return median([self.amount(score) for score in scores]) if scores else -float("inf")

    def accuracy(self, guess: Tensor, truth: Tensor) -> float | None:
        """Return the share of an input's places that `guess` has right, both [*shape]. Default: None, not measured."""
        return None

    def blind_guess(self, examples: Tensor) -> Tensor:
        """Return what an attacker guesses who sees only public examples [N, *shape]: [*shape]. Default: their mean."""
        return examples.mean(0)

    def blind_tokens(self, examples: Tensor) -> tuple[int, ...]:
        """Return the tokens that such an attacker guesses in any order. Default: none, as inputs are no texts."""
        return ()

    def match(self, guess: Tensor, truth: Tensor, data_range: DataRange) -> list[int]:
        """Return each true input's guess, both [B, *shape]. Default: least squares."""
        return match(guess, truth, data_range)

    # -- said ----------------------------------------------------------------------------------------------------------
    @property
    def parts_right(self) -> str:
        """The title of the share of right places: "Columns right"."""
        return f"{self.parts} right".capitalize()

    def stated(self, value: float) -> str:
        """Return a figure of `headline` in words."""
        return f"{self.figure} {value:{self.form}}"

    def brief(self, value: float) -> str:
        """Return a figure of `headline` for a narrow column. Default: a percentage."""
        return f"{value:.1%}"

    def beside(self, value: float, rebuilt: bool) -> str:
        """Return a figure of `headline` as the headline appends it to a level, with a leading space."""
        return f" ({self.stated(value)})"

    def example(self, scores: Sequence[Any]) -> str:
        """Return what the headline quotes of reconstructions, a clause that begins with a comma. Default: nothing."""
        return ""

    def far_worse(self, one: float, other: float) -> bool:
        """Return whether much more leaks at `one` than at `other`, figures of `headline`. Default: of shares of right
        places, whether 0.7 of the wrong ones are left.
        """
        return 1 - one < 0.7 * (1 - other)

    # -- canaries ------------------------------------------------------------------------------------------------------
    def canaries(self, records: Tensor, examples: Tensor, plan: _Planned, generator: Any) -> Tensor:
        """Return n inputs of each of `canary_families`, family by family, [families * n, *shape]: only training on one
        explains how a model answers it.

        records: n of the test examples, of which a family may be made. Default: inputs without content, and noise,
        between the ends of `extent`.
        """
        import torch

        low, high = self.extent(examples, plan.data_range)
        level = self.blank(len(records), tuple(low.shape), generator)
        noise = torch.rand(records.shape, generator=generator)
        return torch.cat([low + (high - low) * level, low + (high - low) * noise])

    def redrawn(self, canaries: Tensor, plan: _Planned, generator: Any) -> Tensor:
        """Return canaries [n, *shape] of `secret_family` with other secrets, drawn as theirs were. Default: as they
        are, without secrets.
        """
        return canaries.clone()

    def extent(self, examples: Tensor, data_range: DataRange) -> tuple[Tensor, Tensor]:
        """Return the least and the greatest canary [*shape]. Default: those of each place in examples [N, *shape]."""
        return examples.amin(0), examples.amax(0)

    def blank(self, count: int, shape: tuple[int, ...], generator: Any) -> Tensor:
        """Return inputs without content [count, *shape] in [0, 1]: one value in each of `BLOCKS` blocks of places."""
        import torch
        from torch.nn.functional import interpolate

        blocks = torch.rand(count, 1, BLOCKS, generator=generator)
        size = torch.Size(shape).numel()
        return interpolate(blocks, size=size, mode="nearest").reshape(count, *shape)


def modality_faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield what a plugin called `name` is not that a modality must be."""
    if not (isinstance(plugin, type) and issubclass(plugin, Modality)):
        yield f"is {shown(plugin, 60)}; it must be a class derived from ppbench.metrics.modality.Modality"
        return
    missing = [attribute for attribute in Modality.__annotations__ if not hasattr(plugin, attribute)]
    if missing or plugin.__abstractmethods__:
        yield f"does not set {', '.join([*missing, *sorted(plugin.__abstractmethods__)])}, which a modality must"
    elif plugin.name != name:
        yield f"has the name {shown(plugin.name, 60)}, but is installed as {name!r}; they must be equal"
    else:
        plugin()  # without arguments: an instance has no state


# -- The modalities of this package, and the registry: from a configuration to the modality of its inputs --
# Others come by the entry point `ppbench.modalities`, a class without arguments; data sets name them (`Dataset.kind`),
# and records of these (`DataInfo.modality`).

EXACT_DB = 59.0
"""PSNR in dB from which two 8-bit images are equal: rounding to 1/255 leaves 20 log10(255 sqrt(12)) = 58.9 dB.

Larger values are judged as equal: whether a copy is exact to 70 or 90 dB depends on rounding.
"""
CLOSE_ROW, CLOSE_ROW_WORDS = 0.1, "a tenth"
"""Relative error below which a table row counts as rebuilt, and its name in sentences."""
FAILED = 1e6
"""Relative error that a failed reconstruction of a table row counts as, where settings are tuned."""
TASKS = {"cross_entropy": "classification", "squared": "regression", "bce": "segmentation"}
"""The task of a loss; one-hot classes under the squared loss are inputs of the same kind."""


class Image(Modality):
    """Images [C, H, W], judged in decibels beyond a blind guess and by whether they are recognized."""

    name: ClassVar[str] = "image"
    noun: ClassVar[str] = "images"
    inputs: ClassVar[str] = "images"
    content: ClassVar[str] = "pixels"
    headline: ClassVar[str] = "psnr_median"
    figure: ClassVar[str] = "median PSNR in dB"
    title: ClassVar[str] = "PSNR"
    form: ClassVar[str] = ".1f"
    broken: ClassVar[str] = "images are rebuilt"
    meaning_rebuilt: ClassVar[str] = (
        "the median image has at most a tenth of the squared error of the best blind guess left (10 dB beyond it), its "
        "whole interval"
    )
    meaning_recognizable: ClassVar[str] = (
        "originals are found by their reconstructions among held-out images, or their classes read off them, well "
        "above chance"
    )
    glossary: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "Re-identified, read",
            "The share of originals that a reconstruction is nearest to among up to 1,000 held-out images, by the "
            "correlation of pixels; the share of classes that its five nearest held-out images vote for rightly.",
        ),
        (
            "PSNR",
            "Peak signal-to-noise ratio of a reconstruction, clipped to the data range, in dB. A bare gradient gives "
            "30 dB and more; what a blind guess gets stands beside it. A reconstruction that failed counts as 0 dB; an "
            "exact one as 100 dB. p95 is the 95th percentile over victims: people at the tail are people.",
        ),
        ("Worst tenth", "Mean PSNR of the tenth of the victims that came out best."),
        (
            "Test-MSE, LPIPS, Feat-MSE",
            "Mean squared error of the clipped pixels, in units of the data range. LPIPS (Zhang et al. 2018) and the "
            "mean squared error of the last features are distances in the eyes of AlexNet's convolutions, given where "
            "a file of their weights was; images of 28 to 31 pixels a side are framed to 32, smaller ones are not "
            "measured. A failed reconstruction counts as MSE 1, and as mid-grey for the other two.",
        ),
        (
            "Evaluations per broken",
            "Gradient evaluations that the attack spent on all victims, over the number of victims above 20 dB.",
        ),
        (
            "SSIM",
            "Structural similarity, the mean over windows of 7 x 7 equal weights and over channels, with sample "
            "covariances; published figures with Gaussian windows of 11 differ. 8 x 8 images have four windows.",
        ),
    )
    thresholds: ClassVar[tuple[Threshold, ...]] = (
        Threshold(lambda s: s.gain, "gain_median", 10.0, "10 dB beyond the best blind guess"),  # a tenth of its error
        Threshold(lambda s: s.decibels, "psnr_median", EXACT_DB, "59 dB, where images are equal to 8 bits"),
    )
    unmeasured_thresholds: ClassVar[tuple[Threshold, ...]] = (
        Threshold(lambda s: s.decibels, "psnr_median", 20.0, "20 dB where no blind guess was measured"),
    )
    readers: ClassVar[tuple[str, ...]] = (
        "reidentified", "recognized", "reidentified_features", "recognized_features",
    )  # fmt: skip
    parts: ClassVar[str] = "classes"
    unmeasured: ClassVar[str] = "whether they are recognizable"
    decibels: ClassVar[bool] = True
    psnr_shown: ClassVar[bool] = True
    drawn: ClassVar[bool] = True
    perceptual: ClassVar[bool] = True
    smooth: ClassVar[bool] = True

    def rebuilt(self, score: Any) -> bool:
        """Return whether the image passes one of `thresholds`."""
        return any(one.is_passed(score) for one in self.thresholds_of((score,)))

    def amount(self, score: Any) -> float:
        """Return the PSNR in dB; -1 of a failed reconstruction."""
        return -1.0 if score.psnr is None else float(score.psnr)

    def is_measured(self, score: Any) -> bool:
        """Return whether it was tried to recognize the image."""
        return getattr(score, "recognition", None) is not None

    def worth(self, scores: Sequence[Any]) -> float:
        """Return the median PSNR; a failed reconstruction counts as 0 dB."""
        return median([score.decibels for score in scores]) if scores else 0.0

    def stated(self, value: float) -> str:
        """Return decibels."""
        return f"{value:.1f} dB"

    brief = stated

    def beside(self, value: float, rebuilt: bool) -> str:
        """Return decibels without decimals."""
        return f" at {value:.0f} dB"

    def far_worse(self, one: float, other: float) -> bool:
        """Return whether half of the squared error is left."""
        return one > other + 3.0

    def extent(self, examples: Tensor, data_range: DataRange) -> tuple[Tensor, Tensor]:
        """Return the ends of the data range."""
        import torch

        low, high = data_range
        return torch.full_like(examples[0], low), torch.full_like(examples[0], high)

    def blank(self, count: int, shape: tuple[int, ...], generator: Any) -> Tensor:
        """Return images with one value in each quarter of each channel."""
        import torch
        from torch.nn.functional import interpolate

        quarters = torch.rand(count, shape[0], 2, 2, generator=generator)
        return interpolate(quarters, size=tuple(shape[1:]), mode="nearest")


class Mask(Image):
    """Images whose targets are masks; what is rebuilt is the image."""

    name: ClassVar[str] = "mask"
    masked: ClassVar[bool] = True
    networks: ClassVar[Mapping[str, str]] = {"": "unet"}
    loss: ClassVar[str] = "bce"


class TableRow(Modality):
    """Rows of a table [features], judged by their relative error: the column means of a table give 35 dB."""

    name: ClassVar[str] = "row"
    noun: ClassVar[str] = "rows"
    inputs: ClassVar[str] = "table rows"
    content: ClassVar[str] = "rows"
    headline: ClassVar[str] = "rmse_mean"
    figure: ClassVar[str] = "mean relative error"
    title: ClassVar[str] = "error"
    broken: ClassVar[str] = f"rows come within {CLOSE_ROW_WORDS} of their size"
    rebuilt_title: ClassVar[str] = f"Within {CLOSE_ROW:.0%}"
    meaning_rebuilt: ClassVar[str] = f"at least half of the rows come within {CLOSE_ROW_WORDS} of their norm"
    meaning_recognizable: ClassVar[str] = "columns come out right well above chance"
    glossary: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "Rows of tables",
            "Decibels say nothing about them: guessing every column's mean does well. A row counts as rebuilt within a "
            f"{CLOSE_ROW_WORDS.removeprefix('a ')} of its norm.",
        ),
    )
    readers: ClassVar[tuple[str, ...]] = ("reconstruction_accuracy",)
    parts: ClassVar[str] = "columns"
    unmeasured: ClassVar[str] = "whether columns come out right"
    networks: ClassVar[Mapping[str, str]] = {"": "mlp"}
    psnr_shown: ClassVar[bool] = True

    def rebuilt(self, score: Any) -> bool:
        """Return whether the relative error is below `CLOSE_ROW`."""
        return bool(score.error < CLOSE_ROW)

    def amount(self, score: Any) -> float:
        """Return minus the relative error."""
        return -float("inf") if score.rmse is None else -float(score.rmse)

    def is_measured(self, score: Any) -> bool:
        """Return whether the right columns were counted."""
        return getattr(score, "accuracy", None) is not None

    def worth(self, scores: Sequence[Any]) -> float:
        """Return minus the median relative error."""
        return median([-FAILED if s.rmse is None else -s.rmse for s in scores]) if scores else -FAILED

    def brief(self, value: float) -> str:
        """Return the error as a percentage."""
        return f"error {value:.1%}"

    def beside(self, value: float, rebuilt: bool) -> str:
        """Return " within 2%" of rebuilt rows, else " (relative error 30%)"."""
        error = f"{value:.0%}" if value >= 0.1 else f"{100 * value:.2g}%"
        return f" within {error}" if rebuilt else f" (relative error {error})"

    def far_worse(self, one: float, other: float) -> bool:
        """Return whether 0.7 of the relative error is left."""
        return one < 0.7 * other


QUOTED = 80
"""Characters of a text, at most, that a headline quotes."""
MOSTLY = 0.9
"""Share of a text's tokens at their place from which it counts as rebuilt."""


class TextInput(Modality):
    """Texts [length] of token numbers, judged by the share of tokens that stand at their place."""

    name: ClassVar[str] = "text"
    noun: ClassVar[str] = "texts"
    inputs: ClassVar[str] = "texts"
    content: ClassVar[str] = "texts"
    headline: ClassVar[str] = "reconstruction_accuracy"
    figure: ClassVar[str] = "share of tokens in place"
    title: ClassVar[str] = "tokens in place"
    broken: ClassVar[str] = f"texts come out with {MOSTLY:.0%} of their tokens in place"
    meaning_rebuilt: ClassVar[str] = f"at least half of the texts have {MOSTLY:.0%} of their tokens in place"
    meaning_recognizable: ClassVar[str] = "tokens are in place, or in the text in any order, well above chance"
    glossary: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "Texts",
            "The share of a text's tokens that stand at their place; padding does not count. The blind guess has the "
            "most frequent token of the public texts at each place, or, in any order, those that share most with them.",
        ),
        (
            "Canaries of texts",
            "Texts under another's class; planted ones, whose names and numbers, and class, are drawn at random; texts "
            "of random tokens.",
        ),
    )
    readers: ClassVar[tuple[str, ...]] = ("reconstruction_accuracy", "tokens_in_set")
    parts: ClassVar[str] = "tokens"
    continuous: ClassVar[bool] = False
    unmeasured: ClassVar[str] = "whether tokens are in place"
    canary_families: ClassVar[tuple[str, ...]] = ("planted", "out_of_distribution")
    secret_family: ClassVar[str] = "planted"
    networks: ClassVar[Mapping[str, str]] = {"": "transformer", "next_token": "gpt"}

    def rebuilt(self, score: Any) -> bool:
        """Return whether `MOSTLY` of the tokens are in place."""
        return score.accuracy is not None and score.accuracy >= MOSTLY

    def amount(self, score: Any) -> float:
        """Return the share of tokens in place; -1 where it was not measured."""
        return -1.0 if score.accuracy is None else float(score.accuracy)

    def is_measured(self, score: Any) -> bool:
        """Return whether tokens were counted."""
        return getattr(score, "accuracy", None) is not None

    def beside(self, value: float, rebuilt: bool) -> str:
        """Return the share of tokens in place."""
        return f" at {value:.0%} of tokens in place"

    def example(self, scores: Sequence[Any]) -> str:
        """Return the reconstruction of the median victim, as `, for example "Dear Dr Keller, invoice"`."""
        texts = sorted((score for score in scores if getattr(score, "text", None)), key=self.amount)
        if not texts:
            return ""
        text = texts[len(texts) // 2].text.guess
        return f', for example "{text if len(text) <= QUOTED else text[:QUOTED] + "..."}"'

    def accuracy(self, guess: Tensor, truth: Tensor) -> float | None:
        """Return the share of a text's tokens at their place, both [length] token numbers."""
        return share_in_place(tokens_of(guess), tokens_of(truth))

    def blind_guess(self, examples: Tensor) -> Tensor:
        """Return the most frequent token at each place of the texts that reach it: padding is never right."""
        import torch

        places = [column[column != PADDING] for column in examples.T]
        return torch.stack([some.mode().values if len(some) else examples.new_tensor(PADDING) for some in places])

    def blind_tokens(self, examples: Tensor) -> tuple[int, ...]:
        """Return the tokens that share most with public texts."""
        return commonest_tokens(examples)

    def match(self, guess: Tensor, truth: Tensor, data_range: DataRange) -> list[int]:
        """Return each true text's guess, both [B, length]: most tokens in place, all together."""
        guesses, texts = map(tokens_of, guess), [tokens_of(text) for text in truth]
        cost = np.array([[-share_in_place(one, text) for text in texts] for one in guesses], dtype=np.float64)
        return assigned(cost.T)

    def canaries(self, records: Tensor, examples: Tensor, plan: _Planned, generator: Any) -> Tensor:
        """Return records with other names and numbers (without a vocabulary as they are), and random tokens."""
        import torch

        planted = self.redrawn(records, plan, generator)
        tokens = int(plan.data_range[1]) + 1
        noise = torch.randint(PADDING + 1, tokens, records.shape, generator=generator)
        return torch.cat([planted, noise.to(records.dtype)])

    def redrawn(self, canaries: Tensor, plan: _Planned, generator: Any) -> Tensor:
        """Return texts with other names and numbers, drawn evenly from the vocabulary; without one as they are."""
        return canaries if plan.vocabulary is None else redraw_facts(canaries, plan.vocabulary, generator)


MASK, IMAGE, TABLE_ROW, TEXT = Mask(), Image(), TableRow(), TextInput()


class _Network(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


class _Model(_Network, Protocol):
    @property
    def loss(self) -> str: ...


class _Data(Protocol):
    @property
    def modality(self) -> str: ...


class _Configured(Protocol):
    @property
    def model(self) -> _Model: ...
    @property
    def data(self) -> _Data: ...


class _Planned(Protocol):
    @property
    def spec(self) -> _Network: ...
    @property
    def loss(self) -> object: ...
    @property
    def kind(self) -> str: ...
    @property
    def data_range(self) -> DataRange: ...
    @property
    def vocabulary(self) -> Vocabulary | None: ...


def modalities() -> tuple[Modality, ...]:
    """Return all modalities, those of others first."""
    return (*_installed(), MASK, IMAGE, TABLE_ROW, TEXT)


@cache
def _installed() -> tuple[Modality, ...]:
    return tuple(plugin() for plugin in load_all("modalities").values())


def modality_from(shape: Sequence[int], task: str = "", name: str = "") -> Modality:
    """Return the modality `name`; without a name what shape and task say: images, masks, or else rows of numbers.

    task: "classification", "regression", "segmentation", "" where it is not known, or a loss. UsageError: no modality
    has that name.
    """
    if not name:
        segmented = TASKS.get(task, task) == "segmentation"
        return TABLE_ROW if len(shape) != 3 else MASK if segmented else IMAGE
    known = {modality.name: modality for modality in modalities()}
    if name not in known:
        raise unknown("modality", name, known)
    return known[name]


def modality_of(config: _Configured) -> Modality:
    """Return the modality of a cell's inputs by its configuration; UsageError: it is not installed here."""
    return modality_from(config.model.shape, config.model.loss, config.data.modality)


def modality_in(plan: _Planned) -> Modality:
    """Return the modality of the inputs of a federation with this plan."""
    return modality_from(plan.spec.shape, plan.loss if isinstance(plan.loss, str) else "", plan.kind)
