"""An engine that is made anew in every round tells the epsilon of that round alone.

Run: python opacus_rounds.py, beside torch and Opacus. Seen with Opacus 1.4.1, 1.5.4 and 1.6.0 on torch 2.13.0.

A `PrivacyEngine` counts its own steps. A federated client that makes one in each round's training, as Flower's example
does (adap/flower, examples/opacus/opacus_fl/client_app.py), prints a number that is the same in every round, while the
examples take part in all of them. One engine kept over the rounds, or `accountant.load_state_dict`, tells the sum.
"""

import warnings

import torch
from opacus import PrivacyEngine
from opacus.accountants import RDPAccountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
ROUNDS, DELTA = 20, 1e-5


def main() -> None:
    """Print what each round's engine tells, and what all steps together amount to."""
    torch.manual_seed(0)
    weights, data = nn.Linear(4, 2), TensorDataset(torch.rand(128, 4), torch.randint(0, 2, (128,)))
    noted, result = RDPAccountant(), list[float]()
    for round_ in range(ROUNDS):
        model = nn.Linear(4, 2)
        model.load_state_dict(weights.state_dict())
        engine = PrivacyEngine(accountant="rdp")
        private, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=DataLoader(data, 16),
            noise_multiplier=1.0, max_grad_norm=1.0,
        )  # fmt: skip
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(x), y).backward()
            optimizer.step()
        if round_ in (0, ROUNDS - 1):
            result.append(engine.get_epsilon(DELTA))
        noted.history += engine.accountant.history
        weights.load_state_dict(model.state_dict())
    print(f"epsilon told in rounds 1 and {ROUNDS}: {result[0]:.2f}, {result[-1]:.2f}")
    print(f"epsilon of all {ROUNDS} rounds: {noted.get_epsilon(DELTA):.2f}")


if __name__ == "__main__":
    main()
