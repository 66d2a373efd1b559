"""Messages to and from the process of a third-party attack: JSON, every value checked."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ppbench.base.registry import plugins
from ppbench.federation.threats import THREATS
from ppbench.records.scores import Scalar, Strict

ShortText = Annotated[str, Field(max_length=200)]
Values = Annotated[dict[ShortText, Scalar], Field(max_length=200)]
Hook = Literal["describe", "suits", "check_held", "crafted", "run"]


class AttackSetting(Strict):
    """One setting of an attack. values: its fields; parameters: its `parameters()`."""

    values: Values
    parameters: Values


class AttackFacts(Strict):
    """The declarations of an attack, see `Attack`, with its setting and its `variants`.

    own: whether it has its own `evidence`. holds: whether it has its own `check_held`. knows: the installed defenses
    whose mechanism it knows.
    """

    version: Annotated[str, Field(min_length=1, max_length=80)]
    kind: ShortText
    threats: Annotated[tuple[ShortText, ...], Field(min_length=1, max_length=20)]
    adaptive: bool
    targets: frozenset[ShortText] | None
    probes: Annotated[tuple[Literal["gradient", "local"], ...], Field(min_length=1)]
    standard: bool
    quick: bool
    contains: ShortText
    audit: Literal["", "references", "rounds", "clients"]
    reads_alone: bool
    reference: Annotated[str, Field(max_length=2000)]
    own: bool
    holds: bool
    needs_public: bool
    knows: frozenset[ShortText]
    setting: AttackSetting
    variants: Annotated[tuple[AttackSetting, ...], Field(min_length=1, max_length=100)]

    @field_validator("kind")
    @classmethod
    def _installed(cls, kind: str) -> str:
        if kind not in plugins("questions"):
            raise ValueError("no question of this name is installed")
        return kind

    @field_validator("threats")
    @classmethod
    def _known(cls, threats: tuple[str, ...]) -> tuple[str, ...]:
        if unknown_threats := [threat for threat in threats if threat not in THREATS]:
            raise ValueError(f"no threat model is called {unknown_threats[0][:40]!r}")
        return threats


class HookCall(Strict):
    """A call of a hook of the attack named `attack` with these `parameters`.

    evidence: whether to reply "unread" if the view has no evidence. device, threads: torch's. tf32: whether a GPU may
    compute in TF32.
    """

    hook: Hook
    attack: str
    parameters: dict[str, Scalar]
    evidence: bool = False
    device: str = "cpu"
    threads: int = 1
    tf32: bool = False


class Reply(Strict):
    """The answer to a call, besides tensors. refused: the sentence of a `UsageError`; unread: nothing could be read;
    plugin: the attack is to blame."""

    refused: Annotated[str, Field(max_length=4000)] = ""
    plugin: bool = False
    unread: bool = False
    suits: bool = False
    facts: AttackFacts | None = None
