"""The table of all cells: one row a cell, typed columns, and the CSV file that is written from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pandas

from ppbench.base.files import write_atomic
from ppbench.questions.base import questions
from ppbench.records.schema import Record
from ppbench.report.cap import SeriesCap, caps, record_distance
from ppbench.report.page.costs import Ratios, relative_costs

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
    "epsilon_lower", "public", "references", "canaries", "perceptual", "tuned", "flags", "tracing_accuracy_chance",
    "detection_auc", "detection_auc_low", "detection_auc_high", "reconstruction_accuracy",
    "reconstruction_accuracy_low", "reconstruction_accuracy_high", "reconstruction_accuracy_chance",
]  # fmt: skip
"""The columns of the CSV, in order; new ones go last.

Figures are those of the record, `mse` is of the delivered model; `n` is the number of victims, `cap` is CAP over
the control values with `distance` (the one of the attack's kind), the same in every row of a series. `bytes_*` are
per client and round, `memory_peak` is in bytes, `*_ratio` are over the cost of `none`. `epsilon_lower` is what an
audit refutes, beside the claimed `epsilon`; `tuned` the settings chosen on tuning victims; `*_chance` what blind
guessing gives. Times are in no column: they differ from run to run, and the table is a function of the records. Behind
the columns stand the figures of questions of other packages that some record answers.
"""
_TEXT = {
    "suite": "config.suite", "threat_model": "config.threat_model.id", "defense": "config.defense.id",
    "control": "config.defense.control.name", "attack": "config.attack.id", "stage": "config.stage",
    "claimed": "claimed", "status": "record.status", "cell_id": "record.cell_id", "distance": "cap.distance",
    "cap_reason": "cap.reason", "dataset": "config.data.name", "model": "config.model.id", "reason": "record.reason",
    "probe": "config.probe", "role": "config.role", "perceptual": "config.perceptual", "tuned": "tuned",
    "flags": "flags",
}  # fmt: skip
_WHOLE = {
    "batch_size": "config.batch_size", "n": "n", "cap_settings": "cap.n", "bytes_setup": "cost.bytes_setup",
    "seed": "config.seed", "probe_rounds": "config.probe_rounds", "memory_peak": "cost.memory_peak",
    "public": "config.data.public", "references": "config.audit.references", "canaries": "config.audit.canaries",
}  # fmt: skip
_TRUTH = {"adaptive": "config.attack.adaptive", "oracle": "config.attack.oracle"}
_REAL = {
    "control_value": "config.defense.control.value", "accuracy": "utility.accuracy", "accuracy_low": "utility.low",
    "accuracy_high": "utility.high", "mse": "utility.mse", "mse_low": "utility.mse_low", "mse_high": "utility.mse_high",
    "distance_value": "distance.value", "distance_low": "distance.low", "distance_high": "distance.high",
    "cap": "cap.value", "cap_low": "cap.low", "cap_high": "cap.high", "cap_corrected": "cap.corrected",
    "cap_unit": "unit.value", "epsilon": "record.privacy.epsilon", "delta": "record.privacy.delta",
    "bytes_up": "cost.bytes_up", "bytes_down": "cost.bytes_down", "up_ratio": "ratios.up", "down_ratio": "ratios.down",
    "memory_ratio": "ratios.memory",
}  # fmt: skip
"""Where the columns are read, by type; the others are metrics and the ends of their intervals, by name."""
_PATHS: Final = {name: path.split(".") for name, path in (_TEXT | _WHOLE | _TRUTH | _REAL).items()}
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
    """Return the table, sorted by suite, threat model, defense, control value, stage, batch, attack and name."""
    series, costs = caps(records), relative_costs(records)
    return sorted((_row(r, series[r.cell_id], costs[r.cell_id], claims) for r in records), key=_order)


def _order(row: Row) -> tuple[object, ...]:
    value = float("-inf") if row["control_value"] is None else row["control_value"]
    where = row["suite"], row["threat_model"], row["defense"], row["control"] or "", value
    return *where, row["stage"], row["batch_size"], f"{row['role']}{row['attack']}", row["cell_id"]


def _row(record: Record, cap: SeriesCap, ratios: Ratios, claims: Claims) -> Row:
    found: Row = {}
    for metric in record.metrics:
        found |= {metric.name: metric.value, f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
        found[f"{metric.name}_chance"] = metric.chance
    about = {
        "record": record,
        "config": record.config,
        "utility": record.utility,
        "cost": record.cost,
        "ratios": ratios,
        "cap": cap.main,
        "unit": cap.unit,
        "distance": record_distance(record),
        "claimed": claims(record),
        "n": len(record.victims),
        "tuned": tuned_text(record),
        "flags": " ".join(dict.fromkeys(flag.code for flag in record.flags)),
    }
    return {name: _at(about, _PATHS[name]) if name in _PATHS else found.get(name) for name in COLUMNS}


def _at(about: Mapping[str, Any], path: Sequence[str]) -> Any:
    """Return what lies at a path of attributes, None where one on the way is None."""
    found = about[path[0]]
    for name in path[1:]:
        found = None if found is None else getattr(found, name)
    return found


def tuned_text(record: Record) -> str:
    """Return the settings that an attack was run with after tuning, as "lr=0.1, tv=0.01"; "" where none were tried."""
    if record.tuned is None or not record.tuned.variants:
        return ""
    return ", ".join(f"{name}={value}" for name, value in record.tuned.variants[record.tuned.chosen].items())


def text(value: Value) -> str:
    """Return a field as written: floats to ten digits; text that a spreadsheet would run after an apostrophe."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value) if isinstance(value, int) else f"{value:.10g}"
    guarded = f"'{value}" if value.lstrip(" \n\v\f")[:1] in tuple("=+-@\t\r") else value
    return guarded.replace("\r", " ")  # Python 3.11's csv does not quote a lone carriage return


def csv_text(records: Sequence[Record], claims: Claims = no_claims) -> str:
    """Return the CSV: a header and one row a cell. A function of records and claims alone, so it can be verified."""
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
