"""The small federation of the batteries: four clients with 48 digits each (the last one 40), a DLNet, seed 0."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast
from unittest.mock import patch

import torch
from pydantic import TypeAdapter, ValidationError
from scipy import stats
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess
from ppbench.adversary.victims import Victims, choose_victims
from ppbench.base import registry
from ppbench.base.errors import UsageError, unknown
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Tree, leaves, tree_map
from ppbench.federation.acting import Acting
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.threats import HONEST_SERVER, TARGET, ThreatModel, recorded_threat
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Model, Update
from ppbench.nets.net import OptionValue, initial, net_spec
from ppbench.questions.base import question_of
from ppbench.questions.images import score_images
from ppbench.questions.inquiry import Probe

# -- Findings of a battery: each property is checked by itself, and all failures are reported together --

T = TypeVar("T")
Property = Callable[[T], Iterator[str]]
"""Checks one property of a subject and yields a sentence per violation; may raise `Inconclusive` or `NotAsked`."""


class Inconclusive(Exception):
    """The check of the property is inconclusive; the message says why. No failure."""


class NotAsked(Exception):
    """The property does not apply to this subject; the message says why. No failure."""


@dataclass(frozen=True)
class PropertyResult:
    """The outcome of a property. sentence: what happened and what is right, or why there is no answer; "": it holds."""

    property: str
    outcome: Literal["holds", "fails", "inconclusive", "not asked"]
    sentence: str = ""

    def __str__(self) -> str:
        return f"{self.property}: {self.outcome}{f' ({self.sentence})' if self.sentence else ''}"


def ask(name: str, question: Property[T], subject: T) -> PropertyResult:
    """Return the finding of `question` on `subject`; an exception of the subject's own code is a failure."""
    try:
        violations = list(dict.fromkeys(question(subject)))  # one sentence for what is wrong in two places
    except Inconclusive as reason:
        return PropertyResult(name, "inconclusive", str(reason))
    except NotAsked as reason:
        return PropertyResult(name, "not asked", str(reason))
    except Exception as error:  # noqa: BLE001 - the code under test may raise anything; reported with its place
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} was raised at {place.filename}:{place.lineno}: {error}"
        return PropertyResult(name, "fails", f"{text}; a call that the contract allows must not fail")
    return PropertyResult(name, "fails", " Also: ".join(violations)) if violations else PropertyResult(name, "holds")


def ask_all(
    subject: T, properties: Mapping[str, Property[T]], only: Collection[str], skip: Mapping[str, str]
) -> tuple[PropertyResult, ...]:
    """Return the findings about `subject`; see `check_defense` for only and skip. UsageError: an unknown name."""
    for name in (*only, *skip):
        if name not in properties:
            raise unknown("property", name, properties)
    chosen = {name: question for name, question in properties.items() if not only or name in only}
    return tuple(
        PropertyResult(name, "not asked", skip[name]) if name in skip else ask(name, question, subject)
        for name, question in chosen.items()
    )


def raise_failures(subject: str, findings: Collection[PropertyResult]) -> None:
    """Raise AssertionError with a line for each failure, if there is one; subject: as "Defense 'dp'"."""
    failed = [finding for finding in findings if finding.outcome == "fails"]
    if failed:
        lines = "".join(f"\n- {finding.property}: {finding.sentence}." for finding in failed)
        raise AssertionError(f"{subject} breaks {len(failed)} of {len(findings)} properties:{lines}")


def unnamed(plugin: Any, parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield why records cannot hold an attack or a defense: its name, its class, its parameters."""
    if not isinstance(getattr(plugin, "name", None), str) or not plugin.name:
        yield "it has no name; set `name: ClassVar[str]`"
    if not plugin.__dataclass_params__.frozen:
        yield "it is no frozen dataclass; decorate it with @dataclass(frozen=True), for a view may carry it"
    for name, value in parameters.items():
        if not (value is None or isinstance(value, str | int | float | bool)):
            yield f"its parameter {name} is a {type(value).__name__}; records hold str, int, float, bool or None"


SCENE_CLIENTS = 4
SHARD = 48
SHAPE, CLASSES = (1, 8, 8), 10

TensorChange = Callable[[Tensor], Tensor]


@lru_cache
def all_digits() -> Data:
    """Return all 1797 digits in scikit-learn's order, x [N, 1, 8, 8] in 0..1, y one-hot."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32)[:, None] / 16
    return Data(x, torch.nn.functional.one_hot(torch.tensor(raw.target), CLASSES).float())


def base_plan() -> Plan:
    """Return the default plan: DLNet of two convolutions, Adam, batches of 16."""
    return Plan(net_spec("dlnet", SHAPE, CLASSES, {"nconv": 2}), SCENE_CLIENTS, Local(batch=16))


def plan_for(defense: Defense, plan: Plan) -> Plan:
    """Return `plan` with the loss, network and federation of the defense's own setting."""
    setting = defense.setting.get("quick", {})
    if not setting:
        return plan
    opt = Opt("adam", 1e-3)  # small steps: learning is not tested, and noise must not make training diverge
    spec = net_spec(setting.get("model", plan.spec.model), SHAPE, CLASSES, setting.get("model_options"))
    local = Local(setting.get("upload", "delta"), setting.get("local_epochs", 1), 16, opt)
    return replace(
        plan,
        spec=spec,
        clients=setting.get("clients", plan.clients),
        local=local,
        loss=setting.get("loss", plan.loss),
        server_opt=opt if local.upload == "gradient" else plan.server_opt,
        schedule=setting.get("schedule", plan.schedule),
    )


def shards_for(defense: Defense, plan: Plan) -> dict[int, Data]:
    """Return 48 examples per client, and 40 for the last one unless the defense refuses shards of unequal sizes."""
    sizes = [SHARD] * (plan.clients - 1) + [SHARD - 8]
    try:
        defense.check_data(plan, sizes)
    except UsageError:
        sizes = [SHARD] * plan.clients
    return digit_shards(sizes)


def digit_shards(sizes: Sequence[int]) -> dict[int, Data]:
    """Return by client c the first sizes[c] of the c-th block of 48 digits, in storage of their own."""
    x, y = all_digits().x.split(SHARD), all_digits().y.split(SHARD)
    return {c: Data(x[c][:n].clone(), y[c][:n].clone()) for c, n in enumerate(sizes)}


@dataclass(frozen=True)
class DefenseTrial:
    """A defense under test. off: parameters at which it does nothing, by name; None if there are none."""

    defense: Defense
    off: tuple[tuple[str, Any], ...] | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the test federation."""
        return plan_for(self.defense, base_plan())

    def federate(self, seed: int = 0, start: bool = True, **changes: Any) -> Federation:
        """Return a federation of the defense, started unless `start` is False, with `changes` of its plan."""
        own = self.plan
        federation = Federation(self.defense, replace(own, **changes), shards_for(self.defense, own), Seeds(seed))
        if start:
            federation.start(initial(federation.plan.spec, 1))
        return federation


def with_parameters(defense: Defense, changes: Mapping[str, Any]) -> Defense:
    """Return `defense` with `changes`, converted as in an evaluation; UsageError: an unknown name or a wrong type."""
    known = {field.name: getattr(defense, field.name) for field in fields(defense)}
    for name in changes:
        if name not in known:
            raise unknown(f"parameter of defense {defense.name!r}", name, known)
    try:
        return TypeAdapter(type(defense)).validate_python({**known, **changes})
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{'.'.join(map(str, first['loc']))}={first['input']!r}"
        raise UsageError(f"The defense {defense.name!r} refuses {where}: {first['msg'].lower()}.") from error


def scene_victims(
    run: Federation, threat: ThreatModel | str = HONEST_SERVER, batch: int = 2, count: int = 8
) -> Victims:
    """Return `count` victims of a federation for the adversary of `threat`."""
    return choose_victims(run.shards, threat, batch, count, Seeds(0), sums=run.defense.sums)


def same_tensors(a: Tree, b: Tree) -> bool:
    """Return whether two trees hold the same tensors, bit for bit."""
    return len(leaves(a)) == len(leaves(b)) and all(map(torch.equal, leaves(a), leaves(b)))


def largest_difference(a: Tree, b: Tree) -> float:
    """Return the largest difference between the tensors of two trees, infinite if shapes differ."""
    if [leaf.shape for leaf in leaves(a)] != [leaf.shape for leaf in leaves(b)]:
        return float("inf")
    pairs = zip(leaves(a), leaves(b), strict=True)
    return max((float((x.double() - y.double()).abs().max()) for x, y in pairs if x.numel()), default=0.0)


@contextmanager
def registered(group: registry.PluginGroup, plugin: type) -> Iterator[None]:
    """Register a class by its name in the block, because views on disk name their defense."""
    name = str(getattr(plugin, "name", plugin.__name__))
    entry = cast(Any, SimpleNamespace(load=lambda: plugin))
    shown = registry.Plugin(group, name, f"{plugin.__module__}:{plugin.__qualname__}", registry.TESTED, entry)
    with patch.dict(registry.plugins(group), {name: shown}):
        yield


@contextmanager
def empty_folder() -> Iterator[Path]:
    """Yield an empty folder that is removed after the block."""
    with TemporaryDirectory(prefix="ppbench-testing-") as path:
        yield Path(path)


# -- Views for attacks under test, with challenges and truth, and views with faults in them --

CHANCE_LEVEL = 0.999
"""Level of intervals around chance. Seeds are fixed, so only a change of the code can leave an interval."""
RING = 2.0**48
"""Unit of the fixed-point numbers that masked defenses send."""

NETWORKS: tuple[tuple[str, dict[str, OptionValue]], ...] = (
    ("mlp", {}),
    ("cnn", {"widths": 16, "pool": "avg"}),
    ("cnn", {}),
)
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
        transcript = run.probe(victims.data, rounds=self.attack.probe_rounds, acting=acting)
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
    defense, world = duel.defense, duel.probe(count, batch)
    if defense.sums or defense.masked or not defense.mappable or _has_own_weights(world):
        g = seeded(5)

        def draw(tensor: Tensor) -> Tensor:
            noise = 1e-3 * torch.randn(tensor.shape, generator=g, dtype=torch.float64)
            return noise.to(tensor.dtype) if tensor.is_floating_point() else (RING * noise).to(tensor.dtype)

        return world.seen(_rewritten(world.view, lambda message: tree_map(draw, message)))
    world = replace(duel, defense=load_plugin("defenses", "full_noise")()).probe(count, batch)
    context = world.run.context("null", 1, 0, 0)

    def sent(message: Tree) -> Tree:
        return defense.upload(context, (), message.params) if isinstance(message, Update) else message

    return world.seen(replace(_rewritten(world.view, sent), defense=defense))


def _has_own_weights(world: World) -> bool:
    """Return whether the model that a defense sends has other weights than the network."""
    names = set(world.view.plan.net.names)
    return any(isinstance(letter.message, Model) and {*letter.message.params} != names for letter in world.view.mail)


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
