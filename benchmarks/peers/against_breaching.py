"""Our attacks against those of `breaching` (Geiping and others): the same victims, the same CPU seconds a victim.

    python -m venv PEERS && PEERS/bin/pip install -e . breaching     # a place of its own: it is no dependency
    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... PEERS/bin/python benchmarks/peers/against_breaching.py OUT.json \
        [--rows conv,dlnet] [--victims 20] [--seconds 10] [--attacks ig,feature_inversion] [--peers modern]

Undefended gradients of single CIFAR-10 images at random weights; labels as each infers them. Victims are training
images 40,000 and on, on which nothing was tuned; attacks take turns on each. How many steps fit into the seconds is
timed beforehand on another image, for each attack and network, by the processor's clock, as other jobs may run.
OUT.json is written after every victim. Without `breaching` the script says so, and exits with 2.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure_reconstruction import cifar, probed

from ppbench.attacks.reconstruction.feature_inversion import FeatureInversion
from ppbench.attacks.reconstruction.ig import IG
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Data
from ppbench.nets.net import NetSpec, build, initial, net_spec

ROWS = {
    "conv": net_spec("cnn", (3, 32, 32), 10),
    "conv3": net_spec("cnn", (3, 32, 32), 10, {"widths": "32,64,128"}),
    "dlnet": net_spec("dlnet", (3, 32, 32), 10),
}
FIRST, TIMED, STEPS = 40_000, 1000, 40
"""The first victim, the image for timing, and the steps that are timed."""

Run = Callable[[Data, int], Tensor]
"""One victim and a number of steps to an image [3, 32, 32]."""


def ours(name: str, spec: NetSpec) -> Run:
    """Return one of our attacks; its steps are gradient evaluations."""

    def run(data: Data, steps: int) -> Tensor:
        view, victims = probed(data, spec, NoDefense())
        first = min(400, steps // 2)
        staged = FeatureInversion(inversion_budget=first, joint_budget=max(1, steps - first))
        attack = IG(budget=steps) if name == "ig" else staged
        (guess,) = attack.run(view, victims.challenges(), torch.Generator().manual_seed(0))
        assert guess.x is not None
        return guess.x[0]

    return run


def theirs(name: str, spec: NetSpec, breaching: Any) -> Run:
    """Return one of breaching's attacks with its own settings; its steps are `max_iterations`."""
    module = copy.deepcopy(build(spec).module).to_empty(device="cpu")
    params = initial(spec, 0)
    with torch.no_grad():
        for key, value in module.named_parameters():
            value.copy_(params[key])
    names = [key for key, _ in module.named_parameters()]
    metadata = {"shape": list(spec.shape), "classes": spec.classes, "task": "classification", "modality": "vision"}
    metadata |= {"mean": [0.0] * 3, "std": [1.0] * 3}

    def run(data: Data, steps: int) -> Tensor:
        from omegaconf import OmegaConf

        torch.manual_seed(0)
        config = breaching.get_attack_config(name)
        config.optim.max_iterations = steps
        setup = {"dtype": torch.float32, "device": torch.device("cpu")}
        attacker = breaching.attacks.prepare_attack(module, torch.nn.CrossEntropyLoss(), config, setup)
        (evidence,) = NoDefense().evidence(probed(data, spec, NoDefense())[0])
        shared = {"num_data_points": 1, "labels": None, "local_hyperparams": None}
        sent = {"gradients": [evidence.observed[key] for key in names], "buffers": None, "metadata": shared}
        down = {"parameters": list(params.values()), "buffers": [], "metadata": OmegaConf.create(metadata)}
        found, _ = attacker.reconstruct([down], [sent], {})
        image: Tensor = found["data"][0].detach()
        return image

    return run


def fitting(run: Run, seconds: float) -> int:
    """Return how many steps fit into `seconds` of the processor, timed on an image that is no victim."""
    data, spent = cifar(TIMED, 1), []
    for steps in (4, STEPS, 4 * STEPS):
        began = time.process_time()
        run(data, steps)
        spent.append(time.process_time() - began)
    return max(1, int(3 * seconds * STEPS / max(1e-6, spent[2] - spent[1])))


def main(about: argparse.Namespace) -> None:
    """Measure, and write what is there after every victim."""
    try:
        import breaching
    except ImportError as cause:
        sys.exit(refusal(cause))
    torch.set_num_threads(1)
    data, table = cifar(FIRST, about.victims), []
    for row in about.rows.split(","):
        runs = {name: ours(name, ROWS[row]) for name in about.attacks.split(",")}
        runs |= {f"breaching {name}": theirs(name, ROWS[row], breaching) for name in about.peers.split(",")}
        steps = {name: fitting(run, about.seconds) for name, run in runs.items()}
        found: dict[str, list[float]] = {name: [] for name in runs}
        spent: dict[str, list[float]] = {name: [] for name in runs}
        table.append({"row": row, "steps": steps, "psnr": found, "cpu_seconds": spent})
        for i in range(about.victims):
            one = Data(data.x[i : i + 1].clone(), data.y[i : i + 1].clone())
            for name, run in runs.items():
                began = time.process_time()
                image = run(one, steps[name]).clamp(0, 1)
                spent[name].append(round(time.process_time() - began, 2))
                found[name].append(round(float(-10 * (image - one.x[0]).square().mean().log10()), 2))
            about.out.write_text(json.dumps({"seconds": about.seconds, "rows": table}, indent=1) + "\n")
        for name, values in found.items():
            fell = sum(value > 20 for value in values)
            print(
                f"{row:6} {name:28} {statistics.median(values):5.1f} dB, {fell} of {len(values)} above 20", flush=True
            )


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
    parser.add_argument("--victims", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--attacks", default="ig,feature_inversion")
    parser.add_argument("--peers", default="modern,invertinggradients")
    main(parser.parse_args())
