"""The fence: whichever public method of a third-party plugin raises, the error is one sentence that says where."""

import dataclasses
import re
import sys
import warnings
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from shutil import copytree
from types import FunctionType
from unittest.mock import patch

import pytest
import thief
import torch
from broken_plugins import Broken
from daily import all_but_nightly
from test_apart import process_for_many_calls
from test_gate import TINY, site

from ppbench import commands, federate, invert, load_attack, load_defense, probe
from ppbench.adversary.attack import Attack
from ppbench.base import registry
from ppbench.base.errors import PluginError, UsageError
from ppbench.base.fence import guard
from ppbench.federation.contract import Defense
from ppbench.metrics import modality
from ppbench.nets.classifier import Classifier
from ppbench.questions import base as questions
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import make_attack
from ppbench.run.suite import load_suite
from ppbench.run.sweep import plan_sweep
from ppbench.task.dataset import Dataset

CONTRACTS = {
    **{"defenses": Defense, "attacks": Attack, "questions": questions.Question, "modalities": modality.Modality},
    **{"models": Classifier, "datasets": Dataset},
}
HEAD = """
from dataclasses import dataclass, fields
from typing import ClassVar, Literal
import torch
from ppbench.api import *
from ppbench.metrics.modality import Image
from ppbench.questions.labels import LabelScore, Labels
from ppbench.task.user_data import open_dataset

@dataclass(frozen=True)
class Guessing(Attack):
    name: ClassVar[str] = "{name}"
    kind: ClassVar[str] = "label"
    def run(self, view, challenges, generator):
        return [Guess(y=torch.zeros(len(c.unit) * c.batch, dtype=torch.int64)) for c in challenges]
"""
SOURCES = {
    "defenses": """
@dataclass(frozen=True)
class My(Defense):
    name: ClassVar[str] = "{name}"
""",
    "attacks": """
@dataclass(frozen=True)
class My(Guessing):
    name: ClassVar[str] = "{name}"
""",
    "questions": """
class MyScore(LabelScore):
    kind: Literal["{name}"] = "{name}"
class My(Labels):
    name: ClassVar[str] = "{name}"
    score = MyScore
Guessing.kind = "{name}"
""",
    "modalities": """
class My(Image):
    name: ClassVar[str] = "{name}"
def build(argument, *, seed, root):
    own = open_dataset("digits", seed=seed, root=root)
    named = {"name": "{name}", "kind": "{name}"}
    return Dataset(**{field.name: getattr(own, field.name) for field in fields(own)} | named)
""",
    "models": """
class My(Classifier):
    pass
def build(shape, classes):
    return My(torch.nn.Sequential(torch.nn.Flatten()), torch.nn.Linear(64, classes))
""",
    "datasets": """
@dataclass(frozen=True, eq=False)
class My(Dataset):
    pass
def build(argument, *, seed, root):
    own = open_dataset("digits", seed=seed, root=root)
    return My(**{field.name: getattr(own, field.name) for field in fields(own)} | {"name": "{name}"})
""",
}
SPIED = """
REACHED = set()
def spied(name, own):
    def call(self, *arguments, **keywords):
        REACHED.add(name)
        return own(self, *arguments, **keywords)
    return call
"""
PLANTED = """
def planted(self, *arguments, **keywords):
    1 / 0
"""
ACTING = 'My.threats = ("server-active/1",)\n'  # only attacks that act have weights of their own
numbers = count(900)  # of packages: names are never used again, for processes remember what they loaded


def methods_of(group):
    """Return the public methods and properties of a contract, with whether each is a property."""
    kinds = (FunctionType, property, cached_property)
    own = {name: member for name, member in vars(CONTRACTS[group]).items() if isinstance(member, kinds)}
    return {name: not isinstance(member, FunctionType) for name, member in own.items() if not name.startswith("_")}


def package(group, more):
    """Return a package with a sound plugin of a group, changed by the source `more`."""
    made = "build" if group in ("models", "datasets") else "My"
    entries = f"[ppbench.{group}]\n{{name}} = {{module}}:{made}\n"
    entries += "[ppbench.attacks]\n{name} = {module}:Guessing\n" if group == "questions" else ""
    entries += "[ppbench.datasets]\n{name} = {module}:build\n" if group == "modalities" else ""  # data that name it
    return Broken(next(numbers), "fence", group, HEAD + SOURCES[group] + more, entries)


def forget():
    for cached in (questions.question_of, questions.questions, modality._installed):
        cached.cache_clear()


@contextmanager
def installed(one, folder):
    """Let this process find a package; nothing that it loaded stays behind."""
    folder.mkdir()
    forget()
    with site(folder, [one]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    forget()


def sentences(one, out):
    """Evaluate with the plugin of a package; return what was raised, or why cells failed."""
    own = {"defenses": "defense", "models": "model", "datasets": "dataset", "modalities": "dataset"}.get(one.group)
    attack = one.name if one.group in ("attacks", "questions") else "label_recovery"
    options = {**TINY, "defense": "none", "attacks": (attack,)} | ({} if own is None else {own: one.name})
    if one.group == "modalities":
        options |= {"attacks": ("dlg",), "budget": 2, "tuning": 1}
    if ACTING in one.source:
        options["threats"] = ("server-active/1",)
    try:
        result = evaluate(configure("quick", **options), out=out, workers=1)
    except UsageError as error:
        return [str(error)]
    return [record.reason for record in result.records if record.status == "failed"]


def reached_methods(group, folder):
    """Return the methods of a sound plugin that an evaluation into folder/out calls."""
    lines = [f"My.{name} = {'property' if prop else ''}(spied({name!r}, My.{name}{'.fget' if prop else ''}))\n"
             for name, prop in methods_of(group).items() if name != "crafted"]  # fmt: skip
    one = package(group, SPIED + "".join(lines))
    with installed(one, folder / "spied"):
        assert sentences(one, folder / "out") == []
        return {*sys.modules[one.module].REACHED, *({"crafted"} if group == "attacks" else ())}


def direct_sentence(one, name):
    """Call a method of the plugin of a package as a command does, behind a door; return the sentence."""
    target = registry.load_plugin(one.group, one.name)
    with pytest.raises(PluginError) as failure, guard():
        made = {"models": lambda: target((1, 8, 8), 10), "datasets": lambda: target("", seed=0, root=None)}
        getattr(made.get(one.group, target)(), name)()
    return str(failure.value)


@pytest.mark.parametrize("group", all_but_nightly(CONTRACTS, ["defenses", "questions", "attacks"]))
def test_a_method_that_raises_is_named_with_plugin_package_file_and_line(group, tmp_path):
    reached, wrong = reached_methods(group, tmp_path), {}
    for name, prop in methods_of(group).items():
        planted = f"{PLANTED}My.{name} = {'property(planted)' if prop else 'planted'}\n"
        one = package(group, planted + (ACTING if name == "crafted" else ""))
        line = 1 + one.source[: one.source.index("1 / 0")].count("\n")
        right = (
            f"The {registry.GROUP_NOUNS[group]} '{one.name}' of package '{one.module}' ({one.module}:\\w+) raised "
            f"ZeroDivisionError: division by zero ({one.module}.py, line {line})."
        )
        with installed(one, tmp_path / name):
            if name in reached:
                out = tmp_path / name / "out"
                if group in ("defenses", "attacks"):  # the controls' cells are there
                    copytree(tmp_path / "out", out)
                texts = sentences(one, out)
            else:
                texts = [direct_sentence(one, name)]
        pattern = re.escape(right).replace(re.escape("\\w+"), r"\w+")
        if not texts or not all(re.search(pattern + "$", text) for text in texts):
            wrong[name] = texts
    assert not wrong, "\n".join(f"{name}: {texts}" for name, texts in wrong.items())


def federated(name):
    """Return a federation of two clients under the defense `name`."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return federate(load_defense(name), model, [(torch.rand(2, 1, 8, 8), torch.tensor([0, 1]))] * 2)


def inverted(name):
    """Attack a gradient of ones with the attack `name`."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    gradient = {key: torch.ones_like(value) for key, value in model.named_parameters()}
    return invert(model, gradient, (1, 8, 8), attack=name)


def commanded(name):
    """Run a command that calls the attack `name`; raise what it prints, after its exit code."""
    lines = []
    with (
        patch.object(commands, "_say", lines.append),
        patch.object(commands, "app", lambda **_: registry.load_plugin("attacks", name)().suits(None)),
        patch.object(sys, "argv", ["ppbench", "list"]),
        pytest.raises(SystemExit) as end,
    ):
        commands.main(checked=True)
    raise PluginError(f"{end.value.code} {lines[0]}")


DOORS = {
    "load_defense": ("defenses", "check_bounds", load_defense),
    "load_attack": ("attacks", "check", load_attack),
    "federate": ("defenses", "init_server", federated),
    "probe": ("defenses", "upload", lambda name: probe(federated(name), [(torch.rand(1, 1, 8, 8), torch.tensor([0]))])),
    "invert": ("attacks", "suits", inverted),
    "command": ("attacks", "suits", commanded),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_door_has_the_fence(door, tmp_path):
    group, method, enter = DOORS[door]
    kind = 'My.kind = "reconstruction"\n' if group == "attacks" else ""
    one = package(group, f"{PLANTED}{kind}My.{method} = planted\n")
    raised = r"' .* raised ZeroDivisionError: division by zero \("
    right = rf"^(2 ppbench: )?The {registry.GROUP_NOUNS[group]} '{one.name}{raised}{one.module}.py, line \d+\)\.$"
    with installed(one, tmp_path / "site"), pytest.raises(PluginError, match=right):
        enter(one.name)


def test_of_two_plugins_of_a_package_the_one_that_ran_is_named(tmp_path):
    """A defense that inherits from another of its package, and one that was named while the other raised."""
    more = f"""{PLANTED}My.upload = planted
class Other(My):
    name: ClassVar[str] = "other_fenced"
"""
    one = package("defenses", more)
    both = dataclasses.replace(one, entries=one.entries + "other_fenced = {module}:Other\n")
    with installed(both, tmp_path / "site"):
        for name in (one.name, "other_fenced"):
            other = "other_fenced" if name == one.name else one.name
            with pytest.raises(PluginError, match=f"^The defense '{name}' "), guard("defenses", other):
                registry.load_plugin("defenses", name)().upload(None, None, None)


SUITE = """\
schema = "ppbench.run.suite/1"
id = "fenced"
version = 1
title = "Fenced"
[task]
dataset = "digits"
model = "mlp"
clients = 2
train = 40
[questions]
attacks = ["label_recovery"]
attack_batch = [1]
victims = 2
tuning = 0
stages = ["init"]
[[defense]]
id = "NAME"
"""


def test_a_suite_says_at_which_place_a_plugin_raised(tmp_path):
    one = package("defenses", f"{PLANTED}My.check_data = planted\n")
    (tmp_path / "fenced.toml").write_text(SUITE.replace("NAME", one.name))
    with installed(one, tmp_path / "site"):
        suite = load_suite(tmp_path / "fenced.toml")
        with pytest.raises(UsageError, match=rf"fenced\.toml.*: The defense '{one.name}' .* raised ZeroDivisionError"):
            plan_sweep(suite, tmp_path / "out")


def test_a_question_that_raises_fails_its_own_cells_alone(tmp_path):
    one = package("questions", f"{PLANTED}My.of_probe = planted\n")
    with installed(one, tmp_path / "site"):
        options = {**TINY, "defense": "none", "attacks": (one.name, "label_recovery")}
        result = evaluate(configure("quick", **options), out=tmp_path / "out", workers=1)
    ended = {(record.config.attack.id, record.status) for record in result.records}
    assert ended == {(one.name, "failed"), ("label_recovery", "complete")}


@pytest.mark.parametrize(("group", "error"), [("models", "ValueError"), ("datasets", "OSError")])
def test_a_function_that_raises_what_ours_raise_for_bad_input_is_named(group, error, tmp_path):
    one = package(group, f'def build(*arguments, **keywords):\n    raise {error}("no")\n')
    noun = registry.GROUP_NOUNS[group]
    with installed(one, tmp_path / "site"):
        (sentence,) = sentences(one, tmp_path / "out")
    assert re.match(
        rf"The {noun} '{one.name}' of package .* raised {error}: no \({one.module}\.py, line \d+\)", sentence
    )


@pytest.mark.nightly
def test_an_isolated_attack_that_raises_is_named_with_file_and_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PPBENCH_CACHE", str(tmp_path / "cache"))
    one = package("attacks", f"{PLANTED}My.check_held = planted\n")
    right = rf"'{one.name}' of package .* raised ZeroDivisionError: division by zero \({one.module}\.py, line \d+\)"
    with (
        installed(one, tmp_path / "site"),
        process_for_many_calls() as ask,
        thief.answered_by(ask),
        pytest.raises(PluginError, match=right),
    ):
        make_attack(one.name, isolate=True).check_held({0: torch.zeros(1, 1, 8, 8)})
