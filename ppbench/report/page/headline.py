"""The result of an evaluation in one line: the first thing on page, in terminal and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ppbench.base.errors import count_of, listed
from ppbench.records.figure import grouped, leakage_value
from ppbench.records.schema import Record
from ppbench.report.controls import Check, rebuilding, taken_share, value
from ppbench.report.costs import CostRow, TimesOf, cost_rows
from ppbench.report.entries import Board
from ppbench.report.frame import frame_of
from ppbench.report.leak import LEVEL_WORDS, SEVERITY
from ppbench.report.learning import USABLE, learning_of
from ppbench.report.page.boards import JudgedEvaluation, boards_of, judged_evaluations, no_claims
from ppbench.report.page.overview import (
    Overview,
    Standing,
    amount_words,
    choice_of,
    control_words,
    example_words,
    figures_words,
    overviews,
    recovered_words,
)
from ppbench.report.page.trust import Trust, trust_of
from ppbench.report.setting import RECOVERED, Setting, Tone, reason_of
from ppbench.report.words import capitalized

HeadlineFate = Literal["fall", "exposed", "partly", "refuted", "stand", "open", "unlearned", "useless"]


@dataclass(frozen=True)
class Headline:
    """One line. tone: whether it is good news for users of the defense."""

    words: str
    tone: Tone


@dataclass(frozen=True)
class HeadlineRow:
    """A defense's row in the table of one evaluation."""

    table: Overview
    standing: Standing

    @property
    def name(self) -> str:
        """The defense."""
        return self.standing.value.entry.defense.id

    @property
    def setting(self) -> str:
        """The row's setting, as "sigma=1"; "" where it is the only one, or has no parameter."""
        control = control_words(self.standing.value)
        return control if len(self.standing.grid) > 1 else ""

    @property
    def fate(self) -> HeadlineFate:
        """The key of `FORMS` under which it is counted."""
        setting = self.standing.value
        if setting.judgement.fate is None:
            return "open"
        if all(v.usable is False for v in self.standing.grid):
            return "useless"
        if setting.judgement.fate != "falls":
            stands = setting.judgement.fate == "stands"
            return "unlearned" if self.table.unlearned else "stand" if stands else "open"
        if setting.refutation and not (setting.leak is not None and setting.leak.falls):
            return "refuted"
        if setting.judgement.seeds < setting.seeds:
            return "partly"
        known = not self.table.unlearned and any(v.usable is not None for v in self.standing.grid)
        return "fall" if known else "exposed"


def headline_of(tables: Sequence[Overview], trust: Trust, boards: Sequence[Board] = ()) -> Headline:
    """Return the headline on the defenses of `tables`, each at its usable setting that leaks least.

    boards: those of the tables; without a defense they say what leaks of the undefended model.
    """
    rows = [HeadlineRow(table, row) for table in tables if table.reliable for row in table.compared]
    if not trust.boards:
        return Headline("Nothing was evaluated.", "info")
    if trust.state == "unknown" or (trust.state == "failed" and not trust.sound):
        return Headline("Nothing is concluded: the controls do not vouch for it.", "error")
    if not rows:
        return Headline(f"Only controls were evaluated{_undefended(boards)}.", "info")
    if costs_alone(tables) and (costs := _costs(rows)):
        return Headline(costs, "info")
    return _one(rows[0]) if len(rows) == 1 else _many(rows)


def _undefended(boards: Sequence[Board]) -> str:
    """Return what leaks of the undefended model, where nothing else was evaluated; "" where that is not shown."""
    entries = [one for board in boards if board.reliable for one in board.entries if one.defense.id == "none"]
    leaks = [one.leak for one in entries if one.leak is not None and one.leak.falls and one.leak.worst is not None]
    if not leaks:
        return ""
    leak = max(leaks, key=lambda one: (SEVERITY[one.level], taken_share(one.worst)))  # type: ignore[arg-type]  # chosen so
    assert leak.worst is not None  # chosen so
    metric, side = leak.worst.metric(rebuilding(leak.worst)), leak.everybody
    figure = None if metric is None else metric.value
    amount = "" if figure is None else side.amount_words(figure, leak.level == "rebuilt")
    return f"; of the undefended model {leak.noun} are {leak.level}{amount}{side.modality.example(leak.worst.victims)}"


def costs_alone(tables: Sequence[Overview]) -> bool:
    """Return whether nothing was attacked, so that only costs are reported."""
    return bool(tables) and not any(table.questions for table in tables)


def _costs(rows: Sequence[HeadlineRow]) -> str:
    """Return a sentence on the least and the largest ratio of uploads to the undefended, "" where none was measured."""
    settings = [row.standing.value for row in rows]
    paid = [(v.shown.cost, v.entry.defense.id) for v in settings]
    uploads = [(cost.ratios.up, name) for cost, name in paid if cost and cost.ratios.up]
    if not uploads:
        return ""
    (least, first), (most, last) = min(uploads), max(uploads)
    spread = "" if first == last else f" ({first}) to {most:.3g} times ({last})"
    share = f"{least:.3g} times" if least >= 0.01 else f"1/{1 / least:,.0f} of"
    return f"A client uploads {share} what an undefended one does{spread or f' ({first})'}."


# -- one defense -----------------------------------------------------------------------------------------------------
def _one(row: HeadlineRow) -> Headline:
    """Return the headline on one defense: on its row's setting, then on its others."""
    setting, name, fate = row.standing.value, row.name, row.fate
    where, leak = f" at {row.setting}" if row.setting else "", setting.leak
    end = f"; {row.table.unlearned}. {row.table.advice}" if row.table.unlearned else "."
    if fate == "useless":
        return Headline(f"{name} has no usable setting: {_why_useless(row)}{_others(row)}{_recovered(row)}.", "warning")
    if fate == "refuted":
        assert setting.refutation is not None  # implied by the fate
        return Headline(f"{name} is refuted{where}: {setting.refutation.words}{recovered_words(setting)}{end}", "error")
    if fate == "unlearned":
        words = f"{name}: inconclusive, because {row.table.unlearned}; no setting can be called usable"
        return Headline(f"{words}{_others(row)}{_recovered(row)}. {row.table.advice}", "warning")
    if leak is None or setting.judgement.fate is None:
        return Headline(f"{name}: {row.standing.verdict}{where}{end}", row.standing.tone)
    if fate in ("fall", "exposed", "partly"):
        refuted = "; its epsilon is refuted" if setting.refutation else ""
        seen = f"{leak.noun} {leak.level}{figures_words(setting)}{example_words(setting)}"
        words = f"{name} falls{_in_seeds(setting)}{_everywhere(row)}: {seen}"
        named = where if _everywhere(row) and row.setting not in _everywhere(row) else ""
        return Headline(f"{words}{named}{recovered_words(setting)}{refuted}{_others(row)}{end}", "error")
    if fate == "stand":
        words = f"{name} stands{where}{_in_seeds(setting)} against the attacks tried here"
        untested = "; untested against an aware attacker" if leak.untested else ""
        seen = f"{leak.noun} no better than blind{figures_words(setting)}{recovered_words(setting)}"
        return Headline(f"{words}: {seen}{untested}{_others(row)}{_recovered_elsewhere(row)}.", row.standing.tone)
    if setting.judgement.verdict.startswith("inconclusive"):
        words = f"it stands in {setting.judgement.seeds} of {setting.seeds} seeds{_others(row)}{_recovered(row)}"
        return Headline(f"{name}: inconclusive{where}, because {words}.", "warning")
    seen = (
        f"{reason_of(leak)}{figures_words(setting)}{recovered_words(setting)}{_others(row)}{_recovered_elsewhere(row)}"
    )
    return Headline(f"{name} is undecided{where}: {seen}.", "warning")


def _everywhere(row: HeadlineRow) -> str:
    """Return where a defense falls: " at all 3 settings, 1 of them usable"; "" with one setting."""
    grid, usable, leaking = row.standing.grid, row.standing.usable, row.standing.leaking
    if len(grid) == 1:
        return ""
    if len(leaking) == len(grid):
        return f" at {_all(len(grid))} settings" + (
            f", {len(usable)} of them usable" if len(usable) < len(grid) else ""
        )
    if row.table.unlearned:
        return f" at {len(leaking)} of {len(grid)} settings"
    return " at every usable setting" if len(usable) > 1 else f" at its one usable setting, {row.setting}"


def _others(row: HeadlineRow) -> str:
    """Return words on the other settings: the worst leak, and how many are not usable.

    "; images are rebuilt at 20 dB at 1 of 3 settings; 2 of 3 settings are not usable".
    """
    grid, setting, number = row.standing.grid, row.standing.value, len(row.standing.grid)
    others = [v for v in row.standing.leaking if v is not setting or row.fate == "useless"]
    shown = [v for v in others if v.leak is not None and v.leak.falls]
    words, own = "", setting.judgement.fate == "falls" and row.fate != "useless"
    if shown:
        worst = max(shown, key=lambda v: (SEVERITY[v.leak.level], leakage_value(v.metric)))  # type: ignore[union-attr]  # shown
        assert worst.leak is not None
        at = f" at {len(shown)} of {number} settings" if number > 1 else ""
        if not own:
            words = f"; {worst.leak.noun} are {worst.leak.level}{amount_words(worst)}{at}"
        elif _is_far_worse(worst, setting):
            words = f" ({worst.leak.level}{amount_words(worst)} at {control_words(worst)})"
    elif others and not own:
        words = f"; {len(others)} of {count_of(number, 'setting')} leak{'s' * (len(others) == 1)} something"
    useless = sum(v.usable is False for v in grid)
    everywhere = own and len(row.standing.leaking) == number
    if useless and row.fate != "useless" and not everywhere:
        words += f"; {useless} of {number} settings {'is' if useless == 1 else 'are'} not usable"
    return words


def _is_far_worse(one: Setting, other: Setting) -> bool:
    """Return whether `one` leaks far more than `other`: at a worse level, or with half the squared error."""
    assert one.leak is not None and other.leak is not None
    if one.metric is None or other.metric is None or one.leak.level != other.leak.level:
        return SEVERITY[one.leak.level] > SEVERITY[other.leak.level]
    return one.leak.everybody.modality.far_worse(one.metric.value or 0.0, other.metric.value or 0.0)


def _why_useless(row: HeadlineRow) -> str:
    grid = row.standing.grid
    if all(v.learning.state == "nothing" for v in grid):
        if len(grid) == 1 and grid[0].collapse:
            return f"its {grid[0].collapse}"
        return f"its model learned nothing{_of_seeds(grid)}"
    who = "it loses" if len(grid) == 1 else f"each of {len(grid)} loses"
    if all(v.loss is not None and -v.loss > USABLE for v in grid):
        return f"{who} more than {USABLE:g} points of accuracy"
    what = "accuracy" if any(v.accuracy is not None for v in grid) else "the variance explained"
    return f"{who} more than {USABLE:g} points of {what}, or more than half of what was learned"


def _of_seeds(grid: Sequence[Setting]) -> str:
    """Return " at all 3 settings", or of one setting " in 1 of 3 seeds"; "" for one seed."""
    if len(grid) > 1:
        return f" at {_all(len(grid))} settings"
    count = sum(learning_of(v.entry.sample.utility).state == "nothing" for v in grid[0].values)
    return "" if count == grid[0].seeds else f" in {count} of {grid[0].seeds} seeds"


def _all(count: int) -> str:
    return "both" if count == 2 else f"all {count}"


def _in_seeds(setting: Setting) -> str:
    """Return " in all 3 seeds" or " in 2 of 3 seeds"; "" with one seed."""
    if setting.seeds == 1:
        return ""
    count = setting.judgement.seeds
    return f" in {_all(setting.seeds)} seeds" if count == setting.seeds else f" in {count} of {setting.seeds} seeds"


def _recovered_elsewhere(row: HeadlineRow) -> str:
    """Return `_recovered(row)` if another setting gives something that the headline's setting does not, else ""."""
    own = {*row.standing.value.recovered}
    return _recovered(row) if any({*v.recovered} - own for v in row.standing.grid) else ""


def _recovered(row: HeadlineRow) -> str:
    """Return "; recovered: 90% of labels", at the setting with the most; "" where nothing is recovered."""
    giving = [v for v in row.standing.grid if v.recovered]
    if not giving:
        return ""
    most = max(giving, key=lambda v: value(v.labels, "label_accuracy") or 0.0)
    at = f" at {len(giving)} of {len(row.standing.grid)} settings" if len(row.standing.grid) > 1 else ""
    return f"; recovered: {recovered_words(most).removeprefix(', ')}{at}"


# -- before anything is trained ----------------------------------------------------------------------------------------
def preliminary_words(answer: Answer) -> str:
    """Return the sentence on a first answer, while other cells run: what leaks before training, without accuracy.

    Where every setting's accuracy is known, the headline as it is.
    """
    rows = [HeadlineRow(table, row) for table in answer.tables if table.reliable for row in table.compared]
    if len(rows) != 1 or all(v.accuracy is not None or v.mse is not None for v in rows[0].standing.grid):
        return f"{answer.headline.words} (preliminary; still running)"
    row, grid = rows[0], rows[0].standing.grid
    levels = sorted({v.leak.level for v in grid if v.leak is not None}, key=lambda level: -SEVERITY[level])
    parts = [
        _at_level([v for v in grid if v.leak is not None and v.leak.level == level], len(grid)) for level in levels
    ]
    noun = next((f"{v.leak.noun} " for v in grid if v.leak is not None), "")
    words = [f"{noun}{'; '.join(parts)}"] if parts else []
    for word in dict.fromkeys(word for v in grid for word in v.recovered):
        words.append(f"{word} recovered{_at(sum(word in v.recovered for v in grid), len(grid))}")
    leaks = "; ".join(words) or "undecided"
    return f"{row.name} before training: {leaks} (preliminary; accuracy and the trained model follow)."


def _at(count: int, number: int) -> str:
    """Return " at all 3 settings", " at 1 of 3 settings", "" where there is one."""
    return "" if number == 1 else f" at {_all(number) if count == number else f'{count} of {number}'} settings"


def _at_level(settings: Sequence[Setting], number: int) -> str:
    """Return "rebuilt at 2 of 3 settings, 46 dB at sigma=0.01" on the settings of one level, with the largest leak."""
    worst = max(settings, key=lambda v: leakage_value(v.metric))
    assert worst.leak is not None
    at = _at(len(settings), number)
    figures = figures_words(worst) if worst.leak.falls else ""
    return f"{LEVEL_WORDS[worst.leak.level]}{at}" + (
        f",{figures} at {control_words(worst)}" if figures and at else figures
    )


# -- several ---------------------------------------------------------------------------------------------------------
NAMES_LENGTH = 120
"""Largest number of characters of a group's names in a headline; of the others it gives the number."""

FORMS: dict[HeadlineFate, str] = {
    "fall": "{who} fall{s} at every usable setting{names}",
    "exposed": "{who} fall{s}, with no setting known to be usable{names}",
    "partly": "{who} fall{s} in some seeds or evaluations and not in others{names}",
    "refuted": "{who} with an epsilon that is refuted{names}",
    "stand": "{number} stand{s} against the attacks tried here{but}{names}",
    "open": "{number} left undecided{but}{names}",
    "unlearned": "{number} inconclusive, as the undefended model learned too little{but}{names}",
    "useless": "{number} without a usable setting{but}{names}",
}
"""Clauses on the defenses of one fate, in this order; a single defense is named instead of counted.

but: qualifiers, such as what the standing ones give away.
"""


def _many(rows: Sequence[HeadlineRow]) -> Headline:
    """Return the headline on several rows: how many defenses fall, stand, or are undecided over all evaluations."""
    by_name = grouped(rows, lambda row: row.name)
    groups: dict[tuple[HeadlineFate, str], list[str]] = {}
    for name, some in by_name.items():
        fate = _together({row.fate for row in some})
        at = dict.fromkeys(row.setting for row in some) if fate == "stand" else {}
        label = f"{name} at {next(iter(at))}" if len(at) == 1 and "" not in at else name
        groups.setdefault((fate, _but(fate, some)), []).append(label)
    parts, only = [], next(iter(by_name)) if len(by_name) == 1 else ""
    for fate, but in sorted(groups, key=lambda pair: ([*FORMS].index(pair[0]), pair[1])):
        names = groups[fate, but]
        words = {
            "but": but,
            "s": "s" if len(names) == 1 else "",
            "names": "" if only else f" ({listed(names, NAMES_LENGTH)})",
        }
        who = only or f"{len(names)} of {len(by_name)} defenses"
        if only and fate == "stand" and names[0] != only:
            who = names[0]  # with its setting
        parts.append(FORMS[fate].format(who=who, number=who if only else len(names), **words))
    return Headline("; ".join(parts) + "." + _unlearned([row.table for row in rows]), _tone([*groups]))


def _unlearned(tables: Iterable[Overview]) -> str:
    """Return a sentence on evaluations whose undefended model learned too little, "" without any."""
    every = list({id(table): table for table in tables}.values())
    unlearned = [table for table in every if table.unlearned]
    if not unlearned:
        return ""
    first = unlearned[0]
    where = "" if len(every) == 1 else f" in {len(unlearned)} of {len(every)} evaluations"
    return f" {capitalized(first.unlearned)}{where}. {first.advice}"


def _tone(fates: Sequence[tuple[HeadlineFate, str]]) -> Tone:
    """Return the tone: "good" where all usable defenses stand and give nothing else away."""
    every = {fate for fate, _ in fates}
    if "stand" not in every and every & {"fall", "exposed", "partly", "refuted"}:
        return "error"
    stand = every <= {"stand", "useless"} and "stand" in every
    return "good" if stand and not any(but for _, but in fates) else "warning"


def _but(fate: HeadlineFate, rows: Sequence[HeadlineRow]) -> str:
    """Return the qualifiers of a fate: " but for labels", missing aware attacks, in how many evaluations it stands."""
    if fate == "useless":
        leaking = any(row.standing.leaking for row in rows)
        return ", leaking all the same" if leaking else ""
    if fate in ("open", "unlearned"):
        standing, leaking = sum(row.fate == "stand" for row in rows), any(row.standing.leaking for row in rows)
        words = f", standing in {standing} of {len(rows)} evaluations" if standing else ""
        return f"{words}, leaking at other settings" if leaking else words
    if fate != "stand":
        return ""
    every = ("labels", *(word for word, _ in RECOVERED))
    recovered = [word for word in every if any(word in row.standing.value.recovered for row in rows)]
    leaks = [row.standing.value.leak for row in rows]
    but = f" but for {' and '.join(recovered)}" if recovered else ""
    untested = any(leak is not None and leak.untested for leak in leaks)
    return f"{but}, untested against aware attackers" if untested else but


def _together(fates: set[HeadlineFate]) -> HeadlineFate:
    """Return the fate of a defense over several evaluations: "stand" and "useless" must hold in all."""
    if len(fates) == 1:
        return next(iter(fates))
    if fates <= {"fall", "exposed"}:
        return "fall"
    if fates & {"fall", "exposed", "partly"}:
        return "partly"
    return "refuted" if "refuted" in fates else "open"


# -- The answer on page, in terminal and JSON: the headline, a table at a glance, and how far to trust it --


@dataclass(frozen=True)
class Answer:
    """The answer of an evaluation.

    tables: a table at a glance for each evaluation that has a defense; controls: for each other one, of the undefended
    model alone.
    """

    headline: Headline
    boards: tuple[Board, ...]
    tables: tuple[Overview, ...]
    trust: Trust
    controls: tuple[Overview, ...] = ()

    @property
    def every(self) -> tuple[Overview, ...]:
        """The tables of all evaluations."""
        return self.tables + self.controls

    def as_dict(self) -> dict[str, Any]:
        """Return headline, settings and reliability in types that JSON has."""
        rows = [row for table in self.tables for row in table.compared]
        return {
            "headline": self.headline.words,
            "tone": self.headline.tone,
            "settings": [setting.as_dict() for row in rows for setting in row.by_control],
            "choices": [{"about": table.about} | choice_of(table).as_dict() for table in self.tables],
            "reliability": self.trust.as_dict(),
        }


def answer_from(
    boards: Sequence[Board], evaluations: Sequence[JudgedEvaluation], costs: Sequence[CostRow], harness: Check | None
) -> Answer:
    """Return the answer from the parts of a page; harness: check of the self-test, None where unknown."""
    every = overviews(boards, evaluations, costs)
    tables, controls = [one for one in every if one.compared], tuple(one for one in every if not one.compared)
    trust = trust_of(boards, evaluations, harness, tables)
    return Answer(headline_of(tables, trust, boards), tuple(boards), tuple(tables), trust, controls)


def answer_of(records: Sequence[Record], harness: Check | None, times: TimesOf = lambda _: None) -> Answer:
    """Return the answer of `records`. harness: None before the self-test has ended: the controls count alone."""
    frame, sound = frame_of(records), harness is None or harness.ok is not False
    all_boards = boards_of(frame, no_claims, sound)
    return answer_from(all_boards, judged_evaluations(frame, sound), cost_rows(all_boards, frame, times), harness)
