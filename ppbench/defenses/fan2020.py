"""Numbers printed by Fan et al., Rethinking Privacy Preserving Deep Learning (2020), as claims of its defenses."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = "Fan et al., Rethinking Privacy Preserving Deep Learning, 2020"
_METRICS = ("reconstruction", "label", "tracing")
_TABLES = {"mnist": "Table 7", "cifar10": "Table 8", "cifar100": "Table 9", "svhn": "Table 10"}
# Calibrated averaged performance; batch sizes 1, 4, 8 of reconstruction, then of label, then of tracing.
_CAP: dict[str, dict[str, tuple[float, ...]]] = {
    "dp": {
        "mnist": (3.38, 3.83, 3.69, 0, 0.71, 0.79, 0.91, 0.93, 0.95),
        "cifar10": (0.57, 0.63, 0.63, 0, 0.45, 0.47, 0.42, 0.57, 0.58),
        "cifar100": (0.23, 0.31, 0.30, 0.03, 0.22, 0.25, 0.14, 0.24, 0.24),
        "svhn": (0.77, 0.84, 0.85, 0, 0.50, 0.65, 0.68, 0.72, 0.72),
    },
    "ppdl": {
        "mnist": (4.04, 4.65, 3.91, 0, 0.66, 0.80, 0.95, 0.95, 0.95),
        "cifar10": (0.57, 0.61, 0.61, 0, 0.43, 0.49, 0.54, 0.54, 0.54),
        "cifar100": (0.21, 0.26, 0.26, 0, 0.19, 0.22, 0.19, 0.19, 0.19),
        "svhn": (0.72, 0.82, 0.81, 0, 0.54, 0.63, 0.68, 0.68, 0.68),
    },
    "spn": {
        "mnist": (4.30, 3.72, 4.33, 0.37, 0.73, 0.81, 0.90, 0.93, 0.94),
        "cifar10": (0.69, 0.70, 0.70, 0.24, 0.50, 0.56, 0.61, 0.63, 0.64),
        "cifar100": (0.37, 0.36, 0.35, 0.17, 0.28, 0.31, 0.29, 0.30, 0.30),
        "svhn": (0.88, 0.89, 0.90, 0.60, 0.66, 0.70, 0.66, 0.79, 0.79),
    },
}


def claims(defense: str) -> tuple[Claim, ...]:
    """Return the paper's CAP figures for "dp", "ppdl" (at theta .3) or "spn", all on DLNet."""
    found = []
    for dataset, values in _CAP[defense].items():
        for index, value in enumerate(values):
            metric, batch = _METRICS[index // 3], (1, 4, 8)[index % 3]
            when = (("theta", 0.3),) if defense == "ppdl" else ()
            found.append(Claim(f"cap_{metric}", float(value), dataset, "dlnet", batch, _TABLES[dataset], when))
    return tuple(found)
