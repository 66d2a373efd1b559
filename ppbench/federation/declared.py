"""Checks of every defense before it is used: what it declares, and what its public methods return."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ppbench.base.declared import class_faults, field_faults, word_faults
from ppbench.base.errors import shown
from ppbench.federation.contract import Defense
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Noise, Plan


def faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield the faults of a class as the defense `name`; after the first one, others may be meaningless."""
    yield from class_faults(plugin, Defense, name)
    yield from field_faults(plugin)
    yield from word_faults(plugin, ("roles", "version"))
    for grid, values in plugin.grids.items():
        if bad := [value for value in values if isinstance(value, bool) or not math.isfinite(value)]:
            yield f"has {bad[0]!r} in its {grid!r} grid; give finite numbers"
    if plugin.control is None:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(plugin)}
    default = defaults.get(plugin.control, "")
    if default is not dataclasses.MISSING and (isinstance(default, bool) or not isinstance(default, int | float)):
        yield f"declares control = {plugin.control!r}; it must be a field whose default is a number"


def answer_faults(defense: Defense, plan: Plan, sizes: Sequence[int], rounds: int) -> Iterator[str]:
    """Yield the faults of what a defense's public methods return before training."""
    if not isinstance(defense.sums, bool):
        yield f"answers {shown(defense.sums, 60)} to sums; it must be True or False"
    noise = defense.noise(plan)
    if noise is not None and not isinstance(noise, Noise):
        yield f"answers {shown(noise, 60)} to noise(plan); it must be a Noise or None"
    for size in sorted(set(sizes)):
        yield from guarantee_faults(defense.guarantee(plan, size, rounds))
    reason = defense.why_no_epsilon(plan, None, rounds)
    if not isinstance(reason, str):
        yield f"answers {shown(reason, 60)} to why_no_epsilon(plan); it must be a text"


def guarantee_faults(answer: object) -> Iterator[str]:
    """Yield a fault unless `guarantee` returned None, or epsilon >= 0 and delta in [0, 1]."""
    if answer is None:
        return
    pair = answer if isinstance(answer, tuple) and len(answer) == 2 else ()
    numbers = [float(v) for v in pair if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2 or not (numbers[0] >= 0 and 0 <= numbers[1] <= 1 and math.isfinite(numbers[0])):
        shown_answer = shown(answer, 60)
        yield f"answers {shown_answer} to guarantee(...); it must be None, or epsilon >= 0 and delta in [0, 1]"


def evidence_faults(answer: object) -> Iterator[str]:
    """Yield a fault unless `evidence` returned a list of Evidence."""
    if not isinstance(answer, list | tuple) or not all(isinstance(one, Evidence) for one in answer):
        yield f"answers {shown(answer, 60)} to evidence(view); it must be a list of Evidence"
