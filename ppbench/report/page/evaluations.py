"""Records by evaluation (suite, data, network, federation and seed), and what may be concluded from each."""

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
"""The suite name of evaluations outside suites; left out of text."""


def evaluation_words(key: Key) -> str:
    """Return an evaluation in words."""
    fed = json.loads(key.federation)
    suite = "" if key.suite == ALONE else f"{key.suite}: "
    public = f", {key.public} public" if key.public else ""
    data = f"{suite}{key.data}, {key.train} examples{public}"
    parties, rounds = count_of(fed["clients"], "client"), count_of(fed["rounds"], "round")
    seed = "" if key.seed is None else f", seed {key.seed}"  # None: of all seeds
    words = f"{data}, {key.network}, {parties}, {rounds}{seed}"
    return " ".join(words.split())


def evaluation_titles(keys: Iterable[Key]) -> dict[Key, str]:
    """Return evaluations in words; equal texts get their differences appended."""
    words: dict[str, list[Key]] = {}
    for key in keys:
        words.setdefault(evaluation_words(key), []).append(key)
    titles: dict[Key, str] = {}
    for text, alike in words.items():
        more = key_differences(alike)
        for number, key in enumerate(sorted(alike, key=Key.text), start=1):
            other = more[key] or (f"the {number}. of {len(alike)} data sets or suites of these names")
            titles[key] = text if len(alike) == 1 else f"{text}, {other}"
    return titles


def key_differences(rows: Sequence[Key]) -> dict[Key, str]:
    """Return each key's values of the fields that differ, as "families=shared, seed 1"; "" where none do.

    Parameters are compared among the keys of one defense; defense and control value are left out.
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
    """Return a key's values by (defense, name); by ("", name) those that all defenses have."""
    mine = {**json.loads(key.parameters), "version": key.version}
    shared = json.loads(key.federation) | ({} if key.seed is None else {"seed": key.seed})
    own = {(key.defense, name): value for name, value in mine.items()}
    return own | {("", name): str(v) if isinstance(v, list) else v for name, v in shared.items()}


def _word(name: str, value: Scalar) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"seed {text}" if name == "seed" else f"{name}={text}"


@dataclass(frozen=True)
class DefenseSentence:
    """A sentence on a defense, with its verdict. about: its evaluation, "" where there is only one."""

    defense: str
    about: str
    sentence: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class JudgedEvaluation:
    """One evaluation: its key by `EVALUATION`, its words, cells and checks; sound: whether the self-test passed."""

    key: Key
    about: str
    records: Frame
    checks: tuple[Check, ...]
    sound: bool

    @property
    def reliable(self) -> bool:
        """Whether all controls ran and hold, and the self-test passed."""
        return self.sound and all(check.ok is True for check in self.checks)


def judged_evaluations(records: Sequence[Record], sound: bool = True) -> list[JudgedEvaluation]:
    """Return every evaluation with its checks, seeds in order; sound: whether the harness's self-test passed."""
    groups = frame_of(records).by(EVALUATION)
    words = evaluation_titles(groups)
    order = sorted(groups, key=lambda key: (evaluation_words(replace(key, seed=None)), key.seed or 0, key.text()))
    return [JudgedEvaluation(key, words[key], groups[key], tuple(check_controls(groups[key])), sound) for key in order]


def defense_sentences(evaluations: Sequence[JudgedEvaluation]) -> list[DefenseSentence]:
    """Return the sentences of `ppbench evaluate` on each defense of each evaluation; none where controls fail."""
    sentences: list[DefenseSentence] = []
    for one in evaluations:
        words = one.about if len(evaluations) > 1 else ""
        by: dict[str, list[Record]] = {}
        for record in one.records if one.reliable else ():
            by.setdefault(record.config.defense.id, []).append(record)
        vouching = [record for control in CONTROLS for record in by.pop(control, [])]
        for name in sorted(by):
            about_it = verdicts(name, one.records.of([*vouching, *by[name]]))
            sentences += [DefenseSentence(name, words, verdict.sentence, verdict) for verdict in about_it]
    return sentences


def checks_of(evaluations: Sequence[JudgedEvaluation]) -> tuple[Check, ...]:
    """Return the checks of all evaluations, each with its evaluation if there are several."""
    if len(evaluations) == 1:
        return evaluations[0].checks
    return tuple(replace(c, sentence=f"[{one.about}] {c.sentence}") for one in evaluations for c in one.checks)


def standalone_sentences(sentences: Sequence[DefenseSentence]) -> list[str]:
    """Return self-contained sentences: with the evaluation and the defense where there are several."""
    defenses: dict[str, set[str]] = {}
    for one in sentences:
        defenses.setdefault(one.about, set()).add(one.defense)
    lines = []
    for one in sentences:
        named = len(defenses[one.about]) == 1 or one.sentence.startswith((f"{one.defense} ", f"{one.defense}:"))
        words = f"[{one.about}] " if one.about else ""
        lines.append(f"{words}{'' if named else f'{one.defense}: '}{one.sentence}")
    return lines
