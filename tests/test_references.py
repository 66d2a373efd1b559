"""Reference runs: trained in lockstep as alone, kept by content, taken up again after a kill, refused in a sentence."""

from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file

from ppbench.base.errors import Overflow, UsageError
from ppbench.base.tree import leaves
from ppbench.defenses.dp import DP
from ppbench.defenses.fedpc.protocol import FedPC
from ppbench.defenses.none import NoDefense
from ppbench.defenses.pbpfl.protocol import PBPFLExt
from ppbench.defenses.spn import SPN
from ppbench.federation.engine import run_many
from ppbench.federation.plan import Local, Plan
from ppbench.nets.net import net_spec
from ppbench.run.audit import runs as audit_runs
from ppbench.run.audit.runs import TARGET, PointAudit, Recorder, Refused, load_recorded, spaced_rounds
from ppbench.run.config import configure
from ppbench.run.experiment import Point, resolve

SMALL = dict(
    defense="none", model="mlp", model_options={"hidden": 8}, train=120, public=0.5, clients=3, rounds=3, canaries=6,
    candidates=10, references=4, stages=("audit",), attacks=("mia_loss",), schedule="parallel",
)  # fmt: skip


def audit(tmp_path, defense=None, **options):
    experiment = resolve(configure(**{**SMALL, **options}))
    return PointAudit.of(experiment, Point(defense or NoDefense()), tmp_path / "cache")


PLAN = Plan(net_spec("mlp", (1, 8, 8), 10, {"hidden": 16}), 4, Local(batch=16))
MASKED = {"loss": "squared", "local": Local("gradient", batch=16)}
CASES = [
    (NoDefense(), {}),
    (NoDefense(), {"schedule": "round_robin"}),
    (DP(), {}),
    (SPN(), {"schedule": "round_robin"}),
    (FedPC(), {}),
    (PBPFLExt(), MASKED),
]


@pytest.mark.parametrize("defense,changes", CASES, ids=lambda v: getattr(v, "name", ""))
def test_runs_in_lockstep_give_the_bits_they_give_alone_in_a_loop(defense, changes, federate):
    plan = replace(PLAN, **changes)
    alone = [federate(defense, plan, seed, backend="loop") for seed in (5, 6, 7)]
    beside = [federate(defense, plan, seed, backend="loop") for seed in (5, 6, 7)]
    ends = [fed.run(2) for fed in alone]
    assert run_many(beside, 2) == ends
    for one, other in zip(alone, beside, strict=True):
        assert (one.round, one.wire.up, one.wire.down) == (other.round, other.wire.up, other.wire.down)
        mine, theirs = (leaves((fed.parties.server, fed.parties.clients)) for fed in (one, other))
        assert len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    weights = [torch.cat([leaf.flatten() for leaf in leaves(fed.parties.server.params)]) for fed in beside]
    assert not torch.equal(weights[0], weights[1]), "runs of other seeds must differ"


def test_runs_in_lockstep_agree_under_vmap_to_float_tolerance(federate):
    alone = [federate(DP(), PLAN, seed, backend="loop") for seed in (5, 6, 7)]
    beside = [federate(DP(), PLAN, seed, backend="vmap") for seed in (5, 6, 7)]
    assert [fed.run(2) for fed in alone] == run_many(beside, 2) == [True] * 3
    for one, other in zip(alone, beside, strict=True):
        for a, b in zip(leaves(one.parties.server.params), leaves(other.parties.server.params), strict=True):
            assert torch.allclose(a, b, atol=2e-4)


def test_a_run_that_diverges_stops_alone(federate):
    @dataclass(frozen=True)
    class Breaks(NoDefense):
        def upload(self, ctx, me, result):
            if ctx.round == 2 and seeds[id(ctx.plan)] == 0:
                raise Overflow("out of range")
            return super().upload(ctx, me, result)

    plans = [PLAN, replace(PLAN, data_range=(0.0, 2.0))]
    seeds = {id(plan): index for index, plan in enumerate(plans)}
    runs = [federate(Breaks(), plan, 0, backend="loop") for plan in plans]
    for run, plan in zip(runs, plans, strict=True):
        run.plan = plan
    assert run_many(runs, 3) == [False, True]
    assert [run.round for run in runs] == [1, 3]


def test_the_recorder_keeps_all_rounds_and_the_states_that_the_server_had(federate, tmp_path):
    fed = federate(NoDefense(), PLAN, 0, backend="loop")
    twin = federate(NoDefense(), PLAN, 0, backend="loop")
    recorder = Recorder(fed, 4)
    assert fed.run(4, recorder) and twin.run(4)
    recorder.save(tmp_path / "rounds.safetensors")
    view = load_recorded(fed, tmp_path / "rounds.safetensors").view("server/1")
    exchanges = list(view.exchanges())
    seen = [(e.round, e.slot.probe, e.slot.client) for e in exchanges]
    assert seen == [(t, -1, c) for t in range(1, 5) for c in range(4)]
    for exchange in exchanges:
        start = view.state_at(exchange).params
        assert all(torch.equal(start[name], value) for name, value in exchange.request.params.items())
    final = view.mail[-1].message.params
    assert all(torch.equal(final[n], v) for n, v in twin.parties.server.params.items()), "recording must move nothing"
    assert view.mail[-1].round == 5 and (fed.wire.up, fed.wire.down) == (twin.wire.up, twin.wire.down)
    assert {s.party for s in view.states} == {-1}
    size = sum(v.nbytes for v in load_file(tmp_path / "rounds.safetensors").values())
    model = sum(v.nbytes for v in final.values())
    assert model * 21 <= size < model * 21 + 100, "a broadcast and the state that it came from are stored once"


def test_evenly_spaced_rounds_are_kept_where_all_are_too_many(federate, tmp_path):
    fed = federate(NoDefense(), PLAN, 0, backend="loop")
    model = sum(v.numel() * 4 for v in fed.parties.server.params.values())
    recorder = Recorder(fed, 9, limit=3 * 6 * model + 100)  # a round: 4 uploads, the broadcast, the server's state
    fed.run(9, recorder)
    assert recorder.rounds == (1, 5, 9) and {e.round for e in recorder.mail} == {1, 5, 9}
    assert spaced_rounds(5, 9) == spaced_rounds(5, 5) == (1, 2, 3, 4, 5) and spaced_rounds(10, 4) == (1, 4, 7, 10)
    assert spaced_rounds(40, 2) == (1, 40) and spaced_rounds(40, 0) == spaced_rounds(40, 1) == (1,)


def test_reference_runs_are_done_once_and_a_killed_audit_goes_on(tmp_path, monkeypatch):
    first = audit(tmp_path, backend="loop")
    assert first.missing() == [TARGET]
    first.run(TARGET)
    assert first.missing() == [range(r, r + 1) for r in (1, 2, 3, 4)], "in a loop each run is by itself"
    first.run(range(2, 3))
    kept = first.path(range(2, 3)).read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(audit_runs, "run_many", killed)
        first.run(range(1, 2))
    again = audit(tmp_path, backend="loop")
    assert again.missing() == [range(r, r + 1) for r in (1, 3, 4)]
    again.complete()
    assert again.missing() == [] and again.path(range(2, 3)).read_bytes() == kept
    answers = again.answers()
    elsewhere = audit(tmp_path / "other", backend="loop")
    elsewhere.complete()
    assert all(torch.equal(value, answers[name]) for name, value in elsewhere.answers().items())
    assert answers["outputs"].shape[0] == 4 and answers["finished"].all()
    assert not list((tmp_path / "cache").rglob("*.tmp")) and not list((tmp_path / "cache").rglob(".target*"))


def test_more_references_leave_the_first_as_they_are(tmp_path):
    few, many = audit(tmp_path, references=2, backend="loop"), audit(tmp_path, references=6, backend="loop")
    assert few.home == many.home
    few.complete()
    assert many.missing() == [range(r, r + 1) for r in (3, 4, 5, 6)]
    assert torch.equal(few.population.keep, many.population.keep[:3])
    assert audit(tmp_path, candidates=8).home != few.home != audit(tmp_path, defense=DP()).home


def test_a_damaged_file_of_references_is_made_again(tmp_path):
    made = audit(tmp_path)
    made.complete()
    part = made.parts()[0]
    before = made.answers()["outputs"]
    made.path(part).write_bytes(b"not safetensors")
    assert torch.equal(made.answers()["outputs"], before)


def test_the_references_together_are_bounded_by_memory(tmp_path, monkeypatch):
    fed = audit(tmp_path, backend="vmap").start(0)
    assert audit_runs._room(fed)[1] == 8
    monkeypatch.setattr(audit_runs, "MEMORY", 1)
    assert audit_runs._room(fed)[1] == 1
    assert audit_runs._room(audit(tmp_path, backend="loop").start(0))[1] == 1


def test_a_defense_that_takes_no_such_shards_is_refused_in_a_sentence(tmp_path):
    @dataclass(frozen=True)
    class Picky(NoDefense):
        def check_data(self, plan, counts):
            raise UsageError("Clients need 1000 examples each.")

    picky = audit(tmp_path, defense=Picky())
    with pytest.raises(Refused, match="1000 examples"):
        picky.complete()
    assert not picky.home.exists()
