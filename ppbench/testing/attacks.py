"""The conformance battery of attacks: a planted leak is found, noise gives chance, and the contract is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low

import torch

from ppbench.adversary.attack import Attack, Challenge, Guess, acting_faults, readable
from ppbench.adversary.isolation import isolated_guesses
from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import load_plugin, plugins
from ppbench.base.tree import finite, leaves
from ppbench.federation.acting import Before
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Data
from ppbench.federation.threats import TARGET, THREATS, ThreatModel
from ppbench.federation.view import View
from ppbench.metrics.labels import multiset_hits
from ppbench.questions.base import question_of
from ppbench.questions.labels import score_labels
from ppbench.questions.reconstruction import EXTRA_EVALUATIONS
from ppbench.testing import record_attacks
from ppbench.testing.small_federation import (
    CHANCE_LEVEL,
    POISONS,
    SCENE_CLIENTS,
    SHAPE,
    TWO_GUESSES,
    Duel,
    NotAsked,
    Property,
    PropertyResult,
    TensorChange,
    Witness,
    World,
    all_digits,
    ask_all,
    empty_folder,
    guess_content,
    malformed,
    noise_pictures,
    noise_world,
    psnrs,
    raise_failures,
    registered,
    seeded,
    silenced,
    unnamed,
    with_changed_mail,
    within_chance,
)

# -- Properties of tracing attacks: perfect reconstructions are all traced, noise by chance, bad numbers survived --

NOISE_DRAWS = 60


def tracing_question(duel: Duel, rebuilt: TensorChange, rounds: int = 1) -> tuple[View, Challenge]:
    """Return a view and a challenge about one image per client and probe, of `rounds` probes.

    rebuilt: makes the reconstructions of the true images.
    """
    world = duel.probe(SCENE_CLIENTS * rounds)
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units])
    unit = tuple(slot for unit in world.victims.units for slot in unit)
    return world.view, Challenge(unit, 1, x=truth, reconstructions=rebuilt(truth.clone()))


def traces_perfect_reconstructions(duel: Duel) -> Iterator[str]:
    """Check that the true images are traced to their owners."""
    view, challenge = tracing_question(duel, lambda x: x, 6)
    owner = duel.attack.run(view, [challenge], seeded())[0].owner
    if owner is None or tuple(owner.shape) != (24,) or owner.dtype != torch.int64:
        yield "24 images are not answered by an int64 owner of shape (24,)"
    elif owner.tolist() != [slot.client for slot in challenge.unit]:
        right = sum(a == slot.client for a, slot in zip(owner.tolist(), challenge.unit, strict=True))
        yield f"of 24 perfect reconstructions {right} are traced to their owners; all can be"


def traces_noise_by_chance(duel: Duel) -> Iterator[str]:
    """Check that noise is traced by chance: one image and one reconstruction per client, 60 times, 1 hit of 4 each.

    Hits are the fixed points of a map composed with a random permutation: mean 1, variance at most 1, near the
    binomial's 0.75.
    """
    hits, noise = 0, seeded(3)
    view, challenge = tracing_question(duel, lambda x: x)
    for _ in range(NOISE_DRAWS):
        drawn = torch.rand(SCENE_CLIENTS, *SHAPE, generator=noise)
        owner = duel.attack.run(view, [replace(challenge, reconstructions=drawn)], seeded())[0].owner
        answers = [] if owner is None else owner.tolist()
        hits += sum(o == slot.client for o, slot in zip(answers, challenge.unit, strict=False))
    if not within_chance(hits, NOISE_DRAWS * SCENE_CLIENTS, 1 / SCENE_CLIENTS):
        images = NOISE_DRAWS * SCENE_CLIENTS
        yield f"of noise {hits} of {images} images are traced, where chance is {NOISE_DRAWS}; nothing reveals them"


def survives_poisoned_reconstructions(duel: Duel, poison: str) -> Iterator[str]:
    """Check that reconstructions of one bad number give the same answer each time, without side effects."""
    view, challenge = tracing_question(duel, POISONS[poison])
    witness = Witness(view, [challenge])
    for seen in (view, silenced(view)):
        first, again = (duel.attack.run(seen, [challenge], seeded(0))[0] for _ in range(2))
        owner = first.owner
        if owner is None or tuple(owner.shape) != (SCENE_CLIENTS,) or owner.dtype != torch.int64:
            yield f"{SCENE_CLIENTS} images are not answered by an int64 owner of shape ({SCENE_CLIENTS},)"
        elif not set(owner.tolist()) <= {-1, *range(SCENE_CLIENTS)}:
            yield f"owners {owner.tolist()} are answered; clients 0 to {SCENE_CLIENTS - 1}, or -1, are right"
        if guess_content(first) != guess_content(again):
            yield TWO_GUESSES
    yield from witness.violations()


# -- Properties of attacks on uploads (reconstruction, label): their planted leak, their null, their contract --

FEW, SOME = 4, 40
"""Budgets: for checks of a guess's form only, and for checks of its quality."""


def finds_the_planted_leak(duel: Duel) -> Iterator[str]:
    """Check that undefended gradients give the images (median PSNR) with their labels."""
    attack = duel.attack
    world = duel.probe(8, pictures=duel.pictures)
    world = world.seen(replace(world.view, public=Data(all_digits().x[600:1000], all_digits().y[600:1000])))
    guesses = world.answers(attack)
    wrong = [g.y.tolist() for g, y in zip(guesses, world.labels, strict=True) if g.y is not None and g.y.tolist() != y]
    if wrong:
        yield f"of undefended gradients of single images {len(wrong)} of 8 labels are wrong; a gradient shows its label"
    reached = median_low(psnrs(world, guesses, attack))
    if not reached > duel.decibels:
        yield f"undefended gradients give a median PSNR of {reached:.1f} dB; more than {duel.decibels:g} dB is right"


def finds_all_labels(duel: Duel) -> Iterator[str]:
    """Check that undefended gradients give all labels of batches."""
    for batch in (1, 4):
        world = duel.probe(32, batch)
        scores = score_labels(world.victims, world.answers(duel.attack)).victims
        right = sum(score.label for score in scores)
        if right != 32:
            yield f"of undefended gradients of {batch} images each it finds {right} of 32 labels; all can be found"


def noise_gives_chance(duel: Duel) -> Iterator[str]:
    """Check that uploads independent of the data give images no nearer than grey, and labels by chance.

    Units are drawn alike, so any pairing of guesses with truths is equally likely: chance is the mean over all, and
    hits vary no more than the binomial. Noise may be nearer than grey by luck: half a decibel on the mean is less than
    a slightly better grey would gain (1 dB at 0.45); on a single victim of 12 a generator's image gains up to 2.5.
    """
    attack, world = duel.quick(SOME), noise_world(duel, 12)
    guesses = world.answers(attack)
    wrong = list(malformed(world, guesses, attack))
    if wrong:
        yield wrong[0]
        return
    grey = [Guess(x=torch.full_like(g.x, 0.5)) for g in guesses if g.x is not None]
    gains = torch.tensor(psnrs(world, guesses)) - torch.tensor(psnrs(world, grey))
    if float(gains.mean()) >= 0.5 or float(gains.max()) >= 4:
        yield (
            f"from uploads of pure noise images come {float(gains.mean()):.1f} dB nearer than grey "
            f"(at most {float(gains.max()):.1f}); there is nothing in them to come from"
        )
    if not _no_nearer_than_any_pairing(world, guesses):
        yield "from uploads of pure noise images are nearest to their own truth; it knows more than its view"
    if all(guess.y is not None for guess in guesses):
        yield from _chance_of_labels(world, guesses, "pure noise")


def noise_gives_labels_by_chance(duel: Duel) -> Iterator[str]:
    """Check that uploads independent of the data give labels by chance, see `noise_gives_chance`."""
    worlds = [(duel.quick(SOME), noise_world(duel, 24), "pure noise")]
    worlds += [(duel.quick(SOME), noise_world(duel, 96, 4), "batches of noise")] if duel.undefended else []
    for attack, world, source in worlds:
        guesses = world.answers(attack)
        wrong = list(malformed(world, guesses, attack))
        yield from wrong[:1] or _chance_of_labels(world, guesses, source)


def _chance_of_labels(world: World, guesses: Sequence[Guess], source: str) -> Iterator[str]:
    """Yield a violation if labels are right significantly more or less often than over all pairings."""
    guessed, true = [g.y.tolist() for g in guesses if g.y is not None], world.labels
    hits = [[sum(multiset_hits(g, t)) for t in true] for g in guessed]
    chance = float(torch.tensor(hits).double().mean()) / len(true[0])
    right, trials = sum(hits[i][i] for i in range(len(hits))), len(true) * len(true[0])
    if not within_chance(right, trials, chance):
        yield f"of {source} {right} of {trials} labels are right, where chance is {chance:.0%}; nothing reveals them"


def _no_nearer_than_any_pairing(world: World, guesses: Sequence[Guess]) -> bool:
    """Return whether guesses, of one image per unit, are no nearer to their truths than in 1 of 1000 orders."""
    if any(len(unit) * world.victims.batch > 1 for unit in world.victims.units):
        return True
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units]).flatten(1)
    low, high = world.view.plan.data_range
    images = torch.cat([guess.x for guess in guesses if guess.x is not None])
    errors = torch.cdist(images.flatten(1).nan_to_num().clamp(low, high).double(), truth.double())
    orders = torch.stack([torch.randperm(len(truth), generator=seeded(i)) for i in range(2000)])
    others = errors[torch.arange(len(truth)), orders].mean(1)
    return bool(errors.diagonal().mean() >= others.quantile(1 - CHANCE_LEVEL))


def one_seed_one_guess(duel: Duel) -> Iterator[str]:
    """Check that all draws come from the generator: global state is neither read nor changed, and seeds differ."""
    attack, world = duel.quick(FEW), duel.probe(3)
    for seen in (world, world.seen(silenced(world.view))):
        witness = Witness(seen.view, world.challenges)
        first = seen.answers(attack, 1)
        yield from witness.violations()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            again = seen.answers(attack, 1)
        if [guess_content(g) for g in first] != [guess_content(g) for g in again]:
            yield TWO_GUESSES
    other = seen.answers(attack, 2)
    if [guess_content(g) for g in first] == [guess_content(g) for g in other]:
        yield "without an observation two seeds give one guess; a guess about nothing is drawn from the generator"


def keeps_form_and_budget(duel: Duel, threat: ThreatModel) -> Iterator[str]:
    """Check that guesses are well-formed, cost no more than the budget, and leave the arguments unchanged."""
    if not threat.among(duel.attack.threats):
        raise NotAsked(f"it does not use views of {threat}")
    world = duel.probe(4, 2, threat)
    if not readable(duel.attack, world.view, world.challenges):
        raise NotAsked(f"views of {threat} hold nothing that it could read")
    for budget in (1, 12):
        attack = duel.quick(budget)
        witness = Witness(world.view, world.challenges)
        guesses = world.answers(attack)
        yield from witness.violations()
        yield from malformed(world, guesses, attack)
        shares = len(world.challenges[0].unit)  # a cohort's clients may be attacked one by one
        limit = shares * (budget * len(duel.limits) + EXTRA_EVALUATIONS)
        over = [g.evaluations for g in guesses if not 0 < g.evaluations <= limit]
        if duel.limits and over:
            yield f"with a budget of {budget} a guess reports {over[0]} evaluations; 1 to {limit} are right"


def sends_what_was_agreed(duel: Duel) -> Iterator[str]:
    """Check that crafted weights have the network's names and shapes, and depend on the seed alone.

    For a whole cohort and for one target client, with public examples and without; the server's state must not change.
    """
    run = duel.federate()
    server, plan = run.parties.server, replace(run.plan, local=replace(run.plan.local, upload="gradient", batch=4))
    state_before = [leaf.clone() for leaf in leaves(server)]
    like = {name: value.shape for name, value in server.params.items()}
    for target, public in ((None, noise_pictures()), (TARGET, None)):
        before = Before(plan, duel.defense, server, tuple(range(plan.clients)), target, public)
        first, again = (duel.attack.crafted(before, seeded(1)) for _ in range(2))
        for sent, other in ((first.params, again.params), (first.others, again.others)):
            if sent is None or other is None:
                continue
            if {name: value.shape for name, value in sent.items()} != like:
                yield "it sends weights of another architecture; names and shapes are those of the model"
            elif not finite(sent):
                yield "it sends weights that are not finite; no client trains on them"
            elif not all(torch.equal(sent[name], other[name]) for name in sent):
                yield TWO_GUESSES
    if not all(map(torch.equal, state_before, leaves(server))):
        yield "it changes the server's state in place; copy before you write"


def survives_poison(duel: Duel, poison: str) -> Iterator[str]:
    """Check that uploads, or broadcasts, of one bad number give a guess and no exception."""
    attack = duel.quick(FEW)
    for batch in (1, 2):
        world = duel.probe(2 * batch, batch)
        for by_server in (False, True):
            seen = world.seen(with_changed_mail(world.view, POISONS[poison], by_server))
            yield from malformed(seen, seen.answers(attack), attack)


def poison_harms_no_other(duel: Duel) -> Iterator[str]:
    """Check that a NaN in one of four uploads leaves the guesses on the others as good as before."""
    attack, world = duel.quick(SOME), duel.probe(4)
    poisoned = with_changed_mail(world.view, POISONS["nan"]).mail
    mail = tuple(b if e.sender == 1 else e for e, b in zip(world.view.mail, poisoned, strict=True))
    clean, guesses = world.answers(attack), world.seen(replace(world.view, mail=mail)).answers(attack)
    labels = {i: y.tolist() for i in (0, 2, 3) if (y := guesses[i].y) is not None}
    if any(labels[i] != world.labels[i] for i in labels):
        yield "a NaN in one client's upload spoils others' labels; treat each upload by itself"
    if question_of(attack.kind).inputs:
        before, after = psnrs(world, clean), psnrs(world, guesses)
        worse = [i for i in (0, 2, 3) if not after[i] > min(before[i], 60) - 3]
        if worse:
            i = worse[0]
            yield (
                f"a NaN in one client's upload takes another's image from {before[i]:.1f} to {after[i]:.1f} dB; "
                "treat each upload by itself"
            )


def answers_without_mail(duel: Duel) -> Iterator[str]:
    """Check that a view without uploads, or without any mail, gives one guess per challenge, and none for none."""
    attack, world = duel.quick(FEW), duel.probe(4, 2)
    for view in (silenced(world.view), replace(world.view, mail=())):
        yield from malformed(world, world.seen(view).answers(attack), attack)
    if attack.run(world.view, [], seeded()) != []:
        yield "no challenge gives a guess; give one guess per challenge"


def survives_constant_images(duel: Duel, level: float) -> Iterator[str]:
    """Check that constant images give guesses with a PSNR between 0 and 100 dB."""
    attack = duel.quick(FEW)
    for batch in (1, 2):
        world = duel.probe(2 * batch, batch, pictures=lambda x: torch.full_like(x, level))
        guesses = world.answers(attack)
        wrong = list(malformed(world, guesses, attack))
        yield from wrong
        if question_of(attack.kind).inputs and not wrong:
            values = psnrs(world, guesses, attack)
            if not all(0 <= value <= 100 for value in values):
                yield f"constant images give PSNRs of {min(values):.1f} to {max(values):.1f} dB; 0 to 100 are right"


def guesses_the_same_from_disk(duel: Duel) -> Iterator[str]:
    """Check that a view from disk gives the same guess bit for bit; in a fresh process if both are installed."""
    attack, world = duel.quick(12), duel.probe(2)
    isolate = question_of(attack.kind).inputs and all(
        plugins(group).get(part.name) is not None and plugins(group)[part.name].entry.load() is type(part)
        for group, part in (("attacks", attack), ("defenses", duel.defense))
    )
    with registered("attacks", type(attack)), registered("defenses", type(duel.defense)), empty_folder() as home:
        world.view.save(home)
        first = world.seen(View.load(home)).answers(attack, 7)
        isolated = partial(isolated_guesses, attack, world.view, world.challenges, 7)
        again = isolated() if isolate else world.seen(View.load(home)).answers(attack, 7)
    if [guess_content(g) for g in first] != [guess_content(g) for g in again]:
        yield (
            f"{'a fresh process' if isolate else 'a second reading'} of the view on disk gives another guess; nothing "
            "but the view, the challenges and the generator may decide"
        )


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
    "one_seed_one_guess": one_seed_one_guess,
    **{f"keeps_form_and_budget_{t}": partial(keeps_form_and_budget, threat=THREATS[t]) for t in sorted(THREATS)},
    **{f"survives_{poison}": partial(survives_poison, poison=poison) for poison in POISONS},
    "poison_harms_no_other": poison_harms_no_other,
    "answers_without_mail": answers_without_mail,
    "sends_what_was_agreed": sends_what_was_agreed,
    "survives_black_images": partial(survives_constant_images, level=0.0),
    "survives_white_images": partial(survives_constant_images, level=1.0),
    "guesses_the_same_from_disk": guesses_the_same_from_disk,
}
ABSENCES = (*POISONS, record_attacks.ABSENT)

ATTACK_PROPERTIES: Mapping[str, Properties] = {
    "reconstruction": {
        "finds_the_planted_leak": finds_the_planted_leak,
        "noise_gives_chance": noise_gives_chance,
        **UPLOADS,
    },
    "label": {
        "finds_the_planted_leak": finds_all_labels,
        "noise_gives_chance": noise_gives_labels_by_chance,
        **UPLOADS,
    },
    "membership": {
        "declares_itself": attack_declares_itself,
        "finds_members": record_attacks.finds_members,
        **{f"knows_no_member_of_{seed}": partial(record_attacks.knows_no_member_of, seed=seed) for seed in range(5)},
        **{f"tosses_coins_{bad}": partial(record_attacks.tosses_coins_without_a_model, poison=bad) for bad in ABSENCES},
    },
    "batch_membership": {
        "finds_the_planted_leak": record_attacks.finds_batch_members,
        "noise_gives_chance": record_attacks.noise_gives_batch_members_by_chance,
        **{name: asks for name, asks in UPLOADS.items() if name != "poison_harms_no_other"},  # one question about all
    },
    "client_membership": {"declares_itself": attack_declares_itself},  # all else needs an audit with canary clients
    "exposure": {"declares_itself": attack_declares_itself},  # all else needs an audit with planted secrets
    "tracing": {
        "declares_itself": attack_declares_itself,
        "traces_perfect_reconstructions": traces_perfect_reconstructions,
        "traces_noise_by_chance": traces_noise_by_chance,
        **{f"survives_{bad}": partial(survives_poisoned_reconstructions, poison=bad) for bad in POISONS},
    },
    "extraction": {
        "declares_itself": attack_declares_itself,
        "reads_the_model": record_attacks.reads_the_model,
        **{f"answers_{poison}": partial(record_attacks.answers_without_a_model, poison=poison) for poison in ABSENCES},
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
    defenses = {d.name: d for d in [load_plugin("defenses", name)() for name in ("none", *targets)]}
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
) -> tuple[PropertyResult, ...]:
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


def _findings(duel: Duel, only: Collection[str], skip: Mapping[str, str]) -> list[PropertyResult]:
    """Return the findings of a duel; unknown names raise UsageError in the undefended duel only."""
    questions = properties_in(duel)
    if duel.undefended:
        return list(ask_all(duel, questions, only, skip))
    applicable = [name for name in only if name in questions]
    if only and not applicable:
        return []
    findings = ask_all(duel, questions, applicable, {name: why for name, why in skip.items() if name in questions})
    return [replace(finding, property=f"{finding.property} against {duel.defense.name}") for finding in findings]
