"""Somebody's own network of texts: token numbers go in, vectors take the place of embeddings, letters come out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import users_texts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ppbench
from ppbench.adversary.attack import Challenge, Guess
from ppbench.attacks.reconstruction.row_spaces import linear_groups
from ppbench.attacks.reconstruction.token_rows import TokenRows
from ppbench.base.errors import UsageError
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.plan import Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import TEXT
from ppbench.nets.model_object import held_network
from ppbench.nets.net import initial, net_spec
from ppbench.run.config import configure
from ppbench.run.task import make_task
from ppbench.task.dataset import Dataset
from ppbench.task.texts import letters


@pytest.fixture(scope="module")
def data() -> Dataset:
    return letters("", seed=0, root=None)


def plan_of(data: Dataset, model: str = "users_texts:Encoder", **options: str | float) -> Plan:
    spec = net_spec(model, data.shape, data.classes, options)
    return Plan(spec, 1, data_range=data.data_range, kind="text", vocabulary=data.vocabulary)


@pytest.mark.parametrize("model", ["Encoder", "Masked"])
def test_its_gradient_is_that_of_plain_pytorch(data: Dataset, model: str) -> None:
    plan = plan_of(data, f"users_texts:{model}")
    params, part = initial(plan.spec, 0), data.train.take(torch.arange(3))
    x, y = part.x, part.y
    module = getattr(users_texts, model)()
    module.load_state_dict({plan.net.own_name(name): value for name, value in params.items()})
    ids = x.long()
    output = module(ids) if model == "Encoder" else module(ids, attention_mask=(ids != 0).long()).logits
    cross_entropy(output, y.argmax(1)).backward()
    tracked = {name: value.clone().requires_grad_() for name, value in params.items()}
    slopes = torch.autograd.grad(plan.objective(tracked, x, y, torch.ones(3)), [*tracked.values()])
    for name, slope in zip(tracked, slopes, strict=True):
        torch.testing.assert_close(slope, module.get_parameter(plan.net.own_name(name)).grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("model", ["Encoder", "Masked"])
def test_vectors_take_the_place_of_embeddings_and_leave_nothing_behind(data: Dataset, model: str) -> None:
    plan = plan_of(data, f"users_texts:{model}")
    params, x = initial(plan.spec, 0), data.train.x[:2].clamp(min=1)  # no padding
    logits = plan.net(params, x)
    torch.testing.assert_close(plan.net(params, params[plan.net.embedding][x.long()]), logits)
    assert torch.equal(plan.net(params, x), logits), "numbers are looked up again after vectors"


def guess_of(plan: Plan, data: Dataset, attack: TokenRows, count: int) -> tuple[Guess, list[float]]:
    part, params = data.train.take(torch.arange(10, 10 + count)), initial(plan.spec, 0)
    shared = Shared(plan)
    simulate, slot = shared.at(shared.same(params)), Slot(0, 0)
    observed = {name: value.detach() for name, value in simulate(part.x[None], part.y[None]).items()}
    evidence = Evidence((slot,), observed, simulate, params)
    (guess,) = attack.answer([evidence], plan, [Challenge((slot,), count)], torch.Generator().manual_seed(0))
    assert guess.x is not None
    order = TEXT.match(guess.x, part.x, data.data_range)
    return guess, [TEXT.accuracy(guess.x[i], text) for i, text in zip(order, part.x, strict=True)]


@pytest.mark.parametrize("count", [1, 2])
def test_letters_are_read_off_the_gradient_of_torchs_own_attention(data: Dataset, count: int) -> None:
    plan = plan_of(data)
    assert linear_groups(plan).names[0] == ("features.block.self_attn",) and linear_groups(plan).alone == 1
    guess, shares = guess_of(plan, data, TokenRows(), count)
    assert shares == [1.0] * count and guess.is_exact, "padding, which this network reads, counts too"


def test_an_evaluation_takes_it_by_its_address() -> None:
    task = make_task(configure(defense="none", dataset="letters", model="users_texts:Encoder"))
    assert task.plan.net.embedding == "features.tokens.weight" and task.plan.net.rows == users_texts.TOKENS


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("users_texts:Encoder", {"tokens": 100}, "the embedding of model 'users_texts:Encoder' has 100; give it as"),
        ("users_texts:Encoder", {"max_norm": 1.0}, r"tokens renormalizes rows in each pass \(max_norm\)"),
        ("users_texts:Encoder", {"p": 0.1}, "take the option dropout=off"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_would_work(model: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_task(configure(defense="none", dataset="letters", model=model, model_options=options))


# -- ppbench.invert in plain PyTorch ----------------------------------------------------------------------------------
def gradient_of(module: nn.Module, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    masked = isinstance(module, users_texts.Masked)
    logits = module(ids, attention_mask=(ids != 0).long()).logits if masked else module(ids)
    return torch.autograd.grad(cross_entropy(logits, labels), [*module.parameters()])


@pytest.mark.parametrize("kind", ["Encoder", "Masked"])
@pytest.mark.parametrize("count", [1, 2])
def test_invert_returns_the_texts_and_their_labels(data: Dataset, kind: str, count: int) -> None:
    assert data.vocabulary is not None
    torch.manual_seed(0)
    words, part = data.vocabulary.words, data.train.take(torch.arange(10, 10 + count))
    module, ids = getattr(users_texts, kind)(4, len(words)), part.x.long()
    result = ppbench.invert(
        module, gradient_of(module, ids, part.y.argmax(1)), ids.shape[1:], batch=count, vocabulary=words
    )
    assert type(module) is getattr(users_texts, kind), "the user's own module is left as it is"
    assert result.attack == "token_rows" and result.accuracy(ids) == [1.0] * count
    assert sorted(result.texts) == sorted(data.vocabulary.text(row.tolist()) for row in ids)
    assert result.x.dtype == torch.int64 and result.mismatch is not None and result.mismatch < 1e-10
    assert result.planted is not None and result.planted.recovered
    order = [next(i for i, row in enumerate(ids) if torch.equal(row, guess)) for guess in result.x]
    assert result.y is not None and result.y.tolist() == part.y.argmax(1)[order].tolist()


def test_invert_of_noise_claims_nothing(data: Dataset) -> None:
    torch.manual_seed(0)
    module = users_texts.Encoder(4, 396)
    noise = [torch.randn_like(value) for value in module.parameters()]
    result = ppbench.invert(module, noise, (24,), labels=[0], attack="token_rows")
    assert not any(layer.exact for layer in result.layers) and (result.mismatch or 1.0) > 0.5
    assert max(result.accuracy(data.train.x[10:11].long())) < 0.35


def test_what_is_no_text_has_no_texts_and_words_must_fit(data: Dataset) -> None:
    module = users_texts.Encoder(4, 396)
    slopes = gradient_of(module, data.train.x[:1].long(), torch.tensor([0]))
    with pytest.raises(UsageError, match="give the 396 tokens of the network's embedding"):
        ppbench.invert(module, slopes, (24,), vocabulary=["a", "b"])
    plain = nn.Sequential(nn.Flatten(), nn.Linear(9, 3))
    slopes = torch.autograd.grad(cross_entropy(plain(torch.rand(1, 1, 3, 3)), torch.tensor([1])), [*plain.parameters()])
    with pytest.raises(UsageError, match="give none, as the network takes no texts"):
        ppbench.invert(plain, slopes, (1, 3, 3), vocabulary=["a"])
    result = ppbench.invert(plain, slopes, (1, 3, 3))
    with pytest.raises(UsageError, match="are no texts"):
        _ = result.texts
    with pytest.raises(UsageError, match="these are no texts"):
        result.accuracy(torch.zeros(1, 24))


def next_token_gradient(module: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the mean over a batch's tokens, as trainers of decoders take it."""
    logits = module(ids)
    logits = getattr(logits, "logits", logits)
    cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0).backward()
    return {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_decoder_gives_its_texts_away_to_the_last_token(count: int, tied: bool) -> None:
    torch.manual_seed(0)
    module, ids = users_texts.Decoder(60, tied), torch.randint(2, 60, (count, 12))
    ids[-1, 9:] = 0  # texts of other lengths weigh otherwise
    result = ppbench.invert(module, next_token_gradient(module, ids), (12,), loss="next_token", batch=count)
    assert result.attack == "token_rows" and result.accuracy(ids) == [1.0] * count and result.y is None
    assert result.mismatch is not None and result.mismatch < 1e-9 and sorted(result.x.tolist()) == sorted(ids.tolist())
    assert result.solved_mismatch is not None and result.solved_mismatch < 1e-6


@pytest.mark.parametrize("count", [1, 2])
def test_texts_are_read_where_places_are_relative(count: int) -> None:
    torch.manual_seed(0)
    module, ids = users_texts.Rotary(), torch.randint(2, 60, (count, 10))
    result = ppbench.invert(module, next_token_gradient(module, ids), (10,), loss="next_token", batch=count)
    assert result.attack == "token_rows" and result.accuracy(ids) == [1.0] * count
    assert result.solved_mismatch is not None and result.solved_mismatch < 1e-6


def test_the_order_of_an_encoders_text_is_read_where_something_tells_it() -> None:
    torch.manual_seed(0)
    ids, labels = torch.randint(2, 60, (1, 8)), torch.tensor([1])
    for places, heads, exact in ((True, 4, True), (True, 1, False), (False, 4, False)):
        module = users_texts.Rotary(3, decoder=False, places=places, heads=heads)
        inverted = ppbench.invert(module, gradient_of(module, ids, labels), (8,), attack="token_rows", planted=False)
        assert all(layer.exact for layer in inverted.layers) == exact == (inverted.accuracy(ids) == [1.0])
        assert {*ids[0].tolist()} == {*inverted.x[0].tolist()} - {0}


def test_a_batch_of_more_texts_than_are_put_together_is_not_called_exact() -> None:
    torch.manual_seed(0)
    module, ids = users_texts.Encoder(4, 60), torch.randint(2, 60, (5, 6))
    slopes = gradient_of(module, ids, torch.tensor([0, 1, 2, 3, 1]))
    inverted = ppbench.invert(module, slopes, (6,), batch=5, attack="token_rows", planted=False)
    assert inverted.accuracy(ids) != [1.0] * 5 and not any(layer.exact for layer in inverted.layers)


def test_layers_that_start_alike_read_the_same_only_if_they_do_after_training() -> None:
    torch.manual_seed(0)
    module = users_texts.Rotary(parallel=True)
    plan = Plan(held_network(module, (6,), texts=True, every_token=True).spec, 1)
    assert linear_groups(plan).names[:3] == (
        ("features.q", "features.k", "features.v"), ("features.o",), ("features.wide",)
    )  # fmt: skip


def test_each_token_adds_to_the_rank_of_the_last_layer() -> None:
    torch.manual_seed(0)
    module, ids = users_texts.Decoder(60), torch.randint(2, 60, (3, 12))
    module.out = nn.Linear(module.out.in_features, 60)
    for batch, larger in ((3, False), (1, True)):
        module.zero_grad()
        about = {"loss": "next_token", "batch": batch, "planted": False}
        result = ppbench.invert(module, next_token_gradient(module, ids), (12,), **about)
        assert ("that of 3 examples or more: the batch is larger" in result.summary) is larger


@pytest.mark.parametrize(
    ("module", "about", "words"),
    [
        (users_texts.Decoder(60), {"labels": [1]}, "texts are their own targets; leave out labels="),
        (users_texts.Decoder(60), {"loss": "cross_entropy"}, "answers every token of a text, which `ppbench.invert`"),
        (users_texts.Encoder(4), {}, "under loss='next_token' it must answer every token of a text"),
        (users_texts.Decoder(60), {"label_smoothing": 0.1}, "label_smoothing and class_weights are of cross-entropy"),
    ],
)
def test_what_is_no_decoder_or_has_labels_is_refused(module: nn.Module, about: dict[str, Any], words: str) -> None:
    gradient = {name: torch.ones_like(value) for name, value in module.named_parameters()}
    with pytest.raises(UsageError, match=words):
        ppbench.invert(module, gradient, (12,), **{"loss": "next_token", **about})


@pytest.mark.parametrize("tied", [False, True])
def test_an_evaluation_takes_a_decoder_by_its_address_and_trains_a_tied_weight_once(tied: bool) -> None:
    about: dict[str, Any] = dict(defense="none", dataset="letters", model="users_texts:Decoder", loss="next_token")
    task = make_task(configure(**about, model_options={"tied": tied}))
    net, x = task.plan.net, task.test.x[:2]
    assert net.every_token and ("head.weight" in net.names) != tied
    assert net(task.params, x).shape == (2, 24, task.plan.spec.classes)
    module = users_texts.Decoder(task.plan.spec.classes, tied=tied)
    module.load_state_dict({net.own_name(name): value for name, value in task.params.items()}, strict=not tied)
    torch.testing.assert_close(net(task.params, x), module(x.long()), rtol=1e-4, atol=1e-5)


# -- a federation in plain PyTorch ------------------------------------------------------------------------------------
def test_federate_trains_a_network_of_texts_and_its_server_reads_them(data: Dataset) -> None:
    torch.manual_seed(0)
    module, ids, labels = (
        users_texts.Encoder(4, 396),
        data.train.x.long(),
        data.train.take(torch.arange(40)).y.argmax(1),
    )
    shards = [(ids[:20], labels[:20]), (ids[20:40], labels[20:40])]
    run = ppbench.federate(ppbench.load_defense("none"), module, shards, lr=0.05, optimizer="sgd", upload="gradient")
    before = cross_entropy(run.outputs(ids[:40].float()), labels)
    run.run(3)
    assert cross_entropy(run.outputs(ids[:40].float()), labels) < before
    view, questions = ppbench.probe(run, [(ids[50:51], labels[:1]), (ids[51:52], labels[:1])])
    guesses = ppbench.load_attack("token_rows").run(view, questions, torch.Generator().manual_seed(0))
    assert [guess.x.long().tolist() for guess in guesses] == [ids[50:51].tolist(), ids[51:52].tolist()]


def test_federate_refuses_token_numbers_beyond_the_embedding_and_of_networks_of_rows(data: Dataset) -> None:
    ids, labels = data.train.x[:8].long(), torch.zeros(8, dtype=torch.int64)
    none = ppbench.load_defense("none")
    with pytest.raises(
        UsageError, match=r"Token numbers go from 0 to \d+; the network's embedding has those from 0 to 99\."
    ):
        ppbench.federate(none, users_texts.Encoder(4, 100), [(ids, labels)])
    with pytest.raises(UsageError, match="answers every token of a text"):
        ppbench.federate(none, users_texts.Decoder(60), [(ids.clamp(max=59), labels)])
    with pytest.raises(UsageError, match="give finite floats"):
        ppbench.federate(none, nn.Sequential(nn.Linear(24, 8), nn.Sigmoid(), nn.Linear(8, 4)), [(ids, labels)])


LOOP: dict[str, Any] = dict(
    loss="next_token", upload="gradient", optimizer="sgd", lr=0.1, batch_size=8, schedule="parallel"
)


@pytest.mark.parametrize("tied", [False, True])
def test_a_loop_of_ones_own_trains_a_decoder_and_its_texts_are_read(data: Dataset, tied: bool) -> None:
    torch.manual_seed(0)
    tokens, network = data.train.x.long(), users_texts.Decoder(len(data.vocabulary or ()), tied=tied).eval()
    federation = ppbench.federate(ppbench.load_defense("none"), network, [tokens[:40], tokens[40:80].numpy()], **LOOP)
    before = federation.outputs(tokens[:2].float())
    assert federation.run(1) and before.shape == (2, tokens.shape[1], len(data.vocabulary or ()))
    assert not torch.equal(before, federation.outputs(tokens[:2].float()))
    view, questions = ppbench.probe(federation, [tokens[100:101], tokens[101:102]])
    guesses = ppbench.load_attack("token_rows").run(view, questions, torch.Generator().manual_seed(0))
    assert torch.equal(torch.cat([guess.x for guess in guesses if guess.x is not None]), tokens[100:102].float())


def test_texts_that_are_their_own_targets_have_no_labels(data: Dataset) -> None:
    none, tokens = ppbench.load_defense("none"), data.train.x.long()
    decoder = users_texts.Decoder(len(data.vocabulary or ())).eval()
    with pytest.raises(UsageError, match=r"Client 0 holds labels, and texts are their own targets; give token numbers"):
        ppbench.federate(none, decoder, [(tokens[:8], data.train.y[:8]), tokens[8:16]], **LOOP)
    with pytest.raises(UsageError, match="under loss='next_token' it must answer every token of a text"):
        ppbench.federate(none, users_texts.Encoder().eval(), [tokens[:8], tokens[8:16]], **LOOP)
    with pytest.raises(UsageError, match=r"give a list, with one entry|give each client inputs"):
        ppbench.federate(none, decoder, tokens[:8], **LOOP)  # type: ignore[arg-type]
