"""Which cells a submission's suite asks for, as it comes with ppbench here: those there must be, those there may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.base.errors import UsageError, shown
from ppbench.ledger.case import Case, Outcome
from ppbench.report.completeness import defenses_without_result, failures
from ppbench.report.controls import CONTROLS
from ppbench.report.unasked import undefended_stands
from ppbench.run.cells import Cell
from ppbench.run.complete import at_hand
from ppbench.run.schedule import Wanted
from ppbench.run.suite import Suite, drawn_with, load_suite
from ppbench.run.sweep import plan
from ppbench.suites import shipped


@dataclass(frozen=True)
class Due:
    """The cells of a suite. must: those of what is handed in, and the controls'; may: of which records may be."""

    suite: Suite
    must: tuple[Wanted, ...]
    may: tuple[Wanted, ...]


def due_of(case: Case) -> tuple[Due | None, Outcome]:
    """Return what the suite of a submission asks for, None where its cells are not of it, and the check's outcome.

    Raises UsageError: its data or one of its plugins cannot be used here.
    """
    config = case.records[0].config
    word, _, _ = config.suite.rpartition("/")
    id_, _, preset = word.partition("@")
    if id_ not in shipped():
        return None, Outcome("suite", False, f"No suite that comes with ppbench is called {shown(id_)}.")
    data, where, apart = _data(case), config.federation, bool(case.attacks)
    try:
        suite = load_suite(
            id_,
            preset,
            add=case.defenses,
            dataset=data,
            device=where.device,
            tf32=bool(where.tf32),
            weights=case.terms.weights,
            isolate=apart,
        )
    except UsageError as error:
        if preset:
            return None, Outcome("suite", False, str(error))
        raise
    if (suite.name, suite.digest) != (config.suite, config.suite_digest):
        told = f"The cells are of {shown(config.suite)} with the digest {shown(config.suite_digest)}"
        return None, Outcome("suite", False, f"{told}; ppbench comes with {suite.name}, {suite.digest}.")
    if (case.about.suite, case.about.digest) != (suite.name, suite.digest):
        told = f"What is handed in says {shown(case.about.suite)}, {shown(case.about.digest)}"
        return None, Outcome("suite", False, f"{told}; its cells are of {suite.name}, {suite.digest}.")
    return _known(case, drawn_with(suite, case.salt) if case.salt else suite)


def _known(case: Case, suite: Suite) -> tuple[Due | None, Outcome]:
    """Return a suite's cells, None where records are of none of them: of other settings than it has."""
    mine = {"defense": case.defenses} if case.defenses else {"attack": case.attacks} if case.attacks else {}
    must = may = plan(suite, case.home, mine).asked
    if _beyond(case, must):
        may = plan(suite, case.home).asked
    if foreign := _beyond(case, may):
        about = case.records[[r.cell_id for r in case.records].index(foreign[0])].config
        told = f"{len(foreign)} of {len(case.records)} cells are none of {suite.name} as it is here, such as"
        why = "its settings, data, versions or weights are others"
        found = f"{told} {foreign[0]} ({about.defense.id} under {about.attack.id}): {why}."
        return None, Outcome("suite", False, found)
    return Due(suite, must, may), Outcome(
        "suite", True, f"All cells are of {suite.name}, {suite.digest}, as it is here."
    )


def _beyond(case: Case, asked: Sequence[Wanted]) -> list[str]:
    known = {cell.id for one in asked for cell in one.cells}
    return [record.cell_id for record in case.records if record.cell_id not in known]


def _data(case: Case) -> str | None:
    """Return what opens the data here, None where the suite's own words do (UsageError: nobody knows)."""
    named = sorted({record.config.data.name for record in case.records})
    if case.terms.dataset is not None or len(named) > 1:
        return case.terms.dataset
    found = at_hand(named[0])
    if found is None:
        raise UsageError(f"Where {named[0]} lies here cannot be known; name it, as --dataset parquet:FOLDER.")
    return found


def complete(case: Case, due: Due) -> Outcome:
    """Return whether all cells are there that there must be, and have a result.

    They are those that `ppbench sweep SUITE --add NAME --only defense=NAME` computes: every attack, every value of the
    control parameter, every seed; of attacks handed in alone, those of all defenses that the suite lists.
    """
    have = {record.cell_id for record in case.records}
    asked = [cell for one in due.must if not _left_out(case, one) for cell in one.cells if _meant(case, cell)]
    name = due.suite.name
    if gone := [cell.config for cell in asked if cell.id not in have]:
        told = f"{len(gone)} of {len(asked)} cells that {name} asks for are missing, such as {gone[0].defense.id} under"
        return Outcome("complete", False, f"{told} {gone[0].attack.id} ({gone[0].stage}); sweep into the folder again.")
    if failed := failures(case.records):
        told = f"{len(failed)} cells failed, such as {failed[0].cell_id} ({failed[0].reason})"
        return Outcome("complete", False, f"{told}; sweep into the folder again.")
    if unknown := defenses_without_result(case.records):
        return Outcome("complete", False, f"No cell of {', '.join(unknown)} is complete.")
    kept = ", ".join([*CONTROLS, *case.defenses] if case.defenses else case.attacks)
    return Outcome("complete", True, f"All {len(asked)} cells are there that {name} asks for of {kept}.")


def _meant(case: Case, cell: Cell) -> bool:
    """Return whether a cell is one of our attacks', or of those handed in: others may be installed here alone."""
    return not cell.config.attack.code or cell.attack.name in case.attacks


def _left_out(case: Case, one: Wanted) -> bool:
    """Return whether cells are not asked since the undefended model stands there: those of `run.looks`."""
    return bool(one.gate) and undefended_stands([record for record in case.records if record.cell_id in one.gate])
