"""What a generator adds: `gifd` against `ig` at equal gradient evaluations, median PSNR of real CIFAR-10 victims.

Undefended gradients of one image each at random weights of `cnn` (widths 32, 64, 128, average pooling: 113,738
parameters), labels recovered from the gradient. The generator is trained on the first half of the training part, the
victims are images of the test part. Settings of both attacks are their defaults; those of `gifd` were tuned on images
100 to 115 of the test part; reported are images 200 and on. Also victims of another data set (MNIST, in three
channels), by the generator that never saw a digit: what it adds there is no memory.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... python benchmarks/bench_gifd.py OUT.json [budgets] [victims] [others]

Takes about two minutes for the generator (kept, see PPBENCH_CACHE) and, for 32 victims on one core, one to three
minutes an attack and 300 evaluations.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.generator import check_apart
from ppbench.attacks.reconstruction.gifd import GIFD
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.search.descent import Inversion
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.nets.net import initial, net_spec
from ppbench.task.user_data import open_dataset

FIRST = 200
NETWORK = {"widths": "32,64,128", "pool": "avg"}


@dataclass(frozen=True)
class Row:
    """One attack on one set of victims."""

    attack: str
    images: str
    budget: int
    victims: int
    median_psnr: float
    mean_psnr: float
    psnr: list[float]
    evaluations: int
    seconds: float


def images(name: str) -> tuple[Data, Data]:
    """Return the training and the test part of a parquet folder, in three channels."""
    result = open_dataset(f"parquet:{os.environ['PPBENCH_TEST_DATA']}/{name}", seed=0)
    parts = [part.take(torch.arange(len(part.y))) for part in (result.train, result.test)]
    wide = [Data(part.x.expand(-1, 3, -1, -1).contiguous(), part.y) for part in parts]
    return wide[0], wide[1]


def seen(x: Tensor, y: Tensor, public: Data) -> View:
    """Return the server's view of one gradient for each image."""
    plan = Plan(net_spec("cnn", (3, 32, 32), 10, NETWORK), 1, Local("gradient"))
    params, mail = initial(plan.spec, seed=0), []
    simulate = simulation(plan, params)
    for i in range(len(x)):
        observed = {n: v.detach() for n, v in simulate(x[i][None, None], y[i][None, None]).items()}
        mail.append(Envelope(i, 1, 0, SERVER, 0, 0, Model(params)))
        mail.append(Envelope(i, 1, 0, 0, SERVER, 0, Update(observed)))
    return View("server/1", SERVER, plan, NoDefense(), tuple(mail), (), public=public)


def measured(attack: Inversion, view: View, truth: Tensor, name: str) -> Row:
    """Run `attack` on every victim and compare with the truth."""
    start = time.perf_counter()
    challenges = [Challenge((Slot(i, 0),), 1) for i in range(len(truth))]
    guesses = attack.run(view, challenges, torch.Generator().manual_seed(0))
    seconds, psnr = time.perf_counter() - start, []
    for guess, x in zip(guesses, truth, strict=True):
        assert guess.x is not None and guess.evaluations <= attack.budget
        psnr.append(float(-10 * torch.log10((guess.x[0].clamp(0, 1) - x).square().mean())))
    spent = max(guess.evaluations for guess in guesses)
    median, mean = statistics.median(psnr), statistics.mean(psnr)
    row = Row(attack.name, name, attack.budget, len(truth), round(median, 2), round(mean, 2), [round(p, 2) for p in psnr], spent, round(seconds))  # fmt: skip # noqa: E501
    print(name, attack.name, attack.budget, row.median_psnr, row.mean_psnr, row.seconds, flush=True)
    return row


def main(out: Path, budgets: Sequence[int], victims: int, others: int) -> None:
    """Measure, and write what is there after every attack."""
    torch.set_num_threads(1)
    train, test = images("cifar10")
    half = len(train.x) // 2  # the file's rows cycle through the classes
    public = Data(train.x[:half].clone(), train.y[:half].clone())
    x, y = test.x[FIRST : FIRST + victims], test.y[FIRST : FIRST + victims]
    view, rows = seen(x, y, public), []
    made = GIFD().prior(view)
    check_apart(made, {0: x})
    print("ceiling", made.about.ceiling, made.about.ceiling_latent, flush=True)
    sets = [("cifar10", view, x, budget) for budget in budgets]
    if others:
        digits = images("mnist")[1]
        x, y = digits.x[FIRST : FIRST + others], digits.y[FIRST : FIRST + others]
        sets.insert(1, ("mnist in 3 channels", seen(x, y, public), x, budgets[0]))
    for name, view, x, budget in sets:
        for attack in (IG(budget=budget), GIFD(budget=budget)):
            rows.append(measured(attack, view, x, name))
            about = {**asdict(made.about), "settings": asdict(GIFD()), "network": NETWORK}
            out.write_text(json.dumps({"generator": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv))
    main(
        Path(given[1]),
        [int(b) for b in given.get(2, "300,600").split(",")],
        int(given.get(3, 32)),
        int(given.get(4, 16)),
    )
