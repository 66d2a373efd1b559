"""The outcome of the self-test where cells were last computed: OUT/selftest.json, beside the records."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from ppbench.base.errors import UsageError
from ppbench.base.files import write_atomic
from ppbench.records.schema import Strict
from ppbench.records.store import Store, canonical_json

SELFTEST = "selftest.json"
FALLEN = 0.5
"""Share of a network's victims that must be rebuilt."""


class SelftestTrial(Strict):
    """An undefended network under an attack that must break it. share: of victims above 20 dB; error: "" if it ran."""

    model: str
    attack: str
    share: float = Field(ge=0, le=1)
    error: str = ""

    @property
    def fell(self) -> bool:
        """Whether the attack broke the network."""
        return self.share >= FALLEN

    def __str__(self) -> str:
        """Return it in words."""
        error = f" ({self.error})" if self.error else ""
        return f"{self.attack} breaks {self.share:.0%} of an undefended {self.model}{error}"


class Soundness(Strict):
    """The outcome of a self-test, with versions; code: digest over the sources, as in sources.json."""

    schema_: Literal["ppbench.selftest/1"] = Field(default="ppbench.selftest/1", alias="schema")
    ppbench: str
    code: str
    torch: str
    python: str
    trials: list[SelftestTrial] = Field(min_length=1)


def save_soundness(out: Path, outcome: Soundness) -> None:
    """Keep the outcome in the results folder `out`, whole or not at all. Raises UsageError: it cannot be written."""
    write_atomic(out / SELFTEST, canonical_json(outcome))


def soundness_of(store: Store) -> Soundness | None:
    """Return the outcome kept in a folder, None for an older ppbench; UsageError: the file is damaged."""
    try:
        return Soundness.model_validate_json(store.files.read(SELFTEST), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        advice = "delete it, and evaluate or sweep into the folder again"
        raise UsageError(f"{store.out / SELFTEST} holds no outcome of a self-test; {advice}.") from cause
