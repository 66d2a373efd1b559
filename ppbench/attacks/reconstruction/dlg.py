"""Deep leakage from gradients (Zhu, Liu and Han, NeurIPS 2019) and iDLG (Zhao, Mopuri and Bilen, 2020).

Minimize sum_p ||grad_p loss(net(x), softmax(q)) - g*_p||^2 over images x and label logits q. The optimizer, the start
and the cost of one evaluation differ from the authors' release: say beside every figure which start, label and
stopping mismatch were used (the paper's: "normal", "joint").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind
from ppbench.attacks.reconstruction.search.lbfgs import Settings
from ppbench.attacks.reconstruction.search.matching import Matches, Prior
from ppbench.attacks.reconstruction.search.restarts import Effort, search
from ppbench.attacks.reconstruction.search.starts import Label, Start, Victim, batches, draw, posed
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


@dataclass(frozen=True)
class DLG(Attack):
    """Deep leakage from gradients: match the gradient over images and soft labels with L-BFGS.

    Attributes:
        start: first images: "grey" (.5 + .02 N(0, 1) for data in [0, 1]), "normal" N(0, 1) or "pattern" (one N(0, 1)
            patch of 8x8 pixels, tiled).
        label: "joint": unknown, softmax of logits that start at .1 N(0, 1); "inferred": from the head's gradient
            before the search. Labels that a challenge grants are used in either case.
        budget: gradient evaluations a victim, restarts included. Failures below 1800 say nothing about a defense.
        stop: mismatch at which a victim is done: relative to that of an all-zero simulation, or, with `absolute`,
            the plain squared distance of the gradients (what the DLG papers print as loss).
        absolute: see `stop`.
        restarts: fresh starts for a victim whose search ended with a mismatch above `hopeless` and evaluations left;
            the guess with the smallest mismatch counts.
        hopeless: see `restarts`. At .9 noise, which no start explains, costs no restarts; 0 tries all again.
        patience: evaluations within which the mismatch must fall by the share `progress`, else the search has stalled.
            Inexact evidence (noise, a secret term) ends so after 200 to 500 evaluations. On trained models joint
            searches crawl before they succeed: a share of .1 lost two in five of the victims that .01 breaks there.
        progress: see `patience`.
        dtype: of the search. A float32 search that rounding stops short of `stop` goes on in float64.
        history: pairs that L-BFGS keeps.
        slots: victims evaluated together, at most (8 images of 32x32 fill the cache; see `lbfgs.Settings`).
    """

    name: ClassVar[str] = "dlg"
    version: ClassVar[str] = "2"
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = "Zhu, Liu and Han, Deep Leakage from Gradients, NeurIPS 2019"

    start: Start = "grey"
    label: Label = "joint"
    budget: int = 1800
    stop: float = 1e-10
    absolute: bool = False
    restarts: int = 2
    hopeless: float = 0.9
    patience: int = 100
    progress: float = 0.01
    dtype: Literal["float32", "float64"] = "float32"
    history: int = 150
    slots: int = 32

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess a challenge; each victim has a generator of its own, whatever runs beside it.

        A victim without evidence, or with an observation that is zero or not finite, gets its start image and
        confidence None. Raises UsageError for an option that does not exist.
        """
        self.check()
        victims = posed(self.evidence(view), view.plan, challenges, generator)
        guesses: dict[int, Guess] = {}
        for rows in batches(victims):
            guesses |= dict(zip(rows, self.attack([victims[i] for i in rows]), strict=True))
        return [guesses.get(i) or victim.failure(self.start) for i, victim in enumerate(victims)]

    def suits(self, plan: Plan) -> bool:
        """Return whether targets are classes or numbers, which are searched alike; masks are not."""
        return not plan.net.pixelwise

    def evidence(self, view: View) -> list[Evidence]:
        """Return what the search matches: the defense's plain evidence. An adaptive attack overrides this."""
        return view.defense.evidence(view)

    def attack(self, victims: Sequence[Victim]) -> list[Guess]:
        """Return the guesses for victims that `batches` put together."""
        scale = torch.stack([victim.evidence.scale() for victim in victims if victim.evidence is not None])
        stop = self.stop / scale if self.absolute else torch.full_like(scale, self.stop)
        found = self.matched(victims, stop)
        labels = found.ends.labels.argmax(-1)
        return [
            Guess(x=x.float(), y=y, confidence=mismatch if math.isfinite(mismatch) else None, evaluations=count)
            for x, y, mismatch, count in zip(
                found.ends.x, labels, found.mismatch.tolist(), found.evaluations.tolist(), strict=True
            )
        ]

    def matched(self, victims: Sequence[Victim], stop: Tensor, prior: Prior | None = None) -> Matches:
        """Return the best match of each victim, searched until the mismatch is `stop` [V], with a `prior`."""
        evidences = [victim.evidence for victim in victims if victim.evidence is not None]
        dtype, plan = torch.float64 if self.dtype == "float64" else torch.float32, victims[0].plan
        effort = self.effort(plan) if prior is None else replace(self.effort(plan), prior=prior)
        return search(evidences, lambda: draw(victims, self.start, self.label, dtype), plan, effort, stop)

    def effort(self, plan: Plan) -> Effort:
        """Return how hard to search. An attack with a prior overrides this."""
        settings = Settings(self.history, self.slots, self.patience, self.progress)
        return Effort(self.budget, self.restarts, self.hopeless, settings)

    def check(self) -> None:
        """Raise UsageError for an option that does not exist or a number out of range."""
        for field, allowed in (("start", Start), ("label", Label), ("dtype", Literal["float32", "float64"])):
            if getattr(self, field) not in get_args(allowed):
                right = " or ".join(map(repr, get_args(allowed)))
                raise UsageError(f"Attack {self.name!r}: {field}={getattr(self, field)!r} is unknown; use {right}.")
        for field, least in (
            ("budget", 1),
            ("restarts", 0),
            ("hopeless", 0),
            ("patience", 0),
            ("history", 1),
            ("slots", 1),
        ):
            if not getattr(self, field) >= least:
                raise UsageError(
                    f"Attack {self.name!r}: {field}={getattr(self, field)} is too small; it must be {least} or more."
                )
        if not 0 <= self.progress < 1:
            raise UsageError(f"Attack {self.name!r}: progress={self.progress} cannot be used; it must be in [0, 1).")
        if not self.stop > 0:
            raise UsageError(f"Attack {self.name!r}: stop={self.stop} cannot be used; it must be above 0.")


@dataclass(frozen=True)
class IDLG(DLG):
    """Improved DLG: labels are read off the head's gradient first, then the images are searched."""

    name: ClassVar[str] = "idlg"
    version: ClassVar[str] = "2"
    reference: ClassVar[str] = "Zhao, Mopuri and Bilen, iDLG: Improved Deep Leakage from Gradients, 2020"

    label: Label = "inferred"
