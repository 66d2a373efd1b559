"""The formal guarantee, or why there is none, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.records.schema import Record
from ppbench.report.verdict.lines import labels_of, listed

NUMBERS = 3  # words in which reasons may differ to be told as one


def guarantee(records: Sequence[Record]) -> list[str]:
    """Return what the mechanism of one defense guarantees, from `Record.privacy` alone.

    Reasons may differ over the control values (in the epsilon that a paper claims, in a condition that fails): what
    they share is said once.
    """
    said: list[str] = []
    values = [r.privacy.epsilon for r in records if r.privacy.epsilon is not None]
    if values:
        span = " to ".join(f"{end:.3g}" for end in dict.fromkeys((min(values), max(values))))
        said.append(f"Formal guarantee over the whole training: epsilon {span} for a single example.")
    label = labels_of(records)
    reasons: dict[str, list[str]] = {}
    values_of = {r.cell_id: 0.0 if (c := r.config.defense.control) is None else c.value for r in records}
    for record in sorted(records, key=lambda r: (values_of[r.cell_id], r.cell_id)):
        reason = (record.privacy.reason or "").strip().rstrip(".")
        if record.privacy.epsilon is None and reason:
            reasons.setdefault(reason, []).append(label[record.cell_id])
    if not reasons:
        return said
    places = {reason: list(dict.fromkeys(at)) for reason, at in reasons.items()}
    known = list(dict.fromkeys(word for at in places.values() for word in at))
    where = f" at {listed(known)}" if values and known != [""] else ""
    return [*said, f"No epsilon can be given{where}: {_clauses(places)}."]


def _clauses(reasons: dict[str, list[str]]) -> str:
    """Return the reasons as one: "epsilon 1 / 3 a round is claimed" where only numbers differ, else what all share and
    then what each adds, with the control values that it is for.
    """
    words = [reason.split(" ") for reason in reasons]
    if len({len(some) for some in words}) == 1:
        places = [list(dict.fromkeys(place)) for place in zip(*words, strict=True)]
        if sum(len(place) > 1 for place in places) <= NUMBERS:
            return " ".join(" / ".join(place) for place in places)
    split = {reason: reason.split("; ") for reason in reasons}
    common = [c for c in next(iter(split.values())) if all(c in clauses for clauses in split.values())]
    own = []
    for reason, clauses in split.items():
        rest = "; ".join(clause for clause in clauses if clause not in common)
        if rest:
            own.append(f"{listed(reasons[reason])}: {rest}" if reasons[reason] != [""] else rest)
    return "; ".join([*common, *own])
