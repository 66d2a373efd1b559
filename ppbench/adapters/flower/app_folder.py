"""An unchanged Flower app folder as a defense: its own server, clients and training; ppbench supplies the data.

Two names in the folder's `pyproject.toml` tell where the network and a client's data come from:

    [tool.ppbench]
    network = "my_app.task:Net"
    data = "my_app.task:load_data"  # returns (training loader, test loader)
    batch = ["img", "label"]  # keys of a loader's batches; left out if they are pairs

Texts go to the app as token numbers, int64; of three keys the second is that of the mask of tokens, 0 at padding.

The server's `main` runs up to `Strategy.start`; then `FlowerDefense` runs the rounds, with the training settings that
were passed there. A client's app runs as a whole, on the client's examples or on a victim's batch.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
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

from ppbench.adapters.flower.mechanism import (
    RUN,
    SERVER_NODE,
    FlowerClientState,
    FlowerDefense,
    Nodes,
    Prepared,
    node_of,
    running_flower,
)
from ppbench.adapters.flower.records import (
    TrainReply,
    TrainRequest,
    array_record,
    content_tree,
    record_dict,
    request_records,
    string_of,
)
from ppbench.adapters.user_code import Steps, as_usage_error, context_seed, watched
from ppbench.base.errors import ProtocolError, UsageError, shown
from ppbench.base.registry import imported
from ppbench.base.toml_files import tomllib
from ppbench.base.tree import Tree
from ppbench.base.vocabulary import PADDING
from ppbench.federation.contract import Context, Job
from ppbench.federation.plan import Data, Plan
from ppbench.nets.net import initial

FILE = "pyproject.toml"
RATE_SETTINGS = ("lr", "learning-rate", "learning_rate")
"""Names of the learning rate in an app's settings; the first one present is set to the plan's."""
BUFFERS = "buffers"
"""The record of a network's buffers in what a client sends."""
_CLIENT_DATA: ContextVar[tuple[Data, int] | None] = ContextVar("client_data", default=None)
"""The data of the client that runs now, and its batch size."""


class _Started(BaseException):
    """Carries the strategy that a server starts, its training settings and the names of its arrays out of `main`."""

    def __init__(self, strategy: Strategy, config: ConfigRecord, names: Sequence[str]) -> None:
        super().__init__()
        self.strategy, self.config, self.names = strategy, config, tuple(names)


@dataclass(frozen=True)
class AppFolder:
    """A Flower app. server, client: its apps; settings: `[tool.flwr.app.config]`; network: the network's address."""

    server: ServerApp
    client: ClientApp
    settings: Mapping[str, Any]
    network: str


@dataclass(frozen=True)
class App(FlowerDefense):
    """A Flower app's folder as a defense."""

    folder: ClassVar[AppFolder]
    tracks: ClassVar[bool] = True

    def check(self, plan: Plan) -> None:
        """As the base class; also raise UsageError if the plan's local optimizer is not the app's."""
        super().check(plan)
        steps = self._steps(plan)
        opt = plan.local.opt
        if (steps.optimizer, steps.lr) != (opt.name, opt.rate(1)):
            right = f"--optimizer {steps.optimizer} --lr {steps.lr:g}"
            raise UsageError(
                f"Defense {self.name!r} trains by {steps.words}; give {right}, by which its updates are read."
            )

    def _steps(self, plan: Plan) -> Steps:
        """Return the app's steps on one random input (UsageError: no attack reads such training)."""
        data = Data(torch.rand(1, *plan.spec.shape), torch.eye(plan.spec.classes)[:1])
        made, params = self._made(plan), initial(plan.spec, 0)
        with as_usage_error():
            with running_flower("The strategy", 0):
                request = next(
                    iter(made.server.configure_train(1, array_record(params), made.config, Nodes(plan.clients)))
                )
            with watched() as steps:
                context = self._context(plan, 0, record_dict(content_tree({})))
                self._trained(plan, request.content, request.metadata.message_type, context, data, 0)
        return steps.checked(self.name, plan.local.epochs)

    def _made(self, plan: Plan) -> Prepared:
        started = self._started(plan)
        return Prepared(started.strategy, (), started.config)

    def _started(self, plan: Plan) -> _Started:
        """Return what the app's server starts; UsageError: it starts nothing."""
        context = FlowerContext(RUN, SERVER_NODE, {}, record_dict(content_tree({})), self._settings(plan))
        try:
            with running_flower(f"The server of {self.name!r}", 0), mock.patch.object(Strategy, "start", _start):
                self.folder.server(Nodes(plan.clients), context)
        except _Started as started:
            return started
        raise UsageError(
            f"The server of {self.name!r} ends without Strategy.start; only what that starts can be run here."
        )

    def _settings(self, plan: Plan) -> dict[str, Any]:
        """Return the app's settings; those of rate, epochs and batch size are set to the plan's."""
        own = dict(self.folder.settings)
        rate = next((name for name in RATE_SETTINGS if name in own), "")
        planned = {rate: plan.local.opt.lr, "local-epochs": plan.local.epochs, "batch-size": plan.local.batch}
        return own | {name: value for name, value in planned.items() if name in own}

    # -- a client ------------------------------------------------------------------------------------------------
    def prepare(self, ctx: Context, me: FlowerClientState, message: Tree, data: Data) -> Job | None:
        """Return None: the app trains by itself, in `reply`."""
        return None

    def reply(
        self, ctx: Context, me: FlowerClientState, message: Tree, result: Tree, data: Data
    ) -> tuple[Tree, Tree | None]:
        """Run the client's app on its data (ProtocolError: it raises, or answers by an error)."""
        if not isinstance(message, TrainRequest):
            raise ProtocolError(f"Client {ctx.party} was sent {type(message).__name__}, not weights to train.")
        context = self._context(ctx.plan, ctx.party, record_dict(me.state))
        answer = self._trained(
            ctx.plan, request_records(message), string_of(message.kind), context, data, context_seed(ctx)
        )
        return self.client_reply(ctx, message, answer, context)

    def _trained(
        self, plan: Plan, request: RecordDict, kind: str, context: FlowerContext, data: Data, seed: int
    ) -> Message:
        """Return the answer of the client's app, which gets the weights by its own names and its network's buffers.

        Buffers that it sends back are visible, but not aggregated, other than running statistics under norms=tracked.
        """
        names, others = self._arrays(plan)
        order = [*_sent_names(self, plan), *names.values(), *others]  # by which apps tell arrays without names
        for key, record in [*request.array_records.items()]:
            if {*record} == {*plan.net.names}:
                arrays = {names[n]: array for n, array in record.items()} | {**others}
                request[key] = ArrayRecord({n: arrays[n] for n in sorted(arrays, key=order.index)})
        own = data if plan.vocabulary is None else Data(data.x.long(), data.y)
        with running_flower(f"The client of {self.name!r}", seed, 2), _supplying(own, plan.local.batch):
            answer = self.folder.client(Message(request, context.node_id, kind), context)
        for key, record in [] if answer.has_error() else [*answer.content.array_records.items()]:
            if all(names[name] in record for name in plan.net.names):
                answer.content[key] = ArrayRecord({name: record.pop(names[name]) for name in plan.net.names})
                if record:
                    answer.content[BUFFERS] = record
        return answer

    def _arrays(self, plan: Plan) -> tuple[dict[str, str], ArrayRecord]:
        """Return the app's name of each trained array, and the other arrays that it sends, as they are at first."""
        module = imported(metadata.EntryPoint("network", self.folder.network, ""))()
        state, names = module.state_dict(), _sent_names(self, plan)
        own = {name: plan.net.own_name(name) for name in plan.net.names}  # in the network's own `state_dict`
        by_state = names_of_arrays([*state], names)
        if {*own.values()} <= {*by_state}:
            trained = {name: by_state[one] for name, one in own.items()}
            rest = {array: state[one] for one, array in by_state.items() if array not in {*trained.values()}}
            return trained, array_record(rest)
        return own, array_record({name: v for name, v in module.named_buffers() if name not in {*own.values()}})

    def replied(self, upload: TrainReply) -> RecordDict:
        """As the base class, without buffers: strategies take one record of arrays."""
        rest = upload.rest
        arrays = {key: record for key, record in rest.arrays.items() if key != BUFFERS}
        return super().replied(replace(upload, rest=replace(rest, arrays=arrays)))

    def _context(self, plan: Plan, party: int, state: Any) -> FlowerContext:
        place: dict[str, Any] = {"partition-id": party, "num-partitions": plan.clients}
        return FlowerContext(RUN, node_of(party), place, state, self._settings(plan))


def _start(self: Strategy, grid: Any, initial_arrays: ArrayRecord, *rest: Any, **named: Any) -> Any:
    """Replace `Strategy.start`: raise what it would start."""
    arguments = inspect.signature(_original).bind(self, grid, initial_arrays, *rest, **named).arguments
    raise _Started(self, arguments.get("train_config") or ConfigRecord(), [*arguments["initial_arrays"]])


@lru_cache(maxsize=8)
def _sent_names(app: App, plan: Plan) -> tuple[str, ...]:
    """Return the names of the arrays that an app's server starts with."""
    return app._started(plan).names  # a cache of one of its answers


ADAPTER_PARTS = {"default", "modules_to_save"}
"""Parts of a name in a network's state that `peft` leaves out where it sends adapters."""


def names_of_arrays(state: Sequence[str], arrays: Sequence[str]) -> dict[str, str]:
    """Return the array's name of each tensor of a network's state that travels.

    state: names in its `state_dict`; arrays: those that an app sends. They are equal, or lack `ADAPTER_PARTS`, as those
    of `peft.get_peft_model_state_dict`; or they are numbers, in the order of the state.
    """
    by_short_name = {_without_adapter_parts(name): name for name in arrays}
    names = {name: name for name in state if name in arrays}
    for name in state:
        if name not in names and (short := _without_adapter_parts(name)) in by_short_name:
            names[name] = by_short_name[short]
    if len({*names.values()}) == len(arrays):
        return names
    return dict(zip(state, arrays, strict=True)) if len(state) == len(arrays) else {}


def _without_adapter_parts(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ADAPTER_PARTS)


_original = Strategy.start


@contextmanager
def _supplying(data: Data, batch: int) -> Iterator[None]:
    token = _CLIENT_DATA.set((data, batch))
    try:
        yield
    finally:
        _CLIENT_DATA.reset(token)


def app_defense(folder: str, name: str) -> type[App]:
    """Return the defense of an app folder (UsageError: it is no Flower app, or lacks the two names)."""
    place = Path(folder).resolve()
    try:
        tool: dict[str, Any] = tomllib.loads((place / FILE).read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as cause:
        raise UsageError(f"{shown(folder)} behind flower: holds no readable {FILE}, so is no Flower app.") from cause
    app, names = tool.get("flwr", {}).get("app", {}), tool.get("ppbench", {})
    server, client = (app.get("components", {}).get(f"{side}app") for side in ("server", "client"))
    if not (isinstance(server, str) and isinstance(client, str)):
        raise UsageError(f"{place / FILE} names no serverapp and clientapp in [tool.flwr.app.components].")
    for key in ("network", "data"):
        if not isinstance(names.get(key), str):
            need = "network, and data, the function that gives a client's loaders"
            raise UsageError(f"{place / FILE} has no [tool.ppbench] {key}; give MODULE:NAME of {need}.")
    sys.path.insert(0, str(place))
    app_folder = AppFolder(
        _imported_app(ServerApp, server, place),
        _imported_app(ClientApp, client, place),
        app.get("config", {}),
        cast(str, names["network"]),
    )
    _replace(names["data"], _loaders(names.get("batch"), place), place)
    return _class(name, app_folder, _digest(place))


def _digest(place: Path) -> str:
    """Return a digest of an app's code and settings, so that an edited app never reuses older cells."""
    digest = hashlib.sha256()
    for path in sorted([place / FILE, *place.rglob("*.py")]):
        content_ = path.read_bytes()
        digest.update(f"{path.relative_to(place).as_posix()}\n{len(content_)}\n".encode() + content_)
    return digest.hexdigest()[:8]


def _class(name: str, folder: AppFolder, digest: str) -> type[App]:
    settings = folder.settings
    federation: dict[str, Any] = {
        "model": folder.network, "optimizer": "sgd", "decay_at": (), "schedule": "parallel",
        "lr": float(next((settings[r] for r in RATE_SETTINGS if r in settings), 0.1)),
        "local_epochs": int(settings.get("local-epochs", 1)), "batch_size": int(settings.get("batch-size", 32)),
    }  # fmt: skip
    attributes = {
        "name": name, "folder": folder, "setting": {preset: federation for preset in ("quick", "paper")},
        "version": f"{App.version}+{digest}", "__module__": folder.network.partition(":")[0],
        "__doc__": "A Flower app of yours.",
    }  # fmt: skip
    return cast("type[App]", dataclass(frozen=True)(type("Yours", (App,), attributes)))


def _imported_app(kind: type, address: str, place: Path) -> Any:
    app = imported(metadata.EntryPoint("app", address, ""))
    file = Path(inspect.getfile(sys.modules[address.partition(":")[0]])).resolve()
    if not isinstance(app, kind):
        raise UsageError(f"{address} in {place} is {shown(app, 60)}, not a {kind.__name__}.")
    if place not in file.parents:
        raise UsageError(f"{address} of {place} was imported from {file}; give the app's package a name of its own.")
    return app


def _loaders(keys: Any, place: Path) -> Callable[..., tuple[Any, Any]]:
    """Return a replacement of the app's data function. keys: of its batches, None for pairs."""
    known = keys is None or (isinstance(keys, list) and len(keys) in (2, 3) and all(isinstance(k, str) for k in keys))
    if not known:
        raise UsageError(
            f"{place / FILE} has [tool.ppbench] batch = {shown(keys, 60)}; give two keys, inputs' and labels', or "
            "three, with that of a text's mask between."
        )

    def loaders(*_: Any, **__: Any) -> tuple[Any, Any]:
        supplied = _CLIENT_DATA.get()
        if supplied is None:
            raise ProtocolError("The app loads a client's data outside a client's training; nothing is handed there.")
        data, batch = supplied
        x, labels = data.x.cpu(), data.y.argmax(1).cpu()
        parts = (x, labels) if keys is None or len(keys) == 2 else (x, (x != PADDING).long(), labels)
        items: list[Any] = list(zip(*parts, strict=True))
        if keys is not None:
            items = [dict(zip(keys, item, strict=True)) for item in items]
        return DataLoader(items, batch_size=batch, shuffle=True), DataLoader(items, batch_size=batch)  # type: ignore[arg-type]  # a list

    return loaders


def _replace(address: str, stand_in: Callable[..., Any], place: Path) -> None:
    """Replace the function at `address` by `stand_in` in all modules of the app."""
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
