"""Rules for claims about what a defense costs a client: bytes and memory, beside the undefended client's.

They follow from the protocol alone; no training and no attack changes them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppbench.base.errors import UsageError
from ppbench.base.files import read_regular
from ppbench.claims.case import ClaimCase, ClaimFinding, ClaimVerdict, finding_of
from ppbench.claims.claim import Claim, Rival
from ppbench.records.schema import Record
from ppbench.report.costs import cost_ratios

HEADER_SLACK = 1.01  # factor on a ratio of bytes: messages have headers
PRINTED_DIGITS = 1e-3  # of a share of bytes: papers print four digits and do not count commands
OTHER_MACHINE = 1.25  # factor on a ratio of memories, which the paper measured on another machine
STOPWATCH = "a stopwatch's figure, of another machine"


def upload_is_as_large(case: ClaimCase) -> ClaimFinding | str:
    """A claimed ratio of uploads holds if a client sends no more numbers than claimed; their width is a separate
    parameter.
    """
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
    verdict: ClaimVerdict = "falls" if numbers > (case.claim.value or 0.0) * HEADER_SLACK else "holds"
    return finding_of(verdict, f"{numbers:.2f}", numbers, reason, figures, mine, none)


def _sent(record: Record) -> float:
    return record.cost.bytes_up + record.cost.bytes_down


def bytes_are_saved(case: ClaimCase) -> ClaimFinding | str:
    """A claimed saving of bytes, both ways in a round and without set-up, holds if no less is saved, to 0.001."""
    mine, none = max(case.mine, key=lambda r: (_sent(r), r.cell_id)), case.undefended
    if none is None or case.claim.value is None:
        return "there are no undefended bytes to compare with"
    saved = 1 - _sent(mine) / _sent(none)
    reason = f"{_sent(mine):.0f} B a client and round beside {_sent(none):.0f} B"
    verdict: ClaimVerdict = "falls" if saved < case.claim.value - PRINTED_DIGITS else "holds"
    return finding_of(verdict, f"{saved:.2%}", -saved, reason, f"{saved:.2%}", mine, none)


def sends_less(case: ClaimCase) -> ClaimFinding | str:
    """The claim that more bytes are saved than by another defense holds if fewer are sent in both directions of a
    round.
    """
    if not case.rival:
        return f"no record of {case.claim.than.defense if case.claim.than else 'the other'} to compare with"
    mine, other = (max(some, key=lambda r: (_sent(r), r.cell_id)) for some in (case.mine, case.rival))
    ours, theirs = _sent(mine), _sent(other)
    figures = f"{ours:.0f} B a client and round beside {theirs:.0f} B"
    verdict: ClaimVerdict = "falls" if ours >= theirs else "holds"
    return finding_of(verdict, figures, ours / max(theirs, 1.0), "counted", figures, mine, other)


def memory_is_as_small(case: ClaimCase) -> ClaimFinding | str:
    """A claimed ratio of memories holds if ours is within a quarter of it: papers count a whole process, we what a
    client's computation allocates beyond its inputs. It is inconclusive if the client takes its batch in slices and the
    undefended one takes it whole, because backpropagation can be sliced too.
    """
    none = case.undefended
    known = [(ratio, r) for r in case.mine if none and (ratio := cost_ratios(r.cost, none.cost).memory) is not None]
    if not known or none is None or case.claim.value is None:
        return "the memory of both was not measured"
    ratio, mine = max(known, key=lambda pair: (pair[0], pair[1].cell_id))
    reason = f"{mine.cost.memory_peak} B at most beside {none.cost.memory_peak} B"
    sliced = mine.config.defense.parameters.get("examples", mine.config.federation.batch)
    verdict: ClaimVerdict = "falls" if ratio > case.claim.value * OTHER_MACHINE else "holds"
    if verdict == "holds" and sliced != mine.config.federation.batch:
        verdict = "inconclusive"
        reason += ", in slices of the batch beside all of it at once; backpropagation can be sliced too"
    return finding_of(verdict, f"{ratio:.2f}", ratio, reason, f"{ratio:.3f}", mine, none)


# -- Claims about time. Records hold no ratios of times; benchmarks do, with their machine and date --

KEY_OF = {
    "client_cost_ratio": "client_ratio",
    "client_backward_ratio": "backward_ratio",
    "server_cost_ratio": "server_ratio",
    "epoch_cost_ratio": "epoch_ratio",
    "training_cost_ratio": "training_ratio",
}
"""The figure of a benchmark for each metric of a claim."""
OF_ONE = ("client_ratio", "backward_ratio", "training_ratio")
"""Figures of one client, which do not depend on how many others there are."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark. about: "resnet20 float64"; values: its numbers by name; machine, date: where and when."""

    defense: str
    about: str
    values: dict[str, float]
    machine: str
    date: str

    def fits(self, claim: Claim, key: str) -> bool:
        """Whether a figure applies to a claim: its network, and where it matters as many clients."""
        clients = None if key in OF_ONE else self.values.get("clients")
        return key in self.values and self.network(claim) and (clients is None or claim.clients in (None, clients))

    def network(self, claim: Claim) -> bool:
        """Whether it is of the claim's network."""
        return claim.model in ("", self.about.partition(" ")[0])

    @property
    def variant(self) -> str:
        """What was timed, without the number of clients: "resnet20 vector gamma"."""
        clients = self.values.get("clients")
        return self.about if clients is None else self.about.partition(f" {clients:g} clients")[0]


def read_figures(paths: Sequence[Path]) -> list[Benchmark]:
    """Return the benchmarks of files {"DEFENSE MODEL VARIANT": {"client_ratio": 2.1, "machine": ""}}, or UsageError."""
    benchmarks = []
    for path in paths:
        try:
            data = json.loads(read_regular(path.resolve()))
        except (OSError, ValueError, RecursionError, RuntimeError) as cause:
            raise UsageError(f"{path} cannot be read as JSON ({cause}); give a file that a benchmark wrote.") from cause
        if not isinstance(data, dict) or not all(isinstance(entry, dict) for entry in data.values()):
            raise UsageError(f'{path} must map "DEFENSE MODEL VARIANT" to figures by name, as benchmarks write it.')
        for name, entry in data.items():
            defense, _, about = str(name).partition(" ")
            values = {k: float(v) for k, v in entry.items() if isinstance(v, int | float) and not isinstance(v, bool)}
            machine, date = (str(entry.get(key, "?")) for key in ("machine", "date"))
            benchmarks.append(Benchmark(defense, about, values, machine, date))
    return sorted(benchmarks, key=lambda b: (b.defense, b.about, b.date))


def time_is_kept(claim: Claim, defense: str, benchmarks: Sequence[Benchmark]) -> tuple[ClaimFinding, str] | str:
    """A claimed time, or ratio of times, is not comparable here, because it is of another machine and ours cannot
    refute it. Ours are shown beside it, with machine-independent counts: passes, bytes, ciphertexts. The claim that a
    defense takes less time than another one, both timed on one machine, holds if its longest time is shorter than the
    other's shortest, and falls if its shortest is longer than the other's longest.

    Returns the finding and the setting of its figures, or a clause on why there is none.
    """
    key = KEY_OF[claim.metric]
    if claim.than is not None:
        return _is_faster(claim, claim.than, defense, key, benchmarks)
    known = _known(claim, defense, key, benchmarks)
    if not known:
        return STOPWATCH
    ratios = [b.values[key] for b in known]
    figures = " to ".join(dict.fromkeys(map(ratio_text, (min(ratios), max(ratios)))))
    finding = finding_of("not comparable", "", max(ratios), STOPWATCH, f"{figures} times on our machine")
    return finding, _machines(known)


def ratio_text(ratio: float) -> str:
    """Return a ratio with three digits, or all before the point: "0.104", "2.54", "10,802"."""
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"


def _machines(known: Sequence[Benchmark]) -> str:
    return f"benchmark, {'; '.join(dict.fromkeys(f'{b.machine}, {b.date}' for b in known))}"


def _known(claim: Claim, defense: str, key: str, benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
    return [b for b in benchmarks if b.defense == defense and b.fits(claim, key)]


def _untimed(claim: Claim, defense: str, key: str, benchmarks: Sequence[Benchmark]) -> str:
    """Return a clause on the variants that were timed only for other numbers of clients than the claim's, or ""."""
    every = {b.variant for b in benchmarks if b.defense == defense and key in b.values and b.network(claim)}
    missing = sorted(every - {b.variant for b in _known(claim, defense, key, benchmarks)})
    return f"{' and '.join(missing)} was not timed with {claim.clients} clients" if missing else ""


def _required(claim: Claim, defense: str) -> list[str]:
    """Return the defense, network and number of clients that a claim needs figures of, in words."""
    return [defense, *([claim.model] if claim.model else []), *([f"{claim.clients} clients"] if claim.clients else [])]


def _is_faster(
    claim: Claim, than: Rival, defense: str, key: str, benchmarks: Sequence[Benchmark]
) -> tuple[ClaimFinding, str] | str:
    """Return the finding on a claim to take less time than another defense: all figures against all."""
    names = defense, than.defense
    sides = [_known(claim, name, key, benchmarks) for name in names]
    missing = [name for name, side in zip(names, sides, strict=True) if not side]
    if missing:
        return f"no benchmark gives {key} of {' '.join(_required(claim, ' and '.join(missing)))} (--figures)"
    mine, theirs = ([b.values[key] for b in side] for side in sides)
    figures = f"{min(mine):.3g} to {max(mine):.3g} beside {min(theirs):.3g} to {max(theirs):.3g}"
    verdict: ClaimVerdict = (
        "holds" if max(mine) < min(theirs) else "falls" if min(mine) > max(theirs) else "inconclusive"
    )
    untimed = "; ".join(filter(None, (_untimed(claim, name, key, benchmarks) for name in names)))
    open_ = untimed or ("" if verdict != "inconclusive" else f"it depends on what is timed: {_spread(sides)}")
    reason = "times the undefended, measured on one machine" + (f"; {open_}" if open_ else "")
    finding = ClaimFinding("inconclusive" if untimed else verdict, "", reason, "", figures)
    return finding, _machines([b for side in sides for b in side])


def _spread(sides: Sequence[Sequence[Benchmark]]) -> str:
    """Return the variants of two defenses whose times overlap: "cnn scalar gamma, cnn vector gamma beside cnn"."""
    return " beside ".join(", ".join(dict.fromkeys(b.variant for b in side)) for side in sides)
