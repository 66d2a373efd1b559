"""The cells that a submission's suite requires and allows, in the version that is shipped here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.base.errors import UsageError, shown
from ppbench.ledger.case import CheckOutcome, SubmissionCase
from ppbench.report.completeness import defenses_without_result, failures
from ppbench.report.controls import CONTROLS
from ppbench.report.unasked import undefended_stands
from ppbench.run.cells import Cell
from ppbench.run.complete import local_dataset
from ppbench.run.schedule import PlannedCells
from ppbench.run.suite import Suite, load_suite, with_salt
from ppbench.run.sweep import plan_sweep
from ppbench.suites import shipped


@dataclass(frozen=True)
class Due:
    """The cells of a suite. must: required, those of the submitted plugins and the controls; may: allowed."""

    suite: Suite
    must: tuple[PlannedCells, ...]
    may: tuple[PlannedCells, ...]


def due_of(case: SubmissionCase) -> tuple[Due | None, CheckOutcome]:
    """Return the cells due in a submission's suite, None if its cells do not belong to it, and the check's outcome.

    Raises UsageError: its data or one of its plugins cannot be used here.
    """
    config = case.records[0].config
    word, _, _ = config.suite.rpartition("/")
    id_, _, preset = word.partition("@")
    if id_ not in shipped():
        return None, CheckOutcome("suite", False, f"No suite that comes with ppbench is called {shown(id_)}.")
    data, where, isolate = _data(case), config.federation, bool(case.attacks)
    try:
        suite = load_suite(
            id_,
            preset,
            add=case.defenses,
            dataset=data,
            device=where.device,
            tf32=bool(where.tf32),
            weights=case.terms.weights,
            isolate=isolate,
        )
    except UsageError as error:
        if preset:
            return None, CheckOutcome("suite", False, str(error))
        raise
    if (suite.name, suite.digest) != (config.suite, config.suite_digest):
        problem = f"The cells are of {shown(config.suite)} with the digest {shown(config.suite_digest)}"
        return None, CheckOutcome("suite", False, f"{problem}; ppbench comes with {suite.name}, {suite.digest}.")
    if (case.about.suite, case.about.digest) != (suite.name, suite.digest):
        problem = f"What is handed in says {shown(case.about.suite)}, {shown(case.about.digest)}"
        return None, CheckOutcome("suite", False, f"{problem}; its cells are of {suite.name}, {suite.digest}.")
    return _due_in(case, with_salt(suite, case.salt) if case.salt else suite)


def _due_in(case: SubmissionCase, suite: Suite) -> tuple[Due | None, CheckOutcome]:
    """Return a suite's cells, None if a record is none of them (other settings), and the outcome."""
    mine = {"defense": case.defenses} if case.defenses else {"attack": case.attacks} if case.attacks else {}
    must = may = plan_sweep(suite, case.home, mine).cells
    if _foreign_cells(case, must):
        may = plan_sweep(suite, case.home).cells
    if foreign := _foreign_cells(case, may):
        about = case.records[[r.cell_id for r in case.records].index(foreign[0])].config
        problem = f"{len(foreign)} of {len(case.records)} cells are none of {suite.name} as it is here, such as"
        why = "its settings, data, versions or weights are others"
        sentence = f"{problem} {foreign[0]} ({about.defense.id} under {about.attack.id}): {why}."
        return None, CheckOutcome("suite", False, sentence)
    return Due(suite, must, may), CheckOutcome(
        "suite", True, f"All cells are of {suite.name}, {suite.digest}, as it is here."
    )


def _foreign_cells(case: SubmissionCase, planned: Sequence[PlannedCells]) -> list[str]:
    """Return the names of the records that are no planned cell."""
    known = {cell.id for one in planned for cell in one.cells}
    return [record.cell_id for record in case.records if record.cell_id not in known]


def _data(case: SubmissionCase) -> str | None:
    """Return the argument that opens the data here, None for the suite's own (UsageError: it is unknown)."""
    named = sorted({record.config.data.name for record in case.records})
    if case.terms.dataset is not None or len(named) > 1:
        return case.terms.dataset
    opener = local_dataset(named[0])
    if opener is None:
        raise UsageError(f"The place of {named[0]} on this machine is unknown; give it, as --dataset parquet:FOLDER.")
    return opener


def check_complete(case: SubmissionCase, due: Due) -> CheckOutcome:
    """Check that all required cells are there and have a result.

    They are the cells of `ppbench sweep SUITE --add NAME --only defense=NAME`: every attack, every value of the control
    parameter, every seed; for submitted attacks alone, the cells of all defenses that the suite lists.
    """
    have = {record.cell_id for record in case.records}
    expected = [
        cell for one in due.must if not _is_gated_out(case, one) for cell in one.cells if _is_required(case, cell)
    ]
    name = due.suite.name
    if gone := [cell.config for cell in expected if cell.id not in have]:
        problem = (
            f"{len(gone)} of {len(expected)} cells that {name} requires are missing, such as {gone[0].defense.id} under"
        )
        return CheckOutcome(
            "complete", False, f"{problem} {gone[0].attack.id} ({gone[0].stage}); sweep into the folder again."
        )
    if failed := failures(case.records):
        problem = f"{len(failed)} cells failed, such as {failed[0].cell_id} ({failed[0].reason})"
        return CheckOutcome("complete", False, f"{problem}; sweep into the folder again.")
    if unknown := defenses_without_result(case.records):
        return CheckOutcome("complete", False, f"No cell of {', '.join(unknown)} is complete.")
    kept = ", ".join([*CONTROLS, *case.defenses] if case.defenses else case.attacks)
    return CheckOutcome("complete", True, f"All {len(expected)} cells that {name} requires of {kept} are there.")


def _is_required(case: SubmissionCase, cell: Cell) -> bool:
    """Return whether a cell's attack is one of ours or submitted: others may be installed only here."""
    return not cell.config.attack.code or cell.attack.name in case.attacks


def _is_gated_out(case: SubmissionCase, one: PlannedCells) -> bool:
    """Return whether cells are skipped because the undefended model withstands their gate (`run.looks`)."""
    return bool(one.gate) and undefended_stands([record for record in case.records if record.cell_id in one.gate])
