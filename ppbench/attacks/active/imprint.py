"""Trap weights: a first linear layer that sorts a batch's images, or texts' tokens, into bins, if possible one per bin.

What lies in a bin of its own is read off the upload, see `image_trap`; of a transformer the layer is the first MLP's,
and tokens are sorted, see `text_trap`. Where the server reads sums alone, all other clients get weights without a
gradient (Pasquini et al., "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022), so
that the sum is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ppbench.attacks.active.image_trap import bin_rows, bin_trap, image_wiring, ratio_rows, ratio_trap
from ppbench.attacks.active.text_trap import last_norm, text_trap, trapped_features
from ppbench.attacks.active.token_bins import shown_texts
from ppbench.attacks.active.wiring import ActiveInversion, WiredLayer, passing, shown_images, silent_weights, wiring
from ppbench.attacks.reconstruction.search.starts import PosedVictim
from ppbench.base.tree import Params, detached, moved
from ppbench.base.vocabulary import PADDING
from ppbench.federation.acting import Before, Sent
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan


class Trap(Protocol):
    """How one kind of input is trapped: the weights that a server sends, and what it reads off the upload."""

    def suits(self, plan: Plan) -> bool:
        """Return whether the network can be a trap."""

    def weights(self, before: Before, generator: torch.Generator, loud: bool) -> tuple[Params, WiredLayer]:
        """Return the trap's weights, and the layer before the head. UsageError: the network cannot be a trap."""

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return the answer [N, *shape] where nothing is read."""

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return at most `count` inputs [N, *shape] that an upload from weights of the trap shows, the surest first."""


class ImageTrap:
    """Bins of brightness, or of a ratio in networks without biases."""

    def suits(self, plan: Plan) -> bool:
        """Return whether `wiring` knows the network's layers."""
        return plan.spec.classes > 1 and wiring(plan) is not None

    def weights(self, before: Before, generator: torch.Generator, loud: bool) -> tuple[Params, WiredLayer]:
        """Return convolutions that pass the image on, with the trap behind them."""
        plan, wired, params = before.plan, image_wiring(before.plan), _weights_of(before)
        params |= passing(wired.before, params, plan.data_range)
        return params | (bin_trap if wired.biased else ratio_trap)(wired, params, before, loud), wired.last

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a grey image for each example."""
        return victim.image("grey")

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return the images in bins of their own, those with the largest share of the gradient first."""
        wired = image_wiring(plan)
        rows = (bin_rows if wired.biased else ratio_rows)(wired, params, evidence, plan)
        return shown_images(plan, wired.before, params, rows)[:count]


class TextTrap:
    """Bins of tokens in the first MLP of a transformer."""

    def suits(self, plan: Plan) -> bool:
        """Return whether the network is a transformer whose blocks are trained."""
        return trapped_features(plan) is not None

    def weights(self, before: Before, generator: torch.Generator, loud: bool) -> tuple[Params, WiredLayer]:
        """Return blocks that pass on what the first one sorts."""
        weights = text_trap(before.plan, _weights_of(before), before.public, generator, loud)
        return weights, last_norm(before.plan)

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a text of padding for each example."""
        return torch.full(victim.size, float(PADDING))

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return texts of token numbers, with padding where a token was not read."""
        return shown_texts(plan, params, evidence, count)


def _weights_of(before: Before) -> Params:
    return moved(detached(before.server.params), torch.device("cpu"))


@dataclass(frozen=True)
class Imprint(ActiveInversion):
    """Trap weights in the first hidden linear layer: recovers the images that fall into a bin of their own, or texts.

    Bins are equally likely on the public examples; without any, by a normal law of brightness, or among drawn tokens.
    With fewer units than images a bin has probability 1 / batch, and the rest of the law has no bins: 1 in e bins then
    holds one image.

    loud: whether gradients are made as large as possible, which drowns noise without clipping before it.
    """

    loud: bool = True

    name: ClassVar[str] = "imprint"
    reads_tokens: ClassVar[bool] = True
    next_token: ClassVar[bool] = True
    reference: ClassVar[str] = (
        "Fowl et al., Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models, "
        "ICLR 2022; Boenisch et al., When the Curious Abandon Honesty, EuroS&P 2023; Pasquini et al., Eluding Secure "
        "Aggregation in Federated Learning via Model Inconsistency, CCS 2022; Fowl et al., Decepticons: Corrupted "
        "Transformers Breach Privacy in Federated Learning for Language Models, ICLR 2023"
    )

    def suits(self, plan: Plan) -> bool:
        """Return whether the network can be a trap."""
        return _trap(plan).suits(plan)

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the trap for the target (or for all), and weights without a gradient for the others."""
        weights, last = _trap(before.plan).weights(before, generator, self.loud)
        silent = None if before.target is None else silent_weights(last, _weights_of(before), before.plan.loss_name)
        return Sent(weights, silent)

    def blank(self, victim: PosedVictim) -> Tensor:
        """Return a grey image, or an empty text, for each example."""
        return _trap(victim.plan).blank(victim)

    def read(self, plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
        """Return the images, or the texts, that the trap's bins show."""
        return _trap(plan).read(plan, params, evidence, count)


def _trap(plan: Plan) -> Trap:
    return ImageTrap() if plan.vocabulary is None else TextTrap()


@dataclass(frozen=True)
class QuietImprint(Imprint):
    """Trap weights with small gradients of one size: sparsifiers keep more of them, and they fit the range of masks."""

    name: ClassVar[str] = "imprint_quiet"

    loud: bool = False
