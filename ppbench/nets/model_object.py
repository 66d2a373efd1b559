"""Networks given as objects: an `nn.Module` with its weights, each layer in its current mode.

`nets.user_model` converts a copy to a `Classifier`, each layer in its mode; the module itself is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ppbench.base.autodiff import gradient
from ppbench.base.errors import UsageError, because, shown
from ppbench.base.import_guard import importable
from ppbench.base.tensor_files import named_tensors
from ppbench.nets import modes, user_model
from ppbench.nets.classifier import Classifier, OutputName, Unfit, UserNetwork, named_part, with_output
from ppbench.nets.net import HeldSpec, Net, NetSpec, trainable


@dataclass(frozen=True)
class HeldNetwork:
    """A user's network. names: the user's parameter names by ours, trained ones, in the order of `parameters()`.

    log_softmax: whether the user's network answers by log-probabilities; `spec.net` answers by what comes before. flat:
    whether it answers by one number an input, [B]; `spec.net` answers by [B, 1].
    """

    spec: HeldSpec
    names: Mapping[str, str]
    log_softmax: bool = False
    flat: bool = False


def held_network(
    module: nn.Module,
    shape: tuple[int, ...],
    data_range: tuple[float, float] = (0.0, 1.0),
    when: str = " before the gradient is taken",
    output: OutputName | None = None,
    any_output: bool = False,
    tracked: bool = False,
    texts: bool = False,
    every_token: bool = False,
) -> HeldNetwork:
    """Return a copy of a user's network, float32 and on the CPU, for inputs of `shape` (without a batch).

    data_range: least and greatest value of an input. when: for errors, when to switch to eval mode. output: the part of
    its answer that the loss takes; None if that is the answer. any_output: whether one output, and probabilities, do.
    tracked: whether running statistics of batch norms in training mode are entries of its weights. texts: whether
    inputs may be token numbers [L] for an embedding of it, or vectors. every_token: whether it answers each of them.
    UsageError: it is no `nn.Module`, cannot be copied or run on such inputs, draws, or `nets.user_model` refuses it.
    """
    module = _with_weights(module)
    name, (whole, table) = type(module).__name__, _for_texts(module, shape if texts else ())
    with torch.random.fork_rng(devices=[]):
        try:
            copy, x = importable(lambda: user_model.runnable_copy(whole, shape, data_range, tracked))
            flat = any_output and _is_flat(copy, x, output)
            copy = copy if output is None and not flat else with_output(copy, output, flat)
            answer = modes.run_module(copy, x)[0]
            classifier = _checked(user_model.as_classifier(name, copy, x, when, any_output), every_token)
        except Unfit as cause:
            raise UsageError(f"Model {name!r} cannot be used for inputs {shape}: {cause}.") from cause
        except Exception as cause:  # whatever somebody's forward pass raises
            if isinstance(cause, UsageError):
                raise
            raise UsageError(_failed_pass(module, shape, data_range, cause)) from cause
    classifier.embedding = f"features.{table}.weight" if table else classifier.embedding
    start, net = trainable(classifier), Net(NetSpec(name, shape, len(classifier.head.weight)), classifier)
    net.spec = spec = HeldSpec(name, shape, net.spec.classes, net=net, start=start)
    names = _names_of(module, classifier, net)
    sums = answer.float().exp().sum(-1) if isinstance(answer, Tensor) and spec.classes > 1 else torch.zeros(1)
    return HeldNetwork(spec, names, torch.allclose(sums, torch.ones_like(sums), atol=1e-4), flat)


def _checked(classifier: Classifier, every_token: bool) -> Classifier:
    """Return a classifier that answers every token of a text, or a text as a whole (Unfit: it does the other)."""
    if classifier.every_token and not every_token:
        raise Unfit("it answers every token of a text, which `ppbench.invert` takes under loss='next_token'")
    if every_token and not classifier.every_token:
        raise Unfit("under loss='next_token' it must answer every token of a text, by logits [B, L, V]")
    return classifier


def _names_of(module: nn.Module, classifier: Classifier, net: Net) -> dict[str, str]:
    """Return the names of a module's trained parameters and statistics by those of its `Net`, in the module's order."""
    kept = isinstance(module, Classifier) or not isinstance(classifier, UserNetwork)  # the names are the module's
    names_here = {n if kept else net.own_name(n): n for n in net.names}
    trained = [n for n, value in module.named_parameters() if value.requires_grad]
    return {names_here[n]: n for n in (*trained, *dict(module.named_buffers())) if n in names_here}


def _for_texts(module: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, str]:
    """Return a copy of a module that takes texts [L], and the name of its embedding; else the module itself, and ""."""
    table = user_model.table_of(module, shape)
    return (user_model.taking_texts(modes.copied(module), table), table) if table else (module, "")


PREFIXES = ("module.", "_orig_mod.")
"""What torch's wrappers (parallel, compiled) put before the names of weights."""


def module_with_weights(
    name: str, factory: Callable[..., Any], weights: Path, shape: tuple[int, ...], classes: int
) -> nn.Module:
    """Return the network that a user's function makes, with the weights of a file; name: of the function, for errors.

    factory: called with those of classes, num_classes, shape, in_channels and the like that it accepts. weights: a
    .safetensors file or a state dict of torch, read without running code. UsageError: they do not fit.
    """
    made = importable(lambda: factory(**user_model.factory_arguments(factory, shape, classes)))
    if not isinstance(made, nn.Module):
        raise UsageError(f"The model {shown(name)} gave {shown(made, 60)}; it must give an nn.Module.")
    state = _state_of(weights)
    expected = made.state_dict()
    if missing := [key for key in expected if key not in state]:
        more = [key for key in state if key not in expected]
        beside = f", and has {more[0]!r} instead" if more else ""
        raise UsageError(f"{weights} lacks the tensor {missing[0]!r} of the model {shown(name)}{beside}.")
    if more := [key for key in state if key not in expected]:
        raise UsageError(f"{weights} has the tensor {more[0]!r}, which the model {shown(name)} does not have.")
    for key, value in expected.items():
        if value.shape != state[key].shape:
            shapes = f"{tuple(state[key].shape)} in {weights} and {tuple(value.shape)} in the model {shown(name)}"
            raise UsageError(f"The tensor {key!r} is {shapes}; give the weights of this network.")
    made.load_state_dict(dict(state))
    return made


def _state_of(weights: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by the names that a network without wrappers has."""
    state = named_tensors(weights)
    inner = state.get("state_dict", state.get("model_state_dict", state))
    tensors = {key: value for key, value in inner.items() if isinstance(value, Tensor)} if inner else {}
    if not tensors or len(tensors) < len(inner):
        raise UsageError(f"{weights} holds other things than tensors by name; save model.state_dict() alone.")
    for prefix in PREFIXES:
        if all(key.startswith(prefix) for key in tensors):
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return tensors


def _is_flat(module: nn.Module, x: Tensor, output: OutputName | None) -> bool:
    """Return whether what a module answers to x [B, *shape], or that part of it, is [B]."""
    answer, _ = modes.run_module(module, x)
    with suppress(Unfit):
        answer = answer if output is None else named_part(answer, output)
    return isinstance(answer, Tensor) and answer.dim() == 1


def _with_weights(module: nn.Module) -> nn.Module:
    """Return a user's module without wrappers; UsageError: no `nn.Module`, without values, or TorchScript."""
    if not isinstance(module, nn.Module):
        right = "a torch.nn.Module that answers a batch of inputs by logits"
        raise UsageError(f"The model is {shown(module, 60)}; it must be {right}.")
    module = unwrapped(module)
    name = type(module).__name__
    if any(value.is_meta for value in (*module.parameters(), *module.buffers())):
        raise UsageError(f"Model {name!r} lies on the meta device, without values; give one that has weights.")
    if isinstance(module, torch.jit.ScriptModule):
        raise UsageError(f"Model {name!r} is TorchScript; give the nn.Module that it was made of, with its weights.")
    return modes.with_single_names(module)


def _failed_pass(module: nn.Module, shape: tuple[int, ...], data_range: tuple[float, float], cause: Exception) -> str:
    """Return the sentence on a network whose pass on inputs of `shape` raised `cause`: what it takes instead."""
    name = type(module).__name__
    if taken := user_model.batch_it_runs_on(module, shape, data_range):
        right = "let its forward pass take the batch size, precision and device of its input"
        reason = f"it runs on {taken}, but not as attacks need it ({because(cause, 200)}); {right}"
        return f"Model {name!r} cannot be used for inputs {shape}: {reason}."
    if embedding := _embedding(module, str(cause)):
        words = f"Model {name!r} has an embedding of tokens ({embedding}), which takes whole numbers"
        return f"{words}; inputs are floats here. Texts are whole numbers [N, tokens]."
    reason = f"{because(cause, 300)}; shape must be that of one input, without the batch"
    return f"Model {name!r} cannot be run on inputs of shape {shape}: {reason}."


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the network inside torch's wrappers (parallel, compiled): the same function of the same parameters."""
    while True:
        compiled = getattr(module, "_orig_mod", None)  # by name: to import torch's compiler takes seconds
        if isinstance(compiled, nn.Module):
            module = compiled
        elif isinstance(module, nn.DataParallel | DistributedDataParallel):
            module = module.module
        else:
            return module


def _embedding(module: nn.Module, message: str) -> str:
    """Return the name of an embedding that got floats, judged by torch's message; "" if none."""
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return names[0] if names and "argument #1 'indices'" in message else ""


@contextmanager
def explaining_failures(network: HeldNetwork) -> Iterator[None]:
    """Turn an exception in the block into a UsageError if the network lacks what attacks need."""
    try:
        yield
    except UsageError:
        raise
    except Exception as cause:
        if fault := _fault(network):
            raise UsageError(f"Model {network.spec.model!r} cannot be attacked so: {fault}.") from cause
        raise


def _fault(network: HeldNetwork) -> str:
    """Return a clause about what attacks need and a network lacks, a second derivative or vmap; "" if nothing."""
    net, params = network.spec.net, {name: value.double() for name, value in network.spec.start.items()}
    x = torch.rand(1, net.most or 2, *net.spec.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(len(x[0]), dtype=torch.int64)

    def length(x: Tensor) -> Tensor:
        slopes = gradient(lambda p: nn.functional.cross_entropy(net(p, x), y), params)
        return torch.stack([value.square().sum() for value in slopes.values()]).sum()

    try:
        with torch.enable_grad():
            one = x[0].requires_grad_()
            torch.autograd.grad(length(one), one, allow_unused=True)
    except Exception as cause:  # noqa: BLE001  # whatever somebody's forward pass raises
        return f"its gradient has no derivative by the input ({because(cause, 200)})"
    try:
        torch.func.vmap(torch.func.grad(length))(x)
    except Exception as cause:  # noqa: BLE001
        return f"torch.func.vmap does not take it ({because(cause, 200)}); take an attack that does without, as 'dlg'"
    return ""
