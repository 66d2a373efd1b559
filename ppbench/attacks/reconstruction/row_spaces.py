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
SKETCHES = 16
"""Directions orthogonal to the row space by which nearly all tokens are ruled out, before the distance is computed."""
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
    net, params = plan.net, initial(plan.spec, 0)
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


def one_by_place(text: ReadText, group: int, space: RowSpace) -> NearTokens:
    """Return the tokens of a text as the only ones that may stand at their places."""
    tokens = tuple((one,) if one != PADDING else () for one in text.tokens)
    return NearTokens(tokens, tuple((text.distance,) * len(one) for one in tokens), group, space)


# -- A text read off a gradient with fewer rows than the text has tokens, as that of adapters of low rank (LoRA) --
# Every row is a mixture of the inputs of all tokens, so no single input lies in the row space. But all rows mix the
# same inputs, one for each place, of a known table: joint sparse recovery. Tokens are chosen greedily, each by how
# much it explains of what the chosen ones leave (rank-aware order recursive matching pursuit: Davies and Eldar, "Rank
# Awareness in Joint Sparse Recovery", IEEE Transactions on Information Theory 2012). Then each place is chosen again,
# given all others, until the rows are explained whole. Wrong tokens do that too where they span nearly the whole
# space: a text counts as read only if the rows hold more than it takes to choose its tokens (`_is_determined`).
# Measured (docs/benchmarks.md): of letters of 22 tokens all from 6 rows on; of reviews of 32 tokens on MiniLM, which
# has 30,522 tokens, 97 % of 16 rows and 41 % of 8.

ATTEMPTS, SWEEPS = 3, 8
"""How often half of the best tokens are given up for others, and then all places are chosen again, at most."""
SAFETY = 2.0
"""How many times the bits that choose a text its rows must hold, for their search tries many."""
LEAST_ROOM = 0.02
"""Share of an input's square that counts, at least, as outside the others: less is rounding."""
LEAST_LEFT = 1e-4
"""Length that a direction of unit rows keeps, at least, to count as not explained."""


def text_of_mixtures(inputs: SummedInputs, words: Tensor, space: RowSpace, generator: torch.Generator) -> ReadText:
    """Return the text whose inputs, together, span the rows of a space best.

    words: the tokens [N] of `inputs`. The text's distance is that of the rows from what its inputs span; 1 where wrong
    tokens might explain them as well.
    """
    rows, best, least = space.rows[space.weights > 0.5], dict[int, int](), math.inf
    for _ in range(ATTEMPTS):
        kept = {place: best[place] for place in best if torch.rand((), generator=generator) < 0.5}
        chosen = _exchanged(inputs, rows, _filled(inputs, rows, kept), space.read_distance, generator)
        distance = _distance(rows, _span(inputs, chosen))
        if distance < least:
            best, least = chosen, distance
        if least < space.read_distance:
            break
    needed = {place: token for place, token in best.items() if _is_needed(inputs, rows, best, place, space)}
    tokens = tuple(int(words[needed[i]]) if i in needed else PADDING for i in range(len(inputs.place)))
    is_determined = _is_determined(rows, len(needed), len(words), space.read_distance)
    return ReadText(tokens, _distance(rows, _span(inputs, needed)) if is_determined else 1.0)


def _is_determined(rows: Tensor, chosen: int, words: int, limit: float) -> bool:
    """Return whether rows [R, D] that so many tokens of `words` explain to `limit` tell them from wrong ones.

    Each row lies within `limit` of their span in D - 1 - `chosen` directions (a norm leaves out one), which wrong
    tokens do by a chance of `limit` each; there are `words` to the power of `chosen` texts.
    """
    free = max(rows.shape[1] - 1 - chosen, 0)
    return len(rows) * free * -math.log2(limit) > SAFETY * chosen * math.log2(max(words, 2))


def _exchanged(
    inputs: SummedInputs, rows: Tensor, chosen: Mapping[int, int], limit: float, generator: torch.Generator
) -> dict[int, int]:
    """Return tokens of which none can be exchanged for a better one, or that leave the rows less than `limit`."""
    chosen = dict(chosen)
    for _ in range(SWEEPS):
        before = dict(chosen)
        if _distance(rows, _span(inputs, chosen)) < limit:
            break
        for place in torch.randperm(len(inputs.place), generator=generator).tolist():
            chosen.pop(place, None)
            chosen |= _best(inputs, rows, chosen, place)
        if chosen == before:
            break
    return chosen


def _filled(inputs: SummedInputs, rows: Tensor, kept: Mapping[int, int]) -> dict[int, int]:
    """Return those tokens that are kept, and one for each other place, until the rows are explained."""
    chosen, span = dict(kept), _span(inputs, kept)
    room = inputs.sizes - inputs.squares(span)
    while len(chosen) < len(inputs.place) and len(left := _unexplained(rows, span)):
        explained = inputs.squares(left.T) / room.clamp(min=LEAST_ROOM * inputs.sizes)
        explained[[*chosen]] = -1.0
        place, token = divmod(int(explained.argmax()), explained.shape[1])
        chosen[place] = token
        grown = _span(inputs, chosen)
        room, span = room - inputs.squares(grown[:, -1:]), grown
    return chosen


def _best(inputs: SummedInputs, rows: Tensor, others: Mapping[int, int], place: int) -> dict[int, int]:
    """Return the token of a place that explains most of what the others leave; none if they leave nothing."""
    span = _span(inputs, others)
    left = _unexplained(rows, span)
    if not len(left):
        return {}
    size = inputs.sizes[place]
    room = (size - inputs.squares(span, [place])[0]).clamp(min=LEAST_ROOM * size)
    return {place: int((inputs.squares(left.T, [place])[0] / room).argmax())}


def _is_needed(inputs: SummedInputs, rows: Tensor, chosen: Mapping[int, int], place: int, space: RowSpace) -> bool:
    """Return whether the rows are not explained without the token of a place: places behind a text's end are not."""
    others = {other: token for other, token in chosen.items() if other != place}
    return _distance(rows, _span(inputs, others)) >= space.read_distance


def _span(inputs: SummedInputs, chosen: Mapping[int, int]) -> Tensor:
    """Return orthonormal directions [D, K] that the inputs of tokens at places span, in their order."""
    if not chosen:
        return inputs.place.new_zeros(inputs.place.shape[1], 0)
    span: Tensor = torch.linalg.qr(torch.stack([inputs.input(*one) for one in chosen.items()]).T)[0]
    return span


def _unexplained(rows: Tensor, span: Tensor) -> Tensor:
    """Return orthonormal directions [M, D] of what rows [R, D] have outside a span."""
    _, sizes, directions = torch.linalg.svd(rows - (rows @ span) @ span.T, full_matrices=False)
    unexplained: Tensor = directions[sizes > LEAST_LEFT]
    return unexplained


def _distance(rows: Tensor, span: Tensor) -> float:
    """Return how much of orthonormal rows lies outside a span, at most."""
    return float(torch.linalg.matrix_norm(rows - (rows @ span) @ span.T, 2))
