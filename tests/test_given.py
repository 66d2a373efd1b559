"""Networks and data by address: what somebody has is taken as it is, or refused in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import somebodys
import torch
from PIL import Image
from torch import nn
from torch.func import grad, vmap

import ppbench
from ppbench.base.errors import PluginError, UsageError
from ppbench.nets.net import Classifier, Net, build, initial, net_spec, trainable
from ppbench.run.sweep import local_dataset
from ppbench.task.user_data import dataset_from, open_dataset

SHAPE = (1, 8, 8)


def net_of(name: str, **options: Any) -> Net:
    return build(net_spec(f"somebodys:{name}", SHAPE, 10, options))


def theirs(module: nn.Module, net: Net, params: dict[str, torch.Tensor]) -> nn.Module:
    """Return somebody's own module with the weights `params` of the network that was made of it."""
    head = net.module.head_name
    renamed = {n.replace("head.", f"{head}.", 1) if n.startswith("head.") else n[9:]: v for n, v in params.items()}
    missing, unexpected = module.load_state_dict(renamed, strict=False)
    assert not unexpected and all("running" in name or "tracked" in name for name in missing)
    return module


@pytest.mark.parametrize(
    ("name", "module", "options"),
    [
        ("Net", somebodys.Net(), {}),
        ("Net", somebodys.Net(norm="group"), {"norm": "group"}),
        ("Attention", somebodys.Attention(10, 0.0), {"dropout": "off"}),
        ("Narrow", somebodys.Narrow(10), {}),
    ],
)
def test_the_gradient_is_that_of_the_module_in_training(name: str, module: nn.Module, options: dict[str, Any]) -> None:
    """Loss and every gradient, as plain torch computes them of the module in train mode, log_softmax and all."""
    net = net_of(name, **options)
    params = initial(net.spec, 3)
    module = theirs(module, net, params).train()
    x, y = torch.rand(5, *SHAPE), torch.arange(5)
    loss = nn.functional.cross_entropy
    loss(module(x), y).backward()
    gradients = grad(lambda p: loss(net(p, x), y))(params)
    assert net.parameter_count == sum(p.numel() for p in module.parameters())
    for own, value in gradients.items():
        plain = own.replace("head.", f"{net.module.head_name}.", 1) if own.startswith("head.") else own[9:]
        torch.testing.assert_close(value, module.get_parameter(plain).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), [("Net", {}), ("Attention", {"dropout": "off"})])
def test_it_can_be_attacked(name: str, options: dict[str, Any]) -> None:
    """Differentiated twice, for many victims at once, as one by one: fused attention and ReLU in place could not."""
    net = net_of(name, **options)
    params, x, y = initial(net.spec, 0), torch.rand(3, 2, *SHAPE), torch.tensor([1, 2])

    def gradient(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return grad(lambda p: nn.functional.cross_entropy(net(p, x), y))(params)

    seen = gradient(x[0])

    def mismatch(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(v - seen[n]).square().sum() for n, v in gradient(x).items()]).sum()

    many = vmap(grad(mismatch))(x)
    assert many[0].abs().max() < 1e-6 < many[1].abs().max()
    torch.testing.assert_close(many[2], grad(mismatch)(x[2]), rtol=1e-3, atol=1e-6)


def test_a_constant_may_have_two_names() -> None:
    """A buffer that two layers hold is theirs when the network is made of its parameters too."""

    class Shift(nn.Module):
        def __init__(self, by: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("by", by)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.by

    by = torch.arange(64.0)
    module = Classifier(nn.Sequential(nn.Flatten(), Shift(by), nn.Tanh(), Shift(by)), nn.Linear(64, 10))
    x = torch.rand(3, *SHAPE)
    expected, params = module(x).detach(), trainable(module)
    torch.testing.assert_close(Net(net_spec("held", SHAPE, 10), module)(params, x), expected)


def test_a_network_may_view_color_images() -> None:
    """The engine lays them channels-last, which convolutions keep, and which no `view` across channels takes."""
    net = build(net_spec("somebodys:Views", (3, 8, 8), 10))
    x, params = torch.rand(2, 3, 8, 8), initial(net.spec, 0)
    assert torch.equal(net(params, x.contiguous(memory_format=torch.channels_last)), net(params, x))


def test_batch_norm_is_of_the_batch_or_as_it_came() -> None:
    """With statistics of the batch an example's logits hang on the others; with the module's own they do not."""
    x = torch.rand(4, *SHAPE)
    for options, mixes in (({}, True), ({"norms": "running"}, False)):
        net = net_of("Net", **options)
        params = initial(net.spec, 0)
        assert net.mixes is mixes
        assert torch.allclose(net(params, x)[:1], net(params, x[:1]), atol=1e-6) is not mixes
    torch.manual_seed(0)
    module = theirs(somebodys.Net(), net, params).eval()
    torch.testing.assert_close(net(params, x).log_softmax(1), module(x))


@pytest.mark.nightly
def test_torchvision_networks_by_their_address() -> None:
    net = build(net_spec("somebodys:resnet18", (3, 32, 32), 10))
    assert (net.parameter_count, net.feature_count, net.fewest, net.module.head_name) == (11_181_642, 512, 2, "fc")
    assert build(net_spec("torchvision.models:resnet18", (3, 64, 64), 7)).fewest == 1
    frozen = build(net_spec("torchvision.models:resnet18", (3, 32, 32), 10, {"norms": "running"}))
    assert frozen.fewest == 1 and len(frozen.frozen) == 60


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "Attention",
            {},
            "(MultiheadAttention) draws at random in each pass in training mode; take the option dropout=off",
        ),
        (
            "Draws",
            {},
            "the network itself (Draws) draws at random in each pass, in eval mode too; let it do so in training mode",
        ),
        ("Tied", {}, "its last linear layer, square, is used elsewhere too"),
        ("ends_in_softmax", {}, "its logits are not the output of an nn.Linear"),
        ("wide", {}, "it answers two inputs by (2, 11); it must answer by logits [2, 10]"),
        ("not_a_module", {}, "it gave str; it must give an nn.Module"),
        ("Net", {"norms": "frozen"}, "norms must be batch or running or tracked, not 'frozen'"),
        ("Net", {"depth": 3}, "unexpected keyword argument 'depth'"),
        ("breaks", {}, "raised KeyError: 'no weights here' (somebodys.py, line"),
        ("absent", {}, "module 'somebodys' has no attribute 'absent'; name what can be imported from here"),
        ("torch", {}, "is <module 'torch'"),
    ],
)
def test_what_is_no_network_is_refused_by_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as error:
        net_of(name, **options)
    assert words in str(error.value) and f"somebodys:{name}" in str(error.value) and "\n" not in str(error.value)


def test_data_sets_of_a_function() -> None:
    pictures = open_dataset("somebodys:arrays", seed=0)
    x, y = somebodys.arrays()[0]
    assert (pictures.name, pictures.shape, pictures.classes, pictures.modality.name) == (
        "somebodys:arrays", (3, 8, 8), 3, "image",
    )  # fmt: skip
    assert torch.equal(pictures.train.x.permute(0, 2, 3, 1), torch.tensor(x))
    assert torch.equal(pictures.train.y, torch.tensor(y))
    assert open_dataset("somebodys:ours", seed=0).name == "somebodys:ours"  # not of whom it borrows
    items = open_dataset("somebodys:torch_datasets", seed=0)
    assert (len(items.train), len(items.test), items.classes) == (40, 12, 4)
    assert torch.equal(items.train.x[7], somebodys.Items(40)[7][0])
    assert items.data_range == (float(items.train.x.min()), float(items.train.x.max()))
    table = open_dataset("somebodys:rows", seed=0)
    assert (table.modality.name, table.shape, len(table.train), len(table.test)) == ("row", (6,), 40, 10)
    assert (
        open_dataset("somebodys:rows", seed=1).sha256()
        != table.sha256()
        == open_dataset("somebodys:rows", seed=0).sha256()
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("half", "has the parts ['validation']; it must return (training part, test part)"),
        ("lone", "gave Items; it must return (training part, test part)"),
        ("bad_labels", "Row 0 of data set 'somebodys:bad_labels' has label 0."),
        ("uneven", "have the shapes (1, 8, 8) and (1, 9, 8); they must be of one"),
        ("unnamed", "has the columns ['picture', 'label']; none of them is called image"),
        ("volumes", "have shape (2, 2, 2, 2); images are [C, H, W], rows [F]"),
        ("breaks", "raised KeyError: 'no weights here' (somebodys.py, line"),
    ],
)
def test_what_is_no_data_set_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        open_dataset(f"somebodys:{name}", seed=0)
    assert words in str(error.value) and f"somebodys:{name}" in str(error.value)


def part(labels: Any, inputs: Any = None) -> Any:
    """Return as many images as labels, and these."""
    return torch.rand(len(labels), 1, 4, 4) if inputs is None else inputs, np.asarray(labels)


@pytest.mark.parametrize("labels", [[0.0, 1.0, 2.0], [False, True, True], np.array([0, 1, 2], np.uint8)])
def test_whole_numbers_are_labels_whatever_their_type(labels: Any) -> None:
    for one in (part([*labels] * 4), [(torch.rand(1, 4, 4), label) for label in [*labels] * 4]):
        data = dataset_from("mine", (one, one), 0)
        assert data.train.y.tolist() == [int(label) for label in [*labels] * 4]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.0, 10.7, 21.4], "Row 1 of data set 'mine' has label 10.7; labels must be class numbers"),
        ([0.0, np.nan, 1.0], "Row 1 of data set 'mine' has label nan"),
        ([0.0, np.inf, 1.0], "Row 1 of data set 'mine' has label inf"),
        (["cat", "dog", "cat"], "Row 0 of data set 'mine' has label 'cat'"),
        ([0, 1, -1], "Row 2 of data set 'mine' has label -1"),
        ([1, 2, 3], "'mine' has labels from 1 on; classes are numbered from 0: subtract 1"),
        ([0, 10, 21], "'mine' has 3 labels, the largest 21; number the classes from 0 without gaps"),
        (range(30), "'mine' has 30 labels in 30 examples, as names of examples do"),
    ],
)
def test_labels_that_number_no_classes_are_refused(labels: Any, words: str) -> None:
    for one in (part(labels), [(torch.rand(1, 4, 4), label) for label in labels]):
        with pytest.raises(UsageError) as error:
            dataset_from("mine", {"train": one}, 0)
        assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.rand(12, 1, 4, 4) * 255, "have values from"),
        (torch.randint(0, 256, (12, 1, 4, 4)), "give uint8, or floats divided by what is white"),
        (np.zeros((12, 8, 8, 4), np.uint8), "as height x width x channels; give 1 or 3 channels"),
        (np.full((12, 1, 4, 4), 1e300), "holds a value that is not finite"),
        (np.array([["a", "b"]] * 12), "are <U1; they must be numbers or images"),
        (np.full((12, 3), None), "are object; they must be numbers or images"),
    ],
)
def test_inputs_that_would_be_read_wrongly_are_refused(inputs: Any, words: str) -> None:
    one = part([0, 1, 2] * 4, inputs)
    with pytest.raises(UsageError) as error:
        dataset_from("mine", (one, one), 0)
    assert words in str(error.value)


def test_pictures_are_read_as_files_of_them_are() -> None:
    """Turned by their EXIF; 16 bits a channel are refused, which Pillow would clip to white."""
    array = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    turned, deep = Image.fromarray(np.ascontiguousarray(np.rot90(array))), Image.new("I;16", (4, 4), 9000)
    turned.getexif()[0x0112] = 6
    data = dataset_from("mine", {"train": [(turned, row % 2) for row in range(10)]}, 0)
    assert np.array_equal(data.train.x[0].permute(1, 2, 0), array)
    with pytest.raises(UsageError, match="'mine' has pixels of type 'I;16'; convert it to 8-bit grey or RGB"):
        dataset_from("mine", {"train": [(deep, row % 2) for row in range(10)]}, 0)


def test_it_is_noted_what_was_read_and_what_not() -> None:
    one = part([0, 1, 3] * 4, torch.randn(12, 5))
    (note,) = dataset_from("mine", {"train": one, "test": one, "validation": one}, 0).notes
    assert note.startswith("mine: 24 rows of (5,) from -")
    assert note.endswith("4 classes, of which 2 has no example for training; not read: validation")


def test_a_folder_that_the_library_datasets_saved(tmp_path: Path) -> None:
    import datasets

    pictures = [Image.fromarray(somebodys.arrays()[0][0][i]) for i in range(20)]
    features = datasets.Features({"img": datasets.Image(), "kind": datasets.Value("int64")})
    result = datasets.Dataset.from_dict({"img": pictures, "kind": [i % 2 for i in range(20)]}, features)
    datasets.DatasetDict({"train": result, "test": result.select(range(6))}).save_to_disk(str(tmp_path / "saved"))
    result.save_to_disk(str(tmp_path / "one"))
    data = open_dataset(f"hf:{tmp_path / 'saved'}?label=kind", seed=0)
    assert (data.name, data.shape, len(data.train), len(data.test)) == ("hf:saved", (3, 8, 8), 20, 6)
    assert torch.equal(data.train.x[3].permute(1, 2, 0), torch.tensor(somebodys.arrays()[0][0][3]))
    assert len(open_dataset(f"hf:{tmp_path / 'one'}?label=kind", seed=0).test) == 4
    for text, words in (
        (f"{tmp_path / 'saved'}", "none of them is called label"),
        (f"{tmp_path / 'saved'}?label=sort", "there is no 'sort'"),
        (f"{tmp_path / 'saved'}?lable=kind", "has the option 'lable'"),
        (f"{tmp_path}", "is no folder that `datasets` saved"),
    ):
        with pytest.raises(UsageError, match=words):
            open_dataset(f"hf:{text}", seed=0)


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the package `datasets`; pip install"):
        open_dataset(f"hf:{tmp_path}", seed=0)


def evaluate(tmp_path: Path, **options: Any) -> ppbench.Evaluation:
    few = {
        "clients": 2, "rounds": 1, "victims": 2, "candidates": 8, "tuning": 0, "stages": ("init", "final"),
        "grid": (0.01,), "attacks": ("idlg", "label_recovery", "adaptive_server"), "budget": 60,
        "dataset": "somebodys:torch_datasets",
    }  # fmt: skip
    return ppbench.evaluate(out=tmp_path, workers=1, **{"defense": "dp", "model": "somebodys:Net", **few, **options})


@pytest.mark.nightly
def test_a_network_and_data_of_ones_own_are_trained_probed_and_attacked(tmp_path: Path) -> None:
    done = evaluate(tmp_path, attack_batch=(1, 2))
    assert [(r.config.attack.id, r.error) for r in done.records if r.status != "complete"] == []
    about = done.records[0].config
    assert (about.model.id, about.data.name) == ("somebodys:Net", "somebodys:torch_datasets")
    assert len(about.model.code) == len(about.data.code) == 12
    assert "somebodys:Net" in (tmp_path / "leaderboard.html").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "somebodys:Narrow"}, "sees one value of an example, so batches of 1 have no statistics"),
        ({"defense": "dp_sgd"}, "makes depend on the others"),
        (
            {"defense": "pbpfl", "model": "somebodys:Attention", "model_options": {"dropout": "off"}},
            "reshapes",  # its patches: two axes of space into one
        ),
    ],
)
def test_what_does_not_fit_together_is_told_before_anything_runs(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        evaluate(tmp_path / "out", **{"attack_batch": (1,), **options})
    assert not (tmp_path / "out").exists()


def test_modules_of_the_present_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lying_here.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(5, 10)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert build(net_spec("lying_here:net", (5,), 10)).parameter_count == 60


def test_records_do_not_choose_what_is_imported() -> None:
    """`verify` opens data by what records call them; an address in a record is not followed."""
    assert local_dataset("somebodys:arrays") is None


@pytest.mark.parametrize("text", ["somebodys:", ":arrays", "some bodys:arrays", "somebodys:a b", "../somebodys:arrays"])
def test_what_is_no_address_is_an_unknown_name(text: str) -> None:
    with pytest.raises(UsageError) as error:
        open_dataset(text, seed=0)
    assert not isinstance(error.value, PluginError) and "There is no data set named" in str(error.value)
