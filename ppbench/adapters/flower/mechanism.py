"""A strategy and client mods of Flower as a defense: ppbench supplies the network, the data and the local training.

A round is Flower's: `configure_train`, each client's `ClientApp` with its mods around the training, `aggregate_train`.
Clients receive and send weights, so a probe is one local step: sent minus received weights are the rate times a
gradient. Snapshots of the strategy and the clients' contexts are taken after each round and restored (`state`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, ClassVar, Literal, NamedTuple

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app import Context as FlowerContext
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from ppbench.adapters.flower.records import (
    Content,
    StageRequest,
    TrainReply,
    TrainRequest,
    array_record,
    content_tree,
    joined_weights,
    record_dict,
    request_records,
    restored_strategy,
    split_weights,
    strategy_snapshot,
    string_of,
    text_tree,
)
from ppbench.adapters.framework import check_plan
from ppbench.adapters.user_code import as_usage_error, context_seed, description, seeded_run
from ppbench.base.errors import ProtocolError, UsageError, one_line
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step
from ppbench.federation.plan import Data, Plan

Mod = Callable[[Message, FlowerContext, Callable[..., Message]], Message]
StrategyAndMods = tuple[Strategy, Sequence[Mod]]
EMPTY = Content({}, {}, {})
EXAMPLE_COUNT = "num-examples"


class Prepared(NamedTuple):
    """The server's new strategy or workflow, clients' mods (outermost first), and training settings, for one round."""

    server: Any
    mods: Sequence[Mod]
    config: ConfigRecord


@node
class FlowerClientState:
    """A client's state: that of its Flower context."""

    state: Content


class _Caught(BaseException):
    """Carries a training request out of the client's app."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message


@dataclass(frozen=True)
class FlowerDefense(Defense):
    """A Flower strategy with client mods as a defense."""

    version: ClassVar[str] = f"1+flwr{metadata.version('flwr')}"
    sends: ClassVar[Literal["weights"]] = "weights"
    mappable: ClassVar[bool] = False
    everybody: ClassVar[bool] = True  # a strategy chooses clients itself
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        preset: {"optimizer": "sgd", "lr": 0.1, "decay_at": (), "schedule": "parallel"} for preset in ("quick", "paper")
    }
    epsilon_reason: ClassVar[str] = "the bench does not know what this mechanism adds"
    _gives: ClassVar[tuple[type, str]] = (Strategy, "strategy")
    """What `parts` gives beside clients' mods, in words too."""

    def parts(self, clients: int) -> StrategyAndMods:
        """Return a new strategy for `clients` clients, and the clients' mods, outermost first."""
        raise NotImplementedError

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse plans that Flower cannot run, and parameters that its code refuses."""
        super().check(plan)
        check_plan(self.name, plan, "weights")
        self._made(plan)

    def _made(self, plan: Plan) -> Prepared:
        """Return the parts of a round (UsageError: their code raises anything, or gives something else)."""
        with as_usage_error(), running_flower(description(self), 0):
            server, mods = self.parts(plan.clients)
        kind, noun = self._gives
        if not isinstance(server, kind) or not all(callable(mod) for mod in mods):
            actual = one_line(type(server).__name__, 60)
            raise UsageError(f"Defense {self.name!r} gave {actual}; it must give ({noun}, list of client mods).")
        return Prepared(server, mods, ConfigRecord())

    # -- the server ----------------------------------------------------------------------------------------------
    def init_server(self, ctx: Context, params: Params) -> Server:
        """As the base class; the state holds a snapshot of the new strategy."""
        server = super().init_server(ctx, params)
        return replace(server, own=strategy_snapshot(self._made(ctx.plan).server))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange nothing: Flower's clients send their numbers of examples with their weights."""
        return server
        yield Step(server, {})  # makes it a coroutine

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one round of the strategy (ProtocolError: it leaves out clients, or a client sends no weights)."""
        strategy, messages = self._configured(ctx, server)
        if missing := sorted({*cohort} - {*messages}):
            raise ProtocolError(
                f"The strategy leaves out client {missing[0]} of {len(cohort)}; let it take all (fraction_train=1)."
            )
        requests = _requests(
            {client: message for client, message in messages.items() if client in cohort}, server.params
        )
        uploads = yield Step(replace(server, own=strategy_snapshot(strategy)), requests)
        return self._aggregated(ctx, server, strategy, messages, uploads)

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Return the server's state and the strategy's first message."""
        strategy, messages = self._configured(ctx, server)
        first = min(messages)
        return replace(server, own=strategy_snapshot(strategy)), _requests({first: messages[first]}, server.params)[
            first
        ]

    def _configured(self, ctx: Context, server: Server) -> tuple[Strategy, dict[int, Message]]:
        prepared = self._made(ctx.plan)
        strategy: Strategy = restored_strategy(prepared.server, server.own)
        with running_flower("The strategy", context_seed(ctx), 0):
            grid, arrays = Nodes(ctx.plan.clients), array_record(server.params)
            training = list(strategy.configure_train(ctx.round, arrays, prepared.config, grid))
        messages = {receiver_of(message): message for message in training}
        if not messages:
            raise ProtocolError(f"The strategy asks nobody to train in round {ctx.round}.")
        return strategy, messages

    def _aggregated(
        self,
        ctx: Context,
        server: Server,
        strategy: Strategy,
        messages: Mapping[int, Message],
        uploads: Mapping[int, Tree],
    ) -> Server:
        replies = []
        counts = server.counts.clone()
        for client, upload in uploads.items():
            if not isinstance(upload, TrainReply):
                raise ProtocolError(f"Client {client} sent {type(upload).__name__}, not weights.")
            replies.append(Message(self.replied(upload), reply_to=messages[client]))
            counts[client] = next(
                (int(m[EXAMPLE_COUNT]) for m in upload.rest.metrics.values() if EXAMPLE_COUNT in m), 1
            )
        with running_flower("The strategy", context_seed(ctx), 1):
            arrays, _ = strategy.aggregate_train(ctx.round, replies)
        params = server.params
        if arrays is not None:
            _, weights, _ = split_weights(content_tree({"arrays": arrays}), params, "What the strategy aggregates")
            params = {name: weights[name].to(old.device, old.dtype) for name, old in params.items()}
        return Server(params, server.opt, counts, strategy_snapshot(strategy))

    def replied(self, upload: TrainReply) -> RecordDict:
        """Return an upload as records for the strategy."""
        return joined_weights(string_of(upload.key), upload.params, upload.rest)

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return an empty context."""
        return FlowerClientState(EMPTY)

    def prepare(self, ctx: Context, me: FlowerClientState, message: Tree, data: Data) -> Job | None:
        """As the base class, from the weights that reach the training: mods may have changed them."""
        if not isinstance(message, TrainRequest):
            return None

        def train(request: Message, _: FlowerContext) -> Message:
            raise _Caught(request)

        try:
            self._run(ctx, me, message, train)
        except _Caught as caught:
            _, start, _ = split_weights(
                content_tree(caught.message.content), message.params, "What the training is given"
            )
            start = {n: start[n].to(old.device, old.dtype) for n, old in message.params.items()}
            return super().prepare(ctx, (), replace(message, params=start), data)
        return None

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return the weights after the local steps."""
        change = super().compute(plan, job)
        return {name: job.start[name] - value for name, value in change.items()}

    def reply(
        self, ctx: Context, me: FlowerClientState, message: Tree, result: Tree, data: Data
    ) -> tuple[Tree, Tree | None]:
        """Run the client's app once more, with the trained weights as its training's result."""

        def train(request: Message, _: FlowerContext) -> Message:
            key = next(iter(request.content.array_records))
            records: dict[str, Any] = {
                key: array_record(result),
                "metrics": MetricRecord({EXAMPLE_COUNT: len(data.x)}),
            }
            return Message(RecordDict(records), reply_to=request)

        return self.client_reply(ctx, message, *self._run(ctx, me, message, train))

    def client_reply(
        self, ctx: Context, request: TrainRequest, answer: Message, context: FlowerContext
    ) -> tuple[Tree, Tree | None]:
        """Return a client's new state and its upload from its app's answer (ProtocolError: an error, or no weights)."""
        if answer.has_error():
            raise ProtocolError(f"Client {ctx.party} answers by an error: {one_line(answer.error.reason)}.")
        key, params, rest = split_weights(
            content_tree(answer.content), request.params, f"What client {ctx.party} sends"
        )
        return FlowerClientState(content_tree(context.state)), TrainReply(params, text_tree(key), rest)

    def _run(
        self,
        ctx: Context,
        me: FlowerClientState,
        message: TrainRequest | StageRequest,
        train: Callable[[Message, FlowerContext], Message],
    ) -> tuple[Message, FlowerContext]:
        """Return a client's answer and context; draws and state are those of the first run in this step."""
        place: dict[str, bool | float | int | str] = {"partition-id": ctx.party, "num-partitions": ctx.plan.clients}
        context = FlowerContext(RUN, node_of(ctx.party), place, record_dict(me.state), {})
        app = ClientApp(mods=[*self._made(ctx.plan).mods])
        app.train()(train)
        request = request_records(message)
        with running_flower(f"The app of client {ctx.party}", context_seed(ctx), 2):
            return app(Message(request, node_of(ctx.party), string_of(message.kind)), context), context

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return the received minus the uploaded weights, float64."""
        return {name: value.double() - upload.params[name].double() for name, value in like.items()}


def _requests(messages: Mapping[int, Message], like: Params) -> dict[int, TrainRequest]:
    """Return messages as trees, by client; messages with the same records share one object."""
    by_content: dict[int, TrainRequest] = {}
    requests: dict[int, TrainRequest] = {}
    for client, message in messages.items():
        if id(message.content) not in by_content:
            key, params, rest = split_weights(content_tree(message.content), like, "What the strategy sends")
            device = next(iter(like.values())).device
            moved = {name: params[name].to(device) for name in like}
            by_content[id(message.content)] = TrainRequest(
                moved, text_tree(key), rest, text_tree(message.metadata.message_type)
            )
        requests[client] = by_content[id(message.content)]
    return requests


# -- Runs Flower's code in this process: seeded, quiet, and without a network --

RUN = SERVER_NODE = 1
MAX_NODE_QUERIES = 5
"""How often a strategy may ask for the nodes: one that waits for more clients asks without end."""


@contextmanager
def running_flower(who: str, *seed: int) -> Iterator[None]:
    """Run Flower's code as `seeded_run` does, with the identity of a Flower task."""
    identity = _identity()
    if identity is not None:
        identity.task_id, identity.run_id, identity.node_id = RUN, RUN, SERVER_NODE
    try:
        with seeded_run("flwr", who, *seed):
            yield
    finally:
        if identity is not None:
            identity.task_id = identity.run_id = identity.node_id = None


def _identity() -> Any:
    """Return the object from which newer versions read a message's sender; None for older ones."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return None
    return TaskIdentity


def node_of(client: int) -> int:
    """Return a client's node id; the server's is `SERVER_NODE`."""
    return client + SERVER_NODE + 1


def receiver_of(message: Message) -> int:
    """Return the client that a message is for."""
    return int(message.metadata.dst_node_id) - SERVER_NODE - 1


class Nodes(Grid):
    """A grid that lists all clients' nodes and sends nothing: `configure_train` returns the messages."""

    def __init__(self, count: int) -> None:
        self.count, self.queries = count, 0

    @property
    def run(self) -> Any:
        """No run."""
        return None

    def set_run(self, run: Any) -> None:
        """Take no run."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of all clients (ProtocolError: asked more than `MAX_NODE_QUERIES` times)."""
        self.queries += 1
        if self.queries > MAX_NODE_QUERIES:
            raise ProtocolError(f"The strategy waits for more clients than the {self.count} that there are.")
        return [node_of(client) for client in range(self.count)]

    def create_message(self, *parts: Any, **named: Any) -> Message:
        """Return a message."""
        return Message(*parts, **named)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse (ProtocolError)."""
        raise ProtocolError("The strategy sends messages by itself; only what configure_train returns is sent here.")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse (ProtocolError)."""
        return self.push_messages(())  # type: ignore[return-value]  # it raises

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Refuse (ProtocolError)."""
        return self.push_messages(messages)  # type: ignore[return-value]  # it raises
