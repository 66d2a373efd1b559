"""Trainings whose accuracy is far from that of all other seeds: bad luck, not the defense.

They are marked and not repeated: repeating until the seeds agree would select trainings.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record, Utility
from ppbench.report.frame import TRAINED, Key, frame_of

STRAY_MARK = "far from other seeds"
"""Mark of such a training."""
STRAY_DISTANCE = 0.1
"""Distance between intervals of accuracy beyond which two seeds are far apart."""
ALL_BUT_SEED = tuple(name for name in TRAINED if name != "seed")


def strays(records: Sequence[Record]) -> frozenset[Key]:
    """Return the keys (`TRAINED`) of trainings whose accuracy is far from that of every other seed, of two or more.

    Far: the 95 % intervals lie more than `STRAY_DISTANCE` apart.
    """
    alike: dict[Key, dict[Key, Utility]] = {}
    for key, some in frame_of(records).by(TRAINED).items():
        alike.setdefault(key.only(ALL_BUT_SEED), {})[key] = some[0].utility
    return frozenset(
        key
        for trained in alike.values()
        if len(trained) > 2
        for key, use in trained.items()
        if all(_far(use, other) for place, other in trained.items() if place != key)
    )


def _far(one: Utility, other: Utility) -> bool:
    """Return whether the 95 % intervals of two accuracies lie far apart; False where one is unknown."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return max(one.low - other.high, other.low - one.high) > STRAY_DISTANCE
