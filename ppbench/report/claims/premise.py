"""Whether a record is about what a claim is about: data, network, clients, length of training, what was attacked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import Any

from ppbench.base.errors import count_of
from ppbench.base.make import made
from ppbench.base.registry import load
from ppbench.federation.claim import Claim, Conditions, Need, Scalar, allowed
from ppbench.records.schema import CellConfig, Record
from ppbench.report.frame import TRAINED, Frame, Key, network

LONG_ENOUGH = 0.95
"""Share of the paper's epochs from which on a training is as long: rounds of whole batches are a little short."""
CLOSENESS: tuple[Need, ...] = ("dataset", "model", "clients", "partition")
"""What makes one evaluation closer to a paper's than another, the weightiest first."""
WORDS = {"dataset": "data set", "batch_size": "training batch", "batch": "batch of victims", "steps": "mini-batches"}
FAMILIES = {
    "mlp": ("mlp",),
    "residual": ("resnet11", "resnet20", "resnet32", "resnet56", "resnet50_fixup", "wrn_10_2"),
    "convolutional": (
        *("dlnet", "lenet", "lenet_baffle", "cnn", "alexnet", "vgg16", "densenet", "unet"),
        *("resnet11", "resnet20", "resnet32", "resnet56", "resnet50_fixup", "wrn_10_2"),
    ),
}
"""Networks by kind; a residual one is a convolutional one too."""


def lacking(claim: Claim, config: CellConfig) -> tuple[str, ...]:
    """Return what of a claim's premise a cell lacks, a clause each; none where it is about what the claim is about."""
    return tuple(_lack(claim, config, need) for need in claim.premise if not shares(claim, config, need))


def unmet(conditions: Conditions, config: CellConfig, control: bool) -> tuple[str, ...]:
    """Return parameters of a defense that a cell has otherwise, a clause each: its control parameter, or the others."""
    axis = "" if config.defense.control is None else config.defense.control.name
    own = config.defense.parameters
    required = [(name, value) for name, value in conditions if (name == axis) == control]
    return tuple(
        f"{name}={_word(own.get(name))}, not {' or '.join(map(_word, allowed(value)))}"
        for name, value in required
        if own.get(name) not in allowed(value)
    )


def shares(claim: Claim, config: CellConfig, need: Need) -> bool:
    """Return whether a cell has what the claim's premise says; what the paper leaves open every cell has."""
    if need == "dataset":
        name = data_of(config)
        return not claim.dataset or name == claim.dataset or name.startswith(f"{claim.dataset}.")
    if need == "model":
        options = {**config.model.options, "layers": _layers(config)}
        same = config.model.id == claim.model and all(options.get(name) == value for name, value in claim.options)
        return not claim.model or same
    if need == "family":
        return not claim.family or config.model.id in FAMILIES.get(claim.family, ())
    if need == "partition":
        dealt = config.federation.partition
        return not claim.partition or dealt == claim.partition or dealt.startswith(f"{claim.partition}:")
    if need == "epochs":
        return claim.epochs is None or epochs_of(config) >= LONG_ENOUGH * claim.epochs
    if need == "steps":
        return claim.steps is None or steps_of(config) >= claim.steps
    ours = {"clients": config.federation.clients, "batch_size": config.federation.batch, "batch": config.batch_size}
    theirs = {"clients": claim.clients, "batch_size": claim.batch_size, "batch": claim.batch}
    return theirs[need] in (None, ours[need])


def data_of(config: CellConfig) -> str:
    """Return what papers call a cell's data set, "mnist" of "parquet:mnist"; no paper has "warped:mnist"."""
    name = config.data.name
    return name if name.startswith("warped:") else name.rpartition(":")[2]


def _lack(claim: Claim, config: CellConfig, need: Need) -> str:
    """Return what a cell has in place of what the claim needs: "digits, not mnist", "20 of 300 epochs"."""
    if need == "epochs":
        return f"{epochs_of(config):.3g} of {claim.epochs:g} epochs"
    if need == "steps":
        return f"{count_of(steps_of(config), 'mini-batch', 'es')} attacked, not {claim.steps} or more"
    fed = config.federation
    pairs: dict[Need, tuple[str, str]] = {
        "dataset": (data_of(config), claim.dataset),
        "model": (network(config.model.id, config.model.options), ", ".join([claim.model, *equations(claim.options)])),
        "family": (config.model.id, f"a {claim.family} network"),
        "clients": (count_of(fed.clients, "client"), str(claim.clients)),
        "partition": (fed.partition, claim.partition),
        "batch_size": (f"training batches of {fed.batch}", str(claim.batch_size)),
        "batch": (f"batches of {config.batch_size}", str(claim.batch)),
    }
    ours, theirs = pairs[need]
    return f"{ours}, not {theirs}"


def words_of(claim: Claim) -> str:
    """Return a claim's premise in words: "mnist, dlnet, 10 clients, iid, 300 epochs"."""
    words: dict[Need, str] = {
        "dataset": claim.dataset,
        "model": ", ".join([claim.model, *equations(claim.options)]) if claim.model else "",
        "family": f"a {claim.family} network" if claim.family else "",
        "clients": "" if claim.clients is None else count_of(claim.clients, "client"),
        "partition": claim.partition,
        "epochs": "" if claim.epochs is None else f"{claim.epochs:g} epochs",
        "batch_size": "" if claim.batch_size is None else f"batches of {claim.batch_size}",
        "batch": "" if claim.batch is None else f"victims in batches of {claim.batch}",
        "steps": "" if claim.steps is None else f"at least {claim.steps} mini-batches an upload",
    }
    return ", ".join(words[need] for need in claim.premise if words[need])


def differing(claim: Claim, config: CellConfig) -> tuple[str, ...]:
    """Return in what else than its premise a cell differs from the paper's setting."""
    return tuple(
        WORDS.get(need, need) for need in CLOSENESS if need not in claim.premise and not shares(claim, config, need)
    )


def closeness(claim: Claim, config: CellConfig) -> tuple[int, float]:
    """Return what is larger the closer a cell's setting is to the paper's: what it shares, then how long it trained."""
    length = 1.0 if claim.epochs is None else min(1.0, epochs_of(config) / (LONG_ENOUGH * claim.epochs))
    return sum(2**i for i, need in enumerate(reversed(CLOSENESS)) if shares(claim, config, need)), length


def equations(pairs: Conditions) -> list[str]:
    """Return ["theta=0.3", "masks=ring32 or ring64"]."""
    return [f"{name}={' or '.join(map(_word, allowed(value)))}" for name, value in pairs]


def _word(value: Scalar | None) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def epochs_of(config: CellConfig) -> float:
    """Return how often a client goes over its share in training: rounds times local epochs, or by batches."""
    fed = config.federation
    if fed.upload == "delta":
        return float(fed.rounds * fed.local_epochs)
    return fed.rounds * fed.batch * fed.clients / config.data.train


def steps_of(config: CellConfig) -> int:
    """Return how many mini-batches an attacked upload holds, at least: one of a gradient, else those of a round.

    Of a local part the defense says it (`fewest_steps`): FedPC's clients choose from menus.
    """
    fed = config.federation
    if config.probe == "gradient":
        return 1
    known = {field.name for field in dataclasses.fields(load("defenses", config.defense.id))}
    own = {name: value for name, value in config.defense.parameters.items() if name in known}  # those of older records
    defense: Any = made("defenses", object, config.defense.id, own)
    return int(defense.fewest_steps(config.batch_size, fed.batch, fed.local_epochs))


def _layers(config: CellConfig) -> int | None:
    """Return the number of linear layers of an "mlp", which may list its hidden widths or count its layers."""
    counted, widths = config.model.options.get("layers"), config.model.options.get("hidden")
    if isinstance(counted, int) and counted:
        return counted
    return None if widths is None else 1 + len([word for word in str(widths).split(",") if word.strip()])


def straying(claim: Claim, far: Set[Key], mine: Frame) -> tuple[str, ...]:
    """Return that a training lies far from those of all other seeds, a clause, where a CAP counts it; else nothing.

    Claims about accuracies count the training in the middle of all seeds, which such a one is not.
    """
    bad = far and claim.metric.startswith("cap_") and any(mine.key(record).only(TRAINED) in far for record in mine)
    return ("a training lies far from those of all other seeds",) if bad else ()


def collapsed(claim: Claim, *some: Sequence[Record]) -> tuple[str, ...]:
    """Return that a training collapsed, a clause, where a claim is about what training gave; else nothing.

    Uploads of the initial model are attacked before there is any training: only accuracies and CAPs of them are not.
    Where the paper itself prints chance, a training that stays there is what it says.
    """
    trained = claim.metric.startswith(("accuracy", "cap_", "dice", "mse"))
    trainings = (r for records in some for r in records if r.utility.is_collapsed)
    printed = claim.value if claim.metric == "accuracy" else None
    beyond = (r for r in trainings if printed is None or r.utility.high is None or printed > r.utility.high)
    bad = next((r for r in beyond if trained or r.config.stage != "init"), None)
    return () if bad is None else (f"the training collapsed ({bad.utility.collapse})",)
