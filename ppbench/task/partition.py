"""Partitions of examples over clients, and splits into train and test; functions of labels and seed."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.seeds import Seeds

PARTITIONS = ("iid", "imbalanced", "dirichlet", "domains")
DEFAULT_ALPHA = 0.9  # the SPN paper, Appendix C
ALPHAS = (1e-3, 1e6)  # outside this range a draw is one-hot or equal shares, and can overflow
DISTINCT = 20
"""Number of distinct targets up to which they are stratified by value, else by decile."""


def partition(kind: str, labels: Tensor, clients: int, seed: int, domain: Tensor | None = None) -> list[Tensor]:
    """Return the examples of each client, ascending int64 indices into the training set.

    The shards are disjoint, cover every example, and none is empty; they are a function of all arguments.

    Args:
        kind: "iid": every class is shuffled, the classes are laid end to end, and dealt round robin: the sizes of two
            shards, and their counts of any one class, differ by at most 1.
            "imbalanced": every class is cut by the same shares u / sum(u), u ~ U(0.5, 1.5): clients differ in size
            alone (FedPC paper, Section 4.1; the law of the shares is ours, the paper only excludes extremes).
            "dirichlet:ALPHA": every class is cut by shares of its own, symmetric Dirichlet of concentration ALPHA in
            [0.001, 1e6]; "dirichlet" alone is ALPHA = 0.9 (SPN paper, Appendix C).
            "domains": client c of N gets examples of the (c D // N)-th of the D domains only, "iid" among the clients
            of a domain (feature skew; BAFFLE paper, Table 3).
            A client without an example takes a random one from the client that has the most.
        labels: int64 [N], the class of each example, or the `strata` of its target.
        domain: int64 [N], the origin of each example, or None if unknown.

    Raises UsageError: unknown kind, bad ALPHA, no client, too many for the examples, or domains that do not fit.
    """
    name, _, argument = kind.partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, PARTITIONS)
    if argument and name != "dirichlet":
        raise UsageError(f"The partition {shown(kind)} takes no argument; write {name!r}.")
    if not 1 <= clients <= len(labels):
        raise UsageError(
            f"{len(labels)} training examples cannot be partitioned over {clients} clients; "
            f"choose from 1 to {len(labels)} clients."
        )
    if name == "domains":
        return _by_domain(labels, domain, clients, seed)
    shards = _by_class(name, argument, labels, clients, np.random.default_rng(Seeds(seed).seed("partition", name)))
    return [torch.from_numpy(np.sort(shard)).long() for shard in shards]


def _by_class(
    name: str, argument: str, labels: Tensor, clients: int, generator: np.random.Generator
) -> list[np.ndarray]:
    classes = [generator.permutation(np.flatnonzero(labels.numpy() == c)) for c in labels.unique().tolist()]
    if name == "iid":
        line = np.concatenate(classes)
        shards = [line[client::clients] for client in range(clients)]
    elif name == "imbalanced":
        raw = generator.uniform(0.5, 1.5, clients)
        shards = _cut(classes, [raw / raw.sum()] * len(classes))
    else:
        alpha = _concentration(argument)
        shards = _cut(classes, [generator.dirichlet(np.full(clients, alpha)) for _ in classes])
    _fill_empty(shards, generator)
    return shards


def _by_domain(labels: Tensor, domain: Tensor | None, clients: int, seed: int) -> list[Tensor]:
    domains = domain.unique().tolist() if domain is not None else []
    if domain is None or not len(domains) <= clients:
        problem = f"{len(domains)} domains and only {clients} clients" if domains else "no domains"
        raise UsageError(
            f"The partition 'domains' cannot be made: there are {problem}; take a data set with domains, such as "
            "imagefolder:FOLDER?domains, and at least as many clients as it has domains."
        )
    shards: list[Tensor] = []
    for number, name in enumerate(domains):
        members = (domain == name).nonzero()[:, 0]
        group = sum(client * len(domains) // clients == number for client in range(clients))
        if group > len(members):
            raise UsageError(
                f"Domain {name} has {len(members)} training examples, too few for its {group} of {clients} clients; "
                "choose fewer clients."
            )
        dealt = partition("iid", labels[members], group, Seeds(seed).seed("domain", name))
        shards += [members[shard] for shard in dealt]
    return shards


def strata(targets: Tensor) -> Tensor:
    """Return the group, int64 [N], of each finite target [N] or [N, 1], for `partition` and for splits.

    Up to `DISTINCT` distinct values are one group each, numbered from 0 in ascending order; of more, the groups are the
    tenths of the sorted values (0 to 9), with equal values in one group.
    """
    values = targets.reshape(-1).double().numpy()
    distinct, rank = np.unique(values, return_inverse=True)
    if len(distinct) > DISTINCT:
        edges = np.quantile(values, np.arange(1, 10) / 10)
        rank = np.searchsorted(edges, values, side="right")
    return torch.from_numpy(rank.astype(np.int64))


def mask_strata(masks: Tensor) -> Tensor:
    """Return the group, int64 [N], of each mask [N, 1, H, W] by its share of ones, for `partition` and for splits.

    0 is an empty mask; the others are the fifths of the sorted shares (1 to 5), with equal shares in one group.
    """
    shares = masks.flatten(1).mean(1, dtype=torch.float64).numpy()
    edges = np.quantile(shares[shares > 0], np.arange(1, 5) / 5) if (shares > 0).any() else []
    return torch.from_numpy(np.where(shares > 0, 1 + np.searchsorted(edges, shares, side="right"), 0).astype(np.int64))


def hold_out(labels: Tensor, parts: int, seed: int, taken: int = 1) -> tuple[Tensor, Tensor]:
    """Split a data set into a training part and a stratified test part of `taken` `parts`-ths.

    The test part has ceil(N taken / parts) examples, drawn by `seed`: floor(n_c taken / parts) of each class of n_c,
    and one more of the classes with the largest remainders; the last example of a class stays in the training part.
    Returns (train, test), ascending int64 indices.
    """
    common = math.gcd(taken, parts)
    parts, taken = parts // common, taken // common
    generator = Seeds(seed).generator("hold-out", *((parts,) if taken == 1 else (parts, taken)))
    members = [(labels == c).nonzero()[:, 0] for c in labels.unique().tolist()]
    quota = [len(member) * taken // parts for member in members]
    missing = -(-len(labels) * taken // parts) - sum(quota)
    for c in sorted(range(len(members)), key=lambda c: (-(len(members[c]) * taken % parts), c))[:missing]:
        quota[c] += 1
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for member, count in zip(members, quota, strict=True):
        order = torch.randperm(len(member), generator=generator)
        chosen[member[order[: min(count, len(member) - 1)]]] = True
    return (~chosen).nonzero()[:, 0], chosen.nonzero()[:, 0]


def three_way(labels: Tensor, shares: tuple[int, int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a data set into training, validation and test parts with sizes as `shares`, each stratified.

    The test part is `hold_out` of the whole, the validation part of the rest, so 4:0:1 is `hold_out` in fifths.
    """
    train, validation, test = shares
    rest, tested = hold_out(labels, sum(shares), seed, test)
    if validation == 0:
        return rest, rest[:0], tested
    kept, held_out = hold_out(labels[rest], train + validation, Seeds(seed).seed("validation"), validation)
    return rest[kept], rest[held_out], tested


def _concentration(argument: str) -> float:
    try:
        alpha = float(argument or DEFAULT_ALPHA)
    except ValueError:
        alpha = math.nan
    if not ALPHAS[0] <= alpha <= ALPHAS[1]:
        raise UsageError(
            f"The partition 'dirichlet:{argument}' has no usable concentration; write a number from {ALPHAS[0]:g} "
            f"to {ALPHAS[1]:g}, as in 'dirichlet:0.9'."
        )
    return alpha


def _cut(classes: list[np.ndarray], shares: list[np.ndarray]) -> list[np.ndarray]:
    """Cut every class (indices [n_c]) at its rounded cumulative shares [clients] and join the pieces by client."""
    pieces = []
    for members, share in zip(classes, shares, strict=True):
        ends = np.rint(np.cumsum(share)[:-1] * len(members)).astype(np.int64).clip(0, len(members))
        pieces.append(np.split(members, ends))
    return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


def _fill_empty(shards: list[np.ndarray], generator: np.random.Generator) -> None:
    for client, shard in enumerate(shards):
        if len(shard) == 0:
            largest = max(range(len(shards)), key=lambda other: len(shards[other]))
            index = int(generator.integers(len(shards[largest])))
            shards[client] = shards[largest][index : index + 1]
            shards[largest] = np.delete(shards[largest], index)
