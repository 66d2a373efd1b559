"""Flower's central DP takes each client's share of the mean for 1 / n; FedAvg's shares follow the examples.

Run: PYTHONPATH=FOLDER python examples/findings/flower_unequal_counts.py [--runs 1000]
where `pip install --target FOLDER flwr` has made FOLDER, with SciPy beside; seen with Flower 1.23 and 1.42, some five
minutes.

The strategies with fixed clipping add noise of standard deviation z C / n to the aggregate (multiplier z, clipping
norm C, n clients), and leave weighting to the strategy that they wrap. FedAvg weights by "num-examples", so that a
client with a share w of all examples moves the aggregate by up to w C: it has the noise of a multiplier z / (n w).

Two worlds differ in one client's update, as long as clipping lets it be in one and next to nothing in the other (an
update of zeros stops Flower: flower_zero_update.py). Number of clients and counts are the same in both, which of the
usual relations is the kindest one: between replaced updates lies up to 2 w C. Who knows everything but the noise says
from the released weights which world it is, by a threshold that other runs fixed. P(says it | it) <= exp(epsilon)
P(says it | not) + delta, and Clopper and Pearson's ends of both shares, 95 % together, give the least epsilon whatever
the noise's law; the second bound takes the law for Gaussian, as the source has it, and uses all of the values. Beside
them stands the exact epsilon of one Gaussian release with the multiplier that was asked for.
"""

from __future__ import annotations

import argparse
import logging
import math
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp import strategy as strategies
from scipy import special, stats

CLIENTS, MULTIPLIER, CLIP, DELTA, LEVEL = 10, 2.0, 0.5, 1e-5, 0.05
EQUAL, UNEQUAL = (100,) * CLIENTS, (1000,) + (100,) * (CLIENTS - 1)  # the canary client is the first
SERVER, CLIENT = "DifferentialPrivacyServerSideFixedClipping", "DifferentialPrivacyClientSideFixedClipping"
START = np.linspace(-1.0, 1.0, 20)


def released(strategy: Any, counts: tuple[int, ...], long: float) -> float:
    """Return how far one round moves the weight in which the canary client's update is `long`."""
    arrays = ArrayRecord({"w": Array(START)})
    grid: Any = SimpleNamespace(get_node_ids=lambda: range(1, len(counts) + 1))

    def trained(request: Message, _: Context) -> Message:
        client = request.metadata.dst_node_id - 1
        weights = request.content.array_records["arrays"]["w"].numpy().copy()
        weights[min(client, 1)] += CLIP / 2 if client else long
        metrics = MetricRecord({"num-examples": counts[client], "one": 1})
        return Message(RecordDict({"arrays": ArrayRecord({"w": Array(weights)}), "metrics": metrics}), reply_to=request)

    replies = []
    for request in strategy.configure_train(1, arrays, ConfigRecord(), grid):
        here = Context(1, request.metadata.dst_node_id, {}, RecordDict(), {})
        clips = type(strategy).__name__ == CLIENT
        replies.append(fixedclipping_mod(request, here, trained) if clips else trained(request, here))
    result, _ = strategy.aggregate_train(1, replies)
    return float(result["w"].numpy()[0] - START[0])


def wrapped(wrapper: str, key: str = "num-examples", **own: Any) -> Any:
    """Return Flower's strategy around FedAvg that weights by `key`."""
    inner = strategies.FedAvg(fraction_evaluate=0.0, weighted_by_key=key)
    return getattr(strategies, wrapper)(inner, MULTIPLIER, CLIP, CLIENTS, **own)


def least(inside: Any, outside: Any, line: float) -> float:
    """Return the least epsilon by the shares of values [runs] beyond `line`, -inf where they tell nothing."""
    runs, hits, alarms = len(inside), int((inside > line).sum()), int((outside > line).sum())
    right = stats.beta.ppf(LEVEL / 2, hits, runs - hits + 1) if hits else 0.0
    wrong = stats.beta.ppf(1 - LEVEL / 2, alarms + 1, runs - alarms) if alarms < runs else 1.0
    return math.log((right - DELTA) / wrong) if right > DELTA else -math.inf


def gaussian(mu: float) -> float:
    """Return epsilon at DELTA between Gaussians `mu` standard deviations apart (Balle and Wang 2018)."""
    low, high = 0.0, 200.0
    for _ in range(80):
        e = (low + high) / 2
        lost = special.ndtr(mu / 2 - e / mu) - math.exp(e + special.log_ndtr(-mu / 2 - e / mu)) if mu > 0 else 0.0
        low, high = (e, high) if lost > DELTA else (low, e)
    return high


def least_gaussian(inside: Any, outside: Any) -> float:
    """Return the least epsilon of Gaussians of one spread, by the ends of their distance's and spread's intervals."""
    runs, free = len(inside), 2 * len(inside) - 2
    square = (inside.var(ddof=1) + outside.var(ddof=1)) / 2
    away = inside.mean() - outside.mean() - stats.t.ppf(1 - LEVEL / 2, free) * math.sqrt(2 * square / runs)
    return gaussian(max(0.0, away) / math.sqrt(free * square / stats.chi2.ppf(LEVEL / 2, free)))


def measured(strategy: Any, counts: tuple[int, ...], runs: int) -> tuple[float, float, float]:
    """Return the least epsilon by shares and as a Gaussian's, and the spread of what is released."""
    tried, used = (
        [np.array([released(strategy, counts, long) for _ in range(runs)]) for long in (10 * CLIP, 1e-6 * CLIP)]
        for _ in range(2)
    )
    line = max(np.concatenate(tried), key=lambda value: least(*tried, value))
    return max(0.0, least(*used, line)), least_gaussian(*used), float(used[1].std(ddof=1))


def accounted() -> str:
    """Return what the strategy says of unequal counts where it has an accountant, which older ones cannot be given."""
    try:
        from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
    except ImportError as cause:
        return f"cannot be asked, {cause}"
    how = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    try:
        released(wrapped(SERVER, accountant=RdpAccountant(PrivacyConfig(DELTA, CLIENTS, *how))), UNEQUAL, CLIP)
    except (ImportError, ValueError) as cause:
        return f"refused, {cause}"
    return "aggregated"


def known() -> None:
    """Tell Flower who sends, which newer versions want to know before a message is made."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


def main() -> None:
    """Print the epsilon that was asked for, and the least that each way of counting gives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    logging.getLogger("flwr").setLevel(logging.ERROR)
    known()
    np.random.seed(0)
    asked_for = f"{CLIENTS} clients, multiplier {MULTIPLIER:g}, z C / n {MULTIPLIER * CLIP / CLIENTS:.4f}"
    print(f"flwr {metadata.version('flwr')}, {asked_for}, {runs} runs a side")
    print(f"one Gaussian release, delta {DELTA:g}: epsilon {gaussian(1 / MULTIPLIER):.2f}")
    for title, strategy, counts, share in (
        ("server clips, equal counts", wrapped(SERVER), EQUAL, 1 / CLIENTS),
        ("server clips, one client has 10 times the others' examples", wrapped(SERVER), UNEQUAL, 10 / 19),
        ("clients clip, equal counts", wrapped(CLIENT), EQUAL, 1 / CLIENTS),
        ("clients clip, one client has 10 times the others' examples", wrapped(CLIENT), UNEQUAL, 10 / 19),
        ("server clips, 10 times, weighted by a metric that is 1 of all", wrapped(SERVER, "one"), UNEQUAL, 1 / CLIENTS),
    ):
        shares, law, spread = measured(strategy, counts, runs)
        print(f"{title}: epsilon at least {shares:.2f}, as a Gaussian's at least {law:.2f}", flush=True)
        print(f"  a share of {share:.3f} would be {gaussian(share * CLIENTS / MULTIPLIER):.2f}; noise {spread:.4f}")
    print(f"server clips, 10 times, with an accountant: {accounted()}")


if __name__ == "__main__":
    main()
