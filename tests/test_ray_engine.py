"""Jobs on a Ray cluster: nodes that go away, nodes that cannot work, workers that die; skipped where Ray is missing."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ppbench import __version__
from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError
from ppbench.records.store import MARKER, Store
from ppbench.run.audit.runs import Refused
from ppbench.run.config import configure
from ppbench.run.evaluation import compute
from ppbench.run.executors import make_executor
from ppbench.run.executors import ray as ours
from ppbench.run.executors.local import InlineExecutor
from ppbench.run.executors.ray import Order, RayExecutor, gpu_share, marker_of, unfit
from ppbench.run.experiment import resolve
from ppbench.run.jobs import Executor, Failure, WorkerDied, WorkItem
from ppbench.run.schedule import plan_cells, unfinished

SMALL: dict[str, Any] = {"clients": 2, "train": 60, "rounds": 1, "victims": 2, "stages": ("init",)}
CELLS: dict[str, Any] = {
    **SMALL,
    **{"defense": "ppdl", "grid": (0.1,), "attacks": ("planted_slow",), "attack_batch": (1, 2, 3, 4)},
    "settings": {"planted_slow.seconds": 0.2},
}
pytestmark = pytest.mark.usefixtures("planted")
FAST_DEATH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 2}


@pytest.fixture(scope="module")
def cluster(planted):
    """Two nodes of one CPU each on this machine."""
    pytest.importorskip("ray", reason="the package ray is not installed (ppbench-fl[ray])")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    one = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    found = Cluster(initialize_head=True, head_node_args={**one, "_system_config": FAST_DEATH})
    found.second = found.add_node(**one)
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def connected(cluster):
    """This process connected to the nodes: executors stay where it is, and workers serve several tests."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    assert ray.is_initialized(), "an executor leaves a connection alone that is not its own"
    ray.shutdown()


def done(out: Path, executor: Executor) -> Store:
    """Have all CELLS computed."""
    store = Store(out)
    store.prepare()
    asked = plan_cells([resolve(configure(**CELLS))])
    compute(asked, unfinished(asked, store), store, executor, Bars(quiet=True), strict=False)
    return store


def records(store: Store) -> dict[str, bytes]:
    """Return the bytes of every record and image, without times."""
    return {p.name: p.read_bytes() for p in store.folder.iterdir() if ".timing" not in p.name}


# -- without a cluster -----------------------------------------------------------------------------------------------
def test_without_ray_one_sentence_says_what_to_install_and_no_other_engine_has_an_address(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError) as caught:
        make_executor("ray", 2, lambda rounds: None)
    assert str(caught.value) == "Engine 'ray' needs the package ray; install ppbench-fl[ray]."
    with pytest.raises(UsageError, match="has no address"):
        make_executor("local", 2, lambda rounds: None, address="auto")


@pytest.mark.parametrize(
    ("workers", "gpus", "share"), [(4, 0, 0.0), (2, 2, 1.0), (1, 4, 1.0), (8, 2, 0.25), (5, 2, 1 / 3)]
)
def test_workers_share_gpus_evenly(workers, gpus, share):
    assert gpu_share(workers, gpus) == share
    assert not gpus or int(1 / share + 1e-9) * gpus >= workers, "all of them find a place"


def test_an_error_arrives_under_its_name_whatever_its_class():
    ours_ = Failure("Refused", "no", "").to_exception()
    other = Failure("SoreError", "planted", "the trace").to_exception()
    assert isinstance(ours_, Refused) and str(ours_) == "no"
    assert type(other).__name__ == "SoreError" and str(other) == "planted" and "the trace" in str(other.__cause__)
    assert not isinstance(other, UsageError)


def test_a_node_that_cannot_work_says_why(tmp_path):
    Store(tmp_path / "out").prepare()
    job = WorkItem(resolve(configure(**CELLS)), tmp_path / "out", 0)
    right = Order(job, __version__, marker_of(tmp_path / "out"), str(tmp_path))
    assert unfit(right) is None
    old = Order(job, "0.0.1", right.marker, right.cwd)
    assert f"has ppbench {__version__}, and this is 0.0.1" in str(unfit(old))
    os.utime(tmp_path / "out" / MARKER, (1, 1))  # another folder under the same path
    assert "does not see the folder" in str(unfit(right))
    (tmp_path / "out" / MARKER).unlink()
    assert f"does not see the folder {tmp_path / 'out'}" in str(unfit(right))


# -- on two nodes ----------------------------------------------------------------------------------------------------
def test_nobody_at_the_address_is_one_sentence(cluster, monkeypatch):
    monkeypatch.setattr(ours, "CONNECT_S", 2.0)
    began = time.monotonic()
    with (
        pytest.raises(UsageError, match=r"No Ray cluster answers at '127\.0\.0\.1:9' ") as caught,
        RayExecutor(1, "127.0.0.1:9"),
    ):
        pass
    assert time.monotonic() - began < 10 and "\n" not in str(caught.value)


def test_a_folder_that_a_node_does_not_see_ends_the_run(cluster, tmp_path, monkeypatch):
    """Not as failed cells: a node that fails at once would swallow all jobs of the others."""
    import ray

    monkeypatch.setattr(ours, "marker_of", lambda out: "of another folder")  # in this process alone
    with pytest.raises(UsageError, match="does not see the folder"):
        done(tmp_path / "out", RayExecutor(2, cluster.address))
    assert records(Store(tmp_path / "out")) == {}
    assert not ray.is_initialized(), "who connects leaves, after an error too"


def test_what_a_job_raises_and_that_its_worker_died_are_told(connected, tmp_path):
    Store(tmp_path).prepare()
    heard: list[int] = []
    sore = resolve(configure(**SMALL, defense="planted_sore", attacks=("label_recovery",)))
    deadly = resolve(configure(**SMALL, defense="none", attacks=("planted_deadly",), attack_batch=(1,)))
    first = plan_cells([deadly])[0]
    jobs = [WorkItem(sore, tmp_path, 0), WorkItem(sore, tmp_path, 2)]
    jobs.append(WorkItem(deadly, tmp_path, 0, first.group, (first.cells[0].id,)))
    with RayExecutor(None, tell=heard.append) as executor:
        assert executor.capacity == 2
        for job in jobs:
            executor.submit(job)
        ended = {done.job: done.error for done in (executor.wait() for _ in jobs)}
    assert ended[jobs[0]] is None and heard == [1], "one training of one round"
    assert f"{type(ended[jobs[1]]).__name__}: {ended[jobs[1]]}" == "SoreError: planted in training (7)"
    assert isinstance(ended[jobs[2]], WorkerDied)


def test_a_node_goes_away_and_all_cells_are_what_they_would_be(connected, cluster, tmp_path):
    """The last test on the cluster: it takes one of its nodes."""
    here = done(tmp_path / "here", InlineExecutor(lambda rounds: None))
    out, seen = tmp_path / "there", list[int]()

    def take():
        while len(there := list((out / "records").glob("*[0-9a-f].json"))) < 3:
            time.sleep(0.02)
        seen.append(len(there))
        cluster.remove_node(cluster.second, allow_graceful=False)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    there = done(out, RayExecutor(2))
    taker.join(30)
    assert not taker.is_alive() and seen[0] < 12, "the node went away while there was work"
    assert len(there.ids()) == 12 and {r.status for r in there.load_all()} == {"complete"}
    assert records(there) == records(here)
