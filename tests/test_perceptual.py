"""LPIPS and feature errors: where weights come from, what is refused, and figures on real images."""

import hashlib
import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from observations import seeded
from PIL import Image
from safetensors.torch import save_file

import ppbench
from ppbench.base.errors import UsageError
from ppbench.metrics import perceptual
from ppbench.metrics.perceptual import (
    ALEXNET_SHAPES,
    Network,
    feature_network,
    measurable,
    weights_file,
    weights_identity,
)
from ppbench.verification import verify

DATA = os.environ.get("PPBENCH_TEST_DATA")


def made(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return convolutions of AlexNet's shapes with random weights of He's size."""
    generator = seeded(seed)
    state = {}
    for layer, shape in ALEXNET_SHAPES.items():
        scale = (2 / np.prod(shape[1:])) ** 0.5
        state[f"{layer}.weight"] = scale * torch.randn(shape, generator=generator)
        state[f"{layer}.bias"] = torch.zeros(shape[0])
    return state


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "alexnet.safetensors"
    save_file(made(), path)
    return path


@pytest.fixture(scope="module")
def alexnet(weights: Path) -> Network | None:
    return feature_network(str(weights))


@pytest.fixture(autouse=True)
def nothing_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(perceptual.WEIGHTS_VARIABLE, raising=False)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))


def image(seed: int = 0, shape: tuple[int, ...] = (2, 3, 32, 32)) -> torch.Tensor:
    return torch.rand(shape, generator=seeded(seed))


def test_without_a_file_there_is_no_network_and_a_named_one_must_be_there(weights, tmp_path, monkeypatch):
    assert weights_identity(None) == "" and feature_network(None) is None and weights_file(None) is None
    assert weights_identity(str(weights)) == f"alexnet sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"
    with pytest.raises(UsageError, match=r"no file .*absent.*option weights"):
        weights_identity(str(tmp_path / "absent"))
    monkeypatch.setenv(perceptual.WEIGHTS_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"no file .*gone.*PPBENCH_WEIGHTS"):
        weights_identity(None)


REFUSED = {
    "less": ({n: v for n, v in made().items() if n != "features.8.bias"}, r"no tensor 'features\.8\.bias'"),
    "other": (
        {**made(), "features.3.weight": torch.zeros(192, 64, 3, 3)},
        r"'features\.3\.weight' has shape \(192, 64, 3, 3\).*\(192, 64, 5, 5\)",
    ),
    "nan": (
        {**made(), "features.0.bias": torch.full((64,), torch.nan)},
        r"'features\.0\.bias' holds values that are no finite",
    ),
    "code": ({"features.0.weight": Path("x")}, "is no file of weights"),
    "list": ([1, 2], "holds no tensors by name"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_not_alexnets_is_refused_with_file_and_tensor(tmp_path, kind):
    """Also a checkpoint that would run code."""
    content, says = REFUSED[kind]
    torch.save(content, tmp_path / f"{kind}.pth")
    with pytest.raises(UsageError, match=rf"{kind}\.pth.*{says}"):
        weights_identity(str(tmp_path / f"{kind}.pth"))


@pytest.mark.parametrize("name", ["bad.safetensors", "bad.pth"])
def test_a_damaged_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x02no weights here")
    with pytest.raises(UsageError, match=r"bad\..* is no file of weights that can be read"):
        weights_identity(str(tmp_path / name))


def test_an_option_goes_before_the_environment_and_that_before_torchvisions_cache(weights, tmp_path, monkeypatch):
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    checkpoint = cache / "alexnet-owt-0.pth"
    torch.save({**made(1), "classifier.1.weight": torch.zeros(2)}, checkpoint)
    assert weights_file(None) == checkpoint and weights_identity(None).endswith(
        hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    )
    monkeypatch.setenv(perceptual.WEIGHTS_VARIABLE, str(weights))
    assert weights_file(None) == weights
    assert weights_file(str(checkpoint)) == checkpoint


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "w.pth"
    torch.save(made(), path)
    first = weights_identity(str(path))
    torch.save(made(2), path)
    os.utime(path, ns=(1, 1))
    assert weights_identity(str(path)) != first


def test_making_the_network_moves_nobodys_draws(weights):
    perceptual._network.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    made_again = feature_network(str(weights))
    assert made_again is not None and torch.equal(before, torch.get_rng_state())
    assert not any(p.requires_grad for p in made_again.model.parameters())


def test_equal_images_are_at_distance_0_and_unlike_ones_are_not(alexnet):
    x = image()
    for figures in alexnet.compare(x, x):
        assert (figures.lpips, figures.feat_mse) == (0, 0)
    near, far = alexnet.compare(x + 0.02 * image(1), x)[0], alexnet.compare(image(2), x)[0]
    assert 0 < near.lpips < far.lpips and 0 < near.feat_mse < far.feat_mse


def test_figures_do_not_depend_on_the_range_nor_on_who_else_is_compared(alexnet):
    x, guess = image(0, (5, 3, 32, 32)), image(1, (5, 3, 32, 32))
    plain = alexnet.compare(guess, x)
    wide = alexnet.compare(4 * guess - 2, 4 * x - 2, (-2.0, 2.0))
    alone = alexnet.compare(guess[3:4], x[3:4])
    for one, two in ((plain[3], wide[3]), (plain[3], alone[0])):
        assert one.lpips == pytest.approx(two.lpips, rel=1e-4) and one.feat_mse == pytest.approx(two.feat_mse, rel=1e-4)


def test_a_failed_reconstruction_is_measured_as_grey_and_a_wild_one_clipped(alexnet):
    x = image()
    failed = x.clone()
    failed[0, 0, 0, 0] = torch.nan
    figures = alexnet.compare(failed, x)
    assert figures[0] == alexnet.compare(torch.full_like(x, 0.5), x)[0] and figures[1].lpips == 0
    assert alexnet.compare(x.round() * 1e6 - 10, x)[0] == alexnet.compare(x.round(), x)[0]


def test_grey_images_of_28_pixels_are_framed_and_repeated(alexnet):
    x, guess = image(0, (1, 1, 28, 28)), image(1, (1, 1, 28, 28))
    frame = torch.nn.functional.pad
    by_hand = [frame(t, (2, 2, 2, 2)).repeat(1, 3, 1, 1) for t in (guess, x)]
    assert alexnet.compare(guess, x) == alexnet.compare(*by_hand)


@pytest.mark.parametrize(
    ("shape", "known"),
    [((3, 32, 32), True), ((1, 28, 28), True), ((1, 27, 32), False), ((2, 32, 32), False), ((64,), False)],
)
def test_small_images_and_rows_are_not_measured(alexnet, shape, known):
    assert measurable(shape) is known
    if not known:
        with pytest.raises(ValueError, match="no perceptual figures"):
            alexnet.compare(torch.zeros(1, *shape), torch.zeros(1, *shape))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 32 pictures of 32 pixels in two classes."""
    root, rng = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 4)):
        for kind in ("dark", "light"):
            folder = root / part / kind
            folder.mkdir(parents=True)
            for i in range(count):
                level = rng.integers(0, 100, (32, 32, 3)) + (120 if kind == "light" else 0)
                Image.fromarray(level.astype(np.uint8)).save(folder / f"{i}.png")
    return f"imagefolder:{root}"


def small(pictures: str, out: Path, **more: object):
    options = dict(defense="ppdl", dataset=pictures, model="mlp", attacks=("analytic",), grid=(0.5,), stages=("init",))
    sizes = dict(victims=2, clients=2, rounds=1, attack_batch=(1,), settings={"analytic.budget": 50}, workers=1)
    return ppbench.evaluate(**options, **sizes, out=out, **more)


def test_an_evaluation_measures_images_and_names_the_network_not_the_file(pictures, weights, tmp_path):
    result = small(pictures, tmp_path / "out", weights=str(weights))
    for record in result.records:
        assert record.config.perceptual == weights_identity(str(weights)), record.reason
        exact = record.config.defense.id == "none"
        assert (record.metric("psnr_median").value > 60) is exact
        assert (record.metric("lpips_mean").value < 1e-3) is exact
        assert (record.metric("feat_mse_mean").value < 1e-4) is exact
        assert 5 < record.metric("blind_median").value < 20
    assert str(weights) not in "".join(path.read_text() for path in (tmp_path / "out" / "records").glob("*.json"))
    assert verify(tmp_path / "out") == []
    again = small(pictures, tmp_path / "out", weights=str(weights))
    assert again.computed == 0
    without = small(pictures, tmp_path / "out")
    assert without.computed == len(result.records), "measured otherwise, these are other cells"
    for record in without.records:
        assert record.config.perceptual == "" and "AlexNet" in record.metric("lpips_mean").reason


@pytest.mark.parametrize("dataset", ["pictures", "digits"])
def test_a_bad_file_is_refused_before_anything_runs(pictures, tmp_path, dataset):
    (tmp_path / "bad.pth").write_bytes(b"no weights")
    with pytest.raises(UsageError, match=r"bad\.pth is no file of weights"):
        small(pictures if dataset == "pictures" else dataset, tmp_path / "out", weights=str(tmp_path / "bad.pth"))
    assert not (tmp_path / "out" / "records").exists() and not (tmp_path / "out" / "cache").exists()


@pytest.mark.skipif(DATA is None, reason="PPBENCH_TEST_DATA is not set")
def test_real_weights_on_real_images_give_the_published_check():
    """Four CIFAR-10 cats: noise of .1 (range [-1, 1]) .003 to .015 over ten seeds, different cats .11 to .16."""
    import pyarrow.parquet as pq

    root = Path(DATA or "")
    table = pq.read_table(root / "cifar10" / "test.parquet").slice(0, 100).to_pylist()
    cats = [np.array(Image.open(io.BytesIO(row["img"]["bytes"]))) for row in table if row["label"] == 3][:4]
    x = torch.tensor(np.stack(cats)).permute(0, 3, 1, 2).float() / 255
    real = feature_network(str(root / "weights" / "alexnet_features.safetensors"))
    noise = 0.05 * torch.randn(x.shape, generator=seeded(0))
    near = [result.lpips for result in real.compare(x + noise, x)]
    assert all(0.002 < value < 0.025 for value in near) and 0.004 < np.mean(near) < 0.01
    pairs = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    apart = [real.compare(x[i : i + 1], x[j : j + 1])[0].lpips for i, j in pairs]
    assert all(0.105 < value < 0.165 for value in apart)
