"""Networks of texts as people write them, in plain PyTorch, for the letters' 396 tokens or fewer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

TOKENS, LENGTH, WIDTH = 1024, 64, 64


class Encoder(nn.Module):
    """Embeddings of tokens and places, one block of torch, the mean, and a linear layer."""

    def __init__(self, num_classes: int = 4, tokens: int = TOKENS, max_norm: float = 0.0, p: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, WIDTH, max_norm=max_norm or None)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=p, batch_first=True)
        self.out = nn.Linear(WIDTH, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.out(self.block(self.tokens(ids) + self.places(places)).mean(1))  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    """Return queries or keys [..., L, D] turned by their places (rotary embeddings, RoPE)."""
    rates = 100 ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = torch.arange(x.shape[-2])[:, None] * rates.to(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
    return torch.stack(turned, -1).flatten(-2)


class Rotary(nn.Module):
    """One block whose queries and keys alone know the place, as in Llama; `places` False: none does.

    It answers by classes, or, as a decoder, predicts each next token. parallel: attention and MLP read the same tokens,
    each behind a norm of its own, as in Pythia.
    """

    def __init__(
        self, num_classes: int = 60, decoder: bool = True, places: bool = True, parallel: bool = False, heads: int = 4
    ) -> None:
        super().__init__()
        self.decoder, self.places, self.parallel, self.heads = decoder, places, parallel, heads
        self.tokens, self.first, self.second = nn.Embedding(60, WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.tokens(ids)
        q, k, v = (
            part(self.first(h)).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = (rotated(q), rotated(k)) if self.places else (q, k)
        likeness = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        if self.decoder:
            likeness = likeness - 1e9 * torch.ones_like(likeness).triu(1)
        mixed = h + self.o((likeness.softmax(-1) @ v).transpose(1, 2).flatten(2))
        y = mixed + self.narrow(torch.relu(self.wide(self.second(h if self.parallel else mixed))))
        return self.out(y) if self.decoder else self.out(y.mean(1))  # type: ignore[no-any-return]


class Masked(Encoder):
    """It passes padding over by the mask that it is handed, and answers as `transformers` does."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        assert attention_mask is not None and input_ids.dtype == torch.int64
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        share = attention_mask / attention_mask.sum(1, keepdim=True).clamp(min=1)
        return SimpleNamespace(loss=None, logits=self.out((self.block(x) * share[..., None]).sum(1)))


class Decoder(nn.Module):
    """It predicts each next token, by weights of its own or, tied, by its embedding."""

    def __init__(self, num_classes: int = 60, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_classes, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, num_classes, bias=False)
        if tied:
            self.out.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        later = -1e9 * torch.ones(length, length, device=ids.device).triu(1)
        x = self.tokens(ids) + self.places(torch.arange(length, device=ids.device))
        return self.out(self.block(x, src_mask=later.to(x.dtype)))  # type: ignore[no-any-return]


def decoder_of_transformers(vocab_size: int = 40) -> nn.Module:
    """A GPT-2 that predicts tokens, of random weights, tied as it is by default."""
    from ppbench.base.import_guard import torchvision

    torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found,unused-ignore]

    sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 16, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocab_size, **sizes)).eval()  # type: ignore[no-any-return,unused-ignore]


def classifier_of_transformers(num_labels: int = 3, vocab_size: int = 40) -> nn.Module:
    """A BERT for classification of random weights, as `transformers` makes it."""
    from ppbench.base.import_guard import torchvision

    torchvision()  # first: transformers cannot import what is built for CUDA alone
    from transformers import BertConfig, BertForSequenceClassification  # type: ignore[import-not-found,unused-ignore]

    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 96}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=vocab_size, num_labels=num_labels, max_position_embeddings=16, **sizes, **still)
    return BertForSequenceClassification(config)  # type: ignore[no-any-return,unused-ignore]


def adapted_of_transformers(num_labels: int = 3, vocab_size: int = 40, rank: int = 16) -> nn.Module:
    """The same classifier under adapters of `peft` (LoRA): what is trained is the adapters and the head."""
    network = classifier_of_transformers(num_labels, vocab_size)
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found,unused-ignore]

    config = LoraConfig(r=rank, target_modules=["query", "value"], task_type="SEQ_CLS")
    return get_peft_model(network, config)  # type: ignore[no-any-return,unused-ignore]
