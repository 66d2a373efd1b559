"""Image sets in parquet files, as on the Hugging Face hub, decoded once and cached."""

from __future__ import annotations

import hashlib
import io
import re
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ppbench.base.errors import UsageError, because, listed
from ppbench.base.files import kind_of, make_folder, sweep_abandoned, write_atomic
from ppbench.base.tensor_files import packed_with_digest, unpacked_with_digest
from ppbench.federation.bounds import LARGEST_COUNT
from ppbench.task.dataset import Dataset, existing
from ppbench.task.image_data import LABEL_COLUMNS, decode_image, image_dataset, join_images, stack_images
from ppbench.task.partition import hold_out
from ppbench.task.user_data import class_numbers, classes_of, empty_classes

PARTS = ("train", "test")
_LIKE_A_LABEL = re.compile("label|class|target", re.IGNORECASE)
_CACHE_FORMAT = "3"  # part of the cache key; change it whenever decoding changes
_SLOW = 1.0  # seconds of decoding from which a shard is cached


def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Images in parquet files: parquet:FOLDER with train*.parquet and test*.parquet, or parquet:FILE split 80 : 20.

    As Hugging Face keeps them, also in FOLDER/data, or in folders train and test of it: a column of structs with a
    field `bytes` (an encoded image, 8-bit grey or color) and a column with the class, a whole number: that named label,
    labels, fine_label, target, class or y, in this order, else the only integers. Shards are read in the order of their
    names. Images are grey if all are; grey 28x28 gets a black border to 32x32. A shard that took long to decode is kept
    in `root`/parquet. A FILE's split is stratified, a function of `seed`.

    Raises UsageError: a path, file, column, label or image that cannot be used, or several image sizes.
    """
    path = existing("parquet", argument)
    name = f"parquet:{path.resolve().name}"
    if path.is_file():
        x, y = read_shard(path, root)
        classes = classes_of(str(path), y)
        train, test = hold_out(y, 5, seed)
        note = _note(name, [path], y[train], y, classes)
        return image_dataset(name, (x[train], y[train]), (x[test], y[test]), classes, notes=note)
    shards = _shards(path)
    files = shards["train"] + shards["test"]
    parts = [read_shard(file, root) for file in files]
    images = join_images([x for x, _ in parts], [str(file) for file in files])
    labels = [y for _, y in parts]
    classes = classes_of(str(path), torch.cat(labels))
    count = len(shards["train"])
    train_part = torch.cat(images[:count]), torch.cat(labels[:count])
    test_part = torch.cat(images[count:]), torch.cat(labels[count:])
    note = _note(name, files, train_part[1], torch.cat(labels), classes)
    return image_dataset(name, train_part, test_part, classes, notes=note)


def _note(name: str, files: list[Path], trained: Tensor, labels: Tensor, classes: int) -> tuple[str]:
    import pyarrow.parquet as pq

    image, label = _columns(pq.read_schema(files[0]), files[0])
    remark = empty_classes(trained, classes)
    ignored = sorted(path.name for path in {*files[0].parent.glob("*.parquet")} - {*files}) if len(files) > 1 else []
    remark += f"; not read: {listed(ignored)}" if ignored else ""
    return (f"{name}: {len(labels)} images in column {image}, labels in {label}: {classes} classes{remark}",)


def _shards(folder: Path) -> dict[str, list[Path]]:
    """Return the files of both parts, sorted by name, in `folder` or its subfolder data."""
    lacking: tuple[str, ...] = PARTS
    for home in (folder, folder / "data"):
        shards = {
            part: sorted(home.glob(f"{part}*.parquet")) or sorted(home.glob(f"{part}/*.parquet")) for part in PARTS
        }
        if all(shards.values()):
            return shards
        lacking = min(lacking, tuple(part for part in PARTS if not shards[part]), key=len)
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        raise UsageError(f"The folder {folder} was saved by the library `datasets`; write 'hf:{folder}'.")
    raise UsageError(
        f"The folder {folder} has no file {lacking[0]}*.parquet; it, or its folder data, must hold train*.parquet and "
        "test*.parquet (or name one file, which is split 80 : 20)."
    )


def read_shard(path: Path, root: Path) -> tuple[Tensor, Tensor]:
    """Return the images uint8 [N, C, H, W] and labels int64 [N] of one file, row by row; UsageError as `load`."""
    cache = root / "parquet" / f"{_cache_key(path)}.safetensors"
    if kind_of(cache) == "file":
        try:
            tensors = unpacked_with_digest(cache)
            return tensors["x"], tensors["y"]
        except (UsageError, KeyError) as cause:
            warnings.warn(f"{cache} is damaged ({cause}) and is made again", stacklevel=2)
    start = time.monotonic()
    x, y = _read(path)
    if time.monotonic() - start > _SLOW:
        try:
            sweep_abandoned(make_folder(cache.parent))
            write_atomic(cache, packed_with_digest({"x": x, "y": y}))
        except UsageError as cause:  # a full or read-only disk costs time, not the result
            warnings.warn(f"the decoded images of {path} cannot be kept in {cache.parent}: {cause}", stacklevel=2)
    return x, y


def _cache_key(path: Path) -> str:
    status = path.stat()
    text = "/".join([_CACHE_FORMAT, str(path.resolve()), str(status.st_size), str(status.st_mtime_ns)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path) -> tuple[Tensor, Tensor]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays: list[NDArray[np.uint8]] = []
    labels: list[Any] = []
    try:
        with pq.ParquetFile(path) as file:
            image, label = _columns(file.schema_arrow, path)
            if file.metadata.num_rows > LARGEST_COUNT:
                rows = f"{file.metadata.num_rows:,}"
                raise UsageError(f"{path} claims to have {rows} rows; a file may have up to {LARGEST_COUNT:,} images.")
            for batch in file.iter_batches(columns=[image, label]):
                for cell in batch.column(image).to_pylist():
                    arrays.append(_image(cell, f"row {len(arrays)} of {path}"))
                labels += batch.column(label).to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError, NotImplementedError, MemoryError) as cause:
        raise UsageError(f"{path} cannot be read as a parquet file ({because(cause)}); write it again.") from cause
    if not arrays:
        raise UsageError(f"{path} has no rows; a parquet file of images must have at least one.")
    numbers = class_numbers(str(path), labels)
    return stack_images(arrays, [f"row {row} of {path}" for row in range(len(arrays))]), numbers


def _image(cell: Any, where: str) -> NDArray[np.uint8]:
    if cell is None or not cell["bytes"]:
        raise UsageError(f"There are no image bytes in {where}; the file must contain its images, not only paths.")
    return decode_image(io.BytesIO(cell["bytes"]), where)


def _columns(schema: Any, path: Path) -> tuple[str, str]:
    """Return the columns of images and of labels."""
    import pyarrow.types as types

    fields = {field.name: field.type for field in schema}
    images = [name for name, kind in fields.items() if types.is_struct(kind) and _encoded(kind)]
    integers = [name for name, kind in fields.items() if types.is_integer(kind)]
    numbers = [*integers, *(name for name, kind in fields.items() if types.is_floating(kind) or types.is_boolean(kind))]
    labels = [name for name in LABEL_COLUMNS if name in numbers][:1]
    if not labels and len(integers) == 1 and (not {*LABEL_COLUMNS} & {*fields} or _LIKE_A_LABEL.search(integers[0])):
        labels = integers
    if len(images) != 1 or len(labels) != 1:
        known = [f"{field.name} ({field.type})"[:80] for field in schema]
        columns = ", ".join(known[:4]) + (" ..." if known[4:] else "")
        raise UsageError(
            f"{path} has the columns {columns}; it needs exactly one column of structs with a binary field 'bytes', "
            "and one integer column, named 'label' if there are several."
        )
    return images[0], labels[0]


def _encoded(struct: Any) -> bool:
    """Return whether a struct's type has one field "bytes", and that of bytes: text or numbers are no image."""
    import pyarrow.types as types

    place = struct.get_field_index("bytes")
    kind = struct.field(place).type if place >= 0 else None
    return kind is not None and (types.is_binary(kind) or types.is_large_binary(kind))
