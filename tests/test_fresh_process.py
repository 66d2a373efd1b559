"""A process of its own: what it loads, stand-ins of torchvision that fail there, what it counts and says."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ppbench.base.import_guard import lpips, torchvision
from ppbench.run import cost
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.train import federation

LIGHT = """
import os, runpy, sys
import ppbench.task.dataset, ppbench.task.downloads, ppbench.task.parquet, ppbench.task.table
import ppbench.task.imagefolder, ppbench.task.synthetic
heavy = {"torchvision", "sklearn", "pandas", "pyarrow", "PIL", "lpips"} & set(sys.modules)
assert not heavy, heavy
import ppbench.run.evaluation, ppbench.commands.terminal
heavy = {"matplotlib", "seaborn", "jinja2", "sklearn", "scipy.stats", "scipy.optimize"} & set(sys.modules)
assert not heavy, heavy
for case in sys.argv[1:]:
    if not (child := os.fork()):
        sys.path.insert(0, case)
        runpy.run_path(f"{case}/use.py")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, case
import torch
from ppbench.run import cost
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.train import federation
torch.set_num_threads(1)
experiment = resolve(configure(defense="none", train=64, clients=2, attacks=("analytic",)))
fed = federation(experiment, experiment.points[0])
fed.start(experiment.task.params)
print(cost.peak_memory(cost.measured_client(fed)))
"""
LACKING = """
import torch
from . import part
if not hasattr(torch.ops.torchvision, "nms"):
    part.loaded.append("failed")
    raise RuntimeError("operator torchvision::nms does not exist")
"""
DECLARED = """
import torch
from ppbench.base.import_guard import torchvision
module = torchvision()
assert module.part.loaded == [], "a module of the failed import was kept"
assert torch.ops.torchvision.nms and torch.ops.torchvision.qnms
assert torchvision() is module
"""
BROKEN = """
import builtins
if not hasattr(builtins, "tried"):
    builtins.tried = True
    raise RuntimeError("broken for another reason")
"""
LEFT_ALONE = """
import torch
from ppbench.base.import_guard import torchvision
try:
    torchvision()
except RuntimeError as error:
    assert str(error) == "broken for another reason"
else:
    raise AssertionError("swallowed")
assert not hasattr(torch.ops.torchvision, "nms")
torchvision()
assert not hasattr(torch.ops.torchvision, "nms")
"""


def stand_in(folder: Path, source: str, use: str) -> str:
    """Write a package torchvision with `source` as its __init__ and a submodule `part`, and what uses it."""
    (folder / "torchvision").mkdir(parents=True)
    (folder / "torchvision" / "__init__.py").write_text(source)
    (folder / "torchvision" / "part.py").write_text("loaded = []\n")
    (folder / "use.py").write_text(use)
    return str(folder)


def test_torchvision_and_lpips_can_be_imported():
    first = torchvision()
    assert torchvision() is first
    assert first.datasets.CIFAR10 and first.transforms.ToTensor
    assert first.models.alexnet(weights=None).features(torch.zeros(1, 3, 64, 64)).shape == (1, 256, 1, 1)
    assert find_spec("lpips") is None or lpips().LPIPS


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return a process that has loaded what it uses, forked for each stand-in and printed a client's bytes."""
    home = tmp_path_factory.mktemp("fresh")
    cases = stand_in(home / "lacking", LACKING, DECLARED), stand_in(home / "broken", BROKEN, LEFT_ALONE)
    return subprocess.run(
        [sys.executable, "-c", LIGHT, *cases], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip


def test_libraries_are_loaded_where_they_are_used_and_schemas_declared_only_where_they_are_missing(done):
    assert done.returncode == 0, done.stderr


def test_the_same_bytes_are_counted_as_amid_other_work_and_nothing_is_said(done):
    experiment = resolve(configure(defense="none", train=64, clients=2, attacks=("analytic",)))
    fed = federation(experiment, experiment.points[0])
    fed.start(experiment.task.params)
    assert int(done.stdout) == cost.peak_memory(cost.measured_client(fed)) > 0
    assert done.stderr == "", "the profiler must not speak amid progress bars"
