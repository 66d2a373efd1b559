"""Records by the evaluation that they are of: suite, data, network, federation and seed; and what may be concluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS, Check, check_controls
from ppbench.report.page.boards import network
from ppbench.report.verdict import sentences

ALONE = "evaluate/1"
"""The suite of an evaluation that nobody's suite asked for; not worth a word."""


def evaluation_of(record: Record) -> str:
    """Return the evaluation that a record is of: a line that says it in words, and what else tells it from others."""
    config = record.config
    model, fed = network(config.model.id, config.model.options), config.federation
    suite = "" if config.suite == ALONE else f"{config.suite}: "
    data = f"{suite}{config.data.name}, {config.data.train} examples"
    about = f"{data}, {model}, {fed.clients} clients, {fed.rounds} rounds, seed {config.seed}"
    parts = (config.data, config.model, config.federation)
    return "\n".join([" ".join(about.split()), *(part.model_dump_json() for part in parts)])


def evaluations(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the records by suite, data, network, federation and seed, which a key's first line says."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(evaluation_of(record), []).append(record)
    return found


@dataclass(frozen=True)
class Said:
    """A sentence on a defense. about: the evaluation that it is of, "" where there is one only."""

    defense: str
    about: str
    sentence: str


@dataclass(frozen=True)
class Judged:
    """One evaluation.

    Attributes:
        key: as `evaluation_of`.
        records: its cells.
        checks: what its controls say.
        sound: whether the harness's self-test passed.
    """

    key: str
    records: tuple[Record, ...]
    checks: tuple[Check, ...]
    sound: bool

    @property
    def about(self) -> str:
        """The evaluation in words."""
        return self.key.partition("\n")[0]

    @property
    def reliable(self) -> bool:
        """Whether all controls ran and hold, and the self-test passed."""
        return self.sound and all(check.ok is True for check in self.checks)


def judged(records: Sequence[Record], sound: bool = True) -> list[Judged]:
    """Return every evaluation in `records` with what its controls say.

    Args:
        records: every cell, in any order.
        sound: whether the harness's self-test passed (`ppbench.run.selftest`); else nothing may be concluded.
    """
    groups = evaluations(records)
    return [Judged(key, tuple(some), tuple(check_controls(some)), sound) for key, some in groups.items()]


def said(found: Sequence[Judged]) -> list[Said]:
    """Return what was found in each evaluation about each defense, sentence by sentence; nothing where controls fail.

    The sentences are those of `ppbench evaluate`: of the defense's records and the controls'.
    """
    told: list[Said] = []
    for one in found:
        about = one.about if len(found) > 1 else ""
        by: dict[str, list[Record]] = {}
        for record in one.records if one.reliable else ():
            by.setdefault(record.config.defense.id, []).append(record)
        vouching = [record for control in CONTROLS for record in by.pop(control, [])]
        for name in sorted(by):
            told += [Said(name, about, sentence) for sentence in sentences(name, [*vouching, *by[name]])]
    return told


def concluded(found: Sequence[Judged]) -> tuple[tuple[Check, ...], tuple[str, ...]]:
    """Return the checks of all evaluations and the sentences that stand, each with its evaluation if there are several.

    A sentence names its defense where its evaluation has several.
    """
    return checks_of(found), tuple(verdict_of(said(found)))


def checks_of(found: Sequence[Judged]) -> tuple[Check, ...]:
    """Return the checks of all evaluations, each with its evaluation if there are several."""
    if len(found) == 1:
        return found[0].checks
    return tuple(replace(c, sentence=f"[{one.about}] {c.sentence}") for one in found for c in one.checks)


def verdict_of(told: Sequence[Said]) -> list[str]:
    """Return sentences that stand by themselves: with the evaluation and the defense where there are several."""
    defenses: dict[str, set[str]] = {}
    for one in told:
        defenses.setdefault(one.about, set()).add(one.defense)
    found = []
    for one in told:
        named = len(defenses[one.about]) == 1 or one.sentence.startswith((f"{one.defense} ", f"{one.defense}:"))
        about = f"[{one.about}] " if one.about else ""
        found.append(f"{about}{'' if named else f'{one.defense}: '}{one.sentence}")
    return found
