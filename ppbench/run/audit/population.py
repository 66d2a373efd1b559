"""Who is in which run of an audit: candidates, canaries, coins. Row 0 of `keep`, the truth, stays with the harness.

Canaries (Carlini et al. 2019, Aerni et al. 2024) are records that only membership explains: attacks on average records
hide how badly a defense protects its worst cases. They are made of test records and noise, never of clients' data.
Which families there are, the modality says, beside test records with a wrong target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ppbench.adversary.victims import Candidates, input_keys
from ppbench.base.errors import UsageError
from ppbench.base.machine import check_room
from ppbench.base.seeds import Seeds
from ppbench.federation.contract import Defense
from ppbench.federation.plan import Data, Plan
from ppbench.federation.threats import ThreatModel
from ppbench.metrics.modality import modality_in
from ppbench.questions.membership import AVERAGE
from ppbench.run.experiment import Experiment
from ppbench.run.task import Task

MISLABELLED = "mislabelled"
"""The family of canaries that every kind of data has whose records have a target: test records with a wrong one."""


def canaries(task: Task, count: int, seeds: Seeds) -> tuple[Data, tuple[str, ...], Tensor]:
    """Return `count` canaries of each family, family by family; the family of each; int64 [count], test records used.

    Mislabelled: test records with another one's class, mask or number. Blank: each quarter of an image in each channel
    (of a table row, each of four blocks of columns) at one level; one level for all would put blanks on a line, where
    they hide each other (AUC of LiRA 0.77 against 0.88). Out of distribution: uniform noise, or random tokens. Planted:
    texts with random names and numbers. All but mislabelled ones have random targets; of texts that are their own
    targets there are no mislabelled ones. UsageError: too few test examples.
    """
    test = task.test
    if count >= len(test.x):
        raise UsageError(
            f"Option canaries={count} cannot be used: mislabelled canaries are test examples and the test part of "
            f"{task.dataset.name!r} has {len(test.x)}, some of which are left for other uses; give fewer."
        )
    generator = seeds.generator("canaries")
    used = torch.randperm(len(test.x), generator=generator)[:count]
    modality = modality_in(task.plan)
    made = modality.canaries(test.x[used], test.x, task.plan, generator)
    if task.predicts_tokens:
        return Data(made, made.clone()), tuple(name for name in modality.canary_families for _ in range(count)), used
    x = torch.cat([test.x[used], made])
    y = torch.cat([_wrong(task, used, generator), _random(task, len(made), generator)])
    return Data(x, y), tuple(name for name in (MISLABELLED, *modality.canary_families) for _ in range(count)), used


def _wrong(task: Task, used: Tensor, generator: torch.Generator) -> Tensor:
    """Return wrong targets [n, C] of the test records `used` [n]: another class, or the next record's target."""
    if not task.classified:
        return task.test.y[(used + 1) % len(task.test.y)]
    y = task.test.y[used]
    classes = y.shape[1]
    step = torch.randint(1, classes, (len(y),), generator=generator)
    return one_hot((y.argmax(1) + step) % classes, classes).to(y.dtype)


def _random(task: Task, count: int, generator: torch.Generator) -> Tensor:
    y = task.test.y
    if not task.classified:
        return y[torch.randint(0, len(y), (count,), generator=generator)]
    return one_hot(torch.randint(0, y.shape[1], (count,), generator=generator), y.shape[1]).to(y.dtype)


ADVERSARY = 0
"""The curious client: it holds no candidate."""
POPULATION = 2500
"""Records of the population at most (`mia_rmia` compares with them)."""
MOST_REFERENCES = 1024


def has_view(threat: ThreatModel) -> bool:
    """Return whether an audit has the view of `threat`: it keeps the state and data of one client alone."""
    return not threat.colludes and {*threat.clients} <= {ADVERSARY}


@dataclass(frozen=True)
class Population:
    """The records of an audit and who is trained on which.

    Attributes:
        candidates: average records of clients other than 0 and canaries, in random order.
        owner: [Q] int64, the client of the target that holds a candidate if it is kept.
        keep: [1 + R, Q] bool, which candidates a run is trained on. Row 0 is the target: exactly half of the average
            records, a coin for each canary; the others are pairs of complements: each candidate is in half of them.
        base, auxiliary: by client, the data of the target's and the references' clients besides candidates.
        public: whether `auxiliary` is public; then the adversary does not know who owns a candidate either.
        sizes: by client, how many examples its shard of the evaluation has. others: Z records that no run is trained
        on.
        level: whether shards are kept in proportion to `sizes`, for a defense that needs equal ones; otherwise a kept
            candidate is added and nothing else changes, which is what a bound on epsilon is about.
    """

    candidates: Candidates
    owner: Tensor
    keep: Tensor
    base: dict[int, Data]
    auxiliary: dict[int, Data]
    public: bool
    sizes: dict[int, int]
    others: Data
    seeds: Seeds
    level: bool = False

    def shards(self, run: int) -> dict[int, Data]:
        """Return the clients' shards in `run`: 0 is the target, 1 and on are references."""
        base = self.auxiliary if run else self.base
        owner = deal_owners(len(self.owner), sorted(base), self.seeds, run) if run and self.public else self.owner
        mine = {client: self.keep[run] & (owner == client) for client in base}
        kept, beside = {c: int(m.sum()) for c, m in mine.items()}, {c: len(d.x) for c, d in base.items()}
        sizes = level_sizes(self.sizes, beside, kept) if self.level else {c: beside[c] + kept[c] for c in base}
        shards = {}
        for client, data in base.items():
            x, y, rest = self.candidates.x, self.candidates.labels, sizes[client] - int(mine[client].sum())
            shards[client] = Data(
                torch.cat([data.x[:rest], x[mine[client]]]), torch.cat([data.y[:rest], y[mine[client]]])
            )
        return shards


def populate(experiment: Experiment) -> Population:
    """Return the population of an audit, a function of task, candidates, canaries and seed; more references add rows.

    Raises UsageError: too few clients, records or test examples, or an odd number of references.
    """
    task, config = experiment.task, experiment.config
    if config.references % 2 or config.references > MOST_REFERENCES:
        raise UsageError(
            f"Option references={config.references} cannot be used: each candidate is in exactly half of the reference "
            f"runs, so give an even number up to {MOST_REFERENCES}."
        )
    if config.clients < 2:
        raise UsageError("An audit asks about other clients' records; use at least 2 clients.")
    seeds = Seeds(task.seeds.seed("audit"))
    chosen, base = _draw_candidates(task, config.candidates, seeds)
    made, families, used = canaries(task, config.canaries, seeds)
    x, y = (torch.cat([getattr(data, part) for data in [*chosen.values(), made]]) for part in ("x", "y"))
    average = torch.cat([torch.full((len(data.x),), client) for client, data in chosen.items()])
    owner = torch.cat([average, deal_owners(len(made.x), sorted(base), seeds, 0)])
    words = (AVERAGE,) * len(average) + families
    order = torch.randperm(len(x), generator=seeds.generator("order"))
    x, y, owner = x[order], y[order], owner[order]
    words = tuple(words[i] for i in order.tolist())
    number = {word: i for i, word in enumerate(dict.fromkeys((AVERAGE, *families)))}
    code = torch.tensor([number[word] for word in words])
    keep = _coins(code, config.references, seeds)
    half = random_half(2 * code + keep[0].long(), seeds.generator("half")).long()
    rest = torch.ones(len(task.test.x), dtype=torch.bool)
    rest[used] = False
    if task.predicts_tokens:
        size = 8.0 * config.references * (len(x) + len(rest)) * task.plan.spec.shape[0] * task.plan.spec.classes
        right = "use fewer --references or --candidates, or shorter texts"
        check_room(size, f"The answers of {config.references} reference runs to every token", right)
    auxiliary, others = _auxiliary(task, base, Data(task.test.x[rest], task.test.y[rest]), seeds)
    candidates = Candidates(x, y, keep[0], half, words)
    sizes = {client: len(shard.x) for client, shard in sorted(task.shards.items())}
    return Population(candidates, owner, keep, base, auxiliary or base, bool(auxiliary), sizes, others, seeds)


def random_half(groups: Tensor, generator: torch.Generator) -> Tensor:
    """Return [n] bool, true for a random half of each group of `groups` [n] int64; a coin decides over an odd one."""
    chosen = torch.zeros(len(groups), dtype=torch.bool)
    for group in groups.unique():
        places = (groups == group).nonzero()[:, 0]
        odd = int(torch.randint(0, 2, (1,), generator=generator)) * (len(places) % 2)
        order = torch.randperm(len(places), generator=generator)
        chosen[places[order[: len(places) // 2 + odd]]] = True
    return chosen


def deal_owners(count: int, clients: list[int], seeds: Seeds, run: int) -> Tensor:
    """Return [count] int64: clients other than the adversary, dealt out evenly in random order."""
    others = torch.tensor([client for client in clients if client != ADVERSARY])
    order = torch.randperm(count, generator=seeds.generator("dealt", run))
    return others[order % len(others)]


def needs_level(defense: Defense, plan: Plan, sizes: Sequence[int]) -> bool:
    """Return whether `defense` accepts shards of these sizes, but not if one client has twice as many examples."""
    uneven = [size * (1 + (client == 0)) for client, size in enumerate(sizes)]
    try:
        defense.check_data(plan, uneven)
    except UsageError:
        return True
    return False


def level_sizes(sizes: dict[int, int], base: dict[int, int], kept: dict[int, int]) -> dict[int, int]:
    """Return how many records each client holds: the largest possible common share of its shard (`sizes`).

    All its records (`base` and the candidates `kept`) if some client has more candidates than its share.
    """
    most = {client: base[client] + kept[client] for client in sizes}
    tight = min(sizes, key=lambda client: most[client] / sizes[client])
    common = {client: size * most[tight] // sizes[tight] for client, size in sizes.items()}
    return common if all(common[client] >= max(1, kept[client]) for client in common) else most


def _coins(code: Tensor, references: int, seeds: Seeds) -> Tensor:
    """Return `Population.keep`; `code` [Q] int64 numbers the families, 0 being average records."""
    generator = seeds.generator("keep")
    coins = torch.randint(0, 2, (len(code),), generator=generator) == 1
    return torch.cat(
        [torch.where(code == 0, random_half(code, generator), coins)[None], _pairs(code, references, seeds)]
    )


def reference_halves(count: int, references: int, seeds: Seeds) -> Tensor:
    """Return which of `count` candidates each reference run is trained on, [R, count] bool: pairs of complements."""
    return _pairs(torch.zeros(count, dtype=torch.int64), references, seeds)


def _pairs(code: Tensor, references: int, seeds: Seeds) -> Tensor:
    """Return `references` rows [R, Q] bool, random halves of each group of `code` [Q], each beside its complement."""
    rows = [random_half(code, seeds.generator("keep", pair)) for pair in range(references // 2)]
    return torch.stack([part for row in rows for part in (row, ~row)]) if rows else torch.zeros(0, len(code)).bool()


def _draw_candidates(task: Task, candidates: int, seeds: Seeds) -> tuple[dict[int, Data], dict[int, Data]]:
    """Return by client the records that become candidates (twice `candidates` in all) and those that stay, one or more
    with every client.

    Records whose input stands twice in the training part stay: left out, they would be trained on all the same.
    """
    once = _standing_once(task.shards)
    orders = {c: torch.randperm(len(own), generator=seeds.generator("apart", c)) for c, own in once.items()}
    orders = {c: torch.cat([order[once[c][order]], order[~once[c][order]]]) for c, order in orders.items()}
    able = {c: min(len(own) - 1, int(own.sum())) for c, own in once.items()}
    pool = torch.cat([torch.full((count,), c) for c, count in able.items() if c != ADVERSARY])
    if len(pool) < 4:
        raise UsageError(
            "An audit needs 4 or more records without a duplicate that clients other than the first can spare, not "
            f"{len(pool)}; use more --train or fewer --clients."
        )
    count = min(2 * candidates, len(pool)) // 2 * 2
    taken = pool[torch.randperm(len(pool), generator=seeds.generator("average"))[:count]].bincount(minlength=len(once))
    chosen, base = {}, {}
    for client, order in orders.items():
        shard, cut = task.shards[client], int(taken[client])
        mine, stay = order[:cut], order[cut:]
        base[client] = Data(shard.x[stay], shard.y[stay])
        if client != ADVERSARY:
            chosen[client] = Data(shard.x[mine], shard.y[mine])
    return chosen, base


def _standing_once(shards: Mapping[int, Data]) -> dict[int, Tensor]:
    """Return by client, in order, which of its records have an input that no other record has, [n] bool."""
    sizes = {client: len(shard.x) for client, shard in sorted(shards.items())}
    keys = input_keys(torch.cat([shards[client].x for client in sizes]))
    _, places, counts = keys.unique(return_inverse=True, return_counts=True)
    return dict(zip(sizes, (counts[places] == 1).split([*sizes.values()]), strict=True))


def _auxiliary(task: Task, base: dict[int, Data], test: Data, seeds: Seeds) -> tuple[dict[int, Data], Data]:
    """Return the references' base by client, {} if nothing is public, and the population of other records."""
    auxiliary: dict[int, Data] = {}
    left = Data(test.x[:0], test.y[:0])
    if task.public is not None:
        size, total = len(task.public.x), sum(len(data.x) for data in base.values())
        share = min(1.0, size / total)
        counts = [max(1, int(share * len(data.x))) for data in base.values()]
        if sum(counts) > size:
            raise UsageError(
                f"The public split has {size} examples, too few for reference runs of {len(base)} clients; give a "
                "larger --public."
            )
        order = torch.randperm(size, generator=seeds.generator("auxiliary"))
        parts = order.split([*counts, size - sum(counts)])
        auxiliary = {c: Data(task.public.x[p], task.public.y[p]) for c, p in zip(base, parts, strict=False)}
        left = Data(task.public.x[parts[-1]], task.public.y[parts[-1]])
    order = torch.randperm(len(test.x), generator=seeds.generator("others"))
    x, y = torch.cat([left.x, test.x[order]]), torch.cat([left.y, test.y[order]])
    return auxiliary, Data(x[:POPULATION].clone(), y[:POPULATION].clone())
