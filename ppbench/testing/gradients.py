"""Properties of attacks on uploads (reconstruction, label): their planted leak, their null, their contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low

import torch

from ppbench.adversary.apart import isolated_guesses
from ppbench.adversary.attack import Guess
from ppbench.adversary.reading import readable
from ppbench.base.registry import plugins
from ppbench.base.tree import finite, leaves
from ppbench.federation.acting import Before
from ppbench.federation.plan import Data
from ppbench.federation.threats import TARGET, ThreatModel
from ppbench.federation.view import View
from ppbench.metrics.labels import multiset_hits
from ppbench.questions.base import question_of
from ppbench.questions.labels import score_labels
from ppbench.testing.findings import NotAsked
from ppbench.testing.scene import all_digits, empty_folder, registered
from ppbench.testing.worlds import (
    CHANCE_LEVEL,
    EXTRA_EVALUATIONS,
    POISONS,
    TWO_GUESSES,
    Duel,
    Witness,
    World,
    guess_content,
    malformed,
    noise_pictures,
    noise_world,
    psnrs,
    seeded,
    silenced,
    with_changed_mail,
    within_chance,
)

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
