"""Defenses that only pretend fall to the server's own use of their uploads; honest ones tell it nothing new."""

from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

import pytest
import torch
from daily import every_third, every_third_row
from lies.ppbench_lies import LIES, Blinded, Cipher, Decode, Permute, Share, Shy, Sums
from observations import reached, seeded, watched

from ppbench.adversary.replay import SAME_UPDATE, replayed_evidence
from ppbench.adversary.victims import choose_victims
from ppbench.attacks.adaptive.server import AdaptiveServer, ServerLabels
from ppbench.attacks.reconstruction.dlg import IDLG
from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Step
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Local, Plan
from ppbench.federation.wire import SERVER, Model
from ppbench.nets.net import initial, net_spec
from ppbench.questions.base import question_of
from ppbench.questions.inquiry import Probe, Yardstick
from ppbench.run.detection import probe_flags
from ppbench.run.experiment import make_defense
from ppbench.testing.defenses import DEFENSE_PROPERTIES
from ppbench.testing.small_federation import DefenseTrial, NotAsked

BELIEVED = [lie for lie in LIES if lie.name != "lie_twice"]
"""Lies that hide images from who reads uploads as their author says; wrong labels alone hide labels."""
SQUARED = "pbpfl", "pbpfl_ext", "mp_cdp", "baffle"
steps_on = DEFENSE_PROPERTIES["evidence_is_what_the_server_steps_on"]


@pytest.fixture
def sees(started):
    """Return what a server sees of eight victims of a small federation under a defense, and whose they are."""

    def watch(defense, clients=4, threat="server/1", count=8):
        return watched(started(defense, clients), threat, count=count)

    return watch


@pytest.fixture
def started(deal):
    """Return a small federation under a defense, of a network and a loss that suit it."""

    def start(defense, clients=4, schedule="parallel"):
        squared = defense.name in SQUARED
        spec = net_spec("mlp", (1, 8, 8), 10, {"hidden": 16, "bias": defense.name != "mp_cdp"})
        spec = spec if squared else net_spec("dlnet", (1, 8, 8), 10, {"nconv": 2})
        local = Local("gradient" if squared else "delta", batch=16)
        plan = Plan(spec, clients, local, loss="squared" if squared else "cross_entropy", schedule=schedule)
        run = Federation(defense, plan, deal([24] * clients), Seeds(0))
        run.start(initial(plan.spec, 1))
        return run

    return start


def norm(tree):
    return float(torch.cat([value.double().flatten() for value in tree.values()]).norm())


@pytest.mark.parametrize("lie", every_third(LIES), ids=lambda lie: lie.name)
def test_a_lie_is_seen_through_and_its_labels_are_read(lie, sees):
    """Medians of 80 dB and more, where who believes its author has 12 dB at most."""
    seen = view, victims = sees(lie())
    assert median(reached(seen, AdaptiveServer(budget=200))[0]) > 50
    if lie in BELIEVED:
        assert median(reached(seen, IDLG(budget=60, restarts=0))[0]) < 20
    result = ServerLabels().run(view, victims.challenges(), seeded())
    right = [
        g.y.tolist() == victims.truth(u).y.argmax(1).sort().values.tolist()
        for g, u in zip(result, victims.units, strict=True)
    ]
    assert all(right)
    assert list(steps_on(DefenseTrial(lie()))), "authors are told by `check_defense`"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dp", {"sigma": 0.1}),
        ("full_noise", {}),
        ("ppdl", {}),
        ("spn", {}),
        ("pbpfl", {}),
        ("mp_cdp", {"bound": 10.0}),
        ("baffle", {"masks": "none"}),
    ],
)
def test_an_honest_upload_says_what_its_defense_says_of_it(name, options, sees):
    """Secrets that a server draws in a round are those of that round; of noise of its own it knows."""
    view, _ = sees(make_defense(name, options))
    own = {e.unit: e.observed for e in view.defense.evidence(view)}
    read = [e for e in replayed_evidence(view) if len(e.unit) == 1]
    assert {e.unit for e in read} == own.keys()
    for unit, update in own.items():
        apart = [norm({n: v - update[n] for n, v in e.observed.items()}) for e in read if e.unit == unit]
        assert min(apart) < 10 * SAME_UPDATE * norm(update)
    assert list(steps_on(DefenseTrial(make_defense(name, options)))) == []


@pytest.mark.parametrize(("name", "options"), every_third_row([("secagg", {}), ("pbpfl_ext", {}), ("baffle", {})]))
def test_of_sums_the_cohort_alone_is_read(name, options, sees):
    defense = make_defense(name, options)
    view, victims = sees(defense, clients=10, count=10)
    assert {len(e.unit) for e in replayed_evidence(view)} == {10}
    with pytest.raises(NotAsked):
        list(steps_on(DefenseTrial(defense)))
    assert median(reached((view, victims), AdaptiveServer(budget=100))[0]) < 20


def test_noise_hides_as_much_as_from_others(sees):
    for defense in (make_defense("dp", {"sigma": 0.1}), make_defense("full_noise")):
        seen = sees(defense)
        decibels, plain = (median(reached(seen, attack)[0]) for attack in (AdaptiveServer(budget=60), IDLG(budget=60)))
        assert decibels == plain < 12


def test_what_the_server_had_when_a_round_began_is_the_servers_alone(sees):
    for threat, known in (("server/1", True), ("collusion/1", True), ("client/1", False), ("eavesdropper/1", False)):
        view, _ = sees(Permute(), threat=threat)
        assert (view.begun(0, 1) is not None) is known
        assert bool(replayed_evidence(view)) is known


def test_a_round_that_goes_otherwise_is_not_believed(sees):
    """Other weights than were sent then: no evidence, rather than answers read by other secrets."""
    view, _ = sees(Share())
    begun = view.begun(0, 1)
    other = replace(begun, server=replace(begun.server, params={n: v + 1 for n, v in begun.server.params.items()}))
    states = tuple(replace(s, state=other) if s.state is begun else s for s in view.states)
    values = {slot.probe for e in replayed_evidence(replace(view, states=states)) for slot in e.unit}
    assert values and 0 not in values
    question = view.defense.round(None, begun.server, [0]).send(None)
    assert isinstance(question, Step) and isinstance(question.out[0], Model) and SERVER not in question.out


def flags(seen, attack=None):
    """Return what the scorer remarks about the defense's own account of its uploads, by code."""
    view, victims = seen
    attack = attack or AdaptiveServer(budget=4)
    inquiry = question_of("reconstruction").of_probe(Probe(attack, view, victims, Seeds(0), view.public, Yardstick))
    guesses = inquiry.score(attack.run(view, inquiry.challenges, seeded())).flags
    return {flag.code: flag for flag in guesses if flag.code.startswith("own_")}


@dataclass(frozen=True)
class Alone(AdaptiveServer):
    """Uses its own evidence alone, and does not say that this is the server's step."""

    name: ClassVar[str] = "alone"
    replays: ClassVar[bool] = False


def test_an_account_that_the_servers_step_belies_is_remarked(sees):
    for lie in (Decode, Cipher, Sums):
        assert set(flags(sees(lie()))) == {"own_account"}
    seen = sees(Permute())
    remarks = flags(seen)
    assert set(remarks) == {"own_account"} and "explains them worse than the step" in remarks["own_account"].detail
    assert set(flags(sees(Blinded()))) == {"own_weights"}
    for name, options in (
        ("none", {}),
        ("dp", {"sigma": 0.1}),
        ("full_noise", {}),
        ("ppdl", {}),
        ("spn", {}),
        ("pbpfl", {}),
    ):
        assert flags(sees(make_defense(name, options))) == {}
    assert flags(seen, IDLG(budget=4)) == {}, "of cells that look at the server's step alone"
    assert flags(seen, Alone(budget=4)) == {}, "not of all that read what is their own"


@pytest.fixture
def remarks(started):
    """Return the flags of a probe of four victims under a defense, beside a round of training."""

    def remark(defense, kind="gradient", schedule="parallel"):
        run = started(defense, schedule=schedule)
        victims = choose_victims(run.shards, "server/1", 1, 4, Seeds(0), sums=defense.sums).data
        return probe_flags(run, run.probe(victims, kind), victims)

    return remark


def test_who_protects_the_probe_alone_is_found_out(remarks):
    """By what it sends in training, 1e-7 from what no defense sends."""
    for kind, schedule in (("gradient", "parallel"), ("local", "parallel"), ("gradient", "round_robin")):
        (flag,) = remarks(Shy(), kind, schedule)
        assert flag.code == "probe_noticed" and "in the probes they are not" in flag.detail


@pytest.mark.parametrize(
    ("name", "options"),
    every_third_row(
        [
            *(("none", {}), ("ppdl", {}), ("spn", {}), ("dp", {"sigma": 0.01}), ("full_noise", {}), ("mp_cdp", {})),
            *(("pbpfl_ext", {}), ("dp_sgd", {}), ("pbpfl", {}), ("fedpc", {}), ("baffle", {})),
        ]
    ),
)
def test_honest_clients_are_as_far_from_no_defense_in_training_as_in_a_probe(name, options, remarks):
    assert remarks(make_defense(name, options)) == ()
