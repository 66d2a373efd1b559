"""Reports in the terminal: tables of an evaluation, one line per defense of a sweep; controls, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ppbench.base.bars import Bars
from ppbench.base.errors import count_of
from ppbench.federation.threats import recorded_threat
from ppbench.metrics.modality import IMAGE, modality_of
from ppbench.records.figure import best, grouped
from ppbench.records.run_files import time_of
from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS, failures, nothing_to_read, rebuilding, value
from ppbench.report.costs import cost_sentence
from ppbench.report.frame import ROW, Frame, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.leak import leaks_of
from ppbench.report.page.boards import ranks_of
from ppbench.report.page.finished_model import SHOWN_SPECS, AuditedModel, figure_words
from ppbench.report.page.headline import Answer, answer_of, preliminary_words
from ppbench.report.page.overview import Overview, choices_of, parameter_words
from ppbench.report.page.trust import Trust
from ppbench.report.rows import SettingRow, audit_rows, extraction_metric_of, model_rows, probe_text, upload_rows
from ppbench.report.setting import Setting
from ppbench.report.words import STAGES
from ppbench.report.worst import Measured, attack_of, worst_of

if TYPE_CHECKING:
    from ppbench.run.evaluation import Evaluation
    from ppbench.run.sweep import SweepPlan, SweepResult


# -- The answer in the terminal: the headline, its reliability, and a table with one row per setting --

PLAIN_WIDTH = 120  # columns where standard output is no terminal


def console() -> Console:
    """Return the console for reports."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=PLAIN_WIDTH)


def plain_table(names: Iterable[str], title: str | None = None, wrapped: Iterable[str] = ()) -> Table:
    """Return an empty table without frame; only columns in `wrapped` wrap, all others are cut."""
    table = Table(title=title, title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in names:
        table.add_column(name, no_wrap=name not in wrapped, overflow="fold" if name in wrapped else "ellipsis")
    return table


def say_answer(to: Console, answer: Answer) -> None:
    """Print the headline and its reliability."""
    style = {"error": "bold red", "good": "bold green", "warning": "bold yellow"}.get(answer.headline.tone, "bold")
    to.print(f"[{style}]{escape(answer.headline.words)}[/]", highlight=False)
    bad = {"failed": "bold red", "unknown": "yellow"}.get(answer.trust.state, "dim")
    unlearned = answer.trust.state == "unlearned"
    head = "" if answer.trust.reliable else "NOTHING CONCLUDED: " if unlearned else "EVALUATION UNRELIABLE: "
    to.print(f"[{bad}]{head}{escape(answer.trust.sentence)}[/]", highlight=False)


NARROW, WIDE = 100, 130
"""Widths of a terminal: below the first a table has only the first figures, from the second on it has all."""
WIDER = "The page and a wider screen also have:"


_Column = tuple[str, Callable[[Setting], str]]
"""A heading, and what the cell of a setting has."""


def _columns_of(overview: Overview) -> list[_Column]:
    """Return the columns after the verdict; boards that ask nothing of an attack are about costs."""
    if not overview.questions:
        return [
            ("upload", _ratio),
            ("download", lambda v: _ratio(v, "down")),
            ("memory", lambda v: _ratio(v, "memory")),
            ("time", _time),
            ("epsilon", lambda v: v.epsilon or "-"),
        ]
    return [
        ("accuracy", _accuracy),
        ("worst case", _leaked),
        ("labels", lambda v: _share(v.labels, "label_accuracy")),
        ("re-identified", lambda v: _share(v.reidentified, "reidentified")),
        ("in batch", lambda v: _share(v.batch, "batch_asr")),
        ("members", lambda v: _share(v.members, "asr")),
        ("epsilon", lambda v: v.epsilon or "-"),
        ("upload", _ratio),
    ]


def glance(overview: Overview, width: int) -> Table:
    """Return a table with one row per setting, or for several defenses one row each, that fits `width`.

    Its caption names the columns that do not fit and have figures.
    """
    single, columns = len(overview.compared) == 1, _columns_of(overview)
    room = 2 if width < NARROW else 5 if width < WIDE else len(columns)
    columns, others = columns[:room], columns[room:]
    heads = ["setting" if single else "defense", *(["verdict"] if overview.questions else [])]
    names = [*heads, *(name for name, _ in columns)]
    table = plain_table(names, wrapped=heads)
    for column, least in zip(table.columns[: len(heads)], (14, 12), strict=False):
        column.min_width = least
    for row in overview.rows:
        for v in row.by_control if single else [row.value]:
            verdict = v.verdict if single and v.entry.role == "compared" else row.verdict
            words = (escape(_setting(v, single)), escape(verdict))[: len(heads)]
            table.add_row(*words, *(cell(v) for _, cell in columns))
    shown = [v for row in overview.rows for v in (row.by_control if single else [row.value])]
    if absent := [name for name, cell in others if any(cell(v) != "-" for v in shown)]:
        table.caption, table.caption_justify = f"{WIDER} {', '.join(absent)}", "left"
    return table


def _setting(v: Setting, single: bool) -> str:
    if v.entry.defense.id == "none":
        return "undefended"
    name, about = v.entry.defense.id, parameter_words(v)
    return about or name if single else f"{name} {about}".rstrip()


def _accuracy(v: Setting) -> str:
    if v.accuracy is None:
        return "-" if v.mse is None else f"MSE {v.mse:.3g}"
    return f"{v.accuracy:.1%}{v.counted}" + ("" if v.loss is None else f" ({round(v.loss, 1) + 0.0:+.1f})")


def _leaked(v: Setting) -> str:
    if v.metric is None or v.metric.value is None:
        return "-"
    modality = modality_of(v.entry.sample.config)
    blind = v.leak.blind if v.leak is not None and modality.decibels else None
    return modality.brief(v.metric.value) + ("" if blind is None else f" (blind {blind:.0f})")


def _share(record: Measured | None, name: str) -> str:
    share = value(record, name)
    return "-" if share is None else f"{share:.0%}"


def _ratio(v: Setting, name: str = "up") -> str:
    """Return a ratio of costs to the undefended client's; one below 0.01 as "1/138"."""
    ratio = None if v.shown.cost is None else getattr(v.shown.cost.ratios, name)
    if ratio is None or 0 < ratio < 0.01:
        return "-" if ratio is None else f"1/{1 / ratio:,.0f}"
    return f"{ratio:.2f}x"


def _time(v: Setting) -> str:
    time = None if v.shown.cost is None else v.shown.cost.time
    return "-" if time is None else f"{time.ratio:.2f}x"


# -- Output while an evaluation runs: its progress, and the first answer as soon as it is known --


class Live(Bars):
    """Progress bars, and above them what the first cells show: the smallest batch before training."""

    def ready(self, records: Sequence[Record]) -> None:  # type: ignore[override]  # Bars cannot know records
        """Print the headline of the first cells, while the others run."""
        self.say(preliminary_words(answer_of(records, None)))


TableColumn = tuple[str, Callable[[SettingRow], str]]
"""A title, and the function that returns a row's field."""


def evaluation_report(result: Evaluation, full: bool = False) -> None:
    """Print the answer, with one row per setting; full: with all tables, sentences and controls."""
    to = console()
    say_answer(to, result.answer)
    for overview in result.answer.every:
        to.print(glance(overview, to.width))
    if full:
        for table in tables(result.records):
            to.print(table)
        if costs := cost_sentence(result.config.defense, result.records, partial(time_of, result.out)):
            to.print(escape(costs), highlight=False)
        say_verdict(to, result.answer.trust, (*result.verdict, *result.left_out))
    say_unfinished(to, result.records)
    finished = len(result.records) - result.computed
    more = "" if full else "; --full prints all tables and sentences"
    where = result.out / "leaderboard.html"
    to.print(
        f"{len(result.records)} cells ({finished} already finished) in {escape(str(where))}{more}", highlight=False
    )


def say_unfinished(to: Console, records: Sequence[Record]) -> None:
    """Print which cells failed, by reason, and which attacks do not apply because they have nothing to read."""
    for reason, count in Counter(r.reason or "" for r in failures(records)).items():
        to.print(f"[red]failed, {count_of(count, 'cell')}:[/] {escape(reason)}", highlight=False)
    idle: dict[str, set[str]] = {}
    for record in records:
        if nothing_to_read(record):
            idle.setdefault(record.config.defense.id, set()).add(record.config.attack.id)
    for defense, attacks in idle.items():
        words = f"not applicable to {defense}, as nothing that they read is sent: {', '.join(sorted(attacks))}"
        to.print(escape(words), style="dim", highlight=False)


def say_verdict(to: Console, trust: Trust, sentences: Iterable[str]) -> None:
    """Print each control, and the sentences where they hold."""
    for check in (one for weakest in trust.checks for one in (weakest, *weakest.others)):
        style = {True: "green", False: "bold red", None: "yellow"}[check.ok]
        to.print(f"[{style}]control {check.control}:[/] {escape(check.sentence)}", highlight=False)
    for sentence in sentences if trust.reliable else ():
        to.print(f"• {escape(sentence)}", highlight=False)


def tables(records: Sequence[Record]) -> list[Table]:
    """Return the final tables: on uploads, on models, on audits."""
    leaks = leaks_of(records, Knowledge.of(records))
    made = (_uploads, upload_rows(records, leaks)), (_models, model_rows(records)), (_audits, audit_rows(records))
    return [table(rows) for table, rows in made if rows]


def _filled(title: str, columns: Sequence[TableColumn], rows: Iterable[SettingRow]) -> Table:
    columns = [("defense", lambda row: f"{escape(row.key.defense)}\n{escape(row.control)}"), *columns]
    table = plain_table([name for name, _ in columns], title)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


def _uploads(rows: Sequence[SettingRow]) -> Table:
    """Return a table of about 90 columns: a value, and its 95 % interval below it."""
    kinds = [modality_of(row.worst.config) for row in rows if row.worst is not None]
    kind = next((kind for kind in kinds if not kind.decibels), IMAGE)
    name, form = kind.headline, kind.form
    what = kind.figure if kind.decibels else f"{kind.figure} of {kind.noun}"
    columns: list[TableColumn] = [
        ("stage", lambda row: row.key.stage),
        ("batch", lambda row: str(row.key.batch)),
        (_utility_name(rows), _utility),
        ("plain", lambda row: _entry(row.plain, name, form)),
        ("worst case", lambda row: _entry(row.worst, name, form)),
        ("by", lambda row: attack_of(row.worst)),
        ("labels", lambda row: _entry(row.labels, "label_accuracy", ".0%")),
        ("tracing\n(chance)", _traced),
        ("in batch\n(50%)", lambda row: _entry(row.top("batch_asr"), "batch_asr", ".0%")),
    ]
    if any(probe_text(row, rows) for row in rows):
        columns.insert(0, ("probe", lambda row: probe_text(row, rows).removeprefix("probe ").replace(", ", "\n")))
    if len({row.key.threat for row in rows}) > 1:
        columns.insert(0, ("to", lambda row: row.key.threat))
    smallest = min(row.key.batch for row in rows)
    shown = [row for row in rows if row.key.defense not in CONTROLS or row.key.batch == smallest]
    return _filled(f"What uploads give away ({what}; 95 % intervals below)", columns, shown)


def _models(rows: Sequence[SettingRow]) -> Table:
    """Return a table of about 110 columns: a value, its 95 % interval, and under the worst case the attack."""
    metric = extraction_metric_of([r for row in rows if (r := row.outputs.worst) is not None])
    threats = len({row.key.threat for row in rows}) > 1

    def model(row: SettingRow) -> str:
        return STAGES[row.key.stage].model + (f"\n{recorded_threat(row.key.threat).short}" if threats else "")

    columns: list[TableColumn] = [("model", model), (_utility_name(rows), _utility)]
    if any(row.members.tried for row in rows):
        columns += [
            ("ASR\nplain", lambda row: _entry(row.members.plain, "asr", ".1%")),
            ("ASR\nworst", lambda row: _by(row.members.worst, "asr", ".1%")),
            ("AUC", lambda row: _entry(row.members.worst, "auc", ".2f")),
        ]
    if any(row.outputs.tried for row in rows):
        plain, worst = ("agrees\nplain", "agrees\nworst") if metric == "agreement" else ("error\nplain", "worst")
        columns += [
            (plain, lambda row: _entry(row.outputs.plain, metric, ".1%")),
            (worst, lambda row: _by(row.outputs.worst, metric, ".1%")),
        ]
        if metric == "agreement":
            columns.append(("error", lambda row: _entry(row.outputs.worst, "output_error", ".1%")))
    return _filled("What a model gives away to its holder (95 % intervals below)", columns, rows)


def _audit_words(row: SettingRow) -> str:
    audit = row.key.audit
    return "None,\nNone" if audit is None else f"{audit.canaries},\n{audit.references}"


def _audits(rows: Sequence[SettingRow]) -> Table:
    """Return a table of about 100 columns on audits: average records, canaries, owners, epsilon."""
    rate, epsilon = "canary_tpr_at_1pct_fpr", "epsilon_lower"
    columns: list[TableColumn] = [
        ("to", lambda row: recorded_threat(row.key.threat).short),
        ("AUC\naverage", lambda row: _by(row.top("auc"), "auc", ".2f")),
        ("AUC\ncanaries", lambda row: _by(row.top("canary_auc"), "canary_auc", ".2f")),
        ("TPR at 1%\ncanaries", lambda row: _entry(row.top("canary_auc"), rate, ".0%")),
        ("owners\n(chance)", _traced),
        ("epsilon\nat least", lambda row: _entry(row.top(epsilon), epsilon, ".2f")),
    ]
    if len({_audit_words(row) for row in rows}) > 1:
        columns.insert(1, ("canaries,\nreferences", _audit_words))
    return _filled("What audits find: trainings with canaries (95 % intervals below)", columns, rows)


def _utility_name(rows: Sequence[SettingRow]) -> str:
    return "MSE" if any(r.utility.accuracy is None and r.utility.mse is not None for r in rows) else "accuracy"


def _utility(row: SettingRow) -> str:
    if row.utility.accuracy is not None:
        return f"{row.utility.accuracy:.1%}{row.utility.counted}{' (collapsed)' if row.utility.is_collapsed else ''}"
    return row.status if row.utility.mse is None else f"{row.utility.mse:.3g}"


def _by(record: Measured | None, name: str, form: str) -> str:
    return _entry(record, name, form) + (f"\n{escape(attack_of(record))}" if record is not None else "")


def _traced(row: SettingRow) -> str:
    """Return the share of images traced to their owner, with the level of chance."""
    top = row.top("tracing_accuracy")
    metric = None if top is None else top.metric("tracing_accuracy")
    share, _, ends = _entry(top, "tracing_accuracy", ".0%").partition("\n")
    return share if metric is None or metric.chance is None else f"{share} ({metric.chance:.0%})\n{ends}"


def _entry(record: Measured | None, name: str, form: str) -> str:
    metric = record.metric(name) if record is not None else None
    if metric is None or metric.value is None:
        return "-"
    if metric.low is None or metric.high is None:
        return f"{metric.value:{form}}"
    if form.endswith("%") and metric.value >= 10:  # a relative error of many times the size
        return f"{metric.value:.3g}x\n{metric.low:.3g}-{metric.high:.3g}x"
    fine = name == "output_error" and metric.value < 0.1
    ends = ".0%" if form.endswith("%") and not fine else form
    return f"{metric.value:{form}}\n{metric.low:{ends}}-{metric.high:{ends}}".replace("%-", "-")


def evaluation_json(result: Evaluation) -> dict[str, Any]:
    """Return the result in types that JSON has: verdict, controls and the cells' metrics."""
    ranks = ranks_of(result.answer.boards)
    unranked = {"rank_low": None, "rank_high": None}
    return {
        **result.answer.as_dict(),
        "reliable": result.reliable,
        "verdict": list(result.verdict),
        "verdicts": [one.as_dict() for one in result.verdicts],
        "data": list(result.notes),
        "computed": result.computed,
        "out": str(result.out),
        "cells": [_cell_json(record, ranks.get(record.cell_id, unranked)) for record in result.records],
    }


def _cell_json(record: Record, rank: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell's configuration, rank and figures in types that JSON has."""
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
        "threat_model": config.threat_model.id,
        "dataset": config.data.name,
        "model": config.model.id,
        **{name: getattr(config, name) for name in ("suite", "seed", "stage", "batch_size", "role")},
        **config.probing.model_dump(),
        **rank,
        "status": record.status,
        "reason": record.reason,
        "accuracy": record.utility.accuracy,
        "utility": record.utility.model_dump(exclude={"curve"}),
        "cost": record.cost.model_dump(),
        "privacy": record.privacy.model_dump(),
        "flags": [flag.model_dump() for flag in record.flags],
        "metrics": {m.name: m.model_dump(exclude={"name"}) for m in record.metrics},
    }


# -- of a sweep ------------------------------------------------------------------------------------------------------
def planned_report(planned: SweepPlan) -> None:
    """Print which cells a sweep would compute, and where they go."""
    planned_cells = [cell for one in planned.cells for cell in one.cells]
    missing = {cell.id for one in planned.todo for cell in one.cells}
    names = ("defense", "control values", "attacks", "cells", "missing")
    table = plain_table(names, wrapped=("control values",))
    for name, some in grouped(planned_cells, lambda cell: cell.config.defense.id).items():
        controls = sorted({c.config.defense.control.value for c in some if c.config.defense.control is not None})
        lacking = sum(cell.id in missing for cell in some)
        values = ", ".join(f"{v:g}" for v in controls)
        table.add_row(name, values, str(len({c.config.attack.id for c in some})), str(len(some)), str(lacking))
    to = console()
    to.print(f"{escape(planned.suite.name)} ({planned.suite.digest}): {escape(planned.suite.title)}")
    to.print(table)
    to.print(
        f"{len(missing)} of {len(planned_cells)} cells are missing and would be computed, from {planned.trainings} "
        f"trainings; results go to {escape(str(planned.store.out))}.",
        highlight=False,
    )


def swept_report(swept: SweepResult, full: bool = False) -> None:
    """Print the answer, one row per defense, failures, and where the board is; full: all sentences and controls."""
    to = console()
    say_answer(to, swept.answer)
    for overview in swept.answer.every:
        to.print(glance(overview, to.width))
    several = any(len(overview.compared) > 1 for overview in swept.answer.tables)  # of one defense the headline says it
    for about, words in choices_of(swept.answer.tables) if several else ():
        head = f"If you must choose{f' ({about})' if about else ''}:"
        to.print(f"[bold]{escape(head)}[/] {escape(words)}", highlight=False)
    if full:
        to.print(defense_table(swept.records))
        say_verdict(to, swept.answer.trust, swept.verdict)
    say_unfinished(to, swept.records)
    cells, finished = len(swept.records), len(swept.records) - swept.computed
    summary = f"{cells} cells ({finished} already finished, {len(swept.failed)} failed)"
    where = swept.out / "leaderboard.html"
    to.print(f"{escape(swept.suite.name)}: {summary} in {escape(str(where))}", highlight=False)


def defense_table(records: Sequence[Record]) -> Table:
    """Return a table with each defense's largest leaks over its grid and all attacks."""
    table = plain_table(("defense", "accuracy", "worst case", "labels", "ASR", "canary TPR", "cells"))
    for key, some in frame_of(records).by(("defense",)).items():
        ends = sorted(r.utility.accuracy for r in some if r.utility.accuracy is not None)
        table.add_row(
            escape(key.defense),
            " to ".join(dict.fromkeys(f"{end:.1%}" for end in (*ends[:1], *ends[-1:]))),
            _rebuilt(some),
            *(_most(some, name) for name in ("label_accuracy", "asr", "canary_tpr_at_1pct_fpr")),
            str(len(some)),
        )
    return table


def _most(records: Sequence[Record], name: str) -> str:
    """Return the largest figure with its attack, "" where no cell has it."""
    top = best(records, name)
    return "" if top is None else f"{value(top, name):.1%} {escape(top.config.attack.id)}"


def _rebuilt(records: Frame) -> str:
    """Return the largest figure of a worst case: decibels of images, the error of table rows."""
    inputs = records.about_inputs()
    metric = rebuilding(inputs[0]) if inputs else ""
    top = worst_of((row.worst(metric) for row in inputs.by(ROW).values()), metric)
    figure = value(top, metric)
    return "" if top is None or figure is None else f"{modality_of(top.config).brief(figure)} {escape(top.name)}"


# -- the audit of a finished model -------------------------------------------------------------------------------------
def audited_report(audited: AuditedModel, paths: Sequence[Path]) -> None:
    """Print the verdict of an audit, its controls, a table of its attacks, and where its files are."""
    screen = console()
    style = {0: "bold green" if not audited.is_found or audited.limits else "bold yellow", 1: "bold red"}
    screen.print(f"[{style.get(audited.exit_code, 'bold yellow')}]{escape(audited.verdict)}[/]", highlight=False)
    if audited.remark:
        screen.print(escape(audited.remark), highlight=False)
    table = plain_table(["attack", *(spec.title for spec in SHOWN_SPECS)])
    for attack in audited.attacks:
        table.add_row(escape(attack.name), *(figure_words(spec, attack.metric(spec.name)) for spec in SHOWN_SPECS))
    screen.print(table)
    reasons = {m.name: m.reason for attack in audited.attacks for m in attack.metrics if m.value is None}
    for spec in SHOWN_SPECS:
        if spec.name in reasons:
            screen.print(escape(f"{spec.title} is not measured: {reasons[spec.name]}."), highlight=False)
    for check in audited.checks:
        screen.print(escape(f"control {'holds' if check.ok else 'FAILS'}: {check.sentence}"), highlight=False)
    for path in paths:
        screen.print(escape(str(path)), highlight=False, soft_wrap=True)
