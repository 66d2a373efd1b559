"""What batch statistics add to a gradient: `ppbench.invert` on torchvision's ResNet-18, with and without them.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_statistics.py random,trained 1,8 ig 600 2

Without its first pooling, which leaves layer4 of 32x32 images one pixel, on which torch's norms refuse a single image.
Victims are the first images of CIFAR-10's test part; "trained" is two epochs of Adam on 2,000 of the training part,
kept in WEIGHTS. Each client takes one step of SGD; its server sees both state dicts.
"""

from __future__ import annotations

import copy
import io
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

import ppbench
from ppbench.base.vision import importable
from ppbench.federation.plan import Data

WEIGHTS = Path("/tmp/measure_statistics.safetensors")
EPOCHS, TRAIN, BATCH = 2, 2000, 32


def images(part: str, count: int) -> Data:
    """The first images of a part of CIFAR-10, 0 to 1, and their classes, one-hot; the others are not decoded."""
    table = pyarrow.parquet.read_table(Path(os.environ["PPBENCH_TEST_DATA"]) / "cifar10" / f"{part}.parquet")
    rows = table.slice(0, count).to_pylist()
    pixels = [np.asarray(Image.open(io.BytesIO(row["img"]["bytes"])).convert("RGB")) for row in rows]
    x = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    return Data(x.contiguous(), torch.eye(10)[[row["label"] for row in rows]])


def resnet() -> nn.Module:
    """Torchvision's ResNet-18 for ten classes, at its own initial weights, without its first pooling."""

    def made() -> nn.Module:
        from torchvision.models import resnet18

        model: nn.Module = resnet18(num_classes=10)
        model.maxpool = nn.Identity()
        return model

    return importable(made)


def trained(data: Data, test: Data) -> nn.Module:
    """The network after training on `data`, in training mode; its accuracy on `test` in eval mode is printed."""
    torch.manual_seed(0)
    model = resnet()
    if WEIGHTS.exists():
        model.load_state_dict(load_file(WEIGHTS))
    else:
        opt = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(data.x)).split(BATCH):
                if len(rows) == BATCH:
                    opt.zero_grad()
                    cross_entropy(model(data.x[rows]), data.y[rows].argmax(1)).backward()
                    opt.step()
        save_file(dict(model.state_dict()), WEIGHTS)
    with torch.no_grad():
        right = model.eval()(test.x).argmax(1) == test.y.argmax(1)
    print(f"trained: accuracy {float(right.double().mean()):.1%} of {len(right)} test images", flush=True)
    return model.train()


def update_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[dict[str, torch.Tensor], ...]:
    """Return the state dicts before and after a client's step of SGD on a batch."""
    own = copy.deepcopy(model)
    opt = torch.optim.SGD(own.parameters(), lr=0.1)
    cross_entropy(own(x), y).backward()
    opt.step()
    return copy.deepcopy(model.state_dict()), own.state_dict()


def main(kinds: str, batches: str, attack: str, budget: str, count: str) -> None:
    """Print the decibels of each batch, with and without the statistics; labels are known in both."""
    pool, test = images("train", TRAIN), images("test", 500)
    for size in map(int, batches.split(",")):
        for kind in kinds.split(","):
            for number in range(int(count)):
                torch.manual_seed(number)
                model = resnet() if kind == "random" else trained(pool, test)
                rows = slice(number * size, (number + 1) * size)
                x, y = test.x[rows], test.y[rows].argmax(1)
                update = update_of(model, x, y)
                for statistics in (True, False):
                    began = time.process_time()
                    options = {"statistics": statistics, "planted": False, "budget": int(budget)}
                    answer = ppbench.invert(model, update, (3, 32, 32), y, attack, **options)
                    each = answer.psnr(x)
                    words = (
                        f"{kind}, batch {size}, {'with' if statistics else 'without'}: {sum(each) / len(each):.1f} dB"
                    )
                    spread = f"({min(each):.1f} to {max(each):.1f}), mismatch {answer.mismatch:.1e}"
                    print(f"{words} {spread}, {time.process_time() - began:.0f} s of CPU", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
