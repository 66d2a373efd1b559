"""What a process that holds a stranger's attack tells of it, and what it is asked: JSON, every value checked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ppbench.base.registry import plugins
from ppbench.federation.threats import THREATS
from ppbench.records.scores import Scalar, Strict

Word = Annotated[str, Field(max_length=200)]
Values = Annotated[dict[Word, Scalar], Field(max_length=200)]
Hook = Literal["describe", "suits", "check_held", "crafted", "run"]


class Setting(Strict):
    """One setting of an attack. values: its fields; told: its `parameters()`."""

    values: Values
    told: Values


class Facts(Strict):
    """What an attack declares, as `Attack` has it, with one setting of it and the `variants` that are tried.

    own: whether it makes evidence itself. holds: whether it refuses knowledge of clients' data (`check_held`). knows:
    the installed defenses that it knows.
    """

    version: Annotated[str, Field(min_length=1, max_length=80)]
    kind: Word
    threats: Annotated[tuple[Word, ...], Field(min_length=1, max_length=20)]
    adaptive: bool
    targets: frozenset[Word] | None
    probes: Annotated[tuple[Literal["gradient", "local"], ...], Field(min_length=1)]
    standard: bool
    quick: bool
    contains: Word
    audit: Literal["", "references", "rounds", "clients"]
    reads_alone: bool
    reference: Annotated[str, Field(max_length=2000)]
    own: bool
    holds: bool
    needs_public: bool
    knows: frozenset[Word]
    setting: Setting
    variants: Annotated[tuple[Setting, ...], Field(min_length=1, max_length=100)]

    @field_validator("kind")
    @classmethod
    def _installed(cls, kind: str) -> str:
        if kind not in plugins("questions"):
            raise ValueError("no question of this name is installed")
        return kind

    @field_validator("threats")
    @classmethod
    def _known(cls, threats: tuple[str, ...]) -> tuple[str, ...]:
        if strange := [threat for threat in threats if threat not in THREATS]:
            raise ValueError(f"no threat model is called {strange[0][:40]!r}")
        return threats


class Ask(Strict):
    """What such a process is asked: a hook of the attack called `attack` with its `parameters`.

    evidence: whether there is nothing to say where nothing can be read. device, threads: of torch. tf32: whether a GPU
    may compute with it.
    """

    hook: Hook
    attack: str
    parameters: dict[str, Scalar]
    evidence: bool = False
    device: str = "cpu"
    threads: int = 1
    tf32: bool = False


class Reply(Strict):
    """What such a process answers, besides tensors. refused: the sentence of a `UsageError`, unread: that nothing could
    be read, plugin: that the attack is to blame."""

    refused: Annotated[str, Field(max_length=4000)] = ""
    plugin: bool = False
    unread: bool = False
    suits: bool = False
    facts: Facts | None = None
