"""A claim beside the records of one evaluation, and the finding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from ppbench.base.errors import count_of
from ppbench.base.fence import made
from ppbench.base.registry import load_plugin
from ppbench.claims.claim import Claim, Conditions, Need, allowed, equations, value_word
from ppbench.records.schema import CellConfig, Record
from ppbench.report.controls import check_controls
from ppbench.report.frame import TRAINED, Frame, Key, network_words
from ppbench.report.words import attack_at, figure_text, setting_labels
from ppbench.report.worst import Measured, WorstCase, attack_of, cell_of

ClaimVerdict = Literal[
    "falls", "inconclusive", "holds", "identity", "outside the premise", "comparison", "not comparable"
]
"""The outcome of a claim. "identity": both trainings are equal to rounding, so that nothing was tested; "outside the
premise": our setting is not the claim's; "comparison": a figure that the paper prints beside its own, and does not
claim; "not comparable": a stopwatch's figure, of another machine.
"""


@dataclass(frozen=True)
class ClaimCase:
    """A claim beside one evaluation: the defense's cells at its parameters, the undefended model's, and all.

    everything: with failed cells, which the others lack; rival: cells of the defense that it is compared with;
    siblings: all claims about the defense.
    """

    claim: Claim
    mine: Sequence[Record]
    none: Sequence[Record]
    everything: Sequence[Record]
    rival: Sequence[Record] = ()
    siblings: Sequence[Claim] = ()

    @property
    def undefended(self) -> Record | None:
        """One of the undefended cells, for figures that all of them share; None without any."""
        return next(iter(self.none), None)


@dataclass(frozen=True)
class ClaimFinding:
    """The finding of an evaluation about a claim.

    to: the figure it falls to, or ""; reason: the rule with its figures; plain, worst: figures of the strongest unaware
    attack, and of all; cells: names of the cells behind them; harm: how bad the figure is for the claim, larger is
    worse, comparable within a rule and verdict; least, most: what `worst` would be in the same setting if all leaked
    (or the model were useless), and if nothing did (or nothing were lost), "" where the rule has no such ends; own: the
    figure by the paper's own attack and measure.
    """

    verdict: ClaimVerdict
    to: str
    reason: str
    plain: str = ""
    worst: str = ""
    cells: tuple[str, ...] = ()
    harm: float = -math.inf
    least: str = ""
    most: str = ""
    own: str = ""


Judge = Callable[[ClaimCase], ClaimFinding | str]
"""Judges a case. Returns a clause on why the claim cannot be checked where its cells were not run."""


def finding_of(
    verdict: ClaimVerdict, to: str, harm: float, reason: str, figures: str, *records: Measured | None, plain: str = ""
) -> ClaimFinding:
    """Return a finding; to: what the claim falls to if it falls; figures: ours, those of `records`."""
    to = f"to {to}" if to and verdict == "falls" else ""
    return ClaimFinding(verdict, to, reason, plain, figures, cell_names(*records), harm)


def unreliable(case: ClaimCase, threat: str, seed: int | None = None) -> str | None:
    """Return a clause if a control speaks against one adversary's attacks in this evaluation (of a seed), else None."""
    scope = [r for r in case.everything if r.config.threat_model.id == threat and seed in (None, r.config.seed)]
    bad = next((check.sentence for check in check_controls(scope) if check.ok is not True), None)
    return None if bad is None else f"a control speaks against the attacks: {bad.rstrip('.')}"


def figure_by_attack(case: ClaimCase, record: Measured | None, name: str, form: str, unit: str = "") -> str:
    """Return "71.0% [66.3, 75.4] (unmask_regression, kappa=10)", with the control value where there are several.

    Of the metric that the claim is about, in the paper's unit.
    """
    if record is None:
        return "not run"
    label = setting_labels(case.mine)
    control = label.get(cell_of(record).cell_id, "") if len(set(label.values())) > 1 else ""
    scale = case.claim.scale if name == case.claim.metric else 1.0
    return f"{figure_text(record, name, form, unit, scale)} ({attack_at(attack_of(record), control)})"


def cell_names(*records: Measured | None) -> tuple[str, ...]:
    """Return the names of the given cells, each once; of a worst case, of all that are best on some victim."""
    groups = [r.cells if isinstance(r, WorstCase) else (r,) for r in records if r is not None]
    return tuple(dict.fromkeys(cell.cell_id for cells in groups for cell in cells))


# -- Whether a record meets a claim's premise: data, network, clients, length of training, what was attacked --

LONG_ENOUGH = 0.95
"""Share of the paper's epochs from which a training is long enough: rounds of whole batches fall a little short."""
CLOSENESS: tuple[Need, ...] = ("dataset", "model", "clients", "partition")
"""What makes an evaluation close to a paper's, in order of weight."""
NEED_WORDS = {
    "dataset": "data set",
    "batch_size": "training batch",
    "batch": "batch of victims",
    "steps": "mini-batches",
}
NETWORK_FAMILIES = {
    "mlp": ("mlp",),
    "residual": ("resnet11", "resnet20", "resnet32", "resnet56", "resnet50_fixup", "wrn_10_2"),
    "convolutional": (
        *("dlnet", "lenet", "lenet_baffle", "cnn", "alexnet", "vgg16", "densenet", "unet"),
        *("resnet11", "resnet20", "resnet32", "resnet56", "resnet50_fixup", "wrn_10_2"),
    ),
    "AlexNet or VGG16": ("alexnet", "vgg16"),
}
"""Networks by kind; residual networks are convolutional too. A kind in capitals names its networks."""


def unmet_needs(claim: Claim, config: CellConfig) -> tuple[str, ...]:
    """Return what a cell lacks of a claim's premise, a clause each; empty where it meets the premise."""
    return tuple(lack for need in claim.premise if (lack := lack_of(claim, config, need)))


def unmet_conditions(conditions: Conditions, config: CellConfig, control: bool) -> tuple[str, ...]:
    """Return a clause for each condition on the defense's parameters that a cell does not meet.

    control: whether conditions on the control parameter are checked, or those on all others.
    """
    axis = "" if config.defense.control is None else config.defense.control.name
    own = config.defense.parameters
    required = [(name, value) for name, value in conditions if (name == axis) == control]
    return tuple(
        f"{name}={value_word(own.get(name))}, not {' or '.join(map(value_word, allowed(value)))}"
        for name, value in required
        if own.get(name) not in allowed(value)
    )


def lack_of(claim: Claim, config: CellConfig, need: Need) -> str:
    """Return what a cell has instead of a need of a claim's premise, "" where it meets it: "20 of 300 epochs".

    Every cell meets what the paper leaves open.
    """
    fed, model = config.federation, config.model
    if need == "epochs":
        met = claim.epochs is None or epochs_of(config) >= LONG_ENOUGH * claim.epochs
        return "" if met else f"{epochs_of(config):.3g} of {claim.epochs:g} epochs"
    if need == "steps":
        batches, _ = batches_and_steps(config)
        met = claim.steps is None or batches >= claim.steps
        return "" if met else f"{count_of(batches, 'mini-batch', 'es')} attacked, not {claim.steps} or more"
    if need == "dataset":
        ours, theirs = data_of(config), claim.dataset
        met = not theirs or ours == theirs or ours.startswith(f"{theirs}.")
    elif need == "model":
        options = {**model.options, "layers": _layers(config)}
        same = model.id == claim.model and all(options.get(name) == value for name, value in claim.options)
        met, ours = not claim.model or same, network_words(model.id, model.options)
        theirs = ", ".join([claim.model, *equations(claim.options)])
    elif need == "family":
        met = not claim.family or model.id in NETWORK_FAMILIES.get(claim.family, ())
        ours, theirs = model.id, claim.family if claim.family[:1].isupper() else f"a {claim.family} network"
    elif need == "partition":
        ours, theirs = fed.partition, claim.partition
        met = not theirs or ours == theirs or ours.startswith(f"{theirs}:")
    else:
        number, required, ours = {
            "clients": (fed.clients, claim.clients, count_of(fed.clients, "client")),
            "batch_size": (fed.batch, claim.batch_size, f"training batches of {fed.batch}"),
            "batch": (config.batch_size, claim.batch, f"batches of {config.batch_size}"),
        }[need]
        met, theirs = required in (None, number), str(required)
    return "" if met else f"{ours}, not {theirs}"


def data_of(config: CellConfig) -> str:
    """Return the papers' name of a cell's data set: "mnist" for "parquet:mnist"; but "warped:mnist" as it is."""
    name = config.data.name
    return name if name.startswith("warped:") else name.rpartition(":")[2]


def differing_needs(claim: Claim, config: CellConfig) -> tuple[str, ...]:
    """Return in what a cell differs from the paper's setting outside the premise, in words."""
    return tuple(
        NEED_WORDS.get(need, need) for need in CLOSENESS if need not in claim.premise and lack_of(claim, config, need)
    )


def closeness(claim: Claim, config: CellConfig) -> tuple[int, float]:
    """Return how close a cell's setting is to the paper's, larger being closer: shared needs, length of training."""
    length = 1.0 if claim.epochs is None else min(1.0, epochs_of(config) / (LONG_ENOUGH * claim.epochs))
    return sum(2**i for i, need in enumerate(reversed(CLOSENESS)) if not lack_of(claim, config, need)), length


def epochs_of(config: CellConfig) -> float:
    """Return the epochs of a client's training: rounds times local epochs, or by the number of batches."""
    fed = config.federation
    if fed.upload == "delta":
        return float(fed.rounds * fed.local_epochs)
    return fed.rounds * fed.batch * fed.clients / config.data.train


def batches_and_steps(config: CellConfig) -> tuple[int, int]:
    """Return the least number of different mini-batches in an attacked upload, and of steps on them; 1 for a gradient.

    The defense knows those of a round: FedPC's clients choose from menus. Several epochs repeat the mini-batches.
    """
    fed = config.federation
    if config.probe == "gradient":
        return 1, 1
    known = {field.name for field in dataclasses.fields(load_plugin("defenses", config.defense.id))}
    own = {
        name: value for name, value in config.defense.parameters.items() if name in known
    }  # older records may have others
    defense: Any = made("defenses", object, config.defense.id, own)
    batches = defense.fewest_batches(config.batch_size, fed.batch)
    return int(batches), int(defense.fewest_steps(config.batch_size, fed.batch, fed.local_epochs))


def attacked_words(config: CellConfig) -> str:
    """Return what one attacked upload is of: "batch 1", "batch 8 in 8 or more mini-batches of one"."""
    batches, steps = batches_and_steps(config)
    if batches == 1:
        return f"batch {config.batch_size}" + (f" in {steps} or more steps" if steps > 1 else "")
    each = "one" if config.batch_size == batches else f"{config.batch_size / batches:g} or fewer"
    return f"batch {config.batch_size} in {batches} or more mini-batches of {each}"


def _layers(config: CellConfig) -> int | None:
    """Return the number of linear layers of an "mlp", by its option `layers` or `hidden`; None without either."""
    counted, widths = config.model.options.get("layers"), config.model.options.get("hidden")
    if isinstance(counted, int) and counted:
        return counted
    return None if widths is None else 1 + len([word for word in str(widths).split(",") if word.strip()])


def stray_clauses(claim: Claim, far: Set[Key], mine: Frame) -> tuple[str, ...]:
    """Return a clause if a claim's CAP counts a training far from those of all other seeds; else nothing.

    Claims about accuracies need no such clause: they count the training in the middle of all seeds.
    """
    bad = far and claim.metric.startswith("cap_") and any(mine.key(record).only(TRAINED) in far for record in mine)
    return ("a training lies far from those of all other seeds",) if bad else ()


def collapse_clauses(claim: Claim, *some: Sequence[Record]) -> tuple[str, ...]:
    """Return a clause if a training collapsed that the claim depends on; else nothing.

    Attacks on the initial model do not depend on training, accuracies and CAPs do. A training at chance meets the claim
    where the paper itself prints chance.
    """
    trained = claim.metric.startswith(("accuracy", "cap_", "dice", "mse"))
    trainings = (r for records in some for r in records if r.utility.is_collapsed)
    printed = claim.value if claim.metric == "accuracy" else None
    beyond = (r for r in trainings if printed is None or r.utility.high is None or printed > r.utility.high)
    bad = next((r for r in beyond if trained or r.config.stage != "init"), None)
    return () if bad is None else (f"the training collapsed ({bad.utility.collapse})",)
