"""Its network, data and training."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    """A convolution and two layers; it views what it is given, as many networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 6 * 6, 12)
        self.out = nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(x))).view(-1, 4 * 6 * 6)
        return self.out(torch.relu(self.hidden(x)))  # type: ignore[no-any-return]


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    raise RuntimeError("the app's own data are not to be touched")


def train(net: nn.Module, loader: DataLoader[Any], config: Any, lr: float) -> float:
    settings: dict[str, Any] = {"lr": lr, "weight_decay": config["decay"]}
    if config["optimizer"] == "SGD":
        settings["momentum"] = 0.9
    optimizer = getattr(torch.optim, config["optimizer"])(net.parameters(), **settings)
    net.train()
    total = 0.0
    for _ in range(config["local-epochs"]):
        for batch in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(batch["img"]), batch["label"])
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader)
