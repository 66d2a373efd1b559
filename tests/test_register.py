"""The register pins what is there, what pins nothing is refused by line and key, its workflow's commands are real."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from github_runner import Ran, Runner
from installed_examples import lay_out

from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.records import sources
from ppbench.run.suite import load_suite

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "leaderboards" / "register.toml"
WORKFLOW = ROOT / ".github" / "workflows" / "register.yml"


@pytest.fixture(scope="module")
def registered(script):
    """benchmarks/registered.py, which reads the register."""
    return script(ROOT / "benchmarks" / "registered.py")


@pytest.fixture(scope="module")
def register(registered):
    return registered.load_register(SHIPPED)


@pytest.fixture(scope="module")
def site(tmp_path_factory, register):
    """Folders in which the entries that are folders of this repository lie as pip would leave them, one each."""
    home = tmp_path_factory.mktemp("site")
    for _, entry in register.entries():
        if (ROOT / entry.install).is_dir():
            lay_out(ROOT / entry.install, home / entry.name)
    return home


@pytest.fixture
def installed(site, monkeypatch):
    """Install one entry."""

    def install(name):
        monkeypatch.syspath_prepend(site / name)
        registry.plugins.cache_clear()
        sources.code_of.cache_clear()

    yield install
    registry.plugins.cache_clear()
    sources.code_of.cache_clear()
    for path in site.glob("*/*/__init__.py"):
        sys.modules.pop(path.parent.name, None)


def test_the_shipped_register_pins_the_examples_as_they_are_now(registered, register, installed):
    """An edited example fails here: give its digest, as the sentence tells it, and its figures, to the register."""
    assert {"sign_sgd", "row_ratio"} <= {entry.name for _, entry in register.entries()}
    for group, entry in register.entries():
        assert "is not installed here" in registered.pin_faults(group, entry)[0]
        if (ROOT / entry.install).is_dir():
            installed(entry.name)
            assert registered.pin_faults(group, entry) == []
            suite = ROOT / entry.suite if entry.suite.endswith(".toml") else entry.suite
            assert load_suite(suite, add=[entry.name] if group == "defenses" else [], isolate=False).configs
            other = entry.model_copy(update={"code": "0" * 12, "version": "9"})
            assert [result.split()[1] for result in registered.pin_faults(group, other)] == ["version", "code"]


CHANGES = [
    ('version = "0.1.0"', "version = 1", "line 8, key defense.1.version: Input should be a valid string, not 1."),
    ('code = "245b7fcbaf58"', 'code = "74c"', "key defense.1.code: String should match pattern"),
    ('licence = "Apache-2.0"', 'license = "x"', "key defense.1.licence: Field required."),
    ('"examples/my_defense"', '"ppbench-sign-sgd"', "key defense.1.install: 'ppbench-sign-sgd' pins nothing; give"),
    ('"examples/my_defense"', '"../elsewhere"', "pins nothing"),
    ('"examples/my_defense"', '"--index-url=x"', "key defense.1.install: String should match pattern"),
    ('"examples/my_defense/tests/small.toml"', '"digit"', "key defense.1.suite: 'digit' is no suite"),
    ('name = "row_ratio"', 'name = "sign_sgd"', "key defense.1.name: 'sign_sgd' is there twice."),
    ("ppbench.register/1", "ppbench.register/2", "line 3, key schema: Input should be 'ppbench.register/1'"),
    ("[[attack]]", "[[attacks]]", "key attacks: Extra inputs are not permitted"),
    ("[[attack]]", "[[attack]", "is no TOML"),
]


def repository(folder):
    """Lay out what a register may name, and return where the register is to lie."""
    for name in ("my_defense", "my_attack"):
        shutil.copytree(ROOT / "examples" / name / "tests", folder / "examples" / name / "tests")
    (folder / "leaderboards").mkdir()
    return folder / "leaderboards" / "register.toml"


@pytest.mark.parametrize(("before", "after", "message"), CHANGES)
def test_what_pins_nothing_is_refused_by_file_line_and_key(registered, tmp_path, before, after, message):
    assert before in SHIPPED.read_text()
    path = repository(tmp_path)
    path.write_text(SHIPPED.read_text().replace(before, after, 1))
    with pytest.raises(UsageError) as caught:
        registered.load_register(path)
    assert message in str(caught.value) and str(path) in str(caught.value), caught.value


def test_versions_and_commits_pin_and_a_missing_file_is_told(registered, tmp_path):
    path = repository(tmp_path)
    for install in ("ppbench-sign-sgd==0.1.0", f"git+https://example.org/a@{'a' * 40}"):
        path.write_text(SHIPPED.read_text().replace('"examples/my_defense"', f'"{install}"'))
        assert registered.load_register(path).named("sign_sgd")[1].install == install
    with pytest.raises(UsageError, match="no entry 'x'"):
        registered.load_register(path).named("x")
    with pytest.raises(UsageError, match="cannot be read as a register"):
        registered.load_register(tmp_path / "none.toml")


def test_figures_that_moved_or_went_are_named(registered, register, cell):
    entry, record = register.named("sign_sgd")[1], cell(share=10.0)
    metric = record.metric("psnr_median")

    def result(value, **changes):
        about = dict(defense="dp", control=0.1, attack="dlg", metric="psnr_median", value=value) | changes
        return registered.moved_figures(
            entry.model_copy(update={"figure": (registered.RegisteredFigure(**about),)}), [record]
        )

    assert result(metric.value) == result(metric.low) == []
    assert "was 30, and now is" in result(30.0)[0]
    for changes in ({"control": 0.2}, {"attack": "ig"}, {"defense": "none"}, {"metric": "psnr_mode"}):
        assert "is not there now" in result(metric.value, **changes)[0]


# -- the workflow ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def test_the_workflows_commands_are_real(jobs, site, register, tmp_path):
    """Its scripts run as GitHub runs them; pip installs nothing, and the last one computes nothing: see below."""
    results = {"PYTHONPATH": f"{ROOT}:{site / 'sign_sgd'}"}
    runner, ran = Runner(tmp_path / "workspace", tmp_path / "home", ROOT), Ran()
    for name in ("benchmarks", "leaderboards", "examples"):
        (runner.workspace / name).symlink_to(ROOT / name)
    outputs = {}
    for step in jobs["entries"]["steps"]:
        if "run" in step:
            code, message = runner.script({**step, "shell": "bash"}, {}, results, ran)
            assert code == 0, ran.log
            outputs |= message
    names = [entry.name for _, entry in register.entries()]
    assert json.loads(outputs["names"]) == names
    install, compute = (step for step in jobs["again"]["steps"] if "NAME" in step.get("env", {}))
    code, _ = runner.script({**install, "env": {}, "shell": "bash"}, {}, {**results, "NAME": "sign_sgd"}, ran)
    assert code == 0 and (runner.home / "pip.txt").read_text().split() == [
        *("install", "."),
        *("install", str(ROOT / "examples" / "my_defense")),
    ]
    code, _ = runner.script({**compute, "env": {}, "shell": "bash"}, {}, {**results, "NAME": "nobody"}, ran)
    assert code != 0 and "has no entry 'nobody'" in ran.log


def test_what_the_workflow_computes_is_pinned(registered, installed, tmp_path, capsys):
    """The defense's entry, whose victims are the same each time: cells, controls and figures come out as they stand."""
    assert registered.run("sign_sgd", tmp_path / "none") == 1 and "is not installed here" in capsys.readouterr().out
    installed("sign_sgd")
    assert registered.run("sign_sgd", tmp_path / "out", engine="inline") == 0
    assert "20 cells of sign-sgd-small/1, 3 figures as pinned." in capsys.readouterr().out


def test_the_workflow_runs_weekly_and_by_hand_reads_alone_and_has_no_expressions_in_scripts(jobs):
    document = yaml.safe_load(WORKFLOW.read_text())
    assert document["permissions"] == {"contents": "read"} and set(document[True]) == {"schedule", "workflow_dispatch"}
    assert [one["cron"].split()[-1] for one in document[True]["schedule"]] == ["1"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert not [step for step in steps if "${{" in step.get("run", "")]
    assert all("@v" in step["uses"] for step in steps if "uses" in step)
    assert jobs["again"]["needs"] == "entries" and "needs.entries.outputs.names" in str(jobs["again"]["strategy"])
