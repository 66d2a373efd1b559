"""The head of the page: which control value a row tells of, its verdict, and what could not be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ppbench.base.errors import UsageError
from ppbench.cli import app
from ppbench.records.schema import Metric, Record
from ppbench.records.store import Store, marker_bytes
from ppbench.report.page.board import rebuild, up_to_date, write_board
from ppbench.report.page.boards import boards
from ppbench.report.page.costs import costs
from ppbench.report.page.drawings import write_figures
from ppbench.report.page.evaluations import judged, said
from ppbench.report.page.html import Page
from ppbench.report.page.overview import Overview, overviews
from ppbench.report.page.standing import Standing
from ppbench.report.page.table import no_claims

Make = Callable[..., Record]


def controls(make: Make, **about: object) -> list[Record]:
    return [make(d, None, "dlg", "reconstruction", db, **about) for d, db in (("none", 35.0), ("full_noise", 6.0))]


def tables(records: Sequence[Record]) -> list[Overview]:
    found = boards(records, no_claims)
    return overviews(found, judged(records), costs(found, records, lambda _: None))


def row(records: Sequence[Record], defense: str = "dp") -> Standing:
    (table,) = tables(records)
    return next(one for one in table.rows if one.value.entry.defense.id == defense)


def head(records: list[Record]) -> str:
    """Return the part of a page of several defenses in which they are told at a glance."""
    page = unescape(Page(records, said=said(judged(records))).html())
    return page[page.index("At a glance") : page.index("<nav")]


def grid(make: Make, *values: tuple[float, float, float], **about: object) -> list[Record]:
    """Return a defense at control values, each with its worst case in dB and its accuracy."""
    more = dict(control="sigma", adaptive=True) | about
    return [make("dp", v, "strong", "reconstruction", db, accuracy=acc, **more) for v, db, acc in values]


@pytest.mark.parametrize(
    ("values", "verdict", "told"),
    [
        (((0.0, 35.0, 0.95), (0.1, 8.0, 0.93), (1.0, 7.0, 0.9)), "holds here", 0.1),  # the best model that hides
        (((0.1, 30.0, 0.95), (1.0, 24.0, 0.2)), "falls to strong", 0.1),  # a useless model is no row's
        (((0.1, 30.0, 0.95), (1.0, 8.0, 0.4)), "hides images, useless model", 1.0),
        (((0.1, 30.0, 0.95), (1.0, 18.7, 0.9)), "undecided", 1.0),
        (((1.0, 8.0, 0.9),), "holds here", 1.0),
    ],
)
def test_a_row_tells_of_the_value_that_hides_with_the_best_model(
    fabricate: Make, values: tuple[tuple[float, float, float], ...], verdict: str, told: float
) -> None:
    found = row(controls(fabricate) + grid(fabricate, *values))
    assert (found.verdict, found.value.entry.defense.control.value) == (verdict, told)
    assert len(found.grid) == len(values) and (found.leaks is None) is (len(values) == 1)


def test_what_falls_everywhere_is_told_where_it_looked_best(fabricate: Make) -> None:
    """At its off level a defense leaks no more than elsewhere and has the best model; that says nothing of it."""
    plain = [
        fabricate("dp", v, "dlg", "reconstruction", db, accuracy=0.9, control="sigma")
        for v, db in ((0.0, 35.0), (0.1, 8.0), (0.5, 12.0))
    ]
    known = grid(fabricate, (0.0, 34.0, 0.9), (0.1, 40.0, 0.9), (0.5, 41.0, 0.9))
    found = row(controls(fabricate) + plain + known)
    assert (found.verdict, found.value.entry.defense.control.value) == ("falls to strong", 0.1)


def test_figures_of_a_row_are_those_of_its_value_beside_the_undefended(fabricate: Make) -> None:
    found = row(controls(fabricate) + grid(fabricate, (0.0, 35.0, 0.95), (0.1, 8.0, 0.93), (1.0, 7.0, 0.9)))
    assert found.loss == pytest.approx(-2.0) and found.accuracies == (0.9, 0.95)
    assert found.value.metric.value == pytest.approx(9.0) and found.leaks == pytest.approx((8.0, 36.0))
    assert found.value.cost.ratios.up == 1.0


def test_what_only_plain_attacks_stand_for_is_marked(fabricate: Make) -> None:
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93), adaptive=False)
    assert row(records).verdict == "hides images from plain attacks"
    assert "plain attacks only" in head([*records, *other(fabricate)])


def test_where_an_attack_failed_what_is_hidden_is_undecided(fabricate: Make) -> None:
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93), (1.0, 7.0, 0.9))
    failed = fabricate("dp", 0.1, "ig", "reconstruction", control="sigma", accuracy=0.93, status="failed")
    assert row([*records, failed]).value.entry.defense.control.value == 1.0, "the one at which all attacks ran"
    alone = [r for r in records if r.config.defense.control is None or r.config.defense.control.value == 0.1]
    assert row([*alone, failed]).verdict == "undecided, attacks failed"


@pytest.mark.parametrize(
    ("labels", "asr", "verdict"),
    [(0.1, 0.5, "holds here"), (1.0, 0.5, "hides images, not labels"), (0.1, 0.9, "hides images, not members"),
     (1.0, 0.9, "hides images, nothing else")],
)  # fmt: skip
def test_what_else_is_given_away_at_that_value_is_said(
    fabricate: Make, labels: float, asr: float, verdict: str
) -> None:
    about = dict(control="sigma", accuracy=0.93)
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93), (0.0, 35.0, 0.95))
    records.append(fabricate("dp", 0.1, "label_recovery", "label", labels, **about))
    records.append(fabricate("dp", 0.1, "mia_loss", "membership", asr, **about))
    records.append(fabricate("dp", 0.0, "mia_loss", "membership", 0.9, **about | {"accuracy": 0.95}))
    assert row(records).verdict == verdict
    (table,) = tables(records)
    assert [table.tells(what) for what in ("labels", "members", "canaries", "outputs")] == [True, True, False, False]


def test_a_refuted_epsilon_is_the_verdict(fabricate: Make) -> None:
    (told,) = grid(fabricate, (0.1, 8.0, 0.93), epsilon=2.0)
    audit = fabricate("dp", 0.1, "mia_loss", "membership", stage="audit", control="sigma", accuracy=0.93, epsilon=2.0)
    bound = Metric(name="epsilon_lower", value=3.0, method="one run", n=400, higher_is_safer=False)
    audit = audit.model_copy(update={"metrics": [*audit.metrics, bound]})
    assert row([*controls(fabricate), told, audit]).verdict == "epsilon refuted by audit"
    assert "audit: ≥ 3.00, refuted" in head([*controls(fabricate), told, audit, *other(fabricate)])


@pytest.mark.parametrize(
    ("asr", "none", "verdict"),
    [(0.5, 0.9, "hides members here"), (0.5, 0.5, "nothing concluded"), (0.85, 0.9, "gives members to mia_loss"),
     (0.5, 0.55, "undecided")],
)  # fmt: skip
def test_where_only_members_were_asked_they_decide(fabricate: Make, asr: float, none: float, verdict: str) -> None:
    def ask(defense: str, value: float | None, share: float) -> Record:
        return fabricate(defense, value, "mia_loss", "membership", share, n=2000, control="sigma")

    records = [ask("none", None, none), ask("full_noise", None, 0.5), ask("dp", 0.1, asr)]
    if verdict == "undecided":
        records[2] = fabricate("dp", 0.1, "mia_loss", "membership", asr, n=100, control="sigma")
    assert row(records).verdict == verdict


def test_rows_of_tables_fall_when_half_are_within_a_tenth(fabricate: Make) -> None:
    def at(error: float) -> list[Record]:
        about = dict(shape=(16,), adaptive=True)
        none = fabricate("none", None, "linear", "reconstruction", 50.0, error=0.01, shape=(16,))
        noise = fabricate("full_noise", None, "linear", "reconstruction", 8.0, error=0.9, shape=(16,))
        return [none, noise, fabricate("dp", 0.1, "strong", "reconstruction", 50.0, error=error, **about)]

    assert row(at(0.05)).verdict == "falls to strong" and row(at(0.5)).verdict == "holds here"


def test_a_role_that_falls_takes_the_control_value_with_it(fabricate: Make) -> None:
    quiet, loud = grid(fabricate, (0.1, 8.0, 0.93)), grid(fabricate, (0.1, 30.0, 0.93), role="pilot")
    found = row([*controls(fabricate), *quiet, *loud])
    assert found.verdict == "falls to strong" and len(found.grid) == 1


def other(make: Make) -> list[Record]:
    return [make("spn", 0.1, "strong", "reconstruction", 34.0, adaptive=True, control="alpha2")]


def test_one_defense_has_its_sentences_at_the_top_and_several_a_table(fabricate: Make) -> None:
    records = controls(fabricate) + grid(fabricate, (0.1, 8.0, 0.93))
    alone = unescape(Page(records, said=said(judged(records))).html())
    sentence = "dp at sigma=0.1 hides the median image from every attack tried here"
    assert sentence in alone[: alone.index("<nav")] and "At a glance" not in alone
    both = head(records + other(fabricate))
    assert sentence not in both and '<a href="#defense-dp">dp</a>' in both


# -- what could not be read -------------------------------------------------------------------------------------------
@pytest.fixture
def damaged(fabricate: Make, tmp_path: Path) -> Store:
    """A folder with three good records, a truncated one, one of a newer schema, and one whose images are gone."""
    store = Store(tmp_path / "<b>out")
    cut, newer, *rest = [*grid(fabricate, (0.1, 8.0, 0.9), (0.2, 8.0, 0.9), (0.3, 8.0, 0.9)), *controls(fabricate)]
    for one in (cut, newer, *rest):
        images = np.zeros((2, 1, 8, 8), dtype=np.float32)
        store.save(one, tensors={"guess": images, "truth": images} if one is rest[0] else None)
    paths = [store.folder / f"{one.cell_id}.json" for one in (cut, newer)]
    paths[0].write_bytes(paths[0].read_bytes()[:300])
    paths[1].write_text(paths[1].read_text().replace("ppbench.run/1", "ppbench.run/2"))
    (store.folder / f"{rest[0].cell_id}.safetensors").unlink()
    return store


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(damaged: Store) -> None:
    written = rebuild(damaged)
    assert len(written.problems) == 3 and all(path.is_file() for path in written.paths)
    assert len(damaged.csv_path.read_text().splitlines()) == 1 + 3
    page = damaged.html_path.read_text()
    for words in ("is not a whole record", "ppbench.run/2", "does not hold the cell"):
        (sentence,) = (problem for problem in written.problems if words in problem)
        assert escape(sentence, quote=True).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in page
    assert "3 files could not be read" in page and "<b>out" not in page
    assert not up_to_date(damaged), "it is said each time"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert damaged.html_path in write_board(damaged), "as evaluations and sweeps do"
    assert sorted(str(w.message) for w in caught) == sorted(written.problems)


def test_the_command_warns_and_exits_with_1(damaged: Store) -> None:
    found = CliRunner().invoke(app, ["leaderboard", str(damaged.out)])
    assert found.exit_code == 1 and found.stderr.count("warning: ") == 3 and "Traceback" not in found.output
    assert str(damaged.csv_path) in found.stdout


def test_a_folder_without_a_whole_record_is_refused(damaged: Store) -> None:
    for path in damaged.folder.glob("*.json"):
        path.write_text("{}")
    with pytest.raises(UsageError, match="holds no record that can be read"):
        rebuild(damaged)


def test_a_baseline_says_that_its_images_were_left_out(fabricate: Make, tmp_path: Path) -> None:
    store = Store(tmp_path / "base")
    store.save(controls(fabricate)[0])
    (store.out / "ppbench.json").write_bytes(marker_bytes(bare=True))
    write_board(Store(store.out))
    assert "Reconstructions were left out of this baseline." in store.html_path.read_text()
    assert "Reconstructions were left out" not in Page(controls(fabricate)).html()


def test_a_png_is_drawn_again_only_when_its_figure_changed(fabricate: Make, tmp_path: Path) -> None:
    def drawn(*values: tuple[float, float, float]) -> tuple[bytes, int]:
        found = boards([*controls(fabricate), *grid(fabricate, *values)], no_claims)
        (path,) = (p for p in write_figures(tmp_path, found, frozenset()) if p.match("ppc-*.png"))
        return path.read_bytes(), path.stat().st_mtime_ns

    first = drawn((0.1, 8.0, 0.9), (0.2, 9.0, 0.8))
    assert drawn((0.1, 8.0, 0.9), (0.2, 9.0, 0.8)) == first
    next(tmp_path.glob("ppc-*.png")).write_bytes(b"no picture")
    assert drawn((0.1, 8.0, 0.9), (0.2, 9.0, 0.8))[0] == first[0], "equal figures, equal bytes"
    assert drawn((0.1, 8.0, 0.9), (0.3, 7.0, 0.7))[0] != first[0]
