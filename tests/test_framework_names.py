"""Names of what ships with a framework: ours and the framework's own mean the same, and records keep ours.

Nothing here needs a framework; test_flower.py, test_nvflare.py and test_opacus.py hold the names against the real ones.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from ppbench import load_defense
from ppbench.adapters import flower, framework, nvflare, opacus
from ppbench.adversary.attack import among
from ppbench.base import registry
from ppbench.base.errors import UsageError, closest
from ppbench.commands import app
from ppbench.run.config import EvaluateConfig
from ppbench.run.suite import DefensePart, PresetPart
from ppbench.testing.sweeps import request_from

ADAPTERS: tuple[ModuleType, ...] = (flower, nvflare, opacus)
PROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")


def names() -> Iterator[tuple[str, str]]:
    """Yield each framework's own names, as they are typed, with what records call them."""
    for adapter in ADAPTERS:
        prefix = f"{adapter.FRAMEWORK.extra}:stock/"
        for own, theirs in adapter.STOCK_NAMES.items():
            yield from ((f"{prefix}{name}", f"{prefix}{own}") for name in theirs)


@pytest.mark.parametrize(("typed", "recorded"), list(names()))
def test_a_name_of_the_framework_stands_for_ours_wherever_a_defense_is_named(typed: str, recorded: str) -> None:
    assert registry.canonical(typed) == registry.canonical(recorded) == recorded
    assert EvaluateConfig(defense=typed).defense == recorded
    assert DefensePart(id=typed).id == recorded
    assert PresetPart(defenses=(typed,), grids={typed: (1.0,)}) == PresetPart(
        defenses=(recorded,), grids={recorded: (1.0,)}
    )
    assert request_from({"defense": typed}) == request_from({"defense": recorded})
    for named in ((typed, recorded), (recorded, typed)):  # by an attack's author, and by who evaluates
        assert among(frozenset({named[0]}), named[1])
    assert registry.find("defenses", typed) is registry.find("defenses", recorded) is not None


def test_other_names_stay_as_they_are() -> None:
    for name in ("spn", "flower:stock/nothing", "flower:my_app:mine", "nobody:stock/LocalDpMod", "LocalDpMod", "", ":"):
        assert registry.canonical(name) == name


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.FRAMEWORK.extra)
def test_without_the_framework_every_name_says_which_extra_to_install(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(framework.metadata, "version", missing)
    extra = adapter.FRAMEWORK.extra
    for own, theirs in adapter.STOCK_NAMES.items():
        for name in (own, *theirs):
            monkeypatch.setattr(registry, "_addressed", {})
            with pytest.raises(UsageError, match=re.escape(f"; pip install 'ppbench-fl[{extra}]'.")):
                load_defense(f"{extra}:stock/{name}")


@pytest.mark.parametrize(
    ("typed", "right"),
    [
        ("localdp_mod", "did you mean 'stock/local_dp' (LocalDpMod)"),
        ("LocalDPMod", "did you mean 'stock/local_dp' (LocalDpMod)?"),
        ("local-dp", "did you mean 'stock/local_dp' (LocalDpMod)?"),
        ("fixedclipping-mod", "did you mean 'stock/dp_client_fixed' (DifferentialPrivacyClientSideFixedClipping or "),
        ("AdaptiveClippingMod", "did you mean 'stock/dp_client_adaptive' ("),
        ("SecAgg+", "did you mean 'stock/secaggplus' (SecAggPlusWorkflow or secaggplus_mod)"),
        ("flwr.clientapp.mod.LocalDpMod", "did you mean 'stock/local_dp' (LocalDpMod)"),
        ("differentialprivacyserversidefixedclipping", "did you mean 'stock/dp_server_fixed' ("),
    ],
)
def test_a_misspelt_name_is_told_the_nearest_under_both_its_names(typed: str, right: str) -> None:
    with pytest.raises(UsageError) as error:
        flower.FRAMEWORK.shipped(f"stock/{typed}", "mechanism", ())
    assert right in str(error.value)


def test_a_name_that_is_close_to_none_is_told_all_of_them() -> None:
    for adapter in ADAPTERS:
        with pytest.raises(UsageError) as error:
            adapter.FRAMEWORK.shipped("stock/xxyyzz", "mechanism", ())
        words = str(error.value)
        assert all(name in words for own, theirs in adapter.STOCK_NAMES.items() for name in (own, *theirs))


def test_a_name_without_its_prefix_is_told_with_it() -> None:
    for name in ("LocalDpMod", "localdpmod"):
        assert "did you mean 'flower:stock/LocalDpMod'? Else give stock/NAME," in str(
            flower.FRAMEWORK.no_name(name, "stock/NAME, ...")
        )
        with pytest.raises(UsageError, match=r"There is no defense named .* did you mean 'flower:stock/LocalDpMod'"):
            load_defense(name)


def test_case_and_punctuation_do_not_hide_a_name() -> None:
    assert closest("SPN", ["spn", "phong"]) == ["spn"]
    assert closest("dp-sgd", ["dp_sgd", "dp"]) == ["dp_sgd"]
    assert closest("??", ["spn", "dp"]) == [] and closest("", ["spn"]) == []


def test_the_list_shows_both_names() -> None:
    for words in (["list"], ["list", "adapters"]):
        lines = CliRunner().invoke(app, words).output.splitlines()
        for adapter in ADAPTERS:
            for own, theirs in adapter.STOCK_NAMES.items():
                [line] = [line for line in lines if f" {adapter.FRAMEWORK.extra}:stock/{own} " in line]
                assert all(name in line for name in theirs)


# -- versions ----------------------------------------------------------------------------------------------------------
def test_extras_have_the_oldest_version_that_is_known_and_no_upper_bound() -> None:
    for adapter in ADAPTERS:
        known = adapter.FRAMEWORK
        assert f'"{known.distribution}>={".".join(map(str, known.oldest))}"' in PROJECT


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.FRAMEWORK.extra)
def test_an_older_framework_is_refused_and_a_newer_one_is_tried_with_a_warning(
    adapter: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = adapter.FRAMEWORK
    (_, low), (major, high) = known.oldest, known.newest
    extra, title, newest = known.extra, known.title, f"{major}.{high}"
    monkeypatch.setattr(framework.metadata, "version", lambda _: f"{major - 1}.99.0")
    with pytest.raises(
        UsageError, match=rf"needs {title} {known.oldest[0]}.{low} or newer; {major - 1}.99.0 is installed"
    ):
        adapter.defense("stock/fedavg", f"{extra}:stock/fedavg")
    monkeypatch.delattr(adapter, "stock", raising=False)
    monkeypatch.setitem(sys.modules, f"ppbench.adapters.{extra}.stock", None)  # it cannot be imported
    for version in (f"{major}.{high + 1}.0", f"{major}.{high + 1}rc1", f"{major + 1}.0.0"):
        monkeypatch.setattr(framework.metadata, "version", lambda _, version=version: version)
        right = f"which is newer than {newest}; pip install '{known.distribution}=={newest}.*'."
        with (
            pytest.warns(UserWarning, match=f"{title} {version} is newer than {newest}, the newest that"),
            pytest.raises(
                UsageError, match=rf"does not run with {title} {version} \(ModuleNotFoundError: .*{re.escape(right)}"
            ),
        ):
            adapter.defense("stock/fedavg", f"{extra}:stock/fedavg")
    monkeypatch.setattr(framework.metadata, "version", lambda _: f"{newest}.7")
    with warnings.catch_warnings(), pytest.raises(ImportError):  # of a known version the cause is told as it is
        warnings.simplefilter("error")
        adapter.defense("stock/fedavg", f"{extra}:stock/fedavg")


def test_what_the_installed_version_lacks_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framework.metadata, "version", lambda _: "1.4.1")
    with pytest.raises(UsageError, match=r"Opacus 1\.4\.1 has no 'stock/AdaClipDPOptimizer'; install a newer opacus\."):
        opacus.FRAMEWORK.shipped("stock/AdaClipDPOptimizer", "mechanism", ())
