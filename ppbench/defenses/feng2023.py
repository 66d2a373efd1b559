"""What Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning (2023), print about their defense."""

from __future__ import annotations

from ppbench.federation.contract import Claim

PAPER = "Feng et al., BAFFLE: A Baseline of Backpropagation-Free Federated Learning, ECCV 2024 (arXiv 2301.12195)"
_Named = tuple[tuple[str, float | str], ...]
_MODELS = {"lenet_baffle": "a LeNet of 2.7e4 parameters", "wrn_10_2": "WRN-10-2"}
_DATA = {"mnist": ("MNIST", 20), "cifar10": ("CIFAR-10", 40), "cifar100": ("CIFAR-100", 40)}  # rounds, of an epoch each
# Table 1, by network and data: percent of BAFFLE at the three K; then at the first K without averaging, with ReLU, with
# SELU, with central differences; then of backpropagation. CIFAR-100 is Top-5.
_IID: dict[tuple[str, str], tuple[tuple[float, ...], tuple[float, float, float, float], float]] = {
    ("lenet_baffle", "mnist"): ((87.27, 89.48, 92.18), (85.06, 81.55, 86.18, 76.02), 94.31),
    ("lenet_baffle", "cifar10"): ((48.78, 51.82, 53.62), (47.97, 44.99, 48.65, 45.97), 58.75),
    ("lenet_baffle", "cifar100"): ((41.54, 45.68, 48.72), (36.81, 39.49, 37.34, 36.53), 54.67),
    ("wrn_10_2", "mnist"): ((88.35, 89.57, 95.17), (85.89, 79.08, 76.44, 77.45), 97.11),
    ("wrn_10_2", "cifar10"): ((52.27, 55.59, 58.63), (50.01, 49.76, 43.37, 42.89), 62.29),
    ("wrn_10_2", "cifar100"): ((46.61, 51.65, 53.15), (45.86, 44.44, 41.79, 39.62), 60.08),
}
_IID_K = {"mnist": (100, 200, 500), "cifar10": (200, 500, 1000), "cifar100": (200, 500, 1000)}
# Table 2: percent at K = 200, 500, 1000, then of backpropagation. Whether CIFAR-100 is Top-5 here is not said.
_DIRICHLET: dict[tuple[str, str], tuple[tuple[float, float, float], float]] = {
    ("lenet_baffle", "cifar10"): ((35.21, 38.14, 39.71), 44.41),
    ("lenet_baffle", "cifar100"): ((28.12, 30.92, 33.35), 38.43),
    ("wrn_10_2", "cifar10"): ((39.53, 41.69, 43.42), 51.18),
    ("wrn_10_2", "cifar100"): ((30.44, 32.89, 34.08), 40.85),
}
# Table 3, by K: percent (Top-1, Top-5), the mean of the four domains, then Top-1 of each; 0 is backpropagation.
_DOMAINS: dict[int, tuple[tuple[float, float], tuple[float, float, float, float]]] = {
    20: ((56.91, 80.24), (44.75, 52.48, 66.63, 63.78)),
    50: ((59.90, 82.46), (47.87, 53.43, 71.28, 67.02)),
    100: ((62.87, 84.65), (50.32, 57.43, 74.19, 69.53)),
    200: ((64.98, 87.65), (51.42, 60.98, 76.05, 71.51)),
    500: ((66.98, 88.40), (53.33, 62.58, 78.84, 73.17)),
    0: ((70.12, 90.04), (55.71, 65.13, 82.44, 77.19)),
}
# Table 4: MB of backpropagation, smallest and largest of BAFFLE, on CIFAR's and on ImageNet's image size.
_MEMORY: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "lenet_baffle": ((1680, 67, 174), (2527, 86, 201)),
    "wrn_10_2": ((1878, 75, 196), (3425, 94, 251)),
    "mobilenet": ((2041, 102, 217), (5271, 121, 289)),
}
_NAMES = ("Art", "Clipart", "Product", "Real World")


def _metric(dataset: str) -> str:
    return "accuracy_top5" if dataset == "cifar100" else "accuracy"


def _trained(k: int, **more: float | str) -> _Named:
    """Return the parameters of the tables' trainings; `more` are changed or added."""
    return tuple({"k": k, "level": "epoch", "scheme": "twice", **more}.items())


def _iid() -> list[Claim]:
    """Return Table 1: ten clients with equal shares of every class, and its ablations at the smallest K."""
    found = []
    for (model, dataset), (at_k, ablated, plain) in _IID.items():
        name, rounds = _DATA[dataset]
        least = _IID_K[dataset][0]
        rows: list[tuple[float, str, _Named, _Named]] = [
            (percent, "Table 1", _trained(k), ()) for k, percent in zip(_IID_K[dataset], at_k, strict=True)
        ]
        no_average, relu, selu, central = ablated
        rows.append((no_average, "Table 1 (w/o EMA)", _trained(least, ema=0.0), ()))
        rows.append((relu, "Table 1 (ReLU)", _trained(least), (("activation", "relu"),)))
        rows.append((selu, "Table 1 (SELU)", _trained(least), (("activation", "selu"),)))
        rows.append((central, "Table 1 (Central)", _trained(least, scheme="central"), ()))
        for percent, source, when, options in rows:
            found.append(
                Claim(
                    *(_metric(dataset), percent / 100, dataset, model, None, source),
                    when=when,
                    clients=10,
                    options=options,
                    undefended=plain / 100,
                    setting=f"{name}, {_MODELS[model]}, 10 clients, iid, {rounds} rounds of an epoch, Adam",
                    partition="iid",
                )
            )
    return found


def _dirichlet() -> list[Claim]:
    """Return Table 2: a hundred clients with unlike shares of the classes."""
    return [
        Claim(
            *("accuracy", percent / 100, dataset, model, None, "Table 2"),
            when=_trained(k),
            clients=100,
            undefended=plain / 100,
            setting=f"{_DATA[dataset][0]}, {_MODELS[model]}, 100 clients, Dirichlet, 40 rounds of an epoch, Adam",
            partition="dirichlet:0.3",
        )
        for (model, dataset), (at_k, plain) in _DIRICHLET.items()
        for k, percent in zip((200, 500, 1000), at_k, strict=True)
    ]


def _domains() -> list[Claim]:
    """Return Table 3: four domains, only the head of a pretrained network is trained."""
    plain = _DOMAINS[0][0][0]
    return [
        Claim(
            *("accuracy", top1 / 100, "officehome", "mobilenet", None, "Table 3 (Avg)"),
            when=_trained(k),
            clients=40,
            undefended=plain / 100,
            setting="OfficeHome, head of a pretrained MobileNet, 4 domains of 10 clients, 40 rounds, Adam at .005",
            note=f"mean of {', '.join(f'{d} {percent}%' for d, percent in zip(_NAMES, each, strict=True))}; Top-5 "
            f"{top5}%; no standard MobileNet has the 1.3e7 parameters that are stated",
        )
        for k, ((top1, top5), each) in _DOMAINS.items()
        if k
    ]


def _memory() -> list[Claim]:
    """Return Table 4, the largest memory of BAFFLE over that of backpropagation."""
    return [
        Claim(
            *("memory_ratio", most / plain, dataset, model, None, "Table 4"),
            setting=f"{model}, images of the size of {size}, GPU memory, layer by layer",
            note=f"{least} to {most} MB beside {plain} MB",
        )
        for model, sizes in _MEMORY.items()
        for (plain, least, most), dataset, size in zip(
            sizes, ("cifar10", "officehome"), ("CIFAR-10/100", "OfficeHome/ImageNet"), strict=True
        )
    ]


def claims() -> tuple[Claim, ...]:
    """Return what the paper prints about BAFFLE."""
    saving = Claim(
        *("bytes_saving", 0.5, "", "wrn_10_2", None, "Sec. 4.2"),
        when=(("k", 500), ("level", "batch"), ("scheme", "central"), ("masks", "none")),
        setting="WRN-10-2, batch level, both ways, beside FedSGD",
        note="approximately half: 4n bytes down and 4K up",
    )
    cost = Claim(
        *("client_cost_ratio", 100 / 5, "", "", None, "Sec. 4.4"),
        when=(("k", 100),),
        setting="any network, any machine",
        note="K / 5: a backward pass is said to cost as much as five forward passes in single precision",
    )
    hidden = Claim(
        *("psnr_median", None, "", "", None, "Sec. 4.4, Appendix D"),
        setting="any network; who sees a client's loss differences",
        note="attackers can hardly obtain useful information from loss differences, whose histograms for real data and "
        "for noise look alike",
    )
    rises = Claim(
        *("accuracy_rises", None, "", "", None, "Sec. 4.2, Figure 2"),
        when=(("level", "batch"),),
        setting="MNIST, CIFAR-10 and CIFAR-100, 10 clients, batch level",
        note="accuracy rises with K",
    )
    return (*_iid(), *_dirichlet(), *_domains(), *_memory(), saving, rises, cost, hidden)
