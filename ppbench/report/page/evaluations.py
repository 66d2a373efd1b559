"""Records by the evaluation that they are of: suite, data, network, federation and seed; and what may be concluded."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ppbench.base.errors import count_of
from ppbench.records.schema import Record, Scalar
from ppbench.report.controls import CONTROLS, Check, check_controls
from ppbench.report.frame import EVALUATION, Frame, Key, frame_of
from ppbench.report.verdict import verdicts
from ppbench.report.verdict.verdict import Verdict

ALONE = "evaluate/1"
"""The suite of an evaluation that nobody's suite asked for; not worth a word."""


def about(key: Key) -> str:
    """Return an evaluation in words."""
    fed = json.loads(key.federation)
    suite = "" if key.suite == ALONE else f"{key.suite}: "
    public = f", {key.public} public" if key.public else ""
    data = f"{suite}{key.data}, {key.train} examples{public}"
    parties, rounds = count_of(fed["clients"], "client"), count_of(fed["rounds"], "round")
    seed = "" if key.seed is None else f", seed {key.seed}"  # None: of all seeds
    words = f"{data}, {key.network}, {parties}, {rounds}{seed}"
    return " ".join(words.split())


def abouts(keys: Iterable[Key]) -> dict[Key, str]:
    """Return evaluations in words; those that would read alike say in what they differ."""
    words: dict[str, list[Key]] = {}
    for key in keys:
        words.setdefault(about(key), []).append(key)
    titles: dict[Key, str] = {}
    for text, alike in words.items():
        more = differences(alike)
        for number, key in enumerate(sorted(alike, key=Key.text), start=1):
            other = more[key] or (f"the {number}. of {len(alike)} data sets or suites of these names")
            titles[key] = text if len(alike) == 1 else f"{text}, {other}"
    return titles


def differences(rows: Sequence[Key]) -> dict[Key, str]:
    """Return each key's values of what differs among them, as "families=shared, seed 1", "" where nothing does.

    Parameters are compared among the keys of one defense; neither the defense nor its control value is told.
    """
    seen: dict[tuple[str, str], set[Scalar]] = defaultdict(set)
    values_of = {key: _values(key) for key in rows}
    for some in values_of.values():
        for name, value in some.items():
            seen[name].add(value)
    return {
        key: ", ".join(_word(name[1], value) for name, value in some.items() if len(seen[name]) > 1)
        for key, some in values_of.items()
    }


def _values(key: Key) -> dict[tuple[str, str], Scalar]:
    """Return what may differ by (defense, name); ("", name) for what all defenses have."""
    mine = {**json.loads(key.parameters), "version": key.version}
    shared = json.loads(key.federation) | ({} if key.seed is None else {"seed": key.seed})
    own = {(key.defense, name): value for name, value in mine.items()}
    return own | {("", name): str(v) if isinstance(v, list) else v for name, v in shared.items()}


def _word(name: str, value: Scalar) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"seed {text}" if name == "seed" else f"{name}={text}"


@dataclass(frozen=True)
class Said:
    """A sentence on a defense, of its verdict. about: the evaluation that it is of, "" where there is one only."""

    defense: str
    about: str
    sentence: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Judged:
    """One evaluation, by `EVALUATION` and in words, its cells and checks; sound: whether the self-test passed."""

    key: Key
    about: str
    records: Frame
    checks: tuple[Check, ...]
    sound: bool

    @property
    def reliable(self) -> bool:
        """Whether all controls ran and hold, and the self-test passed."""
        return self.sound and all(check.ok is True for check in self.checks)


def judged(records: Sequence[Record], sound: bool = True) -> list[Judged]:
    """Return every evaluation, seeds in order, with what its controls say; sound: of the harness's self-test."""
    groups = frame_of(records).by(EVALUATION)
    words = abouts(groups)
    order = sorted(groups, key=lambda key: (about(replace(key, seed=None)), key.seed or 0, key.text()))
    return [Judged(key, words[key], groups[key], tuple(check_controls(groups[key])), sound) for key in order]


def said(evaluations: Sequence[Judged]) -> list[Said]:
    """Return the sentences of `ppbench evaluate` on each defense of each evaluation; none where controls fail."""
    sentences: list[Said] = []
    for one in evaluations:
        words = one.about if len(evaluations) > 1 else ""
        by: dict[str, list[Record]] = {}
        for record in one.records if one.reliable else ():
            by.setdefault(record.config.defense.id, []).append(record)
        vouching = [record for control in CONTROLS for record in by.pop(control, [])]
        for name in sorted(by):
            about_it = verdicts(name, one.records.of([*vouching, *by[name]]))
            sentences += [Said(name, words, verdict.sentence, verdict) for verdict in about_it]
    return sentences


def checks_of(evaluations: Sequence[Judged]) -> tuple[Check, ...]:
    """Return the checks of all evaluations, each with its evaluation if there are several."""
    if len(evaluations) == 1:
        return evaluations[0].checks
    return tuple(replace(c, sentence=f"[{one.about}] {c.sentence}") for one in evaluations for c in one.checks)


def verdict_of(sentences: Sequence[Said]) -> list[str]:
    """Return sentences that stand by themselves: with the evaluation and the defense where there are several."""
    defenses: dict[str, set[str]] = {}
    for one in sentences:
        defenses.setdefault(one.about, set()).add(one.defense)
    lines = []
    for one in sentences:
        named = len(defenses[one.about]) == 1 or one.sentence.startswith((f"{one.defense} ", f"{one.defense}:"))
        words = f"[{one.about}] " if one.about else ""
        lines.append(f"{words}{'' if named else f'{one.defense}: '}{one.sentence}")
    return lines
