"""Views for attacks under test, with challenges and truth, and views with faults in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import torch
from scipy import stats
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base.registry import load
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Tree, leaves, tree_map
from ppbench.federation.acting import Acting
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.messages import Update
from ppbench.federation.optim import Opt
from ppbench.federation.plan import Data, Local, Plan
from ppbench.federation.threats import HONEST_SERVER, TARGET, ThreatModel, recorded_threat
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER
from ppbench.nets.net import Option, initial, net_spec
from ppbench.questions.base import question_of
from ppbench.questions.images import score_images
from ppbench.questions.inquiry import Probe
from ppbench.testing.scene import CLASSES, SHAPE, TensorChange, all_digits, base_plan, shards_for

CHANCE_LEVEL = 0.999
"""Level of intervals around chance. Seeds are fixed, so only a change of the code can leave an interval."""
EXTRA_EVALUATIONS = 8
"""Evaluations by which the smallest budget may be exceeded: each pass of each restart evaluates its start once."""
RING = 2.0**48
"""Unit of the fixed-point numbers that masked defenses send."""

NETWORKS: tuple[tuple[str, dict[str, Option]], ...] = (("mlp", {}), ("cnn", {"widths": 16, "pool": "avg"}), ("cnn", {}))
"""Networks for attacks that do not suit the default one."""

POISONS: dict[str, TensorChange] = {
    "nan": lambda t: torch.full_like(t, torch.nan),
    "inf": lambda t: torch.full_like(t, torch.inf),
    "huge": lambda t: torch.full_like(t, 1e30),
    "zero": torch.zeros_like,
}


def noise_pictures() -> Data:
    """Return 64 public examples of noise, from which a generator learns nothing about digits."""
    x = torch.rand(64, *SHAPE, generator=torch.Generator().manual_seed(6))
    return Data(x, torch.eye(CLASSES)[torch.arange(64) % CLASSES])


@dataclass(frozen=True)
class World:
    """One adversary's view of a federation, with challenges and their truth."""

    view: View
    challenges: list[Challenge]
    victims: Victims
    run: Federation

    @property
    def labels(self) -> list[list[int]]:
        """True labels, unit by unit."""
        return [self.victims.truth(unit).y.argmax(1).tolist() for unit in self.victims.units]

    def answers(self, attack: Attack, seed: int = 0) -> list[Guess]:
        """Return an attack's guesses."""
        return list(attack.run(self.view, self.challenges, seeded(seed)))

    def seen(self, view: View) -> World:
        """Return the same challenges with another view."""
        return replace(self, view=view)


@dataclass(frozen=True)
class Duel:
    """An attack under test against one defense; with `none` it must find the planted leak.

    decibels: median PSNR that it must reach on undefended gradients of 8 x 8 images; pictures: replaces the victims'
    images there; None: digits.
    """

    attack: Attack
    defense: Defense
    decibels: float = 30.0
    pictures: TensorChange | None = None

    @property
    def undefended(self) -> bool:
        """Whether the defense is none at all."""
        return self.defense.name == "none"

    def plan_on(self, plan: Plan) -> Plan:
        """Return the plan of the defense's setting; if it has none `plan`, on a network that suits the attack."""
        setting = self.defense.setting.get("quick", {})
        if "model" in setting:
            spec = net_spec(setting["model"], plan.spec.shape, plan.spec.classes, setting.get("model_options"))
            opt = Opt(setting.get("optimizer", "adam"), setting.get("lr", 1e-3), setting.get("momentum", 0.0))
            local = Local(setting.get("upload", "delta"), batch=16, opt=opt)
            return replace(plan, spec=spec, local=local, loss=setting.get("loss", plan.loss))
        shape, classes = plan.spec.shape, plan.spec.classes
        others = (net_spec(model, shape, classes, options) for model, options in NETWORKS)
        plans = [plan, *(replace(plan, spec=spec) for spec in others)]
        return next(filter(self.attack.suits, plans), plans[1])

    def federate(self) -> Federation:
        """Return a started federation; the last client has fewer examples where the defense allows it."""
        own = self.plan_on(base_plan())
        federation = Federation(self.defense, own, shards_for(self.defense, own), Seeds(0))
        federation.start(initial(own.spec, 1))
        return federation

    def quick(self, budget: int) -> Attack:
        """Return the attack with every budget that it has set to `budget`."""
        return replace(self.attack, **dict.fromkeys(self.limits, budget))

    @property
    def limits(self) -> list[str]:
        """Names of the attack's fields that bound its evaluations."""
        return [field.name for field in fields(self.attack) if field.name.endswith("budget")]

    @property
    def threat(self) -> ThreatModel:
        """The main threat model: "server/1", or the attack's own if its server is active."""
        return next((t for t in map(recorded_threat, self.attack.threats) if t.acts), HONEST_SERVER)

    def probe(
        self, count: int, batch: int = 1, threat: ThreatModel | None = None, pictures: TensorChange | None = None
    ) -> World:
        """Return the world of `threat`, by default the duel's, with `count` victims and public examples of noise.

        pictures: replaces the victims' images. An active server sends the attack's crafted weights.
        """
        run, threat = self.federate(), threat or self.threat
        victims = choose_victims(run.shards, threat, batch, count, Seeds(0), sums=run.defense.sums)
        if pictures is not None:
            victims = replace(victims, data={s: Data(pictures(d.x), d.y) for s, d in victims.data.items()})
        target = TARGET if sum(map(len, victims.units)) < len(victims.data) else None
        acting = Acting(self.attack.crafted, target, noise_pictures()) if threat.acts else None
        transcript = run.probe(victims.data, acting=acting)
        view = replace(transcript.view(threat, own=victims.own), public=noise_pictures())
        inquiry = question_of(self.attack.kind).of_probe(Probe(self.attack, view, victims, Seeds(0), all_digits()))
        return World(view, inquiry.challenges, victims, run)


def seeded(seed: int = 0) -> torch.Generator:
    """Return a fresh generator."""
    return torch.Generator().manual_seed(seed)


def with_changed_mail(view: View, change: TensorChange, by_server: bool = False) -> View:
    """Return the view with the floating-point numbers in the letters of clients, or of the server, replaced."""

    def write(tensor: Tensor) -> Tensor:
        return change(tensor) if tensor.is_floating_point() else tensor

    return _rewritten(view, lambda message: tree_map(write, message), by_server)


def _rewritten(view: View, change: Callable[[Tree], Tree], by_server: bool = False) -> View:
    """Return the view with the messages of clients, or of the server, replaced."""
    mail = [replace(e, message=change(e.message)) if (e.sender == SERVER) is by_server else e for e in view.mail]
    return replace(view, mail=tuple(mail))


def silenced(view: View) -> View:
    """Return the view without any client's letter."""
    return replace(view, mail=tuple(e for e in view.mail if e.sender == SERVER))


def noise_world(duel: Duel, count: int, batch: int = 1) -> World:
    """Return a world whose uploads are noise of scale 1e-3 in the defense's form; masked messages are drawn anew."""
    defense = duel.defense
    if defense.sums or defense.masked or not defense.mappable:
        world, g = duel.probe(count, batch), seeded(5)

        def draw(tensor: Tensor) -> Tensor:
            noise = 1e-3 * torch.randn(tensor.shape, generator=g, dtype=torch.float64)
            return noise.to(tensor.dtype) if tensor.is_floating_point() else (RING * noise).to(tensor.dtype)

        return world.seen(_rewritten(world.view, lambda message: tree_map(draw, message)))
    world = replace(duel, defense=load("defenses", "full_noise")()).probe(count, batch)
    context = world.run.context("null", 1, 0, 0)

    def sent(message: Tree) -> Tree:
        return defense.upload(context, (), message.params) if isinstance(message, Update) else message

    return world.seen(replace(_rewritten(world.view, sent), defense=defense))


def malformed(world: World, guesses: Sequence[Guess], attack: Attack) -> Iterator[str]:
    """Yield faults of guesses: one per challenge, of the documented shapes and dtypes, without autograd history."""
    if len(guesses) != len(world.challenges):
        yield f"{len(guesses)} guesses for {len(world.challenges)} challenges; give one per challenge, in order"
        return
    for challenge, guess in zip(world.challenges, guesses, strict=True):
        yield from question_of(attack.kind).malformed(guess, challenge, world.view.plan)
        if not isinstance(guess.evaluations, int) or guess.evaluations < 0:
            yield f"evaluations is {guess.evaluations!r}; it must be a whole number from 0"
        if not (guess.confidence is None or isinstance(guess.confidence, float)):
            yield f"confidence is {guess.confidence!r}; it must be a float or None"


def guess_content(guess: Guess) -> list[object]:
    """Return all fields of a guess, tensors as bytes, so that NaN equals itself."""
    values = [getattr(guess, field.name) for field in fields(guess)]
    return [v.detach().numpy().tobytes() if isinstance(v, Tensor) else repr(v) for v in values]


TWO_GUESSES = "one seed gives two guesses; draw from the generator that `run` is given and from nothing else"


class Witness:
    """Records the arguments of an attack and the state of torch's global generator before it runs."""

    def __init__(self, view: View, challenges: Sequence[Challenge] = (), *tensors: Tensor | None) -> None:
        fields = [vars(challenge) for challenge in challenges]
        self._watched = [e.message for e in view.mail], [s.state for s in view.states], list(view.data), fields, tensors
        self._bytes, self._generator = self._read(), torch.get_rng_state()

    def _read(self) -> list[bytes]:
        return [leaf.detach().numpy().tobytes() for leaf in leaves(self._watched)]

    def violations(self) -> Iterator[str]:
        """Yield what has changed since; the global generator is restored."""
        if self._read() != self._bytes:
            yield "it changes its arguments; copy before you write"
        if not torch.equal(torch.get_rng_state(), self._generator):
            yield "torch's global generator has moved; draw from the generator that `run` is given"
            torch.set_rng_state(self._generator)


def psnrs(world: World, guesses: Sequence[Guess], attack: Attack | None = None) -> list[float]:
    """Return each victim's PSNR in dB by the scorer; a reconstruction that is not finite counts as 0.

    attack: whose evidence the scorer also evaluates at the truth; None: none.
    """
    own = {} if attack is None else {e.unit: e for e in attack.evidence(world.view)}
    scored = score_images(world.victims, guesses, own, {}, world.view.plan.data_range)
    return [victim.decibels for victim in scored.victims]


def within_chance(hits: int, trials: int, chance: float) -> bool:
    """Return whether `hits` of `trials` are within the interval around chance."""
    low, high = stats.binom.interval(CHANCE_LEVEL, trials, chance)
    return bool(low <= hits <= high)
