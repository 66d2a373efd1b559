"""Generators in files, written atomically, with fingerprints of their training data; trained once by the first process.

A file is safetensors: the decoder's tensors, "fingerprints" (sorted int64, of the training images' contents), and one
metadata entry "ppbench.generator" with the JSON of `Provenance`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppbench.attacks.reconstruction.generator.net import Architecture, Decoder
from ppbench.base import seals
from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, unwritable, write_atomic
from ppbench.base.locks import locked
from ppbench.base.seals import packed_with_digest

FORMAT: Literal["ppbench.generator/1"] = "ppbench.generator/1"
"""Part of every file's name: raise it when the files, or the results of training, change."""
GENERATOR_ENTRY = "ppbench.generator"
PRINTS = "fingerprints"


def _rising(ends: tuple[float, float]) -> tuple[float, float]:
    if not ends[0] < ends[1]:
        raise ValueError("the data range must rise")
    return ends


@dataclass(frozen=True)
class Provenance:
    """The origin of a generator: its file's format, decoder, range of pixels, training, and quality.

    data: SHA-256 of the training images.  split: a description of these images.  ceiling: median PSNR in decibels of
    the public images held out of the training, encoded and decoded.  ceiling_latent: the same for the best latents that
    optimization from there yields (of the first 16).
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: Literal["ppbench.generator/1"]
    plan: Architecture
    data_range: Annotated[tuple[float, float], AfterValidator(_rising)]
    data: str
    split: str
    images: int
    steps: int
    batch: int
    lr: float
    noise: float
    seed: int
    ceiling: float
    ceiling_latent: float
    held_out: int


@dataclass(frozen=True, eq=False)
class Generator:
    """A trained decoder, its origin, and the fingerprints [M] int64 of its training images."""

    decoder: Decoder
    about: Provenance
    prints: Tensor


def fingerprints(images: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return the sorted fingerprints [M] int64 of images [N, *shape]: 64 bits of shape and 8-bit pixels."""
    scaled = (images.detach().double() - low) * (255 / (high - low))
    pixels = scaled.nan_to_num(0.0).round().clamp(0, 255).to(torch.uint8).flatten(1).cpu().contiguous().numpy()
    salt = repr(tuple(images.shape[1:])).encode()
    keys = [hashlib.blake2b(row.tobytes() + salt, digest_size=8).digest() for row in pixels]
    numbers = sorted({int.from_bytes(key, "big", signed=True) for key in keys})
    return torch.tensor(numbers, dtype=torch.int64)


def count_overlap(generator: Generator, images: Tensor) -> int:
    """Return how many of images [N, *shape] the generator was trained on, by content; each copy counts."""
    own = [fingerprints(image[None], *generator.about.data_range) for image in images]
    return int(torch.isin(torch.cat(own), generator.prints).sum()) if own else 0


def check_apart(generator: Generator, shards: Mapping[int, Tensor], source: str = "The generator") -> None:
    """Refuse a generator that was trained on a client's images [N, *shape] (UsageError, which names it `source`)."""
    for client, images in shards.items():
        count = count_overlap(generator, images)
        if count:
            raise UsageError(
                f"{source} was trained on {count} of the {len(images)} images of client {client}, so it could recite "
                "them; use one trained on images that no client holds, as --public 0.5 sets them apart."
            )


def write_generator(generator: Generator, path: Path) -> None:
    """Write the generator to `path` atomically (UsageError if the system refuses)."""
    about = json.dumps(asdict(generator.about), sort_keys=True)
    tensors = {**generator.decoder.params, PRINTS: generator.prints}
    write_atomic(path, packed_with_digest(tensors, {GENERATOR_ENTRY: about}))


def file_digest(path: Path) -> str:
    """Return "sha256:..." of a file's bytes. UsageError if it cannot be read."""
    if kind_of(path) == "special":
        raise UsageError(f"The generator {path} is a device, pipe or socket; give a file made here.")
    try:
        return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as cause:
        raise UsageError(f"The generator {path} cannot be read ({cause.strerror}); give a file made here.") from cause


def read_generator(path: Path) -> Generator:
    """Return the generator in `path`; UsageError, naming file and tensor, if it is missing, damaged or another file."""
    if kind_of(path) != "file":
        raise UsageError(f"There is no generator file {path}; give a .safetensors file that gifd wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            entry, stated = ((file.metadata() or {}).get(name) for name in (GENERATOR_ENTRY, seals.DIGEST_ENTRY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as cause:
        raise UsageError(f"The generator file {path} is damaged ({cause}); train it again, or give another.") from cause
    about = _provenance(path, entry)
    if stated not in (None, seals.digest_of(tensors)):  # older files have none
        raise UsageError(f"The generator file {path} is damaged (its digest differs); train it again, or give another.")
    _check(path, about, tensors)
    prints = tensors.pop(PRINTS)
    return Generator(Decoder(about.plan, tensors, *about.data_range), about, prints)


def _provenance(path: Path, entry: str | None) -> Provenance:
    if entry is None:
        raise UsageError(
            f"The file {path} is no generator: it has no metadata {GENERATOR_ENTRY!r}; give one that gifd wrote."
        )
    try:
        return TypeAdapter(Provenance).validate_json(entry)
    except ValidationError as cause:
        first = cause.errors()[0]
        place, problem = ".".join(map(str, first["loc"])) or GENERATOR_ENTRY, first["msg"].lower()
        raise UsageError(
            f"The generator file {path} has unknown metadata at {place} ({problem}); train it again, or give another."
        ) from cause


def _check(path: Path, about: Provenance, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are missing, unknown, of another shape or type, or not finite; names file and tensor."""
    expected = about.plan.shapes()

    def refuse(name: str, problem: str) -> UsageError:
        return UsageError(f"The generator file {path} cannot be used: tensor {name!r} {problem}.")

    for name in sorted({*expected, PRINTS} - set(tensors)):
        raise refuse(name, "is missing; train it again, or give another")
    for name in sorted(set(tensors) - {*expected, PRINTS}):
        raise refuse(name, f"is unknown; known are {', '.join(sorted(expected))} and {PRINTS}")
    for name, shape in expected.items():
        value = tensors[name]
        if value.dtype != torch.float32 or tuple(value.shape) != shape:
            actual = f"{value.dtype} {tuple(value.shape)}"
            raise refuse(name, f"is {actual}, but its metadata asks for torch.float32 {shape}")
        if not bool(value.isfinite().all()):
            raise refuse(name, "holds numbers that are not finite; train it again, or give another")
    prints = tensors[PRINTS]
    if prints.dtype != torch.int64 or prints.dim() != 1 or bool((prints.diff() <= 0).any()):
        raise refuse(PRINTS, "must be ascending int64 numbers in one row")


def cache_folder() -> Path:
    """Return the folder of trained generators: "generators" below PPBENCH_CACHE, or below ~/.cache/ppbench."""
    return Path(os.environ.get("PPBENCH_CACHE") or Path.home() / ".cache" / "ppbench") / "generators"


def file_name(*parts: object) -> str:
    """Return the name of a file from all that its content depends on."""
    return hashlib.sha256(repr((FORMAT, *parts)).encode()).hexdigest()[:32] + ".safetensors"


def cached(path: Path, train: Callable[[], Generator]) -> Generator:
    """Return the generator in `path`; one process trains it if missing or damaged (UsageError: not writable)."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock")
        lock.touch()
        with locked(lock, "training a generator", math.inf):  # training takes minutes; others wait
            if kind_of(path) == "file":
                try:
                    return read_generator(path)
                except UsageError as cause:
                    warnings.warn(f"{cause} It is trained again.", stacklevel=2)
            write_generator(train(), path)
            return read_generator(path)
    except OSError as cause:
        raise unwritable(path, 0, cause) from cause
