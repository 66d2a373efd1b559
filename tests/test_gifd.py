"""Search through a generator: projections, stages, budgets, and what comes out of an undefended gradient of digits."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from observations import ask, psnr, seeded, updates, uploads
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.attacks.reconstruction.generator import (
    Decoder,
    GeneratorWeights,
    Maps,
    architecture,
    count_overlap,
    initial_weights,
    project_l1,
    read_generator,
    write_generator,
)
from ppbench.attacks.reconstruction.gifd import GGL, GIAS, GIFD, Training, trained_generator
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import simulation
from ppbench.federation.plan import Data, Plan
from ppbench.federation.view import View
from ppbench.nets.net import initial as weights
from ppbench.nets.net import net_spec
from ppbench.task.user_data import open_dataset

STEPS = 150
SMALL = {"widths": "8,8", "pool": "avg"}


@pytest.fixture(scope="module")
def digits() -> Data:
    return open_dataset("digits", seed=0).train.take(torch.arange(260))


@pytest.fixture(scope="module")
def public(digits: Data) -> Data:
    return Data(digits.x[:240].clone(), digits.y[:240].clone())


@pytest.fixture(scope="module")
def path(public: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a trained generator."""
    folder = tmp_path_factory.mktemp("generators")
    write_generator(
        trained_generator(public.x, (0.0, 1.0), Training(steps=500), folder=folder), folder / "digits.safetensors"
    )
    return folder / "digits.safetensors"


def seen(x: Tensor, y: Tensor, public: Data | None = None) -> View:
    """Return a server's view of a gradient for each batch of x [V, N, *shape], y [V, N, C]."""
    plan = Plan(net_spec("cnn", tuple(x.shape[2:]), 10, SMALL), clients=1)
    params = weights(plan.spec, seed=0)
    observed = updates(simulation(plan, params), x, y)
    return uploads(plan, params, observed, public)


def victims(digits: Data, count: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    rows = torch.arange(240, 240 + count * batch)
    return digits.x[rows].unflatten(0, (count, batch)), digits.y[rows].unflatten(0, (count, batch))


def run(attack: GIFD, view: View, count: int, batch: int = 1) -> list[Guess]:
    return attack.run(view, ask(count, batch), seeded())


def nearest_in_ball(z: Tensor, radius: float) -> Tensor:
    """Return the nearest point of an l1 ball by bisection of the threshold: slow, and another way."""
    if float(z.abs().sum()) <= radius:
        return z
    low, high = 0.0, float(z.abs().max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if float((z.abs() - middle).clamp(min=0).sum()) > radius else (low, middle)
    return z.sign() * (z.abs() - high).clamp(min=0)


@settings(max_examples=50)
@given(
    rows=st.lists(st.lists(st.floats(-100, 100), min_size=5, max_size=5), min_size=1, max_size=4),
    radii=st.lists(st.floats(0, 300), min_size=4, max_size=4),
)
def test_projection_finds_the_nearest_point_of_the_l1_ball(rows, radii):
    z, radius = torch.tensor(rows, dtype=torch.float64), torch.tensor(radii[: len(rows)], dtype=torch.float64)
    solution = project_l1(z, radius)
    for mine, row, limit in zip(solution, z, radius.tolist(), strict=True):
        assert torch.allclose(mine, nearest_in_ball(row, limit), atol=1e-9)
        assert float(mine.abs().sum()) <= limit + 1e-9


def test_projection_in_float32_stays_in_balls_of_many_numbers():
    z = torch.randn(6, 8192, generator=seeded(0))
    radius = torch.tensor([0.0, 1.0, 100.0, 1000.0, 6000.0, 1e6])
    solution = project_l1(z, radius)
    assert bool((solution.abs().sum(1) <= radius * (1 + 1e-4) + 1e-6).all())
    assert torch.equal(solution[5], z[5]) and not bool(solution[0].any())


def space(stage: int, rho: float, rows: int = 2, count: int = 3) -> Maps:
    g = seeded(1)
    plan = architecture((1, 12, 8))
    decoder = Decoder(plan, initial_weights(plan, g))
    return Maps(decoder, stage, count, torch.rand(rows, count, math.prod(plan.size(stage)), generator=g), rho)


@pytest.mark.parametrize("stage", [0, 1])
def test_slopes_come_back_through_the_generator_as_autograd_has_them(stage):
    maps, g = space(stage, 0.5), seeded(2)
    z = torch.randn(2, maps.size, generator=g)
    images, pull = maps.images(z, torch.arange(2))
    assert images.shape == (2, 3, 1, 12, 8)
    slope = torch.randn(images.shape, generator=g)
    _, back = torch.func.vjp(lambda z: maps.decoder.decode(maps.maps(z), stage).view(2, 3, 1, 12, 8), z)
    assert torch.allclose(pull(slope), back(slope)[0], atol=1e-6)


def test_maps_stay_in_the_ball_of_their_own_image_and_latents_are_free():
    maps, index = space(1, 0.25, rows=3), torch.tensor([2, 0])
    z = maps.center[index].flatten(1) + 5.0
    moved = (maps.project(z, index).view(2, 3, -1) - maps.center[index]).abs().sum(2)
    assert torch.allclose(moved, 0.25 * maps.center[index].abs().sum(2), rtol=1e-4)
    assert torch.equal(space(0, 0.25).project(z, index), z)


def test_every_row_has_weights_of_its_own():
    maps, g = space(0, 0.0), seeded(3)
    apart = GeneratorWeights(maps.decoder, torch.randn(2, 3, maps.decoder.plan.latent, generator=g))
    z, index = apart.start(), torch.arange(2)
    images, _ = apart.images(z, index)
    assert torch.allclose(images.flatten(0, 1), maps.decoder.decode(apart.latents.flatten(0, 1)), atol=1e-6)
    before = {n: v.clone() for n, v in maps.decoder.params.items()}
    z[1] += 0.1 * torch.randn(apart.size, generator=g)
    changed, pull = apart.images(z, index)
    assert torch.allclose(changed[0], images[0], atol=1e-6) and not torch.allclose(changed[1], images[1], atol=1e-3)
    slope = torch.zeros_like(changed)
    slope[1] = 1
    assert not bool(pull(slope)[0].any()) and bool(pull(slope)[1].any())
    assert all(torch.equal(before[n], v) for n, v in maps.decoder.params.items())


@pytest.mark.nightly
@pytest.mark.parametrize("attack", [GIFD().variants()[1], GGL(), GIAS()])
def test_a_planted_leak_comes_out_far_better_than_a_random_or_a_mean_image(attack, digits, public, path):
    """Over ten seeds by 2.1 dB and more on the mean of six, and the best of them by 5.5 and more."""
    x, y = victims(digits, 6)
    guesses = run(replace(attack, generator=str(path), budget=STEPS), seen(x, y), 6)
    noise, mean, few = torch.rand(x.shape, generator=seeded()), public.x.mean(0), public.x[:6].mean(0)
    mine = sorted(psnr(guess.x, truth) for guess, truth in zip(guesses, x, strict=True))
    blind = sorted(max(psnr(image, truth) for image in (n, mean, few)) for n, truth in zip(noise, x, strict=True))
    assert sum(mine) > sum(blind) + 6 and mine[-1] > blind[-1] + 3
    assert all(guess.y.tolist() == label.argmax(-1).tolist() for guess, label in zip(guesses, y, strict=True))


def test_the_choice_among_starts_and_stages_is_by_the_matching_loss_alone(digits, path):
    """Where the smallest mismatch is not that of the last stage too: a pixel stage of huge steps."""
    x, y = victims(digits, 3)
    view = seen(x, y)
    attack = GIFD(generator=str(path), budget=48, tries=2, lr=30.0, pixels=0.3)
    for guess, evidence in zip(run(attack, view, 3), attack.evidence(view), strict=True):
        assert len(guess.others) == 2 * 3 - 1

        def mismatch(image: Tensor, guess: Guess = guess, evidence=evidence) -> float:
            label = torch.nn.functional.one_hot(guess.y, 10).float()
            compared = attack.matched(evidence)
            return float(compared.discrepancy(compared.simulate(image[None], label[None])).detach())

        assert math.isclose(mismatch(guess.x), guess.confidence, rel_tol=1e-3, abs_tol=1e-6)
        assert all(mismatch(other) >= guess.confidence - 1e-5 for other in guess.others)


@pytest.mark.parametrize("method", ["gifd", "ggl", "gias"])
@pytest.mark.parametrize(("budget", "tries"), [(1, 1), (2, 4), (7, 1), (23, 2)])
def test_the_budget_is_kept_over_starts_and_stages(method, budget, tries, digits, path):
    x, y = victims(digits, 2)
    for guess in run(GIFD(generator=str(path), method=method, budget=budget, tries=tries), seen(x, y), 2):
        assert budget - tries < guess.evaluations <= budget
        spent = [evaluations for evaluations, _ in guess.path]
        assert spent == sorted(spent) and spent[-1] <= guess.evaluations
        assert torch.equal(guess.path[-1][1], guess.x)


def test_the_generator_comes_from_the_views_public_examples(digits, public, tmp_path, monkeypatch):
    monkeypatch.setenv("PPBENCH_CACHE", str(tmp_path))
    x, y = victims(digits, 1)
    attack, view = GIFD(budget=5, steps=3), seen(x, y, public)
    run(attack, view, 1)
    assert len(list((tmp_path / "generators").glob("*.safetensors"))) == 1
    assert count_overlap(attack.prior(view), public.x) == 216
    attack.check_held({0: public.x})  # trained on the view's examples, which the harness set apart itself


def test_without_public_examples_and_file_the_sentence_says_what_to_do(digits):
    x, y = victims(digits, 1)
    with pytest.raises(UsageError, match=r"no public examples to train one on; use --public 0\.5, or gifd\.generator"):
        run(GIFD(), seen(x, y), 1)
    with pytest.raises(UsageError, match=r"ggl\.generator=PATH"):
        run(GGL(), seen(x, y), 1)


def test_a_file_for_other_images_or_of_the_clients_images_is_refused(digits, public, path, tmp_path):
    x, y = victims(digits, 1)
    with pytest.raises(UsageError, match=r"makes images of shape \(1, 8, 8\), and the network takes \(1, 12, 12\)"):
        run(GIFD(generator=str(path)), seen(torch.rand(1, 1, 1, 12, 12), y), 1)
    made, other = read_generator(path), tmp_path / "wide.safetensors"
    decoder = replace(made.decoder, high=2.0)
    write_generator(replace(made, decoder=decoder, about=replace(made.about, data_range=(0.0, 2.0))), other)
    with pytest.raises(UsageError, match=r"makes pixels in \[0, 2\], and the data lie in \[0, 1\]"):
        run(GIFD(generator=str(other)), seen(x, y), 1)
    GIFD(generator=str(path)).check_held({0: digits.x[240:]})
    with pytest.raises(UsageError, match=r"digits\.safetensors was trained on \d+ of the 240 images of client 3"):
        GIFD(generator=str(path)).check_held({0: digits.x[240:], 3: public.x})


def test_only_images_suit():
    def suits(shape: tuple[int, ...], model: str = "mlp") -> bool:
        return GIFD().suits(Plan(net_spec(model, shape, 10, {}), clients=1))

    assert suits((1, 8, 8)) and suits((3, 32, 32))
    assert not suits((16,)) and not suits((1, 4, 4))
