"""CSV, figures and the HTML page: columns, determinism, escaping, ranks, and a real browser."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppbench.errors import UsageError
from ppbench.leaderboard.boards import Entry, boards
from ppbench.leaderboard.figures import Line, Ppc, ppc_png, ppc_svg, strip
from ppbench.leaderboard.html import render, write_html
from ppbench.leaderboard.table import csv_text, no_claims, rows, text, write_csv
from ppbench.metrics.cap import Distance, PpcPoint
from ppbench.metrics.intervals import clopper_pearson
from ppbench.records.aggregate import aggregate
from ppbench.records.schema import CellConfig, Record
from ppbench.records.store import Images, Store

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
        found.append(record("dp", value, "adaptive_dp", 0.6 - 0.13 * np.log10(value / 1e-4), accuracy))
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
    spn = {row.cap for row in table if row.defense == "spn" and row.attack == "dlg"}
    assert len(spn) == 1 and None not in spn
    assert all(row.cap is None and row.cap_reason for row in table if row.defense == "none")


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
    assert found["dp sigma = 0.1"].rank == "1"
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
    assert "Unreliable" in render(undrawn)


def test_an_oracle_is_never_the_headline() -> None:
    best = record("spn", 0.1, "dlg", 1.0)
    attack = best.config.attack.model_copy(update={"oracle": True, "id": "oracle"})
    cell = best.config.model_copy(update={"attack": attack})
    oracle = best.model_copy(update={"config": cell, "cell_id": cell.cell_id()})
    found = entries([oracle, record("spn", 0.1, "dlg", 0.2)])
    assert found["spn alpha2 = 0.1"].worst.config.attack.id == "dlg"


class Page(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "srcset", "href", "xlink:href", "poster", "action")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def gradient_images(n: int = 3) -> Images:
    truth = np.linspace(0, 1, n * 3 * 8 * 8, dtype=np.float32).reshape(n, 3, 8, 8)
    return Images(truth[:, :, ::-1].copy(), truth)


def test_names_and_sentences_stay_text() -> None:
    evil = "<script>alert(1)</script>"
    records = [record(evil, 0.1), record(evil, 0.2), record(evil, 0.3, status="failed").model_copy(
        update={"reason": evil})]  # fmt: skip
    page = render(
        records, verdict=[evil], reliability=[evil], claims=lambda _: evil, images=lambda _: gradient_images()
    )
    assert evil not in page and "&lt;script&gt;alert(1)" in page
    assert Page(page).tags.count("script") == 1


@pytest.fixture(scope="module")
def page() -> str:
    return render(board_records(), verdict=["The verdict."], images=lambda _: gradient_images())


def test_the_page_asks_nobody_for_anything(page: str) -> None:
    found = Page(page)
    assert all(load.startswith(("data:image/png;base64,", "#")) for load in found.loads)
    assert not re.search(r"https?://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_the_page_shows_every_cell_and_why_some_failed(page: str) -> None:
    records = board_records()
    assert all(f'id="c{r.cell_id}"' in page for r in records)
    shown = " ".join(Page(page).text)
    for words in ("The verdict.", "diverged", "failed", "became NaN", "plain attacks only", "adaptive", "TPR"):
        assert words in shown
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_equal_records_give_equal_pages_whatever_their_order() -> None:
    records = [r for r in board_records() if r.config.defense.id in ("none", "dp")]
    assert render(records) == render(records[::-1])


def test_an_empty_page_says_so() -> None:
    assert "Nothing was evaluated" in render([])


def points(ratios: bool) -> tuple[PpcPoint, ...]:
    return tuple(
        PpcPoint(c, r if ratios else None, a, a - 0.02, None, Distance("recon/1", d, d - 0.1, d + 0.1))
        for c, r, a, d in [(0.001, 126.0, 0.7, 0.2), (0.1, 1.26, 0.69, 0.9), (0.5, 0.25, 0.66, 1.1)]
    )


@pytest.mark.parametrize("ratios", [True, False])
def test_figures_are_the_same_bytes_twice_and_survive_any_name(ratios: bool) -> None:
    ppc = Ppc("$\\frac{ <script> & $", "a_$^", "recon/1", (Line("dlg $x$", False, points(ratios)),))
    svg = ppc_svg(ppc, inline=True)
    assert svg == ppc_svg(ppc, inline=True) and ppc_png(ppc) == ppc_png(ppc)
    assert "<script>" not in svg and "http" not in svg and svg.startswith("<svg role")
    assert ("gradient / perturbation" in svg) is ratios
    assert ("#2ca25f" in svg and "#de2d26" in svg) is ratios


def test_strip_puts_truth_above_guess_and_marks_what_is_not_finite() -> None:
    truth = np.zeros((2, 1, 8, 8), dtype=np.float32)
    guess = np.ones((2, 1, 8, 8), dtype=np.float32) * 7
    guess[1] = np.nan
    image = np.asarray(Image.open(io.BytesIO(strip(guess, truth))))
    assert image.shape == (132, 132, 4)
    assert (image[:64, :64, :3] == 0).all() and (image[68:, :64, :3] == 255).all()
    assert set(np.unique(image[68:, 68:, :3])) == {110, 150}
    assert (image[64:68, :, 3] == 0).all()


def test_strip_shows_the_first_ten_and_refuses_tables() -> None:
    many = np.random.default_rng(0).random((30, 3, 32, 32)).astype(np.float32)
    assert Image.open(io.BytesIO(strip(many, many))).size == (10 * 68 - 4, 132)
    with pytest.raises(ValueError, match="strip needs images"):
        strip(np.zeros((3, 5), dtype=np.float32), np.zeros((3, 5), dtype=np.float32))


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


PROBE = """
const table = document.querySelector("table.data"), button = table.querySelector("th[data-col='6'] button");
button.click(); button.click();
document.body.dataset.down = [...table.tBodies[0].rows].map((row) => row.cells[6].dataset.v).join(",");
const filter = document.querySelector("input[type=search]");
filter.value = "SPN"; filter.dispatchEvent(new Event("input"));
const left = [...table.tBodies[0].rows].filter((row) => !row.hidden);
document.body.dataset.left = left.map((row) => row.cells[1].querySelector("span").textContent).join(",");
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_a_real_browser_runs_the_script_and_draws_the_page(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    image = gradient_images()
    kept = [store.save(r, tensors={"guess": image.guess, "truth": image.truth}) for r in board_records()]
    write_html(kept, tmp_path / "page.html", images=store.images)
    policy = re.compile("script-src 'sha256-[^']*'")  # lets the probe in; the page's own digest is tested as it is
    page = policy.sub("script-src 'unsafe-inline'", (tmp_path / "page.html").read_text())
    (tmp_path / "probed.html").write_text(page.replace("</body>", f"<script>{PROBE}</script></body>"))
    common = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    url = (tmp_path / "page.html").as_uri()
    shot = tmp_path / "shot.png"
    ran = subprocess.run(
        [*common, "--enable-logging=stderr", "--window-size=1400,2400", f"--screenshot={shot}", "--dump-dom", url],
        capture_output=True, text=True, timeout=60, env={**os.environ, "HOME": str(tmp_path)}, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in ran.stderr
    if shot.exists():
        assert len(np.unique(np.asarray(Image.open(shot).convert("L")))) > 20
    assert re.search(r'<html[^>]*class="upgraded"', ran.stdout)
    assert "<button>" in ran.stdout and 'type="search"' in ran.stdout
    probed = subprocess.run(
        [*common, "--dump-dom", (tmp_path / "probed.html").as_uri()], capture_output=True, text=True, timeout=60,
        env={**os.environ, "HOME": str(tmp_path)}, check=True,
    ).stdout  # fmt: skip
    down = [float(v) for v in re.search(r'data-down="([^"]*)"', probed)[1].split(",") if v]
    assert len(down) > 5 and down == sorted(down, reverse=True)
    assert re.search(r'data-left="([^"]*)"', probed)[1] == "spn,spn,spn,spn"
