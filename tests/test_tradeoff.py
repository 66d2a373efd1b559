"""The figure of a board: every setting once, higher leaks more, chance beside it, what is pointed at in words."""

import pytest

from ppbench.report.page.boards import boards_of, no_claims
from ppbench.report.page.curves import tradeoff_of
from ppbench.report.page.figures import svg_of

DRAWN = True


def board(make, *rows, kind="reconstruction", attack="dlg"):
    controls = [make("none", None, attack, kind, rows[0][3]), make("full_noise", None, attack, kind, rows[0][4])]
    made = [make(n, v, attack, kind, share, control="sigma", accuracy=acc) for n, v, acc, share, _ in rows]
    return boards_of([*controls, *made], no_claims)[0]


ROWS = (("dp", 1.0, 0.7, 12.0, 6.0), ("dp", 0.01, 0.94, 35.0, 6.0), ("spn", 0.1, 0.9, 20.0, 6.0))


def test_every_setting_stands_where_its_figures_are_along_its_control_value(fabricate):
    result = tradeoff_of(board(fabricate, *ROWS))
    placed = {(one.series, one.about): (one.accuracy[0], round(one.leak[0])) for one in result.settings}
    assert placed["dp", "sigma = 0.01"] == (0.94, 36) and placed["dp", "sigma = 1"] == (0.7, 13)
    assert [one.about for one in result.settings if one.series == "dp"] == ["sigma = 0.01", "sigma = 1"]
    assert {one.series for one in result.settings} == {"none", "full_noise", "dp", "spn"}
    assert result.chance == pytest.approx(11.0) and not result.safer


def test_who_points_at_a_mark_reads_its_setting_and_figures(fabricate):
    svg = svg_of(tradeoff_of(board(fabricate, *ROWS)), inline=True)
    assert "<title>dp sigma = 1: accuracy 0.7 (0.67" in svg and "leaks more, by psnr_median (dB)" in svg


def test_what_is_safer_when_higher_is_drawn_with_the_axis_turned(fabricate):
    rows = [("dp", 1.0, 0.7, 0.9, 0.9), ("dp", 0.1, 0.8, 0.9, 0.9)]
    controls = [fabricate("none", None, "x", "reconstruction", 0.0, error=0.01, shape=(16,))]
    made = [
        fabricate(n, v, "x", "reconstruction", 0.0, error=e, shape=(16,), control="sigma", accuracy=a)
        for (n, v, a, _, _), e in zip(rows, (0.9, 0.5), strict=True)
    ]
    result = tradeoff_of(boards_of([*controls, *made], no_claims)[0])
    assert result.safer and result.draw().axes[0].yaxis_inverted()


def test_one_setting_is_no_figure(fabricate):
    assert tradeoff_of(board(fabricate, ROWS[0])) is None
