"""What every data set is: contents, copies, digests, and one clear sentence for whatever is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.task.dataset import Dataset, Split, default_root, open_dataset

Refused = Callable[..., None]


def small(**changes: Any) -> Dataset:
    split = Split(torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2), torch.arange(6) % 3, 3)
    whole = {"name": "s", "train": split, "test": split, "classes": 3, "shape": (1, 2, 2), "data_range": (0.0, 1.0)}
    return Dataset(**{**whole, "kind": "image", **changes})


def shares_nothing(taken: Tensor, source: Tensor) -> bool:
    """Whether `taken` has a storage of just its own size, apart from that of `source`."""
    own = taken.untyped_storage()
    return (
        own.nbytes() == taken.numel() * taken.element_size() and own.data_ptr() != source.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_take_copies_scales_and_encodes(dtype: torch.dtype) -> None:
    x, index = torch.arange(24).view(6, 1, 2, 2), torch.tensor([4, 1, 1])
    split = Split(x.to(dtype) if dtype == torch.uint8 else x / 255, torch.arange(6) % 3, 3)
    before = split.x.clone()
    data = split.take(index)
    assert data.x.dtype == data.y.dtype == torch.float32
    assert torch.equal(data.x, x[index] / 255)
    assert torch.equal(data.y, torch.eye(3)[split.y[index]])
    assert shares_nothing(data.x, split.x)
    assert shares_nothing(data.y, split.y)
    assert not shares_nothing(split.x[:3], split.x), "the planted view must be found"
    data.x.fill_(7)
    assert torch.equal(split.x, before)


def test_digest_sees_values_labels_and_shapes() -> None:
    digest = small().sha256()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert small(name="other").sha256() == digest
    split = small().train
    changed = split.x.clone()
    changed[5, 0, 1, 1] += 1
    assert small(train=replace(split, x=changed)).sha256() != digest
    assert small(test=replace(split, y=split.y.flip(0))).sha256() != digest
    tall = replace(split, x=split.x.view(6, 1, 1, 4))
    assert small(train=tall, test=tall, shape=(1, 1, 4)).sha256() != digest
    transposed = replace(split, x=split.x.transpose(2, 3))
    assert small(train=transposed).sha256() == small(train=replace(split, x=transposed.x.contiguous())).sha256()


def broken(part: str, **fields: Any) -> dict[str, Any]:
    return {part: replace(small().train, **fields)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (broken("train", y=torch.tensor([0, 1, 2, -1, 1, 2])), "Example 3 of the training part .* label -1"),
        (broken("test", y=torch.tensor([0, 1, 2, 0, 3, 2])), "Example 4 of the test part .* label 3; .* 0 to 2"),
        (broken("test", x=torch.zeros(0, 1, 2, 2), y=torch.zeros(0, dtype=torch.int64)), "no example in the test"),
        (broken("train", x=torch.full((6, 1, 2, 2), torch.nan)), "Example 0 .* not finite"),
        (broken("train", x=torch.full((6, 1, 2, 2), 1.5)), "not in the data range"),
        (broken("train", x=torch.zeros(6, 1, 2, 3)), r"shape \(6, 1, 2, 3\)"),
        (broken("train", x=torch.zeros(6, 1, 2, 2).double()), "float64"),
        (broken("train", y=torch.zeros(6)), "int64"),
        (broken("test", classes=4), "4 classes"),
        ({"classes": 1}, "1 classes"),
        ({"data_range": (-1.0, 1.0)}, "uint8"),
    ],
)
def test_what_is_no_data_set_is_refused(changes: dict[str, Any], words: str, refused: Refused) -> None:
    with pytest.raises(UsageError, match=words):
        small(**changes)


def fitted(**changes: Any) -> Dataset:
    """A small regression."""
    split = Split(torch.arange(24.0).view(6, 4), torch.tensor([[0.5], [-1.0], [2.0], [0.5], [3.0], [0.0]]), 1)
    whole = {"name": "r", "train": split, "test": split, "classes": 1, "shape": (4,), "data_range": (0.0, 23.0)}
    return Dataset(**{**whole, "kind": "tabular", "task": "regression", **changes})


def test_a_regression_gives_its_targets_as_copies() -> None:
    data = fitted()
    taken = data.train.take(torch.tensor([4, 1, 1]))
    assert taken.y.dtype == torch.float32 and taken.y.tolist() == [[3.0], [-1.0], [-1.0]]
    assert shares_nothing(taken.y, data.train.y) and shares_nothing(taken.x, data.train.x)
    assert data.train.strata.tolist() == [2, 0, 3, 2, 4, 1]
    assert torch.equal(small().train.strata, small().train.y)
    moved = replace(data.train, y=data.train.y + 1e-6)
    assert fitted(test=moved).sha256() != data.sha256()
    assert small().task == "classification"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": 2}, "2 classes; a regression must have 1"),
        ({"train": replace(fitted().train, y=torch.arange(6))}, "torch.int64 .*targets of a regression"),
        ({"test": replace(fitted().train, y=torch.zeros(6))}, r"float32 \(6,\); .* \[N, 1\]"),
        ({"test": replace(fitted().train, y=torch.zeros(6, 2))}, r"float32 \(6, 2\)"),
        ({"test": replace(fitted().train, y=torch.zeros(6, 1).double())}, "float64"),
        ({"train": replace(fitted().train, y=torch.tensor([0, 1, torch.inf, 0, 1, 2])[:, None])}, "Example 2 .* inf"),
        ({"train": replace(fitted().train, y=torch.tensor([torch.nan, 1, 0, 0, 1, 2])[:, None])}, "nan.* be finite"),
        ({"task": "classification"}, "1 classes"),
        ({"task": "classification", "classes": 2}, "int64 with one axis"),
    ],
)
def test_what_is_no_regression_is_refused(changes: dict[str, Any], words: str, refused: Refused) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        fitted(**changes)
    assert "\n" not in str(caught.value)


def test_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PPBENCH_DATA", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("PPBENCH_DATA")
    assert default_root() == Path.home() / ".cache" / "ppbench" / "data"


def test_unknown_names_and_paths_are_refused(tmp_path: Path, refused: Refused) -> None:
    refused("digit", "'digit'", "did you mean 'digits'")
    refused("digits:8", "takes no argument")
    for name in ("parquet", "imagefolder", "csv"):
        refused(name, f"'{name}:PATH'")
        refused(f"{name}:{tmp_path}/nowhere", str(tmp_path / "nowhere"))


def test_a_plugin_must_return_a_dataset(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setattr("ppbench.task.embedded.digits", lambda argument, *, seed, root: {"x": 1})
    refused("digits", "returned dict")


# -- digits ----------------------------------------------------------------------------------------------------------


def test_digits(tmp_path: Path) -> None:
    data = open_dataset("digits", seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (1437, 360, 10, (1, 8, 8))
    values = data.train.x.unique()
    assert torch.equal(values * 16, torch.arange(17.0))
    counts = data.train.y.bincount(), data.test.y.bincount()
    assert ((counts[1] / (counts[0] + counts[1]) - 0.2).abs() < 0.01).all()
    # The split belongs to the name: no seed, machine or version of torch may move it.
    assert data.sha256()[:16] == "a96553e79b82a1e8"
    assert open_dataset("digits", seed=1, root=tmp_path).sha256() == data.sha256()
    rows = {row.numpy().tobytes() for row in data.train.x}
    assert sum(row.numpy().tobytes() in rows for row in data.test.x) == 0
