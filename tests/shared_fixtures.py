"""Shared fixtures: a small task on the embedded digits, federations over it, and records made by hand."""

import importlib.util
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.threats import recorded_threat
from ppbench.metrics.image import image_figures
from ppbench.metrics.intervals import clopper_pearson
from ppbench.metrics.modality import modality_of
from ppbench.nets.net import initial, net_spec
from ppbench.questions.image_metrics import ImageScore
from ppbench.questions.images import blind_decibels, flags_of, inexact
from ppbench.questions.reconstruction import RECOMPUTED
from ppbench.records.figure import aggregate
from ppbench.records.schema import CellConfig, Record
from ppbench.report.page.figures import Picture
from ppbench.run import cost
from ppbench.task.user_data import open_dataset
from ppbench.testing.small_federation import all_digits

torch.set_num_threads(1)
CLIENTS = 4


@pytest.fixture(scope="session", autouse=True)
def one_timed_pair():
    """Let trainings in this process time a single pair: how long a client takes is in no record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "BUDGET_S", 0.0)
        patch.setattr(cost, "ENOUGH_S", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def unflushed():
    """Let nothing wait for the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module")
def planted():
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
def heard():
    """Let SIGHUP and SIGINT have their defaults: what a test starts would go on ignoring them, as under nohup."""
    numbers = [signal.SIGINT, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def forked(monkeypatch):
    """Let executors of this process fork their workers: how long everything takes to import is tested elsewhere."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    return fork


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A small published ledger (`ledger_home.Home`), which no test may change."""
    import ledger_home

    from ppbench.run import evaluation

    fork = multiprocessing.get_context("fork")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: fork)
        patch.setattr(evaluation, "write_board", lambda store, claims: None)
        return ledger_home.made(tmp_path_factory.mktemp("ledger"))


@pytest.fixture(scope="module", autouse=True)
def undrawn(request):
    """Replace figures by empty ones unless the module sets `DRAWN = True`: drawing takes longer than what is tested."""

    def empty(picture, plot):
        picture.svg, picture.label = "<svg></svg>", "empty"

    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "DRAWN", False):
            patch.setattr(Picture, "__init__", empty)
            patch.setattr(Picture, "png", lambda picture: picture.label.encode())
        yield


@pytest.fixture
def refused(tmp_path):
    """Return an assertion: opening a data set fails with one line that contains all words."""

    def check(text, *words):
        with pytest.raises(UsageError) as caught:
            open_dataset(text, seed=0, root=tmp_path)
        message = str(caught.value)
        assert "\n" not in message and message[-1] in ".?"
        assert [word for word in words if word not in message] == []

    return check


@pytest.fixture(scope="session")
def digits():
    return all_digits()


@pytest.fixture
def plan():
    return Plan(net_spec("dlnet", (1, 8, 8), 10), CLIENTS, Local(batch=16))


@pytest.fixture
def shards(deal):
    """Four clients; the last one has fewer examples."""
    return deal((48, 48, 48, 40))


@pytest.fixture(scope="session")
def deal(digits):
    """Return a maker of shards of the given sizes, one behind the other, in storage of their own."""

    def make(sizes, dtype=torch.float32):
        ends = [sum(sizes[: client + 1]) for client in range(len(sizes))]
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return {c: Data(*(t[p].to(dtype, copy=True) for t in (digits.x, digits.y))) for c, p in enumerate(parts)}

    return make


@pytest.fixture
def federate(plan, shards):
    """Return a started federation of a defense."""

    def make(defense, plan=plan, seed=0, **options):
        federation = Federation(defense, plan, shards, Seeds(seed), **options)
        federation.start(initial(plan.spec, 1))
        return federation

    return make


@pytest.fixture(scope="session")
def script():
    """Return what imports a file of the repository that is in no package."""

    def imported(path):
        spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return imported


@pytest.fixture(scope="session")
def bench_page(script):
    """benchmarks/bench_page.py, which makes many records."""
    return script(Path(__file__).parent.parent / "benchmarks" / "bench_page.py")


# -- records made by hand --------------------------------------------------------------------------------------------
FEDERATION = dict(
    rounds=20, schedule="parallel", local_epochs=1, batch=32, optimizer="sgd", lr=0.1, momentum=0.0, decay_at=[],
    decay=1.0, partition="iid", server_optimizer="sgd", server_lr=0.1, backend="loop", device="cpu", dtype="float32",
)  # fmt: skip
COUNT = {"membership": 400, "extraction": 200}


def _victims(kind, share, error, n, alike, blind):
    """Yield scores of which `share` are hits; images lie `share` dB from the truth, give or take a little."""
    for i in range(n):
        hit = i < round(share * n)
        if kind == "membership":  # four strata of equal size: two halves times members and others
            member, right = bool(i % 2), i // 4 < round(share * n / 4)
            own = dict(kind="member", half=i % 4 // 2, member=member, decision=member == right)
            own["score"] = float(member == right)
        elif kind == "extraction":
            decision = None if alike is None else int(i >= alike * n)
            own = dict(kind="output", agree=hit, error=error, decision=decision)
        elif kind == "label":
            own = dict(kind="label", probe=i, client=0, index=0, label=hit)
        elif kind == "tracing":
            own = dict(kind="trace", owner=i % 10, guess=i % 10 if i < share * n else -1)
        else:
            own = dict(
                kind="image", probe=i, client=0, index=0, psnr=min(share + i % 3, 100.0), rmse=error, rmse_raw=error
            )
            own |= dict.fromkeys(("ssim", "label", "confidence", "at_truth")) | {"evaluations": 1}
            if blind is not None:
                seen = own["psnr"] > blind + 2
                looks = dict(gallery=500, rank=0 if seen else 9, read=seen, common=0.1)
                own |= dict(blind=blind, mse=0.1, oracle=own["psnr"], recognition=looks)
        yield {"index": i, **own}


def _config(
    defense, value, attack, kind, *, control="kappa", adaptive=False, parameters=None, stage=None, threat=None, batch=1,
    dataset="digits", sha256="0" * 64, model="mlp", options=None, shape=(1, 8, 8), classes=10, loss="squared",
    clients=10, upload="gradient", seed=0, **more,
):  # fmt: skip
    of_records = kind in COUNT
    values = {} if value is None else {control: value}
    threat = threat or ("client/1" if of_records else "server/1")
    axis = None if value is None else dict(name=control, value=value)
    network = dict(id=model, options=options or {}, shape=list(shape), classes=classes, parameters=250, loss=loss)
    return CellConfig.model_validate(
        dict(
            suite="evaluate/1", threat_model=dict(id=threat, sees=recorded_threat(threat).sees, knows_defense=adaptive),
            defense=dict(id=defense, version="1", parameters=values | (parameters or {}), control=axis),
            attack=dict(id=attack, version="1", kind=kind, parameters={}, adaptive=adaptive),
            federation=FEDERATION | dict(clients=clients, upload=upload), model=network,
            data=dict(name=dataset, sha256=sha256, train=1000, test=1000),
            stage=stage or ("final" if of_records else "init"), batch_size=batch, victims=10, seed=seed,
        ) | more
    )  # fmt: skip


def _flags(record):
    """Return the flags that a record's scores of images raise, and its others."""
    scores = record.victims
    others = [flag for flag in record.flags if flag.code not in RECOMPUTED]
    if not scores or type(scores[0]) is not ImageScore:
        return others
    measured = any(score.blind is not None for score in scores)
    modality = modality_of(record.config)
    return [*inexact(scores), *(flags_of(scores, [], (0.0, 1.0), modality) if measured else ()), *others]


METRICS = {}


def _metrics(record, delta):
    """Return the metrics of a record's scores; those that many tests ask for are made once."""
    key = record.model_dump_json(include={"victims"}), record.config.model.classes, record.config.seed, delta
    if key not in METRICS:
        METRICS[key] = aggregate(record.victims, classes=key[1], seed=key[2], delta=delta)
    return list(METRICS[key])


@pytest.fixture(scope="session")
def fabricate():
    """Return a maker of records: `fabricate("pbpfl", 10.0, "mia_loss", "membership", share=0.5, stage="iterate")`.

    share: of hits (images: dB); error: relative error of rows or outputs; alike: share of queries that the true model
    decides for class 0, the others for class 1; blind: dB of blind guesses, beyond which by two an image is found and
    read, None: neither was measured; scores: instead of such; the rest: of the configuration.
    """

    def make(
        defense, value, attack, kind, share=0.5, *, error=0.5, n=None, alike=None, status="complete", accuracy=0.95,
        mse=None, bytes_up=1000.0, epsilon=None, reason="no noise", scores=None, blind=11.0, **about,
    ):  # fmt: skip
        config = _config(defense, value, attack, kind, **about)
        fates = _victims(kind, share, error, n or COUNT.get(kind, 12), alike, blind) if scores is None else scores
        ends = None if accuracy is None else clopper_pearson(round(accuracy * 1000), 1000)
        curve = [] if accuracy is None else [(20, accuracy)]
        utility = dict(accuracy=accuracy, low=ends and ends.low, high=ends and ends.high, n=1000, curve=curve,
                       chance=1 / config.model.classes, reason=None if accuracy is not None else "none",
                       mse=mse, mse_low=mse and 0.95 * mse, mse_high=mse and 1.05 * mse)  # fmt: skip
        claim = (None, None, reason) if epsilon is None else (epsilon, 1e-5, None)
        privacy = dict(zip(("epsilon", "delta", "reason"), claim, strict=True))
        environment = dict(ppbench="0.1.0", python="3.11", torch="2.13", device="x86_64", threads=1, dtype="float32")
        draft = Record.model_validate(
            dict(
                cell_id=config.cell_id(), config=config, metrics=[],
                victims=[*fates] if status == "complete" else [], utility=utility, privacy=privacy,
                cost=dict(bytes_up=bytes_up, bytes_down=1000, bytes_setup=80), environment=environment,
                status=status, reason=None if status == "complete" else "it broke",
            )
        )  # fmt: skip
        metrics = _metrics(draft, None if scores is None else draft.privacy.delta)
        return draft.model_copy(update={"metrics": metrics, "flags": _flags(draft)})

    return make


@pytest.fixture(scope="session")
def rescored():
    """Return a maker of a record whose questions have a name, with `changes`, and with its metrics made again."""

    def make(record, **changes):
        new = record.model_copy(update=changes)
        if "asked" not in changes:
            new = new.model_copy(update={"asked": f"a1b2{len(new.victims)}"})
        return new.model_copy(update={"metrics": _metrics(new, new.privacy.delta), "flags": _flags(new)})

    return make


@pytest.fixture(scope="session")
def pictured(rescored):
    """Return a maker of a record and the reconstructions that give its figures, near its own ones in decibels."""

    def make(record):
        count, shape = len(record.victims), record.config.model.shape
        truth = (torch.arange(count * torch.Size(shape).numel()) % 2).float().reshape(count, *shape)
        far = torch.tensor([10 ** (-score.decibels / 20) for score in record.victims]).clamp(max=1)
        guess = (truth - far[:, None, None, None]).abs()
        blind = torch.full((1, *shape), 0.5)
        scores = [
            score.model_copy(update=asdict(figures) | {"blind": blind_decibels(blind[0], t, (0, 1)), "oracle": 100.0})
            for score, t, figures in zip(record.victims, truth, map(image_figures, guess, truth), strict=True)
        ]
        made = rescored(record, victims=scores).model_copy(update={"asked": record.asked})
        return made, {"guess": guess, "truth": truth, "blind": blind}

    return make


@pytest.fixture(scope="session")
def gained(rescored):
    """Return a maker of a record whose every victim gained decibels, each its own number."""

    def make(record, gain):
        victims = [
            v.model_copy(update={"psnr": v.psnr + by, "oracle": v.psnr + by})
            for v, by in ((v, gain * (1 + i / 100)) for i, v in enumerate(record.victims))
        ]
        return rescored(record, victims=victims)

    return make


@pytest.fixture(scope="session")
def cell(fabricate, rescored):
    """Return a maker of records that `ppbench compare` compares: of dp at sigma = .1, 24 victims, unless told."""

    def make(
        defense = "dp", value = 0.1, share = 10.0, attack = "dlg",
        kind = "reconstruction", n = 24, **more,
    ):  # fmt: skip
        return rescored(fabricate(defense, value, attack, kind, share, control="sigma", n=n, **more))

    return make
