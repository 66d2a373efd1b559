"""What a defense must declare, and what its public methods may answer: asked of every defense before it is used."""

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
    """Yield what keeps a class from being the defense called `name`: the first fault makes others meaningless."""
    yield from class_faults(plugin, Defense, name)
    yield from field_faults(plugin)
    yield from word_faults(plugin, ("roles", "version"))
    for grid, values in plugin.grids.items():
        if bad := [value for value in values if isinstance(value, bool) or not math.isfinite(value)]:
            yield f"has {bad[0]!r} in its {grid!r} grid; give finite numbers"
    if plugin.control is None:
        return
    known = {field.name: field.default for field in dataclasses.fields(plugin)}
    default = known.get(plugin.control, "")
    if default is not dataclasses.MISSING and (isinstance(default, bool) or not isinstance(default, int | float)):
        yield f"declares control = {plugin.control!r}; it must be a field whose default is a number"


def answer_faults(defense: Defense, plan: Plan, sizes: Sequence[int], rounds: int) -> Iterator[str]:
    """Yield what of a defense's answers before training has another form than the contract asks for."""
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


def guarantee_faults(found: object) -> Iterator[str]:
    """Yield why an answer to `guarantee` is none: neither None nor (epsilon >= 0, delta in [0, 1])."""
    if found is None:
        return
    pair = found if isinstance(found, tuple) and len(found) == 2 else ()
    numbers = [float(v) for v in pair if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2 or not (numbers[0] >= 0 and 0 <= numbers[1] <= 1 and math.isfinite(numbers[0])):
        told = shown(found, 60)
        yield f"answers {told} to guarantee(...); it must be None, or epsilon >= 0 and delta in [0, 1]"


def evidence_faults(found: object) -> Iterator[str]:
    """Yield why an answer to `evidence` is none."""
    if not isinstance(found, list | tuple) or not all(isinstance(one, Evidence) for one in found):
        yield f"answers {shown(found, 60)} to evidence(view); it must be a list of Evidence"
