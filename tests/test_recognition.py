"""Found again, or its class read: planted leaks, blind guesses at chance, less of both the more noise there is."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ppbench.metrics.recognition import Gallery, gallery_of
from ppbench.questions.image_metrics import ImageScore, image_metrics
from ppbench.questions.recognition import Recognition

RANGE = (0.0, 1.0)


@pytest.fixture(scope="module")
def gallery_data() -> tuple[Gallery, torch.Tensor, torch.Tensor]:
    """A gallery of 300 digits, and 200 others with their classes."""
    pool = load_digits()
    x = torch.tensor(pool.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.nn.functional.one_hot(torch.tensor(pool.target)).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    gallery = gallery_of(x, y, order[:300], RANGE, classified=True)
    assert gallery is not None and len(gallery.x) == 300
    return gallery, x[order[300:500]], y[order[300:500]].argmax(1)


def shares(gallery_data, guess) -> tuple[float, float]:
    gallery, truth, classes = gallery_data
    seen = gallery.recognize(guess, truth, classes)
    return float(np.mean([one.rank == 0 for one in seen])), float(np.mean([one.read for one in seen]))


def test_what_leaks_whole_is_found_and_read_whatever_its_brightness(gallery_data):
    reidentified, read = shares(gallery_data, gallery_data[1])
    assert reidentified == 1.0 and read > 0.9
    dim = 0.2 * gallery_data[1] + 0.5
    assert shares(gallery_data, dim) == (reidentified, read)


def test_what_says_nothing_is_found_and_read_at_chance(gallery_data):
    gallery, truth, _ = gallery_data
    generator = torch.Generator().manual_seed(1)
    blind = {
        "noise": torch.rand(truth.shape, generator=generator),
        "mean": gallery.x.mean(0).expand_as(truth),
        "another": truth.roll(1, 0),
    }
    for name, guess in blind.items():
        reidentified, read = shares(gallery_data, guess)
        assert reidentified <= 0.02 and read <= gallery.common + 0.1, name


def test_the_more_noise_the_less_is_found_and_read(gallery_data):
    noise = torch.randn(gallery_data[1].shape, generator=torch.Generator().manual_seed(2))
    results = [shares(gallery_data, gallery_data[1] + sigma * noise) for sigma in (0.0, 0.3, 0.6, 1.2, 5.0)]
    for side in zip(*results, strict=True):
        assert list(side) == sorted(side, reverse=True) and side[0] - side[-1] > 0.7
    assert results[1][0] > 0.9, "at 13 dB, 2 dB beyond a blind guess, a digit is still found among 300"


def test_a_class_can_be_read_off_what_nobody_can_be_found_by(gallery_data):
    gallery, _, classes = gallery_data
    means = torch.stack([gallery.x[gallery.classes == c].mean(0) for c in classes])
    reidentified, read = shares(gallery_data, means)
    assert reidentified <= 0.05 and read > 0.95


@pytest.mark.parametrize("nothing", [float("nan"), float("inf"), 0.0, 0.5, 2.0])
def test_a_blank_or_broken_image_is_found_and_read_by_nobody(gallery_data, nothing):
    assert shares(gallery_data, torch.full_like(gallery_data[1], nothing)) == (0.0, 0.0)


def test_ties_count_against_the_reconstruction(gallery_data):
    gallery, truth, classes = gallery_data
    twice = Gallery(torch.cat([gallery.x, truth[:1]]), torch.cat([gallery.classes, classes[:1]]), RANGE)
    assert [one.rank for one in twice.recognize(truth[:2], truth[:2], classes[:2])] == [1, 0]
    every = Gallery(torch.cat([gallery.x, truth]), torch.cat([gallery.classes, classes]), RANGE)
    ranks = [one.rank for one in every.recognize(truth, truth, classes)]
    assert min(ranks) >= 1, f"{ranks.count(0)} found beside an equal image, by the rounding of a product"


def test_shapes_that_differ_are_refused(gallery_data):
    with pytest.raises(ValueError, match="reconstructions"):
        gallery_data[0].recognize(gallery_data[1][:, :, 1:], gallery_data[1], gallery_data[2])


def test_rows_of_a_table_and_masks_have_no_gallery_or_no_classes(gallery_data):
    x = gallery_data[0].x
    assert gallery_of(x.flatten(1), gallery_data[0].x.flatten(1), torch.arange(9), RANGE, classified=True) is None
    masks = gallery_of(x, x, torch.arange(9), RANGE, classified=False)
    assert masks.classes is None and masks.common is None
    assert {one.read for one in masks.recognize(gallery_data[1], gallery_data[1], None)} == {None}


class Halves(torch.nn.Module):
    """Features that are the image's upper half alone."""

    def features(self, x: torch.Tensor, data_range: tuple[float, float]) -> torch.Tensor:
        return x[:, :, :4].flatten(1).double()


def test_a_feature_network_finds_what_pixels_do_not(gallery_data):
    gallery, truth, classes = gallery_data
    half = truth.clone()
    half[:, :, 4:] = torch.rand(half[:, :, 4:].shape, generator=torch.Generator().manual_seed(3))
    seen = Gallery(gallery.x, gallery.classes, RANGE, Halves()).recognize(half, truth, classes)
    by_pixels, by_features = (
        np.mean([r == 0 for r in side]) for side in zip(*((s.rank, s.rank_features) for s in seen), strict=True)
    )
    assert by_features > 0.9 > by_pixels
    assert np.mean([s.read_features for s in seen]) > np.mean([s.read for s in seen]) + 0.1


# -- as figures of a cell ---------------------------------------------------------------------------------------------
def score(place: int, batch: int, seen: Recognition | None) -> ImageScore:
    return ImageScore(
        probe=place // batch, client=0, index=place % batch, psnr=15.0, rmse=0.5, rmse_raw=0.5, ssim=None, label=None,
        confidence=None, at_truth=None, evaluations=1, blind=11.0, recognition=seen,
    )  # fmt: skip


def figures(scores: list[ImageScore]) -> dict[str, float | None]:
    return {name: make() for name, make in image_metrics(scores, 10, 0).items()}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.lists(st.booleans(), min_size=2, max_size=9))
def test_shares_chance_and_gain_are_what_was_scored(batch, result):
    scores = [
        score(i, batch, Recognition(gallery=300, rank=0 if f else 7, read=f, common=0.2))
        for i, f in enumerate(result * batch)
    ]
    figures_ = figures(scores)
    for name in ("reidentified", "recognized"):
        assert figures_[name].value == pytest.approx(np.mean(result))
    assert figures_["reidentified"].chance == pytest.approx(batch / (300 + batch))
    assert figures_["recognized"].chance >= 0.2 and figures_["gain_median"].value == pytest.approx(4.0)
    assert "reidentified_features" not in figures_


def test_matching_a_batch_makes_classes_come_right_more_often(gallery_data):
    """Labels of blind guesses agree with a batch of eight in 45 % of places at best: more than one in ten."""
    one, eight = (
        figures([score(i, b, Recognition(gallery=9, rank=1, read=False, common=0.1)) for i in range(8)]) for b in (1, 8)
    )
    assert one["recognized"].chance == pytest.approx(0.1) and 0.4 < eight["recognized"].chance < 0.5


def test_older_records_have_none_of_it_and_are_written_as_they_were():
    older = score(0, 1, None)
    assert not {"reidentified", "recognized", "gain_median"} & set(figures([older]))
    assert "recognition" not in older.model_dump()
    failed = score(1, 1, Recognition(gallery=9, rank=9)).model_copy(update={"psnr": None})
    figures_ = figures([failed, failed.model_copy(update={"probe": 5})])
    assert (
        figures_["reidentified"].value == 0.0
        and "recognized" not in figures_
        and figures_["gain_median"].value == -11.0
    )
