"""Checkpoints of a long training: what a killed process leaves is gone on with, to the same model and figures."""

import pytest

from ppbench.run import train as training
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.testing.small_federation import same_tensors

ROUNDS, KILLED = 5, 3


class Killed(BaseException):
    """The process ends here, after a round's checkpoint."""


def experiment(defense, **other):
    small = dict(dataset="digits", clients=3, train=200, rounds=ROUNDS, grid=(0.1,), attacks=("label_recovery",))
    return resolve(configure(defense=defense, **{**small, **other}))


def point_of(one, defense):
    return next(point for point in one.points if point.defense.name == defense)


def kill_after(last):
    def after(round_):
        if round_ == last:
            raise Killed

    return after


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_S", 0.0)


@pytest.mark.parametrize(
    ("defense", "options"),
    [
        ("dp", {"optimizer": "adam"}),
        ("spn", {}),
        ("dp", {"sample": 2, "clients": 6}),
        ("top_k", {"model": "cnn", "model_options": {"norm": "bn"}}),
    ],
    ids=["momentum", "secret heads", "sampled clients", "what earlier rounds left out"],
)
def test_a_training_goes_on_to_the_same_model_and_figures(tmp_path, defense, options):
    one = experiment(defense, **options)
    point, rounds = point_of(one, defense), list[int]()
    whole, expected = training.train(one, point, tmp_path / "whole")
    with pytest.raises(Killed):
        training.train(one, point, tmp_path / "cut", kill_after(KILLED))
    fed, figures = training.train(one, point, tmp_path / "cut", rounds.append)
    assert rounds == list(range(KILLED + 1, ROUNDS + 1))
    assert figures.model_copy(update={"seconds": expected.seconds}) == expected
    assert same_tensors(fed.parties.server, whole.parties.server)
    assert all(same_tensors(fed.parties.clients[c], whole.parties.clients[c]) for c in range(one.config.clients))
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [
        path.name for path in (tmp_path / "whole").iterdir()
    ]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    one = experiment("dp")
    point, rounds = point_of(one, "dp"), list[int]()
    with pytest.raises(Killed):
        training.train(one, point, tmp_path, kill_after(KILLED))
    (kept,) = tmp_path.iterdir()
    assert kept.name.endswith(f".0.round{KILLED}"), "earlier ones are removed"
    weights = kept / "server.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + bytes(8))
    with pytest.warns(UserWarning, match="cannot be used"):
        _, figures = training.train(one, point, tmp_path, rounds.append)
    assert rounds == list(range(1, ROUNDS + 1))
    assert figures.utility == training.train(one, point, tmp_path / "other")[1].utility


def test_a_short_training_leaves_none(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_S", 300.0)
    one = experiment("dp")
    with pytest.raises(Killed):
        training.train(one, point_of(one, "dp"), tmp_path, kill_after(KILLED))
    assert not any(tmp_path.iterdir())
