"""Reconstruction: the inputs of a probed batch, images or rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ppbench.metrics.modalities import BROKEN_DB, EXACT_DB, IMAGE, TABLE_ROW, modalities, modality_from, modality_of
from ppbench.questions import kept
from ppbench.questions.base import DistanceLaw, Question, Rule
from ppbench.questions.image_metrics import ImageScore, image_metrics
from ppbench.questions.inquiry import Inquiry, Probe, Scored
from ppbench.questions.labels import LABEL_DISTANCE, mislabelled
from ppbench.records.figure import Terms
from ppbench.records.schema import CellConfig, Metric, Record

if TYPE_CHECKING:
    from ppbench.adversary.attack import Challenge, Guess
    from ppbench.federation.plan import Plan
    from ppbench.records.store import CellImages


class Reconstruction(Question):
    """What are the inputs of a batch? Images are judged in decibels, table rows by their relative error."""

    name = "reconstruction"
    title = "Reconstruction and label recovery"
    score = ImageScore
    inputs = True
    order = 1
    chart = "budget"
    chapter = "uploads"
    distances = (
        DistanceLaw("recon/1", "rmse_mean", lambda error: error, "relative RMSE"),
        DistanceLaw("recon_unit/1", "rmse_unit_mean", lambda error: error, "relative RMSE, at most 1"),
        DistanceLaw("recon_raw/1", "rmse_raw_mean", lambda error: error, "relative RMSE, not clipped"),
        LABEL_DISTANCE,
    )
    figures = (
        ("rmse_mean", "Relative error"),
        ("share_rebuilt", "Within 10%"),
        ("reconstruction_accuracy", "Columns right"),
    )
    rules = (
        Rule("psnr_median", "psnr_median", "all", "median", 0.5, False, 1.0),
        Rule("share_above_20db", "share_above_20db", "all", "decision", 0.02, False, 0.05),
        Rule("rmse_mean", "rmse_mean", "all", "mean", 0.02, True, 0.05),
    )

    def of_probe(self, probe: Probe) -> Inquiry:
        """Return one challenge per unit, without labels."""
        from ppbench.questions.images import accounts_differ, score_images

        view, victims = probe.view, probe.victims
        modality = modality_from(view.plan.spec.shape, view.plan.loss)

        def score(guesses: Sequence[Guess]) -> Scored:
            if probe.yardstick is None:
                return score_images(
                    victims, guesses, {}, {}, view.plan.data_range, columns=view.plan.columns, modality=modality
                )
            own = {e.unit: e for e in reversed(probe.attack.evidence(view))}
            plain = {e.unit: e for e in view.defense.evidence(view)}
            measured_with = probe.yardstick(), probe.detected, view.plan.columns
            scored = score_images(victims, guesses, own, plain, view.plan.data_range, *measured_with)
            flags = accounts_differ(victims, own, plain) if probe.attack.reads_alone else ()
            return replace(scored, flags=(*scored.flags, *flags))

        return Inquiry(victims.challenges(), score, victims.digest())

    def malformed(self, guess: Guess, challenge: Challenge, plan: Plan) -> Iterator[str]:
        """Yield faults of the images, float32 without autograd history, and of labels if there are any."""
        import torch

        expected = (len(challenge.unit) * challenge.batch, *plan.spec.shape)
        if guess.x is None or tuple(guess.x.shape) != expected or guess.x.dtype != torch.float32:
            form = "nothing" if guess.x is None else f"{guess.x.dtype} {tuple(guess.x.shape)}"
            yield f"the guess x is {form}; it must be float32 of shape {expected}"
        elif guess.x.requires_grad:
            yield "the guess x drags its autograd history along; detach it"
        if guess.y is not None:
            yield from mislabelled(guess, challenge, plan)

    def metrics(self, scores: Sequence[ImageScore], terms: Terms) -> list[Metric]:
        """Return the metrics of `image_metrics`."""
        return [make() for make in image_metrics(scores, terms.classes, terms.seed).values()]

    def worth(self, scores: Sequence[ImageScore], plan: Plan) -> float:
        """Return the median PSNR; for table rows, where decibels are meaningless, minus the median relative error."""
        return modality_from(plan.spec.shape, plan.loss).worth(scores)

    def flawed(self, record: Record) -> Iterator[str]:
        """Yield fields in which images of one unit wrongly differ, and flags that do not follow from the scores."""
        if record.victims:
            yield from kept.flawed(image_scores(record), modality_of(record.config), record.flags)

    def contradicted(self, record: Record, images: CellImages) -> Iterator[str]:
        """Yield figures that contradict the images, and units that are not matched; nothing in an unknown range."""
        if kept.in_range(images):
            yield from kept.contradicted(image_scores(record), record.config, images)

    def headline(self, config: CellConfig) -> str:
        """Return the PSNR of images, the relative error of table rows."""
        return modality_of(config).headline

    def columns(self, headline: str) -> tuple[tuple[str, str], ...]:
        """Return the figures of table rows; boards of images have a table of their own."""
        if headline in (IMAGE.headline, TABLE_ROW.headline):
            return self.figures if headline == TABLE_ROW.headline else ()
        title = next((kind.title for kind in modalities() if kind.headline == headline), headline)
        return ((headline, title[:1].upper() + title[1:]), ("share_rebuilt", "Rebuilt"))

    def blind(self, scores: Sequence[ImageScore], config: CellConfig) -> tuple[float, int, float]:
        """Return the share of rebuilt victims; chance is 0.05, for nearly uniform images."""
        rebuilt = modality_of(config).rebuilt
        return sum(rebuilt(v) for v in scores) / len(scores), len({v.unit for v in scores}), 0.05

    def judged(self, score: ImageScore, metric: str) -> float:
        """Return dB, relative error, or 1 for a right label; a failed reconstruction is 0 dB and an error of 1."""
        if metric == LABEL_DISTANCE.metric:
            return float(bool(score.label))
        if metric == "rmse_mean":
            return score.error
        return float(score.decibels > BROKEN_DB) if metric == "share_above_20db" else min(score.decibels, EXACT_DB)

    def rules_of(self, config: CellConfig) -> tuple[Rule, ...]:
        """Return the rules in dB for images, in relative error for rows."""
        metrics = modality_of(config).rules
        return tuple(rule for rule in self.rules if rule.metric in metrics)


def image_scores(record: Record) -> list[ImageScore]:
    """Return the scores of a reconstruction cell."""
    return [score for score in record.victims if isinstance(score, ImageScore)]
