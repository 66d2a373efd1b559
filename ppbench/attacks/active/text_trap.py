"""Trap weights for texts: a transformer whose first MLP sorts the tokens of a batch into bins.

Fowl et al., "Decepticons: Corrupted Transformers Breach Privacy in Federated Learning for Language Models", ICLR 2023:
the first feed-forward layer is an imprint, and the attention before it writes into some coordinates of each token's
vector which text it stands in. Embeddings and places stay as they are. Theirs writes the first token of the text, and
letters begin alike; here attention is the mean over all tokens that a token sees, the text's `signature`. Of a decoder
it is another one at each place and tells what stands before it. All later blocks pass on, and the head is undecided,
so that every token has a gradient of about one size. What the bins show is read by `token_bins`.

Measured on letters (width 96, 384 units, untrained): 357 tokens in 192 bins come out. Noise behind clipping drowns it
from 1e-6 times the bound on, probably because most of a clipped gradient is that of the layer behind the trap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ppbench.attacks.active.wiring import WRONG, WiredLayer, bin_units, padded, quantiles
from ppbench.base.errors import UsageError
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.plan import Data, Plan
from ppbench.nets.models.transformer import TextFeatures

TRAP_BLOCK = "features.blocks.0"
"""The block whose attention writes signatures, and whose MLP is the trap."""
SIGNATURE_PART = 6
"""One in so many coordinates of a token's vector gets the signature."""
NARROWEST = 24
"""Width of the narrowest network that is read: below it the other coordinates do not tell tokens apart."""


def trapped_features(plan: Plan) -> TextFeatures | None:
    """Return the part of a network of texts that can be wired as a trap, None of other networks.

    Its blocks and its head must be trained: adapters of low rank leave no gradient of the MLP. Of a decoder that is
    classified, the second block must carry the gradient to all tokens but the last.
    """
    features = plan.net.module.features
    if not isinstance(features, TextFeatures) or plan.vocabulary is None or plan.net.module.head.bias is None:
        return None
    trained = {name for name, _ in plan.net.module.named_parameters() if "blocks" in name or "norm" in name}
    whole = trained <= {*plan.net.names} and features.embedding.embedding_dim >= NARROWEST
    reaches = len(features.blocks) > 1 or not relays(features)
    return features if whole and reaches and plan.loss in ("cross_entropy", "squared", "next_token") else None


def relays(features: TextFeatures) -> bool:
    """Return whether only a text's last token reaches the head, so that a block behind the trap must relay others."""
    return features.reading.causal and not features.reading.every_token


def signature_size(width: int) -> int:
    """Return the number S of coordinates of a token's vector that get the signature."""
    return width // SIGNATURE_PART


def embedding_tables(plan: Plan, params: Params) -> tuple[Tensor, Tensor]:
    """Return the embeddings [V, D] of tokens and [L, D] of places, trained or not."""
    known = plan.net.frozen | params
    return known["features.embedding.weight"], known["features.positions"]


# -- Vectors of tokens, as the trap reads them --


@dataclass(frozen=True, eq=False)
class TokenVectors:
    """What the trap reads of a token at its place in a text, by the weights that were sent; float64.

    embeddings: [V, D]; places: [L, D]; projection: [S, D], of a token's normed vector onto its share of the signature.
    """

    embeddings: Tensor
    places: Tensor
    projection: Tensor
    causal: bool
    eps: float

    @staticmethod
    def of(plan: Plan, params: Params) -> TokenVectors:
        """Return the vectors under weights by `text_trap`."""
        features = trapped_features(plan)
        assert features is not None  # else no such weights were sent
        tables = [table.detach().cpu().double() for table in embedding_tables(plan, params)]
        width = tables[0].shape[1]
        values = slice(2 * width, 2 * width + signature_size(width))
        projection = params[f"{TRAP_BLOCK}.query_key_value.weight"][values].double()
        return TokenVectors(tables[0], tables[1], projection, features.reading.causal, features.norm.eps)

    def values(self, place: int) -> Tensor:
        """Return the share [V, S] of each token in the signature, at a place."""
        return self._normed(self.embeddings + self.places[place]) @ self.projection.T

    def vectors(self, tokens: Tensor, place: int, signatures: Tensor) -> Tensor:
        """Return the vectors [..., D] of tokens [...] at a place, with signatures [..., S]."""
        x = (self.embeddings[tokens] + self.places[place]).expand(*signatures.shape[:-1], -1).clone()
        x[..., : signatures.shape[-1]] += signatures
        return self._normed(x)

    def of_texts(self, texts: Tensor) -> Tensor:
        """Return the vectors [N, L, D] of all tokens of texts [N, L] of token numbers, padding at their ends."""
        tokens = self.embeddings[texts.long()] + self.places
        real = (texts != PADDING).double()[..., None]
        values = real * (self._normed(tokens) @ self.projection.T)
        if self.causal:
            signatures = values.cumsum(1) / real.cumsum(1).clamp(min=1)
        else:
            signatures = (values.sum(1) / real.sum(1).clamp(min=1))[:, None].expand_as(values)
        tokens[..., : signatures.shape[-1]] += signatures
        return self._normed(tokens)

    def token_part(self, x: Tensor) -> Tensor:
        """Return the coordinates [..., D - S] of vectors [..., D] that tell tokens, less their mean."""
        x = x[..., len(self.projection) :]
        return x - x.mean(-1, keepdim=True)

    def _normed(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        normed: Tensor = x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
        return normed


# -- The weights that are sent --

SIGNATURE_WEIGHT = 2.0
"""Spread of the measurement by signatures, beside that by tokens: letters share tokens, at equal places too."""
SAMPLED_TOKENS = 2**14
"""Tokens of public or drawn texts from which the law of the measurement is taken."""
BLUR = 0.02
"""Spread that is added to the measured values, relative to theirs: tokens that begin a text of a decoder are alike."""
STEPS_IN_BIN = 200.0
"""Change of a unit's input over the median bin: a few of a hundred tokens lie where a unit is half open."""
READ_WEIGHT = 4.0
"""Weight by which the head reads the mean over a text's tokens: its output still stays where it is undecided."""
LOUDER = 30.0
"""How much larger than those of images the weights behind a loud trap are: a norm follows on what rounding leaves."""


def last_norm(plan: Plan) -> WiredLayer:
    """Return the layer before the head of a network of texts."""
    return WiredLayer("features.norm", plan.net.module.get_submodule("features.norm"), nn.Identity())  # type: ignore[arg-type]


def text_trap(plan: Plan, params: Params, public: Data | None, generator: torch.Generator, loud: bool) -> Params:
    """Return the weights of an encoder or decoder whose first MLP is a trap; loud: with the largest gradients.

    Directions are drawn by `generator`. Bins are equally likely among tokens of public texts, else of drawn ones.
    UsageError: the network has no such layer.
    """
    features = trapped_features(plan)
    if features is None:
        raise UsageError(
            f"Attack 'imprint' needs a transformer whose first MLP is trained and whose every token reaches the head; "
            f"model {plan.spec.model!r} is none: take --model transformer without adapters, or gpt of depth 2."
        )
    width = features.embedding.embedding_dim
    drawn = torch.randn(width, 2, generator=generator, dtype=torch.float64)
    way, answered = torch.linalg.qr(drawn - drawn.mean(0))[0].T  # of mean 0: norms pass nothing else
    spread = math.sqrt(sum(float(table.double().var(0).mean()) for table in embedding_tables(plan, params)))
    sent = {**params, **_plain_blocks(params)}
    _write_signatures(sent, width, spread * math.sqrt(len(features.positions)) / 2, generator)  # as large as tokens
    if relays(features):
        _set(sent, "features.blocks.1.query_key_value.weight", slice(2 * width, 2 * width + 1), way[None])
        _set(sent, "features.blocks.1.mixed.weight", (slice(None), 0), READ_WEIGHT * spread * answered)
    else:
        answered = READ_WEIGHT * way
    sent |= _undecided_head(answered, params, plan)
    texts = _law_texts(plan, public, generator)
    vectors = TokenVectors.of(plan, sent)
    return sent | _trap_layer(vectors, vectors.of_texts(texts)[texts != PADDING], way, params, generator, loud)


def _set(weights: Params, name: str, where: slice | tuple[slice | int, ...], value: Tensor) -> None:
    """Set some of the weights `name`, which are no one else's."""
    weights[name][where] = value.to(weights[name])


def _write_signatures(sent: Params, width: int, scale: float, generator: torch.Generator) -> None:
    """Let the first attention write signatures: means over a drawn projection of normed vectors, times `scale`."""
    size = signature_size(width)
    projection = torch.linalg.qr(torch.randn(width, size, generator=generator, dtype=torch.float64))[0].T
    _set(sent, f"{TRAP_BLOCK}.query_key_value.weight", slice(2 * width, 2 * width + size), scale * projection)
    _set(sent, f"{TRAP_BLOCK}.mixed.weight", (slice(size), slice(size)), torch.eye(size))


def _plain_blocks(params: Params) -> Params:
    """Return weights of blocks that add nothing, and whose attention is the mean over what a token sees."""
    weights = Params()
    for name in params:
        layer, _, part = name.rpartition(".")
        if layer.startswith("features.norm") or ".norm_" in layer:
            weights[name] = torch.full_like(params[name], 1.0 if part == "weight" else 0.0)
        elif layer.endswith((".query_key_value", ".mixed", ".down")):
            weights[name] = torch.zeros_like(params[name])
    return weights


def _undecided_head(way: Tensor, params: Params, plan: Plan) -> Params:
    """Return a head that reads one direction [D] into its first output, at which it is undecided.

    Where texts are their own targets the first output is that of padding, no target, and sure: its slope is 1 for all.
    """
    weight, bias = torch.zeros_like(params["head.weight"]), torch.zeros_like(params["head.bias"])
    weight[0] = way.to(weight)
    bias[0] = 0.5 if plan.loss == "squared" else math.log(max(len(bias) - 1, 1)) + WRONG * plan.next_token
    return {"head.weight": weight, "head.bias": bias}


def _law_texts(plan: Plan, public: Data | None, generator: torch.Generator) -> Tensor:
    """Return texts [N, L] from which the law of the measurement is taken: public ones, else drawn tokens."""
    assert plan.vocabulary is not None
    length = plan.spec.shape[0]
    count = max(SAMPLED_TOKENS // length, 16)
    if public is not None and len(public.x) > 1:
        return public.x[:count].cpu().round().long()
    return torch.randint(PADDING + 1, len(plan.vocabulary), (count, length), generator=generator)


def _trap_layer(
    vectors: TokenVectors, seen: Tensor, way: Tensor, params: Params, generator: torch.Generator, loud: bool
) -> Params:
    """Return the weights of the first MLP: units that step along one drawn direction, whose sum goes `way` [D].

    seen: vectors [N, D] of the law of tokens.
    """
    drawn, size = torch.randn(len(way), generator=generator, dtype=torch.float64), len(vectors.projection)
    signature, token = drawn.clone(), drawn.clone()
    signature[size:] = token[:size] = 0
    direction = SIGNATURE_WEIGHT * signature / (seen @ signature).std() + token / (seen @ token).std()
    direction = (direction - direction.mean()) / (direction - direction.mean()).norm()
    measured = seen @ direction
    measured += BLUR * measured.std() * torch.randn(len(measured), generator=generator, dtype=torch.float64)
    like, down = params[f"{TRAP_BLOCK}.up.bias"], params[f"{TRAP_BLOCK}.down.weight"]
    thresholds = torch.quantile(measured, quantiles(len(like) // 2 if loud else len(like), 1))
    gains = torch.full_like(thresholds, STEPS_IN_BIN / float(thresholds.diff().median()))
    units = bin_units(direction, thresholds, gains, nn.GELU(), loud)
    coefficients = padded(units.coefficients * (LOUDER if loud else 1.0), like.double())
    return {
        f"{TRAP_BLOCK}.up.weight": padded(units.weight, params[f"{TRAP_BLOCK}.up.weight"]),
        f"{TRAP_BLOCK}.up.bias": padded(units.bias, like),
        f"{TRAP_BLOCK}.down.weight": (way[:, None] * coefficients).to(down),
        f"{TRAP_BLOCK}.down.bias": (-units.middle * way).to(down),
    }
