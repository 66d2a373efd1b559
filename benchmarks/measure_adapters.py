"""What one gradient of adapters of low rank (LoRA) gives away of one text, by rank: results/adapters.json.

    OMP_NUM_THREADS=1 python benchmarks/measure_adapters.py [REVIEWS.tsv MINILM]

Letters on `transformer` and `gpt` (width 96, initial weights): a letter has 22 to 24 tokens. With REVIEWS.tsv (columns
review and rating) and MINILM (a saved BERT with its tokenizer), which need `transformers` and `tokenizers`: 32 tokens
of reviews on MiniLM. Adapters of queries and values, or of both with keys, as the network has them. They are 0 at
first; here they are drawn with standard deviation 0.02, as if they had learned. `token_rows`, one text each, seed 0.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge
from ppbench.attacks.reconstruction.row_spaces import TextReader, linear_groups, spaces_of
from ppbench.attacks.reconstruction.token_rows import TokenRows
from ppbench.base.registry import load_plugin
from ppbench.federation.evidence import Evidence
from ppbench.federation.plan import Plan
from ppbench.federation.wire import Slot
from ppbench.metrics.modality import TEXT
from ppbench.nets.net import initial, net_spec
from ppbench.task.dataset import Dataset
from ppbench.task.user_data import open_dataset

RESULTS = Path(__file__).parent / "results" / "adapters.json"
RANKS, TEXTS, FIRST, SPREAD = (1, 2, 4, 6, 8, 12, 16), 8, 100, 0.02


def learned(plan: Plan) -> dict[str, Tensor]:
    """Return the initial weights, with adapters that are drawn."""
    params, draws = initial(plan.spec, 0), torch.Generator().manual_seed(1)
    grown = {n: SPREAD * torch.randn(v.shape, generator=draws) for n, v in params.items() if n.endswith("up.weight")}
    return {**params, **grown}


def read(plan: Plan, x: Tensor, y: Tensor) -> dict[str, float]:
    """Return the share of a text's tokens [1, L] read in place, the rows that they are read off, and CPU seconds."""
    params = {name: value.requires_grad_() for name, value in learned(plan).items()}
    loss = plan.objective(params, x, y, torch.ones(1))
    observed = dict(zip(params, torch.autograd.grad(loss, [*params.values()]), strict=True))
    params = {name: value.detach() for name, value in params.items()}
    slot, began = Slot(0, 0), time.process_time()
    evidence = Evidence((slot,), observed, lambda x, y: observed, params)
    (guess,) = TokenRows().answer([evidence], plan, [Challenge((slot,), 1)], torch.Generator().manual_seed(0))
    assert guess.x is not None
    seconds, reader = time.process_time() - began, TextReader(plan, params, linear_groups(plan))
    rows = spaces_of(reader, observed, [0], 0.0, 1)[0].rank
    return {"right": TEXT.accuracy(guess.x[0], x[0]) or 0.0, "rows": rows, "seconds": seconds}


def row(name: str, model: str, data: Dataset, options: dict[str, str | int]) -> dict[str, str | int | float]:
    """Return what is read of some texts, on average."""
    spec = net_spec(model, data.shape, data.classes, {"vocabulary": len(data.vocabulary or ()), **options})
    plan = Plan(spec, 1, data_range=data.data_range, kind="text", vocabulary=data.vocabulary)
    texts = [data.train.take(torch.tensor([i])) for i in range(FIRST, FIRST + TEXTS)]
    results = [read(plan, text.x, text.y) for text in texts]
    return {
        "network": name,
        "rank": options["lora"],
        "rows": round(results[0]["rows"]),
        "tokens": round(statistics.mean(int((text.x != 0).sum()) for text in texts)),
        "right": round(statistics.mean(one["right"] for one in results), 3),
        "exact": sum(one["right"] == 1 for one in results),
        "texts": TEXTS,
        "seconds": round(statistics.median(one["seconds"] for one in results), 2),
    }


def main(words: Sequence[str]) -> None:
    """Measure all rows, print them, and write the file."""
    letters = load_plugin("datasets", "letters")("", seed=0, root=Path())
    cases: list[tuple[str, str, Dataset, dict[str, str | int]]] = [
        (f"`{model}`, width 96", model, letters, {}) for model in ("transformer", "gpt")
    ]
    if words:
        reviews, folder = words
        place = f"text:{reviews}?text=review&label=rating&length=32&tokenizer={folder}"
        cases.append(("MiniLM, width 384", "hf", open_dataset(place, seed=0), {"weights": folder}))
    rows = []
    for name, model, data, options in cases:
        for rank in RANKS:
            rows.append(row(name, model, data, {**options, "lora": rank}))
            print(json.dumps(rows[-1]), flush=True)
    RESULTS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
