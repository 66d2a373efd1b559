"""What a person sees in the terminal: progress with time left, the final table, the verdict."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from ppbench.controls import CONTROLS
from ppbench.evaluation import Evaluation
from ppbench.records.schema import Record
from ppbench.verdict import Line, lines


class Bars:
    """Progress bars on stderr, one a phase, with the time that is left."""

    def __init__(self, quiet: bool = False) -> None:
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}, left"),
            TimeRemainingColumn(),
            TextColumn("gone"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, phase: str, total: int) -> None:
        """Show a bar of `total` steps."""
        unit = "rounds" if phase == "training" else "cells"
        self._tasks[phase] = self._bars.add_task(phase, total=total, unit=unit)

    def advance(self, phase: str, steps: int) -> None:
        """Move a bar."""
        self._bars.advance(self._tasks[phase], steps)


def report(result: Evaluation) -> None:
    """Print the table, what was found, whether the controls hold, and where the files are."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=112)
    console.print(_table(lines(result.records)))
    for check in result.checks:
        style = {True: "green", False: "bold red", None: "yellow"}[check.ok]
        console.print(f"[{style}]control {check.control}:[/] {escape(check.sentence)}", highlight=False)
    if not result.reliable:
        console.print("[bold red]EVALUATION UNRELIABLE[/]: a control failed or did not run; no conclusion is drawn.")
    for sentence in result.verdict if result.reliable else ():
        console.print(f"• {escape(sentence)}", highlight=False)
    failed = [r for r in result.records if r.status == "failed"]
    for record in failed:
        console.print(f"[red]failed:[/] {escape(record.reason or '')}", highlight=False)
    found = len(result.records) - result.computed
    console.print(f"{len(result.records)} cells ({found} found finished) in {result.out / 'leaderboard.html'}")


def _table(rows: list[Line]) -> Table:
    """Return a table of about 105 columns: a value, and its 95 % interval below it."""
    table = Table(
        title="Median PSNR in dB (higher leaks more); labels, tracing, membership AUC; 95 % intervals below",
        title_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    names = ("defense", "stage", "batch", "accuracy", "plain", "worst case", "by", "labels", "tracing", "member")
    for name in names:
        table.add_column(name, no_wrap=True)
    smallest = min((row.batch for row in rows), default=1)
    for row in rows:
        if row.defense in CONTROLS and row.batch != smallest:
            continue
        table.add_row(
            f"{escape(row.defense)}\n{row.control}",
            row.stage,
            str(row.batch),
            row.status if row.accuracy is None else f"{row.accuracy:.1%}",
            _entry(row.plain, "psnr_median", ".1f"),
            _entry(row.worst, "psnr_median", ".1f"),
            row.worst.config.attack.id if row.worst is not None else "-",
            _entry(row.labels, "label_accuracy", ".0%"),
            _entry(row.tracing, "tracing_accuracy", ".0%"),
            _entry(row.membership, "auc", ".2f"),
        )
    return table


def _entry(record: Record | None, name: str, form: str) -> str:
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    if metric.low is None or metric.high is None:
        return f"{metric.value:{form}}"
    return f"{metric.value:{form}}\n{metric.low:{form}}-{metric.high:{form}}".replace("%-", "-")


def as_json(result: Evaluation) -> dict[str, Any]:
    """Return the result for programs: verdict, controls and the cells' metrics. JSON, so plain dicts."""

    def cell(record: Record) -> dict[str, Any]:
        config = record.config
        return {
            "cell_id": record.cell_id,
            "defense": config.defense.id,
            "control": config.defense.control.model_dump() if config.defense.control else None,
            "attack": config.attack.id,
            "follows": config.attack.follows,
            "stage": config.stage,
            "batch_size": config.batch_size,
            "threat_model": config.threat_model.id,
            "status": record.status,
            "accuracy": record.utility.accuracy,
            "metrics": {m.name: m.model_dump(exclude={"name"}) for m in record.metrics},
        }

    return {
        "reliable": result.reliable,
        "controls": [{"control": c.control, "ok": c.ok, "sentence": c.sentence} for c in result.checks],
        "verdict": list(result.verdict),
        "computed": result.computed,
        "out": str(result.out),
        "cells": [cell(record) for record in result.records],
    }
