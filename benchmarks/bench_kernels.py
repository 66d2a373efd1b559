"""How far cells move between processors: one evaluation, computed by torch's and MKL's kernels of other ones.

    python benchmarks/bench_kernels.py FOLDER      # an hour on one core; goes on where it was stopped

What is printed is what `ppbench.ledger.examination` takes its bounds from.
"""

import os
import subprocess
import sys
from pathlib import Path

from ppbench.ledger.examination import first_difference
from ppbench.records.store import Store
from ppbench.report.compare.paired import change, rules_for

WAYS = {
    "here": {},
    "plain": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"},
}
SMALL = dict(dataset="digits", rounds=5, clients=4, train=400, candidates=40, tuning=0, workers=1, seed=0,
             stages=("init", "final"), settings={"ig.budget": 200, "dlg.budget": 300})  # fmt: skip
RUNS = {
    "mlp": dict(SMALL, defense="dp", grid=(0.01, 0.1), model="mlp", victims=12, attack_batch=(1, 4),
                attacks=("analytic", "closed_form", "ig", "dlg", "adaptive_dp", "label_recovery", "mia_loss"),
                settings={**SMALL["settings"], "adaptive_dp.budget": 300}),
    "lenet": dict(SMALL, defense="spn", grid=(0.1,), model="lenet", victims=8, attack_batch=(1,),
                  attacks=("closed_form", "ig", "dlg", "adaptive_spn")),
}  # fmt: skip


def compute(home: Path) -> None:
    """Compute each evaluation in each way, in processes of their own."""
    for way, environment in WAYS.items():
        for name, options in RUNS.items():
            out = home / f"{name}-{way}"
            if not (out / "leaderboard.csv").exists():
                script = f"import ppbench; ppbench.evaluate(out={str(out)!r}, **{options!r})"
                whole = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
                subprocess.run([sys.executable, "-W", "ignore", "-c", script], env=whole, check=True)


def compare(home: Path, name: str, way: str) -> None:
    """Print how many cells moved between two ways, and the largest change of each figure."""
    cells = moved = equal = 0
    most: dict[str, float] = {}
    other = Store(home / f"{name}-{way}")
    for one in Store(home / f"{name}-here").load_all():
        two = other.load(one.cell_id)
        if not one.victims:
            continue
        cells += 1
        equal += not first_difference(one, two)
        changes = {}
        for rule in rules_for(one) if one.victims != two.victims else ():
            if (metric := one.metric(rule.metric)) and metric.value is not None:
                effect = change([one], [two], rule, one.cell_id)
                changes[rule] = abs(effect.base - effect.new)
        moved += any(by > rule.tolerance for rule, by in changes.items())
        for rule, by in changes.items():
            most[rule.name] = max(most.get(rule.name, 0.0), by)
    print(f"{name}, {way}: {cells} cells, {equal} equal, {moved} beyond compare's tolerance; most {most}")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    compute(folder)
    for named in RUNS:
        for way in WAYS:
            if way != "here":
                compare(folder, named, way)
