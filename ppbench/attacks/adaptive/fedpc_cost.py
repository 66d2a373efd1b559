"""What FedPC's cost channel gives away: each round's C_k is the loss of the client's model on all its examples.

It is sent in the clear, by every client in every round (Cao et al. 2022, Eq. 1). Who holds candidate sets of examples
compares their losses with it. The server lacks the models Q_k of all but the pilot; the next broadcast, which the
pilot's model and the others' ternaries make, stands for them, up to an offset that all candidates share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppbench.base.tree import Params
from ppbench.defenses.fedpc.messages import Cost
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View


def reported_costs(view: View, client: int, probe: int = -1) -> dict[int, float]:
    """Return the cost that `client` told, by round, as far as `view` shows it; `probe` -1: the observed real round."""
    return {
        letter.round: float(letter.message.value)
        for letter in view.mail
        if (letter.probe, letter.sender) == (probe, client) and isinstance(letter.message, Cost)
    }


def mean_loss(plan: Plan, params: Params, data: Data) -> float:
    """Return the mean loss of the model `params` on `data`: what a client with these would tell as its cost."""
    with torch.no_grad():
        return float(plan.example_loss(plan.net(params, data.x), data.y).double().mean())


def cost_distances(plan: Plan, costs: Sequence[float], models: Sequence[Params], candidates: Sequence[Data]) -> Tensor:
    """Return how far each candidate set's losses are from the told costs: mean squares over rounds, [K] float64.

    Args:
        plan: gives network and loss.
        costs: C_k of R rounds, R >= 1.
        models: for each round the model that stands for Q_k: Q_k itself of a pilot, else the next broadcast.
        candidates: K sets of examples, of which one is supposed to be the client's.
    """
    told = torch.tensor(costs, dtype=torch.float64)
    losses = torch.tensor([[mean_loss(plan, m, d) for m in models] for d in candidates], dtype=torch.float64)
    return ((losses - told) ** 2).mean(1)
