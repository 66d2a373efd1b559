"""`ppbench.testing.check_attack`: attacks with one planted fault each, which must be named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from ppbench import Attack, Challenge, Guess, View
from ppbench.attacks.extraction.query import Query
from ppbench.attacks.label.recovery import LabelRecovery
from ppbench.attacks.membership.loss import LossThreshold
from ppbench.attacks.membership.one_run import OneRunAudit
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.tracing.nearest import NearestReconstruction
from ppbench.base.errors import UsageError
from ppbench.base.tree import leaves
from ppbench.defenses.dp import DP
from ppbench.federation.view import THREATS
from ppbench.testing import check_attack
from ppbench.testing.attacks import ATTACK_PROPERTIES, ONCE, duels
from ppbench.testing.records import pool
from ppbench.testing.scene import digits

Guesses = list[Guess]
TURN = count()


def random_images(guesses: Guesses, generator: torch.Generator) -> Guesses:
    return [replace(g, x=torch.rand(g.x.shape, generator=generator)) for g in guesses]


class Nameless(LabelRecovery):
    """Does not say where it comes from."""

    reference: ClassVar[str] = ""


@dataclass(frozen=True)
class Elsewhere(LabelRecovery):
    """Uses views that nobody has."""

    threats: ClassVar[tuple[str, ...]] = ("server/9",)


@dataclass(frozen=True)
class Blind(AnalyticInversion):
    """Rebuilds nothing."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return random_images(super().run(view, challenges, generator), generator)


@dataclass(frozen=True)
class BlindToLabels(LabelRecovery):
    """Guesses class 0."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [replace(g, y=torch.zeros_like(g.y)) for g in super().run(view, challenges, generator)]


def knows_the_data(asked: Challenge) -> Tensor:
    """Return the victims' images as the harness draws them: what an attack must not read for itself."""
    from ppbench.adversary.victims import choose_victims
    from ppbench.base.seeds import Seeds
    from ppbench.defenses.none import NoDefense
    from ppbench.testing.scene import base_plan, shards_for

    victims = choose_victims(shards_for(NoDefense(), base_plan()), "server/1", asked.batch, 96, Seeds(0))
    return victims.truth(asked.unit).x


@dataclass(frozen=True)
class Cheats(AnalyticInversion):
    """Reads the data set instead of the view."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        found = super().run(view, challenges, generator)
        return [replace(g, x=knows_the_data(c)) for g, c in zip(found, challenges, strict=True)]


@dataclass(frozen=True)
class GlobalDraws(AnalyticInversion):
    """Draws from torch's global generator."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        found = super().run(view, challenges, generator)
        return [replace(g, x=g.x + 1e-3 * torch.rand(g.x.shape)) for g in found]


@dataclass(frozen=True)
class Stubborn(LabelRecovery):
    """Answers 0 where nothing is told, whatever the seed."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return super().run(view, challenges, torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Overspends(AnalyticInversion):
    """Takes ten times its budget."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        found = super().run(view, challenges, generator)
        return [replace(g, evaluations=10 * self.budget + 9) for g in found]


@dataclass(frozen=True)
class Misshapen(AnalyticInversion):
    """Answers in float64."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [replace(g, x=g.x.double()) for g in super().run(view, challenges, generator)]


@dataclass(frozen=True)
class Scribbles(LabelRecovery):
    """Writes into the letters that it was handed."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        for leaf in leaves([letter.message for letter in view.mail]):
            leaf.mul_(2)
        return super().run(view, challenges, generator)


@dataclass(frozen=True)
class Fragile(LabelRecovery):
    """Fails where a number is bad."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        for leaf in leaves([letter.message for letter in view.mail]):
            assert not leaf.is_floating_point() or bool((leaf.isfinite() & (leaf.abs() < 1e20)).all())
            if leaf.dim() > 1 and leaf.is_floating_point():
                assert bool((leaf != 0).any())
        return super().run(view, challenges, generator)


@dataclass(frozen=True)
class Contagious(LabelRecovery):
    """Has one victim's bad numbers spoil all answers."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        found = super().run(view, challenges, generator)
        bad = [leaf for e in view.mail for leaf in leaves(e.message) if not bool(leaf.isfinite().all())]
        return [replace(g, y=(g.y + 1) % 10) for g in found] if bad else found


@dataclass(frozen=True)
class NeedsMail(LabelRecovery):
    """Fails without letters."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        evidence = {e.unit: e for e in self.evidence(view)}
        assert all(evidence[c.unit] for c in challenges)
        return super().run(view, challenges, generator)


@dataclass(frozen=True)
class NeedsContrast(AnalyticInversion):
    """Fails where an image has one tone."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        found = super().run(view, challenges, generator)
        if any(float(g.x.std()) < 1e-3 for g in found):
            raise ZeroDivisionError("contrast")
        return found


@dataclass(frozen=True)
class Remembers(LabelRecovery):
    """Answers another way at every call."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [replace(g, confidence=float(next(TURN))) for g in super().run(view, challenges, generator)]


@dataclass(frozen=True)
class AllMembers(LossThreshold):
    """Takes everybody for a member."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        found = super().run(view, challenges, generator)
        return [replace(g, decision=torch.ones_like(g.decision), score=torch.rand(g.score.shape)) for g in found]


@dataclass(frozen=True)
class KnowsThePool(LossThreshold):
    """Recognizes the members' images."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        inside = {row.numpy().tobytes() for row in pool().shards[1].x}
        found = super().run(view, challenges, generator)
        told = [torch.tensor([row.numpy().tobytes() in inside for row in c.x]) for c in challenges]
        return [replace(g, decision=t, score=t.float()) for g, t in zip(found, told, strict=True)]


@dataclass(frozen=True)
class NoCoins(LossThreshold):
    """Decides the same whatever the seed."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return super().run(view, challenges, torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class AlwaysFirst(NearestReconstruction):
    """Traces everything to client 0."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [replace(g, owner=torch.zeros_like(g.owner)) for g in super().run(view, challenges, generator)]


@dataclass(frozen=True)
class ReadsPlaces(NearestReconstruction):
    """Answers by the order of the question."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [Guess(owner=torch.tensor([slot.client for slot in c.unit])) for c in challenges]


@dataclass(frozen=True)
class Nobody(NearestReconstruction):
    """Names clients that do not exist."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [Guess(owner=torch.full((len(c.unit),), 99)) for c in challenges]


@dataclass(frozen=True)
class Zeros(Query):
    """Answers nothing but zeros."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [replace(g, outputs=torch.zeros_like(g.outputs)) for g in super().run(view, challenges, generator)]


@dataclass(frozen=True)
class Infinite(Query):
    """Answers infinity."""

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> Guesses:
        return [replace(g, outputs=g.outputs + torch.inf) for g in super().run(view, challenges, generator)]


FAULTS: list[tuple[type[Attack], str, str]] = [
    (Nameless, "declares_itself", "does not say where it comes from"),
    (Elsewhere, "declares_itself", "views of ['server/9']"),
    (Blind, "finds_the_planted_leak", "give a median PSNR of"),
    (BlindToLabels, "finds_the_planted_leak", "of 32 labels; all can be found"),
    (Cheats, "noise_gives_chance", "dB nearer than grey"),
    (Cheats, "noise_gives_chance", "images are nearest to their own truth"),
    (GlobalDraws, "one_seed_one_guess", "one seed gives two guesses"),
    (Stubborn, "one_seed_one_guess", "two seeds give one guess"),
    (Overspends, "keeps_form_and_budget_server/1", "with a budget of 1 a guess tells 19 evaluations"),
    (Misshapen, "keeps_form_and_budget_server/1", "the guess x is torch.float64"),
    (Scribbles, "keeps_form_and_budget_client/1", "it changes what it was handed"),
    (Fragile, "survives_nan", "AssertionError was raised at"),
    (Fragile, "survives_inf", "AssertionError was raised at"),
    (Fragile, "survives_huge", "AssertionError was raised at"),
    (Fragile, "survives_zero", "AssertionError was raised at"),
    (Contagious, "poison_harms_no_other", "a NaN in one client's upload spoils others' labels"),
    (NeedsMail, "answers_without_mail", "KeyError was raised at"),
    (NeedsContrast, "survives_white_images", "ZeroDivisionError was raised at"),
    (Remembers, "guesses_the_same_from_disk", "a second reading of the view on disk gives another guess"),
    (AllMembers, "finds_members", "of a model that knows its records by heart, the AUC is"),
    (KnowsThePool, "knows_no_member_of_0", "of an untrained model the AUC is 1.00"),
    (NoCoins, "tosses_coins_nan", "two seeds give one guess about a model that says nothing"),
    (AlwaysFirst, "traces_perfect_reconstructions", "of 24 perfect reconstructions 6 are traced"),
    (ReadsPlaces, "traces_noise_by_chance", "of noise 240 of 240 images are traced"),
    (Nobody, "survives_nan", "owners [99, 99, 99, 99] are told"),
    (Zeros, "reads_the_model", "a model in the clear is answered with error 0.9"),
    (Infinite, "answers_zero", "are not answered by finite outputs"),
]


@pytest.mark.parametrize(("attack", "name", "words"), FAULTS, ids=[f"{a.__name__}-{n}" for a, n, _ in FAULTS])
def test_a_planted_fault_is_named(attack: type[Attack], name: str, words: str) -> None:
    with pytest.raises(AssertionError, match=r"^Attack '\w+' breaks \d of \d properties:\n- ") as caught:
        check_attack(attack, only=(name,))
    assert f"- {name}: " in str(caught.value) and words in str(caught.value)


def test_every_property_has_a_fault_that_it_finds() -> None:
    names = {name for _, name, _ in FAULTS}
    variants = {f"keeps_form_and_budget_{threat}" for threat in THREATS} | {"survives_black_images"}
    variants |= {name for name in ONCE if name.startswith(("tosses_coins_", "knows_no_member_of_"))}
    variants |= {f"answers_{bad}" for bad in ("nan", "inf", "huge", "absent")}
    asked = {name for questions in ATTACK_PROPERTIES.values() for name in questions}
    assert asked - variants <= names


def test_a_defense_that_nobody_installed_can_be_attacked_too() -> None:
    @dataclass(frozen=True)
    class Mine(DP):
        """DP under another name."""

        name: ClassVar[str] = "mine"

    found = check_attack(LabelRecovery, against=[Mine()], only=("one_seed_one_guess", "finds_the_planted_leak"))
    assert [(f.property, f.outcome) for f in found] == [
        ("finds_the_planted_leak", "holds"),
        ("one_seed_one_guess", "holds"),
        ("one_seed_one_guess against mine", "holds"),
    ]
    assert [duel.defense.name for duel in duels(LabelRecovery(), [Mine()])] == ["none", "mine"]


def test_input_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(UsageError, match="is no attack"):
        check_attack(DP)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs an audit"):
        check_attack(OneRunAudit)
    with pytest.raises(UsageError, match="no property named 'survives_nans'; did you mean 'survives_nan'"):
        check_attack(LabelRecovery, only=("survives_nans",))

    class Strange(LabelRecovery):
        """Of a kind that there is not."""

        kind: ClassVar[Any] = "guesswork"

    with pytest.raises(UsageError, match="no kind of attack named 'guesswork'"):
        check_attack(Strange)


def test_the_scene_is_real_digits() -> None:
    assert digits().x.shape == (1797, 1, 8, 8) and float(digits().x.max()) == 1
