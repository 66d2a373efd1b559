"""Sweeps: what they plan, compute once, find again, keep of failures, say at the end; what is resolved but once."""

import pickle
import warnings
from collections import Counter

import pytest
from typer.testing import CliRunner

from ppbench.base.errors import UsageError
from ppbench.commands import app
from ppbench.federation.engine import Federation
from ppbench.records import sources
from ppbench.run import experiment, task
from ppbench.run import experiment as choice
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate, selftest
from ppbench.run.experiment import resolve
from ppbench.run.jobs import WorkItem
from ppbench.run.schedule import plan_cells
from ppbench.run.suite import load_suite
from ppbench.run.sweep import plan_sweep, sweep

TINY = """\
schema = "ppbench.run.suite/1"
id = "tiny"
version = 1
title = "Tiny"

[task]
dataset = "digits"
model = "mlp"
clients = 3
train = 120

[federation]
rounds = 2

[questions]
attacks = ["analytic", "label_recovery", "mia_loss"]
attack_batch = [1]
victims = 2
candidates = 40
tuning = 0
stages = ["init", "final"]

[[defense]]
id = "dp"
grid = [0.001, 0.1]

[[defense]]
id = "dp_sgd"
grid = [1]
"""


class Heard:
    """Progress that is written down."""

    def __init__(self) -> None:
        self.expected, self.done, self.cells = Counter(), Counter(), Counter()

    def expect(self, phase: str, steps: int) -> None:
        self.expected[phase] += steps

    def advance(self, phase: str, steps: int) -> None:
        self.done[phase] += steps

    def cell(self, status: str, about: str = "") -> None:
        self.cells[status] += 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("suite") / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def swept(tiny, tmp_path_factory):
    heard = Heard()
    return sweep(tiny, out=tmp_path_factory.mktemp("swept") / "out", engine="inline", progress=heard), heard


def test_every_cell_once_and_controls_shared(swept):
    evaluation, heard = swept
    ids = [r.cell_id for r in evaluation.records]
    assert len(set(ids)) == len(ids) == evaluation.computed == heard.cells["complete"]
    defenses = [r.config.defense for r in evaluation.records]
    points = {(d.id, d.control and d.control.value) for d in defenses}
    assert points == {("none", None), ("full_noise", None), ("dp", 0.001), ("dp", 0.1), ("dp_sgd", 1.0)}
    assert len(list((evaluation.out / "cache").iterdir())) == len(points)  # one training each, for both evaluations
    assert heard.expected == heard.done
    assert heard.done["training"] == 2 * len(points) and heard.done["attacking"] == len(ids)
    assert {r.config.suite for r in evaluation.records} == {"tiny/1"}
    assert {r.config.suite_digest for r in evaluation.records} == {evaluation.suite.digest}
    assert all(r.asked for r in evaluation.records)


def test_cells_that_an_exact_answer_leaves_out_do_not_count_as_computed(tmp_path):
    (path := tmp_path / "gated.toml").write_text(
        TINY.replace('"analytic", "label_recovery", "mia_loss"', '"quick"')
        .replace('stages = ["init", "final"]', 'stages = ["init"]\nbudget = 4')
        .replace("[0.001, 0.1]", "[0.001]")
        .replace('[[defense]]\nid = "dp_sgd"\ngrid = [1]\n', "")
    )
    planned = plan_sweep(load_suite(path), tmp_path / "out", {})
    swept = sweep(path, out=tmp_path / "out", engine="inline")
    assert swept.computed == len(swept.records) < sum(len(one.cells) for one in planned.todo)


def test_the_controls_and_the_harness_are_checked(swept):
    evaluation, _ = swept
    assert [c.control for c in evaluation.checks] == ["none", "full_noise", "harness"] and evaluation.reliable
    assert any(sentence.startswith("dp ") for sentence in evaluation.verdict)
    assert (evaluation.out / "leaderboard.html").is_file() and not evaluation.failed


def test_a_second_sweep_finds_everything(swept, tiny):
    evaluation, _ = swept
    files = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in evaluation.out.rglob("*") if p.is_file()}
    again = sweep(tiny, out=evaluation.out, engine="inline")
    assert again.computed == 0 and again.records == evaluation.records and again.verdict == evaluation.verdict
    assert files == {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in evaluation.out.rglob("*") if p.is_file()}


def test_cells_equal_those_of_an_evaluation_but_for_their_suite(swept, tmp_path):
    """A suite is a name over evaluations: the same figures, victim by victim."""
    evaluation, _ = swept
    config = next(c for c in evaluation.suite.configs if c.defense == "dp_sgd")
    config = config.model_copy(update={"suite": "evaluate/1", "suite_digest": ""})
    alone = evaluate(config, out=tmp_path / "a", workers=1)

    def key(record):
        return record.config.model_copy(update={"suite": "", "suite_digest": ""}).cell_id()

    mine = {key(r): r for r in evaluation.records}
    assert len(alone.records) > 5
    for record in alone.records:
        other = mine[key(record)]
        assert (other.victims, other.metrics, other.utility) == (record.victims, record.metrics, record.utility)
        assert other.cell_id != record.cell_id and other.asked == record.asked


def test_finished_cells_of_other_code_are_told(swept, tiny, monkeypatch):
    """Cells are named by versions: who edits a defense and forgets its version must hear why nothing changes."""
    evaluation, _ = swept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(tiny, out=evaluation.out, engine="inline")
    monkeypatch.setattr(sources, "source_digest", lambda **_: "other")
    with pytest.warns(UserWarning, match="has changed since cells in .* Raise the version"):
        sweep(tiny, out=evaluation.out, engine="inline")


def test_only_keeps_the_controls(swept):
    evaluation, _ = swept
    some = plan_sweep(evaluation.suite, evaluation.out, {"defense": ["dp"], "control": ["0.1"], "stage": ["init"]})
    cells = [c.config for one in some.cells for c in one.cells]
    assert {c.defense.id for c in cells} == {"dp", "none", "full_noise"} and not some.todo
    assert {c.defense.control.value for c in cells if c.defense.control} == {0.1}
    assert {c.stage for c in cells} == {"init"}


def test_only_one_of_several_networks_with_its_own_controls(tmp_path):
    two = tmp_path / "two.toml"
    two.write_text(f'{TINY}task = {{ model = "lenet" }}\nquestions = {{ attacks = ["label_recovery"] }}\n')
    some = plan_sweep(load_suite(two), tmp_path / "out", {"model": ["lenet"]})
    results = {(c.config.defense.id, c.config.model.id) for one in some.cells for c in one.cells}
    assert results == {("dp_sgd", "lenet"), ("none", "lenet"), ("full_noise", "lenet")}


@pytest.mark.parametrize(
    ("only", "sentence"),
    [
        ({"defense": ["spn"]}, "no defense in suite 'tiny' named 'spn'; known are dp, dp_sgd"),
        ({"model": ["lenet"]}, "no model in suite 'tiny' named 'lenet'; known are mlp"),
        ({"seed": ["3"]}, "no seed in suite 'tiny' named '3'; known are 0"),
        ({"stage": ["fnal"]}, "did you mean 'final'"),
        ({"stages": ["init"]}, "no filter named 'stages'; did you mean 'stage'"),
        ({"attack": ["analytic"], "defense": ["dp_sgd"], "control": ["9"]}, "no control in suite"),
        ({"control": ["1e-1"], "defense": ["dp"], "attack": ["x"]}, "no attack in suite"),  # 1e-1 is 0.1
        ({"control": ["5"]}, r"known are 0.001, 0.1, 1\."),
        ({"attack": ["mia_loss"], "stage": ["init"]}, "No cell of suite 'tiny' is left by --only"),
    ],
)
def test_filters_that_cannot_be(tiny, tmp_path, only, sentence):
    with pytest.raises(UsageError, match=sentence):
        sweep(tiny, out=tmp_path / "out", only=only, engine="inline")
    assert not (tmp_path / "out").exists()


def test_a_dry_run_computes_and_writes_nothing(tiny, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["sweep", str(tiny), "--out", str(out), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "cells are missing and would be computed, from 5 trainings" in result.output
    assert not out.exists()


@pytest.fixture
def broken(monkeypatch):
    """Let trainings of dp at .1 raise, until it is undone."""
    run = Federation.run

    def breaking(self, *arguments, **options):
        if self.defense.name == "dp" and getattr(self.defense, "sigma", 0) == 0.1:
            raise ZeroDivisionError("planted")
        return run(self, *arguments, **options)

    monkeypatch.setattr(Federation, "run", breaking)
    return monkeypatch


def test_exit_codes_tell(tiny, tmp_path, broken):
    out, only = tmp_path / "out", ["--only", "defense=dp", "--only", "stage=init", "--engine", "inline"]
    result = CliRunner().invoke(app, ["sweep", str(tiny), "--out", str(out), *only])
    assert result.exit_code == 1 and "its training: ZeroDivisionError: planted" in result.output
    assert (out / "leaderboard.csv").is_file(), "the others are there, on a board"
    broken.undo()
    result = CliRunner().invoke(app, ["sweep", str(tiny), "--out", str(out), *only])
    assert result.exit_code == 0 and "0 failed" in result.output
    weak = ["--only", "attack=mia_loss", "--only", "defense=dp", "--only", "stage=final", "--engine", "inline"]
    few = tmp_path / "few.toml"  # of four candidates no attack can show that it finds members
    few.write_text(tiny.read_text().replace("candidates = 40", "candidates = 4"))
    result = CliRunner().invoke(app, ["sweep", str(few), "--out", str(tmp_path / "weak"), *weak])
    assert result.exit_code == 3 and "EVALUATION UNRELIABLE" in result.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--engine", "slurm"], "There is no engine named 'slurm'"),
        (["--address", "auto"], "Engine 'local' has no address"),
        (["--workers", "0"], "workers=0"),
        (["--only", "defense"], "give key=value"),
        (["--preset", "large"], "no preset of suite 'tiny' named 'large'"),
        (["--add", "nobody"], "no defense named 'nobody'"),
        (["--dataset", "parquet:/nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_one_sentence_and_write_nothing(tiny, tmp_path, options, sentence):
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["sweep", str(tiny), "--out", str(out), *options])
    assert isinstance(result.exception, UsageError) and sentence in str(result.exception)
    assert not out.exists()


# -- a configuration is resolved once: one task, one list of points and of attacks, in every process ------------------
SMALL = {
    **{"defense": "dp", "grid": (0.1, 1.0), "model": "mlp", "attacks": ("analytic", "mia_loss"), "victims": 2},
    **{"clients": 2, "train": 60, "rounds": 1, "candidates": 40, "attack_batch": (1,), "canaries": 10},
    "stages": ("init", "final", "audit"),
}


@pytest.fixture
def made(monkeypatch):
    """Count what is made from here on, wherever it is asked for."""
    selftest()  # has a task of its own, once a process
    task.task_of.cache_clear()
    counts = Counter()

    def counted(module, name):
        real = getattr(module, name)

        def call(*args, **options):
            counts[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    counted(task, "partition")  # once a task
    counted(experiment, "points")
    counted(experiment, "select_attacks")
    counted(choice, "make_defense")
    counted(choice, "make_attack")
    return counts


def test_an_evaluation_resolves_its_configuration_once(made, tmp_path):
    evaluation = evaluate(**SMALL, out=tmp_path / "out", workers=1)
    assert len(evaluation.records) == 4 * 4, "four points; probes twice, records twice"
    assert made == {
        **{"partition": 1, "points": 1, "select_attacks": 1},
        "make_defense": 1 + 2 + 2,  # the defense as it is set, its grid, the controls
        "make_attack": 2 + 4,  # those asked, and those that the preset sets parameters of
    }


def test_a_sweep_resolves_each_evaluation_once(made, tmp_path):
    (tmp_path / "s.toml").write_text(TINY.replace("version = 1", "version = 1\nseeds = [0, 1]"))
    suite = load_suite(tmp_path / "s.toml")
    made["make_attack"] = 0  # the suite asks which of its attacks are built for which defense
    sweep(suite, out=tmp_path / "out", only={"defense": ["dp_sgd"], "stage": ["init"]}, engine="inline")
    assert made == {"partition": 2, "points": 4, "select_attacks": 4, "make_defense": 2 * (5 + 4), "make_attack": 0}


def test_a_worker_resolves_what_it_is_sent_once(made, tmp_path):
    """Jobs travel as their configuration: no task, no point and no attack goes between processes."""
    there = resolve(configure(**SMALL))
    jobs = [
        WorkItem(there, tmp_path, w.group.point, w.group, tuple(c.id for c in w.cells)) for w in plan_cells([there])
    ]
    made.clear()
    sent = [pickle.dumps(job) for job in jobs]
    assert len(jobs) == 16 and max(map(len, sent)) < 4000
    here = [pickle.loads(text) for text in sent]
    assert {id(job.experiment) for job in here} == {id(here[0].experiment)} and here[0].experiment is not there
    assert made["points"] == made["select_attacks"] == 1
    ids = [tuple(c.id for c in w.cells) for w in plan_cells([here[0].experiment])]
    assert ids == [job.cells for job in jobs], "and means the same there"


def test_what_needs_no_data_is_refused_before_any_are_read(made):
    wrong = {"no defense named 'dq'": {"defense": "dq"}, "built for": {"attacks": ("adaptive_ppdl",)}}
    for sentence, change in wrong.items():
        with pytest.raises(UsageError, match=sentence):
            resolve(configure(**SMALL | change))
    assert made["partition"] == 0
