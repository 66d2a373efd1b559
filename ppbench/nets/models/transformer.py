"""Transformers that classify texts, or continue them: an encoder and a decoder, small enough to train on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from ppbench.base.errors import because
from ppbench.base.import_guard import torchvision
from ppbench.base.vocabulary import PADDING
from ppbench.nets.models.checks import DEEPEST, checked_flag, checked_int
from ppbench.nets.net import Classifier
from ppbench.nets.user_model import BLOCKED

EMBEDDING_STD = 0.1
"""Standard deviation of embeddings at first."""


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


def _tokens(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens [B, L, D] of numbers [B, L], rounded, or of vectors, which they are; and which are real, [B, L]."""
    if x.dim() > 2:
        return x, torch.ones_like(x[..., 0])
    numbers = x.round().long().clamp(0, len(table) - 1)
    return table[numbers], (numbers != PADDING).to(table.dtype)


def _scores(real: Tensor, causal: bool) -> Tensor:
    """Return what is added to scores of attention [B, L, L]: `BLOCKED` at padding and, if causal, at later tokens."""
    length = real.shape[1]
    hidden = (1 - real)[:, None, :].expand(-1, length, -1)
    if causal:
        later = torch.ones(length, length, dtype=hidden.dtype, device=hidden.device).triu(1)
        hidden = torch.maximum(hidden, later)
    return BLOCKED * hidden


def _shares(real: Tensor, causal: bool) -> Tensor:
    """Return the share [B, L] of each token in a text's vector: the mean of an encoder, the last token of a decoder."""
    count = real.sum(1, keepdim=True).clamp(min=1)
    if not causal:
        return real / count
    places = torch.arange(real.shape[1], device=real.device, dtype=real.dtype)
    return (places == count - 1).to(real.dtype)


@dataclass(frozen=True)
class TextReading:
    """How a network reads texts.

    causal: whether a token sees only those before it. every_token: whether each token is answered, else the text.
    """

    causal: bool
    every_token: bool = False

    def scores(self, real: Tensor) -> Tensor:
        """Return what is added to scores of attention [B, L, L] of tokens that are real, [B, L]."""
        return _scores(real, self.causal)

    def answered(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Return what the head reads of tokens [B, L, D]: these, or one vector a text [B, D]."""
        return tokens if self.every_token else (tokens * _shares(real, self.causal)[..., None]).sum(1)


class TextFeatures(nn.Module):
    """Embeddings, positions and blocks, then one vector a text: the mean of an encoder, the last token of a decoder.
    Or all tokens' vectors.

    It takes token numbers [B, L], rounded, of which `PADDING` is passed over, or vectors [B, L, D] in the place of
    embeddings, none of which is padding: so attacks search texts.
    """

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int, reading: TextReading) -> None:
        super().__init__()
        self.reading = reading
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_STD)
        nn.init.normal_(self.positions, std=EMBEDDING_STD)
        self.blocks = nn.ModuleList(_Block(width, heads, 4 * width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, D], or [B, L, D], of token numbers [B, L] or vectors [B, L, D]."""
        tokens, real = _tokens(x, self.embedding.weight)
        tokens, scores = tokens + self.positions[: tokens.shape[1]], self.reading.scores(real)
        for block in self.blocks:
            tokens = block(tokens, scores)
        return self.reading.answered(self.norm(tokens), real)


class SavedFeatures(nn.Module):
    """A stack that `transformers` saved, in eval mode, then one vector a text, or all, as `TextFeatures` gives them."""

    def __init__(self, stack: nn.Module, embedding: nn.Embedding, reading: TextReading) -> None:
        super().__init__()
        self.stack, self.reading = stack.eval(), reading
        self._table = [embedding]  # in a list: the stack has it already

    def forward(self, x: Tensor) -> Tensor:
        """Return features [B, D], or [B, L, D], of token numbers [B, L] or vectors [B, L, D]."""
        tokens, real = _tokens(x, self._table[0].weight)
        state = self.stack(inputs_embeds=tokens, attention_mask=self.reading.scores(real)[:, None])
        return self.reading.answered(state.last_hidden_state, real)


ADAPTED = ("query_key_value", "query", "value", "c_attn", "q_proj", "v_proj")
"""Names of the linear layers that get adapters: those of attention's queries and values, alone or with its keys."""


class Adapted(nn.Module):
    """A constant linear layer plus a trained one of low rank, up(down(x)), 0 at first (LoRA: Hu et al., ICLR 2022)."""

    def __init__(self, base: nn.Module, width: int, out: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's answer [..., out] to x [..., width]."""
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def _adapt(features: nn.Module, rank: int) -> None:
    """Make constants of all weights, and put adapters of a rank beside the layers `ADAPTED`, in place."""
    features.requires_grad_(False)
    for name, layer in [*features.named_modules()]:
        weight = getattr(layer, "weight", None)
        if name.rpartition(".")[2] in ADAPTED and isinstance(weight, Tensor) and weight.dim() == 2:
            out, width = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
            features.set_submodule(name, Adapted(layer, width, out, rank))
    if not any(isinstance(layer, Adapted) for layer in features.modules()):
        raise ValueError(f"it has none of the layers that get adapters: {', '.join(ADAPTED)}")


def transformer(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 1024,
    width: int = 96,
    heads: int = 4,
    depth: int = 1,
    frozen_embedding: bool = False,
    lora: int = 0,
) -> Classifier:
    """An encoder of texts: blocks that normalize first, every token sees every other, then the mean and the head.

    Args:
        shape: (length,) in tokens; a text may be shorter.
        classes: of texts.
        vocabulary: number of tokens; that of the data set where it is left out.
        width, heads, depth: of a token's vector, a multiple of heads; of blocks. The MLP is four times as wide.
        frozen_embedding: whether embeddings of tokens and places are constants, as in much fine-tuning.
        lora: rank of the attention's adapters, which are trained in place of all weights but the head's; 0: none.
    """
    sizes = vocabulary, width, heads, depth
    return _classifier(shape, classes, sizes, frozen_embedding, lora, TextReading(causal=False))


def gpt(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 1024,
    width: int = 96,
    heads: int = 4,
    depth: int = 2,
    frozen_embedding: bool = False,
    lora: int = 0,
    every_token: bool = False,
) -> Classifier:
    """A decoder of texts as GPT-2 has it: a token sees those before it, and the last one is classified.

    Args:
        shape: (length,) in tokens; a text may be shorter.
        classes: of texts; where every token is answered, of tokens.
        vocabulary: number of tokens; that of the data set where it is left out.
        width, heads, depth: of a token's vector, a multiple of heads; of blocks. The MLP is four times as wide.
        frozen_embedding: whether embeddings of tokens and places are constants, as in much fine-tuning.
        lora: rank of the attention's adapters, which are trained in place of all weights but the head's; 0: none.
        every_token: whether each token is answered by the next one; `--loss next_token` sets it. The head has weights
            of its own: it is not tied to the embedding, as GPT-2's is.
    """
    reading = TextReading(True, checked_flag("every_token", every_token))
    return _classifier(shape, classes, (vocabulary, width, heads, depth), frozen_embedding, lora, reading)


def hf(
    shape: tuple[int, ...],
    classes: int,
    *,
    weights: str = "",
    vocabulary: int = 0,
    frozen_embedding: bool = False,
    lora: int = 0,
    every_token: bool = False,
) -> Classifier:
    """A network of texts that the library `transformers` saved, under a new head; BERT, GPT-2 and their like.

    Args:
        shape: (length,) in tokens; a text may be shorter.
        classes: of texts; where every token is answered, of tokens.
        weights: its folder (config.json and model.safetensors), read without code of its own and without a network.
        vocabulary: of the data set, which must be its tokenizer's: texts must not have more tokens than it knows.
        frozen_embedding: whether embeddings, of tokens and places, are constants, as in much fine-tuning.
        lora: rank of the attention's adapters, which are trained in place of all weights but the head's; 0: none.
        every_token: whether each token of a decoder is answered by the next one; `--loss next_token` sets it. The head
            starts as the embedding, as GPT-2's is, and is then trained apart from it.
    """
    stack = _saved(weights, shape)
    table = stack.get_input_embeddings()
    if vocabulary > table.num_embeddings:
        words = "take its tokenizer, text:FILE?tokenizer=FOLDER"
        raise ValueError(f"the data have {vocabulary} tokens and the network {table.num_embeddings}; {words}")
    if checked_flag("frozen_embedding", frozen_embedding):
        for part in stack.modules():
            if isinstance(part, nn.Embedding):
                part.requires_grad_(False)
    reading = TextReading(not _looks_ahead(stack, table.embedding_dim), checked_flag("every_token", every_token))
    if checked_int("lora", lora, 0):
        _adapt(stack, lora)
    model = Classifier(SavedFeatures(stack, table, reading), _head(table.weight, classes, reading))
    model.embedding = next(name for name, value in model.named_parameters() if value is table.weight)
    model.from_file, model.every_token = True, reading.every_token
    _freeze_unread(model, shape)
    return model


def _head(table: Tensor, classes: int, reading: TextReading) -> nn.Linear:
    """Return the head on a saved stack with an embedding [V, D]: drawn, or where it answers every token, that table.

    ValueError: every token would be answered by one that sees it.
    """
    if reading.every_token and not reading.causal:
        raise ValueError("its tokens see those behind them, so none can be predicted; take a decoder, as GPT-2")
    head = nn.Linear(table.shape[1], classes)
    if reading.every_token:
        with torch.no_grad():
            head.weight.copy_(table[:classes])
            head.bias.zero_()
    return head


def _freeze_unread(model: Classifier, shape: tuple[int, ...]) -> None:
    """Make constants of the parameters that no logit depends on, such as those of a pooler."""
    trained = [value for value in model.parameters() if value.requires_grad]
    slopes = torch.autograd.grad(model(torch.ones(1, *shape)).sum(), trained, allow_unused=True)
    for value, slope in zip(trained, slopes, strict=True):
        value.requires_grad_(slope is not None)


def _saved(weights: str, shape: tuple[int, ...]) -> Any:
    """Return the stack without a head that lies in a folder (ValueError: none does, or inputs are no texts)."""
    if len(shape) != 1:
        raise ValueError(f"it takes texts (length,), not {tuple(shape)}")
    if not weights:
        raise ValueError("it needs the folder of a saved network, weights=FOLDER")
    folder = Path(weights).expanduser()
    torchvision()  # first: `transformers` cannot import what is built for CUDA alone
    try:
        from transformers import AutoModel, logging  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as cause:
        raise ValueError("it needs the package `transformers`; pip install transformers") from cause
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, attn_implementation="eager", dtype=torch.float32
        )
    except (OSError, ValueError, KeyError) as cause:
        raise ValueError(f"{folder} holds no network that `transformers` saved ({because(cause, 300)})") from cause


def _looks_ahead(stack: nn.Module, width: int) -> bool:
    """Return whether a token's state depends on a later one: an encoder's.

    No mask is passed: one of two dimensions a text takes the place of the network's own, which hides later tokens.
    """
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, width, generator=draws).expand(2, -1, -1).clone()
    x[1, 1] += 1
    with torch.no_grad():
        state = stack(inputs_embeds=x).last_hidden_state
    return not torch.equal(state[0, 0], state[1, 0])


def _classifier(
    shape: tuple[int, ...],
    classes: int,
    sizes: tuple[int, int, int, int],
    frozen: bool,
    lora: int,
    reading: TextReading,
) -> Classifier:
    vocabulary, width, heads, depth = sizes
    if len(shape) != 1:
        raise ValueError(f"it takes texts (length,), not {tuple(shape)}")
    checked_int("vocabulary", vocabulary, 2, 2**20)
    checked_int("depth", depth, 1, DEEPEST)
    if checked_int("width", width, 2) % checked_int("heads", heads, 1):
        raise ValueError(f"width must be a multiple of heads={heads}, not {width}")
    features = TextFeatures(vocabulary, shape[0], width, heads, depth, reading)
    if checked_flag("frozen_embedding", frozen):
        features.embedding.weight.requires_grad_(False)
        features.positions.requires_grad_(False)
    if checked_int("lora", lora, 0):
        _adapt(features, lora)
    model = Classifier(features, nn.Linear(width, classes))
    model.embedding, model.every_token = "features.embedding.weight", reading.every_token
    return model
