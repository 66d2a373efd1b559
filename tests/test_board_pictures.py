"""A published board keeps pictures of the cells that its page shows: first victims, checked against their scores."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safe

from ppbench.base.errors import UsageError
from ppbench.records.archive import unpack_archive
from ppbench.records.store import PICTURED, CellImages, Pictures, Store, picture_bytes, pictures_of
from ppbench.report.integrity import history
from ppbench.report.page.board import summary_of
from ppbench.verification import examine, verify
from ppbench.verification.baseline import accept

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(fabricate, pictured, tmp_path):
    """Return a maker of finished runs with all images; dp and spn at these decibels."""

    def make(name, seed=0, **decibels):
        store = Store(tmp_path / name)
        points = [("none", None, 30.0), ("full_noise", None, 5.0)]
        points += [(defense, 0.1, value) for defense, value in decibels.items()]
        for defense, value, psnr in points:
            record = fabricate(defense, value, "dlg", "reconstruction", psnr, control="sigma", seed=seed)
            record, tensors = pictured(record.model_copy(update={"asked": f"q{seed}"}))
            store.save(record, seconds=1.0, tensors=tensors)
        return store

    return make


@pytest.fixture
def baseline(run, tmp_path):
    """Return the store of an accepted baseline, and its records by defense, with the images they were scored by."""
    store = run("new", dp=20.0, spn=8.0)
    accept(store.out, tmp_path / "base", "a test")
    base = Store(tmp_path / "base")
    return base, {r.config.defense.id: (r, store.images(r)) for r in base.load_all()}


def keep(store, record, images):
    (store.out / "records" / f"{record.cell_id}.safetensors").write_bytes(picture_bytes(pictures_of(images)))


def test_pictures_are_the_first_images_to_half_a_255th_and_what_is_not_finite_stays_so(baseline):
    base, cells = baseline
    record, images = cells["dp"]
    guess = images.guess.copy()
    guess[1], guess[2] = np.inf, 7.0
    keep(base, record, replace(images, guess=guess))
    kept = base.images(record)
    assert isinstance(kept, Pictures) and len(kept.truth) == len(kept.guess) == PICTURED < len(images.truth)
    assert np.abs(kept.truth - images.truth[:PICTURED]).max() <= 0.5 / 255 + 1e-7
    assert np.isnan(kept.guess[1]).all() and (kept.guess[2] == 1).all(), "as a page draws them"
    rest = [0, *range(3, PICTURED)]
    assert np.abs(kept.guess[rest] - images.guess[rest].clip(0, 1)).max() <= 0.5 / 255 + 1e-7
    assert np.abs(kept.blind - images.blind).max() <= 0.5 / 255 + 1e-7
    path = base.out / "records" / f"{record.cell_id}.safetensors"
    assert path.read_bytes() == picture_bytes(kept) == picture_bytes(pictures_of(kept)), "kept as they are"


def test_a_baseline_with_pictures_is_verified_accepted_and_drawn_and_says_what_was_not_checked(baseline, tmp_path):
    base, cells = baseline
    for name in ("none", "dp"):
        keep(base, *cells[name])
    report = examine(base.out)
    assert not report.problems and "2 files of pictures" in report.checked
    assert any(clause.startswith("whether pictures are what was scored in 2 of 4 cells") for clause in report.unchecked)
    assert any(clause.startswith("scores of images in 4 of 4 cells") for clause in report.unchecked)
    (strip,) = summary_of(base, "board").pictures
    assert strip.cells == {cells["none"][0].cell_id, cells["dp"][0].cell_id}
    assert [shot.name.split(" (")[0] for shot in strip.shots] == [
        "original", "undefended", "dp sigma=0.1", "blind guess",
    ]  # fmt: skip
    accept(base.out, tmp_path / "other", "from an archive with pictures")
    assert verify(tmp_path / "other") == [] and not list((tmp_path / "other").rglob("*.safetensors"))


def worse(images):
    return replace(images, guess=1 - images.guess)


def swapped(images):
    return replace(images, guess=images.guess[::-1].copy(), truth=images.truth[::-1].copy())


def failed(images):
    return replace(images, guess=np.full_like(images.guess, np.nan))


def other_original(images):
    return replace(images, guess=1 - images.guess, truth=1 - images.truth)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (worse, r"the picture of victim \d+\.\d+\.\d+ has a root mean square error of 0\.\d+, its score 0\.1"),
        (swapped, "has a root mean square error of"),
        (failed, "is not finite, its score says otherwise"),
        (other_original, r"\d+ originals beside its scores are not those of"),
    ],
)
def test_a_picture_that_contradicts_its_score_or_another_cell_is_a_problem(baseline, change, problem, rescored):
    base, cells = baseline
    for name in ("none", "dp"):
        keep(base, *cells[name])
    record, images = cells["dp"]
    if change is swapped:  # victims that differ
        images = replace(images, guess=images.guess * np.linspace(1, 0.2, len(images.guess))[:, None, None, None])
    keep(base, record, change(images))
    (first, *_) = verify(base.out)
    assert re.search(problem, first), first


def test_malformed_and_stray_pictures_are_problems_and_not_drawn(baseline):
    base, cells = baseline
    record, images = cells["dp"]
    path = base.out / "records" / f"{record.cell_id}.safetensors"
    right = safe.load(picture_bytes(pictures_of(images)))
    for change, problem in (
        ({"guess": images.guess[:PICTURED]}, "as uint8 of one shape"),
        ({"truth": right["truth"][:3]}, "as uint8 of one shape"),
        ({"finite": right["finite"][:3]}, "'finite' as one truth value for each image"),
        ({"finite": right["guess"][:, 0, 0, 0].copy()}, "'finite' as one truth value for each image"),
        ({"blind": right["truth"]}, "'blind' as one uint8 image"),
    ):
        path.write_bytes(safe.save({**right, **change}))
        assert any(problem in one for one in verify(base.out)), problem
        with pytest.raises(UsageError, match=problem):
            base.images(record)
        assert any(problem in one for one in summary_of(base, "board").problems)
    path.rename(path.with_name(f"{'0' * 32}.safetensors"))
    assert any("not the pictures of any cell" in one for one in verify(base.out))


# -- benchmarks/boards.py ----------------------------------------------------------------------------------------------
@pytest.fixture
def boards(script, tmp_path, monkeypatch):
    module = script(ROOT / "benchmarks" / "boards.py")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "recheck", None)  # no data set gives these records
    return module


def pictures_in(boards, board, tmp_path, name):
    unpack_archive(boards.RESULTS / board.name / "records.zip", tmp_path / name)
    assert verify(tmp_path / name) == []
    return {path.stem: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}


def test_a_board_is_published_with_the_pictures_of_its_page_and_no_others(boards, run, tmp_path):
    store, board = run("out/0", dp=20.0, spn=8.0), boards.Board("x", preset="")
    boards.publish(board, store.out, "seed 0", 0.1, "here")
    kept = pictures_in(boards, board, tmp_path, "first")
    shown = {r.cell_id for r in store.load_all() if r.config.defense.id != "full_noise"}
    assert kept.keys() == shown and len(shown) == 3
    (strip,) = summary_of(Store(boards.RESULTS / "x" / "records.zip"), "x").pictures
    assert strip.cells == shown and strip.uri == summary_of(store, "x").pictures[0].uri


def test_another_seed_keeps_pictures_and_a_strip_is_of_one_seed(boards, run, tmp_path):
    board = boards.Board("x", preset="")
    boards.publish(board, run("out/0", dp=20.0, spn=8.0).out, "seed 0", 0.1, "here")
    first = pictures_in(boards, board, tmp_path, "first")
    (tmp_path / "out" / "0").rename(tmp_path / "elsewhere")
    boards.publish(board, run("out/1", seed=1, dp=15.0, spn=6.0).out, "seed 1", 0.1, "here")
    assert pictures_in(boards, board, tmp_path, "second") == first, "of the seed that leaks most"
    (strip,) = summary_of(Store(boards.RESULTS / "x" / "records.zip"), "x").pictures
    assert strip.setting.endswith(", seed 0")


def test_pictures_that_a_board_lacks_are_computed_again_and_only_images_that_give_the_scores_are_kept(
    boards, run, tmp_path, monkeypatch, capsys
):
    store, board, commands = run("whole/0", dp=20.0, spn=8.0), boards.Board("x", preset=""), []
    accept(store.out, tmp_path / "bare", "without images")
    with monkeypatch.context() as patch:
        patch.setattr(boards, "add_pictures", lambda *_: None)
        boards.publish(board, store.out, "seed 0", 0.1, "here")
    assert pictures_in(boards, board, tmp_path, "without") == {}
    lines = history(boards.RESULTS / "x" / "records.zip")

    def again(board, seed, out, data, workers):
        commands.append(" ".join(board.command([seed])))
        store.out.rename(out)
        return 0.1

    monkeypatch.setattr(boards, "swept", again)
    record = next(r for r in store.load_all() if r.config.defense.id == "dp")
    images = store.images(record)
    other = CellImages(1 - images.guess, images.truth, images.blind)  # not what was scored
    store.save(record.model_copy(update={"artifacts": []}), tensors={n: v for n, v in vars(other).items()})
    (tmp_path / "out").mkdir()
    boards.illustrate(board, tmp_path / "out", tmp_path, 1)
    filters = ("attack=dlg", "defense=dp,none,spn", "stage=init", "batch=1", "seed=0")
    assert commands == [" ".join(["ppbench sweep x", *(f"--only={one}" for one in filters)])]
    kept = pictures_in(boards, board, tmp_path, "with")
    assert len(kept) == 2 and record.cell_id not in kept
    assert "1 cells that a page would show have no images that give their scores" in capsys.readouterr().out
    assert history(boards.RESULTS / "x" / "records.zip") == lines, "records and their digest stay"
