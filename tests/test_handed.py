"""What people hand to `invert` and `federate`: read right, or refused in one sentence, never a traceback."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from daily import all_but_nightly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import ppbench
from ppbench.base.errors import UsageError
from ppbench.federation.engine import Federation

SHAPE = (1, 8, 8)
QUICK: dict[str, Any] = {"budget": 4, "restarts": 0, "planted": False}


def network(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), *more, nn.Sigmoid(), nn.Flatten(), nn.Linear(144, 10))


torch.manual_seed(1)
MODEL, X, Y = network().eval(), torch.rand(4, *SHAPE), torch.tensor([3, 1, 0, 2])


def gradient_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Return what people read after loss.backward()."""
    model.zero_grad()
    cross_entropy(model(X[:1]), Y[:1]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


GRADIENT = gradient_of(MODEL)
VALUES = [value for value in GRADIENT.values() if value is not None]


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        call(*arguments, **options)
    sentence = str(error.value)
    assert "\n" not in sentence and "ppbench's own code" not in sentence and sentence.endswith((".", "?"))
    return sentence


# -- gradients --------------------------------------------------------------------------------------------------------
WRAPPED = ("module.", "_module.", "_orig_mod.", "module._orig_mod.")
CONTAINERS: dict[str, Any] = {
    "list": VALUES,
    "other order": dict(reversed(GRADIENT.items())),
    "generator": lambda: (value for value in VALUES),
    "pairs": list(GRADIENT.items()),
    "arrays": [value.numpy() for value in VALUES],
    "lists": [value.tolist() for value in VALUES],
    "sparse": [value.to_sparse() for value in VALUES],
    "float64": [value.double() for value in VALUES],
    "array vector": torch.cat([value.flatten() for value in VALUES]).numpy(),
    "float list": torch.cat([value.flatten() for value in VALUES]).tolist(),
    "vector": torch.cat([value.flatten() for value in VALUES]),
    **{prefix: {prefix + name: value for name, value in GRADIENT.items()} for prefix in WRAPPED},
}


@pytest.fixture(scope="module")
def plain() -> ppbench.Inverted:
    """Return what is made of the gradient by name."""
    return ppbench.invert(MODEL, GRADIENT, SHAPE, **QUICK)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_gradient_is_the_same_in_any_container(container: str, plain: ppbench.Inverted) -> None:
    gradient = CONTAINERS[container]
    inversion = ppbench.invert(MODEL, gradient() if callable(gradient) else gradient, SHAPE, **QUICK)
    assert torch.equal(plain.x, inversion.x) and plain.mismatch == inversion.mismatch


def test_an_attack_may_be_an_object_and_another_seed_gives_another_answer() -> None:
    plain = ppbench.invert(MODEL, GRADIENT, SHAPE, attack="dlg", **QUICK)
    whole = ppbench.load_attack("dlg", budget=4, restarts=0)
    assert torch.equal(plain.x, ppbench.invert(MODEL, GRADIENT, list(SHAPE), attack=whole, planted=False).x)
    assert not torch.equal(plain.x, ppbench.invert(MODEL, GRADIENT, SHAPE, attack="dlg", seed=1, **QUICK).x)


def test_buffers_in_the_order_of_a_state_dict_take_no_part() -> None:
    model = network(nn.BatchNorm2d(4)).eval()
    named = gradient_of(model)
    whole = {name: named.get(name, value) for name, value in model.state_dict().items()}
    inversion = [ppbench.invert(model, g, SHAPE, **QUICK) for g in (named, whole, list(whole.values()))]
    assert (
        len(whole) == 9 and torch.equal(inversion[0].x, inversion[1].x) and torch.equal(inversion[0].x, inversion[2].x)
    )


class Spare(nn.Module):
    """A network with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = network(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def test_none_is_the_gradient_of_what_is_frozen_or_not_used_and_of_nothing_else() -> None:
    """The documented idiom, {name: p.grad for ...}."""
    frozen, spare = network(), Spare()
    frozen[0].requires_grad_(False)
    named = gradient_of(frozen)
    assert named["0.weight"] is None
    trained = {name: value for name, value in named.items() if value is not None}
    same = [named, list(named.values()), trained, {**named, "0.weight": torch.zeros(4, 1, 3, 3)}]
    inversion = [ppbench.invert(frozen, gradient, SHAPE, **QUICK) for gradient in same]
    assert all(torch.equal(inversion[0].x, other.x) for other in inversion)
    assert "no trained parameter of the model (frozen); leave it out" in refusal(
        ppbench.invert, frozen, {**named, "0.weight": torch.ones(4, 1, 3, 3)}, SHAPE
    )
    assert ppbench.invert(spare, gradient_of(spare), SHAPE, **QUICK).mismatch is not None
    assert "is None, but the network uses this parameter" in refusal(
        ppbench.invert, spare, {**gradient_of(spare), "net.0.bias": None}, SHAPE
    )
    assert "call loss.backward()" in refusal(ppbench.invert, MODEL, dict.fromkeys(GRADIENT), SHAPE)


@pytest.mark.parametrize("wrap", all_but_nightly([nn.DataParallel, torch.compile], [torch.compile]))
def test_torchs_own_wrappers_of_networks_are_taken_off(wrap: Any) -> None:
    model = wrap(network())
    named = {name: GRADIENT[name.partition(".")[2]] for name, _ in model.named_parameters()}
    plain = ppbench.invert(network(), GRADIENT, SHAPE, **QUICK)
    assert torch.equal(plain.x, ppbench.invert(model, named, SHAPE, **QUICK).x)
    assert isinstance(ppbench.federate(ppbench.load_defense("none"), model, [(X, Y)]), Federation)


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        ([VALUES[1], VALUES[0], *VALUES[2:]], "The gradients of '0.weight' and '0.bias' are swapped: that of "
         "'0.weight' has shape (4,) instead of (4, 1, 3, 3), that of '0.bias' (4, 1, 3, 3); give each its own."),
        ([VALUES[0], VALUES[3], VALUES[2], VALUES[1]], "The gradients of '0.bias' and '3.bias' are swapped"),
        ([*VALUES[:2], VALUES[2].mT, VALUES[3]], "'3.weight' is torch.float32 (144, 10); it must be"),
        ([value.expand(3, *value.shape) for value in VALUES], "one axis more than (4, 1, 3, 3); of gradients"),
        (list(MODEL.parameters()), "holds the model's parameters themselves; give their .grad"),
        (MODEL.state_dict(), "holds the model's parameters themselves; give their .grad"),
        ([p.detach().numpy().copy() for p in MODEL.parameters()], "holds the model's parameters themselves"),
        (torch.nn.utils.parameters_to_vector(MODEL.parameters()), "holds the model's parameters themselves"),
        (np.zeros(7, dtype=np.float32), "or one vector of 1490"),
        ([value.to("meta") for value in VALUES], "is a tensor without values (on the meta device, or nested)"),
        ([value.to(torch.complex64) for value in VALUES], "is torch.complex64 (4, 1, 3, 3)"),
        ([*VALUES[:3], VALUES[3].long()], "of '3.bias' is torch.int64 (10,)"),
        (None, "The gradient is a NoneType"),
        ([value.double() * 1e60 for value in VALUES], "holds a value that is not finite"),
        ({**GRADIENT, "module.0.weight": VALUES[0]}, "has '0.weight' twice, as 'module.0.weight' too"),
        (torch.zeros(7), "or one vector of 1490"),
        ("0.weight", "The gradient is a str; give a tensor for each parameter"),
        (MODEL, "The gradient is a Sequential; give a tensor"),
        ([], "The gradient has 0 tensors; the model has 4 trained parameters"),
        (pd.DataFrame({"a": [1.0]}), "The gradient has 1 tensors"),
    ],
)  # fmt: skip
def test_what_is_no_gradient_is_told_in_one_sentence(gradient: Any, words: str) -> None:
    assert words in refusal(ppbench.invert, MODEL, gradient, SHAPE, **QUICK)


def test_nested_tensors_are_no_gradient() -> None:
    nested = [torch.nested.nested_tensor([value], layout=torch.jagged) for value in VALUES]
    assert "is a tensor without values" in refusal(ppbench.invert, MODEL, nested, SHAPE, **QUICK)


def test_a_gradient_of_the_last_layer_alone_is_inverted_by_its_features() -> None:
    model = network()
    model[0].requires_grad_(False)
    inversion = ppbench.invert(model, gradient_of(model), SHAPE, attack="feature_inversion", planted=False)
    assert inversion.mismatch is not None and inversion.mismatch < 1e-4


class Complex(nn.Module):
    """A network with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 10, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1).to(torch.complex64) @ self.w).real


# -- attacks and networks ---------------------------------------------------------------------------------------------
def test_an_unknown_attack_is_told_with_those_that_can_be_run_here() -> None:
    sentence = refusal(ppbench.invert, MODEL, GRADIENT, SHAPE, attack="magic")
    names = re.fullmatch(r"There is no attack named 'magic'; on such a gradient run (.*)\.", sentence)
    listed = set(names[1].split(", ")) if names else set()
    assert {"dlg", "idlg", "ig", "feature_inversion"} <= listed
    assert not {"mia_loss", "adaptive_spn", "gifd", "imprint", "fedavg_inversion", "analytic"} & listed
    for name in listed:
        others = {
            "feature_inversion": {"inversion_budget": 3, "joint_budget": 3},
            "closed_form": {},
            "gauss_newton": {"steps": 1},
        }
        budget = others.get(name, {"budget": 3})
        assert ppbench.invert(MODEL, GRADIENT, SHAPE, attack=name, planted=False, **budget).x.shape == (1, *SHAPE)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(512, 10)),
            "which takes whole numbers; inputs are floats here. Texts are whole numbers",
        ),
        (nn.Sequential(nn.Flatten(), nn.EmbeddingBag(9, 8), nn.Linear(8, 10)), "has an embedding of tokens (1), which"),
        (Complex(), "Parameter 'w' of the model is complex; keep its real and imaginary parts as real parameters"),
        (network().to("meta"), "lies on the meta device, without values"),
        (MODEL.state_dict(), "it must be a torch.nn.Module that answers a batch"),
    ],
)
def test_networks_that_cannot_be_attacked_are_told_why(model: Any, words: str) -> None:
    for call, arguments in ((ppbench.invert, (model, VALUES, SHAPE)), (federated, ([(X, Y)], model))):
        assert words in refusal(call, *arguments)


# -- what clients hold ------------------------------------------------------------------------------------------------
class Endless(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        while True:
            yield torch.zeros(1), 0


class Named(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": X[index], "label": 1}


class Raising(Named):
    def __getitem__(self, index: int) -> dict[str, Any]:
        raise KeyError("no such file")


def federated(shards: Any, model: Any = MODEL, **options: Any) -> Federation:
    return ppbench.federate(ppbench.load_defense("none"), model, shards, **options)


@pytest.mark.parametrize(
    "shard",
    [
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(4)),
        DataLoader(TensorDataset(X, Y), batch_size=3),
        DataLoader(TensorDataset(X, Y), batch_size=None),
        list(TensorDataset(X, Y)),
        [(image, int(label)) for image, label in zip(X, Y, strict=True)],
        (X.numpy(), Y.numpy()),
        (X.double(), pd.Series(Y.numpy())),
        (X.tolist(), tuple(Y.tolist())),
        (X.to_sparse(), Y.to(torch.uint8)),
    ],
)
def test_a_client_may_hold_a_dataset_a_loader_or_arrays(shard: Any) -> None:
    (data,) = federated([shard]).shards.values()
    assert torch.equal(data.x, X) and torch.equal(data.y.argmax(1), Y) and data.x.dtype == torch.float32
    view, challenges = ppbench.probe(federated([(X, Y)]), [shard])
    assert next(view.exchanges()) is not None and challenges[0].batch == 4


EMPTY = (X[:0], Y[:0])
SHARDS: list[tuple[Any, str]] = [
    ([(X, Y), EMPTY], "Client 1 holds no examples; leave it out, or give it one."),
    ([EMPTY, (X, Y)], "Client 0 holds no examples"),
    ([(X, Y), (torch.tensor([]), torch.tensor([]))], "Client 1 holds no examples"),
    ([TensorDataset(*EMPTY)], "Client 0 holds no examples"),
    (TensorDataset(X, Y), "are those of one client (a TensorDataset); give a list, with one entry per client."),
    (DataLoader(TensorDataset(X, Y)), "are those of one client (a DataLoader)"),
    ((X, Y), "are those of one client (inputs and labels)"),
    ([X, Y], "Client 0 holds torch.float32 of shape (4, 1, 8, 8); give a pair"),
    ([Named()], "Client 0 holds a Named that cannot be read (it has items such as {'image'"),
    ([Raising()], "Client 0 holds a Raising that cannot be read ('no such file')"),
    ([pd.DataFrame({"a": [1.0]})], "Client 0 holds a DataFrame that cannot be read"),
    ([{"x": X, "y": Y}], "give a pair of inputs and labels, as (x, y)"),
    ({0: (X, Y)}, "give each client inputs and labels"),
    ("shards", "are 'shards'; give each client"),
    (None, "are None; give each client"),
    ([(X, Y, Y)], "give a pair of inputs and labels"),
    ([(X, ["cat"] * 4)], "whole numbers: put numbers in the place of names and gaps"),
    ([(X, pd.DataFrame({"label": ["a"] * 4}))], "Client 0: labels="),
    ([(X, torch.eye(10)[:4])], "they must be classes from 0 to 9: of one-hot rows, labels.argmax(1)."),
    ([(X, Y[:, None])], "without a second axis: labels[:, 0]"),
    ([(X, Y.float())], "they must be classes from 0 to 9, of an integer type."),
    ([(X, Y > 1)], "they must be classes from 0 to 9: of booleans, labels.long()."),
    ([(X, None)], "Client 0: labels=None cannot be used"),
    ([(X, Y + 20)], "they must be classes from 0 to 9."),
    ([((255 * X).byte(), Y)], "of bytes, x.float() / 255 (of pictures, transform=ToTensor())"),
    ([(X.to(torch.complex64), Y)], "Client 0 holds inputs torch.complex64"),
    ([(X.to("meta"), Y)], "Client 0 holds inputs a tensor without values"),
    ([(X / 0, Y)], "give finite floats"),
    ([(4 * X - 2, Y)], "outside of data_range=(0, 1); give their range, as data_range=("),
]


@pytest.mark.parametrize(("shards", "words"), SHARDS)
def test_what_no_client_can_hold_is_told_in_one_sentence(shards: Any, words: str) -> None:
    assert words in refusal(federated, shards)
    assert words in refusal(ppbench.probe, federated([(X, Y), (X, Y)]), shards)


def test_a_data_set_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppbench.run.user_inputs.MAX_ITEMS", 50)
    assert "it does not end after 50 items" in refusal(federated, [Endless()])


def test_outputs_are_of_batches_and_any_float() -> None:
    fed = federated([(X, Y)])
    right = fed.outputs(X)
    for x in (X.half(), X.bfloat16(), X.double(), X.clone().requires_grad_()):
        torch.testing.assert_close(fed.outputs(x), right, rtol=0.05, atol=0.05)
    assert "give a dense tensor of floats [N, 1, 8, 8]; of one input, x[None]" in refusal(fed.outputs, X[0])
    for x in (None, X.numpy(), X.to("meta"), X.to_sparse(), X.to(torch.complex64), (255 * X).byte(), X.flatten(1)):
        assert "give a dense tensor of floats" in refusal(fed.outputs, x)
    for last in (-1, True, 1.5, "3"):
        assert "give its number, as run(3)" in refusal(fed.run, last)


# -- every argument ---------------------------------------------------------------------------------------------------
ODD: tuple[Any, ...] = (
    *(None, True, 0, 3, -1, 2**70, 1.5, float("nan"), float("inf"), 1j, "", "cpu", b"x", "\ud800", (), [], {}, {1}),
    *(object(), object, len, np.float32(1), np.int64(1), np.array([]), np.array(["a"]), np.array([1, None])),
    *(torch.tensor(1), torch.tensor([]), torch.zeros(2, 2), torch.tensor(3j), torch.tensor([1], device="meta")),
    *(torch.zeros(1, *SHAPE, dtype=torch.bfloat16), X.to_sparse(), pd.Series([1]), pd.DataFrame({"a": ["b"]})),
    *(iter([1]), range(2), [[1], [2, 3]], [None], ["a"], (0, 1), (1, 0), (1, 8, 8), MODEL, nn.Linear(2, 2)),
    *(TensorDataset(X, Y), Named(), torch.device("cpu"), torch.float32, slice(1)),
)
INVERT = (
    "model",
    "gradient",
    "shape",
    "labels",
    "attack",
    "batch",
    "seed",
    "device",
    "data_range",
    "planted",
    "training",
)
FEDERATE = (
    "defense",
    "model",
    "shards",
    "data_range",
    "lr",
    "seed",
    "device",
    "batch_size",
    "upload",
    "decay_at",
    "loss",
)


@pytest.mark.parametrize("name", all_but_nightly(INVERT, {*INVERT} - {"model", "labels"}))
def test_any_argument_of_invert_is_used_or_refused_in_one_sentence(name: str) -> None:
    for odd in ODD:
        arguments = {"model": MODEL, "gradient": VALUES, "shape": SHAPE, "planted": False, name: odd}
        attack = ppbench.load_attack("ig", budget=2)
        try:
            inversion = ppbench.invert(**{"attack": attack, **arguments})
        except UsageError as error:
            assert "\n" not in str(error) and "ppbench's own code" not in str(error), (name, odd)
        else:
            assert inversion.x.shape[1:] == SHAPE and inversion.summary, (name, odd)


@pytest.mark.parametrize("name", all_but_nightly(FEDERATE, {*FEDERATE} - {"defense", "decay_at"}))
def test_any_argument_of_federate_is_used_or_refused_in_one_sentence(name: str) -> None:
    for odd in ODD:
        arguments = {"defense": ppbench.load_defense("none"), "model": MODEL, "shards": [(X, Y)], name: odd}
        try:
            fed = ppbench.federate(**arguments)
        except UsageError as error:
            assert "\n" not in str(error) and "ppbench's own code" not in str(error), (name, odd)
        else:
            assert fed.outputs(X).shape == (4, 10), (name, odd)


def test_plugins_are_named_by_words_alone() -> None:
    for odd in ODD:
        for load in (ppbench.load_defense, ppbench.load_attack):
            refusal(load, odd)
    assert "the attack 'dlg' refuses stop=nan: it must be finite" in refusal(
        ppbench.load_attack, "dlg", stop=float("nan")
    ).replace("The", "the")
    for name, options in (("dlg", {"budget": True}), ("dlg", {"stop": True}), ("ig", {"budget": False})):
        key, value = next(iter(options.items()))
        assert f"{name!r} refuses {key}={value}: it must be a number." in refusal(ppbench.load_attack, name, **options)
