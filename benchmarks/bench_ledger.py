"""Whether the ledger moves for who only tries often, and whether it moves for a better attack.

Run: OMP_NUM_THREADS=1 python benchmarks/bench_ledger.py [TRIALS [TRIES]]
     python benchmarks/bench_ledger.py majority: how often who names the commonest class would move a row if answers
     need not tell victims apart, by simulation: two thirds of the victims have it, chance is 1 / 7, what stands guesses

A trial has a secret, trainings and victims of its own: `dp` with so much noise that its worst case is below a blind
guess, and `spn` under a weak attack, 24 victims each. On each view TRIES submissions that see nothing are judged one
after another as `ppbench score` does, at the level that falls with their number: noise about grey, uniform noise,
constants, the public mean with noise, pictures that beat the blind guesses on held-out images, means of classes chosen
by chance, blends of held-out images. On `spn` a quarter of TRIES. Then a really better attack is submitted: to `dp` the
truth under noise of 0.2 (its law lets nothing be read so well), to `spn` what `adaptive_spn` answers; as the first try
and as the one after TRIES. In the first trial 25 submissions to each view, and the better one, also go through files
and `ledger.score.score`. Beside what was decided stands how often the bootstrap's p alone would have moved a row, and
the test of signs with it.
Printed, and written to benchmarks/results/ledger.json where PPBENCH_KEEP is set.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from ppbench.adversary.attack import Guess
from ppbench.ledger.form import GuessAbout, counting_records
from ppbench.ledger.publish import compute_views, publish
from ppbench.ledger.score import (
    DECIDING,
    OpenedTruth,
    answers_digest,
    decide,
    exchange_p,
    inquiry_of,
    open_truth,
    p_of,
    permutation_p,
    save_guesses,
    score,
    score_answers,
    standing_worst,
    try_level,
)
from ppbench.ledger.transcript import FrozenView, load_transcript
from ppbench.metrics.image import psnr
from ppbench.metrics.spec import Rule
from ppbench.records.schema import Record
from ppbench.report.compare import judge, paired
from ppbench.report.compare.paired import change, rules_for
from ppbench.report.worst import Measured

RESULTS = Path(__file__).parent / "results" / "ledger.json"
VICTIMS = 24
SUITE = f"""
schema = "ppbench.run.suite/1"
id = "ledger-trial"
version = 1
title = "A trial"
[task]
dataset = "digits"
model = "dlnet"
clients = 4
train = 800
[federation]
rounds = 1
[questions]
attacks = ["dlg", "label_recovery"]
attack_batch = [1]
victims = {VICTIMS}
candidates = 8
tuning = 0
stages = ["init"]
[attack.dlg]
restarts = 0
budget = 60
[[defense]]
id = "dp"
grid = [3]
[[defense]]
id = "spn"
grid = [0.1]
"""


def noise(known: OpenedTruth, count: int, draw: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a kind of noise and answers [Q, 1, *shape] of it, without end."""
    ruler = known.yardstick
    assert ruler is not None and ruler.mean is not None and ruler.gallery is not None
    mean, kept, classes = ruler.mean.float(), ruler.gallery.x, ruler.gallery.classes
    assert classes is not None
    shape, middle = (count, *mean.shape), kept.median(0).values
    kinds = torch.stack([kept[classes == one].mean(0) for one in range(10)])
    while True:
        size, level = (float(one) for one in torch.rand(2, generator=draw))
        size = 10 ** (-2.5 * size)
        normal, uniform = torch.randn(shape, generator=draw), torch.rand(shape, generator=draw)
        some = kinds[torch.randint(10, (count,), generator=draw)]
        one, two = (kept[torch.randint(len(kept), (count,), generator=draw)] for _ in range(2))
        yield "noise about grey", (0.5 + size * normal)[:, None]
        yield "uniform noise", uniform[:, None]
        yield "constants", torch.full(shape, level)[:, None]
        yield "mean and noise", (mean + size * normal)[:, None]
        yield "a better blind picture", best_blind(kept, mean, middle, draw).expand(shape)[:, None].clone()
        yield "classes by chance", (mean + level * (some - mean) + 0.1 * size * normal)[:, None]
        yield "held-out images", (mean + level * ((one + two) / 2 - mean))[:, None]


def best_blind(data: torch.Tensor, mean: torch.Tensor, middle: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return the picture [*shape] of 50 that has the best median PSNR on held-out images: mixed of their averages."""
    share, size = torch.rand(50, 1, 1, 1, generator=draw), 0.05 * torch.rand(50, 1, 1, 1, generator=draw)
    several = mean + share * (middle - mean) + size * torch.randn(50, *mean.shape, generator=draw)
    several *= 0.9 + 0.2 * torch.rand(50, 1, 1, 1, generator=draw)
    errors = ((several.clamp(0, 1)[:, None] - data[None]) ** 2).flatten(2).mean(2)
    return several[errors.median(1).values.argmin()]


def submitted(frozen: FrozenView, x: torch.Tensor) -> tuple[GuessAbout, list[Guess], str]:
    """Return a submission of answers x [Q, 1, *shape]."""
    about = GuessAbout(
        transcript=frozen.about.id, kind="reconstruction", name="trial", version="1", reference="", licence="MIT",
        knows=False,
    )  # fmt: skip
    return about, [Guess(x=row.float()) for row in x], answers_digest({"x": x})


class Trial:
    """One secret, with its views."""

    def __init__(self, home: Path, seed: int) -> None:
        self.truth, self.out = home / "truth", home / "out"
        suite = home / "trial.toml"
        suite.write_text(SUITE)
        compute_views(str(suite), self.truth, workers=1)
        index = {a.defense.id: a.id for a in publish(self.truth, self.out).transcripts}
        self.frozen = {name: load_transcript(self.out / index[name]) for name in ("dp", "spn")}
        self.known = {name: open_truth(one, self.truth) for name, one in self.frozen.items()}
        self.seed = seed
        self.before: dict[str, Any] = {}
        self.blind: dict[str, Any] = {}
        self.like: dict[str, Any] = {}

    def tried(self, name: str, x: torch.Tensor, tries: int) -> dict[str, float]:
        """Return what a submission came to: moved, p, and what the bootstrap and the test of signs would say alone.

        Only what decides is measured: decibels, not what the evidence says at the truth.
        """
        frozen, known = self.frozen[name], replace(self.known[name], yardstick=None)
        about, answers, digest = submitted(frozen, x)
        if name not in self.before:
            self.like[name], _, self.blind[name] = score_answers(frozen, self.known[name], about, answers, digest)
            self.before[name] = standing_worst(counting_records(self.truth, []), self.like[name])
        record = self.measured(name, x[:, 0], digest)
        if tries <= 3:
            right = inquiry_of(frozen, known, about.kind).score(answers).victims
            assert [score.psnr for score in record.victims] == [score.psnr for score in right]
        sides = (self.before[name], *self.blind[name])
        result = decide(sides[0], sides[1:], record, tries, lambda: exchange_p(frozen, known, about.kind, answers))
        rules = [rule for rule in rules_for(record) if rule.form in DECIDING]
        student = min(max(by_bootstrap(side, record, rule) for side in sides) for rule in rules)
        exact = min(max(p_of(side, record, rule) for side in sides) for rule in rules)
        return {
            "moved": result.moved,
            "p": result.p,
            "after": float(np.median([score.decibels for score in record.victims])),
            "student": min(1.0, len(rules) * student),
            "signs": min(1.0, len(rules) * exact),
        }

    def measured(self, name: str, x: torch.Tensor, digest: str) -> Record:
        """Return a record of images [Q, *shape] with their decibels, all else as in another one."""
        like, victims = self.like[name], self.known[name].victims
        truth = [victims.truth(unit).x[0] for unit in victims.units]
        decibels = [psnr(*pair) for pair in zip(x.float(), truth, strict=True)]
        scores = [old.model_copy(update={"psnr": one}) for old, one in zip(like.victims, decibels, strict=True)]
        return like.model_copy(update={"cell_id": digest[:32], "victims": scores})


def by_bootstrap(side: Measured, record: Record, rule: Rule) -> float:
    """Return the one-sided p that `ppbench compare` would give."""
    outcome = change([side], [record], rule, record.cell_id)
    return 1.0 if outcome.certain or outcome.worse <= 0 else outcome.p / 2


def better(trial: Trial, name: str, draw: torch.Generator) -> torch.Tensor:
    """Return what a really better attack answers [Q, 1, *shape]."""
    frozen, known = trial.frozen[name], trial.known[name]
    if name == "spn":
        decibels = [guess.x for guess in frozen.run("adaptive_spn", joint_budget=150, inversion_budget=150)]
        return torch.stack([x for x in decibels if x is not None])
    truth = torch.stack([known.victims.truth(unit).x for unit in known.victims.units])
    return truth + 0.2 * torch.randn(truth.shape, generator=draw)


def ran(trial: Trial, tries: int) -> dict[str, dict[str, float]]:
    """Return the figures of a trial, by view."""
    fields = {}
    for name in trial.frozen:
        draw = torch.Generator().manual_seed(trial.seed)
        good = trial.tried(name, better(trial, name, draw), 1)
        results, kinds, told_apart = [], Counter[str](), Counter[str]()
        source = noise(trial.known[name], VICTIMS, draw)
        asked_for = tries if name == "dp" else -(-tries // 4)
        for number in range(1, asked_for + 1):
            kind, x = next(source)
            one = trial.tried(name, x, number)
            results.append(one)
            kinds[kind] += bool(one["moved"])
            told_apart["student"] += one["student"] <= try_level(number)
            told_apart["signs"] += one["signs"] <= try_level(number)
        late = trial.tried(name, better(trial, name, draw), asked_for + 1)
        now = trial.before[name]
        fields[name] = {
            "stands": now.metric("psnr_median").value,
            "blind": float(np.median([score.blind for score in now.victims])),
            "tries": asked_for,
            "moves": sum(kinds.values()),
            "student_alone": told_apart["student"],
            "without_apart": told_apart["signs"],
            "least_p": min(one["p"] for one in results),
            "least_student": min(one["student"] for one in results),
            "best_noise": max(one["after"] for one in results),
            "better_first": bool(good["moved"]),
            "better_late": bool(late["moved"]),
            "better_p": good["p"],
            "better": good["after"],
        }
    return fields


def by_files(trial: Trial, home: Path, tries: int = 25) -> str:
    """Return what the same came to through files and `score`."""
    moves, printed = 0, []
    for name, frozen in trial.frozen.items():
        draw = torch.Generator().manual_seed(trial.seed)
        source = noise(trial.known[name], VICTIMS, draw)
        for _ in range(tries):
            about, answers, _ = submitted(frozen, next(source)[1])
            moves += score(frozen, save_guesses(home / "g.json", about, answers), trial.truth).decision.moved
        about, answers, _ = submitted(frozen, better(trial, name, draw))
        scores = score(frozen, save_guesses(home / "g.json", about, answers), trial.truth)
        printed.append(f"{name}: {scores.receipt}")
    return f"{moves} of {tries * len(trial.frozen)} moved; then {'; '.join(printed)}"


def majority(trials: int = 3000, share: float = 2 / 3, classes: int = 7) -> str:
    """Return how often naming one class for all would move a row, with the test of answers and without."""
    draw, moved = np.random.default_rng(0), np.zeros(2)
    for _ in range(trials):
        right, stands = draw.random(VICTIMS) < share, draw.random(VICTIMS) < 1 / classes
        more, less = (right & ~stands).sum(), (stands & ~right).sum()
        signs = stats.binom.sf(more - 1, more + less, 0.5) if more > less else 1.0
        p = max(signs, stats.binom.sf(right.sum() - 1, VICTIMS, 1 / classes))
        apart = permutation_p(VICTIMS, lambda order, right=right: right.astype(float))
        moved += np.array([p, max(p, apart)]) <= try_level(1)
    return f"naming the commonest class: {moved[0]:.0f} of {trials} would move, {moved[1]:.0f} do"


def main() -> None:
    """Run the trials."""
    if sys.argv[1:] == ["majority"]:
        print(majority())
        return
    torch.set_num_threads(1)
    trials, tries = (int(word) for word in [*sys.argv[1:], "20", "1000"][: max(2, len(sys.argv) - 1)][:2])
    paired.REPLICATES = judge.REPLICATES = (
        200  # what the bootstrap would say is beside the point, and would take most of the time
    )
    begun, result = time.process_time(), []
    for seed in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Path(folder), seed)
            result.append(ran(trial, tries))
            print(seed, json.dumps(result[-1]), flush=True)
            if seed == 0:
                print(by_files(trial, Path(folder)), flush=True)
    whole = {name: [one[name] for one in result] for name in ("dp", "spn")}
    for name, each in whole.items():
        some = {key: [float(one[key]) for one in each] for key in each[0]}
        print(
            f"{name}: " + ", ".join(f"{key} {min(v):.3g} to {max(v):.3g}, sum {sum(v):.3g}" for key, v in some.items())
        )
    print("levels:", {k: float(f"{try_level(k):.3g}") for k in (1, 2, 10, 100, 1000, tries + 1)})
    print(f"{trials} trials of {tries} tries a view, {time.process_time() - begun:.0f} s of a core")
    if os.environ.get("PPBENCH_KEEP"):
        RESULTS.write_text(json.dumps({"trials": trials, "tries": tries, **whole}, indent=1) + "\n")


if __name__ == "__main__":
    main()
