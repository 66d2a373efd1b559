"""The network class of model plugins: features, then a head of one layer, as defenses and attacks need it."""

from __future__ import annotations

from torch import Tensor, nn


class Classifier(nn.Module):
    """A model plugin returns one of these: `head(features(x))`, the head one layer on flat features or on maps.

    Parameters that need no gradient, and buffers, are frozen: constants of the network, the same for every party, never
    sent and never changed (norms with running statistics: in eval mode). A model that reads them from a file takes its
    path as the option `weights`; records state their digest instead.

    features: maps [B, *shape] to [B, D], or to [B, D, H, W] where pixels are classified; an `nn.Sequential` of plain
    layers lets attacks use a fast path. head: D to C: linear on flat features, a 1x1 convolution on maps.
    mixes: whether an example's output depends on the others of its batch (batch norm). fewest, most: allowed batch
    sizes; most is None for no limit. written: names of the buffers that a pass writes into; a pass gets copies of them.
    single: whether it computes only in float32, for instance because its forward pass casts.
    """

    mixes: bool = False
    fewest: int = 1
    most: int | None = None
    written: frozenset[str] = frozenset()
    single: bool = False

    def __init__(self, features: nn.Module, head: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.features = features
        self.head = head

    @property
    def layers(self) -> nn.Sequential | None:
        """The layers of the features if these are a plain `nn.Sequential`, else None."""
        features = self.features
        in_order = isinstance(features, nn.Sequential) and type(features).forward is nn.Sequential.forward
        return features if in_order else None  # type: ignore[return-value]  # it is one

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, C], of pixels [B, C, H, W], for x [B, *shape]."""
        return self.head(self.features(x))  # type: ignore[no-any-return]
