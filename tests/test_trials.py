"""Before a user's network is refused, it is run as it is: sentences name causes that a run has shown."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import users_networks as users
from torch import Tensor, nn

import ppbench
from ppbench.base.errors import UsageError
from ppbench.nets.model_object import held_network
from ppbench.nets.net import build, initial, net_spec

X, Y = torch.rand(2, *users.SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(2)


class Two(nn.Module):
    """Two linear layers, and a forward pass that is a function of them and x."""

    def __init__(self, forward: Callable[[Two, Tensor], Tensor], num_classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.passes = nn.Linear(64, 16), nn.Linear(16, num_classes), forward
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.passes(self, x)


def plain(net: Two, x: Tensor) -> Tensor:
    out: Tensor = net.b(torch.sigmoid(net.a(x.flatten(1))))
    return out


def rooted(net: Two, x: Tensor) -> Tensor:
    return plain(net, (x - 0.6).sqrt())


def counting(net: Two, x: Tensor) -> Tensor:
    net.n = net.n + 1
    return plain(net, x) * net.n


def dropping(net: Two, x: Tensor) -> Tensor:
    return F.dropout(plain(net, x), training=net.training)


def under_autocast(net: Two, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(net, x)


def widened_from_autocast(net: Two, x: Tensor) -> Tensor:
    return under_autocast(net, x).float()


def cast(first: torch.dtype, last: torch.dtype = torch.float32) -> Callable[[Two, Tensor], Tensor]:
    """Return passes whose layers compute in these precisions."""

    def passes(net: Two, x: Tensor) -> Tensor:
        out: Tensor = net.b(torch.sigmoid(net.a(x.flatten(1).to(first)).float()).to(last))
        return out

    return passes


half_first, double_first = cast(torch.float16), cast(torch.float64)
double_last = cast(torch.float32, torch.float64)


def one_by_one(net: Two, x: Tensor) -> Tensor:
    assert len(x) == 1
    return plain(net, x.view(1, 64))


def refused(module: nn.Module, shape: tuple[int, ...] = users.SHAPE, **options: tuple[float, float]) -> str:
    with pytest.raises(UsageError) as error:
        held_network(module, shape, **options)
    return str(error.value)


# -- inputs that a network is tried with ----------------------------------------------------------------------------
def test_a_network_is_tried_with_inputs_in_the_data_range() -> None:
    """It answers NaN below 0.6, where it is never used."""
    assert held_network(Two(rooted), users.SHAPE, data_range=(0.6, 1.0)).spec.classes == 4
    shards = [(0.6 + 0.4 * X, Y)] * 2
    assert ppbench.federate(ppbench.load_defense("none"), Two(rooted), shards, data_range=(0.6, 1.0)).plan.clients == 2
    right = r"answers inputs between 0.\d+ and 0.9\d+ by NaN; let it be finite there, or give the range"
    with pytest.raises(UsageError, match=right):
        held_network(Two(rooted), users.SHAPE)
    with pytest.raises(UsageError, match=right):
        build(net_spec("test_trials:rooted_network", users.SHAPE, 4))


def rooted_network() -> nn.Module:
    return Two(rooted)


def test_invert_tries_a_network_with_inputs_in_the_data_range() -> None:
    module, x = Two(rooted), 0.6 + 0.4 * X[:1]
    inversion = ppbench.invert(
        module, users.gradient_of(module, x, Y[:1]), users.SHAPE, Y[:1], data_range=(0.6, 1.0), budget=20
    )
    assert inversion.x.isfinite().all()


# -- precision and batch size -----------------------------------------------------------------------------------------
PRECISIONS = [
    (under_autocast, "", torch.float32),
    (widened_from_autocast, "", torch.float32),
    (half_first, "a", torch.float16),
    (half_first, "a", torch.bfloat16),
    (double_first, "a", torch.float64),
    (double_last, "b", torch.float64),
]


@pytest.mark.parametrize(("forward", "layer", "dtype"), PRECISIONS)
def test_a_network_of_several_precisions_is_computed_in_them(
    forward: Callable[[Two, Tensor], Tensor], layer: str, dtype: torch.dtype
) -> None:
    if dtype is torch.bfloat16:
        module = Two(lambda net, x: net.b(torch.sigmoid(net.a(x.flatten(1).bfloat16()).float())))
    else:
        module = Two(forward)
    if layer:
        module.get_submodule(layer).to(dtype)
    network = held_network(module, users.SHAPE).spec.net
    assert len(network.weights_sha256) == 64
    start = initial(network.spec, 0)
    assert {value.dtype for value in start.values()} == {torch.float32}
    torch.testing.assert_close(network(start, X), module(X).float(), rtol=0, atol=0)
    slopes = users.gradient_of(module, X[:1], Y[:1])
    inversion = ppbench.invert(module, [g.float() for g in slopes], users.SHAPE, Y[:1], budget=100, planted=False)
    assert inversion.x.isfinite().all()
    assert inversion.mismatch is not None and inversion.mismatch < 0.05


def test_a_network_in_double_precision_with_casts_is_taken() -> None:
    module = Two(lambda net, x: plain(net, x.double()).float()).double()
    network = held_network(module, users.SHAPE).spec.net
    torch.testing.assert_close(network(initial(network.spec, 0), X), module(X))


def test_a_network_that_takes_one_input_at_a_time_is_inverted_at_one() -> None:
    module = Two(one_by_one)
    gradient = users.gradient_of(module, X[:1], Y[:1])
    assert ppbench.invert(module, gradient, users.SHAPE, Y[:1], budget=250, planted=False).psnr(X[:1])[0] > 40
    right = "Model 'Two' takes one input at a time; let batches have one example."
    with pytest.raises(UsageError, match=right):
        ppbench.invert(module, gradient, users.SHAPE, batch=2, budget=5)


def test_the_shape_is_blamed_only_where_the_network_itself_does_not_take_it() -> None:
    four = refused(Two(lambda net, x: plain(net, x.view(4, 64))))
    assert (
        "it runs on a batch of 4 in float32 on cpu, but not as attacks need it" in four and "shape must be" not in four
    )
    assert "shape must be that of one input" in refused(Two(plain), (1, 7, 7))
    narrow = Two(lambda net, x: plain(net, x) + torch.zeros(4, 16, dtype=torch.float64) @ net.b.weight.T.to(x.dtype))
    assert "shape must be that" in refused(narrow)  # it runs on nothing


# -- what a pass leaves behind ----------------------------------------------------------------------------------------
def test_eval_mode_is_recommended_where_it_helps() -> None:
    left = "depends on what the pass before left in it; "
    assert f"{left}let it move that in training mode alone" in refused(Two(counting).eval())
    assert f"{left}let it move that in training mode alone" in refused(Two(counting))
    helped = Two(lambda net, x: counting(net, x) if net.training else plain(net, x))
    assert f"{left}put it into eval mode before the gradient is taken" in refused(helped)


def test_a_federation_speaks_of_no_gradient() -> None:
    with pytest.raises(UsageError, match=r"in training mode; put it into eval mode\.$"):
        ppbench.federate(ppbench.load_defense("none"), Two(dropping), [(X, Y), (X, Y)])


# -- devices ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("word", ["auto", "meta", "", "tpu"])
def test_a_device_that_cannot_be_used_is_refused_with_one_that_python_takes(word: str) -> None:
    gradient = users.gradient_of(Two(plain), X[:1], Y[:1])
    for call in (
        lambda: ppbench.invert(Two(plain), gradient, users.SHAPE, device=word),
        lambda: ppbench.federate(ppbench.load_defense("none"), Two(plain), [(X, Y), (X, Y)], device=word),
    ):
        with pytest.raises(UsageError, match=rf"^Device '{word}' cannot be used \(.*\); use 'cpu'( or 'cuda')?\.$"):
            call()


# -- by address -------------------------------------------------------------------------------------------------------
class Answers(Two):
    """Answers by a tuple, in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        return (plain(self, x),)  # type: ignore[return-value]


def tuples() -> nn.Module:
    return Answers(plain)


def doubles(num_classes: int) -> nn.Module:
    return Two(plain, num_classes).double()


def halves() -> nn.Module:
    module = Two(half_first)
    module.a.half()
    return module


def singly() -> nn.Module:
    return Two(one_by_one)


def autocasts() -> nn.Module:
    return Two(under_autocast)


INSTANCE = Two(plain)


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("tuples", "it answers by tuple; it must answer by logits"),
        ("halves", "its forward pass counts on parameters that are torch.float16; let it compute in float32"),
        ("singly", "it takes one input at a time; let it take batches of any size"),
        ("autocasts", "its logits are not the output of an nn.Linear in float32; let it end in one, outside autocast"),
        ("INSTANCE", "it is a network itself; name its class, or a function that returns it"),
    ],
)
def test_a_network_by_address_is_refused_with_what_would_be_right(name: str, right: str) -> None:
    with pytest.raises(UsageError, match=right):
        build(net_spec(f"test_trials:{name}", users.SHAPE, 4))


def test_a_network_by_address_in_double_precision_is_taken_in_float32() -> None:
    net = build(net_spec("test_trials:doubles", users.SHAPE, 4))
    start = initial(net.spec, 0)
    torch.testing.assert_close(net(start, X), doubles(4)(X.double()).float())
    assert {value.dtype for value in start.values()} == {torch.float32}
