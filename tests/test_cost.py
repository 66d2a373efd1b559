"""What a client's part of a round takes: memory to the byte and the same on every run, time beside the undefended."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from daily import every_third

from ppbench.base.errors import Overflow, UsageError
from ppbench.base.tree import leaves
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Local
from ppbench.nets.net import initial, net_spec
from ppbench.records.run_files import ClientTime, save_time, time_of, training_of
from ppbench.records.schema import Cost
from ppbench.report.costs import cost_ratios, cost_sentence, relative_costs
from ppbench.run import cost
from ppbench.run.experiment import make_defense
from ppbench.testing.small_federation import same_tensors

CPU = torch.device("cpu")
MEGA = 2**20


@dataclass(frozen=True)
class Hoarder(Defense):
    """Holds `megabytes` more than its training needs, one after another or all at once."""

    megabytes: int = 1
    at_once: bool = True

    name: ClassVar[str] = "hoarder"

    def compute(self, plan, job):
        blocks = []
        for _ in range(self.megabytes):
            blocks = [*blocks, torch.zeros(MEGA // 4)] if self.at_once else [torch.zeros(MEGA // 4)]
        return {name: value * 0 + sum(h[0] for h in blocks) for name, value in job.start.items()}


@dataclass(frozen=True)
class Counted(Defense):
    """Remembers which part of its work a client did."""

    name: ClassVar[str] = "counted"
    did: ClassVar[list[str]] = []

    def prepare(self, *args):
        self.did.append("prepare")
        return super().prepare(*args)

    def compute(self, *args):
        self.did.append("compute")
        return super().compute(*args)

    def upload(self, *args):
        self.did.append("upload")
        return super().upload(*args)


# -- memory ----------------------------------------------------------------------------------------------------------
def test_the_peak_is_what_is_held_at_a_time_to_the_byte():
    def together():
        return torch.zeros(1000), torch.zeros(500, dtype=torch.float64)

    def in_turn():
        first = torch.zeros(1000)
        del first
        return torch.zeros(500)

    blocks = torch.zeros(10_000)
    assert cost.peak_bytes(together, CPU) == 8000
    assert cost.peak_bytes(in_turn, CPU) == 4000
    assert cost.peak_bytes(lambda: blocks[:5], CPU) == 0, "what was there before does not count, nor does a view of it"


def test_garbage_in_cycles_of_before_is_not_freed_into_the_count():
    class Knot:
        def __init__(self) -> None:
            self.self, self.weight = self, torch.zeros(MEGA)

    for _ in range(3):
        Knot()
    assert cost.peak_bytes(lambda: [[[] for _ in range(5)] for _ in range(2000)] and torch.zeros(1000), CPU) == 4000


def test_twice_the_memory_shows_as_twice(federate):
    peaks = {n: cost.peak_memory(cost.measured_client(federate(Hoarder(megabytes=n)))) for n in (1, 2, 4)}
    own = peaks[1] - MEGA
    assert 0 < own < MEGA / 4
    assert abs(peaks[2] - peaks[1] - MEGA) < 64 and abs(peaks[4] - peaks[2] - 2 * MEGA) < 64
    in_turn = cost.peak_memory(cost.measured_client(federate(Hoarder(megabytes=4, at_once=False))))
    assert in_turn < 2.5 * MEGA, "what is freed again does not add up"


@pytest.mark.parametrize("name", every_third(["dp_sgd", "none", "spn", "pbpfl", "fedpc", "baffle"]))
def test_the_peak_is_the_same_on_every_run_and_over_more_steps(name, federate, plan):
    setting = type(make_defense(name)).setting.get("quick", {})
    if setting.get("upload") == "gradient":
        plan = replace(plan, local=replace(plan.local, upload="gradient"), loss=setting["loss"])
    if name == "pbpfl":
        plan = replace(plan, spec=net_spec("mlp", (1, 8, 8), 10, {"hidden": "16"}))
    fed = federate(make_defense(name, {"k": 20} if name == "baffle" else {}), plan=plan)
    results = [cost.peak_memory(cost.measured_client(fed)) for _ in range(2)]
    assert results[0] == results[1] > 0
    client = cost.measured_client(fed)
    assert cost.peak_memory(client) == cost.peak_memory(client, steps=3) == results[0]


def test_memory_grows_with_the_batch_and_not_with_the_number_of_batches(federate, plan):
    def peak(upload, batch, epochs=1):
        own = replace(plan, local=Local(upload, epochs, batch))
        return cost.peak_memory(cost.measured_client(federate(Defense(), plan=own)))

    assert peak("gradient", 8) < peak("gradient", 48)
    assert peak("delta", 16) == peak("delta", 16, epochs=5)


# -- what is measured ------------------------------------------------------------------------------------------------
def test_measuring_moves_nothing(federate, plan):
    fed, twin = federate(make_defense("spn")), federate(make_defense("spn"))
    cost.client_cost(fed, initial(plan.spec, 1))
    assert (fed.round, fed.wire.up, fed.wire.down) == (0, twin.wire.up, twin.wire.down)
    assert fed.run(2) and twin.run(2)
    assert same_tensors((fed.parties.server, fed.parties.clients), (twin.parties.server, twin.parties.clients))


def test_statistics_that_travel_are_part_of_what_is_compared_with(federate, plan):
    tracked = replace(plan, spec=net_spec("cnn", (1, 8, 8), 10, {"norm": "tracked"}))
    taken = cost.client_cost(federate(make_defense("none"), tracked), initial(tracked.spec, 1))
    assert taken.time is not None and taken.memory_peak


def test_a_client_does_its_real_part_with_all_of_its_examples(federate):
    fed = federate(Defense())
    client = cost.measured_client(fed, 1)
    (job,) = client.jobs()
    assert job.batches.x.shape[:2] == (3, 16) and int(job.batches.w.sum()) == 48
    assert [len(cost.first_steps(job, n).batches.x) for n in (1, 2, 9)] == [1, 2, 3]
    assert len(client.drive.data[0].x) == 16, "the others' part is cut short"
    again = next(iter(client.jobs()))
    assert torch.equal(job.batches.x, again.batches.x), "drawn the same each time"


def test_of_two_steps_a_round_both_are_replayed(federate):
    client = cost.measured_client(federate(make_defense("fedpc")))
    assert len(client.turns) == 2 and len(list(client.jobs())) == 1
    assert leaves(client.turns[1].state) != leaves(client.turns[0].state)
    client.act()


def test_a_round_that_cannot_be_sent_costs_nothing_that_can_be_told(federate, plan, monkeypatch):
    def upload(self, *args):
        raise Overflow("too large")

    monkeypatch.setattr(Counted, "upload", upload)
    assert cost.client_cost(federate(Counted()), initial(plan.spec, 1)) == cost.ClientCost(None, None)


# -- time ------------------------------------------------------------------------------------------------------------
def clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[cost.Client]:
    """Let clients take these times, in turn, over and over; return who acted."""
    acted: list[cost.Client] = []

    def took(client: cost.Client) -> float:
        acted.append(client)
        return seconds[(len(acted) - 1) % len(seconds)]

    monkeypatch.setattr(cost, "_seconds", took)
    return acted


def test_the_ratio_is_the_median_over_pairs_in_turn(federate, monkeypatch):
    client, beside = cost.measured_client(federate(Counted())), cost.measured_client(federate(Defense()))
    monkeypatch.setattr(cost, "ENOUGH_S", 0.0)
    monkeypatch.setattr(cost, "BUDGET_S", 5.0)
    acted = clock(monkeypatch, 4.0, 2.0, 9.0, 3.0, 60.0, 20.0)
    ratio = cost.relative_time(client, beside)
    assert [c is client for c in acted] == [True, False] * 10
    assert (ratio.ratio, ratio.pairs, ratio.low, ratio.high) == (3.0, 9, 2.0, 3.0)
    assert (ratio.seconds, ratio.undefended_seconds) == (9.0, 3.0)
    monkeypatch.setattr(cost, "BUDGET_S", 0.0)  # one pair is measured whatever it takes, and has no interval
    clock(monkeypatch, 6.0, 2.0)
    ratio = cost.relative_time(client, beside)
    assert (ratio.ratio, ratio.pairs, ratio.low, ratio.high) == (3.0, 1, None, None)


def test_what_is_timed_is_the_whole_part_of_the_client_once_a_pair(federate, monkeypatch):
    client, beside = cost.measured_client(federate(Counted())), cost.measured_client(federate(Defense()))
    monkeypatch.setattr(cost, "BUDGET_S", 5.0)
    Counted.did.clear()
    ratio = cost.relative_time(client, beside)
    assert Counted.did == ["prepare", "compute", "upload"] * (ratio.pairs + 1)
    assert ratio.ratio > 0 and ratio.machine and ratio.threads == torch.get_num_threads()


@pytest.mark.parametrize(("count", "bounds"), [(1, None), (5, None), (6, (0, 5)), (9, (1, 7)), (100, (39, 60))])
def test_the_interval_of_the_median_is_by_order_statistics(count, bounds):
    assert cost.median_interval(list(map(float, range(count)))) == (bounds or (None, None))


# -- beside the records ----------------------------------------------------------------------------------------------
TIME = ClientTime(ratio=12, low=11, high=13, pairs=9, seconds=1.2, undefended_seconds=0.1, machine="x", threads=1)


def test_times_are_found_by_the_training_that_a_record_is_from(fabricate, tmp_path):
    record = fabricate("pbpfl", 10.0, "dlg", "reconstruction")
    assert time_of(tmp_path, record) is None
    save_time(tmp_path, training_of(record), TIME)
    assert time_of(tmp_path, record) == TIME
    assert time_of(tmp_path, fabricate("pbpfl", 10.0, "query", "extraction", stage="final")) == TIME
    for change in ({"seed": 1}, {"clients": 3}, {"model": "dlnet"}, {"sha256": "1" * 64}):
        assert time_of(tmp_path, fabricate("pbpfl", 10.0, "dlg", "reconstruction", **change)) is None
    for defense, value in (("pbpfl", 1.0), ("none", None)):
        assert time_of(tmp_path, fabricate(defense, value, "dlg", "reconstruction")) is None


@pytest.mark.parametrize("text", ["", "[]", '{"ratio": "1"}', json.dumps(TIME.model_dump() | {"more": 1})])
def test_a_damaged_file_of_times_is_one_sentence(text, fabricate, tmp_path):
    record = fabricate("pbpfl", 10.0, "dlg", "reconstruction")
    save_time(tmp_path, training_of(record), TIME)
    (tmp_path / "times" / f"{training_of(record)}.json").write_text(text)
    with pytest.raises(UsageError, match=r"holds no times of a client; delete it"):
        time_of(tmp_path, record)


def test_times_that_cannot_be_kept_are_one_sentence(tmp_path):
    (tmp_path / "times").write_text("")
    with pytest.raises(UsageError):
        save_time(tmp_path, "0" * 32, TIME)


# -- ratios ----------------------------------------------------------------------------------------------------------
def spent(record, **figures):
    return record.model_copy(update={"cost": record.cost.model_copy(update=figures)})


def test_costs_are_set_beside_the_undefended_of_the_same_training(fabricate):
    none = spent(fabricate("none", None, "dlg", "reconstruction", bytes_up=2000.0), memory_peak=50)
    elsewhere = fabricate("none", None, "dlg", "reconstruction", bytes_up=1.0, clients=3)
    mine = spent(fabricate("pbpfl", 10.0, "dlg", "reconstruction", bytes_up=500.0), memory_peak=10)
    lone = fabricate("pbpfl", 10.0, "dlg", "reconstruction", seed=1)
    result = relative_costs([elsewhere, none, mine, lone])
    of = result[mine.cell_id]
    assert (of.up, of.down, of.memory) == (0.25, 1.0, 0.2)
    assert result[none.cell_id].up == result[none.cell_id].memory == 1.0
    assert result[lone.cell_id].up is None
    some, silent = (Cost(bytes_up=up, bytes_down=1, bytes_setup=0) for up in (1, 0))
    assert cost_ratios(some, silent).up is None


def test_the_terminals_line_has_what_was_measured_and_no_more(fabricate):
    none = spent(fabricate("none", None, "dlg", "reconstruction", bytes_up=1000.0), memory_peak=100)
    mine = spent(fabricate("pbpfl", 1.0, "dlg", "reconstruction", bytes_up=310.0), memory_peak=20)
    more = spent(fabricate("pbpfl", 2.0, "dlg", "reconstruction", bytes_up=400.0), memory_peak=20)
    printed = cost_sentence("pbpfl", [none, mine], lambda record: TIME)
    assert printed == "costs: up 0.31 of none's bytes, down 1.00; memory 0.20 of none's; time 12x (11-13x)"
    both = cost_sentence("pbpfl", [none, mine, more])
    assert both == "costs: up 0.31-0.40 of none's bytes, down 1.00; memory 0.20 of none's"
    assert cost_sentence("pbpfl", [none, spent(mine, memory_peak=None)]).endswith("down 1.00")
    assert cost_sentence("pbpfl", [mine]) == cost_sentence("spn", [none, mine]) == ""
