"""Ways in which somebody makes a training private: `opacus:opacus_apps:NAME` in tests/test_opacus.py."""

from __future__ import annotations

from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn


def _made(model: Any, optimizer: Any, loader: Any, sigma: float, clip: float, **more: Any) -> Any:
    engine = PrivacyEngine(accountant="rdp")
    return engine, *engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma, max_grad_norm=clip, **more
    )


def mine(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """DP-SGD as mine."""
    return _made(model, optimizer, loader, sigma, clip)


def virtual(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """Batches of any size, two examples at a time."""
    engine, model, optimizer, loader = _made(model, optimizer, loader, sigma, clip)
    parts = BatchMemoryManager(data_loader=loader, max_physical_batch_size=2, optimizer=optimizer)
    return engine, model, optimizer, parts.__enter__()


def fixed(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """As tutorials have it; it names a layer of its own network, too."""
    assert isinstance(model.out, nn.Linear)
    model = ModuleValidator.fix(model)
    return _made(model, torch.optim.SGD(model.parameters(), optimizer.param_groups[0]["lr"]), loader, sigma, clip)


def summed(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """Sums over batches, no means."""
    return _made(model, optimizer, loader, sigma, clip, loss_reduction="sum")


class Weak(DPOptimizer):
    """Says one noise, and adds a tenth of it."""

    def add_noise(self) -> None:
        self.noise_multiplier /= 10
        super().add_noise()
        self.noise_multiplier *= 10


def weakened(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    engine, model, private, loader = _made(model, optimizer, loader, sigma, clip)
    private.__class__ = Weak
    return engine, model, private, loader


def seeded(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """As many tutorials begin."""
    torch.manual_seed(42)
    return _made(model, optimizer, loader, sigma, clip)


def generator(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    return _made(model, optimizer, loader, sigma, clip, noise_generator=torch.Generator().manual_seed(1))


def unhooked(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """Its engine sees none of the steps."""
    _, model, private, loader = _made(model, optimizer, loader, sigma, clip)
    return PrivacyEngine(accountant="rdp"), model, private, loader


def oversampled(model: Any, optimizer: Any, loader: Any, sigma: float = 0.5, clip: float = 1.0) -> Any:
    """Its engine counts one rate, its loader samples at twice that."""
    engine, model, private, result = _made(model, optimizer, loader, sigma, clip)
    rate = min(1.0, 2 * result.sample_rate)
    return engine, model, private, DPDataLoader(loader.dataset, sample_rate=rate)


def no_engine(model: Any, optimizer: Any, loader: Any) -> Any:
    return _made(model, optimizer, loader, 1.0, 1.0)[1:]


def not_private(model: Any, optimizer: Any, loader: Any) -> Any:
    return PrivacyEngine(), model, optimizer, loader


def other_engine(model: Any, optimizer: Any, loader: Any) -> Any:
    return None, *_made(model, optimizer, loader, 1.0, 1.0)[1:]


def nothing(model: Any, optimizer: Any, loader: Any) -> Any:
    return None


def other_weights(model: Any, optimizer: Any, loader: Any) -> Any:
    """Its optimizer moves another network."""
    engine, _, private, loader = _made(model, optimizer, loader, 1.0, 1.0)
    return engine, nn.Linear(64, 10), private, loader


def other_network(model: Any, optimizer: Any, loader: Any) -> Any:
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return _made(other, torch.optim.SGD(other.parameters(), 0.1), loader, 1.0, 1.0)


def adam(model: Any, optimizer: Any, loader: Any) -> Any:
    return _made(model, torch.optim.Adam(model.parameters(), 0.1), loader, 1.0, 1.0)


def faster(model: Any, optimizer: Any, loader: Any) -> Any:
    return _made(model, torch.optim.SGD(model.parameters(), 0.7), loader, 1.0, 1.0)


def steps(model: Any, optimizer: Any, loader: Any) -> Any:
    """Four steps an epoch, whatever there is to sample from."""
    engine, model, private, _ = _made(model, optimizer, loader, 1.0, 1.0)
    return engine, model, private, DPDataLoader(loader.dataset, sample_rate=0.25)


def raises(model: Any, optimizer: Any, loader: Any) -> Any:
    raise KeyError("no such key")


def raises_late(model: Any, optimizer: Any, loader: Any) -> Any:
    """It trains, except on more than one example."""
    if len(loader.dataset) > 1:
        raise ValueError("too many examples")
    return _made(model, optimizer, loader, 1.0, 1.0)


def no_default(model: Any, optimizer: Any, loader: Any, sigma: float) -> Any:
    return _made(model, optimizer, loader, sigma, 1.0)


def shadow(model: Any, optimizer: Any, loader: Any, noise: float = 0.5) -> Any:
    return _made(model, optimizer, loader, noise, 1.0)


number = 3


# -- networks ---------------------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    """A layer that Opacus has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Net(nn.Module):
    """A classifier of 8x8 images. part: what it holds before its hidden layer."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part or nn.Identity()
        self.hidden = nn.Linear(64, 16)
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.part(x.flatten(1)))))  # type: ignore[no-any-return]


class Idle(Net):
    """It has a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(3, 3)


def plain_net() -> nn.Module:
    return Net()


def scaled_net() -> nn.Module:
    return Net(Scaled())


def grouped_net() -> nn.Module:
    """Group norm, as ModuleValidator.fix makes of batch norm."""
    return Net(nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), Pool()))


def batch_normed_net() -> nn.Module:
    return Net(nn.BatchNorm1d(64))


class Pool(nn.Module):
    """The mean over four channels, flat."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1).flatten(1)
