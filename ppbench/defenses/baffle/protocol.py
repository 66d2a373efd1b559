"""BAFFLE: clients train by forward passes alone, and answer with loss differences (Feng et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.errors import Overflow, UsageError
from ppbench.base.tree import Params, Tree
from ppbench.defenses.baffle.estimator import Scheme, differences, slope, stein, step_seeds
from ppbench.defenses.baffle.messages import (
    RINGS,
    Differences,
    Evaluate,
    Masks,
    Own,
    answers,
    flat,
    masked,
    numbers_of,
    peeled,
    unmasked,
)
from ppbench.defenses.claims import paper
from ppbench.federation import secagg
from ppbench.federation.bounds import OpenShare, Whole, between, whole
from ppbench.federation.cohort import cohort_evidence, cohorts
from ppbench.federation.contract import Claim, Context, Job, Server, at
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.messages import Model, Update
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Batch, Data, Plan
from ppbench.federation.secagg import PairedDefense
from ppbench.federation.view import Exchange, View

FENG2023 = paper("feng2023")

SETTING: Mapping[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": "32", "activation": "hardswish"},
    "loss": "cross_entropy",
    "upload": "gradient",
    "schedule": "parallel",
    "optimizer": "adam",
    "lr": 1e-2,
    "beta2": 0.99,
    "batch_size": 14,
    "rounds": 200,
    "decay_at": (),
    "attack_batch": (1, 4),
}
# Table 1 on MNIST; the batch size is not given, and nothing is attacked but histograms, which need the other level.
# The average stays "warmed": at the paper's .995 from a random start, the 20 steps of its server, one an epoch, would
# deliver a model of which nine tenths are the start, which is not the one of Table 1.
PAPER: Mapping[str, Any] = {
    **SETTING,
    "dataset": "mnist",
    "model": "lenet_baffle",
    "model_options": {},
    "clients": 10,
    "partition": "iid",
    "upload": "delta",
    "local_epochs": 1,
    "rounds": 20,
    "batch_size": 64,
    "grid": (100.0, 200.0, 500.0),
    "settings": {"level": "epoch", "scheme": "twice"},
    "attacks": ("standard",),
    "victims": 50,
}


@dataclass(frozen=True)
class Baffle(PairedDefense):
    """Replaces backpropagation by finite differences of the loss along random directions that all parties know.

    "batch" level (Alg. 1): a client answers with K loss differences, 4K bytes, of which the server makes Stein's
    estimate of the gradient. "epoch" level (Sec. 3.2): the client steps on its own estimates and uploads the change.

    Attributes:
        k: the paper's K, half the forward passes a step. sigma: standard deviation of a perturbation's entries.
        scheme: "twice" as many forward differences (W + delta, and W once) for the same forward passes (Sec. 3.2): 2K
            numbers are uploaded, which the paper's 4K bytes do not count; or "central" ones, W +- delta (Eq. 2).
        masks: pairwise masks that cancel in the sum (Alg. 1), on fixed-point numbers modulo 2^32 ("ring32": the
            paper's 4 bytes a number, 30 fractional bits) or 2^64 ("ring64", 8 bytes); "none": each client's are read.
        chunk, examples: perturbed models, and examples, that a forward pass takes at a time, see `differences`.
        ema: decay of the average of the weights that is delivered; 0 delivers the last ones.
        average: "warmed": the decay is less at first (`decay`); "constant": as the paper has it, the random start
            stays in the average for about 1 / (1 - ema) steps.
    """

    k: Annotated[int, whole(1, 1_000_000)] = 100
    level: Literal["batch", "epoch"] = "batch"
    scheme: Scheme = "twice"
    sigma: Annotated[float, between(1e-12, 1e3)] = 1e-4
    masks: Masks = "ring32"
    chunk: Whole = 0
    examples: Whole = 0
    ema: OpenShare = 0.995
    average: Literal["warmed", "constant"] = "warmed"

    name: ClassVar[str] = "baffle"
    control: ClassVar[str] = "k"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (10.0, 64.0, 300.0),
        "paper": (100.0, 200.0, 500.0, 1000.0, 5000.0),
    }
    paper: ClassVar[str] = FENG2023.citation
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": SETTING, "paper": PAPER}
    claimed: ClassVar[tuple[Claim, ...]] = FENG2023.claims("baffle")
    epsilon_reason: ClassVar[str] = "loss differences are neither clipped nor noised; the directions are public"
    mappable: ClassVar[bool] = False  # `compute` draws the directions again rather than keep K x n numbers

    def check(self, plan: Plan) -> None:
        """As its base; also refuse a plan of the other level."""
        super().check(plan)
        upload = "gradient" if self.level == "batch" else "delta"
        if plan.local.upload != upload:
            raise UsageError(
                f"Defense {self.name!r} at level={self.level!r} needs --upload {upload}, not {plan.local.upload!r}."
            )

    @property
    def sums(self) -> bool:
        """Whether masks leave the server nothing but the cohort's sum."""
        return self.masks != "none"

    @property
    def count(self) -> int:
        """The number of directions, and of numbers in an answer: K, or 2K of forward differences."""
        return self.k if self.scheme == "central" else 2 * self.k

    def decay(self, step: int) -> float:
        """Return the average's decay at `step` (from 1): ema, or less at first."""
        return self.ema if self.average == "constant" else min(self.ema, (1 + step) / (10 + step))

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Start the average at the initial weights."""
        own = Own(torch.zeros((), dtype=torch.int32), params if self.ema else (), torch.zeros((), dtype=torch.int64))
        return replace(super().init_server(ctx, params), own=own)

    def broadcast(self, ctx: Context, server: Server) -> tuple[Server, Tree]:
        """Draw the round's seed and send it with the weights."""
        seed = torch.randint(2**31, (), generator=ctx.generator).to(torch.int32)
        return replace(server, own=replace(server.own, seed=seed)), Evaluate(server.params, seed)

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Step on Stein's estimate of the mean gradient ("batch"), or on the clients' mean update ("epoch")."""
        layout = Layout.of(server.params)
        flat_params = layout.pack(server.params)
        count, ring = self.count if self.level == "batch" else None, RINGS[self.masks].dtype if self.sums else None
        answers = [numbers_of(c, upload, server.params, count, ring) for c, upload in uploads.items()]
        if self.sums:
            secagg.need_everybody(server, uploads)
        mean = self._mean(answers, self.weights(server, list(uploads)))
        if self.level == "batch":
            slopes = slope(mean, self.sigma, self.scheme)
            mean = stein(int(server.own.seed), slopes, len(flat_params))
        return self.stepped(ctx, server, layout.unpack(mean.to(flat_params.device)))  # sums in a ring are on the CPU

    def _mean(self, answers: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        if self.masks != "none":
            return unmasked(answers, self.masks)
        return sum((w * a.double() for w, a in zip(weights, answers, strict=True)), torch.zeros(()))

    def stepped(self, ctx: Context, server: Server, update: Params) -> Server:
        """Take the optimizer's step, then average the weights."""
        after = super().stepped(ctx, server, update)
        if not self.ema:
            return after
        own: Own = after.own
        steps = own.steps + 1
        b = self.decay(int(steps))
        average = {n: torch.lerp(after.params[n], own.average[n], b) for n in after.params}
        return replace(after, own=replace(own, average=average, steps=steps))

    def deliver(self, ctx: Context, server: Server) -> Tree:
        """Return the averaged weights, or the last ones without averaging."""
        return Model(server.own.average if self.ema else server.params)

    def prepare(self, ctx: Context, me: Tree, message: Tree, data: Data) -> Job | None:
        """Return weights, batches, and in the place of noise the seed of every step's directions."""
        if not isinstance(message, Evaluate):
            return None
        batches = self.batches(ctx, data)
        rate = torch.tensor(ctx.plan.local.opt.rate(ctx.round), dtype=batches.x.dtype, device=batches.x.device)
        return Job(message.params, batches, rate, (), step_seeds(int(message.seed), len(batches.x)))

    def compute(self, plan: Plan, job: Job) -> Tree:
        """Return loss differences [count] float64, or start minus end of local steps on estimates; no graph is made."""
        with torch.no_grad():
            if self.level == "epoch":
                return super().compute(plan, job)
            batch, _, seed = at(job, 0)
            return self.differences(plan, job.start, batch, int(seed))

    def differences(self, plan: Plan, params: Params, batch: Batch, seed: int) -> Tensor:
        """Return the loss differences [count] float64 of a batch (without axis T) at `params`."""
        found = (self.count, self.sigma, self.scheme, self.chunk, self.examples)
        return differences(plan, params, batch, seed, *found)

    def local_gradient(self, plan: Plan, params: Params, batch: Batch, own: Tree, noise: Tree) -> Params:
        """Return Stein's estimate of the batch's gradient; `noise` is the step's seed."""
        layout = Layout.of(params)
        found = slope(self.differences(plan, params, batch, int(noise)), self.sigma, self.scheme)
        estimate = stein(int(noise), found, len(layout.pack(params)))
        return {n: part.to(params[n].dtype) for n, part in layout.unpack(estimate).items()}

    def upload(self, ctx: Context, me: Tree, result: Tree) -> Tree:
        """Encode differences or an update: float32, or weighted by N_c / N in a ring and masked (Overflow)."""
        if self.level == "batch":
            return Differences(self._encoded(ctx, me, result, torch.float32))
        layout = Layout.of(result)
        flat = layout.pack(result)
        return Update(layout.unpack(self._encoded(ctx, me, flat, flat.dtype)))

    def _encoded(self, ctx: Context, me: Tree, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        if not bool(numbers.isfinite().all()):
            raise Overflow(f"Client {ctx.party} has losses or weights that are not finite.")
        return masked(ctx, me, numbers, self.masks) if self.sums else numbers.to(dtype)

    def sketch(self, *exchanges: Exchange, view: View | None = None) -> tuple[int, Tensor]:
        """Return the seed and s [count] float64 with s_k = z_k . gradient, up to O(sigma^2) or O(sigma) (`slope`).

        exchanges: one unmasked batch-level answer; of masked ones the whole cohort's, or one with the `view` of
        colluders.
        """
        return int(exchanges[0].asked.seed), slope(self._read(exchanges, view), self.sigma, self.scheme)

    def evidence(self, view: View) -> list[Evidence]:
        """Return what who takes an estimate for the gradient has: each client's, or with masks each cohort's.

        Colluders read one masked answer; a client nothing at batch level, where the model moves along random
        directions.
        """
        if self.level == "epoch" and not self.sums:
            return super().evidence(view)
        first, shared = [some[0] for some in answers(view).values()], Shared(view.plan)
        if self.sums and not view.threat.colludes:
            units = ((unit, view.state_at(unit[0])) for unit in cohorts(first, view.plan.clients))
            return [cohort_evidence(shared, self._estimate(view, u), u, server) for u, server in units if server]
        models = [e.asked.params for e in first]
        return [
            Evidence((e.slot,), self._estimate(view, [e]), shared.at(params), params, channel="estimate")
            for e, params in zip(first, models, strict=True)
        ]

    def _estimate(self, view: View, unit: Sequence[Exchange]) -> Params:
        layout = Layout.of(unit[0].asked.params)
        if self.level == "batch":
            seed, slopes = self.sketch(*unit, view=view)
            return layout.unpack(stein(seed, slopes, len(layout.pack(unit[0].asked.params))))
        return layout.unpack(self._read(unit, view) / as_gradient(view.plan, unit[0].round))

    def _read(self, unit: Sequence[Exchange], view: View | None) -> Tensor:
        bare = None
        if self.sums and view is not None and len(unit) == 1:
            bare = peeled(view, unit[0], flat(unit[0].answer), self.masks)
        read = self._mean([flat(e.answer) for e in unit], [1.0]) if bare is None else bare
        return read.to(next(iter(unit[0].asked.params.values())).device)  # sums in a ring are on the CPU
