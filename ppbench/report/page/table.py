"""The table of all cells: one row a cell, typed columns, and the CSV file that is written from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pandas

from ppbench.questions.base import questions
from ppbench.records.files import write_atomic
from ppbench.records.schema import Record
from ppbench.report.cap import record_distance
from ppbench.report.page.costs import Ratios, relative_costs
from ppbench.report.page.series import SeriesCap, caps

ENDS = ("", "_low", "_high")
Claims = Callable[[Record], str]
"""What a paper prints about the defense of a record, in words; "" where it prints nothing comparable."""


def no_claims(record: Record) -> str:
    """Return "": for tables made without the defenses at hand."""
    return ""


Value = str | int | float | bool | None
Row = dict[str, Value]
"""One cell, flat, by the names of `COLUMNS`; None is an empty field."""
COLUMNS: Final = [
    "suite", "threat_model", "defense", "control", "control_value", "attack", "adaptive", "stage", "batch_size",
    "n", "accuracy", "psnr_median", "psnr_p95", "rmse_mean", "ssim_mean", "label_accuracy", "asr", "auc",
    "tracing_accuracy", "cap", "claimed", "status", "cell_id", "accuracy_low", "accuracy_high", "psnr_median_low",
    "psnr_median_high", "share_above_20db", "share_above_20db_low", "share_above_20db_high", "label_accuracy_low",
    "label_accuracy_high", "asr_low", "asr_high", "auc_low", "auc_high", "tracing_accuracy_low",
    "tracing_accuracy_high", "distance", "distance_value", "distance_low", "distance_high", "cap_low", "cap_high",
    "cap_corrected", "cap_unit", "cap_settings", "cap_reason", "epsilon", "delta", "bytes_up", "bytes_down",
    "bytes_setup", "oracle", "dataset", "model", "seed", "reason", "agreement", "agreement_low", "agreement_high",
    "output_error", "output_error_low", "output_error_high", "mse", "mse_low", "mse_high", "probe", "probe_rounds",
    "role", "up_ratio", "down_ratio", "memory_peak", "memory_ratio", "psnr_worst_decile", "test_mse_mean",
    "test_mse_mean_low", "test_mse_mean_high", "lpips_mean", "lpips_mean_low", "lpips_mean_high", "feat_mse_mean",
    "feat_mse_mean_low", "feat_mse_mean_high", "blind_median", "oracle_median", "evaluations_per_broken",
    "tpr_at_1pct_fpr", "tpr_at_1pct_fpr_low", "tpr_at_1pct_fpr_high", "canary_auc", "canary_auc_low",
    "canary_auc_high", "canary_tpr_at_1pct_fpr", "canary_tpr_at_1pct_fpr_low", "canary_tpr_at_1pct_fpr_high",
    "epsilon_lower", "public", "references", "canaries", "perceptual", "tuned", "flags",
]  # fmt: skip
"""The columns of the CSV, in order; new ones go last.

Figures are those of the record, `mse` is of the delivered model; `n` is the number of victims, `cap` is CAP over
the control values with `distance` (the one of the attack's kind), the same in every row of a series. `bytes_*` are
per client and round, `memory_peak` is in bytes, `*_ratio` are over the cost of `none`. `epsilon_lower` is what an
audit refutes, beside the claimed `epsilon`; `tuned` the settings chosen on tuning victims. Times are in no column:
they differ from run to run, and the table is a function of the records. Behind the columns stand the figures of
questions of other packages that some record answers.
"""
_TEXT = [
    "suite", "threat_model", "defense", "control", "attack", "stage", "claimed", "status", "cell_id", "distance",
    "cap_reason", "dataset", "model", "reason", "probe", "role", "perceptual", "tuned", "flags",
]  # fmt: skip
_WHOLE = [
    "batch_size", "n", "cap_settings", "bytes_setup", "seed", "probe_rounds", "memory_peak", "public", "references",
    "canaries",
]  # fmt: skip
_TRUTH = ("adaptive", "oracle")
DTYPES: Final = {
    name: "string" if name in _TEXT else "Int64" if name in _WHOLE else "boolean" if name in _TRUTH else "Float64"
    for name in COLUMNS
}
"""pandas' types of the columns, all of which can hold a missing value."""


def table(records: Sequence[Record], claims: Claims = no_claims) -> pandas.DataFrame:
    """Return `rows` as a table with typed columns, a row a cell; a missing value is `pandas.NA`."""
    return pandas.DataFrame(rows(records, claims), columns=COLUMNS).astype(DTYPES)


def further(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the metrics, with their titles, of questions of other packages that `records` answer."""
    found = [question for name, question in questions().items() if not question.chapter]
    kinds = {record.config.attack.kind for record in records}
    return [figure for question in found if question.name in kinds for figure in question.figures]


def rows(records: Sequence[Record], claims: Claims = no_claims) -> list[Row]:
    """Return the table, sorted by suite, threat model, defense, control value, stage, batch, attack and
    name.
    """
    series, costs = caps(records), relative_costs(records)
    return sorted((_row(r, series[r.cell_id], costs[r.cell_id], claims) for r in records), key=_order)


def _order(row: Row) -> tuple[object, ...]:
    value = float("-inf") if row["control_value"] is None else row["control_value"]
    where = row["suite"], row["threat_model"], row["defense"], row["control"] or "", value
    return *where, row["stage"], row["batch_size"], f"{row['role']}{row['attack']}", row["cell_id"]


def _row(record: Record, cap: SeriesCap, ratios: Ratios, claims: Claims) -> Row:
    config, utility, cost = record.config, record.utility, record.cost
    control, distance = config.defense.control, record_distance(record)
    figures: dict[str, float | None] = {}
    for metric in record.metrics:
        figures |= {metric.name: metric.value, f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
    own: Row = {
        "suite": config.suite,
        "threat_model": config.threat_model.id,
        "defense": config.defense.id,
        "control": None if control is None else control.name,
        "control_value": None if control is None else control.value,
        "attack": config.attack.id,
        "adaptive": config.attack.adaptive,
        "stage": config.stage,
        "batch_size": config.batch_size,
        "n": len(record.victims),
        "accuracy": utility.accuracy,
        "cap": cap.main.value,
        "claimed": claims(record),
        "status": record.status,
        "cell_id": record.cell_id,
        "accuracy_low": utility.low,
        "accuracy_high": utility.high,
        "distance": cap.main.distance,
        "distance_value": None if distance is None else distance.value,
        "distance_low": None if distance is None else distance.low,
        "distance_high": None if distance is None else distance.high,
        "cap_low": cap.main.low,
        "cap_high": cap.main.high,
        "cap_corrected": cap.main.corrected,
        "cap_unit": None if cap.unit is None else cap.unit.value,
        "cap_settings": cap.main.n,
        "cap_reason": cap.main.reason,
        "epsilon": record.privacy.epsilon,
        "delta": record.privacy.delta,
        "bytes_up": cost.bytes_up,
        "bytes_down": cost.bytes_down,
        "bytes_setup": cost.bytes_setup,
        "oracle": config.attack.oracle,
        "dataset": config.data.name,
        "model": config.model.id,
        "seed": config.seed,
        "reason": record.reason,
        "mse": utility.mse,
        "mse_low": utility.mse_low,
        "mse_high": utility.mse_high,
        "probe": config.probe,
        "probe_rounds": config.probe_rounds,
        "role": config.role,
        "up_ratio": ratios.up,
        "down_ratio": ratios.down,
        "memory_peak": cost.memory_peak,
        "memory_ratio": ratios.memory,
        "public": config.data.public,
        "references": None if config.audit is None else config.audit.references,
        "canaries": None if config.audit is None else config.audit.canaries,
        "perceptual": config.perceptual,
        "tuned": tuned_text(record),
        "flags": " ".join(dict.fromkeys(flag.code for flag in record.flags)),
    }
    return {name: own[name] if name in own else figures.get(name) for name in COLUMNS}


def tuned_text(record: Record) -> str:
    """Return the settings that an attack was run with after tuning, as "lr=0.1, tv=0.01"; "" where none were tried."""
    if record.tuned is None or not record.tuned.variants:
        return ""
    return ", ".join(f"{name}={value}" for name, value in record.tuned.variants[record.tuned.chosen].items())


def text(value: Value) -> str:
    """Return a field as written: floats with ten significant digits, and no text that a spreadsheet would
    run.

    A text that starts with one of = + - @, tab or carriage return gets a leading apostrophe: spreadsheets
    take such a field for a formula, and the names of defenses and attacks are other people's.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.10g}"
    guarded = f"'{value}" if value.lstrip(" \n\v\f")[:1] in tuple("=+-@\t\r") else value
    return guarded.replace("\r", " ")  # Python 3.11's csv does not quote a lone carriage return


def csv_text(records: Sequence[Record], claims: Claims = no_claims) -> str:
    """Return the CSV: a header and one row a cell. A function of records and claims alone, so it can be
    verified.
    """
    buffer, more = io.StringIO(), [name for name, _ in further(records)]
    own = {r.cell_id: {m.name: (m.value, m.low, m.high) for m in r.metrics} for r in records if more}
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"{name}{end}" for name in more for end in ENDS)])
    for row in rows(records, claims):
        others = [value for name in more for value in own[str(row["cell_id"])].get(name, (None,) * len(ENDS))]
        writer.writerow([text(value) for value in (*row.values(), *others)])
    return buffer.getvalue()


def write_csv(records: Sequence[Record], path: Path, *, claims: Claims = no_claims) -> None:
    """Write the CSV to `path`, whole or not at all. Raises UsageError where it cannot be written."""
    write_atomic(path, csv_text(records, claims).encode())
