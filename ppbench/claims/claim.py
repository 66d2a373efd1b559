"""A paper's claims about its own defense, as data.

A paper is a TOML file: its `citation`, and a `[[table]]` for each table or place in it, with fields of `Claim` and the
`defense`. Fields that differ between claims are named in `columns`, with one list of values per claim in `rows`
(docs/tutorial-defense.md has an example). `when` and `options` are tables of names and values. A `value` of two numbers
is their quotient. `setting` may name other fields in braces, and `where`, a field for that purpose alone.

A paper may name the defenses that it proposes, `own`: a figure of another one is printed for comparison, and no claim.
A paper that has a page of its own (`ppbench/claims/page.py`) also has `name`, `title`, `authors`, `link`, `says` (its
central claim, a sentence) and `across`: by table, the field of a claim that goes across it, where that is not the
figures' own. `source` is the table, with the column or row of it in brackets: "Table 1 (Server)".

A `[[rival]]` says that the table `source` prints a `defense` (at `when`) as better than another one, `than` (at
`than_when`), by `metrics`: each pair of numbers of the same row, the defense's the better one, is a claim to be better.
For a claim without numbers, a `[[table]]` has `than`: `defense`, perhaps `when`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import TypeAdapter, ValidationError

from ppbench.base.errors import UsageError
from ppbench.base.registry import Plugin, find, load_all
from ppbench.base.toml_files import tomllib

ConditionValue = bool | int | float | str
NamedValues = tuple[tuple[str, ConditionValue], ...]
Conditions = tuple[tuple[str, ConditionValue | tuple[ConditionValue, ...]], ...]
"""Parameters by name, each with its required value, or with several allowed ones."""


def allowed(value: ConditionValue | tuple[ConditionValue, ...]) -> tuple[ConditionValue, ...]:
    """Return the allowed values of a condition."""
    return value if isinstance(value, tuple) else (value,)


About = Literal["privacy", "utility", "cost"]
Need = Literal["dataset", "model", "family", "clients", "partition", "epochs", "batch_size", "batch", "steps"]
TRAINING_NEEDS: tuple[Need, ...] = ("dataset", "model", "clients", "partition", "epochs")
QUALITY_METRICS = ("accuracy", "accuracy_top5", "dice", "mse")
"""Metrics of a model's quality."""
LEAK_METRICS = (
    *("psnr_median", "test_mse_mean", "feat_mse_mean", "asr", "agreement", "epsilon", "statement"),
    *("cap_reconstruction", "cap_label", "cap_tracing"),
)
"""Metrics of what leaks; a "statement" has no figure."""
REBUILT_METRICS = ("psnr_median", "test_mse_mean", "feat_mse_mean")
"""Measures of one and the same reconstruction."""
NEEDS: dict[str, tuple[Need, ...]] = {
    **dict.fromkeys(QUALITY_METRICS, TRAINING_NEEDS),
    **dict.fromkeys(("psnr_median", "test_mse_mean", "feat_mse_mean", "asr"), ("dataset", "model")),
    **dict.fromkeys(("cap_reconstruction", "cap_label", "cap_tracing"), ("dataset", "model", "batch")),
    "accuracy_rises": ("dataset",),
    "upload_ratio": ("clients",),
    "bytes_saving": ("model", "clients"),
    "memory_ratio": ("dataset", "model", "batch_size"),  # of the data set only the size of an image
}
"""The premise of a claim by its metric, unless the claim names its own. What a paper leaves open is not part of it."""
SMALLER_IS_BETTER = frozenset({"asr", "psnr_median", "agreement", "mse", "epsilon", "memory_ratio", "upload_ratio"})
"""Metrics of which smaller values are better, besides ratios of cost and seconds."""
COMPARISON_NEEDS: tuple[Need, ...] = ("dataset", "model", "batch")
"""The premise of a claim to be better than another defense: both are trained alike here, for the paper's epochs or
not. Claims about a model's quality also need the paper's epochs: early in training the faster learner is ahead.
"""


METRIC_NAMES = {
    "asr": "ASR",
    "psnr_median": "PSNR",
    "mse": "MSE",
    "accuracy_top5": "Top-5 accuracy",
    "dice": "Dice",
    "bytes_saving": "saved bytes",
    "accuracy_gain": "accuracy more than undefended by",
    "test_mse_mean": "Test-MSE",
    "feat_mse_mean": "Feat-MSE",
}
RATIO_WORDS = {
    "upload_ratio": "times the undefended upload",
    "memory_ratio": "times an undefended client's peak memory",
    "client_cost_ratio": "times an undefended client's time",
    "training_cost_ratio": "times an undefended client's time, without drawing noise",
    "client_backward_ratio": "times the time of its backward passes",
    "client_forward_ratio": "times the time of its forward passes",
    "server_cost_ratio": "times an undefended server's time",
    "server_update_ratio": "times the time of its updates",
    "epoch_cost_ratio": "times an undefended epoch's time",
    "time_to_accuracy_ratio": "times the undefended time to the same accuracy",
}


@dataclass(frozen=True)
class Rival:
    """Another defense that a paper compares with its own. when: its parameters; value: as printed, None: a property."""

    defense: str
    value: float | None = None
    when: Conditions = ()


@dataclass(frozen=True)
class Claim:
    """A number that a paper prints about its defense, or a property that it states without a number, with its premise.

    Attributes:
        metric: "cap_reconstruction", "cap_label", "cap_tracing"; "asr" (of membership attacks on the model that clients
            train); "psnr_median" (of the server's reconstructions); "agreement" (with the true model's decisions, by an
            adversary that has the model that clients train); "accuracy", "accuracy_top5", "dice", "mse", "epsilon";
            "accuracy_rises" (with the control parameter); relative to undefended: "upload_ratio" (bytes up),
            "bytes_saving" (share of a round's bytes, both ways), "memory_ratio" (a client's peak),
            "client_cost_ratio", "training_cost_ratio" (without drawing noise), "client_backward_ratio" (its time).
        value: as printed; shares in [0, 1]. None for a property, then `note` states it.
        batch: of the victims, None if the paper names none.  source: the table or the place in the paper.
        when, options: parameters (name, value) of the defense and of the model for which it holds; `when` may have
            several values.
        clients: None for any.  partition: "iid", "imbalanced" or "dirichlet", with or without ":0.3"; "" for any.
        family: kind of network, of `NETWORK_FAMILIES`; "" for any.
        epochs: local epochs of a client's training in total.  batch_size: of training.  steps: least number of
            mini-batches in an attacked upload.
        lr, optimizer: of training, for the reader.  grid: control values of a CAP; empty: the defense's "paper" grid.
        needs: the fields that a record must share with the claim; None: by the metric (`NEEDS`).
        undefended: the paper's number for the undefended model.  setting: the set-up in words.
        views: threat models of the claim, with their versions; empty: the server.
        attack: our name of the paper's attack, "" if ppbench does not have it.
        fact: what the claim is a part of where that is more than its row in its table ("" for that row).
        repeats: where the same fact is claimed already, in words.
        apart: why only who has its data, or nobody at all, can judge it: a clause.
        counted: the same cost without a clock (passes, ciphertexts), in words.  caveat: what a reader of the verdict
            must know of the premise, a sentence.  scale: the factor from our unit to the paper's.
        central: whether it is among the paper's central claims.  baseline: whether it is a figure that the paper
            prints of another defense, for comparison, and no claim.
        than: the defense that this one is claimed to beat, by the same metric; None: no comparison.
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
    options: NamedValues = ()
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
    fact: str = ""
    repeats: str = ""
    apart: str = ""
    counted: str = ""
    caveat: str = ""
    scale: float = 1.0
    central: bool = False
    baseline: bool = False

    @property
    def about(self) -> About:
        """Whether it is about what leaks, what the model is good for, or what it costs."""
        if self.metric in LEAK_METRICS:
            return "privacy"
        return "utility" if self.metric in (*QUALITY_METRICS, "accuracy_gain", "accuracy_rises") else "cost"

    @property
    def table(self) -> str:
        """The source without the part of it: "Table 1" of "Table 1 (Server)"."""
        return self.source.partition(" (")[0]

    @property
    def part(self) -> str:
        """The part of the source, "" for all of it: "Server" of "Table 1 (Server)"."""
        return self.source.partition(" (")[2].removesuffix(")")

    @property
    def premise(self) -> tuple[Need, ...]:
        """The fields that a record must share with the claim to be compared with it."""
        if self.needs is not None:
            return self.needs
        if self.than is None:
            return NEEDS.get(self.metric, ())
        return (*COMPARISON_NEEDS, "epochs") if self.metric in QUALITY_METRICS else COMPARISON_NEEDS

    @property
    def text(self) -> str:
        """The claim in words: "ASR 50.3% (72.0% undefended)"."""
        if self.value is None:
            return self.note
        if self.metric in RATIO_WORDS:
            text = f"{self.value:.3g} {RATIO_WORDS[self.metric]}"
        elif self.metric.startswith("cap_"):
            about = f"{self.metric.removeprefix('cap_')}, {self.dataset}, batch {self.batch}"
            text = f"CAP {self.value:.2f} ({about})"
        else:
            text = f"{METRIC_NAMES.get(self.metric, self.metric)} {figure_of(self.metric, self.value)}"
        if self.than is not None and self.than.value is not None:
            other = " ".join([self.than.defense, *equations(self.than.when)])
            return f"{text}, better than {other}: {figure_of(self.metric, self.than.value)}"
        beside = "" if self.undefended is None else f" ({figure_of(self.metric, self.undefended)} undefended)"
        return text + beside + (f" [{self.note}]" if self.note else "")


@dataclass(frozen=True)
class Paper:
    """The claims of one paper.

    tables: (defense, claim), in the order of the file; own: the defenses that it proposes, all where it is empty;
    name: the proposed one's, in short; link: where to read it; says: its central claim, a sentence; across: (table,
    field of a claim that goes across it). All but the first two are "" or () where the file does not say.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    citation: str
    tables: tuple[tuple[str, Claim], ...]
    own: tuple[str, ...] = ()
    name: str = ""
    title: str = ""
    authors: str = ""
    link: str = ""
    says: str = ""
    across: tuple[tuple[str, str], ...] = ()

    def claims(self, defense: str) -> tuple[Claim, ...]:
        """Return the claims about a defense, in the order of the file."""
        return tuple(claim for name, claim in self.tables if name == defense)


def read_paper(path: Path) -> Paper:
    """Return the paper in the file `path` (UsageError: unreadable, or an invalid claim, named by table and row)."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise UsageError(f"{path} cannot be read as the TOML of a paper's claims: {cause}.") from cause
    tables, rivals = data.pop("table", None), data.pop("rival", [])
    if not (isinstance(data.get("citation"), str) and isinstance(tables, list) and isinstance(rivals, list)):
        raise UsageError(f"{path} must hold a citation and [[table]]s, perhaps [[rival]]s.")
    claims = [pair for table in tables for pair in _claims(path, table)]
    try:
        paper = _PAPER.validate_python({**_paired(data), "tables": ()})
    except ValidationError as cause:
        raise UsageError(f"{path}: {_problems(cause)}.") from cause
    others = {name for name, _ in claims if paper.own and name not in paper.own}
    own = [(name, replace(claim, baseline=name in others and claim.value is not None)) for name, claim in claims]
    return replace(paper, tables=(*own, *(pair for rival in rivals for pair in _compared(path, rival, claims))))


def _claims(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, Claim]]:
    common = {key: value for key, value in table.items() if key not in ("columns", "rows")}
    columns, rows = table.get("columns", []), table.get("rows", [[]])
    for number, row in enumerate(rows, 1):
        place = f"{path.name}, table of source {table.get('source', '?')!r}, row {number}"
        if len(row) != len(columns):
            raise UsageError(f"{place}: {len(row)} values for {len(columns)} columns.")
        fields = {**_DEFAULTS, **common, **dict(zip(columns, row, strict=True))}
        try:
            yield fields.pop("defense"), _CLAIM.validate_python(_normalized(fields))
        except KeyError as cause:
            raise UsageError(f"{place}: there is no field {cause}.") from cause
        except ValidationError as cause:
            raise UsageError(f"{place}: {_problems(cause)}.") from cause


def _compared(path: Path, table: Mapping[str, Any], claims: Sequence[tuple[str, Claim]]) -> Iterator[tuple[str, Claim]]:
    """Yield the claims to be better of a [[rival]], from the numbers in one table of the paper."""
    try:
        rival = _RIVALRY.validate_python(_paired(dict(table)))
    except ValidationError as cause:
        raise UsageError(f"{path.name}, rival of source {table.get('source', '?')!r}: {_problems(cause)}.") from cause
    claims_there = [(d, c) for d, c in claims if c.source == rival.source and c.metric in rival.metrics]
    own = [c for d, c in claims_there if d == rival.defense and set(rival.when) <= set(c.when)]
    others = {_row_of(c): c for d, c in claims_there if d == rival.than and set(rival.than_when) <= set(c.when)}
    pairs = [(c, others[_row_of(c)]) for c in own if _row_of(c) in others]
    if not pairs:
        pair = f"{rival.defense} beside {rival.than}, source {rival.source!r}"
        raise UsageError(f"{path.name}, rival: no table prints {pair}; name what both have a claim of.")
    for claim, other in pairs:
        if other.value is not None and claim.value is not None and better(claim.metric, claim.value, other.value):
            than = Rival(rival.than, other.value, other.when)
            words = {
                name: getattr(rival, name) or getattr(claim, name) for name in ("note", "fact", "caveat", "counted")
            }
            yield rival.defense, replace(claim, than=than, central=rival.central, **words)


def figure_of(metric: str, value: float) -> str:
    """Return a value of a metric with its unit."""
    if metric in ("asr", "accuracy", "accuracy_top5", "accuracy_gain", "agreement", "dice", "bytes_saving"):
        return f"{value:.2%}"
    if metric.endswith("_seconds"):
        return f"{value:g} s"
    return {"psnr_median": f"{value:.2f} dB", "mse": f"{value:.3f}"}.get(metric, f"{value:.4g}")


def equations(pairs: Conditions) -> list[str]:
    """Return ["theta=0.3", "masks=ring32 or ring64"]."""
    return [f"{name}={' or '.join(map(value_word, allowed(value)))}" for name, value in pairs]


def value_word(value: ConditionValue | None) -> str:
    """Return a parameter's value as a condition shows it."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def better(metric: str, one: float, other: float) -> bool:
    """Return whether the value `one` of a metric is strictly better than `other`."""
    small = metric in SMALLER_IS_BETTER or metric.endswith(
        ("_cost_ratio", "_backward_ratio", "_accuracy_ratio", "_seconds")
    )
    return one < other if small else one > other


def _row_of(claim: Claim) -> tuple[object, ...]:
    """Return the key of a claim's row: numbers with equal keys are printed beside each other."""
    return claim.metric, claim.dataset, claim.model, claim.batch, claim.clients, claim.options, claim.partition


def _paired(fields: dict[str, Any]) -> dict[str, Any]:
    """Return `fields` with tables as pairs of name and value, those within `than` included."""
    paired = {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in fields.items()}
    return {**paired, "than": _paired(fields["than"])} if isinstance(fields.get("than"), dict) else paired


def _problems(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())


def _normalized(fields: dict[str, Any]) -> dict[str, Any]:
    fields = {**fields, "setting": fields.get("setting", "").format(**fields)}
    fields.pop("where", None)
    match fields["value"]:
        case [int() | float() as printed, int() | float() as beside] if beside:
            fields["value"] = printed / beside
    return _paired(fields)


@dataclass(frozen=True)
class _Rivalry:
    """A [[rival]]: the table `source` prints a defense as better than another, by these metrics."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    source: str
    defense: str
    than: str
    metrics: tuple[str, ...]
    when: Conditions = ()
    than_when: Conditions = ()
    note: str = ""
    fact: str = ""
    caveat: str = ""
    counted: str = ""
    central: bool = False


_RIVALRY = TypeAdapter(_Rivalry)
_CLAIM = TypeAdapter(Claim)
_PAPER = TypeAdapter(Paper)
_DEFAULTS: Mapping[str, Any] = {"dataset": "", "model": "", "batch": None, "value": None}


# -- Papers' claims found by the name of a defense; no defense knows what its paper prints --
# Those about ppbench's own defenses lie in `papers/`, one file per paper. Those about another package's defense lie
# beside its module, in files whose names end in "claims.toml". `ppbench/claims/claim.py` describes the format.

PAPERS = Path(__file__).with_name("papers")


@lru_cache
def papers_of(defense: str) -> tuple[Paper, ...]:
    """Return the papers with claims about a defense; () without any, or where it is not installed.

    A file that cannot be read is left out with a warning.
    """
    try:
        plugin = find("defenses", defense)
        known = None if plugin is None else plugin.loaded
    except UsageError:  # records of a broken plugin stay readable
        return ()
    if plugin is None:
        return ()
    files = PAPERS.glob("*.toml") if plugin.ours else _beside(plugin)
    papers = tuple(paper for file in sorted(files) if (paper := _paper(file)) and paper.claims(defense))
    stated = () if papers else _stated(plugin, getattr(known, "claimed", ()))
    return (Paper(plugin.words, tuple((defense, claim) for claim in stated)),) if stated else papers


def claims_of(defense: str) -> tuple[Claim, ...]:
    """Return the claims about a defense, in the order of its papers; () without any, or where it is not installed."""
    return tuple(claim for paper in papers_of(defense) for claim in paper.claims(defense))


def claimed_by_all() -> dict[str, tuple[Claim, ...]]:
    """Return the claims of every installed defense that has any, by its name."""
    return {name: claims for name in load_all("defenses") if (claims := claims_of(name))}


def _beside(plugin: Plugin) -> Iterable[Path]:
    """Return the files of claims beside a plugin's module."""
    file = getattr(sys.modules.get(plugin.module), "__file__", None)
    return () if file is None else Path(file).parent.glob("*claims.toml")


@lru_cache
def _paper(file: Path) -> Paper | None:
    try:
        return read_paper(file)
    except UsageError as cause:
        warnings.warn(f"{str(cause).rstrip('.')}; the claims in it are left out.", stacklevel=2)
        return None


def _stated(plugin: Plugin, claimed: object) -> tuple[Claim, ...]:
    """Return the claims in the class itself, as plugins stated them before claims were files."""
    if isinstance(claimed, tuple) and all(isinstance(claim, Claim) for claim in claimed):
        return claimed
    warnings.warn(
        f"{plugin.words} sets `claimed`, which is no tuple of claims; it is left out. Write a file "
        f"{plugin.name}.claims.toml beside its module.",
        stacklevel=2,
    )
    return ()
