"""Generators: their architecture, training, files, cache, and whether they saw the clients' images."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from observations import seeded
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ppbench.attacks.reconstruction import generator as store
from ppbench.attacks.reconstruction import gifd as training
from ppbench.attacks.reconstruction.generator import (
    Decoder,
    Generator,
    architecture,
    check_apart,
    count_overlap,
    fingerprints,
    initial_weights,
    read_generator,
    write_generator,
)
from ppbench.attacks.reconstruction.gifd import Training, trained_generator
from ppbench.base.errors import UsageError
from ppbench.task.user_data import open_dataset

SHORT = Training(steps=10)


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return open_dataset("digits", seed=0).train.x[:240].clone()


@pytest.fixture(scope="module")
def made(digits: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    return trained_generator(digits[:200], (0.0, 1.0), SHORT, folder=tmp_path_factory.mktemp("generators"))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((1, 8, 8), [(32,), (32, 4, 4), (1, 8, 8)]),
        ((1, 28, 28), [(128,), (64, 7, 7), (32, 14, 14), (1, 28, 28)]),
        ((3, 32, 32), [(128,), (128, 4, 4), (64, 8, 8), (32, 16, 16), (3, 32, 32)]),
        ((3, 30, 19), [(128,), (64, 8, 5), (32, 16, 10), (3, 30, 19)]),
        ((3, 64, 64), [(128,), (128, 4, 4), (128, 8, 8), (64, 16, 16), (32, 32, 32), (3, 64, 64)]),
    ],
)
def test_blocks_follow_the_shape_of_the_images(shape, sizes):
    plan = architecture(shape)
    assert [plan.size(k) for k in range(plan.blocks + 1)] == sizes
    decoder = Decoder(plan, initial_weights(plan, seeded(0)), -1.0, 3.0)
    h = torch.randn(2, *sizes[0], generator=seeded(1))
    whole = decoder.decode(h)
    for k in range(plan.blocks):
        assert torch.equal(decoder.decode(h, k), whole)
        h = decoder.block(k, h)
        assert h.shape == (2, *sizes[k + 1])
    assert torch.equal(h, whole)
    assert float(h.min()) >= -1 and float(h.max()) <= 3 and float(h.std()) > 0.1


@pytest.mark.parametrize("shape", [(10,), (1, 7, 32), (3, 3)])
def test_inputs_that_are_no_images_are_refused(shape):
    with pytest.raises(UsageError, match="8x8 pixels or more"):
        architecture(shape)


def test_the_same_images_and_training_give_the_same_file_whatever_was_drawn_before(digits, made, tmp_path):
    torch.manual_seed(5)
    torch.randn(3)
    before = torch.get_rng_state()
    again = trained_generator(digits[:200], (0.0, 1.0), SHORT, folder=tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), before)
    other = trained_generator(digits[:200], (0.0, 1.0), replace(SHORT, seed=1), folder=tmp_path / "other")
    write_generator(made, tmp_path / "first.safetensors")
    (second,) = (tmp_path / "again").glob("*.safetensors")
    assert second.read_bytes() == (tmp_path / "first.safetensors").read_bytes()
    assert not torch.equal(other.decoder.params["block0.weight"], again.decoder.params["block0.weight"])


def test_training_raises_the_ceiling_and_says_what_it_was_trained_on(digits, tmp_path):
    """Scale of codes: latents of covariance about 1, maps of mean square 1, so that one learning rate fits."""
    short = trained_generator(digits, (0.0, 1.0), Training(steps=4), folder=tmp_path)
    longer = trained_generator(digits, (0.0, 1.0), Training(steps=100), folder=tmp_path)
    assert longer.about.ceiling > short.about.ceiling + 1
    assert longer.about.ceiling_latent > longer.about.ceiling
    assert (longer.about.images, longer.about.held_out) == (216, 24)
    h = torch.randn(500, 32, generator=seeded(0))
    size = float(longer.decoder.block(0, h).square().mean().sqrt())
    assert 0.6 < size < 1.7


def test_a_second_call_reads_the_file(digits, tmp_path, monkeypatch):
    first = trained_generator(digits, (0.0, 1.0), Training(steps=2), folder=tmp_path)

    def never(*_: object) -> Generator:
        raise AssertionError("trained again")

    monkeypatch.setattr(training, "fresh", never)
    second = trained_generator(digits, (0.0, 1.0), Training(steps=2), folder=tmp_path)
    assert all(torch.equal(second.decoder.params[n], v) for n, v in first.decoder.params.items())
    assert second.about == first.about
    for changed in ({"images": digits[1:]}, {"training": Training(steps=3)}, {"data_range": (0.0, 2.0)}):
        options = {"images": digits, "data_range": (0.0, 1.0), "training": Training(steps=2), **changed}
        with pytest.raises(AssertionError, match="trained again"):
            trained_generator(**options, folder=tmp_path)


def test_of_two_that_need_the_same_generator_one_trains_and_the_other_waits(made, tmp_path):
    calls: list[int] = []

    def slow() -> Generator:
        calls.append(1)
        time.sleep(0.2)
        return made

    results: list[Generator] = []
    path = tmp_path / "deep" / "g.safetensors"
    threads = [threading.Thread(target=lambda: results.append(store.cached(path, slow))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(calls), len(results)) == (1, 3)


def test_a_cached_file_that_is_damaged_is_trained_again_with_a_warning(made, tmp_path):
    path = tmp_path / "g.safetensors"
    write_generator(made, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.warns(UserWarning, match=r"g\.safetensors is damaged.*It is trained again"):
        store.cached(path, lambda: made)
    assert path.read_bytes() == whole


def test_training_that_fails_leaves_nothing_behind(tmp_path):
    def fails() -> Generator:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.cached(tmp_path / "g.safetensors", fails)
    assert not list(tmp_path.glob("*.safetensors*"))


Tensors, Entries = dict[str, Tensor], dict
DAMAGE: dict[str, tuple[Callable[[Tensors, Entries], object], str]] = {
    "missing": (lambda t, about: t.pop("block1.bias"), "'block1.bias' is missing"),
    "unknown": (lambda t, about: t.update(other=torch.zeros(2)), "'other' is unknown"),
    "shape": (lambda t, about: t.update({"block1.weight": torch.zeros(3, 3)}), r"'block1.weight' is .* \(3, 3\)"),
    "dtype": (lambda t, about: t.update({"block1.bias": t["block1.bias"].double()}), "'block1.bias' is torch.float64"),
    "nan": (lambda t, about: t["block0.bias"].fill_(torch.nan), "'block0.bias' holds .* not finite"),
    "prints": (lambda t, about: t.update(fingerprints=t["fingerprints"].flip(0)), "'fingerprints' must be ascending"),
    "entry": (lambda t, about: about.update(author="me"), "at author"),
    "range": (lambda t, about: about.update(data_range=[1.0, 0.0]), "at data_range .*must rise"),
    "format": (lambda t, about: about.update(format="ppbench.generator/9"), "at format .*generator/1"),
    "widths": (lambda t, about: about["plan"].update(widths=[0]), r"at plan\.widths"),
    "bare": (lambda t, about: None, "is no generator"),
    "json": (lambda t, about: None, "unknown metadata"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_does_not_fit_is_refused_with_its_name_and_what_is_wrong(made, tmp_path, kind):
    path, (damage, says) = tmp_path / "mine.safetensors", DAMAGE[kind]
    write_generator(made, path)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["ppbench.generator"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    damage(tensors, about)
    meta = {} if kind == "bare" else {"ppbench.generator": "{" if kind == "json" else json.dumps(about)}
    save_file({n: v.contiguous() for n, v in tensors.items()}, path, meta)
    with pytest.raises(UsageError, match=rf"mine\.safetensors .*{says}"):
        read_generator(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 64, None])
def test_a_file_of_another_kind_or_none_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"generator file .*x\.safetensors"):
        read_generator(path)


def test_a_larger_decoder_of_the_family_comes_from_a_file(made, tmp_path):
    plan = replace(made.decoder.plan, latent=7, widths=(24,))
    decoder = Decoder(plan, initial_weights(plan, seeded(0)))
    write_generator(Generator(decoder, replace(made.about, plan=plan), made.prints), tmp_path / "big.safetensors")
    back = read_generator(tmp_path / "big.safetensors").decoder
    z = torch.ones(1, 7)
    assert back.params.keys() == decoder.params.keys()
    assert all(torch.equal(back.params[name], decoder.params[name]) for name in decoder.params)
    # Where a tensor lies in memory decides on how some processors add it up, and on its last bit.
    torch.testing.assert_close(back.decode(z), decoder.decode(z), rtol=1e-5, atol=1e-6)


def test_images_are_known_by_their_contents(digits, made):
    kept = {int(p) for p in fingerprints(digits[:200])} - {int(p) for p in made.prints}
    assert len(kept) == 20  # the tenth that measured the ceiling was not trained on
    assert count_overlap(made, digits[200:]) == 0
    assert count_overlap(made, digits[:200]) == 180
    shuffled = digits[:200][torch.randperm(200, generator=seeded(0))]
    assert count_overlap(made, shuffled + 1e-4) == 180  # less than a step of 8 bits
    assert count_overlap(made, 1 - digits[:200]) == 0
    assert count_overlap(made, digits[:0]) == 0


def test_shape_and_copies_count_in_fingerprints(made):
    x = torch.rand(3, 1, 8, 8, generator=seeded(0))
    twice = torch.cat([x, x])
    assert torch.equal(fingerprints(twice), fingerprints(x))
    known = replace(made, prints=fingerprints(x))
    assert count_overlap(known, twice) == 6
    assert count_overlap(known, x.view(3, 1, 4, 16)) == 0
    assert len(fingerprints(torch.full((2, 1, 8, 8), torch.nan))) == 1


def test_a_generator_of_a_clients_images_is_refused_with_the_client_and_the_count(digits, made):
    check_apart(made, {0: digits[200:220], 1: digits[220:]})
    known = [i for i in range(200) if count_overlap(made, digits[i : i + 1])]
    shards = {0: digits[200:], 4: torch.cat([digits[known[:3]], digits[200:205]])}
    with pytest.raises(UsageError, match=r"trained on 3 of the 8 images of client 4.*no client holds"):
        check_apart(made, shards)
