"""What was found, in one line: the first thing that page and terminal say, computed from the rows at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    return f"A client uploads {least:.3g} times what an undefended one does{spread or f' ({first})'}."


def _one(row: Standing) -> Headline:
    told, leak, name = row.value, row.value.leak, row.value.entry.defense.id
    usable = [v for v in row.grid if is_usable(v, row.none)]
    if leak is None:
        return Headline(f"{name}: {row.verdict}.", row.tone)
    if not usable:
        return Headline(
            f"{name} has no usable setting: each one loses more than {USABLE:g} points of accuracy.", "warning"
        )
    several = len(row.grid) > 1
    where = f" at {told.entry.control.replace(' = ', '=')}" if several and told.entry.control else ""
    if leak.falls:
        everywhere = " at every usable setting" if several and len(usable) > 1 else where
        words = f"{name} falls{everywhere}: {leak.noun} {leak.level}{_figures(row)}"
        return Headline(f"{words}{_labels(told)}.", "error")
    if leak.level == "blind":
        words = f"{name} stands{where} against the attacks tried here: {leak.noun} no better than blind{_figures(row)}"
        tone: Tone = "good" if row.tone == "good" else "warning"
        untested = any(one.code == "untested" for one in leak.qualifiers)
        return Headline(f"{words}{_labels(told)}{'; untested against one who knows of it' if untested else ''}.", tone)
    return Headline(f"{name} is undecided{where}: {reason_of(leak)}{_figures(row)}{_labels(told)}.", "warning")


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


def _labels(told: Value) -> str:
    share = None if told.labels is None else value(best([told.labels], "label_accuracy"), "label_accuracy")
    return f", {share:.0%} of labels" if share is not None and told.gives_labels else ""


def _many(rows: Sequence[Standing]) -> Headline:
    """Return how many defenses fall, stand, or leave it open, each by all its rows: of several seeds or tasks."""
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row.value.entry.defense.id, set()).add(_fate(row))
    fates: dict[str, list[str]] = {}
    for name, some in found.items():
        fates.setdefault(_together(some), []).append(name)
    forms = (
        ("fall", "{} of {} fall{s} at every usable setting ({})"),
        ("partly", "{} of {} fall{s} in some evaluations and not in others ({})"),
        ("stand", "{} stand{s} against the attacks tried here ({})"),
        ("open", "{} left undecided ({})"),
        ("useless", "{} without a usable setting ({})"),
    )
    total, parts = f"{len(found)} defense{'' if len(found) == 1 else 's'}", []
    for fate, form in forms:
        if names := fates.get(fate):
            counts = (len(names), total) if fate in ("fall", "partly") else (len(names),)
            parts.append(form.format(*counts, ", ".join(names), s="s" if len(names) == 1 else ""))
    tone: Tone = "warning"
    if "stand" not in fates and fates.keys() & {"fall", "partly"}:
        tone = "error"
    elif fates.keys() <= {"stand", "useless"} and "stand" in fates:
        tone = "good"
    return Headline("; ".join(parts) + ".", tone)


def _together(fates: set[str]) -> str:
    """Return the fate of a defense of several rows; where none of its settings is usable nothing is said of it."""
    told = fates - {"useless"} or fates
    if len(told) == 1:
        return next(iter(told))
    return "partly" if "fall" in told else "open"


def _fate(row: Standing) -> str:
    if not any(is_usable(v, row.none) for v in row.grid):
        return "useless"
    if row.value.leak is None:
        return {"error": "fall", "good": "stand"}.get(row.tone, "open")
    return "fall" if row.value.leak.falls else "stand" if row.value.leak.level == "blind" else "open"
