"""What every registered attack must keep, whatever it does: its planted leak, its null, its manners.

Attacks come from the registry, each also against the defenses that it is built for, so that a new one is tested
without a line here: in the network, loss and federation that the defense's own setting asks for. Seeds are fixed: an
interval around chance is left once, by a bug, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.isolate import isolated
from ppbench.adversary.score import score_images, score_labels, score_members, score_outputs
from ppbench.adversary.victims import Candidates, Victims, choose_candidates, choose_victims
from ppbench.adversary.view import THREATS, View
from ppbench.defenses.full_noise import FullNoise
from ppbench.defenses.none import NoDefense
from ppbench.errors import UsageError
from ppbench.federation.autodiff import gradient
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.messages import Update
from ppbench.federation.optim import Layout, Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.tree import Params, leaves, tree_map
from ppbench.federation.wire import SERVER
from ppbench.metrics.labels import multiset_hits
from ppbench.registry import load, plugins
from ppbench.seeds import Seeds
from ppbench.task.net import initial, net_spec

ATTACKS: dict[str, type[Attack]] = {
    name: load("attacks", name) for name, plugin in plugins("attacks").items() if plugin.distribution == "ppbench"
}
KINDS = {kind: [n for n, a in ATTACKS.items() if a.kind == kind] for kind in ("reconstruction", "label")}
GRADIENT = KINDS["reconstruction"] + KINDS["label"]  # attacks on the uploads of probes
MEMBERSHIP = [n for n, a in ATTACKS.items() if a.kind == "membership" and not a.audit]
TRACING = [n for n, a in ATTACKS.items() if a.kind == "tracing" and not a.audit]
AUDITS = [n for n, a in ATTACKS.items() if a.audit]  # see test_audit_contract.py
EXTRACTION = [n for n, a in ATTACKS.items() if a.kind == "extraction"]
LEVEL = 0.999  # of the intervals around chance
START = 8  # evaluations that the smallest budget may be exceeded by: each pass of each restart looks at its start once
CLIENTS = 4

RING = 2.0**48  # unit of the fixed-point numbers that masked defenses send

PUBLIC = Data(torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(6)), torch.eye(10)[torch.arange(64) % 10])
"""What no client holds: noise, so that a generator knows nothing of digits and its range is no help but a start."""

Federate = Callable[..., Federation]
Change = Callable[[Tensor], Tensor]
POISONS: dict[str, Change] = {
    "nan": lambda t: torch.full_like(t, torch.nan),
    "inf": lambda t: torch.full_like(t, torch.inf),
    "huge": lambda t: torch.full_like(t, 1e30),
    "zero": torch.zeros_like,
}


@dataclass(frozen=True)
class World:
    """One adversary's view, what is asked, and the truth about it."""

    view: View
    challenges: list[Challenge]
    victims: Victims

    @property
    def labels(self) -> list[list[int]]:
        """True labels, unit by unit."""
        return [self.victims.truth(unit).y.argmax(1).tolist() for unit in self.victims.units]


def defenses_of(name: str) -> list[Defense]:
    """Return no defense, and the defenses that the attack is built for."""
    return [NoDefense(), *(load("defenses", target)() for target in sorted(ATTACKS[name].targets or ()))]


def plan_for(name: str, defense: Defense, plan: Plan) -> Plan:
    """Return a plan that `defense` accepts, by its own setting; without one `plan`, on a network that `name` suits."""
    setting = defense.setting.get("quick", {})
    if "model" in setting:
        spec = net_spec(setting["model"], plan.spec.shape, plan.spec.classes, setting.get("model_options"))
        opt = Opt(setting.get("optimizer", "adam"), setting.get("lr", 1e-3), setting.get("momentum", 0.0))
        local = Local(setting.get("upload", "delta"), batch=16, opt=opt)
        return replace(plan, spec=spec, local=local, loss=setting.get("loss", plan.loss))
    if not ATTACKS[name]().suits(plan):
        return replace(plan, spec=net_spec("mlp", plan.spec.shape, plan.spec.classes))
    return plan


@pytest.fixture
def federate(plan: Plan, digits: Data) -> Federate:
    """Return a started federation of a defense for an attack; the last client has fewer examples where it may."""

    def make(name: str, defense: Defense) -> Federation:
        own, sizes = plan_for(name, defense, plan), [48] * (CLIENTS - 1) + [40]
        try:
            defense.check_data(own, sizes)
        except UsageError:
            sizes = [48] * CLIENTS
        shards = {c: Data(digits.x[c * 48 :][:n].clone(), digits.y[c * 48 :][:n].clone()) for c, n in enumerate(sizes)}
        federation = Federation(defense, own, shards, Seeds(0))
        federation.start(initial(own.spec, 1))
        return federation

    return make


CASES = [(name, defense) for name in GRADIENT for defense in defenses_of(name)]
each_case = pytest.mark.parametrize(("name", "defense"), CASES, ids=[f"{name}-{d.name}" for name, d in CASES])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def limits(attack: Attack) -> list[str]:
    return [f.name for f in fields(attack) if f.name.endswith("budget")]


def quick(name: str, budget: int = 40) -> Attack:
    """Return the attack with every budget that it has set to `budget`."""
    attack = ATTACKS[name]()
    return replace(attack, **{field: budget for field in limits(attack)})


def probe(
    run: Federation, count: int, batch: int = 1, threat: str = "server/1", pictures: Change | None = None
) -> World:
    """Return what the adversary of `threat` sees of `count` victims, whose images `pictures` replaces before."""
    victims = choose_victims(run.shards, threat, batch, count, Seeds(0), sums=run.defense.sums)
    if pictures is not None:
        victims = replace(victims, data={s: Data(pictures(d.x), d.y) for s, d in victims.data.items()})
    view = run.probe(victims.data).view(threat, own=victims.own)
    return World(replace(view, public=PUBLIC), victims.challenges(), victims)


def written(view: View, change: Change, by_server: bool = False) -> View:
    """Return the view with the floating-point numbers in the letters of clients, or of the server, replaced."""

    def write(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.is_floating_point() else tensor

    mail = [
        replace(e, message=tree_map(write, e.message)) if (e.sender == SERVER) is by_server else e for e in view.mail
    ]
    return replace(view, mail=tuple(mail))


def silenced(view: View) -> View:
    return replace(view, mail=tuple(e for e in view.mail if e.sender == SERVER))


def mute(federate: Federate, name: str, defense: Defense, count: int, batch: int = 1) -> World:
    """Return a world whose uploads are noise of scale 1e-3, in the form in which `defense` sends its own.

    Where that takes keys, or more than one gradient, the numbers in the clients' own letters are drawn anew.
    """
    if defense.masked or not defense.mappable:
        world, g = probe(federate(name, defense), count, batch), seeded(5)

        def draw(tensor: Tensor) -> Tensor:
            noise = 1e-3 * torch.randn(tensor.shape, generator=g, dtype=torch.float64)
            return noise.to(tensor.dtype) if tensor.is_floating_point() else (RING * noise).to(tensor.dtype)

        mail = tuple(
            e if e.sender == SERVER else replace(e, message=tree_map(draw, e.message)) for e in world.view.mail
        )
        return replace(world, view=replace(world.view, mail=mail))
    run = federate(name, FullNoise())
    world, context = probe(run, count, batch), run._context("null", 1, 0, 0)
    mail = []
    for letter in world.view.mail:
        if isinstance(letter.message, Update):
            letter = replace(letter, message=defense.upload(context, (), letter.message.params))
        mail.append(letter)
    return replace(world, view=replace(world.view, mail=tuple(mail), defense=defense))


def check_form(world: World, guesses: Sequence[Guess], kind: str) -> None:
    """Assert that there is one guess a challenge, of the documented shapes and dtypes and without history."""
    assert len(guesses) == len(world.challenges)
    for asked, guess in zip(world.challenges, guesses, strict=True):
        count = len(asked.unit) * asked.batch
        if kind == "reconstruction":
            assert guess.x.shape == (count, *world.view.plan.spec.shape)
            assert guess.x.dtype == torch.float32
            assert not guess.x.requires_grad
        if guess.y is not None or kind == "label":
            assert guess.y.shape == (count,)
            assert guess.y.dtype == torch.int64
            assert 0 <= int(guess.y.min()) <= int(guess.y.max()) < world.view.plan.spec.classes
        assert isinstance(guess.evaluations, int)
        assert guess.evaluations >= 0
        assert guess.confidence is None or isinstance(guess.confidence, float)


def content(guess: Guess) -> list[object]:
    """Return everything that a guess says, tensors as bytes: NaN equals itself."""
    values = [getattr(guess, field.name) for field in fields(guess)]
    return [v.detach().numpy().tobytes() if isinstance(v, Tensor) else repr(v) for v in values]


def numbers(*trees: object) -> list[bytes]:
    return [leaf.detach().numpy().tobytes() for tree in trees for leaf in leaves(tree)]


def everything(view: View, challenges: Sequence[Challenge]) -> list[bytes]:
    """Return the bytes of all tensors that an attack is handed."""
    asked = [[getattr(challenge, field.name) for field in fields(challenge)] for challenge in challenges]
    return numbers([e.message for e in view.mail], [s.state for s in view.states], list(view.data), asked)


def psnrs(attack: Attack, world: World, guesses: Sequence[Guess]) -> list[float]:
    """Return each victim's PSNR in dB by the scorer; a reconstruction that is not finite counts as 0."""
    own, plain = ({e.unit: e for e in found} for found in (attack.evidence(world.view), []))
    scored = score_images(world.victims, guesses, own, plain, world.view.plan.data_range)
    return [victim.psnr or 0.0 for victim in scored.victims]


def no_nearer_than_any_pairing(world: World, guesses: Sequence[Guess]) -> bool:
    """Return whether guesses are as far from their own truths as from others', over all orders (one in a thousand is
    farther). True where a unit has several images: their order is not told.
    """
    if any(len(unit) * world.victims.batch > 1 for unit in world.victims.units):
        return True
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units]).flatten(1)
    low, high = world.view.plan.data_range
    found = torch.cat([guess.x for guess in guesses]).flatten(1).nan_to_num().clamp(low, high)
    errors = torch.cdist(found.double(), truth.double())
    orders = torch.stack([torch.randperm(len(truth), generator=seeded(i)) for i in range(2000)])
    others = errors[torch.arange(len(truth)), orders].mean(1)
    return bool(errors.diagonal().mean() >= others.quantile(1 - LEVEL))


def median(values: Sequence[float]) -> float:
    return float(torch.tensor(values).median())


def within_chance(hits: int, trials: int, chance: float) -> bool:
    low, high = stats.binom.interval(LEVEL, trials, chance)
    return bool(low <= hits <= high)


# -- the registry ----------------------------------------------------------------------------------------------------
def test_every_kind_has_attacks_and_their_declarations_hold() -> None:
    assert all([*KINDS.values(), MEMBERSHIP, TRACING, EXTRACTION])
    assert sorted(GRADIENT + MEMBERSHIP + TRACING + EXTRACTION + AUDITS) == sorted(ATTACKS)
    for name, attack in ATTACKS.items():
        assert attack.name == name
        assert attack.reference
        assert set(attack.threats) <= set(THREATS)
        assert (attack.targets or set()) <= set(plugins("defenses"))
        assert attack.adaptive or attack.targets is None or attack.kind == "extraction"


# -- planted leaks ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS["reconstruction"])
def test_planted_leak_an_undefended_gradient_gives_the_image(name: str, federate: Federate, digits: Data) -> None:
    """To 30 dB; through a generator, whose stages share the budget, to 25; by its latent alone, what it makes."""
    attack, public = ATTACKS[name](), Data(digits.x[600:1000], digits.y[600:1000])
    pictures: Change | None = None
    if name == "ggl":
        world, draws = probe(federate(name, NoDefense()), 1), seeded(4)
        decoder = attack.prior(replace(world.view, public=public)).decoder

        def pictures(x: Tensor) -> Tensor:
            return decoder.decode(torch.randn(len(x), decoder.plan.latent, generator=draws)).detach()

    world = probe(federate(name, NoDefense()), 8, pictures=pictures)
    world = replace(world, view=replace(world.view, public=public))
    guesses = attack.run(world.view, world.challenges, seeded())
    assert [guess.y.tolist() for guess in guesses] == world.labels
    assert median(psnrs(attack, world, guesses)) > {"gifd": 25, "gias": 25, "ggl": 20}.get(name, 30)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", KINDS["label"])
def test_planted_leak_an_undefended_gradient_gives_all_labels(name: str, batch: int, federate: Federate) -> None:
    attack, world = ATTACKS[name](), probe(federate(name, NoDefense()), 32, batch)
    scores = score_labels(world.victims, attack.run(world.view, world.challenges, seeded())).victims
    assert len(scores) == 32
    assert all(score.label for score in scores)


# -- nulls -----------------------------------------------------------------------------------------------------------
@each_case
def test_null_noise_instead_of_uploads_gives_chance(name: str, defense: Defense, federate: Federate) -> None:
    """Uploads that do not depend on the data: no image is nearer than grey is, labels are right as often as by chance.

    Each unit's upload is drawn alike, so any pairing of guesses with truths is as likely as the true one: the chance
    of a hit is the mean over all pairings, whichever classes the attack prefers. Hits of a random pairing are drawn
    without replacement, and spread no wider than the binomial. So it is for the images' errors. A guess made of noise
    cannot be nearer than a constant but by luck: half a decibel on the mean is less than a grey tone closer to the
    digits' mean of .3 would gain (1 dB at .45), 1.5 on a single victim what the largest of 24 may.
    """
    kind = ATTACKS[name].kind
    attack, world = quick(name, 90), mute(federate, name, defense, 24)
    guesses = attack.run(world.view, world.challenges, seeded())
    check_form(world, guesses, kind)
    if kind == "reconstruction":
        plain = [Guess(x=torch.full_like(guess.x, 0.5)) for guess in guesses]
        gains = torch.tensor(psnrs(attack, world, guesses)) - torch.tensor(psnrs(attack, world, plain))
        assert float(gains.mean()) < 0.5
        assert float(gains.max()) < 1.5
        assert no_nearer_than_any_pairing(world, guesses)
    found, true = [guess.y.tolist() for guess in guesses], world.labels
    hits = [[sum(multiset_hits(g, t)) for t in true] for g in found]
    chance = float(torch.tensor(hits).double().mean()) / len(true[0])
    assert within_chance(sum(hits[i][i] for i in range(len(hits))), 24, chance)


@pytest.mark.parametrize("name", KINDS["label"])
def test_null_labels_of_batches_are_chance(name: str, federate: Federate) -> None:
    world = mute(federate, name, NoDefense(), 96, 4)
    found = [guess.y.tolist() for guess in ATTACKS[name]().run(world.view, world.challenges, seeded())]
    hits = [[sum(multiset_hits(g, t)) for t in world.labels] for g in found]
    chance = float(torch.tensor(hits).double().mean()) / 4  # over all pairings, as above
    assert within_chance(sum(hits[i][i] for i in range(24)), 96, chance)


# -- determinism, form, budget, harmlessness -------------------------------------------------------------------------
@each_case
def test_one_seed_one_guess_another_seed_another(name: str, defense: Defense, federate: Federate) -> None:
    """Global random state is neither read nor moved; without an observation all is drawn from the generator.

    With one, algebra may leave nothing to draw: there another seed may give the same guess.
    """
    attack, world = quick(name), probe(federate(name, defense), 6)
    before = torch.get_rng_state()
    for seen in (world.view, silenced(world.view)):
        first = attack.run(seen, world.challenges, seeded(1))
        assert torch.equal(torch.get_rng_state(), before)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            again = attack.run(seen, world.challenges, seeded(1))
        assert [content(g) for g in first] == [content(g) for g in again]
    other = attack.run(silenced(world.view), world.challenges, seeded(2))
    assert [content(g) for g in first] != [content(g) for g in other]


@each_case
@pytest.mark.parametrize("threat", sorted(THREATS))
def test_form_and_budget_under_every_threat_model_and_nothing_is_modified(
    name: str, defense: Defense, threat: str, federate: Federate
) -> None:
    if threat not in ATTACKS[name].threats:
        pytest.skip(f"{name} does not use views of {threat}")
    world = probe(federate(name, defense), 6, 2, threat)
    for budget in (1, 40):
        attack = quick(name, budget)
        before = everything(world.view, world.challenges)
        guesses = attack.run(world.view, world.challenges, seeded())
        assert everything(world.view, world.challenges) == before
        check_form(world, guesses, attack.kind)
        if limits(attack):
            shares = len(world.challenges[0].unit)  # a cohort's clients may be attacked one by one
            assert all(0 < g.evaluations <= shares * (budget * len(limits(attack)) + START) for g in guesses)


# -- bad observations ------------------------------------------------------------------------------------------------
@each_case
@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_observation_is_a_failed_guess(name: str, defense: Defense, poison: str, federate: Federate) -> None:
    """Uploads, or broadcasts, that are not finite, absurdly large or zero; batches of one and of two."""
    attack = quick(name)
    for batch in (1, 2):
        world = probe(federate(name, defense), 2 * batch, batch)
        for by_server in (False, True):
            seen = written(world.view, POISONS[poison], by_server)
            check_form(world, attack.run(seen, world.challenges, seeded()), attack.kind)


@pytest.mark.parametrize("name", GRADIENT)
def test_a_poisoned_upload_harms_no_other_victim(name: str, federate: Federate) -> None:
    """One of four uploads is NaN: the guesses on the others stay as good as they were."""
    attack, world = ATTACKS[name](), probe(federate(name, NoDefense()), 4)
    bad = written(world.view, POISONS["nan"]).mail
    mail = tuple(b if e.sender == 1 else e for e, b in zip(world.view.mail, bad, strict=True))
    clean, guesses = (
        attack.run(replace(world.view, mail=m), world.challenges, seeded()) for m in (world.view.mail, mail)
    )
    sound = [0, 2, 3]
    assert [guesses[i].y.tolist() for i in sound] == [world.labels[i] for i in sound]
    if attack.kind == "reconstruction":
        before, after = psnrs(attack, world, clean), psnrs(attack, world, guesses)
        assert all(after[i] > min(before[i], 60) - 3 for i in sound)


@each_case
def test_a_view_without_uploads_or_without_mail_gives_a_guess_a_challenge(
    name: str, defense: Defense, federate: Federate
) -> None:
    attack, world = quick(name), probe(federate(name, defense), 4, 2)
    for seen in (silenced(world.view), replace(world.view, mail=())):
        check_form(world, attack.run(seen, world.challenges, seeded()), attack.kind)
    assert attack.run(world.view, [], seeded()) == []


@each_case
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_constant_images_as_victims(name: str, defense: Defense, level: float, federate: Federate) -> None:
    attack = quick(name)
    for batch in (1, 2):
        world = probe(federate(name, defense), 4, batch, pictures=lambda x: torch.full_like(x, level))
        guesses = attack.run(world.view, world.challenges, seeded())
        check_form(world, guesses, attack.kind)
        if attack.kind == "reconstruction":
            assert all(0 <= value <= 100 for value in psnrs(attack, world, guesses))


# -- a process of its own --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [n for n in KINDS["reconstruction"] if n != "dlg"])  # dlg: test_evaluate.py
def test_a_fresh_process_guesses_the_same_bit_for_bit(name: str, federate: Federate, tmp_path: Path) -> None:
    """Both on the view from disk: what it holds, and the code, are all that a guess depends on."""
    attack, world = quick(name), probe(federate(name, defenses_of(name)[-1]), 2)
    there = isolated(attack, world.view, world.challenges, 7, tmp_path)
    here = attack.run(View.load(tmp_path), world.challenges, seeded(7))
    assert [content(g) for g in here] == [content(g) for g in there]


def test_a_view_from_disk_is_attacked_as_the_one_in_memory_bit_for_bit(federate: Federate, tmp_path: Path) -> None:
    attack, world = ATTACKS["idlg"](), probe(federate("idlg", NoDefense()), 2)
    world.view.save(tmp_path)
    here, there = (attack.run(v, world.challenges, seeded(7)) for v in (world.view, View.load(tmp_path)))
    assert [content(g) for g in here] == [content(g) for g in there]


# -- tracing ---------------------------------------------------------------------------------------------------------
def trace(name: str, federate: Federate, rebuilt: Change, rounds: int = 1) -> tuple[World, Challenge]:
    """Return a world of one question: one image of each client and probe, and reconstructions `rebuilt` of them."""
    world = probe(federate(name, NoDefense()), CLIENTS * rounds)
    truth = torch.cat([world.victims.truth(unit).x for unit in world.victims.units])
    unit = tuple(slot for unit in world.victims.units for slot in unit)
    return world, Challenge(unit, 1, x=truth, reconstructions=rebuilt(truth.clone()))


@pytest.mark.parametrize("name", TRACING)
def test_planted_leak_perfect_reconstructions_are_all_traced(name: str, federate: Federate) -> None:
    world, asked = trace(name, federate, lambda x: x, 6)
    guess = ATTACKS[name]().run(world.view, [asked], seeded())[0]
    assert guess.owner.shape == (24,)
    assert guess.owner.dtype == torch.int64
    assert guess.owner.tolist() == [slot.client for slot in asked.unit]


@pytest.mark.parametrize("name", TRACING)
def test_null_noise_is_traced_at_chance(name: str, federate: Federate) -> None:
    """One image and one reconstruction a client, 60 times: hits average 1 of 4, whatever the images' likeness.

    The reconstructions are drawn alike, so hits are the fixed points of a map composed with a random permutation: mean
    1, variance at most 1 (a permutation; 0 where all images have one nearest). The binomial's .75 is as wide to within
    a fifth of a standard deviation.
    """
    hits, noise = 0, seeded(3)
    for _ in range(60):
        world, asked = trace(name, federate, lambda x: torch.rand(x.shape, generator=noise))
        guess = ATTACKS[name]().run(world.view, [asked], seeded())[0]
        hits += sum(o == slot.client for o, slot in zip(guess.owner.tolist(), asked.unit, strict=True))
    assert within_chance(hits, 60 * CLIENTS, 1 / CLIENTS)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", TRACING)
def test_poisoned_reconstructions_are_traced_without_failure(name: str, poison: str, federate: Federate) -> None:
    world, asked = trace(name, federate, POISONS[poison])
    before = everything(world.view, [asked])
    for seen in (world.view, silenced(world.view)):
        first, again = (ATTACKS[name]().run(seen, [asked], seeded(s))[0] for s in (0, 0))
        assert first.owner.dtype == torch.int64
        assert first.owner.shape == (CLIENTS,)
        assert set(first.owner.tolist()) <= {-1, *range(CLIENTS)}
        assert content(first) == content(again)
    assert everything(world.view, [asked]) == before


# -- membership ------------------------------------------------------------------------------------------------------
COUNT = 60
TANH = Plan(net_spec("dlnet", (1, 8, 8), 10, {"activation": "tanh"}), 2)


@pytest.fixture(scope="module")
def pool(digits: Data) -> tuple[dict[int, Data], Data]:
    """Two clients of COUNT digits and as many for the test, drawn alike; wrong labels, so that only memory helps."""
    order, labels = torch.randperm(3 * COUNT, generator=seeded(1)), seeded(2)
    y = torch.nn.functional.one_hot(torch.randint(0, 10, (3 * COUNT,), generator=labels), 10).float()
    parts = [Data(digits.x[order[i::3]].clone(), y[i::3].clone()) for i in range(3)]
    return {0: parts[0], 1: parts[1]}, parts[2]


@pytest.fixture(scope="module")
def overfit(pool: tuple[dict[int, Data], Data]) -> Params:
    """Weights after full-batch Adam on client 1's data."""
    data, params, opt = pool[0][1], initial(TANH.spec, 0), Opt("adam", lr=0.01)
    layout = Layout.of(params)
    flat, w = layout.pack(params), torch.ones(COUNT)
    state = opt.init(flat)
    for _ in range(150):
        g = gradient(lambda p: TANH.objective(p, data.x, data.y, w), layout.unpack(flat))
        flat, state = opt.step(flat, layout.pack(g), state, torch.tensor(opt.lr))
    return layout.unpack(flat)


def handed(params: Params, shards: dict[int, Data], threat: str) -> View:
    """Return what the adversary holds when the federation releases the model `params`."""
    run = Federation(NoDefense(), TANH, shards, Seeds(0))
    run.start(params)
    return run.release().view(threat, own=((-1, shards[0]),))


def members(name: str, view: View, candidates: Candidates, seed: int = 0) -> tuple[float, int, list[Guess]]:
    """Return the AUC, the number of right decisions and the guesses of a membership attack, by the scorer."""
    guesses = ATTACKS[name]().run(view, [candidates.challenge(half) for half in (0, 1)], seeded(seed))
    for guess in guesses:
        assert guess.score.shape == guess.decision.shape == (len(candidates.x),)
        assert guess.score.is_floating_point()
        assert guess.decision.dtype == torch.bool
    scores = score_members(candidates, guesses).victims
    area = roc_auc_score([s.member for s in scores], [s.score for s in scores])
    return float(area), sum(s.decision == s.member for s in scores), guesses


@pytest.mark.parametrize("name", MEMBERSHIP)
def test_planted_leak_an_overfit_model_betrays_its_members(name: str, pool, overfit: Params) -> None:
    shards, test = pool
    candidates = choose_candidates(shards, test, COUNT, Seeds(0))
    for threat in ATTACKS[name].threats:
        area, right, _ = members(name, handed(overfit, shards, threat), candidates)
        assert area > 0.9
        assert right > 0.8 * 2 * COUNT


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", MEMBERSHIP)
def test_null_an_untrained_model_knows_no_members(name: str, seed: int, pool) -> None:
    """Members and others are drawn alike: the area's variance is Mann and Whitney's (m + n + 1) / (12 m n).

    Decisions are right as often as coins: with as many members as others in a half, hits of decisions that do not
    depend on membership are hypergeometric, no wider than the binomial.
    """
    shards, test = pool
    candidates = choose_candidates(shards, test, COUNT, Seeds(seed))
    view = handed(initial(TANH.spec, seed), shards, ATTACKS[name].threats[0])
    area, right, _ = members(name, view, candidates)
    deviation = ((2 * COUNT + 1) / (12 * COUNT**2)) ** 0.5
    assert abs(area - 0.5) <= stats.norm.isf((1 - LEVEL) / 2) * deviation
    assert within_chance(right, 2 * COUNT, 0.5)


@pytest.mark.parametrize("poison", [*POISONS, "absent"])
@pytest.mark.parametrize("name", MEMBERSHIP)
def test_membership_without_a_usable_model_is_a_coin_from_the_generator(name: str, poison: str, pool) -> None:
    """Also: nothing handed to the attack is modified, one seed gives one guess, another seed another."""
    shards, test = pool
    candidates = choose_candidates(shards, test, COUNT, Seeds(0))
    view = handed(initial(TANH.spec, 0), shards, ATTACKS[name].threats[0])
    view = replace(view, mail=()) if poison == "absent" else written(view, POISONS[poison], by_server=True)
    before, state = everything(view, []), torch.get_rng_state()
    known = numbers(candidates.x, candidates.labels, candidates.member)
    (_, right, first), (_, _, again), (_, _, other) = (members(name, view, candidates, seed) for seed in (1, 1, 2))
    assert within_chance(right, 2 * COUNT, 0.5)
    assert [content(g) for g in first] == [content(g) for g in again]
    if poison != "huge":  # a huge model may still tell losses apart
        assert [content(g) for g in first] != [content(g) for g in other]
    assert everything(view, []) == before
    assert numbers(candidates.x, candidates.labels, candidates.member) == known
    assert torch.equal(torch.get_rng_state(), state)


# -- iterates that clients train on: membership and extraction under defenses that mask them --------------------------
ASKED = [(name, defense) for name in MEMBERSHIP + EXTRACTION for defense in defenses_of(name)[1:]]
each_masked = pytest.mark.parametrize(("name", "defense"), ASKED, ids=[f"{name}-{d.name}" for name, d in ASKED])


@pytest.fixture(scope="module")
def memorized(pool) -> Callable[[Plan], Params]:
    """Return weights that know both clients' data by heart, trained once for each network."""
    shards, _ = pool
    data, known = Data(*(torch.cat([getattr(shards[c], part) for c in (0, 1)]) for part in ("x", "y"))), {}

    def make(plan: Plan) -> Params:
        if plan.spec not in known:
            opt, layout, w = Opt("adam", lr=0.005), Layout.of(initial(plan.spec, 0)), torch.ones(len(data.x))
            flat = layout.pack(initial(plan.spec, 0))
            state = opt.init(flat)
            for _ in range(400):
                g = gradient(lambda p: plan.objective(p, data.x, data.y, w), layout.unpack(flat))
                flat, state = opt.step(flat, layout.pack(g), state, torch.tensor(opt.lr))
            known[plan.spec] = layout.unpack(flat)
        return known[plan.spec]

    return make


def masked_plan(name: str, defense: Defense) -> Plan:
    plan = plan_for(name, defense, replace(TANH, local=Local(batch=COUNT)))
    return replace(plan, local=replace(plan.local, batch=COUNT))


def observed(defense: Defense, plan: Plan, params: Params, shards: dict[int, Data], threat: str, seed: int = 0) -> View:
    """Return what the adversary holds of the round that follows `params`."""
    run = Federation(defense, plan, shards, Seeds(seed))
    run.start(params)
    return run.observe().view(threat, own=((-1, shards[0]),))


@each_masked
def test_planted_leak_a_masked_iterate_is_read(name: str, defense: Defense, pool, memorized) -> None:
    """An adversary who knows the mask finds members and decisions; who takes the iterate as it is finds no decisions.

    Labels are wrong, so outputs on queries are far from one-hot targets: harder than what federations train on.
    """
    (shards, test), plan, attack = pool, masked_plan(name, defense), ATTACKS[name]()
    params = memorized(plan)
    candidates = choose_candidates(shards, test, COUNT, Seeds(0))
    for threat in attack.threats:
        view = observed(defense, plan, params, shards, threat)
        if attack.kind == "membership":
            area, right, _ = members(name, view, candidates)
            assert area > 0.9
            assert right > 0.8 * 2 * COUNT
        else:
            share, error = answered(name, view, test.x, plan.net(params, test.x).detach().double())
            assert (share > 0.8 and error < 0.5) if attack.adaptive else (share < 0.5 and error > 2)


@pytest.mark.parametrize(("name", "defense"), [pair for pair in ASKED if pair[0] in MEMBERSHIP])
def test_null_a_masked_iterate_of_an_untrained_model_knows_no_members(name: str, defense: Defense, pool) -> None:
    (shards, test), plan = pool, masked_plan(name, defense)
    candidates = choose_candidates(shards, test, COUNT, Seeds(0))
    for threat in ATTACKS[name].threats:
        area, right, _ = members(name, observed(defense, plan, initial(plan.spec, 3), shards, threat), candidates)
        assert abs(area - 0.5) <= stats.norm.isf((1 - LEVEL) / 2) * ((2 * COUNT + 1) / (12 * COUNT**2)) ** 0.5
        assert within_chance(right, 2 * COUNT, 0.5)


# -- extraction ------------------------------------------------------------------------------------------------------
def answered(name: str, view: View, x: Tensor, true: Tensor) -> tuple[float, float]:
    """Return the share of equal decisions and the median relative error, by the scorer."""
    (guess,) = ATTACKS[name]().run(view, [Challenge((), 1, x=x.clone())], seeded())
    assert guess.outputs.dtype == torch.float64
    assert not guess.outputs.requires_grad
    scores = score_outputs(true, guess).victims
    return sum(s.agree for s in scores) / len(scores), median([s.error for s in scores])


@pytest.mark.parametrize("name", EXTRACTION)
def test_planted_leak_a_model_in_the_clear_is_answered_exactly(name: str, pool, overfit: Params) -> None:
    shards, test = pool
    run = Federation(NoDefense(), TANH, shards, Seeds(0))
    run.start(overfit)
    true = TANH.net(overfit, test.x).detach().double()
    for threat in ATTACKS[name].threats:
        for transcript in (run.observe(), run.release()):
            assert answered(name, transcript.view(threat, own=((-1, shards[0]),)), test.x, true) == (1.0, 0.0)


@pytest.mark.parametrize("name", [n for n in EXTRACTION if not ATTACKS[n].adaptive])
def test_null_under_an_overwhelming_mask_decisions_are_chance(name: str, pool, memorized) -> None:
    """Classes are exchangeable in the mask's law, so agreement is 1 / C in the mean over masks, whatever the model."""
    (shards, test), defense = pool, replace(load("defenses", "pbpfl")(), kappa=1e6)
    plan = masked_plan(name, defense)
    params = memorized(plan)
    true = plan.net(params, test.x).detach().double()
    shares = torch.tensor(
        [answered(name, observed(defense, plan, params, shards, "client/1", s), test.x, true)[0] for s in range(60)]
    )
    assert abs(float(shares.mean()) - 0.1) <= stats.t.isf((1 - LEVEL) / 2, 59) * float(shares.std()) / 60**0.5


@pytest.mark.parametrize("poison", [*POISONS, "absent"])
@pytest.mark.parametrize("name", EXTRACTION)
def test_extraction_without_a_usable_model_is_a_finite_answer(name: str, poison: str, pool) -> None:
    """Also: nothing handed to the attack is modified, no global state is read, one view gives one answer."""
    shards, test = pool
    for defense in defenses_of(name):
        plan = masked_plan(name, defense)
        for threat in ATTACKS[name].threats:
            view = observed(defense, plan, initial(plan.spec, 0), shards, threat)
            view = replace(view, mail=()) if poison == "absent" else written(view, POISONS[poison], by_server=True)
            asked, state = [Challenge((), 1, x=test.x[:20].clone())], torch.get_rng_state()
            before = everything(view, asked)
            first, again = (ATTACKS[name]().run(view, asked, seeded(s))[0] for s in (0, 0))
            assert first.outputs.shape == (20, 10)
            assert first.outputs.isfinite().all()
            assert content(first) == content(again)
            assert everything(view, asked) == before
            assert torch.equal(torch.get_rng_state(), state)
