"""`ppbench.testing.check_attack`: attacks with one planted fault each, which must be named."""

from dataclasses import dataclass, replace
from itertools import count
from typing import Any, ClassVar

import pytest
import torch

from ppbench import Guess
from ppbench.adversary.victims import choose_victims
from ppbench.attacks.extraction import Query
from ppbench.attacks.labels import LabelRecovery
from ppbench.attacks.membership.audits import OneRunAudit
from ppbench.attacks.membership.outputs import LossThreshold
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.tracing import NearestReconstruction
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.federation.acting import Sent
from ppbench.federation.threats import THREATS
from ppbench.testing import check_attack
from ppbench.testing.attacks import ATTACK_PROPERTIES, UNDEFENDED_ONLY, duels
from ppbench.testing.record_attacks import pool
from ppbench.testing.small_federation import base_plan, shards_for

TURN = count()


def spoilt(base, name, *, look=lambda *_: None, answer=lambda guess, _: guess, seeded=True, **members):
    """Return an attack that looks at what it is handed, makes something else of its guesses, or draws by no seed."""

    class Spoilt(base):
        def run(self, view, challenges, generator):
            look(self, view, challenges)
            guesses = super().run(view, challenges, generator if seeded else torch.Generator().manual_seed(0))
            return [answer(*both) for both in zip(guesses, challenges, strict=True)]

    return dataclass(frozen=True)(type(name, (Spoilt,), members))


def victims_images(challenge):
    """Return the victims' images as the harness draws them: what an attack must not read for itself."""
    victims = choose_victims(shards_for(NoDefense(), base_plan()), "server/1", challenge.batch, 96, Seeds(0))
    return victims.truth(challenge.unit).x


def scribble(_, view, challenges):
    for leaf in leaves([letter.message for letter in view.mail]):
        leaf.mul_(2)


def trust_numbers(_, view, challenges):
    for leaf in leaves([letter.message for letter in view.mail]):
        assert not leaf.is_floating_point() or bool((leaf.isfinite() & (leaf.abs() < 1e20)).all())
        assert leaf.dim() < 2 or not leaf.is_floating_point() or bool((leaf != 0).any())


def trust_mail(attack, view, challenges):
    evidence = {e.unit: e for e in attack.evidence(view)}
    assert all(evidence[c.unit] for c in challenges)


def contrast(guess, challenge):
    if float(guess.x.std()) < 1e-3:
        raise ZeroDivisionError("contrast")
    return guess


@dataclass(frozen=True)
class Contagious(LabelRecovery):
    """Has one victim's bad numbers spoil all answers."""

    def run(self, view, challenges, generator):
        guesses = super().run(view, challenges, generator)
        bad = [leaf for e in view.mail for leaf in leaves(e.message) if not bool(leaf.isfinite().all())]
        return [replace(g, y=(g.y + 1) % 10) for g in guesses] if bad else guesses


def inside(guess, challenge):
    """Recognize the members' images."""
    known = {row.numpy().tobytes() for row in pool().shards[1].x}
    result = torch.tensor([row.numpy().tobytes() in known for row in challenge.x])
    return replace(guess, decision=result, score=result.float())


def everybody(guess, challenge):
    return replace(guess, decision=torch.ones_like(guess.decision), score=torch.rand(guess.score.shape))


IMAGES, LABELS, TRACES = AnalyticInversion, LabelRecovery, NearestReconstruction
Nameless, Elsewhere = spoilt(LABELS, "Nameless", reference=""), spoilt(LABELS, "Elsewhere", threats=("server/9",))
Overspends = spoilt(IMAGES, "Overspends", answer=lambda g, c: replace(g, evaluations=19))
Fragile = spoilt(LABELS, "Fragile", look=trust_numbers)
Cheats = spoilt(IMAGES, "Cheats", answer=lambda g, c: replace(g, x=victims_images(c)))
Blind = spoilt(IMAGES, "Blind", answer=lambda g, c: replace(g, x=torch.rand(g.x.shape, generator=torch.Generator())))
ZeroLabels = spoilt(LABELS, "ZeroLabels", answer=lambda g, c: replace(g, y=torch.zeros_like(g.y)))
GlobalDraws = spoilt(IMAGES, "GlobalDraws", answer=lambda g, c: replace(g, x=g.x + 1e-3 * torch.rand(g.x.shape)))
Misshapen = spoilt(IMAGES, "Misshapen", answer=lambda g, c: replace(g, x=g.x.double()))
Remembers = spoilt(LABELS, "Remembers", answer=lambda g, c: replace(g, confidence=float(next(TURN))))
AlwaysFirst = spoilt(TRACES, "AlwaysFirst", answer=lambda g, c: replace(g, owner=torch.zeros_like(g.owner)))
ReadsPlaces = spoilt(TRACES, "ReadsPlaces", answer=lambda g, c: Guess(owner=torch.tensor([s.client for s in c.unit])))
Nobody = spoilt(TRACES, "Nobody", answer=lambda g, c: Guess(owner=torch.full((len(c.unit),), 99)))
Zeros = spoilt(Query, "Zeros", answer=lambda g, c: replace(g, outputs=torch.zeros_like(g.outputs)))
Infinite = spoilt(Query, "Infinite", answer=lambda g, c: replace(g, outputs=g.outputs + torch.inf))

GROWN = {"crafted": lambda attack, before, generator: Sent({**before.server.params, "extra": torch.ones(1)})}
RESTLESS = {
    "crafted": lambda attack, before, generator: Sent({n: torch.rand(v.shape) for n, v in before.server.params.items()})
}
GREEDY = {"crafted": lambda attack, before, generator: Sent({n: v.mul_(2) for n, v in before.server.params.items()})}
ONE, BOTH = ("server-active/1",), ("server/1", "server-active/1")

FAULTS = [
    (spoilt(IMAGES, "ActsAndNot", threats=BOTH, **GROWN), "declares_itself", "acts under some of its threat models"),
    (spoilt(IMAGES, "Grows", threats=ONE, **GROWN), "sends_what_was_agreed", "weights of another architecture"),
    (spoilt(IMAGES, "Restless", threats=ONE, **RESTLESS), "sends_what_was_agreed", "one seed gives two guesses"),
    (spoilt(IMAGES, "Greedy", threats=ONE, **GREEDY), "sends_what_was_agreed", "changes the server's state in place"),
    (Nameless, "declares_itself", "does not say where it comes from"),
    (Elsewhere, "declares_itself", "views of ['server/9']"),
    (Blind, "finds_the_planted_leak", "give a median PSNR of"),
    (ZeroLabels, "finds_the_planted_leak", "of 32 labels; all can be found"),
    (Cheats, "noise_gives_chance", "dB nearer than grey"),
    (Cheats, "noise_gives_chance", "images are nearest to their own truth"),
    (GlobalDraws, "one_seed_one_guess", "one seed gives two guesses"),
    (GlobalDraws, "one_seed_one_guess", "torch's global generator has moved"),
    (spoilt(LABELS, "Stubborn", seeded=False), "one_seed_one_guess", "two seeds give one guess"),
    (Overspends, "keeps_form_and_budget_server/1", "with a budget of 1 a guess reports 19 evaluations"),
    (Misshapen, "keeps_form_and_budget_server/1", "the guess x is torch.float64"),
    (spoilt(LABELS, "Scribbles", look=scribble), "keeps_form_and_budget_client/1", "it changes its arguments"),
    *((Fragile, f"survives_{bad}", "AssertionError was raised at") for bad in ("nan", "inf", "huge", "zero")),
    (Contagious, "poison_harms_no_other", "a NaN in one client's upload spoils others' labels"),
    (spoilt(LABELS, "NeedsMail", look=trust_mail), "answers_without_mail", "KeyError was raised at"),
    (spoilt(IMAGES, "NeedsContrast", answer=contrast), "survives_white_images", "ZeroDivisionError was raised at"),
    (Remembers, "guesses_the_same_from_disk", "a second reading of the view on disk gives another guess"),
    (spoilt(LossThreshold, "AllMembers", answer=everybody), "finds_members", "that knows its records by heart"),
    (spoilt(LossThreshold, "KnowsThePool", answer=inside), "knows_no_member_of_0", "untrained model the AUC is 1.00"),
    (spoilt(LossThreshold, "NoCoins", seeded=False), "tosses_coins_nan", "two seeds give one guess about an empty"),
    (AlwaysFirst, "traces_perfect_reconstructions", "of 24 perfect reconstructions 6 are traced"),
    (ReadsPlaces, "traces_noise_by_chance", "of noise 240 of 240 images are traced"),
    (Nobody, "survives_nan", "owners [99, 99, 99, 99] are answered"),
    (Zeros, "reads_the_model", "a model in the clear is answered with error "),
    (Infinite, "answers_zero", "are not answered by finite outputs"),
]


@pytest.mark.parametrize(("attack", "name", "words"), FAULTS, ids=[f"{a.__name__}-{n}" for a, n, _ in FAULTS])
def test_a_planted_fault_is_named(attack, name, words):
    with pytest.raises(AssertionError, match=r"^Attack '\w+' breaks \d of \d properties:\n- ") as caught:
        check_attack(attack, only=(name,))
    assert f"- {name}: " in str(caught.value) and words in str(caught.value)


def test_every_property_has_a_fault_that_it_finds():
    names = {name for _, name, _ in FAULTS}
    variants = {f"keeps_form_and_budget_{threat}" for threat in THREATS} | {"survives_black_images"}
    variants |= {name for name in UNDEFENDED_ONLY if name.startswith(("tosses_coins_", "knows_no_member_of_"))}
    variants |= {f"answers_{bad}" for bad in ("nan", "inf", "huge", "absent")}
    question = {name for questions in ATTACK_PROPERTIES.values() for name in questions}
    assert question - variants <= names


def test_a_defense_that_nobody_installed_can_be_attacked_too():
    @dataclass(frozen=True)
    class Mine(DP):
        """DP under another name."""

        name: ClassVar[str] = "mine"

    result = check_attack(LabelRecovery, against=[Mine()], only=("one_seed_one_guess", "finds_the_planted_leak"))
    assert [(f.property, f.outcome) for f in result] == [
        ("finds_the_planted_leak", "holds"),
        ("one_seed_one_guess", "holds"),
        ("one_seed_one_guess against mine", "holds"),
    ]
    assert [duel.defense.name for duel in duels(LabelRecovery(), [Mine()])] == ["none", "mine"]


def test_input_that_cannot_be_used_is_refused():
    with pytest.raises(UsageError, match="is no attack"):
        check_attack(DP)
    with pytest.raises(UsageError, match="needs an audit"):
        check_attack(OneRunAudit)
    with pytest.raises(UsageError, match="no property named 'survives_nans'; did you mean 'survives_nan'"):
        check_attack(LabelRecovery, only=("survives_nans",))

    class Strange(LabelRecovery):
        """Of a kind that there is not."""

        kind: ClassVar[Any] = "guesswork"

    with pytest.raises(UsageError, match="no kind of attack named 'guesswork'"):
        check_attack(Strange)
