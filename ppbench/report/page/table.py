"""The leaderboard as a table: one row a cell, and the CSV file that is written from it."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from ppbench.questions.base import questions
from ppbench.records.files import write_atomic
from ppbench.records.schema import Record
from ppbench.report.cap_series import record_distance
from ppbench.report.page.costs import Ratios, relative_costs
from ppbench.report.page.series import SeriesCap, caps

ENDS = ("", "_low", "_high")
Claims = Callable[[Record], str]
"""What a paper prints about the defense of a record, in words; "" where it prints nothing comparable."""


def no_claims(record: Record) -> str:
    """Return "": for tables made without the defenses at hand."""
    return ""


@dataclass(frozen=True)
class Row:
    """One cell, flat; the fields are the CSV's columns, in order. None is an empty field.

    Figures are those of the record, `mse` is of the delivered model; `n` is the number of victims, `cap` is CAP over
    the control values with `distance` (the one of the attack's kind), the same in every row of a series. `bytes_*` are
    per client and round, `memory_peak` is in bytes, `*_ratio` are over the cost of `none`. `epsilon_lower` is what an
    audit refutes, beside the claimed `epsilon`; `tuned` the settings chosen on tuning victims. Times are in no column:
    they differ from run to run, and the table is a function of the records. New columns go last; behind them
    the figures of questions of other packages that some record answers.
    """

    suite: str
    threat_model: str
    defense: str
    control: str | None
    control_value: float | None
    attack: str
    adaptive: bool
    stage: str
    batch_size: int
    n: int
    accuracy: float | None
    psnr_median: float | None
    psnr_p95: float | None
    rmse_mean: float | None
    ssim_mean: float | None
    label_accuracy: float | None
    asr: float | None
    auc: float | None
    tracing_accuracy: float | None
    cap: float | None
    claimed: str
    status: str
    cell_id: str
    accuracy_low: float | None
    accuracy_high: float | None
    psnr_median_low: float | None
    psnr_median_high: float | None
    share_above_20db: float | None
    share_above_20db_low: float | None
    share_above_20db_high: float | None
    label_accuracy_low: float | None
    label_accuracy_high: float | None
    asr_low: float | None
    asr_high: float | None
    auc_low: float | None
    auc_high: float | None
    tracing_accuracy_low: float | None
    tracing_accuracy_high: float | None
    distance: str
    distance_value: float | None
    distance_low: float | None
    distance_high: float | None
    cap_low: float | None
    cap_high: float | None
    cap_corrected: float | None
    cap_unit: float | None
    cap_settings: int
    cap_reason: str | None
    epsilon: float | None
    delta: float | None
    bytes_up: float
    bytes_down: float
    bytes_setup: int
    oracle: bool
    dataset: str
    model: str
    seed: int
    reason: str | None
    agreement: float | None
    agreement_low: float | None
    agreement_high: float | None
    output_error: float | None
    output_error_low: float | None
    output_error_high: float | None
    mse: float | None
    mse_low: float | None
    mse_high: float | None
    probe: str
    probe_rounds: int
    role: str
    up_ratio: float | None
    down_ratio: float | None
    memory_peak: int | None
    memory_ratio: float | None
    psnr_worst_decile: float | None
    test_mse_mean: float | None
    test_mse_mean_low: float | None
    test_mse_mean_high: float | None
    lpips_mean: float | None
    lpips_mean_low: float | None
    lpips_mean_high: float | None
    feat_mse_mean: float | None
    feat_mse_mean_low: float | None
    feat_mse_mean_high: float | None
    blind_median: float | None
    oracle_median: float | None
    evaluations_per_broken: float | None
    tpr_at_1pct_fpr: float | None
    tpr_at_1pct_fpr_low: float | None
    tpr_at_1pct_fpr_high: float | None
    canary_auc: float | None
    canary_auc_low: float | None
    canary_auc_high: float | None
    canary_tpr_at_1pct_fpr: float | None
    canary_tpr_at_1pct_fpr_low: float | None
    canary_tpr_at_1pct_fpr_high: float | None
    epsilon_lower: float | None
    public: int
    references: int | None
    canaries: int | None
    perceptual: str
    tuned: str
    flags: str


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
    table = [_row(r, series[r.cell_id], costs[r.cell_id], claims) for r in records]
    return sorted(table, key=_order)


def _order(row: Row) -> tuple[str, str, str, str, float, str, int, str, str]:
    value = float("-inf") if row.control_value is None else row.control_value
    where = (row.suite, row.threat_model, row.defense, row.control or "", value)
    return (*where, row.stage, row.batch_size, row.role + row.attack, row.cell_id)


def _row(record: Record, cap: SeriesCap, ratios: Ratios, claims: Claims) -> Row:
    config, utility, cost = record.config, record.utility, record.cost
    control, distance = config.defense.control, record_distance(record)
    figures: dict[str, float | None] = {}
    for metric in record.metrics:
        figures |= {metric.name: metric.value, f"{metric.name}_low": metric.low, f"{metric.name}_high": metric.high}
    return Row(
        suite=config.suite,
        threat_model=config.threat_model.id,
        defense=config.defense.id,
        control=None if control is None else control.name,
        control_value=None if control is None else control.value,
        attack=config.attack.id,
        adaptive=config.attack.adaptive,
        stage=config.stage,
        batch_size=config.batch_size,
        n=len(record.victims),
        accuracy=utility.accuracy,
        cap=cap.main.value,
        claimed=claims(record),
        status=record.status,
        cell_id=record.cell_id,
        accuracy_low=utility.low,
        accuracy_high=utility.high,
        distance=cap.main.distance,
        distance_value=None if distance is None else distance.value,
        distance_low=None if distance is None else distance.low,
        distance_high=None if distance is None else distance.high,
        cap_low=cap.main.low,
        cap_high=cap.main.high,
        cap_corrected=cap.main.corrected,
        cap_unit=None if cap.unit is None else cap.unit.value,
        cap_settings=cap.main.n,
        cap_reason=cap.main.reason,
        epsilon=record.privacy.epsilon,
        delta=record.privacy.delta,
        bytes_up=cost.bytes_up,
        bytes_down=cost.bytes_down,
        bytes_setup=cost.bytes_setup,
        oracle=config.attack.oracle,
        dataset=config.data.name,
        model=config.model.id,
        seed=config.seed,
        reason=record.reason,
        mse=utility.mse,
        mse_low=utility.mse_low,
        mse_high=utility.mse_high,
        probe=config.probe,
        probe_rounds=config.probe_rounds,
        role=config.role,
        up_ratio=ratios.up,
        down_ratio=ratios.down,
        memory_peak=cost.memory_peak,
        memory_ratio=ratios.memory,
        public=config.data.public,
        references=None if config.audit is None else config.audit.references,
        canaries=None if config.audit is None else config.audit.canaries,
        perceptual=config.perceptual,
        tuned=tuned_text(record),
        flags=" ".join(dict.fromkeys(flag.code for flag in record.flags)),
        **{name: figures.get(name) for name in _MEASURED},
    )


_FIGURES = (
    *("psnr_median", "psnr_p95", "share_above_20db", "ssim_mean", "rmse_mean", "auc", "output_error"),
    *("psnr_worst_decile", "test_mse_mean", "lpips_mean", "feat_mse_mean", "blind_median", "oracle_median"),
    *("evaluations_per_broken", "label_accuracy", "tracing_accuracy", "asr", "agreement"),
    *("tpr_at_1pct_fpr", "canary_auc", "canary_tpr_at_1pct_fpr", "epsilon_lower"),
)


_KNOWN = frozenset(field.name for field in fields(Row))
_MEASURED = tuple(f"{name}{end}" for name in _FIGURES for end in ENDS if f"{name}{end}" in _KNOWN)
"""The fields that are metrics of the record, or ends of their intervals."""


def tuned_text(record: Record) -> str:
    """Return the settings that an attack was run with after tuning, as "lr=0.1, tv=0.01"; "" where none were tried."""
    if record.tuned is None or not record.tuned.variants:
        return ""
    return ", ".join(f"{name}={value}" for name, value in record.tuned.variants[record.tuned.chosen].items())


def text(value: str | float | bool | None) -> str:
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
    writer.writerow([field.name for field in fields(Row)] + [f"{name}{end}" for name in more for end in ENDS])
    for row in rows(records, claims):
        others = [value for name in more for value in own[row.cell_id].get(name, (None,) * len(ENDS))]
        writer.writerow([text(value) for value in (*astuple(row), *others)])
    return buffer.getvalue()


def write_csv(records: Sequence[Record], path: Path, *, claims: Claims = no_claims) -> None:
    """Write the CSV to `path`, whole or not at all. Raises UsageError where it cannot be written."""
    write_atomic(path, csv_text(records, claims).encode())
