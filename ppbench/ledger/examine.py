"""The checks of a submission, in order, before it is submitted and where it is received.

Every check relies on the records, the shipped suite and the packages that are installed here, never on the
submission's own description. Cells are recomputed last, if all other checks pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from ppbench.base.errors import UsageError, first_of
from ppbench.ledger.case import CheckOutcome, SubmissionCase
from ppbench.ledger.due import check_complete, due_of
from ppbench.ledger.rerun import TOLERANCE_WORDS, draw_cells, first_difference, recompute, untolerated_difference
from ppbench.ledger.submission import entry_of, strangers, this_machine
from ppbench.records.schema import Record
from ppbench.records.soundness import soundness_of
from ppbench.records.sources import code_of
from ppbench.records.store import Store
from ppbench.report.compare.outcome import failed_controls
from ppbench.report.controls import check_harness
from ppbench.report.page.board import claimed
from ppbench.report.verify import examine
from ppbench.run.recheck import recheck
from ppbench.run.schedule import PlannedCells

CHECKS = ("verify", "controls", "code", "apart", "suite", "complete", "again")


def run_checks(case: SubmissionCase) -> Iterator[CheckOutcome]:
    """Run the checks `CHECKS` in order and yield each outcome; a check that depends on a failed one is not made.

    Raises UsageError: a check cannot be made here, because data are missing or a plugin cannot be used.
    """
    made = list[CheckOutcome]()
    for check in (_check_records, _check_controls, _check_code, _check_isolation):
        made.append(check(case))
        yield made[-1]
    due, outcome = (
        due_of(case) if made[2].ok else (None, CheckOutcome("suite", None, "The cells were computed by other code."))
    )
    made.append(outcome)
    yield outcome
    outcome = (
        CheckOutcome("complete", None, "The required cells are unknown.") if due is None else check_complete(case, due)
    )
    made.append(outcome)
    yield outcome
    if due is not None and all(one.ok for one in made):
        yield _check_rerun(case, due.may)
    else:
        yield CheckOutcome("again", None, "No cell is computed again, since an earlier check does not hold.")


def _check_records(case: SubmissionCase) -> CheckOutcome:
    """Check all figures that can be recomputed without training."""
    problems = examine(case.store.out, claimed, recheck).problems
    sentence = f"{first_of(problems)}." if problems else "Every record, artifact and table row agrees with its scores."
    return CheckOutcome("verify", not problems, sentence)


def _check_controls(case: SubmissionCase) -> CheckOutcome:
    """Check that the controls ran and pass, and the self-test where the cells were computed."""
    try:
        outcome = soundness_of(case.store)
    except UsageError as error:
        return CheckOutcome("controls", False, str(error))
    faults, harness = failed_controls(case.records, outcome), check_harness(outcome)
    if harness.ok is None:
        faults.append(f"harness: {harness.sentence}")
    if faults:
        return CheckOutcome("controls", False, f"{first_of(faults)}.")
    return CheckOutcome("controls", True, "The undefended model falls, noise gives nothing away, the self-test passes.")


def _check_code(case: SubmissionCase) -> CheckOutcome:
    """Check that records and submission match the code that is installed here."""
    for stated in case.about.plugins:
        here = entry_of(stated.group, stated.name)
        if (stated.package, stated.version, stated.code) != (here.package, here.version, here.code):
            installed = f"{here.package} {here.version}, {here.code}"
            problem = f"The {stated.words}, code {stated.code}, is handed in; here is {installed}."
            return CheckOutcome("code", False, problem)
    if stale := [record.config for record in case.records if _stale(record)]:
        problem = f"{len(stale)} of {len(case.records)} cells, such as {stale[0].defense.id} under {stale[0].attack.id}"
        return CheckOutcome(
            "code", False, f"{problem}, are of other code than what is installed here; sweep again with it."
        )
    if missing := {*strangers(case.records)} - {(one.group, one.name) for one in case.about.plugins}:
        names = ", ".join(sorted(name for _, name in missing))
        return CheckOutcome("code", False, f"Cells are of {names} too, which is not handed in.")
    return CheckOutcome("code", True, "; ".join(f"{one.words}, code {one.code}" for one in case.about.plugins) + ".")


def _stale(record: Record) -> bool:
    """Return whether the plugins of a cell have other code here than when it was computed."""
    defense, attack = record.config.defense, record.config.attack
    here = code_of(("attacks", attack.id), ("questions", attack.kind), ("attacks", attack.follows or ""))
    return code_of(("defenses", defense.id)) != defense.code or here != attack.code


def _check_isolation(case: SubmissionCase) -> CheckOutcome:
    """Check that records say that other packages' attacks were isolated from the truth; reruns always isolate."""
    beside = [r for r in case.records if r.config.attack.code and r.victims and not r.environment.apart]
    if not beside:
        return CheckOutcome("apart", True, "No attack of another package ran in a process that knows the truth.")
    problem = (
        f"{len(beside)} cells of other packages' attacks, such as {beside[0].config.attack.id}, ran in a process that"
    )
    return CheckOutcome("apart", False, f"{problem} knows the truth; sweep with --isolate.")


def _check_rerun(case: SubmissionCase, planned: Sequence[PlannedCells]) -> CheckOutcome:
    """Recompute a random share of the cells and check that they agree."""
    terms = case.terms
    chosen = draw_cells(case.records, terms.share, secrets.randbelow(2**63) if terms.seed is None else terms.seed)
    unlike = _machine_differences(case)
    new = recompute(planned, chosen.cells, case.home, case.salt, terms.workers, terms.progress)
    head = f"{len(chosen.cells)} of {chosen.all} cells were computed again (--seed {chosen.seed})"
    if check_harness(soundness_of(new)).ok is not True:
        return CheckOutcome("again", False, f"{head}, but the self-test fails here: inconclusive.")
    how = (
        f"within the tolerance of another machine ({'; '.join(unlike)}): {TOLERANCE_WORDS}" if unlike else "bit for bit"
    )
    have, wrong = {record.cell_id: record for record in case.records}, list[str]()
    for cell in chosen.cells:
        what = _difference(have[cell], new, len(chosen.cells) if unlike else 0)
        about = have[cell].config
        wrong += [f"{cell} ({about.defense.id} under {about.attack.id}, {about.stage}): {what}"] if what else []
    if wrong:
        return CheckOutcome("again", False, f"{head}; {len(wrong)} of them do not agree {how}: {first_of(wrong)}.")
    return CheckOutcome("again", True, f"{head} and agree {how}.")


def _difference(record: Record, new: Store, cells: int) -> str:
    """Return the difference of a recomputed cell, "" for none; cells: number compared with tolerance, 0: exactly."""
    if not new.has(record.cell_id):
        return "it did not run"
    again = new.load(record.cell_id)
    return untolerated_difference(record, again, cells) if cells else first_difference(record, again)


def _machine_differences(case: SubmissionCase) -> tuple[str, ...]:
    """Return differences between the submitter's machine and this one that may change last bits, a clause each."""
    stated, here = case.about.environment, this_machine()
    others = {r.environment.torch for r in case.records} - {stated.torch}
    threads = {r.environment.threads for r in case.records} - {1}
    clauses = [f"cells of torch {one}" for one in sorted(others)]
    return (*stated.unlike(here), *clauses, *(f"cells of {n} threads" for n in sorted(threads)))
