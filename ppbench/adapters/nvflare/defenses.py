"""A user's filters, and those that ship with NVFlare, as defenses."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, ClassVar

import torch
from nvflare.apis.filter import Filter
from nvflare.app_common.filters import ExcludeVars, PercentilePrivacy, SVTPrivacy
from torch import Tensor

from ppbench.adapters.framework import Grids
from ppbench.adapters.nvflare.mechanism import FilteredChange, FilterState, NVFlareDefense, Truncation
from ppbench.adapters.user_code import user_function
from ppbench.base.errors import ProtocolError, UsageError, one_line
from ppbench.base.tree import Params, Tree, node
from ppbench.federation import secagg
from ppbench.federation.bounds import Fraction, Positive, between
from ppbench.federation.contract import Context, Round, Server
from ppbench.federation.evidence import Evidence, as_gradient
from ppbench.federation.plan import Data, Layout, Noise, Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Slot

# -- A user's function that returns filters, as a defense --


def defense(address: str, name: str) -> type[NVFlareDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, ())

    def filters(self: NVFlareDefense) -> list[Filter]:
        new_filters: list[Filter] = function.call(**asdict(self))
        return new_filters

    return function.defense(NVFlareDefense, filters=filters)


# -- NVFlare's own filters of a client's task results. No version ships a filter of Gaussian noise --
# Each docstring has the promise of NVFlare's own documentation. Encryption: `encrypted`.


def matched(defense: NVFlareDefense, field: str, plan: Plan) -> list[str]:
    """Return the variables that the regular expression in a field matches; UsageError: invalid, no match, or all."""
    names, expression = plan.net.names, str(getattr(defense, field))
    try:
        matches = [name for name in names if expression and re.search(expression, name)]
    except re.error as cause:
        problem = one_line(str(cause), 60)
        raise UsageError(f"Defense {defense.name!r}: {field} is no regular expression: {problem}.") from cause
    if len(matches) in (0, len(names)):
        problem = f"{field}={expression!r} matches {'all' if matches else 'none'} of the network's variables"
        raise UsageError(f"Defense {defense.name!r}: {problem}; it must match some of {', '.join(names)}.")
    return matches


@dataclass(frozen=True)
class NVFlareFedAvg(NVFlareDefense):
    """Federated averaging without a filter: changes of weights, averaged by numbers of local steps."""

    name: ClassVar[str] = "nvflare:stock/fedavg"
    kin: ClassVar[str] = ""
    epsilon_reason: ClassVar[str] = "federated averaging adds nothing"


@dataclass(frozen=True)
class Percentile(NVFlareDefense):
    """PercentilePrivacy, "largest percentile to share": of the changes per step, those beyond a percentile are sent.

    Its documentation: "Only abs diff greater than this percentile is updated", "The upper limit to truncate abs values
    of weight diff" (and "Any weight diff with abs<gamma will become 0", which is wrong: entries below the percentile
    become 0, others are truncated at gamma). By default nine tenths of the entries are sent.
    """

    percentile: Annotated[float, between(0, 100)] = 10.0
    gamma: Positive = 0.01

    name: ClassVar[str] = "nvflare:stock/percentile_privacy"
    control: ClassVar[str] = "percentile"
    grids: ClassVar[Grids] = {"quick": (10.0, 90.0), "paper": (10.0, 50.0, 90.0, 99.0)}
    epsilon_reason: ClassVar[str] = "what is sent is a function of the update without any randomness"

    def filters(self) -> list[Filter]:
        """Return the filter."""
        return [PercentilePrivacy(percentile=self.percentile, gamma=self.gamma)]

    def cut(self, plan: Plan) -> Truncation:
        """Return gamma, in units of a gradient."""
        return Truncation(self.gamma / as_gradient(plan, 1), "largest")


CLIPS_FIRST = "epsilon_release" in inspect.signature(SVTPrivacy).parameters
"""Whether values are clipped before noise is added (from 2.8); older versions clip the sum of value and noise."""


@dataclass(frozen=True)
class SVT(NVFlareDefense):
    """SVTPrivacy, "the standard Sparse Vector Technique (SVT) differential privacy algorithm".

    Of the changes per step, entries whose clipped size plus noise exceeds a noisy threshold are candidates; a share of
    all entries is drawn from these and sent under Laplace noise of scale 2 gamma / noise_var. epsilon covers the
    selection alone: "total privacy budget used for the threshold/query selection phase" (from 2.8; before, "epsilon
    (float, optional): Defaults to 0.1"). Each sent entry costs noise_var more.
    """

    fraction: Fraction = 0.1
    epsilon: Positive = 0.1
    noise_var: Positive = 0.1
    gamma: Positive = 1e-5
    tau: Positive = 1e-6
    replace: bool = True

    name: ClassVar[str] = "nvflare:stock/svt_privacy"
    control: ClassVar[str] = "noise_var"
    grids: ClassVar[Grids] = {"quick": (0.1, 10.0), "paper": (0.1, 1.0, 10.0, 100.0)}
    epsilon_reason: ClassVar[str] = (
        "values are sent under noise before they are clipped, so that no noise covers what an update may be"
    )

    def filters(self) -> list[Filter]:
        """Return the filter."""
        own = {"fraction": self.fraction, "epsilon": self.epsilon, "noise_var": self.noise_var}
        return [SVTPrivacy(**own, gamma=self.gamma, tau=self.tau, replace=self.replace)]

    def cut(self, plan: Plan) -> Truncation:
        """Return gamma, in units of a gradient."""
        return Truncation(self.gamma / as_gradient(plan, 1), "noised" if CLIPS_FIRST else "noisy")

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of the noise on a sent entry of one step's update, in units of a gradient.

        None before 2.8 unless the noise is well below gamma, at which value plus noise is truncated: only signs remain.
        """
        if not CLIPS_FIRST and self.noise_var <= 4:
            return None
        return Noise("laplace", math.sqrt(8) * self.gamma / self.noise_var / as_gradient(plan, 1))

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, 0) of all that a client sends, except numbers of steps; None before 2.8.

        This is not the filter's own sum: its proof needs a search that ends at the c-th candidate, but the filter draws
        c from all candidates. All P entries may be candidates: the selection costs the threshold's share of epsilon
        plus P / c times the rest; the c sent values cost noise_var each (2 gamma over the noise's scale).
        """
        scalars = any(value.dim() == 0 for value in plan.net.module.parameters())  # these pass as they are
        if not CLIPS_FIRST or scalars:
            return None
        count = plan.net.parameter_count
        sent = min(math.ceil(count * self.fraction), count)
        threshold = self.epsilon / (1 + (2 * sent) ** (2 / 3))
        once = threshold + (self.epsilon - threshold) * count / sent + sent * self.noise_var
        return rounds * once, 0.0


@dataclass(frozen=True)
class Excluded(NVFlareDefense):
    """ExcludeVars: variables whose names match an expression are not sent ("Exclude/Remove variables from Shareable").

    A variable that no client sends keeps its value at the server.
    """

    exclude_vars: str = "^head"

    name: ClassVar[str] = "nvflare:stock/exclude_vars"
    epsilon_reason: ClassVar[str] = "the variables that are sent are sent as they are"

    def filters(self) -> list[Filter]:
        """Return the filter."""
        return [ExcludeVars(exclude_vars=self.exclude_vars)]

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse an invalid expression, and one that matches no variable or all."""
        super().check(plan)
        matched(self, "exclude_vars", plan)


ENCRYPTION_PURPOSE, BITS = "encrypted", 40
"""Fixed-point numbers of 40 fractional bits hold changes to 5e-13; CKKS at its default scale, 2^40, to some 1e-8."""


@node(name="ppbench.adapters.nvflare.encrypted.KeyHolder")
class KeyHolder(FilterState):
    """A client's state. keys: shared with every other client."""

    filters: Tree
    keys: secagg.PairKeys


@node
class EncryptedChange(FilteredChange):
    """Client to server. words: int64, the masked fixed-point change of the encrypted variables, times `steps`."""

    change: Params
    steps: Tensor
    meta: Tensor
    words: Tensor


@dataclass(frozen=True)
class Encrypted(NVFlareDefense):
    """HEModelEncryptor (nvflare.app_opt.he, TenSEAL) over the layers that `encrypt_layers` matches; simulated here.

    Its documentation: "if string containing regular expression (e.g. "conv"), only matched variables are being
    encrypted". The simulation is exact: of each client the server sees the number of steps, the other variables, and
    uniform numbers for the encrypted ones (a test runs the real filter if TenSEAL is installed). The server also gets
    the aggregate of the encrypted variables, so the model. In NVFlare all clients hold the same secret key, so each can
    decrypt the aggregate and every other client's upload: a client that colludes with the server reveals all uploads.
    Bytes are counted as 8 per number, not as ciphertexts.
    """

    encrypt_layers: str = "^features"

    name: ClassVar[str] = "nvflare:stock/he_partial"
    epsilon_reason: ClassVar[str] = "encryption adds nothing, and the other variables are sent as they are"

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse an expression that matches no variable, as the filter does, or all of them."""
        super().check(plan)
        self.require(plan.clients >= 2, "encrypt_layers", "used with 2 clients or more, or the aggregate is an upload")
        matched(self, "encrypt_layers", plan)

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """As the base class; also draw a key pair."""
        return KeyHolder(super().init_client(ctx, params).filters, secagg.new_keys(ctx))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Exchange public keys between all clients."""
        return secagg.exchange_keys(server, cohort, secagg.complete_graph(len(cohort)))

    def reply(self, ctx: Context, me: FilterState, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Agree on keys at set-up; then answer as the base class, with the encrypted variables masked (Overflow)."""
        if not isinstance(me, KeyHolder):
            raise ProtocolError(f"Client {ctx.party} has no keys.")
        if (setup_reply := secagg.setup_answer(ctx, me.keys, message, data)) is not None:
            return replace(me, keys=setup_reply[0]), setup_reply[1]
        kept, upload = super().reply(ctx, me, message, result, data)
        if not isinstance(upload, FilteredChange):
            raise ProtocolError(f"Client {ctx.party} has nothing to encrypt.")
        hidden = {n: upload.change[n] for n in matched(self, "encrypt_layers", ctx.plan)}
        flat = Layout.of(hidden).pack(hidden)
        ring = secagg.to_ring(flat.cpu() * int(upload.steps), BITS)
        words = ring + secagg.zero_sum(me.keys, ctx, ENCRYPTION_PURPOSE, len(ring))
        visible = {n: value for n, value in upload.change.items() if n not in hidden}
        sent = EncryptedChange(visible, upload.steps, upload.meta, words.to(flat.device))
        return KeyHolder(kept.filters, me.keys), sent

    def aggregate(self, ctx: Context, server: Server, uploads: Mapping[int, Tree]) -> Server:
        """As the base class; also step on the mean of the encrypted variables, in which all masks cancel."""
        after = super().aggregate(ctx, server, uploads)
        for client, upload in uploads.items():
            if not isinstance(upload, EncryptedChange):
                raise ProtocolError(f"Client {client} sent {type(upload).__name__}, nothing encrypted.")
        if sum(int(upload.steps) > 0 for upload in uploads.values()) != ctx.plan.clients:
            return after
        hidden = {n: server.params[n] for n in matched(self, "encrypt_layers", ctx.plan)}
        layout, steps = Layout.of(hidden), sum(int(upload.steps) for upload in uploads.values())
        total = torch.stack([upload.words for upload in uploads.values()]).sum(0)
        mean = layout.unpack(secagg.from_ring(total, BITS) / steps)
        moved = {n: (value.double() + mean[n]).to(value.dtype) for n, value in hidden.items()}
        return replace(after, params={**after.params, **moved})

    def evidence(self, view: View) -> list[Evidence]:
        """As the base class; to an adversary that colludes with clients, of decrypted uploads."""
        if not view.threat.colludes:
            return super().evidence(view)
        opened = {(e.slot, e.round, e.step): self._opened(view, e) for e in view.exchanges()}
        mail = tuple(
            replace(m, message=opened.get((Slot(m.probe, m.sender), m.round, m.step)) or m.message) for m in view.mail
        )
        return super().evidence(replace(view, mail=mail))

    def _opened(self, view: View, exchange: Exchange) -> FilteredChange | None:
        """Return a decrypted upload: all other clients' keys remove its mask; None if the view lacks one's."""
        upload, everybody = exchange.answer, range(view.plan.clients)
        if not isinstance(upload, EncryptedChange):
            return None
        count = len(upload.words)
        masks = secagg.others_masks(view, exchange, everybody, lambda state: state.keys, ENCRYPTION_PURPOSE, count)
        if masks is None:
            return None
        params = exchange.request.params
        layout = Layout.of({n: params[n] for n in matched(self, "encrypt_layers", view.plan)})
        hidden = layout.unpack(secagg.from_ring(upload.words.cpu() + masks, BITS) / int(upload.steps))
        whole = {**hidden, **upload.change}
        return FilteredChange({name: whole[name] for name in params}, upload.steps, upload.meta)


NVFLARE_STOCK: tuple[type[NVFlareDefense], ...] = (NVFlareFedAvg, Percentile, SVT, Excluded, Encrypted)
