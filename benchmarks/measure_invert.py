"""What `ppbench.invert` makes of gradients that plain torch computes: LeNets at torch's own initial weights, one image.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_invert.py 5 sigmoid,tanh dlg,idlg,ig

The first images of CIFAR-10's test part, a network of its own for each. NAME:STOP is an attack with another `stop`.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

import torch
from torch import nn

import ppbench
from ppbench.task.user_data import open_dataset

ACTIVATIONS = {"sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "relu": nn.ReLU}


def lenet(activation: type[nn.Module]) -> nn.Module:
    """The network of docs/invert.md: three convolutions of 12 channels, one linear layer."""
    layers = [nn.Conv2d(3, 12, 5, 2, 2), activation(), nn.Conv2d(12, 12, 5, 2, 2), activation()]
    layers += [nn.Conv2d(12, 12, 5, 1, 2), activation()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(768, 10))


def main(count: int, activations: str, attacks: str) -> None:
    """Print the median PSNR, the share of right labels, the median mismatch and time, a line an attack and network."""
    test = open_dataset(f"parquet:{os.environ['PPBENCH_TEST_DATA']}/cifar10", seed=0).test.take(torch.arange(count))
    for activation in activations.split(","):
        for attack in attacks.split(","):
            name, _, stop = attack.partition(":")
            chosen = ppbench.load_attack(name, **({"stop": float(stop)} if stop else {}))
            results, right, mismatches, began = [], 0, [], time.perf_counter()
            for index in range(count):
                torch.manual_seed(index)
                model, x, y = (
                    lenet(ACTIVATIONS[activation]),
                    test.x[index : index + 1],
                    test.y[index : index + 1].argmax(1),
                )
                gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
                answer = ppbench.invert(model, gradient, (3, 32, 32), attack=chosen, planted=False)
                results += answer.psnr(x)
                right += int(answer.y == y)
                mismatches.append(answer.mismatch)
            seconds = (time.perf_counter() - began) / count
            summary = f"{median(results):.1f} dB ({min(results):.1f} to {max(results):.1f}), labels {right} of {count}"
            print(f"{activation} {attack}: {summary}, mismatch {median(mismatches):.1e}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
