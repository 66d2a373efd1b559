"""A strategy and client mods of Flower as a defense: the bench brings network, data and the local training.

A round is Flower's: `configure_train`, each client's `ClientApp` with its mods around the training, `aggregate_train`.
Clients get weights and send weights, so a probe is one local step, and what was sent less what came back is the rate
times a gradient. Strategy and clients' contexts are read off after each round (`state`), and made anew from that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app import Context as FlowerContext
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from ppbench.adapters.flower.inside import RUN, Nodes, client_of, node_of, running
from ppbench.adapters.flower.records import (
    Asked,
    Content,
    Note,
    Told,
    array_record,
    asked_records,
    content,
    joined,
    records,
    split,
    text,
    words,
)
from ppbench.adapters.flower.state import kept, restored
from ppbench.adapters.framework import check_plan
from ppbench.adapters.running import refused, seed_of, words_of
from ppbench.base.errors import ProtocolError, UsageError, one_line
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Job, Round, Server, Step
from ppbench.federation.plan import Data, Plan

Mod = Callable[[Message, FlowerContext, Callable[..., Message]], Message]
Parts = tuple[Strategy, Sequence[Mod]]
EMPTY = Content({}, {}, {})
COUNT = "num-examples"


class Made(NamedTuple):
    """What a round is run with: a new strategy, clients' mods, outermost first, and the settings of training."""

    strategy: Strategy
    mods: Sequence[Mod]
    config: ConfigRecord


@node
class Worker:
    """A client's state: what its context keeps."""

    state: Content


class _Caught(BaseException):
    """Carries out what the training is asked, where nobody trains yet."""

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message


@dataclass(frozen=True)
class Mechanism(Defense):
    """What a function of strategy and mods gives, as a defense; its parameters are those of the function."""

    sends: ClassVar[Literal["weights"]] = "weights"
    mappable: ClassVar[bool] = False
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        preset: {"optimizer": "sgd", "lr": 0.1, "decay_at": (), "schedule": "parallel"} for preset in ("quick", "paper")
    }
    epsilon_reason: ClassVar[str] = "the bench does not know what this mechanism adds"

    def parts(self, clients: int) -> Parts:
        """Return a new strategy for so many clients, and the clients' mods, outermost first."""
        raise NotImplementedError

    def check(self, plan: Plan) -> None:
        """As its base; also refuse what Flower's rounds have no place for, and parameters that the code refuses."""
        super().check(plan)
        check_plan(self.name, plan, "weights")
        self.mods_for(plan)

    @contextmanager
    def making(self) -> Iterator[None]:
        """Run what makes the parts (UsageError: it raises anything)."""
        with refused(), running(words_of(self), 0):
            yield

    def mods_for(self, plan: Plan) -> Sequence[Mod]:
        """Return a client's mods."""
        return self._made(plan).mods

    def _made(self, plan: Plan) -> Made:
        with self.making():
            strategy, mods = self.parts(plan.clients)
        if not isinstance(strategy, Strategy) or not all(callable(mod) for mod in mods):
            found = one_line(type(strategy).__name__, 60)
            raise UsageError(f"Defense {self.name!r} gave {found}; it must give (strategy, list of client mods).")
        return Made(strategy, mods, ConfigRecord())

    # -- the server ----------------------------------------------------------------------------------------------
    def init_server(self, ctx: Context, params: Params) -> Server:
        """As its base; the strategy as it was made is kept."""
        server = super().init_server(ctx, params)
        return replace(server, own=kept(self._made(ctx.plan).strategy))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Ask nobody anything: Flower's clients tell their numbers of examples with their weights."""
        return server
        yield Step(server, {})  # makes it a coroutine

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one round of the strategy (ProtocolError: clients are left out, or answer something else)."""
        strategy, messages = self._configured(ctx, server)
        if missing := sorted({*cohort} - {*messages}):
            raise ProtocolError(
                f"The strategy leaves out client {missing[0]} of {len(cohort)}; let it take all (fraction_train=1)."
            )
        asked = _once({client: message for client, message in messages.items() if client in cohort}, server.params)
        uploads = yield Step(replace(server, own=kept(strategy)), asked)
        return self._aggregated(ctx, server, strategy, messages, uploads)

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Return the server's state and what the strategy sends first."""
        strategy, messages = self._configured(ctx, server)
        first = min(messages)
        return replace(server, own=kept(strategy)), _once({first: messages[first]}, server.params)[first]

    def _configured(self, ctx: Context, server: Server) -> tuple[Strategy, dict[int, Message]]:
        made = self._made(ctx.plan)
        strategy: Strategy = restored(made.strategy, server.own)
        with running("The strategy", seed_of(ctx), 0):
            grid, arrays = Nodes(ctx.plan.clients), array_record(server.params)
            found = list(strategy.configure_train(ctx.round, arrays, made.config, grid))
        messages = {client_of(message): message for message in found}
        if not messages:
            raise ProtocolError(f"The strategy asks nobody to train in round {ctx.round}.")
        return strategy, messages

    def _aggregated(
        self, ctx: Context, server: Server, strategy: Strategy, asked: Mapping[int, Message], got: Mapping[int, Tree]
    ) -> Server:
        replies = []
        counts = server.counts.clone()
        for client, upload in got.items():
            if not isinstance(upload, Told):
                raise ProtocolError(f"Client {client} sent {type(upload).__name__}, not weights.")
            replies.append(Message(self.replied(upload), reply_to=asked[client]))
            counts[client] = next((int(m[COUNT]) for m in upload.rest.metrics.values() if COUNT in m), 1)
        with running("The strategy", seed_of(ctx), 1):
            arrays, _ = strategy.aggregate_train(ctx.round, replies)
        params = server.params
        if arrays is not None:
            _, found, _ = split(content({"arrays": arrays}), params, "What the strategy aggregates")
            params = {name: found[name].to(old.device, old.dtype) for name, old in params.items()}
        return Server(params, server.opt, counts, kept(strategy))

    def replied(self, upload: Told) -> RecordDict:
        """Return the records that the strategy is handed of an upload."""
        return joined(words(upload.key), upload.params, upload.rest)

    # -- a client ------------------------------------------------------------------------------------------------
    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return an empty context."""
        return Worker(EMPTY)

    def prepare(self, ctx: Context, me: Worker, message: Tree, data: Data) -> Job | None:
        """As its base, from the weights that the training is asked to start from: mods may have changed them."""
        if not isinstance(message, Asked):
            return None

        def train(asked: Message, _: FlowerContext) -> Message:
            raise _Caught(asked)

        try:
            self._run(ctx, me, message, train)
        except _Caught as caught:
            _, start, _ = split(content(caught.message.content), message.params, "What the training is given")
            start = {n: start[n].to(old.device, old.dtype) for n, old in message.params.items()}
            return super().prepare(ctx, (), replace(message, params=start), data)
        return None

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return the weights after the local steps."""
        change = super().compute(plan, job)
        return {name: job.start[name] - value for name, value in change.items()}

    def reply(self, ctx: Context, me: Worker, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Run the client's app once more, around the training that was done."""

        def train(asked: Message, _: FlowerContext) -> Message:
            key = next(iter(asked.content.array_records))
            told: dict[str, Any] = {key: array_record(result), "metrics": MetricRecord({COUNT: len(data.x)})}
            return Message(RecordDict(told), reply_to=asked)

        return self.told(ctx, message, *self._run(ctx, me, message, train))

    def told(self, ctx: Context, asked: Asked, answer: Message, context: FlowerContext) -> tuple[Tree, Tree | None]:
        """Return what a client keeps and sends, of its app's answer (ProtocolError: an error, or no weights)."""
        if answer.has_error():
            raise ProtocolError(f"Client {ctx.party} answers by an error: {one_line(answer.error.reason)}.")
        key, params, rest = split(content(answer.content), asked.params, f"What client {ctx.party} sends")
        return Worker(content(context.state)), Told(params, text(key), rest)

    def _run(
        self, ctx: Context, me: Worker, message: Asked | Note, train: Callable[[Message, FlowerContext], Message]
    ) -> tuple[Message, FlowerContext]:
        """Return a client's answer and its context, both draws and state as at the first time in this step."""
        place: dict[str, bool | float | int | str] = {"partition-id": ctx.party, "num-partitions": ctx.plan.clients}
        context = FlowerContext(RUN, node_of(ctx.party), place, records(me.state), {})
        app = ClientApp(mods=[*self.mods_for(ctx.plan)])
        app.train()(train)
        asked = asked_records(message)
        with running(f"The app of client {ctx.party}", seed_of(ctx), 2):
            return app(Message(asked, node_of(ctx.party), words(message.kind)), context), context

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return what was sent less what came back, float64."""
        return {name: value.double() - upload.params[name].double() for name, value in like.items()}


def _once(messages: Mapping[int, Message], like: Params) -> dict[int, Asked]:
    """Return messages as trees, one object for all that carry the same records."""
    made: dict[int, Asked] = {}
    found: dict[int, Asked] = {}
    for client, message in messages.items():
        if id(message.content) not in made:
            key, params, rest = split(content(message.content), like, "What the strategy sends")
            device = next(iter(like.values())).device
            here = {name: params[name].to(device) for name in like}
            made[id(message.content)] = Asked(here, text(key), rest, text(message.metadata.message_type))
        found[client] = made[id(message.content)]
    return found
