"""Threat models: facts decide on views, victims and reports; a new one is one instance, and no other line changes."""

import json
import sys
from io import StringIO

import pytest
import thief
import torch
from broken_plugins import Broken
from daily import all_but_nightly
from protocols import started
from rich.console import Console
from test_apart import process_for_many_calls
from test_gate import TINY, site

from ppbench.adversary.leaks import leaks
from ppbench.adversary.victims import choose_candidates, choose_victims
from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.commands.terminal import say_verdict
from ppbench.defenses.none import NoDefense
from ppbench.defenses.secagg import SecureAggregation, SparseSecureAggregation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.federation.threats import (
    ACTIVE_SYBILS,
    CURIOUS_CLIENT,
    EAVESDROPPER,
    HONEST_SERVER,
    THREATS,
    ThreatModel,
    recorded_threat,
    register,
    threat_model,
)
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import net_spec
from ppbench.records.store import Store
from ppbench.run.cells import groups, inapplicable
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.experiment import resolve
from ppbench.verification import verify

SEES = "two curious clients without the server: the broadcasts, states and data of both"


@pytest.fixture
def pair():
    """Register two clients that collude without the server, as a module of somebody else would."""
    yield register(ThreatModel("clients/1", SEES, clients=(0, 1), attacked_as=("client/1",)))
    del THREATS["clients/1"]


JURY = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from ppbench.api import Attack, Guess, ThreatModel, register

register(ThreatModel("jury/1", "two curious clients", clients=(0, 1)))

@dataclass(frozen=True)
class My(Attack):
    name: ClassVar[str] = "{name}"
    kind: ClassVar[str] = "label"
    threats: ClassVar[tuple[str, ...]] = ("clients/1", "jury/1")
    def run(self, view, challenges, generator):
        assert view.threat.clients == (0, 1)
        return [Guess(y=torch.zeros(len(c.unit) * c.batch, dtype=torch.int64)) for c in challenges]
"""


@pytest.mark.parametrize("isolate", all_but_nightly([False, True], [False]))
def test_a_registered_threat_model_reaches_an_isolated_attack_and_one_of_its_own_comes_back(
    isolate, pair, tmp_path, monkeypatch
):
    """One that this process registered, and one that the attack's module did."""
    monkeypatch.setenv("PPBENCH_CACHE", str(tmp_path / "cache"))
    one = Broken(970 + isolate, "threats", "attacks", JURY)
    (tmp_path / "site").mkdir()
    with site(tmp_path / "site", [one]), process_for_many_calls() as ask, thief.answered_by(ask):
        options = {**TINY, "defense": "none", "attacks": (one.name,), "threats": ("clients/1", "jury/1"), "clients": 3}
        result = evaluate(configure("quick", **options, isolate=isolate), out=tmp_path / "out", workers=1)
        assert (one.module in sys.modules) is not isolate
    del THREATS["jury/1"]
    cells = [record for record in result.records if record.config.attack.id == one.name]
    assert {record.config.threat_model.id for record in cells} == {"clients/1", "jury/1"}
    assert not [record.reason for record in cells if record.status != "complete"]


def test_names_are_the_format_of_files_and_objects_what_the_program_asks():
    assert all(threat_model(name) is threat is threat_model(threat) for name, threat in THREATS.items())
    assert [str(threat) for threat in THREATS.values()] == [*THREATS]
    assert (HONEST_SERVER.sees_uploads, EAVESDROPPER.sees_uploads, CURIOUS_CLIENT.sees_uploads) == (True, True, False)
    assert [t.name for t in THREATS.values() if t.lone_server or t.lone_client] == ["server/1", "client/1"]
    assert [t.name for t in THREATS.values() if t.acts] == ["server-active/1", "server-active/1/sybil"]
    assert [t.name for t in THREATS.values() if t.colludes] == ["collusion/1", "server-active/1/sybil"]
    assert [ACTIVE_SYBILS.has(party) for party in (SERVER, 0, 1, 9)] == [False, False, True, True]
    assert ACTIVE_SYBILS.short == "server-active"
    with pytest.raises(UsageError, match=r"There is no threat model named 'servr/1'; did you mean 'server/1'"):
        threat_model("servr/1")
    unknown = recorded_threat("jury/3")
    assert (str(unknown), unknown.sees_uploads, unknown.client) == ("jury/3", False, None)


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"name": "clients"}, "a name is words and a version"),
        ({"name": "server/1"}, "another one has this name"),
        ({"sees": ""}, "does not say what it sees"),
        ({"clients": ()}, "nobody is in it"),
        ({"clients": (1, 1)}, "each once"),
        ({"colludes": True}, "the victim of colluders"),
        ({"acts": True}, "without a server"),
        ({"attacked_as": ("clint/1",)}, "no threat model is called 'clint/1'"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(facts, fault):
    with pytest.raises(UsageError, match=fault):
        register(ThreatModel(**{"name": "clients/2", "sees": SEES, "clients": (0, 1), **facts}))
    assert "clients/2" not in THREATS


@pytest.fixture
def run(deal):
    """Return a started federation of four undefended clients that upload gradients."""
    plan = Plan(net_spec("mlp", (1, 8, 8), 10), 4, Local("gradient", batch=4, opt=Opt("sgd", 0.1)))
    return started(NoDefense(), plan, deal([24] * 4))


def test_two_clients_see_what_both_have_and_the_exact_mean_of_the_others(run, pair, tmp_path):
    victims = choose_victims(run.shards, pair, 2, 8, Seeds(0))
    assert victims.units == tuple((Slot(probe, 2), Slot(probe, 3)) for probe in range(2))
    view = run.probe(victims.data).view("clients/1", own=victims.own)
    assert (view.threat, view.party) == (pair, 0)
    assert {letter.sender for letter in view.mail} == {SERVER, 0, 1} and {s.party for s in view.states} == {0, 1}
    assert [(probe, len(data.x)) for probe, data in view.data] == [(0, 4), (1, 4)]
    hidden = [data.x for slot, data in victims.data.items() if slot.client in (2, 3)]
    assert leaks((view, view.defense.evidence(view)), hidden) == []
    evidence = view.defense.evidence(view)
    assert [e.unit for e in evidence] == list(victims.units)
    for e in evidence:
        truth = [victims.data[slot] for slot in e.unit]
        x, y = (torch.stack([getattr(data, part) for data in truth]).flatten(0, 1)[None] for part in ("x", "y"))
        assert at_truth(e, x, y) < 1e-8
    view.save(tmp_path / "view")
    again = View.load(tmp_path / "view")
    assert again.threat == pair and json.loads((tmp_path / "view" / "view.json").read_text())["threat"] == "clients/1"
    assert [e.unit for e in again.defense.evidence(again)] == list(victims.units)


def test_nobody_asks_colluders_about_their_own_records(run, pair, digits):
    candidates = choose_candidates(run.shards, digits, 40, Seeds(0), pair)
    members = {row.numpy().tobytes() for row in candidates.x[candidates.member]}
    kept = [{row.numpy().tobytes() for row in run.shards[client].x} for client in range(4)]
    assert len(members) == 40 and members <= kept[2] | kept[3]
    few = {c: run.shards[c] for c in (0, 1)}
    with pytest.raises(UsageError, match="clients/1 needs other clients to be curious about; use at least 3 clients"):
        choose_victims(few, pair, 1, 2, Seeds(0))
    with pytest.raises(UsageError, match="use at least 3 clients"):
        choose_candidates(few, digits, 4, Seeds(0), pair)
    far = ThreatModel("clients/2", SEES, clients=(0, 2))
    with pytest.raises(UsageError, match="use at least 3 clients"):
        choose_victims(few, far, 1, 2, Seeds(0))  # there is no client 2
    assert [threat.fewest for threat in (CURIOUS_CLIENT, pair, far, HONEST_SERVER)] == [2, 3, 3, 1]


@pytest.mark.parametrize(
    ("defense", "known"), [(SecureAggregation(), True), (SparseSecureAggregation(neighbors=2), False)]
)
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("threat", ["client/1", "clients/1"])
def test_clients_of_secure_aggregation_learn_the_exact_mean_of_the_others(defense, known, equal, threat, pair, deal):
    """Whose numbers of examples the roster names; along a sparse graph, they take the others' for equal."""
    plan = Plan(net_spec("mlp", (1, 8, 8), 10), 4, Local("gradient", batch=4, opt=Opt("sgd", 0.1)))
    run = started(defense, plan, deal([24] * 4 if equal else [40, 24, 16, 32]))
    victims = choose_victims(run.shards, threat_model(threat), 2, 8, Seeds(0), sums=True)
    view = run.probe(victims.data).view(threat, own=victims.own)
    evidence = view.defense.evidence(view)
    assert [e.unit for e in evidence] == list(victims.units) and len(evidence) > 1
    mismatches = []
    for e in evidence:
        truth = [victims.data[slot] for slot in e.unit]
        x, y = (torch.stack([getattr(data, part) for data in truth]) for part in ("x", "y"))
        mismatches.append(at_truth(e, x, y))
    exact = known or equal
    assert all((m < 1e-8) is exact and m < 0.2 for m in mismatches), mismatches
    assert all((e.params is not None) is (equal or not known) for e in evidence)


@pytest.mark.nightly
def test_the_undefended_is_evaluated_under_a_threat_model_from_elsewhere(pair, tmp_path):
    options = {"model": "mlp", "clients": 3, "rounds": 2, "train": 90, "victims": 3, "candidates": 12}
    options |= {"attacks": ("analytic", "mia_loss"), "attack_batch": (1,), "stages": ("init", "final")}
    evaluation = evaluate(defense="none", **options, threats=("clients/1",), out=tmp_path / "out", workers=2)
    records = [r for r in evaluation.records if r.config.defense.id == "none"]
    assert {(r.config.threat_model.id, r.config.threat_model.sees, r.status) for r in records} == {
        ("clients/1", SEES, "complete")
    }
    rebuilt, *_ = [r for r in records if r.config.attack.id == "analytic" and r.config.stage == "init"]
    assert {victim.client for victim in rebuilt.victims} == {2}, "the one client that is not in it"
    assert rebuilt.metric("psnr_median").value > 60, "two broadcasts less two uploads leave one gradient"
    assert {r.config.attack.id for r in records} == {"analytic", "mia_loss"}
    assert "clients/1" in (tmp_path / "out" / "leaderboard.html").read_text()
    assert any("[clients/1]" in verdict.sentence for verdict in evaluation.verdicts)
    assert verify(tmp_path / "out") == []


SMALL = {"model": "mlp", "clients": 4, "rounds": 2, "train": 120, "victims": 4, "candidates": 12, "attack_batch": (1,)}


def test_beside_one_client_it_has_controls_rows_and_sentences_of_its_own(pair, tmp_path):
    options = {**SMALL, "attacks": ("analytic", "mia_loss"), "stages": ("init", "final"), "grid": (0.01,)}
    result = evaluate(defense="dp", **options, threats=("client/1", "clients/1"), out=tmp_path, workers=1)
    sentences = [verdict.sentence for verdict in result.verdicts]
    assert any(s.startswith("[clients/1] dp at sigma=0.01") for s in sentences)
    assert any(s.startswith("[clients/1] A coalition of 2 clients that queries the delivered model") for s in sentences)
    assert any(s.startswith("A client who queries the delivered model") for s in sentences), "one client keeps its own"
    console = Console(file=StringIO(), width=200)
    say_verdict(console, result.answer.trust, ())
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("control none")]
    assert len(lines) == 2 and "[client/1]" in lines[0] and "[clients/1]" in lines[1]
    assert not result.left_out and verify(tmp_path) == []


AUDITED = {"defense": "none", **SMALL, "references": 2, "canaries": 8, "attacks": ("mia_loss",)}
"""An audit that is small."""


def test_an_audit_leaves_out_clients_whose_data_it_does_not_keep_and_says_so(pair, tmp_path):
    threats = ("client/1", "clients/1")
    result = evaluate(**AUDITED, stages=("final", "audit"), threats=threats, out=tmp_path, workers=1)
    cells = {(r.config.stage, r.config.threat_model.id, r.status) for r in result.records}
    final = {("final", threat, "complete") for threat in threats}
    assert cells == final | {("audit", "client/1", "complete")}
    assert result.left_out == (
        "An audit keeps the state and data of one client alone, so it has no view of clients/1.",
    )


@pytest.mark.parametrize("threat", ["clients/1", "collusion/1"])
def test_an_audit_under_nothing_but_such_a_threat_model_is_refused_before_it_trains(threat, pair, tmp_path):
    with pytest.raises(UsageError, match=f"leave out --stage audit.*no view of {threat}"):
        evaluate(**AUDITED, stages=("final", "audit"), threats=(threat,), out=tmp_path, workers=1)
    assert not list(tmp_path.iterdir())


def test_attacks_run_under_requested_threat_models_alone_and_what_cannot_is_said(pair, tmp_path):
    options = {**SMALL, "attacks": ("analytic", "adaptive_server", "mia_loss"), "stages": ("init", "final")}
    resolved = resolve(configure("quick", **options, defense="none", threats=("client/1",)))
    assert {group.threat.name for group in groups(resolved)} == {"client/1"}
    assert list(inapplicable(resolved)) == [
        "Attacks that cannot use the view of client/1 are left out: adaptive_server."
    ]
    usual = resolve(configure("quick", **options, defense="none"))
    assert {(group.threat.name, group.records) for group in groups(usual)} == {("server/1", False), ("client/1", True)}
    assert not list(inapplicable(usual)), "where none is named, attacks run under their own"
    lines = []
    progress = Bars(quiet=True)
    progress.say = lines.append
    evaluate(resolved.config, out=tmp_path / "out", workers=1, progress=progress)
    assert [line for line in lines if "left out" in line] == list(inapplicable(resolved))
    options["attacks"] = ("adaptive_server",)
    with pytest.raises(UsageError, match=r"another --threat than client/1 or .*clients/1.*left out: adaptive_server"):
        evaluate(defense="none", **options, threats=("client/1",), out=tmp_path / "none", workers=1)


def test_records_of_a_threat_model_that_is_not_registered_here_are_still_read(pair, tmp_path):
    options = {"model": "mlp", "clients": 3, "rounds": 1, "train": 90, "victims": 2, "candidates": 12}
    options |= {"attacks": ("analytic",), "attack_batch": (1,), "stages": ("init",), "threats": ("clients/1",)}
    evaluate(defense="none", **options, out=tmp_path / "out", workers=1)
    known = THREATS.pop("clients/1")
    try:
        assert len(list(Store(tmp_path / "out").load_all())) > 0
        verify(tmp_path / "out")
        with pytest.raises(UsageError, match="no threat model named 'clients/1'"):
            evaluate(defense="none", **options, out=tmp_path / "other", workers=1)
    finally:
        register(known)
