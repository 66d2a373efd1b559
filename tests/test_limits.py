"""What is asked for is counted before memory is: victims, networks, local epochs; and what data must hold."""

import gzip
import pickle

import numpy as np
import pytest
import torch
from bad_files import png, put

from ppbench import evaluate
from ppbench.adversary.victims import choose_victims
from ppbench.base import machine
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.commands import LONGEST, check_words
from ppbench.federation.plan import Data
from ppbench.nets.net import _built, net_spec
from ppbench.run.config import EvaluateConfig, numbers, scalar, sizes
from ppbench.run.suite import SuiteFile
from ppbench.task.user_data import open_dataset

SMALL = {"defense": "dp", "grid": (0.1,), "clients": 2, "rounds": 1, "train": 90, "victims": 2, "attack_batch": (1,)}
SMALL |= {"attacks": ("dlg",), "stages": ("init",), "tuning": 0}


def test_victims_are_counted_before_places_are_made():
    shards = {0: Data(torch.rand(5, 1, 2, 2), torch.eye(5)), 1: Data(torch.rand(4, 1, 2, 2), torch.eye(5)[:4])}
    with pytest.raises(UsageError, match="300,000,000 victims cannot be drawn from 9 examples; use fewer --victims"):
        choose_victims(shards, "server/1", 1, 300_000_000, Seeds(0))


def test_what_memory_cannot_hold_is_refused_with_the_estimate(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "memory", lambda: 2.0**24)
    with pytest.raises(UsageError, match=r"parameters would need 0\.\d GiB of memory or more, and there are 0\.0"):
        _built.__wrapped__(net_spec("mlp", (1, 8, 8), 10, {"hidden": "4096,4096"}))
    with pytest.raises(UsageError, match="10,000 local epochs of a client would need"):
        evaluate(**SMALL | {"local_epochs": 10_000, "seed": 77}, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["mlp", "cnn", "dlnet", "densenet", "resnet20"])
def test_counting_a_network_draws_nothing(name):
    """The initial weights are those that torch's generator gave before networks were counted."""
    spec = net_spec(name, (3, 32, 32), 10)
    torch.manual_seed(5)
    _built.__wrapped__(spec)
    with_count = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(with_count, torch.rand(3))


def test_images_of_one_color_each_carry_nothing_and_some_among_others_stay(tmp_path):
    def folder(name, images):
        for place, image in enumerate(images):
            put(f"{name}/c{place % 2}/{place}.png", image, tmp_path, None)
        return {
            **SMALL,
            "dataset": f"imagefolder:{tmp_path / name}",
            "model": "mlp",
            "train": None,
            "out": tmp_path / "o",
        }

    flat = [png(color=10 * level) for level in range(20)]
    with pytest.raises(UsageError, match="Every image of data set 'imagefolder:flat' is of one color"):
        evaluate(**folder("flat", flat))
    assert not (tmp_path / "o").exists()
    import random

    some = [png(draw=random.Random(level)) if level % 2 else image for level, image in enumerate(flat)]
    assert {r.status for r in evaluate(**folder("some", some), workers=1).records} == {"complete"}


def test_files_that_an_old_torchvision_would_unpickle_run_no_code(tmp_path):
    class Harm:
        def __reduce__(self):
            return (tmp_path.joinpath("harm").touch, ())

    for name in ("training.pt", "test.pt"):
        put(f"MNIST/processed/{name}", pickle.dumps(Harm()), tmp_path, None)
    with pytest.raises(UsageError, match="mnist is neither readable in"):
        open_dataset("mnist", seed=0, root=tmp_path)
    assert not (tmp_path / "harm").exists()


def test_words_are_numbers_in_ascii_alone():
    assert [scalar(word) for word in ("1", "-2", "1.5", "1e3", ".5", "true", "x")] == [
        1,
        -2,
        1.5,
        1000.0,
        0.5,
        True,
        "x",
    ]
    assert all(isinstance(scalar(word), str) for word in ("\u0661", "1_0", "0x1", "1e", ""))
    assert sizes("1,8") == (1, 8) and numbers("0.1,2") == (0.1, 2.0) and numbers("paper") == "paper"
    for word in ("true", "1.5", "", ",", "\u0661"):
        with pytest.raises(UsageError, match="--attack-batch"):
            sizes(word)
    assert np.isinf(numbers("inf")).all(), "what is no finite number is refused by name, with the configuration"


OTHERS = {"grid", "grids", "settings", "model_options", "set", "attack"}
"""Fields whose numbers are a plugin's: it has their ends."""


def numbers_of(node, path=()):
    """Yield the paths of numbers in a JSON schema that lack a least or a most."""
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict) or OTHERS & {*path[-1:]}:
        return
    ends = ({"minimum", "exclusiveMinimum"} & node.keys(), {"maximum", "exclusiveMaximum"} & node.keys())
    if node.get("type") in ("integer", "number") and not all(ends):
        yield path
    for name, value in node.items():
        yield from numbers_of(value, (*path, name))


@pytest.mark.parametrize("model", [EvaluateConfig, SuiteFile])
def test_every_number_of_options_and_suites_has_two_ends(model):
    schema = model.model_json_schema()
    assert "rounds" in str(schema) and list(numbers_of(schema)) == []
    assert list(numbers_of({"x": [{"type": "integer", "minimum": 0}]})) == [("x", 0)]


def test_words_that_name_nothing_are_refused_wherever_they_stand():
    for words, where in (
        (["verify", ""], "after 'verify'"),
        (["--out="], "after '--out'"),
        (["--set", " "], "after '--set'"),
        ([""], "number 1"),
    ):
        with pytest.raises(UsageError, match=f"The word {where} is empty"):
            check_words(words)
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        check_words(["--out", "x\udcff"])
    with pytest.raises(UsageError, match="words end at 20,000"):
        check_words(["x" * (LONGEST + 1)])
    check_words(["evaluate", "--set", "sigma=", "--out=a", "x" * LONGEST])


@pytest.mark.parametrize("spoil", [lambda data: data[:30], lambda data: data[:12] + b"\xff" * 40, lambda data: b"no"])
def test_a_table_whose_compression_is_damaged_is_one_sentence(tmp_path, spoil):
    put("d.csv.gz", spoil(gzip.compress(b"a,b\n" + b"1,2\n3,4\n" * 400)), tmp_path, None)
    with pytest.raises(UsageError, match=r"d\.csv\.gz cannot be read as a table"):
        open_dataset(f"csv:{tmp_path / 'd.csv.gz'}", seed=0, root=tmp_path)
