"""The attack that knows every mechanism: it matches what the server's own code makes of one client's messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.replay import replayed_evidence
from ppbench.attacks.adaptive.inversion import searched
from ppbench.attacks.label.recovery import LabelRecovery
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


@dataclass(frozen=True)
class AdaptiveServer(IDLG):
    """iDLG, or what else is `searched`, on the step that the server's own code takes on one client's messages alone.

    Of an honest defense `idlg`, but on convolutions with kinks. A unit of several clients is taken apart where the
    server can read each of them.
    """

    name: ClassVar[str] = "adaptive_server"
    version: ClassVar[str] = "1"
    adaptive: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("server/1", "collusion/1")
    reads_alone: ClassVar[bool] = True
    standard: ClassVar[bool] = True
    reference: ClassVar[str] = "ppbench: the server's own code as evidence"

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the server's own code makes of each client's messages, and of the cohort's."""
        return replayed_evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge: of the ways to read and to answer it, the best explained."""
        told: list[list[Guess]] = [[] for _ in challenges]
        for found in _layers(self.evidence(view)):
            ways = [_ways(challenge, found) for challenge in challenges]
            parts = [part for some in ways for way in some for part in way]
            answers = iter(searched(self, list(found.values()), view.plan, parts, generator))
            for guesses, some in zip(told, ways, strict=True):
                guesses += [_joined([next(answers) for _ in way]) for way in some]
        return [min(guesses, key=_unsure) for guesses in told]


@dataclass(frozen=True)
class ServerLabels(LabelRecovery):
    """Labels from the head's gradient in the step that the server's own code takes."""

    name: ClassVar[str] = "server_labels"
    adaptive: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("server/1", "collusion/1")
    reads_alone: ClassVar[bool] = True
    reference: ClassVar[str] = AdaptiveServer.reference

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the server's own code makes of each client's messages, and of the cohort's."""
        return replayed_evidence(view)


def _layers(found: Sequence[Evidence]) -> list[dict[frozenset[Slot], Evidence]]:
    """Return evidence by unit, first readings of all units, then second ones; one empty layer where there is none."""
    layers: list[dict[frozenset[Slot], Evidence]] = [{}]
    for evidence in found:
        unit = frozenset(evidence.unit)
        layer = next((layer for layer in layers if unit not in layer), None)
        if layer is None:
            layers.append(layer := {})
        layer[unit] = evidence
    return layers


def _ways(challenge: Challenge, known: Mapping[frozenset[Slot], Evidence]) -> list[list[Challenge]]:
    """Return the ways to answer a challenge, each the parts that it is taken in: itself, and slot by slot."""
    parts = [
        replace(challenge, unit=(slot,), y=None if challenge.y is None else challenge.y[place : place + 1])
        for place, slot in enumerate(challenge.unit)
    ]
    apart = len(parts) > 1 and all(frozenset(part.unit) in known for part in parts)
    return [[challenge], parts] if apart else [[challenge]]


def _joined(parts: Sequence[Guess]) -> Guess:
    """Return the answer to the whole from those to its parts; it is as sure as the least sure."""
    if len(parts) == 1:
        return parts[0]
    images, labels = ([getattr(part, name) for part in parts] for name in ("x", "y"))
    return Guess(
        x=torch.cat(images),
        y=None if any(y is None for y in labels) else torch.cat(labels),
        confidence=max(_unsure(part) for part in parts),
        evaluations=sum(part.evaluations for part in parts),
    )


def _unsure(guess: Guess) -> float:
    return math.inf if guess.confidence is None else guess.confidence
