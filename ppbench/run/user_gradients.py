"""Read users' gradients, in any usual container, by our names of a network's trained parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import numpy as np
import scipy
import torch
from scipy.optimize import least_squares
from scipy.special import softmax
from torch import Tensor
from torch.nn import Module

from ppbench.base.errors import UsageError, shown, unknown
from ppbench.base.tree import Params
from ppbench.metrics.intervals import Floats
from ppbench.nets.classifier import HEAD_NAMES
from ppbench.nets.model_object import HeldNetwork
from ppbench.nets.modes import copied, moving_statistics
from ppbench.nets.net import Net, OwnLoss
from ppbench.run.user_inputs import describe_value, to_dense

Gradient = Sequence[Any] | Mapping[str, Any] | Tensor
WRAPPERS = frozenset({"module", "_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names that wrappers (parallel, compiled, per-example gradients) give to the network in them."""


@dataclass(frozen=True)
class Names:
    """Names of a network's tensors: trained parameters, all parameters, all of its `state_dict`."""

    trained: tuple[str, ...]
    parameters: tuple[str, ...]
    state: tuple[str, ...]

    @staticmethod
    def of(module: Module, network: HeldNetwork) -> Names:
        """Return the names of a user's module."""
        parameters = tuple(name for name, _ in module.named_parameters())
        return Names(tuple(network.names.values()), parameters, tuple(module.state_dict()))


def read_gradient(gradient: Gradient, module: Module, network: HeldNetwork) -> Params:
    """Return a user's gradient by our names of its parameters, float32 and dense; UsageError: it cannot be read.

    A trained parameter that a gradient by name lacks is unknown, and missing in what is returned. None stands for the
    gradient of a parameter that the network does not use; entries of frozen parameters and buffers may be None or zero,
    or be missing.
    """
    names, start = Names.of(module, network), network.spec.start
    values = _by_name(gradient, module, names)
    own_names = {name: own for name, own in network.names.items() if own in values}
    _check_weights(values, module)
    _check_frozen(values, names)
    if not own_names:
        raise UsageError("The gradient has no parameter that requires a gradient; give that of one or more of them.")
    if all(values.get(name) is None for name in names.trained):
        raise UsageError("The gradient is None in all parameters; call loss.backward() before it is read.")
    shapes = {own: tuple(start[name].shape) for name, own in own_names.items()}
    _check_order(values, shapes)
    tensors = {name: _read(own, values.get(own), shapes[own]) for name, own in own_names.items()}
    _check_unused([name for name, value in tensors.items() if value is None], network)
    read = {name: torch.zeros_like(start[name]) if value is None else value for name, value in tensors.items()}
    if not any(bool(value.any()) for value in read.values()):
        raise UsageError("The gradient is zero in all parameters; there is nothing to be found in it.")
    place = next(value.device for value in tensors.values() if value is not None)
    return {name: read[name].to(place) for name in start if name in read}


def _read(name: str, value: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Return one parameter's gradient as a dense float32 tensor, None as None; UsageError: another type or shape."""
    if value is None:
        return None
    numbers = to_dense(value)
    if numbers is not None and numbers.is_floating_point() and tuple(numbers.shape[1:]) == shape and numbers.dim():
        words = f"{tuple(numbers.shape)}, one axis more than {shape}"
        raise UsageError(
            f"The gradient of {name!r} has shape {words}; of gradients by example give the mean, as g.mean(0)."
        )
    if numbers is None or not numbers.is_floating_point() or tuple(numbers.shape) != shape:
        words = describe_value(value).replace(" of shape", "")
        raise UsageError(f"The gradient of {name!r} is {words}; it must be a tensor of floats of shape {shape}.")
    single = numbers.float()
    if not bool(single.isfinite().all()):
        raise UsageError(f"The gradient of {name!r} holds a value that is not finite; nothing can be matched to it.")
    return single


def _check_order(values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse tensors in swapped places (UsageError), as far as their shapes show."""
    numbers = {name: to_dense(values[name]) for name in shapes if values.get(name) is not None}
    seen = {name: tuple(value.shape) for name, value in numbers.items() if value is not None}
    wrong = [name for name, shape in shapes.items() if name in seen and seen[name] != shape]
    for one in wrong:
        other = next((n for n in wrong if n != one and seen[n] == shapes[one] and seen[one] == shapes[n]), None)
        if other is not None:
            words = f"{one!r} has shape {seen[one]} instead of {shapes[one]}, that of {other!r} {seen[other]}"
            raise UsageError(f"The gradients of {one!r} and {other!r} are swapped: that of {words}; give each its own.")


def _check_weights(values: Mapping[str, Any], module: Module) -> None:
    """Refuse weights in the place of gradients (UsageError): all values equal the parameters."""
    pairs = [(to_dense(values[name]), own.detach()) for name, own in module.named_parameters() if name in values]
    if any(bool(own.any()) for _, own in pairs) and all(
        value is not None and value.shape == own.shape and torch.equal(value.cpu(), own.to(value.dtype).cpu())
        for value, own in pairs
    ):
        raise UsageError("The gradient holds the model's parameters themselves; give their .grad.")


def _check_frozen(values: Mapping[str, Any], names: Names) -> None:
    """Refuse gradients of parameters that the network does not train (UsageError)."""
    for name in (own for own in names.parameters if own not in names.trained):
        numbers = to_dense(values[name]) if values.get(name) is not None else None
        if numbers is not None and bool(numbers.any()):
            fix = "leave it out, or set requires_grad=True as where the gradient was taken"
            raise UsageError(f"The gradient has {name!r}, which is no trained parameter of the model (frozen); {fix}.")


def _check_unused(lacking: Sequence[str], network: HeldNetwork) -> None:
    """Refuse None for a parameter that the network's output depends on (UsageError)."""
    net, spec = network.spec.net, network.spec
    used = _used(net, spec.start) if lacking else set()
    for name in lacking:
        if name in used:
            words = f"The gradient of {network.names[name]!r} is None, but the network uses this parameter"
            raise UsageError(f"{words}; give its gradient, or freeze it by requires_grad=False.")


def _used(net: Net, params: Params) -> set[str]:
    """Return the trained parameters that the logits depend on."""
    x = torch.rand(2, *net.spec.shape, generator=torch.Generator().manual_seed(0))
    with torch.enable_grad():
        inputs = {name: value.detach().requires_grad_() for name, value in params.items()}
        total = net(inputs, x).sum()
        slopes = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return {name for name, slope in zip(inputs, slopes, strict=True) if slope is not None}


def _by_name(gradient: Any, module: Module, names: Names) -> dict[str, Any]:
    """Return the tensors by the network's own names (UsageError: it is no gradient, or lacks a parameter)."""
    if isinstance(gradient, np.ndarray) or _are_floats(gradient):
        gradient = _vector(gradient)
    if isinstance(gradient, Tensor):
        return _cut(gradient, module, names)
    if isinstance(gradient, str | bytes | Module) or not isinstance(gradient, Iterable):
        words = "order of model.parameters() or by name"
        raise UsageError(
            f"The gradient is a {type(gradient).__name__}; give a tensor for each parameter, in the {words}."
        )
    values = gradient if isinstance(gradient, Mapping) else list(gradient)
    if isinstance(values, list) and values and all(_is_named(part) for part in values):
        values = dict(values)
    if isinstance(values, list):
        values = _in_order(values, names)
    return _by_own_name(values, names)


class Observation(NamedTuple):
    """A network at the start of an update, and the update: a gradient, or start minus end.

    tracked: whether running statistics are in it, as start minus end of several steps, or start minus the batch's.
    """

    module: Module
    update: Gradient
    tracked: bool = False


def observation_of(update: Any, module: Module, steps: bool, statistics: bool) -> Observation:
    """Return what a pair (before, after) of state dicts shows; any other update as it is, with `module` itself.

    Running statistics are in it if `statistics`, and if the client's batch norms moved them. steps: whether it took
    several; else what they moved is divided by the norm's momentum. What both dicts lack is not in it: norms that stay
    with their clients (FedBN). `module` is never changed. UsageError: one lacks what the other has, or other shapes.
    """
    if not isinstance(update, tuple | list) or len(update) != 2 or not all(isinstance(p, Mapping) for p in update):
        return Observation(module, update)
    parameters, state = tuple(name for name, _ in module.named_parameters()), tuple(module.state_dict())
    names = Names(parameters, parameters, state)
    before, after = ({n: to_dense(v) for n, v in _by_own_name(part, names).items()} for part in update)
    start, change = copied(module), dict[str, Tensor]()
    own = start.state_dict()
    sent = [name for name in parameters if before.get(name) is not None or after.get(name) is not None]
    for name in sent or parameters[:1]:
        ends = before.get(name), after.get(name)
        if any(end is None or end.shape != own[name].shape for end in ends):
            right = f"give both as state dicts of the model, with {name!r} of shape {tuple(own[name].shape)}"
            raise UsageError(f"Of the pair (before, after), one lacks {name!r} or has another shape; {right}.")
        first, last = (end.to(torch.float64).cpu() for end in ends if end is not None)
        change[name] = (first - last).float()
    moved = _moved_statistics(before, after, moving_statistics(module), steps) if statistics else {}
    with torch.no_grad():
        for name, value in before.items():
            if value is not None and value.shape == own[name].shape:
                own[name].copy_(value)
    return Observation(start, change | moved, bool(moved))


def _moved_statistics(
    before: Mapping[str, Tensor | None], after: Mapping[str, Tensor | None], shares: Mapping[str, float], steps: bool
) -> dict[str, Tensor]:
    """Return what `observation_of` says of the running statistics named in `shares`; empty if they were not sent."""
    moved = dict[str, Tensor]()
    for name, share in shares.items():
        first, last = before.get(name), after.get(name)
        if first is None or last is None or first.shape != last.shape:
            return {}
        moved[name] = ((first.double() - last.double()).cpu() / (1.0 if steps else share)).float()
    return moved if any(bool(value.any()) for value in moved.values()) else {}


ALONG = 0.5
"""Cosine of the bias's change and the labels' counts from which the change is end minus start."""


def sign_of(change: Params, batch: int, y: Tensor | None) -> float:
    """Return -1 if an update of several steps under cross-entropy seems to be end minus start, else 1.

    Start minus end of the head's bias sums the gradients p - onehot(y): negative at the labels, which `y` [B, C] may
    state, and in no more than `batch` entries.
    """
    bias = change.get("head.bias")
    if bias is None:
        return 1.0
    if y is not None:
        excess = y.sum(0) - y.sum(0).mean()  # 0 where classes are balanced, which shows nothing
        return -1.0 if float(bias.cpu() @ excess) > ALONG * float(bias.norm() * excess.norm()) else 1.0
    return -1.0 if int((bias > 0).sum()) <= batch < int((bias < 0).sum()) else 1.0


def _are_floats(gradient: Any) -> bool:
    """Return whether the gradient is one vector, given as a list of its entries."""
    if not isinstance(gradient, list | tuple) or not gradient:
        return False
    return all(isinstance(entry, float | np.floating) for entry in gradient)


def _vector(gradient: Any) -> Any:
    """Return a NumPy vector or a list of floats as a tensor, an array of arrays as a list."""
    numbers = to_dense(gradient)
    return list(gradient) if numbers is None or numbers.dim() != 1 else numbers


def _is_named(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)


def _cut(flat: Tensor, module: Module, names: Names) -> dict[str, Any]:
    """Return one vector of all trained parameters' entries, split into these by name."""
    parameters = dict(module.named_parameters())
    sizes = [parameters[name].numel() for name in names.trained]
    if flat.dim() != 1 or len(flat) != sum(sizes):
        words = (
            f"a tensor for each parameter, in the order of model.parameters() or by name, or one vector of {sum(sizes)}"
        )
        raise UsageError(f"The gradient is a Tensor of shape {tuple(flat.shape)}; give {words}.")
    parts = zip(names.trained, flat.split(sizes), strict=True)
    return {name: part.reshape(parameters[name].shape) for name, part in parts}


def _in_order(values: Sequence[Any], names: Names) -> dict[str, Any]:
    """Return a list by name: of the trained parameters, of all parameters, or of the state_dict."""
    for order in (names.trained, names.parameters, names.state):
        if len(values) == len(order):
            return dict(zip(order, values, strict=True))
    words = f"The gradient has {len(values)} tensors; the model has {len(names.trained)} trained parameters"
    frozen, whole = len(names.parameters), len(names.state)
    more = f", {frozen} with frozen ones" if frozen > len(names.trained) else ""
    more += f", {whole} tensors in its state_dict" if whole > frozen else ""
    raise UsageError(f"{words}{more}.")


def _by_own_name(values: Mapping[Any, Any], names: Names) -> dict[str, Any]:
    """Return tensors by the network's own names, without wrappers' prefixes; UsageError: an unknown name."""
    known = dict.fromkeys((*names.parameters, *names.state))
    bare: dict[str, list[str]] = {}
    for name in known:
        bare.setdefault(_bare(name), []).append(name)
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        own = [name] if name in known else bare.get(_bare(str(name)), [])
        if len(own) != 1:
            raise unknown("trained parameter of the model", str(name), names.trained)
        if own[0] in renamed:
            raise UsageError(f"The gradient has {own[0]!r} twice, as {shown(name)} too; give it once.")
        renamed[own[0]] = value
    return renamed


def _bare(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


# -- The factor between a gradient and that of the mean cross-entropy of a batch: a sum, a learning rate, clipping --
# The gradient of the last layer is s / B times A^T [Phi, 1], with A = p - y [B, C] and features Phi [B, D], which
# lie in the row space of its weight's gradient: Phi = M R. The predictions p = softmax(Phi W^T + b) close the
# system: fewer unknowns, M [B, B] and s, than equations where B < C (Phong et al. 2018 for one example;
# `feature_inversion`, s = 1). The layers before are not used, and nothing is searched.

MAX_FITTED_EXAMPLES = 8
"""Most examples of a batch whose factor is fitted: unknowns grow with the square."""
CONSISTENT = 1e-11
"""Relative squared residual below which a factor explains the layer's gradient; rounding to float32 leaves 1e-14."""
CANDIDATES, RESTARTS, SPREAD = 16, 2, 0.3
"""Number of multisets of labels and of further starts of the features, and the relative noise of the starts."""
MULTISETS = 5000
"""Most multisets of labels that are ordered; beyond, each label must show in the bias's gradient."""
TINY, FAR, WORST = 1e-300, 500.0, 1e100
"""Least divisor; largest logarithm of a factor; largest residual."""
MAX_RESIDUALS = 40
"""Most residuals that are computed from one start."""
NEAR, ALIKE = 1e-3, 2e-6
"""Relative distance from 1 below which a factor is 1 (other small effects look like it); relative error of a fit."""


@dataclass(frozen=True)
class LastLayer:
    """The equations that the last layer's gradient gives for a batch with known labels; float64.

    target: [C, B + 1], dW R^T beside db: what s / B times A^T [M, 1] must equal; s has this `sign`. logits: [B, C],
    R W^T; bias: [C]. onehot: [B, C].
    """

    target: Floats
    logits: Floats
    bias: Floats
    onehot: Floats
    sign: float

    def starts(self) -> Iterator[Floats]:
        """Yield starting features M [B, B]: each example as if alone in its class, then with noise."""
        classes = self.onehot.argmax(1)
        plain = self.target[classes, :-1] / self.target[classes, -1:]
        draws = np.random.default_rng(0)
        yield plain
        for _ in range(RESTARTS):
            yield plain * (1 + SPREAD * draws.standard_normal(plain.shape))

    def errors(self, m: Floats) -> Floats:
        """Return A = p - y [B, C] of features M [B, B]."""
        return np.asarray(softmax(m @ self.logits + self.bias, axis=1) - self.onehot)

    def factor(self, m: Floats) -> float:
        """Return the factor, positive, that brings the bias's gradient under M nearest to the observed one."""
        mean = self.sign * self.errors(m).mean(0)
        return float(max(mean @ self.target[:, -1] / max(mean @ mean, TINY), TINY))

    def residual(self, m: Floats, factor: float) -> Floats:
        """Return the relative residuals [C * (B + 1)]."""
        wide = np.concatenate([m, np.ones((len(m), 1))], 1)
        simulated = self.sign * factor / len(m) * self.errors(m).T @ wide
        return np.asarray((simulated - self.target) / self._size).ravel()

    def jacobian(self, m: Floats, factor: float) -> Floats:
        """Return the derivatives of `residual` by M and by the factor's logarithm, [C * (B + 1), B * B + 1]."""
        p, wide = softmax(m @ self.logits + self.bias, axis=1), np.concatenate([m, np.ones((len(m), 1))], 1)
        slope = p[:, None] * (self.logits[None] - (p @ self.logits.T)[:, :, None])  # of p_ic by M_ij: [i, j, c]
        by_m = np.einsum("ijc,ik->ckij", slope, wide)
        by_m += np.einsum("ic,jk->ckij", p - self.onehot, np.eye(len(m), len(m) + 1))
        by_m *= self.sign * factor / len(m) / self._size
        by_factor = self.residual(m, factor) + self.target.ravel() / self._size
        return np.concatenate([by_m.reshape(self.target.size, -1), by_factor[:, None]], 1)

    @cached_property
    def _size(self) -> float:
        return max(float(np.linalg.norm(self.target)), TINY)

    def solve(self, m: Floats) -> tuple[float, float]:
        """Return the least squared residual near features M and any factor, and that factor."""
        begin = np.append(m.ravel(), math.log(self.factor(m)))

        def at(z: Floats) -> tuple[Floats, float]:
            return z[:-1].reshape(m.shape), math.exp(min(z[-1], FAR))

        if not np.isfinite(begin).all():
            return math.inf, 1.0
        ended = least_squares(
            lambda z: np.nan_to_num(self.residual(*at(z)), nan=WORST, posinf=WORST, neginf=-WORST),
            begin,
            jac=lambda z: np.nan_to_num(self.jacobian(*at(z))),
            method="lm",
            xtol=1e-15,
            ftol=1e-15,
            max_nfev=MAX_RESIDUALS,
        )
        return 2 * float(ended.cost), at(ended.x)[1]


def scale_of(gradient: Params, start: Params, batch: int, labels: Tensor | None) -> float | None:
    """Return s of a gradient that is s times that of the mean cross-entropy of `batch` examples.

    labels: the examples' one-hot labels [B, C] if they are known. s may be negative, for a change of weights. None: no
    factor explains the last layer (noise, weight decay). It is 1, without a fit, for more than `MAX_FITTED_EXAMPLES`,
    for as many examples as classes or more, and if weight and bias of the last layer are not both trained. Without
    labels only those most like the bias's gradient are tried: with 8 examples and hardly more classes it may be None
    although a factor exists.
    """
    if (
        not {*HEAD_NAMES} <= gradient.keys()
        or not 1 <= batch <= MAX_FITTED_EXAMPLES
        or batch >= len(gradient["head.bias"])
    ):
        return 1.0
    weight, bias = (start[name].detach().cpu().double().numpy() for name in HEAD_NAMES)
    by_weight, by_bias = (gradient[name].detach().cpu().double().numpy() for name in HEAD_NAMES)
    if weight.ndim != 2 or min(by_weight.shape) < batch or not by_bias.any():
        return 1.0
    rows = np.linalg.svd(by_weight, full_matrices=False)[2][:batch]
    target = np.concatenate([by_weight @ rows.T, by_bias[:, None]], 1)
    known = None if labels is None else labels.detach().cpu().double().numpy()
    for sign, onehot in _labelings(by_bias, batch, known, np.asarray(softmax(bias))):
        fitted = _fit(LastLayer(target, rows @ weight.T, bias, onehot, sign))
        if fitted is not None:
            return fitted
    return None


def _fit(system: LastLayer) -> float | None:
    """Return the factor with its sign, None if none explains the gradient."""
    with np.errstate(all="ignore"):  # where the bias's gradient is zero; a step that overflows is taken back
        for m in system.starts():
            size, factor = system.solve(m)
            if size <= CONSISTENT:
                return _rounded(system.sign * factor)
    return None


def _rounded(factor: float) -> float:
    """Return the factor, rounded to 1 or to four digits where the fit does not resolve the difference."""
    if abs(factor - 1) < NEAR:
        return 1.0
    short = float(f"{factor:.4g}")
    return short if abs(short / factor - 1) < ALIKE else factor


def _labelings(by_bias: Floats, batch: int, known: Floats | None, prior: Floats) -> Iterator[tuple[float, Floats]]:
    """Yield pairs of a factor's sign and possible one-hot labels [B, C] of the batch, the likeliest first.

    The bias's gradient is s (p - n / B), with p the mean prediction and n the examples of each class: times the
    factor's sign it is negative only in classes of the batch, though not in all of them if p is large. Counts are tried
    in the order in which a mean prediction near `prior` and any s explain it.
    """
    for sign in (1.0, -1.0):
        if known is not None:
            yield sign, known
            continue
        observed = sign * by_bias
        present = np.flatnonzero(observed < 0)
        free = batch - len(present)
        if not 0 <= free < batch:
            continue
        few = math.comb(len(by_bias) + free - 1, free) <= MULTISETS
        classes = range(len(by_bias)) if few else present.tolist()
        base = np.bincount(present, minlength=len(by_bias))
        more = combinations_with_replacement(classes, free)
        counts = [base + np.bincount(np.array(extra, dtype=np.int64), minlength=len(by_bias)) for extra in more]
        for count in sorted(counts, key=lambda own: _unlike(prior - own / batch, observed))[:CANDIDATES]:
            yield sign, np.eye(len(by_bias))[np.repeat(np.arange(len(by_bias)), count)]


def _unlike(expected: Floats, observed: Floats) -> float:
    """Return the least squared distance of any positive multiple of `expected` from `observed`."""
    factor = max(float(expected @ observed) / max(float(expected @ expected), TINY), 0.0)
    return float(((observed - factor * expected) ** 2).sum())


# -- Other losses, and labels that are no classes: one example, whose outputs and cotangent the last layer shows --
# Of one example the last layer's gradient is dW = s a f^T and db = s a, with a = dL/dz: the features f = dW_k / db_k
# and the outputs z = W f + b do not depend on the factor s, so each possible label predicts a up to s.

FITTED = 1e-9
"""Relative squared distance up to which a label explains the cotangent: rounding of the outputs leaves 1e-12."""


def cotangent_of(loss: OwnLoss, z: Tensor, y: Tensor) -> Tensor:
    """Return dL/dz [C] of the mean loss of one example with outputs z [C] and target y [C]."""
    z, y = z.detach().double()[None], y.double()[None]
    with torch.enable_grad():
        z.requires_grad_()
        (slope,) = torch.autograd.grad(loss.function(z, y).sum(), z)
    shares = loss.shares(y)
    return slope[0] if shares is None else slope[0] / shares


def fitted_label(gradient: Params, start: Params, loss: OwnLoss, rows: Tensor) -> tuple[float, int] | None:
    """Return the factor of one example's gradient, and which of possible targets `rows` [K, C] explains it.

    Positive factors near 1 come first where several do. None: none of them, or the last layer is not of one example.
    """
    weight, bias = (start[name].detach().cpu().double() for name in HEAD_NAMES)
    by_weight, by_bias = (gradient[name].detach().cpu().double() for name in HEAD_NAMES)
    largest = int(by_bias.abs().argmax())
    features = by_weight[largest] / by_bias[largest]
    rest = (by_weight - by_bias[:, None] * features).square().sum() / by_weight.square().sum().clamp(min=TINY)
    if weight.dim() != 2 or not bool(features.isfinite().all()) or float(rest) > FITTED:
        return None
    fits = list[tuple[bool, float, float, int]]()
    for place, row in enumerate(rows):
        slope = cotangent_of(loss, weight @ features + bias, row)
        factor = float(by_bias @ slope / (slope @ slope).clamp(min=TINY))
        left = (by_bias - factor * slope).square().sum() / by_bias.square().sum()
        if float(left) <= FITTED and factor:
            fits.append((factor < 0, abs(math.log(abs(factor))), factor, place))
    return None if not fits else (_rounded(min(fits)[2]), min(fits)[3])


# -- Weight decay inside a gradient: t times the weights, with t such that the last layer's gradient has rank B again --


SHOWN = 1e-5
"""Smallest singular value, relative to the largest, that counts as an example; rounding to float32 leaves 1e-7."""


def least_batch(gradient: Params, answers: int = 1) -> int:
    """Return how many examples the last layer's gradient shows at least, by its rank; 0 without that layer.

    answers: how many the network gives of an example, of which each adds 1 to the rank at most.
    """
    if not {*HEAD_NAMES} <= gradient.keys() or gradient["head.weight"].dim() != 2:
        return 0
    weight, bias = (gradient[name].detach().cpu().double() for name in HEAD_NAMES)
    sizes = torch.linalg.svdvals(torch.cat([weight, bias[:, None]], 1))
    return -(-int((sizes > SHOWN * sizes[0]).sum()) // answers)


def decay_of(gradient: Params, start: Params, batch: int) -> float | None:
    """Return t of a gradient that holds t times the weights, for fewer examples than classes; None: no t explains it.

    A = [dW, db] - t [W, b] has rank B, so that t is a generalized eigenvalue of B + 1 random combinations of its rows
    and columns; of these the one counts that leaves least beyond the rank.
    """
    if any(name not in gradient or gradient[name].dim() != 2 - place for place, name in enumerate(HEAD_NAMES)):
        return None
    seen, own = (
        torch.cat([tree[n].detach().cpu().double().view(len(tree[n]), -1) for n in HEAD_NAMES], 1).numpy()
        for tree in (gradient, start)
    )
    if min(seen.shape) <= batch + 1:
        return None
    draws = np.random.default_rng(0)
    left, right = draws.standard_normal((batch + 1, len(seen))), draws.standard_normal((seen.shape[1], batch + 1))
    candidates = scipy.linalg.eigvals(left @ seen @ right, left @ own @ right)
    real = [0.0, *(float(t.real) for t in candidates if np.isfinite(t) and abs(t.imag) <= 1e-3 * abs(t))]

    def beyond(t: float) -> float:
        sizes = np.linalg.svd(seen - t * own, compute_uv=False)
        return float((sizes[batch:] ** 2).sum() / (sizes**2).sum())

    best = min(real, key=beyond)
    return best if beyond(best) <= FITTED else None


def without_decay(
    gradient: Params, start: Params, decay: float | None, examples: int, steps: bool, statistics: Collection[str] = ()
) -> Params:
    """Return a gradient of so many examples without `decay` times the weights; None: an unknown multiple (`decay_of`).

    statistics: names of the running statistics, which do not decay.

    UsageError: no number, or it cannot be known here.
    """
    if decay == 0 and not isinstance(decay, bool):
        return gradient
    if steps:
        raise UsageError("weight_decay is of one gradient; several local steps with it are not simulated: leave it 0.")
    if decay is None:
        decay = decay_of(gradient, start, examples)
    elif isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1e6:
        raise UsageError(f"weight_decay={shown(decay)} cannot be used; it must be 0 or more, or None if it is unknown.")
    if decay is None:
        right = "give the number; it is read off a last nn.Linear with a bias, of fewer examples than classes"
        raise UsageError(f"weight_decay=None cannot be used here: no multiple of the weights explains it; {right}.")
    return {n: value if n in statistics else value - decay * start[n].to(value) for n, value in gradient.items()}
