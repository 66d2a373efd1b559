"""Full float32 wherever we compute, whatever torch is set to around us; its settings as they were afterwards."""

from __future__ import annotations

import os
import random
import threading
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import somebodys
import torch
from daily import all_but_nightly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ppbench
from ppbench.base import device as precision
from ppbench.base.device import computing
from ppbench.base.version import __version__
from ppbench.federation.plan import Data
from ppbench.records.schema import FederationInfo
from ppbench.records.store import Store
from ppbench.run.cells import cells, groups
from ppbench.run.config import configure
from ppbench.run.evaluation import SUBJECTS, share_broken
from ppbench.run.executors import local, ray
from ppbench.run.executors.ray import Order, marker_of
from ppbench.run.experiment import resolve
from ppbench.run.group import _environment
from ppbench.run.jobs import WorkItem
from ppbench.run.loop import probe
from ppbench.run.task import describe, make_task

NEW = hasattr(torch._C, "_set_fp32_precision_setter")
"""Whether torch has the interface of 2.9."""
EXACT = {"cudnn": False, "cublas": False, "matmul": "highest"}
TF32 = {"cudnn": True, "cublas": True, "matmul": "high"}
SHAPE = (1, 8, 8)


def flags() -> dict[str, object]:
    """Return what code that knows torch's older interface reads; "refused" where torch will not say."""
    read = {
        "cudnn": lambda: torch.backends.cudnn.allow_tf32,
        "cublas": lambda: torch.backends.cuda.matmul.allow_tf32,
        "matmul": torch.get_float32_matmul_precision,
    }
    results: dict[str, object] = {}
    for name, one in read.items():
        try:
            results[name] = one()
        except RuntimeError:
            results[name] = "refused"
    return results


def operations() -> dict[tuple[str, str], str]:
    """Return the precision of each operation, its own, by torch's newer interface; nothing moves."""
    results: dict[tuple[str, str], str] = {}
    for key in precision.OPERATIONS if NEW else ():
        results[key] = torch._C._get_fp32_precision_getter(*key)
        torch._C._set_fp32_precision_setter(*key, "none")
    for key, value in results.items():
        torch._C._set_fp32_precision_setter(*key, value)
    return results


def settings() -> tuple[object, ...]:
    """Return all that this process is set to."""
    cudnn = torch.backends.cudnn
    return flags(), operations(), cudnn.benchmark, cudnn.deterministic, torch.get_default_dtype()


@pytest.fixture(autouse=True)
def unmoved() -> Iterator[None]:
    """Have each test begin as a process does, and leave it so."""
    before = settings()
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = True, False
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float32)
    for key in precision.OPERATIONS if NEW else ():
        torch._C._set_fp32_precision_setter(*key, before[1][key])  # type: ignore[index]
    assert settings() == before


def unsettle(draws: random.Random) -> None:
    """Set torch as somebody may: by either interface, or by both against each other."""
    for _ in range(draws.randint(1, 6)):
        which = draws.randint(0, 4)
        if which == 0:
            torch.backends.cudnn.allow_tf32 = draws.random() < 0.5
        elif which == 1:
            torch.backends.cuda.matmul.allow_tf32 = draws.random() < 0.5
        elif which == 2:
            torch.set_float32_matmul_precision(draws.choice(["highest", "high", "medium"]))
        elif NEW:
            key = draws.choice(precision.OPERATIONS)
            values = ["none", "ieee", "tf32", *(["bf16"] if key[0] != "cuda" else [])]
            torch._C._set_fp32_precision_setter(*key, draws.choice(values))


def test_a_process_is_set_as_before_whatever_it_was_set_to() -> None:
    draws = random.Random(0)
    for _ in range(200):
        unsettle(draws)
        before = settings()
        with computing():
            assert flags() == EXACT and set(operations().values()) <= {"ieee"}
        with pytest.raises(ZeroDivisionError), computing(tf32=True):
            assert flags() == TF32
            assert {v for k, v in operations().items() if k[0] == "mkldnn"} <= {"ieee"}  # a CPU rounds nothing
            raise ZeroDivisionError
        assert settings() == before


def test_an_inner_body_computes_as_the_outer_one_unless_it_says_otherwise() -> None:
    with computing(tf32=True):
        with computing():
            assert flags() == TF32
        with computing(tf32=False):
            assert flags() == EXACT
        assert flags() == TF32
    assert flags()["cudnn"] is True


def test_of_two_threads_the_last_to_leave_sets_the_process_back() -> None:
    before, entered, leave = settings(), threading.Event(), threading.Event()

    def other() -> None:
        with computing():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with computing():
        thread.start()
        assert entered.wait(10)
    assert flags() == EXACT  # the other one computes
    leave.set()
    thread.join()
    assert settings() == before


def test_importing_ppbench_changes_nothing() -> None:
    assert flags() == {"cudnn": True, "cublas": False, "matmul": "highest"}  # as torch comes


SPY = """
import os, torch
from torch import nn

class Spy(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, classes)

    def forward(self, x):
        with open(os.environ["PPBENCH_SPY"], "a") as file:
            cudnn = torch.backends.cudnn
            seen = cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
            file.write(repr((*seen, cudnn.benchmark, cudnn.deterministic)) + "\\n")
        return self.head(torch.sigmoid(self.body(x)).flatten(1))
"""
SMALL: dict[str, Any] = {
    **{"defense": "none", "model": "spying:Spy", "train": 24, "clients": 2, "rounds": 1, "decay_at": (), "victims": 1},
    **{"attack_batch": (1,), "candidates": 4, "settings": {"dlg.restarts": 0, "dlg.budget": 2}, "batch_size": 8},
    **{"attacks": ("dlg", "mia_loss"), "stages": ("init", "final"), "tuning": 0},
}


@pytest.fixture
def spied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file in which a network keeps what torch is set to at each of its forward passes."""
    (tmp_path / "spying.py").write_text(SPY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PPBENCH_SPY", str(tmp_path / "seen"))
    return tmp_path / "seen"


def seen_in(path: Path) -> set[tuple[object, ...]]:
    """Return the settings at forward passes."""
    return {literal_eval(line) for line in path.read_text().splitlines()}


@pytest.mark.parametrize("tf32", all_but_nightly([False, True], [False]))
def test_evaluate_trains_attacks_and_predicts_so(tf32: bool, spied: Path, tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    before = settings()
    ppbench.evaluate(**SMALL, tf32=tf32, workers=1, out=tmp_path / "out")
    looked_at = (*EXACT.values(), False, True)  # a network is, before anything is computed with it
    computed = (*(TF32 if tf32 else EXACT).values(), False, True)
    assert {computed} <= seen_in(spied) <= {computed, looked_at}
    assert settings() == before


@pytest.mark.parametrize("place", ["local", "ray"])
def test_workers_compute_so(place: str, spied: Path, tmp_path: Path) -> None:
    experiment, store = resolve(configure(**SMALL, tf32=True)), Store(tmp_path / "out")
    store.prepare()
    job = WorkItem(experiment, store.out, 0)
    spied.write_text("")
    order = Order(job, __version__, marker_of(store.out), os.getcwd())
    failure = local._run(job) if place == "local" else ray.run_order(order)
    assert failure is None and seen_in(spied) == {(*TF32.values(), False, True)}


def test_an_audit_computes_so(spied: Path, tmp_path: Path) -> None:
    audit = {"stages": ("audit",), "attacks": ("mia_loss",), "references": 2, "canaries": 2}
    ppbench.evaluate(**{**SMALL, **audit}, workers=1, out=tmp_path / "out")
    assert seen_in(spied) == {(*EXACT.values(), False, True)}


class Watching(somebodys.LeNet):
    """A network that keeps what torch is set to at each forward pass."""

    seen: list[dict[str, object]] = []  # noqa: RUF012 - of the class: a copy of the network computes

    def forward(self, x: Tensor) -> Tensor:
        Watching.seen.append(flags())
        return super().forward(x)


def watched() -> nn.Module:
    """Return a network, and forget what was seen."""
    torch.manual_seed(0)
    model = Watching(10, SHAPE)
    Watching.seen.clear()
    return model


def test_invert_computes_so_whatever_is_on_around_it(digits: Data) -> None:
    model, x, y = watched(), digits.x[:1], digits.y[:1].argmax(1)
    gradient = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    plain = ppbench.invert(model, gradient, SHAPE, y, budget=20)
    Watching.seen.clear()
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    before = settings()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = ppbench.invert(model, gradient, SHAPE, y, budget=20)
        assert torch.is_autocast_enabled("cpu")
    assert Watching.seen and all(one == EXACT for one in Watching.seen)
    assert torch.equal(plain.x, again.x) and plain.mismatch == again.mismatch
    assert settings() == before


@pytest.mark.parametrize("tf32", [False, True])
def test_a_federation_of_somebody_s_own_computes_so_at_each_call(tf32: bool, digits: Data) -> None:
    shards = [(digits.x[rows], digits.y[rows].argmax(1)) for rows in torch.arange(16).view(2, 8)]
    before = settings()
    fed = ppbench.federate(ppbench.load_defense("none"), watched(), shards, batch_size=8, tf32=tf32)
    Watching.seen.clear()  # a network is looked at before anything is computed with it
    fed.run(1)
    fed.outputs(shards[0][0])
    view, questions = probe(fed, [(x[:1], y[:1]) for x, y in shards])
    assert Watching.seen and all(one == (TF32 if tf32 else EXACT) for one in Watching.seen)
    Watching.seen.clear()
    ppbench.load_attack("dlg", budget=2, restarts=0).run(view, questions, torch.Generator().manual_seed(0))
    assert Watching.seen and all(one == EXACT for one in Watching.seen)  # an attack of its own is no part of it
    assert settings() == before


def test_the_self_test_computes_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    real = torch.nn.functional.linear

    def linear(*arguments: Tensor) -> Tensor:
        seen.append(flags())
        return real(*arguments)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    share_broken(SUBJECTS[1])
    assert seen and all(one == EXACT for one in seen)


def test_records_of_both_modes_are_apart_and_those_of_a_cpu_are_named_as_before() -> None:
    def facts(device: str, tf32: bool) -> FederationInfo:
        config = configure(defense="none", clients=2, train=40, device=device, tf32=tf32)
        return describe(make_task(config), config)[2]

    assert "tf32" not in facts("cpu", False).model_dump() and facts("cpu", False) == facts("cpu", True)
    older = FederationInfo.model_validate({**facts("cpu", False).model_dump(), "device": "cuda"})
    assert older.tf32 is None  # reads; its convolutions were in TF32, its products were not: it is neither of both
    dumps = [one.model_dump_json() for one in (older, facts("cuda", False), facts("cuda", True))]
    assert len({*dumps}) == 3 and all(
        FederationInfo.model_validate_json(dump).model_dump_json() == dump for dump in dumps
    )


def names_of(device: str, tf32: bool) -> set[str]:
    experiment = resolve(configure(defense="none", clients=2, train=40, device=device, tf32=tf32))
    return {cell.id for group in groups(experiment) for cell in cells(experiment, group)}


def test_cells_of_one_mode_are_never_taken_for_the_other() -> None:
    assert names_of("cpu", True) == names_of("cpu", False)
    assert not names_of("cuda", True) & names_of("cuda", False)


def test_an_environment_says_which_it_was() -> None:
    def words(device: str, tf32: bool) -> str:
        config = configure(defense="none", clients=2, train=40, device=device, tf32=tf32)
        return _environment(describe(make_task(config), config)[2], False).dtype

    assert words("cpu", True) == words("meta", False) == "float32"
    assert words("meta", True) == "float32, products in TF32"
