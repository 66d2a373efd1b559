"""The examples of other people's packages: installed as packages are, found, evaluated, tested; and the CI workflow."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ppbench import cli
from ppbench.base import registry
from ppbench.base.registry import plugins
from ppbench.run import evaluation
from ppbench.run.suite import load_suite
from ppbench.testing import check_attack, check_defense

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
PACKAGES = ("my_defense", "my_attack", "my_question")
MODULES = ("sign_sgd", "row_ratio", "column_guess")
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def about(name: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the examples lie as pip would leave them; `tests/wheel_test.sh` has pip do it."""
    folder = tmp_path_factory.mktemp("site")
    for name in PACKAGES:
        shutil.copytree(
            EXAMPLES / name / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.egg-info")
        )
        told = about(name)
        info = folder / f"{told['name'].replace('-', '_')}-{told['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
        groups = [(group, "\n".join(f"{n} = {where}" for n, where in entries.items()))
                  for group, entries in told["entry-points"].items()]  # fmt: skip
        (info / "entry_points.txt").write_text("\n".join(f"[{group}]\n{lines}" for group, lines in groups))
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process find the examples as packages that were installed."""
    monkeypatch.syspath_prepend(site)
    registry.plugins.cache_clear()
    yield
    registry.plugins.cache_clear()
    for name in MODULES:
        sys.modules.pop(name, None)


def ppbench(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["ppbench", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code


@pytest.mark.usefixtures("installed")
def test_installed_examples_are_listed_with_their_package(monkeypatch, capsys) -> None:
    ppbench(monkeypatch, "list")
    listed = capsys.readouterr().out
    assert "sign_sgd         [ppbench-sign-sgd] Uploads one sign a parameter" in listed
    assert "row_ratio        [ppbench-row-ratio] Row i of dL/dW over dL/db_i" in listed
    assert "attribute        [ppbench-column-guess] Which value has one column" in listed
    assert "value_search     [ppbench-column-guess] The value whose gradient explains" in listed


@pytest.mark.usefixtures("installed")
def test_an_installed_defense_is_evaluated_with_an_installed_attack(monkeypatch, capsys, tmp_path: Path) -> None:
    words = "--model mlp --grid 5 --clients 2 --rounds 1 --victims 4 --attack-batch 1 --stage init --workers 1"
    monkeypatch.setattr(evaluation, "write_board", lambda store: [])  # `tests/wheel_test.sh` draws it
    out = ("--attack", "row_ratio", "--out", str(tmp_path / "out"))
    ppbench(monkeypatch, "evaluate", "--defense", "sign_sgd", *words.split(), *out)
    told = " ".join(capsys.readouterr().out.split())
    assert "The best attack (row_ratio) breaks the undefended model: 100% of images above 20 dB." in told


def test_an_installed_question_passes_its_own_tests_and_touches_no_file_of_ours(site: Path, tmp_path: Path) -> None:
    """In a process of its own: the reports of this one have asked for all questions before."""
    tests = shutil.copytree(EXAMPLES / "my_question/tests", tmp_path / "tests")
    quick = "import ppbench.run.cost as cost\ncost.BUDGET_S = cost.ENOUGH_S = 0.0\n"  # a single pair is timed
    (tests / "conftest.py").write_text(quick)
    env = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
    assert not [p for p in (ROOT / "ppbench").rglob("*.py") if "column_guess" in p.read_text()]


def test_the_contracts_are_kept_without_being_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.syspath_prepend(EXAMPLES / name / "src")
    assert "sign_sgd" not in plugins("defenses") and "row_ratio" not in plugins("attacks")
    check_defense(importlib.import_module("sign_sgd").SignSGD)
    check_attack(importlib.import_module("row_ratio").RowRatio, decibels=60)
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_is_small_and_says_how_it_is_used(name: str) -> None:
    found = [plugin for entries in about(name)["entry-points"].values() for plugin in entries]
    text = (EXAMPLES / name / "README.md").read_text()
    assert found and all(plugin in text for plugin in found) and len(text.splitlines()) <= 30
    assert about(name)["dependencies"] == ["ppbench"]


def test_the_examples_suite_is_one(tmp_path: Path) -> None:
    source = (EXAMPLES / "my_defense/tests/small.toml").read_text().replace('"sign_sgd"', '"ppdl"')
    (tmp_path / "small.toml").write_text(source)
    assert load_suite(tmp_path / "small.toml").id == "sign-sgd-small"


# -- the workflow ----------------------------------------------------------------------------------------------------
WORKFLOW = yaml.safe_load((EXAMPLES / "ci/github-workflow.yml").read_text())


def steps() -> list[dict[str, Any]]:
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def parsed(words: list[str]) -> str:
    """Return the subcommand that the real parser finds in `words`; nothing is run."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("ppbench", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", []), *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    return str(context.command_path)


def test_the_workflow_runs_commands_that_exist() -> None:
    lines = [shlex.split(line) for step in steps() for line in step.get("run", "").splitlines()]
    told = [parsed(words[1:]) for words in lines if words[:1] == ["ppbench"]]
    assert told == ["ppbench sweep", "ppbench verify", "ppbench compare", "ppbench baseline accept"]
    with pytest.raises(Exception, match="No such option"):
        parsed(["sweep", "digits-quick", "--defense", "dp"])


def named(name: str) -> dict[str, Any]:
    """Return the one step of the workflow with this name."""
    (step,) = [step for step in steps() if step.get("name") == name]
    return step


def runs(step: dict[str, Any], event: str, *, baseline: bool) -> bool:
    """Return whether a step runs at an event, where all before it went well; its condition is evaluated."""
    text = str(step.get("if", "True")).replace("always()", "True").replace("&&", " and ").replace("||", " or ")
    text = text.replace("github.event_name", repr(event))
    text = text.replace("hashFiles('baseline/ppbench.json')", repr("d1" if baseline else ""))
    return bool(eval(text, {"__builtins__": {}}))


def test_the_workflow_keeps_results_of_the_same_code_only_and_always_keeps_the_page() -> None:
    (cache,) = [step for step in steps() if "actions/cache@" in step.get("uses", "")]
    (key,) = re.findall(r"hashFiles\((.*?)\)", cache["with"]["key"])
    assert re.findall(r"'(.*?)'", key) == ["src/**", "pyproject.toml", "requirements*.txt", "installed.txt"]
    assert "restore-keys" not in cache["with"]
    (kept,) = [step for step in steps() if "upload-artifact@" in step.get("uses", "")]
    assert kept["if"] == "always()" and "results/*.html" in kept["with"]["path"]
    assert WORKFLOW["permissions"] == {"contents": "read"}


def test_installed_versions_are_written_after_the_installation_and_before_the_key_is_made(tmp_path: Path) -> None:
    names = [step.get("name", step.get("uses")) for step in steps()]
    order = ["Install ppbench and the defense", "Versions of Python and of all packages", "Results of the same code"]
    assert [name for name in names if name in order] == order and names.index("Sweep") > names.index(order[-1])
    script = str(named(order[1])["run"]).replace("python -", f"{shlex.quote(sys.executable)} -")
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, check=True)
    written = (tmp_path / "installed.txt").read_text()
    assert sys.version.split()[0] in written and f"torch=={metadata.version('torch')}" in written


@pytest.mark.parametrize(
    ("event", "baseline", "told"),
    [
        ("pull_request", True, ["Compare with the baseline"]),
        ("pull_request", False, ["A pull request has a baseline", "Compare with the baseline"]),
        ("push", True, ["Compare with the baseline"]),
        ("push", False, ["Accept a new baseline"]),
        ("workflow_dispatch", True, ["Accept a new baseline"]),
        ("workflow_dispatch", False, ["Accept a new baseline"]),
    ],
)
def test_a_pull_request_is_compared_or_fails_and_main_makes_the_first_baseline(
    event: str, baseline: bool, told: list[str]
) -> None:
    conditional = [step for step in steps() if "if" in step and step["if"] != "always()"]
    assert [step["name"] for step in conditional if runs(step, event, baseline=baseline)] == told


def test_a_missing_baseline_fails_the_pull_request_before_anything_is_computed(tmp_path: Path) -> None:
    names = [step.get("name") for step in steps()]
    step = named("A pull request has a baseline")
    assert names.index(step["name"]) < names.index("Sweep")
    done = subprocess.run(["bash", "-e", "-c", step["run"]], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and done.stdout.startswith("::error::baseline/ppbench.json is missing; ")
    assert not [step for step in steps() if "continue-on-error" in step]


def test_no_text_of_a_user_becomes_shell_code_and_actions_are_named_with_their_version() -> None:
    assert not [step for step in steps() if "${{" in step.get("run", "")]
    uses = [step["uses"] for step in steps() if "uses" in step]
    assert uses and all("@v" in name for name in uses)
