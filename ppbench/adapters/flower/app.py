"""An unchanged Flower app folder as a defense: its own server, clients and training; the bench hands it data.

The folder's `pyproject.toml` says by two names where the network and a client's batch come from:

    [tool.ppbench]
    network = "my_app.task:Net"
    data = "my_app.task:load_data"  # gives (training loader, test loader)
    batch = ["img", "label"]  # keys of a loader's batches; left out where they are pairs

The server's `main` runs up to `Strategy.start`; from there on rounds are those of `Mechanism`, with the settings of
training that it gives there. A client's app runs whole, on what the bench holds: its examples, or a victim's batch.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app import Context as FlowerContext
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy
from torch.utils.data import DataLoader

from ppbench.adapters.flower.inside import RUN, SERVER_NODE, Nodes, node_of, running
from ppbench.adapters.flower.mechanism import Made, Mechanism, Worker
from ppbench.adapters.flower.records import Asked, Told, array_record, asked_records, content, records, words
from ppbench.adapters.running import refused, seed_of
from ppbench.adapters.steps import Steps, watched
from ppbench.base.entries import imported
from ppbench.base.errors import ProtocolError, UsageError, shown
from ppbench.base.tree import Tree
from ppbench.federation.contract import Context, Job
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import initial
from ppbench.nets.split import Given
from ppbench.suites import tomllib

FILE = "pyproject.toml"
RATES = ("lr", "learning-rate", "learning_rate")
"""What an app's settings may call the learning rate; the first that it has is the plan's."""
BUFFERS = "buffers"
"""The record that holds, in a view, what a client sends of its network besides weights."""
_HANDED: ContextVar[tuple[Data, int] | None] = ContextVar("handed", default=None)
"""What the client that runs now trains on, and in batches of how many."""


class _Started(BaseException):
    """Carries out of a server's `main` the strategy that it starts, and with which settings."""

    def __init__(self, strategy: Strategy, config: ConfigRecord) -> None:
        super().__init__()
        self.strategy, self.config = strategy, config


@dataclass(frozen=True)
class Parts:
    """What a folder holds. server, client: its apps; settings: `[tool.flwr.app.config]`; network: its address."""

    server: ServerApp
    client: ClientApp
    settings: Mapping[str, Any]
    network: str


@dataclass(frozen=True)
class App(Mechanism):
    """A Flower app, as it lies in a folder."""

    found: ClassVar[Parts]

    def check(self, plan: Plan) -> None:
        """As its base; also refuse a plan whose local optimizer is not the one that the app trains by (UsageError)."""
        super().check(plan)
        steps = self._steps(plan)
        opt = plan.local.opt
        if (steps.optimizer, steps.lr) != (opt.name, opt.rate(1)):
            right = f"--optimizer {steps.optimizer} --lr {steps.lr:g}"
            raise UsageError(
                f"Defense {self.name!r} trains by {steps.words}; give {right}, by which its updates are read."
            )

    def _steps(self, plan: Plan) -> Steps:
        """Return how the app trains, seen at one random input (UsageError: in a way that no attack reads yet)."""
        data = Data(torch.rand(1, *plan.spec.shape), torch.eye(plan.spec.classes)[:1])
        made, params = self._made(plan), initial(plan.spec, 0)
        with refused():
            with running("The strategy", 0):
                asked = next(
                    iter(made.strategy.configure_train(1, array_record(params), made.config, Nodes(plan.clients)))
                )
            with watched() as steps:
                context = self._context(plan, 0, records(content({})))
                self._trained(plan, asked.content, asked.metadata.message_type, context, data, 0)
        return steps.told(self.name, plan.local.epochs)

    def _made(self, plan: Plan) -> Made:
        place = FlowerContext(RUN, SERVER_NODE, {}, records(content({})), self._settings(plan))
        try:
            with running(f"The server of {self.name!r}", 0), mock.patch.object(Strategy, "start", _start):
                self.found.server(Nodes(plan.clients), place)
        except _Started as started:
            return Made(started.strategy, (), started.config)
        raise UsageError(
            f"The server of {self.name!r} ends without Strategy.start; only what that starts can be run here."
        )

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """Return the app's settings, of which rate, epochs and batch are the plan's where it has them."""
        own = dict(self.found.settings)
        told = {next((r for r in RATES if r in own), ""): plan.local.opt.lr, "local-epochs": plan.local.epochs}
        told["batch-size"] = plan.local.batch
        return own | {name: value for name, value in told.items() if name in own}

    # -- a client ------------------------------------------------------------------------------------------------
    def prepare(self, ctx: Context, me: Worker, message: Tree, data: Data) -> Job | None:
        """Return None: the app trains by itself, in `reply`."""
        return None

    def reply(self, ctx: Context, me: Worker, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Run the client's app on its data (ProtocolError: it raises, or answers by an error)."""
        if not isinstance(message, Asked):
            raise ProtocolError(f"Client {ctx.party} was sent {type(message).__name__}, not weights to train.")
        context = self._context(ctx.plan, ctx.party, records(me.state))
        answer = self._trained(ctx.plan, asked_records(message), words(message.kind), context, data, seed_of(ctx))
        return self.told(ctx, message, answer, context)

    def _trained(
        self, plan: Plan, asked: RecordDict, kind: str, context: FlowerContext, data: Data, seed: int
    ) -> Message:
        """Return what the client's app answers, to which weights have its network's names, and come with its buffers.

        What it sends back of buffers is seen, and not aggregated: the bench's networks have none that move.
        """
        names = own_names(plan)
        module = imported(metadata.EntryPoint("network", self.found.network, ""))()
        buffers = array_record(dict(module.named_buffers()))
        for key, record in [*asked.array_records.items()]:
            if {*record} == {*plan.net.names}:
                asked[key] = ArrayRecord({names[n]: array for n, array in record.items()} | {**buffers})
        with running(f"The client of {self.name!r}", seed, 2), _handing(data, plan.local.batch):
            answer = self.found.client(Message(asked, context.node_id, kind), context)
        for key, record in [] if answer.has_error() else [*answer.content.array_records.items()]:
            if all(names[name] in record for name in plan.net.names):
                answer.content[key] = ArrayRecord({name: record.pop(names[name]) for name in plan.net.names})
                if record:
                    answer.content[BUFFERS] = record
        return answer

    def replied(self, upload: Told) -> RecordDict:
        """As its base, without what is no weights: strategies take one record of arrays."""
        rest = upload.rest
        arrays = {key: held for key, held in rest.arrays.items() if key != BUFFERS}
        return super().replied(replace(upload, rest=replace(rest, arrays=arrays)))

    def _context(self, plan: Plan, party: int, state: Any) -> FlowerContext:
        place: dict[str, Any] = {"partition-id": party, "num-partitions": plan.clients}
        return FlowerContext(RUN, node_of(party), place, state, self._settings(plan))


def own_names(plan: Plan) -> dict[str, str]:
    """Return, by the bench's names of a network's parameters, those in its own `state_dict`."""
    module = plan.net.module
    return {name: module.own_name(name) if isinstance(module, Given) else name for name in plan.net.names}


def _start(self: Strategy, grid: Any, initial_arrays: ArrayRecord, *rest: Any, **named: Any) -> Any:
    """Stand for `Strategy.start`."""
    given = inspect.signature(_original).bind(self, grid, initial_arrays, *rest, **named).arguments
    raise _Started(self, given.get("train_config") or ConfigRecord())


_original = Strategy.start


@contextmanager
def _handing(data: Data, batch: int) -> Iterator[None]:
    token = _HANDED.set((data, batch))
    try:
        yield
    finally:
        _HANDED.reset(token)


def defense(folder: str, name: str) -> type[App]:
    """Return the defense that an app folder stands for (UsageError: it is none, or does not give the two names)."""
    place = Path(folder).resolve()
    try:
        tool: dict[str, Any] = tomllib.loads((place / FILE).read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as cause:
        raise UsageError(f"{shown(folder)} behind flower: holds no readable {FILE}, so is no Flower app.") from cause
    app, own = tool.get("flwr", {}).get("app", {}), tool.get("ppbench", {})
    server, client = (app.get("components", {}).get(f"{side}app") for side in ("server", "client"))
    if not (isinstance(server, str) and isinstance(client, str)):
        raise UsageError(f"{place / FILE} names no serverapp and clientapp in [tool.flwr.app.components].")
    for key in ("network", "data"):
        if not isinstance(own.get(key), str):
            need = "network, and data, the function that gives a client's loaders"
            raise UsageError(f"{place / FILE} has no [tool.ppbench] {key}; give MODULE:NAME of {need}.")
    sys.path.insert(0, str(place))
    parts = Parts(
        _of(ServerApp, server, place), _of(ClientApp, client, place), app.get("config", {}), cast(str, own["network"])
    )
    _replace(own["data"], _loaders(own.get("batch"), place), place)
    return _class(name, parts, _digest(place))


def _digest(place: Path) -> str:
    """Return what tells an app's code and settings from others: an edited one never finds older cells."""
    digest = hashlib.sha256()
    for path in sorted([place / FILE, *place.rglob("*.py")]):
        content_ = path.read_bytes()
        digest.update(f"{path.relative_to(place).as_posix()}\n{len(content_)}\n".encode() + content_)
    return digest.hexdigest()[:8]


def _class(name: str, parts: Parts, digest: str) -> type[App]:
    settings = parts.settings
    federation: dict[str, Any] = {
        "model": parts.network, "optimizer": "sgd", "decay_at": (), "schedule": "parallel",
        "lr": float(next((settings[r] for r in RATES if r in settings), 0.1)),
        "local_epochs": int(settings.get("local-epochs", 1)), "batch_size": int(settings.get("batch-size", 32)),
    }  # fmt: skip
    held = {
        "name": name, "found": parts, "setting": {preset: federation for preset in ("quick", "paper")},
        "version": f"1+flwr{metadata.version('flwr')}+{digest}", "__module__": parts.network.partition(":")[0],
        "__doc__": "A Flower app of yours.",
    }  # fmt: skip
    return cast("type[App]", dataclass(frozen=True)(type("Yours", (App,), held)))


def _of(kind: type, address: str, place: Path) -> Any:
    found = imported(metadata.EntryPoint("app", address, ""))
    file = Path(inspect.getfile(sys.modules[address.partition(":")[0]])).resolve()
    if not isinstance(found, kind):
        raise UsageError(f"{address} in {place} is {shown(found, 60)}, not a {kind.__name__}.")
    if place not in file.parents:
        raise UsageError(f"{address} of {place} was imported from {file}; give the app's package a name of its own.")
    return found


def _loaders(keys: Any, place: Path) -> Callable[..., tuple[Any, Any]]:
    """Return what stands where the app loads a client's data. keys: of its batches, None for pairs."""
    if keys is not None and not (isinstance(keys, list) and len(keys) == 2 and all(isinstance(k, str) for k in keys)):
        raise UsageError(
            f"{place / FILE} has [tool.ppbench] batch = {shown(keys, 60)}; give two keys, inputs' and labels'."
        )

    def loaders(*_: Any, **__: Any) -> tuple[Any, Any]:
        handed = _HANDED.get()
        if handed is None:
            raise ProtocolError("The app loads a client's data outside a client's training; nothing is handed there.")
        data, batch = handed
        items: list[Any] = list(zip(data.x.cpu(), data.y.argmax(1).cpu(), strict=True))
        if keys is not None:
            items = [dict(zip(keys, item, strict=True)) for item in items]
        return DataLoader(items, batch_size=batch, shuffle=True), DataLoader(items, batch_size=batch)  # type: ignore[arg-type]  # a list

    return loaders


def _replace(address: str, stand_in: Callable[..., Any], place: Path) -> None:
    """Put `stand_in` wherever modules of the app hold the function at `address`."""
    original = imported(metadata.EntryPoint("data", address, ""))
    if not callable(original):
        raise UsageError(
            f"[tool.ppbench] data = {shown(address)} in {place / FILE} is {shown(original, 60)}, no function."
        )
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and place in Path(file).resolve().parents:
            for attribute in [key for key, value in vars(module).items() if value is original]:
                setattr(module, attribute, stand_in)
