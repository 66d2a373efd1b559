"""RMIA and LiRA beside the published implementations, on the same arrays.

peers/scores.npz: outputs of 64 made-up reference runs (float16) on 60 candidates and 40 records of a population,
those of a target model, and what two public implementations make of them:
    rmia_offline  privacytrustlab/ml_privacy_meter, commit e384af8fd9319b8eeb1303aa82474df1441e3c59, attacks.py:
                  run_rmia(0, probabilities, population, memberships, 32, .3), the target and its complement first
    lira, lira_offline  aidotse/LeakPro, commit c47752fad0fb48cba7d4d03023cdcedf267501c4,
                  leakpro/attacks/mia_attacks/lira.py: AttackLiRA.run_attack, var_calculation "carlini", online and not
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Challenge, References
from ppbench.attacks.membership import references as lira
from ppbench.attacks.membership import references as rmia
from ppbench.attacks.membership.references import LiRA, OfflineLiRA, OfflineRMIA
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.net import net_spec

PEERS = np.load(Path(__file__).parent / "peers" / "scores.npz", allow_pickle=False)


def tensor(name: str) -> Tensor:
    return torch.from_numpy(PEERS[name])


def one_hot(name: str) -> Tensor:
    return torch.nn.functional.one_hot(tensor(name).long(), 3).double()


@pytest.fixture
def inputs(monkeypatch) -> tuple[View, Challenge]:
    """Return a view and a challenge whose model answers what the arrays say."""
    target, population = tensor("target").double(), tensor("population_target").double()
    for module in (lira, rmia):
        monkeypatch.setattr(module, "target_outputs", lambda view, x, count: target[None])
    monkeypatch.setattr(rmia, "model_outputs", lambda view, x: population)
    outputs, keep = tensor("outputs").double()[:, None], tensor("keep")
    others = torch.zeros(len(population), 4)
    references = References(keep, outputs, one_hot("population_labels"), others, tensor("population").double())
    labels, known = one_hot("labels"), torch.full((len(target),), -1, dtype=torch.int8)
    view = View("client/1", 0, Plan(net_spec("mlp", (1, 2, 2), 3), 2), NoDefense(), (), ())
    return view, Challenge((), 1, x=torch.zeros(len(target), 4), labels=labels, known=known, references=references)


def gamma(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the rank correlation over the pairs that `theirs` tells apart: shares of 40 records are often equal."""
    one, other = (np.sign(values[:, None] - values[None]) for values in (ours, theirs))
    return float((one * other)[other != 0].mean())


@pytest.mark.parametrize(
    ("attack", "peer", "least"),
    [
        (OfflineRMIA(a=0.3), "rmia_offline", 0.99),
        (LiRA(), "lira", 0.995),
        (OfflineLiRA(), "lira_offline", 0.995),
    ],
    ids=["rmia", "lira", "lira_offline"],
)
def test_scores_rank_candidates_as_the_published_ones_do(attack, peer, least, inputs):
    scores, theirs = attack.signal(*inputs).numpy(), PEERS[peer]
    result = gamma(scores, theirs) if peer.startswith("rmia") else float(spearmanr(scores, theirs).statistic)
    assert result >= least, f"rank correlation {result:.4f}"
    member = PEERS["member"]
    assert abs(roc_auc_score(member, scores) - roc_auc_score(member, theirs)) < 0.03
