"""Batches that a vision transformer reads, off one gradient: tokens of the first block one by one, then images.

Let r_i [D] be the stream behind the first block's attention at the M tokens of a batch, h_i its MLP's hidden layer, A
and B the MLP's weights. With a cotangent of the stream at every token,
    dA = sum_i d_i (C r_i)^T diag(norm)    and    dB = sum_i g_i h_i^T

have rank M. The row space of dA holds all r_i, that of dB all h_i. So r = X t, with a known X [D, M], is a token only
if act(A norm(X t)) lies in the row space of dB: 4 D - M equations for M numbers, one token at a time. The input of the
attention is W p + c + e_n of a patch p and place n, its output lies in the row space of its projection's gradient. Both
give the patch and the place as linear functions of t, which leaves (B - 1) T numbers of a token for T places, and the
search is a few damped Gauss-Newton steps. A token shows its cotangents, hence q_i with t_i . q_j = delta_ij: the
remaining ones are orthogonal to it. At last the attention tells which patches are of one image.

The condition for a token is that of DAGER (Petrov et al., NeurIPS 2024), which tries words; images have none to try.
No loss and no gradient of a position embedding enters: positions may be fixed, but must differ.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import fold, unfold
from torch.overrides import TorchFunctionMode

from ppbench.attacks.reconstruction.stages import ELEMENTWISE, Elementwise
from ppbench.base.tree import Params
from ppbench.federation.plan import Plan

# -- The first block of a transformer that normalizes before attention and MLP, as torchvision's --

_KINDS = frozenset(["layer_norm", "multi_head_attention_forward", "linear"]) | ELEMENTWISE
SAME = 1e-4
"""Difference up to which values of a forward pass in float32 are the same, absolute and relative."""


@dataclass(frozen=True)
class _Step:
    """A recorded call: name, function, arguments by name, result, and the names of parameters among the arguments."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    result: Any
    parameters: Mapping[str, str]

    @property
    def input(self) -> Tensor:
        """The first argument."""
        return torch.as_tensor(next(iter(self.arguments.values())))


class _StepRecorder(TorchFunctionMode):
    """Records norms, attentions, linear layers and activations, in the order of their calls."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.steps = names, list[_Step]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "").strip("_")
        if name in _KINDS:
            try:
                named = dict(inspect.signature(func).bind(*args, **(kwargs or {})).arguments)
            except ValueError:  # a function of C
                named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
            own = {key: self.names[id(value)] for key, value in named.items() if id(value) in self.names}
            self.steps.append(_Step(name, func, named, out, own))
        return out


@dataclass(frozen=True)
class Norm:
    """A layer norm of width D: factors and shifts [D], and what it adds to the variance."""

    factor: Tensor
    shift: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """Return normalized rows [..., D]."""
        off = rows - rows.mean(-1, keepdim=True)
        return off / (off.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.factor + self.shift


@dataclass(frozen=True)
class FirstBlock:
    """The first block of a transformer and the tokens that it reads, float64.

    projection: [D, P] of a patch. base: [T, D], the tokens of an image of zeros. first: number of tokens before the
    patches. count: of patches. kernel: of a patch. names: of the parameters "patches"; "in", "out", of the attention;
    "up", "down", of the MLP; and of their biases. values: of these parameters.
    """

    projection: Tensor
    base: Tensor
    first: int
    count: int
    kernel: tuple[int, int]
    norms: tuple[Norm, Norm]
    heads: int
    activation: Elementwise
    names: Mapping[str, str]
    values: Mapping[str, Tensor]


def _steps_of_block(plan: Plan, params: Params, x: Tensor) -> list[_Step] | None:
    """Return norm, attention, norm, linear layer, activation and linear layer of a block; None of another kind."""
    recorder = _StepRecorder({id(value): name for name, value in params.items()})
    with torch.no_grad(), recorder:
        plan.net(params, x)
    steps = recorder.steps[:6]
    kinds = ["layer_norm", "multi_head_attention_forward", "layer_norm", "linear", "linear"]
    if [step.name for step in (*steps[:4], *steps[5:])] != kinds or steps[4].name not in ELEMENTWISE:
        return None
    norm, attention, other, up, act, down = steps
    tokens, mixed = norm.input, attention.result[0]
    mixed = mixed if mixed.shape == tokens.shape else mixed.transpose(0, 1)
    pairs = [(other.input, tokens + mixed)] if mixed.shape == tokens.shape else [(tokens, mixed)]
    pairs += [(up.input, other.result), (act.input, up.result), (down.input, act.result)]
    same = all(a.shape == b.shape and torch.allclose(a, b, SAME, SAME) for a, b in pairs)
    return steps if same and tokens.dim() == 3 else None


def _norm_of(step: _Step) -> Norm:
    factor, shift = (step.arguments.get(key) for key in ("weight", "bias"))
    ones, eps = torch.ones(step.input.shape[-1], dtype=torch.float64), float(step.arguments.get("eps", 1e-5))
    return Norm(ones if factor is None else factor.double(), 0 * ones if shift is None else shift.double(), eps)


def first_block(plan: Plan, params: Params, embedding: str, kernel: tuple[int, int]) -> FirstBlock | None:
    """Return the block behind the projection `embedding` of patches that do not overlap; None if it is of another kind.

    Its attention and its MLP each read normalized tokens, and each sum has a way around.
    """
    own = {name: value.detach().cpu().clone() for name, value in params.items()}
    image = torch.rand(plan.spec.shape, generator=torch.Generator().manual_seed(0)).to(own[embedding])
    steps = _steps_of_block(plan, own, torch.stack([torch.zeros_like(image), image]))
    if steps is None:
        return None
    norm, attention, other, up, act, down = steps
    names = {"patches": embedding}
    for key, step, kind in (
        ("in", attention, "in_proj_"),
        ("out", attention, "out_proj_"),
        ("up", up, ""),
        ("down", down, ""),
    ):
        names[key] = step.parameters.get(f"{kind}weight", "")
        names[f"{key} bias"] = step.parameters.get(f"{kind}bias", "")
    projection, tokens = own[embedding].flatten(1), norm.input
    change = tokens[1] - tokens[0]
    moved = change.abs().amax(1).nonzero()[:, 0]
    seen = unfold(image[None], kernel, stride=kernel)[0].T @ projection.T
    if not all(names.values()) or len(moved) != len(seen):
        return None
    first = int(moved[0])
    if not torch.allclose(change[first : first + len(seen)], seen, SAME, SAME):
        return None
    settings = {key: value for key, value in list(act.arguments.items())[1:] if key != "inplace"}
    return FirstBlock(
        *(projection.double(), tokens[0].double(), first, len(seen), kernel, (_norm_of(norm), _norm_of(other))),
        *(attention.arguments["num_heads"], Elementwise(lambda z: act.function(z, **settings)), names),
        {key: own[name].double() for key, name in names.items()},
    )


# -- What is linear in a token's coordinates t [M] --

LEAST_SNR = 1.1
"""Smallest singular value of a rank, in units of the largest beyond it, from which a gradient has that rank."""
EQUILIBRATIONS = 4
"""Turns in which rows and columns are scaled to a mean square of one."""


@dataclass(frozen=True)
class ScaledSpace:
    """A matrix G [m, n] as diag(rows) G diag(columns) = left diag(size) right: [m, k], [k], [k, n].

    Rounding is relative to rows and columns: scaled, it is the same everywhere, and smallest singular values lie a
    hundred times farther above it. rounding: the largest singular value beyond the rank k.
    """

    rows: Tensor
    columns: Tensor
    left: Tensor
    size: Tensor
    right: Tensor
    rounding: float

    @property
    def snr(self) -> float:
        """How far the smallest singular value is above rounding."""
        return float(self.size[-1]) / max(self.rounding, 1e-300)

    @property
    def row_basis(self) -> Tensor:
        """A basis [k, n] of the row space."""
        return self.right / self.columns

    @property
    def column_basis(self) -> Tensor:
        """A basis [m, k] of the column space."""
        return self.left / self.rows[:, None]


def scaled_space(matrix: Tensor, rank: int) -> ScaledSpace | None:
    """Return the row and column space of a matrix of a rank; None if it cannot have this rank."""
    rows, columns = matrix.new_ones(len(matrix)), matrix.new_ones(matrix.shape[1])
    if rank > min(matrix.shape) or not bool(matrix.isfinite().all()):
        return None
    for _ in range(EQUILIBRATIONS):
        energy = (rows[:, None] * matrix * columns).square().mean(1).sqrt()
        rows = rows / torch.where(energy > 0, energy, 1.0)
        energy = (rows[:, None] * matrix * columns).square().mean(0).sqrt()
        columns = columns / torch.where(energy > 0, energy, 1.0)
    left, size, right = torch.linalg.svd(rows[:, None] * matrix * columns, full_matrices=False)
    rounding = max(float(size[rank]) if rank < len(size) else 0.0, 1e-15 * float(size[0]))
    return ScaledSpace(rows, columns, left[:, :rank], size[:rank], right[:rank], rounding)


def _centered(columns: Tensor) -> Tensor:
    """Return columns [D, k] without their means, which no norm lets through."""
    return columns - columns.mean(0)


@dataclass(frozen=True)
class TokenSpace:
    """What a token's coordinates t [M] say, linear in t, and the gradients of the MLP.

    stream: [D, M] to the stream behind the attention. patches: [P, M] to the patch. marks: [R, M] to what tells its
    place, which is a row of `places` [T, R]. mixed: [D, M] to the output of the attention's heads.
    """

    block: FirstBlock
    stream: Tensor
    patches: Tensor
    marks: Tensor
    places: Tensor
    mixed: Tensor
    up: ScaledSpace
    down: ScaledSpace

    @cached_property
    def _reach(self) -> Tensor:
        """[H, M]: coordinates to the hidden layer, before scale and shift."""
        return self.block.values["up"] @ (self.block.norms[1].factor[:, None] * self.stream)

    @cached_property
    def _shift(self) -> Tensor:
        return self.block.values["up"] @ self.block.norms[1].shift + self.block.values["up bias"]

    @cached_property
    def _gram(self) -> Tensor:
        return self.stream.T @ self.stream / len(self.stream)

    def before(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden layer [S, H] before the activation, without scale, and the scale [S], for t [S, M]."""
        size = ((t @ self._gram * t).sum(1) + self.block.norms[1].eps).sqrt()
        plain = t @ self._reach.T
        return plain / size[:, None] + self._shift, plain, size

    def outside(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scaled part [S, H] of the hidden layer that its row space lacks, its square, and that expected.

        Expected of a true token: the rounding of the row space.
        """
        scaled = self.block.activation(self.before(t)[0]) * self.down.columns
        inside = scaled @ self.down.right.T
        gap = scaled - inside @ self.down.right
        expected = (inside / self.down.size).square().sum(1) * self.down.rounding**2
        return gap, gap.square().sum(1), expected + (1e-9 * scaled.norm(dim=1)) ** 2

    def slopes(self, t: Tensor, free: Tensor) -> Tensor:
        """Return the derivatives [S, H, k] of `outside` along directions `free` [M, k]."""
        before, plain, size = self.before(t)
        along = (self._reach @ free)[None] / size[:, None, None]
        along = along - (plain / size[:, None] ** 3)[:, :, None] * (t @ self._gram @ free)[:, None, :]
        along = along * (self.block.activation.slope(before) * self.down.columns)[:, :, None]
        return along - self.down.right.T @ (self.down.right @ along)

    def dual(self, t: Tensor) -> Tensor:
        """Return q [M] with t . q = 1 that is orthogonal to all other tokens' coordinates, of a token t [M].

        Its cotangent at the MLP's output lies in the column space of the one gradient, and what the activation makes
        of it in that of the other.
        """
        slope = self.block.activation.slope(self.before(t[None])[0][0])
        back = slope[:, None] * (self.block.values["down"].T @ self.down.column_basis)
        scaled = self.up.rows[:, None] * back
        scaled = scaled / scaled.norm(dim=0)
        off = scaled - self.up.left @ (self.up.left.T @ scaled)
        least = torch.linalg.svd(off, full_matrices=False)[2][-1]
        q = (self.up.left.T @ (scaled @ least)) / self.up.size
        return torch.div(q, q @ t)


@dataclass(frozen=True)
class _Frame:
    """Directions [D, F] of the first block's input: of patches, of places, and of what the attention adds to all.

    clear: which directions of places tell them. places: [T, R], what they tell, with 1 for what is added.
    """

    columns: Tensor
    clear: Tensor
    places: Tensor
    added: int


def _frame(block: FirstBlock, patches: Tensor) -> _Frame:
    """Return the frame of a block for a basis [R, P] of the patches."""
    base, added = _centered(block.base.T), _centered(block.values["out bias"][:, None])
    directions, energy, _ = torch.linalg.svd(base, full_matrices=False)
    directions = directions[:, energy > APART * energy[0]]
    clear = energy[: directions.shape[1]] > TELLS_PLACES * energy[0]
    added = added[:, : int(float(added.norm()) > 0)]
    ones = torch.ones(len(block.base), added.shape[1], dtype=torch.float64)
    columns = _centered(torch.cat([block.projection @ patches.T, directions, added], 1))
    return _Frame(columns, clear, torch.cat([base.T @ directions[:, clear], ones], 1), added.shape[1])


def token_space(block: FirstBlock, gradient: Params, batch: int) -> TokenSpace | None:
    """Return the coordinates of the tokens of a batch behind one gradient, float64; None if they are not determined."""
    seen = {key: gradient[name] for key, name in block.names.items()}
    width, norm, numbers = block.base.shape[1], block.norms[1], block.projection.shape[1]
    count, patches = batch * len(block.base), batch * block.count
    few = scaled_space(seen["patches"].flatten(1), patches) if patches < min(numbers, width) else None
    basis = torch.eye(numbers, dtype=torch.float64) if few is None else few.row_basis
    frame = _frame(block, basis)
    if frame.columns.shape[1] + count >= width or count > MOST_TOKENS or bool((norm.factor == 0).any()):
        return None
    up = scaled_space((seen["up"] - seen["up bias"][:, None] * norm.shift) / norm.factor, count)
    down, out = scaled_space(seen["down"], count), scaled_space(seen["out"], count)
    if up is None or down is None or out is None or min(up.snr, down.snr) < LEAST_SNR:
        return None
    both = torch.cat([frame.columns, _centered(block.values["out"] @ out.row_basis.T)], 1)
    size, stream = both.norm(dim=0), _centered(up.row_basis.T)
    if float(size.min()) == 0 or np.linalg.cond((frame.columns / frame.columns.norm(dim=0)).numpy()) > MOST_ALIKE:
        return None
    solved = torch.linalg.lstsq(up.columns[:, None] * both / size, up.columns[:, None] * stream).solution
    parts = (solved / size[:, None]).split([len(basis), len(frame.clear), frame.added, count])
    marks, mixed = torch.cat([parts[1][frame.clear], parts[2]]), out.row_basis.T @ parts[3]
    return TokenSpace(block, stream, basis.T @ parts[0], marks, frame.places, mixed, up, down)


APART, TELLS_PLACES = 1e-6, 1e-3
"""Differences of places, relative to the largest, that count, and those that are precise enough to tell places."""
MOST_ALIKE = 1e6
"""Condition number above which places, or patches, are too much alike to be told apart."""


# -- The tokens of each place, by damped Gauss-Newton steps --

PRIOR = 3e-4
"""Weight of a prior on pixels at first, relative to the hidden layer; later it is 0."""
PIXEL_SPREAD = 0.3
"""Typical distance of a pixel from the middle of the data range, in units of that range."""
SEARCH_STEPS, POLISH_STEPS = 25, 12
"""Steps with the prior, and as many without it; and of all tokens at last."""
RETRIES, STARTS = 6, 4
"""Rounds beyond the number of images, at most, and starts of a place in a round after one without success."""
TRUE_TOKEN, NEVER = 5.0, 0.02
"""Residual of a token up to which it is true, in units of the expected one, and relative to its hidden layer."""
START_RIDGE = 1e-3
"""Squared change of a patch, relative to that of a typical direction, from which a direction is used for a start."""
DAMPED, EASIER, HARDER, LEAST_DAMPED, STUCK = 1e-2, 0.3, 5.0, 1e-10, 1e5
"""Damping at first, its factors after a better and a worse step, the least, and the one at which a search ends."""
SMALLEST_DECREASE = 1e-3
"""Relative decrease of a square below which a search ends."""
SLOPES_AT_ONCE, MOST_TOKENS, SAME_PATCH = 2**24, 600, 1e-6
"""Entries of slopes at once, and tokens, at most; distance of patches up to which one was found twice."""


@dataclass(frozen=True)
class TokenSearch:
    """The search of tokens in a space. data_range: of pixels."""

    space: TokenSpace
    data_range: tuple[float, float]

    @property
    def _middle(self) -> float:
        return sum(self.data_range) / 2

    def affine(self, place: int, known: Tensor, open_places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a token [M] and directions [M, k] of all that are at a place and orthogonal to `known` [K, M].

        open_places: places with unknown tokens. What marks the others alone is a sum of known rows.
        """
        space = self.space
        rows = torch.cat([space.marks, known / known.norm(dim=1, keepdim=True).clamp(min=1e-300)])
        left, size, right = torch.linalg.svd(rows)
        marks = torch.linalg.svdvals(space.places[[*open_places]])
        rank = int((marks > TELLS_PLACES * marks[0]).sum()) + len(known)
        rank = min(rank, *rows.shape)
        target = torch.zeros(len(rows), dtype=torch.float64)
        target[: len(space.marks)] = space.places[place]
        base = right[:rank].T @ ((left.T @ target)[:rank] / size[:rank])
        return base, right[rank:].T

    def started(self, base: Tensor, free: Tensor, patches: Tensor) -> Tensor:
        """Return the tokens [S, M] of an affine set nearest to patches [S, P]."""
        pixels = self.space.patches @ free
        square = pixels.T @ pixels
        ridge = START_RIDGE * self.space.patches.square().sum(0).mean() * torch.eye(len(square), dtype=square.dtype)
        off = (patches - base @ self.space.patches.T) @ pixels
        nearest: Tensor = base + torch.linalg.solve(square + ridge, off.T).T @ free.T
        return nearest

    def settled(self, t: Tensor, free: Tensor, steps: int, weight: float) -> Tensor:
        """Return where damped steps from tokens [S, M] along `free` [M, k] end, with a prior's weight."""
        pixels, (low, high) = self.space.patches @ free, self.data_range
        scale = float((self.space.down.columns**2).sum()) * weight / (len(pixels) * (PIXEL_SPREAD * (high - low)) ** 2)

        def loss(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            gap, square, _ = self.space.outside(t)
            off = t @ self.space.patches.T - self._middle
            return gap, off, (square + scale * off.square().sum(1)).nan_to_num(nan=math.inf)

        damping, live = t.new_full((len(t),), DAMPED), torch.arange(len(t) if free.shape[1] else 0)
        gap, off, before = loss(t)
        for _ in range(steps):
            live = live[(damping[live] < STUCK) & (before[live] > 0)]
            if not len(live):
                break
            curved, slope = self._normal(t[live], free, gap[live])
            curved, slope = curved + scale * pixels.T @ pixels, slope + scale * off[live] @ pixels
            diagonal = curved.diagonal(dim1=1, dim2=2).clamp(min=1e-14)
            curved = curved + torch.diag_embed(damping[live, None] * diagonal)
            trial = t[live] - torch.linalg.solve_ex(curved, slope[:, :, None])[0][:, :, 0] @ free.T
            new_gap, new_off, after = loss(trial)
            better = after < before[live]
            damping[live] = torch.where(better, EASIER * damping[live], HARDER * damping[live]).clamp(min=LEAST_DAMPED)
            kept, settled = live[better], better & (after > (1 - SMALLEST_DECREASE) * before[live])
            t[kept], gap[kept], off[kept], before[kept] = (part[better] for part in (trial, new_gap, new_off, after))
            live = live[~settled]
        return t

    def _normal(self, t: Tensor, free: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normal matrices [S, k, k] and slopes [S, k] of the squares of `gap` [S, H], in parts."""
        chunk = max(1, SLOPES_AT_ONCE // (gap.shape[1] * free.shape[1]))
        parts = []
        for part, off in zip(t.split(chunk), gap.split(chunk), strict=True):
            slopes = self.space.slopes(part, free)
            parts.append((slopes.mT @ slopes, (slopes.mT @ off[:, :, None])[:, :, 0]))
        return torch.cat([one for one, _ in parts]), torch.cat([one for _, one in parts])

    def true(self, t: Tensor, free: Tensor) -> Tensor:
        """Return which tokens [S, M], fitted along `free` [M, k], have a hidden layer in the row space: [S] bool."""
        gap, square, expected = self.space.outside(t)
        whole = (self.space.block.activation(self.space.before(t)[0]) * self.space.down.columns).square().sum(1)
        fitted = TRUE_TOKEN if free.shape[1] else math.inf  # what linear systems leave is more than rounding
        within: Tensor = (square <= fitted**2 * expected) & (square <= NEVER**2 * whole)
        return within & gap.isfinite().all(1)

    def tokens(self, batch: int) -> Tensor | None:
        """Return the coordinates [N, B, M] of the patches' tokens; None if not all were separated."""
        tokens_at: list[list[Tensor]] = [[] for _ in range(self.space.block.count)]
        known = self.space.stream.new_zeros(0, self.space.stream.shape[1])
        draws, starts = torch.Generator().manual_seed(0), 1
        for _ in range(batch + RETRIES):
            todo = [n for n, own in enumerate(tokens_at) if len(own) < batch]
            if not todo:
                return self.polished(tokens_at)
            (t, right), before = self._candidates(todo, tokens_at, known, starts, draws), len(known)
            for n, hits, ways in zip(todo, right.view(-1, starts), t.view(len(todo), starts, -1), strict=True):
                if bool(hits.any()):
                    tokens_at[n].append(ways[int(hits.int().argmax())])
                    known = torch.cat([known, self.space.dual(tokens_at[n][-1])[None]])
            if not len(known):
                return None
            starts = 1 if len(known) - before == len(todo) else STARTS
        return self.polished(tokens_at) if all(len(own) == batch for own in tokens_at) else None

    def _candidates(
        self,
        todo: Sequence[int],
        tokens_at: Sequence[Sequence[Tensor]],
        known: Tensor,
        starts: int,
        draws: torch.Generator,
    ) -> tuple[Tensor, Tensor]:
        """Return where searches at some patches end, orthogonal to known tokens, [len(todo) * starts, M]; which hit."""
        block = self.space.block
        others = [n for n in range(len(block.base)) if not 0 <= n - block.first < block.count]
        undone = [*others, *(block.first + n for n in todo)]
        ends = [self.affine(block.first + n, known, undone) for n in todo]
        free, base = ends[0][1], torch.stack([one for one, _ in ends]).repeat_interleave(starts, 0)
        grey = torch.full((len(base), len(self.space.patches)), self._middle, dtype=torch.float64)
        t = self.started(base, free, grey)
        if starts > 1:
            every = torch.stack([one for own in tokens_at for one in own] or [*t]) @ free
            t = t + torch.randn(len(t), free.shape[1], generator=draws, dtype=t.dtype) * every.std(0) @ free.T
        t = self.settled(t, free, SEARCH_STEPS, PRIOR)
        t = self.settled(t, free, SEARCH_STEPS, 0.0)
        return t, self.true(t, free)

    def polished(self, tokens_at: Sequence[Sequence[Tensor]]) -> Tensor | None:
        """Return tokens [N, B, M] corrected by their own equations alone; None if one of them became another."""
        nobody, ends, right = self.space.stream.new_zeros(0, self.space.stream.shape[1]), list[Tensor](), True
        for n, own in enumerate(tokens_at):
            base, free = self.affine(self.space.block.first + n, nobody, range(len(self.space.block.base)))
            ends.append(self.settled(base + (torch.stack([*own]) - base) @ free @ free.T, free, POLISH_STEPS, 0.0))
            right &= bool(self.true(ends[-1], free).all())
        tokens = torch.stack(ends)
        apart = torch.cdist(tokens @ self.space.patches.T, tokens @ self.space.patches.T)
        least = (apart + torch.diag_embed(apart.new_full(apart.shape[:2], math.inf))).min()
        return tokens if right and float(least) > SAME_PATCH else None


# -- Which patches are of one image: those that attend to each other --

SWEEPS = 4
"""Turns in which places are assigned anew by all others."""


def attended(space: TokenSpace, tokens: Tensor) -> Tensor:
    """Return [N B, N B] how far the token of a row attends to that of a column (1: yes, 0: no), of tokens [N, B, M].

    The output of a head is sum_s exp(l_s) v_s / Z over the tokens s of the same image: linear in Z and in whether s is
    of it. Row i has one Z for each head; the other tokens at its own place are of other images.
    """
    block, (count, batch) = space.block, tokens.shape[:2]
    t, places = tokens.flatten(0, 1), torch.arange(count).repeat_interleave(batch)
    rows = torch.cat([block.base[: block.first], block.base[block.first + count :]])  # of no image
    inputs = block.base[block.first + places] + t @ space.patches.T @ block.projection.T
    joined = block.norms[0](torch.cat([rows, inputs])) @ block.values["in"].T + block.values["in bias"]
    q, k, v = joined.view(len(joined), 3, block.heads, -1).unbind(1)
    logits = torch.einsum("ihd,jhd->ihj", q[len(rows) :], k) / k.shape[2] ** 0.5
    shares = (logits - logits.amax(2, keepdim=True)).exp()
    outputs, answer = (t @ space.mixed.T).view(len(t), block.heads, -1), t.new_zeros(len(t), len(t))
    for i, own in enumerate(places):
        parts = shares[i][:, :, None] * v.transpose(0, 1)  # [heads, tokens, width]
        others = (places != own).nonzero()[:, 0]
        certain = parts[:, : len(rows)].sum(1) + parts[:, len(rows) + i]
        answer[i, others] = _members(outputs[i], certain, parts[:, len(rows) + others], batch)
    return answer


def _members(output: Tensor, certain: Tensor, parts: Tensor, batch: int) -> Tensor:
    """Return which of n parts [heads, n, width] sum with certain ones [heads, width] to multiples of the outputs.

    The parts are those of places, of `batch` each, of which one belongs to the sum: [n], 1 for those, else 0.
    """
    heads, count = parts.shape[:2]
    system = torch.cat([torch.block_diag(*output[:, :, None]), -parts.transpose(1, 2).flatten(0, 1)], 1)
    sums = system.new_zeros(count // batch, system.shape[1])
    sums[:, heads:] = torch.eye(count // batch, dtype=sums.dtype).repeat_interleave(batch, 1)
    heavy = float(system.norm()) / system.shape[1] ** 0.5
    system = torch.cat([system, heavy * sums])
    target = torch.cat([certain.flatten(), sums.new_full((len(sums),), heavy)])
    scale = system.norm(dim=0).clamp(min=1e-300)
    solution: Tensor = torch.linalg.lstsq(system / scale, target[:, None], driver="gelsd").solution[:, 0] / scale
    return solution[heads:]


def patches_of_images(space: TokenSpace, tokens: Tensor) -> Tensor:
    """Return patches [B, N, P] of each image, of tokens [N, B, M]."""
    from scipy.optimize import linear_sum_assignment  # half a second, which most evaluations need not pay

    count, batch = tokens.shape[:2]
    together = attended(space, tokens).clamp(-0.5, 1.5)
    score = (together + together.T).view(count, batch, count, batch)
    order = torch.arange(batch).repeat(count, 1)  # [N, B]: which token of a place each image has
    for sweep in range(SWEEPS):
        for n in range(count):
            fixed = range(n) if sweep == 0 else [m for m in range(count) if m != n]
            if not len(fixed):
                continue
            gains = torch.stack([score[m, order[m]][:, n] for m in fixed]).sum(0)  # [images, tokens at n]
            order[n] = torch.from_numpy(linear_sum_assignment(gains.numpy(), maximize=True)[1])
    chosen = torch.stack([tokens[n, order[n]] for n in range(count)], 1)
    patches: Tensor = chosen @ space.patches.T
    return patches


def patch_batch(
    block: FirstBlock, gradient: Params, batch: int, shape: Sequence[int], data_range: tuple[float, float]
) -> tuple[Tensor, float] | None:
    """Return the images [B, C, H, W] of a batch behind one gradient, float64, and the spread of their tokens.

    None where they are not determined. spread: largest over smallest singular value of the scaled gradient.
    """
    space = token_space(block, gradient, batch)
    tokens = None if space is None else TokenSearch(space, data_range).tokens(batch)
    if space is None or tokens is None:
        return None
    patches = patches_of_images(space, tokens)
    images = fold(patches.mT, tuple(shape[1:]), block.kernel, stride=block.kernel)
    return images, float(space.up.size[0] / space.up.size[-1])
