"""What every registered attack of audits must keep: its planted leak, its null, one seed one result.

One audit of an undefended federation that learns its few records by heart, and of the control that uploads noise.
Attacks come from the registry, so that a new one is tested without a line here. What they do with poisoned views and
answers is tested beside each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppbench.adversary.attack import Attack
from ppbench.base.registry import load, plugins
from ppbench.records.schema import Record
from ppbench.run.evaluation import evaluate

AUDITS: dict[str, type[Attack]] = {
    name: attack
    for name, plugin in plugins("attacks").items()
    if plugin.distribution == "ppbench" and (attack := load("attacks", name)).audit
}
ASKED: dict[str, Any] = {
    **{"defense": "none", "model": "mlp", "model_options": {"hidden": 64}, "clients": 3, "train": 240, "public": 0.4},
    **{"rounds": 25, "local_epochs": 4, "batch_size": 16, "decay_at": (), "schedule": "parallel"},
    **{"attacks": tuple(AUDITS), "stages": ("audit",), "references": 8, "canaries": 30, "candidates": 40},
    **{"threats": ("server/1", "client/1")},
}
Found = Mapping[tuple[str, str, str], Record]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the records by defense, attack and threat."""
    out: Path = tmp_path_factory.mktemp("audit") / "out"
    records = evaluate(**ASKED, out=out, workers=1).records
    return {(r.config.defense.id, r.config.attack.id, r.config.threat_model.id): r for r in records}


CASES = [(name, threat) for name, attack in AUDITS.items() for threat in attack.threats]
MEMBERS = [(name, threat) for name, threat in CASES if AUDITS[name].kind == "membership"]
OWNERS = [(name, threat) for name, threat in CASES if AUDITS[name].kind == "tracing"]


def test_audits_have_attacks_of_every_need():
    assert {attack.audit for attack in AUDITS.values()} == {"references", "rounds"}
    assert MEMBERS and OWNERS


@pytest.mark.parametrize(("name", "threat"), CASES)
def test_an_audit_gives_a_complete_cell(name, threat, found):
    for defense in ("none", "full_noise"):
        record = found[defense, name, threat]
        assert record.status == "complete", record.reason
        assert record.config.stage == "audit" and record.config.audit is not None
        assert record.config.audit.references == 8 and record.config.audit.canaries == 30


@pytest.mark.parametrize(("name", "threat"), MEMBERS)
def test_planted_leak_canaries_that_were_learned_by_heart_are_found(name, threat, found):
    record = found["none", name, threat]
    assert record.metric("canary_auc").value > (0.8 if "offline" in name else 0.9)  # these learn from half of the runs
    epsilon = record.metric("epsilon_lower")
    assert epsilon is None or epsilon.value > 0.5


@pytest.mark.parametrize(("name", "threat"), MEMBERS)
def test_null_uploads_of_noise_know_no_member(name, threat, found):
    record = found["full_noise", name, threat]
    for metric in ("auc", "canary_auc"):
        area = record.metric(metric)
        assert area.low - 0.05 <= 0.5 <= area.high + 0.05  # 95 % intervals of a dozen cells: about one is left
    epsilon = record.metric("epsilon_lower")
    assert epsilon is None or epsilon.value == 0


@pytest.mark.parametrize(("name", "threat"), OWNERS)
def test_owners_are_traced_and_not_in_noise(name, threat, found):
    traced, noise = (found[d, name, threat].metric("tracing_accuracy") for d in ("none", "full_noise"))
    assert traced.low > traced.chance
    assert noise.low <= noise.chance  # or below: the first client owns no record here, which the attack cannot know


def test_one_seed_one_result(found, tmp_path):
    """Of the attacks that need no references: the target is trained anew, in another folder."""
    some = tuple(n for n, attack in AUDITS.items() if attack.audit == "rounds" and n != "mia_whitebox")  # it fits long
    small = {**ASKED, "attacks": some, "references": 0, "rounds": 2, "canaries": 4, "candidates": 10}
    once, again = (evaluate(**small, out=tmp_path / folder, workers=1).records for folder in ("a", "b"))
    assert [r.model_dump_json() for r in once] == [r.model_dump_json() for r in again]
