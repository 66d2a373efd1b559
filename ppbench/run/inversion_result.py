"""The result of `ppbench.invert`: inputs, how much of the gradient they explain, and what that shows."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from ppbench.adversary.attack import Guess, SolvedLayer
from ppbench.base.errors import UsageError, count_of, shown
from ppbench.base.vocabulary import Vocabulary
from ppbench.metrics.image import match, psnr
from ppbench.metrics.modality import IMAGE, TEXT, modality_from
from ppbench.run.user_inputs import OUTSIDE, to_dense

RECOVERED_DB = 10.0
"""dB above the best constant image at which a planted input counts as recovered: nine tenths of its variance."""
TELLING = 1e-4
"""The most that a recovered planted batch may leave unexplained, or no mismatch is compared with what it left."""
ALIKE, ROUNDING = 10.0, 1e-12
"""dB by which a mismatch may exceed that of a planted batch; and what a float32 gradient's rounding leaves."""
NOISE, BRIGHT = 0.5, 0.25
"""Share of noise in planted inputs, and of its pixels that are at one end of the data range (the others are at the
other): another mean and contrast than those of any start, which a network may not depend on (`InstanceNorm2d`)."""
NARROW = 0.01
"""Share of the data range that inputs which are not constant must span: 0..1 in a range of 0..255 does not."""

SIDE, GAP, ACROSS = 96, 4, 12
"""Of a picture of images: pixels that a small image is enlarged to, pixels between two, and images in a line."""


@dataclass(frozen=True)
class Planted:
    """The attack's result on a gradient whose inputs are known: its answer mixed with noise, from another start.

    Attributes:
        mismatch: as `Inverted.mismatch`, of the reconstruction.
        psnr: in dB, of each reconstruction against its planted input; constant: of the best constant image.
        evaluations: gradients computed.
        stop: mismatch at which the search ends: smaller ones do not differ in progress.
    """

    mismatch: float
    psnr: tuple[float, ...]
    constant: tuple[float, ...]
    evaluations: int
    stop: float = ROUNDING

    def recovered_at(self, mismatch: float) -> bool:
        """Whether a batch of this mismatch would count as recovered too: one not much greater, see `ALIKE`.

        Squared errors of inputs grow with the mismatch, so a planted batch that came out barely leaves less room.
        """
        least = max(self.stop, ROUNDING)
        worse = 10 * math.log10(max(mismatch, least) / max(self.mismatch, least)) if mismatch < math.inf else math.inf
        clear = all(own - worse >= blind + RECOVERED_DB for own, blind in zip(self.psnr, self.constant, strict=True))
        return self.recovered and worse <= ALIKE and clear

    @property
    def recovered(self) -> bool:
        """Whether each input came out clearly better than a constant image, and nearly all was explained."""
        clear = all(own >= blind + RECOVERED_DB for own, blind in zip(self.psnr, self.constant, strict=True))
        return clear and self.mismatch <= TELLING


@dataclass(frozen=True, repr=False)
class Inverted:
    """An attack's reconstruction from a gradient.

    Attributes:
        x: the inputs that it found, [B, *shape] float32 on the CPU, not clipped, in no particular order.
        y: their labels in the order of `x`: classes [B] int64, or of losses without classes numbers [B, C] float32 ([B]
            of one output); None if the attack names none, or the loss is a function of unknown labels.
        mismatch: share of the gradient's squared norm that `x` and `y` do not explain: 0 for all explained, 1 for what
            explains nothing, more for worse. None without `y`. Alone it decides nothing, see `solved_mismatch`.
        evaluations: gradients that the attack computed.
        data_range: of an input's values.
        scale: what the gradient was divided by: the factor by which it differs from that of the mean loss; 1
            where none was found.
        budget: gradients that the attack might compute; None where it has no such parameter.
        planted: the result of the same attack on a gradient whose inputs are known; None if that was not run.
        unexplained: whether a factor was fitted to the last layer's gradient, and none explains it; `scale` is 1 then.
        training: optimizer of the local steps behind the update; None for a gradient.
        attack: name of the attack that answered.
        layers: of an attack that computes inputs layer by layer, how well each was determined.
        loss: the loss's name.
        blind_mismatch: the least mismatch of a constant image, with the same labels; what explains nothing of the
            image. None where no mismatch is known.
        least_batch: examples that the last layer's gradient shows at least (its rank); 0 where that is not known.
        rate: of the local steps of SGD behind the update, given or fitted; None for a gradient, or other optimizers.
        unseen: names of trained parameters whose gradient the attacker did not have.
        vocabulary: of texts, whose `x` are token numbers, int64; else None.
    """

    x: Tensor
    y: Tensor | None
    mismatch: float | None
    evaluations: int
    data_range: tuple[float, float] = (0.0, 1.0)
    scale: float = 1.0
    budget: int | None = None
    planted: Planted | None = None
    unexplained: bool = False
    training: Literal["sgd", "adam"] | None = None
    attack: str = ""
    layers: tuple[SolvedLayer, ...] = ()
    loss: str = "cross_entropy"
    blind_mismatch: float | None = None
    least_batch: int = 0
    unseen: tuple[str, ...] = ()
    rate: float | None = None
    vocabulary: Vocabulary | None = None

    def __repr__(self) -> str:
        labels = "" if self.y is None else f", labels {shown(self.y.tolist(), 40)}"
        left = "" if self.mismatch is None else f", mismatch {self.mismatch:.1e}"
        blind = "" if self.blind_mismatch is None else f" (blind {self.blind_mismatch:.1e})"
        inputs = f"{count_of(len(self.x), 'input')} of {tuple(self.x.shape[1:])}"
        part = f", {count_of(len(self.unseen), 'tensor')} unseen" if self.unseen else ""
        return f"<Inverted {inputs} by {self.attack!r}{labels}{left}{blind}{part}>"

    @property
    def texts(self) -> list[str]:
        """The texts, as their tokens are written together; UsageError: inputs are no texts."""
        if self.vocabulary is None:
            raise UsageError(f"Inputs of shape {tuple(self.x.shape[1:])} are no texts.")
        return [self.vocabulary.text(row.tolist()) for row in self.x]

    def accuracy(self, truth: Any) -> list[float]:
        """Return the share of tokens in place of each true text [B, L], each beside its best match.

        UsageError: inputs are no texts, or `truth` has another shape.
        """
        true = to_dense(truth)
        if self.vocabulary is None or true is None or true.shape != self.x.shape:
            right = (
                f"token numbers of shape {tuple(self.x.shape)}" if self.vocabulary else "no truth: these are no texts"
            )
            raise UsageError(f"The truth is {shown(truth, 60)}; give {right}.")
        order = TEXT.match(self.x.float(), true.float(), self.data_range)
        return [TEXT.accuracy(self.x[i].float(), text.float()) or 0.0 for i, text in zip(order, true, strict=True)]

    @property
    def _has_pictures(self) -> bool:
        return self.vocabulary is None and modality_from(self.x.shape[1:]) is IMAGE and self.x.shape[1] in (1, 3)

    def show(self, truth: Tensor | None = None) -> Image.Image:
        """Return the images side by side; with the true ones [B, *shape], these above, each over its best match.

        Clipped to the data range, enlarged to about `SIDE` pixels, 8 bits. UsageError: as `psnr`; inputs are no images
        of one or three channels.
        """
        if not self._has_pictures:
            shape = tuple(self.x.shape[1:])
            raise UsageError(f"Inputs of shape {shape} cannot be shown; only images (1, H, W) or (3, H, W) can.")
        if truth is None:
            return image_grid([self.x], self.data_range)
        true = self._checked(truth)
        return image_grid([true, self.x[match(self.x, true, self.data_range)]], self.data_range)

    def _repr_png_(self) -> bytes | None:
        """Return the images as a PNG, for notebooks; None of inputs that are no images."""
        if not self._has_pictures:
            return None
        file = io.BytesIO()
        self.show().save(file, "PNG")
        return file.getvalue()

    @property
    def converged(self) -> bool | None:
        """Whether the search ended before its budget did; None of attacks without a budget.

        It may have ended at its goal or where it made no progress. One that was cut off may do better with more.
        """
        return None if self.budget is None else self.evaluations < self.budget

    @property
    def solved_mismatch(self) -> float | None:
        """The mismatch that this attack left of a planted batch that it recovered, on the same network.

        Ten times this, and less where the planted batch came out barely, is no solved batch's any more. None: the
        planted batch was not recovered, or none was tried, or only signs are compared (Adam); then a mismatch tells
        nothing about `x`, however small.
        """
        if self.training == "adam":
            return None
        return self.planted.mismatch if self.planted is not None and self.planted.recovered else None

    @property
    def summary(self) -> str:
        """The figures in sentences. They never say that `x` is right: that takes the truth, and `psnr`."""
        return " ".join(filter(None, (self._larger(), self._scaled(), self._explained(), self._ended())))

    def psnr(self, truth: Tensor) -> list[float]:
        """Return how close `x` comes to the true inputs [B, *shape], in their order: dB, clipped, at most 100.

        Each is compared with the reconstruction that least squares assigns to it; one that is not finite has 0 dB.
        UsageError: `truth` has another shape than `x`, is no tensor of finite floats, or is none of `data_range`.
        """
        true = self._checked(truth)
        matched = self.x[match(self.x, true, self.data_range)]
        return [psnr(one, own, self.data_range) or 0.0 for one, own in zip(matched, true, strict=True)]

    def _checked(self, truth: Any) -> Tensor:
        true, (low, high) = to_dense(truth), self.data_range
        if true is None:
            raise UsageError(f"The truth is {shown(truth, 60)}; it must be a tensor of shape {tuple(self.x.shape)}.")
        if true.shape != self.x.shape:
            raise UsageError(f"The truth has shape {tuple(true.shape)}; it must be {tuple(self.x.shape)}.")
        if not true.is_floating_point():
            right = f"floats from {low:g} to {high:g}, as the network gets them: of bytes, truth.float() / 255"
            raise UsageError(f"The truth holds {str(true.dtype).removeprefix('torch.')}; give {right}.")
        true = true.detach().cpu().double()
        if not bool(true.isfinite().all()):
            raise UsageError("The truth holds a value that is not finite; nothing can be compared with it.")
        least, most, slack = float(true.min()), float(true.max()), OUTSIDE * (high - low)
        seen = f"from {least:.4g} to {most:.4g}"
        if least < low - slack or most > high + slack:
            right = f"give invert the range of the network's inputs, as data_range=({least:.4g}, {most:.4g})"
            raise UsageError(f"The truth has values {seen}, outside of data_range=({low:g}, {high:g}); {right}.")
        if 0 < most - least < NARROW * (high - low):
            right = "give invert the range of the network's inputs as data_range, and the truth in it"
            raise UsageError(f"The truth has values {seen}, a hundredth of data_range=({low:g}, {high:g}); {right}.")
        return true

    def _larger(self) -> str:
        if self.least_batch <= len(self.x):
            return ""
        words = f"The rank of the last layer's gradient is that of {count_of(self.least_batch, 'example')} or more"
        return f"{words}: the batch is larger, or the gradient holds more (noise, half precision, weight decay)."

    def _scaled(self) -> str:
        if self.unexplained:
            mend = "if it is a sum over the batch or was scaled, divide that out"
            return f"No factor was found that makes the last layer's gradient one of {self._mean_loss}; {mend}."
        if self.training is not None and self.scale == -1:
            return "The update is end minus start; its sign was changed."
        return "" if self.scale == 1 else f"The gradient is {self.scale:.6g} times that of {self._mean_loss}."

    @property
    def _noun(self) -> str:
        return "image" if self.vocabulary is None else "text"

    @property
    def _mean_loss(self) -> str:
        named = self.loss if " with " in self.loss else f"loss {self.loss!r}"
        return f"the mean {'cross-entropy' if self.loss == 'cross_entropy' else named}"

    def _explained(self) -> str:
        if self.mismatch is None:
            return "The attack names no labels, so that nothing tells how much of the gradient the inputs explain."
        if self.training == "adam":
            signs = "Only the signs of the update were compared, since Adam leaves little more of a gradient"
            return f"{signs}: the mismatch of {self.mismatch:.1e} tells nothing, as 0 is left of wrong inputs too."
        whole = "gradient" if self.training is None else "update"
        blind = "" if self.blind_mismatch is None else f", by the best constant {self._noun} {self.blind_mismatch:.1e}"
        words = f"Of the {whole}'s squared norm {self.mismatch:.1e} is left unexplained{blind}."
        if self.planted is None:
            return f"{words} No planted batch was attacked, so that nothing tells what a solved one would leave."
        left, least = f"{self.planted.mismatch:.1e}", f"{min(self.planted.psnr):.1f} dB"
        if self.solved_mismatch is None:
            planted = f"A planted batch came out at {least} and left {left}: it was not recovered"
            return f"{words} {planted}, so that no mismatch tells here whether the inputs are right."
        planted = f"A planted batch that this attack recovered, at {least}, left {left}"
        if self.planted.recovered_at(self.mismatch):
            return f"{words} {planted}, as much. That does not prove the inputs: others may have the same gradient."
        search = "either the search did not come as far (try another seed or attack)"
        return f"{words} {planted}, less: {search}, or {self._otherwise}."

    @property
    def _otherwise(self) -> str:
        """Other possible causes if a solved batch leaves far less, a clause."""
        losses = "weight decay, label smoothing, class weights, another loss, noise, a mask or hook, another mode"
        if self.training is None:
            return f"the gradient is not that of {self._mean_loss} of such a batch (a sum, {losses})"
        wrong = "end minus start instead of start minus end, another lr, local_epochs, batch_size or optimizer"
        return f"the update is not that of such local steps ({wrong}; {losses})"

    def _ended(self) -> str:
        if self.budget is None or self.converged:
            return "" if self.budget is None else f"The search ended by itself after {_gradients(self.evaluations)}."
        return f"The search spent its budget of {_gradients(self.budget)}; a larger one may leave less."


def _gradients(count: int) -> str:
    return f"{count:,} gradients" if count != 1 else count_of(1, "gradient")


def image_grid(rows: list[Tensor], data_range: tuple[float, float]) -> Image.Image:
    """Return images as one picture: `rows` of [B, 1 or 3, H, W] in the data range above each other, `ACROSS` a line."""
    low, high = data_range
    whole = [((row.double().nan_to_num(low, high, low) - low) / (high - low)).clamp(0, 1) for row in rows]
    factor = max(1, SIDE // max(whole[0].shape[-2:]))
    lines = [row[i : i + ACROSS] for i in range(0, len(whole[0]), ACROSS) for row in whole]
    large = [line.repeat_interleave(factor, -2).repeat_interleave(factor, -1) for line in lines]
    tall, wide = (side + GAP for side in large[0].shape[-2:])
    canvas = torch.ones(3, len(large) * tall - GAP, max(map(len, large)) * wide - GAP, dtype=torch.float64)
    for top, line in enumerate(large):
        for left, image in enumerate(line):
            canvas[:, top * tall : (top + 1) * tall - GAP, left * wide : (left + 1) * wide - GAP] = image
    return Image.fromarray((canvas * 255).round().byte().permute(1, 2, 0).numpy())


def mix_with_noise(x: Tensor, data_range: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Return inputs [B, *shape], clipped, mixed half and half with noise at the ends of the data range.

    The noise shares nothing with what an attack starts from, in any direction of the input space. Of each input about
    a quarter of the values are at one end, low or high by chance; a constant image has 13.3 dB at most on average.
    """
    low, high = data_range
    shape = (len(x), *[1] * (x.dim() - 1))
    bright = torch.where(torch.rand(shape, generator=generator) < 0.5, BRIGHT, 1 - BRIGHT)
    noise = low + (high - low) * (torch.rand(x.shape, generator=generator) < bright).float()
    return (1 - NOISE) * x.clamp(low, high) + NOISE * noise


def variants(x: Tensor, data_range: tuple[float, float]) -> tuple[Tensor, ...]:
    """Return inputs [B, *shape] half as large, of half the contrast, and brighter by a quarter of the data range.

    Networks that normalize their inputs have the same gradient for one of these.
    """
    mean = x.mean(tuple(range(1, x.dim())), keepdim=True)
    return x / 2, mean + (x - mean) / 2, x + (data_range[1] - data_range[0]) / 4


def planted_of(
    x: Tensor, guess: Guess, mismatch: float, data_range: tuple[float, float], stop: float
) -> Planted | None:
    """Return the result of an attack that answered `guess` to the gradient of planted inputs x [B, *shape]; None
    without inputs."""
    if guess.x is None:
        return None
    out = guess.x[match(guess.x, x, data_range)]
    levels = [psnr(one, own, data_range) or 0.0 for one, own in zip(out, x, strict=True)]
    constant = [psnr(torch.full_like(own, float(own.mean())), own, data_range) or 0.0 for own in x]
    return Planted(mismatch, tuple(levels), tuple(constant), guess.evaluations, stop)
