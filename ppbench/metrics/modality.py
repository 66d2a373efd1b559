"""The contract of a modality: what kind of data an evaluation is about, and all that follows from it.

Images, masks and table rows stand in `modalities.py`, which also finds the modality of a configuration. Code that needs
to know the kind of data asks a modality; nobody else looks at the number of axes. Reading records loads this file, so
torch is imported only inside of methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

from ppbench.base.errors import shown
from ppbench.metrics.image import DataRange, match

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = 4
"""Blocks of places of a blank input without a grid; an image has quarters."""


class Modality(ABC):
    """One kind of data; an instance has no state. Scores are those of reconstructions (`ImageScore`).

    Class attributes a modality sets:
        name: the word for it.  noun: what inputs are called, as "rows".  inputs: the same in a sentence that says
            nothing else of them, as "table rows".
        content: what a finding about its inputs is listed under.
        headline: the metric that reconstructions are ranked by.  figure: its name in sentences.  title: its
            name in tables.  form: its format.
        broken: what is said of the share that is rebuilt of the undefended model.
        rules: metrics of reconstructions that `ppbench compare` judges.
        readers: metrics of what can be recognized without a rebuilt input.  parts: what they count.
        unmeasured: what is not known where no reader was measured.
        decibels: whether decibels beyond a blind guess say how far an input is rebuilt.
        drawn: whether inputs [C, H, W] are pictures: they are kept, and drawn on the page.
        perceptual: whether inputs are compared by the eye: LPIPS, feature errors, and a gallery of others.
        smooth: whether neighbouring values are alike: attacks may use total variation, smooth starts, shifted copies.
        masked: whether targets are masks of the inputs.
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
    rules: ClassVar[tuple[str, ...]] = ()
    readers: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[str] = "places"
    unmeasured: ClassVar[str] = "whether places come out right"
    decibels: ClassVar[bool] = False
    drawn: ClassVar[bool] = False
    perceptual: ClassVar[bool] = False
    smooth: ClassVar[bool] = False
    masked: ClassVar[bool] = False

    @abstractmethod
    def fits(self, shape: tuple[int, ...], task: str) -> bool:
        """Return whether inputs of this shape are of this kind. task: "classification", "regression", "segmentation",
        "" where it is not known, or the name of another loss.
        """

    # -- judged --------------------------------------------------------------------------------------------------------
    @abstractmethod
    def rebuilt(self, score: Any) -> bool:
        """Return whether the victim of a score is rebuilt."""

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

    def match(self, guess: Tensor, truth: Tensor, data_range: DataRange) -> list[int]:
        """Return each true input's guess, both [B, *shape]. Default: least squares."""
        return match(guess, truth, data_range)

    # -- said ----------------------------------------------------------------------------------------------------------
    def stated(self, value: float) -> str:
        """Return a figure of `headline` in words."""
        return f"{self.figure} {value:{self.form}}"

    def brief(self, value: float) -> str:
        """Return a figure of `headline` for a narrow column. Default: a percentage."""
        return f"{value:.1%}"

    def beside(self, value: float, rebuilt: bool) -> str:
        """Return a figure of `headline` as the headline appends it to a level, with a leading space."""
        return f" ({self.stated(value)})"

    def far_worse(self, one: float, other: float) -> bool:
        """Return whether much more leaks at `one` than at `other`, figures of `headline`. Default: of shares of right
        places, whether 0.7 of the wrong ones are left.
        """
        return 1 - one < 0.7 * (1 - other)

    # -- canaries ------------------------------------------------------------------------------------------------------
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


def faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield what a plugin called `name` is not that a modality must be."""
    if not (isinstance(plugin, type) and issubclass(plugin, Modality)):
        yield f"is {shown(plugin, 60)}; it must be a class derived from ppbench.metrics.modality.Modality"
        return
    missing = [attribute for attribute in Modality.__annotations__ if not hasattr(plugin, attribute)]
    if missing or plugin.__abstractmethods__:
        yield f"does not set {', '.join([*missing, *sorted(plugin.__abstractmethods__)])}, which a modality must"
    elif plugin.name != name:
        yield f"has the name {shown(plugin.name, 60)}, but is installed as {name!r}; they must be equal"
