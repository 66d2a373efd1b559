"""The server's own use of uploads, as evidence.

Whatever a defense does to an upload, the server must turn it into a change of the model. So the server's code is run
again, from its state and draws at the beginning of the round, on one client's messages; the change of the weights,
with plain SGD of rate 1 as server optimizer, is the update that this client sent. This works for every defense without
code of its author, and needs neither the truth nor a client's secret.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import scipy
import torch
from numpy.typing import NDArray

from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params, Tree, finite, leaves, norm, tree_map
from ppbench.federation.contract import Defense, Server
from ppbench.federation.evidence import Evidence, Measure, Shared, as_gradient
from ppbench.federation.plan import Context, Layout, Noise, Opt
from ppbench.federation.threats import HONEST_SERVER
from ppbench.federation.view import Begun, Exchange, Transcript, View
from ppbench.federation.wire import SERVER, Slot

SAME_UPDATE = 1e-4
"""Relative distance up to which two updates, or two messages, are the same: float32 sums in another order."""
REPLAY_ROUNDING = 6e-8
"""Relative distance that float32 cannot tell apart: a replay in float64 is closer to the gradient that it replays."""
WEIGHT_ROUNDING = 1e-6
"""Relative distance of weights, of their own size, up to which a change is their rounding in float32."""
OUTSIZED = 1e3
"""An update this many times larger than the cohort's is masked; only the sum removes the mask."""


Reading = tuple[Params, Measure]
_Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ObservedRound:
    """One round of one probe as its server saw it: its state at the beginning, and all exchanges by step."""

    view: View
    begun: Begun
    exchanges: Sequence[Exchange]

    @property
    def cohort(self) -> list[int]:
        """The clients that answered."""
        return sorted({exchange.slot.client for exchange in self.exchanges})

    @property
    def probe(self) -> int:
        """The probe."""
        return self.exchanges[0].slot.probe

    @property
    def round(self) -> int:
        """The round."""
        return self.exchanges[0].round

    @property
    def steps(self) -> int:
        """Number of steps that the server took in the round."""
        states = (s for s in self.view.states if s.party == SERVER and (s.probe, s.round) == (self.probe, self.round))
        return 1 + max(state.step for state in states)

    def shares(self) -> list[float]:
        """Return the server's weights of the clients; equal ones if it cannot compute them."""
        cohort = self.cohort
        try:
            return list(cast(Defense, self.view.defense).weights(self.begun.server, cohort))
        except Exception:  # noqa: BLE001 - third-party code; `_add_up` notices wrong weights
            return [1 / len(cohort)] * len(cohort)

    def tried(self, cohort: Sequence[int], kept: Sequence[int] | None = None) -> Params | None:
        """Return `stepped`; None also if the protocol refuses the cohort, or the change is not finite.

        Weights are as in the run. Where that gives the same up to their rounding, they are float64, so that small
        changes are not rounded away.
        """
        kept = cohort if kept is None else kept
        try:
            change = self.stepped(cohort, kept, None)
        except RuntimeError:
            return None
        if change is None or not finite(change):
            return None
        try:
            finer = self.stepped(cohort, kept, torch.float64)
        except RuntimeError:
            return change
        if finer is None or not finite(finer):
            return change
        rounding = WEIGHT_ROUNDING * norm(self.begun.server.params) + SAME_UPDATE * norm(change)
        return finer if norm(_minus(finer, change)) <= rounding else change

    def refuses(self, client: int) -> bool:
        """Return whether the protocol refuses a client's messages, alone and among others that send zeros."""
        for cohort in ([client], self.cohort):
            try:
                self.stepped(cohort, [client], None)
            except RuntimeError:
                continue
            return False
        return True

    def stepped(self, cohort: Sequence[int], kept: Sequence[int], dtype: torch.dtype | None) -> Params | None:
        """Return the change of the weights, float64, if only `cohort` takes part and all but `kept` send zeros.

        dtype: of the weights from which the server steps; None: unchanged. Returns None if the server sends a client
        another message than in the round (the answers would not fit), or takes more steps than in the round.
        RuntimeError: the protocol refuses the cohort, by any exception, which is the cause.
        """
        server, plan = _fresh(self.begun.server, dtype), replace(self.view.plan, server_opt=Opt())
        generator = torch.Generator()
        generator.set_state(self.begun.draws.cpu())
        secret = SecretDraws.of(self.begun.secret)
        ctx = Context(plan, self.round, self.begun.session, SERVER, generator, secret)
        by_step = {(e.step, e.slot.client): e for e in self.exchanges}
        coroutine = cast(Defense, self.view.defense).round(ctx, server, list(cohort))
        answers = None
        for step in range(self.steps + 1):
            try:
                request = coroutine.send(answers)  # type: ignore[arg-type]  # None starts a coroutine
            except StopIteration as stop:
                ends = {name: end.detach().double() for name, end in stop.value.params.items()}
                return {name: server.params[name].double() - end for name, end in ends.items()}
            except Exception as cause:  # a third-party server may refuse in any way
                raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause
            by_client = {client: by_step.get((step, client)) for client in request.out}
            if not all(e is None or _same(request.out[client], e.request) for client, e in by_client.items()):
                return None
            answers = {
                client: e.answer if client in kept else tree_map(torch.zeros_like, e.answer)
                for client, e in by_client.items()
                if e is not None
            }
        return None


def replayed_evidence(view: View) -> list[Evidence]:
    """Return as evidence the gradients that the server's code makes of each client's and of the cohort's messages.

    The view must show the server's states; of several rounds the first counts. A client's gradient is the server's step
    on its messages alone. If these steps do not add up to the step on all, it is what the client adds to a cohort that
    sends zeros, of unknown scale. If zeros move the model too, equally for all clients (noise of the server's own),
    there is a second reading without that movement.
    """
    shared, all_evidence = Shared(view.plan), list[Evidence]()
    for observed in _rounds(view):
        params, divisor = shared.same(observed.begun.server.params), as_gradient(view.plan, observed.round)
        shares = observed.shares()
        total = observed.tried(observed.cohort)
        for client, readings in zip(observed.cohort, _readings(observed, total, shares), strict=True):
            for part, measure in readings:
                if total is None or norm(part) <= OUTSIZED * norm(total):
                    update = tree_map(lambda value, d=divisor: value / d, part)  # type: ignore[misc]
                    unit, simulate = (Slot(observed.probe, client),), shared.at(params)
                    all_evidence.append(Evidence(unit, update, simulate, params, measure=measure, channel="server"))
        if total is not None and len(shares) > 1:
            slots = tuple(Slot(observed.probe, client) for client in observed.cohort)
            update = tree_map(lambda value, d=divisor: value / d, total)  # type: ignore[misc]
            all_evidence.append(shared.mean(slots, update, params, shares, "server"))
    return all_evidence


def replay_refusal(view: View) -> str:
    """Return why the server's code cannot be run again on what it received, a clause; "" if it can.

    It must repeat the first round and, unless it reads sums alone, take some client's messages without the others'.
    """
    for observed in _rounds(view):
        total = observed.tried(observed.cohort)
        if total is None:
            return "the server's code does not repeat a round with the messages that it received"
        single = len(observed.cohort) > 1 and not view.defense.sums
        if single and all(observed.refuses(client) for client in observed.cohort):
            return "the server's code refuses the messages of a single client"
        return ""
    return ""


def without_rounding(replayed: Sequence[Evidence], view: View) -> list[Evidence]:
    """Return replayed evidence with the numbers of the defense's own evidence, where a replay's rounding differs alone.

    So attacks that ask both solve the same gradient.
    """
    stated: dict[tuple[Slot, ...], Params] = {}
    for one in view.defense.evidence(view):
        stated.setdefault(one.unit, one.observed)
    every = []
    for one in replayed:
        numbers = stated.get(one.unit, {})
        same = numbers.keys() == one.observed.keys() and all(
            value.shape == numbers[name].shape
            and float((value.double() - numbers[name].double()).norm())
            <= REPLAY_ROUNDING * float(value.double().norm())
            for name, value in one.observed.items()
        )
        every.append(replace(one, observed=numbers) if same else one)
    return every


def _rounds(view: View) -> Iterator[ObservedRound]:
    """Yield the first round of each probe whose initial server state is known; in round robin each turn."""
    by_round: dict[tuple[int, int], list[Exchange]] = {}
    for exchange in view.exchanges():
        by_round.setdefault((exchange.slot.probe, exchange.round), []).append(exchange)
    seen = set[int]()
    for (probe, round_), exchanges in sorted(by_round.items()):
        begun = view.begun(probe, round_)
        if probe not in seen and begun is not None and isinstance(begun.server, Server):
            yield from (
                [ObservedRound(view, begun, exchanges)]
                if view.plan.schedule == "parallel"
                else _turns(view, begun, exchanges)
            )
        seen.add(probe)


def _turns(view: View, begun: Begun, exchanges: Sequence[Exchange]) -> Iterator[ObservedRound]:
    """Yield each client's turn as a round that begins with the server's state at that time."""
    for client in sorted({exchange.slot.client for exchange in exchanges}):
        turn = [exchange for exchange in exchanges if exchange.slot.client == client]
        first, state = turn[0].step, view.state_at(turn[0], SERVER)
        if isinstance(state, Server):
            yield ObservedRound(view, replace(begun, server=state), [replace(e, step=e.step - first) for e in turn])


def _readings(observed: ObservedRound, total: Params | None, shares: Sequence[float]) -> list[list[Reading]]:
    """Return, by client, the readings of its update, each with its measure; none if the update cannot be read."""
    cohort = observed.cohort
    alone = [observed.tried([client]) for client in cohort]
    if total is None or _add_up(alone, shares, total):
        zeros = [observed.tried([client], []) for client in cohort]
        noisy = zeros[0] is not None and norm(zeros[0]) > 0 and all(_alike(zeros[0], zero) for zero in zeros)
        readings_by_client: list[list[Reading]] = [[] if part is None else [(part, "squares")] for part in alone]
        for readings, zero in zip(readings_by_client, zeros, strict=True):
            if noisy and zero is not None and readings:
                readings.append((_minus(readings[0][0], zero), "squares"))
        return readings_by_client
    silent = observed.tried(cohort, [])
    added = [observed.tried(cohort, [client]) for client in cohort]
    return [[] if part is None or silent is None else [(_minus(part, silent), "cosine")] for part in added]


def _add_up(parts: Sequence[Params | None], shares: Sequence[float], total: Params) -> bool:
    """Return whether the weighted sum of the clients' updates equals the update of all together, up to rounding."""
    updates = [part for part in parts if part is not None]
    if len(updates) < len(parts):
        return False
    mean = {n: sum((w * p[n] for w, p in zip(shares, updates, strict=True)), torch.zeros(())) for n in total}
    return _alike(total, mean)


def _alike(change: Params, other_change: Params | None) -> bool:
    """Return whether two changes of the weights are equal, up to rounding."""
    return other_change is not None and norm(_minus(change, other_change)) <= SAME_UPDATE * norm(change)


def _minus(update: Params, subtrahend: Params) -> Params:
    return {name: value - subtrahend[name] for name, value in update.items()}


def _fresh(server: Server, dtype: torch.dtype | None) -> Server:
    """Return the server's state with weights of `dtype` and the initial state of a plain optimizer."""
    params = {name: value.to(dtype or value.dtype) for name, value in server.params.items()}
    return replace(server, params=params, opt=Opt().init(Layout.of(params).pack(params)))


def _same(message: Tree, sent: Tree) -> bool:
    """Return whether a message equals the one that was sent, up to rounding."""
    own_leaves, sent_leaves = leaves(message), leaves(sent)
    if type(message) is not type(sent) or [m.shape for m in own_leaves] != [t.shape for t in sent_leaves]:
        return False
    pairs = [(m.double(), t.double()) for m, t in zip(own_leaves, sent_leaves, strict=True)]
    apart = sum(float((m - t).square().sum()) for m, t in pairs) ** 0.5
    return bool(apart <= SAME_UPDATE * sum(float(t.square().sum()) for _, t in pairs) ** 0.5)


# -- Whether a public law of noise accounts for what is seen --


def explained_by(law: Noise, transcripts: Sequence[Transcript]) -> bool:
    """Return whether the noise on what a defense's evidence shows is that of its law.

    transcripts: of runs with equal updates and other draws. Uploads must differ as independent noise of the law does:
    by its size in each tensor, by its shape, and without correlation over draws, clients and rounds.
    """
    readings = [evidence_numbers(transcript) for transcript in transcripts]
    if not readings[0] or len({tuple(one) for one in readings}) > 1:
        return False
    half, names = math.sqrt(0.5), [*next(iter(readings[0].values()))]
    pairs = [*zip(readings[::2], readings[1::2], strict=True)]
    rows = []  # of two draws each, [numbers] in units of the law
    for one, two in pairs:
        for unit in one:
            rows.append(np.concatenate([half * (one[unit][n] - two[unit][n]) / law.of(n) for n in names]))
    sizes = [len(next(iter(readings[0].values()))[n]) for n in names]
    values = np.stack(rows)
    tensors = np.split(values, np.cumsum(sizes)[:-1], axis=1)
    right = all(
        abs(math.log(max(part.std(), 1e-300))) < max(0.02, LAW_CHANCE / math.sqrt(2 * part.size)) for part in tensors
    )
    return right and _independent(values) and _shaped(law, values)


def evidence_numbers(transcript: Transcript) -> dict[tuple[int, int], dict[str, _Numbers]]:
    """Return the evidence about single clients, by round and client, and tensor."""
    view = transcript.view(HONEST_SERVER)
    readings = dict[tuple[int, int], dict[str, _Numbers]]()
    for number, part in enumerate(view.by_round()):
        for one in part.defense.evidence(part):
            if len(one.unit) == 1:
                numbers = {name: value.detach().cpu().double().numpy().ravel() for name, value in one.observed.items()}
                readings[number, one.unit[0].client] = numbers
    return readings


def _independent(values: _Numbers) -> bool:
    """Return whether numbers [rows, n] of size 1 are independent: rows of one another, and the numbers of each row.

    If a row repeats itself, at a shift, or is spanned by few directions, its spectrum has peaks or its length varies.
    """
    count = values.shape[1]
    across = np.corrcoef(values) if len(values) > 1 else np.eye(1)
    apart = np.abs(across - np.diag(np.diag(across))).max() < LAW_CHANCE / math.sqrt(count)
    spectrum = np.abs(np.fft.rfft(values, axis=1)[:, 1:]) ** 2 / count
    lengths = np.abs((values**2).mean(1) - 1) / np.sqrt((values**4).mean(1) - 1).clip(min=1e-9) * math.sqrt(count)
    return bool(apart and spectrum.max() < math.log(spectrum.size) + OVERWHELMING and lengths.max() < LAW_CHANCE)


OVERWHELMING = 20.0
"""What a spectrum of independent numbers, exponentially distributed, may exceed the log of its size by."""


def _shaped(law: Noise, values: _Numbers) -> bool:
    """Return whether differences of two draws have the law's shape, by Kolmogorov's and Smirnov's test."""
    draws = np.random.default_rng(0)
    one, two = (draws.laplace(size=20_000) if law.law == "laplace" else draws.normal(size=20_000) for _ in range(2))
    expected = (one - two) / math.sqrt(4 if law.law == "laplace" else 2)
    some = values.ravel()[:: -(-values.size // 20_000)]
    return bool(scipy.stats.ks_2samp(some, expected).pvalue > UNLIKELY)


LAW_CHANCE = 6.0
"""Standard deviations beyond which the size or a correlation of noise is not that of its law."""
UNLIKELY = 1e-6
"""Probability below which noise has not the shape of its law."""
