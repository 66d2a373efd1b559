"""Bad inputs by the thousand: words for the command line, and files, that must be refused in one sentence.

A case is a class, words, and what lies in its folder. Everything is a function of the seed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import get_type_hints

from bad_files import BODY, DATA, HEAD, IDX, RESULTS, SUITES, WEIGHTS
from bad_words import MODEL, PAIRS, PLACES

from ppbench.base.registry import load_all
from ppbench.commands.running import OPTIONS
from ppbench.federation.bounds import bounds_of

REFUSED = frozenset({2})
GOOD = {
    "defense": "dp",
    "grid": "0.1",
    "clients": "2",
    "train": "90",
    "rounds": "1",
    "victims": "2",
    "attack": "dlg",
    "attack-batch": "1",
    "stage": "init",
    "tuning": "0",
    "out": "out",
    "workers": "1",
}
Make = Callable[[Path, random.Random], None]


@dataclass(frozen=True)
class Case:
    """One bad input. kind: its class; make: writes its files into the folder it is run in; codes: that are right."""

    kind: str
    words: tuple[str, ...]
    make: Make | None = None
    codes: frozenset[int] = REFUSED
    env: dict[str, str] = field(default_factory=dict)


def evaluated(kind: str, *more: str, make: Make | None = None, env: dict[str, str] | None = None, **changed) -> Case:
    """Return an evaluation that is right but for what is `changed` and `more`."""
    options = {**GOOD, **{name.replace("_", "-"): value for name, value in changed.items()}}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return Case(kind, ("evaluate", *words, *more), make, env=env or {})


def word(draw: random.Random) -> str:
    """Return a word that names nothing: of letters, odd characters, paths, or very long."""
    letters = "".join(draw.choice("abcxyz019_-.") for _ in range(draw.randint(3, 12)))
    odd = draw.choice(
        ["\x1b[31m", "\x00"[:0] + "\x07", "\n", "\t", "\u202e", "\udcff", "é", "漢", "%s", "{0}", "'", '"', "\\"]
    )
    return draw.choice(
        [
            f"x{letters}",
            f"{letters}{odd}x",
            f"{odd}{letters}",
            f"../{letters}",
            f"/etc/{letters}",
            f"x{letters}" * 900,
            f"{letters} {letters}",
            f"~nobody/{letters}",
            f"x,{letters},"[1:] or "x",
            "None",
            "null",
            "-",
            "x" * 19_000,
            f"{letters}=1",
            f"{letters}:{letters}",
            "\U0001d7d9",
            "$HOME",
            "`id`",
            "a" * 300 + "/b",
        ]
    )


LEAST_ONE = ("train", "clients", "rounds", "batch_size", "local_epochs", "probe_rounds", "victims", "budget")
WHOLE = [name for name, (kind, _) in OPTIONS.items() if kind is int]
NO_NUMBER = [
    "abc",
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "1e3x",
    "1,5",
    "½",
    "--5",
    "1" * 5000,
    "1_0_",
    "\u0663a",
    "true",
    "None",
]


def whole(draw: random.Random) -> Case:
    name = draw.choice([*WHOLE, "workers"])
    far = [-1, -(2**63), 2**63, 2**64 + 1, 10**40, -(10**18)]
    if name != "seed":
        far += [10**9 + draw.randrange(10**9), 300_000_000, 999_999_999]
    if name in LEAST_ONE or name == "workers":
        far += [0]
    value = draw.choice([*map(str, far), *NO_NUMBER, f"{draw.random():.3f}"])
    return evaluated("whole numbers", **{name: value})


def real(draw: random.Random) -> Case:
    name = draw.choice(["public", "lr"])
    value = draw.choice([*NO_NUMBER[:9], "-1", "-0.5", "1e39" if name == "lr" else "1", "1e400", f"-{draw.random()}"])
    return evaluated("numbers", **{name: value})


def named(draw: random.Random) -> Case:
    names = ["defense", "preset", "model", "attack", "probe", "stage", "threat", "partition", "schedule", "loss"]
    name = draw.choice([*names, "upload", "optimizer", "device", "weights", "dataset"])
    return evaluated("names", **{name: draw.choice(["", "  ", ",", " , ,"]) if draw.random() < 0.1 else word(draw)})


NO_WORD = [one for one in NO_NUMBER if one not in ("1,5", "1" * 5000)]


def listed(draw: random.Random) -> Case:
    name = draw.choice(["grid", "attack_batch"])
    parts = [draw.choice([*NO_WORD, "\u0661", "-1", "1e39", "0,x"]) for _ in range(draw.randint(1, 3))]
    text = ",".join(part if part.strip(" ,") else "x" for part in parts)
    many = ",".join(["1"] * 1001 if name == "none" else map(str, range(1, 1002)))
    return evaluated("lists", **{name: draw.choice([text, text, text, many, ",", "nan", "-1"])})


@cache
def numeric(group: str) -> list[tuple[str, str, type, float, float]]:
    """Return (plugin, field, type, least, most) of every number that a plugin of the group takes."""
    values = []
    for name, factory in load_all(group).items():
        hints = get_type_hints(factory)
        for one in fields(factory):
            if hints[one.name] in (int, float):
                values.append((name, one.name, hints[one.name], *bounds_of(factory)[one.name].ends))
    return values


def parameter(draw: random.Random) -> Case:
    group = draw.choice(["defenses", "attacks"])
    plugin, name, kind, least, most = draw.choice(numeric(group))
    beyond = [
        str(most * 2 + 1),
        str(most + 1) if kind is int else repr(math.nextafter(most, math.inf)),
        "1e308",
        "nan",
        "inf",
        "abc",
        "",
        "1" * 400,
        "-1",
        "-1e-9",
        "1e400",
        "\u0663",
    ]
    if kind is int:
        beyond += [str(int(least) - 1), "1.5", str(10**30)]
    value = draw.choice(beyond)
    if value in ("-1", "-1e-9") and least < 0:
        value = "nan"
    own = name if group == "defenses" else f"{plugin}.{name}"
    defense = plugin if group == "defenses" else "dp"
    grid = {"grid": "quick"} if group == "defenses" else {}
    return evaluated("parameters", "--set", f"{own}={value}", defense=defense, attack="label_recovery", **grid)


def assigned(draw: random.Random) -> Case:
    text = word(draw)
    form = draw.choice(
        [
            "{}",
            "={}",
            "sigma",
            "sigma={}",
            "{}=1",
            "dlg.{}=1",
            "{}.budget=3",
            "model.{}=1",
            "model.=1",
            "=",
            "=1",
            ".",
            "dlg.=1",
            ".a=2",
            "law={}",
        ]
    )
    text = form.format(text)
    return evaluated("assignments", "--set", text if text.strip() and not text.startswith("sigma=1") else "=")


def model(draw: random.Random) -> Case:
    name = draw.choice([*MODEL])
    text = (
        draw.choice(MODEL[name])
        if draw.random() < 0.7
        else f"{draw.choice(['q', 'opt', 'weight_', 'n'])}{draw.randrange(999)}={word(draw)}"
    )
    more = [part for one in text.split(" ")[:3] for part in ("--set", f"model.{one}") if one]
    return evaluated("model options", *more, model=name)


def place(draw: random.Random) -> Case:
    more = draw.choice(["", "", "q", "-x", "\t", "/..", "%", "?"])
    return evaluated("data sets' names", dataset=draw.choice(PLACES) + more)


def contradicted(draw: random.Random) -> Case:
    return evaluated("contradictions", "--seed", str(draw.randrange(4)), **draw.choice(PAIRS))


def data_file(draw: random.Random) -> Case:
    name = draw.choice([*DATA])
    dataset, make = DATA[name]
    return evaluated("data files", make=make, dataset=dataset, model="mlp")


def idx_file(draw: random.Random) -> Case:
    return evaluated(
        "idx files", make=IDX, dataset=draw.choice(["mnist", "fashion_mnist"]), env={"PPBENCH_DATA": "data"}
    )


def weights_file(draw: random.Random) -> Case:
    name = draw.choice([*WEIGHTS])
    if draw.random() < 0.2:
        return evaluated("weights", "--set", f"model.weights={name}", make=WEIGHTS[name], model="frozen_backbone")
    return evaluated("weights", make=WEIGHTS[name], weights=name)


def suite(draw: random.Random) -> Case:
    make = draw.choice(SUITES)
    dry = ("--dry-run",) if draw.random() < 0.5 else ()
    return Case("suites", ("sweep", "s.toml", "--engine", "inline", "--out", "out", *dry), make)


def swept(draw: random.Random) -> Case:
    text = word(draw)
    more = draw.choice(
        [
            ("--only", text),
            ("--only", "defense="),
            ("--only", f"=x{text}"),
            ("--only", f"defense=x{text}"),
            ("--only", f"seed=x{text}"),
            ("--only", f"q{draw.randrange(999)}=3"),
            ("--only", "control=abc"),
            ("--only", ""),
            ("--add", f"x{text}"),
            ("--add", ""),
            ("--preset", text),
            ("--engine", text),
            ("--workers", draw.choice(["0", "-1", "999999999", "x"])),
            ("--address", text),
            ("--device", text),
            ("--dataset", f"parquet:{text}"),
            ("--dataset", ""),
            ("--weights", f"x{text}"),
            ("--out", ""),
            (f"--x{draw.randrange(999)}", "1"),
        ]
    )
    return Case("sweep's options", ("sweep", "s.toml", "--out", "out", *more), good_suite)


def good_suite(folder: Path, draw: random.Random) -> None:
    text = 'attacks = ["dlg"]\nvictims = 2\nattack_batch = [1]\nstages = ["init"]\ntuning = 0\n'
    task = "[task]\nclients = 2\ntrain = 90\n[federation]\nrounds = 1\n"
    (folder / "s.toml").write_text(f"{HEAD}{task}[questions]\n{text}{BODY}")


def results(draw: random.Random) -> Case:
    name = draw.choice([*RESULTS])
    one = draw.choice(
        [
            ("verify", "r"),
            ("leaderboard", "r"),
            ("pack", "r"),
            ("pack", "r", "new.zip"),
            ("compare", "r", "r"),
            ("compare", "none", "r"),
            ("claims", "r"),
            ("claims", "r", "--to", "none/x.md"),
            ("baseline", "accept", "r", "base", "--reason", "x"),
            ("baseline", "accept", "r", "base", "--reason", " "),
            ("leaderboard", "r", "--out", "new"),
            ("compare", "r", "r", "--junit", "none/x"),
            ("compare", "r", "r", "--github", "--json"),
            ("claims", "r", "--figures", "r"),
            ("verify", ""),
            ("pack", "r", ""),
            ("compare", "r", "r", "--markdown", ""),
            ("leaderboard", "r" * 300),
            ("verify", "r/" * 3000),
        ]
    )
    return Case("folders of results", one, RESULTS[name])


def parsed(draw: random.Random) -> Case:
    text = word(draw).lstrip("-") or "x"
    one = draw.choice(
        [
            (f"x{text}",),
            ("list", f"x{text}"),
            ("evaluate",),
            ("evaluate", "--defense"),
            ("sweep",),
            ("verify",),
            ("compare", "a"),
            ("evaluate", f"--x{draw.randrange(999)}"),
            ("baseline", f"x{text}"),
            ("baseline", "accept", "a", "b"),
            ("list", "all", f"x{text}"),
            ("evaluate", "--defense", "dp", f"x{text}"),
            ("--nope",),
            ("",),
            ("list", ""),
        ]
    )
    return Case("the parser", one)


MAKERS = (
    whole,
    real,
    named,
    listed,
    parameter,
    assigned,
    model,
    place,
    contradicted,
    data_file,
    weights_file,
    suite,
    swept,
    results,
    parsed,
)


def cases(seed: int, count: int) -> list[Case]:
    """Return `count` bad inputs, the classes in turn; a few in a hundred are files in idx, which need torchvision."""
    draw = random.Random(seed)
    made = [MAKERS[place % len(MAKERS)](draw) for place in range(count)]
    for place in range(0, count, 60):
        made[place] = idx_file(draw)
    return made
