"""The graph of clients that share pairwise noise in MP-DP, as a symmetric boolean matrix [K, K]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppbench.base.errors import UsageError


def complete(clients: int) -> Tensor:
    """Return the complete graph of `clients` clients, bool [K, K].

    Raises:
        UsageError: fewer than two clients.
    """
    check_size(clients)
    return ~torch.eye(clients, dtype=torch.bool)


def n_out(clients: int, n: int, generator: torch.Generator) -> Tensor:
    """Return a random n-out graph, bool [K, K]: each client picks n others, and every pick is an edge.

    A client has n neighbors or more, because others pick it too. (The paper's Fig. 2, n = 3, draws two a client.)

    Args:
        clients: number of clients K, >= 2.
        n: others that each client picks, without replacement; 1 <= n <= K - 1.
        generator: CPU generator.

    Raises:
        UsageError: K or n out of range.
    """
    check_size(clients, n)
    score = torch.rand(clients, clients, generator=generator, dtype=torch.float64)
    # Scores lie below 1, so 2 keeps a client from picking itself; the n smallest of a row are a uniform n-subset.
    order = torch.where(complete(clients), score, 2.0).argsort(dim=1)
    picks = torch.zeros(clients, clients, dtype=torch.bool).scatter(1, order[:, :n], True)
    return picks | picks.T


def check_size(clients: int, n: int | None = None) -> None:
    """Refuse numbers that make no graph.

    Raises:
        UsageError: fewer than two clients; n below 1 or above K - 1.
    """
    if clients < 2:
        raise UsageError(f"MP-DP: clients={clients!r} cannot share pairwise noise; there must be at least 2.")
    if n is not None and n < 1:
        raise UsageError(f"MP-DP: n={n!r} neighbors cannot be picked; n must be at least 1.")
    if n is not None and n >= clients:
        raise UsageError(
            f"MP-DP: n={n!r} neighbors cannot be picked among {clients} clients; n must be at most {clients - 1}, "
            "or take graph 'complete'."
        )


def check_graph(adjacency: Tensor, n: int | None = None) -> None:
    """Refuse a matrix that is no client graph, and a graph in which a client has no neighbor.

    Args:
        adjacency: bool [K, K].
        n: where given, the number of others that each client picked.

    Raises:
        UsageError: the matrix is not square, boolean, symmetric and free of loops; K < 2; n < 1 or n >= K; or a client
            without a neighbor, named, whose upload would carry independent noise alone.
    """
    check_matrix(adjacency)
    check_size(len(adjacency), n)
    alone = torch.nonzero(~adjacency.any(1)).flatten().tolist()
    if alone:
        raise UsageError(
            f"MP-DP: client {alone[0]} has no neighbor in the client graph and would add no pairwise noise; "
            "every client needs at least one."
        )


def check_matrix(adjacency: Tensor) -> None:
    """Refuse a matrix that is not square, boolean, symmetric and free of loops.

    Raises:
        UsageError: the first of these that fails.
    """
    if adjacency.dtype != torch.bool or adjacency.dim() != 2 or adjacency.shape[0] != adjacency.shape[1]:
        raise UsageError(
            f"MP-DP: a client graph of shape {tuple(adjacency.shape)} and {adjacency.dtype} cannot be used; "
            "it must be a square boolean matrix."
        )
    if not torch.equal(adjacency, adjacency.T):
        raise UsageError("MP-DP: the client graph is not symmetric; client k must be v's neighbor if v is k's.")
    loops = torch.nonzero(adjacency.diagonal()).flatten().tolist()
    if loops:
        raise UsageError(f"MP-DP: client {loops[0]} is its own neighbor; the graph's diagonal must be False.")


def without(adjacency: Tensor, colluders: Sequence[int]) -> Tensor:
    """Return the graph among the clients that do not collude, bool [K - C, K - C], in the old order.

    A colluder tells the server its noise, so its edges hide nothing.

    Raises:
        UsageError: a colluder that is no client, or none left who does not collude.
    """
    clients = len(adjacency)
    strangers = [c for c in colluders if not 0 <= c < clients]
    if strangers:
        raise UsageError(f"MP-DP: colluder {strangers[0]} is no client; clients are numbered 0 to {clients - 1}.")
    honest = [c for c in range(clients) if c not in set(colluders)]
    if not honest:
        raise UsageError(f"MP-DP: all {clients} clients collude with the server; at least one must not.")
    return adjacency[honest][:, honest]
