"""Numbers and federations for tests of protocols: random tensors, weights in float64, gradients, and how far apart."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppbench.base.autodiff import gradient
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params
from ppbench.defenses.baffle import Baffle
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.view import Transcript
from ppbench.federation.wire import SERVER
from ppbench.nets.net import NetSpec, initial, net_spec

central_bare = partial(Baffle, masks="none", scheme="central")
"""BAFFLE's central differences in the clear: what each client computes, without what the default hides."""


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def weights(spec: NetSpec, seed: int = 1) -> Params:
    """Return initial weights in float64."""
    return {name: value.double() for name, value in initial(spec, seed).items()}


def moved(params: Params, size: float = 0.05, zeros: bool = False) -> Params:
    """Return weights in float64 moved by noise of `size`: none is 0 or 1 by construction; `zeros`: these alone."""
    g = torch.Generator().manual_seed(0)
    noise = {n: size * torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in params.items()}
    return {n: p.double() + noise[n] * (p == 0 if zeros else 1) for n, p in params.items()}


def examples(spec: NetSpec, count: int, seed: int = 0) -> Data:
    """Return examples of noise in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, *spec.shape, generator=generator)
    return Data(x, torch.eye(spec.classes)[torch.randint(spec.classes, (count,), generator=generator)])


def true_gradient(plan: Plan, params: Params, data: Data) -> Params:
    """Return the gradient of the mean loss on `data` in float64."""
    ones, params = torch.ones(len(data.x), dtype=torch.float64), {n: v.double() for n, v in params.items()}
    with torch.no_grad():
        return gradient(lambda p: plan.objective(p, data.x.double(), data.y.double(), ones), params)


def flat(params: Params) -> Tensor:
    return torch.cat([value.flatten() for value in params.values()])


def relative(result: Params, truth: Params) -> float:
    """Return the relative L2 error of all values together."""
    assert list(result) == list(truth)
    gap = sum(float((result[n].double() - v).detach().square().sum()) for n, v in truth.items())
    return math.sqrt(gap / sum(float(v.detach().square().sum()) for v in truth.values()))


def started(defense: Defense, plan: Plan, shards: Mapping[int, Data], seed: int = 0, **options: Any) -> Federation:
    """Return a started federation, in the dtype of its data."""
    run = Federation(defense, plan, dict(shards), Seeds(seed), **options)
    run.start({name: value.to(shards[0].x.dtype) for name, value in initial(plan.spec, 1).items()})
    return run


UNEQUAL = (60, 30, 90, 40, 75, 50, 45, 55, 35, 65)


def unequal(deal: Callable[..., dict[int, Data]], defense: Defense, clients: int = 5, **options: Any) -> Federation:
    """Return a started federation of clients with the first of `UNEQUAL` numbers of digits, on a small network."""
    local = options.pop("local", None) or Local(batch=16, opt=Opt("sgd", 0.05, 0.9))
    plan = Plan(net_spec("mlp", (1, 8, 8), 10, {"hidden": "6"}), clients, local)
    return started(defense, plan, deal(UNEQUAL[:clients]), **options)


def trained(transcript: Transcript) -> dict[int, Params]:
    """Return every client's Q of FedPC, which it keeps until it is told what to send."""
    return {s.party: s.state.trained for s in transcript.states if s.party != SERVER and s.step == 1}


def answers(transcript: Transcript, kind: type) -> dict[int, Any]:
    return {e.sender: e.message for e in transcript.mail if isinstance(e.message, kind)}
