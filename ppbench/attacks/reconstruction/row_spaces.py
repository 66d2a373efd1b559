"""What the linear layers of a network of texts read, and the row spaces of their gradients.

The gradient of a linear layer W is (d loss / d output)^T X: its row space is spanned by the layer's inputs X.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.plan import Plan
from ppbench.nets.net import initial

ROUNDED_SIZE = 4e-7
"""Singular values of a float32 gradient that are rounding, relative to the largest."""
READ_DISTANCE = 1e-3
"""Distance from the row space, relative to the input's norm, up to which an input counts as read."""
FAR_BEHIND = 0.03
"""The same where the rounding hides directions: wrong tokens are at 0.1 and more."""
LEAST_FREE = 0.02
"""Share of directions that a row space must leave free to tell anything."""
BEHIND = 3
"""Groups of layers whose inputs depend on the text that are looked at: those behind the first attention."""
SHIFT = 0.1
"""Size of the shifts of a network's weights by which it is seen which layers read the same."""
SKETCHES = 16
"""Directions orthogonal to the row space by which nearly all tokens are ruled out, before the distance is computed."""
SHORTLISTS = (64, 512)
"""Tokens of a place whose distance is computed: for one text, and for more, whose tokens may seem to stand anywhere."""
BLOCK = 512
"""Tokens, or texts, that pass the network at once."""


class _Read(Exception):
    """The pass has come to the last layer that is looked at."""


@contextmanager
def _watched(module: nn.Module, names: Sequence[str], last: str = "") -> Iterator[dict[str, Tensor]]:
    """Note the first inputs of the linear layers `names`, in the order of the pass, which ends at the layer `last`."""
    inputs: dict[str, Tensor] = {}

    def note(name: str, part: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = _read_by(part, args)
        if x is not None:
            inputs.setdefault(name, x.detach())
        if name == last:
            raise _Read

    hooks = [
        module.get_submodule(name).register_forward_pre_hook(lambda part, args, name=name: note(name, part, args))
        for name in names
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _read_by(part: nn.Module, args: tuple[Tensor, ...]) -> Tensor | None:
    """Return what a linear layer reads, [B, L, D]; None if an attention reads several things, or gets them by name."""
    if not isinstance(part, nn.MultiheadAttention):
        return args[0]
    alike = len(args) > 2 and args[0] is args[1] is args[2]
    return (args[0] if part.batch_first else args[0].transpose(0, 1)) if alike else None


def _is_linear(part: nn.Module) -> bool:
    """Return whether a layer multiplies what it reads by one weight.

    Besides torch's linear layer that of GPT-2 in `transformers`, whose weight is transposed, and torch's attention,
    whose queries, keys and values are one product.
    """
    if isinstance(part, nn.MultiheadAttention):
        return part.in_proj_weight is not None
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"


def _weight_of(name: str, part: nn.Module) -> str:
    """Return the name of the weight of a linear layer."""
    return f"{name}.in_proj_weight" if isinstance(part, nn.MultiheadAttention) else f"{name}.weight"


@dataclass(frozen=True)
class LinearGroups:
    """The trained linear layers that read every token, in the order of the pass; those that share an input are a group.

    The last is the head where it answers every token.

    names: by group. alone: the number of groups at the beginning whose inputs depend on nothing but a token and its
    place; those behind depend on the text.
    """

    names: tuple[tuple[str, ...], ...] = ()
    alone: int = 0

    @property
    def head(self) -> int:
        """The number of the head's group; -1 where it does not answer every token."""
        return len(self.names) - 1 if self.names and self.names[-1] == ("head",) else -1

    @property
    def looked_at(self) -> list[int]:
        """The numbers of the groups whose row spaces are computed: the first ones, and the head's."""
        first = [*range(min(len(self.names), self.alone + BEHIND))]
        return first if self.head in {-1, *first} else [*first, self.head]


@lru_cache(maxsize=32)
def linear_groups(plan: Plan) -> LinearGroups:
    """Return the linear layers of a network of texts that read every token; none of other networks."""
    if not plan.net.embedding:
        return LinearGroups()
    net, draws = plan.net, torch.Generator().manual_seed(0)  # layers that start alike, or at 0, part in training
    params = {
        name: value + SHIFT * (1 + value.abs()) * torch.rand(value.shape, generator=draws)
        for name, value in initial(plan.spec, 0).items()
    }
    linear = [name for name, part in net.module.named_modules() if _is_linear(part)]
    length = plan.spec.shape[0]
    texts = torch.full((3, length), 1.0)
    other = 2.0 if plan.vocabulary is None else float(len(plan.vocabulary) - 1)
    texts[1, length // 2 :] = texts[2, : length // 2] = other
    with torch.no_grad(), _watched(net.module, linear) as order:
        net(params, texts)
    groups: list[list[str]] = []
    for name, x in order.items():
        weight = _weight_of(name, net.module.get_submodule(name))
        if x.dim() != 3 or x.shape[1] != length or weight not in net.names:
            continue
        sharing = next((group for group in groups if torch.equal(order[group[0]], x)), None)
        if sharing is None:
            groups.append([name])
        else:
            sharing.append(name)
    behind = [length == 1 or _depends_on_others(order[group[0]]) for group in groups]
    return LinearGroups(tuple(map(tuple, groups)), behind.index(True) if True in behind else len(groups))


def _depends_on_others(x: Tensor) -> bool:
    """Return whether inputs [3, L, D] of a text, and of two with another end and another beginning, tell the others."""
    return not (torch.equal(x[0, 0], x[1, 0]) and torch.equal(x[0, -1], x[2, -1]))


WORDS_TRIED = 16
"""Words by which it is tried whether inputs are sums."""


@dataclass(frozen=True, eq=False)
class SummedInputs:
    """Inputs that are a norm of a token's vector plus a place's, as in BERT and GPT-2.

    token: [N, D]; place: [L, D]; scale, shift, eps: of the norm. All pairs are reached by products of matrices.
    """

    token: Tensor
    place: Tensor
    scale: Tensor
    shift: Tensor
    eps: float

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [N, D] and places [L, D] as the norm scales them, and by what it divides their sum, [L, N]."""
        token, place = (some - some.mean(-1, keepdim=True) for some in (self.token, self.place))
        square = token.square().sum(1) + place.square().sum(1)[:, None] + 2 * place @ token.T
        return token * self.scale, place * self.scale, (square / token.shape[1] + self.eps).sqrt()

    @cached_property
    def sizes(self) -> Tensor:
        """The squared norm of each input, [L, N]."""
        token, place, size = self._scaled
        square = (token.square().sum(1) + place.square().sum(1)[:, None] + 2 * place @ token.T) / size.square()
        return square + 2 * ((token @ self.shift) + (place @ self.shift)[:, None]) / size + self.shift.square().sum()

    def input(self, place: int, token: int) -> Tensor:
        """Return one input [D]; token: its row."""
        tokens, places, size = self._scaled
        return (tokens[token] + places[place]) / size[place, token] + self.shift

    def squares(self, directions: Tensor, places: Sequence[int] | None = None) -> Tensor:
        """Return the squared length of each input along orthonormal directions [D, S], [L, N], or of some places."""
        tokens, at, size = self._scaled
        chosen = range(len(at)) if places is None else places
        token, place, base = tokens @ directions, at @ directions, self.shift @ directions
        return torch.stack([((token + place[i]) / size[i][:, None] + base).square().sum(1) for i in chosen])

    def along(self, sketch: Tensor) -> Tensor:
        """Return the norm of inputs along directions [D, S], relative to the inputs' own norm, [L, N]."""
        return (self.squares(sketch) / self.sizes.clamp(min=1e-30)).sqrt()


@dataclass(frozen=True, eq=False)
class TextReader:
    """The public network at the weights of a gradient: what its layers read of texts [B, L] of token numbers."""

    plan: Plan
    params: Params
    groups: LinearGroups

    def inputs(self, texts: Tensor, group: int) -> list[Tensor]:
        """Return what the groups of layers up to `group` read, each [B, L, D] float32."""
        names = [some[0] for some in self.groups.names]
        parts: list[list[Tensor]] = []
        for block in texts.split(BLOCK):
            with torch.no_grad(), _watched(self.plan.net.module, names, names[group]) as read, suppress(_Read):
                self.plan.net(self.params, block)
            parts.append([read[name] for name in names[: group + 1]])
        return [torch.cat(some) for some in zip(*parts, strict=True)]

    def tells_places(self, group: int) -> bool:
        """Return whether what a group reads depends on the order of tokens: not before relative places (rotary)."""
        length, most = self.plan.spec.shape[0], max(self.plan.net.rows - 1, 1)
        text = PADDING + 1 + torch.arange(float(length))[None] % most
        there, back = self.inputs(text, group)[group], self.inputs(text.flip(1), group)[group]
        return length == 1 or not torch.allclose(there, back.flip(1), rtol=1e-4, atol=1e-5)

    def rough_distances(self, words: Tensor, sketch: Tensor, group: int) -> Tensor:
        """Return how far from 0 directions [D, S] are on what a group reads of words [N] at each place, [L, N]."""
        if (summed := self.summed(words, group)) is not None:
            return summed.along(sketch)
        rough = torch.empty(self.plan.spec.shape[0], len(words))
        for first in range(0, len(words), BLOCK):
            tokens = words[first : first + BLOCK].float()
            x = self.inputs(tokens[:, None].expand(-1, len(rough)), group)[group]
            rough[:, first : first + len(tokens)] = ((x @ sketch).norm(dim=-1) / x.norm(dim=-1)).T.cpu()
        return rough

    def summed(self, words: Tensor, group: int) -> SummedInputs | None:
        """Return the sums that a group of layers reads behind a norm, None where it reads another thing."""
        module, first = self.plan.net.module, self.groups.names[group][0]
        norms = {name: part for name, part in module.named_modules() if isinstance(part, nn.LayerNorm)}
        length, some = self.plan.spec.shape[0], words[:: max(1, len(words) // WORDS_TRIED)][:WORDS_TRIED].float()
        tried = some[:, None].expand(-1, length)
        sums, x = self._norm_inputs(tried, [*norms], first)
        for name, u in sums.items():
            norm = norms[name]
            scale, shift = (self._value(f"{name}.{end}", getattr(norm, end)) for end in ("weight", "bias"))
            if u.shape == x.shape and torch.allclose(layer_norm(u, u.shape[2:], scale, shift, norm.eps), x, atol=1e-5):
                alone, _ = self._norm_inputs(words.float()[:, None], [name], first)
                token = alone[name][:, 0] - u[0, 0]
                summed = SummedInputs(token, u[0], scale, shift, norm.eps)
                picked = torch.arange(len(words))[:: max(1, len(words) // WORDS_TRIED)][:WORDS_TRIED]
                close = torch.allclose(summed.token[picked][:, None] + summed.place, u, atol=1e-5)
                return summed if close else None
        return None

    def _value(self, name: str, own: Tensor) -> Tensor:
        """Return a parameter of the network, frozen ones as it has them."""
        return self.params.get(name, self.plan.net.frozen.get(name, own))

    def _norm_inputs(self, texts: Tensor, norms: Sequence[str], first: str) -> tuple[dict[str, Tensor], Tensor]:
        """Return what norms before the layer `first` read of texts [N, L], and what this one reads, each [N, L, D]."""
        parts = list[dict[str, Tensor]]()
        for block in texts.split(BLOCK * 16 // texts.shape[1]):
            with torch.no_grad(), _watched(self.plan.net.module, [*norms, first], first) as read, suppress(_Read):
                self.plan.net.features(self.params, block)
            parts.append(dict(read))
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return whole, whole.pop(first)

    def gradients(self, observed: Params, group: int) -> list[Tensor]:
        """Return the observed gradients [m, D] of a group's layers, without those that are not seen or 0."""
        slopes = []
        for name in self.groups.names[group]:
            part = self.plan.net.module.get_submodule(name)
            slope = observed.get(_weight_of(name, part))
            if slope is not None and bool((slope != 0).any()):
                slopes.append(slope.T if type(part).__name__ == "Conv1D" else slope)
        return slopes


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The row space of a gradient: orthonormal rows [R, D] float32, and how surely each belongs to it.

    weights: [R], s^2 / (s^2 + floor^2) of the singular value s; floor: singular values of noise and rounding, relative
    to the gradient's norm. whole: whether its singular values end far above the floor, so that none is hidden by it.
    full: whether its layers read more inputs, maybe, than their gradients have rows, which then mix them.
    """

    rows: Tensor
    weights: Tensor
    condition: float
    floor: float
    whole: bool
    full: bool

    @property
    def free(self) -> float:
        """The share of directions that it leaves free: with none, every input lies in it."""
        return 1 - float(self.weights.sum()) / self.rows.shape[1]

    @property
    def tells(self) -> bool:
        """Whether what lies outside was not read: it leaves directions free, and not because its gradient has few rows.

        A gradient of as many directions as rows, as that of an adapter of low rank, may hide more inputs.
        """
        return self.free > LEAST_FREE and not self.full

    @property
    def rank(self) -> int:
        """The number of directions that stand out of noise and rounding."""
        return int((self.weights > 0.5).sum())

    @property
    def read_distance(self) -> float:
        """The distance up to which an input counts as read: rounding turns the weakest direction by so much."""
        return max(READ_DISTANCE, min(FAR_BEHIND, torch.finfo(torch.float32).eps * self.condition))

    @property
    def limit(self) -> float:
        """The distance up to which an input behind the first attention counts as read."""
        return self.read_distance if self.whole else FAR_BEHIND

    def distance(self, x: Tensor) -> Tensor:
        """Return the distance [...] of inputs [..., D] from it, relative to their norm."""
        along = x @ self.rows.T
        outside = (x - along @ self.rows).square().sum(-1) + ((1 - self.weights) * along.square()).sum(-1)
        return (outside / x.square().sum(-1).clamp(min=1e-30)).sqrt()

    def sketch(self, generator: torch.Generator) -> Tensor:
        """Return random directions [D, `SKETCHES`] on which its inputs are 0."""
        draws = torch.randn(self.rows.shape[1], SKETCHES, generator=generator).to(self.rows)
        return draws - self.rows.T @ (self.weights[:, None] * (self.rows @ draws))


def row_space(gradients: Sequence[Tensor], noise: float, inputs: int) -> RowSpace:
    """Return the common row space of gradients [m, D] of layers that read the same.

    noise: its standard deviation. inputs: how many they read, at most.
    """
    matrix = torch.cat([gradient.detach().double() / _norm(gradient) for gradient in gradients])
    level = max(noise / _norm(gradient) for gradient in gradients)
    _, sizes, rows = torch.linalg.svd(matrix, full_matrices=False)
    floor = max(ROUNDED_SIZE * float(sizes[0]), level * (math.sqrt(len(matrix)) + math.sqrt(matrix.shape[1])))
    weights = sizes**2 / (sizes**2 + floor**2)
    seen = sizes[weights > 0.5]
    condition = float(sizes[0] / seen[-1]) if len(seen) else 1 / ROUNDED_SIZE
    whole = 0 < len(seen) < len(sizes) and float(seen[-1]) > 5 * floor and float(sizes[len(seen)]) < 0.2 * floor
    full = len(matrix) < min(matrix.shape[1], inputs) and not whole
    return RowSpace(rows.float(), weights.float(), condition, floor, whole, full)


def _norm(gradient: Tensor) -> float:
    return max(float(gradient.detach().double().norm()), 1e-30)


def spaces_of(
    reader: TextReader, observed: Params, groups: Sequence[int], noise: float, texts: int
) -> Mapping[int, RowSpace]:
    """Return the row spaces of some groups of layers, of a batch of `texts`, without those not seen or 0."""
    seen, inputs = {group: reader.gradients(observed, group) for group in groups}, texts * reader.plan.spec.shape[0]
    return {group: row_space(gradients, noise, inputs) for group, gradients in seen.items() if gradients}


# -- What is read --


@dataclass(frozen=True)
class NearTokens:
    """The tokens that may stand at each place, nearest first: numbers and distances, ragged, by place.

    group: the layers that read them. space: the row space of their gradient, which the tokens are near.
    """

    tokens: tuple[tuple[int, ...], ...]
    distances: tuple[tuple[float, ...], ...]
    group: int
    space: RowSpace


@dataclass(frozen=True)
class ReadText:
    """A text [L] of token numbers, and the mean distance of its inputs."""

    tokens: tuple[int, ...]
    distance: float

    def inputs(self, places: bool, padding: Sequence[bool] = ()) -> set[tuple[int, int]]:
        """Return its different inputs: places (0 without `places`, which some layers do not read) and tokens.

        padding: the places at which padding is read as a token is; at none by default.
        """
        is_read = [bool(padding) and padding[i] for i in range(len(self.tokens))]
        return {(i * places, one) for i, one in enumerate(self.tokens) if one != PADDING or is_read[i]}


def one_by_place(text: ReadText, group: int, space: RowSpace) -> NearTokens:
    """Return the tokens of a text as the only ones that may stand at their places."""
    tokens = tuple((one,) if one != PADDING else () for one in text.tokens)
    return NearTokens(tokens, tuple((text.distance,) * len(one) for one in tokens), group, space)


# -- Which tokens may stand where --


def tokens_present(reader: TextReader, observed: Params, noise: float) -> Tensor:
    """Return the tokens, int64, whose embeddings were read: those of others have no gradient. All if it is not seen."""
    assert reader.plan.vocabulary is not None
    tokens = torch.arange(PADDING + 1, len(reader.plan.vocabulary))
    table = observed.get(reader.plan.net.embedding)
    if table is None:
        return tokens
    sizes = table.detach().double().norm(dim=1).cpu()
    alone = noise * math.sqrt(table.shape[1])  # the size of a row of noise
    return tokens[sizes[tokens] > max(ROUNDED_SIZE * float(sizes.max()), 1.25 * alone)]


def near_tokens(
    reader: TextReader, group: int, space: RowSpace, words: Tensor, count: int, generator: torch.Generator
) -> NearTokens:
    """Return the tokens of `words` near the row space of a group's gradient at each place.

    count: texts of the batch. As many tokens may stand at a place, or all of the batch where inputs show no place.
    """
    length = reader.plan.spec.shape[0]
    count = count if reader.tells_places(group) else count * length
    if not len(words):
        return NearTokens(((),) * length, ((),) * length, group, space)
    rough = reader.rough_distances(words, space.sketch(generator), group)
    near = words[rough.topk(min(SHORTLISTS[count > 1], len(words)), dim=1, largest=False).indices]
    x = reader.inputs(near.T.float(), group)[group]  # row r holds the r-th nearest token of each place
    distances, order = space.distance(x).T.cpu().sort(dim=1)
    tokens_near = near.gather(1, order)
    usual = float(distances[:, 0].median())
    limit = max(space.read_distance, min(10 * usual, 0.5 * math.sqrt(max(space.free, 0.0))))
    kept = [int((row < limit).sum()) for row in distances]
    most = [
        min(number, max(2 * count, int((row < space.read_distance).sum())))
        for number, row in zip(kept, distances, strict=True)
    ]
    return NearTokens(
        tuple(tuple(row[:n].tolist()) for row, n in zip(tokens_near, most, strict=True)),
        tuple(tuple(row[:n].tolist()) for row, n in zip(distances, most, strict=True)),
        group,
        space,
    )
