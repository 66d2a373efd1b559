"""The expected batch size is cut to a whole number after a product that is a little too small.

Run: python opacus_expected_size.py, beside torch and Opacus. Seen with Opacus 1.4.1, 1.5.4 and 1.6.0 on torch 2.13.0.

`make_private` computes int(len(dataset) * (1 / len(loader))). 49 * (1 / 49) is 0.9999999999999999 in float64, so
that 49 examples in batches of 1 are expected 0 at a time, by which sums of gradients are divided: weights are no
numbers after the first step. 98 in batches of 2 are expected 1 at a time: steps are twice as long as meant, noise and
all. The number of samples an epoch, int(1 / rate), is one too few for 93 batches and others. Epsilon is that of the
steps taken, and right.
"""

import warnings

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")


def main() -> None:
    """Print what is expected, and the weights after a step."""
    for count, batch in ((50, 1), (49, 1), (98, 2), (93, 1)):
        model, data = nn.Linear(2, 2), TensorDataset(torch.rand(count, 2), torch.zeros(count, dtype=torch.int64))
        private, optimizer, loader = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, batch),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
        x, y = next(iter(loader))
        nn.functional.cross_entropy(private(x), y).backward()
        optimizer.step()
        finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
        size, samples = optimizer.expected_batch_size, len(loader)
        print(f"{count} examples in batches of {batch}: expected {size}, {samples} samples an epoch, finite: {finite}")


if __name__ == "__main__":
    main()
