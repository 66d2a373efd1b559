"""The configuration of one evaluation, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from ppbench.base.errors import UsageError, one_line, shown, unknown
from ppbench.base.registry import admit, canonical, load_plugin
from ppbench.federation.bounds import LARGEST_COUNT
from ppbench.federation.contract import Defense
from ppbench.metrics.modality import TEXT, Modality
from ppbench.records.schema import Scalar, Strict
from ppbench.run.options import (
    DefenseOptions,
    FederationOptions,
    ModelOptions,
    QuestionOptions,
    RunOptions,
    TaskOptions,
)
from ppbench.task.dataset import default_root
from ppbench.task.user_data import dataset_modality

DefenseName = Annotated[str, AfterValidator(canonical)]
"""A defense as records name it: a framework's own name for what ships with it becomes ours, so that cells are equal."""


class EvaluateConfig(RunOptions, QuestionOptions, FederationOptions, TaskOptions, DefenseOptions, Strict):
    """One evaluation, the options of `ppbench evaluate` and `ppbench.evaluate`; names are those of `ppbench list`.

    Most options are declared in `run.options`, with their help. What the command line does not offer under a name:

    Attributes:
        model_options: of the network; in them, too, `configure` puts the folder of downloads in place of "{data}".
        settings: parameters of the defense ("theta") and of attacks ("dlg.budget").
        victims_from: examples of each client to pass over before victims are drawn (`adversary.victims`); None: all
            evaluations of a task have the same victims.
        backend: how clients compute, one after another or mapped.
        salt: a secret in hex that takes part in all draws, so that nobody else can repeat them; where `isolate` is on
            and none is given, the folder of results has one.
        suite, suite_digest: the suite with its version, and the digest of what its cells share.
    """

    defense: DefenseName
    model_options: ModelOptions = Field(default_factory=dict)
    settings: dict[str, Scalar] = Field(default_factory=dict)
    victims_from: int | None = Field(default=None, ge=0, le=LARGEST_COUNT)
    backend: Literal["auto", "loop", "vmap"] = "auto"
    salt: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    suite: str = "evaluate/1"
    suite_digest: str = ""

    def victims_at(self, batch: int) -> int:
        """Return how many victim images a cell asks about in batches of `batch`, before these are filled up."""
        return max(self.victims, self.batches * batch)


def recorded_options(*parts: BaseModel) -> dict[str, Any]:
    """Return the options of an evaluation that parts of a record hold under the same names."""
    return {name: value for part in parts for name, value in part if name in EvaluateConfig.model_fields}


SEARCHES = ("dlg", "idlg", "adaptive_server", "fedavg_inversion")
QUICK_BUDGETS: dict[str, Scalar] = {
    "adaptive_spn.inversion_budget": 100,
    "adaptive_spn.joint_budget": 600,
    "adaptive_server.budget": 600,
    "closed_form.largest_batch": 4,
}
"""Smaller budgets of `--attack quick`. Those of `adaptive_spn` give batches of 8 digits of three seeds the levels of
whole ones (400 and 2500); that of `adaptive_server` (1800 otherwise) left the verdicts on SPN at seed 0 as they were.
"""
TEXT_BUDGETS: dict[str, Scalar] = {
    **{f"{attack}.inversion_budget": 30 for attack in ("adaptive_spn", "feature_inversion")},
    **{f"{attack}.joint_budget": 60 for attack in ("adaptive_spn", "feature_inversion")},
    "adaptive_server.budget": 60,  # at 40 it has 66 % of the tokens under dp at 0.01, at 60 97 %
    **{f"{attack}.budget": 40 for attack in ("adaptive_dp", "adaptive_ppdl", "ig", "ig_masked")},
}
"""The same for texts, with which an evaluation ends in two minutes; not behind adapters of low rank, whose rows tell
nothing before they have learned: there searches read 12 to 18 % of a letter with these, 82 % (rank 4) and 100 % (rank
16) with their own.
"""
PRESETS: dict[str, dict[str, Any]] = {
    # One start per victim, no tuning, no cells that cannot show anything: all has to end within 60 s on two cores.
    "quick": {"attacks": ("quick",), "settings": {f"{attack}.restarts": 0 for attack in SEARCHES}, "tuning": 0},
    # The whole arsenal: half of the training part public, as in the MP-DP paper, for generators and reference runs.
    "portfolio": {
        "attacks": ("all",),
        "public": 0.5,
        "references": 16,
        "budget": 1800,
        "stages": ("init", "iterate", "final", "audit"),
    },
    # The SPN paper's Table 2, with one of its data sets; a defense of another paper says in its `setting` what that one
    # prints. The attack is the paper's, which finds labels with the images.
    "paper": {
        "dataset": "cifar10",
        "model": "dlnet",
        "clients": 10,
        "partition": "iid",
        "schedule": "round_robin",
        "rounds": 300,
        "local_epochs": 1,
        "batch_size": 32,
        "optimizer": "adam",
        "lr": 1e-3,
        "beta2": 0.999,
        "decay_at": (),
        "grid": "paper",
        "attacks": ("dlg", "tracing"),
        "attack_batch": (1, 4, 8),
        "stages": ("init",),
        "tuning": 0,
        "victims": 1000,
        "candidates": 1000,
    },
}


def _quick_budgets(options: Mapping[str, Any], kind: Modality | None, model: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the budgets of `--attack quick`, without those that `--budget` says. model: options of the network."""
    short = kind is TEXT and not model.get("lora")
    own, budgets = options.get("budget") is not None, QUICK_BUDGETS | (TEXT_BUDGETS if short else {})
    return {name: value for name, value in budgets.items() if not (own and name.endswith(".budget"))}


def _usual_fields(kind: Modality, options: Mapping[str, Any], base: Mapping[str, Any], loss: object) -> dict[str, Any]:
    """Return the network and the loss that suit data of a kind, where none is named; loss: the one that is."""
    fields: dict[str, Any] = {"loss": kind.loss} if kind.loss and "loss" not in options else {}
    network = kind.network(str(loss))
    if network and "model" not in options and base.get("model") != network:
        fields |= {"model": network, "model_options": options.get("model_options") or {}}
    return fields


def configure(preset: str = "quick", **options: Any) -> EvaluateConfig:
    """Return the configuration of `preset` with `options` laid over it; UsageError for what cannot be used."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    base = {**PRESETS[preset], **_setting(preset, options)}
    attacks = options.get("attacks", base.get("attacks"))
    dataset = options.get("dataset", base.get("dataset"))
    kind = dataset_modality(_placed(dataset)) if isinstance(dataset, str) else None
    quick = isinstance(attacks, tuple | list) and "quick" in attacks
    model = {**base.get("model_options", {}), **(options.get("model_options") or {})}
    budgets = _quick_budgets(options, kind, model) if quick else {}
    settings = {**budgets, **base.get("settings", {}), **(options.get("settings") or {})}
    for name in ("attacks", "attack_batch", "stages", "threats", "grid"):
        if isinstance(options.get(name), tuple | list):
            options[name] = tuple(dict.fromkeys(options[name]))  # twice the same is once
    _check_finite({**settings, "grid": options.get("grid")})
    fields = {**base, **options, "model_options": model, "settings": settings}
    _check_text(fields)
    fields["model_options"] = {name: _placed(value) for name, value in model.items()}
    if "dataset" in fields:
        fields["dataset"] = _placed(fields["dataset"])
    if kind is not None and ":" not in str(base.get("model")):  # an app brings its own
        fields |= _usual_fields(kind, options, base, fields.get("loss"))
    try:
        config = EvaluateConfig(**fields)
    except ValidationError as error:
        raise UsageError(_refused(error)) from error
    if not config.attacks:
        raise UsageError("No attack was named; give names, as --attack dlg,tracing, or all.")
    return config


def _placed(value: Any) -> Any:
    """Return text with the folder of downloads in place of "{data}", anything else as it is."""
    return value.replace("{data}", str(default_root())) if isinstance(value, str) else value


def telling_fault(error: ValidationError) -> ErrorDetails:
    """Return the first fault, of a choice between words and numbers that of the numbers if numbers were given."""
    listed = (e for e in error.errors() if any("tuple" in str(part) for part in e["loc"]) and e["type"] != "tuple_type")
    return next(listed, error.errors()[0])


def _refused(error: ValidationError) -> str:
    """Return what is wrong with an option."""
    first = telling_fault(error)
    where = ".".join(str(part) for part in first["loc"][:1])
    if first["type"] == "extra_forbidden":
        return str(unknown("option", where, EvaluateConfig.model_fields))
    return f"Option {where}={shown(first['input'])} cannot be used: {first['msg'].lower()}."


def _check_text(value: Any, name: str = "") -> None:
    """Refuse text that no file can hold (UsageError): zero bytes, and bytes that are no UTF-8."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            _check_text(key, name)
            _check_text(one, name or str(key))
    elif isinstance(value, tuple | list):
        for one in value:
            _check_text(one, name)
    elif isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
        raise UsageError(f"Option {name or 'of unknown name'}={shown(value)} cannot be used: it is no text in UTF-8.")


def _check_finite(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        for one in value if isinstance(value, tuple | list) else [value]:
            if isinstance(one, float) and not math.isfinite(one):
                raise UsageError(f"Option {name}={shown(one)} cannot be used: it must be a finite number.")


def setting_faults(plugin: type[Defense], name: str) -> Iterator[str]:
    """Yield the options of a defense's `setting` that no evaluation has."""
    for preset, fields in plugin.setting.items():
        try:
            EvaluateConfig(**{"defense": name, **fields})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in (preset, *first["loc"]))
            yield f"declares setting {where} = {shown(first['input'], 60)}; {one_line(first['msg']).lower()}"


def _setting(preset: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the federation that the defense's paper needs, without the options of another network."""
    name = options.get("defense")
    if isinstance(name, str):
        admit(name)
    factory = load_plugin("defenses", name) if isinstance(name, str) else Defense
    setting = dict(getattr(factory, "setting", {}).get("quick" if preset == "portfolio" else preset, {}))
    if options.get("model", setting.get("model")) != setting.get("model"):
        setting.pop("model_options", None)
    return setting


# -- Parse command-line words: lists, numbers, assignments --

_NUMBER = re.compile(r"[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE)


def names(text: str | None, option: str = "") -> tuple[str, ...] | None:
    """Return "a, b" as ("a", "b"); None for None. Raises UsageError, with the `option`, where nothing is named."""
    if text is None:
        return None
    parsed = tuple(word.strip() for word in text.split(",") if word.strip())
    if not parsed:
        raise UsageError(
            f"Option {option} {shown(text)} names nothing; give names with commas between, or leave it out."
        )
    return parsed


def sizes(text: str | None) -> tuple[int, ...] | None:
    """Return "1,4" as (1, 4). Raises UsageError: a word is no whole number, or there is none."""
    return (
        None if text is None else tuple(map(int, _listed(text, "--attack-batch", int, "give whole numbers, as 1,8.")))
    )


def numbers(text: str | None, option: str = "--grid") -> str | tuple[float, ...] | None:
    """Return "0.1,1" as (0.1, 1.0), "quick" and "paper" as they are. Raises UsageError: neither grid nor numbers."""
    if text is None or text in ("quick", "paper"):
        return text
    return tuple(map(float, _listed(text, option, int | float, "give quick, paper or numbers, as 0.01,0.1.")))


def _listed(text: str, option: str, kind: Any, advice: str) -> list[Any]:
    """Return the numbers of a kind between commas (UsageError: another word, or none)."""
    words = names(text, option) or ()
    values = [value for value in map(scalar, words) if isinstance(value, kind) and not isinstance(value, bool)]
    if len(values) < len(words):
        raise UsageError(f"Option {option} {shown(text)} cannot be used; {advice}")
    return values


def scalar(text: str) -> Scalar:
    """Return a word as bool, int, float or, failing these, as it is; digits are those of ASCII, without underscores."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,300}", text, re.ASCII):  # more digits than a float holds are no number of ours
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def assignments(words: Sequence[str]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Return settings, and options of the model, from name=value words; UsageError for a word of another form."""
    settings: dict[str, Scalar] = {}
    model: dict[str, Scalar] = {}
    for word in words:
        name, equals, value = word.partition("=")
        key = name.strip()
        if not equals or not key.removeprefix("model."):
            raise UsageError(f"Option --set {shown(word)} cannot be used; give name=value, as theta=0.05.")
        target = model if key.startswith("model.") else settings
        target[key.removeprefix("model.")] = scalar(value.strip())
    return settings, model


def resolve_device(text: str) -> str:
    """Return "cuda" or "cpu" for "auto", by what torch finds; other words are returned as they are."""
    if text != "auto":
        return text
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
