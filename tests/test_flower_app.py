"""Flower apps as they lie in a folder: their own server, clients and training, on what the bench hands them.

Run beside Flower, see test_adapters.py. `flower_app/` is written as Flower's quickstart is.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import data

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.token_rows import TokenRows
from ppbench.base import registry
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_plugin
from ppbench.base.seeds import Seeds
from ppbench.base.tree import leaves
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import at_truth
from ppbench.federation.plan import Data, Local, Opt, Plan
from ppbench.federation.view import View
from ppbench.federation.wire import SERVER, Slot
from ppbench.nets.net import initial, net_spec
from ppbench.task.user_data import open_dataset

pytest.importorskip("flwr")

FOLDER = Path(__file__).parent / "flower_app"
CLIENTS = 3
PARTIAL = {
    "frozen_app": (),  # its messages hold what it does not train, too
    "partial_app": (
        ("server_app.py", "ArrayRecord(Net().state_dict())",
         "ArrayRecord({n: v for n, v in Net().state_dict().items() if 'conv' not in n})"),
        ("client_app.py", "to_torch_state_dict())", "to_torch_state_dict(), strict=False)"),
        ("client_app.py", "state = model.state_dict()",
         "state = {n: v for n, v in model.state_dict().items() if 'conv' not in n}"),
    ),
    "listed_app": (
        ("server_app.py", "ArrayRecord(Net().state_dict())",
         "ArrayRecord([v.numpy() for v in Net().state_dict().values()])"),
        ("client_app.py", "msg.content[\"arrays\"].to_torch_state_dict())",
         "dict(zip(model.state_dict(), map(torch.from_numpy, msg.content[\"arrays\"].to_numpy_ndarrays()))))"),
        ("client_app.py", "ArrayRecord(state)", "ArrayRecord([v.numpy() for v in state.values()])"),
    ),
}  # fmt: skip
"""Apps whose convolution is frozen: what is replaced in which of their files, by what."""
VICTIMS = {Slot(0, client): client for client in range(CLIENTS)}


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the app in a folder, whose modules are forgotten afterwards."""
    place = tmp_path / "app"
    shutil.copytree(FOLDER, place, ignore=shutil.ignore_patterns("__pycache__"))
    before = [*sys.path]
    yield place
    sys.path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] in ("quick_app", "text_app", *PARTIAL)]:
        del sys.modules[name]


def changed(place: Path, **settings: Any) -> str:
    """Write settings into the app's pyproject.toml, and return the defense's name."""
    file = place / "pyproject.toml"
    for name, value in settings.items():
        lines = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in file.read_text().split("\n")]
        file.write_text("\n".join(lines))
    return f"flower:{place}"


def renamed(place: Path, name: str) -> None:
    """Give the app's package another name: the registry keeps networks by their addresses."""
    (place / "quick_app").rename(place / name)
    for file in [place / "pyproject.toml", *(place / name).glob("*.py")]:
        file.write_text(file.read_text().replace("quick_app", name))


def loaded(name: str) -> Any:
    registry.admit(name)
    return load_plugin("defenses", name)


def started(name: str, opt: Opt | None = None, **options: str) -> Federation:
    made = loaded(name)()
    local = Local("delta", 1, 8, opt or Opt("sgd", 0.1))
    plan = Plan(net_spec("quick_app.task:Net", (1, 8, 8), 10, options), CLIENTS, local)
    run = Federation(made, plan, {client: data(20 + client, client) for client in range(CLIENTS)}, Seeds(0))
    run.start(initial(plan.spec, 0))
    return run


def seen(run: Federation, count: int = 1) -> tuple[View, dict[Slot, Data]]:
    victims = {slot: data(count, 50 + client) for slot, client in VICTIMS.items()}
    return run.probe(victims).view("server/1"), victims


@pytest.mark.parametrize("count", [2, 5])
def test_what_its_clients_send_is_the_rate_times_the_gradient(app: Path, count: int) -> None:
    view, victims = seen(started(changed(app)), count)
    evidence = view.defense.evidence(view)
    assert [e.unit for e in evidence] == [(slot,) for slot in victims]
    for one in evidence:
        right, other = victims[one.unit[0]], data(count, 99)
        assert at_truth(one, right.x[None], right.y[None]) < 1e-9
        assert at_truth(one, other.x[None], other.y[None]) > 1e-3


def test_noise_that_its_clients_add_is_in_what_is_seen(app: Path) -> None:
    view, victims = seen(started(changed(app, noise=0.001)))
    for one in view.defense.evidence(view):
        right = victims[one.unit[0]]
        noise = sum(float((0.001 / 0.1) ** 2) * value.numel() for value in one.observed.values())
        left = at_truth(one, right.x[None], right.y[None]) * float(one.scale())
        assert 0.8 < left / noise < 1.2


def test_its_rounds_train_and_its_view_holds_counts_losses_and_buffers(app: Path) -> None:
    run = started(changed(app))
    before = {name: value.clone() for name, value in run.parties.server.params.items()}
    assert run.run(2)
    assert max(float((run.parties.server.params[n] - v).abs().max()) for n, v in before.items()) > 1e-3
    view, _ = seen(run, 2)
    result = next(iter(view.exchanges())).answer.rest
    assert int(result.metrics["metrics"]["num-examples"]) == 2
    assert float(result.metrics["metrics"]["train_loss"]) > 0
    assert {"norm.running_mean", "norm.num_batches_tracked"} <= {*result.arrays["buffers"]}


def test_its_running_statistics_are_averaged_and_seen_if_norms_are_tracked(app: Path) -> None:
    """As by Flower, whose apps send a whole state dict: the view holds mean and variance of a victim's batch."""
    run = started(changed(app), norms="tracked")
    names = "features.norm.running_mean", "features.norm.running_var"
    assert run.run(1) and {*names} <= {*run.parties.server.params}
    before, run.wire.keep = run.parties.server.params, True
    assert run.run(2)
    sent = [mail.message for mail in run.wire.mail if mail.receiver == SERVER]
    decoded = [run.defense.decode(answer, before) for answer in sent]
    assert len(decoded) == CLIENTS
    for name in names:
        moved = before[name].double() - run.parties.server.params[name].double()
        shares = torch.tensor([20.0, 21.0, 22.0], dtype=torch.float64)[:, None] / 63
        mean = (shares * torch.stack([part[name].double() for part in decoded])).sum(0)
        torch.testing.assert_close(moved, mean, rtol=1e-4, atol=1e-6)
    view, victims = seen(run, 4)
    for one in view.defense.evidence(view):
        right, other = victims[one.unit[0]], data(4, 99)
        assert {*one.statistics} == {*names} and at_truth(one, right.x[None], right.y[None]) < 1e-8
        assert at_truth(one, other.x[None], other.y[None]) > 1e-3
    assert {*next(iter(view.exchanges())).answer.rest.arrays["buffers"]} == {"norm.num_batches_tracked"}


def test_an_app_of_texts_gets_token_numbers_and_a_mask_and_its_letters_are_read(app: Path) -> None:
    renamed(app, "text_app")
    task = app / "text_app" / "task.py"
    begin, end = task.read_text().split("def load_data", 1)
    called = end.replace('net(batch["img"]), batch["label"]', 'net(batch["ids"], batch["mask"]).logits, batch["label"]')
    task.write_text(f"{begin.split('class Net')[0]}from users_texts import Masked as Net\n\n\ndef load_data{called}")
    letters = open_dataset("letters", seed=0)
    shards = {client: letters.train.take(torch.arange(12 * client, 12 * client + 12)) for client in range(2)}
    name = changed(app, batch='["ids", "mask", "label"]')
    defense = loaded(name)()
    plan = Plan(net_spec("text_app.task:Net", letters.shape, 4), 2, Local("delta", 1, 8, Opt("sgd", 0.1)))
    plan = replace(plan, data_range=letters.data_range, kind="text", vocabulary=letters.vocabulary)
    run = Federation(defense, plan, shards, Seeds(0))
    run.start(initial(plan.spec, 0))
    assert run.run(1)
    slot, victim = Slot(0, 0), letters.train.take(torch.arange(50, 51))
    view = run.probe({slot: victim}).view("server/1")
    (evidence,) = view.defense.evidence(view)
    assert at_truth(evidence, victim.x[None], victim.y[None]) < 1e-9
    (guess,) = TokenRows().run(view, [Challenge((slot,), 1)], torch.Generator().manual_seed(0))
    assert torch.equal(guess.x, victim.x)


@pytest.mark.parametrize("name", PARTIAL)
def test_an_app_of_frozen_layers_sends_its_arrays_by_its_own_names_and_is_read(app: Path, name: str) -> None:
    renamed(app, name)
    task = app / name / "task.py"
    frozen = "torch.manual_seed(0)\n        self.conv = nn.Conv2d(1, 4, 3).requires_grad_(False)"
    task.write_text(task.read_text().replace("self.conv = nn.Conv2d(1, 4, 3)", frozen))
    for file, old, new in PARTIAL[name]:
        text = (app / name / file).read_text()
        assert old in text
        (app / name / file).write_text(text.replace(old, new))
    plan = Plan(net_spec(f"{name}.task:Net", (1, 8, 8), 10), CLIENTS, Local("delta", 1, 8, Opt("sgd", 0.1)))
    run = Federation(loaded(changed(app))(), plan, {c: data(20 + c, c) for c in range(CLIENTS)}, Seeds(0))
    run.start(initial(plan.spec, 0))
    before = run.parties.server.params
    assert run.run(1) and not [one for one in before if "conv" in one]
    assert all(not torch.equal(before[one], value) for one, value in run.parties.server.params.items())
    view, victims = seen(run)
    for one in view.defense.evidence(view):
        right = victims[one.unit[0]]
        assert at_truth(one, right.x[None], right.y[None]) < 1e-8


@pytest.mark.parametrize(
    ("state", "arrays", "named"),
    [
        (["a", "b"], ["b", "a"], {"a": "a", "b": "b"}),
        (["base", "l.lora_A.default.weight", "c.original_module.bias", "c.modules_to_save.default.bias"],
         ["l.lora_A.weight", "c.bias"],
         {"l.lora_A.default.weight": "l.lora_A.weight", "c.modules_to_save.default.bias": "c.bias"}),
        (["a", "b"], ["0", "1"], {"a": "0", "b": "1"}),
        (["a", "b"], ["other"], {}),
    ],
)  # fmt: skip
def test_arrays_are_named_as_the_state_as_peft_does_or_in_order(
    state: list[str], arrays: list[str], named: dict[str, str]
) -> None:
    from ppbench.adapters.flower.app_folder import names_of_arrays

    assert names_of_arrays(state, arrays) == named


def test_probes_move_nothing_and_a_seed_gives_one_result(app: Path) -> None:
    name = changed(app, noise=0.01)
    one, other = started(name), started(name)
    assert one.run(1) and other.run(1)
    seen(one)
    assert one.run(2) and other.run(2)
    states = ((leaves(run.parties.server), leaves(run.parties.clients)) for run in (one, other))
    (a, b), (c, d) = states
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for x, y in zip([*a, *b], [*c, *d], strict=True))


def test_an_edited_app_has_another_version(app: Path) -> None:
    first, same = loaded(changed(app)).version, loaded(f"{changed(app)}/").version
    changed(app, noise=0.5)
    other = loaded(f"{changed(app)}/.").version
    assert first == same != other


def test_an_evaluation_takes_what_the_app_says(app: Path) -> None:
    setting = loaded(changed(app)).setting["quick"]
    assert (setting["model"], setting["lr"], setting["batch_size"]) == ("quick_app.task:Net", 0.1, 8)
    assert setting["local_epochs"] == 1 and setting["optimizer"] == "sgd"


@pytest.mark.parametrize(
    ("settings", "opt", "words"),
    [
        ({}, Opt("adam", 0.1), "needs --optimizer sgd"),
        ({"optimizer": '"Adam"'}, None, "Adam at rate 0.1"),
        ({"decay": "0.01"}, None, "weight decay 0.01"),
        ({"optimizer": '"None"'}, None, "has no attribute 'None'"),
    ],
)
def test_trainings_that_no_attack_can_read_are_refused(app: Path, settings: Any, opt: Opt | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        started(changed(app, **settings), opt)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("network", r"has no \[tool.ppbench\] network"),
        ("data", r"has no \[tool.ppbench\] data"),
        ("serverapp", "names no serverapp and clientapp"),
    ],
)
def test_what_is_no_app_is_refused_by_name(app: Path, line: str, words: str) -> None:
    file = app / "pyproject.toml"
    file.write_text("\n".join(one for one in file.read_text().split("\n") if not one.startswith(f"{line} =")))
    with pytest.raises(UsageError, match=words):
        loaded(f"flower:{app}")


def test_other_folders_and_other_keys_are_refused(app: Path, tmp_path: Path) -> None:
    for name, words in (
        (f"flower:{tmp_path}", "no readable pyproject.toml"),
        ("flower:no/such/folder", "no name behind flower:"),
        (changed(app, batch='["img"]'), "give two keys"),
    ):
        with pytest.raises(UsageError, match=words):
            loaded(name)


def test_records_do_not_choose_what_is_imported(app: Path) -> None:
    assert registry.find("defenses", f"flower:{app}") is None
