"""The checks of a submission, in order, before it is submitted and where it is received.

Every check relies on the records, the shipped suite and the packages that are installed here, never on the
submission's own description. Cells are recomputed last, if all other checks pass.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError, first_of, shown
from ppbench.base.files import kind_of
from ppbench.base.registry import GROUP_NOUNS, find
from ppbench.base.toml_files import shipped
from ppbench.ledger.submission import (
    Submission,
    describe_submission,
    entry_of,
    submission_of,
    suite_of,
    third_party_plugins,
    this_machine,
)
from ppbench.metrics.spec import Rule
from ppbench.questions.base import question_for
from ppbench.records.archive import unpack_archive
from ppbench.records.run_files import SALT_FILE, commitment, keep_salt, salt_of, soundness_of
from ppbench.records.schema import MODEL_METRICS, Record, Strict
from ppbench.records.sources import code_of
from ppbench.records.store import Store, open_results
from ppbench.report.compare.outcome import failed_controls
from ppbench.report.compare.paired import Change, change, rules_for
from ppbench.report.controls import CONTROLS, check_harness, defenses_without_result, failures
from ppbench.run.cells import Cell
from ppbench.run.evaluation import compute, local_executor, prepare_results
from ppbench.run.executors import check_workers
from ppbench.run.jobs import OPEN
from ppbench.run.schedule import PlannedCells
from ppbench.run.suite import Suite, load_suite, with_salt
from ppbench.run.sweep import local_dataset, plan_sweep
from ppbench.verification.recheck import EPSILON_TOLERANCE, full_findings

# -- Recompute random cells of a submission, unpredictable for the submitter, and compare them record by record --
# Only this detects forged answers and accuracies that are consistent with everything else. One seed gives one result
# on one machine, so every score must agree bit for bit. Another processor or version of torch rounds sums
# differently, and a search may take another path: there `untolerated_difference` and `too_many_moved` decide, by bounds
# on figures, however many cells are compared. Whoever claims another machine has more cells computed again.
#
# Measured on 248 pairs of cells (digits, mlp and lenet; AVX-512 beside AVX2 and beside neither): 8 % moved beyond the
# tolerance of compare, all of them searches; a median PSNR by 5.6 dB at most, a share of images by 0.33; accuracies,
# members and labels did not (benchmarks/bench_kernels.py).

RERUN_SHARE, MACHINE_SHARE = 0.1, 0.3
"""Share of the cells that are computed again, and the least where another machine is claimed."""
MACHINE_BOUNDS = {"psnr_median": 8.0, "share_above_20db": 0.4, "epsilon_lower": 0.5}
"""Largest change of a cell's figure that another machine explains, by metric."""
MACHINE_BOUND = 0.1
"""The same of any other metric."""
MOVED_SHARE = 0.25
"""Share of the compared cells, and one more, that may change beyond the tolerance of `ppbench compare`."""
TOLERANCE_WORDS = (
    "same questions, status and bytes sent; epsilon to 1e-6; accuracy within the other's 95 % interval; median PSNR "
    "within 8 dB, shares of images within 0.4, other figures within 0.1; one cell in four, and one more, beyond the "
    "tolerance of `ppbench compare`"
)
NOT_COMPARED = frozenset({"environment", "cost", "cell_id", "config"})
"""Fields of a record that are not compared directly: memory depends on the machine, the name on the configuration."""


def draw_cells(records: Sequence[Record], share: float, seed: int) -> tuple[str, ...]:
    """Draw the names of a share of the cells with plugins of other packages, and of the other cells, at least one each.

    Drawn are the names with the smallest SHA-256 of seed and name: reproducible, but unpredictable without the seed.
    """
    theirs = [r.cell_id for r in records if r.config.defense.code or r.config.attack.code]
    others = sorted({r.cell_id for r in records} - {*theirs})
    chosen = list[str]()
    for some in (theirs, others):
        ranked = sorted(some, key=lambda cell: hashlib.sha256(f"{seed}/{cell}".encode()).digest())
        chosen += ranked[: math.ceil(share * len(some) - 1e-9) or bool(some)]
    return tuple(sorted(chosen))


def recompute(
    planned: Sequence[PlannedCells], cells: Sequence[str], out: Path, salt: str, workers: int | None, progress: Bars
) -> Store:
    """Compute these cells of `planned`, with their trainings, into the new folder `out`; return its store.

    Raises UsageError: a wrong number of workers, or the folder cannot be written.
    """
    check_workers(workers)
    due, chosen = list[PlannedCells](), {*cells}
    for one in planned:
        kept = tuple(cell for cell in one.cells if cell.id in chosen)
        due += [replace(one, cells=kept, gate=OPEN)] if kept else []
    store = Store(out)
    prepare_results(store, salt)
    executor = local_executor(workers, due[0].experiment.config.device if due else "cpu", progress)
    compute(due, due, store, executor, progress, strict=False)
    return store


def first_difference(record: Record, again: Record) -> str:
    """Return the first difference between a record and its recomputation on this machine, "" for none."""
    for place, (one, two) in enumerate(zip(record.victims, again.victims, strict=False)):
        if type(one) is not type(two) or one != two:
            return f"victim {place}: {_field(one, two)}"
    fields = [name for name in Record.model_fields if name not in NOT_COMPARED]
    for name in fields:
        if getattr(record, name) != getattr(again, name):
            return _words(name, getattr(record, name), getattr(again, name))
    costs = (one.cost.model_copy(update={"memory_peak": None}) for one in (record, again))
    return "" if len({*map(str, costs)}) == 1 else "cost differs from what was computed again"


def _field(one: Strict, two: Strict) -> str:
    """Return the first field in which two scores differ, with both values."""
    names = [name for name in type(one).model_fields if getattr(one, name) != getattr(two, name, None)]
    return _words(names[0], getattr(one, names[0]), getattr(two, names[0], None)) if names else "another kind of score"


def _words(name: str, one: object, two: object) -> str:
    short = isinstance(one, str | float | int | bool | None) and isinstance(two, str | float | int | bool | None)
    return f"{name} is {one}, computed again {two}" if short else f"{name} differs from what was computed again"


def untolerated_difference(record: Record, again: Record) -> str:
    """Return a difference that another machine does not explain, "" for none. See `TOLERANCE_WORDS`."""
    for name in ("status", "asked"):
        if getattr(record, name) != getattr(again, name):
            return _words(name, getattr(record, name), getattr(again, name))
    sent = [(r.cost.bytes_up, r.cost.bytes_down, r.cost.bytes_setup) for r in (record, again)]
    if sent[0] != sent[1]:
        return _words("bytes", *sent)
    return next(_untolerated(record, again), "")


def _untolerated(record: Record, again: Record) -> Iterator[str]:
    one, two = record.privacy.epsilon, again.privacy.epsilon
    if (one is None) != (two is None) or (
        one is not None and not math.isclose(one, two or 0.0, rel_tol=EPSILON_TOLERANCE)
    ):
        yield _words("epsilon", one, two)
    for name in (metric.name for metric in MODEL_METRICS.values() if metric.judgment is not None):
        (stated, *_), (value, low, high) = record.utility.figure(name), again.utility.figure(name)
        if (stated is None) != (value is None):
            yield _words(name, stated, value)
        elif stated is not None and low is not None and high is not None and not low <= stated <= high:
            yield f"{name} is {stated:.6g}, computed again {value:.6g} [{low:.6g}, {high:.6g}]"
    yield from _scores(record, again)


def _scores(record: Record, again: Record) -> Iterator[str]:
    """Yield figures of two cells' scores that differ by more than another machine explains."""
    if [(v.place, v.truth) for v in record.victims] != [(v.place, v.truth) for v in again.victims]:
        yield "its victims are others than those computed again"
        return
    if record.victims == again.victims:
        return
    effects = _effects(record, again)
    for rule, effect in effects:
        bound = MACHINE_BOUNDS.get(rule.metric, MACHINE_BOUND)
        if abs(effect.base - effect.new) > bound:
            limit = f"another machine explains {bound:g}"
            yield f"{rule.name} is {effect.base:.6g}, computed again {effect.new:.6g} ({limit})"
    if not effects:
        yield f"scores of {question_for(record).name} differ, and no rule says by how much they may"


def _effects(record: Record, again: Record) -> list[tuple[Rule, Change]]:
    """Return the rules that judge a cell, each with the change of its figure."""
    rules = [rule for rule in rules_for(record) if (m := record.metric(rule.metric)) and m.value is not None]
    return [(rule, change([record], [again], rule, record.cell_id)) for rule in rules]


def too_many_moved(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Return that more cells have changed, each within its bounds, than another machine explains, "" for none."""
    moved = [
        one.cell_id
        for one, two in pairs
        if one.victims != two.victims and any(abs(e.base - e.new) > rule.tolerance for rule, e in _effects(one, two))
    ]
    most = 1 + int(MOVED_SHARE * len(pairs))
    if len(moved) <= most:
        return ""
    return f"{len(moved)} of {len(pairs)} cells, such as {moved[0]}, changed; another machine explains {most}"


# -- A submission under judgement: opened from a folder of results, or from a submitted archive --


CheckFinding = tuple[bool | None, str]
"""Whether a check holds, None if it was not made, and its finding in a sentence."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check. ok, sentence: its finding."""

    name: str
    ok: bool | None
    sentence: str


@dataclass(frozen=True)
class RerunTerms:
    """How cells are recomputed. share: fraction of cells; seed: of their draw, None for a random one.

    dataset, weights: where data and AlexNet's weights lie here; salt: a file with the secret of the draws.
    """

    share: float = RERUN_SHARE
    seed: int | None = None
    dataset: str | None = None
    weights: str | None = None
    salt: Path | None = None
    workers: int | None = None
    progress: Bars = field(default_factory=lambda: Bars(quiet=True))


@dataclass(frozen=True)
class SubmissionCase:
    """A submission: its folder of results, its readable records, its own description.

    home: folder for recomputed cells, which does not exist yet. salt: the secret of all draws, "" for none.
    """

    store: Store
    records: tuple[Record, ...]
    about: Submission
    home: Path
    terms: RerunTerms
    salt: str

    @property
    def defenses(self) -> list[str]:
        """The submitted defenses."""
        return [one.name for one in self.about.plugins if one.group == "defenses"]

    @property
    def attacks(self) -> list[str]:
        """The submitted attacks."""
        return [one.name for one in self.about.plugins if one.group == "attacks"]


def case_of_folder(
    folder: Path, scratch: Path, terms: RerunTerms, paper: str = "", reference: str = "", licence: str = ""
) -> SubmissionCase:
    """Return a folder of results as a case. scratch: an empty folder to compute in.

    Raises UsageError: no records, records of no suite or of several, or no plugin of another package.
    """
    store = open_results(folder)
    if kind_of(folder) == "file":
        raise UsageError(f"{folder} is an archive; give the folder of results, or --check.")
    records, _ = store.readable()
    if not records:
        raise UsageError(f"{folder} holds no records that can be read; give the --out of a sweep.")
    about = describe_submission(records, paper, reference, licence)
    return _case(store, records, about, scratch, terms, salt_of(folder, fresh=False))


def case_of_archive(archive: Path, scratch: Path, terms: RerunTerms) -> SubmissionCase:
    """Unpack a submitted archive into `scratch`, an empty folder, and return it as a case.

    Raises UsageError: it is no submission, or damaged, or its plugins are not installed here.
    """
    if kind_of(archive) != "file":
        raise UsageError(f"{archive} is no file; give the archive that `ppbench submit` wrote.")
    about = submission_of(open_results(archive).files)
    for one in about.plugins:
        if find(one.group, one.name) is None:
            raise UsageError(
                f"The {GROUP_NOUNS[one.group]} {shown(one.name)} is not installed here; install {one.package} in "
                f"version {one.version}, with the code {one.code}."
            )
    folder = scratch / "received"
    if damaged := unpack_archive(archive, folder):
        raise UsageError(f"{archive} is damaged: {first_of(damaged)}.")
    store = Store(folder)
    records, _ = store.readable()
    suite_of(records)
    return _case(store, records, about, scratch, terms, "")


def _case(
    store: Store, records: list[Record], about: Submission, scratch: Path, terms: RerunTerms, salt: str
) -> SubmissionCase:
    """Return a case with the secret of its draws, if they have one (UsageError: it is missing)."""
    needed = {record.config.data.salt for record in records} - {""}
    if needed and terms.salt is not None:
        salt = _secret(terms.salt)
    if needed - {commitment(salt)}:
        raise UsageError(
            "The cells were drawn with a secret, which no archive holds; give its holder's "
            f"OUT/{SALT_FILE}, as --salt FILE."
        )
    if needed and store.out.is_relative_to(scratch):
        keep_salt(store.out, salt)  # verification draws the victims again
    return SubmissionCase(store, tuple(records), about, scratch / "again", terms, salt if needed else "")


def _secret(path: Path) -> str:
    """Return the secret in a file named like OUT/salt, or in its folder."""
    folder = path if kind_of(path) == "folder" else path.parent
    if kind_of(folder / SALT_FILE) != "file":
        raise UsageError(f"There is no file {folder / SALT_FILE}; give the secret as the file of that name.")
    return salt_of(folder, fresh=False)


# -- The cells that a submission's suite requires and allows, in the version that is shipped here --


@dataclass(frozen=True)
class Due:
    """The cells of a suite. must: required, those of the submitted plugins and the controls; may: allowed."""

    suite: Suite
    must: tuple[PlannedCells, ...]
    may: tuple[PlannedCells, ...]


def due_of(case: SubmissionCase) -> tuple[Due | None, CheckFinding]:
    """Return the cells due in a submission's suite, None if its cells do not belong to it, and the finding.

    Raises UsageError: its data or one of its plugins cannot be used here.
    """
    config = case.records[0].config
    word, _, _ = config.suite.rpartition("/")
    id_, _, preset = word.partition("@")
    if id_ not in shipped():
        return None, (False, f"No suite that comes with ppbench is called {shown(id_)}.")
    data, where = _data(case), config.federation
    try:
        suite = load_suite(
            id_,
            preset,
            add=case.defenses,
            dataset=data,
            device=where.device,
            tf32=bool(where.tf32),
            weights=case.terms.weights,
            isolate=bool(case.attacks),
        )
    except UsageError as error:
        if preset:
            return None, (False, str(error))
        raise
    if (suite.name, suite.digest) != (config.suite, config.suite_digest):
        problem = f"The cells are of {shown(config.suite)} with the digest {shown(config.suite_digest)}"
        return None, (False, f"{problem}; ppbench comes with {suite.name}, {suite.digest}.")
    if (case.about.suite, case.about.digest) != (suite.name, suite.digest):
        problem = f"What is handed in says {shown(case.about.suite)}, {shown(case.about.digest)}"
        return None, (False, f"{problem}; its cells are of {suite.name}, {suite.digest}.")
    return _due_in(case, with_salt(suite, case.salt) if case.salt else suite)


def _due_in(case: SubmissionCase, suite: Suite) -> tuple[Due | None, CheckFinding]:
    """Return a suite's cells, None if a record is none of them (other settings), and the finding."""
    mine = {"defense": case.defenses} if case.defenses else {"attack": case.attacks} if case.attacks else {}
    must = may = plan_sweep(suite, case.home, mine).cells
    if _foreign_cells(case, must):
        may = plan_sweep(suite, case.home).cells
    if foreign := _foreign_cells(case, may):
        about = case.records[[r.cell_id for r in case.records].index(foreign[0])].config
        problem = f"{len(foreign)} of {len(case.records)} cells are none of {suite.name} as it is here, such as"
        why = "its settings, data, versions or weights are others"
        return None, (False, f"{problem} {foreign[0]} ({about.defense.id} under {about.attack.id}): {why}.")
    return Due(suite, must, may), (True, f"All cells are of {suite.name}, {suite.digest}, as it is here.")


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


def check_complete(case: SubmissionCase, due: Due) -> CheckFinding:
    """Check that all required cells are there and have a result.

    They are the cells of `ppbench sweep SUITE --add NAME --only defense=NAME`: every attack, every value of the control
    parameter, every seed; for submitted attacks alone, the cells of all defenses that the suite lists.
    """
    have = {record.cell_id for record in case.records}
    unskipped = [one for one in due.must if not (one.gate and one.gate.is_closed(case.records))]
    expected = [cell for one in unskipped for cell in one.cells if _is_required(case, cell)]
    name = due.suite.name
    if gone := [cell.config for cell in expected if cell.id not in have]:
        first = f"{gone[0].defense.id} under {gone[0].attack.id} ({gone[0].stage})"
        problem = f"{len(gone)} of {len(expected)} cells that {name} requires are missing, such as {first}"
        return False, f"{problem}; sweep into the folder again."
    if failed := failures(case.records):
        problem = f"{len(failed)} cells failed, such as {failed[0].cell_id} ({failed[0].reason})"
        return False, f"{problem}; sweep into the folder again."
    if unknown := defenses_without_result(case.records):
        return False, f"No cell of {', '.join(unknown)} is complete."
    kept = ", ".join([*CONTROLS, *case.defenses] if case.defenses else case.attacks)
    return True, f"All {len(expected)} cells that {name} requires of {kept} are there."


def _is_required(case: SubmissionCase, cell: Cell) -> bool:
    """Return whether a cell's attack is one of ours or submitted: others may be installed only here."""
    return not cell.config.attack.code or cell.attack.name in case.attacks


CHECKS = ("verify", "controls", "code", "apart", "suite", "complete", "again")


def run_checks(case: SubmissionCase) -> Iterator[CheckOutcome]:
    """Run the checks `CHECKS` in order and yield each outcome; a check that depends on a failed one is not made.

    Raises UsageError: a check cannot be made here, because data are missing or a plugin cannot be used.
    """
    made = list[CheckOutcome]()

    def outcome(finding: CheckFinding) -> CheckOutcome:
        made.append(CheckOutcome(CHECKS[len(made)], *finding))
        return made[-1]

    for check in (_check_records, _check_controls, _check_code, _check_isolation):
        yield outcome(check(case))
    due, finding = due_of(case) if made[2].ok else (None, (None, "The cells were computed by other code."))
    yield outcome(finding)
    yield outcome((None, "The required cells are unknown.") if due is None else check_complete(case, due))
    if due is not None and all(one.ok for one in made):
        yield outcome(_check_rerun(case, due.may))
    else:
        yield outcome((None, "No cell is computed again, since an earlier check does not hold."))


def _check_records(case: SubmissionCase) -> CheckFinding:
    """Check all figures that can be recomputed without training."""
    findings = full_findings(case.store.out, page=False)
    problems, agrees = findings.problems, f"What was checked agrees: {', '.join(findings.checked)}."
    sentence = f"{first_of(problems)}." if problems else f"Not checked: {'; '.join(findings.unchecked)}. {agrees}"
    return not problems, sentence


def _check_controls(case: SubmissionCase) -> CheckFinding:
    """Check that the controls ran and pass, and the self-test where the cells were computed."""
    try:
        outcome = soundness_of(case.store)
    except UsageError as error:
        return False, str(error)
    faults, harness = failed_controls(case.records, outcome), check_harness(outcome)
    if harness.ok is None:
        faults.append(f"harness: {harness.sentence}")
    if faults:
        return False, f"{first_of(faults)}."
    return True, "The undefended model falls, noise gives nothing away, the self-test passes."


def _check_code(case: SubmissionCase) -> CheckFinding:
    """Check that records and submission match the code that is installed here."""
    for stated in case.about.plugins:
        here = entry_of(stated.group, stated.name)
        if (stated.package, stated.version, stated.code) != (here.package, here.version, here.code):
            installed = f"{here.package} {here.version}, {here.code}"
            return False, f"The {stated.words}, code {stated.code}, is handed in; here is {installed}."
    if stale := [record.config for record in case.records if _stale(record)]:
        problem = f"{len(stale)} of {len(case.records)} cells, such as {stale[0].defense.id} under {stale[0].attack.id}"
        return False, f"{problem}, are of other code than what is installed here; sweep again with it."
    if missing := {*third_party_plugins(case.records)} - {(one.group, one.name) for one in case.about.plugins}:
        names = ", ".join(sorted(name for _, name in missing))
        return False, f"Cells are of {names} too, which is not handed in."
    return True, "; ".join(f"{one.words}, code {one.code}" for one in case.about.plugins) + "."


def _stale(record: Record) -> bool:
    """Return whether the plugins of a cell have other code here than when it was computed."""
    defense, attack = record.config.defense, record.config.attack
    here = code_of(("attacks", attack.id), ("questions", attack.kind), ("attacks", attack.follows or ""))
    return code_of(("defenses", defense.id)) != defense.code or here != attack.code


def _check_isolation(case: SubmissionCase) -> CheckFinding:
    """Check that records say that other packages' attacks were isolated from the truth; reruns always isolate."""
    beside = [r for r in case.records if r.config.attack.code and r.victims and not r.environment.apart]
    if not beside:
        return True, "No attack of another package ran in a process that knows the truth."
    cells = f"{len(beside)} cells of other packages' attacks, such as {beside[0].config.attack.id}"
    return False, f"{cells}, ran in a process that knows the truth; sweep with --isolate."


def _check_rerun(case: SubmissionCase, planned: Sequence[PlannedCells]) -> CheckFinding:
    """Recompute a random share of the cells, a larger one for another machine, and check that they agree."""
    terms, unlike = case.terms, _machine_differences(case)
    share = max(terms.share, MACHINE_SHARE) if unlike else terms.share
    seed = secrets.randbelow(2**63) if terms.seed is None else terms.seed
    chosen = draw_cells(case.records, share, seed)
    new = recompute(planned, chosen, case.home, case.salt, terms.workers, terms.progress)
    head = f"{len(chosen)} of {len(case.records)} cells were computed again (--seed {seed})"
    if check_harness(soundness_of(new)).ok is not True:
        return False, f"{head}, but the self-test fails here: inconclusive."
    how = (
        f"within the tolerance of another machine ({'; '.join(unlike)}): {TOLERANCE_WORDS}" if unlike else "bit for bit"
    )
    have, wrong = {record.cell_id: record for record in case.records}, list[str]()
    for cell in chosen:
        what = _difference(have[cell], new, bool(unlike))
        about = have[cell].config
        wrong += [f"{cell} ({about.defense.id} under {about.attack.id}, {about.stage}): {what}"] if what else []
    if wrong:
        return False, f"{head}; {len(wrong)} of them do not agree {how}: {first_of(wrong)}."
    pairs = [(have[cell], new.load(cell)) for cell in chosen]
    if unlike and (moved := too_many_moved(pairs)):
        return False, f"{head}; they do not agree {how}: {moved}."
    return True, f"{head} and agree {how}."


def _difference(record: Record, new: Store, unlike: bool) -> str:
    """Return the difference of a recomputed cell, "" for none; unlike: whether another machine computed it."""
    if not new.has(record.cell_id):
        return "it did not run"
    again = new.load(record.cell_id)
    return untolerated_difference(record, again) if unlike else first_difference(record, again)


def _machine_differences(case: SubmissionCase) -> tuple[str, ...]:
    """Return differences between the submitter's machine and this one that may change last bits, a clause each."""
    stated, here = case.about.environment, this_machine()
    others = {r.environment.torch for r in case.records} - {stated.torch}
    threads = {r.environment.threads for r in case.records} - {1}
    clauses = [f"cells of torch {one}" for one in sorted(others)]
    return (*stated.unlike(here), *clauses, *(f"cells of {n} threads" for n in sorted(threads)))
