"""Scores of single victims, as records keep them: from these every aggregate can be computed again.

The question (`ppbench.questions`) defines the fields of its scores; `kind` names the class. Scores of a question that
is not installed here are kept as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from ppbench.base.registry import load_all

MAX_WHOLE = 2**63 - 1
"""Largest whole number on record: what 64 bits hold."""
Whole = Annotated[int, Field(ge=-MAX_WHOLE, le=MAX_WHOLE)]
Count = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
AtLeastOne = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0)]
"""Types of numbers on record: whole, >= 0, >= 1, in [0, 1], >= 0; all finite."""
Scalar = str | Whole | float | bool | None


class Strict(BaseModel):
    """Frozen, refuses unknown fields and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def agrees(self, other: Strict) -> bool:
        """Return whether both are equal."""
        return self == other


def without_defaults(dumped: dict[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return `dumped` without the fields `later` at these values, so that names of older cells and trainings stay."""
    return {name: value for name, value in dumped.items() if name not in later or value != later[name]}


class Grown(Strict):
    """A form with fields added later. LATER: these, each with the value at which it is not written."""

    LATER: ClassVar[Mapping[str, Any]] = {}

    def agrees(self, other: Strict) -> bool:
        """Return whether both are equal, apart from figures of `LATER` that one of them lacks, as older records do."""
        return type(self) is type(other) and all(self._is_alike(other, name) for name in type(self).model_fields)

    def _is_alike(self, other: Strict, name: str) -> bool:
        one, two = getattr(self, name), getattr(other, name)
        if isinstance(one, Strict) and isinstance(two, Strict):
            return one.agrees(two)
        return bool(one == two) or (self.LATER.get(name, 0) is None and None in (one, two))

    @model_serializer(mode="wrap")
    def _older(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return without_defaults(dump(self), self.LATER)


class Score(Strict):
    """One victim's score. kind: the word that names its class; index: its place in the question."""

    kind: str
    index: Count

    @property
    def place(self) -> tuple[int, ...]:
        """The victim's key within its cell."""
        return (self.index,)

    @property
    def truth(self) -> tuple[int | str, ...]:
        """The facts about the victim, independent of the answer: the same in all cells that ask about it."""
        return ()

    @property
    def unit(self) -> tuple[int, ...]:
        """The unit of observation: victims of one unit are not independent."""
        return (self.index,)

    @property
    def slot(self) -> tuple[int, int] | None:
        """Probe and client of the observation; None if no client was probed for it alone."""
        return None

    @property
    def stratum(self) -> tuple[int, bool]:
        """The stratum of resampling: for candidates, their half and whether they are members."""
        return 0, False

    @property
    def canary(self) -> bool:
        """Whether the victim is an inserted canary, not a record of the data."""
        return False


class ProbedScore(Score):
    """A victim of a probe. probe, client: its slot; index: the place in the slot's batch.

    cohort: whether one observation mixed all clients of the probe; then the probe is the independent unit.
    """

    probe: Count
    client: Count
    cohort: bool = False

    @property
    def place(self) -> tuple[int, ...]:
        """Probe, client and place in the batch."""
        return self.probe, self.client, self.index

    @property
    def slot(self) -> tuple[int, int]:
        """Probe and client."""
        return self.probe, self.client

    @property
    def unit(self) -> tuple[int, ...]:
        """Probe and client, or (probe, -1) for a whole cohort."""
        return self.probe, -1 if self.cohort else self.client


class OtherScore(Score):
    """The score of a question that is not installed here: its fields as they were written."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    index: Whole = -1

    @field_validator("kind")
    @classmethod
    def _unknown(cls, word: str) -> str:
        if word in score_types():
            raise ValueError(f"a score of kind {word!r} has other fields")
        return word

    @model_validator(mode="after")
    def _finite(self) -> OtherScore:
        for name, value in (self.model_extra or {}).items():
            if not _in_range(value):
                raise ValueError(f"{name} holds a number that is not finite, or a whole one beyond 64 bits")
        return self


def _in_range(value: Any) -> bool:
    """Return whether all numbers in a JSON value are finite, and whole ones fit into 64 bits."""
    if isinstance(value, dict | list):
        return all(map(_in_range, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= MAX_WHOLE


def word_of(score: type[Score]) -> str:
    """Return the word that names a class of scores in records."""
    return str(score.model_fields["kind"].default)


@cache
def score_types() -> dict[str, type[Score]]:
    """Return the classes of scores of all questions that are installed, by the word that names them."""
    return {word_of(question.score): question.score for question in load_all("questions").values()}


class _ByQuestion:
    """Validates a score as the class that its word names."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        known = {word: handler.generate_schema(score) for word, score in score_types().items()}
        by_word, other = core_schema.tagged_union_schema(known, "kind"), handler.generate_schema(OtherScore)
        return core_schema.union_schema([(by_word, "score"), (other, "other")], mode="left_to_right")


Victim = Annotated[Score, _ByQuestion]
