"""Feature skew: domains in data sets, folders with domains, and the partition that deals clients to domains."""

from __future__ import annotations

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
from ppbench.task.dataset import Dataset, open_dataset
from ppbench.task.partition import partition

DOMAINS = ("art", "clipart", "product")


@st.composite
def federations(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Labels and domains, numbered with gaps, of at least as many examples a domain as clients in all."""
    names = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    clients = draw(st.integers(len(names), 9))
    domain = torch.tensor(names).repeat(draw(st.integers(clients, 20)))
    labels = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=len(domain), max_size=len(domain))))
    return labels, domain, clients


@settings(deadline=None, max_examples=60)
@given(federation=federations(), seed=st.integers(0, 2**32))
def test_clients_are_dealt_to_domains_in_equal_groups_iid_within(
    federation: tuple[Tensor, Tensor, int], seed: int
) -> None:
    labels, domain, clients = federation
    shards, names = partition("domains", labels, clients, seed, domain), domain.unique().tolist()
    assert torch.cat(shards).sort().values.tolist() == list(range(len(labels)))
    assert all(len(shard) > 0 and shard.dtype == torch.int64 and (shard.diff() > 0).all() for shard in shards)
    for client, shard in enumerate(shards):
        assert domain[shard].unique().tolist() == [names[client * len(names) // clients]]
    for name in names:
        own = [shard for shard in shards if domain[shard[0]] == name]
        assert abs(len(own) - clients / len(names)) < 1
        counts = torch.stack([labels[shard].bincount(minlength=5) for shard in own])
        assert int((counts.max(0).values - counts.min(0).values).max()) <= 1


def test_seeds_and_domains_make_different_draws() -> None:
    labels, domain = torch.arange(200) % 5, torch.arange(200) % 2
    first, again, other = (partition("domains", labels, 4, seed, domain) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0] // 2, first[2] // 2)  # the same places of both domains


@pytest.mark.parametrize(
    ("domain", "clients", "words"),
    [
        (None, 4, "there are no domains"),
        (torch.arange(40) % 5, 4, "5 domains and only 4 clients"),
        (torch.tensor([0] * 39 + [1]), 4, "Domain 1 has 1 training examples, too few for its 2 of 4 clients"),
    ],
)
def test_what_cannot_be_dealt_is_refused(domain: Tensor | None, clients: int, words: str) -> None:
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
def office(tmp_path: Path) -> Path:
    """Three domains with two classes of 10 images; "product" comes split, and lacks class "chair" in its test part."""
    for place, domain in enumerate(DOMAINS[:2]):
        for kind in ("bed", "chair"):
            fill(tmp_path / "office" / domain / kind, 10, 80 * place)
    for part, kind, count in (("train", "bed", 6), ("train", "chair", 6), ("test", "bed", 3)):
        fill(tmp_path / "office" / "product" / part / kind, count, 160)
    return tmp_path / "office"


def opened(folder: Path, query: str = "?domains", seed: int = 0) -> Dataset:
    return open_dataset(f"imagefolder:{folder}{query}", seed=seed)


def test_domains_are_read_from_folders(office: Path) -> None:
    data = opened(office)
    assert (data.name, data.classes, data.shape) == ("imagefolder:office?domains", 2, (1, 8, 8))
    for split, counts in ((data.train, [16, 16, 12]), (data.test, [4, 4, 3])):
        assert split.domain is not None and split.domain.dtype == torch.int64
        assert split.domain.bincount().tolist() == counts
        assert torch.equal(split.x.flatten(1).min(1).values // 80, split.domain)
    for domain in (0, 1):  # stratified within each domain
        assert data.test.y[data.test.domain == domain].bincount().tolist() == [2, 2]


def test_a_domain_is_read_as_a_folder_of_its_own_would_be(office: Path) -> None:
    data, alone = opened(office, seed=3), opened(office / "clipart", "", seed=3)
    assert alone.train.domain is None and alone.test.domain is None
    assert torch.equal(data.train.x[data.train.domain == 1], alone.train.x)
    assert torch.equal(data.test.y[data.test.domain == 1], alone.test.y)


def test_the_digest_knows_domains_and_is_as_before_without(office: Path) -> None:
    data = opened(office)
    assert data.train.domain is not None
    bare = replace(data, train=replace(data.train, domain=None), test=replace(data.test, domain=None))
    other = replace(data, train=replace(data.train, domain=data.train.domain.flip(0)))
    assert len({data.sha256(), bare.sha256(), other.sha256()}) == 3


def test_every_client_of_a_task_has_one_domain(office: Path) -> None:
    options = {"dataset": f"imagefolder:{office}?domains", "partition": "domains", "clients": 7, "model": "mlp"}
    task = make_task(configure(defense="none", **options))
    places = [int((shard.x.amin() * 255 + 0.5) // 80) for shard in task.shards.values()]
    assert places == [0, 0, 0, 1, 1, 2, 2]
    assert all(
        (shard.x.flatten(1).amin(1) * 255 // 79 == place).all()
        for place, shard in zip(places, task.shards.values(), strict=True)
    )
    fewer = make_task(configure(defense="none", **{**options, "train": 30}))
    assert sum(len(shard.x) for shard in fewer.shards.values()) == 30


def test_bad_folders_and_options_are_refused(office: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="option 'domain' is unknown"):
        opened(office, "?domain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="it must hold one a domain"):
        opened(tmp_path / "empty")
    fill(office / "real" / "bed", 2, 0, size=9)
    with pytest.raises(UsageError, match="resize all images to one size"):
        opened(office)
    with pytest.raises(UsageError, match="there are no domains"):
        make_task(configure(defense="none", partition="domains"))


@pytest.mark.parametrize("domain", [torch.zeros(16), torch.zeros(3, dtype=torch.int64), torch.full((16,), -1)])
def test_a_data_set_refuses_bad_domains(office: Path, domain: Tensor) -> None:
    data = opened(office / "art", "")
    with pytest.raises(UsageError, match="must be int64 >= 0, one an example"):
        replace(data, train=replace(data.train, domain=domain))
