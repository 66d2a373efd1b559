"""PBPFL: the server perturbs the model, clients train on it without being able to read it (Feng et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ppbench.base.tree import Params, Tree, node
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Perturbation, Surrogates, exchanges, whole_cohorts
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits
from ppbench.federation.contract import Context, Server
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.plan import Plan
from ppbench.federation.secagg import cohort_evidence
from ppbench.federation.view import View
from ppbench.nets.channels import Channels, Norms, channels_of

PBPFL_SETTING: Mapping[str, Any] = {
    "model": "mlp",
    "model_options": {"hidden": "64,64"},
    "loss": "squared",
    "upload": "gradient",
    "schedule": "parallel",
    "optimizer": "adam",
    "lr": 5e-3,
    "rounds": 400,
    "decay_at": (),
}
# Table 1, on rows; the suite chooses, and explains, what the paper does not give (rate, optimizer, widths).
PBPFL_PAPER_SETTING: Mapping[str, Any] = {
    **PBPFL_SETTING,
    "dataset": "csv:{data}/bank-marketing.csv.gz?target=y&sep=;&split=8:1:1&task=regression",
    "model_options": {"hidden": 64, "layers": 3},
    "clients": 5,
    "batch_size": 32,
    "optimizer": "sgd",
    "lr": 1e-3,
    "rounds": 41_187,  # 200 epochs of 32,950 / 5 rows in batches of 32
    "attacks": ("standard",),
    "attack_batch": (1,),
    "victims": 100,
    "stages": ("init", "iterate", "final"),
}


@node(name="ppbench.defenses.pbpfl.protocol.Secrets")
class RoundSecrets:
    """The server's secrets of one round. scales: [count] > 0, the hidden channels' r; gamma: scalar; direction: [C]."""

    scales: Tensor
    gamma: Tensor
    direction: Tensor


@dataclass(frozen=True)
class PBPFL(Perturbation):
    """Perturbs hidden channels by secret scales and the logits by a secret multiple of a public direction.

    New in every round: scales r ~ U(0.5, 2), direction r_a ~ U(-1, 1)^C, gamma by kappa. The paper calls gamma only "a
    random coefficient" in R, without law, sign or spread. Here it is positive, of the size that kappa requires, and
    varies with r_a, r and the inputs on which it is measured: precision falls with its square, so a wide law would make
    precision random. Lemma 3 also assumes an unknown sign. From three gradients the server recovers each client's
    exact one: for the server this is FedSGD. norms: "refuse" them, or perturb their affine part ("affine"). head_bias:
    "masked" masks the head's bias too; "clear" sends it unmasked.
    """

    norms: Norms = "refuse"
    head_bias: Literal["masked", "clear"] = "masked"

    name: ClassVar[str] = "pbpfl"
    version: ClassVar[str] = "2"
    everybody: ClassVar[bool] = False
    control: ClassVar[str] = "kappa"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "quick": (1.0, 10.0, 100.0),
        "paper": (0.1, 1.0, 10.0, 100.0, 1000.0),
    }
    paper: ClassVar[str] = (
        "Feng et al., Practical and Bilateral Privacy-preserving Federated Learning, 2020 (arXiv 2002.09843)"
    )
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": PBPFL_SETTING, "paper": PBPFL_PAPER_SETTING}
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers every client's exact gradient"

    @property
    def bias_masked(self) -> bool:
        """Whether the head's bias is masked."""
        return self.head_bias == "masked"

    def channels(self, plan: Plan) -> Channels:
        """Return where scales enter the network (UsageError: a layer cannot be perturbed)."""
        return channels_of(plan.spec, self.norms)

    def secrets(self, ctx: Context, server: Server, scales: Tensor, hidden: Params) -> tuple[Tree, Tensor, Tensor]:
        """Return (`RoundSecrets`, gamma r_a, r_a)."""
        uniform = ctx.secret.uniform((ctx.plan.spec.classes,))
        direction = (uniform * 2 - 1).to(scales.device)
        gamma = self.mask_size(ctx, hidden, direction)
        return RoundSecrets(scales, gamma, direction), gamma * direction, direction

    def coefficients(self, own: RoundSecrets) -> tuple[Tensor, Tensor]:
        """Return gamma [1], and gamma^2 times the squared norm of r_a."""
        return own.gamma[None], own.gamma**2 * (own.direction @ own.direction)

    def evidence(self, view: View) -> list[Evidence]:
        """Return each client's recovered gradient (server), or its first surrogate at the perturbed weights (listener).

        Both are exact: a perturbed network is a network. A client gets none: the difference of two perturbed models is
        no gradient.
        """
        shared, pieces = Shared(view.plan), []
        for exchange in exchanges(view):
            server = view.state_at(exchange)
            if server is None:
                params, observed, channel = exchange.request.params, exchange.answer.g, "g"
            else:
                params, observed = server.params, self.recover(view.plan, server, exchange.answer)
                channel = "recovered"
            pieces.append(Evidence((exchange.slot,), observed, shared.at(params), params, channel=channel))
        return pieces


# -- Extended PBPFL: the server learns only the cohort's weighted sum of gradients (Feng et al. 2020, Appendix C) --

ORDERS = {"g": (2, 0), "sigma": (1, 1), "beta": (0, 2)}  # powers of kappa and width with which the families grow
SMALL_KAPPA, SMALL_WIDTH = 10.0, 64  # up to these, all values measured (CIFAR-10, at initialization) are below 3000


def family_bits(bits: int, kappa: float, family: str, width: int) -> int:
    """Return the fractional bits of a family's numbers: `bits`, less those for large kappa and head width."""
    by_kappa, by_width = ORDERS[family]
    kappas, widths = max(0.0, math.log2(kappa / SMALL_KAPPA)), max(0.0, math.log2(width / SMALL_WIDTH))
    return max(0, bits - math.ceil(by_kappa * kappas + by_width * widths))


@dataclass(frozen=True)
class PBPFLExt(PBPFL):
    """PBPFL whose clients mask their uploads, so that only sums over the whole cohort can be read.

    Clients send N_k / N times each surrogate as fixed-point numbers modulo 2^64 plus masks that cancel in the cohort's
    sum (Eq. 23-30). families: "independent" masks the three surrogates separately; "shared" uses one mask for all, as a
    literal reading of Eq. 23-25 allows: it reveals differences of surrogates. fraction_bits: 48 represent values below
    16384 to 2e-15.
    """

    families: Literal["independent", "shared"] = "independent"
    fraction_bits: Bits = 48

    name: ClassVar[str] = "pbpfl_ext"
    everybody: ClassVar[bool] = True
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers the exact mean gradient of the cohort"
    sums = True

    def bits(self, family: str, width: int) -> int:
        """Return the fractional bits of a family's numbers; public, as kappa and the head's `width` D are.

        beta grows as D^2, sigma as kappa D and g as kappa^2 (`ORDERS`): each doubling of kappa beyond 10, or of D
        beyond 64, costs one bit for each power of it; not with a "shared" mask, which needs one unit for all families.
        """
        if self.families == "shared":
            return self.fraction_bits
        return family_bits(self.fraction_bits, self.kappa, family, width)

    def upload(self, ctx: Context, me: secagg.Keys, result: Surrogates) -> Tree:
        """Return N_k / N times the surrogates in fixed point, masked; int64."""
        share, width = me.share(ctx.party), result.g[HEAD_WEIGHT].shape[1]

        def hidden(family: str) -> Params:
            purpose = family if self.families == "independent" else "all"
            return secagg.hide(me, ctx, purpose, getattr(result, family), self.bits(family, width), share)

        return Surrogates(*map(hidden, ORDERS))

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """Sum in the ring, where the masks cancel, then recover the mean gradient and step."""
        secagg.need_everybody(server, uploads)
        return self.stepped(ctx, server, self.recover(ctx.plan, server, self.total(list(uploads.values()))))

    def total(self, uploads: Sequence[Surrogates]) -> Surrogates:
        """Return the N_k-weighted mean of the surrogates, float64, from all masked uploads."""
        width = uploads[0].g[HEAD_WEIGHT].shape[1]
        return Surrogates(
            *(secagg.sum_of_masked([getattr(u, f) for u in uploads], self.bits(f, width)) for f in ORDERS)
        )

    def evidence(self, view: View) -> list[Evidence]:
        """Return evidence of every whole cohort's mean gradient (server); an eavesdropper gets none."""
        shared, pieces = Shared(view.plan), []
        for unit in whole_cohorts(view):
            server = view.state_at(unit[0])
            if server is not None:
                mean = self.recover(view.plan, server, self.total([e.answer for e in unit]))
                pieces.append(cohort_evidence(shared, mean, unit, server))
        return pieces
