"""Tracing is asked only where it can tell anything: with one owner among the queries every answer is right."""

import pytest
import torch

from ppbench.adversary.victims import choose_victims
from ppbench.base.seeds import Seeds
from ppbench.commands.terminal import _traced
from ppbench.federation.plan import Data
from ppbench.metrics.labels import tracing_accuracy
from ppbench.questions.tracing import TraceScore, Tracing
from ppbench.report.page.boards import table_rows
from ppbench.report.rows import upload_rows
from ppbench.run.cells import cells, count_owners, groups
from ppbench.run.config import configure
from ppbench.run.experiment import resolve


def kinds(**options: object) -> dict[tuple[int, str], set[str]]:
    """Return the kinds of the cells of each batch and role."""
    settings = {"attacks": ("dlg", "label_recovery", "tracing"), "stages": ("init",), **options}
    experiment = resolve(configure(**settings))
    results: dict[tuple[int, str], set[str]] = {}
    for group in groups(experiment):
        for cell in cells(experiment, group):
            results.setdefault((group.batch, group.role), set()).add(cell.attack.kind)
    return results


def test_a_group_of_one_owner_has_no_tracing_cell():
    result = kinds(defense="none", victims=8, attack_batch=(1, 4, 8))
    assert result[1, ""] == result[4, ""] == {"reconstruction", "label", "tracing"}
    assert result[8, ""] == {"reconstruction", "label"}, "8 victims at batch 8 are one client's"
    assert kinds(defense="none", victims=9, attack_batch=(8,))[8, ""] == result[1, ""]


def test_colluders_have_one_victim_and_a_curious_client_of_two_as_well():
    for threat, clients in (("collusion/1", 10), ("client/1", 2)):
        result = kinds(defense="none", victims=8, attack_batch=(1,), threats=(threat,), clients=clients)
        assert "tracing" not in result[1, ""]
    assert "tracing" in kinds(defense="none", victims=8, attack_batch=(1,), threats=("client/1",), clients=3)[1, ""]


@pytest.mark.parametrize("defense", ["none", "fedpc"])
@pytest.mark.parametrize("threat", ["server/1", "client/1", "collusion/1"])
def test_owners_are_counted_as_victims_are_drawn(defense, threat):
    experiment = resolve(configure(defense=defense, victims=6, clients=3, attack_batch=(1, 4, 6), threats=(threat,)))
    point, shards = (
        experiment.points[-1],
        {c: Data(torch.rand(30, 4), torch.eye(10)[:1].expand(30, 10)) for c in range(3)},
    )
    for group in (g for g in groups(experiment) if not g.records and g.point == len(experiment.points) - 1):
        roles = len(point.defense.roles) if group.role else 1
        drawn = choose_victims(shards, group.threat, group.batch, 6, Seeds(0), sums=point.defense.sums, roles=roles)
        assert count_owners(experiment, group) == len({slot.client for unit in drawn.units for slot in unit})


def test_one_owner_found_out_later_has_no_figure_and_raises_no_alarm(fabricate):
    """A role that one client always plays is known after the probe; noise names that client too."""
    rate = tracing_accuracy([3] * 8, [3] * 8)
    assert rate.value is None and rate.chance == 1 and "nobody else" in rate.reason
    record = fabricate("none", None, "tracing", "tracing")
    one = [TraceScore(index=i, owner=3, guess=3) for i in range(8)]
    assert Tracing().blind(one, record.config) is None
    two = [TraceScore(index=i, owner=3 + i % 2, guess=3) for i in range(8)]
    assert Tracing().blind(two, record.config)[2] == 0.5


def test_chance_stands_beside_the_figure(fabricate):
    record = fabricate("none", None, "tracing", "tracing")
    metric, (row,), (line,) = record.metric("tracing_accuracy"), table_rows([record]), upload_rows([record])
    assert metric.chance is not None and row["tracing_accuracy_chance"] == metric.chance
    assert f"({metric.chance:.0%})" in _traced(line).splitlines()[0]
