"""Texts read off one gradient: which tokens lie in the row space of the first layer's gradient.

The gradient of a linear layer W is (d loss / d output)^T X: its row space is spanned by the layer's inputs X. In front
of the first attention the input of a token is a known function of the token and its place, so every pair is tried
(Petrov et al., DAGER, NeurIPS 2024). Behind it the input depends on the text: the rows of the next layers tell which
tokens stand in one text, of a decoder from left to right, of an encoder by sorting them (`token_pairs`) and exchanging
those that are wrong until all inputs lie in the row space. No label, no loss and no factor of the gradient enters. A
gradient of fewer rows than tokens, as that of adapters of low rank, is a mixture: see `mixed_rows`. Where places are
relative (rotary), no token's input tells its place: which tokens were read is known first, and their order behind it.

Where texts are their own targets (the next-token loss), no layer reads what behind which nothing is predicted: a text's
last token. The head's gradient shows it, once the others are known (`with_last_tokens`). This head reads every token:
where adapters of low rank are all that is trained before it, its row space alone tells texts, from left to right.

Noise of standard deviation s on a gradient [m, n] drowns singular values below s (sqrt m + sqrt n); directions count by
how far they stand out of it (`RowSpace.weights`). For eight single letters (`letters`, untrained encoder, width 96) the
smallest singular value predicts s = 4e-4 to 9e-4. Measured: all tokens at 1e-4, 61 % at 1e-3, none at 1e-2, where a
search over vectors (`adaptive_server`) still has 97 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Attack, Challenge, Guess, Kind, SolvedLayer
from ppbench.attacks.reconstruction.analytic import guessed_labels
from ppbench.attacks.reconstruction.mixed_rows import text_of_mixtures
from ppbench.attacks.reconstruction.row_spaces import (
    FAR_BEHIND,
    LEAST_FREE,
    READ_DISTANCE,
    NearTokens,
    ReadText,
    RowSpace,
    TextReader,
    linear_groups,
    near_tokens,
    one_by_place,
    spaces_of,
    tokens_present,
)
from ppbench.attacks.reconstruction.search.starts import PosedVictim, posed
from ppbench.attacks.reconstruction.token_pairs import texts_by_cotangents, token_pairs
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.bounds import PositiveInt
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.view import View
from ppbench.nets.classifier import HEAD_NAMES
from ppbench.nets.net import token_losses

# -- Which tokens stand in one text --

BEGINNINGS = 4
"""Beginnings that are followed of each text of a decoder."""
EXCHANGE_ROUNDS = 60
"""Rounds in which a text exchanges tokens, at most."""
WORST, WORST_OF_ALL = 12, 4
"""Places, those of the farthest inputs, that exchange likely tokens first, and those that exchange all near ones."""
FRUITLESS_PASSES = 3
"""Times in a row that the pairs of an encoder's batch are sorted, or starts drawn, without reading another text."""
ALSO_LIKELY = 2
"""Likely tokens of a place beyond the number of texts."""
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


def _from_left(text_filter: TextFilter, near: NearTokens, count: int) -> list[ReadText]:
    """Return texts of a decoder: every place must lie in the row spaces behind those that were read before it."""
    length = len(near.tokens)
    open_, done = [ReadText((), 0.0)], list[ReadText]()
    for place, tokens in enumerate(near.tokens):
        grown = [(text, token) for text in open_ for token in tokens]
        if not grown:
            break
        rows = torch.tensor([[*text.tokens, token] for text, token in grown], dtype=torch.float32)
        distances = text_filter(rows)[:, place].tolist()
        tried = [(text, token, distance) for (text, token), distance in zip(grown, distances, strict=True)]
        goes_on = {one[0] for one in tried if one[2] < _usual_limit(text_filter, one[0])}
        longer = [
            ReadText((*text.tokens, token), (text.distance * place + distance) / (place + 1))
            for text, token, distance in tried
            if distance < (_usual_limit(text_filter, text) if text in goes_on else FAR_BEHIND)
        ]
        starts = {one.tokens[:-1] for one in longer}
        done += [text for text in open_ if text.tokens not in starts]
        open_ = sorted(longer, key=lambda one: one.distance)[: BEGINNINGS * count]
    texts = [*done, *open_]
    filled = [ReadText((*one.tokens, *[PADDING] * (length - len(one.tokens))), one.distance) for one in texts]
    places = text_filter.reader.tells_places(near.group)  # without, a first token repeated is read as it is once
    return sorted(
        filled, key=lambda one: (one.distance > text_filter.space.limit, -len(one.inputs(places)), one.distance)
    )


def _usual_limit(text_filter: TextFilter, text: ReadText) -> float:
    """Return the distance of a text's next token; one on which the loss hardly depends is farther, by rounding."""
    return max(text_filter.space.limit, 3 * text.distance)


def _by_exchange(
    text_filter: TextFilter, near: NearTokens, gradients: Sequence[Tensor], count: int, generator: torch.Generator
) -> list[ReadText]:
    """Return texts of an encoder: sorted by cotangents, then exchanged until all inputs lie in the row space.

    Where sorting brings no other text, starts are drawn from the tokens that no text has that was read.
    """
    length = len(near.tokens)
    candidates = [(token, place) for place, tokens in enumerate(near.tokens) for token in tokens]
    if not candidates:
        return []
    inputs, best = _inputs_of(text_filter.reader, near.group, candidates), list[ReadText]()
    before, fruitless = -1, 0
    while fruitless < FRUITLESS_PASSES:
        exact = [one.tokens for one in best if one.distance < text_filter.space.limit]
        if len(exact) == count:
            break
        sure = {(token, place) for text in exact for place, token in enumerate(text)}
        pairs = token_pairs(candidates, inputs, near.space, gradients, sure)
        likely = replace(near, tokens=tuple(map(tuple, pairs.strongest(count + ALSO_LIKELY, length))))
        if len(exact) > before:
            starts = texts_by_cotangents(pairs, count, length, exact)[len(exact) :]
        else:
            starts = [_drawn(likely, exact, generator) for _ in range(count - len(exact))]
        before, fruitless = len(exact), fruitless + 1 if len(exact) <= before else 0
        best = _best_texts([*best, *_ended(text_filter, likely, near, starts)], count)
    return best


def _ended(
    text_filter: TextFilter, likely: NearTokens, near: NearTokens, starts: Sequence[Sequence[int]]
) -> Iterator[ReadText]:
    """Yield the texts that exchanges lead to, from the nearest start on, until one fails after one that was read.

    Then it is better to sort the pairs again.
    """
    if not starts:  # no place has a token for each text; saved networks take no empty batch
        return
    distances = text_filter.mean(torch.tensor(starts, dtype=torch.float32))
    read = False
    for number in distances.argsort().tolist():
        text = _exchanged(text_filter, likely, near, starts[number])
        yield text
        if read and text.distance >= text_filter.space.limit:
            return
        read = read or text.distance < text_filter.space.limit


def _best_texts(texts: Sequence[ReadText], count: int) -> list[ReadText]:
    """Return the nearest `count` different texts."""
    return sorted(dict.fromkeys(texts), key=lambda one: one.distance)[:count]


def _drawn(likely: NearTokens, exact: Sequence[Sequence[int]], generator: torch.Generator) -> tuple[int, ...]:
    """Return a text of drawn tokens, where it can be of such that no exact text has there."""
    text = list[int]()
    for place, tokens in enumerate(likely.tokens):
        fresh = [token for token in tokens if all(one[place] != token for one in exact)] or [*tokens]
        if not fresh:
            break
        text.append(fresh[int(torch.randint(len(fresh), (), generator=generator))])
    return (*text, *[PADDING] * (len(likely.tokens) - len(text)))


def _inputs_of(reader: TextReader, group: int, candidates: Sequence[tuple[int, int]]) -> Tensor:
    """Return what a group of layers reads of each token at its place, [P, D]."""
    length = reader.plan.spec.shape[0]
    numbers = {token: i for i, token in enumerate(sorted({token for token, _ in candidates}))}
    rows = torch.tensor([*numbers], dtype=torch.float32)[:, None].expand(-1, length)
    x = reader.inputs(rows, group)[group]
    return x[[numbers[token] for token, _ in candidates], [place for _, place in candidates]]


def _exchanged(text_filter: TextFilter, likely: NearTokens, near: NearTokens, start: Sequence[int]) -> ReadText:
    """Return the text that exchanges of tokens, then of two places, lead to from a start."""
    text = torch.tensor(start, dtype=torch.float32)
    least = float(text_filter.mean(text[None]))
    for _ in range(EXCHANGE_ROUNDS):
        if least < READ_DISTANCE:
            break
        order = text_filter(text[None])[0].argsort(descending=True).tolist()
        for changes in _ever_more(text, likely, near, order):
            after, distance = _better(text_filter, text, least, changes)
            if after is not None and distance < SLOWEST * least:
                text, least = after, distance
                break
        else:
            break
    return ReadText(tuple(int(token) for token in text), least)


def _ever_more(
    text: Tensor, likely: NearTokens, near: NearTokens, order: Sequence[int]
) -> Iterator[list[Mapping[int, int]]]:
    """Yield changes of a text, in sets that are each tried if the one before does not help; order: places by distance.

    Sums over a text hardly change by a swap of two places, so no single token improves these.
    """
    yield _changes(text, likely, order[:WORST])
    yield _changes(text, likely, order)
    yield _changes(text, near, order[:WORST_OF_ALL])
    yield _swaps(text, near)
    yield _changes(text, near, order)


def _better(
    text_filter: TextFilter, text: Tensor, least: float, changes: Sequence[Mapping[int, int]]
) -> tuple[Tensor | None, float]:
    """Return the best of a text's changes, and of those that help made together, with its distance; None if none."""
    if not changes:
        return None, math.inf
    distances = text_filter.mean(torch.stack([_with(text, change) for change in changes])).tolist()
    best = dict[int, tuple[float, Mapping[int, int]]]()
    for distance, change in zip(distances, changes, strict=True):
        place = min(change)
        best[place] = min(best.get(place, (math.inf, change)), (distance, change), key=lambda pair: pair[0])
    ranked = [change for distance, change in sorted(best.values(), key=lambda pair: pair[0]) if distance < least]
    together = [{k: v for change in ranked[:n] for k, v in change.items()} for n in (1, 2, 4, 8, 16)]
    return _best(text_filter, [_with(text, move) for move in together] if ranked else [])


def _best(text_filter: TextFilter, texts: Sequence[Tensor]) -> tuple[Tensor | None, float]:
    """Return the text of the least distance, and this; None of no texts."""
    if not texts:
        return None, math.inf
    distances = text_filter.mean(torch.stack([*texts]))
    return texts[int(distances.argmin())], float(distances.min())


def _changes(text: Tensor, near: NearTokens, places: Sequence[int]) -> list[Mapping[int, int]]:
    """Return the changes of one token at some places, also behind the last one, and the ends that may come before."""
    length = int((text != PADDING).sum())
    changes = list[Mapping[int, int]]()
    for place in sorted(place for place in places if place <= length):
        changes += [{place: token} for token in near.tokens[place] if token != int(text[place])]
        if 0 < place < length:
            changes.append(dict.fromkeys(range(place, length), PADDING))
    return changes


def _swaps(text: Tensor, near: NearTokens) -> list[Mapping[int, int]]:
    """Return the exchanges of two places."""
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


# -- Texts that are their own targets: the token that no layer reads --

REPLAYED, MOST_UNSURE = 1e-6, 1e-4
"""Relative squared mismatch of texts that explain a gradient, and what noise may add: a wrong token leaves 1e-3."""
NOISE_SPREAD = 0.05
"""Share of the squared noise by which its sum over a network's weights is taken to vary: it varies by less."""
LIKELY_ENDS, CERTAIN_TOKENS = 8, 3
"""Last tokens that are tried of a text, and tokens behind each of which the model is sure, which leave no gradient."""
SURE_SHARE = 0.5
"""Probability from which on the model is sure of a token."""


@dataclass(frozen=True)
class Replay:
    """An observation, and what texts that are their own targets leave of it."""

    evidence: Evidence

    def __call__(self, texts: Tensor) -> float:
        """Return the discrepancy of texts [B, L]."""
        x = texts.double().to(self.evidence.device).unflatten(0, (len(self.evidence.unit), -1))
        simulated = {n: v.detach() for n, v in self.evidence.simulate(x, x).items() if n in self.evidence.observed}
        return float(self.evidence.discrepancy(simulated))

    def is_exact(self, left: float) -> bool:
        """Return whether a discrepancy is rounding, or noise of the known law in which no wrong token is lost."""
        e, scale = self.evidence, max(float(self.evidence.scale()), 1e-300)
        law = e.noise if e.measure == "squares" and e.weight is None else None
        noise = 0.0 if law is None else sum(law.of(name) ** 2 * value.numel() for name, value in e.observed.items())
        spread = NOISE_SPREAD * noise
        return spread < MOST_UNSURE * scale and left < REPLAYED * scale + noise + spread


def tokens_predicted(observed: Params, words: Tensor) -> Tensor:
    """Return those of `words` whose entry in the gradient of the head's bias is negative: most of the targets.

    An entry is the mean prediction less the token's share of the targets. All words if there is no bias.
    """
    bias = observed.get(HEAD_NAMES[1])
    return words if bias is None else words[bias.detach().cpu()[words] < 0]


def with_last_tokens(
    reader: TextReader, observed: Params, texts: Tensor, replay: Replay, tries: bool
) -> tuple[Tensor, bool]:
    """Return texts [B, L] with their ends, and whether they explain the observation.

    The token behind the last that was read is a target alone. Those behind which the model was sure have no gradient:
    its own are tried. Of several ends the one that explains most; without `tries` the likeliest.
    """
    counts = (texts != PADDING).sum(1)
    if bool((counts == 0).any()) or bool((counts == texts.shape[1]).any()):
        return texts, replay.is_exact(replay(texts))
    likely = likely_ends(reader, observed, texts, counts)
    best = texts.clone()
    best[torch.arange(len(texts)), counts] = likely[:, 0]
    least = replay(best)
    for row in range(len(texts) if tries else 0):
        if replay.is_exact(least):
            break
        for end in likely[row]:
            text = texts[row].clone()
            text[counts[row]] = end
            for longer in _going_on(reader, text):
                trial = best.clone()
                trial[row] = longer
                if (left := replay(trial)) < least:
                    best, least = trial, left
    return best, replay.is_exact(least)


def _going_on(reader: TextReader, text: Tensor) -> Iterator[Tensor]:
    """Yield a text [L], and the same with one more token each time that the network is sure of one."""
    for length in range(int((text != PADDING).sum()), len(text) + 1)[: 1 + CERTAIN_TOKENS]:
        yield text
        if length == len(text):
            return
        with torch.no_grad():
            share, token = reader.plan.net(reader.params, text[None])[0, length - 1].softmax(-1).max(0)
        if float(share) < SURE_SHARE or int(token) == PADDING:
            return
        text = text.clone()
        text[length] = float(token)


def likely_ends(reader: TextReader, observed: Params, texts: Tensor, counts: Tensor) -> Tensor:
    """Return the likeliest tokens [B, `LIKELY_ENDS`] behind texts [B, L] of `counts` [B] tokens, first the likeliest.

    The gradient of all known targets and of the normalizer (logsumexp) behind the last ones, less what was observed, is
    the weighted sum of the slopes of the last tokens' own logits. Of a text's logits the one whose slope by the weights
    has the largest product with it is the last token's: of the head's weights, if they are seen, no other has any.
    """
    plan, rows, head = reader.plan, torch.arange(len(texts)), observed.keys() & {*HEAD_NAMES}
    params = {name: value.double().requires_grad_() for name, value in reader.params.items()}
    like = next(iter(params.values()))
    x, weights = texts.double().to(like.device), plan.target_weights(counts).to(like.device)
    with torch.enable_grad():
        logits = plan.net(params, x)
        last = logits[rows, counts - 1]
        losses = token_losses(logits, x)[0].sum(1) + last.logsumexp(1)
        seen = [name for name in params if name in (head or observed)]
        known = torch.autograd.grad((weights * losses).sum(), [params[name] for name in seen], retain_graph=True)
        shares = torch.zeros_like(last).requires_grad_()  # a derivative by what is linear in them: J v by two passes
        pulled = torch.autograd.grad((shares * last).sum(), [params[name] for name in seen], create_graph=True)
        left = [slope - observed[name].double() for name, slope in zip(seen, known, strict=True)]
        product = torch.stack([(one * other).sum() for one, other in zip(pulled, left, strict=True)]).sum()
        (products,) = torch.autograd.grad(product, shares)
    count = min(LIKELY_ENDS, products.shape[1] - PADDING - 1)
    return products[:, PADDING + 1 :].topk(count).indices.float().cpu() + PADDING + 1


@dataclass(frozen=True)
class TokenRows(Attack):
    """Texts by the row spaces of a transformer's first gradients, see the module.

    It reads networks whose linear layers take every token, and batches of fewer tokens than the stream is wide. Of a
    trained embedding it knows which tokens were read. Noise widens what counts as near, until every token does.

    Attributes:
        largest_batch: texts, at most, that are put together; of larger batches only which tokens stand where.
    """

    name: ClassVar[str] = "token_rows"
    version: ClassVar[str] = "3"
    next_token: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True
    kind: ClassVar[Kind] = "reconstruction"
    threats: ClassVar[tuple[str, ...]] = ("server/1", "eavesdropper/1", "client/1", "collusion/1")
    reference: ClassVar[str] = "Petrov, Dimitrov, Baader, Mueller and Vechev, DAGER, NeurIPS 2024"

    largest_batch: PositiveInt = 4

    def suits(self, plan: Plan) -> bool:
        """Return whether the network takes token numbers, and its first linear layers read them one by one."""
        return super().suits(plan) and plan.vocabulary is not None and linear_groups(plan).alone > 0

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge; empty texts where no gradient was seen."""
        return self.answer(self.evidence(view), view.plan, challenges, generator)

    def answer(
        self, evidence: Sequence[Evidence], plan: Plan, challenges: Sequence[Challenge], generator: torch.Generator
    ) -> list[Guess]:
        """Return the guesses from given evidence, for instance that of an adaptive attack."""
        return [self._guess(victim) for victim in posed(evidence, plan, challenges, generator)]

    def _guess(self, victim: PosedVictim) -> Guess:
        count, evidence, plan = victim.size[0], victim.evidence, victim.plan
        labels = None if plan.next_token else guessed_labels(victim)
        texts = torch.full(victim.size, float(PADDING))
        if evidence is None or evidence.params is None:
            return Guess(x=texts, y=labels, evaluations=1)
        groups = linear_groups(plan)
        reader = TextReader(plan, {name: value.detach() for name, value in evidence.params.items()}, groups)
        std = 0.0 if evidence.noise is None else evidence.noise.std
        observed = {name: value for name, value in evidence.observed.items() if bool(value.isfinite().all())}
        spaces = spaces_of(reader, observed, groups.looked_at, std, count)
        read = self._read(reader, spaces, observed, std, victim)
        if read is None:
            return Guess(x=texts, y=labels, evaluations=1)
        near, text_filter, texts_read = read
        for row, one in zip(texts, cycle(texts_read), strict=False):  # copies of a text add nothing to read
            row[:] = torch.tensor(one.tokens, dtype=torch.float32)
        solved = _solved(reader, near, text_filter, texts_read, count)
        if plan.next_token:
            is_read = count <= self.largest_batch and solved.residual < FAR_BEHIND
            texts, explained = with_last_tokens(reader, observed, texts, Replay(evidence), tries=is_read)
            solved = replace(solved, exact=explained)
        is_sure = len(texts_read) >= count and near.space.free > LEAST_FREE and solved.determined > 0
        confidence = solved.residual if is_sure else 1.0
        return Guess(x=texts, y=labels, confidence=confidence, evaluations=1, layers=(solved,))

    def _read(
        self, reader: TextReader, spaces: Mapping[int, RowSpace], observed: Params, std: float, victim: PosedVictim
    ) -> tuple[NearTokens, TextFilter | None, list[ReadText]] | None:
        """Return the tokens near each place, what put texts together, and the texts; None where nothing was read."""
        if not spaces:
            return None
        count, words = victim.size[0], tokens_present(reader, observed, std)
        alone = [group for group in spaces if group < reader.groups.alone]
        head = reader.groups.head
        if head in spaces and spaces[head].tells and not any(spaces[group].tells for group in alone):
            return self._by_head(reader, TextFilter(reader, head, spaces[head]), words, observed, count)
        if not alone:
            return None
        group = max(alone, key=lambda one: (spaces[one].whole, spaces[one].free))  # rounding may hide rows of others
        if count == 1 and spaces[group].full and (inputs := reader.summed(words, group)) is not None:
            text = text_of_mixtures(inputs, words, spaces[group], victim.generator)
            return one_by_place(text, group, spaces[group]), None, [text]
        near = near_tokens(reader, group, spaces[group], words, count, victim.generator)
        places = reader.tells_places(group)
        text_filter = None if count == 1 and places else self._filter(reader, spaces, near, count)
        if text_filter is None:
            return near, text_filter, _nearest(near, count, places)
        if _reads_back(reader):
            texts_read = _from_left(text_filter, near, count)
        else:
            gradients = reader.gradients(observed, group)
            texts_read = _by_exchange(text_filter, near, gradients, count, victim.generator)
        if not places and not any(one.distance < text_filter.space.limit for one in texts_read[:count]):
            return near, None, _nearest(near, count, places)  # which tokens stand there is known even so
        return near, text_filter, texts_read

    def _by_head(
        self, reader: TextReader, text_filter: TextFilter, words: Tensor, observed: Params, count: int
    ) -> tuple[NearTokens, TextFilter, list[ReadText]]:
        """Return the same by the head alone: its targets are tried first, then every token."""
        for targets in (tokens_predicted(observed, words), words):
            places = [tuple(words.tolist()), *[tuple(targets.tolist())] * (reader.plan.spec.shape[0] - 1)]
            zeros = tuple((0.0,) * len(some) for some in places)
            near = NearTokens(tuple(places), zeros, text_filter.group, text_filter.space)
            texts_read = _from_left(text_filter, near, count)
            if len(texts_read) >= count and max(one.distance for one in texts_read[:count]) < text_filter.space.limit:
                break
        return near, text_filter, texts_read

    def _filter(
        self, reader: TextReader, spaces: Mapping[int, RowSpace], near: NearTokens, count: int
    ) -> TextFilter | None:
        """Return the filter that puts texts together; None of too many, and where rows tell nothing.

        Some layers read nothing but sums of what is read before: behind one head of attention the rows hold any text.
        So the first one counts in which an arbitrary text of near tokens is seen as wrong.
        """
        behind = {group: space for group, space in spaces.items() if group >= reader.groups.alone and space.tells}
        if count > self.largest_batch:
            return None
        free = [group for group in sorted(behind) if behind[group].free > ENOUGH_FREE]
        others = sorted({*behind} - {*free}, key=lambda group: -behind[group].free)
        filters = [TextFilter(reader, group, behind[group]) for group in (*free, *others)]
        arbitrary = torch.tensor([[some[i % len(some)] if some else PADDING for i, some in enumerate(near.tokens)]])
        usual = filters[0] if filters and reader.tells_places(near.group) else None  # of copies no text is wrong
        return next((one for one in filters if float(one(arbitrary.float()).max()) > one.space.limit), usual)


ENOUGH_FREE = 0.3
"""Share of directions that a row space must leave free to be used before those of layers behind it."""


def _reads_back(reader: TextReader) -> bool:
    """Return whether a token's input behind the first attention depends on those before it alone: a decoder's."""
    texts = torch.ones(2, reader.plan.spec.shape[0])
    texts[1, -1] = 2.0
    x = reader.inputs(texts, reader.groups.alone)[reader.groups.alone]
    return torch.equal(*x[:, 0])


def _nearest(near: NearTokens, count: int, places: bool) -> list[ReadText]:
    """Return texts of the nearest tokens of each place, one after another; the end is where no token is near.

    Without `places` any token may stand anywhere: each stands once, in any order.
    """
    texts, length = [], len(near.tokens)
    for rank in range(count):
        numbers = [min(rank, len(some) - 1) if places else rank * length + i for i, some in enumerate(near.tokens)]
        chosen = [(i, number) for i, number in enumerate(numbers) if 0 <= number < len(near.tokens[i])]
        tokens = {i: near.tokens[i][number] for i, number in chosen}
        distances = [near.distances[i][number] for i, number in chosen]
        mean = sum(distances) / len(distances) if distances else 1.0
        texts.append(ReadText(tuple(tokens.get(i, PADDING) for i in range(length)), mean))
    return texts


def _solved(
    reader: TextReader, near: NearTokens, text_filter: TextFilter | None, texts_read: Sequence[ReadText], count: int
) -> SolvedLayer:
    """Return how well the tokens were determined.

    Some networks read padding as they read a token: its input then lies in the row space, and explains some of it.
    Where inputs show no place, a token is one input wherever it stands, and only later layers may show the order.
    """
    number, space = sum(bool(some) for some in near.tokens), near.space
    limit = READ_DISTANCE if text_filter is None else text_filter.space.limit
    sure = [one for one in texts_read[:count] if one.distance < limit]
    padding = torch.full((1, reader.plan.spec.shape[0]), float(PADDING))
    is_read = space.distance(reader.inputs(padding, near.group)[near.group])[0] < space.read_distance
    places, single = reader.tells_places(near.group), count == 1 or max(map(len, near.tokens)) < 2
    inputs = {one for text in sure for one in text.inputs(places, is_read.tolist())}
    is_sorted = (places and single) or (text_filter is not None and reader.tells_places(text_filter.group))
    exact = is_sorted and len(sure) == count and space.free > LEAST_FREE and len(inputs) >= space.rank  # none missing
    worst = max([one.distance for one in texts_read[:count]], default=1.0)
    determined = sum(len(one.tokens) - one.tokens.count(PADDING) for one in sure) if places or is_sorted else 0
    return SolvedLayer("tokens", max(count * number, determined), determined, space.condition, worst, exact)
