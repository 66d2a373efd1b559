"""What `ppbench compare` can find, how often it cries wolf, and how long it takes.

Run: OMP_NUM_THREADS=1 python benchmarks/bench_compare.py power|speed|rerun|edits [RUNS]

power: the smallest true worsening that is found as a regression with a probability of 80 %, by simulation.
speed: CPU seconds of one thread for one row of 1400 candidates (the machine may be shared).
rerun: an evaluation of `dp` made again and again with the same questions but other draws of training, noise and attack
    (20 times, about 20 s each), compared with the first one and each with the one before: no defense changed, so every
    regression is false. What differs between reruns is where `power` takes its noise from.
edits: a defense (tests/weakened) evaluated by default at its initial weights, and again after each of 26 edits of its
    code, 16 of which weaken it; and 10 reruns with draws that no seed decides. 40 s each.
Printed, and written to benchmarks/results/compare.json (edits: compare_edits.csv) where PPBENCH_KEEP is set.
PPBENCH_RERUNS: a folder in which reruns are kept, and found finished.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ppbench.base.seeds import Seeds
from ppbench.records.store import Store
from ppbench.report.compare.join import join
from ppbench.report.compare.outcome import compare
from ppbench.report.compare.paired import (
    ALL_RULES,
    Change,
    Rule,
    Sample,
    bootstrapped,
    mcnemar,
    rules_for,
    sample_of,
    with_luck,
)
from ppbench.run.evaluation import evaluate

RESULTS = Path(__file__).parent / "results" / "compare.json"
ROWS = 20  # of a defense, in Holm's correction
FOUND = 0.8
DISCORDANT = 0.10  # share of candidates decided otherwise by a rerun: .03 to .10 were measured
REAL = {
    "defense": "dp",
    "grid": (1e-3, 1e-2),
    "model": "mlp",
    "clients": 4,
    "rounds": 25,
    "local_epochs": 4,
    "train": 600,
    "victims": 24,
    "candidates": 300,
    "attack_batch": (1,),
    "attacks": ("dlg", "analytic", "label_recovery", "mia_loss", "tracing"),
    "settings": {"dlg.budget": 100, "dlg.restarts": 0},
    "tuning": 0,
}


def rule(name: str) -> Rule:
    return next(one for one in ALL_RULES if one.metric == name)


def plain(base: np.ndarray, new: np.ndarray) -> Sample:
    """Return victims who are units of their own."""
    n, units = len(base), np.arange(len(base))
    return Sample(base, new, np.full(n, 1 / n), units, 0 * units, np.zeros(n, dtype=bool), 0 * units, 1e-5)


def decided(n: int, worse: float, generator: np.random.Generator) -> Change:
    """Return the change of an ASR of .6 that rises by `worse`, give or take the luck of one training a side.

    Of the other candidates the rerun alone decides `DISCORDANT` otherwise.
    """
    luck = rule("asr").luck
    moved = float(np.clip(worse + generator.normal(0, luck * 2**0.5), -0.85, 0.85))
    up, down = (DISCORDANT / 2 + max(0.0, side * moved) for side in (1, -1))
    kind = generator.choice(3, size=n, p=[up, down, 1 - up - down])
    agreed = (generator.random(n) < 0.6).astype(float)
    base = np.where(kind == 0, 0.0, np.where(kind == 1, 1.0, agreed))
    outcome = mcnemar(plain(base, np.where(kind == 2, agreed, 1 - base)), safer=False)
    return with_luck(outcome, luck, 1)


def rebuilt(n: int, worse: float, noise: float, generator: np.random.Generator) -> Change:
    """Return the change of a median PSNR over victims at 15 dB give or take 4, who differ by `noise` dB in a rerun."""
    base = generator.normal(15, 4, size=n)
    new = base + worse + generator.normal(0, noise, size=n)
    return bootstrapped([plain(base, new)], rule("psnr_median"), str(worse))


def regression(result: Change, tolerance: float) -> bool:
    """Return whether a row is a regression where the defense's other rows are as they were."""
    return ROWS * result.p < 0.05 and result.low > 0 and result.worse > tolerance


def smallest(
    make: Callable[[float, np.random.Generator], Change], steps: list[float], tolerance: float
) -> float | None:
    """Return the smallest of `steps` at which 80 % of 300 trials find a regression, None where none does."""
    for worse in steps:
        generator = np.random.default_rng(round(1e6 * worse))
        if np.mean([regression(make(worse, generator), tolerance) for _ in range(300)]) >= FOUND:
            return worse
    return None


def power() -> dict[str, object]:
    asr = {
        n: smallest(lambda worse, g, n=n: decided(n, worse, g), [round(0.01 * k, 2) for k in range(6, 40)], 0.02)
        for n in (200, 400, 1400, 5000)
    }
    psnr = {
        f"sd {noise:g} dB": {
            n: smallest(lambda w, g, n=n, s=noise: rebuilt(n, w, s, g), [0.25 * k for k in range(2, 60)], 0.5)
            for n in (12, 20, 50, 100)
        }
        for noise in (0.3, 1.0, 3.0)
    }
    return {"rows": ROWS, "asr": asr, "psnr_median": psnr}


def speed() -> dict[str, float]:
    """Return CPU seconds for 2000 replicates of 1400 candidates, by form."""
    generator, result = np.random.default_rng(0), {}
    member = np.arange(1400) % 2 == 0
    half = np.arange(1400) // 2 % 2
    base, new = (generator.normal(member * 0.5) for _ in range(2))
    sample = Sample(base, new, np.full(1400, 1 / 1400), np.arange(1400), 2 * half + member, member, half, 1e-5)
    for name in ("auc", "tpr_at_1pct_fpr", "psnr_median", "rmse_mean", "epsilon_lower"):
        times = []
        for _ in range(5):
            began = time.process_time()
            bootstrapped([sample], rule(name), "key")
            times.append(time.process_time() - began)
        result[name] = round(sorted(times)[2], 3)
    return result


def once(number: int, out: str) -> None:
    """Evaluate with the questions of seed 0; everything that a party or an attack draws comes from `number`."""
    seed = Seeds.seed

    def redrawn(self: Seeds, role: str, *index: int | str) -> int:
        other = number and role in ("party", "attack")
        return seed(Seeds(1_000_003 * self.master + number) if other else self, role, *index)

    Seeds.seed = redrawn  # type: ignore[method-assign]
    evaluate(**REAL, out=out, workers=1)  # type: ignore[arg-type]


def rerun(runs: int) -> dict[str, object]:
    """Return how many regressions are found where there are none."""
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(os.environ.get("PPBENCH_RERUNS", folder)) / str(number) for number in range(runs + 1)]
        for number, out in enumerate(outs):
            if not (out / "leaderboard.csv").is_file():
                subprocess.run([sys.executable, __file__, "once", str(number), str(out)], check=True)
        first = [false_alarms(outs[0], out) for out in outs[1:]]
        chain = [false_alarms(one, two) for one, two in itertools.pairwise(outs)]
        noise = differences(outs)
    return {"runs": runs, "with the first": total(first), "with the one before": total(chain), "noise": noise}


def false_alarms(base: Path, new: Path) -> dict[str, int]:
    comparison = compare(base, new)
    statuses = [row.status for row in comparison.rows if row.where.defense == "dp" or row.where.defense == "none"]
    raw = sum(
        row.change is not None and row.change.p < 0.05 and row.change.worse > 0 and not row.change.certain
        for row in comparison.rows
    )
    return {
        "comparisons": 1,
        "with a false regression": bool(comparison.regressions),
        "false regressions": sum(r.status == "regression" for r in comparison.rows),
        "with a false fault": bool(comparison.faults),
        "rows": len(statuses),
        "rows that Holm's correction kept": raw - sum(r.status == "regression" for r in comparison.rows),
        "inconclusive": statuses.count("inconclusive"),
    }


def total(result: list[dict[str, int]]) -> dict[str, int]:
    return {name: int(sum(one[name] for one in result)) for name in result[0]}


def differences(outs: list[Path]) -> dict[str, dict[str, float]]:
    """Return what differs between reruns: the share of other decisions, and the deviation of a victim's PSNR in dB."""
    first = Store(outs[0]).load_all()
    seen = defaultdict[str, list[float]](list)
    for out in outs[1:]:
        for pair in join(first, Store(out).load_all()).pairs:
            for one in rules_for(pair.base[0]):
                if one.metric in ("asr", "psnr_median"):
                    sample = sample_of(pair.base[0], pair.new[0], one)
                    where = pair.where
                    name = f"{one.metric} {where.defense} {where.value} {where.attack} {where.stage}"
                    change = sample.new - sample.base
                    seen[name].append(float((change != 0).mean() if one.form == "decision" else change.std()))
    return {name: {"mean": round(float(np.mean(v)), 3), "most": round(max(v), 3)} for name, v in seen.items()}


# -- edits of a defense's code -----------------------------------------------------------------------------------------
WEAKENED = Path(__file__).parents[1] / "tests" / "weakened"
EDITED = {"defense": "guard", "stages": ("init",), "rounds": 1, "train": 300, "candidates": 20, "attack_batch": (1,)}


def edits() -> list[dict[str, object]]:
    """Return how `compare` ends for each edit, and for reruns."""
    sys.path.insert(0, str(WEAKENED))
    from ppbench_weakened import NO_WEAKER, WEAKER

    with tempfile.TemporaryDirectory() as folder:
        home = Path(os.environ.get("PPBENCH_RERUNS", folder))
        base, rows = edited(home, "as_it_is", 0), list[dict[str, object]]()
        for kind, variants in (("weakened", WEAKER), ("not weakened", NO_WEAKER)):
            rows += [judged(kind, name, base, edited(home, name, 0)) for name in variants]
        for seed in range(10):
            sides = [edited(home, "other_draws", seed, side) for side in ("-a", "-b")]
            rows.append(judged("rerun", f"seed {seed}", *sides))
    return rows


def edited(home: Path, variant: str, seed: int, side: str = "") -> Path:
    """Return the results of an edit, computed where they are not there."""
    out = home / f"{variant}{side}-{seed}"
    if not (out / "selftest.json").is_file():
        paths = {"PYTHONPATH": str(WEAKENED), "PPBENCH_VARIANT": variant}
        words = [sys.executable, __file__, "edit", str(seed), str(out)]
        subprocess.run(words, check=True, env={**os.environ, **paths})
    return out


def judged(kind: str, name: str, base: Path, new: Path) -> dict[str, object]:
    """Return a row of the table: the exit code, and the clearest regression."""
    comparison = compare(base, new)
    regressions = sorted(
        comparison.regressions, key=lambda row: (row.metric != "psnr_median", row.where.attack[:5] != "worst")
    )
    words = f"{regressions[0].metric} {regressions[0].levels}".strip() if regressions else ""
    return {"kind": kind, "edit": name, "exit": int(comparison.exit_code), "found": words}


def write_edits(rows: list[dict[str, object]]) -> None:
    with (RESULTS.parent / "compare_edits.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def main() -> None:
    what, *rest = sys.argv[1:] or ["power"]
    if what == "once":
        return once(int(rest[0]), rest[1])
    if what == "edit":
        evaluate(**EDITED, seed=int(rest[0]), out=rest[1], workers=1)  # type: ignore[arg-type]
        return None
    if what == "edits":
        rows = edits()
        print(json.dumps(rows, indent=1))
        return write_edits(rows) if os.environ.get("PPBENCH_KEEP") else None
    result: object = (
        rerun(int(rest[0]) if rest else 20) if what == "rerun" else {"power": power, "speed": speed}[what]()
    )
    print(json.dumps(result, indent=1))
    if os.environ.get("PPBENCH_KEEP"):
        kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps({**kept, what: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
