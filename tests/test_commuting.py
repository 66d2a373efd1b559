"""What does not commute with scales on channels is refused, by name and with a way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppbench.base.errors import UsageError
from ppbench.nets.net import Classifier, Net, NetSpec
from ppbench.nets.walk import walk

IMAGE = (3, 8, 8)


class Called(nn.Module):
    """A module whose forward is a function of (self, x); keywords are layers, parameters or buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def net_of(features: nn.Module) -> Net:
    with torch.no_grad():
        width = features(torch.zeros(2, *IMAGE)).shape[1]
    return Net(NetSpec("test", IMAGE, 5), Classifier(features, nn.Linear(width, 5)))


def layers(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *parts, nn.Flatten())


def called(function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> nn.Module:
    return Called(lambda m, x: function(m, x).flatten(1), conv=nn.Conv2d(3, 3, 3, padding=1), **parts)


def conv() -> nn.Module:
    return nn.Conv2d(3, 3, 3, padding=1)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


TWICE = "'features.b' is used more than once"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    # name: (features, what the sentence names, what it advises)
    "tanh": (lambda: layers(nn.Tanh()), r"'features.1' \(Tanh\)", "use ReLU or LeakyReLU"),
    "torch.tanh": (lambda: called(lambda m, x: torch.tanh(m.conv(x))), "calls tanh", "use ReLU, LeakyReLU"),
    "batch norm": (lambda: layers(nn.BatchNorm2d(4)), r"'features.1' \(BatchNorm2d\) cancels", "norms=affine"),
    "affine, running statistics": (lambda: layers(nn.BatchNorm2d(4)), "running stat", "track_running_stats=False"),
    "affine, no affine part": (lambda: layers(nn.GroupNorm(2, 4, affine=False)), "no affine part", "affine=True"),
    "affine, layer norm": (lambda: layers(nn.Flatten(), nn.LayerNorm(256)), r"\(LayerNorm\)", "without it"),
    "dropout": (lambda: layers(nn.Dropout(0.5)), r"\(Dropout\)", "use no dropout"),
    "grouped": (lambda: layers(nn.Conv2d(4, 4, 3, groups=2)), "grouped convolution", "groups=1"),
    "raw residual": (lambda: called(lambda m, x: m.conv(x) + x), "unscaled input", "layer on the shortcut"),
    "product": (
        lambda: called(lambda m, x: m.conv(x) * m.other(x), other=conv()),
        "'mul' multiplies two activations",
        "use additions or concatenation",
    ),
    "square": (lambda: called(lambda m, x: (h := m.conv(x)) * h), "multiplies two", "use additions"),
    "padding by 1": (
        lambda: called(lambda m, x: F.pad(m.conv(x), (1, 1, 1, 1), value=1.0)), r"'pad' pads with 1\.0", "zero padding"
    ),
    "ConstantPad2d": (lambda: layers(nn.ConstantPad2d(1, 0.5)), r"\(ConstantPad2d\)", "without it"),
    "reflected channels": (
        lambda: called(lambda m, x: F.pad(m.conv(x).mean(2), (1, 1, 1, 1), mode="reflect")),
        "pads channels in mode 'reflect'",
        "zero padding",
    ),
    "padded batch": (
        lambda: called(lambda m, x: F.pad(m.conv(x), (*[0] * 7, 1))), "pads the batch", "padding of channels and space"
    ),
    "a layer twice": (
        lambda: called(lambda m, x: m.conv(F.relu(m.conv(x)))),
        "'features.conv.weight' is used more than once",
        "a layer of its own for each use",
    ),
    "a bias twice": (lambda: called(lambda m, x: (m.conv(x) + m.b).relu() + m.b, b=parameter(3, 1, 1)), TWICE, "own"),
    "mean over channels": (
        lambda: called(lambda m, x: m.conv(x).mean(1)), "'mean' averages over examples or channels", "means over space"
    ),
    "mean over all": (lambda: called(lambda m, x: x + m.conv(x).mean()), "averages", "means over space"),
    "constant": (lambda: called(lambda m, x: m.conv(x) + 0.5), "adds a constant", "use a bias parameter"),
    "buffer": (lambda: called(lambda m, x: m.conv(x) + m.b, b=torch.ones(1)), "'features.b' is a buf", "own"),
    "weight norm": (
        lambda: layers(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))),
        r"'features.1.weight' is a buffer, a constant, or a weight made of others",
        "parameter of its own",
    ),
    "bias a pixel": (
        lambda: called(lambda m, x: m.conv(x) + m.b, b=parameter(8, 8)), r"\(8, 8\) is not one", r"shape \(3, 1, 1\)"
    ),
    "pool over channels": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.MaxPool1d(3, 1, 1)),
        r"'features.3' \(MaxPool1d\) is applied to activations of shape \(8,\)",
        "use it on 1d maps",
    ),
    "2d pool of 1d maps": (
        lambda: called(lambda m, x: F.max_pool2d(m.conv(x).mean(2), 3, 1, 1)), "max_pool2d", "use it on 2d maps"
    ),
    "two outputs": (
        lambda: called(lambda m, x: m.pool(m.conv(x))[0], pool=nn.MaxPool2d(2, return_indices=True)),
        "'pool' does not keep its channels on axis 1",
        r"\[B, C, ...\]",
    ),
    "other axis": (lambda: called(lambda m, x: torch.cat([m.conv(x)] * 2, 2)), "axis 2", "axis 1"),
    "parameter joined": (
        lambda: called(lambda m, x: torch.cat([m.conv(x), m.p], 1), p=parameter(2, 1, 8, 8)),
        "concatenates a parameter",
        "torch.cat of activations",
    ),
    "by keyword": (lambda: called(lambda m, x: m.conv(input=x)), "'features.conv' is called on", "use layer"),
    "other by keyword": (
        lambda: called(lambda m, x: torch.add(m.conv(x), other=m.conv2(x)), conv2=conv()),
        "'add' names its operands",
        "operands by position",
    ),
    "control flow": (
        lambda: called(lambda m, x: m.conv(x) if x.sum() > 0 else x),
        "'test' cannot be traced by torch.fx",
        "without control flow on tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_commute_is_refused_in_one_sentence_that_names_it_and_a_way_out(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    make, named, advice = REFUSED[name]
    with pytest.raises(UsageError, match=rf"(?s)(?=.*{named}).*{advice}") as caught:
        walk(net_of(make()), "affine" if name.startswith("affine") else "refuse")
    sentence = str(caught.value)
    assert sentence.endswith(".") and ". " not in sentence and "\n" not in sentence, sentence
    assert "cannot be perturbed" in sentence
    assert capfd.readouterr() == ("", ""), "a refusal prints nothing by itself"
