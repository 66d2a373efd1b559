"""Partitions over clients, also of domains that folders hold; the split into train and test; and bad input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.run.config import configure
from ppbench.run.task import make_task
from ppbench.task.dataset import Dataset
from ppbench.task.partition import DISTINCT, hold_out, partition, strata, three_way
from ppbench.task.user_data import open_dataset

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
@settings(max_examples=60)
@given(federation=federations(), seed=st.integers(0, 2**63 - 1))
def test_shards_are_a_partition_without_empty_clients(kind, federation, seed):
    labels, clients = federation
    shards = partition(kind, labels, clients, seed)
    assert len(shards) == clients
    assert all(len(shard) > 0 and shard.dtype == torch.int64 for shard in shards)
    assert all((shard.diff() > 0).all() for shard in shards)
    assert torch.cat(shards).sort().values.tolist() == list(range(len(labels)))


@settings(max_examples=60)
@given(federation=federations(), seed=st.integers(0, 2**32))
def test_iid_sizes_and_class_counts_differ_by_at_most_one(federation, seed):
    labels, clients = federation
    table = counts(partition("iid", labels, clients, seed), labels)
    assert spread(table) <= 1
    assert spread(table.sum(1, keepdim=True)) <= 1


def test_imbalanced_clients_are_class_balanced_and_of_different_sizes():
    table = counts(partition("imbalanced", BALANCED, 8, 1), BALANCED)
    assert spread(table.T) <= 1
    sizes = table.sum(1)
    assert len(sizes.unique()) > 4
    assert sizes.max() <= 3 * sizes.min() + 20  # U(.5, 1.5) bounds the ratio by 3, up to rounding


def test_dirichlet_concentration_orders_heterogeneity():
    def heterogeneity(alpha):
        shares = counts(partition(f"dirichlet:{alpha}", BALANCED, 10, 5), BALANCED) / 500
        return float(shares.square().sum(0).mean())  # 1 if one client holds a class alone, 1 / clients if equal

    single, middle, equal = heterogeneity("0.001"), heterogeneity("0.9"), heterogeneity("1e6")
    # E sum p^2 = (alpha + 1) / (K alpha + 1): .99, .19 and .1 for K = 10.
    assert single > 0.9
    assert 0.14 < middle < 0.26
    assert equal == pytest.approx(0.1, abs=1e-3)
    named, default = (partition(kind, BALANCED, 10, 0) for kind in ("dirichlet:0.9", "dirichlet"))  # the paper's
    assert all(map(torch.equal, named, default))


def test_domains_make_different_draws():
    labels, domain = torch.arange(200) % 5, torch.arange(200) % 2
    shards = partition("domains", labels, 4, 0, domain)
    assert not torch.equal(shards[0] // 2, shards[2] // 2)  # the same places of both domains


DRAWN = {kind: lambda seed, kind=kind: partition(kind, BALANCED, 7, seed) for kind in KINDS}
DRAWN["domains"] = lambda seed: partition("domains", BALANCED, 4, seed, torch.arange(5000) // 10 % 2)
DRAWN["three parts"] = lambda seed: three_way(BALANCED, (8, 1, 1), seed)
DRAWN["held out"] = lambda seed: hold_out(BALANCED, 5, seed)


@pytest.mark.parametrize("name", DRAWN)
def test_a_split_is_a_function_of_its_seed_and_moves_no_global_generator(name):
    before = torch.get_rng_state()
    first, again, other = (DRAWN[name](seed) for seed in (11, 11, 12))
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert any(not torch.equal(one, two) for one, two in zip(first, other, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


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
def test_bad_partitions_are_refused(kind, clients, words):
    with pytest.raises(UsageError, match=words):
        partition(kind, BALANCED, clients, 0)


@settings(max_examples=100)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=100), parts=st.integers(2, 6), seed=st.integers(0, 99))
def test_hold_out_is_stratified(labels, parts, seed):
    y = torch.tensor(labels)
    train, test = hold_out(y, parts, seed)
    assert torch.cat([train, test]).sort().values.tolist() == list(range(len(y)))
    for c in y.unique():
        kept, total = int((y[test] == c).sum()), int((y == c).sum())
        assert kept < total
        assert kept in (total // parts, total // parts + 1, total - 1)
    if (y.bincount()[y.unique()] > parts).all():
        assert len(test) == -(-len(y) // parts)


@settings(max_examples=100)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=100),
    shares=st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_three_parts_are_disjoint_and_stratified(labels, shares, seed):
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
def test_shares_without_validation_are_the_default_split(shares):
    train, test = hold_out(BALANCED, 5, 3)
    kept, none, tested = three_way(BALANCED, shares, 3)
    assert torch.equal(kept, train) and torch.equal(tested, test) and len(none) == 0
    assert [len(part) for part in three_way(BALANCED, (8, 1, 1), 3)] == [4000, 500, 500]


@settings(max_examples=60)
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200), column=st.booleans())
def test_strata_are_values_or_deciles_and_monotone(values, column):
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


def test_strata_of_many_values_are_tenths():
    targets = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 7 - 3
    assert strata(targets).bincount().tolist() == [100] * 10
    assert strata(torch.arange(DISTINCT)).unique().tolist() == list(range(DISTINCT))
    assert strata(torch.arange(DISTINCT + 1)).max() == 9
    shards = partition("iid", strata(targets), 4, 0)
    assert max(targets[shard].mean() for shard in shards) - min(targets[shard].mean() for shard in shards) < 0.1


# -- domains -----------------------------------------------------------------------------------------------------------
DOMAINS = ("art", "clipart", "product")


@st.composite
def domained(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Labels and domains, numbered with gaps, of at least as many examples a domain as clients in all."""
    names = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    clients = draw(st.integers(len(names), 9))
    domain = torch.tensor(names).repeat(draw(st.integers(clients, 20)))
    labels = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=len(domain), max_size=len(domain))))
    return labels, domain, clients


@settings(max_examples=60)
@given(federation=domained(), seed=st.integers(0, 2**32))
def test_clients_are_dealt_to_domains_in_equal_groups_iid_within(federation, seed):
    labels, domain, clients = federation
    shards, names = partition("domains", labels, clients, seed, domain), domain.unique().tolist()
    assert torch.cat(shards).sort().values.tolist() == list(range(len(labels)))
    assert all(len(shard) > 0 and shard.dtype == torch.int64 and (shard.diff() > 0).all() for shard in shards)
    for client, shard in enumerate(shards):
        assert domain[shard].unique().tolist() == [names[client * len(names) // clients]]
    for name in names:
        own = [shard for shard in shards if domain[shard[0]] == name]
        assert abs(len(own) - clients / len(names)) < 1
        assert spread(counts(own, labels)) <= 1


@pytest.mark.parametrize(
    ("domain", "clients", "words"),
    [
        (None, 4, "there are no domains"),
        (torch.arange(40) % 5, 4, "5 domains and only 4 clients"),
        (torch.tensor([0] * 39 + [1]), 4, "Domain 1 has 1 training examples, too few for its 2 of 4 clients"),
    ],
)
def test_what_cannot_be_dealt_is_refused(domain, clients, words):
    with pytest.raises(UsageError, match=words):
        partition("domains", torch.arange(40) % 5, clients, 0, domain)


# -- folders ---------------------------------------------------------------------------------------------------------
def fill(folder: Path, count: int, value: int, size: int = 8) -> None:
    """Write `count` images whose pixels are about `value`: an image tells its domain."""
    folder.mkdir(parents=True)
    noise = np.random.default_rng(value).integers(0, 8, (count, size, size), dtype=np.uint8)
    for i in range(count):
        Image.fromarray(noise[i] + value).save(folder / f"{i}.png")


@pytest.fixture
def office(tmp_path):
    """Three domains with two classes of 10 images; "product" comes split, and lacks class "chair" in its test part."""
    for place, domain in enumerate(DOMAINS[:2]):
        for kind in ("bed", "chair"):
            fill(tmp_path / "office" / domain / kind, 10, 80 * place)
    for part, kind, count in (("train", "bed", 6), ("train", "chair", 6), ("test", "bed", 3)):
        fill(tmp_path / "office" / "product" / part / kind, count, 160)
    return tmp_path / "office"


def opened(folder: Path, query: str = "?domains", seed: int = 0) -> Dataset:
    return open_dataset(f"imagefolder:{folder}{query}", seed=seed)


def test_domains_are_read_from_folders(office):
    data = opened(office)
    assert (data.name, data.classes, data.shape) == ("imagefolder:office?domains", 2, (1, 8, 8))
    for split, counts in ((data.train, [16, 16, 12]), (data.test, [4, 4, 3])):
        assert split.domain is not None and split.domain.dtype == torch.int64
        assert split.domain.bincount().tolist() == counts
        assert torch.equal(split.x.flatten(1).min(1).values // 80, split.domain)
    for domain in (0, 1):  # stratified within each domain
        assert data.test.y[data.test.domain == domain].bincount().tolist() == [2, 2]


def test_a_domain_is_read_as_a_folder_of_its_own_would_be(office):
    data, alone = opened(office, seed=3), opened(office / "clipart", "", seed=3)
    assert alone.train.domain is None and alone.test.domain is None
    assert torch.equal(data.train.x[data.train.domain == 1], alone.train.x)
    assert torch.equal(data.test.y[data.test.domain == 1], alone.test.y)


def test_the_digest_knows_domains_and_is_as_before_without(office):
    data = opened(office)
    assert data.train.domain is not None
    bare = replace(data, train=replace(data.train, domain=None), test=replace(data.test, domain=None))
    other = replace(data, train=replace(data.train, domain=data.train.domain.flip(0)))
    assert len({data.sha256(), bare.sha256(), other.sha256()}) == 3


def test_every_client_of_a_task_has_one_domain(office):
    options = {"dataset": f"imagefolder:{office}?domains", "partition": "domains", "clients": 7, "model": "mlp"}
    task = make_task(configure(defense="none", **options))
    places = [int((shard.x.amin() * 255 + 0.5) // 80) for shard in task.shards.values()]
    assert places == [0, 0, 0, 1, 1, 2, 2]
    for place, shard in zip(places, task.shards.values(), strict=True):
        assert (shard.x.flatten(1).amin(1) * 255 // 79 == place).all()
    fewer = make_task(configure(defense="none", **{**options, "train": 30}))
    assert sum(len(shard.x) for shard in fewer.shards.values()) == 30


def test_bad_folders_and_options_are_refused(office, tmp_path):
    with pytest.raises(UsageError, match="option 'domain' is unknown"):
        opened(office, "?domain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="it must hold one per domain"):
        opened(tmp_path / "empty")
    fill(office / "real" / "bed", 2, 0, size=9)
    with pytest.raises(UsageError, match="resize all images to one size"):
        opened(office)
    with pytest.raises(UsageError, match="there are no domains"):
        make_task(configure(defense="none", partition="domains"))


@pytest.mark.parametrize("domain", [torch.zeros(16), torch.zeros(3, dtype=torch.int64), torch.full((16,), -1)])
def test_a_data_set_refuses_bad_domains(office, domain):
    data = opened(office / "art", "")
    with pytest.raises(UsageError, match="must be int64 >= 0, one per example"):
        replace(data, train=replace(data.train, domain=domain))
