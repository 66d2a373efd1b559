"""Scores of single victims, as records keep them: from these every aggregate can be computed again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Scalar = str | int | float | bool | None


class Strict(BaseModel):
    """Frozen, refuses unknown fields and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ImageScore(Strict):
    """One reconstructed image. A failed one (not finite) has null figures and counts as psnr 0 dB, rmse 1.

    Attributes:
        probe, client, index: the slot, and the place in its batch.
        psnr: dB, of the reconstruction clipped to the data range.
        rmse: ||guess - x|| / ||x||, clipped ("recon/1"); rmse_raw: the same, not clipped.
        ssim: structural similarity, clipped; null where the image is too small.
        label: whether the label that came with the reconstruction is right; null when none was given.
        confidence: the attacker's own relative mismatch.
        at_truth: discrepancy at the truth relative to an all-zero simulation; null with nuisance unknowns.
        evaluations: gradient evaluations spent on the image's batch.
        cohort: whether one observation mixed all clients of the probe; then the probe is the independent unit.
        ratio: magnitude of the undefended gradient over that of the defense's perturbation, at the biases of
            the feature layers (x-axis of a PPC figure); null where nothing is perturbed or it is not known.
        mse: mean squared error of the clipped reconstruction, in units of the data range ("Test-MSE" of MP-DP).
        lpips: perceptual distance (Zhang et al. 2018) by the network that `CellConfig.perceptual` names; null without.
        feat_mse: mean squared error of that network's last features ("Feat-MSE" of MP-DP); null without.
        blind: PSNR in dB of the better of two guesses that see nothing: the public mean image, and grey. Null in
            records of before it was measured, which have no `mse`, `oracle` and `path` either.
        oracle: PSNR of the best among the answer and the reconstructions that the attack rejected; never a result.
        path: (gradient evaluations, PSNR) of what the attack would have answered after so many, ascending.
    """

    kind: Literal["image"] = "image"
    probe: int
    client: int
    index: int
    psnr: float | None
    rmse: float | None
    rmse_raw: float | None
    ssim: float | None
    label: bool | None
    confidence: float | None
    at_truth: float | None
    evaluations: int
    ratio: float | None = None
    cohort: bool = False
    mse: float | None = None
    lpips: float | None = None
    feat_mse: float | None = None
    blind: float | None = None
    oracle: float | None = None
    path: list[tuple[int, float]] = Field(default_factory=list)


class LabelScore(Strict):
    """One recovered label; fields as in `ImageScore`."""

    kind: Literal["label"] = "label"
    probe: int
    client: int
    index: int
    label: bool
    cohort: bool = False


class MemberScore(Strict):
    """One candidate of a membership attack.

    Attributes:
        half: the one it was asked in.
        score: higher is member.
        decision: by the other half's fit; null where the attack abstained (audits guess on the surest only).
        family: "average" for a record of the data, else the family of canaries that it belongs to; the scorer's, never
            the attack's.
    """

    kind: Literal["member"] = "member"
    index: int
    half: int
    member: bool
    score: float
    decision: bool | None
    family: str = "average"


class TraceScore(Strict):
    """One traced image: its owner, and the attack's answer."""

    kind: Literal["trace"] = "trace"
    index: int
    owner: int
    guess: int


class OutputScore(Strict):
    """One query of an extraction attack. agree: whether the guessed outputs have the true model's argmax; error:
    ||guess - true|| of the outputs, in units of the root mean square of ||true|| over the queries; decision: the true
    model's argmax, None where it was not kept.
    """

    kind: Literal["output"] = "output"
    index: int
    agree: bool
    error: float
    decision: int | None = None


Victim = Annotated[ImageScore | LabelScore | MemberScore | TraceScore | OutputScore, Field(discriminator="kind")]
