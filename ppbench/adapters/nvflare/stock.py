"""NVFlare's own filters of a client's task results. No version ships a filter of Gaussian noise.

Each docstring has the promise of NVFlare's own documentation. Encryption: `encrypted`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Annotated, ClassVar

from nvflare.apis.filter import Filter
from nvflare.app_common.filters import ExcludeVars, PercentilePrivacy, SVTPrivacy

from ppbench.adapters.nvflare.mechanism import NVFlareDefense
from ppbench.adapters.nvflare.seen import Truncation
from ppbench.base.errors import UsageError, one_line
from ppbench.federation.bounds import Fraction, Positive, between
from ppbench.federation.evidence import as_gradient
from ppbench.federation.plan import Noise, Plan

NVFLARE_VERSION = f"1+nvflare{metadata.version('nvflare')}"
Grids = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class NVFlareStock(NVFlareDefense):
    """A filter that ships with NVFlare. stock: its name behind "nvflare:stock/"."""

    stock: ClassVar[str]
    version: ClassVar[str] = NVFLARE_VERSION


def matched(defense: NVFlareStock, field: str, plan: Plan) -> list[str]:
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
class NVFlareFedAvg(NVFlareStock):
    """Federated averaging without a filter: changes of weights, averaged by numbers of local steps."""

    name: ClassVar[str] = "nvflare:stock/fedavg"
    stock: ClassVar[str] = "fedavg"
    kin: ClassVar[str] = ""
    epsilon_reason: ClassVar[str] = "federated averaging adds nothing"

    def filters(self) -> list[Filter]:
        """Return no filters."""
        return []


@dataclass(frozen=True)
class Percentile(NVFlareStock):
    """PercentilePrivacy, "largest percentile to share": of the changes per step, those beyond a percentile are sent.

    Its documentation: "Only abs diff greater than this percentile is updated", "The upper limit to truncate abs values
    of weight diff" (and "Any weight diff with abs<gamma will become 0", which is wrong: entries below the percentile
    become 0, others are truncated at gamma). By default nine tenths of the entries are sent.
    """

    percentile: Annotated[float, between(0, 100)] = 10.0
    gamma: Positive = 0.01

    name: ClassVar[str] = "nvflare:stock/percentile_privacy"
    stock: ClassVar[str] = "percentile_privacy"
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
class SVT(NVFlareStock):
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
    stock: ClassVar[str] = "svt_privacy"
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
class Excluded(NVFlareStock):
    """ExcludeVars: variables whose names match an expression are not sent ("Exclude/Remove variables from Shareable").

    A variable that no client sends keeps its value at the server.
    """

    exclude_vars: str = "^head"

    name: ClassVar[str] = "nvflare:stock/exclude_vars"
    stock: ClassVar[str] = "exclude_vars"
    epsilon_reason: ClassVar[str] = "the variables that are sent are sent as they are"

    def filters(self) -> list[Filter]:
        """Return the filter."""
        return [ExcludeVars(exclude_vars=self.exclude_vars)]

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse an invalid expression, and one that matches no variable or all."""
        super().check(plan)
        matched(self, "exclude_vars", plan)


NVFLARE_STOCK: tuple[type[NVFlareStock], ...] = (NVFlareFedAvg, Percentile, SVT, Excluded)
"""The real filters; `encrypted` has the simulated one."""
