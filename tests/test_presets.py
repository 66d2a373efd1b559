"""`--preset paper`: the evaluation that a defense's paper prints, read off the papers by hand."""

from dataclasses import fields

import pytest

from ppbench.base.registry import load_plugin
from ppbench.claims.claim import claimed_by_all
from ppbench.run.config import configure
from ppbench.run.experiment import resolve
from ppbench.run.suite import load_suite
from ppbench.task.dataset import default_root

# Table 2 and Appendix C: "Adam (beta1 = 0.9, beta2 = 0.999)", "Learning rate 0.001", "No decay", "Batch size 32",
# "Local Epochs/Global Communication Rounds 1/300", "Number of Clients 10", "Attack Batch Size 1, 4, 8", "X = 1000".
SPN = {
    "model": "dlnet", "clients": 10, "rounds": 300, "local_epochs": 1, "batch_size": 32, "optimizer": "adam",
    "lr": 0.001, "beta2": 0.999, "decay_at": (), "schedule": "round_robin", "partition": "iid",
    "attack_batch": (1, 4, 8), "attacks": ("dlg", "tracing"), "victims": 1000, "stages": ("init",), "tuning": 0,
}  # fmt: skip
# Sec. 5.1: "the training epochs and the batch-size of each client are set to be 200 and 32"; "41188 instances",
# "8:1:1"; Table 1: MLP-3, k = 5. Loss: Eq. 3.
PBPFL = {"model": "mlp", "clients": 5, "batch_size": 32, "loss": "squared", "upload": "gradient"}
# Sec. 6.1 and 6.4: K = 5; ResNet20 on CIFAR-10; SGD at .1, 100 epochs, batch 256; attackers who know half of the data.
MPDP = {
    "dataset": "cifar10", "model": "resnet20", "clients": 5, "batch_size": 256, "optimizer": "sgd", "lr": 0.1,
    "upload": "gradient", "loss": "squared", "public": 0.5, "attacks": ("gifd", "mia_nn"),
}  # fmt: skip
# Sec. 5.1: "128, 64 or 32"; "initial learning rate for all workers is set to 0.01"; "Momentum optimizer"; Table 1: 250
# epochs; Tables 2 and 4: up to 10 workers, imbalanced. No attack is run in it: Theorems 2 and 4 are of any.
FEDPC = {
    "dataset": "cifar10", "model": "resnet50_fixup", "clients": 10, "rounds": 250, "local_epochs": 1,
    "optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "partition": "imbalanced",
    "upload": "delta", "schedule": "parallel",
}  # fmt: skip
# Sec. 4: "Adam with beta = (0.9, 0.99), learning rate 0.01 and epochs 20/40 for MNIST and CIFAR-10/100", C = 10, iid;
# Table 1: epoch-level, K of 100, 200 and 500 on MNIST; guideline 1: twice-FD. Neither batches nor attacks are printed.
# The average of guideline 3 stays warmed: at .995 from a random start, 20 steps of the server would leave 90 % of it.
BAFFLE = {
    "dataset": "mnist", "model": "lenet_baffle", "clients": 10, "rounds": 20, "local_epochs": 1, "optimizer": "adam",
    "lr": 0.01, "beta2": 0.99, "partition": "iid", "upload": "delta", "grid": (100, 200, 500),
}  # fmt: skip
PAPERS = {
    "spn": SPN, "dp": SPN, "ppdl": SPN, "pbpfl": PBPFL, "pbpfl_ext": PBPFL, "mpdp": MPDP, "mp_cdp": MPDP,
    "mp_dp_naive": MPDP, "mpdp_h": MPDP, "tp_smc": MPDP, "hybridalpha": MPDP, "pile": MPDP,
    "fedpc": FEDPC, "phong": FEDPC, "central": FEDPC, "baffle": BAFFLE,
}  # fmt: skip
GRIDS = {  # Table 2 of the SPN paper
    "spn": {1e-4, 1e-3, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5},
    "dp": {1e-4, 1e-3, 0.01, 0.1, 0.5},
    "ppdl": {1e-4, 1e-3, 0.01, 0.1, 0.5},
}
SETTINGS = {
    "fedpc": {"batch_sizes": "128,64,32", "rates": "1"},  # one rate to start from
    "baffle": {"level": "epoch", "scheme": "twice", "masks": "ring32", "ema": 0.995, "average": "warmed"},
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_preset_is_what_the_paper_prints(name):
    config = configure("paper", defense=name)
    assert {field: getattr(config, field) for field in PAPERS[name]} == PAPERS[name]
    default = {field.name: field.default for field in fields(load_plugin("defenses", name))}
    assert SETTINGS.get(name, {}).items() <= {**default, **config.settings}.items()
    experiment = resolve(config)  # no data are read
    values = {point.value for point in experiment.points if point.defense.name == name}
    assert values == GRIDS[name] if name in GRIDS else values
    expected = [attack for attack in config.attacks if attack != "standard"]
    assert set(expected) <= {attack.name for attack in experiment.applicable}


def test_epochs_are_the_papers():
    pbpfl, mpdp = configure("paper", defense="pbpfl"), configure("paper", defense="mpdp")
    rows = 41_188 - 2 * 4_119  # 8:1:1
    assert 32 * pbpfl.clients * pbpfl.rounds / rows == pytest.approx(200, abs=0.01)
    assert mpdp.batch_size * mpdp.clients * mpdp.rounds / 25_000 == pytest.approx(100, rel=0.01)
    assert pbpfl.model_options == {"hidden": 64, "layers": 3} and mpdp.model_options == {"head_bias": False}


def test_a_user_has_the_last_word_and_data_lie_in_the_folder_of_downloads():
    config = configure("paper", defense="fedpc", rounds=3, grid=(0.5,), settings={"rates": "2"}, dataset="digits")
    assert (config.rounds, config.grid, config.dataset) == (3, (0.5,), "digits")
    assert config.settings == {"batch_sizes": "128,64,32", "rates": "2"}
    assert configure("paper", defense="pbpfl").dataset.startswith(f"csv:{default_root()}/bank-marketing.csv.gz")


def test_every_defense_with_claims_of_a_paper_has_its_preset():
    """A defense whose paper trained something else than the SPN paper says so in its setting."""
    claiming = {*claimed_by_all()}
    own = {name for name in claiming if "paper" in load_plugin("defenses", name).setting}
    assert claiming - own == {"spn", "dp", "ppdl"}


def test_smaller_budgets_are_those_of_the_quick_portfolio_alone():
    """Not of named attacks, of `standard`, of suites; a user has the last word."""
    small = {"adaptive_spn.inversion_budget": 100, "adaptive_spn.joint_budget": 600}
    assert small.items() <= configure(defense="spn").settings.items()
    assert (
        configure(defense="spn", settings={"adaptive_spn.joint_budget": 7}).settings["adaptive_spn.joint_budget"] == 7
    )
    others = [configure(defense="spn", attacks=names) for names in (("standard",), ("adaptive_spn",))]
    others += [experiment.config for experiment in load_suite("digits-quick").places]
    assert len(others) > 2 and not any(small.keys() & config.settings.keys() for config in others)
