"""What a model gives away to who holds it, in sentences: members of the training data, and the true model's outputs.

A masking defense has clients train on another model than it delivers. Both are judged, and who takes a model as it is
apart from who knows of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import above_chance, value
from ppbench.report.verdict.fates import Fate as ModelFate
from ppbench.report.verdict.fates import members_fate, outputs_fate, same_outputs
from ppbench.report.verdict.lines import Held, Sides, extraction_metric_of, figure, held, listed
from ppbench.report.verdict.verdict import Fate, Verdict, together
from ppbench.report.worst import WorstCase, attack_of

CLIENT = "client/1"


@dataclass(frozen=True)
class Members:
    """The question for members. undefended: the strongest cell on the undefended model, one of `tried`, or None."""

    undefended: WorstCase | None
    tried: int
    noun: str = "members"
    metric: str = "asr"
    name: Literal["members"] = "members"

    def of(self, row: Held) -> Sides:
        """Return the row's cells."""
        return row.members

    def fate(self, record: WorstCase, tried: int) -> ModelFate:
        """Return what an attack came to, as the strongest of `tried`."""
        known = self.undefended if above_chance(self.undefended, "asr", self.tried) else None
        return members_fate(record, tried, known)

    def figures(self, record: WorstCase, few: str = "") -> str:
        """Return "ASR 50.1% [47.0, 53.2]"."""
        return f"ASR {few}{figure(record, 'asr', '.1%')}"

    @property
    def beside(self) -> str:
        """What the undefended model gives away, to stand beside."""
        if self.undefended is None:
            return ", undefended: not asked"
        weak = "" if above_chance(self.undefended, "asr", self.tried) else ", not above chance itself"
        return f", undefended {figure(self.undefended, 'asr', '.1%')}{weak}"


@dataclass(frozen=True)
class Outputs:
    """The question for the true model's outputs: its decisions, or the numbers that it predicts."""

    metric: str
    beside: str = ""
    name: Literal["outputs"] = "outputs"

    @property
    def noun(self) -> str:
        """What is looked for."""
        return "the true model's decisions" if self.metric == "agreement" else "the true model's predictions"

    def of(self, row: Held) -> Sides:
        """Return the row's cells."""
        return row.outputs

    def fate(self, record: WorstCase, tried: int) -> ModelFate:
        """Return what an attack came to."""
        return outputs_fate(record, tried)

    def figures(self, record: WorstCase, few: str = "") -> str:
        """Return "agrees with it on 99.8% [99.1, 100.0] of queries, relative error 1.2% [1.1, 1.3]"."""
        wrong = value(record, "output_error")
        form = "-" if wrong is None else ".1%" if wrong < 10 else ".0f"
        error = (
            "-" if wrong is None else figure(record, "output_error", form, "" if wrong < 10 else " times their size")
        )
        if self.metric == "output_error":
            return f"relative error {error}"
        return f"agrees with it on {few}{figure(record, 'agreement', '.1%')} of queries, relative error {error}"


Question = Members | Outputs


def what_models_tell(defense: str, records: Sequence[Record]) -> list[Verdict]:
    """Return the sentences on members and true outputs, adversary by adversary."""
    everything = held(records)
    masked = any(row.stage == "iterate" and row.defense == defense for row in everything)
    outputs = Outputs(extraction_metric_of(records))
    said: list[Verdict] = []
    for threat in sorted({row.threat for row in everything if row.defense == defense}):
        prefix = "" if threat == CLIENT else f"[{threat}] "
        mine = [row for row in everything if row.defense == defense and row.threat == threat]
        trained_on, delivered = ([r for r in mine if r.stage == stage] for stage in ("iterate", "final"))
        if threat != CLIENT and any((r.defense, r.stage, r.threat) == (defense, "final", CLIENT) for r in everything):
            delivered = []  # it is the model that clients are sent, and told of there
        members = [_undefended(everything, threat, stage, defense) for stage in ("iterate", "final")]
        found = [*_judged(trained_on, members[0]), *_judged(trained_on, outputs)]
        found += _delivered(delivered, members[1]) if masked else _queried(delivered, members[1])
        said += [verdict.worded(prefix + verdict.sentence) for verdict in [*found, *_answers(delivered, outputs)]]
    return said


def _undefended(rows: Sequence[Held], threat: str, stage: str, defense: str) -> Members:
    """Return the question for members beside what `none` gives away at the same stage; nothing else compares."""
    some = [r for r in rows if r.defense == "none" and r.stage == stage and r.members.tried and defense != "none"]
    some = [r for r in some if r.threat == threat] or some
    found = best([r for row in some if (r := row.members.worst) is not None], "asr")
    return Members(found, sum(row.members.tried for row in some))


# -- the model that clients train on ---------------------------------------------------------------------------------
def _judged(rows: Sequence[Held], question: Question) -> list[Verdict]:
    """Return a sentence for each set of control values that fare alike."""
    cells = [question.of(row) for row in rows]
    tried = sum(c.plain_tried for c in cells), sum(c.knowing_tried for c in cells)
    groups: dict[tuple[ModelFate | None, ModelFate | None], list[Held]] = {}
    for row, cell in zip(rows, cells, strict=True):
        plain, knowing = (
            None if record is None else question.fate(record, n)
            for record, n in zip((cell.plain, cell.knowing), tried, strict=True)
        )
        if plain is not None or knowing is not None:
            groups.setdefault((plain, knowing), []).append(row)
    said = []
    for (plain, knowing), some in groups.items():
        labels = [row.control for row in some if row.control]
        where = f" at {listed(labels)}" if labels and len(groups) > 1 else ""
        first = _told([question.of(row).plain for row in some], some, question)
        second = _told([question.of(row).knowing for row in some], some, question)
        sentence = f"What clients train on{where} {_clauses(question, plain, first, knowing, second)}."
        became = together(_FATES[side] for side in (plain, knowing) if side is not None)
        top = best([case for row in some if (case := question.of(row).worst) is not None], question.metric)
        said.append(_verdict(some, question, top, became, sentence))
    return said


_FATES: Mapping[ModelFate, Fate] = {
    "found": "falls",
    "part": "falls",
    "hidden": "hidden",
    "undecided": "undecided",
}


def _verdict(
    rows: Sequence[Held], question: Question, top: WorstCase | None, became: Fate | None, sentence: str
) -> Verdict:
    keys = tuple(row.key for row in rows)
    return Verdict(rows[0].defense, question.name, became, sentence, keys, top, question.metric)


def _told(found: Sequence[WorstCase | None], rows: Sequence[Held], question: Question) -> str:
    """Return the strongest of a grid with its figures: "mia_loss, kappa=1: ASR at most 54.0% [49.0, 58.9]"."""
    top = best([r for r in found if r is not None], question.metric)
    if top is None:
        return ""
    control = next(row.control for row, record in zip(rows, found, strict=True) if record is top)
    several = _differ(found, question)
    at = f"{attack_of(top)}, {control}" if several and control else attack_of(top)
    return f"{at}: {question.figures(top, 'at most ' if several else '')}"


def _differ(found: Sequence[WorstCase | None], question: Question) -> bool:
    """Return whether figures of a grid differ as printed, so that the strongest is not that of all."""
    return len({f"{value(record, question.metric):.3f}" for record in found if record is not None}) > 1


def _clauses(question: Question, plain: ModelFate | None, first: str, knowing: ModelFate | None, second: str) -> str:
    """Return what becomes of who takes the model as it is, then of who un-masks it."""
    noun, knower = question.noun, "from one who un-masks it"
    if plain is None:
        return f"{_opening(knowing or 'undecided', noun, knower)} ({second}{question.beside})"
    opening = f"{_opening(plain, noun, 'from who takes it as it is')} ({first}{question.beside})"
    if knowing is None:
        return opening + ("" if plain == "found" else "; no attack that un-masks it was tried")
    if plain == "hidden":
        closing = {
            "found": f" but not {knower}",
            "part": f" but only in part {knower}",
            "hidden": f" and {knower}, as far as tried here",
            "undecided": f"; whether {knower} is undecided",
        }
    else:
        closing = {
            "found": f"; it does not hide them {knower}",
            "part": f"; it hides them only in part {knower}",
            "hidden": "; un-masking it finds none",
            "undecided": f"; whether {knower} is undecided",
        }
    return f"{opening}{closing[knowing]} ({second})"


def _opening(fate: ModelFate, noun: str, who: str) -> str:
    return {
        "hidden": f"hides {noun} {who}",
        "found": f"does not hide {noun}, even {who}" if "takes" in who else f"does not hide {noun} {who}",
        "part": f"hides {noun} only in part {who}",
        "undecided": f"leaves it undecided whether {noun} are hidden {who}",
    }[fate]


# -- the delivered model ---------------------------------------------------------------------------------------------
def _strongest(rows: Sequence[Held], question: Question) -> tuple[WorstCase | None, int, str]:
    """Return the strongest cell of a grid, how many were tried, and "at most " where others stay below it."""
    found = [r for row in rows if (r := question.of(row).worst) is not None]
    tried = sum(question.of(row).tried for row in rows)
    return best(found, question.metric), tried, "at most " if _differ(found, question) else ""


def _delivered(rows: Sequence[Held], question: Members) -> list[Verdict]:
    """Return how many members the model that a masking defense delivers gives away."""
    top, tried, few = _strongest(rows, question)
    if top is None:
        return []
    text = f"{attack_of(top)}: {question.figures(top, few)}{question.beside}"
    fate = question.fate(top, tried)
    if fate == "hidden":
        sentence = f"The delivered model hides members from the attacks tried here ({text})."
    elif fate != "found":
        sentence = f"The delivered model is not shown to give members away, nor to hide them ({text})."
    else:
        sentence = f"The delivered model gives members away{_beside(top, question)} ({text})."
    return [_verdict(rows, question, top, _FATES[fate], sentence)]


def _beside(top: WorstCase, question: Members) -> str:
    """Return how much members are given away beside the undefended model, "" where that is not known."""
    metric, none = top.metric("asr"), value(question.undefended, "asr")
    known = above_chance(question.undefended, "asr", question.tried)
    if none is None or not known or metric is None or metric.low is None or metric.high is None:
        return ""
    as_much = "as" if metric.low <= none <= metric.high else "more than" if metric.low > none else "less than"
    return f" {as_much} the undefended one does"


def _queried(rows: Sequence[Held], question: Members) -> list[Verdict]:
    """Return how many members a defense that masks nothing gives away to who queries its model."""
    top, tried, _ = _strongest(rows, question)
    if top is None:
        return []
    shown = above_chance(top, "asr", tried)
    verb = "tells members from others" if shown else "is not shown to find members"
    beside = question.beside if question.undefended is not None else ""
    text = f"{attack_of(top)}: {question.figures(top, 'at most ')}{beside}"
    sentence = f"A client who queries the delivered model {verb} ({text})."
    return [_verdict(rows, question, top, "falls" if shown else "undecided", sentence)]


def _answers(rows: Sequence[Held], question: Outputs) -> list[Verdict]:
    """Return whether the delivered model answers as the true one."""
    top, tried, few = _strongest(rows, question)
    if top is None:
        return []
    does = "answers" if same_outputs(top, tried) else "does not answer"
    sentence = f"The delivered model {does} as the true one does ({attack_of(top)}: {question.figures(top, few)})."
    return [_verdict(rows, question, top, None, sentence)]
