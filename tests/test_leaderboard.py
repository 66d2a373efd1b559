"""CSV, figures and the HTML page: columns, determinism, escaping, ranks, and a real browser."""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from ppbench.base.errors import UsageError
from ppbench.federation.contract import Claim
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import CellConfig, Played, Record
from ppbench.records.store import Images, Store
from ppbench.records.times import ClientTime, save_time, time_of, training_of
from ppbench.report.cap import Distance, PpcPoint
from ppbench.report.claims import Checked, Unchecked
from ppbench.report.claims.case import Finding
from ppbench.report.frame import EVALUATION, frame_of
from ppbench.report.page.assets import VENDOR, assets, digest
from ppbench.report.page.board import claimed, up_to_date, write_board
from ppbench.report.page.boards import boards
from ppbench.report.page.entries import Board, Entry
from ppbench.report.page.evaluations import Said, about, concluded, judged
from ppbench.report.page.evaluations import said as said_of
from ppbench.report.page.figures import Picture, svg_of
from ppbench.report.page.html import Page
from ppbench.report.page.played import role_counts
from ppbench.report.page.ppc import Line, Ppc
from ppbench.report.page.profiles import anchors
from ppbench.report.page.sprites import sprite
from ppbench.report.page.table import csv_text, no_claims, rows, text, write_csv

Make = Callable[..., Record]
CONTROL = {"dp": "sigma", "spn": "alpha2", "ppdl": "theta"}
ATTACKS = {
    "dlg": ("reconstruction", False),
    "idlg": ("reconstruction", False),
    "adaptive_spn": ("reconstruction", True),
    "adaptive_dp": ("reconstruction", True),
    "label_recovery": ("label", False),
    "mia_loss": ("membership", False),
    "tracing": ("tracing", False),
}


def config(defense: str, value: float | None, attack: str, threat: str = "server/1", **more: object) -> CellConfig:
    kind, adaptive = ATTACKS[attack]
    name = CONTROL.get(defense, "strength")
    data = {
        "suite": "evaluate/1",
        "threat_model": {"id": threat, "sees": "every upload", "knows_defense": adaptive},
        "defense": {
            "id": defense,
            "version": "1",
            "parameters": {} if value is None else {name: value},
            "control": None if value is None else {"name": name, "value": value},
        },
        "attack": {"id": attack, "version": "1", "kind": kind, "parameters": {}, "adaptive": adaptive},
        "federation": dict(
            clients=10, rounds=20, schedule="parallel", upload="delta", local_epochs=1, batch=32, optimizer="adam",
            lr=0.001, momentum=0.0, decay_at=[], decay=1.0, partition="iid", server_optimizer="sgd", server_lr=1.0,
            backend="loop", device="cpu", dtype="float32",
        ),
        "data": {"name": "cifar10", "sha256": "0" * 64, "train": 5000, "test": 1000},
        "model": {
            "id": "dlnet", "options": {}, "shape": [3, 32, 32], "classes": 10, "parameters": 19438,
            "loss": "cross_entropy",
        },
        "stage": "final" if kind == "membership" else "init",
        "batch_size": 1,
        "victims": 12,
        "seed": 1,
    } | more  # fmt: skip
    return CellConfig.model_validate(data)


def victims(kind: str, strength: float, seed: int, n: int = 12) -> list[dict[str, object]]:
    """Return scores of an attack that succeeds with `strength` in [0, 1]."""
    rng = np.random.default_rng(seed)
    if kind == "reconstruction":
        db = np.clip(6 + 34 * strength + rng.normal(0, 3, n), 1, 60)
        return [
            dict(
                kind="image", probe=i, client=i % 10, index=0, psnr=float(v), rmse=float(10 ** (-v / 20) * 2),
                rmse_raw=float(10 ** (-v / 20) * 2.5), ssim=float(min(v / 50, 1)), label=bool(rng.random() < strength),
                confidence=0.01, at_truth=1e-12, evaluations=500,
            )
            for i, v in enumerate(db)
        ]  # fmt: skip
    if kind == "label":
        hits = rng.random(n) < 0.1 + 0.9 * strength
        return [dict(kind="label", probe=i, client=i % 10, index=0, label=bool(h)) for i, h in enumerate(hits)]
    if kind == "tracing":
        guess = [int(i % 10 if rng.random() < strength else rng.integers(10)) for i in range(40)]
        return [dict(kind="trace", index=i, owner=i % 10, guess=g) for i, g in enumerate(guess)]
    score = rng.normal(0, 1, 400) + 2 * strength * (np.arange(400) % 2)
    return [
        dict(kind="member", index=i, half=i // 200, member=bool(i % 2), score=float(s), decision=bool(s > strength))
        for i, s in enumerate(score)
    ]


def record(
    defense: str = "spn", value: float | None = 0.1, attack: str = "dlg", strength: float = 0.5,
    accuracy: float | None = 0.7, status: str = "complete", threat: str = "server/1", **more: object,
) -> Record:  # fmt: skip
    cell = config(defense, value, attack, threat, **more)
    scores = victims(cell.attack.kind, strength, int(cell.cell_id()[:6], 16)) if status == "complete" else []
    interval = None if accuracy is None else clopper_pearson(round(accuracy * 1000), 1000)
    draft = Record.model_validate(
        dict(
            cell_id=cell.cell_id(),
            config=cell,
            victims=scores,
            metrics=[],
            utility=dict(
                accuracy=accuracy, low=interval and interval.low, high=interval and interval.high, n=1000, chance=0.1,
                curve=[], reason=None if accuracy is not None else "the loss became NaN in round 3",
            ),
            cost=dict(bytes_up=77752 if defense != "ppdl" else 9000, bytes_down=77752, bytes_setup=80),
            privacy=dict(epsilon=None, delta=None, reason="the clip is off"),
            status=status,
            reason=None if status == "complete" else "the loss became NaN in round 3",
            environment=dict(
                ppbench="0.1.0", python="3.11.2", torch="2.13.0", device="x86_64", threads=1, dtype="float32"
            ),
        )
    )  # fmt: skip
    metrics = aggregate(draft.victims, classes=10, seed=1)
    return draft.model_copy(update={"metrics": metrics})


def board_records() -> list[Record]:
    """Return about thirty cells: both controls, three defenses, all kinds of attacks, a diverged and a failed one."""
    found = []
    for defense, value in [("none", None), ("full_noise", None)]:
        strength = 1.0 if defense == "none" else 0.0
        accuracy = 0.712 if defense == "none" else 0.104
        found += [record(defense, value, a, strength, accuracy) for a in ("dlg", "label_recovery", "tracing")]
        found.append(record(defense, value, "mia_loss", strength, accuracy, threat="client/1"))
    for value in (0.0001, 0.01, 0.1, 0.5):
        accuracy = 0.71 - value / 10
        found.append(record("spn", value, "dlg", 0.8 - 0.14 * np.log10(value / 1e-4), accuracy))
        found.append(record("spn", value, "adaptive_spn", 0.85 + value / 10, accuracy))
        found.append(record("spn", value, "label_recovery", 1.0, accuracy))
    for value in (0.0001, 0.01, 0.1):
        accuracy = 0.70 - value
        found.append(record("dp", value, "dlg", 0.5 - 0.15 * np.log10(value / 1e-4), accuracy))
        found.append(record("dp", value, "adaptive_dp", 0.6 - 0.2 * np.log10(value / 1e-4), accuracy))
        found.append(record("dp", value, "mia_loss", 0.3 - value, accuracy, threat="client/1"))
    found.append(record("dp", 0.5, "dlg", status="diverged", accuracy=None))
    found.append(record("ppdl", 0.3, "dlg", 0.3, 0.66))
    found.append(record("ppdl", 0.3, "idlg", status="failed", accuracy=0.66))
    return found


COLUMNS = """
suite threat_model defense control control_value attack adaptive stage batch_size n accuracy psnr_median psnr_p95
rmse_mean ssim_mean label_accuracy asr auc tracing_accuracy cap claimed status cell_id
""".split()  # noqa: SIM905


def test_csv_has_the_promised_columns_first_and_a_row_for_every_cell() -> None:
    records = board_records()
    table = list(csv.reader(io.StringIO(csv_text(records))))
    assert table[0][: len(COLUMNS)] == COLUMNS
    assert len(table) == 1 + len(records) and {len(row) for row in table} == {len(table[0])}
    assert not any("second" in name or "time" in name for name in table[0])


def test_csv_does_not_depend_on_the_order_of_the_records() -> None:
    records = board_records()
    assert csv_text(records) == csv_text(records[::-1])


def test_csv_gives_one_cap_to_every_row_of_a_series_and_none_to_a_defense_without_control() -> None:
    table = rows(board_records())
    spn = {row["cap"] for row in table if row["defense"] == "spn" and row["attack"] == "dlg"}
    assert len(spn) == 1 and None not in spn
    assert all(row["cap"] is None and row["cap_reason"] for row in table if row["defense"] == "none")


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1+1"])
def test_csv_neutralizes_formulas_of_spreadsheets(name: str) -> None:
    assert text(name).startswith("'")
    row = next(csv.DictReader(io.StringIO(csv_text([record(name)]), newline="")))
    assert row["defense"] == f"'{name}".replace("\r", " ") and row["control"] == "strength"


def test_csv_leaves_negative_numbers_and_plain_names_alone() -> None:
    assert text(-0.5) == "-0.5" and text("dp_sgd") == "dp_sgd" and text(True) == "true" and text(None) == ""


def test_csv_is_written_whole_and_says_so_where_it_cannot_be(tmp_path: Path) -> None:
    write_csv(board_records(), tmp_path / "leaderboard.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["leaderboard.csv"]
    with pytest.raises(UsageError, match="cannot be written"):
        write_csv([], tmp_path / "missing" / "leaderboard.csv")


def entries(records: list[Record], kind: str = "reconstruction") -> dict[str, Entry]:
    (board,) = [b for b in boards(records, no_claims) if b.setting.kind == kind]
    return {f"{e.defense.id} {e.control}".strip(): e for e in board.entries}


def test_ranks_go_by_the_worst_case_and_overlapping_intervals_share_them() -> None:
    found = entries(board_records())
    assert found["dp sigma = 0.1"].rank.split("-")[0] == "1"
    worst = found["spn alpha2 = 0.5"]
    assert worst.worst.config.attack.id == "adaptive_spn" and worst.plain.config.attack.id == "dlg"
    assert "-" in worst.rank and int(worst.rank.split("-")[0]) > 1
    assert found["none"].rank == found["full_noise"].rank == ""


def test_a_defense_without_an_adaptive_attack_or_with_a_failed_one_is_not_ranked() -> None:
    ppdl = entries(board_records())["ppdl theta = 0.3"]
    assert ppdl.rank == "" and {"plain attacks only", "failed"} <= {badge.text for badge in ppdl.badges}


@pytest.mark.parametrize("broken", ["no control", "attacks too weak", "noise leaks"])
def test_nothing_is_ranked_where_a_control_fails(broken: str) -> None:
    records = [r for r in board_records() if r.config.defense.id not in ("none", "full_noise")]
    if broken != "no control":
        records.append(record("none", None, "dlg", 0.1 if broken == "attacks too weak" else 1.0))
        records.append(record("full_noise", None, "dlg", 1.0 if broken == "noise leaks" else 0.0, 0.1))
    (board,) = [b for b in boards(records, no_claims) if b.setting.kind == "reconstruction"]
    assert not board.reliable and all(entry.rank == "" for entry in board.entries)
    undrawn = [r for r in records if r.config.defense.control is None or r.config.defense.control.value == 0.1]
    assert "Unreliable" in Page(undrawn).html()


def test_an_oracle_is_never_the_headline() -> None:
    best = record("spn", 0.1, "dlg", 1.0)
    attack = best.config.attack.model_copy(update={"oracle": True, "id": "oracle"})
    cell = best.config.model_copy(update={"attack": attack})
    oracle = best.model_copy(update={"config": cell, "cell_id": cell.cell_id()})
    found = entries([oracle, record("spn", 0.1, "dlg", 0.2)])
    assert found["spn alpha2 = 0.1"].worst.config.attack.id == "dlg"


class Reader(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.data_blocks = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.data_blocks += (tag, dict(attrs).get("type")) == ("script", "application/json")
        self.loads += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "xlink:href", "poster", "action")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def own(page: str) -> str:
    """Return the page without the vendored scripts, which name XML's namespaces."""
    for script in assets().scripts[:-1]:
        page = page.replace(str(script), "")
    return page


def gradient_images(n: int = 3) -> Images:
    truth = np.linspace(0, 1, n * 3 * 8 * 8, dtype=np.float32).reshape(n, 3, 8, 8)
    return Images(truth[:, :, ::-1].copy(), truth)


def test_names_and_sentences_stay_text() -> None:
    evil = "<script>alert(1)</script>"
    records = [record(evil, 0.1), record(evil, 0.2), record(evil, 0.3, status="failed").model_copy(
        update={"reason": evil})]  # fmt: skip
    page = Page(
        records, said=[Said(evil, "", evil)], reliability=[evil], claims=lambda _: evil,
        images=lambda _: gradient_images(),
    ).html()  # fmt: skip
    assert evil not in page and "&lt;script&gt;alert(1)" in page
    found = Reader(page)
    assert all(load.startswith("data:image/png") or re.fullmatch(r"#[\w-]+", load) for load in found.loads)
    assert found.data_blocks == found.tags.count("script") - len(assets().scripts)


@pytest.fixture(scope="module")
def page() -> str:
    return Page(board_records(), said=[Said("dp", "", "The verdict.")], images=lambda _: gradient_images()).html()


def test_the_page_asks_nobody_for_anything(page: str) -> None:
    found = Reader(page)
    assert all(load.startswith(("data:image/png;base64,", "#")) for load in found.loads)
    assert not re.search(r"https?://|@import|url\((?!#)|sourceMappingURL", own(page))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and "default-src 'none'" in policy[1] and "unsafe-eval" not in policy[1]


def test_the_page_shows_every_cell_and_why_some_failed(page: str) -> None:
    records = board_records()
    assert all(f'id="c{r.cell_id}"' in page for r in records)
    shown = " ".join(Reader(page).text)
    for words in ("The verdict.", "diverged", "failed", "became NaN", "plain attacks only", "adaptive", "TPR"):
        assert words in shown
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_equal_records_give_equal_pages_whatever_their_order() -> None:
    records = [r for r in board_records() if r.config.defense.id in ("none", "dp")]
    assert Page(records).html() == Page(records[::-1]).html()


def test_an_empty_page_says_so() -> None:
    assert "Nothing was evaluated" in Page([]).html()


def points(ratios: bool) -> tuple[PpcPoint, ...]:
    return tuple(
        PpcPoint(c, r if ratios else None, a, a - 0.02, None, Distance("recon/1", d, d - 0.1, d + 0.1))
        for c, r, a, d in [(0.001, 126.0, 0.7, 0.2), (0.1, 1.26, 0.69, 0.9), (0.5, 0.25, 0.66, 1.1)]
    )


@pytest.mark.parametrize("ratios", [True, False])
def test_figures_are_the_same_bytes_twice_and_survive_any_name(ratios: bool) -> None:
    ppc = Ppc("$\\frac{ <script> & $", "a_$^", "recon/1", (Line("dlg $x$", False, points(ratios)),))
    svg = svg_of(ppc, inline=True)
    assert svg == svg_of(ppc, inline=True) and Picture(ppc).png() == Picture(ppc).png()
    assert "<script>" not in svg and "http" not in svg and svg.startswith("<svg role")
    assert ("gradient / perturbation" in svg) is ratios
    assert ("#2ca25f" in svg and "#de2d26" in svg) is ratios


def test_pointing_at_a_mark_of_a_figure_tells_its_values() -> None:
    evil = '"<&\n>'
    svg = svg_of(Ppc("t", "sigma", "recon/1", (Line(evil, True, points(ratios=True)),)))
    titles = [title.text for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert titles[:2] == ["accuracy", "sigma = 0.5: accuracy 0.660, gradient / perturbation 0.25"], "one end is none"
    ends = '"<& > (adaptive), sigma = 0.001: recon/1 0.200 (0.100 to 0.300), gradient / perturbation 126'
    assert titles[4] == '"<& > (adaptive)' and titles[-1] == ends and len(titles) == 8


def test_a_sprite_puts_truth_above_guess_and_marks_what_is_not_finite() -> None:
    truth = np.zeros((2, 1, 8, 8), dtype=np.float32)
    guess = np.ones((2, 1, 8, 8), dtype=np.float32) * 7
    guess[1] = np.nan
    image = np.asarray(Image.open(io.BytesIO(sprite((truth, guess)))))
    assert image.shape == (66, 66, 4)
    assert (image[:32, :32, :3] == 0).all() and (image[34:, :32, :3] == 255).all()
    assert set(np.unique(image[34:, 34:, :3])) == {110, 150}
    assert (image[32:34, :, 3] == 0).all()


def test_a_sprite_shows_the_first_ten() -> None:
    many = np.random.default_rng(0).random((30, 3, 32, 32)).astype(np.float32)
    assert Image.open(io.BytesIO(sprite((many, many)))).size == (10 * 34 - 2, 66)


# -- models that clients hold, tables, numbers ------------------------------------------------------------------------
LAST = """
agreement agreement_low agreement_high output_error output_error_low output_error_high mse mse_low mse_high
""".split()  # noqa: SIM905


def held(make: Make, stage: str = "iterate", **more: object) -> list[Record]:
    """Return both controls, a masked defense that is read and one that is not, asked for members and outputs."""
    found = []
    for defense, value, right in (
        ("none", None, 1.0),
        ("full_noise", None, 1.0),
        ("bad", 1.0, 1.0),
        ("good", 1.0, 0.1),
    ):
        about = dict(stage=stage) | more
        knows = value is not None
        error = 0.01 if right == 1.0 else 3.0
        found.append(
            make(defense, value, "query", "extraction", 0.1 if knows else 1.0, error=99.0 if knows else 0.0, **about)
        )
        found.append(make(defense, value, "unmask", "extraction", right, error=error, adaptive=knows, **about))
        share = {"none": 0.71, "bad": 0.71}.get(defense, 0.5)
        found.append(make(defense, value, "unmask_asr", "membership", share, adaptive=knows, **about))
    return found  # fmt: skip


def test_csv_has_agreement_error_and_mse_last(fabricate: Make) -> None:
    records = [*held(fabricate), fabricate("dp", 0.1, "dlg", "reconstruction", accuracy=None, mse=0.06, classes=1)]
    table = list(csv.DictReader(io.StringIO(csv_text(records))))
    first = list(table[0]).index(LAST[0])
    assert list(table[0])[first:][: len(LAST)] == LAST and list(table[0])[: len(COLUMNS)] == COLUMNS
    (row,) = [r for r in table if (r["defense"], r["attack"]) == ("good", "unmask")]
    assert (row["agreement"], row["output_error"], row["mse"]) == ("0.1", "3", "")
    assert float(row["agreement_low"]) < 0.1 < float(row["agreement_high"])
    assert (row["distance"], row["distance_value"]) == ("output/1", "0.9")
    (row,) = [r for r in table if r["defense"] == "dp"]
    assert (row["mse"], row["mse_low"], row["mse_high"], row["accuracy"]) == ("0.06", "0.057", "0.063", "")


def test_what_clients_train_on_is_ranked_and_what_is_delivered_is_not_for_answering(fabricate: Make) -> None:
    records = held(fabricate) + held(fabricate, "final")
    found = {(b.setting.kind, b.setting.stage): b for b in boards(records, no_claims)}
    assert list(found) == [(k, s) for k in ("membership", "extraction") for s in ("iterate", "final")]
    ranks = {key: {e.defense.id: e.rank for e in board.entries} for key, board in found.items()}
    for key in (("membership", "iterate"), ("membership", "final"), ("extraction", "iterate")):
        assert found[key].reliable and ranks[key] == {"none": "", "full_noise": "", "good": "1", "bad": "2"}, key
    assert set(ranks["extraction", "final"].values()) == {""}
    assert {b.headline for b in found.values()} == {"auc", "agreement"}
    assert [len(found["extraction", s].checks) for s in ("iterate", "final")] == [1, 1]
    assert len(found["membership", "iterate"].checks) == 2
    worst = {e.defense.id: (e.plain, e.worst) for e in found["extraction", "iterate"].entries}["bad"]
    assert [r.config.attack.id for r in worst] == ["query", "unmask"]


def test_extraction_is_reliable_only_where_the_undefended_model_is_read(fabricate: Make) -> None:
    def board(share: float) -> Board:
        rest = [r for r in held(fabricate) if r.config.defense.id != "none"]
        none = [fabricate("none", None, "query", "extraction", share, stage="iterate")]
        return next(b for b in boards([*rest, *none], no_claims) if b.setting.kind == "extraction")

    assert board(1.0).reliable and not board(0.1).reliable
    assert all(entry.rank == "" for entry in board(0.1).entries)


def test_a_defense_whose_model_only_plain_attacks_queried_is_not_ranked(fabricate: Make) -> None:
    records = [r for r in held(fabricate) if not (r.config.attack.adaptive and r.config.defense.id == "good")]
    (board,) = [b for b in boards(records, no_claims) if b.setting.kind == "extraction"]
    assert {e.defense.id: e.rank for e in board.entries} == {"none": "", "full_noise": "", "good": "", "bad": "1"}


def test_models_without_classes_are_ranked_by_their_error(fabricate: Make) -> None:
    records = held(fabricate, classes=1, shape=(16,), accuracy=None, mse=0.06)
    (board,) = [b for b in boards(records, no_claims) if b.setting.kind == "extraction"]
    assert board.headline == "output_error" and board.reliable
    assert {e.defense.id: e.rank for e in board.entries} == {"none": "", "full_noise": "", "good": "1", "bad": "2"}
    shown = " ".join(" ".join(Reader(Page(records).html()).text).split())
    assert "MSE 0.0600" in shown and "Decisions read" not in shown.split("All cells")[0]


def tables(make: Make, none: float = 0.01) -> list[Record]:
    about = dict(shape=(16,))
    rows = [("none", None, none, 50.0, False), ("full_noise", None, 0.9, 8.0, False)]
    rows += [("bad", 1.0, 0.05, 34.0, True), ("good", 1.0, 0.8, 36.0, True), ("good", 1.0, 0.9, 45.0, False)]
    return [
        make(d, v, "strong" if knows else "linear", "reconstruction", db, error=e, adaptive=knows, **about)
        for d, v, e, db, knows in rows
    ]


def test_rows_of_tables_are_ranked_by_error_and_never_by_decibels(fabricate: Make) -> None:
    (board,) = boards(tables(fabricate), no_claims)
    assert board.headline == "rmse_mean" and board.reliable and not board.images
    assert {e.defense.id: e.rank for e in board.entries} == {"none": "", "full_noise": "", "good": "1", "bad": "2"}
    good = next(e for e in board.entries if e.defense.id == "good")
    assert good.worst.config.attack.id == "strong", "45 dB of a row says nothing; its error is larger"
    page = Page(tables(fabricate)).html()
    section = page[page.index('<section id="b1"') : page.index('<section id="cost"')]
    assert " dB" not in section and "Relative error" in section and "Within 10%" in section
    (weak,) = boards(tables(fabricate, none=0.2), no_claims)
    assert not weak.reliable, "no attack comes within a tenth of an undefended row, at 50 dB or not"


def test_the_page_says_in_words_which_model_was_attacked(fabricate: Make) -> None:
    records = held(fabricate) + held(fabricate, "final") + [fabricate("none", None, "dlg", "reconstruction", 35.0)]
    shown = " ".join(" ".join(Reader(Page(records).html()).text).split())
    for words in (
        "Extraction, client/1, the model that clients train on", "Membership, client/1, the delivered model",
        "Reconstruction, server/1, random weights, batch 1", "meant to answer as the true one does",
        "Extraction of the true model's outputs", "99 times", "digits, 1000 examples, mlp",
    ):  # fmt: skip
        assert words in shown, words


def test_evaluations_of_other_networks_and_other_data_are_kept_apart(fabricate: Make) -> None:
    records = [
        fabricate("dp", 0.1, "dlg", "reconstruction", options={"layers": layers}, clients=clients)
        for layers, clients in ((3, 5), (5, 5), (3, 10))
    ]
    groups = frame_of([*records, records[0]]).by(EVALUATION)
    assert [len(some) for some in groups.values()] == [2, 1, 1]
    heads = [about(key) for key in groups]
    assert heads[0] == "digits, 1000 examples, mlp (layers=3), 5 clients, 20 rounds, seed 0" and len(set(heads)) == 3
    controls = [
        fabricate(d, None, "dlg", "reconstruction", db, options={"layers": layers}, clients=clients)
        for layers, clients in ((3, 5), (5, 5), (3, 10))
        for d, db in (("none", 35.0), ("full_noise", 6.0))
    ]
    checks, verdict = concluded(judged([*records, *controls]))
    for words in (verdict, [check.sentence for check in checks]):
        assert all(any(sentence.startswith(f"[{head}] ") for sentence in words) for head in heads)


def vouched(fabricate: Make) -> list[Record]:
    """Return `held` with controls that hold: what extraction finds of them vouches for nothing."""
    controls = (fabricate(d, None, "dlg", "reconstruction", db) for d, db in (("none", 35.0), ("full_noise", 6.0)))
    return [*held(fabricate), *controls]


def test_sentences_of_several_defenses_say_whose_they_are(fabricate: Make) -> None:
    records = vouched(fabricate)
    _, said = concluded(judged(records))
    assert {sentence.split(":")[0] for sentence in said} == {"bad", "good"}
    _, alone = concluded(judged([r for r in records if r.config.defense.id != "good"]))
    assert list(alone) == [sentence.removeprefix("bad: ") for sentence in said if sentence.startswith("bad: ")]


@pytest.mark.parametrize("fault", ["none stands", "noise leaks", "no noise", "canaries stand"])
def test_nothing_is_said_of_an_evaluation_whose_controls_fail_and_the_others_keep_theirs(
    fabricate: Make, fault: str
) -> None:
    def one(clients: int, bad: bool) -> list[Record]:
        rows = [("none", 10.0 if bad and fault == "none stands" else 35.0), ("dp", 30.0)]
        rows += [] if bad and fault == "no noise" else [("full_noise", 35.0 if bad and fault == "noise leaks" else 6.0)]
        about = dict(control="sigma", clients=clients)
        return [fabricate(d, 0.1 if d == "dp" else None, "dlg", "reconstruction", db, **about) for d, db in rows]

    records = one(3, True) + one(4, False)
    checks, said = concluded(judged(records, sound=fault != "canaries stand"))
    assert len(checks) == 4
    assert {"3 clients" in sentence for sentence in said} == (set() if fault == "canaries stand" else {False})
    page = Reader(
        Page(
            records, said=said_of(judged(records, sound=fault != "canaries stand")), sound=fault != "canaries stand"
        ).html()
    )
    shown = " ".join(" ".join(page.text).split())
    top = shown[shown.index("At a glance") : shown.index("How to read this")]
    assert top.count("nothing concluded") == (2 if fault == "canaries stand" else 1)
    assert top.count("Controls fail: nothing is concluded here.") == (2 if fault == "canaries stand" else 1)


def test_a_claim_stands_beside_the_cells_that_it_is_about(fabricate: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asr = Claim("asr", 0.503, "digits", "mlp", None, "Table 4", when=(("kappa", 3.0),))
    bare = Claim("agreement", None, "digits", "mlp", None, "Lemma 3")
    monkeypatch.setattr("ppbench.report.page.board._claims", lambda name: (bare, asr))
    members = partial(fabricate, "pbpfl", 3.0, "mia_loss", "membership", 0.5)
    assert claimed(members(stage="iterate")) == "ASR 50.3% (Table 4)"
    assert claimed(members(stage="final")) == claimed(members(stage="iterate", dataset="mnist")) == ""
    assert claimed(fabricate("pbpfl", 1.0, "mia_loss", "membership", 0.5, stage="iterate")) == ""
    assert claimed(fabricate("pbpfl", 3.0, "query", "extraction", 0.5, stage="iterate")) == ""


# -- costs ------------------------------------------------------------------------------------------------------------
def costly(record: Record, memory: int | None) -> Record:
    return record.model_copy(update={"cost": record.cost.model_copy(update={"memory_peak": memory})})


def lasting(ratio: float = 12.3, machine: str = "x86_64", pairs: int = 9) -> ClientTime:
    ends = dict(low=11.1, high=13.5) if pairs > 5 else dict(low=None, high=None)
    more = dict(pairs=pairs, seconds=0.0421, undefended_seconds=0.0034, machine=machine, threads=1)
    return ClientTime.model_validate(dict(ratio=ratio) | ends | more)


def cost_board(page: str) -> list[str]:
    """Return the rows of the cost board, tags dropped."""
    board = page[page.index('<section id="cost"') : page.index('<section id="cells"')]
    body = board[board.index("<tbody>") :]
    return [" ".join(" ".join(Reader(row).text).split()) for row in body.split("<tr")[1:]]


def test_the_cost_board_has_bytes_memory_and_time_beside_the_undefended(fabricate: Make) -> None:
    none = costly(fabricate("none", None, "dlg", "reconstruction", 35.0, bytes_up=46_552.0), 465_540)
    mine = costly(fabricate("pbpfl", 10.0, "dlg", "reconstruction", bytes_up=15_419.0), 93_108)
    bare = fabricate("spn", 1.0, "dlg", "reconstruction", control="alpha2")
    again = fabricate("pbpfl", 10.0, "strong", "reconstruction").model_copy(update={"cost": mine.cost})
    ours = {mine.cell_id, again.cell_id}
    found = cost_board(Page([bare, again, mine, none], times=lambda r: lasting() if r.cell_id in ours else None).html())
    assert [row.split()[1] for row in found] == ["none", "pbpfl", "spn"], "one row a setting, the undefended first"
    assert (
        "kappa = 10 15.4 kB 0.33 1.0 kB 1.00 80 B 93.1 kB 0.20 42.1 ms x86_64, 1 thread 12.30 11.10 to 13.50"
        in found[1]
    )
    assert "alpha2 = 1 1.0 kB 0.02 1.0 kB 1.00 80 B not measured n/a not measured no epsilon" in found[2]
    (few,) = cost_board(Page([mine], times=lambda r: lasting(pairs=1)).html())
    assert "n/a" in few and "12.30 1 pair no epsilon" in few


def test_the_cost_board_names_the_federation_where_there_are_several(fabricate: Make) -> None:
    one = fabricate("none", None, "dlg", "reconstruction")
    two = fabricate("none", None, "dlg", "reconstruction", clients=3)
    assert "clients" not in cost_board(Page([one]).html())[0]
    rows_ = cost_board(Page([one, two]).html())
    assert len(rows_) == 2 and "mlp, 10 clients, 20 rounds, seed 0" in rows_[0] and "3 clients" in rows_[1]


def test_names_on_the_cost_board_stay_text(fabricate: Make) -> None:
    evil = "<img src=x onerror=alert(1)>"
    made = [fabricate(evil, 1.0, "dlg", "reconstruction", control=evil, reason=evil, clients=n) for n in (3, 4)]
    page = Page(made, times=lambda r: lasting(machine=evil)).html()
    assert evil not in page and page.count("&lt;img src=x") > 6 and "img" not in Reader(page).tags


def test_the_page_takes_times_from_its_folder_and_the_table_none(fabricate: Make, tmp_path: Path) -> None:
    record = fabricate("pbpfl", 10.0, "dlg", "reconstruction")
    page = Page([record], times=partial(time_of, tmp_path))
    without, table = page.html(), csv_text([record])
    save_time(tmp_path, training_of(record), lasting())
    assert "12.30" in page.html() and "12.30" not in without and csv_text([record]) == table


def test_csv_has_costs_over_those_of_the_undefended(fabricate: Make) -> None:
    none = costly(fabricate("none", None, "dlg", "reconstruction", bytes_up=2000.0), 400)
    mine = costly(fabricate("pbpfl", 10.0, "dlg", "reconstruction", bytes_up=500.0), 100)
    columns = ("bytes_up", "up_ratio", "down_ratio", "memory_peak", "memory_ratio")
    (row,) = [r for r in csv.DictReader(io.StringIO(csv_text([none, mine]))) if r["defense"] == "pbpfl"]
    assert [row[name] for name in columns] == ["500", "0.25", "1", "100", "0.25"]
    (row,) = csv.DictReader(io.StringIO(csv_text([costly(mine, None)])))
    assert [row[name] for name in columns] == ["500", "", "", "", ""]


def test_the_page_shows_who_played_which_role_how_often(fabricate: Make) -> None:
    played = Played(roles=["pilot", "ternary"], rounds=[[5, 0, 1], [1, 6, 5]], examples=[30, 90, 60])
    some = [
        fabricate("fedpc", b, "dlg", "reconstruction", control="beta").model_copy(update={"played": played})
        for b in (0.8, 0.2)
    ]
    (counted,) = role_counts([*some, fabricate("none", None, "dlg", "reconstruction")])
    assert (counted.role, counted.labels) == ("pilot", ("beta=0.2", "beta=0.8"))
    assert counted.counts == ((5, 0, 1), (5, 0, 1)) and counted.examples == (30, 90, 60)
    page = Page([*some]).html()
    assert "Who played which role" in page and "rounds as pilot" in page
    assert page.index("(90)") < page.index("(60)") < page.index("(30)")  # most examples first
    assert "Who played which role" not in Page([fabricate("none", None, "dlg", "reconstruction")]).html()


# -- what the page carries --------------------------------------------------------------------------------------------
def test_vendored_files_are_those_that_were_published_and_their_licenses_lie_beside_them() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = {name: value for value, name in (line.split() for line in lines)}
    assert set(sums) == {path.name for path in VENDOR.iterdir()} - {"SHA256SUMS", "README.md"}
    for name, value in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == value, name
    about = (VENDOR / "README.md").read_text()
    assert all(name in about for name in sums) and "LICENSE.tabulator" in sums


def test_the_policy_names_each_script_that_stands_in_the_page_and_no_other(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert re.findall(r"'(sha256-[^']*)'", policy[1]) == [digest(script) for script in scripts] and len(scripts) == 2


# -- a defense's part of the page -------------------------------------------------------------------------------------
def test_anchors_are_words_and_no_two_names_share_one() -> None:
    found = anchors(["spn", "a b", "a/b", "<x>", "x", ""])
    assert found["spn"] == "defense-spn" and len(set(found.values())) == 6
    assert all(re.fullmatch(r"[A-Za-z][\w-]*", anchor) for anchor in found.values())


def test_a_defense_has_its_sentences_rows_images_and_claims_and_controls_have_none() -> None:
    claim = Claim("asr", 0.5, "cifar10", "dlnet", None, "Table 4")
    outcomes = [
        Checked("spn", claim, "here", Finding("falls", "to 71.0%", "above chance", "50%", "71%", ())),
        Unchecked("spn", claim, "no record of mnist"),
    ]
    said = [Said("spn", "", "spn hides nothing."), Said("dp", "", "dp hides all.")]
    page = Page(board_records(), images=lambda _: gradient_images(), said=said, outcomes=outcomes).html()
    part = page[page.index('id="defense-spn"') : page.index('id="claims"')]
    for words in ("spn hides nothing.", "falls", "to 71.0%", "no record of mnist", "alpha2 = 0.5", "adaptive_spn"):
        assert words in part, words
    assert "dp hides all." not in part and part.count("data:image/png") == 4, "a sprite a control value"
    assert 'id="defense-none"' not in page and 'href="#defense-spn"' in page[: page.index('id="defense-dp"')]
    claims = page[page.index('id="claims"') : page.index('id="cost"')]
    assert "ASR 50.00%" in claims and "falls to 71.0%" in claims


def test_a_sprite_has_the_originals_once_above_the_strongest_of_each_kind() -> None:
    page = Page(board_records(), images=lambda _: gradient_images()).html()
    part = page[page.index('id="defense-spn"') :]
    (names, *_) = re.findall(r"<ul>(.*?)</ul>", part[part.index('class="sprite"') :])
    shown = [
        words.split()[0] for words in re.sub("<[^>]*>", " ", names.replace("</li>", "|")).split("|") if words.strip()
    ]
    assert shown == ["originals", "dlg", "adaptive_spn"]


# -- the folder -------------------------------------------------------------------------------------------------------
def test_figures_of_boards_that_are_gone_are_removed_and_other_files_stay(tmp_path: Path, fabricate: Make) -> None:
    store = Store(tmp_path / "out")
    store.save(fabricate("none", None, "mia_loss", "membership", 0.9))
    folder = store.out / "figures"
    folder.mkdir()
    for name in ("ppc-old.svg", "ppc-old.png", "notes.txt"):
        (folder / name).write_text("x")
    written = write_board(store)
    assert {path.name for path in folder.iterdir()} == {p.name for p in written if p.parent == folder} | {"notes.txt"}


def test_a_board_is_up_to_date_while_both_tables_are(tmp_path: Path, fabricate: Make) -> None:
    store = Store(tmp_path / "out")
    store.save(fabricate("none", None, "dlg", "reconstruction", 35.0))
    write_board(store)
    assert up_to_date(store)
    worst = store.out / "worst_case.csv"
    worst.write_text(worst.read_text().replace("35", "36"))
    assert not up_to_date(store)
    worst.unlink()
    assert not up_to_date(store)
