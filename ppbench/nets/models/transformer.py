"""Transformers that classify texts: an encoder and a decoder, small enough to train on a CPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ppbench.base.vocabulary import PADDING
from ppbench.nets.models.checks import DEEPEST, checked_flag, checked_int
from ppbench.nets.net import Classifier

EMBEDDING_STD = 0.1
"""Standard deviation of embeddings at first."""
BLOCKED = -1e9
"""Added to a score that attention must not see; finite, so that a text of padding alone gives no NaN."""


class _Block(nn.Module):
    """Attention and MLP, each behind a norm and with a way around (Xiong et al., ICML 2020).

    Attention is written out, since fused attention is not twice differentiable.
    """

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        """Return tokens [B, L, D] after the block; seen: [B, L, L], 0, or `BLOCKED` where a row may not look."""
        parts = self.query_key_value(self.norm_attention(tokens)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(-3, -2) for part in parts.unbind(-3))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + seen[:, None]
        tokens = tokens + self.mixed((scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2))
        out: Tensor = tokens + self.down(gelu(self.up(self.norm_mlp(tokens))))
        return out


class TextFeatures(nn.Module):
    """Embeddings, positions and blocks, then one vector a text: the mean of an encoder, the last token of a decoder.

    It takes token numbers [B, L], rounded, of which `PADDING` is passed over, or vectors [B, L, D] in the place of
    embeddings, none of which is padding: so attacks search texts.
    """

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.positions, std=EMBEDDING_STD)
        self.blocks = nn.ModuleList(_Block(width, heads, 4 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, D] of token numbers [B, L] or vectors [B, L, D]."""
        if x.dim() == 2:
            numbers = x.round().long().clamp(0, self.embedding.num_embeddings - 1)
            tokens, real = self.embedding(numbers), (numbers != PADDING).to(self.positions.dtype)
        else:
            tokens, real = x, torch.ones_like(x[..., 0])
        length = tokens.shape[1]
        hidden = (1 - real)[:, None, :].expand(-1, length, -1)
        if self.causal:
            later = torch.ones(length, length, dtype=hidden.dtype, device=hidden.device).triu(1)
            hidden = torch.maximum(hidden, later)
        tokens = tokens + self.positions[:length]
        for block in self.blocks:
            tokens = block(tokens, BLOCKED * hidden)
        out: Tensor = (self.norm(tokens) * self._share(real)[..., None]).sum(1)
        return out

    def _share(self, real: Tensor) -> Tensor:
        """Return the share [B, L] of each token in a text's vector."""
        count = real.sum(1, keepdim=True).clamp(min=1)
        if not self.causal:
            return real / count
        places = torch.arange(real.shape[1], device=real.device, dtype=real.dtype)
        return (places == count - 1).to(real.dtype)


def transformer(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 1024,
    width: int = 96,
    heads: int = 4,
    depth: int = 1,
    frozen_embedding: bool = False,
) -> Classifier:
    """An encoder of texts: blocks that normalize first, every token sees every other, then the mean and the head.

    Args:
        shape: (length,) in tokens; a text may be shorter.
        classes: of texts.
        vocabulary: number of tokens; that of the data set where it is left out.
        width, heads, depth: of a token's vector, a multiple of heads; of blocks. The MLP is four times as wide.
        frozen_embedding: whether embeddings of tokens and places are constants, as in much fine-tuning.
    """
    return _classifier(shape, classes, (vocabulary, width, heads, depth), frozen_embedding, causal=False)


def gpt(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 1024,
    width: int = 96,
    heads: int = 4,
    depth: int = 2,
    frozen_embedding: bool = False,
) -> Classifier:
    """A decoder of texts as GPT-2 has it: a token sees those before it, and the last one is classified.

    Args:
        shape: (length,) in tokens; a text may be shorter.
        classes: of texts.
        vocabulary: number of tokens; that of the data set where it is left out.
        width, heads, depth: of a token's vector, a multiple of heads; of blocks. The MLP is four times as wide.
        frozen_embedding: whether embeddings of tokens and places are constants, as in much fine-tuning.
    """
    return _classifier(shape, classes, (vocabulary, width, heads, depth), frozen_embedding, causal=True)


def _classifier(
    shape: tuple[int, ...], classes: int, sizes: tuple[int, int, int, int], frozen: bool, *, causal: bool
) -> Classifier:
    vocabulary, width, heads, depth = sizes
    if len(shape) != 1:
        raise ValueError(f"it takes texts (length,), not {tuple(shape)}")
    checked_int("vocabulary", vocabulary, 2, 2**20)
    checked_int("depth", depth, 1, DEEPEST)
    if checked_int("width", width, 2) % checked_int("heads", heads, 1):
        raise ValueError(f"width must be a multiple of heads={heads}, not {width}")
    features = TextFeatures(vocabulary, shape[0], width, heads, depth, causal)
    if checked_flag("frozen_embedding", frozen):
        features.embedding.weight.requires_grad_(False)
        features.positions.requires_grad_(False)
    model = Classifier(features, nn.Linear(width, classes))
    model.embedding = "features.embedding.weight"
    return model
