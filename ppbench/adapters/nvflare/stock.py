"""What ships with NVFlare to be put around a client's task results. No version ships a filter of Gaussian noise.

What each promises is in its docstring as its own documentation has it. Encryption: `encrypted`.
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

from ppbench.adapters.nvflare.mechanism import Mechanism
from ppbench.adapters.nvflare.seen import Cut
from ppbench.base.errors import UsageError, one_line
from ppbench.federation.bounds import Fraction, Positive, between
from ppbench.federation.evidence import as_gradient
from ppbench.federation.plan import Noise, Plan

VERSION = f"1+nvflare{metadata.version('nvflare')}"
Grids = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Stock(Mechanism):
    """One of NVFlare's own. stock: its name behind "nvflare:stock/"."""

    stock: ClassVar[str]
    version: ClassVar[str] = VERSION


def matched(defense: Stock, field: str, plan: Plan) -> list[str]:
    """Return the variables that an expression in a field matches; UsageError: it is none, or matches none or all."""
    names, words = plan.net.names, str(getattr(defense, field))
    try:
        found = [name for name in names if words and re.search(words, name)]
    except re.error as cause:
        told = one_line(str(cause), 60)
        raise UsageError(f"Defense {defense.name!r}: {field} is no regular expression: {told}.") from cause
    if len(found) in (0, len(names)):
        told = f"{field}={words!r} matches {'all' if found else 'none'} of the network's variables"
        raise UsageError(f"Defense {defense.name!r}: {told}; it must match some of {', '.join(names)}.")
    return found


@dataclass(frozen=True)
class FedAvg(Stock):
    """Federated averaging without a filter: changes of weights, averaged by numbers of local steps."""

    name: ClassVar[str] = "nvflare:stock/fedavg"
    stock: ClassVar[str] = "fedavg"
    kin: ClassVar[str] = ""
    epsilon_reason: ClassVar[str] = "federated averaging adds nothing"

    def filters(self) -> list[Filter]:
        """Return none."""
        return []


@dataclass(frozen=True)
class Percentile(Stock):
    """PercentilePrivacy, "largest percentile to share": of the changes a step, those beyond a percentile are sent.

    Its documentation: "Only abs diff greater than this percentile is updated", "The upper limit to truncate abs values
    of weight diff" (and "Any weight diff with abs<gamma will become 0", which is not what it does: entries below the
    percentile become 0, others are cut off at gamma). By default nine tenths of the entries are sent.
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

    def cut(self, plan: Plan) -> Cut:
        """Return gamma, in units of a gradient."""
        return Cut(self.gamma / as_gradient(plan, 1), "largest")


CLIPS_FIRST = "epsilon_release" in inspect.signature(SVTPrivacy).parameters
"""Whether values are clipped before the noise (2.8 on); before, the sum of whole values and noise was clipped."""


@dataclass(frozen=True)
class SVT(Stock):
    """SVTPrivacy, "the standard Sparse Vector Technique (SVT) differential privacy algorithm".

    Of the changes a step, entries whose clipped size and noise exceed a noisy threshold are candidates; a share of all
    entries is drawn from these and sent under Laplace noise of scale 2 gamma / noise_var. epsilon pays for the choice
    alone: "total privacy budget used for the threshold/query selection phase" (2.8 on; before, "epsilon (float,
    optional): Defaults to 0.1"). What is sent costs noise_var an entry more.
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

    def cut(self, plan: Plan) -> Cut:
        """Return gamma, in units of a gradient."""
        return Cut(self.gamma / as_gradient(plan, 1), "noised" if CLIPS_FIRST else "noisy")

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of the noise on a sent entry of one step's update that is taken for a gradient.

        None before 2.8 where the noise is not well below gamma, at which both are cut: signs are left then.
        """
        if not CLIPS_FIRST and self.noise_var <= 4:
            return None
        return Noise("laplace", math.sqrt(8) * self.gamma / self.noise_var / as_gradient(plan, 1))

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, 0) of all that a client sends, numbers of steps aside; None before 2.8.

        Not the filter's own sum: its proof wants the search to end at the c-th candidate, and this one takes all of a
        pass and draws c of them. All P entries may be candidates: their choice costs what the threshold's noise does,
        and P / c times the rest of epsilon; the c sent values cost noise_var each (2 gamma over the noise's scale).
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
class Excluded(Stock):
    """ExcludeVars: variables whose names match an expression are not sent ("Exclude/Remove variables from Shareable").

    What nobody sends is not aggregated: it keeps its value at the server.
    """

    exclude_vars: str = "^head"

    name: ClassVar[str] = "nvflare:stock/exclude_vars"
    stock: ClassVar[str] = "exclude_vars"
    epsilon_reason: ClassVar[str] = "the variables that are sent are sent as they are"

    def filters(self) -> list[Filter]:
        """Return the filter."""
        return [ExcludeVars(exclude_vars=self.exclude_vars)]

    def check(self, plan: Plan) -> None:
        """As its base; also refuse an expression that is none, or matches no variable: then all would be sent."""
        super().check(plan)
        matched(self, "exclude_vars", plan)


STOCK: tuple[type[Stock], ...] = (FedAvg, Percentile, SVT, Excluded)
"""Those that are filters here; `encrypted` has the one that is simulated."""
