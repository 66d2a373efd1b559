"""What membership attacks find of letters under noise, beside the tokens that are read: results/letters.json.

    OMP_NUM_THREADS=1 python benchmarks/measure_letters.py OUT [--attacks NAME ...] [--sigmas X ...]

A suite is swept in one process: the quick preset's training of `transformer` on letters, seed 0, undefended and under
`dp` and `dp_sgd` at five sigmas; audits with 80 canaries of each family, and 4 reference runs but for `dp_sgd`; single
letters at random weights. Records in OUT are kept, so an interrupted run goes on; the file has all that are there.
`mia_update_cosine` follows the server through all rounds, two CPU minutes a sigma, more than all others together:
`--attacks` and `--sigmas` leave it for later.

The law: noise of standard deviation s on a gradient [m, n] drowns singular values below s (sqrt m + sqrt n), so rows
should stop telling where the smallest one of a letter's k tokens, the k-th, is drowned (`predicted`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from ppbench.adversary.victims import choose_victims
from ppbench.base.bars import Bars
from ppbench.base.vocabulary import PADDING
from ppbench.federation.threats import HONEST_SERVER
from ppbench.records.schema import Record
from ppbench.run.config import configure
from ppbench.run.suite import load_suite
from ppbench.run.sweep import sweep
from ppbench.run.task import make_task

RESULTS = Path(__file__).parent / "results" / "letters.json"
VICTIMS = 8
SIGMAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
READERS = ("token_rows", "dlg")
ALONE = ("mia_loss", "mia_mentr", "mia_nn", "mia_update_cosine")
MEMBERSHIP = (*ALONE, "mia_lira", "mia_rmia")
"""Attacks on membership: without reference runs, and all."""
FIRST_LAYER, CLIP = "features.blocks.0.query_key_value.weight", 1.0
"""The layer whose rows `token_rows` tries first; the norm to which `dp_sgd` clips."""
KEPT = {
    "reconstruction": ("reconstruction_accuracy", "texts_exact", "facts_found", "rouge_1", "rouge_2"),
    "membership": (
        *("asr", "auc", "tpr_at_1pct_fpr", "canary_auc", "canary_tpr_at_1pct_fpr"),
        *("auc_mislabelled", "auc_planted", "auc_out_of_distribution"),
    ),
}
"""Metrics of a record that the file has, each with its interval and n."""
SUITE = f"""
schema = "ppbench.run.suite/1"
id = "letters"
version = 1
title = "Letters under noise: who was trained on, beside what is read"
base = "quick"
seeds = [0]
task = {{ dataset = "letters", model = "transformer" }}

[questions]
attacks = {json.dumps([*READERS, *MEMBERSHIP])}
attack_batch = [1]
victims = {VICTIMS}
stages = ["init", "audit"]
threats = ["server/1"]
references = 4

[attack.dlg]
budget = 300
restarts = 0

[[defense]]
id = "none"

[[defense]]
id = "dp"
grid = {[*SIGMAS]}

[[defense]]
id = "dp_sgd"
grid = {[*SIGMAS]}
questions = {{ references = 0, attacks = {json.dumps([*READERS, *ALONE])} }} # one by one, they take as long as all else
"""


def figures(record: Record) -> dict[str, list[float | int | None]]:
    """Return value, ends of the interval and n of the metrics in `KEPT`, by name."""
    metrics = (record.metric(name) for name in KEPT[record.config.attack.kind])
    known = (metric for metric in metrics if metric is not None)
    return {m.name: [rounded(m.value), rounded(m.low), rounded(m.high), m.n] for m in known}


def rounded(value: float | None) -> float | None:
    """Return a figure to four digits."""
    return None if value is None else round(value, 4)


def points(records: list[Record]) -> list[dict[str, Any]]:
    """Return what was measured at each defense and sigma."""
    by_sigma: dict[tuple[str, float], dict[str, Any]] = {}
    for record in sorted(records, key=lambda one: (one.config.attack.id, one.config.threat_model.id)):
        config, utility = record.config, record.utility
        sigma = config.defense.control.value if config.defense.control else 0.0
        point = by_sigma.setdefault((config.defense.id, sigma), {"defense": config.defense.id, "sigma": sigma})
        of_stage = point.setdefault(config.stage, {"epsilon": record.privacy.epsilon, "attacks": {}})
        of_stage["accuracy"] = [rounded(one) for one in (utility.accuracy, utility.low, utility.high, utility.chance)]
        name = f"{config.attack.id} {config.threat_model.id}"
        of_stage["attacks"][name] = figures(record) if record.status == "complete" else record.reason
    return [by_sigma[key] for key in sorted(by_sigma)]


def predicted() -> dict[str, list[float]]:
    """Return the sigma at which the noise drowns the smallest singular value of each letter, by defense."""
    task = make_task(configure(defense="none", dataset="letters", model="transformer"))
    sigmas: dict[str, list[float]] = {"dp": [], "dp_sgd": []}
    for data in choose_victims(task.shards, HONEST_SERVER, 1, VICTIMS, task.seeds).data.values():
        params = {name: value.clone().requires_grad_() for name, value in task.params.items()}
        loss = task.plan.objective(params, data.x, data.y, torch.ones(1))
        slopes = dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))
        norm = math.sqrt(sum(float(slope.square().sum()) for slope in slopes.values()))
        layer = slopes[FIRST_LAYER].double()
        smallest = float(torch.linalg.svdvals(layer)[int((data.x != PADDING).sum()) - 1])
        sigma = smallest / sum(math.sqrt(side) for side in layer.shape)
        sigmas["dp"].append(sigma)
        sigmas["dp_sgd"].append(sigma * min(1.0, CLIP / norm))
    return sigmas


def main(words: list[str]) -> int:
    """Sweep what is missing, and write the file; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--attacks", nargs="+", default=[*READERS, *MEMBERSHIP])
    parser.add_argument("--sigmas", nargs="+", default=[f"{sigma:g}" for sigma in SIGMAS])
    chosen = parser.parse_args(words)
    torch.set_num_threads(1)
    chosen.out.mkdir(parents=True, exist_ok=True)
    suite = chosen.out / "letters.toml"
    suite.write_text(SUITE, encoding="utf-8")
    print(f"device cpu, one thread, dtype float32, torch {torch.__version__}", flush=True)
    only = {"attack": chosen.attacks, "control": chosen.sigmas}
    swept = sweep(load_suite(suite), out=chosen.out / "results", engine="inline", only=only, progress=Bars(quiet=True))
    kept = {
        "device": "cpu, one thread",
        "dtype": "float32",
        "torch": torch.__version__,
        "suite": SUITE,
        "predicted": predicted(),
        "points": points([*swept.records]),
    }
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
