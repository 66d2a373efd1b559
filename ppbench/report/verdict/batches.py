"""What uploads give away beside inputs, in sentences: the labels of a batch, and who was in it."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.metrics.labels import multiset_chance
from ppbench.records.figure import best
from ppbench.report.controls import above_chance, value
from ppbench.report.verdict.lines import STAGES, Row, by, figure, listed, undefended_row
from ppbench.report.verdict.verdict import Fate, Verdict, members_fate, unless_belied
from ppbench.report.worst import attack_of

MEMBERS = "batch_asr"


def who_was_in(mine: Sequence[Row], rows: Sequence[Row], stage: str, batch: int) -> list[Verdict]:
    """Return whether uploads tell who was in a batch: a sentence for each set of control values that fare alike."""
    attacked = [row for row in mine if (row.key.stage, row.key.batch) == (stage, batch) and row.top(MEMBERS)]
    none = None if mine and mine[0].key.defense == "none" else undefended_row(rows, stage, batch)
    undefended = None if none is None else none.top(MEMBERS)
    known = undefended if above_chance(undefended, MEMBERS) else None
    tried = sum(value(record, MEMBERS) is not None for row in attacked for record in row.records)
    groups: dict[Fate, list[Row]] = {}
    for row in attacked:
        became = members_fate(row.top(MEMBERS), tried, known, MEMBERS)  # type: ignore[arg-type]  # asked: it has one
        groups.setdefault(unless_belied(became, [f for r in row.records for f in r.flags]), []).append(row)
    beside = "" if undefended is None else f", undefended {figure(undefended, MEMBERS, '.0%')}"
    verdicts = []
    for became, some in groups.items():
        top = max(some, key=lambda row: value(row.top(MEMBERS), MEMBERS) or 0.0)
        labels = [row.control for row in some if row.control]
        where = f" at {listed(labels)}" if labels and len(groups) > 1 else ""
        head = f"Who was in a batch of {batch}"
        does = {
            "falls": f"{head} is told from others by its upload{where}",
            "stands": f"{head} is not told by its upload{where} to an attack that does not know of the defense",
            "undecided": f"Whether an upload{where} hides who was in a batch of {batch} cannot be told",
        }[became]
        strongest = top.top(MEMBERS)
        at, asr = by(attack_of(strongest), top.control), figure(strongest, MEMBERS, ".0%")
        text = f"{at}: ASR at most {asr}{beside}, chance 50%"
        keys = tuple(row.key for row in some)
        verdicts.append(Verdict(top.key.defense, "members", became, f"{does} ({text}).", keys, strongest, MEMBERS))
    return verdicts


def labels_found(rows: Sequence[Row], stage: str) -> list[Verdict]:
    """Return how many labels were recovered: by control value at the smallest batch of a stage, and in general."""
    recovered = [(row, value(cell, "label_accuracy") or 0.0, cell) for row in rows if (cell := row.labels) is not None]
    if not recovered:
        return []
    top = best([cell for _, _, cell in recovered], "label_accuracy")
    classes, by_batch = recovered[0][2].config.model.classes, []
    for batch in sorted({row.key.batch for row, _, _ in recovered}):
        ends = [end(v for row, v, _ in recovered if row.key.batch == batch) for end in (min, max)]
        span = " to ".join(dict.fromkeys(f"{end:.0%}" for end in ends))
        by_batch.append(f"{span} at batch {batch} (chance {multiset_chance(classes, batch):.0%})")
    sentences = [f"Labels recovered by the strongest attack of each cell: {', '.join(by_batch)}."]
    smallest = min(row.key.batch for row, _, _ in recovered)
    shares: dict[str, list[str]] = {}
    for row, v, _ in recovered:
        if (row.key.stage, row.key.batch) == (stage, smallest) and row.control:
            shares.setdefault(f"{v:.0%}", []).append(row.control)
    if len(shares) > 1:
        text = ", ".join(f"{share} at {listed(labels)}" for share, labels in shares.items())
        sentences.append(f"Labels at batch {smallest}, {STAGES[stage]}: {text}.")
    keys = tuple(row.key for row, _, _ in recovered)
    return [
        Verdict(rows[0].key.defense, "labels", None, sentence, keys, top, "label_accuracy") for sentence in sentences
    ]
