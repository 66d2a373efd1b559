"""Scores of single victims, as records keep them: from these every aggregate can be computed again.

What a score holds is its question's to say (`ppbench.questions`), found by the word `kind`; the scores of a question
that is not installed here are kept as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, field_validator
from pydantic_core import CoreSchema, core_schema

from ppbench.base.registry import load_all

Scalar = str | int | float | bool | None


class Strict(BaseModel):
    """Frozen, refuses unknown fields and NaN."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Score(Strict):
    """One victim's score. kind: the word that names its class; index: its place in what was asked."""

    kind: str
    index: int

    @property
    def place(self) -> tuple[int, ...]:
        """Which victim it is, among those of its cell."""
        return (self.index,)

    @property
    def unit(self) -> tuple[int, ...]:
        """What it was observed with: victims of one unit are not independent."""
        return (self.index,)

    @property
    def stratum(self) -> tuple[int, bool]:
        """Victims are drawn anew within it: of candidates their half and whether they are members."""
        return 0, False

    @property
    def canary(self) -> bool:
        """Whether it is no record of the data, but one that was made to be found."""
        return False


class ProbedScore(Score):
    """A victim of a probe. probe, client: its slot; index: the place in the slot's batch.

    cohort: whether one observation mixed all clients of the probe; then the probe is the independent unit.
    """

    probe: int
    client: int
    cohort: bool = False

    @property
    def place(self) -> tuple[int, ...]:
        """Probe, client and place in the batch."""
        return self.probe, self.client, self.index

    @property
    def unit(self) -> tuple[int, ...]:
        """Probe and client, or (probe, -1) for a whole cohort."""
        return self.probe, -1 if self.cohort else self.client


class OtherScore(Score):
    """The score of a question that is not installed here: its fields as they were written."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    index: int = -1

    @field_validator("kind")
    @classmethod
    def _unknown(cls, word: str) -> str:
        if word in score_types():
            raise ValueError(f"a score of kind {word!r} has other fields")
        return word


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
