"""FedPC's messages and states, the server's checks of answers, and masks on ternaries.

Masked ternaries are whole numbers modulo 2^16 or more, with masks among the round's senders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.tree import Params, Tree, node
from ppbench.federation import secagg
from ppbench.federation.bounds import LARGEST_NUMBER, SMALLEST_POSITIVE, NonNegative, OpenFraction, UnitInterval
from ppbench.federation.contract import Context, Server
from ppbench.federation.plan import Layout, Plan
from ppbench.federation.secagg import PairedDefense, others_masks
from ppbench.federation.view import Exchange, View

# -- Ternary vectors of FedPC: a step as entries -1, 0, 1 (Cao et al. 2022, Eq. 4-5), and their encoding --

Packing = Literal["two_bits", "base3"]
PACKING_DIGITS: Mapping[Packing, tuple[int, int]] = {"two_bits": (4, 4), "base3": (3, 5)}
"""Base, and digits per byte. -1 is the highest digit; the two-bit code 10 is invalid."""


def first_ternary(step: Tensor, alpha: float | Tensor) -> Tensor:
    """Return int8 of the shape of `step` Q - P: 0 where |step| <= alpha, the learning rate, else its sign (Eq. 4)."""
    return torch.where(step.abs() <= alpha, 0, step.sign()).to(torch.int8)


def later_ternary(step: Tensor, previous: Tensor, beta: float) -> Tensor:
    """Return int8 of the shape of `step` Q^t - P^{t-1}: 0 below beta |previous|, else sign(step * previous) (Eq. 5).

    1 continues the global model's last step, `previous` = P^{t-1} - P^{t-2}; 0 where that is 0.
    """
    signs = step.sign() * previous.sign()  # a product of the values could underflow to 0
    return torch.where(step.abs() < beta * previous.abs(), 0, signs).to(torch.int8)


def pack_trits(trits: Tensor, packing: Packing) -> Tensor:
    """Return int8 [M] of -1, 0, 1 as digits of base 4 or 3, several a byte, the first one lowest: uint8."""
    base, size = PACKING_DIGITS[packing]
    digits = torch.nn.functional.pad(trits % base, (0, -len(trits) % size)).to(torch.uint8).view(-1, size)
    return (digits * _powers(base, size, trits.device)).sum(1, dtype=torch.uint8)


def unpack_trits(data: Tensor, count: int, packing: Packing) -> Tensor:
    """Return the `count` entries of `data`, int8: the inverse of `pack_trits` (ValueError: invalid bytes)."""
    base, size = PACKING_DIGITS[packing]
    length = -(-count // size)
    if data.dtype != torch.uint8 or data.shape != (length,):
        actual = f"{data.dtype} of shape {tuple(data.shape)}"
        raise ValueError(f"{count} entries take uint8 of shape ({length},), not {actual}")
    digits = (data[:, None] // _powers(base, size, data.device) % base).flatten()[:count]
    trits = (digits == 1).to(torch.int8) - (digits == base - 1).to(torch.int8)
    wrong = pack_trits(trits, packing) != data
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise ValueError(f"byte {place} is {int(data[place])}, with a digit that stands for nothing or padding not 0")
    return trits


def encoded(trits: Tensor, packing: Packing, padded: bool) -> Tensor:
    """Return int8 [M] as the bytes of a message, uint8; `padded` with zeros to the 4 M bytes of a float32 model."""
    packed = pack_trits(trits, packing)
    return torch.nn.functional.pad(packed, (0, 4 * len(trits) - len(packed))) if padded else packed


def decoded(data: Tensor, count: int, packing: Packing, padded: bool) -> Tensor:
    """Return the `count` entries of a message, int8: the inverse of `encoded` (ValueError: invalid bytes)."""
    if padded:
        length = -(-count // PACKING_DIGITS[packing][1])
        if data.shape != (4 * count,) or bool(data[length:].any()):
            raise ValueError(f"{count} entries are padded with zeros to {4 * count} bytes")
        data = data[:length]
    return unpack_trits(data, count, packing)


def _powers(base: int, size: int, device: torch.device) -> Tensor:
    return base ** torch.arange(size, dtype=torch.uint8, device=device)


SEND_MODEL, SEND_TERNARY = 1, 2


@node(name="ppbench.defenses.fedpc.messages.Cost")
class TrainingCost:
    """Client to server. value: float32 scalar, the mean loss of its trained model on all its examples (4 bytes)."""

    value: Tensor


@node
class Command:
    """Server to client: how to answer the round, SEND_MODEL or SEND_TERNARY (uint8 scalar).

    senders: [N] bool, the clients whose masks cancel in the sum; empty (no byte) without masks.
    """

    code: Tensor
    senders: Tensor


@node
class Weights:
    """The pilot to server. params: its trained model Q, float32."""

    params: Params


@node
class Ternary:
    """Any other client to server. packed: uint8, its ternary vector, followed by zeros if messages are padded."""

    packed: Tensor


@node
class Masked:
    """Any other client to server, with masks. words: [M] int16, int32 or int64, N_k T_k plus a mask."""

    words: Tensor


@node
class Trained:
    """A client's result. params: its trained model Q; cost: float32 scalar."""

    params: Params
    cost: Tensor


@node
class Worker:
    """A client's state: its secrets batch and epochs (int64 scalars) and rate (float32, a factor on the plan's).

    last, before: P^{t-1} and P^{t-2}; trained: its Q^t; `{}` if there is none yet. keys: `secagg.Keys`, or `()`.
    """

    batch: Tensor
    epochs: Tensor
    rate: Tensor
    last: Params
    before: Params
    trained: Params
    keys: Tree


@node
class Ledger:
    """The server's own state. before: P^{t-2}, `{}` in round 1; costs: [N] float32, last round; pilots: [t-1] int64."""

    before: Params
    costs: Tensor
    pilots: Tensor


# -- the server's checks of answers: a malformed one is a ProtocolError that names its client --------------------------
def cost_of(client: int, answer: Tree | None) -> Tensor:
    """Return the client's cost, a float32 scalar: finite and >= 0."""
    value: Tensor = _expected(client, answer, TrainingCost).value
    if value.dtype != torch.float32 or value.dim() or not bool(value.isfinite()) or bool(value < 0):
        raise ProtocolError(f"Client {client} told the cost {value.tolist()}, not one finite float32 number >= 0.")
    return value


def pilot_model(client: int, upload: Tree | None, like: Params) -> Params:
    """Return the pilot's model: names, shapes and dtypes of `like`, all values finite."""
    params: Params = _expected(client, upload, Weights).params
    forms, expected = ({n: (p.shape, p.dtype) for n, p in tree.items()} for tree in (params, like))
    if forms != expected:
        raise ProtocolError(f"Client {client} sent a model whose names, shapes or dtypes are not the global model's.")
    for name, value in params.items():
        if not bool(value.isfinite().all()):
            raise ProtocolError(f"Client {client} sent a model with values in {name!r} that are not finite.")
    return params


def ternary_of(client: int, upload: Tree | None, count: int, packing: Packing, padded: bool) -> Tensor:
    """Return the client's ternary vector, int8 [count]."""
    try:
        return decoded(_expected(client, upload, Ternary).packed, count, packing, padded)
    except ValueError as cause:
        raise ProtocolError(f"Client {client} sent a ternary vector that cannot be read: {cause}.") from cause


def masked_of(client: int, upload: Tree | None, count: int, words: torch.dtype) -> Tensor:
    """Return the client's masked ternary vector, [count] of the dtype `words`."""
    sent: Tensor = _expected(client, upload, Masked).words
    if (sent.dtype, sent.shape) != (words, (count,)):
        actual = f"{sent.dtype} of shape {tuple(sent.shape)}"
        raise ProtocolError(f"Client {client} sent masked ternaries as {actual}, not {words} of shape ({count},).")
    return sent


def _expected(client: int, upload: Tree | None, kind: type) -> Tree:
    if not isinstance(upload, kind):
        sent = "nothing" if upload is None else type(upload).__name__
        raise ProtocolError(f"Client {client} was asked for {kind.__name__} and sent {sent}.")
    return upload


TERNARY_MASKS = "ternary"  # of the masks' derivation: colluders derive theirs again under the same name


def word_dtype(counts: Tensor) -> torch.dtype:
    """Return the smallest of int16, int32, int64 that holds sum_k N_k T_k, which lies within +-sum(counts)."""
    total = int(counts.sum())
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if total <= torch.iinfo(dtype).max)


def mask_ternary(ctx: Context, keys: secagg.Keys, senders: Tensor, trits: Tensor) -> Tensor:
    """Return a client's N_k T_k plus its mask, words [M]; over all `senders` [N] bool masks sum to 0 modulo the word.

    ProtocolError: `senders` protects nothing, because this client is not in it, or nobody else is.
    """
    if senders.shape != keys.counts.shape or not bool(senders[ctx.party]) or int(senders.sum()) < 2:
        raise ProtocolError(f"The server asks client {ctx.party} to mask a ternary vector for itself alone.")
    mask = secagg.zero_sum(_among(keys, senders), ctx, TERNARY_MASKS, len(trits))
    return (int(keys.counts[ctx.party]) * trits.cpu().long() + mask).to(word_dtype(keys.counts))


def wrapped(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of masked words, int64, reduced to the range of `dtype`: the unmasked sum."""
    return total.to(dtype).long()


def unmasked_ternary(view: View, exchange: Exchange) -> Tensor | None:
    """Return one client's unmasked ternaries, int8 [M], by all other senders' keys; None if the view lacks some."""
    command: Command = exchange.request
    words, senders = exchange.answer.words, command.senders.nonzero()[:, 0].tolist()
    masks = others_masks(
        view, exchange, senders, lambda worker: _among(worker.keys, command.senders), TERNARY_MASKS, len(words)
    )
    if masks is None:
        return None
    vote = wrapped(words.cpu().long() + masks, words.dtype)  # N_k T_k
    return vote.sign().to(torch.int8)


def _among(keys: secagg.Keys, senders: Tensor) -> secagg.Keys:
    here = senders.to(keys.graph.device)
    return replace(keys, graph=keys.graph & here[:, None] & here[None])


# -- The public parameters of FedPC: their bounds, how they decode messages, and the federation of the paper --

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

    def fewest_batches(self, count: int, batch: int) -> int:
        """Return the fewest mini-batches that the menus allow a client."""
        return math.ceil(count / max(self.menu("batch_sizes")))

    def fewest_steps(self, count: int, batch: int, epochs: int) -> int:
        """Return the fewest local steps that the menus allow a client."""
        return int(min(self.menu("epochs"))) * self.fewest_batches(count, batch)

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
