"""Noise of torch's generator comes off exactly, a stream cipher's does not, and plugins are named by their draws."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import ledger_home
import numpy as np
import pytest
import torch
from observations import psnr, secret, seeded

from ppbench.adversary.victims import Victims, choose_victims
from ppbench.attacks.reconstruction import noise_replay
from ppbench.attacks.reconstruction.noise_replay import NoiseReplay, known_words, passes_parity, word_pairs
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree
from ppbench.defenses.dp import DP
from ppbench.defenses.none import FullNoise
from ppbench.federation.contract import Context, Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Local, Noise, Plan
from ppbench.federation.view import View
from ppbench.ledger.transcript import load_transcript
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import configure
from ppbench.run.experiment import select_attacks
from ppbench.testing.defenses import DEFENSE_PROPERTIES
from ppbench.testing.small_federation import DefenseTrial, digit_shards, registered

SIZES = [300, 12, 3600, 12, 3600, 12, 3600, 12, 480, 10]  # of dlnet's tensors on digits
SALT = "5a" * 32
BEGAN: list[torch.Tensor] = []
"""Of `ByTorch`: the state of torch's generator before each draw."""


@dataclass(frozen=True)
class ByTorch(DP):
    """The noise of `dp`, from torch's generator."""

    name: ClassVar[str] = "by_torch"

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        BEGAN.append(ctx.generator.get_state())
        return {name: torch.randn(steps, *value.shape, generator=ctx.generator) for name, value in params.items()}


@dataclass(frozen=True)
class Undeclared(ByTorch):
    """All noise in one draw, of a law that is not declared."""

    name: ClassVar[str] = "undeclared"

    def draw(self, ctx: Context, params: Params, steps: int) -> Tree:
        numbers = torch.randn(sum(value.numel() for value in params.values()), generator=ctx.generator)
        parts = numbers.split([value.numel() for value in params.values()])
        return {name: part.view(1, *value.shape) for part, (name, value) in zip(parts, params.items(), strict=True)}

    def noise(self, plan: Plan) -> Noise | None:
        return None


def watched(defense: Defense, model: str = "dlnet", count: int = 2) -> tuple[View, Victims]:
    """Return what the server sees of `count` single digits under a secret salt, and the victims."""
    plan = Plan(net_spec(model, (1, 8, 8), 10), 4, Local("gradient", batch=8))
    run = Federation(defense, plan, digit_shards([24] * 4), Seeds(0, SALT))
    run.start(initial(plan.spec, 1))
    victims = choose_victims(run.shards, "server/1", 1, count, Seeds(0))
    return run.probe(victims.data).view("server/1"), victims


def test_words_are_read_off_pairs_of_numbers_as_far_as_rounding_lets() -> None:
    words = torch.randint(0, 2**24, (20_000,), generator=seeded(5)).numpy()
    generator = seeded(5)
    noise = torch.cat([torch.randn(size, generator=generator) for size in SIZES])
    entries, places = word_pairs(SIZES)
    assert len(np.unique(entries)) == entries.size and len(np.unique(places)) == places.size
    for scale in (1.0, 0.1, 0.37):
        known = known_words((noise * scale).double().numpy() / float(np.float32(scale)), entries, places)
        hidden = 24 - known.sure
        assert bool((words[known.at] >> hidden == known.values >> hidden).all())
        assert float(known.sure.mean()) > 21
        assert passes_parity(known)
    wrong = known_words((noise * 0.37).double().numpy() / 0.3701, entries, places)
    other = known_words(secret().normal((sum(SIZES),)).double().numpy(), entries, places)
    assert not passes_parity(wrong) and not passes_parity(other)


def test_what_is_zero_whatever_the_image_is_the_rim_of_kernels_over_small_maps() -> None:
    plan = Plan(net_spec("dlnet", (1, 8, 8), 10), 4)
    bare = torch.from_numpy(noise_replay.bare_entries(plan)).split(SIZES)
    assert [int(part.sum()) for part in bare] == [0, 0, 0, 0, 2304, 0, 2304, 0, 0, 0]
    kernel = bare[4].view(12, 12, 5, 5)[3, 7]
    assert bool(kernel[0].all()) and bool(kernel[:, 4].all()) and not bool(kernel[1:4, 1:4].any())
    assert not noise_replay.bare_entries(replace(plan, spec=net_spec("mlp", (1, 8, 8), 10))).any()
    view, _ = watched(ByTorch(0.1), "mlp")
    assert NoiseReplay().evidence(view) == []


def test_noise_of_a_known_state_comes_off_and_the_image_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the elimination of 20,000 unknown bits, which takes seconds and is left to the night."""
    state = 0, np.zeros(noise_replay.TWISTER, dtype=np.uint32)
    monkeypatch.setattr(noise_replay, "solved_state", lambda known: state)
    monkeypatch.setattr(noise_replay, "generator_before", lambda *_: torch.Generator().set_state(BEGAN[-1]))
    assert_rebuilt(ByTorch(0.1), 1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("defense", "count"), [(ByTorch(0.1), 1), (Undeclared(1.0), 1), (ByTorch(0.1), 10), (ByTorch(1.0), 10)]
)
def test_torchs_noise_comes_off_to_the_last_bit_and_the_images_are_rebuilt(defense: Defense, count: int) -> None:
    assert_rebuilt(defense, count)


def assert_rebuilt(defense: Defense, count: int) -> None:
    view, victims = watched(defense, count=count)
    with registered("defenses", type(defense)):
        cleaned = NoiseReplay().evidence(view)
        guesses = NoiseReplay().run(view, victims.challenges(), seeded())
    bare = torch.from_numpy(noise_replay.bare_entries(view.plan))
    assert len(cleaned) == count
    for one in cleaned:
        assert not bool(torch.cat([value.flatten() for value in one.observed.values()])[bare].any())
    truths = [victims.truth(unit).x for unit in victims.units]
    assert min(psnr(guess.x, x) for guess, x in zip(guesses, truths, strict=True)) > 20  # rounding of large noise stays


@pytest.mark.parametrize("defense", [DP(0.1), DP(1.0), DP(0.1, "laplace"), FullNoise()])
def test_noise_of_ours_does_not_come_off(defense: Defense) -> None:
    view, victims = watched(defense)
    assert NoiseReplay().evidence(view) == []
    guesses = NoiseReplay().run(view, victims.challenges(), seeded())
    assert all(guess.x is not None and guess.confidence is None for guess in guesses)


@pytest.mark.nightly
def test_a_published_row_of_noise_gives_no_noise_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = ledger_home.SUITE.replace('"mlp"', '"dlnet"').replace('"dlg", "analytic", ', "")
    suite = suite.replace("victims = 12", "victims = 4").replace("grid = [10]", "grid = [0.1, 1]")
    suite = suite[: suite.index('[[defense]]\nid = "spn"')] + suite[suite.index('[[defense]]\nid = "dp"') :]
    monkeypatch.setattr(ledger_home, "SUITE", suite.replace("[attack.dlg]\nrestarts = 0\nbudget = 30\n", ""))
    home = ledger_home.made(tmp_path)
    noisy = [load_transcript(folder).view for folder in home.out.iterdir() if folder.is_dir()]
    noisy = [view for view in noisy if view.defense.name == "dp"]
    assert len(noisy) == 2
    for view in noisy:
        assert len(view.defense.evidence(view)) == 4 and NoiseReplay().evidence(view) == []


def test_a_state_that_entries_kept_back_do_not_confirm_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, (entries, _) = seeded(3), word_pairs(SIZES)
    noise = torch.cat([torch.randn(size, generator=generator) for size in SIZES]).double().numpy()
    kept_back = entries[:: noise_replay.EVERY].ravel()
    state = 0, np.zeros(noise_replay.TWISTER, dtype=np.uint32)
    monkeypatch.setattr(noise_replay, "solved_state", lambda known: state)
    monkeypatch.setattr(noise_replay, "generator_before", lambda at, words: seeded(3))
    bare = np.ones(len(noise), dtype=bool)
    assert noise_replay.replayed_noise(noise, bare, SIZES) is not None
    noise[kept_back] += 1e-3
    assert noise_replay.replayed_noise(noise, bare, SIZES) is None


def test_it_is_asked_of_other_packages_defenses_alone() -> None:
    def includes(defense: str, attacks: tuple[str, ...]) -> bool:
        config: Any = configure(defense=defense, attacks=attacks)
        return any(isinstance(attack, NoiseReplay) for attack in select_attacks(config))

    assert not includes("dp", ("standard",)) and not includes("none", ("quick",)) and includes("dp", ("noise_replay",))
    with registered("defenses", ByTorch):
        assert includes("by_torch", ("standard",)) and includes("by_torch", ("quick",))


def test_a_plugin_that_draws_by_torch_is_named_with_what_to_use() -> None:
    ask = DEFENSE_PROPERTIES["torch_draws_no_secret"]
    (sentence,) = ask(DefenseTrial(ByTorch()))
    assert "ctx.secret.normal(shape)" in sentence and "`noise_replay`" in sentence
    assert list(ask(DefenseTrial(DP()))) == []
