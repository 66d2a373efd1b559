"""Broken plugin packages, made on disk as pip leaves them: a module and its metadata, one fault each."""

# ruff: noqa: E501 - a fault a line, or next to it

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

IMPORTS = """
import os, sys
from dataclasses import dataclass, field
from typing import ClassVar
import torch
from ppbench import Attack, Challenge, Defense, Evidence, Guess, View
from ppbench.defenses.dp import DP
from ppbench.questions.base import Question
from ppbench.records.scores import ProbedScore
"""
DEFENSE = """
@dataclass(frozen=True)
class My(Defense):
    'A defense.'
    name: ClassVar[str] = "{name}"
"""
ATTACK = """
@dataclass(frozen=True)
class My(Attack):
    'An attack.'
    name: ClassVar[str] = "{name}"
    kind: ClassVar[str] = "label"
    def run(self, view, challenges, generator):
        return [Guess(y=torch.zeros(len(c.unit) * c.batch, dtype=torch.int64)) for c in challenges]
"""
BODIES = {"defenses": DEFENSE, "attacks": ATTACK}
# -- what comes up while a module is imported --------------------------------------------------------------------------
AT_IMPORT = [
    "raise ValueError('no')", "raise SystemExit(0)", "sys.exit()", "sys.exit(3)", "raise KeyboardInterrupt",
    "raise BaseException('base')", "raise RecursionError", "def f(): f()\nf()", "def (", "import no_such_module_xyz",
    "from ppbench import NoSuchThing", "print('noise'); os.chdir('/'); raise OSError('x')", "1/0", "x = \x00",
    "raise MemoryError", "raise GeneratorExit", "raise StopIteration", "raise type('Odd', (Exception,), {'__str__': lambda s: 1/0})()",
    "raise Exception('line\\nline\\x1b[2J' * 200)", "assert False", "exit()", "raise ImportError('\\ud800')",
    "class M(type):\n    def __getattribute__(c, n): raise RuntimeError(n)\nclass My(metaclass=M): pass",
    "def __getattr__(n): raise RuntimeError(n)", "def __getattr__(n): sys.exit(0)", "My = None", "My = 3", "My = Defense",
    "My = Attack", "class My: pass", "My = lambda: None", "import ppbench.run.evaluation; My = object()", "del Defense",
]  # fmt: skip
# -- what a class declares ---------------------------------------------------------------------------------------------
DECLARED = {
    "defenses": [
        "roles: ClassVar = ()", "roles: ClassVar = ('a', 'a')", "roles: ClassVar = 'ab'", "roles: ClassVar = (1,)",
        "roles: ClassVar = None", "version: ClassVar = 1", "version: ClassVar = ''", "version: ClassVar = None",
        "control: ClassVar = 'sigma'", "control: ClassVar = 3", "control: ClassVar = 'name'",
        "grids: ClassVar = ()", "grids: ClassVar = {'quick': 1}", "grids: ClassVar = {'quick': (float('nan'),)}",
        "grids: ClassVar = {'quick': ('a',)}", "grids: ClassVar = {'quick': (True,)}", "setting: ClassVar = 4",
        "setting: ClassVar = {'quick': {'loss': 'no'}}", "setting: ClassVar = {'quick': {'x': 1}}",
        "setting: ClassVar = {'quick': {'clients': -1}}", "masked: ClassVar = 'yes'", "mappable: ClassVar = None",
        "paper: ClassVar = 7", "epsilon_reason: ClassVar = 0",
        "name: ClassVar[str] = 'none'", "name: ClassVar[str] = ''", "name: ClassVar = 7", "name: ClassVar[str] = 'dp'",
        "name = property(lambda s: 1/0)", "name: ClassVar[str] = 'a b'", "x: list = field(default_factory=list)",
        "x: object = (1, 2)", "x: float = float('inf')", "x: torch.Tensor = torch.zeros(1)",
    ],
    "attacks": [
        "kind: ClassVar = 'nothing'", "kind: ClassVar = None", "kind: ClassVar = ''", "threats: ClassVar = ()",
        "threats: ClassVar = 'server/1'", "threats: ClassVar = ('nobody/1',)", "threats: ClassVar = None",
        "threats: ClassVar = ('server-active/1',)", "probes: ClassVar = ()", "probes: ClassVar = ('x',)",
        "audit: ClassVar = 'x'", "audit: ClassVar = True", "targets: ClassVar = frozenset()", "targets: ClassVar = 'dp'",
        "targets: ClassVar = 3", "adaptive: ClassVar = 'no'", "standard: ClassVar = 1", "quick: ClassVar = None",
        "contains: ClassVar = None", "reads_alone: ClassVar = 0", "replays: ClassVar = 'no'", "probe_rounds: ClassVar = 0", "probe_rounds: ClassVar = '2'",
        "reference: ClassVar = b'x'", "version: ClassVar = 2",
        "version: ClassVar = ''", "name: ClassVar[str] = 'all'", "name: ClassVar[str] = 'dlg'", "name: ClassVar = ('a',)",
        "name = property(lambda s: 1/0)", "x: dict = field(default_factory=dict)", "x: object = b'y'",
    ],
}  # fmt: skip
# -- what methods answer or raise --------------------------------------------------------------------------------------
RAISE = ["raise ValueError('no')", "sys.exit(0)", "raise SystemExit('bye')", "raise RecursionError", "1/0", "raise BaseException('x')",
         "assert False, 'a\\nb'"]  # fmt: skip
METHODS = {
    "defenses": {
        "check": [], "check_data": [], "guarantee": ["return (float('nan'), 0)", "return 'abc'", "return (1,)", "return (1, 2)"],
        "why_no_epsilon": ["return None", "return 3"], "noise": ["return 'loud'", "return 0.1"], "init_server": ["return None", "return 5"],
        "init_client": ["return object()", "return lambda: 0"], "setup": ["return None", "yield None"], "round": ["return None", "yield 3"],
        "broadcast": ["return None", "return (1, 2, 3)"], "aggregate": ["return None", "return 'server'"],
        "decode": ["return None", "return {}", "return {'w': 1}"], "upload": ["return None", "return object()", "return {'a': 'b'}"],
        "prepare": ["return 3", "return 'job'"], "compute": ["return None", "return 'x'"], "reply": ["return None", "return (1, 2, 3)"],
        "deliver": ["return None", "return 7"],
        "predict": ["return None", "return torch.zeros(3)", "return torch.full((len(a[2]), 10), float('nan'))", "return torch.zeros(len(a[2]), 3)"],
        "weights": ["return None", "return ['a']"], "batches": ["return None"], "draw": ["return 3"],
        "evidence": ["return None", "return [1]", "return 'x'"], "sums": ["return 'yes'", "return None"],
        "local_gradient": ["return None", "return {}", "return {n: v.to('meta') for n, v in a[2].items()}"], "__post_init__": [],
    },
    "attacks": {
        "check": [], "parameters": ["return None", "return {'x': [1]}", "return 3", "return {'x': float('nan')}"],
        "check_held": [], "needs_public": ["return 'no'"], "variants": ["return None", "return []", "return [3]"],
        "suits": ["return None", "return 'x'"], "knows": ["return 3"], "evidence": ["return None", "return [3]"],
        "run": ["return None", "return 3", "return []", "return [None for c in a[2]]", "return [Guess() for c in a[2]]",
                "return [Guess(y='abc') for c in a[2]]", "return [Guess(y=torch.zeros(3, 3)) for c in a[2]]",
                "return [Guess(y=torch.full((1,), float('nan'))) for c in a[2]]", "return (c for c in a[2])",
                "return [Guess(y=torch.zeros(1, dtype=torch.int64, device='meta')) for c in a[2]]",
                "return [Guess(y=torch.zeros(1, dtype=torch.int64), evaluations='x') for c in a[2]]",
                "return [Guess(y=torch.full((1,), 99)) for c in a[2]]"],
        "__post_init__": [],
    },
}  # fmt: skip
PROPERTIES = ("sums", "needs_public")
FUNCTIONS = {
    "datasets": [
        "def My(): pass", "def My(argument, *, seed, root): return None", "My = 3", "def My(argument, *, seed, root): sys.exit(0)",
        "def My(argument, *, seed, root): 1/0", "class My: pass", "def My(argument, *, seed, root): raise BaseException('x')",
    ],
    "models": [
        "def My(): pass", "def My(shape, classes): return None", "My = 'x'", "def My(shape, classes): sys.exit(0)",
        "def My(shape, classes): 1/0", "def My(shape, classes): return torch.nn.Linear(3, 3)",
        "from ppbench.nets.net import Classifier\ndef My(shape, classes):\n    return Classifier(torch.nn.Flatten(), torch.nn.Linear(64, classes + 1))",
        "from ppbench.nets.net import Classifier\ndef My(shape, classes):\n    return Classifier(torch.nn.Flatten(), torch.nn.Linear(9, classes))",
        "from ppbench.nets.net import Classifier\ndef My(shape, classes):\n    return Classifier(torch.nn.Flatten(), torch.nn.Linear(64, classes).double())",
        "from ppbench.nets.net import Classifier\ndef My(shape, classes):\n    return Classifier(torch.nn.Flatten(), torch.nn.ReLU())",
    ],
    "questions": [
        "class My(Question): pass", "class My(Question): name = '{name}'", "class My: name = '{name}'", "My = Question",
        "class My(Question):\n    name = '{name}'; title = 'x'; score = 3; distances = (); specs = ()",
        "from ppbench.questions.labels import Labels\nclass My(Labels): pass",
        "from ppbench.questions.labels import Labels\nclass My(Labels):\n    name = '{name}'\n    def __init__(self): sys.exit(0)",
        "from ppbench.questions.labels import Labels\nclass My(Labels):\n    name = '{name}'\n    follows = 'nothing'",
        "from ppbench.questions.labels import LabelScore, Labels\nclass S(LabelScore): pass\nclass My(Labels):\n    name = '{name}'\n    score = S",
    ],
}  # fmt: skip
METADATA = [
    "[ppbench.defenses]\n{name} =\n", "[ppbench.defenses]\n{name} = {module}\n", "[ppbench.defenses]\n{name} = :My\n",
    "[ppbench.defenses]\n{name}\n", "[ppbench.defenses]\n{name} = no_such_xyz:My\n", "[ppbench.defenses]\n{name} = {module}:No\n",
    "[ppbench.defenses]\na.b = {module}:My\n", "[ppbench.defenses]\na,b = {module}:My\n", "[ppbench.defenses]\n{name} = os:getcwd\n",
    "[ppbench.defenses]\n{name} = ppbench.defenses.dp:DP\n", "[ppbench.attacks]\nall = {module}:My\n", "[ppbench.attacks]\n{name} = {module}.x.y:My\n",
    "[ppbench.models]\n{name} = a b c\n", "\xff\xfe[ppbench.attacks]\n", "[ppbench.questions]\n{name} = {module}:My [extra]\n",
    "[ppbench.defenses]\nnone = {module}:My\n", "[ppbench.defenses]\n{name} = {module}:My\n{name} = {module}:Other\n",
]  # fmt: skip


@dataclass(frozen=True)
class Broken:
    """A package. told: whether its fault is in what its class says, so that `list` knows it, or shows in use alone."""

    index: int
    about: str
    group: str
    source: str
    entries: str = ""
    reported: bool = True

    @property
    def name(self) -> str:
        return f"bad_{self.index}"

    @property
    def module(self) -> str:
        return f"bad_package_{self.index}"

    def write(self, site: Path) -> None:
        """Write the package below `site`."""
        words = {"name": self.name, "module": self.module}
        text = self.source.replace("{name}", self.name)
        raw = b"\x80\xff\x00" if text == "BINARY" else text.encode("utf-8", "surrogatepass")
        if text != "MISSING":
            (site / f"{self.module}.py").write_bytes(raw)
        info = site / f"{self.module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {self.module}\nVersion: 1.0\n")
        entries = self.entries or "[ppbench.{group}]\n{name} = {module}:My\n".replace("{group}", self.group)
        for key, value in words.items():
            entries = entries.replace("{" + key + "}", value)
        (info / "entry_points.txt").write_bytes(entries.encode("latin-1"))
        names = f"{self.module}.py", *(f"{info.name}/{name}" for name in ("METADATA", "entry_points.txt", "RECORD"))
        (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))


def _method(group: str, name: str, body: str) -> str:
    text = BODIES[group] + ("    @property\n" if name in PROPERTIES else "")
    return IMPORTS + text + f"    def {name}(*a, **k):\n        {body}\n"


def everything() -> list[Broken]:
    """Return all broken packages, in an order that is the same every time."""
    results: list[tuple[str, str, str, str, bool]] = []
    for group in BODIES:
        results += [("import", group, IMPORTS + text, "", True) for text in (*AT_IMPORT, "")]
        results += [("import", group, text, "", True) for text in ("BINARY", "MISSING")]
        results += [
            ("declared", group, IMPORTS + BODIES[group] + f"    {line}\n", "", True) for line in DECLARED[group]
        ]
        bare = "".join(line + "\n" for line in BODIES[group].splitlines() if " name:" not in line)
        results += [("declared", group, IMPORTS + bare, "", True)]
        for name, answers in METHODS[group].items():
            results += [("raises", group, _method(group, name, body), "", False) for body in RAISE]
            results += [("answers", group, _method(group, name, body), "", False) for body in answers]
    inherited = IMPORTS + "@dataclass(frozen=True)\nclass My(DP):\n    'Mine.'\n"
    results += [("declared", "defenses", inherited, "", True)]
    for group, texts in FUNCTIONS.items():
        results += [("function", group, IMPORTS + text, "", False) for text in texts]
    results += [("metadata", "defenses", IMPORTS + DEFENSE, text, False) for text in METADATA]
    return [Broken(i, about, *rest) for i, (about, *rest) in enumerate(results)]


def chosen(count: int, seed: int = 0) -> list[Broken]:
    """Return so many of them, as many of each class as its share, drawn by `seed`."""
    every = everything()
    random.Random(seed).shuffle(every)
    classes = sorted({(one.about, one.group) for one in every})
    picked = [one for key in classes for one in [o for o in every if (o.about, o.group) == key][:1]]
    rest = [one for one in every if one not in picked]
    return sorted((picked + rest)[:count], key=lambda one: one.index)
