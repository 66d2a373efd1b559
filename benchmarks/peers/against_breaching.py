"""Our attacks against those of `breaching` (Geiping and others): the same victims, the same CPU seconds a batch.

    python -m venv PEERS && PEERS/bin/pip install -e . breaching     # a place of its own: it is no dependency
    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... PEERS/bin/python benchmarks/peers/against_breaching.py OUT.json \
        [--rows conv,dlnet/4,dlnet/4/trained] [--first 40000] [--victims 20] [--seconds 10] \
        [--attacks ig,feature_inversion,idlg] [--peers modern]

Undefended gradients of CIFAR-10 images; a row is a network, the size of a batch, and whether it was trained before: on
the first 10,000 training images. Labels as each attack infers them, images matched to the truth by least squared
error. Victims are training images from 40,000 on, on which nothing was tuned; attacks take turns on each batch. How
many steps fit into the seconds is timed beforehand on another batch, for each attack and row, by the processor's
clock, as other jobs may run. OUT.json is written after every batch. `--peers ""` measures ours alone; with peers, but
without `breaching`, the script says so, and exits with 2. `ig3` is `ig` with three times its prior, as tuning tries.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure_reconstruction import cifar, probed

from ppbench.adversary.attack import Attack, Guess
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.feature_inversion import FeatureInversion
from ppbench.attacks.reconstruction.ig import IG
from ppbench.base.tree import Params
from ppbench.base.vision import torchvision
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Data
from ppbench.nets.net import NetSpec, build, initial, net_spec
from ppbench.questions.images import score_images

NETWORKS = {
    "conv": net_spec("cnn", (3, 32, 32), 10),
    "conv3": net_spec("cnn", (3, 32, 32), 10, {"widths": "32,64,128"}),
    "dlnet": net_spec("dlnet", (3, 32, 32), 10),
    "resnet20": net_spec("resnet20", (3, 32, 32), 10),
}
TIMED, STEPS = 1000, 40
"""The first image of the batch for timing, and the steps that are timed."""
LEARNED, TESTED, EPOCHS, RATE = 10_000, 2000, 30, 2e-3
"""Images that a network is trained on, images before the victims that it is tested on; passes and rate of Adam."""

Run = Callable[[Data, int], Guess]
"""One batch and a number of steps to a guess at it."""


@dataclass(frozen=True)
class Row:
    """A network, its weights, and how many images a batch has."""

    name: str
    spec: NetSpec
    params: Params
    batch: int
    accuracy: float | None

    def module(self) -> torch.nn.Module:
        """Return the network with its weights, for those who do not take weights apart."""
        module = copy.deepcopy(build(self.spec).module).to_empty(device="cpu")
        with torch.no_grad():
            for key, value in module.named_parameters():
                value.copy_(self.params[key])
        return module

    def psnr(self, data: Data, guess: Guess) -> list[float]:
        """Return each image's PSNR in dB, matched to the truth by least squared error."""
        _, victims = probed(data, self.spec, NoDefense(), self.batch, self.params)
        return [round(score.psnr or 0.0, 2) for score in score_images(victims, [guess], {}, {}, (0.0, 1.0)).victims]


def row_of(text: str, first: int) -> Row:
    """Return the row that "network/batch/trained" names; batch 1 and random weights where these are left out."""
    name, batch, trained = text.split("/") + ["1", ""][text.count("/") :]
    row = Row(text, NETWORKS[name], initial(NETWORKS[name], 0), int(batch), None)
    return learned(row, first) if trained else row


def learned(row: Row, first: int) -> Row:
    """Return the row with weights that were trained by Adam."""
    module, data, tested = row.module(), cifar(0, LEARNED), cifar(first - TESTED, TESTED)
    optimizer, draws = torch.optim.Adam(module.parameters(), RATE), torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(LEARNED, generator=draws).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        right = (module(tested.x).argmax(1) == tested.y.argmax(1)).float().mean()
    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    return Row(row.name, row.spec, params, row.batch, round(float(right), 3))


def ours(name: str, row: Row) -> Run:
    """Return one of our attacks; its steps are gradient evaluations."""

    def attack(steps: int) -> Attack:
        first = min(400, steps // 2)
        found: dict[str, Attack] = {
            "ig": IG(budget=steps),
            "ig3": IG(budget=steps, tv=3.0),
            "idlg": IDLG(budget=steps),
            "feature_inversion": FeatureInversion(inversion_budget=first, joint_budget=max(1, steps - first)),
        }
        return found[name]

    def run(data: Data, steps: int) -> Guess:
        view, victims = probed(data, row.spec, NoDefense(), row.batch, row.params)
        (guess,) = attack(steps).run(view, victims.challenges(), torch.Generator().manual_seed(0))
        return guess

    return run


def theirs(name: str, row: Row, breaching: Any) -> Run:
    """Return one of breaching's attacks with its own settings; its steps are `max_iterations`."""
    module = row.module()
    names = [key for key, _ in module.named_parameters()]
    metadata = {"shape": list(row.spec.shape), "classes": row.spec.classes, "task": "classification"}
    metadata |= {"modality": "vision", "mean": [0.0] * 3, "std": [1.0] * 3}

    def run(data: Data, steps: int) -> Guess:
        from omegaconf import OmegaConf

        torch.manual_seed(0)
        config = breaching.get_attack_config(name)
        config.optim.max_iterations = steps
        setup = {"dtype": torch.float32, "device": torch.device("cpu")}
        attacker = breaching.attacks.prepare_attack(module, torch.nn.CrossEntropyLoss(), config, setup)
        (evidence,) = NoDefense().evidence(probed(data, row.spec, NoDefense(), row.batch, row.params)[0])
        shared = {"num_data_points": row.batch, "labels": None, "local_hyperparams": None}
        sent = {"gradients": [evidence.observed[key] for key in names], "buffers": None, "metadata": shared}
        down = {"parameters": list(row.params.values()), "buffers": [], "metadata": OmegaConf.create(metadata)}
        found, _ = attacker.reconstruct([down], [sent], {})
        return Guess(x=found["data"].detach().clamp(0, 1), y=found["labels"].detach())

    return run


def fitting(run: Run, batch: int, seconds: float) -> int:
    """Return how many steps fit into `seconds` of the processor, timed on a batch that is no victim."""
    data, spent = cifar(TIMED, batch), []
    for steps in (4, STEPS, 4 * STEPS):
        began = time.process_time()
        run(data, steps)
        spent.append(time.process_time() - began)
    return max(1, int(3 * seconds * STEPS / max(1e-6, spent[2] - spent[1])))


def main(about: argparse.Namespace) -> None:
    """Measure, and write what is there after every batch."""
    peers, breaching = [name for name in about.peers.split(",") if name], None
    if peers:
        try:
            torchvision()  # which breaching imports, and PyPI's fails beside a torch for CPUs
            import breaching
        except ImportError as cause:
            sys.exit(refusal(cause))
    torch.set_num_threads(1)
    table: list[dict[str, object]] = []
    for text in about.rows.split(","):
        row = row_of(text, about.first)
        count = about.victims // row.batch * row.batch
        data, runs = cifar(about.first, count), {name: ours(name, row) for name in about.attacks.split(",")}
        runs |= {f"breaching {name}": theirs(name, row, breaching) for name in peers}
        steps = {name: fitting(run, row.batch, about.seconds) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        spent: dict[str, list[float]] = {name: [] for name in runs}
        table.append({"row": text, "accuracy": row.accuracy, "steps": steps, "psnr": found, "cpu_seconds": spent})
        for i in range(0, count, row.batch):
            one = Data(data.x[i : i + row.batch].clone(), data.y[i : i + row.batch].clone())
            for name, run in runs.items():
                began = time.process_time()
                guess = run(one, steps[name])
                spent[name].append(round(time.process_time() - began, 2))
                found[name] += row.psnr(one, guess)
            whole = {"first": about.first, "seconds": about.seconds, "rows": table}
            about.out.write_text(json.dumps(whole, indent=1) + "\n")
        for name, values in found.items():
            fell, took = sum(value > 20 for value in values), statistics.median(spent[name])
            figures = f"{statistics.median(values):5.1f} dB, {fell} of {len(values)} above 20, {took:.1f} s a batch"
            print(f"{text:18} {name:28} {figures}", flush=True)


def refusal(cause: ImportError) -> int:
    """Say what is missing, and return the exit code."""
    print(
        f"This comparison needs the package 'breaching' beside ppbench, in an environment of its own ({cause}); see "
        "the first lines of this file.",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", default="conv,dlnet")
    parser.add_argument("--first", type=int, default=40_000)
    parser.add_argument("--victims", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attacks", default="ig,feature_inversion")
    parser.add_argument("--peers", default="modern,invertinggradients")
    main(parser.parse_args())
