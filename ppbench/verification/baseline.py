"""Accepting results: the only way to move a baseline.

A baseline holds the marker, which says that reconstructions were left out, the records, their board, selftest.json and
accepted.jsonl, the history of moves; no images, caches or times: it can be committed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from ppbench.base.errors import UsageError, first_of
from ppbench.base.files import kind_of, listing, locked, sweep_abandoned, temporary_of, unwritable, write_atomic
from ppbench.base.version import __version__
from ppbench.claims.check import PAPER_CLAIMS, claimed
from ppbench.records.run_files import ORIGIN, SELFTEST, Origin, Soundness, origin_of, save_soundness, soundness_of
from ppbench.records.schema import Record
from ppbench.records.store import MARKER, Store, canonical_json, marker_bytes, open_results
from ppbench.report.compare.outcome import failed_controls
from ppbench.report.controls import failures
from ppbench.report.integrity import HISTORY, Accepted, Moved, baseline_problems, history, records_digest
from ppbench.report.page.board import write_board
from ppbench.verification import Further, verify

_OLD = ".old"
BOARD_FILES = ("leaderboard.csv", "worst_case.csv", "leaderboard.html")  # files of the board
_OURS = {MARKER, HISTORY, SELFTEST, ORIGIN, "records", *BOARD_FILES}


def accept(new: Path, baseline: Path, reason: str, further: Further | None = None, *, keep: bool = False) -> Accepted:
    """Make the results in `new`, a folder or an archive, the baseline; return the new line of its history.

    The new baseline is written beside the old one and then replaces it: a failure leaves the old one. UsageError: no
    reason, problems, failed cells or controls in `new`, a `baseline` that is something else or the current folder, or a
    full disk. further: as in `verify`. keep: whether cells stay that `new` lacks, if they are of a suite in `new` with
    its digest, as for a board that is computed one seed at a time; then `baseline` may have no problems either.
    """
    reason = " ".join(reason.split())
    if not reason:
        raise UsageError("A baseline moves for a reason; give it, as --reason 'clipping is per example now'.")
    _check_place(new, baseline)
    baseline = baseline.resolve()
    with locked(baseline.parent, "moving a baseline in it"):
        _recover(baseline)
        return _moved(new, baseline, reason, further, keep)


def _moved(new: Path, baseline: Path, reason: str, further: Further | None, keep: bool) -> Accepted:
    """Move a baseline; the caller holds the lock."""
    _check_target(baseline)
    known = Store(baseline).load_all()
    if problems := verify(new, claimed, further):
        raise UsageError(f"{new} has problems: {first_of(problems)}; nothing was accepted.")
    store = Store(new)
    records, outcome = store.load_all(), soundness_of(store)
    if not records:
        raise UsageError(f"{new} holds no records; nothing was accepted.")
    kept = _kept(baseline, known, records) if keep else []
    records += kept
    _check_worth(new, records, outcome)
    lines = history(baseline)
    before, after = ({r.cell_id: canonical_json(r) for r in some} for some in (known, records))
    changed = sum(before[name] != after[name] for name in before.keys() & after.keys())
    line = Accepted(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        reason=reason,
        ppbench=__version__,
        cells=len(records),
        digest=records_digest(records),
        moved=Moved(
            added=len(after.keys() - before.keys()), removed=len(before.keys() - after.keys()), changed=changed
        ),
    )
    with _replaced(baseline) as folder:
        _fill(folder, records, outcome, origin_of(store), [*lines, line])
        if kept and (problems := verify(folder, claimed, further)):
            raise UsageError(f"{new} beside {baseline} has problems: {first_of(problems)}; nothing was accepted.")
    return line


def _kept(baseline: Path, known: list[Record], records: list[Record]) -> list[Record]:
    """Return those cells `known` of a baseline that stay beside `records`; UsageError where it was edited by hand."""
    suites, ids = {(r.config.suite, r.config.suite_digest) for r in records}, {r.cell_id for r in records}
    kept = [r for r in known if (r.config.suite, r.config.suite_digest) in suites and r.cell_id not in ids]
    if kept and (problems := list(baseline_problems(Store(baseline), known))):
        raise UsageError(f"{baseline}, whose cells are to be kept, has problems: {first_of(problems)}.")
    return kept


def _check_place(new: Path, baseline: Path) -> None:
    """Raise UsageError where no baseline may be, whatever the place holds."""
    open_results(new)
    if kind_of(baseline) is not None and new.resolve() == baseline.resolve():
        raise UsageError(f"NEW and BASELINE are one folder, {new}; give two.")
    if kind_of(baseline.parent) != "folder":
        raise UsageError(f"There is no folder {baseline.parent} for the baseline; make it first.")
    if kind_of(baseline, follow=False) == "link":
        raise UsageError(f"{baseline} is a link; give the folder that it leads to.")
    if Path.cwd().is_relative_to(baseline.resolve()):
        raise UsageError(
            f"{baseline} is the current folder or holds it, and a baseline is replaced as a whole; go to another "
            "folder and name it from there."
        )


def _check_target(baseline: Path) -> None:
    """Raise UsageError where the target, about to be replaced, holds anything but a baseline."""
    store, kind = Store(baseline), kind_of(baseline)
    if kind == "file":
        raise UsageError(f"{baseline} is an archive; a baseline that moves is a folder.")
    if store.files.holds(MARKER) and not (store.bare and store.files.holds(HISTORY)):
        what = "results, not an accepted baseline; give another folder, they would be lost"
        raise UsageError(f"{baseline} holds {what}.")
    foreign = [path.name for path in listing(baseline) if path.name not in _OURS] if kind == "folder" else []
    if foreign:
        what = f"files that are no part of a baseline, such as {foreign[0]!r}; move them out"
        raise UsageError(f"{baseline} holds {what}.")


def _check_worth(new: Path, records: list[Record], outcome: Soundness | None) -> None:
    """Raise UsageError where results have failed cells or controls, so that nothing can be judged by them."""
    if failed := failures(records):  # diverged cells and views with nothing to read are results
        first = failed[0].config
        raise UsageError(
            f"{len(failed)} of {len(records)} cells in {new} failed, such as {first.defense.id} under "
            f"{first.attack.id} ({failed[0].reason}); compute them again, nothing was accepted."
        )
    if faults := failed_controls(records, outcome):
        raise UsageError(f"{new}, {first_of(faults)}; a baseline needs controls that hold.")


def _fill(
    folder: Path, records: list[Record], outcome: Soundness | None, origin: Origin, lines: list[Accepted]
) -> None:
    """Write a baseline into the empty `folder`."""
    (folder / "records").mkdir()
    write_atomic(folder / MARKER, marker_bytes(bare=True))
    for record in records:
        write_atomic(folder / "records" / f"{record.cell_id}.json", canonical_json(record))
    history_text = "".join(line.model_dump_json() + "\n" for line in lines)
    write_atomic(folder / HISTORY, history_text.encode())
    if outcome is not None:
        save_soundness(folder, outcome)
    if origin != Origin():
        write_atomic(folder / ORIGIN, canonical_json(origin))
    write_board(Store(folder), PAPER_CLAIMS)
    for path in listing(folder):
        if path.name not in _OURS:
            shutil.rmtree(path) if kind_of(path) == "folder" else path.unlink()


def _recover(target: Path) -> None:
    """Restore a baseline whose move was killed between its two renames, and remove leftovers of killed moves."""
    former = [path for path in listing(target.parent) if path.name.startswith(f"{target.name}{_OLD}~")]
    if former and kind_of(target, follow=False) is None:  # we hold the lock, so no other move is between its renames
        former[0].rename(target)
    sweep_abandoned(target.parent, f"{target.name}~")
    sweep_abandoned(target.parent, f"{target.name}{_OLD}~")


@contextmanager
def _replaced(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` that replaces it at the end, completely or not at all (UsageError)."""
    fresh, old = temporary_of(target), temporary_of(target, _OLD)
    try:
        fresh.mkdir()
        try:
            yield fresh
            if target.exists():  # between the two renames the old folder lies beside, see `_recover`
                target.rename(old)
            try:
                fresh.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as cause:
        raise unwritable(target, 0, cause) from cause
