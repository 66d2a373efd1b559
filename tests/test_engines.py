"""The schedule over executors, and the one of this machine: order, what dies, trainings that raise."""

import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import process
from pathlib import Path
from typing import Any

import pytest

from ppbench.base.errors import Unwritable, UsageError
from ppbench.records.schema import Record
from ppbench.records.store import Store
from ppbench.run.audit.runs import Refused
from ppbench.run.config import configure
from ppbench.run.evaluation import compute
from ppbench.run.executors import WORKERS, check_workers
from ppbench.run.executors.local import InlineExecutor, LocalExecutor
from ppbench.run.experiment import Experiment, resolve
from ppbench.run.jobs import Done, WorkerDied, WorkItem, work
from ppbench.run.schedule import plan_cells, unfinished
from ppbench.run.suite import load_suite
from ppbench.run.sweep import plan_sweep, sweep

SMALL: dict[str, Any] = {
    **{"defense": "ppdl", "grid": (0.1,), "attacks": ("label_recovery", "planted_slow"), "attack_batch": (1, 3, 2)},
    **{"clients": 2, "train": 60, "rounds": 1, "victims": 2, "stages": ("init",)},
    "settings": {"planted_slow.seconds": 0.0},
}
TRAININGS, GROUPS, CELLS = 3, 9, 18
pytestmark = pytest.mark.usefixtures("planted")


class Watched(InlineExecutor):
    """Runs jobs in this process, two submitted at a time; `fate` may give one another end than its own."""

    capacity = 2

    def __init__(self, fate: Callable[[WorkItem], Exception | None] = lambda job: None) -> None:
        super().__init__(lambda rounds: None)
        self.fate, self.begun, self.open = fate, list[WorkItem](), list[int]()

    def submit(self, job: WorkItem) -> None:
        super().submit(job)
        self.begun.append(job)
        self.open.append(len(self._jobs))

    def wait(self) -> Done:
        error = self.fate(self._jobs[0])
        return super().wait() if error is None else Done(self._jobs.popleft(), error)


class Heard:
    """Progress that is kept: steps of each phase still to come, and how cells ended."""

    def __init__(self) -> None:
        self.left, self.statuses = Counter[str](), Counter[str]()

    def expect(self, phase: str, steps: int) -> None:
        self.left[phase] += steps

    def advance(self, phase: str, steps: int) -> None:
        self.left[phase] -= steps

    def cell(self, status: str, about: str = "") -> None:
        self.statuses[status] += 1


def small(**options: Any) -> Experiment:
    return resolve(configure(**{**SMALL, **options}))


def run(out, executor, experiment=None, *others, strict=False):
    """Have everything computed that is missing; return what was heard of it."""
    store, heard = Store(out), Heard()
    store.prepare()
    configs = plan_cells([experiment or small(), *others])
    compute(configs, unfinished(configs, store), store, executor, heard, strict=strict)
    return heard


def records(out: Path) -> list[Record]:
    return Store(out).load_all()


def trains(job: WorkItem) -> bool:
    return job.group is None


# -- the schedule ----------------------------------------------------------------------------------------------------
def test_trainings_come_first_and_once_then_large_batches(tmp_path):
    executor = Watched()
    heard = run(tmp_path, executor)
    assert [trains(job) for job in executor.begun] == [True] * TRAININGS + [False] * GROUPS
    assert len({job.point for job in executor.begun[:TRAININGS]}) == TRAININGS
    for point in range(TRAININGS):
        assert [job.group.batch for job in executor.begun if job.group and job.point == point] == [3, 2, 1]
    assert max(executor.open) == executor.capacity, "no more is handed out than can run: later jobs may be more urgent"
    assert heard.left["attacking"] == 0 and heard.statuses == {"complete": CELLS}


def test_what_is_there_is_not_made_again(tmp_path):
    run(tmp_path, Watched())
    lost = [r.cell_id for r in records(tmp_path) if r.config.batch_size == 2 and r.config.attack.id == "planted_slow"]
    for cell in lost:
        (tmp_path / "records" / f"{cell}.json").unlink()
    executor = Watched()
    run(tmp_path, executor)
    assert sorted(cell for job in executor.begun for cell in job.cells) == sorted(lost) and len(lost) == 3
    assert not any(trains(job) for job in executor.begun), "trainings are kept"
    for record in records(tmp_path):
        if record.config.attack.id == "label_recovery":
            (tmp_path / "records" / f"{record.cell_id}.json").unlink()
    again = Watched()
    run(tmp_path, again)
    batches = [job.group.batch for job in again.begun if job.group]
    assert batches == [3, 3, 3, 2, 2, 2, 1, 1, 1], "of all that is ready, the largest batch first"


def test_what_two_evaluations_share_is_made_once(tmp_path):
    executor = Watched()
    run(tmp_path, executor, small(), small(defense="dp"))
    assert sum(trains(job) for job in executor.begun) == TRAININGS + 1
    named = [cell for job in executor.begun for cell in job.cells]
    assert len(named) == len(set(named)) == CELLS * (TRAININGS + 1) // TRAININGS


def test_of_a_group_whose_worker_dies_only_the_cell_that_did_it_fails(tmp_path):
    culprit = next(c.id for w in plan_cells([small()]) for c in w.cells if c.attack.name == "planted_slow")
    executor = Watched(lambda job: WorkerDied("killed") if culprit in job.cells else None)
    heard = run(tmp_path, executor)
    tries = [job.cells for job in executor.begun if culprit in job.cells]
    assert [len(cells) for cells in tries] == [2, 1, 1], "with its group, alone, and once more"
    failed = [r for r in records(tmp_path) if r.status == "failed"]
    assert [(r.cell_id, r.reason) for r in failed] == [(culprit, "the cell: WorkerDied: killed")]
    assert heard.statuses == {"complete": CELLS - 1, "failed": 1} and heard.left["attacking"] == 0
    clean = Watched()
    assert run(tmp_path, clean).statuses == {"complete": 1}, "the next run tries it again, and it alone"
    assert [job.cells for job in clean.begun] == [(culprit,)]


def test_a_worker_that_dies_once_costs_nothing(tmp_path):
    died = set[int]()

    def fate(job):
        first = trains(job) and job.point not in died
        died.add(job.point)
        return WorkerDied("its node went away") if first else None

    executor = Watched(fate)
    assert run(tmp_path, executor).statuses == {"complete": CELLS}
    assert sum(trains(job) for job in executor.begun) == 2 * TRAININGS


@pytest.mark.parametrize(
    ("error", "tries", "reason"),
    [
        (ValueError("planted"), 1, "its training: ValueError: planted"),
        (WorkerDied("killed"), 2, "its training: WorkerDied: killed"),
        (UsageError("No."), 1, "its training: UsageError: No."),
    ],
)
def test_a_training_that_is_lost_fails_its_cells_and_no_others(error, tries, reason, tmp_path):
    executor = Watched(lambda job: error if trains(job) and job.point == 1 else None)
    heard = run(tmp_path, executor)
    assert sum(job.point == 1 for job in executor.begun) == tries, "none of its cells is begun"
    lost = [r for r in records(tmp_path) if r.status == "failed"]
    assert {r.reason for r in lost} == {reason} and len(lost) == CELLS // TRAININGS
    assert heard.statuses == {"complete": CELLS - len(lost), "failed": len(lost)} and heard.left["attacking"] == 0


def test_an_error_outside_of_attacks_fails_the_cells_of_its_job(tmp_path):
    executor = Watched(lambda job: OSError("planted") if job.group and (job.point, job.group.batch) == (0, 2) else None)
    run(tmp_path, executor)
    assert Counter(r.reason for r in records(tmp_path)) == {None: CELLS - 2, "the cell: OSError: planted": 2}


def test_a_refused_audit_is_told_by_its_cells(tmp_path):
    """The schedule does not judge a refusal: the cells are run, and each says what was refused."""
    executor = Watched(lambda job: Refused("no audit") if trains(job) else None)
    assert run(tmp_path, executor, strict=True).statuses == {"complete": CELLS}


@pytest.mark.parametrize("strict", [False, True])
def test_where_nothing_can_be_written_all_ends(strict, tmp_path):
    executor = Watched(lambda job: Unwritable("No space is left."))
    with pytest.raises(Unwritable, match="No space"):
        run(tmp_path, executor, strict=strict)
    assert records(tmp_path) == [] and len(executor._jobs) == 0


def test_a_single_evaluation_ends_with_the_first_error_of_ppbenchs_own(tmp_path):
    with pytest.raises(ValueError, match="planted"):
        run(tmp_path, Watched(lambda job: ValueError("planted")), strict=True)


@pytest.mark.parametrize(
    "error", [WorkerDied("its worker process was killed"), MemoryError("planted"), OSError(24, "Too many open files")]
)
def test_what_the_machine_has_no_more_of_fails_cells_with_the_cause_and_the_rest_goes_on(error, tmp_path):
    lost = Watched(lambda job: error if trains(job) and job.point == 0 else None)
    run(tmp_path, lost, strict=True)
    result = Counter((record.config.defense.id, record.status) for record in records(tmp_path))
    assert {status for (name, status) in result if name == "none"} == {"failed"}
    assert {status for (name, status) in result if name != "none"} == {"complete"}
    assert all(str(error) in record.reason for record in records(tmp_path) if record.status == "failed")


def test_a_worker_without_a_thread_to_lead_it_is_ended_and_told(tmp_path, forked, monkeypatch):
    """The process begins before the thread; nobody would ever tell it to end."""
    monkeypatch.setattr(process._ExecutorManagerThread, "start", raising(RuntimeError("can't start new thread")))
    before = {*multiprocessing.active_children()}
    with LocalExecutor(1, lambda rounds: None) as executor, pytest.raises(UsageError, match="can't start new thread"):
        executor.submit(WorkItem(small(), tmp_path, 0))
    for child in {*multiprocessing.active_children()} - before:
        child.join(5)
    assert not {*multiprocessing.active_children()} - before


def raising(error):
    def start(self):
        raise error

    return start


# -- processes of this machine ---------------------------------------------------------------------------------------
def test_a_worker_that_is_killed_takes_only_its_own_job_and_all_go_at_an_error(tmp_path, forked):
    attacks, settings = ("planted_deadly", "label_recovery", "planted_slow"), {"planted_slow.seconds": 300.0}
    experiment = small(defense="none", grid="quick", attacks=attacks, settings=settings)
    configs = plan_cells([experiment])

    def of(attack, batch):
        one = next(w for w in configs if w.group.batch == batch)
        cells = tuple(c.id for c in one.cells if c.attack.name == attack)
        return WorkItem(experiment, tmp_path, one.group.point, one.group, cells)

    Store(tmp_path).prepare()
    work(WorkItem(experiment, tmp_path, configs[0].group.point))
    deadly, others = of("planted_deadly", 1), [of("label_recovery", 3), of("planted_deadly", 2)]
    sore = WorkItem(small(defense="planted_sore", grid="quick"), tmp_path, 2)
    with pytest.raises(KeyboardInterrupt), LocalExecutor(2, lambda rounds: None) as executor:
        for job in (deadly, *others, sore):
            executor.submit(job)
        ended = {done.job: done.error for done in (executor.wait() for _ in range(4))}
        idle = next(pool for pool in executor._free if pool._processes)  # the other may not have begun
        next(iter(idle._processes.values())).kill()
        while not idle._broken:
            time.sleep(0.01)
        executor.submit(of("planted_slow", 1))
        executor.submit(of("label_recovery", 1))
        last = executor.wait()
        began = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began < 60, "the slow one is not waited for"
    assert isinstance(ended[deadly], WorkerDied) and "was killed" in str(ended[deadly])
    assert [ended[job] for job in others] == [None, None] and last.error is None
    message = f"{type(ended[sore]).__name__}: {ended[sore]}"  # an exception that does not survive pickling
    assert message.startswith("PluginError: The defense 'planted_sore' of package 'ppbench-planted'")
    assert "raised SoreError: planted in training (7) (ppbench_planted.py, line" in message
    assert "in prepare" in str(getattr(ended[sore], "__cause__", ""))
    assert {r.cell_id for r in records(tmp_path)} == {job.cells[0] for job in (*others, last.job)}


def undisturbed(suite, out):
    """Sweep in this process, in which nobody sleeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: None)
        return sweep(suite, out=out, engine="inline", isolate=False)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="finds worker processes in /proc")
def test_a_sweep_killed_with_its_worker_gives_what_an_undisturbed_one_gives(script, forked, tmp_path, monkeypatch):
    """First a worker, of which the sweep takes no notice, then the sweep: no file that is finished changes."""
    kill = script(Path(__file__).parents[1] / "benchmarks" / "kill_sweep.py")  # which does the same at length
    suite, log, out = tmp_path / "kill.toml", tmp_path / "log", tmp_path / "killed"
    suite.write_text(kill.SUITE.format(seeds="[0]", seconds="0.2", grid="[0.1]"))
    still = undisturbed(suite, tmp_path / "still")
    monkeypatch.setenv("PPBENCH_PLANTED_LOG", str(log))
    watch = kill.Watch(out)
    process = forked.Process(target=sweep, args=(suite,), kwargs={"out": out, "workers": 2, "isolate": False})
    process.start()

    def until(goal):
        while watch.count() < goal and process.is_alive():
            time.sleep(0.02)

    until(1)
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    os.kill(int(workers.read_text().split()[0]), signal.SIGKILL)
    until(watch.look() + 4)
    assert process.is_alive()
    orphans, patience = [Path("/proc", pid) for pid in workers.read_text().split()], time.monotonic() + 10
    process.kill()
    process.join()
    while any(pid.exists() for pid in orphans) and time.monotonic() < patience:  # they die with it, a little later
        time.sleep(0.02)
    cells = len(still.records)
    left = cells - watch.look()
    assert 0 < left < cells, "killed too late, or too early, to prove anything"
    last = undisturbed(suite, out)
    watch.look()
    assert last.computed == left and last.failed == () and not watch.changed
    assert kill.compare(tmp_path / "still", out) == ()
    begun, late = kill.starts_of(log, Store(out).load_all(), out)
    assert late == 0 and begun > 0, "no cell is begun that is finished"
    assert plan_sweep(load_suite(suite, isolate=False), out).todo == ()


@pytest.mark.parametrize("workers", [0, WORKERS + 1, 10**6])
def test_a_number_of_workers_has_two_ends(workers):
    check_workers(1)
    check_workers(WORKERS)
    with pytest.raises(UsageError, match=rf"workers={workers} cannot be used; give from 1 to {WORKERS}"):
        check_workers(workers)
