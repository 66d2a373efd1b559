"""What every registered defense must keep, whatever it does: the battery of `ppbench.testing`, and our own rules."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from daily import every_third
from torch.nn.functional import one_hot

from ppbench.attacks.reconstruction.search.problem import discrepancy, objective
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin, plugins
from ppbench.base.tree import nbytes
from ppbench.federation.contract import Defense
from ppbench.federation.engine import Federation
from ppbench.federation.plan import Local, Opt, Plan
from ppbench.federation.threats import THREATS
from ppbench.federation.wire import SERVER, Slot
from ppbench.testing.defenses import DEFENSE_PROPERTIES
from ppbench.testing.small_federation import DefenseTrial, PropertyResult, ask, plan_for, scene_victims

DEFENSES = [n for n, p in plugins("defenses").items() if p.ours]
ENCRYPTED = {"tp_smc", "hybridalpha", "pile"}
UNFIT = {
    "baffle",
    "pbpfl_ext",
    "secagg",
    "secagg_plus",
    "mpdp",
    "mpdp_h",
    "fedpc",
    *ENCRYPTED,
}  # for clients in turn: what cancels in a sum needs them all at once
# Their servers make nothing of one client's messages:
UNREAD = ENCRYPTED | {"baffle", "central", "fedpc", "mpdp_h", "pbpfl_ext", "secagg", "secagg_plus"}
SILENT = {"standalone"}  # its clients send nothing: there are no bytes, no secrets to find in mail, no evidence
OF_MAIL = ("bytes_are_counted", "secrets_", "evidence_is_what")
BARE = {"central"}  # hands its examples over, on purpose
OFF: dict[str, dict[str, Any]] = {"dp": {"sigma": 0.0}, "ppdl": {"theta": 1.0, "sigma": 0.0}, "spn": {"alpha2": 0.0}}
OFF |= {"soteria": {"rate": 0.0}, "mixup": {"alpha": 0.0}}
MOVES = "control_moves_accuracy_one_way"
TRAINED = {"dp"}  # over their grids: the others take too long for every run of the tests
LONG_WORLDS = {"baffle", "pbpfl_ext", "mpdp_h", *ENCRYPTED}  # 7 to 24 s of CPU
CASES = [(name, q) for q in DEFENSE_PROPERTIES for name in DEFENSES if q != MOVES or name in TRAINED]


def make(name: str) -> Defense:
    return load_plugin("defenses", name)()


@dataclass(frozen=True)
class FewClients(DefenseTrial):
    """The battery's federation with at most four clients and two steps a round: as much, sooner."""

    @property
    def plan(self) -> Plan:
        own = super().plan
        return replace(own, clients=min(own.clients, 4), local=replace(own.local, batch=24))


def federate(defense: Defense, **changes: Any) -> Federation:
    """Return a started federation of a defense in a plan that it accepts, with `changes` of that plan."""
    return FewClients(defense).federate(**changes)


def expected(name: str, question: str) -> str:
    """Return the outcome that is right for one of ours."""
    if question in ("secrets_from_the_server", "secrets_from_a_listener", "secrets_after_training") and name in BARE:
        return "fails"
    if name in SILENT and question.startswith(OF_MAIL):
        return "not asked"
    if question == "resumes_round_robin" and name in UNFIT:
        return "not asked"
    if question == "evidence_is_what_the_server_steps_on" and name in UNREAD:
        return "not asked"
    if question == "loop_equals_vmap" and not make(name).mappable:
        return "not asked"
    if question == "off_level_equals_none" and name not in OFF:
        return "not asked"
    return "holds"


def case(name: str, question: str) -> Any:
    """Return a case of the battery: secrets are asked of every defense in every run, the rest of enough of them."""
    marks = [] if question.startswith("secrets_") else [pytest.mark.battery(question, name)]
    late = question == MOVES or (question == "nothing_else_reaches_the_server" and name in LONG_WORLDS)
    return pytest.param(name, question, marks=[*marks, *([pytest.mark.nightly] if late else [])])


@pytest.mark.parametrize(("name", "question"), [case(*one) for one in CASES])
def test_the_battery_finds_what_is_right(name, question):
    off = OFF.get(name)
    trial = FewClients(make(name), None if off is None else tuple(off.items()))
    result: PropertyResult = ask(question, DEFENSE_PROPERTIES[question], trial)
    assert result.outcome == expected(name, question), result.sentence


@pytest.mark.parametrize("name", sorted(UNFIT))
def test_a_schedule_that_cannot_be_is_refused_before_anything_runs(name):
    with pytest.raises(UsageError, match=rf"{name}.*use --schedule parallel"):
        federate(make(name), schedule="round_robin")


@pytest.mark.parametrize("name", DEFENSES)
def test_evidence_on_one_broadcast_is_attacked_in_one_batch(name):
    run = federate(make(name))
    view = run.probe(scene_victims(run).data).view("server/1")
    assert len({id(e.simulate) for e in view.defense.evidence(view)}) == (0 if name in SILENT else 1)


@pytest.fixture(scope="module")
def table():
    """Return by defense and column whether the table of docs/threat-models.md says that an attack here reads it."""
    text = (Path(__file__).parents[1] / "docs" / "threat-models.md").read_text()
    lines = (
        text[text.index("## What each sees of each defense") :].split("\n| defense |")[1].split("\n\n")[0].splitlines()
    )
    columns = [cell.strip() for cell in lines[0].split("|")[:-1]]
    result = {}
    for line in lines[2:]:
        names, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        reads = {column: not cell.startswith("*") for column, cell in zip(columns, cells, strict=True)}
        for column, cell in zip(columns, cells, strict=True):
            if cell.strip("*").startswith("as the server"):
                reads[column] = reads["server/1"]
        result |= {(name, column): reads[column] for name in re.findall(r"`(\w+)`", names) for column in columns}
    return result


@pytest.mark.parametrize("name", every_third(DEFENSES))
def test_the_table_of_views_says_whom_evidence_gives_something(name, table):
    run, reads = federate(make(name), server_opt=Opt("sgd", 0.1)), {}
    count = 16 if name == "fedpc" else 4  # a client of FedPC reads rounds in which it was no pilot
    for threat in THREATS:
        victims = scene_victims(run, threat, count=count)
        view = run.probe(victims.data).view(threat, own=victims.own)
        reads[threat] = bool(view.defense.evidence(view))
    assert reads == {threat: table[name, column_of(THREATS[threat])] for threat in THREATS}


def column_of(threat):
    """Return the first threat model with the facts of `threat` that decide on mail: its column stands for it."""
    facts = attrgetter("server", "colludes", "overhears")
    return next(one.name for one in THREATS.values() if facts(one) == facts(threat))


@pytest.mark.parametrize(
    ("name", "measure"),
    [
        pytest.param(name, measure, marks=pytest.mark.battery(name, measure))
        for name in sorted(set(DEFENSES) - SILENT)
        for measure in ("squares", "cosine", "poisoned")
    ],
)
def test_what_a_search_minimizes_is_what_the_evidence_compares(name, measure):
    """However it is computed: a chain of layers may not leave out what a defense does to the gradient, as clipping."""
    run = federate(make(name))
    victims = scene_victims(run)
    view = run.probe(victims.data).view("server/1")
    for evidence in view.defense.evidence(view):
        question = evidence if evidence.measure == "hinge" else replace(evidence, measure=measure)
        data = torch.Generator().manual_seed(0)
        slots, count, classes = len(question.unit), victims.batch, run.plan.spec.classes
        x = torch.rand(1, slots * count, *run.plan.spec.shape, generator=data, dtype=torch.float64)
        y = one_hot(torch.randint(classes, (1, slots * count), generator=data), classes).double()
        extra = torch.zeros(1, sum(math.prod(shape) for shape in question.nuisance.values())).double()
        search, only = objective([question], run.plan, slots * count, torch.float64), torch.zeros(1, dtype=torch.int64)
        result = discrepancy(question, x[0], y[0], extra[0])
        torch.testing.assert_close(search(x, y, extra, only)[0][0], result, rtol=1e-6, atol=1e-9)


KEY = 32
BYTES: dict[str, Callable[[int, int, int], tuple[int, int | None, int, int]]] = {
    # name: of P parameters, C classes and N clients: down and up a message, set-up up and down of all clients
    "pbpfl": lambda p, c, n: (8 * (p + c), 3 * 8 * p, 8 * n, 0),
    "pbpfl_ext": lambda p, c, n: (8 * (p + c), 3 * 8 * p, (8 + KEY) * n, n * (n * (8 + KEY) + n * n)),
    "secagg": lambda p, c, n: (4 * p, 8 * p, (8 + KEY) * n, n * (n * (8 + KEY) + n * n)),
    # at set-up a client gets one total and its neighbors' numbers and keys: all others of a cohort this small
    "secagg_plus": lambda p, c, n: (4 * p, 8 * p, (8 + KEY) * n, n * (8 + (n - 1) * (8 + KEY))),
    "ppdl": lambda p, c, n: (4 * p, None, 8 * n, 0),  # what it sends depends on the data
    "top_k": lambda p, c, n: (4 * p, None, 8 * n, 0),
    # 8 bits of an entry, 4 bytes of a tensor: tests/test_compression.py
    "qsgd": lambda p, c, n: (4 * p, None, 8 * n, 0),
    "sign": lambda p, c, n: (4 * p, None, 8 * n, 0),
    "standalone": lambda p, c, n: (0, None, 0, 0),
    # a seed down, 2K = 200 masked numbers up
    "baffle": lambda p, c, n: (4 * p + 4, 4 * 200, (8 + KEY) * n, n * (n * (8 + KEY) + n * n)),
}
COUNTED = {"mpdp", "mpdp_h", "mp_dp_naive", "mp_cdp", "fedpc", "central", "precode", *ENCRYPTED}  # by their own tests


@pytest.mark.parametrize("name", DEFENSES)
def test_bytes_are_those_of_the_messages(name):
    run = federate(make(name))
    transcript = run.probe(scene_victims(run, count=4).data)
    assert {e.sender == SERVER for e in transcript.mail} == ({True} if name in SILENT else {True, False})
    for letter in transcript.mail:
        assert letter.nbytes == nbytes(letter.message)
    if name in COUNTED:
        return
    p, c, n = run.plan.net.parameter_count, run.plan.spec.classes, run.plan.clients
    down, up, setup_up, setup_down = BYTES.get(name, lambda p, c, n: (4 * p, 4 * p, 8 * n, 0))(p, c, n)
    for letter in transcript.mail:
        expected = down if letter.sender == SERVER else up
        assert expected is None or letter.nbytes == expected
    assert (run.setup_up, run.setup_down) == (setup_up, setup_down)


INF, NAN = float("inf"), float("nan")
OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "dp": dict(sigma=[-1.0], law=["cauchy"]),
    "dp_sgd": dict(noise_multiplier=[-0.1], clip=[0.0]),
    "ppdl": dict(theta=[0.0, 1.5], noise_on=["weights"]),
    "qsgd": dict(bits=[1, 3, 16]),
    "top_k": dict(theta=[0.0, 1.5]),
    "soteria": dict(rate=[-0.1, 1.1]),
    "mixup": dict(alpha=[-1.0, INF], partners=[0]),
    "precode": dict(beta=[-1.0, NAN], size=[0]),
    "spn": dict(alpha2=[-0.1], bits=[0], phi_tap=["tail"]),
    "full_noise": dict(sigma=[0.0, INF]),
    "baffle": dict(
        k=[0], sigma=[NAN], chunk=[-1], examples=[-1], ema=[1.0], average=["mean"], scheme=["backward"],
        masks=["float"], level=["day"],
    ),
    "fedpc": dict(
        beta=[0.0], alpha0=[NAN], flip=[1.5], pilot_clip=[-1.0], pilot_sigma=[1.0], batch_sizes=["64,0", "64,1.5"],
        epochs=[""], rates=["1,-1", "inf"], ternary_sign=["times"], packing=["bytes"], masks=["one"],
    ),
    "mpdp_h": dict(
        epsilon=[0.0, INF], delta=[0.0, 1.0], kappa=[NAN], bound=[0.0], floor=[-1.0], fraction_bits=[60],
        gamma=["matrix"], graph=["ring"],
    ),
    "tp_smc": dict(
        epsilon=[0.0, INF], delta=[0.0, 1.0], bound=[0.0], honest=[0.0, 1.5], key_bits=[1024], fraction_bits=[57]
    ),
    "hybridalpha": dict(least=[1, 1000], honest=[NAN], epsilon=[-1.0]),
    "pile": dict(kappa=[0.0], honest=[0.0], fraction_bits=[15], key_bits=[0]),
    "pbpfl_ext": dict(
        kappa=[0.0, NAN], fraction_bits=[57], precision=["float16"], head_bias=["gone"], norms=["batch"],
        families=["one"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name(name, plan):
    for field, values in OUT_OF_RANGE[name].items():
        for value in values:
            sentence = rf"^Defense '{name}': {field}={value!r} cannot be used; it must be .+\.$"
            with pytest.raises(UsageError, match=sentence) as refusal:
                replace(make(name), **{field: value}).check(plan_for(make(name), plan))
            assert ". " not in str(refusal.value)


def test_a_diverging_run_stops_and_says_so():
    run = federate(make("none"), local=Local(batch=16, opt=Opt("sgd", lr=1e38)))
    assert run.defense.weights(run.parties.server, [0, 3]) == pytest.approx([48 / 88, 40 / 88])  # by examples
    assert run.run(5) is False and run.round < 5


def test_slots_of_one_probe_are_its_cohort():
    run = federate(make("none"))
    data = {Slot(0, 1): run.shards[1], Slot(0, 2): run.shards[2]}
    mail = run.probe(data).mail
    assert {e.sender for e in mail} == {SERVER, 1, 2}
