"""`ppbench.invert`: somebody's own gradient, attacked as the bench attacks, or refused in one sentence."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import somebodys
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ppbench
from ppbench.adversary.attack import Attack, Guess
from ppbench.base.errors import UsageError
from ppbench.base.import_guard import importable
from ppbench.base.tree import leaves
from ppbench.federation.contract import plain_evidence
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data, Local, Plan
from ppbench.nets.model_object import held_network
from ppbench.nets.net import build, initial, net_spec
from ppbench.records.store import Store
from ppbench.run import invert as module
from ppbench.run.cells import cells, groups
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.group import run_group
from ppbench.run.scene import probe_group
from ppbench.run.train import federation
from ppbench.run.update_view import view_of

ROOT = Path(__file__).resolve().parent.parent
SHAPE = (1, 8, 8)
TINY = (1, 4, 4)


def lenet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return somebodys.LeNet(10, SHAPE)


def tiny(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), *more, nn.Linear(16, 3))


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return what a plain user of torch has."""
    return torch.autograd.grad(cross_entropy(model(x), y), [p for p in model.parameters() if p.requires_grad])


def refused(*arguments: Any, **options: Any) -> str:
    """Return the one sentence with which `invert` refuses."""
    with pytest.raises(UsageError) as error:
        ppbench.invert(*arguments, **options)
    sentence = str(error.value)
    assert "\n" not in sentence and sentence.endswith((".", "?")) and len(sentence) < 500
    return sentence


Victim = tuple[nn.Module, Tensor, Tensor, tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def victim(digits: Data) -> Victim:
    """A LeNet, a digit, its label and its gradient."""
    model, x, y = lenet(), digits.x[:1], digits.y[:1].argmax(1)
    return model, x, y, gradient_of(model, x, y)


# -- the same as in the bench -----------------------------------------------------------------------------------------
@pytest.mark.nightly
def test_a_lenets_gradient_gives_what_dlg_gives_in_a_cell_of_the_bench(tmp_path: Path) -> None:
    """One victim at initial weights: the images that the cell keeps, bit for bit; by plain torch's gradient nearly."""
    options = dict(model="somebodys:LeNet", attacks=("dlg",), stages=("init",), attack_batch=(1,), victims=1, tuning=0)
    config = configure(defense="none", clients=1, train=8, rounds=1, seed=5, settings={"dlg.budget": 150}, **options)
    experiment = resolve(config)
    group = next(g for g in groups(experiment) if experiment.points[g.point].defense.name == "none")
    (cell,) = cells(experiment, group)
    run_group(experiment, group, tmp_path, [cell.id])
    store = Store(tmp_path)
    record = store.load(cell.id)
    kept = store.images(record)
    assert kept is not None and record.status == "complete"

    fed = federation(experiment, experiment.points[group.point])
    fed.start(experiment.task.params)
    scene = probe_group(experiment, group, fed)
    (exchange,) = scene.view.exchanges()
    model = lenet()
    names = held_network(model, SHAPE).names
    model.load_state_dict({names[n]: value for n, value in experiment.task.params.items()})
    sent = {names[n]: value for n, value in exchange.answer.params.items()}

    inversion = ppbench.invert(model, sent, SHAPE, attack="dlg", seed=5, budget=150)
    assert np.array_equal(inversion.x.numpy(), kept.guess)
    (score,) = record.victims
    assert inversion.psnr(torch.tensor(kept.truth)) == [score.psnr] and inversion.evaluations == score.evaluations
    assert inversion.y is not None and score.label and score.psnr > 25
    truth = scene.victims.truth(scene.victims.units[0])
    own = gradient_of(model, truth.x, truth.y.argmax(1))
    for value, name in zip(own, names.values(), strict=True):
        torch.testing.assert_close(value, sent[name], rtol=1e-4, atol=1e-6)
    near = ppbench.invert(model, own, SHAPE, attack="dlg", seed=5, budget=150)
    assert near.psnr(truth.x)[0] > 25 and near.mismatch is not None and near.mismatch < 1e-6


def test_by_default_linear_systems_answer_and_a_search_where_these_are_not_exact(victim: Victim) -> None:
    model, x, _, gradient = victim
    exact = ppbench.invert(model, gradient, SHAPE, planted=False)
    assert exact.attack == "closed_form" and exact.psnr(x)[0] > 80 and exact.evaluations == 2
    assert exact.layers and all(layer.exact for layer in exact.layers) and exact.converged is None
    searched = ppbench.invert(model, gradient, SHAPE, batch=9, planted=False, budget=20)
    named = ppbench.invert(model, gradient, SHAPE, attack="dlg", batch=9, planted=False, budget=20)
    assert searched.attack == "dlg" and torch.equal(searched.x, named.x) and not searched.layers


def test_by_default_the_answer_counts_that_explains_the_gradient_best(
    victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies outside the data range explains nothing: not the smaller mismatch wins, but the better image."""
    model, x, y, gradient = victim
    tried: list[str] = []

    def answer(attack: Attack, *_: object) -> Guess:
        tried.append(attack.name)
        images = {"dlg": x + 1.2, "feature_inversion": x + 0.01}
        return Guess(x=torch.cat([images.get(attack.name, 0 * x)] * 2), y=torch.cat([y, y]))

    monkeypatch.setattr(module, "_answer", answer)
    result = ppbench.invert(model, gradient, SHAPE, batch=2, planted=False)
    assert result.attack == "feature_inversion" and tried == ["closed_form", "dlg", "feature_inversion"]


@pytest.mark.parametrize(
    ("kinks", "batch", "single", "names"),
    [
        (False, 1, False, ("dlg",)),
        (False, 4, False, ("dlg", "feature_inversion")),
        (True, 1, False, ("ig_features", "feature_inversion")),
        (True, 4, True, ("ig_features",)),
    ],
)
def test_searches_of_the_default_follow_the_network(
    kinks: bool, batch: int, single: bool, names: tuple[str, ...]
) -> None:
    plan = Plan(net_spec("cnn" if kinks else "dlnet", SHAPE, 10), 1, Local("gradient"))
    assert module._searches(plan, batch, single) == names
    assert module._searches(replace(plan, local=replace(plan.local, upload="delta")), batch, single) == (
        "fedavg_inversion",
    )


# -- what is found ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("attack", ["idlg", "ig"])
def test_attacks_that_read_plain_gradients_run(victim: Any, attack: str) -> None:
    model, x, y, gradient = victim
    inversion = ppbench.invert(model, gradient, SHAPE, attack=attack, budget=100)
    assert inversion.x.shape == x.shape and inversion.x.dtype == torch.float32 and torch.equal(inversion.y, y)
    assert 0 < inversion.evaluations <= 100 and inversion.mismatch is not None and inversion.mismatch < 0.1
    assert inversion.psnr(x)[0] > 12


def test_a_batch_of_two_with_its_labels(digits: Data) -> None:
    model, x, y = lenet(), digits.x[:2], digits.y[:2].argmax(1)
    gradient = gradient_of(model, x, y)
    inversion = ppbench.invert(model, gradient, SHAPE, y.tolist(), budget=400)
    assert torch.equal(inversion.y, y) and min(inversion.psnr(x)) > 20
    assert inversion.psnr(x.flip(0)) == inversion.psnr(x)[::-1]  # matched, in the order of the truth
    guessed = ppbench.invert(model, gradient, SHAPE, attack="idlg", batch=2, budget=5)
    assert guessed.x.shape == (2, *SHAPE) and sorted(guessed.y.tolist()) == sorted(y.tolist())


def test_a_first_linear_layer_gives_its_input_away_exactly(digits: Data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    x, y = digits.x[3:4], digits.y[3:4].argmax(1)
    inversion = ppbench.invert(model, gradient_of(model, x, y), SHAPE, attack="analytic")
    assert inversion.psnr(x)[0] > 80
    alone = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert ppbench.invert(alone, gradient_of(alone, x, y), SHAPE, budget=50).psnr(x)[0] > 40


def test_nothing_of_the_users_is_moved(victim: Any) -> None:
    _, x, y, _ = victim
    model = somebodys.Net().eval()
    cross_entropy(model(x), y).backward()
    gradient = [p.grad for p in model.parameters()]
    before = copy.deepcopy((model.state_dict(), gradient))
    made, state = type(model), torch.get_rng_state()
    ppbench.invert(model, gradient, SHAPE, budget=3)
    assert type(model) is made and not model.training and torch.equal(torch.get_rng_state(), state)
    after = leaves((dict(model.state_dict()), gradient))
    assert all(torch.equal(a, b) for a, b in zip(leaves((dict(before[0]), before[1])), after, strict=True))
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("Net", "train"), ("Net", "eval")),
        *(pytest.param("resnet18", mode, marks=pytest.mark.nightly) for mode in ("train", "eval")),
    ],
)
def test_modes_mean_what_they_mean_in_torch(name: str, mode: str) -> None:
    """At the truth the simulation is the gradient that torch computed, in either mode, batch norms and all."""
    shape, y = (3, 32, 32) if name == "resnet18" else SHAPE, torch.tensor([3, 4])
    model = importable(lambda: getattr(somebodys, name)(10)).train(mode == "train")
    with torch.no_grad():
        for buffer in (b for b in model.buffers() if b.is_floating_point()):
            buffer.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    network = held_network(model.double(), shape)
    seen = dict(zip(network.names, gradient_of(model, x, y), strict=True))
    plan = Plan(network.spec, 1, Local("gradient", batch=2))
    (evidence,) = plain_evidence(view_of(plan, network.spec.start, seen))
    assert at_truth(evidence, x[None], torch.eye(10)[y][None]) < 1e-12
    assert build(plan.spec).mixes == (mode == "train")


@pytest.mark.parametrize("name", ["somebodys:LeNet", "dlnet"])
def test_a_network_of_the_bench_is_taken_as_an_object_too(name: str, digits: Data) -> None:
    """A `Classifier`, also one that the bench made of a user's class, keeps its own parameter names."""
    classifier = copy.deepcopy(build(net_spec(name, SHAPE, 10)).module).to_empty(device="cpu")
    classifier.load_state_dict(initial(net_spec(name, SHAPE, 10), 0))
    x, y = digits.x[:1], digits.y[:1].argmax(1)
    gradient = dict(zip(dict(classifier.named_parameters()), gradient_of(classifier, x, y), strict=True))
    result = ppbench.invert(classifier, gradient, SHAPE, planted=False)
    assert result.psnr(x)[0] > 80 and torch.equal(result.y, y)


def test_networks_that_are_held_are_told_apart_and_named_in_no_file(tmp_path: Path, victim: Any) -> None:
    model, _, _, gradient = victim
    one, other = held_network(model, SHAPE), held_network(lenet(1), SHAPE)
    assert one.spec == one.spec != other.spec and hash(one.spec) != hash(other.spec) and build(one.spec) is one.spec.net
    assert torch.equal(initial(one.spec, 7)["head.weight"], model.fc.weight)
    view = view_of(Plan(one.spec, 1), one.spec.start, dict(zip(one.names, gradient, strict=True)))
    with pytest.raises(UsageError, match="held as an object, cannot be saved; name the network by its address"):
        view.save(tmp_path / "view")
    assert not (tmp_path / "view").exists()


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ("mia_loss", "answers another question (membership)"),
        ("label_recovery", "answers another question (label)"),
        ("mia_upload", "answers another question (batch membership)"),
        ("imprint", "is of a server that sends weights of its own"),
        ("adaptive_spn", "is built for what spn sends"),
        ("gifd", "learns from public examples"),
        ("tableak", "has no use for a network such as 'LeNet'"),
        ("adaptive_server", "runs the server's own code again, and only a federation has its state"),
        ("two_rounds", "needs gradients of 2 rounds of one batch"),
        ("dgl", "There is no attack named 'dgl'; did you mean"),
        (ppbench.load_attack, "give a name, as 'dlg', or what load_attack gives"),
    ],
)
def test_attacks_that_need_more_are_refused(victim: Any, attack: Any, words: str) -> None:
    model, _, _, gradient = victim
    assert words in refused(model, gradient, SHAPE, attack=attack)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (lambda m, g: (m, g[:-1], SHAPE), {}, "has 7 tensors; the model has 8 trained parameters"),
        (lambda m, g: (m, g[0], SHAPE), {}, "a Tensor of shape (12, 1, 5, 5); give a tensor for each"),
        (lambda m, g: (m, {"fc.wieght": g[6]}, SHAPE), {}, "named 'fc.wieght'; did you mean 'fc.weight'"),
        (lambda m, g: (m, {}, SHAPE), {}, "The gradient has no parameter that requires a gradient"),
        (lambda m, g: (m, [0 * v for v in g], SHAPE), {}, "The gradient is zero in all parameters"),
        (lambda m, g: (m, g, (1, 1, 8, 8)), {}, "shape must be that of one input, without the batch"),
        (lambda m, g: (m, g, (1, 9, 30)), {}, "'LeNet' cannot be run on inputs of shape (1, 9, 30)"),
        (lambda m, g: (m, g, 64), {}, "shape=64 cannot be used"),
        (lambda m, g: (m, g, (1, 0, 8)), {}, "shape=(1, 0, 8) cannot be used"),
        (lambda m, g: (nn.Conv2d(1, 2, 3), g, SHAPE), {}, "it answers two inputs by (2, 2, 6, 6); it must"),
        (lambda m, g: (somebodys.ends_in_softmax(), g, SHAPE), {}, "it answers by probabilities"),
        (lambda m, g: (somebodys.Attention(10), g, SHAPE), {}, "its layer block.self_attn (MultiheadAttention) draws"),
        (lambda m, g: (somebodys.Draws(10), g, SHAPE), {}, "draws at random in each pass, in eval mode too"),
        (lambda m, g: (m, g, SHAPE, [3, 4]), {"batch": 1}, "batch=1 cannot be used; there are 2 labels"),
        (lambda m, g: (m, g, SHAPE, [10]), {}, "labels=[10] cannot be used; they must be classes from 0 to 9"),
        (lambda m, g: (m, g, SHAPE, torch.eye(10)[:1]), {}, "they must be classes from 0 to 9"),
        (lambda m, g: (m, g, SHAPE, "3"), {}, "labels='3' cannot be used"),
        (lambda m, g: (m, g, SHAPE), {"batch": 0}, "batch=0 cannot be used; it must be a whole number from 1"),
        (lambda m, g: (m, g, SHAPE), {"seed": -1}, "seed=-1 cannot be used"),
        (lambda m, g: (m, g, SHAPE), {"data_range": (1, 0)}, "data_range=(1, 0) cannot be used"),
        (lambda m, g: (m, g, SHAPE), {"device": "gpu"}, "Device 'gpu' cannot be used"),
        (lambda m, g: (m, g, SHAPE), {"budgt": 3}, "parameter of attack 'dlg' named 'budgt'; did you mean 'budget'"),
        (lambda m, g: (m, g, SHAPE), {"budget": 0}, "budget=0 cannot be used; it must be a whole number from 1"),
        (lambda m, g: (m, g, SHAPE), {"attack": ppbench.load_attack("dlg"), "budget": 3}, "to an attack object"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_told_in_one_sentence(victim: Any, arguments: Any, options: Any, words: str) -> None:
    model, _, _, gradient = victim
    assert words in refused(*arguments(model, gradient), **options)


def test_batch_norm_of_single_values_is_refused() -> None:
    model = tiny(nn.BatchNorm1d(16))
    x, y = torch.rand(2, *TINY), torch.tensor([0, 1])
    gradient = gradient_of(model, x, y)
    assert "give batches of 2 and more, or put it into eval mode" in refused(model, gradient, TINY)
    assert ppbench.invert(model, gradient, TINY, batch=2, budget=3).x.shape == (2, *TINY)


# -- odd combinations of arguments, of which `test_handed` tries each alone -------------------------------------------
MODEL = tiny()
GOOD = gradient_of(MODEL, torch.rand(1, *TINY), torch.tensor([1]))
ODD = st.one_of(
    st.none(), st.integers(-3, 3), st.text(max_size=3), st.floats(), st.just(torch.zeros(())), st.just(GOOD[0]),
    st.just(torch.full((3, 16), torch.inf)), st.just(torch.zeros(3, dtype=torch.complex64)), st.just(torch.zeros(0)),
)  # fmt: skip
LABELS = st.one_of(st.none(), ODD, st.lists(st.integers(-1, 4), max_size=3), st.lists(st.floats(), max_size=2))
GRADIENTS = st.one_of(
    ODD, st.lists(st.one_of(ODD, st.sampled_from(GOOD)), max_size=3), st.just(GOOD),
    st.dictionaries(st.sampled_from(["1.weight", "1.bias", "", "weight"]), st.one_of(ODD, st.sampled_from(GOOD))),
)  # fmt: skip
SHAPES = st.one_of(st.just(TINY), ODD, st.lists(st.integers(-1, 17), max_size=4))


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(GRADIENTS, SHAPES, LABELS, st.one_of(st.none(), ODD))
@example(GOOD, TINY, None, None)
@example(GOOD, TINY, [1], 1)
def test_any_input_is_answered_or_refused_in_one_sentence(gradient: Any, shape: Any, labels: Any, batch: Any) -> None:
    try:
        result = ppbench.invert(MODEL, gradient, shape, labels, batch=batch, budget=2, restarts=0)
    except UsageError as error:
        assert str(error) and "\n" not in str(error) and "Traceback" not in str(error)
    else:
        assert result.x.shape[1:] == TINY and result.y is not None and len(result.y) == len(result.x)


# -- the page ---------------------------------------------------------------------------------------------------------
FIGURES = re.compile(r"\d+\.\de[-+]\d+")
NEAR = 15
"""dB by which a reconstruction may differ from the page's: 5 without statistics, 92 with them."""


def levels_of(text: str) -> list[int]:
    """Return the decibels that blocks of the page print."""
    return [int(level) for ends in re.findall(r">((?: \d+)+) dB", text) for level in ends.split()]


def test_the_page_runs_as_it_stands_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Every block as it is printed, one after another; last digits differ from processor to processor."""
    page = (ROOT / "docs" / "invert.md").read_text(encoding="utf-8")
    blocks, shown = (
        re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) for kind in ("python", "text")
    )
    scope: dict[str, Any] = {}
    assert len(blocks) == 7 and len(shown) == 5
    for block, text in zip_longest(blocks, shown):
        exec(compile(block, "docs/invert.md", "exec"), scope)
        printed = capsys.readouterr().out
        if text is not None:
            words, same = (re.sub(r" \d+(?=[ \d]* dB)", " #", FIGURES.sub("#", one)) for one in (printed, text))
            assert words == same
            assert all(abs(a - b) <= NEAR for a, b in zip(levels_of(printed), levels_of(text), strict=True))
    assert scope["guess"].y.tolist() == [3] and scope["fed"].round == 3
