"""Recognition in records: the shares of victims whose original is re-identified, or whose class is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from ppbench.metrics.intervals import Estimate, proportion
from ppbench.metrics.labels import multiset_chance
from ppbench.metrics.spec import MetricSpec
from ppbench.records.schema import Strict
from ppbench.records.scores import AtLeastOne, Count, Share


class Recognition(Strict):
    """The recognition of one reconstruction, see `metrics.recognition`.

    Attributes:
        gallery: number of held-out images beside its original.
        rank: number of these at least as similar; 0: re-identified. rank_features: the same by features.
        read: whether its class is read; null without classes. read_features: the same by features.
        common: share of the commonest class, the best accuracy of a blind guess; null without classes.
    """

    gallery: AtLeastOne
    rank: Count
    read: bool | None = None
    rank_features: Count | None = None
    read_features: bool | None = None
    common: Share | None = None

    @model_validator(mode="after")
    def _fits(self) -> Recognition:
        if max(self.rank, self.rank_features or 0) > self.gallery:
            raise ValueError(f"no more than the {self.gallery} images of the gallery can be more like the original")
        return self


RECOGNITION_METRICS: dict[str, Callable[[Recognition], float | None]] = {
    "reidentified": lambda recognition: recognition.rank,
    "recognized": lambda recognition: recognition.read,
    "reidentified_features": lambda recognition: recognition.rank_features,
    "recognized_features": lambda recognition: recognition.read_features,
}
"""The field of `Recognition` for each metric, by pixels and by a feature network."""
REIDENTIFIED = "reidentified"
"""Prefix of the metrics that count re-identified originals, not classes that are read."""


def share_of_readers(spec: MetricSpec, scores: Sequence[Any], classes: int, seed: int) -> Estimate:
    """Return the share of victims that are re-identified, or whose class is read; one without a figure is neither.

    Chance is the most that blind guesses reach if each is matched to the most similar image of its batch: among B
    images and a gallery of G others the most similar one is of the batch with probability B / (G + B), and the best
    matching of B classes gets `multiset_chance` right, or the commonest class.
    """
    name = spec.name
    units = successes_of(name, scores)
    reidentifies, sizes = name.startswith(REIDENTIFIED), {unit: len(victims) for unit, victims in units.items()}
    measured = [(s.recognition, sizes[s.unit]) for s in scores if s.recognition is not None]
    blind = [
        size / (recognition.gallery + size)
        if reidentifies
        else max(recognition.common or 0.0, multiset_chance(classes, size))
        for recognition, size in measured
    ]
    return proportion(list(units.values()), sum(blind) / len(blind))


def successes_of(name: str, scores: Sequence[Any]) -> dict[Hashable, NDArray[np.bool_]]:
    """Return, by unit, which victims the metric `name` counts as successes; one without a figure is none."""
    of, units = RECOGNITION_METRICS[name], dict[Hashable, list[bool]]()
    for score in scores:
        value = None if score.recognition is None else of(score.recognition)
        units.setdefault(score.unit, []).append(value == 0 if name.startswith(REIDENTIFIED) else bool(value))
    return {unit: np.array(successes, dtype=np.bool_) for unit, successes in units.items()}


def is_reidentified(score: Any) -> bool:
    """Return whether the original of a victim is re-identified among the gallery, by pixels or by features."""
    recognition: Recognition | None = getattr(score, "recognition", None)
    return recognition is not None and any(
        of(recognition) == 0 for name, of in RECOGNITION_METRICS.items() if name.startswith(REIDENTIFIED)
    )


def gallery_size(scores: Sequence[Any]) -> int:
    """Return the number of held-out images beside each victim; 0 if recognition was not measured."""
    recognitions = (getattr(score, "recognition", None) for score in scores)
    return next((recognition.gallery for recognition in recognitions if recognition is not None), 0)
