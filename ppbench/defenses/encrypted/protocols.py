"""TP-SMC, HybridAlpha and PILE, as the MP-DP paper compares them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError
from ppbench.base.tree import Params, Tree
from ppbench.defenses.encrypted.sums import Ciphertext, EncryptedSums, ThresholdDefense, ciphertext_of, ciphertext_words
from ppbench.defenses.mpdp.accounting import composed_epsilon, theta_max
from ppbench.defenses.mpdp.model_perturbation import MPDP_PAPER_SETTING, MPDP_QUICK_SETTING
from ppbench.defenses.pbpfl.perturbation import HEAD_WEIGHT, Surrogates
from ppbench.defenses.pbpfl.protocol import ORDERS, PBPFL, family_bits
from ppbench.federation import secagg
from ppbench.federation.bounds import Bits, OpenFraction, between, whole_number
from ppbench.federation.contract import Ciphering, Context, Round, Server, Step, client_observations, functional
from ppbench.federation.evidence import Evidence, Shared, as_gradient
from ppbench.federation.plan import Layout, Noise, Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import SERVER

# -- Clipping, and Gaussian noise in shares that add up to the budget's, before TP-SMC and HybridAlpha encrypt --


@dataclass(frozen=True)
class ReducedNoise(EncryptedSums):
    """Clients clip their update and add a share of the noise: t - 1 honest shares suffice for the budget.

    sigma, for a sum in which one client's part has norm at most `bound`, is that of MP-DP's Eq. [23], so that budgets
    are comparable; each client adds N(0, sigma^2 / (t - 1)) (Truex et al. 2019, Section 3.3). Weights are equal, 1/N.

    epsilon, delta: privacy budget of ONE round. bound: L2 norm to which an update is clipped.
    """

    epsilon: Annotated[float, between(1e-6, 1e6)] = 3.0
    delta: OpenFraction = 1e-5
    bound: Annotated[float, between(1e-12, 1e12)] = 1.0

    control: ClassVar[str] = "epsilon"
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (3.0, 10.0, 30.0), "paper": (0.5, 1.0, 3.0, 5.0, 10.0)}
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": MPDP_QUICK_SETTING, "paper": MPDP_PAPER_SETTING}

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no general guarantee, and the epsilon that holds while t clients are honest."""
        rounds, honest = max(1, rounds), f"{self.trusted(plan)} of {plan.clients} clients"
        total = composed_epsilon(4 * theta_max(self.epsilon, self.delta), self.delta, rounds)
        return (
            f"only while {honest} are honest is there one (then epsilon {total:.3g} an example over {rounds} rounds, "
            f"delta {self.delta:g}); more colluders know too much of the noise"
        )

    def sigma(self, plan: Plan) -> float:
        """Return the standard deviation of the noise that one client adds to a coordinate of its update."""
        return self.bound / math.sqrt(theta_max(self.epsilon, self.delta) * (self.trusted(plan) - 1))

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of one client's noise on its gradient; None for local steps."""
        return Noise("gaussian", self.sigma(plan)) if plan.local.upload == "gradient" else None

    def weights(self, server: Server, clients: Sequence[int]) -> list[float]:
        """Return equal weights 1/N, so that a client's part in the sum is bounded."""
        return [1 / len(clients)] * len(clients)

    def encoded(self, ctx: Context, keys: secagg.PairKeys, result: Params) -> Tensor:
        """Return 1/N times the clipped and noisy update in fixed point, [values] int64 (Overflow)."""
        flat = Layout.of(result).pack(result).double().cpu()
        clipped = flat * (self.bound / flat.norm().clamp(min=1e-300)).clamp(max=1.0)
        noise = ctx.secret.normal((len(flat),), torch.float64)
        noisy = clipped + self.sigma(ctx.plan) * noise
        return secagg.to_ring(noisy, self.fraction_bits, 1 / ctx.plan.clients)

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the words as an update, float64."""
        flat = secagg.from_ring(words, self.fraction_bits) / share
        return {n: v.double() for n, v in Layout.of(server.params).unpack(flat).items()}

    def evidence(self, view: View) -> list[Evidence]:
        """Return, to a client, the others' mean from two models in a row less what it sent; as its base to others."""
        if not view.threat.sees_uploads:
            return self._others(view)
        return super().evidence(view)

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], summed: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """As the base class; an eavesdropper, which can decrypt like the server, gets it at the broadcast's weights."""
        if view.state_at(unit[0]) is not None:
            return super().piece(view, shared, unit, summed, words)
        params = unit[0].request.params
        server = Server(params, (), torch.zeros(0, dtype=torch.int64), ())
        observed = self.read(view.plan, server, words, len(summed) / len(unit) * as_gradient(view.plan, unit[0].round))
        return Evidence(tuple(e.slot for e in summed), observed, shared.at(params), params, channel="sum")

    def _others(self, view: View) -> list[Evidence]:
        """Return the others' mean gradient from two models and the client's own upload, decrypted by its keys."""
        opt, shared, pieces = view.plan.server_opt, Shared(view.plan), []
        if opt.name != "sgd" or opt.momentum:
            return []
        for others, own_uploads, first, second in client_observations(view):
            states = {e.slot.client: view.state_at(e, e.slot.client) for e in own_uploads}
            words = [w for e in own_uploads if (w := self._bare(view, e, states)) is not None]
            if len(words) < len(own_uploads):
                continue
            layout, size = Layout.of(first), view.plan.clients
            own = secagg.from_ring(torch.stack(words).sum(0), self.fraction_bits)
            moved = (layout.pack(first).double() - layout.pack(second).double()) / opt.lr
            mean = (moved - own.to(moved.device)) * size / len(others) / as_gradient(view.plan, own_uploads[0].round)
            observed = layout.unpack(mean)
            pieces.append(Evidence(others, observed, shared.at(first), first, channel="aggregate"))
        return pieces


# -- TP-SMC: shares of noise under threshold Paillier (Truex et al. 2019), as compared in the MP-DP paper --


@dataclass(frozen=True)
class TPSMC(ReducedNoise, ThresholdDefense):
    """Clients clip, add shares of the noise and encrypt; N - t + 1 of them decrypt the sum (t are honest).

    The server and fewer colluders read the noisy sum of the honest clients; with N - t + 1 colluders it reads every
    upload, which has only its share of the noise. All clients see each model. No client drops out.
    """

    name: ClassVar[str] = "tp_smc"
    paper: ClassVar[str] = "Truex et al., A Hybrid Approach to Privacy-Preserving Federated Learning, AISec@CCS 2019"


# -- HybridAlpha: shares of noise under functional encryption with keys of an authority (Xu et al. 2019) --
# The authority is honest, not on the wire, and gives one key per round: for equal weights of the whole cohort. With
# it the server reads the sum, as with pairwise masks that cancel in it, and colluders reveal the same uploads. So
# pairwise keys replace the authority's. One weakness of the paper's scheme is not modelled: its ciphertexts have no
# labels, so a key also decrypts sums of uploads from different rounds.

FUNCTIONAL_PADS = "functional"


@dataclass(frozen=True)
class HybridAlpha(ReducedNoise):
    """Clients clip, add shares of the noise and encrypt; a key of a trusted authority lets the server read the sum.

    The server and all clients but one can decrypt that client's upload, which has only its share of the noise; fewer
    colluders read the noisy sum of the others. All clients see each model. least: the least number of clients in a sum
    for which the authority gives a key (its inference-prevention module refuses fewer).
    """

    least: Annotated[int, whole_number(2, 10_000)] = 3

    name: ClassVar[str] = "hybridalpha"
    paper: ClassVar[str] = (
        "Xu et al., HybridAlpha: An Efficient Approach for Privacy-Preserving Federated Learning, AISec@CCS 2019"
    )

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse fewer clients than `least`."""
        super().check(plan)
        self.require(self.least <= plan.clients, "least", f"at most the number of clients, {plan.clients}")

    def ciphering(self, plan: Plan) -> Ciphering:
        """Return the encryption of a round; only the server decrypts."""
        return functional(plan.clients, self.values(plan))

    def upload(self, ctx: Context, me: secagg.PairKeys, result: Tree) -> Ciphertext:
        """Return the encrypted share of the update (Overflow)."""
        own = self.encoded(ctx, me, result)
        return ciphertext_of(own + secagg.zero_sum(me, ctx, FUNCTIONAL_PADS, len(own)), self.ciphering(ctx.plan))

    def key_for(self, clients: Sequence[int]) -> None:
        """As the authority, refuse a key for the sum of too few clients (ProtocolError)."""
        if len(set(clients)) < self.least:
            problem = f"The authority gives no key for a sum of {len(set(clients))} clients"
            raise ProtocolError(f"{problem}; ask for {self.least} at least.")

    def round(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Broadcast, collect, and step on the sum that the authority's key decrypts (ProtocolError: it gives none)."""
        server, message = self.broadcast(ctx, server)
        uploads = yield Step(server, dict.fromkeys(cohort, message))
        self.key_for(list(uploads))
        secagg.need_everybody(server, uploads)
        words = [ciphertext_words(client, upload, self.values(ctx.plan)) for client, upload in uploads.items()]
        return self.applied(ctx, server, torch.stack(words).sum(0))

    def total(self, view: View, unit: Sequence[Exchange]) -> Tensor | None:
        """Return the cohort's sum for the server; an eavesdropper has no key."""
        if view.party != SERVER:
            return None
        count = self.values(view.plan)
        return torch.stack([ciphertext_words(e.slot.client, e.answer, count) for e in unit]).sum(0)

    def pad(self, ctx: Context, states: Mapping[int, Tree], words: int) -> Tensor | None:
        """Return the pad of `ctx.party`: its own, or minus the sum of all others' pads; None if one is missing."""
        if ctx.party in states:
            return secagg.zero_sum(states[ctx.party], ctx, FUNCTIONAL_PADS, words)
        others = [client for client in range(ctx.plan.clients) if client != ctx.party]
        if any(other not in states for other in others):
            return None
        pads = (secagg.zero_sum(states[c], replace(ctx, party=c), FUNCTIONAL_PADS, words) for c in others)
        return -sum(pads, torch.zeros(words, dtype=torch.int64))


# -- PILE: a perturbed model, and uploads under threshold Paillier (Tang et al. 2023), as in the MP-DP paper --
# According to the MP-DP paper, clients train on a perturbed model, the server recovers the exact aggregate,
# homomorphic encryption hides the uploads, there is no noise (its accuracy is FedAvg's), and it is slow, mostly in
# decryption. So it is PBPFL with encrypted surrogates, like extended PBPFL but by another scheme. Its zero-knowledge
# proofs, by which a server rejects wrong gradients, change no view of honest parties and are neither run nor timed.


@dataclass(frozen=True)
class PILE(ThresholdDefense, PBPFL):
    """PBPFL whose clients encrypt the surrogates under threshold Paillier: the server reads only the exact sum.

    N - t + 1 colluding clients (t are trusted) can decrypt every upload; the server then recovers that client's exact
    gradient. Clients see a perturbed model. fraction_bits: as in `pbpfl_ext`.
    """

    fraction_bits: Bits = 48

    name: ClassVar[str] = "pile"
    paper: ClassVar[str] = (
        "Tang et al., PILE: Robust Privacy-Preserving Federated Learning via Verifiable Perturbations, TDSC 2023"
    )
    grids: ClassVar[Mapping[str, tuple[float, ...]]] = {"quick": (1.0, 10.0, 100.0), "paper": (10.0,)}
    setting: ClassVar[Mapping[str, Mapping[str, Any]]] = {"quick": MPDP_QUICK_SETTING, "paper": MPDP_PAPER_SETTING}
    epsilon_reason: ClassVar[str] = "there is no noise; the server recovers the exact mean gradient of the cohort"

    def values(self, plan: Plan) -> int:
        """Return the count of numbers that a client encrypts: three surrogates."""
        return len(ORDERS) * plan.net.parameter_count

    def bits(self, family: str, width: int) -> int:
        """Return the fractional bits of a family's numbers, public; see `PBPFLExt.bits`."""
        return family_bits(self.fraction_bits, self.kappa, family, width)

    def encoded(self, ctx: Context, keys: secagg.PairKeys, result: Surrogates) -> Tensor:
        """Return N_k / N times the surrogates in fixed point, one after another, [3 P] int64 (Overflow)."""
        share, width = keys.share(ctx.party), result.g[HEAD_WEIGHT].shape[1]
        parts = []
        for family in ORDERS:
            tree = getattr(result, family)
            parts.append(secagg.to_ring(Layout.of(tree).pack(tree).cpu(), self.bits(family, width), share))
        return torch.cat(parts)

    def surrogates(self, words: Tensor, share: float, like: Params) -> Surrogates:
        """Return the surrogates, float64, of words [3 P] int64 that are `share` times them."""
        layout, width, trees = Layout.of(like), like[HEAD_WEIGHT].shape[1], []
        for family, part in zip(ORDERS, words.chunk(len(ORDERS)), strict=True):
            tree = layout.unpack(secagg.from_ring(part, self.bits(family, width)) / share)
            trees.append({n: v[None] for n, v in tree.items()} if family == "sigma" else tree)
        return Surrogates(*trees)

    def read(self, plan: Plan, server: Server, words: Tensor, share: float) -> Params:
        """Return the exact gradient at the true weights, float64, from words that are `share` times the surrogates."""
        return self.recover(plan, server, self.surrogates(words, share, server.params))

    def piece(
        self, view: View, shared: Shared, unit: Sequence[Exchange], summed: Sequence[Exchange], words: Tensor
    ) -> Evidence | None:
        """As the base class; an eavesdropper, which can decrypt the sum, gets the mean first surrogate."""
        if view.state_at(unit[0]) is not None:
            return super().piece(view, shared, unit, summed, words)
        params = unit[0].request.params
        observed = self.surrogates(words.to(params[HEAD_WEIGHT].device), 1.0, params).g
        return Evidence(tuple(e.slot for e in summed), observed, shared.at(params), params, channel="g")
