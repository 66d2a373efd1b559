"""Batches of vision transformers, token by token: what is read exactly, and what is not claimed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from observations import batch_gradient, psnr, seeded, uploads
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.closed_form import ClosedForm
from ppbench.attacks.reconstruction.patch_tokens import first_block
from ppbench.base.tree import Params
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.image import match
from ppbench.nets.net import initial, net_spec

sys.path.insert(0, str(Path(__file__).parent))


class Blocks(nn.Module):
    """A transformer of two blocks, with a class token, on patches of 4 x 4 pixels of digits.

    positions: "learned", "fixed", or "none". The blocks normalize first if `first`.
    """

    def __init__(self, width: int = 48, positions: str = "learned", first: bool = True) -> None:
        super().__init__()
        self.project, self.token = nn.Conv2d(1, width, 4, 4), nn.Parameter(0.1 * torch.randn(1, 1, width))
        places = {"none": 0.0}.get(positions, 0.3) * torch.randn(1, 5, width)
        if positions == "learned":
            self.places = nn.Parameter(places)
        else:
            self.register_buffer("places", places)
        layer = nn.TransformerEncoderLayer(width, 4, 3 * width, 0.0, nn.GELU(), batch_first=True, norm_first=first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.project(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], 1) + self.places
        out: Tensor = self.head(self.norm(self.layers(rows))[:, 0])
        return out


def plan_of(batch: int, **options: str | int | bool) -> Plan:
    return Plan(net_spec("test_patch_tokens:Blocks", (1, 8, 8), 10, options), 1, Local("gradient", batch=batch))


def sent(places: list[int], **options: str | int | bool) -> tuple[Plan, Params, Params, Tensor, Tensor]:
    """Return plan, weights and the gradient of some digits at them, with images and labels."""
    plan, data = plan_of(len(places), **options), load_digits()
    x, y = torch.tensor(data.images[places] / 16)[:, None].float(), torch.tensor(data.target[places])
    params = initial(plan.spec, 0)
    params = {n: v + 0.05 * torch.randn(v.shape, generator=seeded(1)) for n, v in params.items()}  # biases are not 0
    return plan, params, batch_gradient(plan, params, x, one_hot(y, 10).float()), x, y


def guessed(plan: Plan, params: Params, update: Params) -> Guess:
    challenge = Challenge((Slot(0, 0),), plan.local.batch)
    (guess,) = ClosedForm().run(uploads(plan, params, [update]), [challenge], seeded())
    return guess


def least(guess: Guess, truth: Tensor) -> float:
    """Return the PSNR of the worst image, matched."""
    order = match(guess.x, truth)
    return min(psnr(guess.x[i : i + 1], truth[j : j + 1]) for j, i in enumerate(order))


@pytest.mark.parametrize("positions", ["learned", "fixed"])
def test_a_batch_is_read_exactly_with_its_labels(positions: str) -> None:
    plan, params, update, x, y = sent([7, 21, 40], positions=positions)
    guess = guessed(plan, params, update)
    assert guess.is_exact, guess.layers
    assert least(guess, x) > 55 and sorted(guess.y.tolist()) == sorted(y.tolist())
    assert [layer.unknowns for layer in guess.layers] == [3 * 64]


def test_one_image_needs_no_learned_positions() -> None:
    plan, params, update, x, y = sent([12], positions="fixed")
    guess = guessed(plan, params, update)
    assert guess.is_exact and psnr(guess.x, x) > 55 and guess.y.tolist() == y.tolist()


def test_one_gradient_gives_one_batch() -> None:
    plan, params, update, _, _ = sent([0, 1])
    one, other = (guessed(plan, params, update) for _ in range(2))
    assert one.is_exact and torch.equal(one.x, other.x) and one.layers == other.layers


# -- what it does not claim --
def test_of_noise_it_claims_nothing() -> None:
    plan, params, update, _, _ = sent([7, 21])
    for share in (1e-4, 1e-2, 1.0):
        size = {n: share * v.square().mean().sqrt() for n, v in update.items()}
        noisy = {n: v + size[n] * torch.randn(v.shape, generator=seeded(1)) for n, v in update.items()}
        assert not guessed(plan, params, noisy).is_exact
    noise = {n: torch.randn(v.shape, generator=seeded(2)) for n, v in update.items()}
    assert not guessed(plan, params, noise).is_exact


def test_noise_elsewhere_is_seen_by_the_whole_gradient() -> None:
    plan, params, update, x, _ = sent([7, 21])
    name = next(n for n in reversed(update) if n.endswith("linear1.weight"))
    false = update | {name: torch.randn(update[name].shape, generator=seeded(1))}
    guess = guessed(plan, params, false)
    assert least(guess, x) > 55 and not guess.is_exact and guess.layers[-1].residual > 0.1


@pytest.mark.parametrize("case", [{"positions": "none"}, {"width": 20}, {"first": False}])
def test_what_is_not_determined_is_not_read(case: dict[str, str | int | bool]) -> None:
    """Without places patches have no order; a narrow stream holds no rank; other blocks are not read."""
    plan, params, update, _, _ = sent([7, 21], **case)
    guess = guessed(plan, params, update)
    assert not guess.layers and guess.evaluations == 1


def test_equal_images_are_not_told_apart() -> None:
    plan, params, update, _, _ = sent([7, 7])
    assert not guessed(plan, params, update).is_exact


def test_only_the_first_block_is_read() -> None:
    plan, params, *_ = sent([7])
    name = next(n for n in params if n.endswith("project.weight"))
    block = first_block(plan, params, name, (4, 4))
    assert block is not None and (block.first, block.count, block.heads) == (1, 4, 4)
    assert "layers.0" in block.names["up"] and block.base.shape == (5, 48)
