"""Adaptive clipping: an empty sample ends the training, and before 1.6 the count of unclipped examples cost nothing.

Run: python opacus_adaptive.py, beside torch and Opacus. Seen with Opacus 1.5.4 and, the first of both, 1.6.0 on torch
2.13.0.

Poisson sampling gives empty batches. `AdaClipDPOptimizer.clip_and_accumulate` reshapes each tensor of gradients to
(0, -1) then, which torch refuses; `DPOptimizer` takes them. The noise that a step's budget buys is shared between the
gradient and the count (Andrew et al., Theorem 1), so that the gradient's multiplier is above the given one. Until 1.5.4
the accountant was told the gradient's, as if the count were not released; 1.6.0 tells it the given one.
"""

import importlib.metadata
import warnings
from typing import Any

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
DELTA = 1e-5


def private(batch: int, std: float) -> tuple[Any, ...]:
    """Return an engine, and what it makes private of a linear model; std: of the noise on the count."""
    model, data = nn.Linear(4, 2), TensorDataset(torch.rand(8, 4), torch.randint(0, 2, (8,)))
    engine = PrivacyEngine(accountant="rdp")
    return engine, *engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, batch),
        noise_multiplier=1.0, max_grad_norm=1.0, clipping="adaptive", unclipped_num_std=std, max_clipbound=10.0,
        min_clipbound=0.01, target_unclipped_quantile=0.5, clipbound_learning_rate=0.2,
    )  # fmt: skip


def trained(batch: int, std: float, epochs: int) -> tuple[int, float]:
    """Return how many steps were taken, and the engine's epsilon."""
    engine, model, optimizer, loader = private(batch, std)
    steps = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except RuntimeError as cause:
                print(f"after {steps} steps, a sample of {len(x)} examples: {cause}")
                return steps, engine.get_epsilon(DELTA)
            steps += 1
    return steps, engine.get_epsilon(DELTA)


def main() -> None:
    """Print what an empty sample does, and what two noises on the count cost."""
    torch.manual_seed(0)
    print(f"Opacus {importlib.metadata.version('opacus')}")
    trained(1, 10.0, 9)
    for std in (100.0, 0.6):
        steps, epsilon = trained(8, std, 1)
        print(f"{steps} step at multiplier 1, noise of {std:g} on the count: epsilon {epsilon:.2f}")


if __name__ == "__main__":
    main()
