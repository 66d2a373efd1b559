"""FedPC: one client a round, the pilot, reveals its model, the others a cost and a ternary vector (Cao et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import Overflow
from ppbench.base.tree import Params, Tree, finite
from ppbench.defenses.claims import paper
from ppbench.defenses.fedpc.evidence import fedpc_evidence
from ppbench.defenses.fedpc.messages import (
    SEND_MODEL,
    SEND_TERNARY,
    Command,
    Cost,
    Ledger,
    Masked,
    Ternary,
    Trained,
    Weights,
    Worker,
    cost_of,
    mask_ternary,
    pilot_model,
)
from ppbench.defenses.fedpc.parameters import FEDPC_PAPER, FEDPC_QUICK, MENUS, Parameters
from ppbench.defenses.fedpc.ternary import encoded, first_ternary, later_ternary
from ppbench.federation import secagg
from ppbench.federation.contract import Claim, Context, Job, Round, Server, Step
from ppbench.federation.evidence import Evidence
from ppbench.federation.messages import Hello, Join, Model
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Batch, Data, Plan, gather
from ppbench.federation.view import View

CAO2022 = paper("cao2022")

TERNARY_SIGNS = {"plus": 1.0, "minus": -1.0, "none": 0.0}


@dataclass(frozen=True)
class FedPC(Parameters):
    """A pilot's model and the others' ternary vectors.

    A round: the model goes to all; each client trains with its private hyper-parameters and sends its cost C_k; the
    client of largest goodness (`goodness`) sends its model Q, the others the direction of each weight's step
    (`ternary.py`). The next model is Q plus the others' ternaries times beta and the last step (`advanced`).
    """

    name: ClassVar[str] = "fedpc"
    control: ClassVar[str] = "beta"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (0.2, 0.8), "paper": (0.1, 0.2, 0.35, 0.5, 0.8)}
    paper: ClassVar[str] = CAO2022.citation
    claimed: ClassVar[tuple[Claim, ...]] = CAO2022.claims("fedpc")
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
            torch.tensor(menu[int(torch.randint(len(menu), (), generator=ctx.generator))])
            for menu in map(self.menu, MENUS)
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
            return replace(me, last=message.params, before=me.last, trained=result.params), Cost(result.cost)
        return replace(me, trained={}), self.answer_to(ctx, me, message)

    def answer_to(self, ctx: Context, me: Worker, command: Command) -> Tree:
        """Return the worker's model or its ternary vector, by the command."""
        if int(command.code) == SEND_MODEL:
            if self.pilot_clip:
                return Weights(noisy_model(me.last, me.trained, self.pilot_clip, self.pilot_sigma, ctx.generator))
            return Weights(me.trained)
        trits = self.ternary(ctx, me)
        if self.flip:
            trits = randomized(trits, self.flip, ctx.generator)
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


def randomized(trits: Tensor, flip: float, generator: torch.Generator) -> Tensor:
    """Return int8 [M] with each entry redrawn, uniformly from -1, 0, 1, with probability `flip`."""
    anew = torch.rand(len(trits), generator=generator) < flip
    drawn = torch.randint(-1, 2, (len(trits),), generator=generator, dtype=torch.int8)
    return torch.where(anew.to(trits.device), drawn.to(trits.device), trits)


def noisy_model(last: Params, trained: Params, clip: float, sigma: float, generator: torch.Generator) -> Params:
    """Return the model P + clipped (Q - P) + noise: the update scaled to norm `clip`, noise N(0, (sigma clip)^2)."""
    layout = Layout.of(last)
    start = layout.pack(last)
    update = layout.pack(trained) - start
    noise = torch.randn(len(update), generator=generator).to(update)
    update = update * (clip / update.norm().clamp(min=clip)) + sigma * clip * noise
    return layout.unpack(start + update)
