"""The attack aware of every mechanism: it matches what the server's own code makes of one client's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.replay import replayed_evidence, without_rounding
from ppbench.attacks.adaptive.inversion import exact_first, fittest_guesses, mismatch_of
from ppbench.attacks.adaptive.pbpfl import joined_guess, split_unit
from ppbench.attacks.labels import LabelRecovery
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.federation.evidence import Evidence
from ppbench.federation.view import View
from ppbench.federation.wire import Slot


@dataclass(frozen=True)
class AdaptiveServer(IDLG):
    """Linear systems, else a search, on the step that the server's own code takes on one client's messages alone.

    On an honest defense the search is that of `idlg`, except on convolutions with kinks (`fittest_guesses`). A unit of
    several clients is split where the server can read each of them.
    """

    name: ClassVar[str] = "adaptive_server"
    version: ClassVar[str] = "5"
    adaptive: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("server/1", "collusion/1")
    reads_alone: ClassVar[bool] = True
    replays: ClassVar[bool] = True
    standard: ClassVar[bool] = True
    reference: ClassVar[str] = "ppbench: the server's own code as evidence"

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the server's own code makes of each client's messages, and of the cohort's."""
        return replayed_evidence(view)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge: the best explained over all readings and all ways to split it."""
        candidates: list[list[Guess]] = [[] for _ in challenges]
        for by_unit in _layers(self.evidence(view)):
            splits = [_splits(challenge, by_unit) for challenge in challenges]
            flat = [part for ways in splits for parts in ways for part in parts]
            answers = iter(self._read(by_unit, view, flat, generator))
            for guesses, ways in zip(candidates, splits, strict=True):
                for parts in ways:
                    each = [next(answers) for _ in parts]
                    guesses.append(each[0] if len(each) == 1 else joined_guess(each))
        return [min(guesses, key=mismatch_of) for guesses in candidates]

    def _read(
        self,
        by_unit: Mapping[frozenset[Slot], Evidence],
        view: View,
        challenges: Sequence[Challenge],
        generator: torch.Generator,
    ) -> list[Guess]:
        """Return the guesses from one reading of each unit: by linear systems, else by a search."""

        def search(unsolved: Sequence[Evidence]) -> list[Guess]:
            evidence = [by_unit[frozenset(one.unit)] for one in unsolved]
            return fittest_guesses(self, evidence, view.plan, challenges, generator)

        readings = without_rounding(list(by_unit.values()), view)
        return exact_first(readings, view.plan, challenges, search, self.budget)


@dataclass(frozen=True)
class ServerLabels(LabelRecovery):
    """Labels from the head's gradient in the step that the server's own code takes."""

    name: ClassVar[str] = "server_labels"
    adaptive: ClassVar[bool] = True
    threats: ClassVar[tuple[str, ...]] = ("server/1", "collusion/1")
    reads_alone: ClassVar[bool] = True
    replays: ClassVar[bool] = True
    reference: ClassVar[str] = AdaptiveServer.reference

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the server's own code makes of each client's messages, and of the cohort's."""
        return without_rounding(replayed_evidence(view), view)


def _layers(evidence: Sequence[Evidence]) -> list[dict[frozenset[Slot], Evidence]]:
    """Return evidence by unit: first readings of all units, then second ones; one empty dict without evidence."""
    layers: list[dict[frozenset[Slot], Evidence]] = [{}]
    for reading in evidence:
        unit = frozenset(reading.unit)
        layer = next((layer for layer in layers if unit not in layer), None)
        if layer is None:
            layers.append(layer := {})
        layer[unit] = reading
    return layers


def _splits(challenge: Challenge, known: Mapping[frozenset[Slot], Evidence]) -> list[list[Challenge]]:
    """Return the ways to split a challenge into parts: the whole and, where every slot is known, slot by slot."""
    parts = split_unit(challenge)
    separable = len(parts) > 1 and all(frozenset(part.unit) in known for part in parts)
    return [[challenge], parts] if separable else [[challenge]]
