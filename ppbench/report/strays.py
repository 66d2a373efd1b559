"""Trainings that came out far from those of all other seeds: one in three says little of what a defense costs.

They are marked and not done again: who draws until the seeds agree has chosen among trainings. The other seeds are
there already, which is how one is known to stray.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record, Utility
from ppbench.report.frame import TRAINED, Key, frame_of

FAR = "far from other seeds"
"""Mark of such a training."""
STRAY = 0.1
"""Distance of intervals of accuracy from which on a seed is far from another."""
ALIKE = tuple(name for name in TRAINED if name != "seed")


def strays(records: Sequence[Record]) -> frozenset[Key]:
    """Return the keys (`TRAINED`) of trainings whose accuracy is far from that of every other seed, of two or more.

    Far: the 95 % intervals lie more than `STRAY` apart.
    """
    alike: dict[Key, dict[Key, Utility]] = {}
    for key, some in frame_of(records).by(TRAINED).items():
        alike.setdefault(key.only(ALIKE), {})[key] = some[0].utility
    return frozenset(
        key
        for trained in alike.values()
        if len(trained) > 2
        for key, use in trained.items()
        if all(_far(use, other) for place, other in trained.items() if place != key)
    )


def _far(one: Utility, other: Utility) -> bool:
    """Return whether the 95 % intervals of two accuracies lie far apart; not where one is unknown."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return max(one.low - other.high, other.low - one.high) > STRAY
