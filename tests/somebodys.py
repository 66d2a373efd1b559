"""Networks and data as somebody has them who never heard of ppbench: named by address in tests/test_given.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Net(nn.Module):
    """As in PyTorch's own examples: ends in a log_softmax; batch norm, ReLU in place."""

    def __init__(self, num_classes: int = 10, norm: str = "batch") -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4) if norm == "batch" else nn.GroupNorm(1, 4)
        self.act = nn.ReLU(inplace=True)
        self.hidden = nn.Linear(256, 16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x))).flatten(1)
        return self.out(torch.sigmoid(self.hidden(x))).log_softmax(1)


class Attention(nn.Module):
    """A vision transformer of one block, with dropout in its attention."""

    def __init__(self, classes: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.place = nn.Parameter(torch.randn(4, 8) * 0.1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.patches(x).flatten(2).mT + self.place).mean(1))


class Views(nn.Module):
    """Views its convolution's output, of color images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.relu(self.conv(x)).view(-1, 4 * 6 * 6))
        return out


class Narrow(nn.Module):
    """Its batch norm sees one value of an example and channel."""

    def __init__(self, n_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Sigmoid())
        self.fc = nn.Linear(8, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x))


class Draws(Narrow):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class Tied(Narrow):
    """What its last layer gives goes in again."""

    def __init__(self) -> None:
        super().__init__(10)
        self.square = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return self.square(flat + self.square(flat).mean())


class LeNet(nn.Module):
    """A LeNet as torchvision writes networks: parts by name, sigmoids."""

    def __init__(self, num_classes: int = 10, shape: tuple[int, ...] = (3, 32, 32), width: int = 12) -> None:
        super().__init__()
        channels, rows, columns = shape
        self.conv1, self.act = nn.Conv2d(channels, width, 5, 2, 2), nn.Sigmoid()
        self.conv2 = nn.Conv2d(width, width, 5, 2, 2)
        self.conv3 = nn.Conv2d(width, width, 5, 1, 2)
        self.fc = nn.Linear(width * (rows // 4) * (columns // 4), num_classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)  # as the DLG release has it

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv3(self.act(self.conv2(self.act(self.conv1(x))))))
        out: Tensor = self.fc(x.flatten(1))
        return out


def ends_in_softmax() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))


def wide(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes + 1))


def not_a_module() -> str:
    return "a network"


def breaks() -> nn.Module:
    raise KeyError("no weights here")


def resnet18(num_classes: int) -> nn.Module:
    """torchvision's, imported as its users do."""
    from torchvision.models import resnet18 as made

    return made(num_classes=num_classes)


def arrays() -> Any:
    """Color pictures as NumPy has them, height x width x channels, whose color tells their class."""
    draws = np.random.default_rng(0)

    def part(count: int) -> tuple[Any, Any]:
        y = draws.integers(0, 3, count)
        x = draws.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        x[..., 0] = (80 * y)[:, None, None]
        return x, y

    return part(60), part(20)


class Items(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index >= self.count:
            raise IndexError(index)
        return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(index)) + index % 4, index % 4


def torch_datasets() -> Any:
    return {"train": Items(40), "test": Items(12)}


def rows() -> Any:
    """Rows of a table, one part."""
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    return {"train": (x, (x[:, 0] > 0).long())}


def ours() -> Any:
    """One of the bench's own data sets."""
    from ppbench.task.user_data import open_dataset

    return open_dataset("digits", seed=0)


def half() -> Any:
    return {"validation": Items(3)}


def lone() -> Any:
    return Items(3)


def bad_labels() -> Any:
    return (torch.rand(4, 1, 8, 8), torch.rand(4)), (torch.rand(4, 1, 8, 8), torch.rand(4))


def uneven() -> Any:
    part = [(np.zeros((1, 8, 8), np.float32), 0), (np.zeros((1, 9, 8), np.float32), 1)]
    return part, part


def unnamed() -> Any:
    part = [{"picture": np.zeros((8, 8), np.uint8), "label": i % 2} for i in range(4)]
    return part, part


def volumes() -> Any:
    part = (torch.rand(4, 2, 2, 2, 2), torch.arange(4) % 2)
    return part, part


class DropPath(nn.Module):
    """As in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1) < 0.5) if self.training else x


class Paths(nn.Module):
    """Draws in two layers, one of a function, beside a batch norm by hand."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.hidden, self.norm, self.fc = nn.Linear(64, 16), HandNorm(16), nn.Linear(16, num_classes)
        self.drop, self.noise = DropPath(), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.noise(self.drop(self.norm(self.hidden(x.flatten(1))))))
        return out


class HandNorm(nn.Module):
    """Batch norm by the function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=self.training)


class Auxiliary(nn.Module):
    """Answers by two heads in training mode, as Inception does."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.fc, self.side = nn.Linear(64, num_classes), nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Any:
        flat = torch.tanh(self.norm(self.conv(x))).flatten(1)
        return (self.fc(flat), self.side(flat)) if self.training else self.fc(flat)


class Frozen(nn.Module):
    """Its head is frozen as it was drawn."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.hidden, self.fc = nn.Linear(64, 24), nn.Linear(24, num_classes).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.tanh(self.hidden(x.flatten(1))))
        return out
