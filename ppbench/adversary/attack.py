"""The contract of an attack: a View and challenges in, guesses out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ppbench.adversary.token_vectors import run_on_vectors, suits_vectors
from ppbench.base.declarations import SCALARS, class_faults, contract_faults, field_faults, is_scalar, word_faults
from ppbench.base.device import computing
from ppbench.base.errors import UsageError, count_of, shown
from ppbench.base.fence import check_answers
from ppbench.base.registry import canonical, find, load_plugin, plugins
from ppbench.base.tree import leaves, moved, node
from ppbench.federation.acting import Before, Sent
from ppbench.federation.bounds import bounds_of
from ppbench.federation.contract import evidence_faults
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.threats import THREATS
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.records.scores import Scalar

Name = Annotated[str, Field(max_length=200)]
Kind = Name
"""The name of a question (`ppbench.questions`)."""
ProbeName = Annotated[str, Field(pattern="^(gradient|local)$")]


@node
class References:
    """Reference runs: federations that the adversary trained itself under the defense, and their models' outputs.

    Attributes:
        keep: [R, Q] bool, which candidates each run was trained on; each candidate is in half of the runs.
        outputs: [R, A, Q, C] float64, the models' outputs on A augmentations of each candidate, itself first.
        labels: [Z, C] one-hot labels of the population: public records that nobody trains on.
        x: [Z, *shape] inputs of the population.
        population: [R, Z, C] float64, the models' outputs on the population.
    """

    keep: Tensor
    outputs: Tensor
    labels: Tensor
    x: Tensor
    population: Tensor


@dataclass(frozen=True)
class Challenge:
    """One question to an attack; never part of the View.

    Attributes:
        unit: the slots that the question is about.
        batch: examples in each slot's batch.
        y: true one-hot labels [U, B, C] if the threat model grants them, else None.
        x: [Q, *shape]: membership candidates, images to trace, or inputs whose true outputs are to be guessed.
        labels: one-hot labels [Q, C] of membership candidates.
        known: for membership, [Q] int8: 1 member, 0 non-member, -1 unknown (to be guessed).
        reconstructions: for tracing, the adversary's own [U * B, *shape], in the order of `unit`.
        references: for membership, the adversary's reference runs over the same candidates, if it has any.
        extra: further tensors for questions of other packages, by name.
    """

    unit: tuple[Slot, ...]
    batch: int
    y: Tensor | None = None
    x: Tensor | None = None
    labels: Tensor | None = None
    known: Tensor | None = None
    reconstructions: Tensor | None = None
    references: References | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@node
class SolvedLayer:
    """One layer whose input an attack computed from its output and its weights' gradient.

    name: of its weight. unknowns: numbers of its input; determined: how many of them the observation determines.
    condition: condition number of the equations. residual: relative, of the worse system. exact: whether all numbers
    are determined, and the equations solved, up to rounding.
    """

    name: str
    unknowns: int
    determined: int
    condition: float
    residual: float
    exact: bool


@dataclass(frozen=True)
class Guess:
    """An attack's answer to a challenge. Fields that it does not answer are None.

    Its tensors are moved to the CPU, where the truth is.

    Attributes:
        x: reconstructions [U * B, *shape], not clipped.
        y: labels [U * B] int64 (a multiset for batches: the scorer matches the order).
        score: membership scores [Q], higher means member.
        decision: membership decisions [Q] bool, from a threshold fitted on the known half.
        owner: client index [Q] int64.
        outputs: the adversary's estimate of the true model's outputs [Q, C] on the queries.
        confidence: the attack's own figure of merit, smaller is surer (e.g. relative mismatch); None if it has none.
        evaluations: gradient evaluations spent.
        path: for budget curves, (evaluations, x) in ascending order: the answer after so many evaluations.
        others: images like `x` of starts and hypotheses that the attack rejected; an oracle may choose among them.
        abstain: [Q] bool, membership candidates without a guess (audits); None: guesses on all.
        extra: answers to questions of other packages, by name.
        layers: of an attack that computes inputs layer by layer, how well each was determined, from the head down.
    """

    x: Tensor | None = None
    y: Tensor | None = None
    score: Tensor | None = None
    decision: Tensor | None = None
    owner: Tensor | None = None
    outputs: Tensor | None = None
    confidence: float | None = None
    evaluations: Annotated[int, Field(ge=0)] = 0
    path: tuple[tuple[int, Tensor], ...] = ()
    others: tuple[Tensor, ...] = ()
    abstain: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    layers: tuple[SolvedLayer, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether every layer down to the input was computed up to rounding, so that no search can do better."""
        return bool(self.layers) and all(layer.exact for layer in self.layers)

    def __post_init__(self) -> None:
        """Bring every tensor to the CPU."""
        for part in fields(self):
            object.__setattr__(self, part.name, moved(getattr(self, part.name), torch.device("cpu")))


def among(targets: frozenset[str] | None, defense: str) -> bool:
    """Return whether an attack is built for a defense, by the defense's name or its `kin`; targets None: for all."""
    if targets is None or canonical(defense) in map(canonical, targets):
        return True
    plugin = find("defenses", defense)
    return plugin is not None and str(getattr(plugin.loaded, "kin", "")) in targets


@dataclass(frozen=True)
class Attack:
    """An attack with public parameters as its fields.

    Class attributes an attack sets; each is checked against its annotation, also where an isolated process reports it:
        name: as on the command line.  version: raise it when results may change.
        kind: the question that it answers, by name.
        threats: threat models whose views it can use.
        adaptive: whether it knows the defense's mechanism.
        targets: defenses it is built for; None for all.
        probes: the kinds of probes under which it adds anything to other attacks: "gradient", "local".
        probe_rounds: the fewest rounds of a probe that it needs; it does not apply to probes of fewer.
        standard: whether it belongs to `--attack standard`; others run when named, or by "all".
        quick: whether a standard attack also belongs to the quick portfolio, the default; no subclass inherits it.
            "unaware": only for a defense that no attack is built for; "foreign": it belongs to both for defenses of
            other packages, and to neither for ours, whose laws our attacks know.
        exact: whether it computes inputs instead of searching them (`Guess.is_exact`); where it solves every victim,
            the default portfolio leaves searches out.
        separates_by: what of the loss tells it the examples of a batch apart: "classes" that it infers, or "softmax" of
            the logits less a class, as of plain cross-entropy; then `invert` refuses batches under other losses.
        contains: a plain attack that does the same with less knowledge; sets of attacks leave it out beside this one.
        audit: what a membership or tracing attack needs from an audit: "references" (reference runs), "rounds" (the
            mail of all rounds of training), "clients" (canary clients) or "secrets" (canaries that hold one); "" for
            nothing.
        reads_alone: whether it uses only its own evidence; if there is none, the cell reports it.
        reads_tokens: whether it answers a text by token numbers; others search vectors (`adversary.token_vectors`).
        next_token: whether it works where texts are their own targets (`Plan.next_token`): it needs no classes.
        replays: whether its evidence is what the server's own code makes of the mail (`adversary.replay`); its cells
            then report a defense whose account of itself differs.
        reference: its publication or origin.
    """

    name: ClassVar[str]
    contract: ClassVar[int] = 0
    version: ClassVar[Annotated[str, Field(min_length=1, max_length=80)]] = "1"
    kind: ClassVar[Kind]
    threats: ClassVar[Annotated[tuple[Name, ...], Field(min_length=1, max_length=20)]] = (
        "server/1",
        "eavesdropper/1",
        "client/1",
    )
    adaptive: ClassVar[bool] = False
    targets: ClassVar[frozenset[Name] | None] = None
    probes: ClassVar[Annotated[tuple[ProbeName, ...], Field(min_length=1)]] = ("gradient", "local")
    probe_rounds: ClassVar[Annotated[int, Field(ge=1, le=100)]] = 1
    standard: ClassVar[bool] = True
    quick: ClassVar[bool | Literal["unaware", "foreign"]] = True
    exact: ClassVar[bool] = False
    separates_by: ClassVar[Literal["any", "classes", "softmax"]] = "any"
    contains: ClassVar[Name] = ""
    audit: ClassVar[Literal["", "references", "rounds", "clients", "secrets"]] = ""
    reads_alone: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    reads_tokens: ClassVar[bool] = False
    next_token: ClassVar[bool] = False
    reference: ClassVar[Annotated[str, Field(max_length=2000)]] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Wrap `run` so that it computes in full precision, and of texts searches vectors, also when called by hand."""
        super().__init_subclass__(**keywords)
        if "run" in vars(cls):
            cls.run = computing()(run_on_vectors(cls.run))  # type: ignore[method-assign]
        if "suits" in vars(cls):
            cls.suits = suits_vectors(cls.suits)  # type: ignore[method-assign]

    def check(self) -> None:
        """Raise UsageError, one sentence, for parameters that the attack cannot work with; called before anything runs.

        Default: refuse values outside the bounds that their fields are annotated with.
        """
        for name, bound in bounds_of(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            value = getattr(self, name)
            if not bound.holds(value):
                raise UsageError(
                    f"Attack {self.name!r}: {name}={shown(value)} cannot be used; it must be {bound.right}."
                )

    def parameters(self) -> dict[str, Scalar]:
        """Return what determines the answers, for records. Default: the fields. Name a file by its digest, not path."""
        return asdict(self)

    def check_held(self, inputs: Mapping[int, Tensor]) -> None:
        """Raise UsageError, one sentence that names the file, for knowledge learned from clients' data. Default: none.

        Args:
            inputs: the clients' inputs [N_k, *shape], by client. An attack must not keep them.
        """

    @property
    def needs_public(self) -> bool:
        """Whether the attack cannot run without public examples to learn from. Default: no."""
        return False

    def variants(self) -> Sequence[Attack]:
        """Return the settings to try on tuning victims, each with the attack's budget. Default: this one alone."""
        return (self,)

    @suits_vectors
    def suits(self, plan: Plan) -> bool:
        """Return whether the attack works under `plan`. Default: if targets are classes, or it attacks a model.

        Where texts are their own targets the answer is no without `next_token`, whatever a subclass says.
        """
        return plan.spec.classes > 1 or load_plugin("questions", self.kind).source == "model"

    def lacks_rounds(self, rounds: int) -> str:
        """Return, as the end of a sentence, that it does not apply to probes of so few rounds; "" if it does."""
        if rounds >= self.probe_rounds:
            return ""
        probes = f"probes of {count_of(rounds, 'round')}"
        return f"needs {self.probe_rounds} rounds of one batch and is not applicable to {probes}"

    def knows(self, defense: str) -> bool:
        """Return whether the attack knows the mechanism of the defense called `defense`."""
        return self.adaptive and among(self.targets, defense)

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the weights that an active server ("server-active/1") sends to clients; the view shows their answers.

        Such an attack has no other threat model. UsageError: see `acting.acted`.
        """
        raise NotImplementedError

    def evidence(self, view: View) -> list[Evidence]:
        """Return the evidence to match; the scorer checks it at the truth. Default: the defense's plain evidence."""
        return view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge, in order. NaN observations must give a failed guess, not an exception."""
        raise NotImplementedError


# -- Checks of every attack before it is used: its declarations, and the answers of its public methods --


def attack_faults(plugin: Any, name: str) -> Iterator[str]:
    """Yield why a class is not the attack `name`; after the first fault others may be meaningless."""
    yield from class_faults(plugin, Attack, name)
    yield from contract_faults(plugin, Attack)
    yield from field_faults(plugin)
    yield from word_faults(plugin, ("threats", "probes", "version"))
    if plugin.kind not in plugins("questions"):
        known = ", ".join(plugins("questions"))
        yield f"answers the question {plugin.kind!r}, which is not installed; known are {known}"
    if plugin.targets is not None and not plugin.targets:
        yield "declares targets without any; name the defenses it is built for, or set None for all"
    if unknown_threats := [name for name in plugin.threats if name not in THREATS]:
        yield f"declares threats with {shown(unknown_threats[0], 60)}; known are {', '.join(THREATS)}"
    yield from acting_faults(plugin)


def acting_faults(plugin: type[Attack]) -> Iterator[str]:
    """Yield a fault if an attack acts under some of its threat models but not under others."""
    crafts = plugin.crafted is not Attack.crafted
    if any(THREATS[name].acts is not crafts for name in plugin.threats if name in THREATS):
        yield "acts under some of its threat models and not under others; define `crafted` where all of them act"


def attack_answer_faults(attack: Attack, plan: Plan, defenses: Iterable[str]) -> Iterator[str]:
    """Yield which answers of an attack before `run` break the contract."""
    suits = attack.suits(plan)
    if not isinstance(suits, bool):
        yield f"answers {shown(suits, 60)} to suits(plan); it must be True or False"
    yield from static_answer_faults(attack, defenses)


def static_answer_faults(attack: Attack, defenses: Iterable[str]) -> Iterator[str]:
    """Yield which answers that do not depend on a plan break the contract."""
    for call, answer in (
        ("needs_public", attack.needs_public),
        *((f"knows({name!r})", attack.knows(name)) for name in defenses),
    ):
        if not isinstance(answer, bool):
            yield f"answers {shown(answer, 60)} to {call}; it must be True or False"
    parameters = attack.parameters()
    if not isinstance(parameters, Mapping) or not all(
        isinstance(n, str) and is_scalar(v) for n, v in parameters.items()
    ):
        yield f"answers {shown(parameters, 60)} to parameters(); it must be a mapping from names to values; {SCALARS}"
    variants = attack.variants()
    if not isinstance(variants, Sequence) or not variants or any(type(one) is not type(attack) for one in variants):
        yield f"answers {shown(variants, 60)} to variants(); it must be one or more {type(attack).__name__}"


# -- Whether a view holds evidence for an attack, and whether that evidence is well-formed --


def reads_anything(attack: Attack, view: View, challenges: Sequence[Challenge]) -> bool:
    """Return whether a view holds evidence for an attack, see `readable`. PluginError: the evidence is malformed."""
    check_evidence(attack, view)
    return readable(attack, view, challenges)


def is_silent(view: View) -> bool:
    """Return whether no message of a view carries a tensor, so that nothing can be asked about it."""
    return not any(leaves(letter.message) for letter in view.mail)


def check_evidence(attack: Attack, view: View) -> None:
    """Raise PluginError for malformed evidence of a third-party defense or attack, before other code fails on it."""
    check_answers("defenses", view.defense.name, lambda: evidence_faults(view.defense.evidence(view)))
    check_answers("attacks", attack.name, lambda: evidence_faults(attack.evidence(view)))


def readable(attack: Attack, view: View, challenges: Sequence[Challenge]) -> bool:
    """Return whether a view holds evidence for an attack: its own, or the defense's unless it `reads_alone`."""
    evidence = attack.evidence(view)
    if not attack.reads_alone:
        return bool(evidence or view.defense.evidence(view))
    slots = {slot for one in evidence for slot in one.unit if len(one.unit) == 1}
    units = {frozenset(one.unit) for one in evidence}
    return any(frozenset(c.unit) in units or slots.issuperset(c.unit) for c in challenges)
