"""What the adapters of Flower, NVFlare and Opacus have in common: one battery, asked of each that is installed.

Run with a framework beside ppbench (`.ci/run` does so with the oldest and the newest version of each):
PYTHONPATH=FOLDER pytest tests/test_adapters.py tests/test_flower.py, where FOLDER is what one of these has made:
pip install --target FOLDER 'flwr==1.42.*'; pip install --no-deps --target FOLDER 'nvflare==2.9.*' msgpack grpcio
protobuf; pip install --no-deps --target FOLDER 'opacus==1.6.*' opt_einsum.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapted import Setting

import ppbench
from ppbench.adapters import flower, nvflare, opacus
from ppbench.base import registry
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.registry import load_plugin
from ppbench.federation.wire import SERVER
from ppbench.nets.net import initial
from ppbench.testing.small_federation import largest_difference, same_tensors

PACKAGES = {"flower": "flwr", "nvflare": "nvflare", "opacus": "opacus"}
HERE = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
SETTINGS = {
    "flower": Setting(),
    "nvflare": Setting((16, 24, 32)),  # whole batches, so that steps count as examples do
    "opacus": Setting(lr=0.5),
}
STOCK = [
    *(f"flower:stock/{name}" for name in flower.STOCK_NAMES),
    *(f"nvflare:stock/{name}" for name in nvflare.STOCK_NAMES),
    *(f"opacus:stock/{name}" for name in opacus.STOCK_NAMES),
    *("nvflare:nvflare_apps:mine", "nvflare:nvflare_apps:feedback"),
]


def setting_of(name: str) -> Setting:
    """Return the setting of an address's framework; skip where that is not installed."""
    extra = name.partition(":")[0]
    if extra not in HERE:
        pytest.skip(f"needs {PACKAGES[extra]}")
    return SETTINGS[extra]


# -- rounds and probes -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["flower:stock/fedavg", "nvflare:stock/fedavg", "nvflare:nvflare_apps:nothing"])
def test_federated_averaging_is_ours_to_rounding(name: str) -> None:
    """Same data, same seeds, unequal shards, three rounds of several steps; and weights do move."""
    setting = setting_of(name)
    ours = setting.trained("none", rounds=3)
    assert largest_difference(setting.trained(name, rounds=3), ours) < 1e-6
    assert largest_difference(ours, initial(setting.plan.spec, 0)) > 1e-2


def generators() -> Any:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()  # type: ignore[index]


@pytest.mark.parametrize("name", STOCK)
def test_two_runs_agree_and_a_probe_moves_nothing(name: str) -> None:
    """Training goes on as if nobody had asked; nobody's generators move; another probe of it is equal."""
    setting = setting_of(name)
    if name.startswith("opacus:stock/") and name.partition("/")[2] not in reachable():
        pytest.skip("this version has none that can be reached")
    alone, least = setting.trained(name), 1e-3 if name.startswith("opacus:") else 0.0
    assert largest_difference(setting.trained(name), alone) == 0
    assert largest_difference(setting.trained(name, seed=1), alone) > least
    run = setting.federation(name)
    assert run.run(1)
    before = generators()
    first, second = setting.seen(run, 2), setting.seen(run, 2)
    assert generators() == before
    for one, other in zip(first.mail, second.mail, strict=True):
        if one.sender != SERVER and not name.endswith("secaggplus"):  # whose keys are new in every run
            assert same_tensors(one.message, other.message)
    assert run.run(2) and largest_difference(run.parties.server.params, alone) == 0


def reachable() -> list[str]:
    """Return the names of what this version of Opacus has."""
    from ppbench.adapters.opacus import mechanism as stock

    return [one.name.partition("stock/")[2] for one in stock.OPACUS_STOCK]


@pytest.mark.parametrize(
    "name",
    ["flower:flower_apps:adam", "flower:flower_apps:counting", "nvflare:nvflare_apps:feedback", "opacus:stock/dp_sgd"],
)
def test_a_run_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    """A strategy's moments, what clients keep and what their accountants noted outlive it."""
    setting = setting_of(name)
    run = setting.federation(name)
    assert run.run(2)
    again = setting.restored(run, tmp_path)
    assert (
        run.run(3) and again.run(3) and largest_difference(run.parties.server.params, again.parties.server.params) == 0
    )
    assert same_tensors(run.parties.clients, again.parties.clients)


# -- what is a mechanism ---------------------------------------------------------------------------------------------
OWN = {  # control, its value in a quick run, docstring, and the shipped mechanism that is the same
    "flower": ("multiplier", 0.1, "Central DP whose clients clip.", "dp_client_fixed", "clipping_norm"),
    "nvflare": ("scale", 0.01, "Local noise on clipped changes.", None, None),
    "opacus": ("sigma", 0.5, "DP-SGD as mine.", "dp_sgd", "max_grad_norm"),
}


@pytest.mark.parametrize("extra", OWN)
def test_a_function_of_ones_own_is_a_defense(extra: str) -> None:
    setting, name = setting_of(extra), f"{extra}:{extra}_apps:mine"
    control, value, about, stock, clip = OWN[extra]
    registry.admit(name)
    made = load_plugin("defenses", name)
    assert (made.control, made.grids["quick"], made.__doc__) == (control, (value,), about)
    assert asdict(made(**{control: 0.7})) == {control: 0.7, "clip": 1.0} and made() == made(**{control: value})
    assert extra != "opacus" or made.kin == "dp_sgd"
    if stock is not None:
        shipped = setting.trained(f"{extra}:stock/{stock}", noise_multiplier=0.2, **{clip: 0.3})
        assert largest_difference(setting.trained(name, **{control: 0.2, "clip": 0.3}), shipped) == 0


FORMS = {  # what an address must give
    "flower": "it must give (strategy, list of client mods)",
    "nvflare": "it must give a list of NVFlare's Filters",
    "opacus": "it must give (engine, model, optimizer, loader)",
}
NO_MECHANISMS = {
    "flower": {
        "flower_apps:not_a_strategy": f"gave object; {FORMS['flower']}",
        "flower_apps:alone": "raised TypeError",
        "flower_apps:no_default": "has the parameter scale without a default",
        "flower_apps:refuses": "raised ValueError: The noise multiplier should be a non-negative value",
        "stock/local_pd": "did you mean 'stock/local_dp'",
        "nothing": "is no name behind flower:; give stock/NAME, MODULE:OBJECT of yours, or an app",
    },
    "nvflare": {
        "nvflare_apps:not_a_list": f"gave PercentilePrivacy; {FORMS['nvflare']}",
        "nvflare_apps:not_filters": f"gave a list with str; {FORMS['nvflare']}",
        "nvflare_apps:alone": f"gave NoneType; {FORMS['nvflare']}",
        "nvflare_apps:no_default": "has the parameter scale without a default",
        "nvflare_apps:shadows": "has the parameter 'noise', which means something else of a defense; call it another",
        "nvflare_apps:refuses": "raised ValueError: the noise must not be negative",
        "stock/svt_privat": "did you mean 'stock/svt_privacy'",
        "nothing": "is no name behind nvflare:; give stock/NAME, or MODULE:OBJECT of yours",
    },
    "opacus": {
        "opacus_apps:no_engine": f"gave a tuple of 3; {FORMS['opacus']}",
        "opacus_apps:nothing": f"gave a NoneType; {FORMS['opacus']}",
        "opacus_apps:other_engine": "gave a NoneType where a PrivacyEngine must be",
        "opacus_apps:not_private": "gave a SGD where a DPOptimizer must be",
        "opacus_apps:other_weights": "gave an optimizer of other weights than its model's",
        "opacus_apps:other_network": "trains a network of other parameters than it was given",
        "opacus_apps:adam": "trains by Adam at rate 0.1",
        "opacus_apps:faster": "trains by SGD at rate 0.7; it must keep the plan's rate 0.5",
        "opacus_apps:steps": "took 4 steps of torch.optim in 1 epochs",
        "opacus_apps:raises": "raised KeyError: 'no such key'",
        "opacus_apps:no_default": "has the parameter sigma without a default",
        "opacus_apps:shadow": "has the parameter 'noise'",
        "stock/dp_sdg": "did you mean 'stock/dp_sgd'",
        "nothing": "is no name behind opacus:; give stock/NAME, or MODULE:OBJECT of yours",
    },
}
for extra, cases in NO_MECHANISMS.items():
    cases[f"{extra}_apps:number"] = "is 3; it must be a function"
    cases[f"{extra}_apps:absent"] = "has no attribute 'absent'"
    cases["no_such_module:x"] = "No module named 'no_such_module'"


@pytest.mark.parametrize(
    ("name", "words"),
    [(f"{extra}:{name}", words) for extra, cases in NO_MECHANISMS.items() for name, words in cases.items()],
)
def test_what_is_no_mechanism_is_refused(name: str, words: str) -> None:
    plan = setting_of(name).plan
    registry.admit(name)
    with pytest.raises(UsageError) as error:
        load_plugin("defenses", name)().check(plan)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("extra", PACKAGES)
def test_records_do_not_choose_what_is_imported(extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defenses at an address are loaded for who asks for them; a record that names one, anybody's, imports nothing."""
    setting_of(extra)
    (tmp_path / f"never_{extra}.py").write_text("c = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"{extra}:never_{extra}:c"
    assert registry.find("defenses", name) is None
    with pytest.raises(UsageError, match=f"There is no defense named '{name}'"):
        load_plugin("defenses", name)
    assert f"never_{extra}" not in sys.modules
    with pytest.raises(UsageError, match=f"'{name}' is"):  # asked for: imported, and no function
        ppbench.evaluate(defense=name)
    assert all(registry.find("defenses", one) is not None for one in STOCK if one.startswith(f"{extra}:stock/"))


# -- what is refused -------------------------------------------------------------------------------------------------
BROKEN_ROUNDS = {
    "flower:flower_apps:samples": "The strategy leaves out client",
    "flower:flower_apps:waits": "The strategy waits for more clients than the 3 that there are",
    "flower:flower_apps:nobody": "The strategy asks nobody to train in round 1",
    "flower:flower_apps:raises": "The app of client 0 raised KeyError: 'no such key'",
    "flower:flower_apps:errs": "Client 0 answers by an error: out of memory",
    "flower:flower_apps:shapes": "What client 0 sends holds {'arrays': 4}; it must hold the model's 4 arrays, in their",
    "flower:flower_apps:no_arrays": "What client 0 sends holds no arrays",
    "flower:flower_apps:aggregates_nothing": "The strategy raised",
    "flower:flower_apps:uncopied": "the strategy.draws is a Generator, of which no probe can have a copy",
    "nvflare:nvflare_apps:raises": "The filters of client 0 raised KeyError: 'no such key'",
    "nvflare:nvflare_apps:no_dxo": "The filters of client 0 let out no DXO: ",
    "nvflare:nvflare_apps:no_shareable": "Filter Whole of client 0 gives NoneType, not a Shareable",
    "nvflare:nvflare_apps:blocks": "The filters of client 0 let out no result: return code EXECUTION_EXCEPTION",
    "nvflare:nvflare_apps:weights": "The filters of client 0 let out WEIGHTS, not WEIGHT_DIFF",
    "nvflare:nvflare_apps:shapes": "let out of 'head.bias' is (3,) float32; it must be (10,) float32",
    "nvflare:nvflare_apps:integers": "let out of 'head.bias' is (10,) int64; it must be (10,) float32",
    "nvflare:nvflare_apps:strange_names": "The filters of client 0 let out 'tail', which the model has not",
    "nvflare:nvflare_apps:no_steps": "The filters of client 0 let out -2 steps; it must be a whole number from 1",
    "nvflare:nvflare_apps:no_arrays": "What the filters of client 0 let out of 'head.bias' is object, no array",
    "nvflare:nvflare_apps:uncopied": "the filters[0].draws is a Generator, of which no probe can have a",
    "nvflare:nvflare_apps:own_draws": "the filters[0].draws is a Random, of which no probe can have a",
}


@pytest.mark.parametrize(("name", "words"), BROKEN_ROUNDS.items())
def test_what_breaks_a_round_is_told_in_a_sentence(name: str, words: str) -> None:
    with pytest.raises(ProtocolError) as error:
        setting_of(name).federation(name).run(1)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "adam"}, "needs --optimizer sgd"),
        ({"schedule": "round_robin"}, "needs --schedule parallel"),
        ({"upload": "gradient"}, "needs --upload delta"),
        ({"grid": (-1.0,)}, "it must be 0 or from 1e-12 to 1e"),
    ],
)
@pytest.mark.parametrize("name", ["flower:stock/fedavg", "nvflare:stock/fedavg", "opacus:stock/dp_sgd"])
def test_federations_that_no_attack_reads_are_refused(
    tmp_path: Path, name: str, options: dict[str, Any], words: str
) -> None:
    setting_of(name)
    if ("opacus" in name and "schedule" in options) or ("opacus" not in name and "grid" in options):
        pytest.skip("clients that train by Opacus may do so in turn; averaging alone has no control value")
    with pytest.raises(UsageError, match=words):
        ppbench.evaluate(defense=name, out=tmp_path / "out", **options)


# -- from end to end -------------------------------------------------------------------------------------------------
COMMON = {
    "model": "mlp", "clients": 2, "rounds": 1, "victims": 4, "candidates": 8, "tuning": 0, "stages": ("init",),
    "attack_batch": (1,), "budget": 200, "workers": 1,
}  # fmt: skip
READERS = ("analytic", "adaptive_server", "label_recovery")
PRIVATE = {"settings": {"max_grad_norm": 1e3}, "lr": 0.2, "rounds": 4}
EVALUATIONS = {  # an undefended or weakly defended setting falls, one with much noise does not
    "flower": (
        {"defense": "flower:stock/fedavg"},
        {"defense": "flower:stock/local_dp", "grid": (0.1,), "attacks": (*READERS, "adaptive_dp")},
    ),
    "nvflare": (
        {"defense": "nvflare:stock/fedavg"},
        {"defense": "nvflare:stock/percentile_privacy", "grid": (50.0,)},
        {"defense": "nvflare:nvflare_apps:mine", "grid": (1.0,), "attacks": (*READERS, "adaptive_ppdl")},
    ),
    "opacus": (
        {"defense": "opacus:stock/dp_sgd", "grid": (0.0,), **PRIVATE},
        {"defense": "opacus:stock/dp_sgd", "grid": (1e-3,), **PRIVATE},
    ),
}


@pytest.mark.parametrize("extra", EVALUATIONS)
def test_an_evaluation_from_end_to_end(extra: str, tmp_path: Path) -> None:
    """All but the last give the image; noise takes it; controls hold; a framework's own name finds the same cells."""
    setting_of(extra)
    *open_, shut = (
        ppbench.evaluate(**{**COMMON, "attacks": READERS, **options}, out=tmp_path / str(place))
        for place, options in enumerate(EVALUATIONS[extra])
    )
    assert all("falls: images" in one.answer.headline.words for one in open_)
    assert "falls" not in shut.answer.headline.words
    assert {one.answer.trust.state for one in (*open_, shut)} == {"holds"}
    if extra == "flower":
        options = {**COMMON, **EVALUATIONS[extra][-1], "defense": "flower:stock/LocalDpMod"}
        cells = sorted(shut.out.rglob("*.json"))
        assert ppbench.evaluate(**options, out=shut.out).records == shut.records
        assert sorted(shut.out.rglob("*.json")) == cells
