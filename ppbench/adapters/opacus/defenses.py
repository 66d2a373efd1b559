"""Opacus's own mechanisms: `PrivacyEngine.make_private` on a client's training.

secure_mode is off, the default: it needs torchcsprng, which no current torch has; noise comes from torch's generator.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Any, ClassVar, Literal

from opacus import PrivacyEngine

from ppbench.adapters.framework import Grids
from ppbench.adapters.opacus.mechanism import RELEASE, OpacusDefense, Public
from ppbench.adapters.user_code import user_function
from ppbench.federation.bounds import LARGEST_NUMBER, OpenShare, Positive, between

# -- A user's function that makes a training private, as a defense --


def defense(address: str, name: str) -> type[OpacusDefense]:
    """Return the defense of the function at MODULE:OBJECT; UsageError: there is no such function."""
    function = user_function(address, name, Public._fields)

    def parts(self: OpacusDefense, training: Public) -> Any:
        arguments = {part: value for part, value in training._asdict().items() if part in function.accepts}
        return function.call(**arguments, **asdict(self))

    return function.defense(OpacusDefense, "opacus", parts=parts)


@dataclass(frozen=True)
class OpacusDPSGD(OpacusDefense):
    """Opacus's DP-SGD: each example's gradient clipped to `max_grad_norm`, noise in units of it.

    accountant: Opacus's accountant of epsilon: "prv" (its default, numerical) or "rdp" (a bound, for any noise).
    """

    noise_multiplier: Annotated[float, between(1e-12, LARGEST_NUMBER, zero=True)] = 0.5
    max_grad_norm: Positive = 1.0
    poisson_sampling: bool = True
    accountant: Literal["prv", "rdp"] = "rdp"

    name: ClassVar[str] = "opacus:stock/dp_sgd"
    stock: ClassVar[str] = "dp_sgd"
    version: ClassVar[str] = f"1+opacus{metadata.version('opacus')}"
    control: ClassVar[str] = "noise_multiplier"
    grids: ClassVar[Grids] = {"quick": (0.01, 0.1, 1.0), "paper": (0.001, 0.01, 0.1, 0.5, 1.0, 2.0)}
    paper: ClassVar[str] = "Yousefpour et al., Opacus: User-Friendly Differential Privacy Library in PyTorch, 2021"

    def settings(self, training: Public) -> dict[str, Any]:
        """Return further arguments of `make_private`."""
        return {"max_grad_norm": self.max_grad_norm}

    def parts(self, training: Public) -> Any:
        """Return the engine, and what it makes of the training."""
        engine = PrivacyEngine(accountant=self.accountant, secure_mode=False)
        made = engine.make_private(
            module=training.model,
            optimizer=training.optimizer,
            data_loader=training.loader,
            noise_multiplier=self.noise_multiplier,
            poisson_sampling=self.poisson_sampling,
            **self.settings(training),
        )
        return engine, *made


@dataclass(frozen=True)
class PerLayer(OpacusDPSGD):
    """As dp_sgd, but each tensor's gradient is clipped by itself, all alike, to `max_grad_norm` together."""

    name: ClassVar[str] = "opacus:stock/dp_sgd_per_layer"
    stock: ClassVar[str] = "dp_sgd_per_layer"

    def settings(self, training: Public) -> dict[str, Any]:
        """Return the kind of clipping, and each tensor's norm."""
        count = len(list(training.model.parameters()))
        return {"clipping": "per_layer", "max_grad_norm": [self.max_grad_norm / count**0.5] * count}


@dataclass(frozen=True)
class Adaptive(OpacusDPSGD):
    """As dp_sgd, but the norm follows a quantile of the gradients' norms from step to step, by a noisy count.

    Each round begins at `max_grad_norm` again, as the optimizer is made anew.
    """

    quantile: OpenShare = 0.5
    clip_rate: Positive = 0.2
    least_norm: Positive = 0.01
    most_norm: Positive = 100.0
    count_std: Positive = 10.0

    name: ClassVar[str] = "opacus:stock/dp_sgd_adaptive"
    stock: ClassVar[str] = "dp_sgd_adaptive"

    def settings(self, training: Public) -> dict[str, Any]:
        """Return the kind of clipping, and how the norm moves."""
        moving = {"target_unclipped_quantile": self.quantile, "clipbound_learning_rate": self.clip_rate}
        ends = {"min_clipbound": self.least_norm, "max_clipbound": self.most_norm}
        return {
            **super().settings(training), **moving, **ends, "clipping": "adaptive", "unclipped_num_std": self.count_std,
        }  # fmt: skip


OPACUS_STOCK: tuple[type[OpacusDPSGD], ...] = (OpacusDPSGD, PerLayer, *((Adaptive,) if RELEASE >= (1, 5) else ()))
"""Before 1.5 `make_private` does not pass on the adaptive optimizer's settings."""
