"""The comparison with breaching: the best of each side on the same victims, by name; what cannot be run is named."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ppbench.adversary.attack import Guess
from ppbench.federation.plan import Data

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def script(script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    """Return the benchmark's script as a module, without running it; it puts a folder on the path."""
    before = list(sys.path)
    yield script(BENCHMARKS / "peers" / "against_breaching.py")
    sys.path[:] = before


def images(first: int, count: int) -> Data:
    generator = torch.Generator().manual_seed(first)
    return Data(torch.rand(count, 3, 32, 32, generator=generator), torch.eye(10)[torch.arange(count) % 10])


def off_by(size: float) -> Callable[[Data, int], Guess]:
    """Return an attack whose images are wrong by so much."""
    return lambda data, steps: Guess(x=(data.x - size).clamp(0, 1), y=data.y.argmax(1))


def broken(data: Data, steps: int) -> Guess:
    raise TypeError("of another version\nand more")


@pytest.fixture
def compared(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return what compares attacks on made-up images, and gives the figures that are kept."""
    monkeypatch.setattr(script, "cifar", images)
    monkeypatch.setattr(script, "fitting", lambda run, batch, seconds: (run(images(0, batch), 1), 7)[1])

    def ask(runs: dict[str, Any], before: dict[str, Any] | None = None, **options: int) -> dict[str, Any]:
        about = argparse.Namespace(
            **{"first": 40_000, "victims": 4, "seconds": 1.0, "tuning": 2, "finalists": 2, **options}
        )
        kept: list[dict[str, Any]] = []
        script.compared(script.row_of("dlnet", 40_000), runs, about, kept.append, before)
        return kept[-1]

    return ask


RUNS = {
    "ig": off_by(0.3),
    "idlg": off_by(0.02),
    "breaching modern": off_by(0.3),
    "breaching deepleakage": off_by(0.01),
    "breaching legacy": off_by(0.4),
    "breaching rgap": broken,
}


def test_the_best_of_each_side_are_compared_by_name(
    compared: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    result = compared(RUNS)
    assert result["best"] == {"ours": "idlg", "breaching": "breaching deepleakage"}
    assert set(result["psnr"]) == {"idlg", "ig", "breaching deepleakage", "breaching modern"}  # two finalists a side
    assert set(result["tuning"]) == {*RUNS} - {"breaching rgap"}
    assert all(len(values) == 4 for values in result["psnr"].values())
    assert result["failed"] == {"breaching rgap": "TypeError: of another version"}
    out = capsys.readouterr().out
    assert "cannot be run: TypeError: of another version" in out
    assert out.splitlines()[-1].count("dB") == 2 and "breaching deepleakage" in out.splitlines()[-1]
    assert set(compared(RUNS, finalists=1)["psnr"]) == {"idlg", "breaching deepleakage"}


def test_a_later_run_goes_on_with_the_victims_that_are_left(compared: Callable[..., dict[str, Any]]) -> None:
    early = compared(RUNS, victims=2)
    calls: list[int] = []

    def counted(data: Data, steps: int) -> Guess:
        calls.append(len(data.x))
        return off_by(0.01)(data, steps)

    later = compared({**RUNS, "breaching deepleakage": counted}, early, victims=4)
    assert calls == [1, 1] and later["best"] == early["best"] and later["psnr"].keys() == early["psnr"].keys()
    assert all(values[:2] == early["psnr"][name] and len(values) == 4 for name, values in later["psnr"].items())
    assert compared({**RUNS, "breaching deepleakage": counted}, later, victims=4) == later and len(calls) == 2


def test_the_default_does_not_count_where_it_takes_longer(
    compared: Callable[..., dict[str, Any]], script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(script.time, "process_time", lambda: clock.now)

    def slow(data: Data, steps: int) -> Guess:
        clock.now += 1.5
        return off_by(0.0)(data, steps)

    assert compared({**RUNS, "default": slow})["best"]["ours"] == "idlg"
    assert compared({**RUNS, "default": off_by(0.0)})["best"]["ours"] == "default"


def test_who_fails_on_some_victims_is_named_and_not_compared(compared: Callable[..., dict[str, Any]]) -> None:
    calls = iter(range(100))

    def unsteady(data: Data, steps: int) -> Guess:
        return broken(data, steps) if next(calls) > 4 else off_by(0.001)(data, steps)

    result = compared({**RUNS, "breaching wei": unsteady}, finalists=3)
    assert result["best"]["breaching"] == "breaching deepleakage" and "breaching wei" not in result["psnr"]
    assert result["failed"]["breaching wei"] == "TypeError: of another version"


def test_all_of_breaching_s_attacks_on_a_plain_gradient_are_tried_by_default(script: ModuleType) -> None:
    assert {"modern", "invertinggradients", "deepleakage", "beyondinfering", "seethroughgradients"} <= set(script.PEERS)
    assert {"idlg", "ig", "feature_inversion"} <= set(script.OURS)


def test_steps_are_timed_by_the_slower_of_early_and_later_ones(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that has done after 40 steps on the timing batch is not given hundreds on a victim."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(script.time, "process_time", lambda: clock.now)
    monkeypatch.setattr(script, "cifar", images)

    def run(data: Data, steps: int) -> None:
        clock.now += 0.1 * min(steps, 40)

    assert script.fitting(run, 1, 2.0) == 20


def test_nothing_longer_is_timed_behind_what_took_the_seconds(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, timed = SimpleNamespace(now=0.0), list[int]()
    monkeypatch.setattr(script.time, "process_time", lambda: clock.now)
    monkeypatch.setattr(script, "cifar", images)

    def run(data: Data, steps: int) -> None:
        timed.append(steps)
        clock.now += 0.1 * steps

    assert script.fitting(run, 1, 2.0) == 20 and timed == [4, 40]
    assert script.fitting(run, 1, 0.25) == 2 and timed == [4, 40, 4]


def test_a_network_given_as_an_object_keeps_its_buffers(script: ModuleType) -> None:
    norm = torch.nn.BatchNorm2d(2)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), norm, torch.nn.Flatten(), torch.nn.Linear(8, 10))
    norm.running_var.fill_(7.0)
    spec, x = script.held_network(network.eval(), (3, 4, 4)).spec, torch.rand(2, 3, 4, 4)
    module = script.Row("norm", spec, script.initial(spec, 0), None, 1).module()
    assert torch.equal(module(x), network(x))


def test_victims_are_whole_batches_and_no_fewer_than_named(
    script: ModuleType, compared: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row_of = script.row_of
    monkeypatch.setattr(script, "row_of", lambda _, first: row_of("dlnet/3", first))
    assert all(len(values) == 6 for values in compared(RUNS, victims=4)["psnr"].values())


def test_the_default_attacks_a_network_given_as_an_object(script: ModuleType) -> None:
    row, data = script.row_of("vit", 40_000), images(0, 1)
    guess = script.ours("default", row)(data, 1)
    assert row.psnr(data, guess)[0] > 40
