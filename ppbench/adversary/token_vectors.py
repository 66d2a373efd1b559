"""Texts for attacks that follow a gradient: vectors in the place of embeddings are searched, then read as tokens.

Token numbers have no slope. A network of texts takes vectors [L, D] in the place of its tokens' embeddings
(`Classifier.embedding`), so an attack that searches inputs gets a view whose inputs are these, as in DLG and TAG (Deng
et al., EMNLP 2021); each vector of its answer becomes the token of the nearest embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor

from ppbench.base.registry import load_plugin
from ppbench.base.tree import Params
from ppbench.base.vocabulary import PADDING
from ppbench.federation.plan import Plan
from ppbench.federation.view import View


class _Searching(Protocol):
    """An attack (`adversary.attack`), as far as it matters here."""

    kind: str
    next_token: bool
    reads_tokens: bool
    adaptive: bool

    def evidence(self, view: View) -> list[Any]:
        """Return the evidence to match."""


RunFunction = Callable[..., list[Any]]
"""Maps an attack, a view, challenges and a generator to guesses."""


TEXT_READER = "token_rows"
"""The attack that adaptive ones try first: nothing explains an observation better than an exact guess."""


def _searched(attack: _Searching, plan: Plan) -> bool:
    return plan.vocabulary is not None and not attack.reads_tokens and load_plugin("questions", attack.kind).inputs


def suits_vectors(suits: Callable[[Any, Plan], bool]) -> Callable[[Any, Plan], bool]:
    """Return an attack's `suits`: on the plan of vectors where it searches texts, and no where it lacks classes."""

    @wraps(suits)
    def suits_plan(attack: _Searching, plan: Plan) -> bool:
        if plan.next_token and not attack.next_token:
            return False
        return suits(attack, plan.of_vectors() if _searched(attack, plan) else plan)

    return suits_plan


def run_on_vectors(run: RunFunction) -> RunFunction:
    """Return an attack's `run` that searches vectors where inputs are texts, and answers by token numbers.

    Texts that are their own targets have no labels.
    """

    @wraps(run)
    def on_vectors(attack: _Searching, view: View, challenges: Sequence[Any], generator: torch.Generator) -> list[Any]:
        if view.plan.next_token:
            return [replace(guess, y=None) for guess in answered(attack, view, challenges, generator)]
        return answered(attack, view, challenges, generator)

    def answered(attack: _Searching, view: View, challenges: Sequence[Any], generator: torch.Generator) -> list[Any]:
        if not _searched(attack, view.plan):
            return run(attack, view, challenges, generator)
        exact = _read(attack, view, challenges) if attack.adaptive else {}
        left = [challenge for i, challenge in enumerate(challenges) if i not in exact]
        table = view.plan.token_table(_sent_weights(view)).cpu()
        vectors = replace(view, plan=view.plan.of_vectors(float(table.abs().max())))
        searched = iter(run(attack, vectors, left, generator) if left else ())
        return [exact[i] if i in exact else _as_tokens(next(searched), table) for i in range(len(challenges))]

    return on_vectors


def _read(attack: _Searching, view: View, challenges: Sequence[Any]) -> dict[int, Any]:
    """Return the exact guesses of `TEXT_READER` from an adaptive attack's evidence, by the challenge's number."""
    reader = load_plugin("attacks", TEXT_READER)()
    if not reader.suits(view.plan):
        return {}
    draws = torch.Generator().manual_seed(0)
    guesses = reader.answer(attack.evidence(view), view.plan, challenges, draws)
    return {i: guess for i, guess in enumerate(guesses) if guess.is_exact}


def _sent_weights(view: View) -> Params | None:
    """Return the first weights with an embedding that a client was sent, None where none was seen."""
    name = view.plan.net.embedding
    sent = (weights for exchange in view.exchanges() for weights in _holding(exchange.request, name))
    return next(sent, None)


def _holding(tree: Any, name: str) -> Iterator[Params]:
    """Yield the mappings in a message that have an entry `name`."""
    if isinstance(tree, Mapping):
        if isinstance(tree.get(name), Tensor):
            yield dict(tree)
        parts: Iterable[Any] = tree.values()
    elif is_dataclass(tree):
        parts = vars(tree).values()
    else:
        parts = tree if isinstance(tree, tuple | list) else ()
    for part in parts:
        yield from _holding(part, name)


def _as_tokens(guess: Any, table: Tensor) -> Any:
    def tokens(x: Tensor) -> Tensor:
        return nearest_tokens(x, table)

    path = tuple((mark, tokens(x)) for mark, x in guess.path)
    x = None if guess.x is None else tokens(guess.x)
    return replace(guess, x=x, path=path, others=tuple(map(tokens, guess.others)))


def nearest_tokens(x: Tensor, table: Tensor) -> Tensor:
    """Return the token numbers [..., L] float32 of the embeddings in `table` [V, D] nearest to vectors [..., L, D].

    Never padding, which has no vector of its own; NaN where a vector is not finite.
    """
    rows = x.detach().cpu().float().flatten(0, -2)
    distances = torch.cdist(rows.nan_to_num(0.0, 0.0, 0.0), table.float()[PADDING + 1 :])
    tokens = (distances.argmin(1) + PADDING + 1).float()
    tokens[~rows.isfinite().all(1)] = torch.nan
    return torch.reshape(tokens, x.shape[:-1])
