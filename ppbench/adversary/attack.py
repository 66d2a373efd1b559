"""The contract of an attack: a View and questions in, guesses out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ppbench.base.errors import UsageError, shown
from ppbench.base.precision import computing
from ppbench.base.registry import canonical, find, load
from ppbench.base.tree import moved, node
from ppbench.federation.acting import Before, Sent
from ppbench.federation.bounds import bounds_of
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.federation.wire import Slot
from ppbench.records.scores import Scalar

Kind = str
"""The name of a question (`ppbench.questions`)."""


@node
class References:
    """Reference runs: federations that the adversary trained itself under the defense, and what their models answer.

    Attributes:
        keep: [R, Q] bool, which candidates each run was trained on; each candidate in half of the runs.
        outputs: [R, A, Q, C] float64, the models' outputs on A augmentations of each candidate, itself first.
        labels: [Z, C] one-hot labels of the population: public records that nobody trains on.
        x: [Z, *shape] the population itself.
        population: [R, Z, C] float64, the models' outputs on it.
    """

    keep: Tensor
    outputs: Tensor
    labels: Tensor
    x: Tensor
    population: Tensor


@dataclass(frozen=True)
class Challenge:
    """What is asked; never part of the View.

    Attributes:
        unit: the slots that the question is about.
        batch: examples in each slot's batch.
        y: true one-hot labels [U, B, C] where the threat model grants them, else None.
        x: [Q, *shape]: membership candidates, images to trace, or inputs whose true outputs are asked.
        labels: one-hot labels [Q, C] of membership candidates.
        known: for membership, [Q] int8: 1 member, 0 not, -1 unknown (what is asked).
        reconstructions: for tracing, the adversary's own [U * B, *shape], in the order of `unit`.
        references: for membership, the adversary's reference runs over the same candidates, if it has any.
        extra: what questions of other packages ask with, by name.
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


@dataclass(frozen=True)
class Guess:
    """An attacker's answer. Fields that an attack does not answer are None.

    Its tensors lie on the CPU, where the truth is, wherever the attack computed them.

    Attributes:
        x: reconstructions [U * B, *shape], not clipped.
        y: labels [U * B] int64 (as a multiset for batches: order is matched by the scorer).
        score: membership scores [Q], higher is member.
        decision: membership decisions [Q] bool, from a threshold fitted on the known half.
        owner: client index [Q] int64.
        outputs: the true model's outputs [Q, C] on the queries, as far as the adversary can tell.
        confidence: the attacker's own figure of merit, smaller is surer (e.g. relative mismatch); None if it has none.
        evaluations: gradient evaluations spent.
        path: for budget curves, (evaluations, x) in ascending order: what would have been answered after so many.
        others: images like `x` of starts and hypotheses that the attacker rejected: what an oracle could choose from.
        abstain: [Q] bool, membership candidates on which no guess is made (audits); None: guesses on all.
        extra: what questions of other packages want answered, by name.
    """

    x: Tensor | None = None
    y: Tensor | None = None
    score: Tensor | None = None
    decision: Tensor | None = None
    owner: Tensor | None = None
    outputs: Tensor | None = None
    confidence: float | None = None
    evaluations: int = 0
    path: tuple[tuple[int, Tensor], ...] = ()
    others: tuple[Tensor, ...] = ()
    abstain: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Bring every tensor to the CPU."""
        for part in fields(self):
            object.__setattr__(self, part.name, moved(getattr(self, part.name), torch.device("cpu")))


def among(targets: frozenset[str] | None, defense: str) -> bool:
    """Return whether a defense is among those that an attack is built for: by its name, or that of its kin."""
    if targets is None or canonical(defense) in map(canonical, targets):
        return True
    plugin = find("defenses", defense)
    return plugin is not None and str(getattr(plugin.loaded, "kin", "")) in targets


@dataclass(frozen=True)
class Attack:
    """An attack with public parameters as its fields.

    Class attributes an attack sets:
        name: as on the command line.  version: raise it when results may change.
        kind: the question that it answers, by name.
        threats: threat models whose views it can use.
        adaptive: whether it knows the defense's mechanism.
        targets: defenses it is built for; None for all.
        probes: what probed clients must do for it to say anything that others do not: "gradient", "local".
        standard: whether it belongs to `--attack standard`; others run when named, or by "all".
        quick: whether it belongs to the quick portfolio too, the default, if it is standard; no subclass inherits it.
        contains: a plain attack that does the same and knows less: where all are meant it is left out beside this one.
        audit: what a membership or tracing attack needs that only an audit has: "references" (reference runs) or
            "rounds" (the mail of all rounds of training), or "clients" (canary clients); "" for nothing.
        reads_alone: whether its own evidence is all that it goes by; where that tells nothing, the cell says so.
        reference: where it comes from.
    """

    name: ClassVar[str]
    version: ClassVar[str] = "1"
    kind: ClassVar[Kind]
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1")
    adaptive: ClassVar[bool] = False
    targets: ClassVar[frozenset[str] | None] = None
    probes: ClassVar[tuple[str, ...]] = ("gradient", "local")
    standard: ClassVar[bool] = True
    quick: ClassVar[bool] = True
    contains: ClassVar[str] = ""
    audit: ClassVar[Literal["", "references", "rounds", "clients"]] = ""
    reads_alone: ClassVar[bool] = False
    reference: ClassVar[str] = ""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Have `run` compute in full precision, by whomever it is called: who tries an attack by hand does so too."""
        super().__init_subclass__(**keywords)
        if "run" in vars(cls):
            cls.run = computing()(cls.run)  # type: ignore[method-assign]

    def check(self) -> None:
        """Refuse, before anything runs, parameters that the attack cannot work with (UsageError, one sentence).

        Default: those outside the bounds that their fields are annotated with.
        """
        for name, bound in bounds_of(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            value = getattr(self, name)
            if not bound.holds(value):
                raise UsageError(
                    f"Attack {self.name!r}: {name}={shown(value)} cannot be used; it must be {bound.right}."
                )

    def parameters(self) -> dict[str, Scalar]:
        """Return what determines the answers, for records: the fields; a file is named by what it holds, not where."""
        return asdict(self)

    def check_held(self, held: Mapping[int, Tensor]) -> None:
        """Refuse knowledge learned from clients' data (UsageError, one sentence that names the file). Default: none.

        Args:
            held: the clients' inputs [N_k, *shape], by client. An attack must not keep them.
        """

    @property
    def needs_public(self) -> bool:
        """Whether the attack learns from public examples, and has nothing else to learn from. Default: no."""
        return False

    def variants(self) -> Sequence[Attack]:
        """Return the settings tried on tuning victims, each with the attack's budget. Default: this one alone."""
        return (self,)

    def suits(self, plan: Plan) -> bool:
        """Return whether the attack can say anything under `plan`. Default: where targets are classes, not numbers."""
        return plan.spec.classes > 1 or load("questions", self.kind).source == "model"

    def knows(self, defense: str) -> bool:
        """Return whether the attack knows the mechanism of the defense called `defense`."""
        return self.adaptive and among(self.targets, defense)

    def crafted(self, before: Before, generator: torch.Generator) -> Sent:
        """Return the weights that clients are sent, where the server acts ("server-active/1"); the view is of these.

        Such an attack has no other threat model: what it reads, it has sown. UsageError: see `acting.acted`.
        """
        raise NotImplementedError

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the attack matches. The scorer checks it at the truth. Default: the defense's plain evidence."""
        return view.defense.evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge, in order. Must not fail on NaN observations: that is a failed guess."""
        raise NotImplementedError
