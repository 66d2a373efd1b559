"""Texts by a search over vectors that alternates with moves of whole tokens, under a prior of language.

Balunovic, Dimitrov, Jovanovic and Vechev, LAMP, NeurIPS 2022. Adam follows the cosine distance of gradients, tensor by
tensor, and the mean norm of embeddings; then tokens are swapped and moved, and what lowers distance plus the prior's
surprise is kept. The paper's prior is GPT-2. Here it is the pairs of words in the public texts (`--public 0.5`), since
nothing is ever downloaded; without public texts, moves count by the gradient alone.

Three letters, one each, untrained encoder, 800 evaluations: 82 to 100 % of tokens in place, under declared noise of
0.003 77 to 89 %, of 0.02 73 to 89 %, with the prior the same or fewer; `dlg` on vectors has 100 % and 91 to 100 % in
half the time. Beside LAMP's own code: docs/benchmarks.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ppbench.adversary.attack import Challenge, Guess
from ppbench.adversary.token_vectors import nearest_tokens
from ppbench.attacks.reconstruction.search.starts import ImageSearch, PosedVictim
from ppbench.base.vocabulary import PADDING
from ppbench.federation.bounds import NonNegative, Positive, PositiveInt
from ppbench.federation.evidence import Measure
from ppbench.federation.plan import Plan
from ppbench.federation.view import View

DECAY, DECAY_EVERY = 0.89, 50
"""Factor of the step size, and steps after which it applies (the paper's)."""
SMOOTHED = 1.0
"""Occurrences that a word's own frequency adds to those of its pairs."""


@dataclass(frozen=True)
class WordPairs:
    """How often tokens, and pairs of neighbors, stand in texts."""

    words: Counter[int] = field(default_factory=Counter)
    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, texts: Tensor) -> WordPairs:
        """Return the counts of texts [N, L]; padding counts as the word that ends one."""
        rows = [[int(token) for token in row] for row in texts.tolist()]
        return cls(Counter(t for row in rows for t in row), Counter(pair for row in rows for pair in pairwise(row)))

    def surprise(self, texts: Tensor) -> float:
        """Return the mean of -log P(token | the one before) over texts [N, L], in nats; 0 where nothing is known."""
        total = sum(self.words.values())
        if not total:
            return 0.0
        logs = [
            math.log((self.pairs[a, b] + SMOOTHED * (self.words[b] + 1) / total) / (self.words[a] + 2 * SMOOTHED))
            for row in texts.tolist()
            for a, b in pairwise(int(token) for token in row)
        ]
        return -sum(logs) / max(len(logs), 1)


@dataclass(frozen=True)
class Lamp(ImageSearch):
    """LAMP, see the module. Labels are read off the head first; texts fill the whole length.

    Attributes (and `budget`: gradient evaluations per victim, those of moves with them):
        rate: of Adam. size_weight: of the squared difference of the mean norms of vectors and of embeddings.
        language: weight of the prior's surprise, in nats. starts: random ones, of which the nearest is followed.
        stretch: steps between moves. moves: of tokens that are tried each time.
    """

    name: ClassVar[str] = "lamp"
    next_token: ClassVar[bool] = True
    version: ClassVar[str] = "2"
    reads_tokens: ClassVar[bool] = True
    standard: ClassVar[bool] = False
    reference: ClassVar[str] = "Balunovic, Dimitrov, Jovanovic and Vechev, LAMP, NeurIPS 2022"

    budget: PositiveInt = 1000
    rate: Positive = 0.01
    size_weight: NonNegative = 1.0
    language: NonNegative = 0.002
    starts: PositiveInt = 20
    stretch: PositiveInt = 75
    moves: PositiveInt = 50

    def suits(self, plan: Plan) -> bool:
        """Return whether the network takes token numbers, or vectors in their place."""
        return plan.vocabulary is not None and bool(plan.net.embedding)

    def run(self, view: View, challenges: Sequence[Challenge], generator: torch.Generator) -> list[Guess]:
        """Return one guess per challenge, a start of other inputs than texts; UsageError as `check`."""
        if not self.suits(view.plan):
            return [replace(guess, evaluations=1) for guess in self.answer([], view.plan, challenges, generator)]
        prior = WordPairs() if view.public is None else WordPairs.of(view.public.x)
        attack = partial(self._searched, prior=prior)
        return self.answer(self.evidence(view), view.plan, challenges, generator, attack)

    def attack(self, victims: Sequence[PosedVictim]) -> list[Guess]:
        """Return the guesses for victims without a prior."""
        return self._searched(victims, WordPairs())

    def _searched(self, victims: Sequence[PosedVictim], prior: WordPairs) -> list[Guess]:
        return [_Search(self, victim, prior).guess() for victim in victims]


class _Search:
    """The search for one victim: its evidence, weights and draws."""

    def __init__(self, attack: Lamp, victim: PosedVictim, prior: WordPairs) -> None:
        assert victim.evidence is not None  # those without are not searched
        self.attack, self.prior, self.draws = attack, prior, victim.generator
        # As in the paper tensor by tensor, but under noise all together: small tensors are drowned first.
        measure: Measure = "tensors" if victim.evidence.noise is None else "cosine"
        self.evidence = replace(victim.evidence, measure=measure, noise=None)
        self.shape = (len(victim.challenge.unit), victim.challenge.batch, victim.size[1])
        self.table = victim.plan.token_table(victim.evidence.params)
        labels = victim.labels("inferred")
        labels = victim.logits().softmax(-1) if labels is None else labels
        self.y = labels.view(*self.shape[:2], -1).to(self.table)
        self.usual_norm = float(self.table[PADDING + 1 :].norm(dim=1).mean())
        self.spent = 0

    def guess(self) -> Guess:
        """Return the nearest text over all steps and moves."""
        z = min(
            (self._drawn() for _ in range(min(self.attack.starts, self.attack.budget))), key=self._distance
        ).requires_grad_()
        best, least = z.detach().clone(), math.inf
        optimizer = torch.optim.Adam([z], lr=self.attack.rate)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, DECAY_EVERY, DECAY)
        step = 0
        while self.spent < self.attack.budget:
            optimizer.zero_grad()
            loss = self._loss(z)
            loss.backward()
            if float(loss.detach()) < least:
                best, least = z.detach().clone(), float(loss.detach())
            optimizer.step()
            decay.step()
            step += 1
            if step % self.attack.stretch == 0:
                with torch.no_grad():
                    z.copy_(self._moved(z.detach()))
        with torch.no_grad():
            best = min((best, self._moved(best)), key=self._distance)
        texts = nearest_tokens(best, self.table).flatten(0, 1)
        return Guess(x=texts, y=self.y.flatten(0, 1).argmax(-1).cpu(), confidence=None, evaluations=self.spent)

    def _drawn(self) -> Tensor:
        draws = torch.randn(*self.shape, self.table.shape[1], generator=self.draws).to(self.table)
        return draws * self.usual_norm / math.sqrt(self.table.shape[1])

    def _loss(self, z: Tensor) -> Tensor:
        self.spent += 1
        distance = self.evidence.discrepancy(self.evidence.simulate(z, self.y))
        size: Tensor = z.norm(dim=-1).mean() - self.usual_norm
        return distance + self.attack.size_weight * size.square()

    def _distance(self, z: Tensor) -> float:
        with torch.enable_grad():  # a simulation takes gradients
            return float(self._loss(z).detach())

    def _moved(self, z: Tensor) -> Tensor:
        """Return vectors after the best of some moves of whole tokens, or as they are."""
        best, least = z, self._distance(z) + self._surprise(z)
        for _ in range(self.attack.moves):
            if self.spent >= self.attack.budget:
                break
            trial = best.clone()
            row = trial.flatten(0, 1)[int(torch.randint(math.prod(self.shape[:2]), (), generator=self.draws))]
            row.copy_(row[moved_order(len(row), self.draws)])
            worth = self._distance(trial) + self._surprise(trial)
            if worth < least:
                best, least = trial, worth
        return best

    def _surprise(self, z: Tensor) -> float:
        if not self.prior.words or not self.attack.language:
            return 0.0
        return self.attack.language * self.prior.surprise(nearest_tokens(z, self.table).flatten(0, 1))


def moved_order(length: int, draws: torch.Generator) -> list[int]:
    """Return the places of a text after one of the paper's moves: a swap, a token or a span elsewhere, a new end."""

    def draw(end: int) -> int:
        return int(torch.randint(end, (), generator=draws))

    order, kind, i, j = list(range(length)), draw(4), draw(length), draw(length)
    if kind == 0:
        order[i], order[j] = order[j], order[i]
    elif kind == 1:
        order.insert(j, order.pop(i))
    elif kind == 2:
        end = min(length, i + 2 + draw(max(1, length // 2)))
        span, rest = order[i:end], order[:i] + order[end:]
        order = rest[: min(j, len(rest))] + span + rest[min(j, len(rest)) :]
    else:
        order = order[i:] + order[:i]
    return order
