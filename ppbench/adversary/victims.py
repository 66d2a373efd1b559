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
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import CURIOUS_CLIENT, TARGET, ThreatModel, threat_model
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import modality_from, modality_in

# -- Augmented copies of records: a fixed list, the same for target and reference models of LiRA (2022) --

SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0), (1, 1), (1, -1), (-1, 1), (-1, -1))
"""Shifts in rows down and columns to the right; each with and without mirroring."""
MOST_AUGMENTATIONS = 2 * len(SHIFTS)
"""Number of augmentations of an image, the image itself included."""


def augmentations(x: Tensor, count: int) -> Tensor:
    """Return up to `count` >= 1 augmentations [A, Q, *shape] of records x [Q, *shape], the records themselves first.

    Images [Q, C, H, W]: the image and its shifts by `SHIFTS`, each followed by its mirror image; the border is
    repeated. Other records are not augmented: A = 1. Raises UsageError for a count below 1.
    """
    if count < 1:
        raise UsageError(f"{count} augmentations were requested; expected 1 (the record itself) or more.")
    if not modality_from(x.shape[1:]).smooth:
        return x[None].clone()
    copies = []
    for down, right in SHIFTS[: (count + 1) // 2]:
        moved = shifted(x, down, right)
        copies += [moved, moved.flip(-1)]
    return torch.stack(copies[:count])


def shifted(x: Tensor, down: int, right: int) -> Tensor:
    """Return images x [..., H, W] moved by whole pixels, with the border repeated."""
    height, width = x.shape[-2:]
    rows = (torch.arange(height, device=x.device) - down).clamp(0, height - 1)
    columns = (torch.arange(width, device=x.device) - right).clamp(0, width - 1)
    return x[..., rows, :][..., columns]


def tensors_digest(*tensors: Tensor, about: str = "") -> str:
    """Return a hash, 16 hex digits, of tensors (values, types, shapes) and a text."""
    state = hashlib.sha256(about.encode())
    update_digest(state, *tensors)
    return state.hexdigest()[:16]


@dataclass(frozen=True)
class Victims:
    """Probes and the truth about them.

    data: the batch of `batch` images of every slot, curious clients' too.  units: groups of slots whose batches one
    observation mixes, in the order of the challenges.  own: curious clients' batches by probe, see `own_batches`.
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
        return _joined([self.data[slot] for slot in unit])


def probed_units(
    clients: Sequence[int],
    threat: ThreatModel,
    batches: int,
    sums: bool = False,
    roles: int = 1,
    first: int = 0,
) -> tuple[list[Slot], tuple[tuple[Slot, ...], ...]]:
    """Return the slots to probe and the units to attack, `batches` of them or a few more.

    Arguments as of `choose_victims`; no data are needed. UsageError: curious clients without others.
    """
    targeted = threat.colludes or (threat.acts and (sums or roles > 1))
    others = {client for client in clients if (client == TARGET if targeted else not threat.has(client))}
    cohort = (sums or not threat.sees_uploads) and not targeted
    per_probe = 1 if targeted or (roles > 1 and not cohort) else len(others)
    if not others or len(clients) < threat.fewest:
        raise UsageError(f"{threat} needs other clients to be curious about; use at least {threat.fewest} clients.")
    probes = range(first, first - (-batches // per_probe))
    slots = [Slot(p, c) for p in probes for c in clients]
    slots = slots[:batches] if not cohort and per_probe == len(clients) else slots
    if not cohort:
        return slots, tuple((slot,) for slot in slots if slot.client in others)
    return slots, tuple(tuple(s for s in slots if s.probe == p and s.client in others) for p in probes)


def choose_victims(
    shards: Mapping[int, Data],
    threat: ThreatModel | str,
    batch: int,
    count: int,
    seeds: Seeds,
    sums: bool = False,
    roles: int = 1,
    first: int = 0,
    skip: int | None = None,
) -> Victims:
    """Draw `count` victim images from the clients' own data, in batches, over as many probes as needed from `first` on.

    threat: a threat model or its name. One that sees uploads attacks clients in order. Curious clients attack whole
    cohorts, with the batches of all others as one unit; so does everybody where uploads can be read only as `sums`.
    With several `roles` (see `Victims.playing`), probes are whole cohorts with one unit per slot, so that each role has
    enough slots. Colluders attack client 0 alone; so does a server that acts where it sees sums or decides on roles.
    The draw depends only on (master seed, batch, client, probe). skip: examples of each client to pass over, in an
    order that does not depend on the batch size; draws whose skips differ enough share no victim.

    Raises:
        UsageError: a curious client without others, or a client has too few examples; no example is a victim twice.
    """
    available = sum(len(shard.x) for shard in shards.values())
    if count > available:  # checked before as many slots are made
        raise UsageError(f"{count:,} victims cannot be drawn from {available:,} examples; use fewer --victims.")
    threat = threat_model(threat)
    slots, units = probed_units(sorted(shards), threat, -(-count // batch), sums, roles, first)
    data = {s: _batch(shards[s.client], s, s.probe - first, batch, count, seeds, skip) for s in slots}
    return Victims(data, units, own_batches(threat, data), batch)


def own_batches(threat: ThreatModel, data: Mapping[Slot, Data]) -> tuple[tuple[int, Data], ...]:
    """Return the batches of the adversary's own clients by probe, several of one probe joined in the clients' order.

    Empty for a threat model that sees uploads: its own clients' batches are not used.
    """
    by_probe: dict[int, list[Data]] = {}
    for slot, batch in data.items():
        if threat.has(slot.client) and not threat.sees_uploads:
            by_probe.setdefault(slot.probe, []).append(batch)
    return tuple((probe, _joined(parts)) for probe, parts in by_probe.items())


def _joined(parts: Sequence[Data]) -> Data:
    """Return several batches as one."""
    if len(parts) == 1:
        return parts[0]
    return Data(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def _batch(shard: Data, slot: Slot, number: int, batch: int, count: int, seeds: Seeds, skip: int | None) -> Data:
    """Return the examples of a slot: batch `number` of its client."""
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


KEYED_AT_ONCE = 2**23
"""Numbers of which keys are made at a time, 64 MB."""


def input_keys(x: Tensor) -> Tensor:
    """Return [N] int64 that are equal for equal inputs x [N, *shape] float32, and else by a chance of 2^-64."""
    generator, keys, size = torch.Generator().manual_seed(0), list[Tensor](), x.shape[1:].numel()
    odd = torch.randint(-(2**62), 2**62, (size,), generator=generator) * 2 + 1
    for part in x.cpu().split(max(1, KEYED_AT_ONCE // max(size, 1))):
        bits = (part.flatten(1).float() + 0.0).contiguous().view(torch.int32).long()  # -0.0 and 0.0 are equal
        keys.append((bits * odd).sum(1))
    return torch.cat(keys) if keys else torch.zeros(0, dtype=torch.int64)


def are_among(x: Tensor, known: Tensor) -> Tensor:
    """Return [N] bool: which inputs x [N, *shape] stand in `known` [M, *shape] too, value by value."""
    return torch.isin(input_keys(x), input_keys(known))


def choose_candidates(
    shards: Mapping[int, Data], test: Data, count: int, seeds: Seeds, threat: ThreatModel = CURIOUS_CLIENT
) -> Candidates:
    """Draw up to `count` members (data of clients that are not curious) and as many others; halves are balanced.

    Where uploads are seen these are the clients that one curious client would ask about. Others are test records whose
    input no client has: a duplicate was trained on, whatever part it stands in.
    """
    curious = CURIOUS_CLIENT if threat.sees_uploads else threat
    others = [c for c in sorted(shards) if not curious.has(c)]
    if not others or len(shards) < curious.fewest:
        raise UsageError(f"Membership needs the records of other clients; use at least {curious.fewest} clients.")
    known, trained = _joined([shards[c] for c in others]), torch.cat([shard.x.cpu() for shard in shards.values()])
    places = draw_places(len(known.x), len(test.x), count, seeds, are_among(test.x, trained))
    if not len(places.outside):
        right = "hold others out, or leave questions about members out (--stage init, attacks by name)"
        raise UsageError(f"Membership needs two test examples that no client trains on, and there are fewer; {right}.")
    return places.candidates(known, test)


@dataclass(frozen=True)
class CandidatePlaces:
    """Which records become candidates: places of n members and of n others, and the order [2n] of both together."""

    inside: Tensor
    outside: Tensor
    order: Tensor

    def candidates(self, members: Data, others: Data) -> Candidates:
        """Return the records at these places as candidates, on the CPU."""
        x, y = members.x.cpu(), members.y.cpu()
        return _mixed(
            Data(x[self.inside], y[self.inside]), Data(others.x[self.outside], others.y[self.outside]), self.order
        )


def draw_places(members: int, others: int, count: int, seeds: Seeds, seen: Tensor | None = None) -> CandidatePlaces:
    """Draw up to `count` of so many members, an even number, and as many of so many others.

    seen: [others] bool, others that are passed over.
    """
    outside = torch.randperm(others, generator=seeds.generator("candidates", "other"))
    outside = outside if seen is None else outside[~seen[outside]]
    n = min(count, members, len(outside)) // 2 * 2
    return CandidatePlaces(
        inside=torch.randperm(members, generator=seeds.generator("candidates", "member"))[:n],
        outside=outside[:n],
        order=torch.randperm(2 * n, generator=seeds.generator("candidates", "order")),  # it must reveal nothing
    )


def beside(victims: Victims, test: Data, seeds: Seeds) -> Candidates:
    """Return the victims' records as members and as many `test` records as non-members, in balanced halves.

    Test records that are some victim's are passed over.
    """
    own = _joined([victims.truth(unit) for unit in victims.units])
    outside = torch.randperm(len(test.x), generator=seeds.generator("batch candidates", "other", victims.batch))
    outside = outside[~are_among(test.x, own.x)[outside]]
    n = min(len(own.x), len(outside))
    order = torch.randperm(2 * n, generator=seeds.generator("batch candidates", "order", victims.batch))
    others = Data(test.x[outside[:n]].cpu(), test.y[outside[:n]].cpu())
    return _mixed(Data(own.x[:n], own.y[:n]), others, order)


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


# -- Planted secrets: each canary that holds one, among other canaries that differ in the secret alone --

SECRET_FORMS = 256
"""Forms of a canary that an attack ranks, its own among them: an exposure is at most log2 of it, 8 bits."""


@dataclass(frozen=True, eq=False)
class PlantedSecret:
    """A canary among forms of it.

    index: its number among the candidates. forms: [V, *shape], which differ in the secret alone; all secrets are drawn
    alike, so that only training on the canary tells its own. labels: [V, C] targets. place: of the canary's own form.
    member: whether it was trained on.
    """

    index: int
    forms: Tensor
    labels: Tensor
    place: int
    member: bool

    def challenge(self) -> Challenge:
        """Return the challenge which form was planted."""
        return Challenge((), 1, x=self.forms.clone(), labels=self.labels.clone())


def planted_secrets(candidates: Candidates, plan: Plan, seeds: Seeds) -> list[PlantedSecret]:
    """Return the canaries among `candidates` that hold a secret, [] where the plan's kind of data has none."""
    modality, generator = modality_in(plan), seeds.generator("secrets")
    chosen = [i for i, family in enumerate(candidates.family) if family and family == modality.secret_family]
    planted = []
    for index in chosen:
        x = candidates.x[index]
        forms = modality.redrawn(x.expand(SECRET_FORMS, *x.shape), plan, generator).clone()
        place = int(torch.randint(SECRET_FORMS, (), generator=generator))
        forms[place] = x
        if bool((forms == x).all()):
            continue  # it holds no secret
        labels = forms if plan.next_token else candidates.labels[index].expand(SECRET_FORMS, -1)
        planted.append(PlantedSecret(index, forms, labels, place, bool(candidates.member[index])))
    return planted


def secrets_digest(planted: Sequence[PlantedSecret]) -> str:
    """Return the hash of all planted secrets with the truth, in order."""
    truth = [(secret.index, secret.place, secret.member) for secret in planted]
    return tensors_digest(*(secret.forms for secret in planted), about=str(truth))
