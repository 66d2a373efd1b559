"""Rules for claims about what a defense takes beside the undefended: bytes sent, and a client's peak memory."""

from __future__ import annotations

from ppbench.records.schema import Record
from ppbench.report.claims.case import Case, Finding, cells_of
from ppbench.report.claims.figures import OTHER_MACHINE
from ppbench.report.page.costs import ratios

SLACK = 1.01  # of a ratio of bytes: messages have headers
PRINTED = 1e-3  # of a share of bytes: papers print four digits, and leave commands out of the count


def upload_is_as_large(case: Case) -> Finding | str:
    """A claimed ratio of uploads holds where a client sends no more numbers; their width is a parameter of its own."""
    mine, none = max(case.mine, key=lambda r: (r.cost.bytes_up, r.cell_id)), next(iter(case.none), None)
    if none is None or not none.cost.bytes_up:
        return "the undefended upload is not there to stand beside"
    width = 2.0 if mine.config.defense.parameters.get("precision") == "float64" else 1.0
    width /= 2.0 if none.config.federation.dtype == "float64" else 1.0
    ratio = mine.cost.bytes_up / none.cost.bytes_up
    numbers, claimed = ratio / width, case.claim.value or 0.0
    told = f"{ratio:.2f} in bytes" + (f", {numbers:.2f} in numbers" if width != 1 else "")
    reason = f"{mine.cost.bytes_up:.0f} B a client and round beside {none.cost.bytes_up:.0f} B"
    reason += ", in float64 where the undefended sends float32" if width == 2 else ""
    if numbers > claimed * SLACK:
        return Finding("falls", f"to {numbers:.2f}", reason, "", told, cells_of(mine, none))
    return Finding("holds", "", reason, "", told, cells_of(mine, none))


def bytes_are_saved(case: Case) -> Finding | str:
    """A claimed saving of bytes, both ways in a round and without set-up, holds where no less is saved, to 0.001."""
    none = next(iter(case.none), None)
    if none is None or case.claim.value is None:
        return "the undefended bytes are not there to stand beside"
    plain = none.cost.bytes_up + none.cost.bytes_down

    def sent(record: Record) -> float:
        return record.cost.bytes_up + record.cost.bytes_down

    mine = max(case.mine, key=lambda r: (sent(r), r.cell_id))
    saved = 1 - sent(mine) / plain
    reason = f"{sent(mine):.0f} B a client and round beside {plain:.0f} B"
    fell = saved < case.claim.value - PRINTED
    to = f"to {saved:.2%}" if fell else ""
    return Finding("falls" if fell else "holds", to, reason, "", f"{saved:.2%}", cells_of(mine, none))


def memory_is_as_small(case: Case) -> Finding | str:
    """A claimed ratio of memories holds where ours is within a quarter of it: papers count a whole process, we what a
    client's computation allocates beyond its inputs.
    """
    none = next(iter(case.none), None)
    known = [(ratio, r) for r in case.mine if none and (ratio := ratios(r.cost, none.cost).memory) is not None]
    if not known or none is None or case.claim.value is None:
        return "the memory of both was not measured"
    ratio, mine = max(known, key=lambda pair: (pair[0], pair[1].cell_id))
    reason = f"{mine.cost.memory_peak} B at most beside {none.cost.memory_peak} B"
    fell = ratio > case.claim.value * OTHER_MACHINE
    to = f"to {ratio:.2f}" if fell else ""
    return Finding("falls" if fell else "holds", to, reason, "", f"{ratio:.3f}", cells_of(mine, none))
