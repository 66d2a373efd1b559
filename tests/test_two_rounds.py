"""Attacks on several rounds: a view cut by round, evidence of rounds as one, and `two_rounds`, which needs two."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest
import torch
from observations import seeded

from ppbench.adversary.attack import Attack, readable
from ppbench.adversary.victims import choose_victims
from ppbench.attacks.reconstruction.dlg import IDLG, TwoRounds
from ppbench.attacks.reconstruction.fastpath.chain import ChainObjective
from ppbench.attacks.reconstruction.search.problem import (
    JointObjective,
    MappedObjective,
    SimulatedObjective,
    objective,
)
from ppbench.attacks.reconstruction.search.starts import simulation_groups
from ppbench.base.declarations import declared, read_declared
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.defenses.dp import DP
from ppbench.defenses.none import NoDefense
from ppbench.federation.evidence import (
    Evidence,
    JointEvidence,
    at_truth,
    joint_evidence,
    numbered,
    simulation,
    with_number,
)
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import configure
from ppbench.run.experiment import select_attacks
from ppbench.testing.attacks import check_attack
from ppbench.testing.small_federation import Duel, psnrs


@pytest.mark.parametrize("threat", ["server/1", "eavesdropper/1", "client/1"])
def test_each_round_of_a_view_gives_evidence_of_its_own_model(federate, plan, threat):
    run = federate(NoDefense(), replace(plan, local=Local("gradient", batch=16, opt=Opt(lr=0.5))))
    victims = choose_victims(run.shards, threat, 2, 4, Seeds(0))
    run.parties.server = replace(run.parties.server, counts=torch.full_like(run.parties.server.counts, 40))
    view = run.probe(victims.data, rounds=3).view(threat, own=victims.own)
    parts = view.by_round()
    assert [sorted({e.round for e in part.mail if e.receiver == SERVER}) for part in parts] == [[1], [2], [3]]
    models = []
    for part in parts:
        for evidence in part.defense.evidence(part):
            data = [victims.data[slot] for slot in evidence.unit]
            assert at_truth(evidence, torch.stack([d.x for d in data]), torch.stack([d.y for d in data])) < 1e-4
            models.append(evidence.params["head.bias"])
    assert len({tuple(model.tolist()) for model in models}) >= 3
    assert len(TwoRounds().evidence(view)) == len(parts[0].defense.evidence(parts[0])) > 0


def rounds_of(plan: Plan, measures: list[str], victims: int, nuisance: int = 0) -> list[Evidence]:
    """Return evidence of each victim's same batch at as many models as `measures`."""
    x = torch.rand(victims, 1, 2, *plan.spec.shape, generator=seeded(3), dtype=torch.float64)
    y = torch.randn(victims, 1, 2, plan.spec.classes, generator=seeded(4), dtype=torch.float64).softmax(-1)
    lists = []
    for number, measure in enumerate(measures):
        params = {n: v.double() for n, v in initial(plan.spec, number).items()}
        simulate = simulation(plan, params)

        def scaled(x, y, factor, simulate=simulate):
            return {n: v * factor.exp() for n, v in simulate(x, y).items()}

        unknown = {"factor": ()} if number < nuisance else {}
        pieces = []
        for v in range(victims):
            observed = {n: g.detach() for n, g in simulate(x[v], y[v]).items()}
            pieces.append(Evidence((Slot(v, 0),), observed, scaled if unknown else simulate,
                                   None if unknown else params, nuisance=unknown, measure=measure))  # fmt: skip
        lists.append(pieces)
    return joint_evidence(lists)


@pytest.mark.parametrize(
    ("model", "options", "nuisance", "kinds"),
    [
        ("dlnet", {"nconv": 2}, 0, [ChainObjective, ChainObjective]),
        ("densenet", {"growth": 2, "blocks": 2, "layers": 1}, 0, [MappedObjective, MappedObjective]),
        ("dlnet", {"nconv": 2}, 1, [SimulatedObjective, ChainObjective]),
    ],
)
def test_all_rounds_at_once_have_the_slopes_of_autograd_each_on_its_fast_path(model, options, nuisance, kinds):
    plan = Plan(net_spec(model, (1, 8, 8), 10, options), 1)
    evidence = rounds_of(plan, ["squares", "cosine"], 3, nuisance)
    assert simulation_groups(evidence) == [[0, 1, 2]]
    fast = objective(evidence, plan, 2, torch.float64)
    assert isinstance(fast, JointObjective) and [type(part) for part in fast.parts] == kinds
    x = torch.rand(4, 2, 1, 8, 8, generator=seeded(1), dtype=torch.float64)
    y = torch.randn(4, 2, 10, generator=seeded(2), dtype=torch.float64).softmax(-1)
    unknown = torch.full((4, nuisance), 0.3, dtype=torch.float64)
    arguments = x, y, unknown, torch.tensor([2, 0, 1, 0])
    for mine, theirs in zip(fast(*arguments), SimulatedObjective(evidence)(*arguments), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
        assert not theirs.numel() or bool((theirs != 0).any())


def test_joint_evidence_is_of_units_seen_in_all_rounds_and_relative_in_each():
    plan = Plan(net_spec("mlp", (7,), 3), 1)
    simulate = simulation(plan, initial(plan.spec, 0))
    one = initial(plan.spec, 1)
    first = [Evidence((Slot(0, c),), {n: (c + 1) * v for n, v in one.items()}, simulate) for c in (2, 1, 0)]
    again = Evidence((Slot(0, 1),), one, simulate)
    second = [Evidence((Slot(0, c),), {n: 1000 * v for n, v in one.items()}, simulate) for c in (0, 1)]
    whole = joint_evidence([[*first, again], second])
    assert [e.unit for e in whole] == [(Slot(0, 1),), (Slot(0, 0),)] and whole[0].parts[0] is first[1]
    guess = numbered([{n: 0.5 * v for n, v in part.observed.items()} for part in whole[0].parts])
    assert float(whole[0].discrepancy(guess)) == pytest.approx(0.25 + 0.25) and float(whole[0].scale()) == 2
    assert with_number(whole[0].observed, 1).keys() == one.keys()
    silent = JointEvidence.of([first[0], replace(again, observed={n: 0 * v for n, v in one.items()})])
    assert float(silent.scale()) == 0, "as a search takes up what observes something alone"
    assert joint_evidence([]) == [] == joint_evidence([first, []])


@pytest.mark.nightly
def test_two_independent_noises_average_where_one_round_is_not_enough():
    """Half the variance of the noise is 3 dB at most: after a step on the victim the second gradient is smaller."""
    world = Duel(TwoRounds(), DP(sigma=1e-3)).probe(24)
    one, two = (psnrs(world, world.answers(attack(budget=200, restarts=0)), attack()) for attack in (IDLG, TwoRounds))
    gains = torch.tensor(two) - torch.tensor(one)
    error = float(gains.std()) / len(gains) ** 0.5  # measured: 2.2 +- 0.3
    assert max(one) < 50 and 3 * error < float(gains.mean()) < 3 + 3 * error


def test_labels_are_read_off_both_rounds():
    world = Duel(TwoRounds(), DP(sigma=0.3)).probe(40)
    right = []
    for attack in (IDLG(budget=1), TwoRounds(budget=1)):
        guesses = world.answers(attack)
        right.append(sum(g.y.tolist() == y for g, y in zip(guesses, world.labels, strict=True)))
    assert right[0] < right[1] < 40


def test_with_one_round_it_does_not_apply_and_says_what_helps():
    def chosen(*attacks, rounds):
        config = configure(defense="spn", attacks=attacks, probe_rounds=rounds)
        return [attack.name for attack in select_attacks(config)]

    right = (
        r"'two_rounds' needs 2 rounds of one batch and is not applicable to probes of 1 round; add --probe-rounds 2\.$"
    )
    with pytest.raises(UsageError, match=right):
        chosen("two_rounds", rounds=1)
    assert chosen("two_rounds", rounds=2) == ["two_rounds"]
    assert "two_rounds" not in chosen("all", rounds=1) and "two_rounds" in chosen("all", rounds=3)
    assert "two_rounds" not in chosen("standard", rounds=2)
    world = Duel(IDLG(), NoDefense()).probe(2)
    assert TwoRounds().evidence(world.view) == [] and not readable(TwoRounds(), world.view, world.challenges)


def test_a_published_transcript_of_one_round_is_refused(published):
    with pytest.raises(UsageError, match=r"'two_rounds' needs 2 rounds .* to probes of 1 round, as in this transcript"):
        published.frozen("spn").run("two_rounds")


def test_what_an_attack_declares_is_read_off_the_contract():
    hints = typing.get_type_hints(Attack, include_extras=True)
    stated = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.ClassVar}
    values = declared(TwoRounds, Attack)
    assert set(values) == stated and {"probe_rounds", "replays", "reads_alone"} <= stated
    assert read_declared(values, Attack) == {name: getattr(TwoRounds, name) for name in stated}
    for wrong in ({"probe_rounds": 0}, {"probe_rounds": 101}, {"probes": ("x",)}, {"threats": ()}, {"version": ""},
                  {"kind": 300 * "x"}, {"audit": "x"}, {"more": 1}):  # fmt: skip
        with pytest.raises(ValueError, match=r"validation error|is declared where it should not be"):
            read_declared({**values, **wrong}, Attack)
    with pytest.raises(ValueError, match="'quick' is declared where it should not be, or is not declared"):
        read_declared({name: value for name, value in values.items() if name != "quick"}, Attack)


def test_the_battery_probes_as_many_rounds_as_an_attack_needs():
    class Blind(TwoRounds):
        """Declares one round, and so finds nothing in what it is shown."""

        probe_rounds = 1

        def evidence(self, view):
            return TwoRounds().evidence(view)

    assert [f.outcome for f in check_attack(TwoRounds, only=("finds_the_planted_leak",))] == ["holds"]
    with pytest.raises(AssertionError, match="undefended gradients give a median PSNR"):
        check_attack(Blind, only=("finds_the_planted_leak",))
