"""Partitions over clients and the split into train and test: invariants over random labels, and bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.task.partition import DISTINCT, hold_out, partition, strata, three_way

KINDS = ("iid", "imbalanced", "dirichlet", "dirichlet:0.01", "dirichlet:100")
BALANCED = torch.arange(10).repeat(500)


@st.composite
def federations(draw: st.DrawFn) -> tuple[Tensor, int]:
    labels = draw(st.lists(st.integers(0, 5), min_size=1, max_size=120))
    return torch.tensor(labels), draw(st.integers(1, len(labels)))


def counts(shards: list[Tensor], labels: Tensor) -> Tensor:
    """Class counts [clients, classes]."""
    return torch.stack([labels[shard].bincount(minlength=int(labels.max()) + 1) for shard in shards])


def spread(table: Tensor) -> int:
    """Largest difference between clients in any column."""
    return int((table.max(0).values - table.min(0).values).max())


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(federation=federations(), seed=st.integers(0, 2**63 - 1))
def test_shards_are_a_partition_without_empty_clients(kind: str, federation: tuple[Tensor, int], seed: int) -> None:
    labels, clients = federation
    shards = partition(kind, labels, clients, seed)
    assert len(shards) == clients
    assert all(len(shard) > 0 and shard.dtype == torch.int64 for shard in shards)
    assert all((shard.diff() > 0).all() for shard in shards)
    assert torch.cat(shards).sort().values.tolist() == list(range(len(labels)))


@settings(deadline=None, max_examples=60)
@given(federation=federations(), seed=st.integers(0, 2**32))
def test_iid_sizes_and_class_counts_differ_by_at_most_one(federation: tuple[Tensor, int], seed: int) -> None:
    labels, clients = federation
    table = counts(partition("iid", labels, clients, seed), labels)
    assert spread(table) <= 1
    assert spread(table.sum(1, keepdim=True)) <= 1


def test_imbalanced_clients_are_class_balanced_and_of_different_sizes() -> None:
    table = counts(partition("imbalanced", BALANCED, 8, 1), BALANCED)
    assert spread(table.T) <= 1
    sizes = table.sum(1)
    assert len(sizes.unique()) == 8
    assert sizes.max() <= 3 * sizes.min() + 20  # U(.5, 1.5) bounds the ratio by 3, up to rounding


def test_dirichlet_concentration_orders_heterogeneity() -> None:
    def heterogeneity(alpha: str) -> float:
        shares = counts(partition(f"dirichlet:{alpha}", BALANCED, 10, 5), BALANCED) / 500
        return float(shares.square().sum(0).mean())  # 1 if one client holds a class alone, 1 / clients if equal

    single, middle, equal = heterogeneity("0.001"), heterogeneity("0.9"), heterogeneity("1e6")
    # E sum p^2 = (alpha + 1) / (K alpha + 1): .99, .19 and .1 for K = 10.
    assert single > 0.9
    assert 0.14 < middle < 0.26
    assert equal == pytest.approx(0.1, abs=1e-3)


def test_dirichlet_without_argument_is_the_papers() -> None:
    named, default = (partition(kind, BALANCED, 10, 0) for kind in ("dirichlet:0.9", "dirichlet"))
    assert all(torch.equal(one, other) for one, other in zip(named, default, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_partition_is_a_function_of_the_seed(kind: str) -> None:
    first, again, other = (partition(kind, BALANCED, 7, seed) for seed in (11, 11, 12))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_partition_does_not_touch_the_global_generators() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    partition("dirichlet", BALANCED, 7, 0)
    hold_out(BALANCED, 5, 0)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("kind", "clients", "words"),
    [
        ("idd", 2, "did you mean 'iid'"),
        ("iid:3", 2, "takes no argument"),
        ("dirichlet:x", 2, "'dirichlet:x'"),
        ("dirichlet:0", 2, "usable concentration"),
        ("dirichlet:-1", 2, "usable concentration"),
        ("dirichlet:nan", 2, "usable concentration"),
        ("dirichlet:inf", 2, "usable concentration"),
        ("iid", 0, "from 1 to 5000 clients"),
        ("dirichlet", 5001, "5000 training examples cannot be partitioned over 5001 clients"),
    ],
)
def test_bad_partitions_are_refused(kind: str, clients: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        partition(kind, BALANCED, clients, 0)


@settings(deadline=None, max_examples=100)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=100), parts=st.integers(2, 6), seed=st.integers(0, 99))
def test_hold_out_is_stratified(labels: list[int], parts: int, seed: int) -> None:
    y = torch.tensor(labels)
    train, test = hold_out(y, parts, seed)
    assert torch.cat([train, test]).sort().values.tolist() == list(range(len(y)))
    for c in y.unique():
        held, total = int((y[test] == c).sum()), int((y == c).sum())
        assert held < total
        assert held in (total // parts, total // parts + 1, total - 1)
    if (y.bincount()[y.unique()] > parts).all():
        assert len(test) == -(-len(y) // parts)


@settings(deadline=None, max_examples=100)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=100),
    shares=st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_three_parts_are_disjoint_and_stratified(labels: list[int], shares: tuple[int, int, int], seed: int) -> None:
    y, whole = torch.tensor(labels), sum(shares)
    parts = three_way(y, shares, seed)
    assert torch.cat(parts).sort().values.tolist() == list(range(len(y)))
    assert all((part.diff() > 0).all() for part in parts)
    for c in y.unique():
        n = int((y == c).sum())
        sizes = [int((y[part] == c).sum()) for part in parts]
        assert sizes[0] > 0
        assert sizes[2] in (n * shares[2] // whole, n * shares[2] // whole + 1, n - 1)
        assert abs(sizes[1] - n * shares[1] / whole) < 2
    if (y.bincount()[y.unique()] > whole).all():
        assert len(parts[2]) == -(-len(y) * shares[2] // whole)
    assert shares[1] > 0 or len(parts[1]) == 0


@pytest.mark.parametrize("shares", [(4, 0, 1), (8, 0, 2)])
def test_shares_without_validation_are_the_default_split(shares: tuple[int, int, int]) -> None:
    train, test = hold_out(BALANCED, 5, 3)
    kept, none, tested = three_way(BALANCED, shares, 3)
    assert torch.equal(kept, train) and torch.equal(tested, test) and len(none) == 0


def test_three_parts_depend_on_the_seed_alone() -> None:
    first, again, other = (three_way(BALANCED, (8, 1, 1), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert [len(part) for part in first] == [4000, 500, 500]


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), column=st.booleans())
def test_strata_are_values_or_deciles_and_monotone(values: list[float], column: bool) -> None:
    targets = torch.tensor(values)
    groups = strata(targets[:, None] if column else targets)
    assert groups.dtype == torch.int64 and groups.shape == (len(values),)
    order = targets.argsort()
    assert (groups[order].diff() >= 0).all()
    distinct = targets.unique()
    if len(distinct) <= DISTINCT:
        assert torch.equal(distinct[groups], targets)
    else:
        assert groups.min() >= 0 and groups.max() <= 9
        assert all(len(groups[targets == value].unique()) == 1 for value in distinct)


def test_strata_of_many_values_are_tenths() -> None:
    targets = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 7 - 3
    assert strata(targets).bincount().tolist() == [100] * 10
    assert strata(torch.arange(DISTINCT)).unique().tolist() == list(range(DISTINCT))
    assert strata(torch.arange(DISTINCT + 1)).max() == 9
    shards = partition("iid", strata(targets), 4, 0)
    assert max(targets[shard].mean() for shard in shards) - min(targets[shard].mean() for shard in shards) < 0.1
