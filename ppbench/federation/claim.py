"""What a paper says about its own defense, as data: the table of claims sets records beside it.

A paper is a TOML file: its `citation`, and a `[[table]]` for each table or place in it, with fields of `Claim` and
`defense`, whose they are. Where some differ from claim to claim, `columns` names them and `rows` holds one list of them
a claim (docs/tutorial-defense.md has an example). `when` and `options` are tables of names and values. A `value` of two
numbers is their quotient. `setting` may name other fields in braces, and `where`, which is for that alone.

A `[[rival]]` says that in the table `source` a `defense` (at `when`) is printed better than another one, `than` (at
`than_when`), by `metrics`: every pair of numbers that stands there beside one another, the defense's the better one,
is a claim to be better. Where a paper says so without numbers, a `[[table]]` has `than`: `defense`, perhaps `when`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from ppbench.base.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Scalar = bool | int | float | str
Named = tuple[tuple[str, Scalar], ...]
Conditions = tuple[tuple[str, Scalar | tuple[Scalar, ...]], ...]
"""Parameters by name, each with the value that it must have, or with those of which it must have one."""


def allowed(value: Scalar | tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Return the values of a condition of which one must be had."""
    return value if isinstance(value, tuple) else (value,)


Need = Literal["dataset", "model", "family", "clients", "partition", "epochs", "batch_size", "batch", "steps"]
TRAINED: tuple[Need, ...] = ("dataset", "model", "clients", "partition", "epochs")
LEARNT = ("accuracy", "accuracy_top5", "dice", "mse")
"""What a model is good for."""
NEEDS: dict[str, tuple[Need, ...]] = {
    **dict.fromkeys(LEARNT, TRAINED),
    **dict.fromkeys(("psnr_median", "test_mse_mean", "feat_mse_mean", "asr"), ("dataset", "model")),
    **dict.fromkeys(("cap_reconstruction", "cap_label", "cap_tracing"), ("dataset", "model", "batch")),
    "accuracy_rises": ("dataset",),
    "upload_ratio": ("clients",),
    "bytes_saving": ("model", "clients"),
    "memory_ratio": ("dataset", "model", "batch_size"),  # of the data set the size of an image
}
"""What belongs to the premise of a claim about a metric, unless the claim says it. What a paper leaves open is none."""
SMALLER = frozenset({"asr", "psnr_median", "agreement", "mse", "epsilon", "memory_ratio", "upload_ratio"})
"""Metrics by which a defense is the better the smaller they are; ratios of cost and seconds are too, no others."""
COMPARED: tuple[Need, ...] = ("dataset", "model", "batch")
"""The same of a claim to be better than another defense: both are trained alike here, at equal accuracy, the paper's
length or not. That a model is better is said of the paper's length: early in training the faster learner is ahead.
"""


@dataclass(frozen=True)
class Rival:
    """Another defense that a paper sets beside. when: its parameters; value: as printed, None of a property."""

    defense: str
    value: float | None = None
    when: Conditions = ()


@dataclass(frozen=True)
class Claim:
    """A number that a paper prints about its defense, or a property that it states without one, with its premise.

    Attributes:
        metric: "cap_reconstruction", "cap_label", "cap_tracing"; "asr" (of membership attacks on what clients train
            on); "psnr_median" (of what the server rebuilds); "agreement" (with the true model's decisions, by who holds
            what clients train on); "accuracy", "accuracy_top5", "dice", "mse", "epsilon"; "accuracy_rises" (with the
            control parameter); beside the undefended: "upload_ratio" (bytes up), "bytes_saving" (share of a round's
            bytes, both ways), "memory_ratio" (a client's peak), "client_cost_ratio", "training_cost_ratio" (without
            drawing noise), "client_backward_ratio" (its time).
        value: as printed; shares in [0, 1]. None for a property, then `note` states it.
        batch: of the victims, None where the paper names none.  source: the table or the place in the paper.
        when, options: parameters (name, value) of the defense, of `when` also several values, and of the model, that
            it holds for.
        clients: None for any.  partition: "iid", "imbalanced" or "dirichlet", with or without ":0.3"; "" for any.
        family: kind of network that it is about ("mlp", "convolutional", "residual"), "" for any.
        epochs: local epochs of a client's training in all.  batch_size: of training.  steps: mini-batches that an
            attacked upload holds, at least.
        lr, optimizer: of training, for the reader.  grid: control values of a CAP; empty: the defense's "paper" grid.
        needs: what a record must share with it, or is outside its premise; None: by the metric (`NEEDS`).
        undefended: what the paper prints for the undefended model beside it.  setting: its set-up in words.
        views: threat models of those whom it speaks of, with their versions; empty: of the server.
        attack: ours that is the one which the paper runs, "" where it names none that is here.
        than: another defense than which it is claimed to be better, by the same metric; None: it stands alone.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    metric: str
    value: float | None
    dataset: str
    model: str
    batch: int | None
    source: str
    when: Conditions = ()
    clients: int | None = None
    options: Named = ()
    undefended: float | None = None
    setting: str = ""
    note: str = ""
    partition: str = ""
    family: str = ""
    epochs: float | None = None
    batch_size: int | None = None
    steps: int | None = None
    lr: float | None = None
    optimizer: str = ""
    grid: tuple[float, ...] = ()
    needs: tuple[Need, ...] | None = None
    than: Rival | None = None
    attack: str = ""
    views: tuple[str, ...] = ()

    @property
    def premise(self) -> tuple[Need, ...]:
        """What a record must share with it before its figure says anything about the claim."""
        if self.needs is not None:
            return self.needs
        if self.than is None:
            return NEEDS.get(self.metric, ())
        return (*COMPARED, "epochs") if self.metric in LEARNT else COMPARED


@dataclass(frozen=True)
class Paper:
    """What one paper prints. citation: of the paper; tables: (defense, claim), in the order of the file."""

    citation: str
    tables: tuple[tuple[str, Claim], ...]

    def claims(self, defense: str) -> tuple[Claim, ...]:
        """Return what it prints about a defense, in the order of the file."""
        return tuple(claim for name, claim in self.tables if name == defense)


def read_paper(path: Path) -> Paper:
    """Return what the paper prints that `path` holds (UsageError: it is none, or a claim is, by table and row)."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise UsageError(f"{path} cannot be read as the TOML of a paper's claims: {cause}.") from cause
    tables, rivals, citation = data.get("table"), data.get("rival", []), data.get("citation")
    named = {"citation", "table"} <= set(data) <= {"citation", "table", "rival"}
    if not (named and isinstance(citation, str) and isinstance(tables, list) and isinstance(rivals, list)):
        raise UsageError(f"{path} must hold a citation and [[table]]s, perhaps [[rival]]s, and nothing else.")
    claims = [pair for table in tables for pair in _claims(path, table)]
    return Paper(citation, (*claims, *(pair for rival in rivals for pair in _compared(path, rival, claims))))


def _claims(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, Claim]]:
    common = {key: value for key, value in table.items() if key not in ("columns", "rows")}
    columns, rows = table.get("columns", []), table.get("rows", [[]])
    for number, row in enumerate(rows, 1):
        place = f"{path.name}, table of source {table.get('source', '?')!r}, row {number}"
        if len(row) != len(columns):
            raise UsageError(f"{place}: {len(row)} values for {len(columns)} columns.")
        fields = {**_DEFAULTS, **common, **dict(zip(columns, row, strict=True))}
        try:
            yield fields.pop("defense"), _CLAIM.validate_python(_plain(fields))
        except KeyError as cause:
            raise UsageError(f"{place}: there is no field {cause}.") from cause
        except ValidationError as cause:
            raise UsageError(f"{place}: {_wrong(cause)}.") from cause


def _compared(path: Path, table: Mapping[str, Any], claims: Sequence[tuple[str, Claim]]) -> Iterator[tuple[str, Claim]]:
    """Yield the claims to be better that a [[rival]] makes of the numbers in one table of the paper."""
    try:
        rival = _RIVALRY.validate_python(_paired(dict(table)))
    except ValidationError as cause:
        raise UsageError(f"{path.name}, rival of source {table.get('source', '?')!r}: {_wrong(cause)}.") from cause
    printed = [(d, c) for d, c in claims if c.source == rival.source and c.metric in rival.metrics]
    mine = [c for d, c in printed if d == rival.defense and set(rival.when) <= set(c.when)]
    theirs = {_row_of(c): c for d, c in printed if d == rival.than and set(rival.than_when) <= set(c.when)}
    pairs = [(c, theirs[_row_of(c)]) for c in mine if _row_of(c) in theirs]
    if not pairs:
        what = f"{rival.defense} beside {rival.than}, source {rival.source!r}"
        raise UsageError(f"{path.name}, rival: no table prints {what}; name what both have a claim of.")
    for claim, other in pairs:
        if other.value is not None and claim.value is not None and better(claim.metric, claim.value, other.value):
            than = Rival(rival.than, other.value, other.when)
            yield rival.defense, replace(claim, than=than, note=rival.note or claim.note)


def better(metric: str, one: float, other: float) -> bool:
    """Return whether a defense whose metric is `one` is better than another whose is `other`; equals are not."""
    small = metric in SMALLER or metric.endswith(("_cost_ratio", "_backward_ratio", "_accuracy_ratio", "_seconds"))
    return one < other if small else one > other


def _row_of(claim: Claim) -> tuple[object, ...]:
    """Return what two numbers of one table share that are printed beside one another."""
    return claim.metric, claim.dataset, claim.model, claim.batch, claim.clients, claim.options, claim.partition


def _paired(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with tables of names and values as pairs, also those of another defense."""
    paired = {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in fields.items()}
    return {**paired, "than": _paired(fields["than"])} if isinstance(fields.get("than"), dict) else paired


def _wrong(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    fields = {**fields, "setting": fields.get("setting", "").format(**fields)}
    fields.pop("where", None)
    match fields["value"]:
        case [int() | float() as printed, int() | float() as beside] if beside:
            fields["value"] = printed / beside
    return _paired(fields)


@dataclass(frozen=True)
class _Rivalry:
    """A [[rival]]: in the table `source` a defense is printed better than another, by these metrics."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    source: str
    defense: str
    than: str
    metrics: tuple[str, ...]
    when: Conditions = ()
    than_when: Conditions = ()
    note: str = ""


_RIVALRY = TypeAdapter(_Rivalry)
_CLAIM = TypeAdapter(Claim)
_DEFAULTS: Mapping[str, Any] = {"dataset": "", "model": "", "batch": None, "value": None}
