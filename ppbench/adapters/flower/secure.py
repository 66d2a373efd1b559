"""Flower's secure aggregation, SecAgg+: its own workflow of four stages, and its client mod.

The server reads the sum of the cohort's weights, and each client's number of examples and metrics, which the mod does
not mask. Each stage of the workflow is run twice, from the same state and seed: until it sends, and then with the
replies; a round is then a coroutine like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app import Context as FlowerContext
from flwr.client.mod.secure_aggregation.secaggplus_mod import RECORD_KEY_STATE
from flwr.common import Code, FitRes, Status
from flwr.server import LegacyContext, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.secure_aggregation import secaggplus_workflow as flower
from torch import Tensor

from ppbench.adapters.flower.mechanism import (
    EMPTY,
    RUN,
    SERVER_NODE,
    FlowerClientState,
    FlowerDefense,
    Nodes,
    node_of,
    receiver_of,
    running_flower,
)
from ppbench.adapters.flower.records import (
    Content,
    StageRequest,
    TrainRequest,
    array_record,
    content_tree,
    record_dict,
    text_tree,
)
from ppbench.adapters.user_code import context_seed
from ppbench.base.errors import ProtocolError, UsageError, one_line
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Round, Server, Step
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Data, Noise, Plan
from ppbench.federation.secagg import cohort_evidence
from ppbench.federation.threats import TARGET
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER, Model

# -- Removes the masks from a client's upload under SecAgg+, as colluders can: pairwise ones and the private one --
# The server receives shares of the private mask's seed in the last stage, as the protocol has it. Pairwise masks
# cancel in the sum; the other client of a pair knows its mask.

SETTINGS_RECORD = flower.RECORD_KEY_CONFIGS


def _settings(tree: Any, key: str = SETTINGS_RECORD) -> Mapping[str, Any]:
    """Return the settings in a message or a client's state."""
    settings: Mapping[str, Any] = record_dict(tree)[key]
    return settings


def stage_of(exchange: Exchange) -> str:
    """Return the protocol stage of an exchange."""
    return str(_settings(exchange.request.rest)[flower.Key.STAGE])


def bare_weights(view: View, target: Exchange, clipping: float, levels: int, modulus: int) -> list[Tensor] | None:
    """Return the weights in a masked upload, float64, in the model's order; None: the view lacks a mask's key.

    clipping, levels, modulus: the workflow's ranges.
    """
    masked = [flower.bytes_to_ndarray(one) for one in _settings(target.answer.rest)[flower.Key.MASKED_PARAMETERS]]
    shapes = [one.shape for one in masked]
    for sign, seed in _seeds(view, target):
        if seed is None:
            return None
        masked = [a + sign * b for a, b in zip(masked, flower.pseudo_rand_gen(seed, modulus, shapes), strict=True)]
    factor, values = flower.factor_extract([one % modulus for one in masked])
    weights = flower.dequantize(values, clipping, levels)
    return [torch.from_numpy(np.asarray(one) * (levels / factor)) for one in weights]


def _seeds(view: View, target: Exchange) -> Iterator[tuple[int, bytes | None]]:
    """Yield the sign and the seed of every mask on a client's upload; seed None: the view lacks its key."""
    node, nodes = node_of(target.slot.client), {node_of(c): c for c in range(view.plan.clients)}
    exchanges = [e for e in view.exchanges() if e.slot.probe == target.slot.probe and e.round == target.round]
    shares: list[bytes] = []
    for one in exchanges:
        settings = _settings(one.answer.rest)
        if stage_of(one) == flower.Stage.UNMASK:
            shares += [
                s
                for n, s in zip(settings[flower.Key.NODE_ID_LIST], settings[flower.Key.SHARE_LIST], strict=True)
                if n == node
            ]
    yield -1, flower.combine_shares(shares) if shares else None
    keys = next(e for e in exchanges if e.slot == target.slot and stage_of(e) == flower.Stage.SHARE_KEYS)
    public = {int(n): pair for n, pair in _settings(keys.request.rest).items() if n.isdigit()}
    for neighbour in {*public} - {node}:
        state = view.state_at(target, nodes[neighbour])
        seed = None
        if state is not None:
            own = _settings(state.state, RECORD_KEY_STATE)["sk1"]
            pair = flower.bytes_to_private_key(own), flower.bytes_to_public_key(public[node][0])
            seed = flower.generate_shared_key(*pair)
        yield (-1 if node > neighbour else 1), seed


COUNT_METRIC = ("fitres.num_examples", "num_examples")


@node
class StageReply:
    """Client to server: a stage's answer. rest: its records, with the masked weights as bytes in its settings."""

    rest: Content


class _Sent(BaseException):
    """Carries a stage's messages out of it."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__()
        self.messages = messages


class _Relay(Nodes):
    """A grid that raises a stage's messages (`_Sent`), or returns the replies to them."""

    def __init__(self, count: int, replies: list[Message] | None) -> None:
        super().__init__(count)
        self.replies = replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the replies; raise `_Sent` if there are none yet."""
        if self.replies is None:
            raise _Sent(list(messages))
        return self.replies


@dataclass(frozen=True)
class Secure(FlowerDefense):
    """A workflow of secure aggregation, with its client mods, as a defense."""

    epsilon_reason = "there is no noise but the rounding's; the server reads the sum of the cohort's weights"
    sums = True
    _gives = SecAggPlusWorkflow, "workflow"

    def check(self, plan: Plan) -> None:
        """As the base class; also raise UsageError if there are too few clients for the protocol."""
        super().check(plan)
        shares = self._made(plan).server.num_shares
        least = max(2, shares) if isinstance(shares, int) else 2
        if plan.clients < least:
            raise UsageError(f"Defense {self.name!r} needs at least {least} clients, not {plan.clients}.")

    # -- the server ----------------------------------------------------------------------------------------------
    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the server's state: weights alone, since the workflow has no state between rounds."""
        return Defense.init_server(self, ctx, params)

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Return the server's state and the weights as the third stage sends them."""
        return server, TrainRequest(server.params, text_tree("fitins.parameters"), EMPTY, text_tree("train"))

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run the workflow's four stages (ProtocolError: one halts, or a client answers by an error)."""
        workflow = self._made(ctx.plan).server
        state, place, counts = flower.WorkflowState(), self._place(ctx, server), server.counts.clone()
        for stage in (
            workflow.setup_stage,
            workflow.share_keys_stage,
            workflow.collect_masked_vectors_stage,
            workflow.unmask_stage,
        ):
            messages = self._sent(ctx, stage, place, copy.deepcopy(state))
            answers = yield Step(server, {client: _request(one, server.params) for client, one in messages.items()})
            replies = []
            for client, reply in answers.items():
                if not isinstance(reply, StageReply):
                    raise ProtocolError(
                        f"Client {client} sent {type(reply).__name__}, no answer of secure aggregation."
                    )
                replies.append(Message(record_dict(reply.rest), reply_to=messages[client]))
                counts[client] = _count(reply, int(counts[client]))
            self._done(ctx, stage, place, state, replies)
        arrays = place.state.array_records[flower.MAIN_PARAMS_RECORD]
        arrays_by_name = zip(server.params.items(), arrays.values(), strict=True)
        params = {n: torch.from_numpy(np.array(a.numpy())).to(old.device, old.dtype) for (n, old), a in arrays_by_name}
        return Server(params, server.opt, counts, server.own)

    def _place(self, ctx: Context, server: Server) -> LegacyContext:
        manager = SimpleClientManager()
        for client in range(ctx.plan.clients):
            manager.register(GridClientProxy(node_of(client), Nodes(ctx.plan.clients), RUN))
        state = RecordDict()
        state[flower.MAIN_CONFIGS_RECORD] = ConfigRecord({flower.WorkflowKey.CURRENT_ROUND: ctx.round})
        arrays = array_record(server.params).values()
        state[flower.MAIN_PARAMS_RECORD] = ArrayRecord({str(i): array for i, array in enumerate(arrays)})
        return LegacyContext(FlowerContext(RUN, SERVER_NODE, {}, state, {}), strategy=FedAvg(), client_manager=manager)

    def _sent(self, ctx: Context, stage: Callable[..., bool], place: LegacyContext, state: Any) -> dict[int, Message]:
        """Return a stage's messages, by client."""
        try:
            self._done(ctx, stage, place, state, None)
        except _Sent as sent:
            return {receiver_of(message): message for message in sent.messages}
        raise ProtocolError(f"Secure aggregation ends in its {stage.__name__} without asking anybody.")

    def _done(
        self, ctx: Context, stage: Callable[..., bool], place: LegacyContext, state: Any, replies: list[Message] | None
    ) -> None:
        with running_flower("The workflow", context_seed(ctx), 0):
            if not stage(_Relay(ctx.plan.clients, replies), place, state):
                raise ProtocolError(f"Secure aggregation halts in its {stage.__name__}: too few clients answered.")

    # -- a client ------------------------------------------------------------------------------------------------
    def reply(
        self, ctx: Context, me: FlowerClientState, message: Tree, result: Tree, data: Data
    ) -> tuple[Tree, Tree | None]:
        """Run the client's mods, around the training in the stage that requests it."""

        def train(request: Message, _: FlowerContext) -> Message:
            if not isinstance(message, TrainRequest):
                raise ProtocolError(f"The mods of client {ctx.party} train in a stage that sends no weights.")
            weights = flower.compat.arrayrecord_to_parameters(array_record(result), keep_input=False)
            fit_result = FitRes(Status(Code.OK, ""), weights, len(data.x), {})
            return Message(flower.compat.fitres_to_recorddict(fit_result, keep_input=False), reply_to=request)

        answer, context = self._run(ctx, me, message, train)
        if answer.has_error():
            raise ProtocolError(f"Client {ctx.party} answers by an error: {one_line(answer.error.reason)}.")
        return FlowerClientState(content_tree(context.state)), StageReply(content_tree(answer.content))

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return no weights: one upload alone reveals none."""
        return {}

    # -- the adversary -------------------------------------------------------------------------------------------
    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of each cohort's mean (server) or of client 0's own weights (colluders); others get none."""
        shared = Shared(view.plan)
        if view.party != SERVER:
            return []
        make = self._own if view.threat.colludes else self._sum
        return [piece for unit, after in _rounds(view) if (piece := make(view, shared, unit, after)) is not None]

    def _sum(self, view: View, shared: Shared, unit: list[Exchange], after: Params) -> Evidence | None:
        before, divisor = unit[0].request.params, as_gradient(view.plan, unit[0].round)
        mean = {n: (value.double() - after[n].double()) / divisor for n, value in before.items()}
        counts = torch.zeros(view.plan.clients, dtype=torch.int64)
        for exchange in unit:
            counts[exchange.slot.client] = _count(exchange.answer, 1)
        piece = cohort_evidence(shared, mean, unit, Server(before, (), counts, ()))
        return replace(piece, noise=self._rounding(view.plan, unit, divisor))

    def _own(self, view: View, shared: Shared, unit: list[Exchange], after: Params) -> Evidence | None:
        target = next((e for e in unit if e.slot.client == TARGET), None)
        if target is None:
            return None
        workflow = self._made(view.plan).server
        own = bare_weights(view, target, workflow.clipping_range, workflow.quantization_range, workflow.modulus_range)
        if own is None:
            return None
        before, divisor = shared.same(target.request.params), as_gradient(view.plan, target.round)
        pairs = zip(before.items(), own, strict=True)
        change = {n: (value.double() - end.to(value.device)) / divisor for (n, value), end in pairs}
        noise = self._rounding(view.plan, [target], divisor)
        return Evidence((target.slot,), change, shared.at(before), before, noise=noise)

    def _rounding(self, plan: Plan, unit: Sequence[Exchange], divisor: float) -> Noise:
        """Return the law of the rounding error on a mean: each upload's has a sixth of a squared step as variance."""
        workflow = self._made(plan).server
        step = 2 * workflow.clipping_range / workflow.quantization_range
        share = sum(_count(e.answer, 1) for e in unit) / workflow.max_weight
        return Noise("gaussian", step * (len(unit) / 6) ** 0.5 / share / divisor)


def _count(reply: StageReply, otherwise: int) -> int:
    """Return the number of examples that a client sends in the clear, `otherwise` if it sends none."""
    record, key = COUNT_METRIC
    count = reply.rest.metrics.get(record, {}).get(key)
    return otherwise if count is None else int(count)


def _request(message: Message, like: Params) -> Tree:
    """Return a stage's message as a tree; its weights, if it has some, by the model's names."""
    tree, kind = content_tree(message.content), text_tree(message.metadata.message_type)
    if not tree.arrays:
        return StageRequest(tree, kind)
    ((key, arrays),) = tree.arrays.items()
    pairs = zip(like.items(), arrays.values(), strict=True)
    params = {name: value.to(old.device, old.dtype) for (name, old), value in pairs}
    return TrainRequest(params, text_tree(key), replace(tree, arrays={}), kind)


def _rounds(view: View) -> Iterator[tuple[list[Exchange], Params]]:
    """Yield each probe's uploads of masked weights in its first round, and the aggregated weights."""
    units: dict[int, list[Exchange]] = {}
    for exchange in view.exchanges():
        if isinstance(exchange.request, TrainRequest):
            units.setdefault(exchange.slot.probe, []).append(exchange)
    for probe, unit in units.items():
        first = unit[0].round
        letters = (m for m in view.mail if m.probe == probe and m.sender == SERVER and m.round > first)
        after = next((m.message.params for m in letters if isinstance(m.message, Model)), None)
        if after is not None:
            yield [exchange for exchange in unit if exchange.round == first], after
