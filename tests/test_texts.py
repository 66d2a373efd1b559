"""Texts: what they say, how much of one came out, and what a gradient gives away of them."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap
from torch.nn.functional import one_hot

from ppbench.adversary.attack import Challenge
from ppbench.adversary.token_vectors import nearest_tokens
from ppbench.attacks.reconstruction.dlg import DLG
from ppbench.attacks.reconstruction.lamp import Lamp, WordPairs, moved_order
from ppbench.attacks.reconstruction.row_spaces import TextReader, row_space
from ppbench.attacks.reconstruction.token_rows import TokenRows
from ppbench.base.errors import UsageError
from ppbench.base.vocabulary import PADDING, UNKNOWN, Vocabulary
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Noise, Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import TEXT
from ppbench.metrics.text import commonest_tokens, redraw_facts, rouge, share_in_text, text_figures
from ppbench.nets.net import initial, net_spec
from ppbench.questions.image_metrics import ImageScore, TextScore, image_metrics
from ppbench.records.store import Store
from ppbench.report.page.board import summary_of
from ppbench.report.page.profiles import MarkedText, TextSample, marked, text_lines
from ppbench.run.config import configure
from ppbench.run.evaluation import evaluate
from ppbench.run.task import make_task
from ppbench.task.dataset import Split
from ppbench.task.texts import encode_words, letters, word_tokens
from ppbench.task.user_data import open_dataset
from ppbench.verification.recheck import full_findings

WORDS = Vocabulary(("[pad]", "[unknown]", "Dear", "Anna", ",", "pay", "4", "7", "euros", "."))


@pytest.fixture(scope="module")
def data():
    return letters("", seed=0, root=None)


# -- what texts say ---------------------------------------------------------------------------------------------------
def test_a_text_is_written_as_one_writes():
    assert WORDS.text([2, 3, 4, 5, 6, 7, 8, 9, 0, 0]) == "Dear Anna, pay 47 euros."
    assert WORDS.text([float("nan"), -3.0, 99.0]) == "." and WORDS.text([]) == ""
    pieces = Vocabulary(("[PAD]", "in", "##voice", "paid"), "wordpiece")
    assert pieces.text([1, 2, 3]) == "invoice paid"
    assert Vocabulary(("", "Ġna", "Ã¯", "ve"), "bytes").text([1, 2, 3]) == "naïve"
    assert Vocabulary(("", "▁pay", "▁me"), "pieces").text([1, 2]) == "pay me"


@given(st.lists(st.integers(2, len(WORDS) - 1), min_size=1, max_size=12))
def test_reading_a_written_text_gives_its_tokens(numbers):
    assert encode_words([WORDS.text(numbers)], WORDS) == [numbers]


def test_a_word_that_the_vocabulary_lacks_is_unknown():
    assert encode_words(["Dear Otto"], WORDS) == [[2, UNKNOWN]]
    assert word_tokens("It's 1,204 €") == ["It", "'", "s", "1", ",", "2", "0", "4", "€"]


# -- how much came out ------------------------------------------------------------------------------------------------
def test_figures_of_a_text():
    truth = [2, 3, 4, 5, 6, 7, 8, 9, 0, 0]  # Dear Anna, pay 47 euros.
    exact = text_figures(truth, truth, WORDS)
    assert (exact.in_place, exact.in_set, exact.exact, exact.run, exact.facts) == (1.0, 1.0, True, 8, 1.0)
    shifted = text_figures([3, 4, 5, 6, 7, 8, 9, 2, 0, 0], truth, WORDS)
    assert (shifted.in_place, shifted.in_set, shifted.run, shifted.facts) == (0.0, 1.0, 7, 0.5)  # 47, but not Anna
    blank = text_figures([0] * 10, truth, WORDS)
    assert (blank.in_place, blank.in_set, blank.run, blank.facts) == (0.0, 0.0, 0, 0.0)
    assert text_figures([5], [5], WORDS).facts is None


def test_rouge_counts_words_pairs_and_the_longest_subsequence():
    truth = [2, 3, 4, 5, 6, 7, 8, 9, 0, 0]  # Dear Anna, pay 47 euros.
    exact, blank = text_figures(truth, truth, WORDS), text_figures([0] * 10, truth, WORDS)
    assert (exact.rouge_1, exact.rouge_2, exact.rouge_l) == (1.0, 1.0, 1.0)
    assert (blank.rouge_1, blank.rouge_2, blank.rouge_l) == (0.0, 0.0, 0.0)
    assert rouge("pay 47 euros, Anna", "Dear Anna, pay 47 euros.") == (8 / 9, 4 / 7, 6 / 9)
    assert rouge("Zürich", "ZÜRICH!") == (1.0, 0.0, 1.0)  # one word has no pair, and is a word in any script


@settings(max_examples=200, deadline=None)
@given(*[st.text("abAB 1.,-_'", max_size=40)] * 2)
def test_rouge_is_that_of_the_package(guess, truth):
    from rouge_score.rouge_scorer import RougeScorer  # here: its imports take seconds

    theirs = RougeScorer(["rouge1", "rouge2", "rougeL"]).score(truth, guess)
    assert rouge(guess, truth) == pytest.approx([score.fmeasure for score in theirs.values()])


@pytest.mark.parametrize("space", ["", "Ġ", "▁"])
def test_names_and_numbers_are_drawn_anew_and_nothing_else(space):
    words = ("[pad]", "pay", "Anna", "Otto", "Vera", "7", "8", ".")
    vocabulary = Vocabulary(tuple(space + word if word.isalpha() else word for word in words))
    text = torch.tensor([[1.0, 2, 5, 7, 2, 0, 0]]).expand(50, -1)  # pay Anna 7. Anna
    drawn = redraw_facts(text, vocabulary, torch.Generator().manual_seed(0))
    assert torch.equal(drawn[:, [0, 3, 4, 5, 6]], text[:, [0, 3, 4, 5, 6]])  # the second Anna begins a sentence
    assert set(drawn[:, 1].tolist()) == {2.0, 3.0, 4.0} and set(drawn[:, 2].tolist()) == {5.0, 6.0}
    assert torch.equal(redraw_facts(text, Vocabulary(("[pad]",) + ("pay",) * 7), torch.Generator()), text)


def test_older_scores_of_texts_are_read_and_agree_with_newer_ones():
    old = {"guess": "pay", "truth": "pay 7", "in_set": 0.5, "exact": False, "run": 1, "facts": 0.0}
    new = TextScore(**old, rouge_1=0.5, rouge_2=0.0, rouge_l=0.5)
    assert TextScore(**old).model_dump() == old and new.model_dump()["rouge_1"] == 0.5
    assert new.agrees(TextScore(**old)) and not new.agrees(TextScore(**old, rouge_1=0.4))
    scores = [make_score(text) for text in (new, TextScore(**old))]
    assert scores[0].agrees(scores[1]) and not scores[0].agrees(make_score(new.model_copy(update={"run": 2})))
    names = [set(image_metrics(some, 4, 0)) for some in (scores[:1], scores[1:])]
    assert names[0] - names[1] == {"rouge_1", "rouge_2", "rouge_l"}
    assert image_metrics(scores[:1], 4, 0)["rouge_l"]().value == 0.5


def make_score(text):
    """Return the score of a victim with a text."""
    none = dict.fromkeys(("psnr", "rmse", "rmse_raw", "ssim", "label", "confidence", "at_truth"))
    return ImageScore(index=0, probe=0, client=0, evaluations=1, accuracy=0.5, text=text, **none)


def test_padding_is_no_token_that_one_gets_right():
    assert TEXT.accuracy(torch.tensor([2.0, 0, 0, 0]), torch.tensor([2.0, 3, 0, 0])) == 0.5
    assert TEXT.accuracy(torch.tensor([2.4, 3, 7, 7]), torch.tensor([2.0, 3, 0, 0])) == 1.0
    assert TEXT.accuracy(torch.full((2,), torch.nan), torch.tensor([2.0, 3])) == 0.0


def test_a_blind_guess_has_a_token_wherever_some_text_has_one():
    """Padding stood where most texts had ended, which is never right: chance was too low for the long ones."""
    public = torch.tensor([[2.0, 3, 0, 0], [2, 4, 0, 0], [5, 3, 7, 0]])
    assert TEXT.blind_guess(public).tolist() == [2, 3, 7, 0]


def test_guesses_are_matched_to_texts_by_tokens_in_place():
    truth = torch.tensor([[2.0, 3, 4], [5, 6, 7], [8, 9, 0]])
    assert TEXT.match(truth[[2, 0, 1]], truth, (0.0, 9.0)) == [1, 2, 0]
    assert TEXT.blind_guess(torch.tensor([[2.0, 3], [2, 4], [5, 4]])).tolist() == [2.0, 4.0]


def test_shared_pieces_are_marked_and_the_median_text_is_quoted():
    texts = [
        TextScore(guess=guess, truth="Dear Anna, pay 47 euros.", in_set=0.5, exact=False, run=2, facts=None)
        for guess in ("nothing", "Dear Anna, pay 74 euros.", "Dear Anna, pay 47 euros.")
    ]
    scores = [type("Score", (), {"text": text, "accuracy": i / 2})() for i, text in enumerate(texts)]
    assert marked(scores[1]).pieces == (("Dear Anna, pay ", True), ("74", False), (" euros.", True))
    assert marked(scores[0]).pieces == (("nothing", False),)
    assert TEXT.example(scores) == ', for example "Dear Anna, pay 74 euros."' and TEXT.example([]) == ""


# -- where texts come from --------------------------------------------------------------------------------------------
def test_letters_are_a_function_of_the_seed(data):
    again, other = letters("", seed=0, root=None), letters("", seed=1, root=None)
    assert data.sha256() == again.sha256() != other.sha256() and data.vocabulary == other.vocabulary
    assert (len(data.train), len(data.test), data.classes, data.shape) == (640, 160, 4, (24,))
    assert not (data.train.x == UNKNOWN).any() and torch.equal(data.train.y.bincount(), torch.full((4,), 160))
    texts = [data.vocabulary.text(row.tolist()) for row in data.train.x[:50]]
    assert len({*texts}) == 50 and all(text_figures([*map(int, row)], [*map(int, row)], data.vocabulary).facts
                                        for row in data.train.x[:50])  # fmt: skip


def test_a_file_of_texts_is_read_by_its_columns(tmp_path):
    rows = [(i, "you owe me " + "money " * 12 if i % 2 else f"room {i} is cold", "ab"[i % 2]) for i in range(20)]
    path = tmp_path / "mail.csv"
    path.write_text("id,body,class\n" + "".join(f"{i},{text},{label}\n" for i, text, label in rows))
    data = open_dataset(f"text:{path}?length=8", seed=0)
    assert (data.shape, data.classes, len(data.train), len(data.test)) == ((8,), 2, 16, 4)
    assert {data.vocabulary.text(row.tolist()).split()[0] for row in data.train.x} == {"you", "room"}
    assert "10 of 20 texts were cut to 8 tokens" in data.notes[1] and "column body, 2 classes of class" in data.notes[0]
    assert configure(defense="none", dataset=f"text:{path}").model == "transformer"
    assert configure(defense="none", dataset=f"text:{path}", model="gpt").model == "gpt"


def test_a_class_called_none_is_one_and_rows_without_a_token_are_counted(tmp_path):
    """Classes like None and NA went without a word, as pandas reads them; texts of nothing but padding were victims."""
    path, rows = tmp_path / "mail.csv", [("see you", "None"), ("NA", "N/A"), ("all fine here", " ok")] * 8
    rows += [("   ", "ok"), ("", "None"), ("no class", " ")]
    path.write_bytes(("\ufefftext,my label\r\n" + "".join(f"{x},{y}\r\n" for x, y in rows)).encode())
    data = open_dataset(f"text:{path}?label=my label&length=4", seed=0)
    assert data.classes == 3 and "3 classes of my label: N/A, None, ok" in data.notes[0]
    assert (
        len(data.train) + len(data.test) == 24
        and data.notes[1] == "3 of 27 rows have no text or no class and are left out"
    )
    pd.DataFrame({"text": [x for x, _ in rows], "label": [y for _, y in rows]}).to_parquet(tmp_path / "mail.parquet")
    saved = open_dataset(f"text:{tmp_path / 'mail.parquet'}?length=4", seed=0)
    assert saved.train.x.any(1).all() and saved.test.x.any(1).all() and len(saved.train) + len(saved.test) == 24


def test_a_long_word_for_a_class_is_no_text(tmp_path):
    path = tmp_path / "short.csv"
    words = ["quite a positive sentiment", "quite a negative sentiment"]
    path.write_text("text,label\n" + "".join(f"good {i},{words[i % 2]}\n" for i in range(20)))
    assert "texts of column text, 2 classes of label" in open_dataset(f"text:{path}", seed=0).notes[0]
    assert "texts of column text, 2 classes of label" in open_dataset(f"text:{path}?label=label", seed=0).notes[0]
    with pytest.raises(UsageError, match="'text' cannot be both text and class"):
        open_dataset(f"text:{path}?text=text&label=text", seed=0)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("?txt=body", "no option of the data set 'text' named 'txt'; did you mean 'text'"),
        ("?text=boddy", "no column named 'boddy'"),
        ("?length=0", "length='0' cannot be used: it must be 1 to 4096"),
        ("?label=id", "has 6 distinct values in 6 rows; name the column of classes"),
    ],
)
def test_what_cannot_be_read_as_texts_is_refused_in_one_sentence(tmp_path, query, words):
    path = tmp_path / "mail.csv"
    path.write_text("id,body,class\n" + "".join(f"{i},letter {i},{i % 2}\n" for i in range(6)))
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        open_dataset(f"text:{path}{query}", seed=0)
    with pytest.raises(UsageError, match=r"no file of texts; give one that ends in \.csv"):
        open_dataset(f"text:{tmp_path / 'other.txt'}" if (tmp_path / "other.txt").write_text("x") else "", seed=0)


def test_texts_of_a_folder_that_the_library_datasets_saved_keep_their_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"good day number {i}" for i in range(30)], "label": [i % 2 for i in range(30)]}
    saved = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict({"test": saved.select(range(6)), "train": saved}).save_to_disk(str(tmp_path / "both"))
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"validation": saved}).save_to_disk(str(tmp_path / "none"))
    both, one = (open_dataset(f"text:{tmp_path / name}?length=6", seed=0) for name in ("both", "one"))
    assert (len(both.train), len(both.test), both.name, both.classes) == (30, 6, "text:both", 2)
    assert both.vocabulary.text(both.test.x[3].int().tolist()) == "good day number 3" and int(both.test.y[3]) == 1
    assert (len(one.train), len(one.test)) == (24, 6)
    with pytest.raises(UsageError, match="has the splits validation; it must have one called train"):
        open_dataset(f"text:{tmp_path / 'none'}", seed=0)
    with pytest.raises(UsageError, match="is no folder that `datasets` saved"):
        open_dataset(f"text:{tmp_path}", seed=0)


def test_a_tokenizer_of_a_file_makes_the_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"[PAD]": 0, "[UNK]": 1, "pay": 2, "##ing": 3}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "paying pay\tx\npay\ty\n" * 6)
    data = open_dataset(f"text:{tmp_path / 'a.tsv'}?tokenizer={tmp_path}&length=4", seed=0)
    assert {tuple(row.tolist()) for row in data.train.x} == {(2.0, 3.0, 2.0, 0.0), (2.0, 0.0, 0.0, 0.0)}
    assert data.vocabulary.text([2, 3]) == "paying" and not any("padding" in note for note in data.notes)
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text().replace("[PAD]", "!"))
    data = open_dataset(f"text:{tmp_path / 'a.tsv'}?tokenizer={tmp_path}&length=4", seed=0)
    assert data.notes[-1] == "token 0, '!', counts as padding: it is passed over in texts"
    with pytest.raises(UsageError, match="is no tokenizer of the Hugging Face format"):
        open_dataset(f"text:{tmp_path / 'a.tsv'}?tokenizer={tmp_path / 'a.tsv'}", seed=0)


# -- networks ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["transformer", "gpt"])
def test_padding_changes_nothing_and_vectors_stand_for_embeddings(model):
    plan = Plan(net_spec(model, (6,), 3, {"vocabulary": 10, "width": 8, "heads": 2}), 1)
    params = {name: value.double() for name, value in initial(plan.spec, 0).items()}
    short = torch.tensor([[2.0, 3, 4, 0, 0, 0]], dtype=torch.float64)
    cut = plan.net(params, short[:, :3])
    torch.testing.assert_close(plan.net(params, short), cut)
    whole = torch.tensor([[2.0, 3, 4, 5, 6, 7]], dtype=torch.float64)
    vectors = params[plan.net.embedding][whole[0].long()][None]
    torch.testing.assert_close(plan.net(params, vectors), plan.net(params, whole))
    changed = whole.clone()
    changed[0, 0] = 9
    assert not torch.allclose(plan.net(params, changed), plan.net(params, whole))
    assert plan.net(params, torch.zeros_like(whole)).isfinite().all()  # padding alone


def test_gradients_of_texts_are_mapped_over_examples():
    plan = Plan(net_spec("transformer", (6,), 3, {"vocabulary": 10, "width": 8, "heads": 2}), 1)
    params, x, y = initial(plan.spec, 0), torch.randint(1, 10, (4, 6)).float(), one_hot(torch.arange(4) % 3, 3).float()
    _ = plan.net  # built here: nothing can be drawn under vmap

    def slope(a, b):
        return grad(lambda p: plan.objective(p, a[None], b[None], torch.ones(1)))(params)

    mapped = vmap(slope)(x, y)
    for i in range(4):
        for name, value in slope(x[i], y[i]).items():
            torch.testing.assert_close(mapped[name][i], value)


def test_each_kind_of_data_gets_a_network_that_fits_where_none_is_named():
    def chosen(dataset, **options):
        config = configure(defense="none", dataset=dataset, **options)
        return config.model, config.loss

    assert chosen("letters") == ("transformer", "cross_entropy")
    assert chosen("csv:rows.csv?target=y") == ("mlp", "cross_entropy") and chosen("shapes") == ("unet", "bce")
    assert chosen("csv:rows.csv?target=y", loss="squared") == ("mlp", "squared")
    assert chosen("shapes", model="cnn", loss="squared") == ("cnn", "squared")
    rows = configure(defense="pbpfl", dataset="csv:rows.csv?target=y&task=regression")
    assert rows == configure(defense="pbpfl", dataset="csv:rows.csv?target=y&task=regression", model="mlp")


def test_quick_searches_of_texts_are_short_but_behind_adapters():
    whole, adapters = (configure(defense="none", dataset="letters", model_options=o) for o in ({}, {"lora": 4}))
    assert whole.settings["feature_inversion.joint_budget"] == 60 and whole.settings["ig.budget"] == 40
    assert not {"feature_inversion.joint_budget", "ig.budget"} & {*adapters.settings}
    assert adapters.settings["adaptive_server.budget"] == 600, "as for other kinds"


def test_texts_need_a_network_of_texts_and_no_other_data_one():
    with pytest.raises(UsageError, match="has texts, but model 'mlp' takes no texts; use 'transformer', 'gpt', or"):
        make_task(configure(defense="none", dataset="letters", model="mlp"))
    with pytest.raises(UsageError, match="it takes texts"):
        make_task(configure(defense="none", dataset="digits", model="gpt"))


# -- what a gradient gives away ---------------------------------------------------------------------------------------
def gradient_of(plan, params, x, y):
    own = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = plan.objective(own, x, y, torch.ones(len(x)))
    return dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))


class _Seen:
    """A view that holds one gradient."""

    def __init__(self, plan, evidence):
        self.plan, self.defense = plan, self
        self._evidence = [evidence]

    def evidence(self, view):
        return self._evidence


def read(data, model="transformer", count=1, start=0, change=lambda g: g, noise=None, learned=False, **options):
    """Return the guess of `token_rows` about some letters, and the share of each that is right.

    learned: whether adapters are not 0 any more.
    """
    plan = Plan(net_spec(model, data.shape, 4, {"vocabulary": len(data.vocabulary), **options}), 1)
    plan = Plan(plan.spec, 1, data_range=data.data_range, kind="text", vocabulary=data.vocabulary)
    params, part = initial(plan.spec, 0), data.train.take(torch.arange(start, start + count))
    for name in params:
        if learned and name.endswith("up.weight"):
            params[name] = 0.1 * torch.randn(params[name].shape, generator=torch.Generator().manual_seed(1))
    observed = change(gradient_of(plan, params, part.x, part.y))
    slot = Slot(0, 0)
    evidence = Evidence((slot,), observed, lambda x, y: observed, params, noise=noise)
    (guess,) = TokenRows().run(_Seen(plan, evidence), [Challenge((slot,), count)], torch.Generator().manual_seed(0))
    order = TEXT.match(guess.x, part.x, data.data_range)
    return guess, [TEXT.accuracy(guess.x[i], text) for i, text in zip(order, part.x, strict=True)]


@pytest.mark.parametrize(("model", "count"), [("transformer", 1), ("transformer", 2), ("gpt", 1), ("gpt", 3)])
@pytest.mark.parametrize("frozen", [False, True])
def test_letters_are_read_word_for_word_off_one_gradient(data, model, count, frozen):
    guess, shares = read(data, model, count, 10, frozen_embedding=frozen)
    assert shares == [1.0] * count and guess.is_exact and guess.confidence < 0.03


def test_a_batch_of_four_is_sorted_into_its_letters(data):
    guess, shares = read(data, "transformer", 4, 10)  # 76 pairs of a token and a place lie among 608 that fit
    assert shares == [1.0] * 4 and guess.is_exact


@pytest.mark.parametrize("model", ["transformer", "gpt"])
def test_copies_of_a_text_in_one_batch_are_read_as_often_as_they_stand_there(data, model):
    """No row tells copies apart: of an encoder the attack ended in an exception, and its cell without a figure."""
    copies = Split(data.train.x[[10, 10]], data.train.y[[10, 10]], 4)
    _, shares = read(replace(data, train=copies), model, 2)
    assert shares == [1.0, 1.0]


@pytest.mark.parametrize("model", ["transformer", "gpt"])
def test_adapters_give_a_text_away_whose_length_is_below_their_rank(data, model):
    guess, shares = read(data, model, 1, 10, lora=32)
    assert shares == [1.0] and guess.is_exact
    guess, shares = read(data, model, 1, 10, lora=4)
    assert shares[0] < 0.35 and not guess.is_exact


@pytest.mark.parametrize("model", ["transformer", "gpt"])
def test_adapters_that_have_learned_give_away_texts_longer_than_their_rank(data, model):
    """The letter has 22 tokens. As long as adapters are 0, their first factor has no gradient."""
    guess, shares = read(data, model, 1, 10, learned=True, lora=6)
    assert shares == [1.0] and guess.is_exact
    guess, shares = read(data, model, 1, 10, learned=True, lora=1)
    assert shares[0] < 0.5 and not guess.is_exact


@pytest.mark.parametrize("model", ["transformer", "gpt"])
@pytest.mark.parametrize(("width", "rank"), [(24, 1), (24, 8), (28, 1), (28, 2), (32, 1)])
def test_a_text_as_long_as_the_network_is_wide_is_not_called_exact(data, model, width, rank):
    """Nearly any 22 to 24 tokens span the rows of such adapters."""
    for start in (10, 20):
        guess, _ = read(data, model, 1, start, learned=True, lora=rank, width=width)
        assert not guess.is_exact and guess.confidence == 1.0


def test_a_factor_and_a_sum_change_nothing(data):
    guess, shares = read(data, change=lambda g: {name: -1e-3 * value for name, value in g.items()})
    assert shares == [1.0] and guess.is_exact


def test_noise_alone_says_nothing_and_is_not_called_exact(data):
    draws = torch.Generator().manual_seed(1)

    def noise(gradient):
        return {name: torch.randn(value.shape, generator=draws) for name, value in gradient.items()}

    for law in (None, Noise("gaussian", 1.0)):
        guess, shares = read(data, change=noise, noise=law)
        assert not guess.is_exact and shares[0] < 0.35 and guess.confidence > 0.1


def test_small_noise_is_passed_over_and_large_noise_drowns_the_rows(data):
    def noisy(std):
        draws = torch.Generator().manual_seed(2)
        return lambda g: {n: v + std * torch.randn(v.shape, generator=draws) for n, v in g.items()}

    shares = [read(data, change=noisy(std), noise=Noise("gaussian", std))[1][0] for std in (1e-7, 1e-4, 1e-2)]
    assert shares[:2] == [1.0, 1.0] and shares[2] < 0.35


def test_noise_that_leaves_no_pairs_to_sort_never_sends_an_empty_batch_through_the_network(data, monkeypatch):
    inputs, draws, std = TextReader.inputs, torch.Generator().manual_seed(3), 1e-3

    def as_a_saved_network(reader, texts, group):
        assert len(texts), "a saved BERT cannot reshape it"
        return inputs(reader, texts, group)

    def noisy(gradient):
        return {n: v + std * torch.randn(v.shape, generator=draws) for n, v in gradient.items()}

    monkeypatch.setattr(TextReader, "inputs", as_a_saved_network)
    guess, _ = read(data, count=2, start=100, change=noisy, noise=Noise("gaussian", std))
    assert guess.x.count_nonzero() and not guess.is_exact


def test_a_gradient_that_lacks_the_first_layers_or_is_not_finite_gives_empty_texts(data):
    for change in (
        lambda g: {name: value for name, value in g.items() if name.startswith("head")},
        lambda g: {name: torch.full_like(value, torch.nan) for name, value in g.items()},
        lambda g: {name: torch.zeros_like(value) for name, value in g.items()},
    ):
        guess, shares = read(data, change=change)
        assert shares == [0.0] and not guess.is_exact and (guess.x == PADDING).all()


def test_the_answer_is_a_function_of_the_seed(data):
    first, second = (read(data, "transformer", 2)[0] for _ in range(2))
    assert torch.equal(first.x, second.x) and first.layers == second.layers


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 1000))
def test_rows_lie_in_their_own_space_and_others_do_not(count, seed):
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, 16, generator=draws)
    space = row_space([torch.randn(8, count, generator=draws) @ rows], 0.0, count)
    assert float(space.distance(rows).max()) < 0.02 and space.free == pytest.approx(1 - count / 16, abs=0.01)
    assert float(space.distance(torch.randn(50, 16, generator=draws)).min()) > 0.1


def test_a_blind_guess_in_any_order_shares_most_with_texts():
    texts = torch.tensor([[5, 5, 2, 0], [5, 3, 5, 0], [5, 4, 0, 0]])
    assert commonest_tokens(texts) == (5, 5, 4, 2)
    assert [share_in_text((5, 5, 4, 2), text) for text in texts.tolist()] == [1.0, pytest.approx(2 / 3), 1.0]
    assert share_in_text((5, 5), [0, 0]) == 0.0 == share_in_text((0, 0), [3, 0])


@pytest.mark.parametrize(("inputs", "sizes", "full"), [
    (12, [1.0] * 8, True),
    (12, [1.0] * 7 + [1e-7], True),  # rounding hides a row
    (12, [1.0] * 5 + [0.0] * 3, False),  # five inputs were read
    (8, [1.0] * 8, False),
])  # fmt: skip
def test_a_space_is_full_where_its_rows_may_mix_more_inputs(inputs, sizes, full):
    draws = torch.Generator().manual_seed(0)
    rows = torch.linalg.qr(torch.randn(16, 8, generator=draws))[0].T
    assert row_space([torch.tensor(sizes)[:, None] * rows], 0.0, inputs).full == full


# -- searches ---------------------------------------------------------------------------------------------------------
def test_vectors_become_the_tokens_of_the_nearest_embeddings():
    table = torch.eye(5)
    assert nearest_tokens(table[[1, 4]] + 0.1, table).tolist() == [1.0, 4.0]
    assert nearest_tokens(table[[PADDING]], table).item() != PADDING  # it has no vector of its own
    assert nearest_tokens(torch.full((2, 5), torch.nan), table).isnan().all()


def small_text():
    """Return the plan of a small network, evidence about one text of it, and the text."""
    plan = Plan(net_spec("transformer", (4,), 4, {"vocabulary": 12, "width": 16, "heads": 2, "depth": 1}), 1)
    plan = Plan(plan.spec, 1, data_range=(0.0, 11.0), kind="text", vocabulary=Vocabulary(tuple("pabcdefghijk")))
    params, x, y = initial(plan.spec, 0), torch.tensor([[3.0, 7, 2, 9]]), one_hot(torch.tensor([1]), 4).float()
    observed = gradient_of(plan, params, x, y)

    def simulate(vectors, labels):
        own = {name: value.to(vectors.dtype).requires_grad_() for name, value in params.items()}
        loss = plan.objective(own, vectors[0], labels[0], torch.ones(1, dtype=vectors.dtype))
        slopes = torch.autograd.grad(loss, list(own.values()), create_graph=True, materialize_grads=True)
        return dict(zip(own, slopes, strict=True))

    return plan, Evidence((Slot(0, 0),), observed, simulate, params), x


def test_a_search_follows_vectors_and_answers_by_tokens():
    plan, evidence, x = small_text()
    searched = plan.of_vectors()
    assert searched.spec.shape == (4, 16) and searched.net is plan.net and searched.of_vectors() is searched
    attack, challenge = DLG(budget=300, restarts=0), Challenge(evidence.unit, 1)
    (guess,) = attack.answer([evidence], searched, [challenge], torch.Generator().manual_seed(0))
    assert nearest_tokens(guess.x, plan.token_table(evidence.params)).tolist() == x.tolist()


def test_lamp_finds_a_text_within_its_budget_and_says_the_same_again():
    plan, evidence, x = small_text()
    attack, challenge = Lamp(budget=600), Challenge(evidence.unit, 1)
    first, again = (attack.answer([evidence], plan, [challenge], torch.Generator().manual_seed(0))[0] for _ in range(2))
    assert first.x.tolist() == x.tolist() and torch.equal(first.x, again.x)
    assert 600 <= first.evaluations <= 605 and not first.is_exact
    assert attack.suits(plan) and not attack.suits(plan.of_vectors())


@given(st.integers(1, 12), st.integers(0, 999))
def test_a_move_keeps_every_token(length, seed):
    assert sorted(moved_order(length, torch.Generator().manual_seed(seed))) == list(range(length))


def test_public_texts_say_which_word_follows_another():
    prior = WordPairs.of(torch.tensor([[2.0, 3, 4, 0], [2, 3, 5, 0], [6, 2, 3, 0]]))
    usual, mixed = (prior.surprise(torch.tensor([row])) for row in ([2, 3, 4, 0], [3, 2, 0, 4]))
    assert 0 < usual < mixed and WordPairs().surprise(torch.ones(1, 4)) == 0.0


def test_a_reading_on_a_board_is_no_markup():
    text = MarkedText("<b>a|b*</b> and one word", (("<i>x|", False), (" one *word* ", True)), None)
    lines = text_lines([TextSample("batch 1", text.original, (("dp|1", text),))])
    assert lines[-2] == r"| dp\|1 | &lt;i&gt;x\| **one \*word\***  | - |"
    assert "<b>" not in "".join(lines)


# -- from the command line to the page --------------------------------------------------------------------------------
def test_an_evaluation_of_letters_quotes_one(tmp_path):
    few = dict(
        victims=12, rounds=4, clients=2, train=160, candidates=20, workers=1, stages=("init",), attack_batch=(1,)
    )
    out = tmp_path / "out"
    evaluation = evaluate(defense="spn", grid=(0.1,), dataset="letters", attacks=("token_rows", "dlg"), out=out,
                          settings={"dlg.budget": 3}, **few)  # fmt: skip
    assert evaluation.reliable
    scores = [v for record in Store(out).load_all() if record.config.attack.id == "token_rows" for v in record.victims]
    assert {score.text.exact for score in scores if score.accuracy == 1.0} == {True}
    page = (out / "leaderboard.html").read_text()
    assert "<h4>Texts</h4>" in page and "<mark>" in page and "for example &#34;" in page
    board = summary_of(Store(out), "letters")
    sample = board.texts[0]
    assert [name for name, _ in sample.readings] == ["undefended", "spn at alpha2=0.1"]
    assert f"**{sample.original}**" in board.markdown() and f"<mark>{sample.original}</mark>" in board.html()
    verified = full_findings(out)
    assert not verified.problems and "the network is not built here" not in str(verified)


def test_an_evaluation_of_nothing_but_controls_says_what_leaks_of_the_undefended_model(tmp_path):
    about = dict(defense="none", dataset="letters", attacks=("token_rows",), stages=("init",), attack_batch=(1,))
    made = evaluate(**about, rounds=1, victims=8, clients=4, out=tmp_path / "out", workers=1)
    begin = "Only controls were evaluated; of the undefended model texts are rebuilt at 100% of tokens in place, for"
    assert made.answer.headline.words.startswith(begin) and '"' in made.answer.headline.words
    (table,) = made.answer.every
    assert not made.answer.tables and table.rows[0].verdict == "undefended"
    assert "At a glance" in (tmp_path / "out" / "leaderboard.html").read_text()
