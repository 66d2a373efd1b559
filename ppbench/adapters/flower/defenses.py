"""Mechanisms that ship with Flower: server and client differential privacy, fixed and adaptive clipping, strategies.

The strategies are protocols, not defenses; they are here because defenses run inside them. Each docstring has the
promise of Flower's own documentation.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import strategy as strategies
from flwr.serverapp.strategy import Strategy

from ppbench.adapters.flower.mechanism import FlowerDefense, Mod, StrategyAndMods, running_flower
from ppbench.adapters.flower.secure import Secure
from ppbench.adapters.framework import Grids
from ppbench.adapters.user_code import UserFunction, user_function
from ppbench.base.errors import ProtocolError
from ppbench.federation.bounds import NonNegative, NonNegativeInt, Positive, PositiveInt
from ppbench.federation.evidence import as_gradient
from ppbench.federation.plan import Noise, Plan

# -- A user's function that returns a strategy and mods, or a secure aggregation workflow and mods, as a defense --

CLIENTS_PARAMETER = "clients"
TRIAL_CLIENTS = 10
"""Number of clients in the call that finds out what the function returns."""


def defense(address: str, name: str) -> type[FlowerDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, (CLIENTS_PARAMETER,))

    def parts(self: FlowerDefense, clients: int) -> Any:
        return _called(function, clients, **asdict(self))

    return function.defense(Secure if _aggregates_securely(function) else FlowerDefense, parts=parts)


def _called(function: UserFunction, clients: int, **parameters: Any) -> Any:
    return function.call(**({CLIENTS_PARAMETER: clients} if function.accepts else {}), **parameters)


def _aggregates_securely(function: UserFunction) -> bool:
    """Return whether the function returns a workflow by default; if it raises, `check` reports that later."""
    try:
        with running_flower("It", 0):
            made = _called(function, TRIAL_CLIENTS)
    except ProtocolError:
        return False
    return isinstance(made, tuple) and bool(made) and isinstance(made[0], SecAggPlusWorkflow)


GRIDS: Grids = {"quick": (0.01, 0.1, 1.0), "paper": (0.01, 0.1, 0.5, 1.0)}
NO_NOISE_SENT = "uploads carry no noise: the server that adds it sees each client's weights, as its threat model says"


def _taking_all(clients: int, strategy: str = "FedAvg") -> Strategy:
    """Return one of Flower's strategies that takes all clients, even a single one."""
    made: Strategy = getattr(strategies, strategy)(min_train_nodes=1, min_available_nodes=min(2, clients))
    return made


@dataclass(frozen=True)
class FixedClipping(FlowerDefense):
    """Central differential privacy, fixed clipping by the server: it clips each update and noises their mean."""

    noise_multiplier: NonNegative = 1.0
    clipping_norm: Positive = 1.0

    name: ClassVar[str] = "flower:stock/dp_server_fixed"
    control: ClassVar[str] = "noise_multiplier"
    grids: ClassVar[Grids] = GRIDS
    epsilon_reason: ClassVar[str] = NO_NOISE_SENT
    wrapper: ClassVar[str] = "DifferentialPrivacyServerSideFixedClipping"
    mods: ClassVar[tuple[Mod, ...]] = ()

    def parts(self, clients: int) -> StrategyAndMods:
        """Return the wrapper around FedAvg, and the clients' mods."""
        made = getattr(strategies, self.wrapper)
        return made(_taking_all(clients), self.noise_multiplier, self.clipping_norm, clients), self.mods


@dataclass(frozen=True)
class ClientFixedClipping(FixedClipping):
    """Central differential privacy, fixed clipping by the clients: they clip, the server noises the mean."""

    name: ClassVar[str] = "flower:stock/dp_client_fixed"
    kin: ClassVar[str] = "dp_sgd"
    wrapper: ClassVar[str] = "DifferentialPrivacyClientSideFixedClipping"
    mods: ClassVar[tuple[Mod, ...]] = (fixedclipping_mod,)

    def clipping(self, plan: Plan) -> float | None:
        """Return the norm to which an update is clipped, in units of a gradient."""
        return self.clipping_norm / as_gradient(plan, 1)


@dataclass(frozen=True)
class AdaptiveClipping(FlowerDefense):
    """Central differential privacy, adaptive clipping by the server, to a norm that follows the updates' norms."""

    noise_multiplier: NonNegative = 0.1
    initial_clipping_norm: Positive = 0.1
    clipped_count_stddev: Positive = 1.0

    name: ClassVar[str] = "flower:stock/dp_server_adaptive"
    control: ClassVar[str] = "noise_multiplier"
    grids: ClassVar[Grids] = GRIDS
    epsilon_reason: ClassVar[str] = NO_NOISE_SENT
    wrapper: ClassVar[str] = "DifferentialPrivacyServerSideAdaptiveClipping"
    mods: ClassVar[tuple[Mod, ...]] = ()

    def parts(self, clients: int) -> StrategyAndMods:
        """Return the wrapper around FedAvg, and the clients' mods."""
        own = {"initial_clipping_norm": self.initial_clipping_norm, "clipped_count_stddev": self.clipped_count_stddev}
        return getattr(strategies, self.wrapper)(_taking_all(clients), self.noise_multiplier, clients, **own), self.mods


@dataclass(frozen=True)
class ClientAdaptiveClipping(AdaptiveClipping):
    """Central differential privacy, adaptive clipping by the clients, which report whether they clipped."""

    name: ClassVar[str] = "flower:stock/dp_client_adaptive"
    wrapper: ClassVar[str] = "DifferentialPrivacyClientSideAdaptiveClipping"
    mods: ClassVar[tuple[Mod, ...]] = (adaptiveclipping_mod,)


@dataclass(frozen=True)
class LocalDP(FlowerDefense):
    """Local differential privacy: each client clips its update and adds Gaussian noise before it sends it.

    The noise is sensitivity sqrt(2 ln(1.25 / delta)) / epsilon on every weight, whatever the clipping norm.
    noise_multiplier: its standard deviation in units of the clipping norm, which determines epsilon; sensitivity: the
    mod's, 0 for the clipping norm.
    """

    noise_multiplier: Positive = 0.1
    clipping_norm: Positive = 1.0
    sensitivity: NonNegative = 0.0
    delta: Positive = 1e-5

    name: ClassVar[str] = "flower:stock/local_dp"
    kin: ClassVar[str] = "dp_sgd"
    control: ClassVar[str] = "noise_multiplier"
    grids: ClassVar[Grids] = GRIDS

    @property
    def std(self) -> float:
        """Standard deviation of the noise on each weight."""
        return self.noise_multiplier * self.clipping_norm

    @property
    def claimed_epsilon(self) -> float:
        """The mod's epsilon, for one release."""
        return (self.sensitivity or self.clipping_norm) * math.sqrt(2 * math.log(1.25 / self.delta)) / self.std

    def parts(self, clients: int) -> StrategyAndMods:
        """Return FedAvg and the mod."""
        sensitivity = self.sensitivity or self.clipping_norm
        return _taking_all(clients), [LocalDpMod(self.clipping_norm, sensitivity, self.claimed_epsilon, self.delta)]

    def noise(self, plan: Plan) -> Noise | None:
        """Return the law of the noise on an update, in units of a gradient."""
        return Noise("gaussian", self.std / as_gradient(plan, 1))

    def clipping(self, plan: Plan) -> float | None:
        """Return the norm to which an update is clipped, in units of a gradient."""
        return self.clipping_norm / as_gradient(plan, 1)

    def guarantee(self, plan: Plan, examples: int, rounds: int) -> tuple[float, float] | None:
        """Return (epsilon, delta) of all that a client sends, by the RDP accountant for the Gaussian mechanism.

        The sensitivity is twice `clipping_norm`: two clipped updates are at most that far apart.
        """
        from dp_accounting import GaussianDpEvent  # takes a second
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant()
        accountant.compose(GaussianDpEvent(self.std / (2 * self.clipping_norm)), rounds)
        return float(accountant.get_epsilon(self.delta)), self.delta


@dataclass(frozen=True)
class SecAggPlus(Secure):
    """Secure aggregation (SecAgg+): the server learns the sum of clients' weights, but no single client's.

    num_shares: clients, itself included, with which each client shares keys, 0 for all; threshold: how many of them
    restore a key. max_weight, clipping_range, quantization: the workflow's settings.
    """

    num_shares: NonNegativeInt = 0
    threshold: PositiveInt = 2
    max_weight: Positive = 1000.0
    clipping_range: Positive = 8.0
    quantization: PositiveInt = 2**22

    name: ClassVar[str] = "flower:stock/secaggplus"

    def parts(self, clients: int) -> Any:
        """Return the workflow and the mod."""
        ranges = {"clipping_range": self.clipping_range, "quantization_range": self.quantization}
        shares = self.num_shares or 1.0
        return SecAggPlusWorkflow(shares, self.threshold, max_weight=self.max_weight, **ranges), [secaggplus_mod]


def _protocol(
    name: str, about: str, strategy: str, adds: str = "a way to aggregate, which adds nothing to uploads"
) -> type[FlowerDefense]:
    """Return a defense class for a strategy with its default settings. adds: why it has no epsilon."""

    def parts(self: FlowerDefense, clients: int) -> StrategyAndMods:
        return _taking_all(clients, strategy), []

    attributes = {
        "name": f"flower:stock/{name}", "parts": parts, "epsilon_reason": adds, "__doc__": about, "__module__": __name__
    }  # fmt: skip
    return dataclass(frozen=True)(type(strategy, (FlowerDefense,), attributes))


_AVERAGES = "Federated averaging: clients train, the server averages weights by numbers of examples."
FLOWER_STOCK: tuple[type[FlowerDefense], ...] = (
    _protocol("fedavg", _AVERAGES, "FedAvg", "federated averaging adds nothing"),
    FixedClipping,
    ClientFixedClipping,
    AdaptiveClipping,
    ClientAdaptiveClipping,
    LocalDP,
    SecAggPlus,
    _protocol("fedmedian", "The coordinate-wise median of clients' weights.", "FedMedian"),
    _protocol("krum", "The weights of the client that is closest to the others.", "Krum"),
    _protocol("fedadam", "The mean update, by Adam at the server.", "FedAdam"),
    _protocol("fedprox", "FedAvg whose clients are told a proximal term's weight.", "FedProx"),
)
