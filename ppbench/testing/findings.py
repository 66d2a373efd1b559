"""Findings of a battery: each property is checked by itself, and all failures are reported together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from ppbench.base.errors import unknown

T = TypeVar("T")
Property = Callable[[T], Iterator[str]]
"""Checks one property of a subject and yields a sentence per violation; may raise `Inconclusive` or `NotAsked`."""


class Inconclusive(Exception):
    """The check of the property is inconclusive; the message says why. No failure."""


class NotAsked(Exception):
    """The property does not apply to this subject; the message says why. No failure."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a property. sentence: what happened and what is right, or why there is no answer; "": it holds."""

    property: str
    outcome: Literal["holds", "fails", "inconclusive", "not asked"]
    sentence: str = ""

    def __str__(self) -> str:
        return f"{self.property}: {self.outcome}{f' ({self.sentence})' if self.sentence else ''}"


def ask(name: str, question: Property[T], subject: T) -> Finding:
    """Return the finding of `question` on `subject`; an exception of the subject's own code is a failure."""
    try:
        violations = list(dict.fromkeys(question(subject)))  # one sentence for what is wrong in two places
    except Inconclusive as reason:
        return Finding(name, "inconclusive", str(reason))
    except NotAsked as reason:
        return Finding(name, "not asked", str(reason))
    except Exception as error:  # noqa: BLE001 - the code under test may raise anything; reported with its place
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} was raised at {place.filename}:{place.lineno}: {error}"
        return Finding(name, "fails", f"{text}; a call that the contract allows must not fail")
    return Finding(name, "fails", " Also: ".join(violations)) if violations else Finding(name, "holds")


def ask_all(
    subject: T, properties: Mapping[str, Property[T]], only: Collection[str], skip: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Return the findings about `subject`; see `check_defense` for only and skip. UsageError: an unknown name."""
    for name in (*only, *skip):
        if name not in properties:
            raise unknown("property", name, properties)
    chosen = {name: question for name, question in properties.items() if not only or name in only}
    return tuple(
        Finding(name, "not asked", skip[name]) if name in skip else ask(name, question, subject)
        for name, question in chosen.items()
    )


def raise_failures(subject: str, findings: Collection[Finding]) -> None:
    """Raise AssertionError with a line for each failure, if there is one; subject: as "Defense 'dp'"."""
    failed = [finding for finding in findings if finding.outcome == "fails"]
    if failed:
        lines = "".join(f"\n- {finding.property}: {finding.sentence}." for finding in failed)
        raise AssertionError(f"{subject} breaks {len(failed)} of {len(findings)} properties:{lines}")


def unnamed(plugin: Any, parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield why records cannot hold an attack or a defense: its name, its class, its parameters."""
    if not isinstance(getattr(plugin, "name", None), str) or not plugin.name:
        yield "it has no name; set `name: ClassVar[str]`"
    if not plugin.__dataclass_params__.frozen:
        yield "it is no frozen dataclass; decorate it with @dataclass(frozen=True), for a view may carry it"
    for name, value in parameters.items():
        if not (value is None or isinstance(value, str | int | float | bool)):
            yield f"its parameter {name} is a {type(value).__name__}; records hold str, int, float, bool or None"
