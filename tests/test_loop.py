"""Plugins by name, and a defense in somebody's own loop: the bench's own federation, of his network and data."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import somebodys
import torch
from torch import Tensor, nn

import ppbench
from ppbench.base.errors import UsageError
from ppbench.base.tree import leaves
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data
from ppbench.metrics.image import psnr
from ppbench.nets.model_object import held_network
from ppbench.run.config import configure
from ppbench.run.experiment import make_defense, resolve

SHAPE = (1, 8, 8)


@pytest.fixture(scope="module")
def shards(digits: Data) -> list[tuple[Tensor, Tensor]]:
    """Four clients' digits: what a DataLoader gives."""
    return [(digits.x[rows], digits.y[rows].argmax(1)) for rows in torch.arange(64).view(4, 16)]


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return somebodys.LeNet(10, SHAPE)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_plugins_are_loaded_with_their_parameters() -> None:
    spn = ppbench.load_defense("spn", alpha2=0.1)
    assert isinstance(spn, ppbench.Defense) and spn == make_defense("spn", {"alpha2": 0.1})
    dlg = ppbench.load_attack("dlg", budget=7)
    assert isinstance(dlg, ppbench.Attack) and dlg.parameters()["budget"] == 7


@pytest.mark.parametrize(
    ("load", "name", "parameters", "words"),
    [
        ("load_defense", "sqn", {}, "There is no defense named 'sqn'; did you mean 'spn'"),
        ("load_defense", "spn", {"alpha": 1}, "parameter of defense 'spn' named 'alpha'; did you mean 'alpha2'"),
        ("load_defense", "spn", {"alpha2": "much"}, "The defense 'spn' refuses alpha2='much'"),
        ("load_defense", "dp", {"sigma": -1.0}, "Defense 'dp': sigma=-1.0 cannot be used; it must be a number >="),
        ("load_attack", "dgl", {}, "There is no attack named 'dgl'"),
        ("load_attack", "dlg", {"budget": 0}, "Attack 'dlg': budget=0 cannot be used; it must be a whole number"),
        ("load_attack", "dlg", {"name": "x"}, "There is no parameter of attack 'dlg' named 'name'"),
    ],
)
def test_what_cannot_be_loaded_is_told_as_the_command_line_tells_it(
    load: str, name: str, parameters: dict[str, Any], words: str
) -> None:
    assert words in (message := refusal(getattr(ppbench, load), name, **parameters))
    if load == "load_defense" and "must be" not in words:
        assert refusal(lambda: resolve(configure(defense=name, settings=parameters))) == message


def test_two_lines_train_somebodys_network_under_a_defense(shards: Any) -> None:
    model = lenet()
    before = [value.clone() for value in model.state_dict().values()]
    fed = ppbench.federate(ppbench.load_defense("spn", alpha2=0.1), model, shards, lr=0.01, batch_size=4, seed=3)
    first = fed.outputs(shards[0][0])
    assert fed.run(1) and fed.run(2) and fed.round == 2 and fed.wire.up > 0
    assert fed.outputs(shards[0][0]).shape == (16, 10) and not torch.equal(first, fed.outputs(shards[0][0]))
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    torch.testing.assert_close(ppbench.federate(make_defense("none"), model, shards).outputs(shards[0][0]),
                               model(shards[0][0]).detach().double(), rtol=1e-4, atol=1e-5)  # fmt: skip
    assert (fed.plan.local.opt.lr, fed.plan.local.batch, fed.seeds.master) == (0.01, 4, 3)


def test_an_undefended_clients_upload_is_the_gradient_that_torch_computes(shards: Any) -> None:
    """What `probe` shows is inverted as the user's own gradient is."""
    model, (x, y) = lenet(), (shards[0][0][:1], shards[0][1][:1])
    fed = ppbench.federate(ppbench.load_defense("none"), model, shards)
    state = leaves(fed.parties)
    view, challenges = ppbench.probe(fed, [(x, y)])
    assert all(a is b for a, b in zip(state, leaves(fed.parties), strict=True))
    (exchange,) = view.exchanges()
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    sent = [exchange.answer.params[name] for name in held_network(model, SHAPE).names]
    for a, b in zip(sent, gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert [(len(a.unit), a.batch, a.y) for a in challenges] == [(1, 1, None)]


def test_spns_own_attack_reads_through_it_in_two_more_lines(shards: Any) -> None:
    fed = ppbench.federate(ppbench.load_defense("spn", alpha2=0.1), lenet(), shards)
    x = shards[0][0][:2]
    view, challenges = ppbench.probe(fed, [(x[:1], shards[0][1][:1]), (x[1:], shards[0][1][1:2])])
    attack = ppbench.load_attack("adaptive_spn", inversion_budget=200, joint_budget=200, restarts=1)
    guesses = attack.run(view, challenges, torch.Generator().manual_seed(0))
    assert [slot.client for challenge in challenges for slot in challenge.unit] == [0, 1]
    decibels = [psnr(guess.x[0], one) or 0.0 for guess, one in zip(guesses, x, strict=True)]
    assert min(decibels) > 20, decibels


@pytest.mark.parametrize(
    ("name", "questions"), [("secagg", 1), ("fedpc", 4), ("dp_sgd", 4), ("ppdl", 4), ("pbpfl", 4), ("baffle", 1)]
)
def test_defenses_run_on_somebodys_network_as_their_papers_need_it(name: str, questions: int, shards: Any) -> None:
    """Without a word about losses, steps and rounds of a probe; of sums the question is about all."""
    fed = ppbench.federate(ppbench.load_defense(name), linear(), shards)
    view, challenges = ppbench.probe(fed, [(x[:4], y[:4]) for x, y in shards])
    assert len(challenges) == questions and sum(len(a.unit) for a in challenges) == 4
    assert {slot.client for a in challenges for slot in a.unit} == {0, 1, 2, 3}
    assert fed.run(1) and next(view.exchanges()).answer is not None
    if name == "pbpfl":  # the perturbation is taken off again: his network is walked as ours are
        x, y = shards[0]
        evidence = view.defense.evidence(view)[0]
        assert at_truth(evidence, x[None, :4], torch.eye(10)[y[None, :4]]) < 1e-12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shards": []}, "There are no shards; give each client inputs"),
        ({"shards": [(torch.rand(3, *SHAPE), [1, 2])]}, "Client 0 holds 3 inputs and 2 labels"),
        (
            {"shards": [(torch.rand(2, *SHAPE), [1, 2]), (torch.rand(2, 64), [1, 2])]},
            "Client 1 holds inputs torch.float32 of",
        ),
        ({"defense": "spn"}, "The defense is 'spn'; give what load_defense gives"),
        ({"model": somebodys.ends_in_softmax()}, "it answers by probabilities"),
        ({"learning_rate": 0.1}, "There is no option of training named 'learning_rate'"),
        ({"lr": -1.0}, "Option lr=-1.0 cannot be used"),
        ({"device": "gpu"}, "Device 'gpu' cannot be used"),
        ({"data_range": "all"}, "data_range='all' cannot be used"),
        ({"defense": make_defense("dp", {"sigma": -1.0})}, "sigma=-1.0 cannot be used"),
        ({"defense": make_defense("dp_sgd"), "model": somebodys.Net()}, "which batch norm in model 'Net'"),
    ],
)
def test_federations_that_cannot_be_are_refused(change: dict[str, Any], words: str) -> None:
    own = [(torch.rand(2, *SHAPE), [1, 2])]
    options = {"defense": make_defense("none"), "model": linear(), "shards": own, **change}
    first = [options.pop(name) for name in ("defense", "model", "shards")]
    assert words in refusal(ppbench.federate, *first, **options)


def test_batches_that_cannot_be_probed_are_refused(shards: Any) -> None:
    fed = ppbench.federate(make_defense("secagg"), linear(), shards)
    assert "There are 1 batches of [16] examples; give 4, of one size" in refusal(ppbench.probe, fed, shards[:1])
    plain = ppbench.federate(make_defense("none"), linear(), shards)
    assert "give up to 4, of one size" in refusal(ppbench.probe, plain, [*shards, *shards])
    assert "There are no batches; give each client" in refusal(ppbench.probe, plain, [])
    assert "of [3, 16] examples" in refusal(ppbench.probe, plain, [(shards[0][0][:3], shards[0][1][:3]), shards[1]])


def test_importing_ppbench_imports_no_torch() -> None:
    code = "import sys, ppbench; assert not {'torch', 'numpy', 'ppbench.run'} & set(sys.modules); dir(ppbench)"
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode
