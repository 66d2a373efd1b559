"""Images by name: torchvision's sets, parquet files and their cache, folders of classes; one sentence for bad ones."""

import io
import os
import struct
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

from ppbench.base.import_guard import torchvision
from ppbench.task import parquet
from ppbench.task.user_data import open_dataset

DATA = Path(os.environ.get("PPBENCH_TEST_DATA", ""))
needs_data = pytest.mark.skipif(
    not os.environ.get("PPBENCH_TEST_DATA") or not DATA.is_dir(),
    reason="PPBENCH_TEST_DATA does not name a folder with cifar10/ and mnist/",
)


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


# -- torchvision's ---------------------------------------------------------------------------------------------------
def no_network(*args: Any, **kwargs: Any) -> None:
    raise URLError("Name or service not known")


@pytest.fixture
def offline(monkeypatch):
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
def test_without_network_the_folder_and_files_are_named(tmp_path, name, folder, file, refused):
    refused(name, str(tmp_path / folder), file, "Name or service not known", "PPBENCH_DATA")
    refused(f"{name}:x", "takes no argument")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_files_in_place_need_no_network_and_equal_parquet(tmp_path, name, folder):
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
def test_damaged_idx_files_are_refused(tmp_path, refused):
    for part in ("train", "t10k"):
        write_idx(tmp_path / "MNIST" / "raw", part, pictures(4, (28, 28)), np.arange(4))
    broken_file = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    broken_file.write_bytes(broken_file.read_bytes()[:-100])
    refused("mnist", "MNIST/raw", "damaged")


@pytest.mark.parametrize(("name", "factory"), [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100"), ("svhn", "SVHN")])
def test_color_sets_come_channels_first(monkeypatch, tmp_path, name, factory):
    images = pictures(4, (32, 32, 3))

    def made(root, download, train=None, split=None):
        assert (root, download) == (str(tmp_path), True)
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


# -- parquet ---------------------------------------------------------------------------------------------------------
def test_shards_are_read_in_the_order_of_their_names(tmp_path):
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


def test_one_parquet_file_is_split_by_the_seed(tmp_path):
    images, labels = pictures(50, (8, 8)), np.arange(50) % 5
    path = write_parquet(tmp_path / "all.parquet", images, labels)
    data, again, other = (open_dataset(f"parquet:{path}", seed=seed, root=tmp_path) for seed in (0, 0, 1))
    assert (len(data.train), len(data.test), data.shape) == (40, 10, (1, 8, 8))
    assert data.test.y.bincount().tolist() == [2] * 5
    assert data.sha256() == again.sha256() != other.sha256()


def test_the_label_column_among_several_integers(tmp_path, refused):
    path = write_parquet(tmp_path / "a.parquet", pictures(10, (8, 8)), [0, 1] * 5)
    table = pq.read_table(path).append_column("coarse", pa.array(range(10)))
    pq.write_table(table, path)
    assert open_dataset(f"parquet:{path}", seed=0, root=tmp_path).classes == 2
    pq.write_table(table.rename_columns(["image", "fine", "coarse"]), path)
    refused(f"parquet:{path}", "fine (int64), coarse (int64)", "'label'")


def test_jpeg_and_mixed_modes(tmp_path):
    grey, color = pictures(5, (8, 8)), pictures(5, (8, 8, 3))
    path = write_parquet(tmp_path / "a.parquet", [*grey, *color], [0, 1] * 5)
    data = open_dataset(f"parquet:{path}", seed=0, root=tmp_path)
    assert data.shape == (3, 8, 8)
    grey_as_color = torch.from_numpy(grey[0]).expand(3, 8, 8)
    assert sum(torch.equal(row, grey_as_color) for row in torch.cat([data.train.x, data.test.x])) == 1
    flat = [encoded(np.full((8, 8, 3), 10 * row, np.uint8), "JPEG") for row in range(10)]
    data = open_dataset(f"parquet:{write_parquet(path, flat, [0, 1] * 5)}", seed=0, root=tmp_path)
    levels = torch.cat([data.train.x, data.test.x]).float().mean((1, 2, 3)).round()
    assert sorted(levels.tolist()) == list(range(0, 100, 10))


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
def test_bad_rows_are_named(tmp_path, images, labels, words, refused):
    path = write_parquet(tmp_path / "bad.parquet", images, labels)
    refused(f"parquet:{path}", str(path) if words != ("1 classes",) else "bad.parquet", *words)


def test_bad_parquet_files_are_refused(tmp_path, refused):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 not really")
    refused(f"parquet:{tmp_path}/train.parquet", "train.parquet cannot be read")
    refused(f"parquet:{tmp_path}", "no file test*.parquet")
    pq.write_table(pa.table({"image": ["a"], "label": [0]}), tmp_path / "train.parquet")
    refused(f"parquet:{tmp_path}/train.parquet", "image (string), label (int64)", "'bytes'")
    write_parquet(tmp_path / "train.parquet", pictures(2, (8, 8)), [0, 1])
    write_parquet(tmp_path / "test.parquet", pictures(2, (8, 4)), [0, 1])
    refused(f"parquet:{tmp_path}", "4x8", "8x8", "test.parquet", "train.parquet")


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """A parquet file, how to open it with a cache, and the count of images that were decoded."""
    monkeypatch.setattr(parquet, "_SLOW", -1.0)
    decoded: list[int] = []
    original = parquet.decode_image

    def counting(source, where):
        decoded.append(1)
        return original(source, where)

    monkeypatch.setattr(parquet, "decode_image", counting)
    path = write_parquet(tmp_path / "a.parquet", pictures(10, (8, 8)), [0, 1] * 5)
    return path, lambda: open_dataset(f"parquet:{path}", seed=0, root=tmp_path / "root"), decoded


def test_decoded_images_are_kept_until_the_file_changes(cached, tmp_path):
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


def test_a_damaged_or_impossible_cache_warns_and_costs_time_only(cached, tmp_path):
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


def test_imagefolder_with_train_and_test(tmp_path):
    write_folder(tmp_path / "train", {"bird": 1, "cat": 3, "dog": 2})
    write_folder(tmp_path / "test", {"bird": 1, "dog": 1})
    (tmp_path / "train" / "cat" / "Thumbs.db").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    data = open_dataset(f"imagefolder:{tmp_path}", seed=0, root=tmp_path)
    assert data.train.y.tolist() == [0, 1, 1, 1, 2, 2]
    assert data.test.y.tolist() == [0, 2]
    assert torch.equal(data.train.x[1:4], torch.from_numpy(pictures(3, (8, 8, 3), 1)).permute(0, 3, 1, 2))


def test_imagefolder_without_parts_is_split_by_the_seed(tmp_path):
    write_folder(tmp_path / "set", {"a": 10, "b": 5})
    data, again, other = (open_dataset(f"imagefolder:{tmp_path}/set", seed=s, root=tmp_path) for s in (0, 0, 3))
    assert (data.train.y.bincount().tolist(), data.test.y.bincount().tolist()) == ([8, 4], [2, 1])
    assert data.sha256() == again.sha256() != other.sha256()


def test_bad_imagefolders_are_refused(tmp_path, refused):
    folder = tmp_path / "set"
    folder.mkdir()
    refused(f"imagefolder:{folder}", "no class folders")
    (folder / "file").write_text("")
    refused(f"imagefolder:{folder}/file", "is a file")
    write_folder(folder / "train", {"a": 2, "b": 2})
    refused(f"imagefolder:{folder}", "no test/")
    write_folder(folder / "test", {"a": 1})
    (folder / "test" / "b").mkdir()
    refused(f"imagefolder:{folder}", "test/b has no image")
    (folder / "test" / "b" / "x.png").write_bytes(b"no image")
    refused(f"imagefolder:{folder}", "test/b/x.png cannot be decoded")
    (folder / "test" / "b" / "x.png").write_bytes(encoded(pictures(1, (8, 6, 3))[0]))
    refused(f"imagefolder:{folder}", "test/b/x.png is 6x8", "test/a/00.png is 8x8")


# -- real data -------------------------------------------------------------------------------------------------------
@needs_data
def test_cifar10_from_parquet(tmp_path):
    data = open_dataset(f"parquet:{DATA / 'cifar10' / 'test.parquet'}", seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (8000, 2000, 10, (3, 32, 32))
    assert data.test.y.bincount().tolist() == [200] * 10
    means = data.train.x.double().mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.494, 0.485, 0.450]).double(), rtol=0, atol=0.01)
