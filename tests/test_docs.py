"""The documents say what the program does: the reference is made from it, and what they tell people to type parses."""

import ast
import importlib
import re
import runpy
import shlex
import sys
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from ppbench.adversary.attack import Attack
from ppbench.base.registry import plugins
from ppbench.commands import app
from ppbench.federation.contract import Defense
from ppbench.federation.threats import THREATS
from ppbench.run.suite import SECTIONS, DefensePart, PresetPart, SuiteFile, load_suite
from ppbench.testing import check_defense

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "leaderboards" / "README.md", *sorted((ROOT / "benchmarks").glob("*.md"))]
PAGES = [page for page in [*PAGES, *sorted((ROOT / "examples").rglob("*.md"))] if page.is_file()]
WORKFLOWS = sorted((ROOT / "examples").rglob("*.yml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ |run: +|- run: +)?(?:\.venv/bin/)?ppbench (?P<words>.*)$")
INNER = re.compile(r"`(?:[A-Z_]+=\S+ )?ppbench (?P<words>[^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
FOLDERS = ("attacks", "benchmarks", "defenses", "docs", "examples", "leaderboards", "ppbench", "tests")
TOLD = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*|[\w-]+\.(?:md|sh))`")
REPOSITORY = (ROOT / "docs").is_dir() and (ROOT / "pyproject.toml").is_file()

pytestmark = pytest.mark.skipif(not REPOSITORY, reason="the documents are not here")


def blocks(language):
    """Return the fenced blocks in a language: page, the line on which each begins, and its text."""
    results = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        fences = [match for match in FENCE.finditer(text) if match[1] == language]
        results += [(page.name, text[: match.start()].count("\n") + 1, match[2]) for match in fences]
    return results


def commands():
    """Return every `ppbench ...` that people are told to type, with its place; capitals stand for what they put."""
    results = []
    for file in [page for page in PAGES if page.name != "cli.md"] + WORKFLOWS:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            place = f"{file.relative_to(ROOT)}:{number}"
            for part in re.split(r" (?:&&|\|\|) ", line.strip()):
                if match := COMMAND.match(part.strip()):
                    results.append((place, shlex.split(match["words"], comments=True)))
            results += [(place, shlex.split(match["words"])) for match in INNER.finditer(line)]
    return [(place, [word for word in words if word != "..."]) for place, words in results]


def test_the_reference_of_the_command_line_is_the_programs():
    made = runpy.run_path(str(ROOT / "docs" / "make_cli.py"), run_name="make_cli")["reference"]()
    assert (ROOT / "docs" / "cli.md").read_text() == made, "docs/cli.md is old; run: python docs/make_cli.py"


def test_the_page_of_benchmarks_is_that_of_their_results():
    benchmarks = runpy.run_path(str(ROOT / "docs" / "make_benchmarks.py"), run_name="make_benchmarks")
    assert benchmarks["main"](["--check"]) == 0


made = cache(typer.main.get_command)


def parsed(words):
    """Parse words as the program does, without running anything; return what is wrong, "" if they are right."""
    command = made(app)
    path, rest = "ppbench", words
    try:
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            command, path, rest = command.commands[rest[0]], f"{path} {rest[0]}", rest[1:]
        with command.make_context(path, list(rest)):
            return ""
    except typer.Exit:  # --help, --version, or a group without a command
        return ""
    except Exception as error:  # noqa: BLE001 - click's own errors, vendored or not, are told by their message
        tell = getattr(error, "format_message", error.__str__)
        return f"{path}: {type(error).__name__}: {tell()}"


BESIDE = {"deployed": ("flwr", "nvflare", "opacus")}
"""Suites of other frameworks' defenses, and what must be installed for them."""


def test_every_command_that_people_are_told_to_type_is_one():
    every = commands()
    assert len(every) > 40 and len({place.partition(":")[0] for place, _ in every}) >= 6
    wrong = []
    for place, words in every:
        problem, named = parsed(words), len(words) <= 2 and all(re.fullmatch(r"[a-z]+", word) for word in words)
        if problem and not (named and "MissingParameter" in problem):  # `ppbench compare` is named, not typed
            wrong.append(f"{place}: ppbench {shlex.join(words)}: {problem}")
    assert not wrong, "\n".join(wrong)


def test_what_commands_name_is_there():
    """Values of --defense, --attack, --only and names of suites exist, or are those of a page's own example."""
    own = {"rounding", "unrounding", "sign_sgd", "row_ratio", "value_search", "my_defense"}
    own |= {"ours:Net", "my_code:network", "torchvision.models:resnet18"}  # by address
    known = {group: {*plugins(group), *own} for group in ("defenses", "attacks", "models")}
    known["attacks"] |= {"standard", "all"}
    options = {"--defense": "defenses", "--add": "defenses", "--attack": "attacks", "--model": "models"}
    wrong = []
    for place, words in commands():
        for option, value in pairwise(words):
            unknown = set(value.split(",")) - known[options[option]] if option in options else set()
            unknown = {name for name in unknown if name.partition(":")[0] not in plugins("adapters")}  # their own tests
            wrong += [f"{place}: {option} {name}" for name in sorted(unknown) if not name.isupper()]
        if words[:1] == ["sweep"] and not words[1].endswith(".toml") and not words[1].isupper():
            if any(find_spec(framework) is None for framework in BESIDE.get(words[1], ())):
                continue
            load_suite(words[1], words[words.index("--preset") + 1] if "--preset" in words else "")
    assert not wrong, "\n".join(wrong)


def test_what_is_no_command_is_found_wherever_it_stands():
    for words in ("evaluate", "evaluate --defence dp", "compare baseline", "claim FOLDER", "baseline accept a b"):
        assert parsed(words.split()), words
    match = COMMAND.match("- run: ppbench verify results")
    assert match is not None and match["words"] == "verify results"
    assert COMMAND.match(".venv/bin/ppbench list") and INNER.search("see `ppbench list suites`.")


def slugs(page):
    """Return the anchors of a page's headings, as GitHub makes them; of equal headings, the first's."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.sub(
        r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE))
    )
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings.lower().split("\n")}


def found_in_text(pattern):
    """Yield what a pattern finds in pages, without their fenced blocks, as page and first group."""
    for page in PAGES:
        for match in pattern.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
            yield page, match[1]


def test_every_link_leads_somewhere():
    every, wrong = [pair for pair in found_in_text(LINK) if not re.match(r"[a-z]+:", pair[1])], []
    assert len(every) > 20
    for page, target in every:
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or ROOT not in (there, *there.parents):
            wrong.append(f"{page.name}: {target}: no such file")
        elif anchor and anchor not in slugs(there):
            wrong.append(f"{page.name}: {target}: no such heading, only {', '.join(sorted(slugs(there)))}")
    assert not wrong, "\n".join(wrong)


def test_files_that_are_named_are_there_and_the_index_names_every_document():
    """A path in backticks in one of our folders is there; x.py stands for any, and readers make compare.md."""
    wrong, every = [], list(found_in_text(TOLD))
    for page, name in every:
        homes = (ROOT, page.parent, ROOT / "ppbench", ROOT / "docs")
        there = name == "compare.md" or Path(name).stem == "x" or any((home / name).exists() for home in homes)
        wrong += [] if there else [f"{page.relative_to(ROOT)}: {name}"]
    assert len(every) > 20
    assert not wrong, "\n".join(wrong)
    index = (ROOT / "README.md").read_text()
    left = {page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in index}
    assert not left, f"README.md does not name {left}"


def test_what_the_design_names_in_a_file_is_in_that_file():
    """ "`NAME` in `FILE`" and "`NAME` (`FILE`)", so that a renamed function is renamed on the page that follows it."""
    named = re.findall(r"`([\w.]+)` (?:in |\()`(ppbench/[\w/]+)\.py`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 12
    missing = []
    for name, path in named:
        home = importlib.import_module(path.replace("/", "."))
        for part in name.split("."):
            home = getattr(home, part, None)
        missing += [f"{name} in {path}.py"] if home is None else []
    assert not missing


def test_every_toml_block_is_one_and_every_suite_loads(tmp_path):
    """Of defenses and attacks that a page has the reader write, `dp` and `dlg` stand in."""
    toml, suites = blocks("toml"), [block for block in blocks("toml") if block[2].startswith("schema")]
    assert len(toml) >= 3 and len(suites) >= 2
    presets = {text: tomllib.loads(text).get("preset", {}) for *_, text in toml}
    for *place, text in suites:
        path = tmp_path / "suite.toml"
        path.write_text(text.replace('"rounding"', '"dp"').replace('"unrounding"', '"dlg"'))
        for preset in ("", *presets[text]):
            assert load_suite(path, preset).configs, place


def test_every_python_block_is_one_and_what_it_imports_is_there():
    assert len(blocks("python")) >= 5
    for page, line, text in blocks("python"):
        for node in ast.walk(ast.parse(text, f"{page}:{line}")):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ppbench":
                home = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(home, alias.name)]
                assert not missing, f"{page}:{line}: {node.module} has no {', '.join(missing)}"


def test_the_plugins_of_the_tutorials_are_plugins(script, tmp_path):
    """The code that the tutorials print runs: the defense keeps what is asked of its form, the attack knows it."""
    made = []
    for page, name in (("tutorial-defense.md", "Rounding"), ("tutorial-attack.md", "Unrounding")):
        path = tmp_path / f"{name}.py"
        path.write_text(next(text for file, _, text in blocks("python") if file == page and f"class {name}(" in text))
        made.append(getattr(script(path), name))
    defense, attack = made
    assert issubclass(defense, Defense) and issubclass(attack, Attack)
    assert attack().knows(defense.name)
    check_defense(defense, off={"step": 0.0}, only=("declares_itself", "one_seed_one_result", "off_level_equals_none"))


def test_every_key_of_a_suite_is_explained():
    result = set(re.findall(r"`([a-z_0-9]+)`", (ROOT / "docs" / "tutorial-data.md").read_text()))
    models = [*SECTIONS.values(), SuiteFile, DefensePart, PresetPart]
    keys = {field.alias or name for model in models for name, field in model.model_fields.items()}
    keys -= {"attack", "defense", "preset"}  # tables, named with their brackets
    assert len(keys) > 30
    assert not sorted(keys - result)


def test_every_defense_and_threat_model_stands_in_the_table_of_views():
    text = (ROOT / "docs" / "threat-models.md").read_text()
    table = text[text.index("## What each sees of each defense") :]
    rows = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    ours = {name for name, plugin in plugins("defenses").items() if plugin.ours}
    assert rows == ours
    assert all(f"`{threat}`" in text for threat in THREATS)
