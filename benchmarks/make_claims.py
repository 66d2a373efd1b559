"""Make the records behind the older tables in leaderboards/: settings of papers that no suite had.

Run: PPBENCH_SHARED=FOLDER python benchmarks/make_claims.py OUT [PART ...]
FOLDER holds data/cifar10, data/mnist (parquet) and data/bank-marketing.csv.gz; without it only digits are evaluated.
Finished cells are found again. PART: some of `digits`, `fedpc`, `baffle`, `bank`, `cifar`, `mnist`, `baffle_images`;
all by default.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.run.evaluation import evaluate

BATCHES = (1,)
MEMBERS = ("mia_loss", "mia_mentr", "mia_nn", "unmask_regression", "unmask_projection", "unmask_data_free")
FAST = {"stages": ("init",), "attack_batch": (1,), "victims": 12}
OF_FEDPC = {k: v for k, v in FedPC.setting["quick"].items() if k != "attack_batch"}
MODELS = ("query", "extract_regression", "extract_data_free")


def runs(data: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Return the evaluations by part, as keywords of `evaluate`."""
    found: dict[str, list[dict[str, Any]]] = {
        "digits": [
            {"defense": "pbpfl", "attack_batch": BATCHES},
            {"defense": "pbpfl_ext", "attack_batch": BATCHES, "grid": (10.0,), "rounds": 100},
            {"defense": "mpdp", "attack_batch": BATCHES},
            {"defense": "mp_cdp", "attack_batch": BATCHES, "grid": (3.0,)},
            {
                **{"defense": "mpdp", "attack_batch": BATCHES, "grid": (3.0,), "rounds": 300, "clients": 100},
                **{"train": 500, "settings": {"graph": "n_out", "n": 5}, "stages": ("iterate", "final")},
                **{"attacks": (*MEMBERS, *MODELS)},  # the paper's K and n
            },
        ]
    }
    found["fedpc"] = [
        {"defense": "fedpc", "victims": 12},
        *(
            {"defense": "fedpc", "clients": n, "grid": (0.2,), "attacks": ("dlg", "adaptive_fedpc"), **FAST}
            for n in (3, 10)
        ),
        *({"defense": name, **OF_FEDPC, "attacks": ("dlg",), **FAST} for name in ("phong", "central")),
    ]
    found["baffle"] = [
        {"defense": "baffle"},
        {
            "defense": "baffle",
            "grid": (300.0,),
            "settings": {"masks": "ring64"},
            "threats": ("collusion/1",),
            **FAST,
            "victims": 20,
            "attacks": ("dlg", "label_recovery", "baffle_sketch", "baffle_labels"),
        },
    ]
    if data is None:
        return found
    table = f"csv:{data / 'bank-marketing.csv.gz'}?target=y&sep=;&split=8:1:1&task=regression"
    found["bank"] = [
        {
            **{"defense": "pbpfl", "dataset": table, "grid": (10.0,), "clients": clients, "rounds": 1500},
            **{"model_options": {"hidden": 64, "layers": layers}, "attacks": ("analytic",), "victims": 10},
            **{"stages": ("final",), "attack_batch": BATCHES, "lr": 1e-3},
        }
        for layers in (3, 5, 7)
        for clients in (1, 5, 10)
    ]
    common = {"attack_batch": BATCHES, "victims": 20}
    cifar, mnist = f"parquet:{data / 'cifar10'}", f"parquet:{data / 'mnist'}"
    found["cifar"] = [
        {
            **common,
            **{"defense": "pbpfl", "dataset": cifar, "train": 1000, "clients": 5, "grid": (10.0, 100.0)},
            **{"model_options": {"hidden": "256,128"}, "rounds": 600, "lr": 1e-3},
            **{"attacks": ("analytic", *MEMBERS, *MODELS)},
        },
        {
            **common,
            **{
                "defense": "mpdp",
                "dataset": cifar,
                "train": 1000,
                "clients": 5,
                "grid": (3.0,),
                "rounds": 5,
                "lr": 0.01,
            },
            **{"model_options": {"hidden": "64,64", "bias": False}, "stages": ("init",)},
            **{"attacks": ("analytic", "label_recovery", "adaptive_mpdp", "mpdp_histogram")},
        },
    ]
    found["mnist"] = [
        {
            **common,
            **{"defense": "mpdp", "dataset": mnist, "train": 300, "clients": 20, "grid": (10.0,)},
            **{"model_options": {"hidden": 32, "bias": False}, "rounds": 300},
            **{"attacks": ("analytic", "label_recovery", "adaptive_mpdp", "mpdp_histogram", *MEMBERS, *MODELS)},
        }
    ]
    found["baffle_images"] = [
        {
            **{"defense": "baffle", "dataset": cifar, "model": model, "train": 640, "batch_size": 64, "rounds": 1},
            **{"grid": (10.0,), "settings": {"scheme": "twice"}, "attacks": ("baffle_labels", "label_recovery")},
            **{"stages": ("init",), "attack_batch": BATCHES},
        }
        for model in ("lenet_baffle", "wrn_10_2")
    ]
    found["baffle_images"].append(
        {
            **{"defense": "baffle", "dataset": mnist, "model": "lenet_baffle", "train": 640, "batch_size": 32},
            **{"upload": "delta", "settings": {"scheme": "twice", "level": "epoch"}, "grid": (100.0,), "rounds": 20},
            **{"attacks": ("label_recovery",), "stages": ("init",), "attack_batch": BATCHES},
        }
    )
    return found


def main(out: Path, parts: list[str]) -> None:
    """Run what is missing."""
    shared = os.environ.get("PPBENCH_SHARED")
    every = runs(Path(shared) / "data" if shared else None)
    for part in parts or list(every):
        for options in every.get(part, []):
            result = evaluate(out=out / part, workers=2, **options)
            print(part, options["defense"], *result.verdict, sep="\n  ", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
