"""Texts that are their own targets: the next-token loss, what its gradient gives away, and who was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.token_vectors import nearest_tokens
from ppbench.attacks.membership.model_queries import token_likelihoods
from ppbench.attacks.membership.outputs import LossThreshold, MinK
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.row_spaces import linear_groups
from ppbench.attacks.reconstruction.token_rows import TokenRows
from ppbench.base.errors import UsageError
from ppbench.base.registry import load_all, load_plugin
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING, Vocabulary
from ppbench.defenses.none import NoDefense
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import TEXT
from ppbench.nets.net import LOSSES, initial, net_spec, token_losses
from ppbench.records.schema import Utility
from ppbench.records.store import Store
from ppbench.report.learning import learning_of
from ppbench.report.words import utility_text
from ppbench.run.audit.population import canaries
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.task import Task, make_task
from ppbench.run.train import at_chance, constant_answer, next_tokens
from ppbench.verification.recheck import full_findings

UNIT = (Slot(0, 0),)


def task_of(**model_options: Any) -> Task:
    about = dict(defense="none", dataset="letters", model="gpt", loss="next_token")
    return make_task(configure(**about, model_options=model_options))


@pytest.fixture(scope="module")
def task() -> Task:
    return task_of()


# -- the loss ----------------------------------------------------------------------------------------------------------
def test_it_is_the_cross_entropy_of_each_token_from_those_before_it(task: Task) -> None:
    x, params = task.test.x[:4], task.params
    assert torch.equal(task.test.y, task.test.x) and task.plan.spec.classes == len(task.plan.vocabulary or ())
    logits = task.plan.net(params, x)
    each = [cross_entropy(logits[i, :-1], x[i, 1:].long(), ignore_index=PADDING) for i in range(4)]
    torch.testing.assert_close(task.plan.example_loss(logits, x), torch.stack(each))
    mean = task.plan.objective(params, x, x, torch.tensor([1.0, 1, 0, 0]))
    torch.testing.assert_close(mean, torch.stack(each[:2]).mean())


def test_neither_padding_nor_what_stands_behind_it_counts(task: Task) -> None:
    x = task.test.x[:1].clone()
    x[0, 10:] = PADDING
    logits = task.plan.net(task.params, x)
    other = logits.clone()
    other[0, 9:] = torch.randn(15, logits.shape[2])
    loss = LOSSES["next_token"]
    assert torch.equal(loss(logits, x), loss(other, x)) and token_losses(logits, x)[1].sum() == 9
    assert not torch.equal(loss(logits, x), loss(torch.randn_like(logits), x))
    assert loss(logits, torch.eye(24)[:1]).item() == 0, "one token predicts none"
    stacked = loss(torch.stack([logits, other])[:, None], x)  # as reference runs have them
    assert stacked.shape == (2, 1, 1) and torch.equal(stacked[0, 0], loss(logits, x))


def test_vectors_at_embeddings_are_their_tokens_as_targets_too(task: Task) -> None:
    plan, params, x = task.plan, task.params, task.test.x[:3]
    vectors = plan.token_table(params)[x.long()]
    torch.testing.assert_close(plan.objective(params, vectors, x, torch.ones(3)),
                               plan.objective(params, x, x, torch.ones(3)), atol=0.01, rtol=0)  # fmt: skip
    shares = plan.nearness(params, vectors)
    assert torch.equal(shares.argmax(-1), x.long()) and shares.max(-1).values.min() > 0.9
    between = vectors.roll(1, 1).lerp(vectors, 0.5).requires_grad_()
    (slope,) = torch.autograd.grad(plan.nearness(params, between)[..., 5].sum(), between)
    assert slope.abs().max() > 1e-3, "a search can move a target"


def test_texts_get_a_decoder_where_next_tokens_are_predicted() -> None:
    assert configure(defense="none", dataset="letters", loss="next_token").model == "gpt"
    assert configure(defense="none", dataset="letters").model == "transformer"
    assert configure(defense="none", dataset="letters", loss="next_token", model="hf").model == "hf"


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"dataset": "letters", "model": "transformer"}, "'transformer' answers a text; use --loss cross_entropy"),
        ({"dataset": "digits", "model": "mlp"}, "'digits' has images, whose next token cannot be predicted"),
        ({"dataset": "letters", "model": "gpt", "model_options": {"every_token": True}, "loss": "cross_entropy"},
         "'gpt' answers every token; use --loss next_token"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(about: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_task(configure(**{"defense": "none", "loss": "next_token", **about}))


def test_texts_of_one_token_have_no_next_one(tmp_path: Any) -> None:
    """Such a training ended in an error of ppbench's own, after its first cells."""
    (tmp_path / "words.csv").write_text("text,label\n" + "".join(f"word{'ab'[i % 2]},{i % 2}\n" for i in range(20)))
    about: dict[str, Any] = dict(defense="none", dataset=f"text:{tmp_path / 'words.csv'}?length=4", loss="next_token")
    with pytest.raises(UsageError, match=r"a part without a text of two tokens.*; use longer texts, or another --loss"):
        make_task(configure(**about))


def test_every_attack_either_needs_no_classes_or_is_left_out(task: Task) -> None:
    suited = {name for name, attack in load_all("attacks").items() if attack().suits(task.plan)}
    assert {"token_rows", "dlg", "lamp", "adaptive_server", "adaptive_dp", "mia_loss", "mia_min_k", "mia_lira",
            "mia_rmia", "mia_upload", "tracing", "audit_one_run"} <= suited  # fmt: skip
    assert not suited & {"label_recovery", "server_labels", "closed_form", "feature_inversion", "ig_masked", "query",
                         "mia_mentr", "mia_nn", "mia_whitebox"}  # fmt: skip
    classified = make_task(configure(defense="none", dataset="letters", model="gpt"))
    assert not MinK().suits(classified.plan) and LossThreshold().suits(classified.plan)
    with pytest.raises(UsageError, match="'label_recovery' has no use for model 'gpt' with loss 'next_token'"):
        evaluate(defense="none", dataset="letters", model="gpt", loss="next_token", attacks=("label_recovery",))


@pytest.mark.parametrize(
    ("defense", "words"),
    [
        ("mixup", "where targets are classes"),
        ("soteria", "one vector"),
        ("precode", "one vector"),
        ("spn", "with loss 'cross_entropy'"),
    ],
)
def test_defenses_of_classes_or_of_one_vector_refuse_it(task: Task, defense: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_plugin("defenses", defense)().check(task.plan)


# -- what a gradient gives away ----------------------------------------------------------------------------------------
def read(
    task: Task, count: int, change: Callable[[Params], Params] = dict, noise: Noise | None = None, start: int = 10
) -> tuple[Guess, list[float]]:
    """Return the guess of `token_rows` about some letters, and the share of each one's tokens in place."""
    part, shared = task.dataset.train.take(torch.arange(start, start + count)), Shared(task.plan)
    simulate = shared.at(shared.same(task.params))
    observed = change({name: value.detach() for name, value in simulate(part.x[None], part.y[None]).items()})
    evidence = Evidence(UNIT, observed, simulate, task.params, noise=noise)
    (guess,) = TokenRows().answer([evidence], task.plan, [Challenge(UNIT, count)], torch.Generator().manual_seed(0))
    assert guess.x is not None and guess.y is None
    order = TEXT.match(guess.x, part.x, task.dataset.data_range)
    shares = [TEXT.accuracy(guess.x[i], text) or 0.0 for i, text in zip(order, part.x, strict=True)]
    return guess, shares


@pytest.mark.parametrize(("count", "options"), [(1, {}), (2, {}), (4, {}), (2, {"frozen_embedding": True}),
                                                (1, {"lora": 4}), (2, {"lora": 16})])  # fmt: skip
def test_letters_are_read_to_their_last_token(count: int, options: dict[str, Any]) -> None:
    """The last one is a target alone. Behind adapters of low rank the head's row space tells the texts."""
    guess, shares = read(task_of(**options), count)
    assert shares == [1.0] * count and guess.is_exact


def test_the_head_that_reads_every_token_is_a_group_of_its_own(task: Task) -> None:
    groups = linear_groups(task.plan)
    assert groups.names[groups.head] == ("head",) and groups.head in groups.looked_at
    plain = linear_groups(make_task(configure(defense="none", dataset="letters", model="gpt")).plan)
    assert plain.head == -1 and plain.names == groups.names[:-1]


def test_what_a_trained_model_is_sure_of_leaves_no_gradient_and_is_its_own_answer(task: Task) -> None:
    """Other letters were memorized; behind the last name of this one the model is sure of the full stop, its end."""
    x = task.dataset.train.x
    trained = replace(task, params=memorized(task, x[:160], 60))
    end = int((x[302] != PADDING).sum()) - 1
    assert float(task.plan.net(trained.params, x[302:303])[0, end - 1].softmax(-1)[int(x[302, end])]) > 0.98
    for count in (1, 2):
        guess, shares = read(trained, count, start=302)
        assert shares == [1.0] * count and guess.is_exact


@pytest.mark.parametrize("part", ["features", "head"])
def test_a_part_of_the_gradient_shows_the_last_token_too(task: Task, part: str) -> None:
    guess, shares = read(task, 2, lambda g: {name: value for name, value in g.items() if name.startswith(part)})
    assert shares == [1.0, 1.0] and guess.is_exact


def test_noise_says_nothing_and_a_wrong_token_is_not_called_exact(task: Task) -> None:
    draws = torch.Generator().manual_seed(1)
    guess, shares = read(task, 1, lambda g: {n: torch.randn(v.shape, generator=draws) for n, v in g.items()})
    assert not guess.is_exact and shares[0] < 0.35

    small = Noise("gaussian", 1e-4)
    guess, shares = read(task, 1, lambda g: {n: v + 1e-4 * torch.randn(v.shape, generator=draws) for n, v in g.items()},
                         small)  # fmt: skip
    assert guess.is_exact and shares == [1.0], "what is left is the noise of its law"

    for std in (0.01, 0.1):
        noisy = {n: std * torch.randn(v.shape, generator=draws) for n, v in task.params.items()}
        guess, _ = read(task, 1, lambda g, e=noisy: {n: v + e[n] for n, v in g.items()}, Noise("gaussian", std))
        assert not guess.is_exact, "noise of its law is left of any text"

    def swapped(gradient: Params) -> Params:
        return {**gradient, "head.weight": gradient["head.weight"].roll(1, 0)}

    assert not read(task, 1, swapped)[0].is_exact


def test_a_search_moves_texts_and_targets_together() -> None:
    spec = net_spec("gpt", (4,), 12, {"vocabulary": 12, "width": 16, "heads": 2, "depth": 1, "every_token": True})
    plan = Plan(
        spec, 1, loss="next_token", data_range=(0.0, 11.0), kind="text", vocabulary=Vocabulary(tuple("pabcdefghijk"))
    )
    params, x = initial(spec, 1), torch.tensor([[3.0, 7, 2, 9]])
    observed = {name: value.detach() for name, value in Shared(plan).at(params)(x[None], x[None]).items()}
    evidence = Evidence(UNIT, observed, Shared(plan.of_vectors()).at(params), params)
    attack = DLG(budget=300, restarts=0)
    (guess,) = attack.answer([evidence], plan.of_vectors(), [Challenge(UNIT, 1)], torch.Generator().manual_seed(0))
    assert guess.x is not None and nearest_tokens(guess.x, plan.token_table(params)).tolist() == x.tolist()


# -- utility -----------------------------------------------------------------------------------------------------------
def test_chance_is_the_most_frequent_token_and_padding_is_none(task: Task) -> None:
    right, count = constant_answer(task)
    tokens, real = next_tokens(task.test.x)
    assert count == len(tokens) == int(real.sum()) and right == int((tokens == tokens.mode().values).sum())
    assert 0.05 < right / count < 0.2 and PADDING not in tokens
    curve = [(round_, right / count) for round_ in (1, 2, 3)]
    utility = Utility(accuracy=right / count, low=0.09, high=0.11, n=160, chance=1 / 196, curve=curve, tokens=count,
                      constant=right / count)  # fmt: skip
    assert at_chance(utility, task) and learning_of(utility).state == "nothing"
    assert learning_of(utility).figure == "accuracy 10% of next tokens [9.0, 11.0], a constant answer 10%"
    assert utility_text(utility, None) == "accuracy 10.0% of next tokens"
    learned = utility.model_copy(update={"curve": [*curve, (4, 0.5)], "accuracy": 0.5})
    assert not at_chance(learned, task)


def test_an_evaluation_says_what_its_accuracy_is_a_share_of(tmp_path: Any) -> None:
    few = dict(victims=8, rounds=3, clients=2, train=160, candidates=40, workers=1, attack_batch=(1,))
    made = evaluate(defense="none", dataset="letters", model="gpt", loss="next_token", stages=("init", "final"),
                    attacks=("token_rows", "mia_loss", "mia_min_k"), out=tmp_path / "out", **few)  # fmt: skip
    assert made.answer.headline.words.startswith(
        "Only controls were evaluated; of the undefended model texts are rebuilt at 100% of tokens in place, for"
    )
    records = Store(tmp_path / "out").load_all()
    undefended = next(record for record in records if record.config.defense.id == "none")
    assert undefended.utility.tokens and (undefended.utility.accuracy or 0) > undefended.utility.floor > 0.05
    assert undefended.config.model.loss == "next_token" and undefended.config.model.options["every_token"] is True
    assert "of next tokens" in (tmp_path / "out" / "leaderboard.html").read_text()
    assert not full_findings(tmp_path / "out").problems, "what `ppbench verify` makes again is the same"


# -- members -----------------------------------------------------------------------------------------------------------
def memorized(task: Task, texts: Tensor, steps: int) -> Params:
    """Return weights after `steps` of Adam on texts."""
    weights = {name: value.clone().requires_grad_() for name, value in task.params.items()}
    optimizer = torch.optim.Adam([*weights.values()], lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        task.plan.objective(weights, texts, texts, torch.ones(len(texts))).backward()
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


def likelihoods(task: Task, params: Params, texts: Tensor) -> Tensor:
    """Return what a client's view says of the tokens of texts under a delivered model."""
    fed = Federation(NoDefense(), task.plan, task.shards, task.seeds)
    fed.start(params)
    return token_likelihoods(fed.release().view("client/1"), texts)


@pytest.mark.parametrize("attack", [LossThreshold(), MinK()])
def test_a_model_that_memorizes_gives_its_members_away_and_another_does_not(task: Task, attack: Any) -> None:
    texts, member = task.test.x[:80], torch.arange(80) < 40
    for steps, least, most in ((60, 0.95, 1.0), (0, 0.3, 0.7)):
        signal = likelihoods(task, memorized(task, texts[member], steps), texts)
        scores = attack.scores(task.plan, signal, texts.double())
        auc = float((scores[member][:, None] > scores[~member]).double().mean())
        assert least <= auc <= most, (steps, auc)


def test_min_k_is_the_mean_of_the_least_likely_tokens_and_the_loss_that_of_all(task: Task) -> None:
    texts = torch.cat([task.test.x[:3], torch.eye(24)[:1]])
    signal = likelihoods(task, task.params, texts)
    loss = task.plan.example_loss(task.plan.net(task.params, texts), texts)
    torch.testing.assert_close(LossThreshold().scores(task.plan, signal, texts).float(), -loss)
    for share, count in ((0.2, lambda n: -(-n // 5)), (1.0, lambda n: n)):
        least = [sorted(row[row < torch.inf].tolist()) for row in signal]
        expected = [sum(row[: count(len(row))]) / max(count(len(row)), 1) for row in least]
        assert MinK(share=share).scores(task.plan, signal, texts).tolist() == pytest.approx(expected)
    none = torch.full_like(signal, torch.nan)
    assert all(attack.scores(task.plan, none, texts).isnan().all() for attack in (LossThreshold(), MinK()))


def test_canaries_are_texts_that_are_their_own_targets(task: Task) -> None:
    made, families, used = canaries(task, 5, task.seeds)
    assert torch.equal(made.x, made.y) and set(families) == {"planted", "out_of_distribution"} and len(made.x) == 10
    assert len(used) == 5 and not (made.x[:5] == task.test.x[used]).all(1).any(), "names and numbers are others"
