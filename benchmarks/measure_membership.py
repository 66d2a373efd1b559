"""What membership attacks find in audits of overfit models, and of models that learn nothing: printed as JSON.

Run: OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_membership.py [digits] [mnist]

Few records and many rounds, so that the models remember; 80 canaries of each of three families, members by coin;
reference runs from public records. Every figure is that of `ppbench.records.figure` with its 95 % interval. MNIST is
read from the folder mnist (parquet) of PPBENCH_TEST_DATA.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppbench.adversary.attack import Attack
from ppbench.base.registry import load_plugin
from ppbench.questions.membership import score_members
from ppbench.records.figure import aggregate
from ppbench.run.audit.runs import PointAudit
from ppbench.run.config import EvaluateConfig, configure
from ppbench.run.experiment import Point, make_defense, resolve

COMMON: dict[str, Any] = {
    "defense": "none", "attacks": ("mia_loss",), "clients": 2, "schedule": "parallel", "public": 0.5,
    "stages": ("audit",), "canaries": 80, "candidates": 60, "train": 300, "decay_at": (), "lr": 3e-3, "references": 16,
    "batch_size": 16,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp", "model_options": {"hidden": 256}, "rounds": 120, "lr": 5e-3, "decay_at": (80,), "decay": 0.2,
    },
    "mnist": {"model": "cnn", "rounds": 30},
}  # fmt: skip
SEEDS = {"digits": (3, 4, 5, 6, 7), "mnist": (1,)}
"""Other seeds than those on which the settings were chosen (0 to 2)."""
WANTED = (
    "canary_tpr_at_1pct_fpr", "canary_auc", "auc", "asr", "tpr_at_1pct_fpr", "auc_mislabelled", "auc_blank",
    "auc_out_of_distribution", "epsilon_lower"
)  # fmt: skip
ATTACKS: tuple[tuple[str, int], ...] = (
    ("mia_loss", 0), ("mia_lira", 16), ("mia_lira", 4), ("mia_lira_offline", 16), ("mia_rmia", 4), ("mia_rmia", 16),
    ("mia_rmia_offline", 4), ("mia_update_cosine", 0), ("mia_whitebox", 0), ("audit_one_run", 0),
)  # fmt: skip
"""Attacks and the references that each may use."""


def config_of(case: str, references: int, seed: int = 0) -> EvaluateConfig:
    """Return the evaluation of a case."""
    dataset = "digits" if case == "digits" else f"parquet:{Path(os.environ['PPBENCH_TEST_DATA']) / 'mnist'}"
    return configure(**{**COMMON, **CASES[case], "dataset": dataset, "references": references, "seed": seed})


def figures_of(attack: Attack, audit: PointAudit, threat: str, seed: int) -> dict[str, Any]:
    """Return the figures of one attack, each with its interval."""
    task, view = audit.experiment.task, audit.view(threat)
    generator = task.seeds.generator("attack", attack.name, threat, seed)
    scored = score_members(audit.candidates, attack.run(view, audit.challenges(), generator))
    result = aggregate(scored.victims, classes=task.plan.spec.classes, seed=0)
    return {m.name: [m.value, m.low, m.high, m.n] for m in result if m.name in WANTED}


def measure(case: str, defense: str, seed: int, cache: Path) -> dict[str, Any]:
    """Return what the attacks that are installed find in a case under a defense."""
    began, config = time.perf_counter(), config_of(case, 16, seed)
    audit = PointAudit.of(resolve(config), Point(make_defense(defense)), cache)
    target = audit.complete()
    result: dict[str, Any] = {"accuracy": target.trained.utility.accuracy, "flags": [f.code for f in audit.flags()]}
    result["seconds of training"] = round(time.perf_counter() - began, 1)
    for name, count in ATTACKS:
        result |= _attacked(name, count, audit)
    return result


def cases(names: Sequence[str], cache: Path) -> dict[str, Any]:
    """Return all figures by case, defense and seed, and the settings."""
    results: dict[str, Any] = {}
    for case in names:
        results[case] = {"setting": {**COMMON, **CASES[case]}}
        for defense in ("none", "full_noise"):
            results[case][defense] = {f"seed {seed}": measure(case, defense, seed, cache) for seed in SEEDS[case]}
    return results


def _attacked(name: str, count: int, audit: PointAudit) -> dict[str, Any]:
    """Return the figures of an attack by name, with the first `count` references, from every view that it can use."""
    attack: Attack = load_plugin("attacks", name)()
    references, dropped = audit.references
    fewer = None
    if references is not None and count:
        keep, outputs, population = references.keep, references.outputs, references.population
        fewer = replace(references, keep=keep[:count], outputs=outputs[:count], population=population[:count])
    known = replace(audit)
    known.__dict__["references"] = (fewer, dropped)
    label = f"{name} R={count}" if count else name
    result, run = {}, partial(figures_of, attack, known)
    for threat in attack.threats:
        if threat in ("server/1", "client/1"):
            began = time.perf_counter()
            result[f"{label} {threat}"] = run(threat, 0) | {"seconds": round(time.perf_counter() - began, 1)}
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(cases(sys.argv[1:] or tuple(CASES), Path(folder)), indent=1))
