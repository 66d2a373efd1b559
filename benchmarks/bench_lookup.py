"""What looking victims up in public data finds, and what warped data leave of it: the table of docs/benchmarks.md.

    OMP_NUM_THREADS=1 python benchmarks/bench_lookup.py OUT      # a folder; finished parts are taken from it
    OMP_NUM_THREADS=1 PPBENCH_TEST_DATA=FOLDER python benchmarks/bench_lookup.py images   # what the warp does to them

Transcripts of digits and of warped:digits are computed and published as `ppbench publish` does, then attacked by who
has scikit-learn's digits, labels included, and the code of the warp, but not the secret. For each observation

    lookup: the image whose update would lie nearest to what was seen: least squares, the likelihood of Gaussian noise;
        under SPN on the public head alone, which SPN leaves exact;
    bent lookup: the same among all images, each bent in BENDS ways that the adversary draws;
    fit: the bends of the NEAREST of those images, improved by STEPS of Adam at the same likelihood; the best counts.

found: victims whose original was chosen. Beside them the best of our attacks in the ordinary cells of the same view.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import vmap

from ppbench.attacks.adaptive.dp import AdaptiveDP
from ppbench.attacks.adaptive.spn import AdaptiveSPN
from ppbench.base.seeds import Seeds
from ppbench.federation.evidence import Evidence
from ppbench.ledger.publish import compute_views, publish, title_of
from ppbench.ledger.transcript import FrozenView, load_transcript
from ppbench.records.run_files import salt_of
from ppbench.records.store import Store
from ppbench.task.dataset import Split
from ppbench.task.user_data import open_dataset
from ppbench.task.warped import WARP_NUMBERS, Bend, bent

BENDS, NEAREST, STEPS, CHUNK = 20, 8, 200, 256
OURS = ("dlg", "adaptive_dp", "adaptive_spn")
SUITE = """
schema = "ppbench.run.suite/1"
id = "lookup"
version = 1
title = "What looking victims up finds"
seeds = [0]
[task]
dataset = "DATASET"
model = "dlnet"
clients = 10
[federation]
rounds = 1
[questions]
attacks = ["standard"]
attack_batch = [1]
victims = 24
tuning = 0
stages = ["init"]
threats = ["server/1"]
[[defense]]
id = "dp"
grid = [0.001, 0.003, 0.01, 0.1, 1]
[[defense]]
id = "spn"
grid = [0.1]
"""


@dataclass(frozen=True)
class Known:
    """What the adversary has: all images of digits, x float32 [N, 1, 8, 8], y one-hot [N, 10]."""

    x: Tensor
    y: Tensor

    @classmethod
    def of(cls, name: str, seed: int) -> Known:
        """Return the training part, then the test part, of a data set."""
        data = open_dataset(name, seed=seed)
        parts = [split.take(torch.arange(len(split))) for split in (data.train, data.test)]
        return cls(*(torch.cat([getattr(part, field) for part in parts]) for field in ("x", "y")))


@dataclass(frozen=True)
class Target:
    """What was seen of the victims: observed [V, P] of weight [P], and what an image would have sent."""

    evidence: Evidence
    names: tuple[str, ...]
    observed: Tensor

    @classmethod
    def of(cls, frozen: FrozenView) -> Target:
        """Return what a transcript's questions are about, in their order."""
        reader = AdaptiveSPN() if frozen.about.defense.id == "spn" else AdaptiveDP()
        evidence = {e.unit: e for e in reader.evidence(frozen.view)}
        every = [evidence[challenge.unit] for challenge in frozen.challenges]
        weight = every[0].weight
        names = tuple(n for n in every[0].observed if weight is None or bool(weight[n].any()))
        return cls(every[0], names, torch.stack([cls._flat(e.observed, names) for e in every]))

    @staticmethod
    def _flat(tree: dict[str, Tensor], names: Sequence[str]) -> Tensor:
        return torch.cat([tree[name].reshape(-1) for name in names])

    def updates(self, x: Tensor, y: Tensor) -> Tensor:
        """Return what images [n, ...] with labels [n, C] would have sent each, [n, P]."""
        return vmap(lambda x, y: self._flat(self.evidence.simulate(x[None, None], y[None, None]), self.names))(x, y)

    def distances(self, x: Tensor, y: Tensor) -> Tensor:
        """Return how far each of images [n, ...] is from explaining each observation, [V, n]."""
        parts = [
            torch.cdist(self.observed, self.updates(*some)) for some in zip(x.split(CHUNK), y.split(CHUNK), strict=True)
        ]
        return torch.cat(parts, 1)


def drawn(count: int, generator: torch.Generator) -> Bend:
    """Return bends as the adversary draws them, without grain, which he cannot guess."""
    numbers = 2 * torch.rand(count, WARP_NUMBERS, generator=generator, dtype=torch.float64) - 1
    return Bend(numbers, torch.zeros(count, 1, 8, 8, dtype=torch.float64))


def looked_up(target: Target, known: Known, generator: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """Return for each way of looking up the images chosen [V, ...] and their places [V] in `known`."""
    plain = target.distances(known.x, known.y)
    place = plain.argmin(1)
    least, numbers = plain, torch.zeros(len(plain), len(known.x), WARP_NUMBERS, dtype=torch.float64)
    for _ in range(BENDS):
        bend = drawn(len(known.x), generator)
        here = target.distances(bent(known.x, bend).clamp(0, 1).float(), known.y)
        numbers = torch.where((here < least)[..., None], bend.numbers, numbers)
        least = torch.minimum(here, least)
    near = least.topk(NEAREST, largest=False).indices
    best, start = near[:, 0], numbers.gather(1, near[..., None].expand(-1, -1, WARP_NUMBERS))
    rough = bent(known.x[best], Bend(start[:, 0], torch.zeros(()))).clamp(0, 1).float()
    return {"lookup": (known.x[place], place), "bent": (rough, best), "fit": fitted(target, known, near, start)}


def fitted(target: Target, known: Known, near: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best explained of the images `near` [V, K], bent from numbers `start` [V, K, NUMBERS] on; places."""
    rows, seen = near.flatten(), target.observed.repeat_interleave(NEAREST, 0)
    free = start.flatten(0, 1).clamp(-0.95, 0.95).atanh().requires_grad_()
    steps, least, images = torch.optim.Adam([free], lr=0.05), torch.full((len(rows),), torch.inf), known.x[rows].clone()
    for _ in range(STEPS):
        x = bent(known.x[rows], Bend(free.tanh(), torch.zeros(()))).clamp(0, 1).float()
        apart = (target.updates(x, known.y[rows]) - seen).square().sum(1)
        better = apart.detach() < least
        least, images = torch.where(better, apart.detach(), least), torch.where(better[:, None, None, None], x, images)
        steps.zero_grad()
        (apart / seen.square().sum(1)).sum().backward()
        steps.step()
    images = images.detach()
    best = least.view(near.shape).argmin(1)
    each = torch.arange(len(near))
    return images.view(*near.shape, *images.shape[1:])[each, best], near[each, best]


def decibels(guess: Tensor, truth: Tensor) -> float:
    """Return the median PSNR; 200 for what is equal."""
    return float((-10 * (guess - truth).double().square().flatten(1).mean(1).clamp(min=1e-20).log10()).median())


def measure(dataset: str, home: Path) -> None:
    """Compute, publish, look up; print a row of the table for each view."""
    results, out, suite = home / "results", home / "transcripts", home / "suite.toml"
    home.mkdir(parents=True, exist_ok=True)
    suite.write_text(SUITE.replace("DATASET", dataset))
    compute_views(str(suite), results, only={"attack": OURS}, workers=1)
    seed = Seeds(0, salt_of(results, fresh=False)).seed("data")
    theirs, known = Known.of(dataset, seed), Known.of("digits", 0)
    ours: dict[str, float] = {}
    for record in Store(results).load_all():
        if record.config.attack.kind == "reconstruction":
            reached = statistics.median(v.psnr for v in record.victims)  # type: ignore[union-attr]
            ours[title_of(record.config)] = max(reached, ours.get(title_of(record.config), 0.0))
    for about in sorted(publish(results, out).transcripts, key=lambda a: a.title):
        if about.defense.id == "full_noise":
            continue
        truth = load_file(results / "truth" / f"{about.id}.safetensors")["x"].flatten(0, 1)
        origin = torch.cdist(truth.flatten(1), theirs.x.flatten(1)).argmin(1)
        target = Target.of(load_transcript(out / about.id))
        cells = [about.title.partition(",")[0], dataset, f"{ours[about.title]:.1f}"]
        for guess, place in looked_up(target, known, torch.Generator().manual_seed(1)).values():
            cells.append(f"{int((place == origin).sum())} of {len(truth)}, {decibels(guess, truth):.1f}")
        print(f"| {' | '.join(cells)} |", flush=True)


def learned(train: Split, test: Split, seed: int) -> float:
    """Return the accuracy of a small convolutional network after 25 epochs."""
    torch.manual_seed(seed)
    every, data = (part.take(torch.arange(len(part))) for part in (train, test))
    side = train.x.shape[-1] // 2
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * side**2, 64), nn.ReLU(), nn.Linear(64, train.classes))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(25):
        for some in torch.randperm(len(train)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(every.x[some]), every.y[some]).backward()
            optimizer.step()
    return float((net(data.x).argmax(1) == test.y).float().mean())


def near(name: str, count: int = 1000) -> None:
    """Print how far `count` warped images are from their originals, and from the nearest of all originals."""
    plain, ours = (Known.of(text, 0).x.flatten(1) for text in (name, f"warped:{name}"))
    own = -10 * (ours - plain)[:count].square().mean(1).log10()
    parts = [torch.cdist(ours[:count], part).square().min(1).values for part in plain.split(10_000)]
    least = -10 * (torch.stack(parts).min(0).values / plain.shape[1]).log10()
    values = [
        f"{float(t.median()):.1f} (90 % below {float(t.quantile(0.9)):.1f}, most {float(t.max()):.1f})"
        for t in (own, least)
    ]
    print(f"| {Path(name).name} | {' | '.join(values)} |", flush=True)


def images() -> None:
    """Print what the warp does to images: distances, and what digits are worth in training."""
    folder = os.environ.get("PPBENCH_TEST_DATA")
    print("| images | PSNR to its original, dB | to the nearest original |\n| --- | --- | --- |")
    for name in ("digits", *([f"parquet:{folder}/mnist", f"parquet:{folder}/cifar10"] if folder else [])):
        near(name)
    for name in ("digits", "warped:digits"):
        data = open_dataset(name, seed=0)
        results = [learned(data.train, data.test, seed) for seed in range(3)]
        print(f"{name}: accuracy {', '.join(f'{value:.3f}' for value in results)}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "images":
        images()
    else:
        print(
            "| view | data | our best, dB | lookup: found, dB | bent lookup | fit |\n" + "| --- " * 6 + "|", flush=True
        )
        for dataset in ("digits", "warped:digits"):
            measure(dataset, Path(sys.argv[1]) / dataset.replace(":", "-"))
