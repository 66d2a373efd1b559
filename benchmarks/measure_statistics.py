"""What batch statistics add to a gradient: `ppbench.invert` on networks with batch norms, with and without them, and
where norms stay with their clients (FedBN).

    export OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER
    python benchmarks/measure_statistics.py resnet18 random,trained 1,8 200 1
    python benchmarks/measure_statistics.py quickstart random,trained 1,8 600 4

NETWORK, weights, sizes of a batch, evaluations of `ig`, and batches of each. "resnet18" is torchvision's without its
first pooling, which leaves layer4 of 32x32 images one pixel, on which torch's norms refuse a single image; "quickstart"
is the network of Flower's quickstart with a norm behind each convolution. "trained" is by Adam on the first images of
CIFAR-10's training part, kept in WEIGHTS; victims are the first of its test part. Each client takes one step of SGD;
its server sees both state dicts, and knows the labels.
"""

from __future__ import annotations

import copy
import io
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy, relu

import ppbench
from ppbench.base.import_guard import importable
from ppbench.federation.plan import Data

WEIGHTS = "/tmp/measure_statistics_{}.safetensors"
BATCH, TESTED = 32, 500
"""Images of a step of training, and on which its accuracy is tested."""


class Quickstart(nn.Module):
    """The network of Flower's quickstart, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(relu(self.norm1(self.conv1(x))))
        x = self.pool(relu(self.norm2(self.conv2(x)))).flatten(1)
        out: torch.Tensor = self.fc3(relu(self.fc2(relu(self.fc1(x)))))
        return out


def resnet() -> nn.Module:
    """Torchvision's ResNet-18 for ten classes, at its own initial weights, without its first pooling."""

    def made() -> nn.Module:
        from torchvision.models import resnet18

        model: nn.Module = resnet18(num_classes=10)
        model.maxpool = nn.Identity()
        return model

    return importable(made)


@dataclass(frozen=True)
class Case:
    """A network, and the epochs and images that it is trained for."""

    made: Callable[[], nn.Module]
    epochs: int
    images: int


CASES = {"resnet18": Case(resnet, 2, 2000), "quickstart": Case(Quickstart, 5, 10_000)}


def images(part: str, count: int) -> Data:
    """The first images of a part of CIFAR-10, 0 to 1, and their classes, one-hot; the others are not decoded."""
    table = pyarrow.parquet.read_table(Path(os.environ["PPBENCH_TEST_DATA"]) / "cifar10" / f"{part}.parquet")
    rows = table.slice(0, count).to_pylist()
    pixels = [np.asarray(Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB")) for row in rows]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    return Data(x.contiguous(), torch.eye(10)[[row["label"] for row in rows]])


def trained(name: str, test: Data) -> nn.Module:
    """The network after training, in training mode; its accuracy on `test` in eval mode is printed."""
    torch.manual_seed(0)
    case, weights = CASES[name], Path(WEIGHTS.format(name))
    model = case.made()
    if weights.exists():
        model.load_state_dict(load_file(weights))
    else:
        data, opt = images("train", case.images), torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(case.epochs):
            for rows in torch.randperm(len(data.x)).split(BATCH):
                if len(rows) == BATCH:
                    opt.zero_grad()
                    cross_entropy(model(data.x[rows]), data.y[rows].argmax(1)).backward()
                    opt.step()
        save_file(dict(model.state_dict()), weights)
    with torch.no_grad():
        right = model.eval()(test.x).argmax(1) == test.y.argmax(1)
    print(f"trained: accuracy {float(right.double().mean()):.1%} of {len(right)} test images", flush=True)
    return model.train()


State = tuple[dict[str, torch.Tensor], ...]
"""State dicts before and after a step."""


def update_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> State:
    """Return the state dicts before and after a client's step of SGD on a batch."""
    own = copy.deepcopy(model)
    opt = torch.optim.SGD(own.parameters(), lr=0.1)
    cross_entropy(own(x), y).backward()
    opt.step()
    return copy.deepcopy(model.state_dict()), own.state_dict()


WAYS = "with", "without", "FedBN"
"""What of its norms a client sends: weights and statistics, weights alone, or nothing (FedBN: Li et al., ICLR 2021)."""


def answer_to(model: nn.Module, update: State, way: str, y: torch.Tensor, budget: int) -> ppbench.Inverted:
    """What `ig` makes of the update in one of `WAYS`."""
    if way == "FedBN":
        norms = tuple(f"{name}." for name, part in model.named_modules() if isinstance(part, nn.BatchNorm2d))
        update = tuple({k: v for k, v in state.items() if not k.startswith(norms)} for state in update)
    options = {"statistics": way == "with", "planted": False, "budget": budget}
    return ppbench.invert(model, update, (3, 32, 32), y, "ig", **options)


def main(network: str, kinds: str, sizes: str, budget: str, count: str) -> None:
    """Print the decibels of each batch, in each of `WAYS`, and their means over all images."""
    test = images("test", TESTED)
    for size in map(int, sizes.split(",")):
        for kind in kinds.split(","):
            means: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(int(count)):
                torch.manual_seed(number)
                model = CASES[network].made() if kind == "random" else trained(network, test)
                rows = slice(number * size, (number + 1) * size)
                x, y = test.x[rows], test.y[rows].argmax(1)
                update = update_of(model, x, y)
                for way, every in means.items():
                    began = time.process_time()
                    answer = answer_to(model, update, way, y, int(budget))
                    each = answer.psnr(x)
                    every += each
                    spread = f"{sum(each) / size:.1f} dB ({min(each):.1f} to {max(each):.1f})"
                    cost = f"mismatch {answer.mismatch:.1e}, {time.process_time() - began:.0f} s of CPU"
                    print(f"{network}, {kind}, batch {size}, {way}: {spread}, {cost}", flush=True)
            ends = ", ".join(f"{way} {sum(every) / len(every):.1f} dB" for way, every in means.items())
            print(f"{network}, {kind}, batch {size}: {ends}, n={len(means[WAYS[0]])}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
