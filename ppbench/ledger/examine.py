"""Whether a submission stands: what is asked of it, in order, before it is handed in and where it is received.

Every check is made from the records, the suite that comes with ppbench and the packages that are installed here;
nothing that the submission says of itself is believed. Cells are computed again last, where all else holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from ppbench.base.errors import UsageError, first_of
from ppbench.ledger.case import Case, Outcome
from ppbench.ledger.due import complete, due_of
from ppbench.ledger.rerun import TOLERANCE, drawn, recomputed, tolerated, unequal
from ppbench.ledger.submission import entry_of, machine, strangers
from ppbench.records.schema import Record
from ppbench.records.soundness import soundness_of
from ppbench.records.sources import code_of
from ppbench.records.store import Store
from ppbench.report.compare.outcome import failed_controls
from ppbench.report.controls import check_harness
from ppbench.report.page.board import claimed
from ppbench.report.verify import examine
from ppbench.run.recheck import recheck
from ppbench.run.schedule import Wanted

CHECKS = ("verify", "controls", "code", "apart", "suite", "complete", "again")


def examined(case: Case) -> Iterator[Outcome]:
    """Yield the outcome of each check of `CHECKS` as it is known; what rests on one that fails is not made.

    Raises UsageError: a check cannot be made here, for want of data or because something cannot be used.
    """
    made = list[Outcome]()
    for check in (_verified, _controls, _code, _apart):
        made.append(check(case))
        yield made[-1]
    due, outcome = due_of(case) if made[2].ok else (None, Outcome("suite", None, "Other code than here was run."))
    made.append(outcome)
    yield outcome
    outcome = Outcome("complete", None, "It is not known what is asked.") if due is None else complete(case, due)
    made.append(outcome)
    yield outcome
    if due is not None and all(one.ok for one in made):
        yield _again(case, due.may)
    else:
        yield Outcome("again", None, "Nothing is computed again where something before it does not hold.")


def _verified(case: Case) -> Outcome:
    """Return whether all that can be computed again without training agrees."""
    problems = examine(case.store.out, claimed, recheck).problems
    sentence = f"{first_of(problems)}." if problems else "Every record, artifact and table row agrees with its scores."
    return Outcome("verify", not problems, sentence)


def _controls(case: Case) -> Outcome:
    """Return whether the controls ran and hold, and the self-test of where the cells were computed."""
    try:
        outcome = soundness_of(case.store)
    except UsageError as error:
        return Outcome("controls", False, str(error))
    faults, harness = failed_controls(case.records, outcome), check_harness(outcome)
    if harness.ok is None:
        faults.append(f"harness: {harness.sentence}")
    if faults:
        return Outcome("controls", False, f"{first_of(faults)}.")
    return Outcome("controls", True, "The undefended model falls, noise gives nothing away, the self-test passes.")


def _code(case: Case) -> Outcome:
    """Return whether records and submission are of the code that is installed here."""
    for stated in case.about.plugins:
        here = entry_of(stated.group, stated.name)
        if (stated.package, stated.version, stated.code) != (here.package, here.version, here.code):
            problem = (
                f"The {stated.words}, code {stated.code}, is handed in; here is {here.package} {here.version}, {here.code}"
            )
            return Outcome("code", False, f"{problem}.")
    if stale := [record.config for record in case.records if _stale(record)]:
        problem = f"{len(stale)} of {len(case.records)} cells, such as {stale[0].defense.id} under {stale[0].attack.id}"
        return Outcome("code", False, f"{problem}, are of other code than what is installed here; sweep again with this.")
    if missing := {*strangers(case.records)} - {(one.group, one.name) for one in case.about.plugins}:
        problem = ", ".join(sorted(name for _, name in missing))
        return Outcome("code", False, f"Cells are of {problem} too, which is not handed in.")
    return Outcome("code", True, "; ".join(f"{one.words}, code {one.code}" for one in case.about.plugins) + ".")


def _stale(record: Record) -> bool:
    """Return whether what is installed here under a cell's names has other code than took part in it."""
    defense, attack = record.config.defense, record.config.attack
    here = code_of(("attacks", attack.id), ("questions", attack.kind), ("attacks", attack.follows or ""))
    return code_of(("defenses", defense.id)) != defense.code or here != attack.code


def _apart(case: Case) -> Outcome:
    """Return whether strangers' attacks ran apart from the truth, as records say; again they run so in any case."""
    beside = [r for r in case.records if r.config.attack.code and r.victims and not r.environment.apart]
    if not beside:
        return Outcome("apart", True, "No attack of another package ran in a process that knows the truth.")
    problem = (
        f"{len(beside)} cells of other packages' attacks, such as {beside[0].config.attack.id}, ran in a process that"
    )
    return Outcome("apart", False, f"{problem} knows the truth; sweep with --isolate.")


def _again(case: Case, planned: Sequence[Wanted]) -> Outcome:
    """Return whether cells that nobody could foresee come out again."""
    terms = case.terms
    chosen = drawn(case.records, terms.share, secrets.randbelow(2**63) if terms.seed is None else terms.seed)
    unlike = _unlike(case)
    new = recomputed(planned, chosen.cells, case.home, case.salt, terms.workers, terms.progress)
    head = f"{len(chosen.cells)} of {chosen.all} cells were computed again (--seed {chosen.seed})"
    if check_harness(soundness_of(new)).ok is not True:
        return Outcome("again", False, f"{head}, but the self-test fails here: nothing can be said.")
    how = f"within the tolerance of another machine ({'; '.join(unlike)}): {TOLERANCE}" if unlike else "bit for bit"
    have, wrong = {record.cell_id: record for record in case.records}, list[str]()
    for cell in chosen.cells:
        what = _differing(have[cell], new, len(chosen.cells) if unlike else 0)
        about = have[cell].config
        wrong += [f"{cell} ({about.defense.id} under {about.attack.id}, {about.stage}): {what}"] if what else []
    if wrong:
        return Outcome("again", False, f"{head}; {len(wrong)} of them do not agree {how}: {first_of(wrong)}.")
    return Outcome("again", True, f"{head} and agree {how}.")


def _differing(record: Record, new: Store, cells: int) -> str:
    """Return what of a cell does not agree, "" for nothing; cells: how many are compared with tolerance, 0: exactly."""
    if not new.has(record.cell_id):
        return "it did not run"
    again = new.load(record.cell_id)
    return tolerated(record, again, cells) if cells else unequal(record, again)


def _unlike(case: Case) -> tuple[str, ...]:
    """Return what differs between where the cells were computed and here and may change last bits, a clause each."""
    stated, here = case.about.environment, machine()
    others = {r.environment.torch for r in case.records} - {stated.torch}
    threads = {r.environment.threads for r in case.records} - {1}
    clauses = [f"cells of torch {one}" for one in sorted(others)]
    return (*stated.unlike(here), *clauses, *(f"cells of {n} threads" for n in sorted(threads)))
