"""What every registered attack must keep, whatever it does: the battery of `ppbench.testing`, and our own rules.

Attacks come from the registry, each also against the defenses that it is built for, so that a new one is tested
without a line here: in the network, loss and federation that the defense's own setting asks for. Attacks that need an
audit are asked below: one of an undefended federation that learns its few records by heart, and of noise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from subprocess import PIPE, Popen
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy import stats
from thief import answered_by
from torch import Tensor

from ppbench.adversary.attack import Attack
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin, plugins
from ppbench.defenses.mpdp.protocol import MPDPNaive
from ppbench.defenses.none import NoDefense
from ppbench.federation.plan import Data
from ppbench.federation.threats import THREATS
from ppbench.run import evaluation
from ppbench.run.experiment import make_attack
from ppbench.testing.attacks import ATTACK_PROPERTIES, duels, finds_the_planted_leak, properties_in
from ppbench.testing.record_attacks import extraction_result, masked_plan, memorized, observed_view
from ppbench.testing.small_federation import CHANCE_LEVEL, Duel, all_digits, ask, seeded

ATTACKS: dict[str, type[Attack]] = {
    name: load_plugin("attacks", name) for name, plugin in plugins("attacks").items() if plugin.ours
}
EXTRACTION = [name for name, attack in ATTACKS.items() if attack.kind == "extraction"]
DECIBELS = {"gifd": 25, "gias": 25, "ggl": 20}  # through a generator, whose stages share the budget; by its latent
ENOUGH = {"gradinversion": 400, "ig_masked": 120, "likelihood": 150, "ig": 100, "gias": 150}
"""Budgets, less than their own, at which attacks find their planted leak 9 dB and more above what is asked."""
UNREAD = {  # masked numbers; the server alone has a key; clients get a perturbed model
    ("baffle_histogram", "baffle", "keeps_form_and_budget_eavesdropper/1"),
    ("baffle_labels", "baffle", "keeps_form_and_budget_eavesdropper/1"),
    ("adaptive_encrypted", "hybridalpha", "keeps_form_and_budget_eavesdropper/1"),
    ("adaptive_encrypted", "pile", "keeps_form_and_budget_client/1"),
}
LONG = {
    ("peel", "poison_harms_no_other"),
    ("closed_form", "survives_white_images"),
    ("closed_form", "survives_huge"),
    ("adaptive_spn", "keeps_form_and_budget_server/1"),
}
"""Cases of seconds: a usual run asks their questions of other attacks, and these attacks other questions."""
ELSEWHERE = {
    ("ggl", "finds_the_planted_leak"),  # of what its generator makes, below
    ("token_rows", "finds_the_planted_leak"),  # of texts: test_texts.py
    ("lamp", "finds_the_planted_leak"),
    ("noise_replay", "finds_the_planted_leak"),  # of noise, which undefended gradients lack: test_noise_replay.py
}


def cases() -> list[tuple[Duel, str]]:
    """Return each property with each duel that it is asked in; a view from disk in the last one alone (a process)."""
    results = []
    for name, attack in ATTACKS.items():
        if attack.audit:
            continue
        met = duels(attack())
        for duel in met:
            for question in properties_in(duel):
                missing = question.startswith("keeps_form_and_budget_") and question[22:] not in attack.threats
                idle = question == "guesses_the_same_from_disk" and (duel is not met[-1] or attack.kind == "label")
                known = question == "reads_the_model" and not duel.undefended and not attack.adaptive
                if not (missing or idle or known or (name, question) in ELSEWHERE):
                    leak = question == "finds_the_planted_leak" and name in ENOUGH
                    made = duel.quick(ENOUGH[name]) if leak else duel.attack
                    results.append((replace(duel, attack=made, decibels=DECIBELS.get(name, 30)), question))
    return results


CASES = cases()


def named(duel: Duel, question: str) -> Any:
    """Return a case that the battery knows by its attack, its defense and its question."""
    values = f"{duel.attack.kind} {question}", duel.attack.name, duel.defense.name
    late = [pytest.mark.nightly] if (duel.attack.name, question) in LONG else []
    return pytest.param(
        duel, question, marks=[pytest.mark.battery(*values), *late], id="-".join((question, *values[1:]))
    )


WORKER = """
import sys
from ppbench.adversary.isolated_worker import main
for line in sys.stdin:
    main(*line.split())
    print(0, flush=True)
"""


@pytest.fixture(scope="module")
def apart(pytestconfig: pytest.Config) -> Iterator[None]:
    """Let all views from disk be attacked in one process, which knows only files; of the whole, each in a fresh one."""
    if pytestconfig.getoption("--battery") == "whole":
        yield
        return

    def ask(target: str, words: list[str], *_: object) -> int:
        print(*words, file=worker.stdin, flush=True)
        return int(worker.stdout.readline() or 1)

    with (
        Popen([sys.executable, "-c", WORKER], stdin=PIPE, stdout=PIPE, text=True) as worker,
        answered_by(ask),
    ):
        yield


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("duel", "question"), [named(*case) for case in CASES])
def test_the_battery_finds_what_is_right(duel, question):
    result = ask(question, ATTACK_PROPERTIES[duel.attack.kind][question], duel)
    unread = (duel.attack.name, duel.defense.name, question) in UNREAD
    assert result.outcome == ("not asked" if unread else "holds"), result.sentence


def test_every_kind_has_attacks_and_their_declarations_hold():
    assert {attack.kind for attack in ATTACKS.values()} == set(ATTACK_PROPERTIES)
    for name, attack in ATTACKS.items():
        assert attack.name == name and attack.reference
        assert set(attack.threats) <= set(THREATS)
        assert (attack.targets or set()) <= set(plugins("defenses"))
        assert attack.adaptive or attack.targets is None or attack.kind == "extraction"


INF, NAN = float("inf"), float("nan")
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "dlg": dict(
        start=["gray"], label=["guessed"], dtype=["float16"], budget=[0], slots=[0], hopeless=[-1.0], progress=[1.0],
        stop=[0.0, NAN], restarts=[-1], patience=[-1], history=[0],
    ),
    "gifd": dict(method=["magic"], rho=[-1.0], latent=[2.0], steps=[0], map_lr=[0.0], spread=[NAN]),
    "ig": dict(tries=[0], slots=[0], tv=[NAN], label=["guess"]),
    "ig_masked": dict(tries=[2]),
    "likelihood": dict(lr=[0.0], budget=[0]),
    "gradinversion": dict(group=[-1.0], norm=[INF]),
    "baffle_labels": dict(method=["bayes"]),
    "baffle_histogram": dict(candidates=[0]),
    "audit_one_run": dict(share=[0.0, 1.1, NAN]),
    "mia_lira": dict(shrink=[-1.0]),
    "mia_rmia": dict(gamma=[0.0], a=[1.5]),
    "mia_nn": dict(seeds=[2]),
    "mia_whitebox": dict(rounds=[0], seeds=[1]),
    "mia_update_cosine": dict(ridge=[0.0]),
    "mia_fedmia": dict(ridge=[0.0]),
    "mia_stack": dict(penalty=[0.0, INF]),
    "tracing_cosine": dict(ridge=[-1.0, INF]),
}  # fmt: skip
OUT_OF_RANGE["idlg"] = OUT_OF_RANGE["dlg"]


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name(name):
    for field, values in OUT_OF_RANGE[name].items():
        for value in values:
            with pytest.raises(UsageError, match=f"^Attack '{name}': {field}={value!r} cannot be used; [^.]+"):
                ATTACKS[name](**{field: value}).check()
            with pytest.raises(UsageError, match=field):
                make_attack(name, {field: value})


def test_planted_leak_an_image_that_the_generator_makes_is_found_by_its_latent():
    duel = Duel(ATTACKS["ggl"](), NoDefense(), DECIBELS["ggl"])
    public = Data(all_digits().x[600:1000], all_digits().y[600:1000])
    decoder = duel.attack.prior(replace(duel.probe(1).view, public=public)).decoder
    draws = seeded(4)

    def pictures(x: Tensor) -> Tensor:
        return decoder.decode(torch.randn(len(x), decoder.plan.latent, generator=draws)).detach()

    assert list(finds_the_planted_leak(replace(duel, pictures=pictures))) == []


@pytest.mark.parametrize("name", [n for n in EXTRACTION if not ATTACKS[n].adaptive])
def test_who_takes_a_masked_iterate_as_it_is_finds_no_decisions(name):
    for duel in duels(ATTACKS[name]())[1:]:
        duel = replace(duel, defense=replace(duel.defense, kappa=10.0))
        plan = masked_plan(duel)
        for threat in duel.attack.threats:
            view = observed_view(duel, plan, memorized(plan), threat)
            result = extraction_result(duel.attack, view, plan, memorized(plan))
            assert result.share < 0.5 and result.error > 2


def test_the_small_mask_that_mpdp_can_learn_under_leaves_decisions_readable():
    """kappa 1, so that clipping leaves something to learn from: more than chance is right in the masked outputs.

    Of 20 masks the mean is 0.40, from 0.08 to 0.73, and at kappa 10 it is 0.10, which is chance.
    """
    for kappa, above in ((1.0, True), (10.0, False)):
        duel = Duel(ATTACKS["query"](), MPDPNaive(kappa=kappa))
        plan = masked_plan(duel)
        params = memorized(plan)
        views = [observed_view(duel, plan, params, "client/1", seed) for seed in range(10)]
        shares = [extraction_result(duel.attack, view, plan, params).share for view in views]
        assert (sum(shares) / len(shares) > 0.3) == above


@pytest.mark.parametrize("name", [n for n in EXTRACTION if not ATTACKS[n].adaptive])
def test_null_under_an_overwhelming_mask_decisions_are_chance(name):
    """Classes are exchangeable in the mask's law, so agreement is 1 / C in the mean over masks, whatever the model."""
    duel = Duel(ATTACKS[name](), replace(load_plugin("defenses", "pbpfl")(), kappa=1e6))
    plan = masked_plan(duel)
    params = memorized(plan)
    views = (observed_view(duel, plan, params, "client/1", seed) for seed in range(60))
    shares = torch.tensor([extraction_result(duel.attack, view, plan, params).share for view in views])
    assert abs(float(shares.mean()) - 0.1) <= stats.t.isf((1 - CHANCE_LEVEL) / 2, 59) * float(shares.std()) / 60**0.5


AUDITS = {name: attack for name, attack in ATTACKS.items() if attack.audit not in ("", "clients", "secrets")}
"""Those about records; canary clients are asked about in `test_canary_clients.py`, secrets in `test_exposure.py`."""
ASKED: dict[str, Any] = {
    **{"defense": "none", "model": "mlp", "model_options": {"hidden": 64}, "clients": 3, "train": 240, "public": 0.4},
    **{"rounds": 16, "local_epochs": 4, "batch_size": 32, "lr": 0.01, "decay_at": (), "schedule": "parallel"},
    **{"attacks": tuple(AUDITS), "stages": ("audit",), "references": 8, "canaries": 30, "candidates": 40},
    **{"threats": ("server/1", "client/1")},
}


def audited(out, **changes):
    """Return the records of an evaluation in this process that draws no page."""
    with patch.object(evaluation, "write_board"):
        return evaluation.evaluate(**{**ASKED, **changes}, out=out, workers=1).records


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Return the records by defense, attack and threat."""
    records = audited(tmp_path_factory.mktemp("audit") / "out")
    return {(r.config.defense.id, r.config.attack.id, r.config.threat_model.id): r for r in records}


AUDITED = [(name, threat) for name, attack in AUDITS.items() for threat in attack.threats]
MEMBERS = [(name, threat) for name, threat in AUDITED if AUDITS[name].kind == "membership"]
OWNERS = [(name, threat) for name, threat in AUDITED if AUDITS[name].kind == "tracing"]


def test_audits_have_attacks_of_every_need():
    assert {attack.audit for attack in AUDITS.values()} == {"references", "rounds"}
    assert MEMBERS and OWNERS


@pytest.mark.parametrize(("name", "threat"), AUDITED)
def test_an_audit_gives_a_complete_cell(name, threat, records):
    for defense in ("none", "full_noise"):
        record = records[defense, name, threat]
        assert record.status == "complete", record.reason
        assert record.config.stage == "audit" and record.config.audit is not None
        assert record.config.audit.references == 8 and record.config.audit.canaries == 30


@pytest.mark.parametrize(("name", "threat"), MEMBERS)
def test_planted_leak_canaries_that_were_learned_by_heart_are_found(name, threat, records):
    record = records["none", name, threat]
    weak = "offline" in name or name == "mia_fedmia"  # these learn from half of the runs, that from two other clients
    assert record.metric("canary_auc").value > (0.8 if weak else 0.9)
    epsilon = record.metric("epsilon_lower")
    assert epsilon is None or epsilon.value > 0.5


@pytest.mark.parametrize(("name", "threat"), MEMBERS)
def test_null_uploads_of_noise_know_no_member(name, threat, records):
    record = records["full_noise", name, threat]
    for metric in ("auc", "canary_auc"):
        area = record.metric(metric)
        more = (area.high - area.low) / 2  # 95 % intervals of a dozen cells: twice as wide, they are 99.99 % ones
        assert area.low - more <= 0.5 <= area.high + more
    epsilon = record.metric("epsilon_lower")
    assert epsilon is None or epsilon.value < 0.25  # at most .006 over ten seeds; a 95 % bound, .5 and more of a leak


@pytest.mark.parametrize(("name", "threat"), OWNERS)
def test_owners_are_traced_and_not_in_noise(name, threat, records):
    traced, noise = (records[d, name, threat].metric("tracing_accuracy") for d in ("none", "full_noise"))
    assert traced.low > traced.chance
    assert noise.low <= noise.chance  # or below: the first client owns no record here, which the attack cannot know


@pytest.mark.nightly
def test_one_seed_one_result(records, tmp_path):
    """Of the attacks that need no references: the target is trained anew, in another folder."""
    some = tuple(n for n, attack in AUDITS.items() if attack.audit == "rounds" and n != "mia_whitebox")  # it fits long
    small = {"attacks": some, "references": 0, "rounds": 2, "canaries": 4, "candidates": 10}
    once, again = (audited(tmp_path / folder, **small) for folder in ("a", "b"))
    assert [r.model_dump_json() for r in once] == [r.model_dump_json() for r in again]
