"""The subjects of questions (probed clients, a model, an audit), and the challenges and scores about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from ppbench.metrics.modality import modality_from
from ppbench.records.schema import Flag

if TYPE_CHECKING:
    from torch import Tensor

    from ppbench.adversary.attack import Attack, Challenge, Guess
    from ppbench.adversary.victims import Candidates, PlantedSecret, Victims
    from ppbench.base.seeds import Seeds
    from ppbench.federation.plan import Data
    from ppbench.federation.view import View
    from ppbench.federation.wire import Slot
    from ppbench.metrics.perceptual import Network
    from ppbench.metrics.recognition import Gallery


@dataclass(frozen=True)
class Scored:
    """Scores of one cell, and for reconstructions the images themselves in the order of the truth.

    blind: [*shape], the mean image as a blind guess, if it was measured. drawn: whether reconstructions
    are pictures; None: by their shape.
    """

    victims: list[Any]
    flags: tuple[Flag, ...] = ()
    guess: Tensor | None = None
    truth: Tensor | None = field(default=None, repr=False)
    blind: Tensor | None = field(default=None, repr=False)
    drawn: bool | None = None

    @property
    def images(self) -> dict[str, Tensor] | None:
        """The images to store beside a record: matched images with their originals; None if answers are no images."""
        if self.guess is None or self.truth is None:
            return None
        if not (modality_from(self.guess.shape[1:]).drawn if self.drawn is None else self.drawn):
            return None
        images = {"guess": self.guess, "truth": self.truth}
        return images if self.blind is None else {**images, "blind": self.blind.unsqueeze(0)}


@dataclass(frozen=True)
class Inquiry:
    """One cell's challenges for the attack, and the function that scores its guesses, one per challenge.

    score holds the truth and is never passed to an attack; it raises ValueError for malformed answers. digest: hash of
    the challenges with their true answers, see `Record.asked`.
    """

    challenges: list[Challenge]
    score: Callable[[Sequence[Guess]], Scored]
    digest: str


@dataclass(frozen=True, eq=False)
class Yardstick:
    """References for measuring reconstructions, beside the truth.

    mean: [*shape], of public examples, a blind guess; network: for LPIPS and feature errors; gallery: held-out images
    for recognition; tokens: of texts, a blind guess in any order. What is None, or empty, is not measured.
    """

    mean: Tensor | None = None
    network: Network | None = None
    gallery: Gallery | None = None
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Probe:
    """Probed clients: the attack with its view, and its victims with the truth; test: examples that nobody trains on.

    yardstick: makes the `Yardstick`; None: only the quality of answers is measured, nothing about the evidence.
    answers: of the attack that this one follows, on the same victims. detected: for an active server, by victim, see
    `run.detection`.
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
class TargetModel:
    """A model that the adversary has: delivered, or sent for training.

    test: examples that nobody trains on; count: number of candidates, or of queries; outputs: from inputs [Q, *shape]
    to the true model's outputs [Q, C]; choose: draws the candidates of membership.
    """

    test: Data
    count: int
    outputs: Callable[[Tensor], Tensor]
    choose: Callable[[], Candidates]

    @cached_property
    def candidates(self) -> Candidates:
        """Members and non-members, the same for all attacks."""
        return self.choose()

    @cached_property
    def answers(self) -> Tensor:
        """The true model's outputs [Q, C] on the first `count` test examples."""
        return self.outputs(self.test.x[: self.count])


class _Canaries(Protocol):
    """Canary clients of an audit. inside: [Q] bool, which directions took part; challenge: asks which did; digest: hash
    of the challenge with its true answers.
    """

    @property
    def inside(self) -> Tensor: ...
    def challenge(self) -> Challenge: ...
    def digest(self) -> str: ...


class FinishedAudit(Protocol):
    """A finished audit (`ppbench.run.audit.runs`)."""

    @property
    def candidates(self) -> Candidates:
        """The candidates with their true membership."""

    @property
    def clients(self) -> _Canaries:
        """The canary clients; UsageError: there are none."""

    def secrets(self) -> list[PlantedSecret]:
        """Return the canaries that hold a secret; UsageError: there are none."""

    def challenges(self) -> list[Challenge]:
        """Return the membership challenge of each half, with the reference runs."""

    def tracing(self) -> tuple[Challenge, Tensor]:
        """Return the challenge which client owns each member, and the true owners."""
