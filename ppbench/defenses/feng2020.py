"""What Feng et al., Practical and Bilateral Privacy-preserving Federated Learning (2020), print about their defense."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = "Feng et al., Practical and Bilateral Privacy-preserving Federated Learning, 2020 (arXiv 2002.09843)"
_EPOCHS = "200 epochs, batch 32 a client, squared loss"
_CLIENTS = (1, 5, 10)
# Mean squared error on the test part by network, for 1, 5 and 10 clients: (PBPFL, FedAvg).
_UBMD: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {  # by the MLP's layers
    3: ((0.060, 0.078, 0.097), (0.059, 0.079, 0.097)),
    5: ((0.059, 0.077, 0.101), (0.059, 0.079, 0.100)),
    7: ((0.059, 0.082, 0.114), (0.058, 0.086, 0.113)),
}
_ABD = ((0.047, 0.088, 0.114), (0.048, 0.085, 0.117))


def _parties(clients: int) -> str:
    return "1 client" if clients == 1 else f"{clients} clients"


def _errors() -> list[Claim]:
    """Return Table 1: UBMD is UCI Bank Marketing, ABD the retina images of APTOS 2019."""
    found = []
    for layers, (masked, plain) in _UBMD.items():
        for clients, value, undefended in zip(_CLIENTS, masked, plain, strict=True):
            found.append(
                Claim(
                    *("mse", value, "bank-marketing", "mlp", None, "Table 1"),
                    clients=clients,
                    options=(("layers", layers),),
                    undefended=undefended,
                    setting=f"UBMD (Bank Marketing, 8:1:1), MLP-{layers}, {_parties(clients)}, {_EPOCHS}",
                )
            )
    for clients, value, undefended in zip(_CLIENTS, *_ABD, strict=True):
        found.append(
            Claim(
                *("mse", value, "aptos2019", "resnet20", None, "Table 1"),
                clients=clients,
                undefended=undefended,
                setting=f"ABD (APTOS 2019, 64 x 64), ResNet20, {_parties(clients)}, {_EPOCHS}",
            )
        )
    return found


def _costs() -> list[Claim]:
    """Return the ratios of Table 3 (seconds for 250 iterations) and of the text below it (megabytes)."""
    setting = "ResNet56, 224 x 224, batch 32, 250 iterations, one Tesla M40"
    return [
        Claim(
            *("client_backward_ratio", 225.86 / 88.89, "", "resnet56", None, "Table 3 (LBP)"),
            setting=setting,
            note="225.86 s beside 88.89 s",
        ),
        Claim(
            *("client_cost_ratio", 228.06 / 91.08, "", "resnet56", None, "Table 3 (client, total)"),
            setting=setting,
            note="228.06 s beside 91.08 s",
        ),
    ]


def _upload() -> Claim:
    return Claim(
        *("upload_ratio", 3.0, "", "resnet56", None, "Sec. 5.2.3"),
        setting="ResNet56",
        note="2.55 MB beside 0.85 MB; 0.85 million is the number of parameters, so that the ratio compares and the "
        "megabytes do not",
    )


def claims(defense: str) -> tuple[Claim, ...]:
    """Return what the paper prints about "pbpfl", or about "pbpfl_ext" (Appendix C, which prints no figures)."""
    if defense == "pbpfl_ext":
        return (_upload(),)
    accuracy = Claim(
        *("accuracy", 0.6174, "ham10000", "resnet20", None, "Table 2"),
        clients=5,
        undefended=0.6168,
        setting=f"LDC (HAM10000, 64 x 64), ResNet20, 5 clients, {_EPOCHS}",
        note="beside FedAvg with squared loss; with cross-entropy it reaches 64.93%",
    )
    prediction = Claim(
        *("agreement", None, "", "", None, "Sec. 4, Lemma 3"),
        setting="any network, during training",
        note="clients cannot tell which of the true outputs is the largest: they cannot obtain the true prediction",
    )
    return (*_errors(), accuracy, prediction, _upload(), *_costs())
