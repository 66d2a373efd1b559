"""What a paper says about its own defense, as data: the table of claims sets records beside it.

A paper is a TOML file: its `citation`, and a `[[table]]` for each table or place in it, with fields of `Claim` and
`defense`, whose they are. Where some differ from claim to claim, `columns` names them and `rows` holds one list of them
a claim (docs/tutorial-defense.md has an example). `when` and `options` are tables of names and values. A `value` of two
numbers is their quotient. `setting` may name other fields in braces, and `where`, which is for that alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from ppbench.base.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Named = tuple[tuple[str, bool | int | float | str], ...]


@dataclass(frozen=True)
class Claim:
    """A number that a paper prints about its defense, or a property that it states without one.

    Attributes:
        metric: "cap_reconstruction", "cap_label", "cap_tracing"; "asr" (of membership attacks on what clients train
            on); "psnr_median" (of what the server rebuilds); "agreement" (with the true model's decisions, by who holds
            what clients train on); "accuracy", "accuracy_top5", "dice", "mse", "epsilon"; "accuracy_rises" (with the
            control parameter); beside the undefended: "upload_ratio" (bytes up), "bytes_saving" (share of a round's
            bytes,
            both ways), "memory_ratio" (a client's peak), "client_cost_ratio", "client_backward_ratio" (its time).
        value: as printed; shares in [0, 1]. None for a property, then `note` states it.
        batch: of the victims, None where the paper names none.  source: the table or the place in the paper.
        when, options: parameters (name, value) of the defense, and of the model, that it holds for.
        clients: None for any.  partition: "iid", "imbalanced" or "dirichlet", with or without ":0.3"; "" for any.
        undefended: what the paper prints for the undefended model beside it.  setting: its set-up in words.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    metric: str
    value: float | None
    dataset: str
    model: str
    batch: int | None
    source: str
    when: Named = ()
    clients: int | None = None
    options: Named = ()
    undefended: float | None = None
    setting: str = ""
    note: str = ""
    partition: str = ""


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
    tables, citation = data.get("table"), data.get("citation")
    if set(data) != {"citation", "table"} or not isinstance(citation, str) or not isinstance(tables, list):
        raise UsageError(f"{path} must hold a citation and [[table]]s, and nothing else.")
    return Paper(citation, tuple(pair for table in tables for pair in _claims(path, table)))


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
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in cause.errors())
            raise UsageError(f"{place}: {wrong}.") from cause


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    fields = {**fields, "setting": fields.get("setting", "").format(**fields)}
    fields.pop("where", None)
    match fields["value"]:
        case [int() | float() as printed, int() | float() as beside] if beside:
            fields["value"] = printed / beside
    return {key: tuple(value.items()) if isinstance(value, dict) else value for key, value in fields.items()}


_CLAIM = TypeAdapter(Claim)
_DEFAULTS: Mapping[str, Any] = {"dataset": "", "model": "", "batch": None, "value": None}
