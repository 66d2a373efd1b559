"""Every figure of the committed digits-quick board as this code computes it, beside what is kept in this folder.

    python tests/golden/board.py                             lists what differs; exit code 1 if anything does
    python tests/golden/board.py --replace-figures "REASON"  lists it, then keeps today's figures

Figures move only where a change is meant to move them: commit the new files together with that change, and say in the
message which figures moved and why (REASON is printed with the list, to be copied there).
"""

from __future__ import annotations

import csv
import io
import lzma
import sys
from collections.abc import Mapping
from pathlib import Path

from ppbench.claims.check import Unchecked, claimed, outcomes_of
from ppbench.records.figure import aggregate
from ppbench.records.schema import Metric, Record
from ppbench.records.store import Store
from ppbench.report.page.boards import (
    boards_of,
    checks_of,
    csv_text,
    defense_sentences,
    judged_evaluations,
    standalone_sentences,
    worst_csv,
)

HERE = Path(__file__).parent
BOARD = HERE.parents[1] / "leaderboards" / "results" / "digits-quick" / "records.zip"
KEPT = ("leaderboard.csv.xz", "metrics.csv.xz", "worst_case.csv", "sentences.txt", "claims.txt")
SHOWN = 40  # changes that are printed of each file


def records() -> list[Record]:
    """Return the cells of the committed board."""
    return Store(BOARD).load_all()


def figures(cells: list[Record]) -> dict[str, str]:
    """Return the text of each kept file from `cells`, every figure computed again from the victims' scores."""
    evaluations, result = judged_evaluations(cells), boards_of(cells, claimed)
    checks, verdict = checks_of(evaluations), standalone_sentences(defense_sentences(evaluations))
    values = [f"{check.control}: {check.ok}: {check.sentence}" for check in checks]
    texts = (
        csv_text(cells, claimed, result),
        _metrics(cells),
        worst_csv(result),
        "".join(f"{line}\n" for line in [*values, *verdict]),
        _claims(cells),
    )
    return dict(zip(KEPT, texts, strict=True))


def _claims(cells: list[Record]) -> str:
    """Return a line for each claim about a defense of the board: what it says, and what became of it."""
    lines = []
    for outcome in outcomes_of(cells):
        words = [outcome.defense, outcome.claim.source, outcome.claim.text]
        if isinstance(outcome, Unchecked):
            words += [outcome.status, outcome.reason]
        else:
            finding = outcome.finding
            words += [
                finding.verdict,
                finding.to,
                finding.reason,
                finding.worst,
                finding.plain,
                finding.own,
                finding.least,
                finding.most,
            ]
            words += [outcome.setting, *finding.cells]
        lines.append(" | ".join(words) + "\n")
    return "".join(lines)


def _metrics(cells: list[Record]) -> str:
    """Return a row for each metric of each cell, under the name that the cell's configuration hashes to."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    fields = tuple(Metric.model_fields)
    table.writerow(("cell_id", *fields))
    for cell in cells:
        config = cell.config
        result = aggregate(cell.victims, classes=config.model.classes, seed=config.seed, delta=cell.privacy.delta)
        for metric in result:
            table.writerow((config.cell_id(), *(repr(getattr(metric, name)) for name in fields)))
    return out.getvalue()


def kept() -> dict[str, str]:
    """Return the text of each file of this folder."""
    return {name: _unpacked(name, (HERE / name).read_bytes()) for name in KEPT if (HERE / name).is_file()}


def differences(expected: Mapping[str, str], today: Mapping[str, str]) -> list[str]:
    """Return every line that one of two boards has and the other lacks, as "file: - line" and "file: + line"."""
    changes = []
    for name in KEPT:
        old, new = expected.get(name, "").splitlines(), today[name].splitlines()
        if old != new:
            gone, come = set(old) - set(new), set(new) - set(old)
            changes += [f"{name}: - {line}" for line in old if line in gone]
            changes += [f"{name}: + {line}" for line in new if line in come]
            changes += [] if gone or come else [f"{name}: the same lines in another order or number"]
    return changes


def _unpacked(name: str, data: bytes) -> str:
    return (lzma.decompress(data) if name.endswith(".xz") else data).decode()


def _packed(name: str, text: str) -> bytes:
    data = text.encode()
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if name.endswith(".xz") else data


def main(words: list[str]) -> int:
    """List what differs, and keep today's figures where that is asked for with a reason."""
    if words and not (len(words) == 2 and words[0] == "--replace-figures" and words[1].strip()):
        print(__doc__)
        return 2
    today = figures(records())
    changes = differences(kept(), today)
    for name in KEPT:
        some = [line for line in changes if line.startswith(f"{name}: ")]
        print(*some[:SHOWN], *([f"{name}: ... {len(some)} lines in all"] if len(some) > SHOWN else []), sep="\n")
    print(f"{len(changes)} lines differ{f' ({words[1]})' if words else ''}.")
    if words:
        for name, text in today.items():
            (HERE / name).write_bytes(_packed(name, text))
        return 0
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
