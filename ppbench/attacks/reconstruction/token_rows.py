"""Texts read off one gradient: which tokens lie in the row space of the first layer's gradient.

The gradient of a linear layer W is (d loss / d output)^T X: its row space is spanned by the layer's inputs X. In front
of the first attention the input of a token is a known function of the token and its place, so every pair is tried
(Petrov et al., DAGER, NeurIPS 2024). Behind it the input depends on the text: the rows of the next layers tell which
tokens stand in one text, of a decoder from left to right, of an encoder by exchanging tokens until all inputs lie in
the row space. No label, no loss and no factor of the gradient enters.

Noise of standard deviation s on a gradient [m, n] drowns singular values below s (sqrt m + sqrt n); directions count by
how far they stand out of it (`RowSpace.weights`). For eight single letters (`letters`, untrained encoder, width 96) the
smallest singular value predicts s = 4e-4 to 9e-4. Measured: all tokens at 1e-4, 61 % at 1e-3, none at 1e-2, where a
search over vectors (`adaptive_server`) still has 97 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor, nn

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, SolvedLayer
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial

ROUNDED_SIZE = 2e-6
"""Singular values of a float32 gradient that are rounding, relative to the largest."""
READ_DISTANCE = 1e-3
"""Distance from the row space, relative to the input's norm, up to which a token counts as read."""
FAR_BEHIND = 0.03
"""The same behind the first attention, where weak directions are rounded: wrong tokens are at 0.1 and more."""
SKETCHES = 16
"""Directions orthogonal to the row space by which nearly all tokens are ruled out, before the distance is computed."""
SHORTLIST = 64
"""Tokens of a place whose distance is computed."""
BLOCK = 512
"""Tokens, or texts, that pass the network at once."""


# -- What the linear layers of a network of texts read --


class _Read(Exception):
    """The pass has come to the last layer that is looked at."""


@contextmanager
def _watched(module: nn.Module, names: Sequence[str], last: str = "") -> Iterator[dict[str, Tensor]]:
    """Note the first inputs of the linear layers `names`, in the order of the pass, which ends at the layer `last`."""
    inputs: dict[str, Tensor] = {}

    def note(name: str, x: Tensor) -> None:
        inputs.setdefault(name, x.detach())
        if name == last:
            raise _Read

    hooks = [
        module.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        for name in names
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


@lru_cache(maxsize=32)
def _layers(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Return the linear layers that read every token, by what they read, in the order of the pass; () for none.

    Layers that share an input are one group. The first group must depend on nothing but a token and its place.
    """
    if not plan.net.embedding:
        return ()
    net, params = plan.net, initial(plan.spec, 0)
    linear = [name for name, part in net.module.named_modules() if isinstance(part, nn.Linear) and name != "head"]
    length = plan.spec.shape[0]
    texts = torch.full((2, length), 1.0)
    texts[1, length // 2 :] = 2.0 if plan.vocabulary is None else float(len(plan.vocabulary) - 1)
    with torch.no_grad(), _watched(net.module, linear) as order:
        net.features(params, texts)
    groups: list[list[str]] = []
    for name, x in order.items():
        if x.dim() != 3 or x.shape[1] != length or f"{name}.weight" not in net.names:
            continue
        if groups and torch.equal(order[groups[-1][0]], x):
            groups[-1].append(name)
        else:
            groups.append([name])
    alone = bool(groups) and length > 1 and torch.equal(*order[groups[0][0]][:, 0])
    return tuple(map(tuple, groups)) if alone else ()


@dataclass(frozen=True, eq=False)
class TextReader:
    """The public network at the weights of a gradient: what its layers read of texts [B, L] of token numbers."""

    plan: Plan
    params: Params
    groups: tuple[tuple[str, ...], ...]

    def inputs(self, texts: Tensor, group: int) -> list[Tensor]:
        """Return what the groups of layers up to `group` read, each [B, L, D] float32."""
        names = [some[0] for some in self.groups]
        parts: list[list[Tensor]] = []
        for block in texts.split(BLOCK):
            with torch.no_grad(), _watched(self.plan.net.module, names, names[group]) as read, suppress(_Read):
                self.plan.net.features(self.params, block)
            parts.append([read[name] for name in names[: group + 1]])
        return [torch.cat(some) for some in zip(*parts, strict=True)]


@dataclass(frozen=True, eq=False)
class RowSpace:
    """The row space of a gradient: orthonormal rows [R, D] float32, and how surely each belongs to it.

    weights: [R], s^2 / (s^2 + floor^2) of the singular value s; floor: singular values of noise and rounding.
    """

    rows: Tensor
    weights: Tensor
    condition: float

    @property
    def free(self) -> float:
        """The share of directions that it leaves free: with none, every input lies in it."""
        return 1 - float(self.weights.sum()) / self.rows.shape[1]

    def distance(self, x: Tensor) -> Tensor:
        """Return the distance [...] of inputs [..., D] from it, relative to their norm."""
        along = x @ self.rows.T
        outside = (x - along @ self.rows).square().sum(-1) + ((1 - self.weights) * along.square()).sum(-1)
        return (outside / x.square().sum(-1).clamp(min=1e-30)).sqrt()

    def sketch(self, generator: torch.Generator) -> Tensor:
        """Return random directions [D, `SKETCHES`] on which its inputs are 0."""
        draws = torch.randn(self.rows.shape[1], SKETCHES, generator=generator).to(self.rows)
        return draws - self.rows.T @ (self.weights[:, None] * (self.rows @ draws))


def row_space(gradients: Sequence[Tensor], noise: float) -> RowSpace:
    """Return the common row space of gradients [m, D] of layers that read the same; noise: its standard deviation."""
    matrix = torch.cat(
        [gradient.detach().double() / gradient.double().norm().clamp(min=1e-30) for gradient in gradients]
    )
    level = max(noise / max(float(gradient.double().norm()), 1e-30) for gradient in gradients)
    _, sizes, rows = torch.linalg.svd(matrix, full_matrices=False)
    floor = max(ROUNDED_SIZE * float(sizes[0]), level * (math.sqrt(len(matrix)) + math.sqrt(matrix.shape[1])))
    weights = sizes**2 / (sizes**2 + floor**2)
    seen = sizes[weights > 0.5]
    condition = float(sizes[0] / seen[-1]) if len(seen) else math.inf
    return RowSpace(rows.float(), weights.float(), condition)


# -- Which tokens may stand where --


@dataclass(frozen=True)
class NearTokens:
    """The tokens that may stand at each place, nearest first: numbers and distances, ragged, by place."""

    tokens: tuple[tuple[int, ...], ...]
    distances: tuple[tuple[float, ...], ...]


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
    reader: TextReader, space: RowSpace, words: Tensor, count: int, generator: torch.Generator
) -> NearTokens:
    """Return the tokens of `words` near the row space at each place.

    count: texts of the batch, at most so many or near ones.
    """
    length = reader.plan.spec.shape[0]
    if not len(words):
        return NearTokens(((),) * length, ((),) * length)
    sketch = space.sketch(generator)
    rough = torch.empty(length, len(words))
    for first in range(0, len(words), BLOCK):
        tokens = words[first : first + BLOCK].float()
        x = reader.inputs(tokens[:, None].expand(-1, length), 0)[0]
        rough[:, first : first + len(tokens)] = ((x @ sketch).norm(dim=-1) / x.norm(dim=-1)).T.cpu()
    near = words[rough.topk(min(SHORTLIST, len(words)), dim=1, largest=False).indices]
    x = reader.inputs(near.T.float(), 0)[0]  # row r holds the r-th nearest token of each place
    distances, order = space.distance(x).T.cpu().sort(dim=1)
    tokens_near = near.gather(1, order)
    usual = float(distances[:, 0].median())
    limit = max(READ_DISTANCE, min(10 * usual, 0.5 * math.sqrt(max(space.free, 0.0))))
    kept = [int((row < limit).sum()) for row in distances]
    most = [
        min(number, max(2 * count, int((row < READ_DISTANCE).sum())))
        for number, row in zip(kept, distances, strict=True)
    ]
    return NearTokens(
        tuple(tuple(row[:n].tolist()) for row, n in zip(tokens_near, most, strict=True)),
        tuple(tuple(row[:n].tolist()) for row, n in zip(distances, most, strict=True)),
    )


# -- Which tokens stand in one text --

TEXT_LAYERS = (1, 2, 3)
"""Groups of layers behind the first attention whose inputs depend on the text: those of the first block."""
BEGINNINGS = 4
"""Beginnings that are followed of each text of a decoder."""
EXCHANGE_ROUNDS = 60
"""Rounds in which a text exchanges tokens, at most."""
TRIES = 5
"""Starts of each text of an encoder."""
SLOWEST = 0.995
"""Least gain of a round, as a factor of the distance."""


@dataclass(frozen=True, eq=False)
class TextFilter:
    """How far the inputs of a group of layers lie from the row space of their gradient."""

    reader: TextReader
    group: int
    space: RowSpace

    def __call__(self, texts: Tensor) -> Tensor:
        """Return the distance [N, L] of each token of texts [N, L]; 0 at padding."""
        distances = self.space.distance(self.reader.inputs(texts, self.group)[self.group])
        return torch.where(texts != PADDING, distances, 0.0)

    def mean(self, texts: Tensor) -> Tensor:
        """Return the mean distance [N] over the tokens of texts [N, L]; 1 of an empty one."""
        count = (texts != PADDING).sum(1)
        return torch.where(count > 0, self(texts).sum(1) / count.clamp(min=1), 1.0)


@dataclass(frozen=True)
class ReadText:
    """A text [L] of token numbers, and the mean distance of its inputs."""

    tokens: tuple[int, ...]
    distance: float


def _from_left(text_filter: TextFilter, near: NearTokens, count: int) -> list[ReadText]:
    """Return texts of a decoder: every place must lie in the row spaces behind those that were read before it."""
    length = len(near.tokens)
    open_, done = [ReadText((), 0.0)], list[ReadText]()
    for place, tokens in enumerate(near.tokens):
        grown = [(text, token) for text in open_ for token in tokens]
        if not grown:
            break
        rows = torch.full((len(grown), length), float(PADDING))
        for row, (text, token) in zip(rows, grown, strict=True):
            row[: place + 1] = torch.tensor([*text.tokens, token], dtype=torch.float32)
        distances = text_filter(rows)[:, place].tolist()
        longer = [
            ReadText((*text.tokens, token), (text.distance * place + distance) / (place + 1))
            for (text, token), distance in zip(grown, distances, strict=True)
            if distance < max(FAR_BEHIND, 3 * text.distance)
        ]
        starts = {one.tokens[:-1] for one in longer}
        done += [text for text in open_ if text.tokens not in starts]
        open_ = sorted(longer, key=lambda one: one.distance)[: BEGINNINGS * count]
    texts = [*done, *open_]
    filled = [ReadText((*one.tokens, *[PADDING] * (length - len(one.tokens))), one.distance) for one in texts]
    return sorted(filled, key=lambda one: (one.distance > FAR_BEHIND, one.tokens.count(PADDING), one.distance))


def _by_exchange(text_filter: TextFilter, near: NearTokens, count: int, generator: torch.Generator) -> list[ReadText]:
    """Return texts of an encoder: tokens are exchanged, place by place, for those that bring all inputs nearer."""
    texts = list[ReadText]()
    for _ in range(TRIES * count):
        exact = [one for one in texts if one.distance < FAR_BEHIND]
        if len({one.tokens for one in exact}) >= count:
            break
        used = [{one.tokens[place] for one in exact} for place in range(len(near.tokens))]
        fresh = [[t for t in tokens if t not in some] or tokens for tokens, some in zip(near.tokens, used, strict=True)]
        length = next((place for place, tokens in enumerate(near.tokens) if not tokens), len(near.tokens))
        start = [some[int(torch.randint(len(some), (), generator=generator))] for some in fresh[:length]]
        start += [PADDING] * (len(near.tokens) - length)
        texts.append(_exchanged(text_filter, near, start))
    return sorted(dict.fromkeys(texts), key=lambda one: one.distance)


def _exchanged(text_filter: TextFilter, near: NearTokens, start: Sequence[int]) -> ReadText:
    """Return the text that exchanges of tokens, then of two places, lead to from a start."""
    text = torch.tensor(start, dtype=torch.float32)
    least = float(text_filter.mean(text[None]))
    for _ in range(EXCHANGE_ROUNDS):
        singles = list(_changes(text, near))
        if not singles or least < READ_DISTANCE:
            break
        distances = text_filter.mean(torch.stack([_with(text, change) for change in singles])).tolist()
        best = dict[int, tuple[float, Mapping[int, int]]]()
        for distance, change in zip(distances, singles, strict=True):
            place = min(change)
            best[place] = min(best.get(place, (math.inf, change)), (distance, change), key=lambda pair: pair[0])
        ranked = [change for distance, change in sorted(best.values(), key=lambda pair: pair[0]) if distance < least]
        together = [{k: v for change in ranked[:n] for k, v in change.items()} for n in (1, 2, 4, 8, 16)]
        for moves in (together if ranked else [], _swaps(text, near)):
            after, distance = _best(text_filter, [_with(text, move) for move in moves])
            if after is not None and distance < SLOWEST * least:
                text, least = after, distance
                break
        else:
            break
    return ReadText(tuple(int(token) for token in text), least)


def _best(text_filter: TextFilter, texts: Sequence[Tensor]) -> tuple[Tensor | None, float]:
    """Return the text of the least distance, and this; None of no texts."""
    if not texts:
        return None, math.inf
    distances = text_filter.mean(torch.stack([*texts]))
    return texts[int(distances.argmin())], float(distances.min())


def _changes(text: Tensor, near: NearTokens) -> Iterator[Mapping[int, int]]:
    """Yield the changes of one token, also behind the last one, and the ends that a text may have before its own."""
    length = int((text != PADDING).sum())
    for place, tokens in enumerate(near.tokens[: length + 1]):
        yield from ({place: token} for token in tokens if token != int(text[place]))
        if 0 < place < length:
            yield dict.fromkeys(range(place, length), PADDING)


def _swaps(text: Tensor, near: NearTokens) -> list[Mapping[int, int]]:
    """Return exchanges of two places: sums over a text hardly change by these, so no single token improves them."""
    numbers = [int(token) for token in text]
    return [
        {i: numbers[j], j: numbers[i]}
        for i, j in combinations(range(len(numbers)), 2)
        if numbers[i] != numbers[j] and numbers[j] in near.tokens[i] and numbers[i] in near.tokens[j]
    ]


def _with(text: Tensor, tokens: Mapping[int, int]) -> Tensor:
    changed = text.clone()
    for place, token in tokens.items():
        changed[place] = token
    return changed


@dataclass(frozen=True)
class TokenRows(Attack):
    """Texts by the row spaces of a transformer's first gradients, see the module.

    It reads networks whose linear layers take every token, and batches of fewer tokens than the stream is wide. Of a
    trained embedding it knows which tokens were read. Noise widens what counts as near, until every token does.

    Attributes:
        largest_batch: texts, at most, that are put together; of larger batches only which tokens stand where.
    """

    name: ClassVar[str] = "token_rows"
    exact: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = "Petrov, Dimitrov, Baader, Mueller and Vechev, DAGER, NeurIPS 2024"

    largest_batch: PositiveInt = 4

    def suits(self, plan: Plan) -> bool:
        """Return whether the network takes token numbers, and its first linear layers read them one by one."""
        return super().suits(plan) and plan.vocabulary is not None and len(_layers(plan)) > max(TEXT_LAYERS)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; empty texts where no gradient was seen."""
        return self.answer(self.evidence(view), view.plan, challenges, generator)

    def answer(
        self, evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        """Return the guesses from given evidence, for instance that of an adaptive attack."""
        return [self._guess(victim) for victim in posed(evidence, plan, challenges, generator)]

    def _guess(self, victim: PosedVictim) -> Guess:
        count = victim.size[0]
        labels, evidence, plan = guessed_labels(victim), victim.evidence, victim.plan
        texts = torch.full(victim.size, float(PADDING))
        groups = _layers(plan)
        if evidence is None or evidence.params is None or not groups:
            return Guess(x=texts, y=labels, evaluations=1)
        reader = TextReader(plan, {name: value.detach() for name, value in evidence.params.items()}, groups)
        std = 0.0 if evidence.noise is None else evidence.noise.std
        observed = {name: value for name, value in evidence.observed.items() if bool(value.isfinite().all())}
        spaces = spaces_of(groups, observed, std)
        if 0 not in spaces:
            return Guess(x=texts, y=labels, evaluations=1)
        words = tokens_present(reader, observed, std)
        near = near_tokens(reader, spaces[0], words, count, victim.generator)
        texts_read = self._put_together(reader, near, spaces, count, victim.generator)
        for row, one in zip(texts, texts_read, strict=False):
            row[:] = torch.tensor(one.tokens, dtype=torch.float32)
        solved = _solved(near, spaces[0], texts_read, count)
        confidence = solved.residual if len(texts_read) >= count and spaces[0].free > LEAST_FREE else 1.0
        return Guess(x=texts, y=labels, confidence=confidence, evaluations=1, layers=(solved,))

    def _put_together(
        self,
        reader: TextReader,
        near: NearTokens,
        spaces: Mapping[int, RowSpace],
        count: int,
        generator: torch.Generator,
    ) -> list[ReadText]:
        """Return texts, the surest first."""
        behind = {group: space for group, space in spaces.items() if group in TEXT_LAYERS and space.free > LEAST_FREE}
        if count == 1 or count > self.largest_batch or not behind:
            return _nearest(near, count)
        freest = max(behind, key=lambda group: behind[group].free)
        usual = next((group for group in sorted(behind) if behind[group].free > ENOUGH_FREE), freest)
        text_filter = TextFilter(reader, usual, behind[usual])
        if _reads_back(reader):
            return _from_left(text_filter, near, count)
        return _by_exchange(text_filter, near, count, generator)


LEAST_FREE, ENOUGH_FREE = 0.02, 0.3
"""Share of directions that a row space must leave free to tell anything, and to be used before layers behind it."""


def spaces_of(groups: Sequence[Sequence[str]], observed: Params, noise: float) -> dict[int, RowSpace]:
    """Return the row spaces of the first groups of layers, without those whose gradient is not seen or 0."""
    spaces = dict[int, RowSpace]()
    for group in (0, *TEXT_LAYERS):
        gradients = [observed[f"{name}.weight"] for name in groups[group] if f"{name}.weight" in observed]
        if gradients and any(bool((gradient != 0).any()) for gradient in gradients):
            spaces[group] = row_space(gradients, noise)
    return spaces


def _reads_back(reader: TextReader) -> bool:
    """Return whether a token's input behind the first attention depends on those before it alone: a decoder's."""
    texts = torch.ones(2, reader.plan.spec.shape[0])
    texts[1, -1] = 2.0
    x = reader.inputs(texts, 1)[1]
    return torch.equal(*x[:, 0])


def _nearest(near: NearTokens, count: int) -> list[ReadText]:
    """Return texts of the nearest tokens of each place, one after another; the end is where no token is near."""
    texts = []
    for rank in range(count):
        tokens = [some[min(rank, len(some) - 1)] if some else PADDING for some in near.tokens]
        distances = [some[min(rank, len(some) - 1)] for some in near.distances if some]
        texts.append(ReadText(tuple(tokens), sum(distances) / max(len(distances), 1) if distances else 1.0))
    return texts


def _solved(near: NearTokens, space: RowSpace, texts_read: Sequence[ReadText], count: int) -> SolvedLayer:
    """Return how well the tokens were determined."""
    places = sum(bool(some) for some in near.tokens)
    sure = [one for one in texts_read[:count] if one.distance < FAR_BEHIND]
    exact = len(sure) == count and space.free > LEAST_FREE
    worst = max([one.distance for one in texts_read[:count]], default=1.0)
    determined = sum(len(one.tokens) - one.tokens.count(PADDING) for one in sure)
    return SolvedLayer("tokens", max(count * places, determined), determined, space.condition, worst, exact)
