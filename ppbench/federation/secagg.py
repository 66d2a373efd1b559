"""Pairwise secrets between clients: masks that cancel in a sum, and noise that two parties share; and evidence of sums.

X25519 key agreement through the server; HKDF-SHA256 separates sessions, rounds and purposes; ChaCha20 expands. Sums of
fixed-point numbers are taken modulo 2^64 (int64 wraps), so masked values are uniform and do not reveal their size. Keys
are of a party's secret draws, so that a benchmark can be repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from ppbench.base.errors import Overflow, ProtocolError, UsageError
from ppbench.base.secret_draws import SecretDraws
from ppbench.base.tree import Params, Tree, node
from ppbench.federation.contract import Context, Defense, Round, Server, Step
from ppbench.federation.evidence import Evidence, Shared
from ppbench.federation.plan import Data, Layout, Plan
from ppbench.federation.view import Exchange, View
from ppbench.federation.wire import Hello, checked_count


@node
class Announce:
    """Client to server at set-up. count: int64 scalar N_k; public: [32] uint8, its X25519 public key."""

    count: Tensor
    public: Tensor


@node
class Roster:
    """Server to client at set-up. counts: [N] int64; public: [N, 32] uint8; graph: [N, N] bool, neighbors."""

    counts: Tensor
    public: Tensor
    graph: Tensor


@node
class Keys:
    """A client's state. private: [32] uint8; shared: [N, 32] uint8 secrets with every neighbor; graph, counts: public.

    All but `private` are empty before the roster arrives.
    """

    private: Tensor
    shared: Tensor
    graph: Tensor
    counts: Tensor

    def neighbors(self, party: int) -> list[int]:
        """Return the clients that `party` shares a secret with."""
        return [int(other) for other in self.graph[party].nonzero().flatten()]

    def secret(self, other: int) -> Tensor:
        """Return the secret [32] uint8 shared with the client `other`."""
        return self.shared[other]

    def share(self, party: int) -> float:
        """Return N_k / N of `party`."""
        return int(self.counts[party]) / int(self.counts.sum())

    def known_shares(self, party: int) -> dict[int, float]:
        """Return N_k / N by client, of all whose number `party`, whose state this is, knows."""
        return {client: self.share(client) for client in range(len(self.counts))}


@node
class Neighbors:
    """Server to client at set-up, in the place of `Roster`: what it needs of a sparse graph.

    total: int64 scalar, all clients' examples; clients: [D] int64, its neighbors; public: [D, 32] uint8, their keys.
    """

    total: Tensor
    clients: Tensor
    public: Tensor


@node
class NeighborKeys:
    """A client's state that holds nothing of clients who are no neighbors. count, total: int64, its and all examples.

    private: [32] uint8; clients: [D] int64; shared: [D, 32] uint8, the secrets with these.
    """

    private: Tensor
    clients: Tensor
    shared: Tensor
    count: Tensor
    total: Tensor

    def neighbors(self, party: int) -> list[int]:
        """Return the clients that `party`, whose state this is, shares a secret with."""
        return [int(other) for other in self.clients]

    def secret(self, other: int) -> Tensor:
        """Return the secret [32] uint8 shared with the client `other`."""
        return self.shared[self.clients == other][0]

    def share(self, party: int) -> float:
        """Return N_k / N of `party`, whose state this is."""
        return int(self.count) / int(self.total)

    def known_shares(self, party: int) -> dict[int, float]:
        """Return N_k / N by client, of all whose number `party`, whose state this is, knows: its own alone."""
        return {party: self.share(party)}


PairKeys = Keys | NeighborKeys


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _words(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def new_private(ctx: Context) -> Tensor:
    """Return a party's X25519 private key, [32] uint8, of its secret draws."""
    return ctx.secret.random_bytes((32,))


def public_of(private: Tensor) -> Tensor:
    """Return the public key [32] uint8 of a private one."""
    return _words(X25519PrivateKey.from_private_bytes(_bytes(private)).public_key().public_bytes_raw())


def shared_secret(private: Tensor, public: Tensor, sender: str) -> Tensor:
    """Return the secret [32] uint8 of a private and `sender`'s public key (ProtocolError: a bad public key)."""
    return _secret(X25519PrivateKey.from_private_bytes(_bytes(private)), public, sender)


def _secret(own: X25519PrivateKey, public: Tensor, sender: str) -> Tensor:
    try:
        return _words(own.exchange(X25519PublicKey.from_public_bytes(_bytes(public))))
    except ValueError as cause:
        raise ProtocolError(f"{sender} sent a public key that gives no shared secret: {cause}.") from cause


def expand_secret(secret: Tensor, info: str, words: int) -> Tensor:
    """Return `words` uniform int64 from a shared secret [32] uint8, different for every `info`."""
    key = HKDF(SHA256(), 32, None, info.encode()).derive(_bytes(secret))
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return torch.frombuffer(bytearray(cipher.update(bytes(8 * words))), dtype=torch.int64)


def new_keys(ctx: Context) -> Keys:
    """Return a client's key pair, of its secret draws."""
    private = new_private(ctx)
    none = torch.zeros(0, dtype=torch.int64)
    return Keys(private, torch.zeros(0, 32, dtype=torch.uint8), torch.zeros(0, 0, dtype=torch.bool), none)


def exchange_keys(server: Server, cohort: Sequence[int], graph: Tensor) -> Generator[Step, Mapping[int, Tree], Server]:
    """Run set-up as the server: collect counts and public keys, then send the roster to all (ProtocolError)."""
    server, public = yield from _collect_keys(server, cohort)
    yield Step(server, dict.fromkeys(cohort, Roster(server.counts, public, graph)))
    return server


def exchange_neighbor_keys(
    server: Server, cohort: Sequence[int], neighbors: Tensor
) -> Generator[Step, Mapping[int, Tree], Server]:
    """Run set-up as the server of a sparse graph, `neighbors` [N, D]: each client gets its neighbors' keys alone."""
    server, public = yield from _collect_keys(server, cohort)
    total = server.counts.sum()
    out = {c: Neighbors(total, others, public[others]) for c, others in zip(cohort, neighbors, strict=True)}
    yield Step(server, out)
    return server


def _collect_keys(server: Server, cohort: Sequence[int]) -> Generator[Step, Mapping[int, Tree], tuple[Server, Tensor]]:
    answers = yield Step(server, dict.fromkeys(cohort, Hello()))
    counts, public = announced_keys(cohort, answers)
    return Server(server.params, server.opt, counts, server.own), public


def announced_keys(cohort: Sequence[int], answers: Mapping[int, Tree]) -> tuple[Tensor, Tensor]:
    """Return the cohort's numbers of examples [N] int64 and public keys [N, 32], by client (ProtocolError: not all)."""
    for client, answer in answers.items():
        if not isinstance(answer, Announce):
            raise ProtocolError(f"Client {client} answered set-up with {type(answer).__name__}, not Announce.")
        if (answer.public.dtype, answer.public.shape) != (torch.uint8, (32,)):
            actual = f"{answer.public.dtype} of shape {tuple(answer.public.shape)}"
            raise ProtocolError(f"Client {client} sent a public key as {actual}, not uint8 of shape (32,).")
    missing = [client for client in cohort if client not in answers]
    if missing:
        raise ProtocolError(f"Client {missing[0]} did not answer set-up; masks need everybody's public key.")
    counts = torch.stack([checked_count(c, answers[c].count) for c in sorted(answers)])
    return counts, torch.stack([answers[c].public for c in sorted(answers)])


def announce(private: Tensor, count: int) -> Announce:
    """Return a client's set-up message."""
    return Announce(torch.tensor(count), public_of(private))


def with_secrets(me: PairKeys, party: int, roster: Roster) -> Keys:
    """Return the client's state with a secret for each of its neighbors (ProtocolError: a bad public key)."""
    shared, others = torch.zeros(len(roster.public), 32, dtype=torch.uint8), roster.graph[party].nonzero().flatten()
    if len(others):
        shared[others] = _secrets(me.private, others, [roster.public[other] for other in others.tolist()])
    return Keys(me.private, shared, roster.graph, roster.counts)


def _secrets(private: Tensor, others: Tensor, public: Iterable[Tensor]) -> Tensor:
    """Return the secrets [D, 32] of a private key and the public keys, each [32], of the clients `others` [D]."""
    own = X25519PrivateKey.from_private_bytes(_bytes(private))
    pairs = zip(others.tolist(), public, strict=True)
    return torch.stack([_secret(own, key, f"Client {other}") for other, key in pairs])


def setup_answer(ctx: Context, me: PairKeys, message: Tree, data: Data) -> tuple[PairKeys, Tree | None] | None:
    """Return a client's new state and its answer to a set-up message; None for any other message."""
    if isinstance(message, Hello):
        return me, announce(me.private, len(data.x))
    if isinstance(message, Roster):
        return with_secrets(me, ctx.party, message), None
    if isinstance(message, Neighbors):
        shared, count = _secrets(me.private, message.clients, message.public), torch.tensor(len(data.x))
        return NeighborKeys(me.private, message.clients, shared, count, message.total), None
    return None


def stream(me: PairKeys, ctx: Context, other: int, purpose: str, words: int) -> Tensor:
    """Return `words` uniform int64 that only `ctx.party` and `other` can derive, new in every session and round."""
    low, high = sorted((ctx.party, other))
    return expand_secret(me.secret(other), f"ppbench|{ctx.session}|{ctx.round}|{low}|{high}|{purpose}", words)


def complete_graph(clients: int) -> Tensor:
    """Return the complete graph of `clients` clients, bool [K, K]."""
    return ~torch.eye(clients, dtype=torch.bool)


def ring_neighbors(clients: int, degree: int, secret: SecretDraws) -> Tensor:
    """Return the neighbors of each of K clients in a random graph of even degree, [K, D] int64; D is K - 1 at most.

    Clients stand on a circle in random order, each beside its nearest: the Harary graph of Bell et al. 2020 (Algorithm
    2), which stays connected when fewer than `degree` clients are removed. An odd degree becomes the next even one.
    """
    order, half = secret.permutation(clients), min(-(-degree // 2), clients // 2)
    steps = torch.cat([torch.arange(1, half + 1), -torch.arange(1, half + 1)])
    steps = steps.remainder(clients).unique()  # at both sides the opposite client may be the same one
    others = order[(torch.arange(clients)[:, None] + steps) % clients]
    neighbors = torch.empty_like(others)
    neighbors[order] = others.sort(dim=1).values
    return neighbors


def zero_sum(me: PairKeys, ctx: Context, purpose: str, words: int) -> Tensor:
    """Return this client's mask [words] int64: over all clients of the graph the masks sum to 0 modulo 2^64."""
    shares = ((other, stream(me, ctx, other, purpose, words)) for other in me.neighbors(ctx.party))
    return add_signed(ctx.party, shares, torch.zeros(words, dtype=torch.int64))


def add_signed(party: int, shares: Iterable[tuple[int, Tensor]], total: Tensor) -> Tensor:
    """Add signed shares to `total`, and return it: the lower index of a pair adds its share, the other subtracts it."""
    for other, share in shares:
        total.add_(share, alpha=1 if party < other else -1)
    return total


def to_unit(words: Tensor) -> Tensor:
    """Return uniform int64 `words` as float64 in (-1, 1), uniform on the odd multiples of 2^-53: exact, never 0."""
    return ((words >> 11) * 2 + 1).double() * 2.0**-53


def pair_noise(me: PairKeys, ctx: Context, purpose: str, words: int) -> Tensor:
    """Return this client's noise [words], float64: uniform on (-1, 1) per neighbor, which has the opposite sign."""
    shares = ((other, to_unit(stream(me, ctx, other, purpose, words))) for other in me.neighbors(ctx.party))
    return add_signed(ctx.party, shares, torch.zeros(words, dtype=torch.float64))


def to_ring(values: Tensor, bits: int, share: float = 1.0) -> Tensor:
    """Return `share` times `values` (float64) as fixed-point int64 with `bits` fractional bits.

    Raises Overflow for a value (not its share) that is not finite, or at least 2^(62 - bits): if shares sum to 1, a sum
    is in range for any number of clients.
    """
    limit = 2.0 ** (62 - bits)
    if not bool((values.abs() < limit).all()):  # NaN fails too
        raise Overflow(
            f"A value to be masked is {float(values.abs().max()):.3g}; fixed point with {bits} fractional bits holds "
            f"finite values below {limit:g}."
        )
    return (values.double() * share * 2.0**bits).round().to(torch.int64)


def from_ring(total: Tensor, bits: int) -> Tensor:
    """Return a sum of fixed-point numbers as float64."""
    return total.double() / 2.0**bits


def hide(me: PairKeys, ctx: Context, purpose: str, values: Params, bits: int, share: float) -> Params:
    """Return `share` times `values` in fixed point plus this client's mask of `purpose`, int64 (Overflow)."""
    layout = Layout.of(values)
    flat = layout.pack(values)
    ring = to_ring(flat.cpu(), bits, share) + zero_sum(me, ctx, purpose, len(flat))
    return layout.unpack(ring.to(flat.device))


def sum_of_masked(parts: Sequence[Params], bits: int) -> Params:
    """Return the sum of all clients' masked values, float64: the masks cancel."""
    return {name: from_ring(torch.stack([part[name] for part in parts]).sum(0), bits) for name in parts[0]}


def need_everybody(server: Server, uploads: Mapping[int, Tree]) -> None:
    """Raise ProtocolError unless every client sent an upload."""
    if len(uploads) != len(server.counts):
        sent = f"{len(uploads)} of {len(server.counts)} clients sent an upload"
        raise ProtocolError(f"{sent}; masks cancel only in everybody's sum.")


@dataclass(frozen=True)
class PairedDefense(Defense):
    """A defense whose clients share keys with one another (if `paired`), as `Keys` in the client's state."""

    fewest: ClassVar[int] = 2  # clients that hide one another
    everybody: ClassVar[bool] = True

    @property
    def paired(self) -> bool:
        """Whether clients agree on keys: by default if the server can read only sums."""
        return self.sums

    def check(self, plan: Plan) -> None:
        """As the base class; with keys also refuse too few clients, and clients that upload one after another."""
        super().check(plan)
        if self.paired and plan.clients < self.fewest:
            pairs = f"Defense {self.name!r} hides clients' uploads by keys that pairs of them share"
            raise UsageError(f"{pairs}; use at least {self.fewest} clients.")
        if self.paired and plan.schedule != "parallel":
            raise UsageError(
                f"Defense {self.name!r} needs the sum over all clients, so they upload together; use --schedule "
                f"parallel, not {plan.schedule!r}."
            )

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Draw a key pair."""
        return new_keys(ctx) if self.paired else super().init_client(ctx, params)

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Collect numbers of examples; with keys, also exchange public keys between all clients."""
        if not self.paired:
            return super().setup(ctx, server, cohort)
        return exchange_keys(server, cohort, complete_graph(len(cohort)))

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Announce a public key and agree on secrets at set-up; then answer as usual."""
        if self.paired and (answer := setup_answer(ctx, me, message, data)):
            return answer
        return super().reply(ctx, me, message, result, data)


# -- Keys that each client shares with the server and with nobody else, for defenses that subclass `KeyedDefense` --
# X25519 at set-up over an open link, as `secagg` does between clients. The keys lie in `Server.own` and in the
# clients' states, so a view has them where its threat model has those: "server/1" all, "client/1" its own, a
# listener none.


@node(name="ppbench.federation.shared_keys.Offer")
class Offer:
    """Server to client at set-up, in the place of `Hello`. public: [32] uint8, the server's X25519 public key."""

    public: Tensor


@node(name="ppbench.federation.shared_keys.SharedKeys")
class SharedKeys:
    """A party's keys. private: [32] uint8. shared: uint8, [32] of a client, [N, 32] of the server; 0 before set-up."""

    private: Tensor
    shared: Tensor


@dataclass(frozen=True)
class KeyedDefense(Defense):
    """A defense whose clients each share a key with the server.

    Override `upload`, which hides by `stream(ctx, me, ctx.party, ...)`, and `decoded`, which undoes it by `stream(ctx,
    server.own, client, ...)`; where `decode`, which needs no key, gives no update, also `evidence` for "client/1".
    Further state goes into a `@node` with a field `keys`, which holds what the default `init_server` or `init_client`
    returns.
    """

    def init_server(self, ctx: Context, params: Params) -> Server:
        """Return the server's state with a key pair of its own."""
        keys = SharedKeys(new_private(ctx), torch.zeros(ctx.plan.clients, 32, dtype=torch.uint8))
        return replace(super().init_server(ctx, params), own=keys)

    def init_client(self, ctx: Context, params: Params) -> Tree:
        """Return a client's key pair."""
        return SharedKeys(new_private(ctx), torch.zeros(32, dtype=torch.uint8))

    def setup(self, ctx: Context, server: Server, cohort: Sequence[int]) -> Round:
        """Send everybody the server's public key; collect theirs and their numbers of examples (ProtocolError)."""
        keys = keys_of(server.own)
        answers = yield Step(server, dict.fromkeys(cohort, Offer(public_of(keys.private))))
        counts, public = announced_keys(cohort, answers)
        shared = torch.stack([shared_secret(keys.private, key, f"Client {c}") for c, key in enumerate(public)])
        own = _with_keys(server.own, replace(keys, shared=shared.to(keys.private.device)))
        return replace(server, counts=counts, own=own)

    def reply(self, ctx: Context, me: Tree, message: Tree, result: Tree, data: Data) -> tuple[Tree, Tree | None]:
        """Agree on the key at set-up; then answer as usual."""
        if not isinstance(message, Offer):
            return super().reply(ctx, me, message, result, data)
        keys = keys_of(me)
        shared = shared_secret(keys.private, message.public, "The server").to(keys.private.device)
        return _with_keys(me, replace(keys, shared=shared)), announce(keys.private, len(data.x))

    def stream(self, ctx: Context, state: Tree, client: int, purpose: str, words: int) -> Tensor:
        """Return uniform int64 [words], on the CPU, that only the server and `client` can derive in this round.

        Their `argsort()` is a random order. Session, round and `purpose` are part of the derivation; the first words do
        not depend on `words`. `state` is the client's state, or the server's own (`Server.own`).
        """
        shared = keys_of(state).shared
        key = shared if shared.dim() == 1 else shared[client]
        return expand_secret(key, f"ppbench|server|{ctx.session}|{ctx.round}|{client}|{purpose}", words)


def keys_of(state: Tree) -> SharedKeys:
    """Return the keys in a client's state or the server's own: the state itself, or its field `keys`."""
    return state if isinstance(state, SharedKeys) else state.keys


def _with_keys(state: Tree, keys: SharedKeys) -> Tree:
    return keys if isinstance(state, SharedKeys) else replace(state, keys=keys)


# -- Evidence of whole cohorts, of which the server reads only a sum --


def cohorts(exchanges: Iterable[Exchange], clients: int) -> list[list[Exchange]]:
    """Return the exchanges of every probe in which each of `clients` clients sent one upload."""
    by_probe: dict[int, list[Exchange]] = defaultdict(list)
    for exchange in exchanges:
        by_probe[exchange.slot.probe].append(exchange)
    return [unit for unit in by_probe.values() if len(unit) == clients]


def cohort_evidence(shared: Shared, mean: Params, unit: Sequence[Exchange], server: Server) -> Evidence:
    """Return evidence about a cohort (one upload per client) from the N_k-weighted `mean` of its gradients."""
    counts = server.counts[[e.slot.client for e in unit]].double()
    slots = tuple(e.slot for e in unit)
    return shared.mean(slots, mean, server.params, (counts / counts.sum()).tolist(), "sum")


# -- Colluders' unmasking of uploads, for the evidence of several defenses --


def others_masks(
    view: View, exchange: Exchange, among: Sequence[int], keys_of: Callable[[Tree], Tree], purpose: str, words: int
) -> Tensor | None:
    """Return the sum [words] int64 of the other clients' masks; added to a client's masked upload it unmasks it.

    None if `view` lacks the keys (`keys_of` a client's state) of one of `among`, the clients whose masks cancel.
    """
    victim, session = exchange.slot.client, view.session(exchange)
    others, total = [client for client in among if client != victim], torch.zeros(words, dtype=torch.int64)
    for other in others:
        state = view.state_at(exchange, other)
        if state is None:
            return None
        keys = keys_of(state)
        if victim in keys.neighbors(other):  # the others' masks among themselves cancel
            ctx = Context(view.plan, exchange.round, session, other, torch.Generator())
            add_signed(other, [(victim, stream(keys, ctx, victim, purpose, words))], total)
    return total if others else None
