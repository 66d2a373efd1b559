"""What Cao et al. (FedPC, 2022) print about their defense, and about the baselines beside it."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = (
    "Cao et al., A Federated Deep Learning Framework for Privacy Preservation and Communication Efficiency, "
    "Journal of Systems Architecture 124, 2022 (arXiv 2001.09782)"
)
CENTRAL = {"cifar10": 0.9172, "lggs": 0.9959}  # Table 1
# Accuracy by clients: (FedPC, weight transmission, FedAvg).
_CIFAR10 = {
    3: (0.9009, 0.9101, 0.9113),
    4: (0.8914, 0.9119, 0.9044),
    5: (0.8819, 0.9115, 0.9021),
    6: (0.8752, 0.9134, 0.8992),
    7: (0.8697, 0.9102, 0.8935),
    8: (0.8632, 0.9117, 0.8906),
    9: (0.8471, 0.9095, 0.8824),
    10: (0.8388, 0.9120, 0.8772),
}
_LGGS = {
    3: (0.9952, 0.9966, 0.9959),
    4: (0.9951, 0.9913, 0.9955),
    5: (0.9887, 0.9962, 0.9926),
    6: (0.9915, 0.9936, 0.9944),
    7: (0.9914, 0.9926, 0.9942),
    8: (0.9925, 0.9912, 0.9904),
    9: (0.9901, 0.9936, 0.9938),
    10: (0.9887, 0.9959, 0.9887),
}
_DIRICHLET = {
    3: (0.8927, 0.9051, 0.9016),
    5: (0.8564, 0.8955, 0.8879),
    7: (0.8317, 0.8941, 0.8751),
    10: (0.8001, 0.8934, 0.8540),
}
_TABLES = (
    (_CIFAR10, "cifar10", "resnet50_fixup", "Table 2", "imbalanced", "CIFAR-10, 250 rounds"),
    (_LGGS, "lggs", "unet", "Table 3", "imbalanced", "LGG segmentation (256 x 256), 35 rounds"),
    (_DIRICHLET, "cifar10", "resnet50_fixup", "Table 4", "dirichlet", "CIFAR-10, 250 rounds"),
)
_SENT = (("packing", "two_bits"), ("padded", False), ("masks", "none"))


def saving(clients: int) -> float:
    """Return the share of FedAvg's bytes, both ways, that a round saves: 1 - (N + 1 + (N-1)/16) / 2N (Eq. 8)."""
    return 1 - (clients + 1 + (clients - 1) / 16) / (2 * clients)


def _accuracies(column: int) -> list[Claim]:
    """Return Tables 2 to 4: FedPC's accuracy (column 0) or weight transmission's (1), FedAvg's beside it."""
    return [
        Claim(
            *("accuracy", row[column], dataset, model, None, source),
            clients=clients,
            undefended=row[2],
            setting=f"{setting}, {clients} clients, {dealt}",
            partition=dealt,
        )
        for rows, dataset, model, source, dealt, setting in _TABLES
        for clients, row in rows.items()
    ]


def _bytes() -> list[Claim]:
    """Return the savings that the paper prints; its 42.20% is 42.1875%, rounded up."""
    return [
        Claim(
            *("bytes_saving", printed, "", "", None, "Eq. 8, Figure 6"),
            when=_SENT,
            clients=clients,
            setting=f"any network of 32-bit weights, {clients} clients",
            note=f"Eq. 8 gives {100 * saving(clients):.4f}%",
        )
        for clients, printed in ((3, 0.3125), (10, 0.4220))
    ]


def claims(defense: str) -> tuple[Claim, ...]:
    """Return what the paper prints about "fedpc", "phong" (its reference 2) or "central"."""
    if defense == "central":
        return tuple(
            Claim("accuracy", value, data, model, None, "Table 1", setting=f"centralized, {rounds} epochs")
            for (data, value), model, rounds in zip(CENTRAL.items(), ("resnet50_fixup", "unet"), (250, 35), strict=True)
        )
    if defense == "phong":
        return tuple(_accuracies(1))
    hidden = Claim(
        *("psnr_median", None, "", "", None, "Theorems 2 and 4"),
        setting="any network; the server, alone or with all clients but two",
        note="the server cannot recover a client's data: it would have to solve a non-linear system whose unknowns are "
        "the mini-batch gradients and the secret learning rate",
    )
    return (*_accuracies(0), *_bytes(), hidden)
