"""How many images come out of an update of many local steps, in the setting of Dimitrov et al. (TMLR 2022), on MNIST.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_fedavg.py IMAGES EPOCHS BATCH ATTACK BUDGET

Their network (two convolutions of 3x3, 32 and 64 channels, a ReLU and an average pooling behind each, 100 units, 62
outputs; Flax's initial weights), rate 0.004, labels known, and an image counts from 20 dB on, as in their code
(github.com/eth-sri/fedavg_leakage). MNIST is harder than their FEMNIST: 50 images are of ten classes, and by mean and
spread of the pixels a white sheet has 16 dB of FEMNIST, a black one 10 of MNIST.

ATTACK is `fedavg_inversion`, which simulates the steps, or one that reads a gradient, which then gets the change over
steps and rate as the gradient at the middle between the weights before and after (printed: what the truth leaves of the
change there, and at the start).
"""

from __future__ import annotations

import copy
import io
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ppbench

RATE, SOLVED = 0.004, 20.0
"""Learning rate of the client; decibels from which on an image counts."""


def images(count: int) -> tuple[Tensor, Tensor]:
    """Return the first images of MNIST's training part, 0 to 1, and their classes; up to ten, each of another class."""
    table = pyarrow.parquet.read_table(Path(os.environ["PPBENCH_TEST_DATA"]) / "mnist" / "train.parquet")
    rows = table.slice(0, max(200, count)).to_pylist()
    if count <= 10:
        rows = list({row["label"]: row for row in reversed(rows)}.values())
    pixels = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows[:count]]
    return torch.from_numpy(np.stack(pixels)).float()[:, None] / 255, torch.tensor([r["label"] for r in rows[:count]])


def network() -> nn.Sequential:
    """Return the network at Flax's initial weights: normal, cut at two deviations, of variance one over the inputs."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(3136, 100), nn.ReLU(), nn.Linear(100, 62))
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            spread = math.sqrt(1 / layer.weight[0].numel()) / 0.8796
            nn.init.trunc_normal_(layer.weight, 0.0, spread, -2 * spread, 2 * spread)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model


def trained(model: nn.Module, x: Tensor, y: Tensor, epochs: int, size: int) -> nn.Module:
    """Return a copy after a client's epochs of SGD, in another order each."""
    own = copy.deepcopy(model)
    opt = torch.optim.SGD(own.parameters(), lr=RATE)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(size):
            opt.zero_grad()
            cross_entropy(own(x[rows]), y[rows]).backward()
            opt.step()
    return own


def between(model: nn.Module, end: nn.Module, share: float) -> nn.Module:
    """Return a network with weights on the line from one's to another's."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for p, a, b in zip(own.parameters(), model.parameters(), end.parameters(), strict=True):
            p.copy_(a.lerp(b, share))
    return own


def left(model: nn.Module, x: Tensor, y: Tensor, change: list[Tensor]) -> float:
    """Return the share of a change that the true gradient at a network's weights does not explain."""
    gradient = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
    away = sum(float((g - c).square().sum()) for g, c in zip(gradient, change, strict=True))
    return away / sum(float(c.square().sum()) for c in change)


def main(count: str, epochs: str, size: str, attack: str, budget: str) -> None:
    """Print the share of images that an attack rebuilds."""
    (x, y), steps = images(int(count)), int(epochs) * math.ceil(int(count) / int(size))
    torch.manual_seed(0)
    model = network()
    end = trained(model, x, y, int(epochs), int(size))
    change = [(a - b).detach() / (RATE * steps) for a, b in zip(model.parameters(), end.parameters(), strict=True)]
    middle = between(model, end, 0.5)
    print(
        f"the truth leaves {left(model, x, y, change):.1%} at the start, {left(middle, x, y, change):.1%} in the middle"
    )
    began, options = time.process_time(), {"budget": int(budget), "planted": False}
    if attack == "fedavg_inversion":
        training = {"lr": RATE, "local_epochs": int(epochs), "batch_size": int(size)}
        update = model.state_dict(), end.state_dict()
        answer = ppbench.invert(model, update, (1, 28, 28), y, attack, training=training, **options)
    else:
        answer = ppbench.invert(middle, change, (1, 28, 28), y, attack, **options)
    each = answer.psnr(x)
    solved, mean = sum(value >= SOLVED for value in each), sum(each) / len(each)
    cost = f"{time.process_time() - began:.0f} s of CPU"
    print(f"{attack}, {budget}: {solved} of {len(each)} images, {mean:.1f} dB, mismatch {answer.mismatch:.1e}, {cost}")


if __name__ == "__main__":
    main(*sys.argv[1:])
