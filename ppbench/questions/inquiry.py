"""What a question is asked about (probed clients, a model, an audit), and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ppbench.records.schema import Flag

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.adversary.attack import Attack, Challenge, Guess
    from ppbench.adversary.victims import Candidates, Victims
    from ppbench.base.seeds import Seeds
    from ppbench.federation.plan import Data
    from ppbench.federation.view import View
    from ppbench.federation.wire import Slot
    from ppbench.metrics.perceptual import Network
    from ppbench.metrics.recognition import Gallery


@dataclass(frozen=True)
class Scored:
    """Scores of one cell, and for reconstructions the images themselves in the order of the truth.

    blind: [*shape], the mean image that who sees nothing guesses, where it was measured. drawn: whether reconstructions
    are pictures.
    """

    victims: list[Any]
    flags: tuple[Flag, ...] = ()
    guess: Tensor | None = None
    truth: Tensor | None = field(default=None, repr=False)
    blind: Tensor | None = field(default=None, repr=False)
    drawn: bool = False

    @property
    def images(self) -> dict[str, Tensor] | None:
        """What is kept beside a record: matched images with their originals; None where answers are none."""
        if self.guess is None or self.truth is None or not self.drawn:
            return None
        seen = {"guess": self.guess, "truth": self.truth}
        return seen if self.blind is None else {**seen, "blind": self.blind.unsqueeze(0)}


@dataclass(frozen=True)
class Inquiry:
    """One cell's questions: the challenges that the attack is handed, and how guesses, one a challenge, are scored.

    score holds the truth, so no attack ever sees it; it raises ValueError for answers without the form that is asked
    for. digest: hash of what was asked with its answers, see `Record.asked`.
    """

    challenges: list[Challenge]
    score: Callable[[Sequence[Guess]], Scored]
    digest: str


@dataclass(frozen=True, eq=False)
class Yardstick:
    """What reconstructions are measured with, beside the truth.

    mean: [*shape], of examples that anyone may see: a blind guess; None: none is measured. network: for LPIPS and
    feature errors; None: they are null. gallery: held-out images, for what who looks gets; None: it is not measured.
    """

    mean: Tensor | None = None
    network: Network | None = None
    gallery: Gallery | None = None


@dataclass(frozen=True, eq=False)
class Probe:
    """Probed clients: the attack with its view, and its victims with the truth; test: examples that nobody trains on.

    yardstick: makes what reconstructions are measured with; None: only what tells good answers from bad is measured,
    nothing about the evidence. answers: of the attack that this one follows, on the same victims. detected: where the
    server acts, how far each victim notices, see `run.detection`.
    """

    attack: Attack
    view: View
    victims: Victims
    seeds: Seeds
    test: Data
    yardstick: Callable[[], Yardstick] | None = None
    answers: Sequence[Guess] = ()
    detected: Mapping[Slot, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Model:
    """A model that the adversary holds: delivered, or sent to be trained on.

    test: examples that nobody trains on; count: candidates, or queries, that are wanted; outputs: inputs [Q, *shape] to
    the true model's outputs [Q, C]; choose: draws the candidates of membership.
    """

    test: Data
    count: int
    outputs: Callable[[Tensor], Tensor]
    choose: Callable[[], Candidates]

    @cached_property
    def candidates(self) -> Candidates:
        """Members and others, the same for all attacks."""
        return self.choose()

    @cached_property
    def answers(self) -> Tensor:
        """The true model's outputs [Q, C] on the first `count` test examples."""
        return self.outputs(self.test.x[: self.count])


class Canaries(Protocol):
    """Canary clients of an audit (`ppbench.run.audit.clients`)."""

    @property
    def inside(self) -> Tensor:
        """[Q] bool: which directions took part."""

    def challenge(self) -> Challenge:
        """Return the question which did."""

    def digest(self) -> str:
        """Return the hash of what is asked, with its answers."""


class Audit(Protocol):
    """An audit that is complete (`ppbench.run.audit.questions`)."""

    @property
    def candidates(self) -> Candidates:
        """The truth about the candidates."""

    @property
    def clients(self) -> Canaries:
        """The canary clients; UsageError: there are none."""

    def challenges(self) -> list[Challenge]:
        """Return the membership questions about either half, with the references."""

    def tracing(self) -> tuple[Challenge, Tensor]:
        """Return the question who holds each member, and the owners."""
