"""`action.yml`, the composite action, and the workflow that uses it: run step by step, in bash, as GitHub runs them."""

import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from github_runner import BASH, Runner

from ppbench.base.version import __version__
from ppbench.records.sources import source_digest
from ppbench.records.store import Store

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step.get("id", step["name"]): step for step in ACTION["runs"]["steps"]}
(JOB,) = yaml.safe_load((ROOT / "examples/ci/github-workflow.yml").read_text(encoding="utf-8"))["jobs"].values()
WORKFLOW = yaml.safe_load((ROOT / "examples/ci/github-workflow.yml").read_text(encoding="utf-8"))
SMALL = (
    "--model mlp --grid 0.01 --clients 2 --rounds 1 --train 60 --victims 12 --attack-batch 1 --stage init --workers 1"
)
EVALUATED = {"defense": "dp", "suite": "", "arguments": f"{SMALL} --attack analytic"}
KEPT, SAVED = "actions/upload-artifact@v4", "actions/cache/save@v4"


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Return a maker of runners with a workspace each, or with that of another one."""

    def make(workspace=None):
        home = tmp_path_factory.mktemp("m")
        return Runner(workspace or home / "workspace", home / "home", ROOT)

    return make


@pytest.fixture(scope="module")
def first(machine):
    """Return a runner on which a tiny evaluation of `dp` was accepted as the first baseline, and what that run said."""
    runner = machine()
    return runner, runner.run(ACTION, {**EVALUATED, "reason": "the first\none"})


def test_the_first_results_are_evaluated_verified_and_accepted_with_the_reason(first):
    runner, ran = first
    assert ran.code == 0, ran.log
    assert ran.outputs == {"verdict": "accepted", "exit-code": "0"}
    assert "### ppbench: accepted (exit code 0)" in ran.summary and "::error" not in ran.log
    assert [STEPS[key]["name"] for key in ("run", "verify", "accept")] == [
        name for name in ran.steps if name in {STEPS[key]["name"] for key in ("run", "verify", "compare", "accept")}
    ]
    (line,) = (runner.workspace / "baseline/accepted.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "the first one" and "3 cells" in ran.log
    assert ran.pip[:3] == ["install", str(ROOT), "."], "the code of the action, and the package in the workspace"
    assert (runner.workspace / "installed.txt").read_text().endswith(f"code {source_digest()}\n")


@pytest.fixture
def compared(first, machine, tmp_path, rescored):
    """Return a maker of runs on the results of the first, with a baseline made of its records: kept(record) or None."""

    def make(kept):
        runner = machine(tmp_path / "workspace")
        shutil.copytree(first[0].workspace / "results", runner.workspace / "results")
        for record in Store(runner.workspace / "results").load_all():
            if (made := kept(record)) is not None:
                Store(runner.workspace / "baseline").save(made)
        return runner.run(ACTION, EVALUATED)

    return make


def test_an_equal_baseline_passes_and_finished_cells_are_found_again(compared):
    ran = compared(lambda record: record)
    assert (ran.code, ran.outputs) == (0, {"verdict": "passed", "exit-code": "0"}), ran.log
    assert "### ppbench: passed (exit code 0)" in ran.summary and "::error" not in ran.log


def test_a_defense_that_leaks_more_fails_with_1_and_is_called_a_regression(compared, rescored):
    def better(record):
        if record.config.defense.id != "dp":
            return record
        victims = [v.model_copy(update={"psnr": v.psnr - 6 - i / 100}) for i, v in enumerate(record.victims)]
        return rescored(record, asked=record.asked, victims=victims)

    ran = compared(better)
    assert (ran.code, ran.outputs) == (1, {"verdict": "regression", "exit-code": "1"}), ran.log
    assert "### ppbench: regression (exit code 1)" in ran.summary and "1 rows of dp got worse" in ran.summary
    assert "::error title=ppbench: regression (exit code 1)::The defense leaks more" in ran.log
    assert KEPT in ran.used and SAVED in ran.used, "a failed comparison computes nothing twice"


def test_what_cannot_be_compared_fails_with_3_and_is_no_regression(compared):
    ran = compared(lambda record: None if record.config.defense.id == "dp" else record)
    assert (ran.code, ran.outputs) == (3, {"verdict": "harness-fault", "exit-code": "3"}), ran.log
    assert "### ppbench: harness-fault (exit code 3)" in ran.summary and "regression" not in ran.outputs["verdict"]


def test_a_control_that_fails_ends_the_run_with_3_before_anything_is_compared(machine):
    idle = f"{SMALL} --attack dlg --set dlg.budget=1"  # nobody rebuilds the undefended victims
    ran = machine().run(ACTION, {**EVALUATED, "arguments": idle, "reason": "r"})
    assert (ran.code, ran.outputs) == (3, {"verdict": "harness-fault", "exit-code": "3"}), ran.log
    assert STEPS["accept"]["name"] not in ran.steps and SAVED not in ran.used and KEPT in ran.used


def test_a_wrong_name_or_option_fails_with_2_and_says_which(machine):
    runner = machine()
    for wrong, result in (({"defense": "dq"}, "did you mean 'dp'?"), ({"arguments": "--grids 1"}, "--grids")):
        ran = runner.run(ACTION, {**EVALUATED, **wrong, "reason": "r"})
        assert (ran.code, ran.outputs) == (2, {"verdict": "unusable-input", "exit-code": "2"}), ran.log
        assert result in ran.log and "### ppbench: unusable-input (exit code 2)" in ran.summary


def test_a_missing_baseline_fails_before_anything_is_installed_or_computed(machine):
    runner = machine()
    ran = runner.run(ACTION, EVALUATED)
    assert (ran.code, ran.outputs["exit-code"], ran.pip) == (2, "2", []) and "There is no baseline" in ran.log
    assert ran.steps == [STEPS[key]["name"] for key in ("inputs", "told")] + [list(STEPS.values())[-1]["name"]]
    (runner.workspace / "baseline").mkdir()
    assert runner.run(ACTION, EVALUATED).outputs["verdict"] == "unusable-input", "an empty folder is none"


def test_a_failed_installation_is_not_taken_for_a_regression(machine):
    ran = machine().run(ACTION, {**EVALUATED, "reason": "r"}, PIP_ENDS="1")
    assert (ran.code, ran.outputs) == (1, {"verdict": "unfinished", "exit-code": ""})
    assert "(exit code none)" in ran.summary and STEPS["run"]["name"] not in ran.steps


def test_no_text_of_an_input_becomes_shell_code(machine):
    runner = machine()
    for name in ("ppbench", "python"):
        (runner.home / "bin" / name).write_text("#!/bin/bash\n")
    (runner.workspace / "baseline").mkdir()
    (runner.workspace / "baseline/ppbench.json").write_text("{}")
    evil, ended = "\"; touch pwned; '$(touch pwned)`touch pwned`\n| touch pwned #", []
    for name in ACTION["inputs"]:
        ended += [runner.run(ACTION, {"defense": "dp", "reason": why, name: evil}).outputs for why in ("", "r")]
    assert {"verdict": "passed", "exit-code": "0"} in ended and {"verdict": "accepted", "exit-code": "0"} in ended
    assert {path.name for path in runner.workspace.rglob("*")} == {"baseline", "ppbench.json", "installed.txt"}


def test_expressions_stand_nowhere_in_scripts_and_actions_of_others_are_named_with_their_version():
    steps = [*ACTION["runs"]["steps"], *JOB["steps"]]
    assert not [step for step in steps if "${{" in step.get("run", "")]
    assert all(step["shell"] == "bash" for step in ACTION["runs"]["steps"] if "run" in step)
    uses = [step["uses"] for step in steps if "uses" in step]
    assert len(uses) == 6 and all("@v" in name for name in uses)
    assert not [step for step in steps if "continue-on-error" in step]


def test_a_suite_is_swept_under_the_defense_alone_and_words_are_split_at_spaces_and_lines(machine):
    runner = machine()
    (runner.home / "bin/ppbench").write_text('#!/bin/bash\nprintf "<%s>" "$@"\n')
    ran = runner.run(ACTION, {"defense": "sign_sgd", "arguments": "--preset *\n --workers 2", "reason": "moved on"})
    command = "<sweep><digits-quick><--add><sign_sgd><--only><defense=sign_sgd><--out><results>"
    assert f"{command}<--preset><*><--workers><2>" in ran.log
    assert "<baseline><accept><results><baseline><--reason><moved on>" in ran.log
    version = runner.run(ACTION, {"defense": "x", "reason": "r", "version": "0.1.0", "install": "-r more.txt ."})
    assert version.pip[:5] == ["install", "ppbench-fl==0.1.0", "-r", "more.txt", "."]
    alone = runner.run(ACTION, {"defense": "x", "reason": "r", "install": "", "python-version": "", "artifact": ""})
    assert alone.pip[:3] == ["install", str(ROOT), "freeze"] and set(alone.used) == {"actions/cache/restore@v4", SAVED}


MEANINGS = {
    ("compare", "0"): "passed", ("compare", "1"): "regression", ("compare", "2"): "unusable-input",
    ("compare", "3"): "harness-fault", ("compare", "4"): "missing", ("compare", "139"): "unfinished",
    ("accept", "0"): "accepted", ("accept", "2"): "unusable-input", ("verify", "1"): "damaged",
    ("verify", "2"): "unusable-input", ("run", "1"): "failed-cells", ("run", "2"): "unusable-input",
    ("run", "3"): "harness-fault", ("run", "130"): "unfinished", ("inputs", "2"): "unusable-input",
    ("run", "70"): "crashed", ("compare", "70"): "crashed", ("run", "143"): "unfinished",
    ("run", "0"): "unfinished", ("verify", "0"): "unfinished", ("inputs", ""): "unfinished",
}  # fmt: skip


@pytest.mark.parametrize(("command", "code"), MEANINGS)
def test_the_same_exit_code_of_another_command_means_something_else(tmp_path, command, code):
    before = {"compare": ("run", "verify"), "accept": ("run", "verify"), "verify": ("run",)}.get(command, ())
    codes = dict.fromkeys(STEPS["told"]["env"], "") | {name.upper(): "0" for name in before} | {command.upper(): code}
    (tmp_path / "script.sh").write_text(STEPS["told"]["run"])
    files = {"GITHUB_OUTPUT": str(tmp_path / "output"), "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    done = subprocess.run([*BASH, tmp_path / "script.sh"], env={**codes, **files}, capture_output=True, text=True)
    verdict = MEANINGS[command, code]
    assert done.returncode == 0 and verdict in ACTION["outputs"]["verdict"]["description"]
    assert (tmp_path / "output").read_text() == f"verdict={verdict}\nexit-code={code}\n"
    title, _, sentence = (tmp_path / "summary").read_text().strip().partition("\n\n")
    assert title == f"### ppbench: {verdict} (exit code {code or 'none'})" and sentence.endswith(".")
    assert ("::error" in done.stdout) == (verdict not in ("passed", "accepted"))


def test_results_are_kept_for_the_same_code_only_and_the_page_always():
    key = STEPS["found"]["with"]["key"]
    result = re.findall(r"'(.*?)'", key)
    assert result == ["**/*.py", "**/*.toml", "src/**", "requirements*.txt", ".github/workflows/**", "installed.txt"]
    assert "restore-keys" not in STEPS["found"]["with"] and "inputs.defense" in key
    names = list(STEPS)
    assert names.index("Versions of Python and of all packages, and which code this is") < names.index("found")
    page = ACTION["runs"]["steps"][-1]
    assert page["if"].startswith("always()") and "${{ inputs.results }}/*.html" in page["with"]["path"]


def test_which_versions_are_installed_is_written_down(tmp_path):
    step = STEPS["Versions of Python and of all packages, and which code this is"]
    script = f"python() {{ '{sys.executable}' \"$@\"; }}\n{step['run']}"
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, check=True)
    written = (tmp_path / "installed.txt").read_text()
    assert sys.version.split()[0] in written and f"torch=={metadata.version('torch')}" in written
    assert written.endswith(f"code {source_digest()}\n")


# -- the workflow to copy ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("event", "values", "baseline", "reason", "ends"),
    [
        ("pull_request", "", True, "", "compare"),
        ("pull_request", "", False, "", "inputs"),
        ("push", "", True, "", "compare"),
        ("push", "", False, "first baseline", "accept"),
        ("workflow_dispatch", "it got better", True, "it got better", "accept"),
        ("workflow_dispatch", "the first", False, "the first", "accept"),
    ],
)
def test_a_pull_request_is_compared_or_fails_and_main_makes_the_first_baseline(
    machine, event, values, baseline, reason, ends
):
    runner = machine()
    (runner.home / "bin/ppbench").write_text("#!/bin/bash\nexit 0\n")
    if baseline:
        (runner.workspace / "baseline").mkdir()
        (runner.workspace / "baseline/ppbench.json").write_text("{}")
    (step,) = [step for step in JOB["steps"] if step["uses"].startswith("ppbench/")]
    context = {"github": {"event_name": event}, "inputs": {"reason": values}}
    inputs = {name: runner.filled(text, context) for name, text in step["with"].items()}
    assert inputs == {"defense": "sign_sgd", "suite": "digits-quick", "reason": reason}
    ran = runner.run(ACTION, inputs)
    names = {STEPS[key]["name"]: key for key in ("inputs", "run", "verify", "compare", "accept")}
    assert [names[name] for name in ran.steps if name in names][-1] == ends
    assert (ran.code == 0) == (ends != "inputs")


def test_the_workflow_checks_out_first_may_read_alone_and_names_this_version():
    assert [step["uses"] for step in JOB["steps"]] == ["actions/checkout@v4", f"ppbench/ppbench-fl@v{__version__}"]
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert set(WORKFLOW[True]) == {"push", "pull_request", "workflow_dispatch"}, "YAML takes `on` for a truth"
    with_ = JOB["steps"][1]["with"]
    assert set(with_) <= set(ACTION["inputs"])
