"""Which epsilon does SVTPrivacy give, beside the number that it is configured with? NVFlare and NumPy alone; seconds.

Two updates that the filter is to hide from one another pass it many times. Who sees the result decides by a rule fixed
beforehand which of the two it was; a mechanism of epsilon e lets nobody have P(says A | A) > exp(e) P(says A | B). Both
shares have exact intervals (Clopper and Pearson, 95 % together), from which follows a least epsilon that holds whatever
is thought of the filter's proof.

    python examples/findings/nvflare_svt.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters import SVTPrivacy

RUNS = 1000
LEVEL = 0.05


def passed(update: Any, seed: int, **own: Any) -> tuple[Any, dict[str, Any]]:
    """Return what the filter lets out of an update [P] float32, and the properties that it sets."""
    np.random.seed(seed)
    dxo = DXO(DataKind.WEIGHT_DIFF, data={"w": update.copy()}, meta={MetaKey.NUM_STEPS_CURRENT_ROUND: 1})
    left = from_shareable(SVTPrivacy(**own).process(dxo.to_shareable(), FLContext()))
    return left.data["w"], left.meta


def tail(k: int, n: int, p: float) -> float:
    """Return P(X >= k) of a binomial X."""
    if k <= 0:
        return 1.0
    if p <= 0 or p >= 1:
        return float(p >= 1)
    i = np.arange(k, n + 1)
    logs = [math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1) for j in i]
    return float(np.exp(np.array(logs) + i * math.log(p) + (n - i) * math.log1p(-p)).sum())


def at_least(k: int, n: int, level: float) -> float:
    """Return the lower end of Clopper and Pearson's interval, one-sided at `level`."""
    low, high = 0.0, k / n
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(k, n, middle) < level else (low, middle)
    return low


def least_epsilon(a: Any, b: Any, says_a: Callable[[Any], bool], **own: Any) -> tuple[float, float, float]:
    """Return the shares of "A" where it was a, and where it was b, and the epsilon that they need at least."""
    hits = [sum(says_a(passed(update, 2 * run + k, **own)[0]) for run in range(RUNS)) for k, update in ((0, a), (1, b))]
    right, wrong = at_least(hits[0], RUNS, LEVEL / 2), 1 - at_least(RUNS - hits[1], RUNS, LEVEL / 2)
    return hits[0] / RUNS, hits[1] / RUNS, max(0.0, math.log(max(right, 1e-300) / wrong))


def summed(meta: dict[str, Any]) -> str:
    """Return in words what the filter's own accountant says of one call (2.8 on)."""
    own = meta.get("svt_privacy_budget")
    return f"its own sum {own['epsilon_total']:.4g}" if own else "it sums nothing"


def report(title: str, result: tuple[float, float, float], claimed: str) -> None:
    """Print one finding."""
    print(f"{title}\n  says A of A {result[0]:.4f}, of B {result[1]:.4f}: epsilon >= {result[2]:.2f}; {claimed}")


def main() -> None:
    """Print all findings."""
    logging.disable(logging.WARNING)
    version = metadata.version("nvflare")
    print(f"nvflare {version}, {RUNS} runs a side, least epsilon at {1 - LEVEL:.0%}\n")

    size, gamma = 20_000, 1e-5
    up = np.full(size, gamma, dtype=np.float32)
    _, meta = passed(up, 0)
    printed = summed(meta)
    report(
        f"1. Defaults (epsilon=0.1), {size} entries: all +gamma (A) against all -gamma (B), by the sign of the sum",
        least_epsilon(up, -up, lambda out: bool(out.sum() > 0)),
        f"configured 0.1, {printed}",
    )

    ten = np.full(10, 1e3 * gamma, dtype=np.float32)
    _, meta = passed(ten, 0)
    printed = summed(meta)
    report(
        "2. Defaults, ten entries, of which one is sent: all +1000 gamma (A) against all -1000 gamma (B), by its sign",
        least_epsilon(ten, -ten, lambda out: bool(out.sum() > 0)),
        f"configured 0.1, {printed}",
    )

    first = np.zeros(40, dtype=np.float32)
    first[0] = gamma
    rest = np.where(first == 0, np.float32(gamma), np.float32(0))
    report(
        "3. epsilon=4, one of 40 entries is sent: the first is gamma, the rest 0 (A), or the reverse (B), by the first",
        least_epsilon(first, rest, lambda out: bool(out[0] != 0), fraction=1 / 40, epsilon=4.0),
        "configured 4: the choice keeps it as far as this test sees",
    )

    draws = np.random.default_rng(0)
    wide = (draws.standard_normal(size) * 1e-3).astype(np.float32)
    largest = np.argsort(-np.abs(wide))[: size // 10]
    shares = [np.mean(passed(wide, run)[0][largest] != 0) for run in range(20)]
    sent = np.mean([np.mean(passed(wide, run)[0] != 0) for run in range(20)])
    chance, message = f"of all entries {sent:.1%}", f"of the tenth that is largest {np.mean(shares):.1%} are sent"
    print(f"4. Defaults: {message}, {chance}: the choice is by chance")
    out = passed(wide, 0)[0]
    kept = out != 0
    right, mean = np.mean(np.sign(out)[kept] == np.sign(wide)[kept]), np.abs(out[kept]).mean() / gamma
    print(
        f"5. Defaults, changes of 1e-3: {right:.1%} of the sent entries have the right sign; mean size {mean:.1f} gamma"
    )


if __name__ == "__main__":
    main()
