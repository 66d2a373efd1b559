"""Victims and their truth: batches for probes, and candidates for membership.

The truth stays with the harness; no View or Challenge reaches it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import update_digest
from ppbench.federation.plan import Data
from ppbench.federation.view import TARGET, acts, colludes
from ppbench.federation.wire import Slot


def tensors_digest(*tensors: Tensor, about: str = "") -> str:
    """Return a hash, 16 hex digits, of tensors (values, types, shapes) and a text."""
    state = hashlib.sha256(about.encode())
    update_digest(state, *tensors)
    return state.hexdigest()[:16]


@dataclass(frozen=True)
class Victims:
    """Probes and the truth about them.

    data: the batch of `batch` images of every slot, also of a client adversary.  units: groups of slots whose batches
    one observation mixes, in the order of the challenges.  own: a client adversary's batches by probe.
    """

    data: Mapping[Slot, Data]
    units: tuple[tuple[Slot, ...], ...]
    own: tuple[tuple[int, Data], ...]
    batch: int

    def playing(self, role: str, roles: Mapping[Slot, str], count: int) -> Victims:
        """Return the first units, of about `count` images, in which every slot has `role`; roles: by slot."""
        units = [unit for unit in self.units if all(roles.get(slot) == role for slot in unit)]
        return replace(self, units=tuple(units[: -(-count // self.batch)]))

    def challenges(self) -> list[Challenge]:
        """Return one challenge per unit, without labels."""
        return [Challenge(unit, self.batch) for unit in self.units]

    def queries(self, seeds: Seeds) -> tuple[Tensor, Tensor]:
        """Return all victim images [Q, *shape] in random order, and their owners [Q] in that order."""
        slots = [slot for unit in self.units for slot in unit]
        owners = torch.tensor([slot.client for slot in slots]).repeat_interleave(self.batch)
        order = torch.randperm(len(owners), generator=seeds.generator("queries", self.batch))
        return torch.cat([self.data[slot].x for slot in slots])[order], owners[order]

    def digest(self) -> str:
        """Return the hash of all victims with their slots, in order."""
        parts = [tensor for unit in self.units for slot in unit for tensor in (self.data[slot].x, self.data[slot].y)]
        return tensors_digest(*parts, about=str(self.units))

    def truth(self, unit: tuple[Slot, ...]) -> Data:
        """Return the true images [U * B, *shape] and labels of a unit."""
        return Data(torch.cat([self.data[s].x for s in unit]), torch.cat([self.data[s].y for s in unit]))


def probed_units(
    clients: Sequence[int],
    threat: str,
    batches: int,
    adversary: int = 0,
    sums: bool = False,
    roles: int = 1,
    first: int = 0,
) -> tuple[list[Slot], tuple[tuple[Slot, ...], ...]]:
    """Return the slots to probe and the units to attack, `batches` of them or a few more.

    Arguments as of `choose_victims`; no data are needed. UsageError: a curious client without others.
    """
    curious = threat.startswith("client/")
    colluding = colludes(threat) or (acts(threat) and (sums or roles > 1))
    cohort = curious or (sums and not colluding)
    per_probe = len(clients) - 1 if curious else 1 if colluding or (roles > 1 and not cohort) else len(clients)
    if per_probe == 0:
        raise UsageError("A curious client needs others to be curious about; use at least 2 clients.")
    probes = range(first, first - (-batches // per_probe))
    slots = [Slot(p, c) for p in probes for c in clients]
    slots = slots[:batches] if not cohort and per_probe == len(clients) else slots
    if not cohort:
        return slots, tuple((slot,) for slot in slots if not colluding or slot.client == TARGET)
    attacked = [s for s in slots if not curious or s.client != adversary]
    return slots, tuple(tuple(s for s in attacked if s.probe == p) for p in probes)


def choose_victims(
    shards: Mapping[int, Data],
    threat: str,
    batch: int,
    count: int,
    seeds: Seeds,
    adversary: int = 0,
    sums: bool = False,
    roles: int = 1,
    first: int = 0,
    skip: int | None = None,
) -> Victims:
    """Draw `count` victim images from the clients' own data, in batches, over as many probes as needed from `first` on.

    Server and eavesdropper: clients in order. A curious client (`adversary`): whole cohorts, with the batches of all
    others as one unit; whole cohorts too if uploads can be read only as `sums`. With several `roles` (see
    `Victims.playing`): probes of whole cohorts with one unit per slot, so that each role has enough slots. Collusion:
    likewise, with client 0 as the only victim of each probe; so too for an active server that sees sums or decides on
    roles. The draw depends only on (master seed, batch, client, probe). skip: examples of each client to pass over, in
    an order that does not depend on the batch size; draws whose skips differ enough share no victim.

    Raises:
        UsageError: a curious client without others, or a client has too few examples; no example is a victim twice.
    """
    available = sum(len(shard.x) for shard in shards.values())
    if count > available:  # checked before as many slots are made
        raise UsageError(f"{count:,} victims cannot be drawn from {available:,} examples; use fewer --victims.")
    slots, units = probed_units(sorted(shards), threat, -(-count // batch), adversary, sums, roles, first)
    data = {s: _batch(shards[s.client], s, s.probe - first, batch, count, seeds, skip) for s in slots}
    own_slots = [s for s in slots if s.client == adversary] if threat.startswith("client/") else []
    return Victims(data, units, tuple((s.probe, data[s]) for s in own_slots), batch)


def _batch(shard: Data, slot: Slot, number: int, batch: int, count: int, seeds: Seeds, skip: int | None) -> Data:
    """Return the examples of a slot: the batch number `place` of its client."""
    draws = ("victims", batch, slot.client) if skip is None else ("victims apart", slot.client)
    order, start = torch.randperm(len(shard.x), generator=seeds.generator(*draws)), (skip or 0) + number * batch
    pick = order[start : start + batch].to(shard.x.device)
    if len(pick) < batch:
        raise UsageError(
            f"Client {slot.client} has {len(order)} examples, fewer than the {start + batch} that "
            f"{count} victims in batches of {batch} need of it; use fewer --victims or another partition."
        )
    return Data(shard.x[pick].cpu(), shard.y[pick].cpu())


@dataclass(frozen=True)
class Candidates:
    """Membership candidates, as many members as non-members, in two halves; each half is attacked knowing the other.

    x, labels: the records [Q, *shape] and their targets [Q, C].  member: [Q] bool.  half: [Q] int64, 0 or 1: the
    challenge in which its membership is unknown.  family: in an audit "average" or a family of canaries.
    """

    x: Tensor
    labels: Tensor
    member: Tensor
    half: Tensor
    family: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return the hash of all candidates with their membership, in order."""
        return tensors_digest(self.x, self.labels, self.member, self.half, about=str(self.family))

    def challenge(self, unknown_half: int, references: References | None = None) -> Challenge:
        """Return the challenge about one half (0 or 1); the adversary knows the other half's membership."""
        known = torch.where(self.half == unknown_half, -1, self.member.to(torch.int64)).to(torch.int8)
        x, labels = self.x.clone(), self.labels.clone()
        return Challenge((), 1, x=x, labels=labels, known=known, references=references)


def choose_candidates(
    shards: Mapping[int, Data], test: Data, count: int, seeds: Seeds, adversary: int = 0
) -> Candidates:
    """Draw up to `count` members (data of all clients but the adversary) and as many test records; balanced halves."""
    others = [c for c in sorted(shards) if c != adversary]
    if not others:
        raise UsageError("Membership needs the records of other clients; use at least 2 clients.")
    x = torch.cat([shards[c].x for c in others]).cpu()
    y = torch.cat([shards[c].y for c in others]).cpu()
    n = min(count, len(x), len(test.x)) // 2 * 2
    order = torch.randperm(2 * n, generator=seeds.generator("candidates", "order"))  # the order must reveal nothing
    inside = torch.randperm(len(x), generator=seeds.generator("candidates", "member"))[:n]
    outside = torch.randperm(len(test.x), generator=seeds.generator("candidates", "other"))[:n]
    return _mixed(Data(x[inside], y[inside]), Data(test.x[outside], test.y[outside]), order)


def beside(victims: Victims, test: Data, seeds: Seeds) -> Candidates:
    """Return the victims' records as members and as many `test` records as non-members, in balanced halves."""
    parts = [victims.truth(unit) for unit in victims.units]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    n = min(len(x), len(test.x))
    order = torch.randperm(2 * n, generator=seeds.generator("batch candidates", "order", victims.batch))
    outside = torch.randperm(len(test.x), generator=seeds.generator("batch candidates", "other", victims.batch))[:n]
    return _mixed(Data(x[:n], y[:n]), Data(test.x[outside].cpu(), test.y[outside].cpu()), order)


def _mixed(members: Data, others: Data, order: Tensor) -> Candidates:
    """Return `members` and as many `others` as candidates in this `order`, in balanced halves."""
    n = len(members.x)
    side, member = torch.arange(n) % 2, torch.arange(2 * n) < n
    return Candidates(
        torch.cat([members.x, others.x])[order],
        torch.cat([members.y, others.y])[order],
        member[order],
        torch.cat([side, side])[order],
    )
