"""What the user asks for, and its resolution into points (a defense at one control value) and cells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from ppbench.adversary.attack import Attack
from ppbench.adversary.view import THREATS
from ppbench.controls import CONTROLS
from ppbench.errors import UsageError, unknown
from ppbench.federation.contract import Defense
from ppbench.records.schema import Scalar, Strict
from ppbench.registry import load, load_all, plugins
from ppbench.task.losses import LossName

Stage = Literal["init", "iterate", "final"]


class EvaluateConfig(Strict):
    """One evaluation, as `ppbench evaluate` or `ppbench.evaluate` is told it.

    Attributes:
        defense: a name in `ppbench list defenses`.
        dataset: NAME or NAME:ARGUMENT, see `ppbench list datasets`.
        model, model_options: a name in `ppbench list models` and its options.
        attacks: names, or ("all",): every attack that applies to the defense.
        grid: "quick" or "paper" (the defense's own grids), or values of its control parameter.
        settings: parameters of the defense ("theta") and of attacks ("dlg.budget").
        train: training examples that the clients share, drawn by seed; None for all. Few are easily memorized.
        clients, rounds, local_epochs, batch_size: the federation.
        schedule: "round_robin" (the SPN paper's for DLNet) or "parallel".
        loss: "cross_entropy", "squared" (half the squared distance to one-hot labels or numbers) or "bce" (masks).
        upload: "delta" (FedAvg: local epochs, then start minus end) or "gradient" (FedSGD: one batch a client a round).
        optimizer, lr, momentum, beta2, decay_at, decay: of who steps: every client ("delta") or the server
            ("gradient"); the rate is multiplied by `decay` at those rounds.
        partition: "iid", "imbalanced", "dirichlet:ALPHA", or "domains" (groups of clients hold one domain each).
        attack_batch: sizes of the victims' batches.
        victims: victim images a cell (rounded up to whole batches); candidates: members and non-members of each kind.
        probe: what a probed client does with the victim's batch: "gradient" (uploads one gradient of it) or "local"
            (its local part of a round, as in training).
        probe_rounds: rounds that a probed client holds the batch, all seen by the adversary.
        stages: "init" (random weights), "final" (after training; membership: the delivered model) and "iterate" (what
            clients train on in the next round, where that is not the delivered model; only membership and extraction
            are asked there).
        threats: threat models of reconstruction, label and tracing attacks.
        seed: master seed.
        device: "cpu" or "cuda"; backend: "auto", "loop" or "vmap".
    """

    defense: str
    dataset: str = "digits"
    model: str = "dlnet"
    model_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    attacks: tuple[str, ...] = ("all",)
    grid: Literal["quick", "paper"] | tuple[float, ...] = "quick"
    settings: dict[str, Scalar] = Field(default_factory=dict)
    train: int | None = Field(default=None, ge=1)
    clients: int = Field(default=10, ge=1)
    rounds: int = Field(default=40, ge=1)
    local_epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)
    schedule: Literal["round_robin", "parallel"] = "round_robin"
    loss: LossName = "cross_entropy"
    upload: Literal["delta", "gradient"] = "delta"
    optimizer: Literal["sgd", "adam"] = "adam"
    lr: float = Field(default=5e-3, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    beta2: float = Field(default=0.999, gt=0, lt=1)
    decay_at: tuple[int, ...] = (20, 32)
    decay: float = Field(default=0.5, gt=0, le=1)
    partition: str = "iid"
    attack_batch: tuple[int, ...] = Field(default=(1, 4, 8), min_length=1)
    probe: Literal["gradient", "local"] = "gradient"
    probe_rounds: int = Field(default=1, ge=1, le=100)
    victims: int = Field(default=20, ge=1)
    candidates: int = Field(default=200, ge=4)
    stages: tuple[Stage, ...] = Field(default=("init", "iterate", "final"), min_length=1)
    threats: tuple[str, ...] = ("server/1",)
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["auto", "loop", "vmap"] = "auto"


SEARCHES = ("dlg", "idlg", "fedavg_inversion")
PRESETS: dict[str, dict[str, Any]] = {
    # One start a victim: on two cores the whole has to end within three minutes.
    "quick": {"settings": {f"{attack}.restarts": 0 for attack in SEARCHES}},
    "paper": {
        "grid": "paper",
        "rounds": 300,
        "lr": 1e-3,
        "decay_at": (),
        "victims": 1000,
        "candidates": 1000,
    },
}


def configure(preset: str = "quick", **options: Any) -> EvaluateConfig:
    """Return the configuration of `preset` with `options` laid over it.

    Raises:
        UsageError: an unknown preset, option, threat model or stage, or a value out of range.
    """
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    base = {**PRESETS[preset], **_setting(preset, options)}
    settings = {**base.get("settings", {}), **(options.get("settings") or {})}
    model = {**base.get("model_options", {}), **(options.get("model_options") or {})}
    for name in ("attacks", "attack_batch", "stages", "threats", "grid"):
        if isinstance(options.get(name), tuple | list):
            options[name] = tuple(dict.fromkeys(options[name]))  # twice the same is once
    _check_finite({**settings, "grid": options.get("grid")})
    try:
        config = EvaluateConfig(**{**base, **options, "model_options": model, "settings": settings})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][:1])
        raise UsageError(f"Option {where}={first['input']!r} cannot be used: {first['msg'].lower()}.") from error
    for threat in config.threats:
        if threat not in THREATS:
            raise unknown("threat model", threat, THREATS)
    if not config.attacks:
        raise UsageError("No attack was named; give names, as --attack dlg,tracing, or all.")
    if any(size < 1 for size in config.attack_batch):
        raise UsageError(f"Option attack_batch={config.attack_batch} cannot be used: a batch has at least 1 image.")
    return config


def _check_finite(values: Mapping[str, Any]) -> None:
    """Raise UsageError at a parameter, or a value of a grid, that is infinite or no number."""
    for name, value in values.items():
        for one in value if isinstance(value, tuple | list) else [value]:
            if isinstance(one, float) and not math.isfinite(one):
                raise UsageError(f"Option {name}={one} cannot be used: it must be a finite number.")


def _setting(preset: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the federation that the defense's paper needs, less what belongs to another network than the asked."""
    name = options.get("defense")
    factory = load("defenses", name) if isinstance(name, str) else Defense
    setting = dict(getattr(factory, "setting", {}).get(preset, {}))
    if options.get("model", setting.get("model")) != setting.get("model"):
        setting.pop("model_options", None)
    return setting


@dataclass(frozen=True)
class Point:
    """A defense at one value of its control parameter."""

    defense: Defense

    @property
    def value(self) -> float | None:
        """The control parameter's value, or None for a defense without one."""
        name = self.defense.control
        return None if name is None else float(getattr(self.defense, name))

    @property
    def label(self) -> str:
        """For people: "spn alpha2=0.1"."""
        return self.defense.name if self.value is None else f"{self.defense.name} {self.defense.control}={self.value:g}"


def _instance(kind: str, factory: Any, name: str, parameters: Mapping[str, Scalar]) -> Any:
    """Build a plugin's dataclass from `parameters`, with their types checked and converted."""
    if not (isinstance(factory, type) and dataclasses.is_dataclass(factory)):
        raise UsageError(f"The {kind} {name!r} is no dataclass of its parameters; make it one.")
    known = [field.name for field in dataclasses.fields(factory)]
    for key in parameters:
        if key not in known:
            raise unknown(f"parameter of {kind} {name!r}", key, known or ["(it has none)"])
    try:
        return TypeAdapter(factory).validate_python(dict(parameters))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].lower()
        raise UsageError(f"The {kind} {name!r} refuses {where}={first['input']!r}: {message}.") from error


def make_defense(name: str, parameters: Mapping[str, Scalar] | None = None) -> Defense:
    """Return the defense called `name` with `parameters`; raises UsageError for an unknown name or parameter."""
    made = _instance("defense", load("defenses", name), name, parameters or {})
    if not isinstance(made, Defense):
        raise UsageError(f"The plugin {name!r} is no Defense; subclass ppbench.Defense.")
    return made


def points(config: EvaluateConfig) -> list[Point]:
    """Return the points of an evaluation: the controls first, then the defense over its grid.

    Raises:
        UsageError: unknown defense or parameter, a grid for a defense without control parameter, or none given.
    """
    own = {key: value for key, value in config.settings.items() if "." not in key}
    base = make_defense(config.defense, own)
    if base.control is None:
        if not isinstance(config.grid, str):
            raise UsageError(f"Defense {base.name!r} has no control parameter; leave out --grid.")
        grid = [Point(base)]
    else:
        values = base.grids.get(config.grid, ()) if isinstance(config.grid, str) else config.grid
        if base.control in own and config.grid == "quick":
            values = (float(getattr(base, base.control)),)  # --set of the control parameter is a grid of one
        if not values:
            raise UsageError(f"Defense {base.name!r} declares no {config.grid!r} grid; give values, as --grid 0.1,1.")
        grid = [Point(make_defense(config.defense, {**own, base.control: v})) for v in values]
    names = {point.defense.name for point in grid}
    return [Point(make_defense(name)) for name in CONTROLS if name not in names] + grid


def attacks(config: EvaluateConfig) -> list[Attack]:
    """Return the attacks of an evaluation, each with its parameters.

    "all" is every attack that can be imported and applies to the defense; a named one must exist. Tracing needs
    reconstructions, so a reconstruction attack must be among them.

    Raises:
        UsageError: unknown attack or parameter, an attack built for another defense, or tracing alone.
    """
    everything = config.attacks == ("all",)
    found = load_all("attacks") if everything else {name: load("attacks", name) for name in config.attacks}
    for key in config.settings:
        if "." in key and key.split(".")[0] not in plugins("attacks"):
            raise unknown("attack", key.split(".")[0], plugins("attacks"))
    named = {key.split(".")[0] for key in config.settings if "." in key}
    for name in named - set(found):  # a parameter of an attack that does not run is still checked
        prefix = f"{name}."
        own = {k[len(prefix) :]: v for k, v in config.settings.items() if k.startswith(prefix)}
        _instance("attack", load("attacks", name), name, own)
    chosen = []
    for name, factory in found.items():
        prefix = f"{name}."
        own = {k[len(prefix) :]: v for k, v in config.settings.items() if k.startswith(prefix)}
        attack = _instance("attack", factory, name, own)
        if not isinstance(attack, Attack):
            raise UsageError(f"The plugin {name!r} is no Attack; subclass ppbench.Attack.")
        attack.check()
        if attack.targets is not None and config.defense not in attack.targets and not attack.general:
            if not everything:
                targets = ", ".join(sorted(attack.targets))
                raise UsageError(f"Attack {name!r} is built for {targets}, not for {config.defense!r}; leave it out.")
            continue
        chosen.append(attack)
    kinds = {attack.kind for attack in chosen}
    if "tracing" in kinds and "reconstruction" not in kinds:
        raise UsageError("Tracing needs reconstructions; add a reconstruction attack, as --attack dlg,tracing.")
    return chosen


def threats_of(attack: Attack, config: EvaluateConfig) -> Iterator[str]:
    """Yield the threat models under which `attack` runs: the asked ones that it supports, else its own."""
    asked = [threat for threat in config.threats if threat in attack.threats]
    yield from asked or attack.threats
