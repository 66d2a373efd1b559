"""The conformance battery of attacks: a planted leak is found, noise gives chance, and the contract is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from ppbench.adversary.attack import Attack
from ppbench.adversary.declared import acting_faults
from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import load, plugins
from ppbench.federation.contract import Defense
from ppbench.federation.threats import THREATS
from ppbench.questions.base import question_of
from ppbench.testing import gradients, records, traces
from ppbench.testing.findings import Finding, Property, ask_all, raise_failures, unnamed
from ppbench.testing.worlds import POISONS, Duel

Properties = Mapping[str, Property[Duel]]


def attack_declares_itself(duel: Duel) -> Iterator[str]:
    """Check that name, threat models and `crafted` are valid, and that the attack names its reference."""
    attack = duel.attack
    yield from unnamed(attack, attack.parameters())
    if not attack.reference:
        yield "it does not say where it comes from; set `reference: ClassVar[str]`"
    unknown_threats = sorted(set(attack.threats) - set(THREATS))
    if unknown_threats or not attack.threats:
        yield f"it can use views of {unknown_threats or 'nothing'}; known threat models are {', '.join(THREATS)}"
    for fault in acting_faults(type(attack)):
        yield f"it {fault}"


UPLOADS: Properties = {
    "declares_itself": attack_declares_itself,
    "one_seed_one_guess": gradients.one_seed_one_guess,
    **{
        f"keeps_form_and_budget_{t}": partial(gradients.keeps_form_and_budget, threat=THREATS[t])
        for t in sorted(THREATS)
    },
    **{f"survives_{poison}": partial(gradients.survives_poison, poison=poison) for poison in POISONS},
    "poison_harms_no_other": gradients.poison_harms_no_other,
    "answers_without_mail": gradients.answers_without_mail,
    "sends_what_was_agreed": gradients.sends_what_was_agreed,
    "survives_black_images": partial(gradients.survives_constant_images, level=0.0),
    "survives_white_images": partial(gradients.survives_constant_images, level=1.0),
    "guesses_the_same_from_disk": gradients.guesses_the_same_from_disk,
}
ABSENCES = (*POISONS, records.ABSENT)

ATTACK_PROPERTIES: Mapping[str, Properties] = {
    "reconstruction": {
        "finds_the_planted_leak": gradients.finds_the_planted_leak,
        "noise_gives_chance": gradients.noise_gives_chance,
        **UPLOADS,
    },
    "label": {
        "finds_the_planted_leak": gradients.finds_all_labels,
        "noise_gives_chance": gradients.noise_gives_labels_by_chance,
        **UPLOADS,
    },
    "membership": {
        "declares_itself": attack_declares_itself,
        "finds_members": records.finds_members,
        **{f"knows_no_member_of_{seed}": partial(records.knows_no_member_of, seed=seed) for seed in range(5)},
        **{f"tosses_coins_{bad}": partial(records.tosses_coins_without_a_model, poison=bad) for bad in ABSENCES},
    },
    "batch_membership": {
        "finds_the_planted_leak": records.finds_batch_members,
        "noise_gives_chance": records.noise_gives_batch_members_by_chance,
        **{name: asks for name, asks in UPLOADS.items() if name != "poison_harms_no_other"},  # one question about all
    },
    "client_membership": {"declares_itself": attack_declares_itself},  # all else needs an audit with canary clients
    "tracing": {
        "declares_itself": attack_declares_itself,
        "traces_perfect_reconstructions": traces.traces_perfect_reconstructions,
        "traces_noise_by_chance": traces.traces_noise_by_chance,
        **{f"survives_{bad}": partial(traces.survives_poisoned_reconstructions, poison=bad) for bad in POISONS},
    },
    "extraction": {
        "declares_itself": attack_declares_itself,
        "reads_the_model": records.reads_the_model,
        **{f"answers_{poison}": partial(records.answers_without_a_model, poison=poison) for poison in ABSENCES},
    },
}
"""The properties of attacks by kind and name. `tests/test_attack_contract.py` checks all attacks of ppbench.

For a question of another package `properties_of` covers only the contract, not leaks and chance.
"""


def properties_of(kind: str) -> Properties:
    """Return the properties of attacks of a kind, by name."""
    manners = UPLOADS if question_of(kind).reads else {"declares_itself": attack_declares_itself}
    return ATTACK_PROPERTIES.get(kind, manners)


UNDEFENDED_ONLY = frozenset(
    {"declares_itself", "finds_the_planted_leak", "poison_harms_no_other", "traces_perfect_reconstructions"}
    | {f"tosses_coins_{poison}" for poison in ABSENCES}
    | {f"knows_no_member_of_{seed}" for seed in range(1, 5)}
)
"""Properties that are checked without a defense only."""


ACTING_ONLY = frozenset({"sends_what_was_agreed"})
"""Properties of attacks with an active server only."""


def duels(attack: Attack, against: Iterable[Defense] = ()) -> list[Duel]:
    """Return the attack against no defense, against each of its targets that is installed, and against `against`."""
    targets = sorted(name for name in attack.targets or () if name in plugins("defenses"))
    defenses = {d.name: d for d in [load("defenses", name)() for name in ("none", *targets)]}
    defenses |= {defense.name: defense for defense in against}
    return [Duel(attack, defense) for defense in defenses.values()]


def properties_in(duel: Duel) -> Properties:
    """Return the properties to check in a duel, by name."""
    properties = properties_of(duel.attack.kind)
    chosen = {name: question for name, question in properties.items() if duel.undefended or name not in UNDEFENDED_ONLY}
    return {name: question for name, question in chosen.items() if name not in ACTING_ONLY or duel.threat.acts}


def check_attack(
    attack: type[Attack] | Attack,
    *,
    against: Iterable[Defense] = (),
    decibels: float = 30.0,
    only: Collection[str] = (),
    skip: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """Check all properties of an attack's kind (`properties_of`); return one finding per property and duel.

    Against no defense, its installed `targets` and `against`, in small federations on digits: some ten seconds each.
    The attack need not be installed, its question must be.
    attack: the class, for its default parameters, or an instance; decibels: median PSNR that a reconstruction attack
    must reach on undefended gradients of single images; only: names of the properties to check; skip: properties that
    it breaks on purpose, with the reason.
    AssertionError: a line for each property that fails, with what happened and what is right. UsageError: no attack,
    one that needs an audit, or an unknown property.
    """
    instance = attack() if isinstance(attack, type) and issubclass(attack, Attack) else attack
    if not isinstance(instance, Attack):
        raise UsageError(f"{attack!r} is no attack; give a subclass of ppbench.Attack, or an instance of one.")
    if instance.kind not in plugins("questions"):
        raise unknown("kind of attack", instance.kind, plugins("questions"))
    if instance.audit:
        raise UsageError(
            f"Attack {instance.name!r} needs an audit ({instance.audit}), which this battery does not train; evaluate "
            "it with ppbench.evaluate(stages=('audit',)) and look at the controls."
        )
    findings = [
        f for duel in duels(instance, against) for f in _findings(replace(duel, decibels=decibels), only, skip or {})
    ]
    raise_failures(f"Attack {getattr(instance, 'name', type(instance).__name__)!r}", findings)
    return tuple(findings)


def _findings(duel: Duel, only: Collection[str], skip: Mapping[str, str]) -> list[Finding]:
    """Return the findings of a duel; unknown names raise UsageError in the undefended duel only."""
    questions = properties_in(duel)
    if duel.undefended:
        return list(ask_all(duel, questions, only, skip))
    applicable = [name for name in only if name in questions]
    if only and not applicable:
        return []
    findings = ask_all(duel, questions, applicable, {name: why for name, why in skip.items() if name in questions})
    return [replace(finding, property=f"{finding.property} against {duel.defense.name}") for finding in findings]
