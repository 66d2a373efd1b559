"""A configuration is resolved once: one task, one list of points and of attacks, in every process of an evaluation."""

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ppbench.base.errors import UsageError
from ppbench.run import choice, experiment, task
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import resolve
from ppbench.run.jobs import Job
from ppbench.run.schedule import wanted
from ppbench.run.selftest import selftest
from ppbench.run.suite import load_suite
from ppbench.run.sweep import sweep

pytestmark = pytest.mark.usefixtures("undrawn")
SMALL: dict[str, Any] = {
    **{"defense": "dp", "grid": (0.1, 1.0), "model": "mlp", "attacks": ("analytic", "mia_loss"), "victims": 2},
    **{"clients": 2, "train": 60, "rounds": 1, "candidates": 40, "attack_batch": (1,), "canaries": 10},
    "stages": ("init", "final", "audit"),
}
TWO_SEEDS = """
schema = "ppbench.run.suite/1"
id = "two-seeds"
version = 1
title = "Two tasks"
seeds = [0, 1]
[task]
model = "mlp"
clients = 2
train = 60
[federation]
rounds = 1
[questions]
attacks = ["label_recovery"]
attack_batch = [1]
victims = 2
stages = ["init"]
[[defense]]
id = "dp"
grid = [0.1]
"""


@pytest.fixture
def made(monkeypatch):
    """Count what is made from here on, wherever it is asked for."""
    selftest()  # has a task of its own, once a process
    task.task_of.cache_clear()
    counts = Counter[str]()

    def counted(module, name):
        real: Callable[..., object] = getattr(module, name)

        def call(*args, **options):
            counts[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, call)

    counted(task, "partition")  # once a task
    counted(experiment, "points")
    counted(experiment, "attacks")
    counted(choice, "make_defense")
    counted(choice, "make_attack")
    return counts


def test_an_evaluation_resolves_its_configuration_once(made, tmp_path):
    found = evaluate(**SMALL, out=tmp_path / "out", workers=1)
    assert len(found.records) == 4 * 4, "four points; probes twice, records twice"
    assert made == {
        **{"partition": 1, "points": 1, "attacks": 1},
        "make_defense": 1 + 2 + 2,  # the defense as it is set, its grid, the controls
        "make_attack": 2 + 3,  # those asked, and those that the preset sets parameters of
    }


def test_a_sweep_resolves_each_evaluation_once(made, tmp_path):
    (tmp_path / "s.toml").write_text(TWO_SEEDS)
    suite = load_suite(tmp_path / "s.toml")
    made["make_attack"] = 0  # the suite asks which of its attacks are built for which defense
    sweep(suite, out=tmp_path / "out", engine="inline")
    assert made == {"partition": 2, "points": 2, "attacks": 2, "make_defense": 2 * 4, "make_attack": 0}


def test_a_worker_resolves_what_it_is_sent_once(made, tmp_path):
    """Jobs travel as their configuration: no task, no point and no attack goes between processes."""
    there = resolve(configure(**SMALL))
    jobs = [Job(there, tmp_path, w.group.point, w.group, tuple(c.id for c in w.cells)) for w in wanted([there])]
    made.clear()
    sent = [pickle.dumps(job) for job in jobs]
    assert len(jobs) == 16 and max(map(len, sent)) < 4000
    here = [pickle.loads(text) for text in sent]
    assert {id(job.experiment) for job in here} == {id(here[0].experiment)} and here[0].experiment is not there
    assert made["points"] == made["attacks"] == 1
    ids = [tuple(c.id for c in w.cells) for w in wanted([here[0].experiment])]
    assert ids == [job.cells for job in jobs], "and means the same there"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [({"defense": "dq"}, "no defense named 'dq'"), ({"attacks": ("adaptive_ppdl",)}, "built for")],
)
def test_what_needs_no_data_is_refused_before_any_are_read(change, sentence, made):
    with pytest.raises(UsageError, match=sentence):
        resolve(configure(**{**SMALL, **change}))
    assert made["partition"] == 0
