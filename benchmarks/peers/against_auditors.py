"""Attacks of `ppbench.audit` beside the code of ml_privacy_meter and of LeakPro, on the same outputs of models.

    export OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER PRIVACY_METER=CHECKOUT LEAKPRO=CHECKOUT
    python benchmarks/peers/against_auditors.py 0,1,2   # seeds

A checkout is a folder with their files (`git archive HEAD | tar x` of github.com/privacytrustlab/ml_privacy_meter,
commit e384af8, and of github.com/aidotse/LeakPro, commit c47752f). Their attacks run as they stand; of LeakPro its
loaders, reports and store of shadow models, none of which compute a score, are replaced by nothing.

CIFAR-10: a network of two convolutions is trained on 500 images for 30 epochs, and so are 16 references,
each on a half of 1,000 candidates; 1,000 other images are the population of RMIA. Each attack gets these outputs, of
each image as it is. `ppbench.audit` itself reads those of mirror images too: the last rows. LeakPro's RMIA draws its
population from the candidates, half of them, and has a gamma, a temperature and an `offline_a` of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ppbench.adversary.attack import References
from ppbench.attacks.membership.model_queries import AuditAttack
from ppbench.attacks.membership.references import LiRA, OfflineLiRA, OfflineRMIA
from ppbench.base.seeds import Seeds
from ppbench.metrics.membership import Half, auc, tpr_at
from ppbench.run.model_audit import member_set, without_duplicates
from ppbench.run.model_subject import AttackedModel, Trainer, evaluated_network
from ppbench.task.user_data import open_dataset

Scores = NDArray[np.float64]
MEMBERS, OTHERS, REFERENCES, EPOCHS, BATCH = 500, 1500, 16, 30, 50
A = 0.3
"""RMIA's offline correction in ours and in ml_privacy_meter."""
NAMES = {
    "lira": "LiRA",
    "lira_offline": "LiRA, offline",
    "rmia_offline": "RMIA, offline",
}


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """Return a network that remembers its training images."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2048, 10)]
    model = nn.Sequential(*layers)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            opt.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            opt.step()
    return model


# -- theirs -----------------------------------------------------------------------------------------------------------
def module(name: str, path: Path) -> ModuleType:
    """Return a Python file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def replaced(names: Mapping[str, Mapping[str, object]]) -> None:
    """Let modules of these names hold these things alone."""
    for name, things in names.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(things)


def leakpro() -> tuple[type[Any], type[Any]]:
    """Return LeakPro's LiRA and RMIA."""
    folder = Path(os.environ["LEAKPRO"]) / "leakpro" / "attacks"
    store = SimpleNamespace(attack_cache_folder_path="")
    result = SimpleNamespace(from_full_scores=lambda **_: None)
    lines = SimpleNamespace(info=lambda _: None)
    replaced(
        {
            "leakpro.attacks.mia_attacks.abstract_mia": {"AbstractMIA": object},
            "leakpro.attacks.utils.shadow_model_handler": {"ShadowModelHandler": lambda: store},
            "leakpro.input_handler.mia_handler": {"MIAHandler": object},
            "leakpro.reporting.mia_result": {"MIAResult": result},
            "leakpro.signals.signal": {"ModelLogits": object},
            "leakpro.signals.signal_extractor": {"PytorchModel": object},
            "leakpro.utils.import_helper": {"Self": Any},
            "leakpro.utils.logger": {"logger": lines},
            "tqdm": {"tqdm": lambda values, **_: values},
        }
    )
    module("leakpro.attacks.utils.utils", folder / "utils" / "utils.py")
    attacks = folder / "mia_attacks"
    lira: type[Any] = module("leakpro_lira", attacks / "lira.py").AttackLiRA
    rmia: type[Any] = module("leakpro_rmia", attacks / "rmia.py").AttackRMIA
    return lira, rmia


class Arrays:
    """What every attack gets: logits of the model and of its references, on candidates and a population."""

    def __init__(self, subject: AttackedModel, references: References) -> None:
        self.member = subject.candidates.member.numpy()
        self.labels = subject.candidates.labels.argmax(1).numpy()
        self.target, self.outputs = subject.outputs.numpy(), references.outputs[:, 0].numpy()
        self.keep = references.keep.numpy()
        self.population, self.population_labels = references.population.numpy(), references.labels.argmax(1).numpy()
        self.population_target = subject.answers(subject.params, references.x).numpy()

    @staticmethod
    def likelihoods(logits: Scores, labels: NDArray[np.int64]) -> Scores:
        """Return the probability of the right class [..., N] by logits [..., N, C]."""
        probabilities = torch.from_numpy(logits).softmax(-1).numpy()
        right: Scores = probabilities[..., np.arange(len(labels)), labels]
        return right

    def of_privacy_meter(self) -> dict[str, Scores]:
        """Return the scores [Q] of ml_privacy_meter: the model first, an empty place for its pair, the references."""
        run_rmia = module("privacy_meter", Path(os.environ["PRIVACY_METER"]) / "attacks.py").run_rmia

        def beside(target: Scores, others: Scores) -> Scores:
            return np.column_stack([target, np.zeros_like(target), others.T])

        signals = beside(self.likelihoods(self.target, self.labels), self.likelihoods(self.outputs, self.labels))
        labels = self.population_labels
        z = beside(self.likelihoods(self.population_target, labels), self.likelihoods(self.population, labels))
        memberships = np.column_stack([self.member, ~self.member, self.keep.T])
        return {"rmia_offline": run_rmia(0, signals, z, memberships, REFERENCES // 2, A)}

    def of_leakpro(self, seed: int) -> dict[str, Scores]:
        """Return the scores [Q] of LeakPro's attacks by their own settings."""
        lira, rmia = leakpro()
        inside, outside = np.flatnonzero(self.member), np.flatnonzero(~self.member)
        audited = {"data": np.arange(len(self.member)), "in_members": inside, "out_members": outside}
        common = {"audit_dataset": audited, "out_indices": ~self.keep}
        scores = {}
        for name, online in (("lira", True), ("lira_offline", False)):
            attack = lira.__new__(lira)
            vars(attack).update(common, **lira.AttackConfig(num_shadow_models=REFERENCES, online=online).model_dump())
            attack.configs, attack.fix_var_threshold = lira.AttackConfig(), 32
            attack.target_logits = attack.rescale_logits(self.target, self.labels)
            attack.shadow_models_logits = np.array([attack.rescale_logits(x, self.labels) for x in self.outputs])
            attack.run_attack()
            scores[name] = self._joined(attack)
        np.random.seed(seed)  # its draw of the population
        attack = rmia.__new__(rmia)
        vars(attack).update(common, **rmia.AttackConfig(num_shadow_models=REFERENCES, online=False).model_dump())
        attack.configs, attack.epsilon, attack.load_for_optuna = rmia.AttackConfig(), 1e-6, True
        attack.attack_data_indices, attack.ground_truth_indices = audited["data"], self.labels
        attack.logits_theta, attack.logits_shadow_models = self.target, list(self.outputs)
        attack.shadow_models = [None] * REFERENCES
        places = {"train_indices": audited["data"], "test_indices": [], "target_model": None}
        attack.handler = SimpleNamespace(get_labels=lambda rows: self.labels[rows], **places)
        attack.prepare_attack()
        attack.run_attack()
        return {**scores, "rmia_offline": self._joined(attack)}

    def _joined(self, attack: Any) -> Scores:
        scores = np.empty(len(self.member))
        scores[self.member], scores[~self.member] = attack.in_member_signals[:, 0], attack.out_member_signals[:, 0]
        return scores


# -- ours -------------------------------------------------------------------------------------------------------------
def of_ours(subject: AttackedModel, references: References) -> dict[str, Scores]:
    """Return the scores [Q] of our attacks."""
    attacks: dict[str, AuditAttack] = {"lira": LiRA(), "lira_offline": OfflineLiRA(), "rmia_offline": OfflineRMIA(a=A)}
    challenge, view = subject.candidates.challenge(0, references), subject.view(subject.params)
    return {name: attack.signal(view, challenge).numpy() for name, attack in attacks.items()}


def subject_of(seed: int) -> tuple[AttackedModel, References]:
    """Return a trained model with its candidates, and its references, as `ppbench.audit` makes them."""
    data = open_dataset(f"parquet:{os.environ['PPBENCH_TEST_DATA']}/cifar10", seed=0).train
    first = seed * (MEMBERS + OTHERS)
    rows = data.take(torch.arange(first, first + MEMBERS + OTHERS))
    x, y = rows.x, rows.y.argmax(1)
    members = member_set("members", (x[:MEMBERS], y[:MEMBERS]))
    others, _ = without_duplicates(members, member_set("nonmembers", (x[MEMBERS:], y[MEMBERS:])))
    torch.manual_seed(seed)
    network = evaluated_network(trained(x[:MEMBERS], y[:MEMBERS]), members, others, None)
    count, seeds = len(members.y), Seeds(seed)
    subject = AttackedModel.of(network, members, others, count, REFERENCES, seeds, torch.device("cpu"))
    references = Trainer(trained, subject, REFERENCES).references()
    print(f"seed {seed}: accuracy {subject.accuracy(True):.1%} of members, {subject.accuracy(False):.1%} of others")
    return subject, references


def main(seeds: str) -> None:
    """Print AUC and TPR at 1 % FPR of each attack on each side, of each seed and their means."""
    figures = dict[tuple[str, str], list[tuple[float, float, float]]]()
    for seed in map(int, seeds.split(",")):
        subject, references = subject_of(seed)
        plain, arrays = replace(references, outputs=references.outputs[:, :1]), Arrays(subject, references)
        ours = of_ours(subject, plain)
        sides = {
            "ppbench": ours,
            "ml_privacy_meter": arrays.of_privacy_meter(),
            "LeakPro": arrays.of_leakpro(seed),
            "ppbench.audit": of_ours(subject, references),
        }
        for side, attacks in sides.items():
            for name, scores in attacks.items():
                half = Half(arrays.member, scores, np.zeros(len(scores), bool))
                alike = float(spearmanr(scores, ours[name]).statistic)
                row = auc([half], 0).value, tpr_at([half], 0.01).value, alike
                figures.setdefault((name, side), []).append(row)
    for (name, side), each in sorted(figures.items()):
        areas, rates, alike = zip(*each, strict=True)
        every = [" ".join(f"{value:.3f}" for value in values) for values in (areas, rates)]
        ends = f"AUC {mean(areas):.3f} ({every[0]}), TPR at 1 % FPR {mean(rates):.3f} ({every[1]})"
        print(f"{NAMES[name]}, {side}: {ends}, rank correlation with ours {min(alike):.3f} at least", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
