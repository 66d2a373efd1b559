"""What a trap for texts shows: tokens read in the bins of `text_trap`, put together to texts.

A bin's share of the gradient is a sum of its tokens' vectors, behind a norm. One alone is looked up among tokens at
places, in the coordinates without signature; these then tell its signature. Of several tokens the sum is a sparse one
of embeddings and places, found by orthogonal matching pursuit (Pati, Rezaiifar and Krishnaprasad, Asilomar 1993). A
text is put together from tokens that fall into bins in which they were read, each with the signature that it would
have there; of an encoder, so that the mean over its tokens is its signature. Tokens beside those of known texts tell
signatures of more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ppbench.attacks.active.text_trap import TRAP_BLOCK, TokenVectors
from ppbench.attacks.active.wiring import BIN_FLOOR, bin_differences
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.nets.classifier import HEAD_NAMES

# -- What the bins show --

EXPLAINED_SUM = 1e-3
"""Relative error of a sum of vectors below which it counts as explained, unless noise or rounding are larger."""
NOISE_MARGIN, NOISIEST = 2.0, 0.7
"""How much larger than usual noise may be; the relative error from which on a bin is not read."""
ROUNDED_SUM = 4e-7
"""Rounding of the gradient of a unit, relative to its size; a bin is the difference of two."""
MOST_SUMMANDS = 40
"""Embeddings and places, at most, into which a bin is taken apart."""
ALIKE_SIGNATURES, NOISY_SIGNATURES = 1e-2, 2.0
"""Relative distance of the signatures of one text; with noise, times the relative error of bins."""


@dataclass(frozen=True, eq=False)
class TokenBins:
    """The bins of an upload.

    direction: [D], thresholds: [H], of the measurement. rows: [H, D + 1], what each bin adds to the gradient; error:
    [H], relative, infinite for a bin without a token. tokens, places: [H, V], [H, L] bool, what was read in each.
    alone: [H], whether it is one token, which then has one of `signatures` [H, S].
    """

    vectors: TokenVectors
    direction: Tensor
    thresholds: Tensor
    rows: Tensor
    error: Tensor
    tokens: Tensor
    places: Tensor
    alone: Tensor
    signatures: Tensor

    def numbers(self, vectors: Tensor) -> Tensor:
        """Return the numbers [...] of the bins into which vectors [..., D] fall, at least 0."""
        return (torch.searchsorted(self.thresholds, (vectors @ self.direction).contiguous()) - 1).clamp(min=0)

    @property
    def alike(self) -> float:
        """The relative distance up to which signatures are those of one text."""
        errors = self.error[self.alone]
        return max(ALIKE_SIGNATURES, NOISY_SIGNATURES * float(errors.median()) if len(errors) else 0.0)

    def words(self, place: int) -> Tensor:
        """Return the tokens that were read in a bin together with a place."""
        return self.tokens[self.places[:, place]].any(0).nonzero()[:, 0]


def token_bins(plan: Plan, params: Params, evidence: Evidence) -> TokenBins | None:
    """Return the bins of an upload from weights by `text_trap`; None if the gradient of the trap is not seen."""
    names = f"{TRAP_BLOCK}.up.weight", f"{TRAP_BLOCK}.up.bias"
    if any(name not in evidence.observed for name in names):
        return None
    weight, bias = (evidence.observed[name].detach().cpu().double().nan_to_num(0.0, 0.0, 0.0) for name in names)
    units = torch.cat([params[names[0]], params[names[1]][:, None]], 1).double()
    down = params[f"{TRAP_BLOCK}.down.weight"].double()
    coefficients = down[down[:, 0].abs().argmax()]
    gradient = torch.cat([weight, bias[:, None]], 1)
    rows = bin_differences(gradient, coefficients, units, bumps=False)
    noise = _noise(evidence.observed, gradient.shape[1] - 1)
    rounding = ROUNDED_SUM * gradient.norm(dim=1) + NOISE_MARGIN * noise * math.sqrt(gradient.shape[1])
    steps = rounding / coefficients.abs()
    if len(rows) < len(units):  # the mean of two equal units
        units, steps = units[::2], steps.unflatten(0, (-1, 2)).square().mean(1).sqrt()
    gains = units[:, :-1].norm(dim=1)
    error = (steps.square() + torch.cat([steps[1:], steps[:1] * 0]).square()).sqrt() / rows.norm(dim=1)
    seen = (rows.norm(dim=1) > BIN_FLOOR * rows.norm(dim=1).max()) & (error < NOISIEST)
    error = torch.where(seen, error, torch.inf)
    return _bins_read(TokenVectors.of(plan, params), units[0, :-1] / gains[0], -units[:, -1] / gains, rows, error)


def _noise(observed: Params, width: int) -> float:
    """Return the standard deviation of noise: queries and keys are 0, so that their weights' gradients are noise alone.

    0 if they are not seen.
    """
    seen = observed.get(f"{TRAP_BLOCK}.query_key_value.weight")
    return 0.0 if seen is None else float(seen[: 2 * width].double().nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt())


def _bins_read(vectors: TokenVectors, direction: Tensor, thresholds: Tensor, rows: Tensor, error: Tensor) -> TokenBins:
    """Return the bins with rows [H, D + 1], of relative errors [H], with what is read in each."""
    token, place, distance = _nearest(vectors, rows[:, :-1])
    loose = error.clamp(min=EXPLAINED_SUM)
    same = (distance < loose) & error.isfinite()  # one token at one place, but maybe of several texts
    length = (rows[:, :-1] / rows[:, -1:]).square().mean(1).sqrt()
    alone = same & ((length - 1).abs() < loose)  # behind a norm a sum of several vectors is shorter than one
    tokens = torch.zeros(len(rows), len(vectors.embeddings), dtype=torch.bool)
    places = torch.zeros(len(rows), len(vectors.places), dtype=torch.bool)
    tokens[same, token[same]] = places[same, place[same]] = True
    atoms, count = _atoms(vectors), len(vectors.embeddings)
    for number in (error.isfinite() & ~same).nonzero()[:, 0].tolist():
        summands = _summands(atoms, vectors.token_part(rows[number, :-1]), float(loose[number]))
        tokens[number, [one for one in summands if one < count]] = True
        places[number, [one - count for one in summands if one >= count]] = True
    signatures = _signatures_of(vectors, rows, token, place)
    return TokenBins(vectors, direction, thresholds, rows, error, tokens, places, alone, signatures)


def _signatures_of(vectors: TokenVectors, rows: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
    """Return the signatures [N, S] of tokens [N] at places [N], from their rows [N, D + 1] of the gradient.

    What a norm did to a vector is a scale and an offset, which the coordinates that tell the token show.
    """
    single, size = rows[:, :-1] / rows[:, -1:], len(vectors.projection)
    x, seen = vectors.embeddings[tokens] + vectors.places[places], vectors.token_part(single)
    scale = (vectors.token_part(x) * seen).sum(1, keepdim=True) / seen.square().sum(1, keepdim=True)
    offset = (x[:, size:] - scale * single[:, size:]).mean(1, keepdim=True)
    return scale * single[:, :size] + offset - x[:, :size]


def _nearest(vectors: TokenVectors, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token at a place, [H] each, along whose vector each of rows [H, D] lies best, and the sine to it."""
    tokens, places, seen = (vectors.token_part(x) for x in (vectors.embeddings, vectors.places, rows))
    by_token, by_place, size = seen @ tokens.T, seen @ places.T, tokens.square().sum(1)
    best = torch.full((len(rows),), -1.0, dtype=torch.float64)
    token, place = torch.zeros(2, len(rows), dtype=torch.int64)
    for number in range(len(places)):
        norm = (size + 2 * tokens @ places[number] + places[number].square().sum()).sqrt()
        along = ((by_token + by_place[:, number : number + 1]) / norm).abs()
        along[:, PADDING] = 0
        value, nearest = along.max(1)
        better = value > best
        best[better], token[better], place[better] = value[better], nearest[better], number
    cosine = best / seen.norm(dim=1).clamp(min=1e-300)
    return token, place, (1 - cosine.square()).clamp(min=0).sqrt()


def _atoms(vectors: TokenVectors) -> Tensor:
    """Return the embeddings, then the places, as far as they tell tokens, normed [V + L, D - S]; that of padding 0."""
    atoms = vectors.token_part(torch.cat([vectors.embeddings, vectors.places]))
    atoms[PADDING] = 0
    return _unit(atoms)


def _summands(atoms: Tensor, row: Tensor, error: float) -> list[int]:
    """Return the numbers of the few of `atoms` [A, T] that sum up to a row [T], none if there are no such."""
    row, chosen = row / row.norm(), list[int]()
    left = row
    for _ in range(min(MOST_SUMMANDS, len(row) // 2)):
        nearest = int((atoms @ left).abs().argmax())
        if nearest in chosen:
            break
        chosen.append(nearest)
        shares = torch.linalg.lstsq(atoms[chosen].T, row[:, None]).solution[:, 0]
        left = row - shares @ atoms[chosen]
        if float(left.norm()) < error:
            return [one for one, share in zip(chosen, shares.tolist(), strict=True) if abs(share) > error]
    return []


# -- Which tokens stand in one text --


def shown_texts(plan: Plan, params: Params, evidence: Evidence, count: int) -> Tensor:
    """Return at most `count` texts [N, L] float32 of token numbers that an upload from weights by `text_trap` shows.

    `PADDING` stands where a token was not read.
    """
    bins = token_bins(plan, params, evidence)
    texts = [] if bins is None else (_texts_of_decoder if bins.vectors.causal else _texts_of_encoder)(bins, count)
    texts = [text for text in texts if text]
    if plan.next_token:
        texts = with_ends(plan, params, evidence.observed, texts, count)
    shown = torch.full((len(texts), *plan.spec.shape), float(PADDING))
    for row, text in zip(shown, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.float32)
    return shown


SURE, LIKELY = 0.0, 1.0
"""Costs of a token: alone in its bin with the signature that it must have; read in its bin, with others."""
WIDTH, TRIED = 64, 4096
"""Beginnings that are followed of each text of a decoder; choices of tokens that are tried of a text of an encoder."""


@dataclass(frozen=True, eq=False)
class Beginning:
    """The tokens of a text up to a place, the sum [S] of their values, and their cost."""

    tokens: tuple[int, ...]
    total: Tensor
    cost: float


def _costs(bins: TokenBins, place: int, words: Tensor, signatures: Tensor) -> Tensor:
    """Return the costs [N, W] of words [W] at a place with signatures [N, W, S]; infinite where they were not read."""
    vectors = bins.vectors.vectors(words, place, signatures)
    number = bins.numbers(vectors)
    seen = bins.rows[number, :-1] / bins.rows[number, -1:]
    distance = (vectors - seen).norm(dim=-1) / math.sqrt(vectors.shape[-1])
    cost = torch.full_like(distance, torch.inf)
    cost[bins.tokens[number, words] & bins.places[number, place]] = LIKELY
    cost[bins.alone[number] & (distance < 2 * bins.error[number].clamp(min=EXPLAINED_SUM))] = SURE
    return cost


def _texts_of_decoder(bins: TokenBins, count: int) -> list[tuple[int, ...]]:
    """Return texts read from left to right: each token falls into a bin in which it was read."""
    size = len(bins.vectors.projection)
    going, done = [Beginning((), torch.zeros(size, dtype=torch.float64), 0.0)], list[Beginning]()
    for place in range(len(bins.vectors.places)):
        words = bins.words(place)
        if not len(words) or not going:
            break
        values = bins.vectors.values(place)[words]
        totals = torch.stack([one.total for one in going])[:, None] + values
        costs = _costs(bins, place, words, totals / (place + 1))
        goes_on = costs.isfinite().any(1).tolist()
        done += [one for one, goes in zip(going, goes_on, strict=True) if not goes]
        whole = costs + torch.tensor([one.cost for one in going], dtype=torch.float64)[:, None]
        ranked = whole.flatten().argsort(stable=True)[: min(WIDTH * count, int(whole.isfinite().sum()))]
        going = [
            Beginning((*going[row].tokens, int(words[column])), totals[row, column], float(whole[row, column]))
            for row, column in (divmod(number, len(words)) for number in ranked.tolist())
        ]
    return _covering(bins, [*done, *going], count)


def _covering(bins: TokenBins, beginnings: Sequence[Beginning], count: int) -> list[tuple[int, ...]]:
    """Return the texts that explain most of the bins, one after another, each up to its last token with a share."""
    texts = torch.full((len(beginnings), len(bins.vectors.places)), PADDING)
    for row, one in zip(texts, beginnings, strict=True):
        row[: len(one.tokens)] = torch.tensor(one.tokens, dtype=torch.int64)
    vectors = bins.vectors.of_texts(texts)
    paths = [[one.tokens[: i + 1] for i in range(len(one.tokens))] for one in beginnings]
    shares = _shares(bins, {key: vectors[row, i] for row, path in enumerate(paths) for i, key in enumerate(path)})
    chosen = list[tuple[int, ...]]()
    left = {key for key, share in shares.items() if share > 0}
    for _ in range(count):
        gains = [sum(key in left for key in path) - 0.1 * sum(shares[key] == 0 for key in path) for path in paths]
        best = max(range(len(gains)), key=gains.__getitem__, default=None)
        if best is None or gains[best] <= 0:
            break
        end = max(i + 1 for i, key in enumerate(paths[best]) if key in left)
        chosen.append(beginnings[best].tokens[:end])
        left -= {*paths[best]}
    return chosen


def _shares(bins: TokenBins, vectors: Mapping[tuple[int, ...], Tensor]) -> dict[tuple[int, ...], float]:
    """Return the share of each of `vectors` [D], by its key, in the bin into which it falls; 0 if it has none.

    1 where a few of them explain the whole bin; else, as where a text is unknown, less, by least squares.
    """
    keys, shares = [*vectors], dict.fromkeys(vectors, 0.0)
    if not keys:
        return shares
    atoms = torch.stack([*vectors.values()])
    numbers, atoms = bins.numbers(atoms), _unit(torch.cat([atoms, torch.ones_like(atoms[:, :1])], 1))
    for number in numbers[bins.error[numbers].isfinite()].unique().tolist():
        row, error = _unit(bins.rows[number]), float(bins.error[number])
        inside, loose = (numbers == number).nonzero()[:, 0], max(error, EXPLAINED_SUM)
        if chosen := _summands(atoms[inside], row, 2 * error) or _summands(atoms[inside], row, loose):
            parts = torch.zeros(len(inside))
            parts[chosen] = 1.0
        else:
            parts = torch.linalg.lstsq(atoms[inside].T, row[:, None], driver="gelsd").solution[:, 0].abs()
            parts = torch.where(parts > loose * parts.max(), 0.5 * parts / parts.max().clamp(min=1e-300), 0.0)
        shares |= {keys[i]: share for i, share in zip(inside.tolist(), parts.tolist(), strict=True)}
    return shares


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=-1, eps=1e-300)


def _texts_of_encoder(bins: TokenBins, count: int) -> list[tuple[int, ...]]:
    """Return texts by their signatures: those of tokens that are alone in their bin, or beside tokens of read texts."""
    seen, best = bins.signatures[bins.alone], list[tuple[tuple[int, ...], bool]]()
    while True:
        texts = _texts_with(bins, _distinct(seen, count, bins.alike))
        exact = [text for text, fits in texts if fits]
        if best and len(exact) <= sum(fits for _, fits in best):
            break
        best = texts
        if not exact or len(exact) == count:
            break
        seen = torch.cat([bins.signatures[bins.alone], _signatures_beside(bins, exact)])
    return [text for text, _ in best]


def _texts_with(bins: TokenBins, signatures: Tensor) -> list[tuple[tuple[int, ...], bool]]:
    """Return the text of each of signatures [T, S], and whether its tokens have that signature together."""
    vectors = dict[tuple[int, ...], Tensor]()
    for place in range(len(bins.vectors.places) if len(signatures) else 0):
        words = bins.words(place)
        spread = signatures[:, None].expand(-1, len(words), -1)
        for (text, column), vector in _likeliest(bins, place, words, spread):
            vectors[text, place, int(words[column])] = vector
    options = [[dict[int, float]() for _ in bins.vectors.places] for _ in signatures]
    for (text, place, token), share in _shares(bins, vectors).items():
        options[text][place][token] = share
    return [_fitting(bins, some, signature) for some, signature in zip(options, signatures, strict=True)]


def _signatures_beside(bins: TokenBins, texts: Sequence[tuple[int, ...]]) -> Tensor:
    """Return the signatures [N, S] of tokens that share their bin with those of known texts alone."""
    length = len(bins.vectors.places)
    padded = torch.tensor([(*text, *[PADDING] * (length - len(text))) for text in texts]).view(-1, length)
    vectors = bins.vectors.of_texts(padded)[padded != PADDING]
    numbers, signatures = bins.numbers(vectors), list[Tensor]()
    for number in numbers[bins.error[numbers].isfinite() & ~bins.alone[numbers]].unique().tolist():
        row, known = bins.rows[number], vectors[numbers == number]
        seen = bins.vectors.token_part(row[:-1])
        limit = max(float(bins.error[number]), EXPLAINED_SUM) * float(seen.norm())
        for token, place in product(*(some[number].nonzero()[:, 0] for some in (bins.tokens, bins.places))):
            own = bins.vectors.embeddings[token] + bins.vectors.places[place]
            atoms = bins.vectors.token_part(torch.cat([known, own[None]]))
            shares = torch.linalg.lstsq(atoms.T, seen[:, None], driver="gelsd").solution[:, 0]
            if float((seen - shares @ atoms).norm()) < limit and float(shares[-1].abs()) > limit:
                left = row - torch.cat([shares[:-1] @ known, shares[:-1].sum()[None]])
                signatures.append(_signatures_of(bins.vectors, left[None], token[None], place[None]))
                break
    return torch.cat(signatures) if signatures else bins.signatures[:0]


def _likeliest(
    bins: TokenBins, place: int, words: Tensor, signatures: Tensor
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield the row and column of the likeliest words at a place with signatures [N, W, S], with their vectors [D]."""
    if not len(words):
        return
    costs, vectors = _costs(bins, place, words, signatures), bins.vectors.vectors(words, place, signatures)
    least = costs.min(1, keepdim=True).values
    for row, column in ((costs == least) & costs.isfinite()).nonzero().tolist():
        yield (row, column), vectors[row, column]


def _distinct(signatures: Tensor, count: int, alike: float) -> Tensor:
    """Return those of signatures [N, S] that are not `alike`, at most `count`, the most frequent first."""
    left, texts = signatures, list[Tensor]()
    while len(left) and len(texts) < count:
        near = torch.cdist(left, left) < alike * left.norm(dim=1)
        most = near[int(near.sum(1).argmax())]
        texts.append(left[most].median(0).values)
        left = left[~most]
    return torch.stack(texts) if texts else signatures[:0]


def _fitting(
    bins: TokenBins, options: Sequence[Mapping[int, float]], signature: Tensor
) -> tuple[tuple[int, ...], bool]:
    """Return the text whose mean over its tokens' values is its signature [S], and whether there is one.

    options: the tokens that may stand at each place, with their shares. One place may have none: its token is filled
    in. If no text fits, that of the largest shares.
    """
    least, best = bins.alike * float(signature.norm()), tuple[int, ...]()
    for texts, sums in _choices(bins.vectors, options):
        length = texts.shape[1]
        left, gaps = length * signature - sums, (texts[0] == PADDING).nonzero()[:, 0].tolist()
        filled = bins.vectors.values(gaps[0])[PADDING + 1 :] if gaps else torch.zeros_like(left[:1])
        distances = torch.cdist(left, filled) / length
        number, token = divmod(int(distances.argmin()), len(filled))
        if float(distances.min()) < least:
            text = texts[number].tolist()
            for place in gaps:
                text[place] = token + PADDING + 1
            least, best = float(distances.min()), tuple(text)
    if best:
        return best, True
    likely = [max(some, key=some.__getitem__, default=PADDING) for some in options]
    return tuple(likely[: max((place + 1 for place, token in enumerate(likely) if token), default=0)]), False


def _choices(vectors: TokenVectors, options: Sequence[Mapping[int, float]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each length texts [C, length] of the largest shares, with the sums [C, S] of their tokens' values.

    Up to the second place without `options`; in the first one stands `PADDING`, of value 0.
    """
    texts, scores = torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    sums = torch.zeros(1, len(vectors.projection), dtype=torch.float64)
    gaps = 0
    for place, some in enumerate(options):
        gaps += not some
        if gaps > 1:
            return
        words = torch.tensor([*some] or [PADDING])
        values = vectors.values(place)[words] * bool(some)
        shares = torch.tensor([*some.values()] or [0.0], dtype=torch.float64)
        scores, kept = (scores[:, None] + shares).flatten().sort(descending=True, stable=True)
        scores, kept = scores[:TRIED], kept[:TRIED]
        row, column = kept // len(words), kept % len(words)
        texts, sums = torch.cat([texts[row], words[column, None]], 1), sums[row] + values[column]
        yield texts, sums


# -- Texts that are their own targets: no token follows the last one, so that the trap has no gradient of it --


def with_ends(
    plan: Plan, params: Params, observed: Params, texts: Sequence[tuple[int, ...]], count: int
) -> list[tuple[int, ...]]:
    """Return texts of a batch of `count` with their last tokens, which the head's gradient shows once others are known.

    It is a sum over places of what was predicted less the target, times the head's input; what is left of it is a sum
    of the last targets, a text each, times inputs that are known.
    """
    if HEAD_NAMES[0] not in observed or not texts or not all(0 < len(text) < plan.spec.shape[0] for text in texts):
        return [*texts]
    x = torch.full((len(texts), *plan.spec.shape), float(PADDING), dtype=torch.float64)
    for row, text in zip(x, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.float64)
    weights = {name: value.double() for name, value in params.items()}
    with torch.no_grad():
        inputs = plan.net.features(weights, x)
        predicted = plan.net.head(weights, inputs).softmax(-1)
    places = torch.tensor([len(text) for text in texts])
    share = ((x != PADDING) / (places[:, None] * count))[..., None]
    targets = torch.nn.functional.one_hot(x.roll(-1, 1).long(), predicted.shape[-1])
    targets[..., PADDING] = 0
    left = torch.einsum("blv,bld->vd", share * (predicted - targets), inputs) - observed[HEAD_NAMES[0]].double().cpu()
    ends = inputs[torch.arange(len(texts)), places - 1]
    shown = places[:, None] * count * torch.linalg.lstsq(ends.T, left.T, driver="gelsd").solution
    shown[:, PADDING] = 0
    surest, tokens = shown.max(1)
    return [
        (*text, token) if sure > 0.5 else text
        for text, token, sure in zip(texts, tokens.tolist(), surest.tolist(), strict=True)
    ]
