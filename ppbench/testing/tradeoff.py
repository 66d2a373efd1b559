"""Properties of learning: a defense has no effect at its "off" level, and a monotone one along its control."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import mean, stdev

import torch
from scipy import stats

from ppbench.base.errors import UsageError
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation, run_many
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.nets.net import initial, net_spec
from ppbench.testing.findings import Inconclusive, NotAsked
from ppbench.testing.scene import (
    CLASSES,
    SHAPE,
    SHARD,
    DefenseTrial,
    all_digits,
    base_plan,
    digit_shards,
    plan_for,
    with_parameters,
)

LEARN_ROUNDS = 12
SEEDS = range(8)
TRAIN = 400
"""Training examples of all clients, drawn for each seed from the first `POOL` digits; the others are test examples."""
POOL = 1300
FALSE_ALARM = 0.01
"""Probability of a false direction, over all pairs of values together."""
OFF_TOLERANCE = 1e-4
"""Largest distance from the weights of `none` at the off level, relative to the change of these in training."""


def off_level_equals_none(trial: DefenseTrial) -> Iterator[str]:
    """Check that the defense at its off level trains as `none` does, to float tolerance.

    With equal shards, full batches and plain SGD, so that nothing amplifies rounding.
    """
    if trial.off is None:
        raise NotAsked("no parameters at which it does nothing are named; give off={...} if there is such a level")
    level = with_parameters(trial.defense, dict(trial.off))
    setting = ", ".join(f"{name}={value!r}" for name, value in trial.off)
    for upload in ("gradient", "delta"):
        local = Local("gradient", 1, SHARD, Opt("sgd", 0.1)) if upload == "gradient" else Local("delta", 2, SHARD)
        local = replace(local, opt=Opt("sgd", 0.1))
        plan = replace(plan_for(trial.defense, base_plan()), local=local, server_opt=Opt("sgd", 1.0))
        start = initial(plan.spec, 1)
        try:
            ends = [_weights(defense, plan, start) for defense in (level, load("defenses", "none")())]
        except UsageError as refusal:
            raise NotAsked(f"it refuses the plan of the comparison ({refusal})") from refusal
        layout = Layout.of(start)
        defended, undefended = (layout.pack(end) for end in ends)
        distance = float((defended - undefended).norm() / (undefended - layout.pack(start)).norm())
        if not distance <= OFF_TOLERANCE:
            yield (
                f"at its off level ({setting}) two rounds of {upload} uploads end {distance:.2g} of their length away "
                f"from where `none` ends; at most {OFF_TOLERANCE:g} is right there"
            )


def _weights(defense: Defense, plan: Plan, start: Params) -> Params:
    run = Federation(defense, plan, digit_shards([SHARD] * plan.clients), Seeds(0))
    run.start(start)
    run.run(2)
    return run.parties.server.params


def control_moves_accuracy_one_way(trial: DefenseTrial) -> Iterator[str]:
    """Check that accuracy is monotone over the control grid; `Inconclusive` if no pair of values differs.

    The smallest, the middle and the largest value of the quick grid, eight seeds each, paired by seed: a difference
    counts if a paired t-test finds it at level 0.01 over all pairs (Bonferroni).
    """
    defense = trial.defense
    if defense.control is None:
        raise NotAsked("it has no control parameter")
    grid = sorted(set(defense.grids.get("quick", ())))
    if len(grid) < 2:
        raise NotAsked("its quick grid has fewer than 2 values")
    values = [grid[i] for i in sorted({0, len(grid) // 2, len(grid) - 1})]
    try:
        by_value = [accuracies(with_parameters(defense, {defense.control: value})) for value in values]
    except UsageError as refusal:
        raise NotAsked(f"it refuses the federation of the comparison ({refusal})") from refusal
    ways = {
        d
        for a, b in combinations(range(len(values)), 2)
        if (d := accuracy_trend(by_value[a], by_value[b], len(values)))
    }
    means = ", ".join(f"{mean(f):.1%} at {v:g}" for v, f in zip(values, by_value, strict=True))
    if len(ways) == 2:
        yield (
            f"accuracy falls and rises along {defense.control} ({means}; means of {len(SEEDS)} seeds); a control "
            "parameter trades accuracy for privacy one way"
        )
    if not ways:
        raise Inconclusive(
            f"accuracy along {defense.control} is {means}: after {LEARN_ROUNDS} rounds of a small federation no two of "
            f"{len(SEEDS)} seeds' means differ by more than chance may make them"
        )


def accuracies(defense: Defense) -> list[float]:
    """Return the accuracy on the 497 last digits after 12 rounds, for each seed; chance where training diverged."""
    plan, data = _learning(defense), all_digits()
    runs = []
    for seed in SEEDS:
        order = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))[:TRAIN].chunk(plan.clients)
        equal = min(len(part) for part in order)
        shards = {c: Data(data.x[part[:equal]], data.y[part[:equal]]) for c, part in enumerate(order)}
        run = Federation(defense, plan, shards, Seeds(seed))
        run.start(initial(plan.spec, seed))
        runs.append(run)
    finished = run_many(runs, LEARN_ROUNDS)
    test = Data(data.x[POOL:], data.y[POOL:])
    return [run.accuracy(test) if ok else 1 / plan.spec.classes for run, ok in zip(runs, finished, strict=True)]


def _learning(defense: Defense) -> Plan:
    """Return a plan that learns digits within a few rounds, in the federation of the defense's setting."""
    setting, plan = defense.setting.get("quick", {}), plan_for(defense, base_plan())
    opt = Opt(setting.get("optimizer", "adam"), setting.get("lr", 5e-3), setting.get("momentum", 0.0))
    if "model" not in setting:
        plan = replace(plan, spec=net_spec("mlp", SHAPE, CLASSES))
    if plan.local.upload == "gradient":
        return replace(plan, local=replace(plan.local, batch=TRAIN // plan.clients), server_opt=opt)
    return replace(plan, local=replace(plan.local, opt=opt))


def accuracy_trend(first: Sequence[float], second: Sequence[float], values: int) -> int:
    """Return 1 if accuracy, paired by seed, rises significantly from `first` to `second`, -1 if it falls, else 0.

    values: number of values whose pairs are all tested.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    pairs = values * (values - 1) / 2
    error = max(stdev(differences), 1 / (1797 - POOL)) / len(differences) ** 0.5  # never surer than one test example
    probability = 2 * stats.t.sf(abs(mean(differences)) / error, len(differences) - 1)
    if probability * pairs >= FALSE_ALARM:
        return 0
    return 1 if mean(differences) > 0 else -1
