"""What attacks on uploads must keep (reconstruction, label): their planted leak, their null, their manners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_low

import torch

from ppbench.adversary.apart import isolated
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
from ppbench.testing.scene import digits, folder, installed
from ppbench.testing.worlds import (
    LEVEL,
    POISONS,
    START,
    TWO_GUESSES,
    Duel,
    Witness,
    World,
    content,
    malformed,
    mute,
    noise_pictures,
    psnrs,
    seeded,
    silenced,
    within_chance,
    written,
)

FEW, SOME = 4, 40
"""Budgets: where only the form of a guess is asked, and where it should be as good as another, or no better."""


def finds_the_planted_leak(duel: Duel) -> Iterator[str]:
    """Ask whether undefended gradients give the images (median PSNR) with their labels."""
    attack = duel.attack
    world = duel.probe(8, pictures=duel.pictures)
    world = world.seen(replace(world.view, public=Data(digits().x[600:1000], digits().y[600:1000])))
    guesses = world.answers(attack)
    wrong = [g.y.tolist() for g, y in zip(guesses, world.labels, strict=True) if g.y is not None and g.y.tolist() != y]
    if wrong:
        yield f"of undefended gradients of single images {len(wrong)} of 8 labels are wrong; a gradient tells its label"
    reached = median_low(psnrs(world, guesses, attack))
    if not reached > duel.decibels:
        yield f"undefended gradients give a median PSNR of {reached:.1f} dB; more than {duel.decibels:g} dB is right"


def finds_all_labels(duel: Duel) -> Iterator[str]:
    """Ask whether undefended gradients give all labels of batches."""
    for batch in (1, 4):
        world = duel.probe(32, batch)
        scores = score_labels(world.victims, world.answers(duel.attack)).victims
        right = sum(score.label for score in scores)
        if right != 32:
            yield f"of undefended gradients of {batch} images each it finds {right} of 32 labels; all can be found"


def noise_gives_chance(duel: Duel) -> Iterator[str]:
    """Ask whether uploads that do not depend on the data give images no nearer than grey, and their labels by chance.

    Units are drawn alike, so any pairing of guesses with truths is as likely: chance is the mean over all, and hits
    spread no wider than the binomial. Noise is nearer than a constant by luck alone: half a decibel on the mean is less
    than a slightly better grey would gain (1 dB at .45); on a single victim of 12 a generator's image gains up to 2.5.
    """
    attack, world = duel.quick(SOME), mute(duel, 12)
    guesses = world.answers(attack)
    wrong = list(malformed(world, guesses, attack))
    if wrong:
        yield wrong[0]
        return
    plain = [Guess(x=torch.full_like(g.x, 0.5)) for g in guesses if g.x is not None]
    gains = torch.tensor(psnrs(world, guesses)) - torch.tensor(psnrs(world, plain))
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
    """Ask whether uploads that do not depend on the data give labels by chance, see `noise_gives_chance`."""
    worlds = [(duel.quick(SOME), mute(duel, 24), "pure noise")]
    worlds += [(duel.quick(SOME), mute(duel, 96, 4), "batches of noise")] if duel.undefended else []
    for attack, world, words in worlds:
        guesses = world.answers(attack)
        wrong = list(malformed(world, guesses, attack))
        yield from wrong[:1] or _chance_of_labels(world, guesses, words)


def _chance_of_labels(world: World, guesses: Sequence[Guess], words: str) -> Iterator[str]:
    """Yield a violation where labels are right more, or less, often than over all pairings."""
    found, true = [g.y.tolist() for g in guesses if g.y is not None], world.labels
    hits = [[sum(multiset_hits(g, t)) for t in true] for g in found]
    chance = float(torch.tensor(hits).double().mean()) / len(true[0])
    right, trials = sum(hits[i][i] for i in range(len(hits))), len(true) * len(true[0])
    if not within_chance(right, trials, chance):
        yield f"of {words} {right} of {trials} labels are right, where chance is {chance:.0%}; nothing tells them"


def _no_nearer_than_any_pairing(world: World, guesses: Sequence[Guess]) -> bool:
    """Return whether guesses, of one image a unit, are as far from their truths as in 999 of 1000 other orders."""
    if any(len(unit) * world.victims.batch > 1 for unit in world.victims.units):
        return True
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units]).flatten(1)
    low, high = world.view.plan.data_range
    images = torch.cat([guess.x for guess in guesses if guess.x is not None])
    errors = torch.cdist(images.flatten(1).nan_to_num().clamp(low, high).double(), truth.double())
    orders = torch.stack([torch.randperm(len(truth), generator=seeded(i)) for i in range(2000)])
    others = errors[torch.arange(len(truth)), orders].mean(1)
    return bool(errors.diagonal().mean() >= others.quantile(1 - LEVEL))


def one_seed_one_guess(duel: Duel) -> Iterator[str]:
    """Ask whether all draws come from the generator: nothing global is read or moved, seeds differ without mail."""
    attack, world = duel.quick(FEW), duel.probe(3)
    for seen in (world, world.seen(silenced(world.view))):
        witness = Witness(seen.view, world.challenges)
        first = seen.answers(attack, 1)
        yield from witness.violations()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            again = seen.answers(attack, 1)
        if [content(g) for g in first] != [content(g) for g in again]:
            yield TWO_GUESSES
    other = seen.answers(attack, 2)
    if [content(g) for g in first] == [content(g) for g in other]:
        yield "without an observation two seeds give one guess; a guess about nothing is drawn from the generator"


def keeps_form_and_budget(duel: Duel, threat: ThreatModel) -> Iterator[str]:
    """Ask whether guesses have their form, cost no more than the budget, and leave what was handed over as it was."""
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
        most = shares * (budget * len(duel.limits) + START)
        over = [g.evaluations for g in guesses if not 0 < g.evaluations <= most]
        if duel.limits and over:
            yield f"with a budget of {budget} a guess tells {over[0]} evaluations; 1 to {most} are right"


def sends_what_was_agreed(duel: Duel) -> Iterator[str]:
    """Ask whether what is crafted has the network's names and shapes, depends on the seed alone, and leaves the rest.

    To a whole cohort and to one client among others, with public examples and without.
    """
    run = duel.federate()
    server, plan = run.parties.server, replace(run.plan, local=replace(run.plan.local, upload="gradient", batch=4))
    kept = [leaf.clone() for leaf in leaves(server)]
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
    if not all(map(torch.equal, kept, leaves(server))):
        yield "it changes the server's state in place; copy before you write"


def survives_poison(duel: Duel, poison: str) -> Iterator[str]:
    """Ask whether uploads, or broadcasts, of one bad number are answered: a failed guess, no exception."""
    attack = duel.quick(FEW)
    for batch in (1, 2):
        world = duel.probe(2 * batch, batch)
        for by_server in (False, True):
            seen = world.seen(written(world.view, POISONS[poison], by_server))
            yield from malformed(seen, seen.answers(attack), attack)


def poison_harms_no_other(duel: Duel) -> Iterator[str]:
    """Ask whether the guesses on others stay as good as they were when one of four uploads is NaN."""
    attack, world = duel.quick(SOME), duel.probe(4)
    bad = written(world.view, POISONS["nan"]).mail
    mail = tuple(b if e.sender == 1 else e for e, b in zip(world.view.mail, bad, strict=True))
    clean, guesses = world.answers(attack), world.seen(replace(world.view, mail=mail)).answers(attack)
    told = {i: y.tolist() for i in (0, 2, 3) if (y := guesses[i].y) is not None}
    if any(told[i] != world.labels[i] for i in told):
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
    """Ask whether a view without uploads, or without any mail, gives a guess a challenge, and no challenge none."""
    attack, world = duel.quick(FEW), duel.probe(4, 2)
    for view in (silenced(world.view), replace(world.view, mail=())):
        yield from malformed(world, world.seen(view).answers(attack), attack)
    if attack.run(world.view, [], seeded()) != []:
        yield "no challenge gives a guess; give one a challenge"


def survives_constant_images(duel: Duel, level: float) -> Iterator[str]:
    """Ask whether victims of one tone are answered, with a PSNR between 0 and 100 dB."""
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
    """Ask whether a view from disk gives the same guess bit for bit; where both are installed, in a fresh process."""
    attack, world = duel.quick(12), duel.probe(2)
    apart = question_of(attack.kind).inputs and all(
        plugins(group).get(part.name) is not None and plugins(group)[part.name].entry.load() is type(part)
        for group, part in (("attacks", attack), ("defenses", duel.defense))
    )
    with installed("attacks", type(attack)), installed("defenses", type(duel.defense)), folder() as home:
        world.view.save(home)
        here = world.seen(View.load(home)).answers(attack, 7)
        alone = partial(isolated, attack, world.view, world.challenges, 7)
        again = alone() if apart else world.seen(View.load(home)).answers(attack, 7)
    if [content(g) for g in here] != [content(g) for g in again]:
        yield (
            f"{'a fresh process' if apart else 'a second reading'} of the view on disk gives another guess; nothing "
            "but the view, the challenges and the generator may decide"
        )
