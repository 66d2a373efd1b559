"""Shared fixtures: a small task on the embedded digits, federations over it, and records made by hand."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.metrics.intervals import clopper_pearson
from ppbench.nets.net import initial, net_spec
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import CellConfig, Record, Score
from ppbench.run import cost

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


@pytest.fixture(scope="session")
def bench_page() -> ModuleType:
    """benchmarks/bench_page.py, which makes many records."""
    path = Path(__file__).parent.parent / "benchmarks" / "bench_page.py"
    spec = importlib.util.spec_from_file_location("bench_page", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- records made by hand --------------------------------------------------------------------------------------------
FEDERATION = dict(
    rounds=20, schedule="parallel", local_epochs=1, batch=32, optimizer="sgd", lr=0.1, momentum=0.0, decay_at=[],
    decay=1.0, partition="iid", server_optimizer="sgd", server_lr=0.1, backend="loop", device="cpu", dtype="float32",
)  # fmt: skip
ENVIRONMENT = dict(ppbench="0.1.0", python="3.11", torch="2.13", device="x86_64", threads=1, dtype="float32")
IMAGE = dict(kind="image", client=0, index=0, ssim=None, label=None, confidence=None, at_truth=None, evaluations=1)


def _victims(kind: str, share: float, error: float, n: int, alike: float | None = None) -> list[dict[str, object]]:
    """Return scores of which `share` are hits; images lie `share` dB from the truth, give or take a little."""
    if kind == "membership":  # four strata of equal size: two halves times members and others
        told = [(i, bool(i % 2), bool(i % 2) == (i // 4 < round(share * n / 4))) for i in range(n)]
        about = dict(kind="member")
        return [about | dict(index=i, half=i % 4 // 2, member=m, score=float(d), decision=d) for i, m, d in told]
    if kind == "extraction":
        decisions = [None if alike is None else int(i >= alike * n) for i in range(n)]
        about = dict(kind="output", error=error)
        return [about | dict(index=i, agree=i < round(share * n), decision=d) for i, d in enumerate(decisions)]
    if kind == "label":
        return [dict(kind="label", probe=i, client=0, index=0, label=i < round(share * n)) for i in range(n)]
    if kind == "tracing":
        return [dict(kind="trace", index=i, owner=i % 10, guess=i % 10 if i < share * n else -1) for i in range(n)]
    return [IMAGE | dict(probe=i, psnr=share + i % 3, rmse=error, rmse_raw=error) for i in range(n)]


def _use(accuracy: float | None, mse: float | None, classes: int) -> dict[str, object]:
    ends = None if accuracy is None else clopper_pearson(round(accuracy * 1000), 1000)
    found = dict(accuracy=accuracy, low=ends and ends.low, high=ends and ends.high, n=1000, chance=1 / classes)
    found |= dict(mse=mse, mse_low=mse and 0.95 * mse, mse_high=mse and 1.05 * mse, curve=[])
    return found | dict(reason=None if accuracy is not None else "none")


def _fabricated(
    defense: str, value: float | None, attack: str, kind: str, share: float = 0.5, *, error: float = 0.5,
    n: int | None = None, control: str = "kappa", adaptive: bool = False, stage: str | None = None,
    threat: str | None = None, batch: int = 1, accuracy: float | None = 0.95, mse: float | None = None,
    dataset: str = "digits", model: str = "mlp", options: dict[str, object] | None = None,
    shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, clients: int = 10, seed: int = 0,
    parameters: dict[str, object] | None = None, bytes_up: float = 1000.0, reason: str | None = "no noise",
    epsilon: float | None = None, status: str = "complete", upload: str = "gradient", loss: str = "squared",
    sha256: str = "0" * 64, alike: float | None = None, scores: Sequence[Score] | None = None, **more: object,
) -> Record:  # fmt: skip
    records, whole = kind in ("membership", "extraction"), status == "complete"
    threat, stage = threat or ("client/1" if records else "server/1"), stage or ("final" if records else "init")
    chosen = None if value is None else dict(name=control, value=value)
    given = ({} if value is None else {control: value}) | (parameters or {})
    config = CellConfig.model_validate(
        dict(
            suite="evaluate/1", batch_size=batch, victims=10, seed=seed, stage=stage,
            threat_model=dict(id=threat, sees="", knows_defense=adaptive),
            defense=dict(id=defense, version="1", parameters=given, control=chosen),
            attack=dict(id=attack, version="1", kind=kind, parameters={}, adaptive=adaptive),
            federation=FEDERATION | dict(clients=clients, upload=upload),
            data=dict(name=dataset, sha256=sha256, train=1000, test=500),
            model=dict(id=model, options=options or {}, shape=[*shape], classes=classes, parameters=250, loss=loss),
        ) | more
    )  # fmt: skip
    count = n or {"membership": 400, "extraction": 200}.get(kind, 12)
    made = _victims(kind, share, error, count, alike) if scores is None else list(scores)
    privacy = dict(epsilon=epsilon, delta=None if epsilon is None else 1e-5)
    privacy |= dict(reason=reason if epsilon is None else None)
    draft = Record.model_validate(
        dict(
            cell_id=config.cell_id(), config=config, victims=made if whole else [], metrics=[], privacy=privacy,
            utility=_use(accuracy, mse, classes), cost=dict(bytes_up=bytes_up, bytes_down=1000, bytes_setup=80),
            status=status, reason=None if whole else "it broke", environment=ENVIRONMENT,
        )
    )  # fmt: skip
    delta = None if scores is None else draft.privacy.delta
    return draft.model_copy(update={"metrics": aggregate(draft.victims, classes=classes, seed=seed, delta=delta)})


@pytest.fixture(scope="session")
def fabricate() -> Callable[..., Record]:
    """Return a maker of records: `fabricate("pbpfl", 10.0, "mia_loss", "membership", share=0.5, stage="iterate")`.

    share: of hits (images: dB); error: relative error of rows or outputs; alike: share of queries that the true model
    decides for class 0, the others for class 1; scores: in place of such; more: other fields of the configuration.
    """
    return _fabricated
