"""Warped images: a function of the seed, all of its bits; labels and split stay; records of them are checked again."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppbench.claims.case import data_of
from ppbench.records.sources import code_of
from ppbench.records.store import Store
from ppbench.run import task
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.sweep import local_dataset
from ppbench.run.task import describe, make_task
from ppbench.task import warped
from ppbench.task.user_data import open_dataset, plugins_of
from ppbench.task.warped import WARP_NUMBERS, Bend, bent
from ppbench.verification import recheck as rechecking
from ppbench.verification import verify

SEEDS = st.integers(0, 2**63 - 1)
SHARES = st.lists(st.floats(-1, 1), min_size=WARP_NUMBERS, max_size=WARP_NUMBERS)


def bend(*numbers: float, grain: float = 0.0, shape: tuple[int, ...] = (1, 8, 8)) -> Bend:
    padded = [*numbers, *[0.0] * (WARP_NUMBERS - len(numbers))]
    return Bend(torch.tensor([padded], dtype=torch.float64), torch.full((1, *shape), grain, dtype=torch.float64))


@pytest.fixture(scope="module")
def plain():
    return open_dataset("digits", seed=0)


@pytest.fixture(scope="module")
def ours():
    return open_dataset("warped:digits", seed=0)


def test_only_images_change(plain, ours):
    assert (ours.name, ours.shape, ours.classes, ours.kind) == ("warped:digits", (1, 8, 8), 10, "")
    for part in ("train", "test"):
        one, other = getattr(plain, part), getattr(ours, part)
        assert torch.equal(one.y, other.y) and one.x.shape == other.x.shape and other.x.dtype == torch.float32
        assert not (one.x == other.x).flatten(1).all(1).any()
        assert torch.equal(other.x, (other.x * 255).round() / 255)
    assert open_dataset("digits", seed=0).sha256() == plain.sha256()


def test_the_same_on_every_machine(ours):
    """Rounded from double precision, drawn by a hash: so another processor, or another torch, gives these bytes."""
    assert ours.sha256()[:32] == "ab121f714118755a77235827ebb212a8"


def test_no_original_is_near(plain, ours):
    """An original is about as far from what was made of it as from the nearest other original."""
    x, known = (torch.cat([d.train.x, d.test.x]).flatten(1).double() for d in (ours, plain))
    nearest = -10 * (torch.cdist(x, known).square() / 64).min(1).values.log10()
    among = (torch.cdist(known, known).square() / 64).fill_diagonal_(9).min(1).values
    assert nearest.median() < 19 and nearest.max() < 30
    assert nearest.median() < -10 * among.log10().median() + 1


@settings(max_examples=12)
@given(seed=SEEDS, high=st.integers(1, 30))
def test_every_bit_of_the_seed_counts(seed, high):
    """High ones too, of which torch's own generators know nothing: with 32 bits all could be tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warped, "STRETCH", 1)
        one = open_dataset("warped:somebodys:arrays", seed=seed)
        same = open_dataset("warped:somebodys:arrays", seed=seed)
        other = open_dataset("warped:somebodys:arrays", seed=seed ^ (1 << 32 + high))
    assert one.sha256() == same.sha256() and one.train.x.dtype == torch.uint8
    assert not (one.train.x == other.train.x).flatten(1).all(1).any()


def test_images_are_drawn_one_by_one(ours, monkeypatch):
    monkeypatch.setattr(warped, "PIXELS_AT_ONCE", 7 * 64)
    assert open_dataset("warped:digits", seed=0).sha256() == ours.sha256()


def test_nothing_drawn_changes_nothing():
    x = torch.rand(1, 3, 6, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(bent(x, bend(shape=(3, 6, 9))), x.double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("turn", [-1.0, 0.5])
def test_a_turn_is_scipys(turn):
    x = torch.rand(1, 1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = np.cos(warped.TURN * turn), np.sin(warped.TURN * turn)
    to = np.array([[cos, sin], [-sin, cos]])
    expected = scipy.ndimage.affine_transform(x[0, 0].numpy(), to, [4, 4] - to @ [4, 4], order=1, mode="nearest")
    result = bent(x, bend(turn, shape=(1, 9, 9)))[0, 0]
    torch.testing.assert_close(result, torch.tensor(expected), rtol=0, atol=1e-6)


def test_a_shift_is_a_share_of_the_side():
    ramp = torch.arange(50.0)[None, None, None].expand(1, 1, 50, 50) / 100
    moved = bent(ramp, bend(0, 0, 0, 0, 0.5, 1, shape=(1, 50, 50)))  # half of SHIFT to the right, and down
    torch.testing.assert_close(moved[..., 5:40] - ramp[..., 5:40], torch.full((1, 1, 50, 35), 0.01).double())
    bulged = bent(ramp, bend(*[0] * 8, *[1] * 9, shape=(1, 50, 50)))  # all knots the same way
    torch.testing.assert_close(bulged[..., 5:40] - ramp[..., 5:40], torch.full((1, 1, 50, 35), 0.015).double())


@settings(max_examples=30)
@given(numbers=SHARES, level=st.floats(0, 1), grain=st.floats(-1, 1))
def test_a_plain_image_stays_plain_and_within_the_bounds(numbers, level, grain):
    out = bent(torch.full((1, 1, 8, 8), level), bend(*numbers, grain=grain))
    most = 0.5 * (torch.tensor(warped.CONTRAST).exp() - 1) + warped.BRIGHTER + warped.GRAIN
    assert (out - level).abs().max() <= most + 1e-6 and out.amax() - out.amin() < 1e-6


def test_what_cannot_be_warped_is_refused(refused, tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(20)))
    refused(f"warped:csv:{tmp_path}/a.csv", "a table", "only images with classes")
    refused("warped:shapes", "images with masks", "only images with classes")
    for text in ("warped", "warped:", "warped:warped:digits"):
        refused(text, "needs another one", "'warped:digits'")
    refused("warped:parquet:/nowhere", "'parquet:/nowhere'", "does not exist")
    refused("warped:digit", "did you mean 'digits'")


def test_records_know_both_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("PPBENCH_DATA", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    assert local_dataset("warped:digits") == "warped:digits"
    assert local_dataset("warped:parquet:cifar10") == f"warped:parquet:{tmp_path}/cifar10"
    assert (
        local_dataset("warped:parquet:cifar")
        is local_dataset("warped:somebodys:arrays")
        is local_dataset("warped:" * 9999)
        is None
    )
    assert plugins_of("warped:parquet:F") == ("warped", "parquet") and plugins_of("parquet:warped") == ("parquet",)
    config = configure(defense="none", dataset="warped:somebodys:arrays", model="mlp", clients=2)
    about, _, _ = describe(make_task(config), config)
    assert about.name == "warped:somebodys:arrays"
    assert about.code == code_of(("datasets", "somebodys:arrays")) != ""


def test_no_paper_used_them():
    names = ("digits", "parquet:mnist", "warped:digits", "warped:parquet:mnist")
    configs = [SimpleNamespace(data=SimpleNamespace(name=name)) for name in names]
    assert [data_of(c) for c in configs] == ["digits", "mnist", "warped:digits", "warped:parquet:mnist"]


def test_an_evaluation_of_them_is_checked_again(tmp_path, monkeypatch):
    """With a secret: its victims are found again by who has it, and are others without."""
    options = {"defense": "none", "dataset": "warped:digits", "model": "mlp", "clients": 2, "rounds": 1, "train": 40}
    more = {"victims": 2, "attack_batch": (1,), "stages": ("init",), "attacks": ("label_recovery",), "tuning": 0}
    salted = {"salt": "ab" * 32}
    plain, secret = (make_task(configure(**options, **some)).dataset for some in ({}, salted))
    assert plain.sha256() != secret.sha256() and torch.equal(plain.train.y, secret.train.y)
    evaluation = evaluate(**options, **more, out=tmp_path / "out", workers=1)
    assert {r.config.data.name for r in evaluation.records} == {"warped:digits"} and verify(evaluation.out) == []
    checked = rechecking.recheck(Store(evaluation.out), evaluation.records)
    assert not checked.problems and not [what for what in checked.unchecked if "at hand)" in what and "victims" in what]
    monkeypatch.setattr(warped, "TURN", warped.TURN / 2)  # other images than those of the records
    for cache in (rechecking.task_of_cell, task.task_of, task._dataset):
        cache.cache_clear()
    assert any(
        "digest" in problem for problem in rechecking.recheck(Store(evaluation.out), evaluation.records).problems
    )
