"""How many images of a batch `spear` gives back exactly, beside `analytic`, as JSON: one run, one thread, fixed seeds.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... python benchmarks/measure_exact.py SETTING BATCHES DTYPES SEEDS

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... python benchmarks/measure_exact.py digits:64 4,8,12,16 float32,float64 10

SETTING is digits:HIDDEN, cifar:HIDDEN or bank:HIDDEN, the hidden widths of an MLP of ReLUs at random weights (two
layers: "128,64"; cifar and bank need the files of the folder). Each seed has its own weights and batch, drawn from the
whole training part; the upload is the plain gradient, labels are not granted. Both attacks see the same uploads.
exact: images within 1e-4 of the data range (root mean square), 80 dB; near: 40 dB; labels: batches with all right.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.reconstruction.spear import Spear
from ppbench.base.registry import load_plugin
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.nets.net import initial, net_spec

FILES = Path(os.environ.get("PPBENCH_TEST_DATA", "."))


@dataclass(frozen=True)
class Reached:
    """dB of every image, batches with all labels right, CPU seconds of every batch."""

    decibels: list[float]
    labels: int
    seconds: list[float]

    def report(self) -> dict[str, object]:
        """Return the figures for print."""
        size = len(self.decibels)
        return {
            "median_db": round(statistics.median(self.decibels), 1),
            "near": f"{sum(d > 40 for d in self.decibels)} of {size}",
            "exact": f"{sum(d > 80 for d in self.decibels)} of {size}",
            "labels": f"{self.labels} of {len(self.seconds)}",
            "median_s": round(statistics.median(self.seconds), 2),
            "most_s": round(max(self.seconds), 2),
        }


def examples(name: str) -> tuple[Data, tuple[float, float]]:
    """Return the training part of a data set, and the range of its inputs."""
    where = {
        "digits": ("digits", ""),
        "cifar": ("parquet", f"{FILES / 'cifar10'}"),
        "bank": ("csv", f"{FILES / 'bank-marketing.csv.gz'}?target=y&sep=;"),
    }
    plugin, argument = where[name]
    result = load_plugin("datasets", plugin)(argument, seed=0, root=FILES)
    y = torch.nn.functional.one_hot(result.train.y, result.classes).float()
    x = result.train.x
    return Data(x.float() / 255 if x.dtype == torch.uint8 else x, y), result.data_range


def upload(plan: Plan, batch: Data, seed: int, dtype: torch.dtype) -> View:
    """Return the server's view of one gradient, at weights of their own."""
    params = {n: v.to(dtype) for n, v in initial(plan.spec, seed).items()}
    update = simulation(plan, params)(batch.x[None].to(dtype), batch.y[None].to(dtype))
    letters = Model(params), Update({n: v.detach() for n, v in update.items()})
    mail = Envelope(0, 1, 0, SERVER, 0, 0, letters[0]), Envelope(0, 1, 0, 0, SERVER, 0, letters[1])
    return View("server/1", SERVER, plan, NoDefense(), mail, ())


def decibels(result: Tensor, truth: Tensor, width: float) -> list[float]:
    """Return the dB of each true input, matched one to one, at most 150."""
    errors = torch.cdist(truth.flatten(1).double(), result.flatten(1).double()) ** 2 / truth[0].numel() / width**2
    rows, columns = linear_sum_assignment(errors.numpy())
    return [float(d) for d in (-10 * errors[rows, columns].clamp(min=1e-15).log10())]


def measured(attack: Attack, views: list[tuple[View, Data]]) -> Reached:
    """Return what an attack reaches on views of one batch each."""
    reached, right, seconds = [], 0, []
    for seed, (view, batch) in enumerate(views):
        challenges = [Challenge((Slot(0, 0),), len(batch.x))]
        began = time.process_time()
        (guess,) = attack.run(view, challenges, torch.Generator().manual_seed(seed))
        seconds.append(time.process_time() - began)
        low, high = view.plan.data_range
        assert guess.x is not None and guess.y is not None
        reached += decibels(guess.x, batch.x, high - low)
        right += Counter(guess.y.tolist()) == Counter(batch.y.argmax(1).tolist())
    return Reached(reached, right, seconds)


def main() -> None:
    """Print a line of JSON for each batch size, precision and attack."""
    setting, batches, dtypes, seeds = sys.argv[1:5]
    name, _, hidden = setting.partition(":")
    data, data_range = examples(name)
    spec = net_spec("mlp", tuple(data.x.shape[1:]), data.y.shape[1], {"hidden": hidden})
    plan = replace(Plan(spec, 1, Local("gradient")), data_range=data_range)
    for count in map(int, batches.split(",")):
        for dtype in dtypes.split(","):
            views = []
            for seed in range(int(seeds)):
                some = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(seed))[:count]
                batch = Data(data.x[some], data.y[some])
                views.append((upload(plan, batch, seed, getattr(torch, dtype)), batch))
            for attack in (Spear(), AnalyticInversion()):
                row = {"setting": setting, "batch": count, "dtype": dtype, "attack": attack.name}
                print(json.dumps(row | measured(attack, views).report()), flush=True)


if __name__ == "__main__":
    main()
