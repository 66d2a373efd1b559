"""What Yang et al., Efficiently Achieving Secure Model Training and Secure Aggregation (2024), print about MP-DP."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = (
    "Yang et al., Efficiently Achieving Secure Model Training and Secure Aggregation to Ensure Bidirectional "
    "Privacy-preservation in Federated Learning, 2024 (arXiv 2412.11737)"
)
_BUDGET = (("epsilon", 3.0),)
_TRAINING = "SGD, 100 epochs, batch 256 a client, privacy budget 3 (delta, clipping and rounds not given)"
_NETWORK = {"cifar10": "resnet20", "cifar100": "resnet56"}
_NAMES = {"cifar10": "CIFAR-10, ResNet20", "cifar100": "CIFAR-100, ResNet56"}
_FEDAVG = {"cifar10": (0.8460, 13.56, 0.7201), "cifar100": (0.5358, 14.10, 0.6730)}  # accuracy, PSNR in dB, ASR
# Tables 2 and 4: accuracy, PSNR in dB of the server's reconstructions, ASR of a client (None: not attacked).
_TABLES: dict[str, dict[str, tuple[float, float, float | None]]] = {
    "mpdp": {"cifar10": (0.8315, 9.22, 0.5030), "cifar100": (0.5064, 8.49, 0.5023)},
    "mp_cdp": {"cifar10": (0.8421, 12.15, None), "cifar100": (0.5103, 12.85, None)},
}
# Table 3, by clients: (accuracy, PSNR, ASR) of MP-DP, then of FedAvg.
_BREAST: dict[int, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    5: ((0.5647, 9.81, 0.5018), (0.5695, 15.61, 0.7305)),
    100: ((0.5898, 9.79, 0.5024), (0.6031, 15.30, 0.7236)),
}


def _images(defense: str) -> list[Claim]:
    """Return Tables 2 and 4: CIFAR-10 with ResNet20 and CIFAR-100 with ResNet56."""
    found = []
    for dataset, (accuracy, psnr, asr) in _TABLES[defense].items():
        where, beside = (dataset, _NETWORK[dataset], None), _FEDAVG[dataset]
        setting = f"{_NAMES[dataset]}, {_TRAINING}"
        found.append(
            Claim("accuracy", accuracy, *where, "Table 2", when=_BUDGET, undefended=beside[0], setting=setting)
        )
        attacked = f"{setting}; GIFD without auxiliary data"
        found.append(
            Claim("psnr_median", psnr, *where, "Table 2", when=_BUDGET, undefended=beside[1], setting=attacked)
        )
        if asr is not None:
            attacked = f"{setting}; a learned attack that knows half of the training set"
            found.append(Claim("asr", asr, *where, "Table 4", when=_BUDGET, undefended=beside[2], setting=attacked))
    return found


def _breast() -> list[Claim]:
    """Return Table 3: a breast-cancer data set (BreakHis) with ResNet11."""
    found = []
    for clients, (masked, plain) in _BREAST.items():
        for metric, value, undefended in zip(("accuracy", "psnr_median", "asr"), masked, plain, strict=True):
            found.append(
                Claim(
                    *(metric, value, "breakhis", "resnet11", None, "Table 3"),
                    when=_BUDGET,
                    clients=clients,
                    undefended=undefended,
                    setting=f"BreakHis, ResNet11, {clients} clients, {_TRAINING}",
                )
            )
    return found


def _costs() -> list[Claim]:
    """Return the ratios of seconds an epoch, CIFAR-10 and five clients."""
    setting = "CIFAR-10, ResNet20, 5 clients, Xeon Gold 6148 and RTX 3090"
    return [
        Claim(
            *("client_cost_ratio", 1.51 / 1.32, "cifar10", "resnet20", None, "Table 5 (Train)"),
            setting=setting,
            note="1.51 s beside 1.32 s, without drawing noise; the protocol takes C + 2 backward passes, C the classes",
        ),
        Claim(
            *("client_cost_ratio", 2.11 / 1.32, "cifar10", "resnet20", None, "Table 1 (Client)"),
            setting=setting,
            note="2.11 s beside 1.32 s, noise included",
        ),
    ]


def claims(defense: str) -> tuple[Claim, ...]:
    """Return what the paper prints about "mpdp" or "mp_cdp"; about "mp_dp_naive" it draws a figure and no number."""
    if defense == "mp_dp_naive":
        return ()
    if defense == "mp_cdp":
        return tuple(_images(defense))
    guarantee = Claim(
        *("epsilon", 3.0, "", "", None, "Theorem 10"),
        when=_BUDGET,
        setting="any network, each round",
        note="(epsilon, delta)-differential privacy of what the server recovers of each client, a round",
    )
    iterate = Claim(
        *("agreement", None, "", "", None, "Theorem 9"),
        setting="any network, during training",
        note="a client learns nothing about the true model but what follows from its own data",
    )
    return (*_images(defense), *_breast(), guarantee, iterate, *_costs())
