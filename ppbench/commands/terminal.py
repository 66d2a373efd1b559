"""What a person sees in the terminal at the end: the tables, the controls, the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppbench.questions.image_metrics import NEAR
from ppbench.records.schema import Record
from ppbench.records.times import time_of
from ppbench.report.controls import CONTROLS, is_image
from ppbench.report.page.costs import cost_sentence
from ppbench.report.verdict.audits import Audited, audits
from ppbench.report.verdict.lines import Held, Line, extraction_metric_of, held, lines, probed
from ppbench.report.worst import Measured, attack_of
from ppbench.run.evaluation import Evaluation

WIDTH = 120  # of what is not a terminal


def report(result: Evaluation) -> None:
    """Print the tables, what was found, whether the controls hold, and where the files are."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables(result.records):
        console.print(table)
    if said := cost_sentence(result.config.defense, result.records, partial(time_of, result.out)):
        console.print(escape(said), highlight=False)
    for check in result.checks:
        style = {True: "green", False: "bold red", None: "yellow"}[check.ok]
        console.print(f"[{style}]control {check.control}:[/] {escape(check.sentence)}", highlight=False)
    if not result.reliable:
        console.print("[bold red]EVALUATION UNRELIABLE[/]: a control failed or did not run; no conclusion is drawn.")
    for sentence in result.verdict if result.reliable else ():
        console.print(f"• {escape(sentence)}", highlight=False)
    for reason in dict.fromkeys(r.reason or "" for r in result.records if r.status == "failed"):
        console.print(f"[red]failed:[/] {escape(reason)}", highlight=False)
    found = len(result.records) - result.computed
    console.print(f"{len(result.records)} cells ({found} found finished) in {result.out / 'leaderboard.html'}")


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the final tables: what uploads give away, what models give away to who holds them, what audits find."""
    made = []
    if uploads := lines(records):
        made.append(_uploads(uploads))
    if models := held(records):
        made.append(_models(models))
    if audited := audits(records):
        made.append(_audits(audited))
    return made


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=True)
    return table


def _uploads(rows: Sequence[Line]) -> Table:
    """Return a table of about 90 columns: a value, and its 95 % interval below it."""
    images = all(row.worst is None or is_image(row.worst) for row in rows)
    name, form, what = (
        ("psnr_median", ".1f", "median PSNR in dB") if images else ("rmse_mean", ".2f", "mean relative error of rows")
    )
    title = f"What uploads give away ({what}; 95 % intervals below)"
    threats, several = len({row.threat for row in rows}) > 1, any(probed(row, rows) for row in rows)
    scene = [*(["to"] if threats else []), *(["probe"] if several else [])]
    names = ["defense", *scene, "stage", "batch", _utility_name(rows)]
    table = _table(title, [*names, "plain", "worst case", "by", "labels", "tracing"])
    smallest = min(row.batch for row in rows)
    for row in rows:
        if row.defense in CONTROLS and row.batch != smallest:
            continue
        table.add_row(
            f"{escape(row.defense)}\n{escape(row.control)}",
            *([row.threat] if threats else []),
            *([probed(row, rows).removeprefix("probe ").replace(", ", "\n")] if several else []),
            row.stage,
            str(row.batch),
            _utility(row),
            _entry(row.plain, name, form),
            _entry(row.worst, name, form),
            attack_of(row.worst),
            _entry(row.labels, "label_accuracy", ".0%"),
            _entry(row.tracing, "tracing_accuracy", ".0%"),
        )
    return table


def _models(rows: Sequence[Held]) -> Table:
    """Return a table of about 110 columns: a value, its 95 % interval, and under the worst case the attack."""
    metric = extraction_metric_of([r for row in rows if (r := row.outputs.worst) is not None])
    members, outputs = any(row.members.tried for row in rows), any(row.outputs.tried for row in rows)
    threats = len({row.threat for row in rows}) > 1
    names = ["defense", "model", _utility_name(rows)] + (["ASR\nplain", "ASR\nworst", "AUC"] if members else [])
    if outputs:
        names += ["agrees\nplain", "agrees\nworst", "error"] if metric == "agreement" else ["error\nplain", "worst"]
    table = _table("What a model gives away to who holds it (95 % intervals below)", names)
    for row in rows:
        cells = [f"{escape(row.defense)}\n{escape(row.control)}"]
        cells += [HELD[row.stage] + (f"\n{row.threat.partition('/')[0]}" if threats else ""), _utility(row)]
        if members:
            top = row.members.worst
            cells += [_entry(row.members.plain, "asr", ".1%"), _by(top, "asr", ".1%"), _entry(top, "auc", ".2f")]
        if outputs:
            top = row.outputs.worst
            form = ".1%"
            cells += [_entry(row.outputs.plain, metric, form), _by(top, metric, form)]
            cells += [_entry(top, "output_error", ".1%")] if metric == "agreement" else []
        table.add_row(*cells)
    return table


HELD = {"init": "initial", "iterate": "trained on", "final": "delivered"}


def _audits(rows: Sequence[Audited]) -> Table:
    """Return a table of about 100 columns on audits: average records, canaries, owners, epsilon."""
    title = "What audits find: trainings with canaries (95 % intervals below)"
    several = len({(row.key.canaries, row.key.references) for row in rows}) > 1
    names = [
        "defense",
        "to",
        *(["canaries,\nreferences"] if several else []),
        "AUC\naverage",
        "AUC\ncanaries",
        "TPR at 1%\ncanaries",
        "owners",
        "epsilon\nat least",
    ]
    table = _table(title, names)
    for row in rows:
        table.add_row(
            f"{escape(row.defense)}\n{escape(row.control)}",
            row.threat.partition("/")[0],
            *([f"{row.key.canaries},\n{row.key.references}"] if several else []),
            _by(row.members, "auc", ".2f"),
            _by(row.canaries, "canary_auc", ".2f"),
            _entry(row.canaries, "canary_tpr_at_1pct_fpr", ".0%"),
            _entry(row.owners, "tracing_accuracy", ".0%"),
            _entry(row.epsilon, "epsilon_lower", ".2f"),
        )
    return table


def _utility_name(rows: Sequence[Line] | Sequence[Held]) -> str:
    return "MSE" if any(r.utility.accuracy is None and r.utility.mse is not None for r in rows) else "accuracy"


def _utility(row: Line | Held) -> str:
    if row.utility.accuracy is not None:
        return f"{row.utility.accuracy:.1%}"
    return row.status if row.utility.mse is None else f"{row.utility.mse:.3g}"


def _by(record: Measured | None, name: str, form: str) -> str:
    return _entry(record, name, form) + (f"\n{escape(attack_of(record))}" if record is not None else "")


def _entry(record: Measured | None, name: str, form: str) -> str:
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    if metric.low is None or metric.high is None:
        return f"{metric.value:{form}}"
    if form.endswith("%") and metric.value >= 10:  # a relative error of many times the size
        return f"{metric.value:.3g}x\n{metric.low:.3g}-{metric.high:.3g}x"
    fine = name == "output_error" and metric.value < NEAR
    ends = ".0%" if form.endswith("%") and not fine else form
    return f"{metric.value:{form}}\n{metric.low:{ends}}-{metric.high:{ends}}".replace("%-", "-")


def as_json(result: Evaluation) -> dict[str, Any]:
    """Return the result for programs: verdict, controls and the cells' metrics. JSON, so plain dicts."""

    def cell(record: Record) -> dict[str, Any]:
        config = record.config
        return {
            "cell_id": record.cell_id,
            "defense": config.defense.id,
            "parameters": config.defense.parameters,
            "control": config.defense.control.model_dump() if config.defense.control else None,
            "attack": config.attack.id,
            "kind": config.attack.kind,
            "adaptive": config.attack.adaptive,
            "follows": config.attack.follows,
            "stage": config.stage,
            "batch_size": config.batch_size,
            "threat_model": config.threat_model.id,
            "seed": config.seed,
            "status": record.status,
            "reason": record.reason,
            "accuracy": record.utility.accuracy,
            "utility": record.utility.model_dump(exclude={"curve"}),
            "cost": record.cost.model_dump(),
            "privacy": record.privacy.model_dump(),
            "flags": [flag.model_dump() for flag in record.flags],
            "metrics": {m.name: m.model_dump(exclude={"name"}) for m in record.metrics},
        }

    return {
        "reliable": result.reliable,
        "controls": [{"control": c.control, "ok": c.ok, "sentence": c.sentence} for c in result.checks],
        "verdict": list(result.verdict),
        "verdicts": [found.as_dict() for found in result.verdicts],
        "computed": result.computed,
        "out": str(result.out),
        "cells": [cell(record) for record in result.records],
    }
