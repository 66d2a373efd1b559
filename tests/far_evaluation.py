"""Small evaluations on the pretended accelerator: `far_evaluation.py FOLDER few|whole DEFENSE...` prints JSON.

What the device says of itself, what became of every cell, and what was refused for lying on the wrong device, caught or
not. With PPBENCH_FAR=cuda the same evaluations run on a real GPU.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import far_device
import torch

from ppbench.adversary.attack import Attack
from ppbench.base.registry import load_all
from ppbench.defenses import baffle as estimator
from ppbench.federation import draws
from ppbench.federation.engine import Federation
from ppbench.federation.wire import Slot
from ppbench.records.store import Store
from ppbench.run import cost
from ppbench.run import train as training
from ppbench.run.cells import cells, groups
from ppbench.run.config import EvaluateConfig, configure
from ppbench.run.cost import ClientCost, client_cost
from ppbench.run.experiment import make_defense, resolve
from ppbench.run.group import run_group
from ppbench.run.task import make_task

DEVICE = os.environ.get("PPBENCH_FAR", far_device.NAME)
"""Where everything is computed: the pretended accelerator, or what torch calls this."""

AUDITED = "none"
"""The defense that is audited too: reference runs are trainings like any other, and their attacks read outputs."""
FOLLOWED = None, "dlg"
"""Whose reconstructions tracing follows: it reads images, whoever made them."""

SEARCHED = "analytic", "dlg"
"""Reconstructions that every defense meets."""
APART = {"likelihood": ("dp", "ppdl"), "fedavg_inversion": ("fedpc",), "feature_inversion": ("mp_dp_naive",)}
APART |= {
    "imprint": ("baffle",),
    "imprint_quiet": ("baffle",),
    "spear": ("pbpfl",),
}  # their networks have what these need
"""Searches that make something else of what these defenses send."""
ALIKE = "mia_mentr", "mia_nn"
"""What reads a defense's delivered model as `mia_loss` does, and makes something else of its outputs."""
STAGE = {"membership": "final", "extraction": "iterate"}
"""Where the mask of a defense is read: what attacks of both kinds read is read by the same functions."""
STEPPED = "feature_inversion", "fedavg_inversion", "ig_masked", "label_recovery"
"""What reaches every line that local training alone does."""
LITTLE = {"budget": 2, "joint_budget": 2, "inversion_budget": 2, "sign_budget": 2, "restarts": 1, "steps": 1}
"""Parameters of attacks that say how long they search, or learn."""


def settings() -> dict[str, int]:
    """Return every attack's parameters of that kind, made little."""
    known = {name: getattr(attack, "__dataclass_fields__", {}) for name, attack in load_all("attacks").items()}
    return {f"{name}.{field}": LITTLE[field] for name, fields in known.items() for field in LITTLE if field in fields}


def small(defense: str, **options: object) -> EvaluateConfig:
    """Return an evaluation of `defense` by all attacks that apply: two victims, a few numbers of everything."""
    base = dict(
        defense=defense,
        device=DEVICE,
        attacks=("all",),
        stages=("init", "iterate", "final", *(("audit",) if defense == AUDITED else ())),
        threats=("server/1", "client/1", "collusion/1"),
        settings=settings(),
        **dict(train=40, public=0.1, clients=4, rounds=1, decay_at=(), batch_size=8),
        **dict(victims=2, attack_batch=(2,), candidates=8, references=2, canaries=2),
        canary_clients=2 if defense == AUDITED else 0,
    )
    result = configure("quick", **{**base, **options})
    return result.model_copy(update={"model_options": {"nconv": 2}}) if result.model == "dlnet" else result


def met(defense: str, attack: Attack, threat: str, stage: str) -> bool:
    """Return whether a cell is run where not the whole is asked for.

    What reads by the server's own code meets every defense once. What is built for the defense is, under every threat,
    in the STAGE of its kind if there is one; what reads labels or records under all but collusion, ALIKE of AUDITED
    alone; SEARCHED at the server. Other searches make the same of any evidence: each meets AUDITED, and what it takes
    APART.
    """
    if attack.replays:
        return (threat, stage) == ("server/1", "init")
    if attack.knows(defense):
        return stage in (STAGE.get(attack.kind, stage), "audit")
    if attack.kind != "reconstruction":
        return threat != "collusion/1" and (defense == AUDITED or attack.name not in ALIKE)
    return threat in ("server/1", "server-active/1") and (
        defense == AUDITED or attack.name in SEARCHED or defense in APART.get(attack.name, ())
    )


def free(*_: object) -> ClientCost:
    """Return the cost of a client that is not measured."""
    return ClientCost(None, None)


def evaluated(defense: str, config: EvaluateConfig, folder: Path, whole: bool) -> Iterator[dict[str, object]]:
    """Yield what became of each cell of the defense's first point; its controls are evaluated as defenses.

    Probes are made of the initial model alone: the trained one is made of the same messages. What a client of AUDITED
    costs is measured; of others that is their first round once more.
    """
    experiment, store = resolve(config), Store(folder)
    store.prepare()
    first = next(i for i, point in enumerate(experiment.points) if point.defense.name == defense)
    for group in groups(experiment):
        if group.point != first or (group.stage == "final" and not group.records):
            continue
        every = [c for c in cells(experiment, group) if c.follows in FOLLOWED]
        chosen = [c for c in every if whole or met(defense, c.attack, group.threat.name, group.stage)]
        with patch.object(training, "client_cost", client_cost if whole or defense == AUDITED else free):
            run_group(experiment, group, folder, {cell.id for cell in chosen})
        for cell in chosen:
            record = store.load(cell.id)
            about = {"defense": defense, "attack": cell.attack.name, "threat": group.threat.name, "stage": group.stage}
            yield {**about, "status": record.status, "reason": record.reason}


VARIED: tuple[tuple[str, dict[str, object], dict[str, object]], ...] = (
    ("baffle", {"k": 2, "level": "epoch", "masks": "none"}, {"upload": "delta"}),
    ("baffle", {"k": 2, "masks": "none", "scheme": "central", "chunk": 2, "examples": 3}, {}),
    ("baffle", {"k": 2, "masks": "ring64", "ema": 0.0}, {"model": "dlnet", "model_options": {"nconv": 2}}),
    ("dp", {"law": "laplace"}, {}),
    ("dp_sgd", {}, {}),
    ("ppdl", {"sigma": 0.1, "theta": 0.9}, {}),
    ("ppdl", {"sigma": 0.1, "theta": 0.01, "noise_on": "upload"}, {}),
)
"""Defenses as no evaluation here has them: parameters, and fields of the evaluation."""


def varied() -> list[str]:
    """Train and probe VARIED, with noise that is drawn step by step and with batches that count as images."""
    ended = []
    with patch.object(draws, "EAGER_NUMBERS", 16), patch.object(estimator, "SMALL_BATCH", 1):
        for name, parameters, fields in VARIED:
            config = configure(defense=name, device=DEVICE, clients=3, train=24, batch_size=8, **fields)
            task, defense = make_task(config), make_defense(name, parameters)
            for backend in ("loop", "vmap"):
                device = torch.device(DEVICE)
                fed = Federation(defense, task.plan, task.shards, task.seeds, device, backend)
                fed.start(task.params)
                fed.run(2)
                fed.accuracy(task.test)
                view = fed.probe({Slot(0, k): shard for k, shard in task.shards.items()}).view("server/1")
                ended.append(f"{name} {backend} {len(defense.evidence(view))}")
    return ended


def main(folder: str, battery: str, *defenses: str) -> None:
    """Evaluate `defenses`, in pairs with attacks or wholly, into folders in `folder`; print all rows and refusals."""
    torch.set_num_threads(1)
    cost.BUDGET_S = cost.ENOUGH_S = 0.0  # one timed pair: how long a client takes is in no record
    if DEVICE == far_device.NAME:
        far_device.install()
    Path(folder).mkdir(parents=True, exist_ok=True)
    names, whole, home = [(defense, small(defense)) for defense in defenses], battery == "whole", Path(folder)
    itself = far_device.itself() if DEVICE == far_device.NAME else {}
    if AUDITED in defenses:  # what is asked of local training alone; searches that try labels and hypotheses first
        more = {**settings(), "ig_masked.budget": 48, "likelihood.budget": 12}
        local = dict(probe="local", stages=("init",), threats=("server/1",), attack_batch=(1, 2), batch_size=1)
        names.append((AUDITED, small(AUDITED, settings=more, **local, **({} if whole else {"attacks": STEPPED}))))
        wired = dict(
            model="cnn", model_options={"widths": "4,4", "hidden": "8"}, stages=("init",), threats=("server/1",)
        )
        names.append((AUDITED, small(AUDITED, attacks=("spear_features", "peel"), **wired)))
        table = home / "table.csv"
        table.write_text("a,b,c,y\n" + "".join(f"{i % 7},{i % 5},{'uvw'[i % 3]},{i % 2}\n" for i in range(80)))
        columns = dict(dataset=f"csv:{table}?target=y", model="mlp", model_options={"hidden": "8"}, train=None)
        names.append(
            (AUDITED, small(AUDITED, attacks=("tableak",), stages=("init",), threats=("server/1",), **columns))
        )
    rows = [row for defense, config in names for row in evaluated(defense, config, home / defense, whole)]
    ended = varied() if AUDITED in defenses else []
    print(json.dumps({"itself": itself, "cells": rows, "varied": ended, "refused": far_device.REFUSED}))


if __name__ == "__main__":
    main(*sys.argv[1:])
