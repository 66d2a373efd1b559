"""Rules for claims about what a defense costs a client: bytes and memory, beside the undefended client's.

They follow from the protocol alone; no training and no attack changes them.
"""

from __future__ import annotations

from ppbench.records.schema import Record
from ppbench.report.claims.case import ClaimCase, ClaimFinding, cell_names, verdict_of
from ppbench.report.page.costs import cost_ratios

HEADER_SLACK = 1.01  # factor on a ratio of bytes: messages have headers
PRINTED_DIGITS = 1e-3  # of a share of bytes: papers print four digits and do not count commands
OTHER_MACHINE = 1.25  # factor on a ratio of times or memories, which the paper measured on another machine


def upload_is_as_large(case: ClaimCase) -> ClaimFinding | str:
    """A claimed ratio of uploads holds where a client sends no more numbers; their width is a parameter by itself."""
    mine, none = max(case.mine, key=lambda r: (r.cost.bytes_up, r.cell_id)), case.undefended
    if none is None or not none.cost.bytes_up:
        return "there is no undefended upload to compare with"
    width = 2.0 if mine.config.defense.parameters.get("precision") == "float64" else 1.0
    width /= 2.0 if none.config.federation.dtype == "float64" else 1.0
    ratio = mine.cost.bytes_up / none.cost.bytes_up
    numbers = ratio / width
    figures = f"{ratio:.2f} in bytes" + (f", {numbers:.2f} in numbers" if width != 1 else "")
    reason = f"{mine.cost.bytes_up:.0f} B a client and round beside {none.cost.bytes_up:.0f} B"
    reason += ", in float64 where the undefended sends float32" if width == 2 else ""
    return verdict_of(
        numbers > (case.claim.value or 0.0) * HEADER_SLACK, f"{numbers:.2f}", numbers, reason, figures, mine, none
    )


def _sent(record: Record) -> float:
    return record.cost.bytes_up + record.cost.bytes_down


def bytes_are_saved(case: ClaimCase) -> ClaimFinding | str:
    """A claimed saving of bytes, both ways in a round and without set-up, holds where no less is saved, to 0.001."""
    mine, none = max(case.mine, key=lambda r: (_sent(r), r.cell_id)), case.undefended
    if none is None or case.claim.value is None:
        return "there are no undefended bytes to compare with"
    saved = 1 - _sent(mine) / _sent(none)
    reason = f"{_sent(mine):.0f} B a client and round beside {_sent(none):.0f} B"
    return verdict_of(
        saved < case.claim.value - PRINTED_DIGITS, f"{saved:.2%}", -saved, reason, f"{saved:.2%}", mine, none
    )


def sends_less(case: ClaimCase) -> ClaimFinding | str:
    """That more bytes are saved than by another defense holds where fewer are sent, both ways in a round."""
    if not case.rival:
        return f"no record of {case.claim.than.defense if case.claim.than else 'the other'} to compare with"
    mine, other = (max(some, key=lambda r: (_sent(r), r.cell_id)) for some in (case.mine, case.rival))
    figures = f"{_sent(mine):.0f} B a client and round beside {_sent(other):.0f} B"
    return verdict_of(
        _sent(mine) >= _sent(other), figures, _sent(mine) / max(_sent(other), 1.0), "counted", figures, mine, other
    )


def memory_is_as_small(case: ClaimCase) -> ClaimFinding | str:
    """A claimed ratio of memories holds where ours is within a quarter of it: papers count a whole process, we what a
    client's computation allocates beyond its inputs. It is inconclusive where the client takes its batch in slices and
    the undefended one takes it whole: backpropagation can be sliced too.
    """
    none = case.undefended
    known = [(ratio, r) for r in case.mine if none and (ratio := cost_ratios(r.cost, none.cost).memory) is not None]
    if not known or none is None or case.claim.value is None:
        return "the memory of both was not measured"
    ratio, mine = max(known, key=lambda pair: (pair[0], pair[1].cell_id))
    reason = f"{mine.cost.memory_peak} B at most beside {none.cost.memory_peak} B"
    sliced = mine.config.defense.parameters.get("examples", mine.config.federation.batch)
    if ratio <= case.claim.value * OTHER_MACHINE and sliced != mine.config.federation.batch:
        reason += ", in slices of the batch beside all of it at once; backpropagation can be sliced too"
        return ClaimFinding("inconclusive", "", reason, "", f"{ratio:.3f}", cell_names(mine, none), ratio)
    return verdict_of(
        ratio > case.claim.value * OTHER_MACHINE, f"{ratio:.2f}", ratio, reason, f"{ratio:.3f}", mine, none
    )
