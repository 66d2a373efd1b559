"""What the page shows: records grouped into boards, a row for each defense and control value, ranked by worst
case.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppbench.questions.base import Missing, question_for, question_of
from ppbench.records.figure import best
from ppbench.records.schema import Record
from ppbench.report.controls import CONTROLS
from ppbench.report.frame import BOARD, ROW, SCOPE, Frame, Key, frame_of
from ppbench.report.page.badges import adaptive, badges_of, knowing
from ppbench.report.page.differences import differences
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.ranks import order, ranked
from ppbench.report.page.reliability import board_checks
from ppbench.report.page.table import Claims

STAGE_ORDER = ("init", "iterate", "final", "audit")


def boards(records: Sequence[Record], claims: Claims, sound: bool = True) -> list[Board]:
    """Return every board of `records`; of one suite, data set and model in the order of their questions.

    Args:
        records: every cell.
        claims: what a paper prints about a record's defense.
        sound: whether the harness's self-test passed (`ppbench.run.selftest`); else no board is ranked.
    """
    frame = frame_of(records)
    scopes, known = frame.by(SCOPE), knowing(records)
    known_here = frame.of([record for record in frame if not isinstance(question_for(record), Missing)])
    groups = sorted(known_here.by(BOARD).items(), key=lambda pair: _place(pair[0]))
    return [_board(key, some, scopes[key.only(SCOPE)], known, claims, sound) for key, some in groups]


def _place(setting: Key) -> tuple[object, ...]:
    """Return what boards are sorted by."""
    about = setting.suite, setting.data, setting.model, question_of(setting.kind).order, setting.kind, setting.threat
    return *about, STAGE_ORDER.index(setting.stage), setting.batch, setting.text()


def _board(
    setting: Key, members: Frame, scope: Sequence[Record], known: frozenset[str], claims: Claims, sound: bool
) -> Board:
    sample = members[0].config
    name = question_of(setting.kind).headline(sample)
    rows = members.by(ROW)
    differs = differences(list(rows))
    entries = [_entry(key, rows[key], name, known, claims, differs[key]) for key in sorted(rows, key=Key.text)]
    checks = board_checks(setting.kind, name, entries, scope)
    reliable = sound and all(check.ok is True for check in checks)
    ranks = reliable and not setting.intended
    placed = ranked(entries, name) if ranks else entries
    return Board(setting, name, tuple(sorted(placed, key=lambda e: order(e, name))), checks, reliable)


def _entry(key: Key, members: Frame, name: str, known: frozenset[str], claims: Claims, differs: str) -> Entry:
    sample = min(members, key=lambda r: (r.status != "complete", r.cell_id))
    flags = {(flag.code, flag.detail): flag for record in members for flag in record.flags}
    claimed = sorted({text for record in members if (text := claims(record))})
    defense, plain = sample.config.defense, members.of([r for r in members if not adaptive(r, known)])
    worst = members.worst(name)
    return Entry(
        key=key,
        defense=defense,
        role="control" if defense.id in CONTROLS else "compared",
        sample=sample,
        records=tuple(sorted(members, key=lambda r: (r.config.attack.id, r.cell_id))),
        plain=worst if len(plain) == len(members) else plain.worst(name),
        worst=worst,
        labels=best([r for r in members if r.config.model.classes > 1], "label_accuracy"),
        rank="",
        badges=tuple(badges_of(members, known)),
        flags=tuple(flags[key] for key in sorted(flags)),
        claimed="; ".join(claimed),
        differs=differs,
    )
