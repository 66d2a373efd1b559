"""Whether a client could detect that its server acts: an honest message against one that an attack crafted.

A client knows the message that it received and its own step on it. (It does not see that others received another one.)
Of both, `signs` are computed, on its own batch. The sign that separates crafted from honest best is chosen on half of
the models and scored on the other half, the real one among them, so that no test overfits one model. After training
the honest models are the real one and freshly initialized ones.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from statistics import median

import scipy
import torch
from torch import Tensor

from ppbench.adversary.replay import replayed_evidence
from ppbench.base.errors import Overflow
from ppbench.base.registry import find
from ppbench.base.seeds import Seeds
from ppbench.base.tree import Params, Tree, leaves, moved, norm, tree_map
from ppbench.federation.acting import Acting, Before, matching_params
from ppbench.federation.contract import Defense
from ppbench.federation.drive import Straight, party_context
from ppbench.federation.engine import Federation
from ppbench.federation.evidence import as_gradient
from ppbench.federation.plan import Context, Data, Opt, Plan
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import Transcript
from ppbench.federation.wire import SERVER, Model, Slot, session_of
from ppbench.nets.net import initial
from ppbench.records.schema import Flag

MODELS = 8
"""Number of models; a sign is chosen on half of them."""
MAX_CLIENTS = 6
"""Most clients whose batches are put to each model."""
ROWS = 128
"""Most rows of a matrix that are compared with one another."""


def detection_scores(
    fed: Federation, acting: Acting, transcript: Transcript, victims: Mapping[Slot, Data]
) -> dict[Slot, float]:
    """Return for each victim the share of honest clients on whom the chosen sign is weaker; ties count half.

    Its mean over victims is the area under the ROC curve of the sign as a test: 0.5 if nothing can be detected.
    """
    if not any(leaves(letter.message) for letter in transcript.mail):  # no message, no sign
        return {}
    plan, batch = transcript.plan, max(len(data.x) for data in victims.values())
    chosen, scored = [_population(fed, acting, plan, batch, range(first, MODELS, 2)) for first in (1, 0)]
    honest, crafted = chosen
    areas = torch.stack([_share_below(honest[:, i], crafted[:, i]).mean() for i in range(honest.shape[1])])
    sign = int((areas - 0.5).abs().argmax())
    way = 1.0 if float(areas[sign]) >= 0.5 else -1.0
    first = {Slot(e.probe, e.receiver): e.message for e in reversed(transcript.mail) if e.sender == SERVER}
    seen = {slot: message_signs(fed, plan, first[slot], data)[sign] for slot, data in victims.items() if slot in first}
    return {slot: float(_share_below(way * scored[0][:, sign], way * value[None])) for slot, value in seen.items()}


def _population(
    fed: Federation, acting: Acting, plan: Plan, batch: int, models: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the signs [M, S] of honest and of crafted messages of several models, on batches of the clients."""
    honest, crafted = list[Tensor](), list[Tensor]()
    clients = sorted(fed.shards)[:MAX_CLIENTS]
    for model in models:
        draws = Seeds(fed.seeds.seed("detection", model)).generator("batches")
        params = fed.parties.server.params if model == 0 else _fresh(fed, model)
        server = replace(fed.parties.server, params=params)
        ctx = fed.context(f"detection-{model}", fed.round + 1, 0, SERVER)
        before = Before(plan, fed.defense, server, tuple(sorted(fed.shards)), acting.target, acting.public)
        sent = matching_params(acting.craft(before, fed.seeds.generator("acting", "detection", model)).params, params)
        for rows, weights in ((honest, params), (crafted, sent)):
            _, message = fed.defense.broadcast(replace(ctx, plan=plan), replace(server, params=weights))
            for client in clients:
                shard = fed.shards[client]
                some = torch.randperm(len(shard.x), generator=draws)[:batch].to(shard.x.device)
                rows.append(message_signs(fed, plan, message, Data(shard.x[some], shard.y[some])))
    return torch.stack(honest), torch.stack(crafted)


def _fresh(fed: Federation, model: int) -> Params:
    like = fed.parties.server.params
    return {
        name: value.to(like[name]) for name, value in initial(fed.plan.spec, fed.seeds.seed("model", model)).items()
    }


def _share_below(honest: Tensor, crafted: Tensor) -> Tensor:
    """Return for each value of crafted [A] the share of honest [H] below it; ties count half."""
    below = (honest[:, None] < crafted).double() + 0.5 * (honest[:, None] == crafted).double()
    return below.mean(0)


def message_signs(fed: Federation, plan: Plan, message: Tree, data: Data) -> Tensor:
    """Return the signs [S] float64 of a message and of a step on a client's batch; infinite values become 1e30.

    Of the message the size, the largest entry beside the typical one, the share of zeros and how alike rows are; of the
    step the loss, the gradient's size, its share of zeros and the share of dead units, all by the defense's `predict`.
    """
    weights = [leaf.detach() for leaf in leaves(message) if leaf.is_floating_point()]
    flat = torch.cat([leaf.flatten().double() for leaf in weights])
    typical = flat.abs().median().clamp(min=1e-30)
    parts = [_log(flat.norm()), _log(flat.abs().max() / typical), (flat == 0).double().mean(), _alike(weights)]
    tracked = tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()), message)
    with torch.enable_grad():
        outputs = fed.defense.predict(plan, tracked, data.x.to(flat.device))
        loss = plan.example_loss(outputs, data.y.to(outputs)).mean()
    inputs = [leaf for leaf in leaves(tracked) if leaf.requires_grad]
    slopes = torch.autograd.grad(loss, inputs, allow_unused=True)
    steps = [slope.detach().double() for slope in slopes if slope is not None]
    step = torch.cat([part.flatten() for part in steps])
    dead = torch.cat([(part.flatten(1) == 0).all(1).double() for part in steps if part.dim() > 1])
    parts += [loss.detach().double(), _log(step.norm()), (step == 0).double().mean(), dead.mean()]
    return torch.stack([part.cpu() for part in parts]).nan_to_num(1e30, 1e30, -1e30)


def _log(value: Tensor) -> Tensor:
    return value.clamp(min=1e-30).log10()


def _alike(weights: Sequence[Tensor]) -> Tensor:
    """Return the mean over rows of the largest |cosine| with another row of the same matrix."""
    cosines = []
    for weight in weights:
        rows = weight.flatten(1)[:ROWS].double() if weight.dim() > 1 else weight[None, :0]
        if min(rows.shape) > 1:
            rows = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-30)
            cosines.append((rows @ rows.T).abs().fill_diagonal_(0).amax(1))
    return torch.cat(cosines).mean() if cosines else torch.zeros((), dtype=torch.float64)


# -- Whether clients behave differently in a probe and in training: a defense that detects the measurement --
# A probe must differ from a round of training in whose examples it uses, and how many. A defense that inspects these
# can protect the probe alone. In training it then sends undefended updates. The harness has the clients' examples
# and draws, so it can compute those updates and compare. An honest law may do so too: it clips what is large, and a
# probe's gradient is larger than what training sends. So both are asked what they make of the same update.

UNDEFENDED_DISTANCE = 0.01
"""Relative distance from an undefended update up to which a round of training counts as undefended."""
DEFENDED_DISTANCE = 0.1
"""Relative distance above which a probe counts as defended."""
LESS_DEFENDED = 3.0
"""How many times farther a probe must be than training: less is luck of draws, or an update of another size."""
OBSERVED_ROUNDS = 2
"""Rounds of training that are looked at: a defense may also spare every second one."""
FEWEST_READ = 10
"""Clients' updates of each kind, at least, that a comparison of laws reads; several rounds or probes give them."""
BY_LUCK = 1e-3
"""Probability of a false alarm of that comparison."""


def probe_flags(
    fed: Federation, probed: Transcript, victims: Mapping[Slot, Data], thorough: bool = True
) -> tuple[Flag, ...]:
    """Return a flag if clients defend an update in the probes but not in training, else ().

    Distances are medians over clients, of the update that the server's own code reads (`replayed_evidence`) to what a
    client without a defense computes from the same examples, weights and draws. Where those of training are smaller,
    both get the same update (`law_differs`). If the laws cannot be compared, training must be undefended but for its
    scale. No flag where the code reads no single client. Comparing laws takes seconds: unless `thorough`, only where
    training is undefended but for its scale.
    """
    probe = median_distance(fed, probed, victims)
    if probe is None or probe <= DEFENDED_DISTANCE:
        return ()
    shards = {Slot(-1, client): data for client, data in fed.shards.items()}
    rounds = [_later(fed, number) for number in range(OBSERVED_ROUNDS)]
    known = [(median_distance(one, transcript, shards), one) for one in rounds if (transcript := _observed(one))]
    read = [(value, one) for value, one in known if value is not None]
    if not read:
        return ()
    training, later = min(read, key=lambda pair: pair[0])
    if LESS_DEFENDED * training >= probe:
        return ()
    undefended = training <= UNDEFENDED_DISTANCE
    differs = law_differs(fed, later, probed, victims) if thorough or undefended else None
    if differs is False or (differs is None and not undefended):
        return ()
    bare = "those of no defense" if undefended else "less defended"
    detail = (
        f"in training the server's steps are {bare} (relative distance {training:.2g}), in the probes "
        f"they are not ({probe:.2g}): what the attacks are shown is not what clients send"
    )
    return (Flag(code="probe_noticed", severity="warning", detail=detail),)


def _later(fed: Federation, rounds: int) -> Federation:
    """Return the federation with its present states, at a later round."""
    later = copy(fed)
    later.round = fed.round + rounds
    return later


def _observed(fed: Federation) -> Transcript | None:
    """Return the transcript of the next round; None if its uploads overflow."""
    try:
        return fed.observe()
    except Overflow:
        return None


def median_distance(fed: Federation, transcript: Transcript, data: Mapping[Slot, Data]) -> float | None:
    """Return the median relative distance of clients' updates from undefended ones; None if none can be read."""
    distances = [one.distance for one in read_updates(fed, transcript, data)]
    return median(distances) if distances else None


@dataclass(frozen=True)
class ReadUpdate:
    """A client's update as the server's code reads it, its undefended update, and their distance relative to that."""

    client: int
    plain: Params
    distance: float


def read_updates(
    fed: Federation, transcript: Transcript, data: Mapping[Slot, Data], raw: Mapping[int, Params] | None = None
) -> list[ReadUpdate]:
    """Return the updates that the server's code reads; raw: by client, gradients in place of those of its examples."""
    view, updates, directions = transcript.view(HONEST_SERVER), list[ReadUpdate](), raw or {}
    steps = {exchange.slot: exchange.step for exchange in reversed([*view.exchanges()])}
    for evidence in replayed_evidence(view):
        if len(evidence.unit) > 1 or evidence.measure != "squares" or evidence.params is None:
            continue
        (slot,), scale = evidence.unit, as_gradient(transcript.plan, fed.round + 1)
        draws = party_context(
            fed.seeds, transcript.plan, session_of(slot.probe), fed.round + 1, steps[slot], slot.client
        )
        plain = _undefended(draws, evidence.params, moved(data[slot], fed.device), directions.get(slot.client))
        apart = {name: scale * value - plain[name].double() for name, value in evidence.observed.items()}
        updates.append(ReadUpdate(slot.client, plain, norm(apart) / max(norm(plain), 1e-30)))
    return updates


def _undefended(ctx: Context, params: Params, data: Data, direction: Params | None = None) -> Params:
    """Return the update of a client without a defense, from the same draws; direction: its gradient, if it is given."""
    none, plan = Defense(), ctx.plan if direction is None else Straight.of(ctx.plan, direction)
    job = none.prepare(ctx, (), Model(params), data)
    assert job is not None  # weights were sent
    return tree_map(lambda value: value.detach(), none.compute(plan, job))


def law_differs(fed: Federation, later: Federation, probed: Transcript, victims: Mapping[Slot, Data]) -> bool | None:
    """Return whether clients defend one and the same update more in a probe than in training; None: cannot be asked.

    Each client's gradient is replaced (`Straight`) so that the undefended update is the same in both, of the size that
    it has in a probe, then of the size that it has in training. The steps of training are those of plain SGD, whose
    updates have a size. From a probe's few examples to a batch of training the number doubles step by step. later: the
    federation at the round of training.
    """
    shards = {Slot(-1, client): data for client, data in fed.shards.items()}
    first = {slot: data for slot, data in victims.items() if slot.probe == min(s.probe for s in victims)}
    transcript = _observed(later)
    if transcript is None:
        return None
    try:
        training = {one.client: one.plain for one in read_updates(later, transcript, shards)}
        sizes = [norm(one.plain) for one in read_updates(fed, probed, victims)]
        if not training or not sizes or not first:
            return None
        raw = {slot.client: training[slot.client] for slot in first if slot.client in training}
        for size in (median(sizes), None):
            update = {c: scaled(raw[c], 1.0 if size is None else size / max(norm(raw[c]), 1e-30)) for c in raw}
            contexts = list(SameUpdate(fed, later, probed.plan, update).distances(first))
            if any(_less(*pair[::-1]) for pair in itertools.pairwise(contexts)):
                return True
    except Exception:  # noqa: BLE001 - another package's client may not compute the gradient of any loss
        return None
    return False


@dataclass(frozen=True)
class SameUpdate:
    """One undefended update per client, in probes of `fed` under `plan` and in the training of `later`.

    raw: the updates, by client.
    """

    fed: Federation
    later: Federation
    plan: Plan
    raw: Mapping[int, Params]

    def distances(self, victims: Mapping[Slot, Data]) -> Iterator[list[float]]:
        """Yield the distances in probes of the victims, of twice as many examples and so on, then in training.

        Noise on a sum of examples halves with each step, as a mean does; a rule by their number shows as a cliff.
        """
        clients = sorted(self.raw)
        batch, own = self.fed.plan.local.batch, self.fed.shards
        count, most = max(len(d.x) for d in victims.values()), min(min(batch, len(own[c].x)) for c in clients)
        yield self._probed({c: next(d for slot, d in victims.items() if slot.client == c) for c in clients})
        while (count := min(2 * count, max(most, count))) <= most:
            yield self._probed({c: Data(own[c].x[:count], own[c].y[:count]) for c in clients})
            if count == most:
                break
        yield self._trained(clients)

    @property
    def _repeats(self) -> range:
        return range(-(-FEWEST_READ // len(self.raw)))

    def _probed(self, data: Mapping[int, Data]) -> list[float]:
        local = replace(self.plan.local, batch=max(self.plan.local.batch, *(len(d.x) for d in data.values()), 1))
        steps = max(_steps(self.fed, replace(self.plan, local=local), d) for d in data.values())
        plan, values = replace(self.plan, local=replace(local, opt=Opt("sgd", 1 / steps))), list[float]()
        for number in self._repeats:
            one, slots = _with_gradients(self.fed, plan, self.raw), {Slot(number, c): d for c, d in data.items()}
            values += [read.distance for read in read_updates(one, one.forked(plan, slots), slots, self.raw)]
        return values

    def _trained(self, clients: Sequence[int]) -> list[float]:
        """Return the distances in training."""
        rounds = (_later(self.later, OBSERVED_ROUNDS * number) for number in self._repeats)
        every = [trained_distances(one, self.fed.plan, {c: self.raw[c] for c in clients}) for one in rounds]
        return [distance for one in every for distance in one.values()]


def trained_distances(fed: Federation, plan: Plan, raw: Mapping[int, Params]) -> dict[int, float]:
    """Return by client the distance of one round's update, whose undefended one is `raw`, by steps of plain SGD.

    Times the root of its steps, over which noise averages.
    """
    steps = {c: _steps(fed, plan, fed.shards[c]) for c in raw}
    most = max(steps.values())
    gradients = {c: scaled(update, most / steps[c]) for c, update in raw.items()}
    one = _with_gradients(fed, replace(plan, local=replace(plan.local, opt=Opt("sgd", 1 / most))), gradients)
    updates = read_updates(one, one.observe(), {Slot(-1, c): data for c, data in one.shards.items()}, gradients)
    return {read.client: most**0.5 * read.distance for read in updates if read.client in gradients}


def _steps(fed: Federation, plan: Plan, data: Data) -> int:
    """Return the local steps of a client with some examples."""
    local = plan.local
    return 1 if local.upload == "gradient" else max(1, fed.defense.fewest_steps(len(data.x), local.batch, local.epochs))


def _with_gradients(fed: Federation, plan: Plan, raw: Mapping[int, Params]) -> Federation:
    """Return the federation under a plan, with the gradients of some clients."""
    other = copy(fed)
    other.plan, other.canaries, other.backend = plan, raw, "loop"
    return other


def scaled(update: Params, factor: float) -> Params:
    """Return `factor` times an update."""
    return {name: factor * value for name, value in update.items()}


def _less(trained: Sequence[float], probed: Sequence[float]) -> bool:
    """Return whether updates are defended less in training, by more than luck of draws."""
    if not trained or not probed or sum(probed) / len(probed) <= DEFENDED_DISTANCE:
        return False
    if LESS_DEFENDED * sum(trained) / len(trained) >= sum(probed) / len(probed):
        return False
    return float(scipy.stats.mannwhitneyu(trained, probed, alternative="less").pvalue) < BY_LUCK


# -- Whether clients behave differently in an audit: a defense that detects canaries --

AUDIT_ROUNDS = 8
"""Rounds in which an audit's clients are compared with themselves; the first clears an honest defense."""


def audit_flags(fed: Federation, without: Mapping[int, Data]) -> tuple[Flag, ...]:
    """Return a flag if clients defend one and the same update more because they hold canaries, else ().

    fed: the audit's trained target; without: by client, its examples but for the canaries. A blank image, or noise,
    is easily told from data, and noise for who holds one hides canaries alone. Code of another package that fails on
    such an update gets a flag, too: by raising it must not escape the comparison.
    """
    if fed.canaries:
        return ()
    usual = copy(fed)
    usual.shards = {client: moved(data, fed.device) for client, data in without.items()}
    with_canaries, without_canaries = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    try:
        shards = {Slot(-1, client): data for client, data in fed.shards.items()}
        raw = {one.client: one.plain for one in read_updates(fed, fed.observe(), shards)}
        for number in range(AUDIT_ROUNDS if raw else 0):
            for side, distances in ((fed, with_canaries), (usual, without_canaries)):
                for client, value in trained_distances(_later(side, number), fed.plan, raw).items():
                    distances[client].append(value)
            if not any(
                _mean(with_canaries[c]) > max(LESS_DEFENDED * _mean(without_canaries[c]), DEFENDED_DISTANCE)
                for c in with_canaries
            ):
                return ()
    except Exception as cause:  # noqa: BLE001 - a client's code may not compute the gradient of any loss
        return _uncompared(fed.defense, cause)
    more = [client for client in with_canaries if _less(without_canaries[client], with_canaries[client])]
    if not more:
        return ()
    one, other = (_mean(distances[more[0]]) for distances in (with_canaries, without_canaries))
    detail = (
        f"{len(more)} of {len(with_canaries)} clients defend an update more because they hold canaries (relative "
        f"distance {one:.2g}, without them {other:.2g}): the audit is not what clients send"
    )
    return (Flag(code="audit_noticed", severity="warning", detail=detail),)


def _uncompared(defense: Defense, cause: Exception) -> tuple[Flag, ...]:
    plugin = find("defenses", defense.name)
    if plugin is not None and plugin.ours:
        return ()
    failure = f"its clients fail with and without canaries on one and the same update ({type(cause).__name__}: {cause})"
    return (Flag(code="not_replayable", severity="warning", detail=f"cannot be replayed: {failure}"),)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
