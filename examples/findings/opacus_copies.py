"""The engine's epsilon is of one example: of a record that a client holds several times, it is no bound.

Run: python opacus_copies.py, beside torch and Opacus. Seen with Opacus 1.4.1, 1.5.4 and 1.6.0 on torch 2.13.0.

Clipping and accounting are by example, as PrivacyEngine's documentation says of per-sample gradients. A client that
holds a record COPIES times adds as many clipped gradients of it. Here an observer tells the updates of a client that
holds it from those of one that does not, by one threshold; the 99.9 % bounds on its hits and false alarms give a lower
bound on the epsilon of that record. Accounting for a person's records together, or for the client, needs the norm of
their sum clipped.
"""

import math
import warnings

import torch
from opacus import PrivacyEngine
from scipy.stats import beta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
RUNS, OTHERS, COPIES, NOISE, CLIP, DELTA = 1200, 8, 8, 4.0, 1.0, 1e-5


def updates(copies: int) -> tuple[torch.Tensor, float]:
    """Return the sums of gradients [RUNS] that steps on all examples tell, and the engine's epsilon of one step."""
    x = torch.cat([torch.zeros(OTHERS, 1), torch.full((COPIES, 1), 5.0 if copies else 0.0)])
    model = nn.Linear(1, 1, bias=False)
    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), noise_multiplier=NOISE, max_grad_norm=CLIP,
        data_loader=DataLoader(TensorDataset(x), len(x)),
    )  # fmt: skip
    results, epsilon = [], 0.0
    while len(results) < RUNS:
        for (inputs,) in loader:
            nn.init.zeros_(model.weight)
            optimizer.zero_grad()
            (-private(inputs)).mean().backward()
            optimizer.step()
            epsilon = epsilon or engine.get_epsilon(DELTA)
            results.append(float(model.weight.detach()) * optimizer.expected_batch_size)
    return torch.tensor(results), epsilon


def main() -> None:
    """Print the engine's epsilon, and the least that the record's can be."""
    torch.manual_seed(0)
    with_, epsilon = updates(COPIES)
    without, _ = updates(0)
    line = 2.5 * NOISE * CLIP
    hits, alarms = int((with_ > line).sum()), int((without > line).sum())
    least_hits = beta.ppf(0.001, hits, RUNS - hits + 1)
    most_alarms = beta.ppf(0.999, alarms + 1, RUNS - alarms)
    bound = math.log((least_hits - DELTA) / most_alarms)
    print(f"engine's epsilon of one step at delta {DELTA:g}: {epsilon:.2f}")
    print(f"a record held {COPIES} times: {hits} hits, {alarms} false alarms in {RUNS}: epsilon at least {bound:.2f}")


if __name__ == "__main__":
    main()
