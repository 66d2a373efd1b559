"""The public parameters of FedPC: their bounds, how they decode messages, and the federation of the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.base.tree import Params, Tree
from ppbench.defenses.fedpc.messages import Ternary, Weights, masked_of, ternary_of, word_dtype, wrapped
from ppbench.defenses.fedpc.ternary import Packing, decoded
from ppbench.federation.bounds import LARGEST_NUMBER, SMALLEST_POSITIVE, NonNegative, OpenFraction, UnitInterval
from ppbench.federation.contract import Server
from ppbench.federation.optim import Layout
from ppbench.federation.plan import Plan
from ppbench.federation.secagg import PairedDefense

MENUS = ("batch_sizes", "epochs", "rates")
LARGEST_CHOICE: Mapping[str, float] = {"batch_sizes": 1_000_000, "epochs": 1000, "rates": LARGEST_NUMBER}
"""The largest choice of each menu."""
MOST_CHOICES = 100
FEDPC_QUICK: Mapping[str, Any] = {
    "model": "lenet",
    "clients": 5,
    "rounds": 30,
    "schedule": "parallel",
    "optimizer": "sgd",
    "lr": 0.2,
    "momentum": 0.9,
    "decay_at": (),
    "batch_size": 64,
    "partition": "imbalanced",
    "attack_batch": (1, 4),
    "victims": 8,
    "probe": "local",
    "probe_rounds": 2,
}
# Tables 1, 2 and 4 at their largest number of workers, which start from one rate; its decay is not given. The paper
# runs no attack; its theorems are about updates of many mini-batches.
CAO2022_FEDERATION: Mapping[str, Any] = {
    "dataset": "cifar10",
    "model": "resnet50_fixup",
    "clients": 10,
    "partition": "imbalanced",
    "schedule": "parallel",
    "rounds": 250,
    "batch_size": 32,
    "optimizer": "sgd",
    "lr": 0.01,
    "momentum": 0.9,
    "decay_at": (),
    "attacks": ("standard",),
    "victims": 8,
}
FEDPC_PAPER: Mapping[str, Any] = {
    **CAO2022_FEDERATION,
    "grid": (0.2,),
    "settings": {"batch_sizes": "128,64,32", "rates": "1"},
    "attack_batch": (256,),
    "probe": "local",
    "probe_rounds": 2,
}


@dataclass(frozen=True)
class Parameters(PairedDefense):
    """Parameters of `protocol.FedPC`, and the public decoding of messages.

    Attributes:
        beta: the share of its last step that a weight must move to be reported, and by which a ternary moves it.
        ternary_sign: "plus" moves where the ternaries point (the paper's Figure A.8 and text); "minus" away (its Eq. 3
            as printed); "none" leaves them out.
        alpha0: how far a ternary moves a weight in round 1, which has no last step; the paper gives no value.
        batch_sizes, epochs, rates: public menus, comma-separated, from which each client draws its private batch size,
            local epochs and factor on the plan's learning rate, once.
        packing: "two_bits" per entry, or "base3": five entries per byte.
        padded: whether ternaries are as long as a model, so that lengths do not reveal the pilot; not with masks.
        masks: "ring" adds masks to N_k T_k that cancel over the round's ternary senders, at 2 (or 4) bytes per entry.
        flip: probability with which each ternary is redrawn uniformly.
        pilot_clip: norm to which the pilot's update Q - P is clipped; 0 for no clipping. pilot_sigma: standard
            deviation of Gaussian noise on each of its weights, in units of `pilot_clip`.
    """

    beta: OpenFraction = 0.2
    ternary_sign: Literal["plus", "minus", "none"] = "plus"
    alpha0: NonNegative = 0.01
    batch_sizes: str | int | float = "128,64,32"
    epochs: str | int | float = "1,2"
    rates: str | int | float = "0.5,1,2"
    packing: Packing = "two_bits"
    padded: bool = False
    masks: Literal["none", "ring"] = "none"
    flip: UnitInterval = 0.0
    pilot_clip: NonNegative = 0.0
    pilot_sigma: NonNegative = 0.0

    fewest: ClassVar[int] = 3

    @property
    def paired(self) -> bool:
        """Whether ternaries are masked."""
        return self.masks == "ring"

    def check(self, plan: Plan) -> None:
        """As the base class; also refuse invalid menus, and clients that upload one after another."""
        super().check(plan)
        for field in MENUS:
            kind = "numbers" if field == "rates" else "whole numbers"
            right = f"at most {MOST_CHOICES} {kind} > 0, at most {LARGEST_CHOICE[field]:,.0f}, separated by commas"
            self.require(bool(self.menu(field)), field, right)
        self.require(not (self.paired and self.padded), "padded", "False where masks is 'ring'")
        self.require(self.pilot_clip > 0 or not self.pilot_sigma, "pilot_sigma", "0 where pilot_clip is 0")
        if plan.schedule != "parallel":
            raise UsageError(
                f"Defense {self.name!r} compares the costs of all clients before it asks one for its model; use "
                f"--schedule parallel, not {plan.schedule!r}."
            )

    def menu(self, field: str) -> list[float]:
        """Return the choices of a menu; none if any part is not a number > 0 of the menu's kind."""
        try:
            values = [float(part) if field == "rates" else int(part) for part in str(getattr(self, field)).split(",")]
        except ValueError:
            return []
        most = LARGEST_CHOICE[field]
        return (
            values
            if len(values) <= MOST_CHOICES and all(SMALLEST_POSITIVE <= value <= most for value in values)
            else []
        )

    def fewest_steps(self, count: int, batch: int, epochs: int) -> int:
        """Return the fewest local steps that the menus allow a client."""
        return int(min(self.menu("epochs"))) * math.ceil(count / max(self.menu("batch_sizes")))

    def why_no_epsilon(self, plan: Plan, server: Server | None = None, rounds: int = 1) -> str:
        """Return why there is no guarantee, even with noise."""
        if not (self.flip or self.pilot_sigma):
            return self.epsilon_reason
        entry = f", and a ternary's epsilon of {entry_epsilon(self.flip):.3g} is one entry's alone" if self.flip else ""
        return f"costs, and who is pilot, are functions of the data without noise{entry}"

    def decode(self, upload: Tree, like: Params) -> Params:
        """Return a pilot's update `like` - Q, or a ternary vector in float32; ValueError for other uploads."""
        layout = Layout.of(like)
        if isinstance(upload, Weights):
            return {name: value - upload.params[name] for name, value in like.items()}
        if isinstance(upload, Ternary):
            flat = layout.pack(like)
            trits = decoded(upload.packed, len(flat), self.packing, self.padded)
            return layout.unpack(trits.to(flat.device, torch.float32))  # unmasked ones are on the CPU
        raise ValueError(f"{type(upload).__name__} cannot be read by itself")

    def reach(self, last: Params, before: Params) -> Tensor:
        """Return how far a ternary of 1 moves each weight, float64 [M]: beta (P^{t-1} - P^{t-2}), or alpha0."""
        layout = Layout.of(last)
        flat = layout.pack(last)
        if not before:
            return torch.full_like(flat, self.alpha0, dtype=torch.float64)
        return self.beta * (flat - layout.pack(before)).double()

    def votes(self, server: Server, uploads: Mapping[int, Tree]) -> Tensor:
        """Return sum_k N_k T_k, int64 [M], over the ternary senders (ProtocolError)."""
        total = torch.zeros_like(Layout.of(server.params).pack(server.params), dtype=torch.int64)
        words = word_dtype(server.counts)
        for client, upload in uploads.items():
            if self.paired:
                total = total + masked_of(client, upload, len(total), words).to(total.device)
            else:
                read = ternary_of(client, upload, len(total), self.packing, self.padded)
                total = total + int(server.counts[client]) * read.long()
        return wrapped(total, words) if self.paired else total


def entry_epsilon(flip: float) -> float:
    """Return the local epsilon of one entry redrawn with probability `flip` (three values); M entries compose."""
    return math.log(3 / flip - 2) if flip else math.inf
