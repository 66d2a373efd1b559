"""CAP and PPC: the paper's equation, versioned distances, grids with holes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppbench.records.schema import Metric, Record
from ppbench.report.cap import (
    cap_value,
    corrected_accuracy,
    distance_of,
    ppc_point,
    record_distance,
    series_cap,
)

Make = Callable[..., Record]
KINDS = {"reconstruction": "rmse_mean", "label": "label_accuracy", "membership": "asr", "tracing": "tracing_accuracy"}
KINDS |= {"extraction": "agreement"}


@pytest.fixture(scope="module")
def record(fabricate: Callable[..., Record]) -> Callable[..., Record]:
    def made(
        value: float | None = 0.1, accuracy: float | None = 0.5, figure: float | None = 1.0,
        kind: str = "reconstruction", status: str = "complete", ratio: float | None = None,
    ) -> Record:  # fmt: skip
        """Return a cell with one figure, which and the accuracy lie within .1, and a ratio."""
        ends = (None, None) if figure is None else (figure - 0.1, figure + 0.1)
        about = dict(method="m", n=1, higher_is_safer=True, reason=None if figure is not None else "r")
        metrics = [
            Metric(name=KINDS[kind], value=figure, low=ends[0], high=ends[1], **about),
            Metric(name="ratio_median", value=ratio, **about),
        ]
        cell = fabricate("dp", value, "a", kind, control="sigma", status=status, stage="init")
        ends = (None, None) if accuracy is None else (accuracy - 0.1, accuracy + 0.1)
        use = cell.utility.model_copy(update={"accuracy": accuracy, "low": ends[0], "high": ends[1], "chance": 0.1})
        return cell.model_copy(update={"metrics": metrics, "utility": use})

    return made


def test_the_papers_equation() -> None:
    assert cap_value([0.5, 0.5], [1, 0]) == 0.25
    with pytest.raises(ValueError, match="CAP needs"):
        cap_value([], [])


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=9), st.randoms())
def test_cap_with_a_bounded_distance_is_bounded_by_the_mean_accuracy(pairs: list, random: object) -> None:
    accuracy, distance = zip(*pairs, strict=True)
    value = cap_value(accuracy, distance)
    assert 0 <= value <= math.fsum(accuracy) / len(pairs) + 1e-12
    random.shuffle(pairs)
    assert cap_value(*zip(*pairs, strict=True)) == pytest.approx(value)


def test_corrected_accuracy_gives_nothing_for_chance_and_all_for_no_loss() -> None:
    assert corrected_accuracy(0.1, 0.1, 0.7) == 0 and corrected_accuracy(0.8, 0.1, 0.7) == 1
    with pytest.raises(ValueError, match="not above chance"):
        corrected_accuracy(0.1, 0.1, 0.1)


@pytest.mark.parametrize(
    ("kind", "figure", "name", "expected"),
    [
        ("reconstruction", 1.4, "recon/1", 1.4),
        ("label", 0.3, "label/1", 0.7),
        ("tracing", 0.1, "trace/1", 0.9),
        ("membership", 0.75, "mia/1", 0.5),
        ("membership", 0.4, "mia/1", 1.0),
        ("extraction", 0.85, "output/1", 0.15),
    ],
)
def test_distances_by_kind(record: Make, kind: str, figure: float, name: str, expected: float) -> None:
    found = record_distance(record(kind=kind, figure=figure))
    assert found.name == name and found.value == pytest.approx(expected)
    assert found.low <= found.value <= found.high


def test_a_null_metric_has_no_distance(record: Make) -> None:
    null = Metric(name="asr", value=None, method="none", n=0, higher_is_safer=False, reason="r")
    assert distance_of(null, "mia/1") is None
    assert ppc_point(record(figure=None)) is None


def test_cap_of_a_series_with_its_bracket_and_correction(record: Make) -> None:
    found = series_cap([record(0.1, 0.5, 1.0), record(0.2, 0.4, 0.5)], 0.7)
    assert found.value == pytest.approx((0.5 + 0.2) / 2) and found.n == 2 and found.distance == "recon/1"
    assert found.low == pytest.approx((0.4 * 0.9 + 0.3 * 0.4) / 2)
    assert found.corrected == pytest.approx((0.4 / 0.6 + 0.3 / 0.6 * 0.5) / 2)
    assert found.low < found.value < found.high
    assert series_cap([record(0.1), record(0.2)], None).corrected is None


def test_a_diverged_setting_is_worth_nothing_and_a_failed_one_refuses_the_cap(record: Make) -> None:
    good = record(0.1, 0.5, 1.0)
    assert series_cap([good, record(0.2, None, None, status="diverged")], 0.7).value == pytest.approx(0.25)
    refused = series_cap([good, record(0.2, 0.5, 1.0, status="failed")], 0.7)
    assert refused.value is None and "1 of 2 settings" in refused.reason


def test_one_setting_is_no_grid(record: Make) -> None:
    assert series_cap([record()], 0.7).value is None
    assert series_cap([record(None), record(None)], 0.7).value is None


def test_ppc_point_carries_the_ratio_where_it_is_known(record: Make) -> None:
    assert ppc_point(record(ratio=9.0)).x() == pytest.approx(1)
    assert ppc_point(record()).x() is None
    assert ppc_point(record(status="failed")) is None and ppc_point(record(accuracy=None)) is None
