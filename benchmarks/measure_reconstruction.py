"""What the gradient-descent attacks reach on real CIFAR-10 images, as JSON: one run, one thread, fixed seeds.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... python benchmarks/measure_reconstruction.py [PART ...]

convnet: `ig`, 32 images, batch 1, `cnn` of 113,738 parameters at initialization, 300 steps, one start.
noise: Gaussian noise of 2 and 3 times the gradients' root mean square on every entry; `ig` as it is against
`likelihood` whose prior is tuned on other images; 8 images, 300 steps each.
batch: `ig`, 8 images a batch, DLNet; images matched to the truth by least squared error.
kinks: `adaptive_server`, `idlg` and `ig` on exact gradients of convolutions with ReLUs, images 41,000 on, batch 1.
soft: `ig` with rounded kinks (soften=0.1, the default) and without (soften=0), images 41,000 on, digits 1,300 on.
Settings were tuned on training images 1000 and up, reported are the first ones; labels are never granted.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, one_hot

from ppbench.adversary.attack import Attack
from ppbench.adversary.victims import Victims
from ppbench.attacks.adaptive.server import AdaptiveServer
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.likelihood import Likelihood
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.nets.net import NetSpec, build, initial, net_spec
from ppbench.questions.images import score_images

CONVNET = net_spec("cnn", (3, 32, 32), 10, {"widths": "32,64,128", "pool": "avg"})
TUNING = 1000


@dataclass(frozen=True)
class Reached:
    """Scores of one run: PSNR in dB of each image, labels found, evaluations a victim, seconds."""

    psnr: list[float]
    labels: int
    evaluations: int
    seconds: float

    def report(self) -> dict[str, object]:
        return {
            "median_db": round(statistics.median(self.psnr), 2),
            "psnr_db": [round(p, 1) for p in self.psnr],
            "labels": f"{self.labels} of {len(self.psnr)}",
            "evaluations_a_victim": self.evaluations,
            "seconds": round(self.seconds, 1),
        }


def cifar(first: int, count: int) -> Data:
    """Return `count` training images from the `first` one on."""
    return images("cifar10", "RGB", first, count)


def images(folder: str, mode: str, first: int, count: int) -> Data:
    """Return `count` training images of a data set from the `first` one on."""
    path = Path(os.environ["PPBENCH_TEST_DATA"]) / folder / "train.parquet"
    rows = next(pyarrow.parquet.ParquetFile(path).iter_batches(first + count)).slice(first).to_pydict()
    (cells,) = (column for name, column in rows.items() if name != "label")
    arrays = [np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert(mode)) for cell in cells]
    x = torch.from_numpy(np.stack(arrays)).reshape(count, *arrays[0].shape[:2], -1).permute(0, 3, 1, 2).float() / 255
    return Data(x, one_hot(torch.tensor(rows["label"]), 10).float())


def digits(first: int, count: int) -> Data:
    """Return `count` of scikit-learn's digits from the `first` one on."""
    x, y = (torch.tensor(part[first : first + count]) for part in load_digits(return_X_y=True))
    return Data(x.float().view(-1, 1, 8, 8) / 16, one_hot(y, 10).float())


def probed(
    data: Data, spec: NetSpec, defense: Defense, batch: int = 1, params: Params | None = None
) -> tuple[View, Victims]:
    """Return the server's view of a federation of one client that holds batches of `data`, one probe each."""
    plan = Plan(spec, 1, Local("gradient", batch=batch))
    fed = Federation(defense, plan, {0: data}, Seeds(0))
    fed.start(initial(spec, 0) if params is None else params)
    slots = [Slot(i, 0) for i in range(len(data.x) // batch)]
    parts = {
        s: Data(data.x[s.probe * batch :][:batch].clone(), data.y[s.probe * batch :][:batch].clone()) for s in slots
    }
    return fed.probe(parts).view("server/1"), Victims(parts, tuple((s,) for s in slots), (), batch)


def attacked(
    attack: Attack, data: Data, spec: NetSpec, defense: Defense, batch: int = 1, params: Params | None = None
) -> Reached:
    """Score what the server's view of `data` gives away."""
    view, victims = probed(data, spec, defense, batch, params)
    began = time.perf_counter()
    guesses = attack.run(view, victims.challenges(), torch.Generator().manual_seed(0))
    seconds = time.perf_counter() - began
    scores = score_images(victims, guesses, {}, {}, view.plan.data_range).victims
    return Reached([s.psnr or 0.0 for s in scores], sum(bool(s.label) for s in scores), guesses[0].evaluations, seconds)


def convnet() -> dict[str, object]:
    return attacked(IG(budget=300), cifar(0, 32), CONVNET, NoDefense()).report()


def rms(data: Data) -> float:
    """Return the median over images of the root mean square of a gradient's entries."""
    view, _ = probed(data, CONVNET, NoDefense())
    flat = [torch.cat([v.flatten() for v in e.observed.values()]) for e in view.defense.evidence(view)]
    return statistics.median(float(g.square().mean().sqrt()) for g in flat)


def noise() -> dict[str, object]:
    results: dict[str, object] = {}
    data, others = cifar(0, 8), cifar(TUNING, 6)
    for factor in (2, 3):
        defense = DP(sigma=factor * rms(others))
        oblivious = attacked(IG(budget=300), data, CONVNET, defense)
        variants = [v for v in Likelihood(budget=300).variants() if isinstance(v, Likelihood)]
        tuning = [statistics.median(attacked(v, others, CONVNET, defense).psnr) for v in variants]
        best = variants[tuning.index(max(tuning))]
        aware = attacked(best, data, CONVNET, defense)
        results[f"{factor} x rms"] = {
            "sigma": defense.sigma,
            "ig": oblivious.report(),
            "likelihood": aware.report(),
            "tuned": {f"tv={v.tv:.3g}": round(score, 2) for v, score in zip(variants, tuning, strict=True)},
        }
    return results


def batch() -> dict[str, object]:
    spec = net_spec("dlnet", (3, 32, 32), 10)
    return {
        f"{steps} steps": attacked(IG(budget=steps), cifar(0, 16), spec, NoDefense(), 8).report()
        for steps in (300, 1000)
    }


def kinks() -> dict[str, object]:
    nets = {
        "cnn": (net_spec("cnn", (3, 32, 32), 10), 8, 1800),
        "densenet": (net_spec("densenet", (3, 32, 32), 10, {"bias": False}), 4, 900),
        "resnet20": (net_spec("resnet20", (3, 32, 32), 10, {"head_bias": False}), 4, 900),
    }
    return {
        f"{name}, {budget} evaluations": {
            attack.name: attacked(attack, cifar(41_000, count), spec, NoDefense()).report()
            for attack in (IDLG(budget=budget), IG(budget=budget), AdaptiveServer(budget=budget))
        }
        for name, (spec, count, budget) in nets.items()
    }


def learned(spec: NetSpec) -> Params:
    """Return weights after six passes of Adam over 5,000 images (`cnn` is right on 51 %)."""
    net, data, draws = build(spec), cifar(2000, 5000), torch.Generator().manual_seed(0)
    params = {name: value.clone().requires_grad_() for name, value in initial(spec, 0).items()}
    optimizer = torch.optim.Adam(params.values(), 2e-3)
    for _ in range(6):
        for rows in torch.randperm(len(data.x), generator=draws).split(64):
            optimizer.zero_grad()
            cross_entropy(net(params, data.x[rows]), data.y[rows]).backward()
            optimizer.step()
    return {name: value.detach() for name, value in params.items()}


@dataclass(frozen=True)
class Setting:
    """What `soft` attacks: single images of `data`, or batches, by budgets of so many evaluations."""

    data: Data
    spec: NetSpec
    defense: Defense = field(default_factory=NoDefense)
    batch: int = 1
    params: Params | None = None
    budgets: tuple[int, ...] = (300,)


def settings() -> dict[str, Setting]:
    """Return the settings of `soft` by name."""
    shape, photos, both = (3, 32, 32), cifar(41_000, 16), (300, 900)
    eight, cnn = Data(photos.x[:8], photos.y[:8]), net_spec("cnn", shape, 10)
    hidden = net_spec("cnn", shape, 10, {"widths": "16,32", "hidden": 64})
    strided = net_spec("lenet_baffle", shape, 10, {"activation": "relu"})
    return {
        "`cnn`": Setting(eight, cnn, budgets=both),
        "`cnn`, widths 16,32, hidden 64": Setting(eight, hidden, budgets=both),
        "`lenet_baffle`, ReLU": Setting(eight, strided, budgets=both),
        "`cnn`, batch 4": Setting(photos, cnn, batch=4),
        "`cnn`, trained to 51 %": Setting(eight, cnn, params=learned(cnn)),
        "`cnn`, widths 32,64,128, average pools": Setting(eight, CONVNET),
        "`cnn`, `dp` 0.01": Setting(eight, cnn, DP(sigma=0.01)),
        "`cnn`, MNIST": Setting(images("mnist", "L", 41_000, 8), net_spec("cnn", (1, 28, 28), 10)),
        "`cnn`, digits": Setting(digits(1300, 40), net_spec("cnn", (1, 8, 8), 10), budgets=both),
        "`resnet20`": Setting(eight, net_spec("resnet20", shape, 10, {"head_bias": False})),
    }


def soft() -> dict[str, object]:
    results: dict[str, object] = {}
    for name, case in settings().items():
        for budget in case.budgets:
            pair = {
                f"soften={attack.soften:g}": attacked(
                    attack, case.data, case.spec, case.defense, case.batch, case.params
                ).report()
                for attack in (IG(budget=budget, soften=0.0), IG(budget=budget))
            }
            results[f"{name}, {budget} evaluations"] = pair
            print(name, budget, json.dumps(pair), file=sys.stderr, flush=True)
    return results


PARTS = {"convnet": convnet, "noise": noise, "batch": batch, "kinks": kinks, "soft": soft}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or PARTS:
        print(json.dumps({name: PARTS[name]()}, indent=1), flush=True)


if __name__ == "__main__":
    main()
