"""Verdicts on what uploads give away beside inputs: the labels of a batch, and its members."""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.metrics.labels import multiset_chance
from ppbench.records.figure import best
from ppbench.report.controls import above_chance, value
from ppbench.report.verdict.lines import STAGE_WORDS, SettingRow, attack_at, figure, listed_values, undefended_row
from ppbench.report.verdict.verdict import Fate, Verdict, members_fate, unless_belied
from ppbench.report.worst import attack_of

BATCH_ASR = "batch_asr"


def batch_member_verdicts(
    mine: Sequence[SettingRow], rows: Sequence[SettingRow], stage: str, batch: int
) -> list[Verdict]:
    """Return whether uploads reveal who was in a batch, one verdict per group of control values with one fate."""
    attacked = [row for row in mine if (row.key.stage, row.key.batch) == (stage, batch) and row.top(BATCH_ASR)]
    none = None if mine and mine[0].key.defense == "none" else undefended_row(rows, stage, batch)
    undefended = None if none is None else none.top(BATCH_ASR)
    known = undefended if above_chance(undefended, BATCH_ASR) else None
    tried = sum(value(record, BATCH_ASR) is not None for row in attacked for record in row.records)
    groups: dict[Fate, list[SettingRow]] = {}
    for row in attacked:
        became = members_fate(row.top(BATCH_ASR), tried, known, BATCH_ASR)  # type: ignore[arg-type]  # `attacked` rows have one
        groups.setdefault(unless_belied(became, [f for r in row.records for f in r.flags]), []).append(row)
    beside = "" if undefended is None else f", undefended {figure(undefended, BATCH_ASR, '.0%')}"
    verdicts = []
    for became, some in groups.items():
        top = max(some, key=lambda row: value(row.top(BATCH_ASR), BATCH_ASR) or 0.0)
        labels = [row.control for row in some if row.control]
        where = f" at {listed_values(labels)}" if labels and len(groups) > 1 else ""
        head = f"who was in a batch of {batch}"
        does = {
            "falls": f"An upload{where} reveals {head}",
            "stands": f"An upload{where} does not reveal {head} to an unaware attack",
            "undecided": f"Whether an upload{where} reveals {head} is undecided",
        }[became]
        strongest = top.top(BATCH_ASR)
        at, asr = attack_at(attack_of(strongest), top.control), figure(strongest, BATCH_ASR, ".0%")
        text = f"{at}: ASR at most {asr}{beside}, chance 50%"
        keys = tuple(row.key for row in some)
        verdicts.append(Verdict(top.key.defense, "members", became, f"{does} ({text}).", keys, strongest, BATCH_ASR))
    return verdicts


def label_verdicts(rows: Sequence[SettingRow], stage: str) -> list[Verdict]:
    """Return how many labels were recovered: by batch size, and by control value at the smallest batch of a stage."""
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
        text = ", ".join(f"{share} at {listed_values(labels)}" for share, labels in shares.items())
        sentences.append(f"Labels at batch {smallest}, {STAGE_WORDS[stage]}: {text}.")
    keys = tuple(row.key for row, _, _ in recovered)
    return [
        Verdict(rows[0].key.defense, "labels", None, sentence, keys, top, "label_accuracy") for sentence in sentences
    ]
