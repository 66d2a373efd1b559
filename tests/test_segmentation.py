"""Segmentation: the loss, the overlap of masks, U-Net, data sets with masks, a federation that learns them."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from protocols import rand, weights
from torch.func import grad, vmap

from ppbench.adversary.victims import choose_candidates, choose_victims
from ppbench.attacks.labels import LabelRecovery
from ppbench.attacks.membership.outputs import LossThreshold
from ppbench.attacks.reconstruction.analytic import AnalyticInversion
from ppbench.attacks.tracing import NearestReconstruction
from ppbench.base.errors import UsageError
from ppbench.base.seeds import Seeds
from ppbench.federation.plan import Plan
from ppbench.nets.channels import channels_of
from ppbench.nets.models.unet import unet
from ppbench.nets.net import Classifier, bce, build, initial, net_spec
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.task import Task, check_fit
from ppbench.run.train import mask_overlap, over_images, train
from ppbench.task.dataset import Dataset, Split
from ppbench.task.partition import mask_strata, partition
from ppbench.task.user_data import open_dataset

SHAPE = (3, 32, 32)
UNET = net_spec("unet", SHAPE, 1, {"width": 2})


@pytest.fixture(scope="module")
def shapes():
    return open_dataset("shapes", seed=0)


# -- the loss and the figures ----------------------------------------------------------------------------------------
def test_bce_is_the_mean_cross_entropy_of_pixels():
    logits, y = 8 * rand(4, 1, 5, 6) - 4, (rand(4, 1, 5, 6, seed=1) > 0.5).double()
    expected = F.binary_cross_entropy_with_logits(logits, y, reduction="none").mean((1, 2, 3))
    assert torch.allclose(bce(logits, y), expected, atol=1e-14)
    soft = rand(4, 1, 5, 6, seed=2)
    assert (bce(soft.logit(), soft) <= bce(logits, soft)).all()  # best where the logits say the soft targets


def test_bce_is_finite_far_out_and_can_be_differentiated_twice():
    far = torch.tensor([-1e4, 1e4])[:, None, None, None].requires_grad_()
    value = bce(far, torch.ones(2, 1, 1, 1))
    assert value.tolist() == [1e4, 0.0]
    logit = torch.tensor(0.7, dtype=torch.float64)
    second = grad(grad(lambda z: bce(z.view(1, 1, 1, 1), torch.ones(1, 1, 1, 1)).sum()))(logit)
    p = logit.sigmoid()
    assert float(second) == pytest.approx(float(p * (1 - p)), rel=1e-9)


def test_overlap_of_planted_masks():
    true = torch.zeros(6, 1, 4, 4)
    true[:5, :, :2] = 1.0  # 8 of 16 pixels; the last mask is empty
    logits = torch.full((6, 1, 4, 4), -1.0)
    logits[0, :, :2] = 1.0  # right
    logits[1, :, 2:] = 1.0  # disjoint
    logits[2, :, 1:3] = 1.0  # half of both
    logits[3, :, :1] = 1.0  # half of the true ones, and nothing else
    logits[4] = torch.nan  # predicts nothing
    decibels = mask_overlap(logits, true)
    assert decibels.dice.tolist() == [1.0, 0.0, 0.5, pytest.approx(2 / 3), 0.0, 1.0]
    assert decibels.accuracy.tolist() == [1.0, 0.0, 0.5, 0.75, 0.5, 1.0]
    assert mask_overlap(torch.full((1, 1, 2, 2), torch.inf), torch.ones(1, 1, 2, 2)).dice.tolist() == [0.0]
    with pytest.raises(ValueError, match="masks of"):
        mask_overlap(logits, true[:5])


def test_intervals_resample_images_not_pixels():
    wide, narrow = (over_images(rand(n), seed=0) for n in (20, 2000))
    for value, n in ((wide, 20), (narrow, 2000)):
        low, high = value.interval.low, value.interval.high
        assert low is not None and value.value is not None and high is not None
        assert value.n == n and low < value.value < high
        assert high - low == pytest.approx(2 * 1.96 / math.sqrt(12 * n), rel=0.25)
    assert over_images(rand(1), seed=0).interval.low is None


# -- U-Net -----------------------------------------------------------------------------------------------------------
def test_parameters_of_the_original_widths():
    with torch.device("meta"):
        model = unet((3, 256, 256), 1)
    assert sum(p.numel() for p in model.parameters()) == 31_031_745
    assert model(torch.empty(2, 3, 256, 256, device="meta")).shape == (2, 1, 256, 256)


def test_its_net_has_maps_and_a_head_of_one_by_one():
    net, params = build(UNET), initial(UNET, 0)
    x = rand(2, 3, 32, 48, dtype=torch.float32)
    assert (net.pixelwise, net.head_bias, net.feature_count, net.frozen) == (True, True, 2, {})
    features = net.features(params, x)
    assert features.shape == (2, 2, 32, 48)
    expected = torch.einsum("bdhw,cd->bchw", features, params["head.weight"][..., 0, 0]) + params["head.bias"]
    assert torch.allclose(net(params, x), expected, atol=1e-6)


def test_one_pixel_reaches_far_through_the_bottom_and_keeps_its_place_beside_it():
    spec = net_spec("unet", (1, 32, 32), 1, {"width": 4})
    net, params = build(spec), weights(spec, 0)
    x = rand(1, 1, 32, 32)
    touched = x.clone()
    touched[0, 0, 16, 16] += 1
    moved = (net(params, touched) - net(params, x)).abs()[0, 0]
    assert moved[0, 0] > 0
    cut = {n: torch.zeros_like(p) if n.startswith("features.up.3") else p for n, p in params.items()}
    beside = (net(cut, touched) - net(cut, x)).abs()[0, 0]
    assert beside[16, 16] > 0 and beside[:12].max() == 0  # four 3x3 convolutions reach 4 pixels


def test_vmap_over_clients_equals_a_loop_and_gradients_can_be_differentiated():
    net, params = build(UNET), weights(UNET, 0)
    x, y = rand(3, 2, *SHAPE), (rand(3, 2, 1, 32, 32, seed=1) > 0.5).double()

    def loss(params, x, y):
        return bce(net(params, x), y).mean()

    together = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    for i in range(3):
        alone = grad(loss)(params, x[i], y[i])
        assert all(torch.allclose(together[n][i], alone[n], atol=1e-12) for n in params)

    def size(x):
        return torch.stack([g.square().sum() for g in grad(loss)(params, x, y[0]).values()]).sum()

    step = 1e-7 * torch.randn(x[0].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    numeric = float(size(x[0] + step) - size(x[0] - step)) / 2
    assert float((grad(size)(x[0]) * step).sum()) == pytest.approx(numeric, rel=1e-3)


def test_a_head_on_maps_must_be_one_by_one(monkeypatch):
    def wide(shape, classes):
        return Classifier(torch.nn.Identity(), torch.nn.Conv2d(3, classes, 3, padding=1))

    for module in ("ppbench.nets.net", "ppbench.base.fence"):
        monkeypatch.setattr(f"{module}.load_plugin", lambda group, name: wide)
    with pytest.raises(UsageError, match="must be 1x1"):
        build(net_spec("wide", (3, 4, 4), 1))


def test_defenses_that_scale_channels_and_attacks_on_labels_have_no_use_for_it():
    with pytest.raises(UsageError):
        channels_of(UNET)
    plan = Plan(UNET, 2, loss="bce")
    for attack in (LabelRecovery(), AnalyticInversion(), NearestReconstruction()):
        assert not attack.suits(plan), attack.name
    assert LossThreshold().suits(plan)


# -- data sets -------------------------------------------------------------------------------------------------------
def test_shapes_are_a_function_of_the_seed(shapes):
    again, other = open_dataset("shapes", seed=0), open_dataset("shapes", seed=1)
    assert shapes.sha256() == again.sha256() != other.sha256()
    assert (len(shapes.train), len(shapes.test), shapes.shape, shapes.classes) == (192, 48, SHAPE, 1)
    assert (shapes.task, shapes.train.x.dtype, shapes.train.y.shape) == ("segmentation", torch.uint8, (192, 1, 32, 32))
    shares = torch.cat([shapes.train.y, shapes.test.y]).mean((1, 2, 3))
    assert shares.min() > 0.01 and shares.max() < 0.6
    with pytest.raises(UsageError, match="takes no argument"):
        open_dataset("shapes:100", seed=0)


def test_objects_of_shapes_stand_out_but_not_by_one_threshold(shapes):
    x, inside = shapes.train.x.float().mean(1, keepdim=True) / 255, shapes.train.y == 1
    off = (x - 0.5).abs()
    assert off[inside].mean() > 3 * off[~inside].mean()
    best = max(float(((x > cut) == inside).float().mean()) for cut in torch.linspace(0, 1, 21).tolist())
    assert best < 0.93  # objects are darker or brighter


def test_masks_are_stratified_by_their_share_and_copied(shapes):
    strata = shapes.train.strata
    shares = shapes.train.y.mean((1, 2, 3))
    assert strata.dtype == torch.int64 and strata.unique().tolist() == [1, 2, 3, 4, 5]
    assert all(shares[strata == k].max() <= shares[strata == k + 1].min() for k in range(1, 5))
    empty = torch.cat([torch.zeros(3, 1, 4, 4), torch.ones(2, 1, 4, 4)])
    assert mask_strata(empty).bincount().tolist() == [3, 0, 0, 0, 0, 2]
    assert mask_strata(empty[:3]).tolist() == [0, 0, 0]
    taken = shapes.train.take(torch.arange(5))
    assert taken.y.shape == (5, 1, 32, 32) and torch.equal(taken.y, shapes.train.y[:5])
    assert taken.y.untyped_storage().data_ptr() != shapes.train.y.untyped_storage().data_ptr()
    shards = partition("iid", strata, 4, 0)
    counts = torch.stack([strata[shard].bincount(minlength=6) for shard in shards])
    assert int((counts.max(0).values - counts.min(0).values).max()) <= 1


def scans(folder: Path, count: int = 10, size: int = 16) -> Path:
    """Write grey images with masks: image i is i everywhere, and 200 where its mask is 255."""
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for i in range(count):
        mask = np.zeros((size, size), dtype=np.uint8)
        mask[: i + 1] = 255
        Image.fromarray(np.where(mask > 0, np.uint8(200), np.uint8(i))).save(folder / "images" / f"{i}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
    return folder


def test_folders_of_images_and_masks(tmp_path):
    folder = scans(tmp_path / "lgg")
    ones = np.zeros((16, 16, 3), dtype=np.uint8)
    ones[:3] = 1
    Image.fromarray(ones).save(folder / "masks" / "2.bmp")  # another suffix, RGB, ones instead of 255
    (folder / "masks" / "2.png").unlink()
    data = open_dataset(f"segmentation:{folder}", seed=0)
    assert (data.name, data.task, data.shape) == ("segmentation:lgg", "segmentation", (1, 16, 16))
    assert (len(data.train), len(data.test)) == (8, 2)
    for split in (data.train, data.test):
        assert torch.equal(split.x == 200, split.y == 1)
    rows = torch.cat([data.train.y, data.test.y])[:, 0, :, 0].sum(1)
    assert sorted(rows.tolist()) == list(range(1, 11))
    assert data.sha256() == open_dataset(f"segmentation:{folder}", seed=0).sha256()


def test_bad_folders_are_refused(tmp_path, refused):
    refused(f"segmentation:{tmp_path}", "There is no folder", "images")
    name = f"segmentation:{(folder := scans(tmp_path / 'a'))}"
    Image.fromarray(np.full((16, 16), 7, dtype=np.uint8)).save(folder / "images" / "extra.png")
    refused(name, "masks has no file for 'extra'")
    Image.fromarray(np.zeros((16, 17), dtype=np.uint8)).save(folder / "masks" / "extra.png")
    refused(name, "must be grey and 16x16 pixels")
    Image.fromarray((np.arange(256) % 3).astype(np.uint8).reshape(16, 16)).save(folder / "masks" / "extra.png")
    refused(name, "has 3 values; it must be black but for one")
    Image.fromarray(np.zeros((16, 16), dtype=np.uint8)).save(folder / "masks" / "extra.bmp")
    refused(name, "keep one file for each name")
    refused(f"segmentation:{scans(tmp_path / 'b', count=1)}", "too few to hold some out")
    refused(f"segmentation:{scans(tmp_path / 'c', count=0)}", "has no image")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda y: y * 0.5, "has label 0.5; masks must be 0 or 1"),
        (lambda y: y * torch.nan, "masks must be 0 or 1"),
        (lambda y: y[:, 0], "masks of the images"),
        (lambda y: y[..., :16], "masks of the images"),
        (lambda y: y.double(), "masks of the images"),
    ],
)
def test_bad_masks_are_refused(shapes, change, words):
    split = shapes.train
    with pytest.raises(UsageError, match=words):
        replace(shapes, train=Split(split.x, change(split.y), 1))  # type: ignore[operator]
    with pytest.raises(UsageError, match="a segmentation must have 1"):
        replace(shapes, classes=2)


@pytest.mark.parametrize(
    ("dataset", "model", "loss", "words"),
    [
        ("shapes", "unet", "cross_entropy", "has masks as targets; use --loss bce, not 'cross_entropy'"),
        ("shapes", "unet", "squared", "use --loss bce"),
        ("shapes", "mlp", "bce", "model 'mlp' gives one answer an image; use 'unet'"),
        ("digits", "dlnet", "bce", "has classes as targets; use --loss cross_entropy or squared, not 'bce'"),
    ],
)
def test_loss_and_network_must_fit_the_targets(dataset, model, loss, words):
    data = open_dataset(dataset, seed=0)
    plan = Plan(net_spec(model, data.shape, data.classes), 2, loss=loss)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=words):
        check_fit(data, plan)


def test_a_network_of_masks_is_refused_where_images_have_classes(shapes):
    y = torch.arange(192) % 2
    data = Dataset("two", Split(shapes.train.x, y, 2), Split(shapes.test.x, y[:48], 2), 2, SHAPE, (0.0, 1.0))
    with pytest.raises(UsageError, match="model 'unet' gives masks; use another"):
        check_fit(data, Plan(net_spec("unet", SHAPE, 2, {"width": 2}), 2))


# -- a federation ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def learned(tmp_path_factory, shapes):
    """A task, and what undefended training makes of it: objects that are all brighter than what is around them.

    Of dark and bright ones training learns one kind first and the other sooner or later, as rounding has it.
    """
    folder = tmp_path_factory.mktemp("bright")
    bright = (2 * (shapes.train.x[:120].float() - 127.5).abs()).permute(0, 2, 3, 1).byte()
    for kind, images in (("images", bright), ("masks", (255 * shapes.train.y[:120, 0]).byte())):
        (folder / kind).mkdir()
        for i, image in enumerate(images.numpy()):
            Image.fromarray(image).save(folder / kind / f"{i}.png")
    config = configure(
        defense="none", dataset=f"segmentation:{folder}", model="unet", model_options={"width": 4}, loss="bce",
        clients=2, batch_size=4, schedule="parallel", seed=1, attacks=("label_recovery",),
    )  # fmt: skip
    experiment = resolve(config.model_copy(update={"rounds": 6, "lr": 5e-3}))
    utility = train(experiment, experiment.points[-1], tmp_path_factory.mktemp("cache"))[1].utility
    assert experiment.facts[1].loss == "bce"
    return experiment.task, utility


def blind(task: Task) -> tuple[float, float]:
    """Return the best dice and accuracy of one mask for all images: where more than a share of training masks lie."""
    share = torch.cat([shard.y for shard in task.shards.values()]).mean(0, keepdim=True)
    decibels = [mask_overlap((share - t).expand_as(task.test.y), task.test.y) for t in torch.linspace(-0.05, 0.95, 21)]
    return max(float(f.dice.mean()) for f in decibels), max(float(f.accuracy.mean()) for f in decibels)


def test_it_learns_masks_and_says_how_well(learned):
    """Better than who does not look at the image; over ten seeds dice .62 to .99, a blind mask's .46 to .53."""
    task, last = learned
    assert last.dice is not None and last.accuracy is not None
    dice, accuracy = blind(task)
    assert last.dice > dice + 0.05 and dice > 0.4 and last.accuracy > accuracy + 0.04
    ones = float(task.test.y.mean())
    assert last.chance == pytest.approx(max(ones, 1 - ones)) and last.accuracy > last.chance
    for value, low, high in ((last.dice, last.dice_low, last.dice_high), (last.accuracy, last.low, last.high)):
        assert low is not None and high is not None and 0 <= low < value < high <= 1
    assert (last.n, last.mse, len(last.curve)) == (24, None, 6)
    assert last.curve[-1][1] == pytest.approx(last.accuracy)
    assert last.reason is not None and "share of pixels" in last.reason


def test_victims_and_candidates_carry_masks(learned):
    task = learned[0]
    victims = choose_victims(task.shards, "server/1", 2, 4, Seeds(0))
    truth = victims.truth(victims.units[0])
    assert truth.x.shape == (2, *SHAPE) and truth.y.shape == (2, 1, 32, 32)
    candidates = choose_candidates(task.shards, task.test, 20, Seeds(0))
    assert candidates.labels.shape == (40, 1, 32, 32)


def test_membership_by_loss_finds_planted_members(learned):
    plan = learned[0].plan
    masks = (rand(8, 1, 32, 32) > 0.5).double()
    sure = torch.where(torch.arange(8)[:, None, None, None] < 4, 3.0, 0.3)
    scores = LossThreshold().scores(plan, (2 * masks - 1) * sure, masks)
    assert scores.shape == (8,) and scores[:4].min() > scores[4:].max()
