"""What was found, in one line: the first thing that page and terminal say, computed from the rows at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ppbench.base.errors import listed
from ppbench.records.figure import best
from ppbench.report.controls import value
from ppbench.report.page.entries import USABLE
from ppbench.report.page.overview import Overview
from ppbench.report.page.standing import Standing, Tone, Value, is_usable, reason_of
from ppbench.report.page.trust import Trust


@dataclass(frozen=True)
class Headline:
    """One line. tone: whether it is good news for who relies on the defense."""

    words: str
    tone: Tone


def headline_of(tables: Sequence[Overview], trust: Trust) -> Headline:
    """Return what was found on the defenses of `tables`, of each the usable setting that leaks least."""
    rows = [r for table in tables if table.reliable for r in table.rows if r.value.entry.role == "compared"]
    if not trust.boards:
        return Headline("Nothing was evaluated.", "info")
    if trust.state == "unknown" or (trust.state == "failed" and not trust.sound):
        return Headline("Nothing is concluded: the controls do not vouch for it.", "error")
    if not rows:
        return Headline("Only controls were evaluated.", "info")
    if costs_alone(tables) and (costs := _costs(rows)):
        return Headline(costs, "info")
    return _one(rows[0]) if len(rows) == 1 else _many(rows)


def costs_alone(tables: Sequence[Overview]) -> bool:
    """Return whether nothing was asked that a defense could fall to: what is told is what it costs."""
    rows = [row.value for table in tables for row in table.rows if row.value.entry.role == "compared"]
    asked = [v for v in rows if v.leak is not None or any((v.members, v.batch, v.canaries, v.outputs))]
    return bool(rows) and not asked


def _costs(rows: Sequence[Standing]) -> str:
    """Return the least and the largest upload beside the undefended client's, "" where none was measured."""
    found = [(v.cost.ratios.up, v.entry.defense.id) for row in rows if (v := row.value).cost and v.cost.ratios.up]
    if not found:
        return ""
    (least, first), (most, last) = min(found), max(found)
    spread = "" if first == last else f" ({first}) to {most:.3g} times ({last})"
    share = f"{least:.3g} times" if least >= 0.01 else f"1/{1 / least:,.0f} of"
    return f"A client uploads {share} what an undefended one does{spread or f' ({first})'}."


def _one(row: Standing) -> Headline:
    told, leak, name, fate = row.value, row.value.leak, row.value.entry.defense.id, _fate(row)
    if leak is None:
        return Headline(f"{name}: {row.verdict}.", row.tone)
    if fate == "useless":
        return Headline(
            f"{name} has no usable setting: each one loses more than {USABLE:g} points of accuracy.", "warning"
        )
    several = len(row.grid) > 1
    where = f" at {told.entry.control.replace(' = ', '=')}" if several and told.entry.control else ""
    seen = f"{_figures(row)}{_beside(told)}"
    if fate == "refuted":
        return Headline(
            f"{name} is refuted{where}: an audit finds more than its epsilon allows{_beside(told)}.", "error"
        )
    if fate == "fall":
        usable = [v for v in row.grid if is_usable(v, row.none)]
        everywhere = " at every usable setting" if several and len(usable) > 1 else where
        refuted = "; its epsilon is refuted" if told.refuted else ""
        return Headline(f"{name} falls{everywhere}: {leak.noun} {leak.level}{seen}{refuted}.", "error")
    if fate == "stand":
        words = f"{name} stands{where} against the attacks tried here: {leak.noun} no better than blind{seen}"
        return Headline(f"{words}{'; untested against one who knows of it' if leak.untested else ''}.", row.tone)
    if row.tone == "info":
        return Headline(f"{name}: {row.verdict}{where}.", row.tone)
    reason = "attacks failed" if told.lacking else reason_of(leak)
    return Headline(f"{name} is undecided{where}: {reason}{seen}.", "warning")


def _figures(row: Standing) -> str:
    """Return " at 46 dB (undefended 89, blind 11)"; of table rows their relative error."""
    leak, none = row.value.leak, row.none
    if leak is None or row.value.metric is None or row.value.metric.value is None:
        return ""
    if row.value.metric.name != "psnr_median":
        return f" within {row.value.metric.value:.0%}"
    undefended = None if none is None else value(none.worst, "psnr_median")
    beside = [f"{what} {number:.0f}" for what, number in (("undefended", undefended), ("blind", leak.blind)) if number]
    return f" at {row.value.metric.value:.0f} dB" + (f" ({', '.join(beside)})" if beside else "")


def _beside(told: Value) -> str:
    """Return ", 90% of labels, members", of what is found beside inputs."""
    share = None if told.labels is None else value(best([told.labels], "label_accuracy"), "label_accuracy")
    return "".join(f", {share:.0%} of labels" if word == "labels" and share else f", {word}" for word in told.given)


MOST = 120
"""Characters of names that a group of defenses has in a headline; how many more there are is told."""

Fate = Literal["fall", "partly", "refuted", "stand", "open", "useless"]
FORMS: dict[Fate, str] = {
    "fall": "{who} fall{s} at every usable setting{names}",
    "partly": "{who} fall{s} in some evaluations and not in others{names}",
    "refuted": "{who} with an epsilon that an audit refutes{names}",
    "stand": "{number} stand{s} against the attacks tried here{but}{names}",
    "open": "{number} left undecided{names}",
    "useless": "{number} without a usable setting{names}",
}
"""What a headline says of defenses of one fate, in this order; a defense that is alone is named in place of numbers.

but: what is given away by those that stand.
"""


def _many(rows: Sequence[Standing]) -> Headline:
    """Return how many defenses fall, stand, or leave it open, each by all its rows: of several seeds or tasks."""
    found: dict[str, list[Standing]] = {}
    for row in rows:
        found.setdefault(row.value.entry.defense.id, []).append(row)
    fates: dict[tuple[Fate, str], list[str]] = {}
    for name, some in found.items():
        fate = _together({_fate(row) for row in some})
        but = _but([row for row in some if _fate(row) == "stand"]) if fate == "stand" else ""
        fates.setdefault((fate, but), []).append(name)
    parts, only = [], next(iter(found)) if len(found) == 1 else ""
    for fate, but in sorted(fates, key=lambda pair: ([*FORMS].index(pair[0]), pair[1])):
        names = fates[fate, but]
        words = {"but": but, "s": "s" if len(names) == 1 else "", "names": "" if only else f" ({listed(names, MOST)})"}
        who = only or f"{len(names)} of {len(found)} defenses"
        parts.append(FORMS[fate].format(who=who, number=only or len(names), **words))
    return Headline("; ".join(parts) + ".", _tone([*fates]))


def _tone(fates: Sequence[tuple[Fate, str]]) -> Tone:
    """Return the tone of defenses' fates: good where all that can be used stand, and give nothing else away."""
    told = {fate for fate, _ in fates}
    if "stand" not in told and told & {"fall", "partly", "refuted"}:
        return "error"
    stand = told <= {"stand", "useless"} and "stand" in told
    return "good" if stand and not any(but for _, but in fates) else "warning"


def _but(rows: Sequence[Standing]) -> str:
    """Return what is found of a defense that stands, in any of its rows: " but for labels", and who did not try."""
    given = [word for word in ("labels", "members") if any(word in row.value.given for row in rows)]
    untested = any(row.value.leak is not None and row.value.leak.untested for row in rows)
    words = f" but for {' and '.join(given)}" if given else ""
    return f"{words}, untested against those who know of it" if untested else words


def _together(fates: set[Fate]) -> Fate:
    """Return the fate of a defense of several rows; where none of its settings is usable nothing is said of it."""
    told = fates - {"useless"} or fates
    if len(told) == 1:
        return next(iter(told))
    return "partly" if "fall" in told else "refuted" if "refuted" in told else "open"


def _fate(row: Standing) -> Fate:
    """Return which of `FORMS` a row is told by, as the table's verdict has it."""
    told = row.value
    if not any(is_usable(v, row.none) for v in row.grid):
        return "useless"
    if row.tone == "error":
        return "refuted" if told.refuted and not (told.leak is not None and told.leak.falls) else "fall"
    if row.tone == "info":
        return "open"
    stands = row.tone == "good" if told.leak is None else told.leak.level == "blind" and not told.lacking
    return "stand" if stands else "open"
