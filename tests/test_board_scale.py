"""Many records: what grows with their number, and what the page does about it."""

from __future__ import annotations

import json
import re
from types import ModuleType

import numpy as np
import pytest

from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Images
from ppbench.report.cap import caps
from ppbench.report.frame import Key, frame_of, key_of
from ppbench.report.page import drawings
from ppbench.report.page.boards import boards
from ppbench.report.page.cells import PLAIN
from ppbench.report.page.costs import relative_costs
from ppbench.report.page.entries import adaptive, knowing
from ppbench.report.page.evaluations import judged
from ppbench.report.page.html import Page
from ppbench.report.page.ppc import ppcs
from ppbench.report.page.sprites import Album
from ppbench.report.page.table import no_claims, rows
from ppbench.report.verify import record_problems


@pytest.fixture(scope="module")
def many(bench_page: ModuleType) -> list[Record]:
    """Return 1,632 cells that ask for labels and owners: nothing to resample, nothing to rebuild."""
    return list(bench_page.synthetic(10_000, kinds=("label", "tracing")))


@pytest.fixture(scope="module")
def page(many: list[Record]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawings, "BUDGET", 1)
        return Page(many).html()


def test_work_on_boards_is_linear_in_the_records(many: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts what is done for a record, because seconds depend on the machine."""
    counts = []
    for number in (408, 816, 1632):
        calls = []

        def keyed(config: CellConfig, calls: list[CellConfig] = calls) -> Key:
            calls.append(config)
            return key_of(config)

        monkeypatch.setattr("ppbench.report.frame.key_of", keyed)
        frame = frame_of(many[:number])
        caps(frame), relative_costs(frame), judged(frame), boards(frame, no_claims)
        counts.append(len(calls) / number)
    assert counts == [1, 1, 1], "each record's key is made once, whatever is made of the records"


def test_boards_keep_suites_apart_and_seeds_together(many: list[Record]) -> None:
    found = boards(many, no_claims)
    assert len({b.setting.suite for b in found}) == 4
    labels = [b for b in found if b.setting.kind == "reconstruction"]
    assert len(labels) == 4, "one board a suite, all seeds on it"
    names = [entry.name for entry in labels[0].entries if entry.defense.id == "spn"]
    assert len(names) == len(set(names)) == 18 and "spn strength = 0.01, seed 1" in names


def test_lines_of_several_seeds_are_lines_of_their_own(many: list[Record]) -> None:
    known = knowing(many)
    for board in boards(many, no_claims)[:3]:
        for ppc in ppcs(board, known):
            for line in ppc.lines:
                controls = [point.control for point in line.points]
                assert len(controls) == len(set(controls)) == 6, (ppc.title, line.attack)
            assert {line.attack.rpartition(", ")[2] for line in ppc.lines} == {"seed 0", "seed 1", "seed 2"}


def test_an_attack_knows_the_defense_through_what_it_follows(many: list[Record], bench_page: ModuleType) -> None:
    record = next(r for r in many if r.config.attack.kind == "tracing")
    follows = record.config.attack.follows
    assert not adaptive(record, frozenset()) and adaptive(record, frozenset([follows]))
    found = bench_page.synthetic(2, kinds=("membership",))
    assert follows not in knowing(many) and knowing(found) == {"mia_knowing"}


def test_a_page_of_many_cells_has_them_all_as_data_and_the_first_as_a_plain_table(
    page: str, many: list[Record]
) -> None:
    (text,) = re.findall(r'<script type="application/json" id="cell-data">(.*?)</script>', page)
    data = json.loads(text)
    assert len(data["rows"]) == len(many) and [c["title"] for c in data["columns"]][:2] == ["Suite", "Defense"]
    assert {row[-1] for row in data["rows"]} == {r.cell_id for r in many}
    table = rows(many)
    place = [c["title"] for c in data["columns"]].index("Accuracy")
    assert [row[place] for row in data["rows"]] == pytest.approx([row["accuracy"] for row in table], rel=1e-5)
    assert page.count('<tr id="c') == PLAIN
    assert f"all {len(many)} cells" in page and f"the first {PLAIN}" in page and "leaderboard.csv has the rest" in page


def test_a_page_of_many_boards_draws_figures_as_long_as_there_is_place_and_says_where_the_others_are(page: str) -> None:
    figures = page.count('<figure class="chart"')
    assert figures > 80 and page.count("<svg role") == 1
    assert page.count("no place for it on this page; it lies in figures/") == figures - 1


def test_sprites_stop_at_a_number_of_bytes_and_are_counted(bench_page: ModuleType) -> None:
    noise = np.random.default_rng(0).random((10, 3, 32, 32)).astype(np.float32)
    record = next(bench_page.synthetic(1))
    album = Album(lambda _: Images(noise, noise), budget=100_000)
    found = [album.strip(record) for _ in range(5)]
    assert found[0] is not None and found[-1] is None
    assert album.refused == sum(uri is None for uri in found) > 0


def test_the_generator_gives_records_that_verify(bench_page: ModuleType) -> None:
    some = [*bench_page.synthetic(600)][::41]
    assert len({r.cell_id for r in some}) == len(some)
    assert not [problem for r in some for problem in record_problems(r)]
