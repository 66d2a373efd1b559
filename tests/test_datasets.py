"""What every data set is, digits, and tables as data sets: contents, digests, splits, one sentence for bad ones."""

import gzip
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from ppbench.base.errors import UsageError
from ppbench.base.registry import plugins
from ppbench.task import synthetic
from ppbench.task.dataset import Dataset, Split, default_root
from ppbench.task.partition import hold_out, strata, three_way
from ppbench.task.user_data import open_dataset


def small(**changes: Any) -> Dataset:
    split = Split(torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2), torch.arange(6) % 3, 3)
    whole = {"name": "s", "train": split, "test": split, "classes": 3, "shape": (1, 2, 2), "data_range": (0.0, 1.0)}
    return Dataset(**{**whole, **changes})


def shares_nothing(taken: Tensor, source: Tensor) -> bool:
    """Whether `taken` has a storage of just its own size, apart from that of `source`."""
    own, other = taken.untyped_storage(), source.untyped_storage()
    return own.nbytes() == taken.numel() * taken.element_size() and own.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_take_copies_scales_and_encodes(dtype):
    x, index = torch.arange(24).view(6, 1, 2, 2), torch.tensor([4, 1, 1])
    split = Split(x.to(dtype) if dtype == torch.uint8 else x / 255, torch.arange(6) % 3, 3)
    before = split.x.clone()
    data = split.take(index)
    assert data.x.dtype == data.y.dtype == torch.float32
    assert torch.equal(data.x, x[index] / 255)
    assert torch.equal(data.y, torch.eye(3)[split.y[index]])
    assert shares_nothing(data.x, split.x)
    assert shares_nothing(data.y, split.y)
    assert not shares_nothing(split.x[:3], split.x), "the planted view must be found"
    data.x.fill_(7)
    assert torch.equal(split.x, before)


def test_digest_sees_values_labels_and_shapes():
    digest = small().sha256()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert small(name="other").sha256() == digest
    split = small().train
    changed = split.x.clone()
    changed[5, 0, 1, 1] += 1
    assert small(train=replace(split, x=changed)).sha256() != digest
    assert small(test=replace(split, y=split.y.flip(0))).sha256() != digest
    tall = replace(split, x=split.x.view(6, 1, 1, 4))
    assert small(train=tall, test=tall, shape=(1, 1, 4)).sha256() != digest
    transposed = replace(split, x=split.x.transpose(2, 3))
    assert small(train=transposed).sha256() == small(train=replace(split, x=transposed.x.contiguous())).sha256()


def broken(part: str, **fields: Any) -> dict[str, Any]:
    return {part: replace(small().train, **fields)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (broken("train", y=torch.tensor([0, 1, 2, -1, 1, 2])), "Example 3 of the training part .* label -1"),
        (broken("test", y=torch.tensor([0, 1, 2, 0, 3, 2])), "Example 4 of the test part .* label 3; .* 0 to 2"),
        (broken("test", x=torch.zeros(0, 1, 2, 2), y=torch.zeros(0, dtype=torch.int64)), "no example in the test"),
        (broken("train", x=torch.full((6, 1, 2, 2), torch.nan)), "Example 0 .* not finite"),
        (broken("train", x=torch.full((6, 1, 2, 2), 1.5)), "not in the data range"),
        (broken("train", x=torch.zeros(6, 1, 2, 3)), r"shape \(6, 1, 2, 3\)"),
        (broken("train", x=torch.zeros(6, 1, 2, 2).double()), "float64"),
        (broken("train", y=torch.zeros(6)), "int64"),
        (broken("test", classes=4), "4 classes"),
        ({"classes": 1}, "1 classes"),
        ({"data_range": (-1.0, 1.0)}, "uint8"),
    ],
)
def test_what_is_no_data_set_is_refused(changes, words, refused):
    with pytest.raises(UsageError, match=words):
        small(**changes)


def fitted(**changes: Any) -> Dataset:
    """A small regression."""
    split = Split(torch.arange(24.0).view(6, 4), torch.tensor([[0.5], [-1.0], [2.0], [0.5], [3.0], [0.0]]), 1)
    whole = {"name": "r", "train": split, "test": split, "classes": 1, "shape": (4,), "data_range": (0.0, 23.0)}
    return Dataset(**{**whole, "task": "regression", **changes})


def test_a_regression_gives_its_targets_as_copies():
    data = fitted()
    taken = data.train.take(torch.tensor([4, 1, 1]))
    assert taken.y.dtype == torch.float32 and taken.y.tolist() == [[3.0], [-1.0], [-1.0]]
    assert shares_nothing(taken.y, data.train.y) and shares_nothing(taken.x, data.train.x)
    assert data.train.strata.tolist() == [2, 0, 3, 2, 4, 1]
    assert torch.equal(small().train.strata, small().train.y)
    moved = replace(data.train, y=data.train.y + 1e-6)
    assert fitted(test=moved).sha256() != data.sha256()
    assert small().task == "classification"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"classes": 2}, "2 classes; a regression must have 1"),
        ({"train": replace(fitted().train, y=torch.arange(6))}, "torch.int64 .*targets of a regression"),
        ({"test": replace(fitted().train, y=torch.zeros(6))}, r"float32 \(6,\); .* \[N, 1\]"),
        ({"test": replace(fitted().train, y=torch.zeros(6, 2))}, r"float32 \(6, 2\)"),
        ({"test": replace(fitted().train, y=torch.zeros(6, 1).double())}, "float64"),
        ({"train": replace(fitted().train, y=torch.tensor([0, 1, torch.inf, 0, 1, 2])[:, None])}, "Example 2 .* inf"),
        ({"train": replace(fitted().train, y=torch.tensor([torch.nan, 1, 0, 0, 1, 2])[:, None])}, "nan.* be finite"),
        ({"task": "classification"}, "1 classes"),
        ({"task": "classification", "classes": 2}, "int64 with one axis"),
    ],
)
def test_what_is_no_regression_is_refused(changes, words, refused):
    with pytest.raises(UsageError, match=words) as caught:
        fitted(**changes)
    assert "\n" not in str(caught.value)


def test_root_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PPBENCH_DATA", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("PPBENCH_DATA")
    assert default_root() == Path.home() / ".cache" / "ppbench" / "data"


def test_unknown_names_and_paths_are_refused(tmp_path, refused):
    refused("digit", "'digit'", "did you mean 'digits'")
    refused("digits:8", "takes no argument")
    for name in ("parquet", "imagefolder", "csv"):
        refused(name, f"'{name}:PATH'")
        refused(f"{name}:{tmp_path}/nowhere", str(tmp_path / "nowhere"))


def test_a_plugin_must_return_a_dataset(monkeypatch, refused):
    opened = vars(plugins("datasets")["digits"])  # imported once a process, by whichever test came first
    monkeypatch.setitem(opened, "loaded", lambda argument, *, seed, root: {"x": 1})
    refused("digits", "returned dict")


# -- digits ----------------------------------------------------------------------------------------------------------
def test_digits(tmp_path):
    data = open_dataset("digits", seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.classes, data.shape) == (1437, 360, 10, (1, 8, 8))
    values = data.train.x.unique()
    assert torch.equal(values * 16, torch.arange(17.0))
    counts = data.train.y.bincount(), data.test.y.bincount()
    assert ((counts[1] / (counts[0] + counts[1]) - 0.2).abs() < 0.01).all()
    # The split belongs to the name: no seed, machine or version of torch may move it.
    assert data.sha256()[:16] == "a96553e79b82a1e8"
    assert open_dataset("digits", seed=1, root=tmp_path).sha256() == data.sha256()
    rows = {row.numpy().tobytes() for row in data.train.x}
    assert sum(row.numpy().tobytes() in rows for row in data.test.x) == 0


# -- tables ------------------------------------------------------------------------------------------------------------
DATA = Path(os.environ.get("PPBENCH_TEST_DATA", ""))
needs_data = pytest.mark.skipif(
    not os.environ.get("PPBENCH_TEST_DATA") or not DATA.is_dir(),
    reason="PPBENCH_TEST_DATA does not name a folder with bank-marketing.csv.gz",
)


def table(rows: int = 40) -> list[list[Any]]:
    draw = np.random.default_rng(0)
    ages = [round(float(draw.normal(40, 9)), 3) for _ in range(rows)]
    return [[age, row, "rst"[row % 3], row % 7, ["no", "yes"][row % 2]] for row, age in enumerate(ages)]


def write_csv(path: Path, rows: list[list[Any]], sep: str = ";", header: str = "age;id;job;pdays;y") -> Path:
    text = "\n".join([header.replace(";", sep), *(sep.join(map(str, row)) for row in rows)]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_csv_features_labels_and_range(tmp_path):
    rows = table()
    data = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    assert (data.modality.name, data.name, data.classes, data.shape) == ("row", "csv:a.csv", 2, (6,))
    assert (len(data.train), len(data.test)) == (32, 8)
    train, _ = hold_out(torch.arange(40) % 2, 5, 0)
    assert torch.equal(data.train.y, train % 2)
    age = torch.tensor([rows[int(row)][0] for row in train], dtype=torch.float64)
    expected = (age - age.mean()) / age.std(correction=0)
    torch.testing.assert_close(data.train.x[:, 0].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(data.train.x[:, 3:], torch.eye(3)[train % 3])
    assert data.data_range == (float(data.train.x.min()), float(data.train.x.max()))


def test_it_is_noted_which_columns_are_categories_and_of_how_many_values(tmp_path):
    path = write_csv(tmp_path / "a.csv", table())
    (note,) = open_dataset(f"csv:{path}", seed=0, root=tmp_path).notes
    read = "numbers: age, id (it counts the rows), pdays; categories (values): job (3)"
    assert note == f"csv:a.csv: 40 rows; {read}; target: y (2 classes)"
    rows = [[*row[:3], "" if row[1] < 4 else row[3], row[4]] for row in table()]
    path = write_csv(tmp_path / "a.csv", rows)
    (note,) = open_dataset(f"csv:{path}?na=&drop=age,job&target=id&task=regression", seed=0, root=tmp_path).notes
    read = "36 rows (4 without a value are left out); numbers: pdays; categories (values): y (2)"
    assert note == f"csv:a.csv: {read}; target: id (numbers)"


def test_numbers_that_hardly_differ_beside_their_size_are_refused(tmp_path, refused):
    rows = [[1e9 + row[1] * 2e-7, *row[1:]] for row in table()]
    refused(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", "'age'", "too little beside their size")


@pytest.mark.parametrize("sep", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_separator_is_sniffed_and_gzip_read(tmp_path, sep, name):
    reference = open_dataset(f"csv:{write_csv(tmp_path / 'r.csv', table())}", seed=0, root=tmp_path).sha256()
    path = write_csv(tmp_path / name, table(), sep)
    assert open_dataset(f"csv:{path}", seed=0, root=tmp_path).sha256() == reference
    named = "tab" if sep == "\t" else sep
    assert open_dataset(f"csv:{path}?sep={named}&target=y", seed=0, root=tmp_path).sha256() == reference


def test_test_rows_influence_nothing_else(tmp_path):
    rows = table()
    _, test = hold_out(torch.arange(40) % 2, 5, 0)
    before = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    for row in test.tolist():
        rows[row][:4] = [1e6, -5, "unseen", 99]
    after = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    assert torch.equal(before.train.x, after.train.x)
    assert before.data_range == after.data_range
    assert (after.test.x[:, 3:] == 0).all()
    assert (after.test.x[:, 0] > 1000).all()
    train_row = next(row for row in range(40) if row not in test.tolist())
    rows[train_row][0] = 41.5
    changed = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}", seed=0, root=tmp_path)
    assert not torch.equal(changed.train.x, after.train.x), "the comparison must be able to fail"


def test_other_targets_and_missing_categories(tmp_path):
    rows = table()
    for row in rows[3:9]:  # one at least is for training
        row[4] = ""
    path = write_csv(tmp_path / "a.csv", rows)
    data = open_dataset(f"csv:{path}?target=job", seed=0, root=tmp_path)
    assert (data.classes, data.shape) == (3, (6,))  # age, id, pdays; y is no, yes or missing
    assert data.train.y.unique().tolist() == [0, 1, 2]


def test_three_parts_leave_validation_rows_out(tmp_path):
    path = write_csv(tmp_path / "a.csv", table(200))
    data = open_dataset(f"csv:{path}?split=8:1:1", seed=5, root=tmp_path)
    train, validation, test = three_way(torch.arange(200) % 2, (8, 1, 1), 5)
    assert (len(data.train), len(validation), len(data.test)) == (160, 20, 20)
    ids = torch.arange(200.0)  # the second column, standardized with the training rows' figures
    scale = ids[train].std(correction=0)
    torch.testing.assert_close(data.train.x[:, 1], (ids[train] - ids[train].mean()) / scale, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(data.test.x[:, 1], (ids[test] - ids[train].mean()) / scale, rtol=1e-5, atol=1e-5)
    usual = open_dataset(f"csv:{path}", seed=5, root=tmp_path).sha256()
    assert open_dataset(f"csv:{path}?split=4:0:1", seed=5, root=tmp_path).sha256() == usual != data.sha256()


def test_validation_rows_influence_nothing(tmp_path):
    rows = table(100)
    _, validation, _ = three_way(torch.arange(100) % 2, (8, 1, 1), 0)
    name = f"csv:{write_csv(tmp_path / 'a.csv', rows)}?split=8:1:1"
    before = open_dataset(name, seed=0, root=tmp_path).sha256()
    for row in validation.tolist():
        rows[row][:4] = [1e6, -5, "unseen", 99]
    write_csv(tmp_path / "a.csv", rows)
    assert open_dataset(name, seed=0, root=tmp_path).sha256() == before


@pytest.mark.parametrize(("target", "values"), [("pdays", [float(row % 7) for row in range(60)]), ("age", None)])
def test_csv_regression(tmp_path, target, values):
    rows = table(60)
    path = write_csv(tmp_path / "a.csv", rows)
    data = open_dataset(f"csv:{path}?target={target}&task=regression", seed=2, root=tmp_path)
    expected = torch.tensor(values or [row[0] for row in rows])[:, None]
    train, _, test = three_way(strata(expected), (4, 0, 1), 2)
    assert (data.task, data.classes, data.train.classes) == ("regression", 1, 1)
    assert torch.equal(data.train.y, expected[train]) and torch.equal(data.test.y, expected[test])
    assert data.train.y.dtype == torch.float32 and data.train.y.shape == (len(train), 1)
    assert data.train.take(torch.tensor([0])).y.shape == (1, 1)
    again = open_dataset(f"csv:{path}?task=regression&target={target}", seed=2, root=tmp_path)
    other = open_dataset(f"csv:{path}?task=regression&target={target}", seed=3, root=tmp_path)
    assert again.sha256() == data.sha256() != other.sha256()


def test_a_truth_value_is_a_number_to_fit(tmp_path):
    rows = [[*row[:4], row[1] % 4 == 0] for row in table()]
    data = open_dataset(f"csv:{write_csv(tmp_path / 'a.csv', rows)}?task=regression", seed=0, root=tmp_path)
    assert data.train.y.unique().tolist() == [0.0, 1.0]
    assert float(data.train.y.mean()) == float(data.test.y.mean()) == 0.25


def test_bad_splits_and_targets_are_refused(tmp_path, refused):
    path = write_csv(tmp_path / "a.csv", table())
    for text in ("8:2", "0:1:1", "8:1:0", "8:-1:1", "8:1:x", "", "8:1:1:1", "1e3:1:1", "0.8:0.1:0.1"):
        refused(f"csv:{path}?split={text}", f"split={text!r}", "'split=8:1:1'")
    refused(f"csv:{path}?task=regresion", "csv task", "did you mean 'regression'")
    refused(f"csv:{path}?task=regression", "target column 'y'", "text such as 'no'", "must be numbers")
    refused(f"csv:{path}?task=regression&target=job", "'job'", "'r'")
    refused(f"csv:{write_csv(path, [[*row[:4], 3] for row in table()])}?task=regression", "3 in every row")
    for cell, words in (("inf", "inf"), ("1e39", "1e+39"), ("", "no value in the target column")):
        rows: list[list[Any]] = [[*row[:4], row[1]] for row in table()]
        rows[6][4] = cell
        refused(f"csv:{write_csv(path, rows)}?task=regression", "Row 6", "'y'", words)
    refused(f"csv:{write_csv(path, table(3))}?split=2:1:1&task=regression&target=id", "3 rows", "split=2:1:1")


def test_bad_options_and_tables_are_refused(tmp_path, refused):
    """Tables with other faults: `faulty_files.py`; damaged compression: `test_limits.py`."""
    path = write_csv(tmp_path / "a.csv", table())
    refused(f"csv:{path}?target=yy", "column", "'yy'", "did you mean 'y'")
    refused(f"csv:{path}?traget=y", "csv option", "'target'")
    refused(f"csv:{path}?target", "malformed")
    refused(f"csv:{path}?sep=ab", "not one character")
    refused(f"csv:{path}?sep=,", "1 columns", "','")
    refused(f"csv:{tmp_path}", "cannot be read as a table")
    rows = table(1100)
    refused(f"csv:{write_csv(path, [[f'n{row[1]}', *row[1:]] for row in rows])}", "'age'", "1100 distinct")
    refused(f"csv:{write_csv(path, [[*row[:4], row[1]] for row in rows])}", "'y'", "1100 distinct")
    path.write_bytes(b"\xff\xfe\x00")
    refused(f"csv:{path}", "UTF-8")


@needs_data
def test_bank_marketing_as_the_paper_splits_and_fits_it(tmp_path):
    name = f"csv:{DATA / 'bank-marketing.csv.gz'}?target=y&sep=;&split=8:1:1&task=regression"
    data = open_dataset(name, seed=0, root=tmp_path)
    assert (len(data.train), len(data.test), data.task, data.classes) == (32_950, 4_119, "regression", 1)
    assert data.train.y.unique().tolist() == [0.0, 1.0] and data.train.x[:, 0].mean().abs() < 1e-5
    assert [float(split.y.mean()) for split in (data.train, data.test)] == [pytest.approx(0.1127, abs=5e-4)] * 2


# -- pictures of scikit-image ------------------------------------------------------------------------------------------
def test_faces_come_first_and_look_alike():
    one, other = (open_dataset("faces", seed=seed) for seed in (0, 1))
    assert one.sha256() == other.sha256() and (len(one.train), len(one.test), one.shape) == (160, 40, (1, 25, 25))
    faces, backgrounds = (one.train.x[one.train.y == label].flatten(1) for label in (0, 1))
    mean = one.test.x[one.test.y == 0].flatten(1).mean(0)
    near = [torch.corrcoef(torch.cat([mean[None], some]))[0, 1:].median() for some in (faces, backgrounds)]
    assert near[0] > 0.5 > near[1] + 0.2


def test_photos_are_crops_that_do_not_overlap(monkeypatch, tmp_path):
    dataset = open_dataset("photos", seed=0)
    assert (len(dataset.train), len(dataset.test), dataset.shape, dataset.classes) == (219, 55, (3, 32, 32), 5)
    crops = torch.cat([dataset.train.x, dataset.test.x]).flatten(1)
    assert len(crops.unique(dim=0)) == len(crops)
    with Image.open(synthetic._of_scikit_image("chelsea.png")) as picture:
        half = torch.from_numpy(np.array(picture.convert("RGB"))).float().div(255)[64:128, 128:192]
    expected = half.unflatten(0, (32, 2)).unflatten(2, (32, 2)).mean((1, 3)).permute(2, 0, 1)
    assert torch.isclose(crops, expected.flatten(), atol=1e-6).all(1).sum() == 1, (
        "the second row's third crop of the cat"
    )
    with pytest.raises(UsageError, match="takes no argument"):
        open_dataset("photos:32", seed=0)
    monkeypatch.setattr(synthetic, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    with pytest.raises(UsageError, match=r"lacks lfw_subset\.npy"):
        synthetic.faces("", seed=0, root=tmp_path)
