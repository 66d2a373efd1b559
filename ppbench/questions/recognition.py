"""What who looks at a reconstruction gets, as records keep it, and the shares of victims that are found or read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from ppbench.metrics.intervals import proportion
from ppbench.metrics.labels import multiset_chance
from ppbench.records.figure import record_metric
from ppbench.records.schema import Metric, Strict
from ppbench.records.scores import AtLeastOne, Count, Share


class Recognition(Strict):
    """What a reconstruction gives away to who looks, as of `metrics.recognition`.

    Attributes:
        gallery: number of held-out images that its original was to be found among.
        rank: how many of them are at least as like it; 0: it is found. rank_features: by the feature network, or null.
        read: whether its class is read off it; null where there are no classes. read_features: likewise.
        common: share of the commonest class, which who sees nothing gets right at best; null without classes.
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


LOOKED: dict[str, Callable[[Recognition], float | None]] = {
    "reidentified": lambda found: found.rank,
    "recognized": lambda found: found.read,
    "reidentified_features": lambda found: found.rank_features,
    "recognized_features": lambda found: found.read_features,
}
"""What who looks gets, by metric: by the pixels, and by a feature network."""
FOUND = "reidentified"
"""How the names of those begin that count originals which are found, not classes that are read."""


def share_of_readers(name: str, scores: Sequence[Any], classes: int, seed: int) -> Metric:
    """Return the share of victims that are found, or whose class is read; one without a figure is neither.

    Chance is what guesses that see nothing reach at most, when each is matched to the likest of its batch: of B images
    in a gallery of G others the likest is one of the batch with probability B / (G + B), and the best matching of B
    classes gets `multiset_chance` right, or the commonest class.
    """
    units = seen_of(name, scores)
    finds, sizes = name.startswith(FOUND), {unit: len(some) for unit, some in units.items()}
    known = [(s.recognition, sizes[s.unit]) for s in scores if s.recognition is not None]
    blind = [
        size / (found.gallery + size) if finds else max(found.common or 0.0, multiset_chance(classes, size))
        for found, size in known
    ]
    share = proportion(list(units.values()), sum(blind) / len(blind))
    return record_metric(name, share, False)


def seen_of(name: str, scores: Sequence[Any]) -> dict[Hashable, NDArray[np.bool_]]:
    """Return, by unit, of which victims who looks gets what the metric `name` counts; one without a figure is none."""
    of, units = LOOKED[name], dict[Hashable, list[bool]]()
    for score in scores:
        seen = None if score.recognition is None else of(score.recognition)
        units.setdefault(score.unit, []).append(seen == 0 if name.startswith(FOUND) else bool(seen))
    return {unit: np.array(some, dtype=np.bool_) for unit, some in units.items()}


def is_found(score: Any) -> bool:
    """Return whether the original of a victim is found again among the gallery, by its pixels or by its features."""
    found: Recognition | None = getattr(score, "recognition", None)
    return found is not None and any(of(found) == 0 for name, of in LOOKED.items() if name.startswith(FOUND))


def gallery_size(scores: Sequence[Any]) -> int:
    """Return how many held-out images the victims were to be found among; 0 where that was not measured."""
    seen = (getattr(score, "recognition", None) for score in scores)
    return next((found.gallery for found in seen if found is not None), 0)
