"""`ppbench.api`: what plugins import stays there, and a plugin of another version gets one sentence."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest

from ppbench import api
from ppbench.base import declarations, registry
from ppbench.base.registry import load_all
from ppbench.federation.contract import defense_faults
from ppbench.questions.base import question_faults
from ppbench.questions.labels import Labels

ROOT = Path(__file__).parent.parent
BASES = {"defenses": api.Defense, "attacks": api.Attack, "questions": api.Question}


@dataclass(frozen=True)
class Outside(api.Defense):
    """A defense of another package."""

    name: ClassVar[str] = "outside"
    contract: ClassVar[int] = 1


def test_the_contract_lists_what_it_has():
    assert len(set(api.__all__)) == len(api.__all__) and all(hasattr(api, name) for name in api.__all__)
    assert set(api.CHANGES) == set(range(1, api.CONTRACT + 1))


def test_examples_and_tutorials_import_the_contract_and_nothing_behind_it():
    """But `ppbench`, `ppbench.testing`, and what a page is about: results, and one attack that another builds on."""
    free = {"ppbench", "ppbench.api", "ppbench.testing"}
    kept = {"ppbench.attacks.reconstruction.dlg", "ppbench.report.compare.outcome", "ppbench.run.evaluation"}
    files = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").glob("tutorial-*.md")]
    imported = {m for file in files for m in re.findall(r"^\s*(?:from|import) (ppbench[\w.]*)", file.read_text(), re.M)}
    assert imported <= free | kept


@pytest.mark.parametrize("group", BASES)
def test_every_plugin_of_ours_can_be_called_as_the_contract_says(group):
    for name, plugin in load_all(group).items():
        assert list(declarations.contract_faults(plugin, BASES[group])) == [], name


def test_a_plugin_of_a_newer_contract_is_refused_and_one_that_lacks_an_argument_is_named():
    assert list(defense_faults(Outside, "outside")) == []

    class Newer(Outside):
        contract: ClassVar[int] = api.CONTRACT + 1

    assert "update ppbench" in next(declarations.contract_faults(Newer, api.Defense))

    class Older(Outside):
        contract: ClassVar[int] = 0

        def decoded(self, server, client, upload):  # the argument `ctx` came later
            return upload

    (fault,) = declarations.contract_faults(Older, api.Defense)
    assert (
        fault.startswith("cannot be called as decoded(self, ctx:")
        and f"states no contract, this is {api.CONTRACT}" in fault
    )
    with patch.dict(declarations.__dict__, CONTRACT=2, CHANGES={1: "a", 2: "decoded gets a context"}):
        Older.contract = 1
        (fault,) = declarations.contract_faults(Older, api.Defense)
        assert fault.endswith("it is written for contract 1, this is 2 (since 2: decoded gets a context)")


class BySpecs(Labels):
    """A question with metrics of its own."""

    name: ClassVar[str] = "by_specs"
    specs = (
        api.MetricSpec("right", "Right", judgment=api.Judgment("decision", 0.02, 0.05)),
        api.MetricSpec(
            "error", "Error", higher_is_safer=True, judgment=api.Judgment("mean", 0.1, 0.2, subset="canaries")
        ),
        api.MetricSpec("more", "More"),
    )


def test_a_questions_rules_and_columns_are_those_of_its_specs():
    question = BySpecs()
    assert question.all_rules == (
        api.Rule("right", "right", "all", "decision", 0.02, False, 0.05),
        api.Rule("error", "error", "canaries", "mean", 0.1, True, 0.2),
    )
    assert question.columns("error") == (("error", "Error"), ("right", "Right"), ("more", "More"))
    assert list(question_faults(BySpecs, "by_specs")) == []

    class Twice(BySpecs):
        name = "twice"
        specs = BySpecs.specs[:1] * 2

    assert any("several specs of one name" in fault for fault in question_faults(Twice, "twice"))


@pytest.mark.parametrize("former", [("right", False), ("right",), (BySpecs().spec("error"), True)])
def test_a_figure_is_recorded_by_its_spec_and_the_former_form_says_what_to_write(former):
    share, error = api.proportion([np.array([True, False])]), BySpecs().spec("error")
    assert api.record_metric(error, share).higher_is_safer
    with pytest.raises(TypeError, match=r"takes a MetricSpec.* and write record_metric\(SPEC, figure\)$"):
        api.record_metric(former[0], share, *former[1:])


def test_a_plugin_that_imports_a_module_that_moved_is_told_where_names_stay(tmp_path, monkeypatch):
    (tmp_path / "moved_plugin.py").write_text("from ppbench.federation.messages import Update\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = registry.metadata.EntryPoint("moved", "moved_plugin:Thing", "")
    with pytest.raises(api.UsageError, match=r"No module named .*; import from ppbench\.api \(contract 2\)") as refused:
        _ = registry.Plugin("defenses", "moved", "moved_plugin:Thing", "somebodys", entry).loaded
    assert "\n" not in str(refused.value)
    sys.modules.pop("moved_plugin", None)
