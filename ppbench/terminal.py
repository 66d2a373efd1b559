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
from ppbench.evaluate import Evaluation
from ppbench.records.schema import Record
from ppbench.verdict import Line, figure, lines


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
    console.print(_table(lines(result.records)))
    for sentence in result.verdict:
        console.print(f"• {escape(sentence)}", highlight=False)
    for check in result.checks:
        style = {True: "green", False: "bold red", None: "yellow"}[check.ok]
        console.print(f"[{style}]control {check.control}:[/] {escape(check.sentence)}", highlight=False)
    if not result.reliable:
        console.print("[bold red]EVALUATION UNRELIABLE[/]: a control failed, so nothing above may be trusted.")
    failed = [r for r in result.records if r.status == "failed"]
    for record in failed:
        console.print(f"[red]failed:[/] {escape(record.reason or '')}", highlight=False)
    found = len(result.records) - result.computed
    console.print(f"{len(result.records)} cells ({found} found finished) in {result.out / 'leaderboard.html'}")


def _table(rows: list[Line]) -> Table:
    """Return a table that fits 100 columns: a value with its 95 % interval below it."""
    table = Table(
        title="Median PSNR in dB (higher leaks more), labels, tracing and membership AUC; 95 % intervals below",
        title_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for name in (
        "defense",
        "stage",
        "batch",
        "accuracy",
        "plain attack",
        "worst case",
        "labels",
        "tracing",
        "member AUC",
    ):
        table.add_column(name, no_wrap=name == "defense")
    shown = [row for row in rows if row.defense not in CONTROLS or row.batch == min(r.batch for r in rows)]
    for row in shown:
        table.add_row(
            f"{escape(row.defense)}\n{row.control}",
            row.stage,
            str(row.batch),
            row.status if row.accuracy is None else f"{row.accuracy:.3f}",
            _entry(row.plain, "psnr_median", ".1f"),
            _entry(row.worst, "psnr_median", ".1f"),
            _entry(row.labels, "label_accuracy", ".2f", named=False),
            _entry(row.tracing, "tracing_accuracy", ".2f", named=False),
            _entry(row.membership, "auc", ".2f", named=False),
        )
    return table


def _entry(record: Record | None, name: str, form: str, named: bool = True) -> str:
    value, _, interval = figure(record, name, form).partition(" ")
    if record is None or not interval:
        return value
    attack = f" {record.config.attack.id}" if named else ""
    return f"{value}{escape(attack)}\n{escape(interval)}"


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
