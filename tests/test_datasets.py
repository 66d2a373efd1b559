"""Data sets by name: contents, splits, copies, digests, caches, and one clear sentence for whatever is unusable."""

from __future__ import annotations

import gzip
import io
import os
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.base.vision import torchvision
from ppbench.task import parquet
from ppbench.task.dataset import Dataset, Split, default_root, open_dataset
from ppbench.task.partition import hold_out, strata, three_way

DATA = Path(os.environ.get("PPBENCH_TEST_DATA", ""))
needs_data = pytest.mark.skipif(
    not os.environ.get("PPBENCH_TEST_DATA") or not DATA.is_dir(),
    reason="PPBENCH_TEST_DATA does not name a folder with cifar10/, mnist/ and bank-marketing.csv.gz",
)


def refused(text: str, root: Path, *words: str) -> None:
    """Assert that opening `text` fails with one line that contains all `words`."""
    with pytest.raises(UsageError) as caught:
        open_dataset(text, seed=0, root=root)
    message = str(caught.value)
    assert "\n" not in message
    assert message[-1] in ".?"
    for word in words:
        assert word in message


def pictures(count: int, size: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *size), dtype=np.uint8)


def encoded(array: np.ndarray, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind)
    return buffer.getvalue()


def write_parquet(path: Path, images: Any, labels: Any, column: str = "image", label: str = "label") -> Path:
    cells = [
        {"bytes": encoded(image) if isinstance(image, np.ndarray) else image, "path": f"{row}.png"}
        for row, image in enumerate(images)
    ]
    layout = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({column: pa.array(cells, layout), label: pa.array(labels, pa.int64())}), path)
    return path


def write_idx(folder: Path, part: str, images: np.ndarray, labels: np.ndarray) -> None:
    """Write images [N, 28, 28] and labels [N] as MNIST's own files."""
    folder.mkdir(parents=True, exist_ok=True)
    head = struct.pack(">HBB3I", 0, 8, 3, *images.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
    head = struct.pack(">HBBI", 0, 8, 1, len(labels))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.astype(np.uint8).tobytes())


# -- the data set itself ---------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("index", [torch.tensor([4, 1, 1]), torch.arange(6), torch.tensor([0])])
def test_take_copies_scales_and_encodes(dtype: torch.dtype, index: Tensor) -> None:
    x = torch.arange(24).view(6, 1, 2, 2)
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
def test_what_is_no_data_set_is_refused(changes: dict[str, Any], words: str) -> None:
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
def test_what_is_no_regression_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        fitted(**changes)
    assert "\n" not in str(caught.value)


def test_a_class_that_only_the_test_part_has_is_accepted() -> None:
    train = replace(small().train, y=torch.tensor([0, 1, 0, 1, 0, 1]))
    assert small(train=train).classes == 3


def test_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PPBENCH_DATA", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("PPBENCH_DATA")
    assert default_root() == Path.home() / ".cache" / "ppbench" / "data"


def test_unknown_names_and_paths_are_refused(tmp_path: Path) -> None:
    refused("digit", tmp_path, "'digit'", "did you mean 'digits'")
    refused("digits:8", tmp_path, "takes no argument")
    for name in ("parquet", "imagefolder", "csv"):
        refused(name, tmp_path, f"'{name}:PATH'")
        refused(f"{name}:{tmp_path}/nowhere", tmp_path, str(tmp_path / "nowhere"))


def test_a_plugin_must_return_a_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ppbench.task.embedded.digits", lambda argument, *, seed, root: {"x": 1})
    refused("digits", tmp_path, "returned dict")


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


# -- torchvision's ---------------------------------------------------------------------------------------------------


def no_network(*args: Any, **kwargs: Any) -> None:
    raise URLError("Name or service not known")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = torchvision().datasets
    monkeypatch.setattr(datasets.mnist, "download_and_extract_archive", no_network)
    monkeypatch.setattr(datasets.cifar, "download_and_extract_archive", no_network)
    monkeypatch.setattr(datasets.svhn, "download_url", no_network)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("name", "folder", "file"),
    [
        ("mnist", "MNIST/raw", "t10k-labels-idx1-ubyte.gz"),
        ("fashion_mnist", "FashionMNIST/raw", "train-images-idx3-ubyte.gz"),
        ("cifar10", ".", "cifar-10-python.tar.gz"),
        ("cifar100", ".", "cifar-100-python.tar.gz"),
        ("svhn", ".", "test_32x32.mat"),
    ],
)
def test_without_network_the_folder_and_files_are_named(tmp_path: Path, name: str, folder: str, file: str) -> None:
    refused(name, tmp_path, str(tmp_path / folder), file, "Name or service not known", "PPBENCH_DATA")
    refused(f"{name}:x", tmp_path, "takes no argument")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_files_in_place_need_no_network_and_equal_parquet(tmp_path: Path, name: str, folder: str) -> None:
    images, labels = pictures(30, (28, 28)), np.arange(30) % 10
    for part, other, rows in (("train", "train", slice(0, 20)), ("t10k", "test", slice(20, 30))):
        write_idx(tmp_path / folder / "raw", part, images[rows], labels[rows])
        write_parquet(tmp_path / f"{other}.parquet", images[rows], labels[rows])
    data = open_dataset(name, seed=0, root=tmp_path)
    assert data.shape == (1, 32, 32)
    assert torch.equal(data.train.x[:, 0, 2:30, 2:30], torch.from_numpy(images[:20]))
    assert data.train.x.sum() == images[:20].sum(dtype=np.int64), "the border must be black"
    assert data.test.y.tolist() == labels[20:].tolist()
    assert open_dataset(f"parquet:{tmp_path}", seed=0, root=tmp_path).sha256() == data.sha256()


@pytest.mark.usefixtures("offline")
def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    for part in ("train", "t10k"):
        write_idx(tmp_path / "MNIST" / "raw", part, pictures(4, (28, 28)), np.arange(4))
    broken_file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    broken_file.write_bytes(broken_file.read_bytes()[:-100])
    refused("mnist", tmp_path, "MNIST/raw", "damaged")


@pytest.mark.parametrize(("name", "factory"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100"), ("svhn", "SVHN")])
def test_color_sets_come_channels_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, factory: str
) -> None:
    images = pictures(4, (32, 32, 3))

    def made(root: str, download: bool, train: bool | None = None, split: str | None = None) -> SimpleNamespace:
        assert (root, download) == (str(tmp_path), True)
        print("Files already downloaded and verified")
        rows = slice(0, 3) if train or split == "train" else slice(3, 4)
        if name == "svhn":
            assert train is None
            return SimpleNamespace(data=images[rows].transpose(0, 3, 1, 2), labels=np.arange(4)[rows])
        return SimpleNamespace(data=images[rows], targets=[0, 1, 2, 3][rows])

    monkeypatch.setattr(torchvision().datasets, factory, made)
    data = open_dataset(name, seed=0, root=tmp_path)
    assert (data.classes, data.shape) == (100 if name == "cifar100" else 10, (3, 32, 32))
    assert torch.equal(data.train.x, torch.from_numpy(images[:3]).permute(0, 3, 1, 2))
    assert data.test.y.tolist() == [3]
    assert capsys.readouterr().out == ""


# -- parquet ---------------------------------------------------------------------------------------------------------


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    images = pictures(9, (8, 8, 3))
    write_parquet(tmp_path / "train-00001-of-00002.parquet", images[3:6], [0, 1, 2], "img", "fine_label")
    write_parquet(tmp_path / "train-00000-of-00002.parquet", images[:3], [2, 1, 0], "img", "fine_label")
    write_parquet(tmp_path / "test-00000-of-00001.parquet", images[6:], [3, 1, 1], "img", "fine_label")
    data = open_dataset(f"parquet:{tmp_path}", seed=0, root=tmp_path)
    assert data.name == f"parquet:{tmp_path.name}"
    assert (data.classes, data.shape) == (4, (3, 8, 8))
    assert torch.equal(data.train.x, torch.from_numpy(images[:6]).permute(0, 3, 1, 2))
    assert data.train.y.tolist() == [2, 1, 0, 0, 1, 2]
    assert data.test.y.tolist() == [3, 1, 1]


def test_one_parquet_file_is_split_by_the_seed(tmp_path: Path) -> None:
    images, labels = pictures(50, (8, 8)), np.arange(50) % 5
    path = write_parquet(tmp_path / "all.parquet", images, labels)
    data, again, other = (open_dataset(f"parquet:{path}", seed=seed, root=tmp_path) for seed in (0, 0, 1))
    assert (len(data.train), len(data.test), data.shape) == (40, 10, (1, 8, 8))
    assert data.test.y.bincount().tolist() == [2] * 5
    assert data.sha256() == again.sha256() != other.sha256()


def test_the_label_column_among_several_integers(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pictures(10, (8, 8)), [0, 1] * 5)
    table = pq.read_table(path).append_column("coarse", pa.array(range(10)))
    pq.write_table(table, path)
    assert open_dataset(f"parquet:{path}", seed=0, root=tmp_path).classes == 2
    pq.write_table(table.rename_columns(["image", "fine", "coarse"]), path)
    refused(f"parquet:{path}", tmp_path, "fine (int64), coarse (int64)", "'label'")


def test_jpeg_and_mixed_modes(tmp_path: Path) -> None:
    grey, color = pictures(5, (8, 8)), pictures(5, (8, 8, 3))
    path = write_parquet(tmp_path / "a.parquet", [*grey, *color], [0, 1] * 5)
    data = open_dataset(f"parquet:{path}", seed=0, root=tmp_path)
    assert data.shape == (3, 8, 8)
    grey_as_color = torch.from_numpy(grey[0]).expand(3, 8, 8)
    assert sum(torch.equal(row, grey_as_color) for row in torch.cat([data.train.x, data.test.x])) == 1
    flat = [encoded(np.full((8, 8, 3), 10 * row, np.uint8), "JPEG") for row in range(10)]
    data = open_dataset(f"parquet:{write_parquet(path, flat, [0, 1] * 5)}", seed=0, root=tmp_path)
    assert sorted(int(row.float().mean().round()) for row in torch.cat([data.train.x, data.test.x])) == list(
        range(0, 100, 10)
    )


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        ([*pictures(3, (8, 8)), *pictures(1, (9, 8))], [0, 1, 0, 1], ("8x9", "8x8", "row 3 of")),
        ([*pictures(3, (8, 8)), b"no image"], [0, 1, 0, 1], ("row 3 of", "cannot be decoded")),
        ([*pictures(3, (8, 8)), encoded(pictures(1, (8, 8))[0])[:60]], [0, 1, 0, 1], ("row 3 of", "cannot be decoded")),
        ([*pictures(3, (8, 8)), None], [0, 1, 0, 1], ("row 3 of", "no image bytes")),
        ([*pictures(3, (8, 8)), encoded(pictures(1, (8, 8))[0].astype(np.uint16))], [0, 1, 0, 1], ("row 3", "I;16")),
        ([*pictures(4, (8, 8))], [0, 1, -1, 1], ("Row 2 of", "label -1")),
        ([*pictures(4, (8, 8))], [0, 1, None, 1], ("Row 2 of", "label None")),
        ([*pictures(4, (8, 8))], [0, 1, 10**12, 1], ("Row 2 of", "label 1000000000000")),
        ([*pictures(4, (8, 8))], [0, 0, 0, 0], ("1 classes",)),
        ([], [], ("no rows",)),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, images: list[Any], labels: list[Any], words: tuple[str, ...]) -> None:
    path = write_parquet(tmp_path / "bad.parquet", images, labels)
    refused(f"parquet:{path}", tmp_path, str(path) if words != ("1 classes",) else "bad.parquet", *words)


def test_bad_parquet_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    refused(f"parquet:{tmp_path}/train.parquet", tmp_path, "train.parquet cannot be read")
    refused(f"parquet:{tmp_path}", tmp_path, "no file test*.parquet")
    pq.write_table(pa.table({"image": ["a"], "label": [0]}), tmp_path / "train.parquet")
    refused(f"parquet:{tmp_path}/train.parquet", tmp_path, "image (string), label (int64)", "'bytes'")
    write_parquet(tmp_path / "train.parquet", pictures(2, (8, 8)), [0, 1])
    write_parquet(tmp_path / "test.parquet", pictures(2, (8, 4)), [0, 1])
    refused(f"parquet:{tmp_path}", tmp_path, "4x8", "8x8", "test.parquet", "train.parquet")


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Callable[[], Dataset], list[int]]:
    """A parquet file, how to open it with a cache, and the count of images that were decoded."""
    monkeypatch.setattr(parquet, "_SLOW", -1.0)
    decoded: list[int] = []
    original = parquet.decode

    def counting(source: Any, where: str) -> Any:
        decoded.append(1)
        return original(source, where)

    monkeypatch.setattr(parquet, "decode", counting)
    path = write_parquet(tmp_path / "a.parquet", pictures(10, (8, 8)), [0, 1] * 5)
    return path, lambda: open_dataset(f"parquet:{path}", seed=0, root=tmp_path / "root"), decoded


def test_decoded_images_are_kept_until_the_file_changes(
    cached: tuple[Path, Callable[[], Dataset], list[int]], tmp_path: Path
) -> None:
    path, opened, decoded = cached
    first = opened().sha256()
    assert opened().sha256() == first
    assert len(decoded) == 10
    size = path.stat().st_size
    write_parquet(path, pictures(10, (8, 8)), [1, 0] * 5)
    os.utime(path, ns=(0, 10**18))
    assert path.stat().st_size == size, "only the time of change tells the two files apart"
    assert opened().sha256() != first
    assert len(decoded) == 20
    assert {file.suffix for file in (tmp_path / "root" / "parquet").iterdir()} == {".safetensors"}


def test_a_damaged_or_impossible_cache_warns_and_costs_time_only(
    cached: tuple[Path, Callable[[], Dataset], list[int]], tmp_path: Path
) -> None:
    _, opened, decoded = cached
    first = opened().sha256()
    (kept,) = (tmp_path / "root" / "parquet").iterdir()
    kept.write_bytes(kept.read_bytes()[:50])
    with pytest.warns(UserWarning, match="damaged"):
        assert opened().sha256() == first
    assert opened().sha256() == first
    assert len(decoded) == 20
    kept.unlink()
    kept.parent.rmdir()
    kept.parent.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="cannot be kept"):
        assert opened().sha256() == first


# -- imagefolder -----------------------------------------------------------------------------------------------------


def write_folder(folder: Path, names: dict[str, int], seed: int = 0) -> None:
    for offset, (name, count) in enumerate(names.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for row, image in enumerate(pictures(count, (8, 8, 3), seed + offset)):
            (folder / name / f"{row:02}.png").write_bytes(encoded(image))


def test_imagefolder_with_train_and_test(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 3, "dog": 2})
    write_folder(tmp_path / "test", {"bird": 1, "dog": 1})
    (tmp_path / "train" / "cat" / "Thumbs.db").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    data = open_dataset(f"imagefolder:{tmp_path}", seed=0, root=tmp_path)
    assert data.train.y.tolist() == [1, 1, 1, 2, 2]  # bird, cat, dog
    assert data.test.y.tolist() == [0, 2]
    assert torch.equal(data.train.x[:3], torch.from_numpy(pictures(3, (8, 8, 3))).permute(0, 3, 1, 2))


def test_imagefolder_without_parts_is_split_by_the_seed(tmp_path: Path) -> None:
    write_folder(tmp_path / "set", {"a": 10, "b": 5})
    data, again, other = (open_dataset(f"imagefolder:{tmp_path}/set", seed=s, root=tmp_path) for s in (0, 0, 3))
    assert (data.train.y.bincount().tolist(), data.test.y.bincount().tolist()) == ([8, 4], [2, 1])
    assert data.sha256() == again.sha256() != other.sha256()


def test_bad_imagefolders_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    refused(f"imagefolder:{folder}", tmp_path, "no class folders")
    (folder / "file").write_text("")
    refused(f"imagefolder:{folder}/file", tmp_path, "is a file")
    write_folder(folder / "train", {"a": 2, "b": 2})
    refused(f"imagefolder:{folder}", tmp_path, "no test/")
    write_folder(folder / "test", {"a": 1})
    (folder / "test" / "b").mkdir()
    refused(f"imagefolder:{folder}", tmp_path, "test/b has no image")
    (folder / "test" / "b" / "x.png").write_bytes(b"no image")
    refused(f"imagefolder:{folder}", tmp_path, "test/b/x.png cannot be decoded")
    (folder / "test" / "b" / "x.png").write_bytes(encoded(pictures(1, (8, 6, 3))[0]))
    refused(f"imagefolder:{folder}", tmp_path, "test/b/x.png is 6x8", "test/a/00.png is 8x8")


# -- csv -------------------------------------------------------------------------------------------------------------


def table(rows: int = 40) -> list[list[Any]]:
    draw = np.random.default_rng(0)
    return [
        [round(float(draw.normal(40, 9)), 3), int(row), "rst"[row % 3], row % 7, ["no", "yes"][row % 2]]
        for row in range(rows)
    ]


def write_csv(path: Path, rows: list[list[Any]], sep: str = ";", header: str = "age;id;job;pdays;y") -> Path:
    text = "\n".join([header.replace(";", sep), *(sep.join(map(str, row)) for row in rows)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_csv_features_labels_and_range(tmp_path: Path) -> None:
    rows = table()
    data = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    assert (data.kind, data.name, data.classes, data.shape) == ("tabular", "csv:a.csv", 2, (6,))
    assert (len(data.train), len(data.test)) == (32, 8)
    train, _ = hold_out(torch.arange(40) % 2, 5, 0)
    assert torch.equal(data.train.y, train % 2)
    age = torch.tensor([rows[int(row)][0] for row in train], dtype=torch.float64)
    expected = (age - age.mean()) / age.std(correction=0)
    torch.testing.assert_close(data.train.x[:, 0].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(data.train.x[:, 3:], torch.eye(3)[train % 3])
    assert data.data_range == (float(data.train.x.min()), float(data.train.x.max()))


@pytest.mark.parametrize("sep", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_separator_is_sniffed_and_gzip_read(tmp_path: Path, sep: str, name: str) -> None:
    reference = open_dataset(f"csv:{write_csv(tmp_path / 'r.csv', table())}", seed=0, root=tmp_path).sha256()
    path = write_csv(tmp_path / name, table(), sep)
    assert open_dataset(f"csv:{path}", seed=0, root=tmp_path).sha256() == reference
    named = "tab" if sep == "\t" else sep
    assert open_dataset(f"csv:{path}?sep={named}&target=y", seed=0, root=tmp_path).sha256() == reference


def test_test_rows_influence_nothing_else(tmp_path: Path) -> None:
    rows = table()
    _, test = hold_out(torch.arange(40) % 2, 5, 0)
    before = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    for row in test.tolist():
        rows[row][:4] = [1e6, -5, "unseen", 99]
    after = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    assert torch.equal(before.train.x, after.train.x)
    assert before.data_range == after.data_range
    assert (after.test.x[:, 3:] == 0).all()
    assert (after.test.x[:, 0] > 1000).all()
    train_row = next(row for row in range(40) if row not in test.tolist())
    rows[train_row][0] = 41.5
    changed = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    assert not torch.equal(changed.train.x, after.train.x), "the comparison must be able to fail"


def test_other_targets_and_missing_categories(tmp_path: Path) -> None:
    rows = table()
    rows[3][4] = ""
    path = write_csv(tmp_path / "a.csv", rows)
    data = open_dataset(f"csv:{path}?target=job", seed=0, root=tmp_path)
    assert (data.classes, data.shape) == (3, (6,))  # age, id, pdays; y is no, yes or missing
    assert data.train.y.unique().tolist() == [0, 1, 2]


def test_three_parts_leave_validation_rows_out(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", table(200))
    data = open_dataset(f"csv:{path}?split=8:1:1", seed=5, root=tmp_path)
    train, validation, test = three_way(torch.arange(200) % 2, (8, 1, 1), 5)
    assert (len(data.train), len(validation), len(data.test)) == (160, 20, 20)
    ids = torch.arange(200.0)  # the second column, standardized with the training rows' figures
    scale = ids[train].std(correction=0)
    torch.testing.assert_close(data.train.x[:, 1], (ids[train] - ids[train].mean()) / scale, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(data.test.x[:, 1], (ids[test] - ids[train].mean()) / scale, rtol=1e-5, atol=1e-5)
    usual = open_dataset(f"csv:{path}", seed=5, root=tmp_path).sha256()
    assert open_dataset(f"csv:{path}?split=4:0:1", seed=5, root=tmp_path).sha256() == usual != data.sha256()


def test_validation_rows_influence_nothing(tmp_path: Path) -> None:
    rows = table(100)
    _, validation, _ = three_way(torch.arange(100) % 2, (8, 1, 1), 0)
    name = f"csv:{write_csv(tmp_path / 'a.csv', rows)}?split=8:1:1"
    before = open_dataset(name, seed=0, root=tmp_path).sha256()
    for row in validation.tolist():
        rows[row][:4] = [1e6, -5, "unseen", 99]
    write_csv(tmp_path / "a.csv", rows)
    assert open_dataset(name, seed=0, root=tmp_path).sha256() == before


@pytest.mark.parametrize(("target", "values"), [("pdays", [float(row % 7) for row in range(60)]), ("age", None)])
def test_csv_regression(tmp_path: Path, target: str, values: list[float] | None) -> None:
    rows = table(60)
    path = write_csv(tmp_path / "a.csv", rows)
    data = open_dataset(f"csv:{path}?target={target}&task=regression", seed=2, root=tmp_path)
    expected = torch.tensor(values or [row[0] for row in rows])[:, None]
    train, _, test = three_way(strata(expected), (4, 0, 1), 2)
    assert (data.task, data.classes, data.train.classes) == ("regression", 1, 1)
    assert torch.equal(data.train.y, expected[train]) and torch.equal(data.test.y, expected[test])
    assert data.train.y.dtype == torch.float32 and data.train.y.shape == (len(train), 1)
    assert data.train.take(torch.tensor([0])).y.shape == (1, 1)
    again = open_dataset(f"csv:{path}?task=regression&target={target}", seed=2, root=tmp_path)
    other = open_dataset(f"csv:{path}?task=regression&target={target}", seed=3, root=tmp_path)
    assert again.sha256() == data.sha256() != other.sha256()


def test_a_truth_value_is_a_number_to_fit(tmp_path: Path) -> None:
    rows = [[*row[:4], row[1] % 4 == 0] for row in table()]
    data = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}?task=regression", seed=0, root=tmp_path)
    assert data.train.y.unique().tolist() == [0.0, 1.0]
    assert float(data.train.y.mean()) == float(data.test.y.mean()) == 0.25


def test_bad_splits_and_targets_are_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", table())
    for text in ("8:2", "0:1:1", "8:1:0", "8:-1:1", "8:1:x", "", "8:1:1:1", "1e3:1:1", "0.8:0.1:0.1"):
        refused(f"csv:{path}?split={text}", tmp_path, f"split={text!r}", "'split=8:1:1'")
    refused(f"csv:{path}?task=regresion", tmp_path, "csv task", "did you mean 'regression'")
    refused(f"csv:{path}?task=regression", tmp_path, "target column 'y'", "text such as 'no'", "must be numbers")
    refused(f"csv:{path}?task=regression&target=job", tmp_path, "'job'", "'r'")
    refused(f"csv:{write_csv(path, [[*row[:4], 3] for row in table()])}?task=regression", tmp_path, "3 in every row")
    for cell, words in (("inf", "inf"), ("1e39", "1e+39"), ("", "no value in the target column")):
        rows: list[list[Any]] = [[*row[:4], row[1]] for row in table()]
        rows[6][4] = cell
        refused(f"csv:{write_csv(path, rows)}?task=regression", tmp_path, "Row 6", "'y'", words)
    refused(f"csv:{write_csv(path, table(3))}?split=2:1:1&task=regression&target=id", tmp_path, "3 rows", "split=2:1:1")


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", table())
    refused(f"csv:{path}?target=yy", tmp_path, "column", "'yy'", "did you mean 'y'")
    refused(f"csv:{path}?traget=y", tmp_path, "csv option", "'target'")
    refused(f"csv:{path}?target", tmp_path, "malformed")
    refused(f"csv:{path}?sep=ab", tmp_path, "not one character")
    refused(f"csv:{path}?sep=,", tmp_path, "1 columns", "','")
    for cell, words in (("", ("nan",)), ("inf", ("inf",))):
        rows = table()
        rows[7][0] = cell
        refused(f"csv:{write_csv(path, rows)}", tmp_path, "Row 7", "'age'", *words)
    rows = table()
    rows[5][4] = ""
    refused(f"csv:{write_csv(path, rows)}", tmp_path, "Row 5", "target column 'y'")
    rows = table(1100)
    refused(f"csv:{write_csv(path, [[f'n{row[1]}', *row[1:]] for row in rows])}", tmp_path, "'age'", "1100 distinct")
    refused(f"csv:{write_csv(path, [[*row[:4], row[1]] for row in rows])}", tmp_path, "'y'", "1100 distinct")
    refused(f"csv:{write_csv(path, [])}", tmp_path, "0 rows")
    refused(f"csv:{write_csv(path, [[*row, 1, 2] for row in table()])}", tmp_path, "more fields than its header")
    uneven = [*table(), [1, 2, "r", 3, "no", 4]]
    refused(f"csv:{write_csv(path, uneven)}", tmp_path, "cannot be read as a table", "saw 6")
    refused(f"csv:{write_csv(path, table(), header='age;age;job;pdays;y')}", tmp_path, "Duplicate names")
    path.write_bytes(b"\xff\xfe\x00")
    refused(f"csv:{path}", tmp_path, "UTF-8")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n")[:15])
    refused(f"csv:{tmp_path}/b.csv.gz", tmp_path, "b.csv.gz cannot be read")
    refused(f"csv:{tmp_path}", tmp_path, "cannot be read as a table")


# -- real data -------------------------------------------------------------------------------------------------------


@needs_data
def test_mnist_from_parquet(tmp_path: Path) -> None:
    data = open_dataset(f"parquet:{DATA / 'mnist'}", seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.shape) == (60_000, 10_000, (1, 32, 32))
    inner = data.train.x[:, :, 2:30, 2:30].double() / 255
    assert inner.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert inner.std().item() == pytest.approx(0.3081, abs=5e-5)
    assert data.train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]


@needs_data
def test_cifar10_from_parquet(tmp_path: Path) -> None:
    data = open_dataset(f"parquet:{DATA / 'cifar10' / 'test.parquet'}", seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (8000, 2000, 10, (3, 32, 32))
    assert data.test.y.bincount().tolist() == [200] * 10
    means = data.train.x.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.494, 0.485, 0.450]).double(), rtol=0, atol=0.01)


@needs_data
def test_bank_marketing(tmp_path: Path) -> None:
    data = open_dataset(f"csv:{DATA / 'bank-marketing.csv.gz'}?target=y&sep=;", seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (32_950, 8_238, 2)
    assert data.test.y.double().mean().item() == pytest.approx(0.113, abs=1e-3)
    assert data.train.x[:, 0].mean().abs() < 1e-5


@needs_data
def test_bank_marketing_as_the_paper_splits_and_fits_it(tmp_path: Path) -> None:
    name = f"csv:{DATA / 'bank-marketing.csv.gz'}?target=y&sep=;&split=8:1:1&task=regression"
    data = open_dataset(name, seed=0, root=tmp_path)
    assert (len(data.train), len(data.test)) == (32_950, 4_119)
    assert 41_188 - len(data.train) - len(data.test) == 4_119
    assert (data.task, data.classes) == ("regression", 1)
    assert data.train.y.unique().tolist() == [0.0, 1.0]
    means = [float(split.y.mean()) for split in (data.train, data.test)]
    assert means == [pytest.approx(0.1127, abs=5e-4)] * 2
    assert data.train.strata.bincount().tolist() == [int((data.train.y == v).sum()) for v in (0, 1)]
