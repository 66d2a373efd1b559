"""FedPC: one client a round, the pilot, reveals its model, the others a cost and a ternary vector (Cao et al. 2022)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import Overflow
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params, Tree, finite
from ppbench.defenses.fedpc.messages import (
    FEDPC_PAPER,
    FEDPC_QUICK,
    MENUS,
    SEND_MODEL,
    SEND_TERNARY,
    Command,
    Ledger,
    Masked,
    Parameters,
    Ternary,
    Trained,
    TrainingCost,
    Weights,
    Worker,
    cost_of,
    encoded,
    first_ternary,
    later_ternary,
    mask_ternary,
    pilot_model,
    unmasked_ternary,
)
from ppbench.federation import secagg
from ppbench.federation.contract import Context, Job, Round, Server, Step
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Batch, Data, Layout, Noise, Plan, gather
from ppbench.federation.secagg import cohort_evidence
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER, Hello, Join, Model, Slot

# -- Evidence from FedPC's messages: who was pilot, signs of steps, and the plain evidence --


def command_answers(view: View) -> list[Exchange]:
    """Return the answers to commands in `view`, in order of time; unmasked if the view has all other senders' keys."""
    return [_bare(view, e) for e in view.exchanges() if isinstance(e.answer, Weights | Ternary | Masked)]


def _bare(view: View, exchange: Exchange) -> Exchange:
    trits = unmasked_ternary(view, exchange) if isinstance(exchange.answer, Masked) else None
    if trits is None:
        return exchange
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    return replace(exchange, answer=Ternary(encoded(trits, defense.packing, defense.padded)))


def pilots(view: View) -> dict[tuple[int, int], int]:
    """Return the pilot by (probe, round), as far as `view` shows it: a client knows only of itself."""
    return {(e.slot.probe, e.round): e.slot.client for e in command_answers(view) if isinstance(e.answer, Weights)}


def round_model(view: View, probe: int, round_: int) -> Params | None:
    """Return the model P^{t-1} with which round t began, from the mail of `view`, or None if it has none."""
    models = (
        envelope.message.params
        for envelope in view.mail
        if (envelope.probe, envelope.round, envelope.sender) == (probe, round_, SERVER)
        and isinstance(envelope.message, Model)
    )
    return next(models, None)


def previous_model(view: View, exchange: Exchange) -> Params | None:
    """Return the model P^{t-2}, `{}` in round 1; None if `view` has none: an eavesdropper that came later."""
    if exchange.round == 1:
        return {}
    server = view.state_at(exchange, SERVER)
    if isinstance(server, Server) and isinstance(server.own, Ledger):
        return server.own.before
    return round_model(view, exchange.slot.probe, exchange.round - 1)


def step_signs(view: View, exchange: Exchange) -> Params | None:
    """Return the signs of a client's P^{t-1} - Q^t that an upload reveals: -1, 1, or 0 for unknown; float32.

    After one plain step these are the gradient's signs. A pilot reveals all; a ternary sender those of the nonzero
    entries: T = sign(Q - P) in round 1 and T = sign(Q - P) sign(P^{t-1} - P^{t-2}) later. None if the view lacks the
    models, or the ternaries are masked.
    """
    last, older = round_model(view, exchange.slot.probe, exchange.round), previous_model(view, exchange)
    if last is None or isinstance(exchange.answer, Masked):
        return None
    change = view.defense.decode(exchange.answer, last)
    if isinstance(exchange.answer, Weights):
        return {name: value.sign() for name, value in change.items()}
    if older is None:
        return None
    if not older:
        return {name: -value for name, value in change.items()}
    return {name: -value * (last[name] - older[name]).sign() for name, value in change.items()}


def fedpc_evidence(view: View) -> list[Evidence]:
    """Return one piece of evidence per slot, for an attacker that takes uploads for gradients at the broadcast model.

    - A pilot (in its first round as one): P - Q, divided by the plan's nominal learning rate and epochs.
    - A ternary sender: the server's surrogate, -beta T (P^{t-1} - P^{t-2}), in round 1 -alpha0 T, over the same.
    - Masked ternaries: the N_k-weighted mean of the surrogates of all their senders, about all of them together.
    - For a client: the change of the model in a round in which it was no pilot, about all others together.
    """
    shared = Shared(view.plan)
    if not view.threat.sees_uploads:
        return _client_evidence(view, shared)
    best: dict[Slot, Exchange] = {}
    hidden: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    for exchange in command_answers(view):
        if isinstance(exchange.answer, Masked):
            hidden[exchange.slot.probe, exchange.round].append(exchange)
        elif exchange.slot not in best or _rank(view, exchange) > _rank(view, best[exchange.slot]):
            best[exchange.slot] = exchange
    pieces = [piece for exchange in best.values() if (piece := _piece(view, exchange, shared)) is not None]
    return pieces + [piece for unit in hidden.values() if (piece := _sum_piece(view, unit, shared)) is not None]


def _rank(view: View, exchange: Exchange) -> int:
    """Return the rank of an upload's information: 2 a model, 1 a ternary vector with a last step, 0 one without."""
    return 2 if isinstance(exchange.answer, Weights) else int(bool(previous_model(view, exchange)))


def nominal_divisor(plan: Plan, round_: int) -> float:
    """Return the divisor that turns a weight change of round `round_` into a gradient: rate times epochs."""
    return plan.local.opt.rate(round_) if plan.local.upload == "gradient" else as_gradient(plan, round_)


def _piece(view: View, exchange: Exchange, shared: Shared) -> Evidence | None:
    last, older = round_model(view, exchange.slot.probe, exchange.round), previous_model(view, exchange)
    if last is None:
        return None
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    divisor, change = nominal_divisor(view.plan, exchange.round), defense.decode(exchange.answer, last)
    if isinstance(exchange.answer, Ternary):
        if older is None:
            return None
        reach = Layout.of(last).unpack(defense.reach(last, older).to(next(iter(last.values())).dtype))
        change = {name: -value * reach[name] for name, value in change.items()}
    observed = {name: value / divisor for name, value in change.items()}
    if isinstance(exchange.answer, Ternary):
        return Evidence((exchange.slot,), observed, shared.at(last), last, channel="ternary")
    std = defense.pilot_sigma * defense.pilot_clip / divisor
    noise = Noise("gaussian", std) if std else None
    return Evidence((exchange.slot,), observed, shared.at(last), last, noise=noise, channel="pilot")


def _sum_piece(view: View, unit: list[Exchange], shared: Shared) -> Evidence | None:
    server = view.state_at(unit[0], SERVER)
    if server is None or len(unit) < int(unit[0].request.senders.sum()):  # masks cancel in the sum of all senders only
        return None
    defense: Parameters = view.defense  # type: ignore[assignment]  # its own evidence
    counts = server.counts[[e.slot.client for e in unit]].double()
    votes = defense.votes(server, {e.slot.client: e.answer for e in unit})
    mean = (
        -defense.reach(server.params, server.own.before)
        * votes
        / counts.sum()
        / nominal_divisor(view.plan, unit[0].round)
    )
    return cohort_evidence(shared, Layout.of(server.params).unpack(mean), unit, server)


def _client_evidence(view: View, shared: Shared) -> list[Evidence]:
    pieces: list[Evidence] = []
    own = set(pilots(view))
    for probe, _ in view.data:
        others = tuple(Slot(probe, c) for c in range(view.plan.clients) if not view.inside(c))
        rounds = sorted(
            {e.round for e in command_answers(view) if e.slot.probe == probe} - {r for p, r in own if p == probe}
        )
        pairs = ((round_model(view, probe, r), round_model(view, probe, r + 1), r) for r in rounds)
        first = next(((a, b, r) for a, b, r in pairs if a is not None and b is not None), None)
        if first is None or not others:
            continue
        last, new, round_ = first
        observed = {n: (last[n].double() - new[n].double()) / nominal_divisor(view.plan, round_) for n in last}
        pieces.append(Evidence(others, observed, shared.at(last), last, channel="aggregate"))
    return pieces


TERNARY_SIGNS = {"plus": 1.0, "minus": -1.0, "none": 0.0}


@dataclass(frozen=True)
class FedPC(Parameters):
    """A pilot's model and the others' ternary vectors.

    A round: the model goes to all; each client trains with its private hyper-parameters and sends its cost C_k; the
    client of largest goodness (`goodness`) sends its model Q, the others the direction of each weight's step
    (`ternary.py`). The next model is Q plus the others' ternaries times beta and the last step (`advanced`).
    """

    name: ClassVar[str] = "fedpc"
    version: ClassVar[str] = "2"
    control: ClassVar[str] = "beta"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.2, 0.8), "paper": (0.1, 0.2, 0.35, 0.5, 0.8)}
    paper: ClassVar[str] = (
        "Cao et al., A Federated Deep Learning Framework for Privacy Preservation and Communication "
        "Efficiency, Journal of Systems Architecture 124, 2022 (arXiv 2001.09782)"
    )
    epsilon_reason: ClassVar[str] = "there is no noise: the pilot's model and the ternaries are functions of the data"
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": FEDPC_QUICK, "paper": FEDPC_PAPER}
    roles: ClassVar[tuple[str, ...]] = ("pilot", "ternary")

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the server's state, with an empty ledger."""
        base, count = super().init_server(ctx, params), ctx.plan.clients
        return Server(params, base.opt, base.counts, Ledger({}, torch.zeros(count), torch.zeros(0, dtype=torch.int64)))

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Run one round: models down and costs up, then commands down and one model and ternaries up (Alg. 1)."""
        server, message = self.broadcast(ctx, server)
        answers = yield Step(server, dict.fromkeys(cohort, message))
        costs = {client: cost_of(client, answers.get(client)) for client in cohort}
        good = self.goodness(server, costs)
        pilot = max(cohort, key=lambda client: good[client])  # the first of equals
        uploads = yield Step(server, self.commands(server, cohort, pilot))
        return self.advanced(server, costs, pilot, uploads)

    def goodness(self, server: Server, costs: Mapping[int, Tensor]) -> dict[int, float]:
        """Return N_k / C_k in round 1, then N_k times the fall of the cost (Eq. 1), by client."""
        ledger: Ledger = server.own
        goodness_by_client = {}
        for client, cost in costs.items():
            count, now = server.counts[client].double(), cost.double()
            goodness_by_client[client] = float(
                count * (ledger.costs[client].double() - now) if ledger.before else count / now
            )
        return goodness_by_client

    def commands(self, server: Server, cohort: Sequence[int], pilot: int) -> dict[int, Tree]:
        """Return the command to each client: the pilot sends its model, all others ternaries."""
        senders = torch.zeros(len(server.counts) if self.paired else 0, dtype=torch.bool)
        if self.paired:
            senders[[client for client in cohort if client != pilot]] = True
        model, ternary = (Command(torch.tensor(c, dtype=torch.uint8), senders) for c in (SEND_MODEL, SEND_TERNARY))
        return {client: model if client == pilot else ternary for client in cohort}

    def advanced(self, server: Server, costs: Mapping[int, Tensor], pilot: int, uploads: Mapping[int, Tree]) -> Server:
        """Return the state after the round (Eq. 3): Q + s sum_k p_k T_k beta (P^{t-1} - P^{t-2}), p_k = N_k / N.

        Over all k but the pilot (round 1: alpha0 T_k). The votes sum_k N_k T_k are whole numbers, so masks do not
        change the result.
        """
        ledger: Ledger = server.own
        layout, trained = Layout.of(server.params), pilot_model(pilot, uploads.get(pilot), server.params)
        votes = self.votes(server, {client: uploads.get(client) for client in costs if client != pilot})
        reach = self.reach(server.params, ledger.before)
        total = int(server.counts[list(costs)].sum())
        flat = layout.pack(trained)
        step = TERNARY_SIGNS[self.ternary_sign] * reach * votes.double() / total
        params = layout.unpack((flat.double() + step).to(flat.dtype))
        all_costs = ledger.costs.clone()
        all_costs[list(costs)] = torch.stack(list(costs.values()))
        log = torch.cat([ledger.pilots, ledger.pilots.new_tensor([pilot])])
        return Server(params, server.opt, server.counts, Ledger(server.params, all_costs, log))

    def init_client(self, ctx: Context, params: Params) -> Worker:
        """Draw the private hyper-parameters from the menus and, with masks, a key pair."""
        batch, epochs, rate = (
            torch.tensor(menu[int(ctx.secret.integers(0, len(menu), ()))]) for menu in map(self.menu, MENUS)
        )
        keys = secagg.new_keys(ctx) if self.paired else ()
        return Worker(batch, epochs, rate, {}, {}, {}, keys)

    def prepare(self, ctx: Context, me: Worker, message: Tree, data: Data) -> Job | None:
        """Return the job of training with the private hyper-parameters; `own` is all of `data`, to compute the cost."""
        if not isinstance(message, Model):
            return None
        local = replace(ctx.plan.local, batch=int(me.batch), epochs=int(me.epochs))
        batches = self.batches(replace(ctx, plan=replace(ctx.plan, local=local)), data)
        lr = me.rate.to(data.x) * ctx.plan.local.opt.rate(ctx.round)
        return Job(message.params, batches, lr, in_order(data, batches.x.shape[1]), ())

    def compute(self, plan: Plan, job: Job) -> Trained:
        """Return the trained model and its cost. One gradient (a gradient plan) is one step of the local optimizer."""
        steps = replace(plan, local=replace(plan.local, upload="delta"))
        update = super().compute(steps, job)
        params = {name: value - update[name] for name, value in job.start.items()}
        return Trained(params, mean_loss_over_batches(plan, params, job.own))

    def reply(self, ctx: Context, me: Worker, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Join; send the trained model's cost (Overflow: it has diverged); or answer a command (Alg. 2)."""
        if self.paired and (joined := secagg.setup_answer(ctx, me.keys, message, data)):
            return replace(me, keys=joined[0]), joined[1]
        if isinstance(message, Hello):
            return me, Join(torch.tensor(len(data.x)))
        if isinstance(message, Model):
            if not finite(result):
                raise Overflow(f"Client {ctx.party}'s model or cost is not finite after local training.")
            return replace(me, last=message.params, before=me.last, trained=result.params), TrainingCost(result.cost)
        return replace(me, trained={}), self.answer_to(ctx, me, message)

    def answer_to(self, ctx: Context, me: Worker, command: Command) -> Tree:
        """Return the worker's model or its ternary vector, by the command."""
        if int(command.code) == SEND_MODEL:
            if self.pilot_clip:
                return Weights(noisy_model(me.last, me.trained, self.pilot_clip, self.pilot_sigma, ctx.secret))
            return Weights(me.trained)
        trits = self.ternary(ctx, me)
        if self.flip:
            trits = randomized(trits, self.flip, ctx.secret)
        if self.paired:
            return Masked(mask_ternary(ctx, me.keys, command.senders, trits))
        return Ternary(encoded(trits, self.packing, self.padded))

    def ternary(self, ctx: Context, me: Worker) -> Tensor:
        """Return the direction of each of the worker's weights, int8 [M]."""
        layout = Layout.of(me.last)
        last = layout.pack(me.last)
        step = layout.pack(me.trained) - last
        if me.before:
            return later_ternary(step, last - layout.pack(me.before), self.beta)
        return first_ternary(step, me.rate * ctx.plan.local.opt.rate(ctx.round))

    def role_of(self, uploads: Sequence[Tree]) -> str:
        """Return "pilot" for a client that sent its model in any of the rounds."""
        return "pilot" if any(isinstance(upload, Weights) for upload in uploads) else "ternary"

    def played(self, plan: Plan, server: Server) -> Tensor:
        """Return the number of rounds in which each client was pilot, and was not, int64 [2, N]."""
        pilot = server.own.pilots.cpu().bincount(minlength=plan.clients)
        return torch.stack([pilot, len(server.own.pilots) - pilot])

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence for an attacker unaware of FedPC, see `evidence.fedpc_evidence`."""
        return fedpc_evidence(view)


def in_order(data: Data, size: int) -> Batch:
    """Return all of `data` once, in batches of `size`, padded with examples of weight 0."""
    count = len(data.x)
    index = torch.arange(-(-count // size) * size).view(-1, size)
    return gather(data, index % count, (index < count).float())


def mean_loss_over_batches(plan: Plan, params: Params, batches: Batch) -> Tensor:
    """Return the mean loss of `params` over all batches [T, B], a float32 scalar, summed in float64."""
    total = torch.zeros((), dtype=torch.float64, device=batches.w.device)
    for t in range(batches.x.shape[0]):
        losses = plan.example_loss(plan.net(params, batches.x[t]), batches.y[t])
        total = total + (batches.w[t] * losses).double().sum()
    return (total / batches.w.double().sum()).float()


def randomized(trits: Tensor, flip: float, secret: SecretDraws) -> Tensor:
    """Return int8 [M] with each entry redrawn, uniformly from -1, 0, 1, with probability `flip`."""
    anew = secret.bernoulli(flip, (len(trits),))
    drawn = secret.integers(-1, 2, (len(trits),)).to(torch.int8)
    return torch.where(anew.to(trits.device), drawn.to(trits.device), trits)


def noisy_model(last: Params, trained: Params, clip: float, sigma: float, secret: SecretDraws) -> Params:
    """Return the model P + clipped (Q - P) + noise: the update scaled to norm `clip`, noise N(0, (sigma clip)^2)."""
    layout = Layout.of(last)
    start = layout.pack(last)
    update = layout.pack(trained) - start
    noise = secret.normal((len(update),)).to(update)
    update = update * (clip / update.norm().clamp(min=clip)) + sigma * clip * noise
    return layout.unpack(start + update)
