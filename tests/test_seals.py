"""Caches carry digests: what is damaged costs time and a warning, and never becomes another record."""

import json
import shutil
import warnings

import pytest
import safetensors.torch
import torch
from daily import every_third

import ppbench
from ppbench.base.errors import UsageError
from ppbench.base.tensor_files import DIGEST_ENTRY, packed_with_digest, seal, unpacked_with_digest, unsealed
from ppbench.base.tree import load_tree, save_tree

ASKED = dict(
    defense="dp", grid=(0.1,), rounds=1, clients=2, train=60, victims=2, attack_batch=(1,), attacks=("label_recovery",),
    stages=("final",), candidates=4, workers=1,
)  # fmt: skip


def flipped(path, where=-3):
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def reshaped(path):
    """Write a state of another shape, well-formed, with a digest to it: who can write a cache can do that."""
    counters, server, clients = load_tree(path)
    params = {n: torch.zeros(*p.shape, 2) if n == "head.bias" else p for n, p in server.params.items()}
    save_tree((counters, type(server)(params, server.opt, server.counts, server.own), clients), path)
    seal(path.parent, "trained.json", json.loads((path.parent / "trained.json").read_text())["about"])


def changed(path):
    text = path.read_text()
    accuracy = json.loads(text)["about"]["utility"]["accuracy"]
    path.write_text(text.replace(f'"accuracy": {accuracy}', '"accuracy": 0.5', 1))


def strange(path):
    """Put the state of another training there, which is whole."""
    others = (other.read_bytes() for other in sorted(path.parent.parent.glob(f"*/{path.name}")))
    path.write_bytes(next(data for data in others if data != path.read_bytes()))


def older(path):
    """Write what an older ppbench kept, without any digest: nothing vouches for it, and the same bits come again."""
    path.write_text(json.dumps(json.loads(path.read_text())["about"]))


DAMAGES = {
    "a flipped bit": ("server.safetensors", flipped, "digest differs"),
    "truncated clients": ("clients0.safetensors", cut, "digest differs"),
    "another shape": ("server.safetensors", reshaped, "no state of this federation"),
    "another accuracy": ("trained.json", changed, "digest differs"),
    "another training's": ("server.safetensors", strange, "digest differs"),
    "lost clients": ("clients0.safetensors", lambda path: path.unlink(), "cannot be read"),
    "of before": ("trained.json", older, "older than digests"),
    "no object": ("trained.json", lambda path: path.write_text("[" * 100_000), "damaged"),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    out = tmp_path_factory.mktemp("kept") / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ppbench.evaluate(out=out, **ASKED)
    return out


def records(out):
    return {path.name: path.read_bytes() for path in sorted((out / "records").glob("*[0-9a-f].json"))}


@pytest.mark.parametrize("damage", every_third(DAMAGES))
def test_a_damaged_training_is_done_again_and_gives_the_same_records(kept, tmp_path, damage):
    out = tmp_path / "out"
    shutil.copytree(kept, out)
    before, (name, spoil, words) = records(out), DAMAGES[damage]
    for home in (out / "cache").iterdir():
        spoil(home / name)
    for path in (out / "records").iterdir():
        path.unlink()
    with pytest.warns(UserWarning, match=f"cannot be used.*{words}.*done again"):
        ppbench.evaluate(out=out, **ASKED)
    assert records(out) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what was made again is whole
        for home in (out / "cache").iterdir():
            assert unsealed(home / "trained.json")["utility"]


def test_tensors_in_one_file_are_told_from_damaged_ones(tmp_path):
    path, tensors = tmp_path / "x.safetensors", {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([True])}
    path.write_bytes(packed_with_digest(tensors))
    assert all(torch.equal(tensors[name], value) for name, value in unpacked_with_digest(path).items())
    for spoil in (flipped, cut, lambda p: p.unlink()):
        path.write_bytes(packed_with_digest(tensors))
        spoil(path)
        with pytest.raises(UsageError, match=r"x\.safetensors"):
            unpacked_with_digest(path)
    assert packed_with_digest(tensors) == packed_with_digest(dict(reversed(tensors.items())))


def test_the_same_tensors_give_the_same_bytes_in_every_process():
    """The library writes metadata in an order that changes from process to process, and from call to call."""
    about = {f"ppbench.{name}": name for name in "abcdefgh"}
    tensors = {"w": torch.arange(6.0).reshape(2, 3), "é": torch.zeros(1)}
    first = packed_with_digest(tensors, about)
    assert all(packed_with_digest(tensors, about) == first for _ in range(5))
    header = first[8 : 8 + int.from_bytes(first[:8], "little")]
    assert list(json.loads(header)["__metadata__"]) == sorted([*about, DIGEST_ENTRY])
    assert len(header) % 8 == 0 and torch.equal(safetensors.torch.load(first)["w"], tensors["w"])
