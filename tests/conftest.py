"""Shared fixtures: a small task on the embedded digits, federations over it, and records made by hand."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest
import torch

from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.metrics.intervals import clopper_pearson
from ppbench.nets.net import initial, net_spec
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import CellConfig, Record
from ppbench.run import cost
from ppbench.task.dataset import open_dataset

torch.set_num_threads(1)
CLIENTS = 4


# -- batteries: many cases, of which a usual run asks enough ----------------------------------------------------------
def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--battery", choices=("pairs", "whole"), default="pairs",
        help="ask the batteries' cases until every pair of their values was met, or the whole of them",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "battery(*values): a case of a battery, known by these values, one of each axis")


def covering(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Return places of cases, in order, that hold every pair of values of two axes that any case holds.

    Each pair is met first where fewest cases hold it; of those the case with the most pairs yet unmet is taken, and
    the first of equals, so that the choice is the same in every process.
    """
    pairs = [list(combinations(enumerate(case), 2)) for case in cases]
    holders: dict[Hashable, list[int]] = defaultdict(list)
    for place, held in enumerate(pairs):
        for pair in held:
            holders[pair].append(place)
    chosen, met = set(), set()
    for pair in sorted(holders, key=lambda pair: len(holders[pair])):
        if pair not in met:
            best = max(holders[pair], key=lambda place: sum(other not in met for other in pairs[place]))
            chosen.add(best)
            met.update(pairs[best])
    return sorted(chosen)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a battery need not ask, unless the whole is wanted or cases are chosen by name."""
    if config.getoption("--battery") == "whole" or config.option.keyword or any("[" in arg for arg in config.args):
        return
    batteries: dict[str, list[tuple[pytest.Item, tuple[Hashable, ...]]]] = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("battery"):
            batteries[item.nodeid.partition("[")[0]].append((item, mark.args))
    left = set()
    for cases in batteries.values():
        kept = set(covering([values for _, values in cases]))
        left |= {item for place, (item, _) in enumerate(cases) if place not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session", autouse=True)
def one_timed_pair() -> Iterator[None]:
    """Let trainings in this process time a single pair: how long a client takes is in no record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "BUDGET_S", 0.0)
        patch.setattr(cost, "ENOUGH_S", 0.0)
        yield


@pytest.fixture(scope="module")
def planted() -> Iterator[Path]:
    """Let this process, and those that it starts, find the planted plugins; return where they are."""
    home = Path(__file__).parent / "planted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(home))
        registry.plugins.cache_clear()
        yield home
    registry.plugins.cache_clear()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> BaseContext:
    """Let executors of this process fork their workers: how long everything takes to import is tested elsewhere."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    return fork


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., None]:
    """Return an assertion: opening a data set fails with one line that contains all words."""

    def check(text: str, *words: str) -> None:
        with pytest.raises(UsageError) as caught:
            open_dataset(text, seed=0, root=tmp_path)
        message = str(caught.value)
        assert "\n" not in message and message[-1] in ".?"
        assert [word for word in words if word not in message] == []

    return check


@pytest.fixture(scope="session")
def digits() -> Data:
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    return Data(x, torch.nn.functional.one_hot(torch.tensor(raw.target), 10).float())


@pytest.fixture
def plan() -> Plan:
    return Plan(net_spec("dlnet", (1, 8, 8), 10), CLIENTS, Local(batch=16))


@pytest.fixture
def shards(digits: Data) -> dict[int, Data]:
    """Four clients; the last one has fewer examples."""
    sizes = (48, 48, 48, 40)
    return {c: Data(digits.x[c * 48 :][:n].clone(), digits.y[c * 48 :][:n].clone()) for c, n in enumerate(sizes)}


@pytest.fixture
def federate(plan: Plan, shards: dict[int, Data]) -> Callable[..., Federation]:
    """Return a started federation of a defense."""

    def make(defense: Defense, plan: Plan = plan, seed: int = 0, **options: object) -> Federation:
        federation = Federation(defense, plan, shards, Seeds(seed), **options)  # type: ignore[arg-type]
        federation.start(initial(plan.spec, 1))
        return federation

    return make


# -- records made by hand --------------------------------------------------------------------------------------------
def _victims(kind: str, share: float, error: float, n: int, alike: float | None = None) -> list[dict[str, object]]:
    """Return scores of which `share` are hits; images lie `share` dB from the truth, give or take a little."""
    if kind == "membership":  # four strata of equal size: two halves times members and others
        right = round(share * n / 4)
        found = []
        for index in range(n):
            stratum, member = index // 4, bool(index % 2)
            decision = member if stratum < right else not member
            half = index % 4 // 2
            found.append(
                dict(kind="member", index=index, half=half, member=member, score=float(decision), decision=decision)
            )
        return found
    if kind == "extraction":
        decisions = [None if alike is None else int(i >= alike * n) for i in range(n)]
        return [
            dict(kind="output", index=i, agree=i < round(share * n), error=error, decision=d)
            for i, d in enumerate(decisions)
        ]
    if kind == "label":
        return [dict(kind="label", probe=i, client=0, index=0, label=i < round(share * n)) for i in range(n)]
    if kind == "tracing":
        return [dict(kind="trace", index=i, owner=i % 10, guess=i % 10 if i < share * n else -1) for i in range(n)]
    return [
        dict(
            kind="image", probe=i, client=0, index=0, psnr=share + i % 3, rmse=error, rmse_raw=error, ssim=None,
            label=None, confidence=None, at_truth=None, evaluations=1,
        )
        for i in range(n)
    ]  # fmt: skip


@pytest.fixture(scope="session")
def fabricate() -> Callable[..., Record]:
    """Return a maker of records: `fabricate("pbpfl", 10.0, "mia_loss", "membership", share=0.5, stage="iterate")`.

    share: of hits (images: dB); error: relative error of rows or outputs; alike: share of queries that the true model
    decides for class 0, the others for class 1; further options as named below.
    """

    def make(
        defense: str, value: float | None, attack: str, kind: str, share: float = 0.5, *, error: float = 0.5,
        n: int | None = None, control: str = "kappa", adaptive: bool = False, stage: str | None = None,
        threat: str | None = None, batch: int = 1, accuracy: float | None = 0.95, mse: float | None = None,
        dataset: str = "digits", model: str = "mlp", options: dict[str, object] | None = None,
        shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, clients: int = 10, seed: int = 0,
        parameters: dict[str, object] | None = None, bytes_up: float = 1000.0, reason: str | None = "no noise",
        epsilon: float | None = None, status: str = "complete", upload: str = "gradient", loss: str = "squared",
        sha256: str = "0" * 64, alike: float | None = None,
    ) -> Record:  # fmt: skip
        records = kind in ("membership", "extraction")
        given = {} if value is None else {control: value}
        config = CellConfig.model_validate(
            dict(
                suite="evaluate/1",
                threat_model=dict(id=threat or ("client/1" if records else "server/1"), sees="",
                                  knows_defense=adaptive),
                defense=dict(id=defense, version="1", parameters=given | (parameters or {}),
                             control=None if value is None else dict(name=control, value=value)),
                attack=dict(id=attack, version="1", kind=kind, parameters={}, adaptive=adaptive),
                federation=dict(clients=clients, rounds=20, schedule="parallel", upload=upload, local_epochs=1,
                                batch=32, optimizer="sgd", lr=0.1, momentum=0.0, decay_at=[], decay=1.0,
                                partition="iid", server_optimizer="sgd", server_lr=0.1, backend="loop", device="cpu",
                                dtype="float32"),
                data=dict(name=dataset, sha256=sha256, train=1000, test=500),
                model=dict(id=model, options=options or {}, shape=list(shape), classes=classes, parameters=250,
                           loss=loss),
                stage=stage or ("final" if records else "init"), batch_size=batch, victims=10, seed=seed,
            )
        )  # fmt: skip
        count = n or {"membership": 400, "extraction": 200}.get(kind, 12)
        scores = _victims(kind, share, error, count, alike) if status == "complete" else []
        interval = None if accuracy is None else clopper_pearson(round(accuracy * 1000), 1000)
        draft = Record.model_validate(
            dict(
                cell_id=config.cell_id(), config=config, victims=scores, metrics=[],
                utility=dict(
                    accuracy=accuracy, low=interval and interval.low, high=interval and interval.high, n=1000,
                    chance=1 / classes, curve=[], reason=None if accuracy is not None else "none", mse=mse,
                    mse_low=mse and 0.95 * mse, mse_high=mse and 1.05 * mse,
                ),
                cost=dict(bytes_up=bytes_up, bytes_down=1000, bytes_setup=80),
                privacy=dict(epsilon=epsilon, delta=None if epsilon is None else 1e-5,
                             reason=None if epsilon is not None else reason),
                status=status, reason=None if status == "complete" else "it broke",
                environment=dict(ppbench="0.1.0", python="3.11", torch="2.13", device="x86_64", threads=1,
                                 dtype="float32"),
            )
        )  # fmt: skip
        return draft.model_copy(update={"metrics": aggregate(draft.victims, classes=classes, seed=seed)})

    return make
