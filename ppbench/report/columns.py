"""Every column of leaderboard.csv, worst_case.csv and the tables of `ppbench.load`: its type, unit and meaning, once.

Columns of metrics are made of their specs. docs/columns.md is made from here. New columns go last in `CELLS`, so that
older tables still agree with their records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel

from ppbench.base.registry import plugins
from ppbench.metrics.spec import INTERVAL, Ending, MetricSpec
from ppbench.questions.base import Question, metric_specs, question_of
from ppbench.records.schema import MODEL_METRICS, AuditInfo, ModelMetric, ProbeInfo

ColumnValue = str | int | float | bool | None
Row = dict[str, ColumnValue]
"""One row of a table by column; None is an empty field."""
ENDS: Final = ("_low", "_high")
Dtype = Literal["string", "Int64", "Float64", "boolean"]
_DTYPES: Final[Mapping[Any, Dtype]] = {int: "Int64", bool: "boolean", float: "Float64"}


@dataclass(frozen=True)
class Column:
    """One column.

    path: where a cell's value is read, as "record.status", or "" where it is computed, as for metrics; unit: "" without
    one; dtype: pandas' nullable type; unwritten: the value of a field that records only have where it is another;
    then the column is empty, so that tables of older records do not change.
    """

    name: str
    path: str
    meaning: str
    unit: str = ""
    dtype: Dtype = "string"
    unwritten: ColumnValue = None


_text, _whole, _real, _truth = (partial(Column, dtype=dtype) for dtype in get_args(Dtype))


def _ends(name: str, of: str) -> tuple[Column, Column]:
    """Return the columns of the interval of the figure `of`, read at `name`."""
    return (
        _real(f"{name}_low", f"{name}.low", f"Lower end of the 95 % interval of `{of}`."),
        _real(f"{name}_high", f"{name}.high", f"Upper end of the 95 % interval of `{of}`."),
    )


def _ours() -> list[Question]:
    """Return our own questions, in the order of their boards; others are not loaded."""
    own = [question_of(name) for name, plugin in plugins("questions").items() if plugin.ours]
    return sorted(own, key=lambda question: (question.order, question.name))


METRICS: Final[dict[str, MetricSpec]] = {spec.name: spec for question in _ours() for spec in question.specs}
"""Every metric of our own questions; audits also have `auc_FAMILY` for each family of canaries."""


def unit_of(metric: str) -> str:
    """Return the unit of a metric of any installed question, "" if it has none or is unknown."""
    spec = metric_specs().get(metric)
    return "" if spec is None else spec.unit


COLUMN_METRICS: Final = {
    spec.name: spec
    for spec in (
        *MODEL_METRICS.values(),
        *(spec for question in _ours() if question.chapter for spec in question.specs),
    )
}
"""Metrics of the model, and of victims, that always have their columns in leaderboard.csv."""


def metric_columns(spec: MetricSpec) -> dict[str, Column]:
    """Return the columns of leaderboard.csv that a metric declares, by name."""
    meanings: dict[Ending, str] = {
        "": spec.meaning,
        "_low": f"Lower end of the 95 % interval of `{spec.name}`.",
        "_high": f"Upper end of the 95 % interval of `{spec.name}`.",
        "_chance": f"What blind guessing gives for `{spec.name}`.",
    }
    return {
        f"{spec.name}{ending}": _real(
            f"{spec.name}{ending}",
            f"utility.{spec.field(ending)}" if isinstance(spec, ModelMetric) else "",
            meanings[ending],
            spec.unit,
        )
        for ending in spec.columns
    }


_DECLARED: Final = {n: column for spec in COLUMN_METRICS.values() for n, column in metric_columns(spec).items()}


def _metrics(*names: str, endings: tuple[str, ...] = ("",)) -> tuple[Column, ...]:
    """Return columns that metrics declare, by their names; endings: of each, as `ENDS` for the interval alone."""
    return tuple(_DECLARED[f"{name}{ending}"] for name in names for ending in endings)


def _part(root: str, part: type[BaseModel]) -> dict[str, Column]:
    """Return a column for each field of a part of the key, by name."""
    columns = {}
    for name, about in part.model_fields.items():
        extra = about.json_schema_extra
        unit = str(extra.get("unit", "")) if isinstance(extra, dict) else ""
        dtype = _DTYPES.get(about.annotation, "string")
        columns[name] = Column(name, f"{root}.{name}", about.description or "", unit, dtype)
    return columns


_PART: Final = _part("key.probing", ProbeInfo) | _part("key.audit", AuditInfo)
_LISTED: Final = (
    _text("dataset", "key.data", "Name of the data set, as given on the command line or in the suite."),
    _text("model", "key.model", "Name of the network."),
    _text("threat_model", "key.threat", "The adversary, with the version, as `server/1`; see threat-models.md."),
    _text("kind", "kind", "The question; in worst_case.csv that of the board, which includes label attacks."),
    _text("stage", "key.stage", "Which model: `init`, `iterate` (trained on), `final` (delivered) or `audit`."),
    _whole("batch_size", "key.batch", "Examples in a victim's batch.", "examples"),
    _PART["probe"],
    _PART["probe_rounds"],
    _text("defense", "key.defense", "Name of the defense; `none` and `full_noise` are the controls."),
    _text("control", "key.control", "Name of the control parameter: the x-axis of the trade-off."),
    _real("control_value", "key.value", "Its value."),
    _text("parameters", "parameters", "Every parameter of the defense in JSON, sorted by name."),
    _text("role", "key.role", "Role that the victims played; empty where all clients do the same."),
    _whole("seed", "key.seed", "Master seed: one seed, one result."),
    _text("suite", "key.suite", "Where the cell comes from, with the version: `evaluate/1`, or a suite's id."),
    _whole("train", "key.train", "Training examples that the clients share.", "examples"),
    _whole("public", "key.public", "Examples that no client holds and adversaries may use.", "examples"),
    _PART["references"],
    _PART["canaries"],
    _PART["canary_clients"],
    _text("federation", "key.federation", "How the model was trained, in JSON: clients, rounds, schedule, optimizers."),
    _text("architecture", "key.architecture", "The network in JSON: options, input shape, classes, parameters, loss."),
    _whole("test", "key.test", "Test examples.", "examples"),
    _text("data_digest", "key.digest", "SHA-256 of the data, whatever their name."),
    _text("suite_digest", "key.suite_digest", "Digest of what the suite's cells share; empty outside suites."),
    _text("defense_version", "key.version", "Version of the defense."),
    _text("auxiliary", "key.auxiliary", "Further knowledge of the adversary; empty without any."),
)
_LATER: Final = {**ProbeInfo.LATER, **AuditInfo.LATER}
KEY: Final = (
    *_LISTED,
    *(replace(column, unwritten=_LATER.get(name)) for name, column in _PART.items() if column not in _LISTED),
)
"""The columns that identify a row of a board: `report.frame.ROW`; no two rows are equal in all of them."""
RANKS: Final = (
    _whole("rank_low", "", "Best rank of the row on its board, 1 leaking least; empty where it is not ranked."),
    _whole("rank_high", "", "Worst rank: rows whose intervals overlap share ranks `rank_low` to `rank_high`."),
)
_KEY: Final = {column.name: column for column in KEY}
_PLACED: Final = (
    *(_KEY[name] for name in ("suite", "threat_model", "defense", "control", "control_value")),
    _text("attack", "key.attack", "Name of the attack."),
    _truth("adaptive", "key.knows", "Whether the attack declares that it knows the defense's mechanism."),
    *(_KEY["stage"], _KEY["batch_size"]),
    _whole("n", "n", "Victims, candidates or queries that were scored."),
    *_metrics(
        "accuracy",
        "psnr_median",
        "psnr_p95",
        "rmse_mean",
        "ssim_mean",
        "label_accuracy",
        "asr",
        "auc",
        "tracing_accuracy",
    ),
    _real("cap", "cap.value", "CAP: mean of accuracy x `distance` over the control values; equal along a series."),
    _text("claimed", "claimed", "The claim of the defense's paper for this very setting; only in leaderboard.csv."),
    _text("status", "record.status", "`complete`, `diverged` or `failed`; `reason` says why."),
    _text("cell_id", "record.cell_id", "Name of the cell: the file in records/, a hash of its whole configuration."),
    *_metrics("accuracy", "psnr_median", endings=ENDS),
    *_metrics("share_above_20db", endings=INTERVAL),
    *_metrics("label_accuracy", "asr", "auc", "tracing_accuracy", endings=ENDS),
    _text("distance", "cap.distance", "Which distance from the truth CAP takes, with its version, as `recon/1`."),
    _real("distance_value", "distance.value", "That distance of the cell; larger is safer."),
    *_ends("distance", "distance_value"),
    *_ends("cap", "cap"),
    _real("cap_corrected", "cap.corrected", "CAP with accuracy between chance, 0, and the undefended one's, 1."),
    _real("cap_unit", "unit.value", "CAP by the question's second distance, `recon_unit/1`; empty without one."),
    _whole("cap_settings", "cap.n", "Control values that CAP is a mean over."),
    _text("cap_reason", "cap.reason", "Why there is no CAP."),
    _real("epsilon", "record.privacy.epsilon", "The formal guarantee over the whole training, if any."),
    _real("delta", "record.privacy.delta", "Its delta."),
    _real("bytes_up", "cost.bytes_up", "Bytes that a client uploads per round.", "bytes"),
    _real("bytes_down", "cost.bytes_down", "Bytes that a client downloads per round.", "bytes"),
    _whole("bytes_setup", "cost.bytes_setup", "Bytes that the set-up sends in total.", "bytes"),
    _truth("oracle", "key.oracle", "Whether the attack chose its answer by the truth; such a cell is never a result."),
    *(_KEY["dataset"], _KEY["model"], _KEY["seed"]),
    _text("reason", "record.reason", "Why a cell is not complete."),
    *_metrics("agreement", "output_error", "mse", endings=INTERVAL),
    *(_KEY["probe"], _KEY["probe_rounds"], _KEY["role"]),
    _real("up_ratio", "ratios.up", "`bytes_up` over that of `none` in the same federation."),
    _real("down_ratio", "ratios.down", "`bytes_down` over that of `none`."),
    _whole("memory_peak", "cost.memory_peak", "Peak memory of a client's computation.", "bytes"),
    _real("memory_ratio", "ratios.memory", "`memory_peak` over that of `none`."),
    *_metrics("psnr_worst_decile"),
    *_metrics("test_mse_mean", "lpips_mean", "feat_mse_mean", endings=INTERVAL),
    *_metrics("blind_median", "oracle_median", "evaluations_per_broken"),
    *_metrics("tpr_at_1pct_fpr", "canary_auc", "canary_tpr_at_1pct_fpr", endings=INTERVAL),
    *_metrics("epsilon_lower"),
    *(_KEY["public"], _KEY["references"], _KEY["canaries"]),
    _text("perceptual", "config.perceptual", "Network of perceptual figures and its file's digest; empty without one."),
    _text("tuned", "tuned", "Settings of the attack that were chosen on tuning victims."),
    _text("flags", "flags", "Codes of remarks on the cell, separated by spaces."),
    _DECLARED["tracing_accuracy_chance"],
    *_metrics("detection_auc", "reconstruction_accuracy", endings=INTERVAL),
    _DECLARED["reconstruction_accuracy_chance"],
    *(_KEY["kind"], _KEY["parameters"]),
    *RANKS,
    *_metrics("batch_asr", "batch_auc", endings=INTERVAL),
    *_metrics(
        "reidentified", "recognized", "reidentified_features", "recognized_features", "gain_median", endings=INTERVAL
    ),
    *(_DECLARED["reidentified_chance"], _DECLARED["recognized_chance"]),
    *_metrics("accuracy_top5", endings=INTERVAL),
    _whole("collapsed", "utility.collapsed", "Trainings at chance in every evaluated round; 3: none learned."),
    _whole("retrained", "utility.retrained", "Seed of the training reported here, where the cell's own collapsed."),
    _whole("cap_collapsed", "cap.collapsed", "Number of `cap_settings` of which no training learned."),
    _whole("cap_strays", "cap.strays", "Number of `cap_settings` whose accuracy is far from that of every other seed."),
)
"""The columns of leaderboard.csv that have their place. Those of further metrics follow by themselves; before another
column is added, they get theirs here."""
CELLS: Final = (*_PLACED, *(column for name, column in _DECLARED.items() if name not in {c.name for c in _PLACED}))
"""The columns of leaderboard.csv, in order; new ones go last.

Every file has all of them, so that files of two boards can be concatenated, and older tables differ from tables that
lost a column. There are no times: they differ from run to run, and the table is a function of the records. Further
columns follow for questions without a chapter (`foreign_metrics` in page/boards.py).
"""
_CELL: Final = {column.name: column for column in CELLS}
WORST_METRICS: Final = (
    *("psnr_median", "psnr_worst_decile", "rmse_mean", "share_above_20db", "ssim_mean", "lpips_mean"),
    *("gain_median", "reidentified", "recognized"),
)
"""Metrics of the worst case in worst_case.csv."""
PLAIN_METRICS: Final = ("psnr_median", "rmse_mean")
"""Metrics of the worst case over unaware attacks there."""
OTHER_HEADLINE: Final = "reconstruction_accuracy"
"""The metric there, of both worst cases, of kinds of data that are not judged by a distance."""
_WORST: Final = (*(f"{WORST_METRICS[0]}{end}" for end in INTERVAL), *WORST_METRICS[1:])


def _of_case(case: str, about: str, names: tuple[str, ...]) -> tuple[Column, ...]:
    """Return the columns of the metrics `names` of a worst case."""
    return tuple(_real(f"{case}_{name}", "", f"`{name}` of {about}.", _CELL[name].unit) for name in names)


_FRONT: Final = KEY[: [column.name for column in KEY].index("suite")]
RELIABLE: Final = _truth("reliable", "", "Whether the controls hold on the board, so that ranks mean something.")
WORST: Final = (
    *_FRONT,
    *RANKS,
    RELIABLE,
    _text("level", "", "How far inputs leak: `rebuilt`, `recognizable`, `blind` or `undecided`; see levels.md."),
    _text("level_plain", "", "The same for unaware attackers."),
    _text("qualifiers", "", "Codes of the level's qualifiers, separated by spaces."),
    _CELL["accuracy"],
    _whole("attacks", "", "Attacks that gave reconstructions."),
    _whole("n", "", "Victims of the worst case."),
    _text("plain", "", "The unaware attack with the worst case; `portfolio (NAME)`: several, mostly NAME."),
    *_of_case("plain", "the worst case over unaware attacks", PLAIN_METRICS),
    _text("worst", "", "The attack of the worst case, over all; `portfolio (NAME)`: several, mostly NAME."),
    *_of_case("worst", "the worst case", _WORST),
    *KEY[len(_FRONT) :],
    *_of_case("plain", "the worst case over unaware attacks", (OTHER_HEADLINE,)),
    *_of_case("worst", "the worst case", (OTHER_HEADLINE,)),
)
"""The columns of worst_case.csv, in order; new ones go last. Columns that are empty in every row are not written."""

LONG: Final = (
    _text("metric", "", "Name of the metric; missing where a cell came to no figure, which `reason` explains."),
    _real("value", "", "Its value; missing where `reason` says why.", "of the metric"),
    _real("low", "", "Lower end of its 95 % interval.", "of the metric"),
    _real("high", "", "Upper end.", "of the metric"),
    _whole("n", "", "Number of victims, candidates or queries."),
    _real("chance", "", "What blind guessing gives, where that is defined.", "of the metric"),
    _truth("higher_is_safer", "", "Whether a higher value leaks less."),
    _text("reason", "", "Why there is no value."),
)
"""The columns of a metric in tables of `ppbench.load`."""
CELL_KEY: Final = (
    _CELL["cell_id"],
    _CELL["attack"],
    _text("attack_version", "key.attack_version", "Version of the attack."),
    _text("attack_parameters", "key.settings", "Every parameter of the attack in JSON, sorted by name."),
    _text("follows", "key.follows", "The attack whose answers it uses; empty where it uses none."),
    _CELL["adaptive"],
    _CELL["oracle"],
    _CELL["status"],
)
"""The columns that distinguish the cells of one row of a board."""
_NOT_REPEATED: Final = {c.name for c in (*KEY, *CELL_KEY, *LONG)} | {"claimed"}
LOADED_CELLS: Final = (
    *KEY,
    *CELL_KEY,
    *(c for c in CELLS if (c.path or c in RANKS) and c.name not in _NOT_REPEATED),
    *LONG,
)
"""The columns of `ppbench.load(folder)`: those of leaderboard.csv, with one row per cell and metric."""
LOADED_VICTIMS: Final = (
    *_FRONT,
    *(column for column in CELL_KEY if column.name not in ("attack_version", "attack_parameters")),
    _text("victim", "", "Which victim of the cell, equal in all cells with the same question; numbers with dots."),
    _text("unit", "", "Its unit of observation: victims of one unit are not independent."),
    _truth("canary", "", "Whether it is a canary."),
    _text("metric", "", "Name of the figure: a field of the question's score, see `ppbench/questions`."),
    _real("value", "", "Its value, 1 for yes and 0 for no; missing where the victim has none.", "of the figure"),
)
"""The columns of `ppbench.load(folder, level="victims")`; join others by `cell_id`."""
LOADED_WORST: Final = (
    *KEY,
    _text("row", "", "The row in words, as on its board: the defense, its control value, what else distinguishes it."),
    *RANKS,
    RELIABLE,
    *_metrics("accuracy", endings=INTERVAL),
    *(_CELL["epsilon"], _CELL["delta"]),
    _text("case", "", "`worst`: over all attacks; `plain`: over unaware ones."),
    _text("attack", "", "The attack of the case; `portfolio (NAME)`: several, mostly NAME."),
    _text("cell_id", "", "The cell of the case, of a portfolio the leading one."),
    _truth("headline", "", "Whether the board is ranked by this metric."),
    *LONG,
)
"""The columns of `ppbench.load(folder, level="worst")`."""
