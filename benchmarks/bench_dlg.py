"""What a solved victim costs: our DLG against the plain reference loop, at equal stopping loss.

Both attack the same images on the same network in one process on one core, in turn; seconds are the processor's.
Network: LeNet of the DLG release, 100 classes, weights from U(-.5, .5), batch 1. A victim is solved above 20 dB PSNR;
the time of failures counts. `extra_info` holds seconds, PSNR of each victim, and seconds a solved victim. Reference:
N(0, 1) start, joint label. Ours: grey start; label and slots as the test's name says.

    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... pytest benchmarks/bench_dlg.py --benchmark-only

PPBENCH_TEST_DATA names a folder with cifar10/train.parquet; without it images are the digits of scikit-learn, enlarged
to 32x32 and colored, and extra_info says so. PPBENCH_BENCH_VICTIMS changes the number of victims from 20, and
PPBENCH_BENCH_FIRST where they begin. With PPBENCH_KEEP figures are written to benchmarks/results/dlg.json. The row
`lenet100` of peers/against_breaching.py is this network.
"""

from __future__ import annotations

import io
import json
import math
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import interpolate, one_hot

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.dlg import DLG, IDLG
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Local, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Envelope, Model, Slot, Update
from ppbench.nets.net import initial, net_spec

VICTIMS, FIRST = (int(os.environ.get(f"PPBENCH_BENCH_{name}", n)) for name, n in (("VICTIMS", "20"), ("FIRST", "0")))
CLASSES = 100
RESULTS = Path(__file__).parent / "results" / "dlg.json"


# -- The plain loop of deep leakage from gradients: the reference of these timings, and of tests of `dlg` --
# torch.optim.LBFGS with learning rate 1 and its defaults (at most 20 evaluations per step, history 100, no line
# search), an N(0, 1) start for image and label logits, autograd's double backward, float32 (Zhu, Liu and Han,
# NeurIPS 2019).

OUTER = 300


def reference_dlg(plan: Plan, params: Params, observed: Params, stop: float, generator: torch.Generator) -> Tensor:
    """Return the reconstruction [1, *shape] of one image from its gradient `observed` at public weights `params`.

    The loop ends if, after an outer step, the squared distance of gradients is at most `stop` or not finite.
    """
    x = torch.randn(1, *plan.spec.shape, generator=generator).requires_grad_()
    q = torch.randn(1, plan.spec.classes, generator=generator).requires_grad_()
    optimizer = torch.optim.LBFGS([x, q])
    weights = {name: value.detach().requires_grad_() for name, value in params.items()}
    last = math.inf

    def closure() -> Tensor:
        nonlocal last
        optimizer.zero_grad()
        loss = plan.example_loss(plan.net(weights, x), torch.softmax(q, -1)).mean()
        simulated = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = torch.stack([((g - observed[n]) ** 2).sum() for n, g in zip(weights, simulated, strict=True)]).sum()
        distance.backward(inputs=[x, q])
        last = distance.item()
        return distance.detach()

    for _ in range(OUTER):
        optimizer.step(closure)
        if not last > stop:
            break
    return x.detach()


@dataclass
class Tally:
    """One method's seconds and PSNR over the victims."""

    seconds: float = 0.0
    psnr: list[float] = field(default_factory=list)

    def report(self, name: str) -> dict[str, object]:
        solved = sum(value > 20 for value in self.psnr)
        return {
            f"{name}_seconds": round(self.seconds, 1),
            f"{name}_psnr": [round(value, 2) for value in self.psnr],
            f"{name}_solved": solved,
            f"{name}_seconds_per_solved_victim": round(self.seconds / solved, 1) if solved else None,
        }


def images() -> tuple[Tensor, Tensor, str]:
    """Return images [V, 3, 32, 32] in [0, 1], labels [V] and where they are from."""
    path = Path(os.environ.get("PPBENCH_TEST_DATA", "")) / "cifar10" / "train.parquet"
    if "PPBENCH_TEST_DATA" in os.environ and path.is_file():
        rows = next(pyarrow.parquet.ParquetFile(path).iter_batches(FIRST + VICTIMS)).slice(FIRST).to_pydict()
        arrays = [np.asarray(Image.open(io.BytesIO(cell["bytes"])).convert("RGB")) for cell in rows["img"]]
        x = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255
        return x, torch.tensor(rows["label"]), f"CIFAR-10 from {FIRST:,} on"
    digits = load_digits()
    grey = torch.from_numpy(digits.images[:VICTIMS]).float()[:, None] / 16
    x = interpolate(grey, size=(32, 32), mode="bilinear") * torch.tensor([1.0, 0.8, 0.6]).view(1, 3, 1, 1)
    return (
        x,
        torch.from_numpy(digits.target[:VICTIMS]),
        "digits of scikit-learn, enlarged and colored: NOT natural images",
    )


@dataclass(frozen=True)
class Target:
    """The network and the victims' gradients."""

    plan: Plan
    params: Params
    x: Tensor
    observed: list[Params]
    source: str


@pytest.fixture(scope="module")
def target() -> Target:
    x, labels, source = images()
    spec = net_spec("lenet", (3, 32, 32), CLASSES)
    plan, params = Plan(spec, 1, Local("gradient")), initial(spec, seed=0)
    simulate = simulation(plan, params)
    y = one_hot(labels, CLASSES).float()
    observed = []
    for i in range(len(x)):
        gradient = simulate(x[i][None, None], y[i][None, None])
        observed.append({name: value.detach() for name, value in gradient.items()})
    return Target(plan, params, x, observed, source)


def psnr(guess: Tensor, truth: Tensor) -> float:
    if not bool(torch.isfinite(guess).all()):
        return 0.0
    return float(-10 * torch.log10(((guess.clamp(0, 1) - truth) ** 2).mean().clamp(min=1e-12)))


def ours(target: Target, attack: DLG, rows: range, tally: Tally) -> None:
    """Attack the victims `rows` in one call, from a server's view of their uploads."""
    model = Model(target.params)
    mail = []
    for i in rows:
        mail.append(Envelope(i, 1, 0, SERVER, 0, 0, model))
        mail.append(Envelope(i, 1, 0, 0, SERVER, 0, Update(target.observed[i])))
    view = View("server/1", SERVER, target.plan, NoDefense(), tuple(mail), ())
    challenges = [Challenge((Slot(i, 0),), batch=1) for i in rows]
    begin = time.process_time()
    guesses = attack.run(view, challenges, torch.Generator().manual_seed(rows.start))
    tally.seconds += time.process_time() - begin
    tally.psnr += [psnr(guess.x[0], target.x[i]) for i, guess in zip(rows, guesses, strict=True)]


def reference(target: Target, stop: float, row: int, tally: Tally) -> None:
    generator = torch.Generator().manual_seed(1000 + row)
    begin = time.process_time()
    guess = reference_dlg(target.plan, target.params, target.observed[row], stop, generator)
    tally.seconds += time.process_time() - begin
    tally.psnr.append(psnr(guess[0], target.x[row]))


def compare(target: Target, attack: DLG, together: int) -> tuple[Tally, Tally]:
    """Run both on all victims, `together` at once for ours, then the reference on the same ones."""
    mine, theirs = Tally(), Tally()
    for first in range(0, len(target.x), together):
        rows = range(first, min(first + together, len(target.x)))
        ours(target, attack, rows, mine)
        for row in rows:
            reference(target, attack.stop, row, theirs)
        print(f"{len(mine.psnr)} victims: ours {mine}, reference {theirs}", flush=True)
    return mine, theirs


def measured(benchmark: object, target: Target, attack: DLG, together: int) -> None:
    torch.set_num_threads(1)
    mine, theirs = benchmark.pedantic(compare, (target, attack, together), rounds=1, iterations=1)  # type: ignore[attr-defined]
    results: dict[str, object] = {"victims": len(target.x), "stop": attack.stop, "images": target.source}
    results |= {**mine.report("ours"), **theirs.report("reference")}
    benchmark.extra_info.update(results)  # type: ignore[attr-defined]
    print(results, flush=True)
    if os.environ.get("PPBENCH_KEEP"):
        keep(f"{attack.name}, {together} at once" if together > 1 else f"{attack.name}, one by one", results)


def keep(case: str, figures: dict[str, object]) -> None:
    """Write a case's figures into the results, beside those of the other."""
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    content["machine"] = f"{platform.machine()}, torch {torch.__version__}, 1 thread"
    content.setdefault("cases", {})[case] = figures
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def test_joint_label_one_victim_at_a_time_stop_1e_5(benchmark: object, target: Target) -> None:
    measured(benchmark, target, DLG(stop=1e-5, absolute=True, slots=1), 1)


def test_label_inferred_eight_victims_at_once_stop_1e_4(benchmark: object, target: Target) -> None:
    measured(benchmark, target, IDLG(stop=1e-4, absolute=True, slots=8), 8)
