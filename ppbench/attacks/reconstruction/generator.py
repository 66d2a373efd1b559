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
from pydantic import AfterValidator, ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.func import vjp, vmap
from torch.nn.functional import conv_transpose2d, leaky_relu, linear

from ppbench.attacks.reconstruction.search.problem import Pull
from ppbench.base import tensor_files
from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, locked, unwritable, write_atomic
from ppbench.base.tensor_files import packed_with_digest
from ppbench.base.tree import Params
from ppbench.federation.plan import Layout
from ppbench.metrics.modality import modality_from

# -- Decoders of one family, latent -> small map -> maps of twice the size -> image, and the spaces searched through
# them --
# G_0 is linear, the other blocks are transposed convolutions (4x4, stride 2); all end in a leaky ReLU, except the
# last, which ends in a sigmoid over the data's range. At stage k an attack searches the input of G_k, or the
# weights.

SLOPE = 0.2
LATENT, THINNEST, WIDEST = 128, 32, 128
SMALLEST_MAP = 4


@dataclass(frozen=True)
class Architecture:
    """A decoder's sizes: images of `shape` (channels, height, width), `latent` numbers, maps of `widths` channels.

    The smallest map comes first; each other one doubles height and width, and so does the last block.
    """

    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    latent: PositiveInt = LATENT
    widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (128, 64, 32)

    @property
    def blocks(self) -> int:
        """Return K, the number of blocks."""
        return len(self.widths) + 1

    @property
    def base(self) -> tuple[int, int]:
        """Return height and width of the smallest map; images whose size is no multiple are cropped."""
        factor = 2 ** len(self.widths)
        return -(-self.shape[1] // factor), -(-self.shape[2] // factor)

    def size(self, stage: int) -> tuple[int, ...]:
        """Return the shape of the input of block `stage`, in 0..K - 1; of the image for K."""
        if stage == 0:
            return (self.latent,)
        if stage == self.blocks:
            return self.shape
        grow = 2 ** (stage - 1)
        return (self.widths[stage - 1], self.base[0] * grow, self.base[1] * grow)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name."""
        shapes = {"block0.weight": (math.prod(self.size(1)), self.latent), "block0.bias": (math.prod(self.size(1)),)}
        outs = (*self.widths[1:], self.shape[0])
        for k, (wide, out) in enumerate(zip(self.widths, outs, strict=True), start=1):
            shapes |= {f"block{k}.weight": (wide, out, 4, 4), f"block{k}.bias": (out,)}
        return shapes


def architecture(shape: tuple[int, ...]) -> Architecture:
    """Return the decoder for images of `shape` (C, H, W): doublings of a map of at least 4x4; UsageError below 8x8.

    The latent has 128 numbers, but at most half as many as an image.
    """
    if not modality_from(shape).drawn or min(shape[1:]) < 2 * SMALLEST_MAP:
        raise UsageError(f"A generator makes images of 8x8 pixels or more, not inputs of shape {shape}; use ig or dlg.")
    count = int(math.log2(min(shape[1:]) / SMALLEST_MAP))
    widths = tuple(min(WIDEST, THINNEST * 2 ** (count - 1 - i)) for i in range(count))
    return Architecture((shape[0], shape[1], shape[2]), min(LATENT, math.prod(shape) // 2), widths)


def initial_weights(plan: Architecture, generator: torch.Generator) -> Params:
    """Return random weights of variance 2 / (inputs per output), and biases of 0; float32."""
    params = {}
    for name, shape in plan.shapes().items():
        fan = shape[1] if len(shape) == 2 else shape[0] * 4  # four taps of a 4x4 kernel reach an output
        normal = torch.randn(shape, generator=generator) * math.sqrt(2 / fan)
        params[name] = normal if name.endswith("weight") else torch.zeros(shape)
    return params


@dataclass(frozen=True, eq=False)
class Decoder:
    """A decoder with its weights by name, as in `Architecture.shapes`; low, high: the data's range."""

    plan: Architecture
    params: Params
    low: float = 0.0
    high: float = 1.0

    def block(self, k: int, h: Tensor, params: Params | None = None) -> Tensor:
        """Return the output of block k for h [S, *size(k)]; with `params` instead of its own weights, if not None."""
        params = self.params if params is None else params
        weight, bias = params[f"block{k}.weight"], params[f"block{k}.bias"]
        if k == 0:
            return leaky_relu(linear(h, weight, bias), SLOPE).view(-1, *self.plan.size(1))
        h = conv_transpose2d(h, weight, bias, stride=2, padding=1)
        if k < self.plan.blocks - 1:
            return leaky_relu(h, SLOPE)
        _, height, width = self.plan.shape
        return self.low + (self.high - self.low) * torch.sigmoid(h[..., :height, :width])

    def decode(self, h: Tensor, stage: int = 0, params: Params | None = None) -> Tensor:
        """Return the images [S, *shape] for h [S, *size(stage)]."""
        for k in range(stage, self.plan.blocks):
            h = self.block(k, h, params)
        return h


def project_l1(z: Tensor, radius: Tensor) -> Tensor:
    """Return the points of the l1 balls of `radius` [S] that are nearest to z [S, n] (Duchi et al. 2008, Fig. 1)."""
    size = z.abs()
    outside = torch.nonzero(size.sum(1) > radius).flatten()
    if not len(outside):
        return z
    rows, limit = size[outside], radius[outside].clamp(min=0)[:, None]
    ordered = rows.sort(1, descending=True).values
    places = torch.arange(1, z.shape[1] + 1, dtype=z.dtype, device=z.device)
    threshold = (ordered.double().cumsum(1) - limit.double()) / places.double()
    last = ((ordered > threshold) * places).argmax(1, keepdim=True)
    shrunk = (rows - threshold.gather(1, last).to(z)).clamp(min=0)
    shrunk = torch.where(limit > 0, shrunk, 0.0)
    return z.index_copy(0, outside, z[outside].sign() * shrunk)


@dataclass(frozen=True, eq=False)
class Maps:
    """The input of one block, N = `count` maps per row: the latent (stage 0), or maps that stay near their start.

    center: [S, N, n] each start's first maps.  rho: radius of the l1 balls around them, per image, in units of their l1
    norm; ignored in stage 0.
    """

    decoder: Decoder
    stage: int
    count: int
    center: Tensor
    rho: float

    @property
    def size(self) -> int:
        """Return the count of numbers in N maps."""
        return self.count * math.prod(self.decoder.plan.size(self.stage))

    def maps(self, z: Tensor) -> Tensor:
        """Return the rows as maps [S * N, *size]."""
        return z.reshape(-1, *self.decoder.plan.size(self.stage))

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images from the rest of the generator, and the product with its Jacobian's transpose."""
        leaf = self.maps(z).detach().requires_grad_()
        with torch.enable_grad():
            images = self.decoder.decode(leaf, self.stage)

        def pull(slope: Tensor) -> Tensor:
            (back,) = torch.autograd.grad(images, leaf, slope.reshape(images.shape))
            return back.view(len(z), -1)

        return images.detach().view(len(z), self.count, *self.decoder.plan.shape), pull

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the maps projected to their balls."""
        if self.stage == 0:
            return z
        center = self.center[index].flatten(0, 1)
        moved = project_l1(z.reshape(center.shape) - center, self.rho * center.abs().sum(1))
        return (center + moved).view_as(z)

    def following(self, z: Tensor) -> Tensor:
        """Return the input of the next block [S, N, n]: maps, or at last images."""
        with torch.no_grad():
            return self.decoder.block(self.stage, self.maps(z)).view(len(z), self.count, -1)


@dataclass(frozen=True, eq=False)
class GeneratorWeights:
    """The generator's weights, a copy for each row, at fixed latents [S, N, L] (Jeon et al. 2021)."""

    decoder: Decoder
    latents: Tensor

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return sum(value.numel() for value in self.decoder.params.values())

    def start(self) -> Tensor:
        """Return rows [S, n] of the trained weights."""
        row = Layout.of(self.decoder.params).pack(self.decoder.params)
        return row.expand(len(self.latents), -1).contiguous()

    def _made(self, row: Tensor, latents: Tensor) -> Tensor:
        return self.decoder.decode(latents, 0, Layout.of(self.decoder.params).unpack(row))

    def images(self, z: Tensor, index: Tensor) -> tuple[Tensor, Pull]:
        """Return the images [S, N, *shape] of each row's generator and latents, and the pull-back of slopes."""
        latents = self.latents[index]
        images, back, *_ = vjp(lambda rows: vmap(self._made)(rows, latents), z.detach())

        def pull(slope: Tensor) -> Tensor:
            slopes: Tensor = back(slope.reshape(images.shape))[0]
            return slopes

        return images.detach(), pull

    def project(self, z: Tensor, index: Tensor) -> Tensor:
        """Return the rows as they are."""
        return z


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
            entry, stated = ((file.metadata() or {}).get(name) for name in (GENERATOR_ENTRY, tensor_files.DIGEST_ENTRY))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as cause:
        raise UsageError(f"The generator file {path} is damaged ({cause}); train it again, or give another.") from cause
    about = _provenance(path, entry)
    if stated not in (None, tensor_files.digest_of(tensors)):  # older files have none
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
