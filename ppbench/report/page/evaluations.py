"""Records by evaluation (suite, data, network, federation and seed), and what may be concluded from each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS, Check, check_controls
from ppbench.report.frame import EVALUATION, Frame, Key, frame_of
from ppbench.report.knowing import Knowledge
from ppbench.report.titles import evaluation_titles, evaluation_words
from ppbench.report.verdict import verdicts
from ppbench.report.verdict.verdict import Verdict


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
    known = Knowledge.of(record for one in evaluations for record in one.records)
    for one in evaluations:
        words = one.about if len(evaluations) > 1 else ""
        by: dict[str, list[Record]] = {}
        for record in one.records if one.reliable else ():
            by.setdefault(record.config.defense.id, []).append(record)
        vouching = [record for control in CONTROLS for record in by.pop(control, [])]
        for name in sorted(by):
            about_it = verdicts(name, one.records.of([*vouching, *by[name]]), known)
            sentences += [DefenseSentence(name, words, verdict.sentence, verdict) for verdict in about_it]
    return sentences


def checks_of(evaluations: Sequence[JudgedEvaluation]) -> tuple[Check, ...]:
    """Return the checks of all evaluations, each with its evaluation if there are several."""
    if len(evaluations) == 1:
        return evaluations[0].checks
    return tuple(_about(check, f"[{one.about}] ") for one in evaluations for check in one.checks)


def _about(check: Check, words: str) -> Check:
    others = tuple(_about(other, words) for other in check.others)
    return replace(check, sentence=words + check.sentence, others=others)


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
