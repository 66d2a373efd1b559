"""The best of our attacks against the best of `breaching` (Geiping and others): same victims, same CPU seconds a batch.

    python -m venv PEERS && PEERS/bin/pip install -e . breaching     # a place of its own: it is no dependency
    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=... PEERS/bin/python benchmarks/peers/against_breaching.py OUT.json \
        [--rows conv,dlnet/4,dlnet/4/trained,resnet18,vit] [--first 40000] [--victims 20] [--seconds 10] [--tuning 4] \
        [--finalists 2] [--attacks default,ig,feature_inversion,idlg] [--peers modern,deepleakage]

All of `--attacks` and `--peers` are tried on `--tuning` images that are no victims; the `--finalists` of each side with
the best medians attack the victims, and the best there of each are compared, by name; images fill whole batches. By
default `--peers` are all of breaching's attacks on an image's plain gradient, with its own settings: the others need
text, a transformer, or a server that sends weights of its own. What raises an error is named with it.

Undefended gradients of CIFAR-10 images; a row is a network, the size of a batch, and whether it was trained before: on
the first 10,000 training images. Labels as each attack infers them, images matched to the truth by least squared
error. Victims are training images from 40,000 on, on which nothing was tuned; attacks take turns on each batch. How
many steps fit into the seconds is timed beforehand on another batch, for each attack and row, by the processor's
clock, as other jobs may run. OUT.json is written after every batch, and a later run goes on where it ends: finished
rows are kept, and of others the finalists and the victims they had, so `--victims` can be raised. `default` is what
`ppbench.invert` computes or searches, at its own budget: it counts only where its seconds are no more. `--peers ""`
measures ours alone; with peers, but without `breaching`, the script says so, and exits with 2. `ig3` is `ig` with three
times its prior and no rounded kinks, `ig3_pattern` that from a tiled patch, where breaching's `modern` starts.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measure_reconstruction import cifar, probed

import ppbench
from ppbench.adversary.attack import Attack, Guess
from ppbench.adversary.victims import Victims
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.attacks.reconstruction.feature_inversion import FeatureInversion
from ppbench.attacks.reconstruction.ig import IG
from ppbench.attacks.reconstruction.ig_features import IGFeatures
from ppbench.base.import_guard import torchvision
from ppbench.base.tree import Params
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Data
from ppbench.federation.view import View
from ppbench.nets.classifier import UserNetwork
from ppbench.nets.model_object import held_network
from ppbench.nets.net import NetSpec, build, initial, net_spec
from ppbench.questions.images import score_images

NETWORKS = {
    "conv": net_spec("cnn", (3, 32, 32), 10),
    "conv3": net_spec("cnn", (3, 32, 32), 10, {"widths": "32,64,128"}),
    "dlnet": net_spec("dlnet", (3, 32, 32), 10),
    "resnet20": net_spec("resnet20", (3, 32, 32), 10),
    "lenet100": net_spec("lenet", (3, 32, 32), 100),
}
"""Networks of ours, `lenet100` that of bench_dlg.py; `network_spec` knows two more."""
TIMED, TUNED, STEPS, MOST = 1000, 2000, 40, 100_000
"""The first image of the batch for timing, and of those for tuning; the steps that are timed, and the most steps."""
OURS = ("default", "ig", "ig3", "ig3_pattern", "ig_features", "ig_features3", "idlg", "feature_inversion")
PEERS = (
    *("modern", "invertinggradients", "deepleakage", "legacy", "wei", "beyondinfering", "seethroughgradients"),
    *("multiscale_ghiasi", "clsattack", "analytic", "rgap"),
)
"""Attacks that are tried by default."""
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
    accuracy: float | None
    batch: int

    def module(self) -> torch.nn.Module:
        """Return the network with its weights and buffers, for those who do not take weights apart."""
        net = build(self.spec)
        module, known = copy.deepcopy(net.module).to_empty(device="cpu"), {**net.frozen, **self.params}
        with torch.no_grad():
            for key, value in (*module.named_parameters(), *module.named_buffers()):
                value.copy_(known[key])
        return module

    def probed(self, data: Data) -> tuple[View, Victims]:
        """Return the server's view of a client that holds `data`, labels among the network's classes."""
        y = torch.nn.functional.pad(data.y, (0, self.spec.classes - data.y.shape[-1]))
        return probed(Data(data.x, y), self.spec, NoDefense(), self.batch, self.params)

    def gradient(self, data: Data) -> Params:
        """Return what the server sees of one batch."""
        (evidence,) = NoDefense().evidence(self.probed(data)[0])
        return evidence.observed

    def psnr(self, data: Data, guess: Guess) -> list[float]:
        """Return each image's PSNR in dB, matched to the truth by least squared error."""
        _, victims = self.probed(data)
        return [round(score.psnr or 0.0, 2) for score in score_images(victims, [guess], {}, {}, (0.0, 1.0)).victims]


def resnet18() -> torch.nn.Module:
    """Return torchvision's ResNet-18 for 32x32 images (a 3x3 convolution first, no pooling behind it), in eval mode."""
    module = torchvision().models.resnet18(num_classes=10)
    module.conv1, module.maxpool = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False), torch.nn.Identity()
    return module.eval()


class ViT(torch.nn.Module):
    """A vision transformer of two layers, width 96, on 64 patches of 4x4, with a learned position embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.position = torch.nn.Conv2d(3, 96, 4, 4), torch.nn.Parameter(0.02 * torch.randn(1, 64, 96))
        layer = torch.nn.TransformerEncoderLayer(96, 4, 192, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = torch.nn.LayerNorm(96), torch.nn.Linear(96, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.encoder(patches)).mean(1))


def network_spec(name: str) -> NetSpec:
    """Return the network of a row: ours, torchvision's ResNet-18 or a ViT, with weights drawn from seed 0."""
    if name in NETWORKS:
        return NETWORKS[name]
    return held_network(foreign_network(name), (3, 32, 32)).spec


def foreign_network(name: str) -> torch.nn.Module:
    """Return a network that ppbench does not have, in eval mode."""
    torch.manual_seed(0)
    return {"resnet18": resnet18, "vit": ViT}[name]().eval()


def users_network(row: Row) -> tuple[torch.nn.Module, list[str]]:
    """Return a row's network as a user has it, and our names of its parameters, in their order."""
    module = row.module()
    if not isinstance(module, UserNetwork):
        return module.eval(), [key for key, _ in module.named_parameters()]
    ours = {module.own_name(key): key for key in row.params}
    users = foreign_network(row.name.split("/")[0])
    with torch.no_grad():
        for key, value in users.named_parameters():
            value.copy_(row.params[ours[key]])
    return users, [ours[key] for key, _ in users.named_parameters()]


def row_of(text: str, first: int) -> Row:
    """Return the row that "network/batch/trained" names; batch 1 and random weights where these are left out."""
    name, batch, trained = text.split("/") + ["1", ""][text.count("/") :]
    spec = network_spec(name)
    if trained:
        return Row(text, spec, *learned(spec, first), int(batch))
    return Row(text, spec, initial(spec, 0), None, int(batch))


@functools.cache
def learned(spec: NetSpec, first: int) -> tuple[Params, float]:
    """Return weights that were trained by Adam, and their accuracy."""
    module = Row("", spec, initial(spec, 0), None, 1).module()
    data, tested = cifar(0, LEARNED), cifar(first - TESTED, TESTED)
    optimizer, draws = torch.optim.Adam(module.parameters(), RATE), torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(LEARNED, generator=draws).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        right = (module(tested.x).argmax(1) == tested.y.argmax(1)).float().mean()
    params = {name: value.detach().clone() for name, value in module.named_parameters()}
    return params, round(float(right), 3)


def ours(name: str, row: Row) -> Run:
    """Return one of our attacks; its steps are gradient evaluations, of which `default` takes what it needs."""
    if name == "default":
        return by_default(row)

    def attack(steps: int) -> Attack:
        first = min(400, steps // 2)
        results: dict[str, Attack] = {
            "ig": IG(budget=steps),
            "ig3": IG(budget=steps, tv=3.0, soften=0.0),
            "ig3_pattern": IG(budget=steps, tv=3.0, soften=0.0, start="pattern"),
            "ig_features": IGFeatures(budget=steps),
            "ig_features3": IGFeatures(budget=steps, tv=3.0, soften=0.0),
            "idlg": IDLG(budget=steps),
            "feature_inversion": FeatureInversion(inversion_budget=first, joint_budget=max(1, steps - first)),
        }
        return results[name]

    def run(data: Data, steps: int) -> Guess:
        view, victims = row.probed(data)
        (guess,) = attack(steps).run(view, victims.challenges(), torch.Generator().manual_seed(0))
        return guess

    return run


def by_default(row: Row) -> Run:
    """Return what `ppbench.invert` does without naming an attack."""
    module, names = users_network(row)

    def run(data: Data, _: int) -> Guess:
        observed = row.gradient(data)
        sent = [observed[key] for key in names]
        answer = ppbench.invert(module, sent, row.spec.shape, batch=row.batch, planted=False)
        return Guess(x=answer.x, y=answer.y)

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
        if "optim" in config:
            config.optim.max_iterations = steps
        elif "inversion" in config:
            config.inversion.steps = steps
        setup = {"dtype": torch.float32, "device": torch.device("cpu")}
        attacker = breaching.attacks.prepare_attack(module, torch.nn.CrossEntropyLoss(), config, setup)
        observed = row.gradient(data)
        shared = {"num_data_points": row.batch, "labels": None, "local_hyperparams": None}
        sent = {"gradients": [observed[key] for key in names], "buffers": None, "metadata": shared}
        down = {"parameters": list(row.params.values()), "buffers": [], "metadata": OmegaConf.create(metadata)}
        result, _ = attacker.reconstruct([down], [sent], {})
        return Guess(x=result["data"].detach().clamp(0, 1), y=result["labels"].detach())

    return run


def fitting(run: Run, batch: int, seconds: float) -> int:
    """Return how many steps fit into `seconds` of the processor, timed on a batch that is no victim.

    By the slower of early and later steps: some searches have done on that batch before the last. Nothing longer is
    timed behind what took as many seconds.
    """
    data, rates, spent, last = cifar(TIMED, batch), list[float](), 0.0, 0
    for steps in (4, STEPS, 4 * STEPS):
        began = time.process_time()
        run(data, steps)
        took = time.process_time() - began
        rates.append((took - spent) / (steps - last))
        spent, last = took, steps
        if took > seconds:
            break
    slower = max(rates[1:] or rates)  # the first four start what later ones share
    return min(MOST, max(1, int(seconds / max(slower, 1e-9))))


@dataclass(frozen=True)
class Measured:
    """What attacks made of some images, by name: dB of each, CPU seconds a batch; failed: why some made nothing."""

    psnr: dict[str, list[float]]
    seconds: dict[str, list[float]]
    failed: dict[str, str]

    def median(self, name: str) -> float:
        """Return an attack's median PSNR in dB."""
        return statistics.median(self.psnr[name])

    def best(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that made something of all images so far, the best median first."""
        able = [name for name in names if self.psnr.get(name) and name not in self.failed]
        return sorted(able, key=self.median, reverse=True)

    def line(self, name: str) -> str:
        """Return what an attack made of all images, in words."""
        values = self.psnr[name]
        fell, took = sum(value > 20 for value in values), statistics.median(self.seconds[name])
        return f"{self.median(name):5.1f} dB, {fell} of {len(values)} above 20, {took:.1f} s a batch"


def measured(
    row: Row, runs: Mapping[str, Run], steps: Mapping[str, int], data: Data, after: Callable[[Measured], None]
) -> Measured:
    """Return what `runs` make of `data`, batch by batch, in turn; what raises an error is left out from then on.

    after: called with what there is after each batch.
    """
    result = Measured({name: [] for name in runs}, {name: [] for name in runs}, {})
    for i in range(0, len(data.x), row.batch):
        one = Data(data.x[i : i + row.batch].clone(), data.y[i : i + row.batch].clone())
        for name in [name for name in runs if name not in result.failed]:
            began = time.process_time()
            try:
                values = row.psnr(one, runs[name](one, steps[name]))
            except Exception as cause:  # noqa: BLE001 - another package's, on a network that it may not know
                result.failed[name] = f"{type(cause).__name__}: {cause}".splitlines()[0]
                continue
            result.seconds[name].append(round(time.process_time() - began, 2))
            result.psnr[name] += values
        after(result)
    for name in result.failed:  # of some batches alone: medians would be of other images
        del result.psnr[name], result.seconds[name]
    return result


def timed(runs: Mapping[str, Run], batch: int, seconds: float) -> tuple[dict[str, int], dict[str, str]]:
    """Return how many steps of each of `runs` fit into `seconds`, and why others cannot be run."""
    steps, failed = dict[str, int](), dict[str, str]()
    for name, run in runs.items():
        try:
            steps[name] = fitting(run, batch, seconds)
        except Exception as cause:  # noqa: BLE001 - as in `measured`
            failed[name] = f"{type(cause).__name__}: {cause}".splitlines()[0]
    return steps, failed


def kept_rows(path: Path, seconds: float) -> dict[str, dict[str, Any]]:
    """Return the figures of an earlier run for as many seconds, by row; none without a file."""
    whole = json.loads(path.read_text()) if path.exists() else {"seconds": seconds, "rows": []}
    if whole["seconds"] != seconds:
        sys.exit(f"{path} has rows of {whole['seconds']} s; take another file, or --seconds {whole['seconds']}.")
    return {row["row"]: row for row in whole["rows"]}


def sides(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names of attacks by whose they are."""
    every = list(names)
    theirs = [name for name in every if name.startswith("breaching ")]
    return {"ours": [name for name in every if name not in theirs], "breaching": theirs}


def chosen_attacks(row: Row, runs: Mapping[str, Run], about: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a row before its victims: steps in the time, what tuning images gave, the finalists."""
    steps, failed = timed(runs, row.batch, about.seconds)
    able = {name: runs[name] for name in steps}
    tuning = measured(row, able, steps, cifar(TUNED, -(-about.tuning // row.batch) * row.batch), lambda _: None)
    for name in tuning.psnr:
        print(f"{row.name:18} {name:32} {tuning.line(name)} (tuning)", flush=True)
    failed |= tuning.failed
    for name, why in failed.items():
        print(f"{row.name:18} {name:32} cannot be run: {why}", flush=True)
    within = [n for n in tuning.psnr if n != "default" or statistics.median(tuning.seconds[n]) <= about.seconds]
    chosen = [name for side in sides(within).values() for name in tuning.best(side)[: about.finalists]]
    about_row = {"row": row.name, "accuracy": row.accuracy, "steps": steps, "tuning": tuning.psnr, "failed": failed}
    return {**about_row, "psnr": {name: [] for name in chosen}, "cpu_seconds": {name: [] for name in chosen}}


def compared(
    row: Row,
    runs: Mapping[str, Run],
    about: argparse.Namespace,
    after: Callable[[dict[str, object]], None],
    before: Mapping[str, Any] | None = None,
) -> None:
    """Try all attacks on tuning images, and the best of each side on the victims; `after` is told the figures.

    before: figures of the row from an earlier run: its finalists go on with the victims that they have not had.
    """
    figures = dict(before or chosen_attacks(row, runs, about))
    names = [name for name in figures["psnr"] if name in runs]
    done = min((len(figures["psnr"][name]) for name in names), default=0)

    def joined(result: Measured) -> Measured:
        psnr, seconds, failed = dict[str, list[float]](), dict[str, list[float]](), figures["failed"] | result.failed
        for name in [name for name in names if name not in failed]:
            psnr[name] = figures["psnr"][name][:done] + result.psnr.get(name, [])
            seconds[name] = figures["cpu_seconds"][name][: done // row.batch] + result.seconds.get(name, [])
        return Measured(psnr, seconds, failed)

    def keep(result: Measured) -> None:
        whole = joined(result)
        best = {side: (whole.best(each) or [""])[0] for side, each in sides(names).items()}
        kept = {"psnr": whole.psnr, "cpu_seconds": whole.seconds, "failed": whole.failed, "best": best}
        after({**figures, **kept})

    result, left = Measured({}, {}, {}), -(-about.victims // row.batch) * row.batch - done
    if left > 0:
        victims = cifar(about.first + done, left)
        result = measured(row, {name: runs[name] for name in names}, figures["steps"], victims, keep)
    keep(result)
    whole = joined(result)
    for name in whole.psnr:
        print(f"{row.name:18} {name:32} {whole.line(name)}", flush=True)
    best = [whole.best(each)[0] for each in sides(names).values() if whole.best(each)]
    print(f"{row.name:18} the best of each: " + "; ".join(f"{name} {whole.line(name)}" for name in best), flush=True)


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
    table: dict[str, dict[str, Any]] = kept_rows(about.out, about.seconds)

    def keep(figures: dict[str, object]) -> None:
        table[str(figures["row"])] = figures
        whole = {"first": about.first, "seconds": about.seconds, "rows": [*table.values()]}
        about.out.write_text(json.dumps(whole, indent=1) + "\n")

    for text in about.rows.split(","):
        row = row_of(text, about.first)
        runs = {name: ours(name, row) for name in about.attacks.split(",")}
        runs |= {f"breaching {name}": theirs(name, row, breaching) for name in peers}
        compared(row, runs, about, keep, table.get(text))


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
    parser.add_argument("--tuning", type=int, default=4)
    parser.add_argument("--finalists", type=int, default=2)
    parser.add_argument("--attacks", default=",".join(OURS))
    parser.add_argument("--peers", default=",".join(PEERS))
    main(parser.parse_args())
