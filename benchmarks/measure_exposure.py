"""By how many bits training on a planted letter exposes its names and numbers, under noise: results/exposure.json.

    OMP_NUM_THREADS=1 python benchmarks/measure_exposure.py OUT

Evaluations of letters at seed 0 with the quick preset's training, as a classification (`transformer`) and by next
tokens (`gpt`): audits with 80 canaries of each family, undefended and under `dp` and `dp_sgd`. `mia_loss` stands
beside. Finished cells in OUT are kept; about five CPU minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

import ppbench
from ppbench.questions.exposure import Exposure
from ppbench.records.schema import Record

RESULTS = Path(__file__).parent / "results" / "exposure.json"
GRIDS = {"dp": (1e-3, 1e-2, 1e-1, 1.0), "dp_sgd": (0.1, 0.5, 1.0, 2.0)}
LOSSES = ("cross_entropy", "next_token")
KEPT = (*(spec.name for spec in Exposure.specs), "auc", "canary_auc", "auc_planted")


def evaluated(out: Path, defense: str, loss: str) -> list[Record]:
    """Return the records of one defense and loss."""
    about: dict[str, Any] = {"dataset": "letters", "loss": loss, "stages": ("audit",), "workers": 1}
    name = f"{defense}-{loss}"
    attacks = ("exposure", "mia_loss")
    return [*ppbench.evaluate(defense=defense, grid=GRIDS[defense], attacks=attacks, out=out / name, **about).records]


def figures(record: Record) -> dict[str, list[float | None]]:
    """Return value and ends of the interval of each metric in `KEPT` that a record has."""
    return {m.name: [m.value, m.low, m.high] for m in record.metrics if m.name in KEPT}


def main(out: Path) -> None:
    """Evaluate, and write the file."""
    torch.set_num_threads(1)
    rows: dict[tuple[str, str, float], dict[str, Any]] = {}
    for loss in LOSSES:
        for defense in GRIDS:
            for record in evaluated(out, defense, loss):
                config = record.config
                sigma = config.defense.control.value if config.defense.control else 0.0
                key = (loss, config.defense.id, sigma)
                about = {"loss": loss, "defense": key[1], "sigma": sigma, "epsilon": record.privacy.epsilon}
                rows.setdefault(key, {**about, "accuracy": record.utility.accuracy}).update(figures(record))
    kept = {"device": "cpu, one thread", "dtype": "float32", "torch": torch.__version__, "rows": [*rows.values()]}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
