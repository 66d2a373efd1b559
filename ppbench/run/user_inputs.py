"""Inputs from users' own programs, converted to tensors of the bench, or refused in one sentence."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import Module, functional
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader, Dataset

from ppbench.base.errors import UsageError, because, shown
from ppbench.base.vocabulary import Vocabulary
from ppbench.federation.plan import Data, Plan
from ppbench.nets.model_object import HeldNetwork
from ppbench.nets.net import LossName, OwnLoss, bce, next_token_of_batches, softened_cross_entropy

ClassLabels = Tensor | Sequence[int]
LabelledBatch = tuple[Any, Any]
"""A batch: inputs [N, *shape], floats, and their classes [N]; tensors, or what NumPy makes arrays of."""
Shard = LabelledBatch | Dataset[Any] | DataLoader[Any] | Tensor | NDArray[Any]
"""What a client holds; arrays alone are texts that are their own targets."""
MAX_ITEMS = 100_000
"""Most items that are read from a data set without a length: it may have no end."""
OUTSIDE = 1e-4
"""How far an input may lie outside the data range, as a share of its width: rounding."""


def int_between(name: str, value: int, least: int, most: int) -> int:
    """Return `value`, also of NumPy or torch, as an int from `least` to `most` (else UsageError)."""
    number = _integer(value)
    if number is None or not least <= number <= most:
        raise UsageError(f"{name}={shown(value)} cannot be used; it must be a whole number from {least} to {most:,}.")
    return number


def _integer(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor without a value
        return None


def check_real(model: Any) -> None:
    """Refuse a network with complex parameters (UsageError): gradients and updates are real here."""
    names = [name for name, own in model.named_parameters() if own.is_complex()] if isinstance(model, Module) else []
    if names:
        fix = "keep its real and imaginary parts as real parameters (torch.view_as_complex in forward)"
        raise UsageError(f"Parameter {names[0]!r} of the model is complex; {fix}.")


def check_switches(**switches: Any) -> None:
    """Refuse a switch that is neither True nor False (UsageError)."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise UsageError(f"{name}={shown(value)} cannot be used; it must be True or False.")


def shape_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one input as a tuple (UsageError: it is no shape)."""
    ordered = isinstance(shape, Sequence | Tensor | np.ndarray) and not isinstance(shape, str | bytes)
    sides = [_integer(side) for side in shape] if ordered and getattr(shape, "ndim", 1) == 1 else []
    known = tuple(side for side in sides if side is not None and 0 < side <= 2**20)
    if not sides or len(known) < len(sides):
        raise UsageError(f"shape={shown(shape)} cannot be used; it must be that of one input, as (3, 32, 32).")
    return known


def range_of(data_range: tuple[float, float]) -> tuple[float, float]:
    """Return the least and the greatest value of an input (UsageError: they are no range)."""
    try:
        low, high = (0.0, 0.0) if isinstance(data_range, str) else map(float, data_range)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor without a value
        low = high = 0.0
    if not -1e30 < low < high < 1e30:
        raise UsageError(f"data_range={shown(data_range)} cannot be used; it must be two numbers, the smaller first.")
    return low, high


def to_dense(value: Any) -> Tensor | None:
    """Return a tensor, array, list or frame as a dense tensor without history; None if it holds no numbers."""
    try:
        if not isinstance(value, Tensor):
            listed = isinstance(value, list | tuple) and value and all(isinstance(part, Tensor) for part in value)
            value = torch.stack(list(value)) if listed else torch.from_numpy(np.array(value))
        if value.is_nested or value.is_meta:
            return None
        dense: Tensor = value if value.layout == torch.strided else value.to_dense()
        return dense.detach()
    except Exception:  # noqa: BLE001 - a user's class may raise anything in the conversion
        return None


def describe_value(value: Any) -> str:
    """Return a value in words, for messages: a tensor by its dtype and shape."""
    numbers = to_dense(value)
    if isinstance(value, Tensor) and numbers is None:
        return "a tensor without values (on the meta device, or nested)"
    if numbers is None or (numbers.dim() == 0 and not isinstance(value, Tensor)):
        return shown(value, 60)
    return f"{numbers.dtype} of shape {tuple(numbers.shape)}"


def one_hot_of(labels: ClassLabels | int, classes: int, of: str = "") -> Tensor:
    """Return labels [B], or one, as one-hot rows [B, C] float32 on the CPU.

    UsageError: they are no classes from 0 to C - 1. of: prefix of the message, whose labels they are.
    """
    numbers = to_dense(labels)
    if numbers is not None and numbers.dim() == 0:
        numbers = numbers[None]
    hint = _unfit(numbers, classes)
    if numbers is None or hint is not None:
        right = f"they must be classes from 0 to {classes - 1}"
        raise UsageError(f"{of}labels={shown(labels)} cannot be used; {right}{hint}.")
    return one_hot(numbers.long().cpu(), classes).float()


def _unfit(labels: Tensor | None, classes: int) -> str | None:
    """Return a hint on how to mend wrong labels, "" without a hint; None if nothing is wrong."""
    if labels is None:
        return ", whole numbers: put numbers in the place of names and gaps"
    if not labels.numel():
        return ", one per input"
    if labels.dim() == 2 and labels.shape[1] == classes > 1:
        return ": of one-hot rows, labels.argmax(1)"
    if labels.dim() == 2 and labels.shape[1] == 1:
        return ", without a second axis: labels[:, 0]"
    if labels.is_floating_point() and labels.dim() == 1:
        return ", of an integer type"
    if labels.dtype == torch.bool:
        return ": of booleans, labels.long()"
    if labels.dim() != 1 or labels.is_complex():
        return ""
    return None if 0 <= int(labels.min()) <= int(labels.max()) < classes else ""


def shards_of(shards: Iterable[Shard] | Any, kind: str = "shards") -> list[tuple[Any, Any]]:
    """Return inputs and labels of each client, unconverted; UsageError: they are no list of such pairs.

    A client's may be a `Dataset` of (input, class), or a `DataLoader` of batches of them: it is read once, to its end.
    """
    right = "give each client inputs and labels, as [(x, y), (x, y)]"
    one = isinstance(shards, Dataset | DataLoader)
    one = one or (isinstance(shards, tuple) and len(shards) == 2 and not any(_is_shard(part) for part in shards))
    if one:
        called = "inputs and labels" if isinstance(shards, tuple) else f"a {type(shards).__name__}"
        raise UsageError(f"The {kind} are those of one client ({called}); give a list, with one entry per client.")
    if isinstance(shards, str | bytes | Mapping | Tensor | np.ndarray) or not isinstance(shards, Iterable):
        raise UsageError(f"The {kind} are {describe_value(shards)}; {right}.")
    listed = list(shards)
    if not listed:
        raise UsageError(f"There are no {kind}; {right}.")
    return [_pair(client, shard) for client, shard in enumerate(listed)]


def texts_alone(shards: Iterable[Shard] | Any) -> Any:
    """Return what clients hold with each array of texts as a pair of itself and itself, its targets."""
    if isinstance(shards, str | bytes | Mapping | Tensor | np.ndarray) or not isinstance(shards, Iterable):
        return shards  # refused by `shards_of`
    return [(one, one) if isinstance(one, Tensor | np.ndarray) else one for one in shards]


def _is_shard(value: Any) -> bool:
    return isinstance(value, tuple | list | Dataset | DataLoader)


def _pair(client: int, shard: Any) -> tuple[Any, Any]:
    """Return a client's inputs and labels; UsageError: they are no pair, nor a set of pairs."""
    if isinstance(shard, Dataset | DataLoader) or _are_items(shard) or _is_indexed(shard):
        return _read(client, shard)
    try:
        if isinstance(shard, str | bytes | Mapping | Tensor | np.ndarray):
            raise TypeError
        x, labels = shard
    except Exception as cause:  # a user's class may raise anything when unpacked
        right = "a pair of inputs and labels, as (x, y), or a Dataset of such pairs"
        raise UsageError(f"Client {client} holds {describe_value(shard)}; give {right}.") from cause
    return x, labels


def _are_items(shard: Any) -> bool:
    """Return whether a list holds pairs of one input and its class: what list(dataset) is."""
    pairs = isinstance(shard, list) and shard and all(isinstance(item, tuple) and len(item) == 2 for item in shard)
    return bool(pairs) and all(isinstance(x, Tensor | np.ndarray) for x, _ in shard)


def _is_indexed(shard: Any) -> bool:
    """Return whether a value is indexed like a data set and is no type of Python, NumPy or torch."""
    plain = isinstance(shard, tuple | list | str | bytes | Mapping | Tensor | np.ndarray | np.generic)
    return not plain and hasattr(shard, "__getitem__") and hasattr(shard, "__len__")


def _read(client: int, source: Any) -> tuple[Tensor, Tensor]:
    """Return all of a data set or loader as two tensors; UsageError: its items are no pairs of numbers of one shape."""
    batched, items = isinstance(source, DataLoader) and source.batch_size is not None, []
    dataset = source.dataset if isinstance(source, DataLoader) else source
    sized = not isinstance(source, DataLoader) and hasattr(source, "__len__")
    try:
        for item in (source[i] for i in range(len(source))) if sized else islice(source, MAX_ITEMS + 1):
            x, y = map(to_dense, item if isinstance(item, tuple | list) else (None, None))
            if x is None or y is None:
                raise TypeError(f"it has items such as {shown(item, 60)}")
            items.append((x, y) if batched else (x[None], y[None]))
        if not sized and len(items) > MAX_ITEMS:
            raise ValueError(f"it does not end after {MAX_ITEMS:,} items")
        if not items:
            return torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        return torch.cat([x for x, _ in items]), torch.cat([y for _, y in items])
    except Exception as cause:  # a user's data set may raise anything
        right = "each item must be a pair of floats and their class, as (x, y); of pictures, transform=ToTensor()"
        message = f"Client {client} holds a {type(dataset).__name__} that cannot be read ({because(cause, 120)})"
        raise UsageError(f"{message}; {right}.") from cause


def are_texts(inputs: Any) -> bool:
    """Return whether inputs are whole numbers [N, L], as texts are."""
    x = to_dense(inputs)
    return x is not None and x.dim() == 2 and x.dtype in (torch.int32, torch.int64)


def inputs_of(client: int, inputs: Any, shape: Sequence[int] = (), texts: bool = False) -> Tensor:
    """Return a client's inputs [N, ...], dense floats (else UsageError).

    shape: of one input, if it is known. texts: whether they are token numbers [N, L].
    """
    x = to_dense(inputs)
    if texts and x is not None and are_texts(x) and len(x):
        return x.float()
    if x is not None and x.dim() and not len(x):
        raise UsageError(f"Client {client} holds no examples; leave it out, or give it one.")
    if x is None or not x.is_floating_point() or x.dim() < 2:
        raise _no_inputs(client, inputs, shape)
    return x


def _no_inputs(client: int, inputs: Any, shape: Sequence[int]) -> UsageError:
    x, sizes = to_dense(inputs), ", ".join(map(str, shape)) or "*shape"
    integers = x is not None and not x.is_floating_point() and not x.is_complex() and x.dim() > 1
    hint = "; of bytes, x.float() / 255 (of pictures, transform=ToTensor())" if integers else ""
    right = f"give finite floats [N, {sizes}] and N labels{hint}"
    return UsageError(f"Client {client} holds inputs {describe_value(inputs)}; {right}.")


def examples_of(
    client: int,
    examples: LabelledBatch,
    shape: Sequence[int],
    classes: int,
    texts: bool = False,
    next_token: bool = False,
) -> Data:
    """Return a copy of a client's examples, float32.

    texts: whether inputs are token numbers. next_token: whether they are their own targets. UsageError: they do not fit
    the network.
    """
    x, labels = inputs_of(client, examples[0], shape, texts), examples[1]
    if tuple(x.shape[1:]) != tuple(shape) or not bool(x.isfinite().all()):
        raise _no_inputs(client, x, shape)
    if next_token:
        if labels is not examples[0]:
            raise UsageError(
                f"Client {client} holds labels, and texts are their own targets; give token numbers [N, L]."
            )
        return Data(x.clone().float().cpu(), x.clone().float().cpu())
    y = one_hot_of(labels, classes, f"Client {client}: ")
    if len(y) != len(x):
        raise UsageError(f"Client {client} holds {len(x)} inputs and {len(y)} labels; give each input its label.")
    return Data(x.clone().float().cpu(), y)


def check_range(data: Mapping[Any, Data], data_range: tuple[float, float], texts: bool = False) -> None:
    """Refuse inputs outside of the data range (UsageError): attacks search within it, and would seem to fail.

    texts: whether they are token numbers, whose range is that of the network's embedding.
    """
    least, most = min(float(own.x.min()) for own in data.values()), max(float(own.x.max()) for own in data.values())
    (low, high), slack = data_range, OUTSIDE * (data_range[1] - data_range[0])
    if texts and (least < low or most > high):
        right = f"the network's embedding has those from 0 to {high:g}"
        raise UsageError(f"Token numbers go from {least:g} to {most:g}; {right}.")
    if least < low - slack or most > high + slack:
        problem = f"Inputs have values from {least:.4g} to {most:.4g}, outside of data_range=({low:g}, {high:g})"
        raise UsageError(f"{problem}; give their range, as data_range=({least:.4g}, {most:.4g}).")


def check_batch(plan: Plan, size: int) -> None:
    """Refuse a batch too small for batch norm (UsageError)."""
    if size < plan.net.fewest:
        problem = f"Model {plan.spec.model!r} has a batch norm that sees one value of an example"
        raise UsageError(f"{problem}; give batches of {plan.net.fewest} and more, or put it into eval mode.")


def plan_of_texts(plan: Plan, words: Sequence[str] | None) -> Plan:
    """Return a plan whose inputs are texts if the network takes token numbers (UsageError: words do not fit it)."""
    rows = plan.net.rows
    if words is not None and (isinstance(words, str) or len(words) != rows):
        right = f"the {rows} tokens of the network's embedding" if rows else "none, as the network takes no texts"
        raise UsageError(f"vocabulary={shown(words, 40)} cannot be used; give {right}.")
    if not rows:
        return plan
    vocabulary = Vocabulary(tuple(map(str, range(rows) if words is None else words)))
    return replace(plan, kind="text", vocabulary=vocabulary, data_range=(0.0, float(rows - 1)))


# -- Losses and their targets --

LOSS_WORDS = ("cross_entropy", "nll", "bce", "mse", "next_token")
TORCH_LOSSES: dict[Any, str] = {
    nn.CrossEntropyLoss: "cross_entropy",
    nn.NLLLoss: "nll",
    nn.BCEWithLogitsLoss: "bce",
    nn.MSELoss: "mse",
    functional.cross_entropy: "cross_entropy",
    functional.nll_loss: "nll",
    functional.binary_cross_entropy_with_logits: "bce",
    functional.mse_loss: "mse",
}
"""torch's own losses, by what they are called here: their labels can be read off a gradient, a function's cannot."""
ClassWeights = Sequence[float] | Tensor
LossFunction = Callable[[Tensor, Tensor], Tensor]
TargetKind = Literal["classes", "multi-hot", "numbers", "tokens", "any"]


@dataclass(frozen=True)
class UserLoss:
    """A loss as the user names it. targets: their kind; "any" of a function. function: of the user, else None.

    smoothing, weights: of a cross-entropy; weights [C] or None. is_sum: whether it is a sum over the batch, as torch's
    objects say it (`reduction="sum"`); the bench's own is a mean.
    """

    word: str
    targets: TargetKind
    function: LossFunction | None = None
    smoothing: float = 0.0
    weights: Tensor | None = None
    is_sum: bool = False

    def sum_over_mean(self, examples: int, labels: Tensor | None, classes: int) -> float:
        """Return by what this loss of a batch differs from its mean; labels: one-hot [B, C], None if unknown.

        torch means squared and binary losses over outputs too, and weighted ones by the sum of their labels' weights.
        1 where that is unknown.
        """
        if not self.is_sum:
            return 1.0
        if self.weights is not None:
            return 1.0 if labels is None else float((labels.double() @ self.weights).sum())
        return float(examples if self.targets == "classes" else examples * classes)

    @property
    def any_output(self) -> bool:
        """Whether one output, and probabilities, will do."""
        return self.targets not in ("classes", "tokens")

    def for_plan(self, network: HeldNetwork, indices: bool = False) -> LossName | OwnLoss:
        """Return the loss of the network's outputs, for a plan.

        indices: whether a function takes classes [B] int64 as labels, else rows of numbers. UsageError: the network has
        other outputs than the loss takes, or a function fails on them.
        """
        classes = network.spec.classes
        if self.targets == "tokens":
            return next_token_of_batches()
        if self.word == "nll" and not network.log_softmax:
            right = "let it end in log_softmax, or take loss='cross_entropy'"
            raise UsageError(f"loss='nll' takes log-probabilities, and the network answers by other numbers; {right}.")
        if self.weights is not None and len(self.weights) != classes:
            raise UsageError(f"class_weights has {len(self.weights)} numbers; the network has {classes} classes.")
        if self.targets == "classes":
            plain = not self.smoothing and self.weights is None
            return "cross_entropy" if plain else softened_cross_entropy(self.smoothing, self.weights)
        known = {"bce": bce, "mse": mean_square_error}.get(self.word)
        function = known or _adapted(self.function, network.flat, indices, torch.zeros(2, classes))
        after = _behind_log_softmax(function) if network.log_softmax else function
        return OwnLoss(self.word, after, classes=indices)


def mean_square_error(output: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared distance [B] of output [B, C] and targets y [B, C], as `torch.nn.MSELoss`."""
    return (output - y).square().mean(-1)


def _behind_log_softmax(function: LossFunction) -> LossFunction:
    return lambda logits, y: function(logits.log_softmax(-1), y)


def _adapted(function: LossFunction | None, flat: bool, indices: bool, outputs: Tensor) -> LossFunction:
    """Return a user's function as one of outputs [B, C] and targets [B, C]; UsageError: it fails on such `outputs`.

    One that takes float32 alone (class weights in it, for instance) gets float32.
    """
    assert function is not None  # a loss without a word is a function

    def losses(z: Tensor, y: Tensor) -> Tensor:
        labels = y.argmax(-1) if indices else y[:, 0] if flat else y
        return function(z[:, 0] if flat else z, labels)

    def singles(z: Tensor, y: Tensor) -> Tensor:
        return losses(z.float(), y.float()).to(z.dtype)

    z, y = outputs + 0.1 * torch.arange(outputs.shape[1]), torch.zeros_like(outputs)
    y[:, 0] = 1
    problem = _problem_of(losses, z, y)
    if problem:
        raise UsageError(f"loss= {problem}; it must take outputs [B, C] and labels, and return losses [B] or a mean.")
    return singles if _problem_of(losses, z.double(), y.double()) else losses


def _problem_of(losses: LossFunction, z: Tensor, y: Tensor) -> str:
    """Return why a loss cannot be used, a clause; "" if it can."""
    try:
        answer = losses(z, y)
        if not isinstance(answer, Tensor) or answer.shape not in ((), (len(z),)):
            return f"returned {describe_value(answer)} for {len(z)} examples"
        slope = torch.func.grad(lambda a: losses(a, y).sum())
        torch.func.grad(lambda a: slope(a).square().sum())(z)
        return "" if bool(slope(z).isfinite().all()) and bool(slope(z).any()) else "has no gradient by the outputs"
    except Exception as cause:  # noqa: BLE001 - a user's function may raise anything
        return f"fails, or cannot be differentiated twice ({because(cause, 160)})"


def user_loss(loss: str | LossFunction, label_smoothing: float, class_weights: ClassWeights | None) -> UserLoss:
    """Return the loss that arguments name; UsageError: there is none such, or they do not go together."""
    if isinstance(loss, nn.CrossEntropyLoss) and not label_smoothing:
        label_smoothing = loss.label_smoothing
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and class_weights is None:
        class_weights = loss.weight
    plain = not isinstance(loss, nn.BCEWithLogitsLoss) or (loss.weight is None and loss.pos_weight is None)
    known = (
        TORCH_LOSSES.get(type(loss) if isinstance(loss, Module) else loss)
        if plain and isinstance(loss, Hashable)
        else None
    )
    word = loss if isinstance(loss, str) else known or "a function"
    if not callable(loss) and word not in LOSS_WORDS:
        right = f"{', '.join(map(repr, LOSS_WORDS))}, or a function of outputs and labels"
        raise UsageError(f"loss={shown(loss)} cannot be used; it must be {right}.")
    smoothing, weights = _smoothing(label_smoothing), None if class_weights is None else _weights(class_weights)
    if word == "a function":
        _refuse_softening(smoothing, weights, "put them into the function")
        return UserLoss(word, "any", function=loss)  # type: ignore[arg-type]  # no str, so it is callable
    if word in ("bce", "mse", "next_token"):
        _refuse_softening(smoothing, weights, f"loss={word!r} has none; give a function of outputs and labels instead")
    kinds: dict[str, TargetKind] = {"bce": "multi-hot", "mse": "numbers", "next_token": "tokens"}
    is_sum = getattr(loss, "reduction", "mean") == "sum"
    return UserLoss(word, kinds.get(word, "classes"), None, smoothing, weights, is_sum)


def _refuse_softening(smoothing: float, weights: Tensor | None, right: str) -> None:
    if smoothing or weights is not None:
        raise UsageError(f"label_smoothing and class_weights are of cross-entropy; {right}.")


def _smoothing(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise UsageError(f"label_smoothing={shown(value)} cannot be used; it must be a number from 0 to below 1.")
    return float(value)


def _weights(value: ClassWeights) -> Tensor:
    numbers = to_dense(value)
    if numbers is None or numbers.dim() != 1 or numbers.is_complex() or not bool((numbers > 0).all()):
        raise UsageError(f"class_weights={shown(value)} cannot be used; give one positive number a class.")
    return numbers.double().cpu()


def label_rows(labels: Any, kind: TargetKind, classes: int) -> Tensor:
    """Return labels as rows [B, C] float32 of numbers, of one output also from [B]; of one example also from [C].

    UsageError: they have another shape or, under "multi-hot", values outside of 0 to 1.
    """
    numbers = to_dense(labels)
    right = f"one row of {classes} numbers an example" if classes > 1 else "one number an example"
    right += " from 0 to 1" if kind == "multi-hot" else ""
    if numbers is None or numbers.is_complex() or not numbers.numel() or not bool(numbers.float().isfinite().all()):
        raise UsageError(f"labels={shown(labels)} cannot be used; they must be {right}.")
    rows = numbers.float().cpu()
    rows = rows.reshape(-1, classes) if rows.dim() < 2 and (classes == 1 or rows.numel() == classes) else rows
    if rows.dim() != 2 or rows.shape[1] != classes:
        raise UsageError(f"labels have shape {tuple(numbers.shape)}; they must be {right}, [B, {classes}].")
    if kind == "multi-hot" and not 0 <= float(rows.min()) <= float(rows.max()) <= 1:
        raise UsageError(f"labels={shown(labels)} cannot be used; they must be {right}.")
    return rows
