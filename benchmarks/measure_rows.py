"""How many columns of table rows attacks find in one gradient, as JSON: one run, one thread, fixed seeds.

    OMP_NUM_THREADS=1 python benchmarks/measure_rows.py CSV ACTIVATIONS BATCHES ATTACKS SEEDS

    OMP_NUM_THREADS=1 python benchmarks/measure_rows.py 'bank-marketing.csv.gz?target=y&sep=;' relu,sigmoid 1,4,8 \
        tableak,dlg,ig,analytic,spear 5

MLPs of one hidden layer of 64 at random weights. Each seed has its own weights and batch, the same for all attacks,
drawn from the training part; the upload is the plain gradient in float32, labels are not granted. ATTACKS may have
parameters: ig:budget=6000. median: of the accuracy of rows (`questions.images`); blind: the same of the most frequent
categories and means; rows: those with all columns right; seconds: of the CPU, median of batches.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

from ppbench.adversary.attack import Attack, Challenge
from ppbench.base.registry import load_plugin
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Columns, Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.metrics.image import match
from ppbench.nets.net import initial, net_spec
from ppbench.questions.images import row_accuracy
from ppbench.run.experiment import make_attack
from ppbench.task.dataset import Dataset


def upload(plan: Plan, batch: Data, seed: int) -> View:
    """Return the server's view of one gradient, at weights of their own."""
    params = initial(plan.spec, seed)
    update = simulation(plan, params)(batch.x[None], batch.y[None])
    mail = (
        Envelope(0, 1, 0, SERVER, 0, 0, Model(params)),
        Envelope(0, 1, 0, 0, SERVER, 0, Update({n: v.detach() for n, v in update.items()})),
    )
    return View("server/1", SERVER, plan, NoDefense(), mail, ())


def accuracies(attack: Attack, view: View, batch: Data, seed: int) -> tuple[list[float], float]:
    """Return the accuracy of each row, matched as evaluations do, and the CPU seconds."""
    columns = view.plan.columns
    assert columns is not None
    began = time.process_time()
    (guess,) = attack.run(view, [Challenge((Slot(0, 0),), len(batch.x))], torch.Generator().manual_seed(seed))
    seconds = time.process_time() - began
    assert guess.x is not None
    x = guess.x[match(guess.x, batch.x, view.plan.data_range)]
    return [row_accuracy(one, truth, columns) for one, truth in zip(x, batch.x, strict=True)], seconds


def main() -> None:
    """Print a line of JSON for each activation, batch size and attack."""
    csv, activations, sizes, attacks, seeds = sys.argv[1:]
    data: Dataset = load_plugin("datasets", "csv")(csv, seed=0, root=Path())
    columns = data.columns or Columns(data.shape[0])
    for activation in activations.split(","):
        spec = net_spec("mlp", data.shape, data.classes, {"hidden": 64, "activation": activation})
        plan = Plan(spec, 1, Local("gradient"), data_range=data.data_range, columns=data.columns)
        for size in map(int, sizes.split(",")):
            drawn = [
                torch.randperm(len(data.train), generator=torch.Generator().manual_seed(s)) for s in range(int(seeds))
            ]
            batches = [data.train.take(order[:size]) for order in drawn]
            mean = data.test.x.mean(0)
            blind = statistics.median(row_accuracy(mean, x, columns) for batch in batches for x in batch.x)
            views = [upload(plan, batch, seed) for seed, batch in enumerate(batches)]
            for text in attacks.split(","):
                name, _, options = text.partition(":")
                attack = make_attack(name, dict(option.split("=") for option in options.split("+") if option))
                results = [
                    accuracies(attack, *pair, seed) for seed, pair in enumerate(zip(views, batches, strict=True))
                ]
                rows = [value for values, _ in results for value in values]
                row = {
                    "activation": activation,
                    "batch": size,
                    "attack": text,
                    "median": round(statistics.median(rows), 3),
                    "mean": round(statistics.fmean(rows), 3),
                    "rows": f"{sum(value == 1 for value in rows)} of {len(rows)}",
                    "blind": round(blind, 3),
                    "seconds": round(statistics.median(seconds for _, seconds in results), 2),
                }
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
