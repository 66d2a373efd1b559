"""The suites that come with ppbench: each plans, with each of its presets, and these keep what a claim needs."""

import math
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ppbench.run.task as task_module
from ppbench.base.import_guard import torchvision
from ppbench.base.toml_files import shipped, suite_titles, tomllib
from ppbench.run.suite import load_suite
from ppbench.run.sweep import plan_sweep
from ppbench.task.dataset import Dataset, Split
from ppbench.task.imagefolder import masked_dataset
from ppbench.task.texts import letters

SHAPES = {"digits": (1, 8, 8), "mnist": (1, 28, 28), "ham10000": (3, 64, 64), "breakhis": (3, 64, 64)}
CLASSES = {"cifar100": 100, "ham10000": 7, "breakhis": 8, "officehome": 65}
LARGE = (12, "resnet50_fixup", "unet", "vgg16", "frozen_backbone")
"""Entries of suites, and networks, from which on a test looks at the first entries and the last ones only."""


@cache
def standing_in(name: str, size: int) -> Dataset:
    """Return a small data set of the shape that a suite's has, with `size` images to train on."""
    if name == "letters" or name.startswith("text:"):
        return letters("", seed=0, root=Path())
    if name.startswith("csv:"):
        x, y = torch.rand(900, 24), torch.rand(900, 1)
        train, test = Split(x[:800], y[:800], 1), Split(x[800:], y[800:], 1)
        return Dataset("table", train, test, 1, (24,), (0, 1), task="regression")
    name = name.rpartition("/")[2].partition("?")[0]
    if name == "lggs":
        x, y = torch.randint(0, 256, (90, 3, 64, 64), dtype=torch.uint8), (torch.rand(90, 1, 64, 64) < 0.2).float()
        return masked_dataset("segmentation:lggs", Split(x[:80], y[:80], 1), Split(x[80:], y[80:], 1))
    shape, classes = SHAPES.get(name, (3, 32, 32)), CLASSES.get(name, 10)
    x = torch.randint(0, 256, (200, *shape), dtype=torch.uint8).repeat(-(-(size + 800) // 200), 1, 1, 1)
    number = torch.arange(len(x))  # in two pixels: who was trained on is asked of images without a copy
    x.flatten(1)[:, :2] = torch.stack([number // 256, number % 256], 1).to(torch.uint8)
    y, domain = torch.arange(size + 800) % classes, torch.arange(size + 800) % 4 if name == "officehome" else None
    parts = [
        Split(x[p], y[p], classes, None if domain is None else domain[p])
        for p in (slice(size), slice(size, size + 800))
    ]
    return Dataset(name, *parts, classes, shape, (0, 1))


def needed(config) -> int:
    """Return how many training images an evaluation takes that says how many."""
    return math.ceil((config.train or 0) / (1 - config.public))


def presets(name: str) -> list[str]:
    return list(tomllib.loads(shipped()[name].read_text()).get("preset", {}))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    """A folder of downloads with the weights that a suite names."""
    folder = tmp_path_factory.mktemp("data")
    network = torchvision().models.mobilenet_v3_large(weights=None)
    torch.save(network.state_dict(), folder / "mobilenet_v3_large.pth")
    if find_spec("transformers"):
        from transformers import BertConfig, BertModel

        sizes = dict(vocab_size=1024, hidden_size=48, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96)
        BertModel(BertConfig(**sizes, max_position_embeddings=64)).save_pretrained(folder / "minilm")
    return folder


def needs(name):
    """Skip a suite of other frameworks' defenses where one is not installed; `.ci/run` asks beside them."""
    if name == "deployed":
        for framework in ("flwr", "nvflare", "opacus"):
            pytest.importorskip(framework)
    if name == "text-pretrained":
        pytest.importorskip("transformers")


def plans():
    """Return every suite with each preset: where `two-cores` has the same premise, it stands for all in a usual run,
    which asks every third of these."""
    every = [(name, preset) for name in sorted(shipped()) for preset in ("", *presets(name))]
    stands = [(name, preset) for name, preset in every if preset == "two-cores" or "two-cores" not in presets(name)]
    return [pytest.param(*one, marks=[] if one in stands[::3] else [pytest.mark.nightly]) for one in every]


@pytest.mark.parametrize(("name", "preset"), plans())
def test_shipped_suites_can_be_swept(name, preset, tmp_path, monkeypatch, downloads):
    """Whatever can be refused before anything is trained is not refused: losses, networks, stages, shares, victims."""
    needs(name)
    monkeypatch.setenv("PPBENCH_DATA", str(downloads))
    suite = load_suite(name, preset)
    few = 1000 if any(place in suite.configs[0].dataset for place in ("ham10000", "breakhis")) else 4000
    size = max(few, *(needed(config) for config in suite.configs))
    monkeypatch.setattr(task_module, "_dataset", lambda name, seed: standing_in(name, size))
    task_module.task_of.cache_clear()
    assert suite.id == (f"{name}@{preset}" if preset else name) and preset in suite_titles()[name]
    first = suite.configs[0].seed
    kept = [(experiment, place) for experiment, place in suite.places.items() if experiment.config.seed == first]
    if len(kept) >= LARGE[0] or kept[0][0].config.model in LARGE:
        kept = kept[:2] + kept[-2:]
    alone = replace(suite, places=dict(kept))
    planned = plan_sweep(alone, tmp_path / "out")
    task_module.task_of.cache_clear()
    results = {c.config.defense.id for one in planned.cells for c in one.cells}
    assert results >= {experiment.config.defense for experiment, _ in kept}
    assert planned.todo == planned.cells and not (tmp_path / "out").exists()


SMALL = {
    *("active", "baffle-perturbations", "classic", "compression", "cost", "digits-quick", "fedpc-workers", "messages"),
    *("text", "text-pretrained"),
}
"""Suites that two cores can do as they are."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "preset"), [(n, p) for n in sorted(set(shipped()) - SMALL) for p in sorted({"two-cores", *presets(n)})]
)
def test_what_two_cores_do_keeps_the_premise_of_the_claims(name, preset):
    """Fewer examples, rounds and victims; networks, losses, shares, clients and parameters are those of the suite."""
    needs(name)
    before, _, after = shipped()[name].read_text().partition(f"[preset.{preset}]")
    assert before.rstrip("\n").splitlines()[-1].startswith("# ") and after, "a comment says what the preset gives up"
    whole, two = (load_suite(name, chosen).configs for chosen in ("", preset))

    def premise(config):
        own = sorted((k, v) for k, v in config.settings.items() if "." not in k)
        options = sorted(config.model_options.items())
        fixed = (config.model, config.loss, config.partition, config.clients, config.upload, config.schedule)
        return (config.defense, *fixed, config.probe, config.local_epochs, str(own), str(options))

    assert {premise(config) for config in two} <= {premise(config) for config in whole}
    assert {c.seed for c in two} in ({0, 1, 2}, {0})
    assert len(two) // len({c.seed for c in two}) >= min(4, len(whole) // len({c.seed for c in whole}))


def test_boards_of_the_spn_paper_run_over_its_control_values_and_batches():
    for name in ("mnist-dlnet", "cifar10-dlnet", "cifar100-dlnet", "svhn-dlnet"):
        for preset in ("", "two-cores"):
            suite = load_suite(name, preset)
            of = {c.defense: c for c in suite.configs}
            assert {1e-4, 1e-3, 0.01, 0.1, 0.5} <= set(of["dp"].grid) and set(of["dp"].grid) == set(of["ppdl"].grid)
            assert {1e-4, 1e-3, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5} <= set(of["spn"].grid)
            thetas = {c.settings["theta"] for c in suite.configs if c.defense == "ppdl"}
            assert thetas == {0.05, 0.3} and of["spn"].attack_batch == (1, 4, 8) and of["spn"].clients == 10
        assert [of["spn"].victims_at(batch) for batch in (1, 4, 8)] == [20, 32, 64] and "closed_form" in of[
            "spn"
        ].attacks
    assert of["spn"].model_options == {"activation": "tanh"}  # svhn


def test_updates_of_fedpc_hold_as_many_mini_batches_as_its_theorems_need():
    for preset in ("", "two-cores"):
        for config in load_suite("fedpc-theorems", preset).configs:
            batches = math.ceil(min(config.attack_batch) / config.batch_size)
            assert (config.probe, batches) == ("local", 8) and config.clients in (3, 5, 10)
            assert config.defense != "fedpc" or str(config.settings["batch_sizes"]) == str(config.batch_size)


def test_updates_that_workers_see_are_eight_steps_on_one_image():
    for config in load_suite("fedpc-workers").configs:
        assert (config.probe, config.attack_batch, config.local_epochs) == ("local", (1,), 8) and config.batch_size == 1
        assert config.defense != "fedpc" or (config.settings["batch_sizes"], config.settings["epochs"]) == ("1", "8")
