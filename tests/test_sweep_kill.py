"""A sweep that is killed, or whose workers are, loses the cells in flight and nothing else."""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ppbench.records.store import Store
from ppbench.run.suite import load_suite
from ppbench.run.sweep import plan, sweep

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds worker processes in /proc"),
    pytest.mark.usefixtures("planted"),
]


@pytest.fixture(scope="module")
def kill():
    """benchmarks/kill_sweep.py, which does the same at length."""
    path = Path(__file__).parents[1] / "benchmarks" / "kill_sweep.py"
    spec = importlib.util.spec_from_file_location("kill_sweep", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_sweep"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_sweep_killed_with_its_worker_gives_what_an_undisturbed_one_gives(kill, forked, tmp_path, monkeypatch):
    """First a worker, of which the sweep takes no notice, then the sweep: no file that is finished changes."""
    suite, log, out = tmp_path / "kill.toml", tmp_path / "log", tmp_path / "killed"
    suite.write_text(kill.SUITE.format(seeds="[0]", seconds="0.2", grid="[0.1]"))
    still = sweep(suite, out=tmp_path / "still", engine="inline")
    monkeypatch.setenv("PPBENCH_PLANTED_LOG", str(log))
    watch = kill.Watch(out)
    process = forked.Process(target=sweep, args=(suite,), kwargs={"out": out, "workers": 2})
    process.start()

    def until(goal):
        while watch.count() < goal and process.is_alive():
            time.sleep(0.02)

    until(1)
    (worker, *_) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    os.kill(worker, signal.SIGKILL)
    until(watch.look() + 4)
    assert process.is_alive()
    process.kill()
    process.join()
    time.sleep(0.2)
    cells = len(still.records)
    left = cells - watch.look()
    assert 0 < left < cells, "killed too late, or too early, to prove anything"
    last = sweep(suite, out=out, engine="inline")
    watch.look()
    assert last.computed == left and last.failed == () and not watch.changed
    assert kill.compare(tmp_path / "still", out) == ()
    begun, late = kill.starts_of(log, Store(out).load_all(), out)
    assert late == 0 and begun > 0, "no cell is begun that is finished"
    assert plan(load_suite(suite), out).todo == ()
