"""Write docs/benchmarks.md from benchmarks/results: `python docs/make_benchmarks.py [--check]`.

Tables come from the result files: those of one benchmark each, and `measured.json`, which keeps tables that were
written down by hand, each with its date, command and setting. The paragraphs stand here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean, median
from typing import Any

PAGE = Path(__file__).with_name("benchmarks.md")
RESULTS = PAGE.parent.parent / "benchmarks" / "results"
PLACE = re.compile(r"^<<([\w-]+)>>$", re.MULTILINE)
CPU_ONLY = {"`evaluate --defense spn` (CPU: 16 cores)": ("over 100 s", "96 s")}
BEST = {"ours": "", "breaching": "breaching "}
PEER_NETWORKS = {"dlnet": "`dlnet`", "conv": "`cnn` (ReLU)", "resnet18": "ResNet-18", "vit": "ViT, two layers of 96"}
MEMBERSHIP = {
    "`mia_lira`, 16 references": "mia_lira R=16 client/1",
    "`mia_lira`, 4": "mia_lira R=4 client/1",
    "`mia_lira_offline`, 16": "mia_lira_offline R=16 client/1",
    "`mia_rmia`, 4": "mia_rmia R=4 client/1",
    "`mia_rmia_offline`, 4": "mia_rmia_offline R=4 client/1",
    "`mia_update_cosine`": "mia_update_cosine server/1",
    "`mia_whitebox`": "mia_whitebox server/1",
    "`mia_loss`": "mia_loss client/1",
}
"""Rows of the table of audits: what is shown, and its name in membership.json."""

NOISES = ("none", "dp", "dp_sgd", "full_noise")
"""Defenses of the table of letters under noise, in its order."""
AREAS = ("auc", "canary_auc")


def read(name: str) -> Any:
    """Return what a result file holds."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def number(value: float, digits: int = 1) -> str:
    """Return a number with so many decimals, halves rounded up."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    titles = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def solved(decibels: Iterable[float]) -> int:
    """Return how many of some images are above 20 dB."""
    return sum(value > 20 for value in decibels)


def span(values: Sequence[float], digits: int = 1) -> str:
    """Return the least and the largest of some numbers."""
    return f"{number(min(values), digits)} to {number(max(values), digits)}"


# -- tables of one result file each -----------------------------------------------------------------------------------
def gpu() -> str:
    """Return seconds of one GPU beside one CPU core."""
    rows = [
        [
            f"`{run['attack']}`, {run['together']} victim{'s at once' if run['together'] > 1 else ''}",
            f"{number(run['device_s'], 2)} s",
            f"{number(run['cpu_core_s'], 2)} s",
            number(run["cpu_over_device"], 1),
        ]
        for run in read("gpu")["victims"]
    ]
    rows += [[what, *seconds, ""] for what, seconds in CPU_ONLY.items()]
    return table(["LeNet, 40 evaluations", "GPU", "one CPU core", "CPU / GPU"], rows)


def gpu_beside_cpu() -> str:
    """Return figures of cells that both devices finished."""
    beside = read("gpu")["cpu_beside_cuda"]
    pairs = {name: pair for name, pair in beside.items() if isinstance(pair, list)}
    return table(["cell", "CPU", "GPU"], [[name, *map(str, pair)] for name, pair in pairs.items()])


def arsenal() -> str:
    """Return what searches reach on undefended single images."""
    reached, generator = read("ig_reached"), read("gifd")
    runs = {(run["attack"], run["images"], run["budget"]): run for run in generator["rows"]}
    net, noise, batch = reached["convnet"], reached["noise"], reached["batch"]["300 steps"]
    ceilings = [number(generator["generator"][name]) for name in ("ceiling", "ceiling_latent")]
    low_high = span(net["psnr_db"])
    rows = [
        ["`ig`, 300, 32 victims", f"{number(net['median_db'])} dB ({low_high}), labels {net['labels']}"],
        *(
            [
                f"`gifd` beside `ig`, {budget}, {runs['ig', images, budget]['victims']} other victims, {images}",
                " and ".join(number(runs[attack, images, budget]["median_psnr"]) for attack in ("gifd", "ig")) + " dB",
            ]
            for images, budget in (("cifar10", 300), ("cifar10", 600), ("mnist in 3 channels", 300))
        ),
        ["the generator alone, 500 held-out images: encoded; best latent", f"{ceilings[0]} dB; {ceilings[1]} dB"],
        *(
            [
                f"`likelihood` beside `ig`, noise of {scale} of the gradient, 300, 8 victims",
                " and ".join(number(run[attack]["median_db"]) for attack in ("likelihood", "ig")) + " dB",
            ]
            for scale, run in noise.items()
        ),
        ["`ig`, batch 8 on `dlnet`, two batches", f"{number(batch['median_db'])} dB, labels {batch['labels']}"],
    ]
    return table(["attack, gradient evaluations, victims", "median PSNR"], rows)


def breaching() -> str:
    """Return the best attack of each side at equal seconds."""

    def best(row: Mapping[str, Any], side: str) -> str:
        name = row["best"][side]
        decibels, seconds = row["psnr"][name], number(median(row["cpu_seconds"][name]))
        shown = name.removeprefix(BEST[side])
        return f"`{shown}` {number(median(decibels))} dB, {solved(decibels)} of {len(decibels)}, {seconds} s"

    def about(row: Mapping[str, Any]) -> str:
        name, batch, trained = row["row"].split("/") + ["1", ""][row["row"].count("/") :]
        weights = f"trained to {number(100 * row['accuracy'], 0)} %" if trained else "random"
        return f"{PEER_NETWORKS[name]}, batch {batch}, {weights}"

    rows = [
        [about(row), number(run["seconds"], 0), best(row, "ours"), best(row, "breaching")]
        for run in (read("peers_longer"), read("peers_best"))
        for row in run["rows"]
        if row["row"].split("/")[0] in PEER_NETWORKS
    ]
    return table(["network, batch, weights", "seconds", "best of ours", "best of breaching's"], rows)


def dlg() -> str:
    """Return what a solved victim costs by DLG, by its authors' loop, and by the best of either side."""

    def line(name: str, stop: str, decibels: Sequence[float], seconds: float | None) -> list[str]:
        cost = "-" if seconds is None else f"{number(seconds)} s"
        return [name, stop, f"{solved(decibels)} of {len(decibels)}", cost, f"{number(median(decibels))} dB"]

    rows = []
    for name, case in read("dlg")["cases"].items():
        attack, _, together = name.partition(", ")
        for side, shown in (("ours", f"`{attack}`, {together}"), ("reference", "the authors' loop, one by one")):
            stop = f"{case['stop']:.0e}".replace("e-0", "e-")
            rows.append(line(shown, stop, case[f"{side}_psnr"], case[f"{side}_seconds_per_solved_victim"]))
    (row,) = (row for row in read("peers_best")["rows"] if row["row"] == "lenet100")
    for side, shown in (("ours", "`invert` without an attack named"), ("breaching", "breaching's best, `{}`")):
        name = row["best"][side]
        shown = shown.format(name.removeprefix(BEST[side]))
        count = solved(row["psnr"][name])
        rows.append(line(shown, "-", row["psnr"][name], sum(row["cpu_seconds"][name]) / count if count else None))
    return table(["attack", "stops at", "above 20 dB", "seconds a solved victim", "median"], rows)


def membership() -> str:
    """Return true-positive rates on canaries at 1 % false positives, of five seeds and of MNIST."""
    kept = read("membership")
    (mnist,) = (kept[name]["none"]["seed 0"] for name in kept if name.startswith("mnist"))
    seeds = kept["digits"]["none"].values()
    rows = []
    for shown, name in MEMBERSHIP.items():
        each = [seed[name]["canary_tpr_at_1pct_fpr"][0] for seed in seeds]
        other = mnist[name]["canary_tpr_at_1pct_fpr"][0]
        rows.append([shown, f"{mean(each):.2f} ({' '.join(f'{one:.2f}' for one in each)})", f"{other:.2f}"])
    return table(["attack", "digits MLP, five seeds: mean (each)", "MNIST `cnn`, seed 0"], rows)


def points_of_letters() -> list[tuple[str, Mapping[str, Any]]]:
    """Return what noise was measured on letters, in words, and the figures."""
    points = sorted(read("letters")["points"], key=lambda one: (NOISES.index(one["defense"]), one["sigma"]))
    return [(f"`{one['defense']}` {one['sigma']:g}" if one["sigma"] else f"`{one['defense']}`", one) for one in points]


def letters() -> str:
    """Return what is read of letters under noise, and what LiRA, or else the loss, finds of who was trained on."""

    def within(figure: Sequence[float]) -> str:
        return f"{figure[0]:.2f} ({figure[1]:.2f} to {figure[2]:.2f})"

    rows = []
    for noise, point in points_of_letters():
        value, low, _, chance = point["audit"]["accuracy"]
        readers = [point["init"]["attacks"][f"{name} server/1"] for name in ("token_rows", "dlg")]
        found = point["audit"]["attacks"]
        attack = "mia_lira" if "mia_lira client/1" in found else "mia_loss"
        figures = found[f"{attack} client/1"]
        rows.append(
            [
                noise,
                "" if point["audit"]["epsilon"] is None else f"{point['audit']['epsilon']:.2g}",
                f"{number(100 * value, 0)} %" + (", chance" if low <= chance else ""),
                *(f"{number(100 * one['reconstruction_accuracy'][0], 0)} %" for one in readers),
                f"`{attack}`",
                *(within(figures[name]) for name in ("auc", "tpr_at_1pct_fpr", "canary_auc")),
                *(within(figures[name]) for name in ("canary_tpr_at_1pct_fpr", "auc_planted")),
            ]
        )
    head = [
        "noise",
        "epsilon",
        "accuracy",
        "tokens, `token_rows`",
        "`dlg`",
        "members by",
        "letters: AUC",
        "TPR at 1 % FPR",
    ]
    return table([*head, "canaries: AUC", "TPR at 1 % FPR", "planted: AUC"], rows)


def law_of_letters() -> str:
    """Return where rows should stop telling, of the least and the most robust letter, and where they do."""
    rows = []
    for defense, sigmas in read("letters")["predicted"].items():
        shares = {
            point["sigma"]: point["init"]["attacks"]["token_rows server/1"]["reconstruction_accuracy"][0]
            for _, point in points_of_letters()
            if point["defense"] == defense
        }
        read_at = "; ".join(f"{number(100 * share, 0)} % at {sigma:g}" for sigma, share in shares.items())
        rows.append([f"`{defense}`", f"{min(sigmas):.1e} to {max(sigmas):.1e}".replace("e-0", "e-"), read_at])
    return table(["noise", "predicted sigma", "tokens in place by `token_rows`"], rows)


def members_of_letters() -> str:
    """Return the AUC of each membership attack on letters, and on canaries."""
    names = list(dict.fromkeys(name for _, point in points_of_letters() for name in point["audit"]["attacks"]))
    rows = [
        [noise, *(" / ".join(f"{found[name][key][0]:.2f}" for key in AREAS) if name in found else "" for name in names)]
        for noise, point in points_of_letters()
        for found in [point["audit"]["attacks"]]
    ]
    return table(["noise", *(f"`{name.split()[0]}`" for name in names)], rows)


def ledger() -> str:
    """Return how often a submission that sees nothing moves a row, and whether a better attack does."""
    kept, rows = read("ledger"), []
    for name, trials in (("`dp`, sigma 3", kept["dp"]), ("`spn`, alpha2 0.1, under `dlg` of 60 steps", kept["spn"])):
        tries = trials[0]["tries"]
        rows.append(
            [
                name,
                f"{span([trial['stands'] for trial in trials])} dB",
                f"{span([trial['blind'] for trial in trials])} dB",
                f"{sum(trial['moves'] for trial in trials)} of {tries * len(trials):,}",
                f"{sum(trial['better_first'] for trial in trials)} of {len(trials)}",
                f"{sum(trial['better_late'] for trial in trials)} of {len(trials)}",
            ]
        )
    head = [
        "row",
        "stands, median PSNR",
        "blind guess",
        "moved by nothing",
        "better attack first",
        "better attack last",
    ]
    return table(head, rows)


def ratios() -> str:
    """Return what batching attacks and reference runs saves."""
    rows = []
    for name, title in (("ig_cnn", "ConvNet of 113,738 parameters"), ("ig_lenet", "LeNet")):
        kept = read(name)
        ours, plain = (number(kept[f"{side}_bytes_per_victim"] / 1e6, 2) for side in ("ours", "plain"))
        beside = f"a plain loop, one victim ({plain} MB a victim; ours {ours})"
        rows.append([f"`ig`, 32 victims at once, {title}", beside, f"{kept['ratio']} ({span(kept['ratios'], 2)})"])
    for name, case in read("references")["cases"].items():
        within = f"{case['ratio']} ({case['ratio_low']} to {case['ratio_high']})"
        rows.append([f"8 reference runs in lockstep, {name}", "one after the other", within])
    return table(["what", "beside", "ratio (range)"], rows)


def pairs() -> str:
    """Return what a whole command costs beside an older commit."""
    rows = [
        [
            name,
            case["before"],
            ", ".join(number(pair["before"], 0) for pair in case["pairs"]),
            ", ".join(number(pair["after"], 0) for pair in case["pairs"]),
            ", ".join(number(pair["ratio"], 2) for pair in case["pairs"]),
        ]
        for name, case in read("pair_trees").items()
        if isinstance(case, dict)
    ]
    return table(["command", "older commit", "its CPU seconds", "CPU seconds after", "ratios"], rows)


def scale() -> str:
    """Return what many clients, many cells and a long page cost."""
    kept, rows = read("scale"), []
    for run in kept["clients"]:
        about = f"{run['clients']:,} clients of 5 examples, {run['sample']} drawn, {run['rounds']} rounds, 3 trainings"
        figures = [number(run["cpu_s"], 0), f"{run['peak_mb']:,}", f"{number(run['disk_mb'], 0)} MB on disk"]
        rows.append([f"`{run['defense']}`: {about}", *figures])
    for run in kept["cells"]:
        for step, about in (
            ("schedule", "planned and scheduled, not computed"),
            ("resume", "planned again, a small record of each there"),
        ):
            rows.append(
                [f"{run['cells']:,} cells {about}", number(run[f"{step}_cpu_s"], 0), f"{run[f'{step}_peak_mb']:,}", ""]
            )
    for run in kept.get("page", []):
        took, size = number(run["load_s"] + run["render_s"], 0), f"the page has {number(run['page_mb'], 0)} MB"
        rows.append([f"a page of {run['records']:,} rows", took, f"{run['peak_mb']:,}", size])
    scaling = read("workers") if (RESULTS / "workers.json").is_file() else {"runs": []}
    for count in sorted({run["workers"] for run in scaling["runs"]}):
        runs = [run for run in scaling["runs"] if run["workers"] == count]
        best = min(1.0, scaling["cores"] / count)
        ratios_of = span([run["efficiency"] for run in runs], 2)
        about = f"{count} worker{'s' * (count > 1)} on {scaling['cores']} cores, {scaling['seeds']} evaluations each"
        took = number(sum(run["cpu_s"] for run in runs) / len(runs), 0)
        rows.append(
            [about, took, f"{runs[0]['peak_mb']:,}", f"time of 1 worker / theirs {ratios_of}; at best {best:g}"]
        )
    lost = kept["nodes"]
    about = f"{lost['nodes'][0]} Ray nodes, one killed at {lost['records']} of {lost['cells']} cells"
    same = f"{lost['complete']} complete, {lost['lost']} begun twice, {len(lost['differ'])} files unlike one process's"
    rows.append([about, "", "", same])
    return table(["what", "CPU seconds", "peak MB", ""], rows)


HONEST_IN_SUITES = ("dp", "secagg")
"""Honest defenses that stand beside the lies of a suite."""
TRIED = {
    "lies by the default evaluation": ("channels",),
    "lies by both tests": ("lie about sums", "lie about noise", "lie about replay"),
    "honest defenses by both tests": ("honest", "honest twin"),
    "all of ours by both tests": ("ours",),
}
"""Rows of the table of power: what is shown, and its parts in lies.json."""


def power() -> str:
    """Return how often lies were believed, and honest defenses accused."""
    kept, rows = read("lies"), []
    for shown, parts in TRIED.items():
        tallies = [
            one
            for part in parts
            for name, one in kept[part].items()
            if name not in HONEST_IN_SUITES * (parts == ("channels",))
        ]
        runs, wrong = (sum(len(one[key]) for one in tallies) for key in ("seeds", "marked"))
        rows.append([shown, str(len(tallies)), str(runs), f"{wrong} {'believed' if 'lies' in shown else 'accused'}"])
    return table(["what, by what", "defenses", "runs, ten seeds each", "wrong"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "gpu": gpu,
    "gpu-beside-cpu": gpu_beside_cpu,
    "arsenal": arsenal,
    "breaching": breaching,
    "dlg": dlg,
    "membership": membership,
    "letters": letters,
    "letters-law": law_of_letters,
    "letters-members": members_of_letters,
    "ledger": ledger,
    "ratios": ratios,
    "pairs": pairs,
    "scale": scale,
    "power": power,
}


def measured() -> dict[str, str]:
    """Return the tables of measured.json by id, each with a line below it: date, command, setting."""
    pages = {}
    for kept in read("measured"):
        parts = [kept["date"], f"`{kept['command']}`" if kept["command"] else "", kept["setting"]]
        below = "; ".join(part for part in parts if part)
        pages[kept["id"]] = f"{table(kept['columns'], kept['rows'])}\n\n{below[0].upper()}{below[1:]}."
    return pages


TEXT = """\
<!-- Made by docs/make_benchmarks.py from benchmarks/results; change these, not this file. -->

# Benchmarks

How strong the attacks are, how fast the bench is, and what was tried against it. Every benchmark compares two things
in one run and reports their ratio, because absolute times of two machines say nothing. Where no device is named: one
thread of two shared x86-64 cores, torch 2.13.0, Python 3.11, with other jobs beside. CIFAR-10 is a JPEG re-encoding.
A figure holds for the setting in the line below its table. `benchmarks/README.md` says how each script is run.

## On a GPU

One NVIDIA H200 (driver 580.159.04, 16 CPU cores), 2026-11-27, torch 2.11.0+cu130, Python 3.12, 28 minutes in all
(of the parts of `benchmarks/gpu.sh`; figures in `benchmarks/results/gpu.json`).

- **It runs.** All 21 defenses with every attack that applies (`PPBENCH_FAR=cuda python tests/far_evaluation.py`): 319
  cells complete, 25 not applicable, none failed.
- **It agrees with the CPU**, on 29 cells of `evaluate --defense spn` that both finished.
- **It pays for many victims.** Searches launch their kernels as one CUDA graph (equal to the bit to single launches),
  and 256 victims are searched together. Choose a CPU for small networks and few victims. Of the 0.78 s for 256 victims
  some 0.5 s are checks of each victim's evidence, which a longer search does not repeat.

<<gpu-beside-cpu>>

<<gpu>>

Federated training takes 3.5 (`dlnet`), 3.6 (LeNet) and 4.2 (MLP) times fewer seconds than a plain PyTorch loop on the
same GPU. A FedSGD round of ResNet20 (5 clients, batches of 256) takes 0.029 s with stacked clients and 3.6 GiB, 0.025 s
client by client and 0.5 GiB (with TF32 0.015 s; a plain loop 0.039 s): large steps run client by client. Fourteen
trainings of defenses beside each other took 0.375 s per round, so no cell of `cifar10-resnet20` ended in 400 s.

## What the arsenal reaches

Undefended single CIFAR-10 images at random weights of `cnn` (widths 32,64,128, average pooling: 113,738 parameters),
labels read off the gradient, one seed. The generator of `gifd` adds knowledge of natural images, so it gains nothing
on MNIST. With max pooling `ig` reaches about 18 dB on eight tuning images. Reproduce with
`PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_reconstruction.py` and
`python benchmarks/bench_gifd.py OUT.json 300,600 32 12`.

<<arsenal>>

How many labels of a batch are read off the gradient:

<<labels-of-batches>>

What the running statistics of batch norms add, which a client's state dict holds: after one step of SGD mean and
variance of the batch in each layer (`benchmarks/measure_statistics.py`; labels known, mean PSNR over all images).
A trained ResNet-18 shows 9,600 such numbers; at random weights the search does not match them (14 times the gradient
is left). The quickstart shows 44, a batch of 8 has eight times the unknowns.

<<batch-statistics>>

Many local steps: Dimitrov et al. (TMLR 2022) print more than 45 % of a FEMNIST client's 50 images out of 10 epochs of
10 batches of 5. Their network and rate on another data set, MNIST (FEMNIST was not at hand), where 50 images are of
ten classes, not of 62. `ig` and `dlg` read the change as one gradient at the weights half way, which of 50 images
explains 92 % of it, at the start 62 %. A fifth of their images comes out whole; their size does not, and it is not the
steps: one step of all 50 hides as much.

<<many-local-steps>>

## Beside breaching

The best of each side on the same victims, steps for 4 CPU seconds a batch (breaching 0.1.2, 2026-11-28; CIFAR-10 from
40,000 on, where nothing was tuned; a batch has no class twice): median PSNR, images above 20 dB, seconds.
`python benchmarks/peers/against_breaching.py OUT.json --seconds 4 --tuning 2`. Other images chose each side's attack:
on `dlnet`, batch 1, random among all of breaching's (`multiscale_ghiasi`, `analytic`, `rgap` raise errors), elsewhere
among those that `tuning` in benchmarks/results/peers_best.json names. `ig3`, `ig_features3`: at tv=3. On `cnn`, batch
1, random, our side was measured again with `ig_features`, and on trained `dlnet`, batch 8, both sides with more
attacks, after first results were known. The row of 12 s is of an earlier run.

<<breaching>>

Our attacks alone, on harder victims. `cnn` trained to 56 %, batch 4 (16 images), is not inverted: `ig` 11.3 dB,
`feature_inversion` 11.8 dB.

<<networks-and-batches>>

## When the exact gradient is known

An attacker aware of `mpdp`, `pbpfl`, the encrypted protocols or `dp` without noise holds an exact gradient. On
convolutions with kinked activations L-BFGS stalls, so these attacks use `ig`: from 16 pixels a side on always, on
smaller images by whichever of `idlg` and two settings of `ig` leaves the smallest angle
(`ppbench/attacks/adaptive/inversion.py`). The start alone moves an image by up to 6 dB. It is no gain everywhere: of
digits on `resnet20` L-BFGS alone saw 70 dB and they now see 59, far beyond what counts as rebuilt.

<<exact-gradients>>

The smallest angle is not trusted on larger images, because noise has it where images are rebuilt at all:

<<smallest-angle>>

**Where no search can judge a defense.** The control asks that half of the undefended images are re-identified. On MNIST
with these networks and on `densenet` it fails, more evaluations do not help, and no board is kept; the last row passes:

<<undefended-not-found>>

**MP-DP by its own attack.** The paper's figures are met by an attack that knows nothing of the mechanism; one that
knows it sees 14.8 to 16.1 dB of `mpdp` (board `cifar10-perturbed-convolutions`).

<<mpdp-own-attack>>

## What audits find

Models that learn few records by heart, canaries of three families; TPR at 1 % FPR on canaries, both halves together.
`PPBENCH_TEST_DATA=FOLDER python benchmarks/measure_membership.py`; every interval is in
`benchmarks/results/membership.json`. `audit_one_run` bounds epsilon from below by 3.2 (server) and 3.1 (client). On
uploads of noise all attacks find at most 0.06 (AUC 0.42 to 0.57, epsilon 0). The setting was chosen on seeds 0 to 2;
the table has seeds 3 to 7. On MNIST single blank canaries spoil the online form of RMIA with 4 references.

<<membership>>

<<fedmia-and-stacking>>

Canary clients estimate a client's epsilon. The estimate reads low where canaries are noise to one another: 100 of
them in 4 rounds are a variance of 0.04 beside z squared, a sixth of it at z = 0.5.

<<canary-clients>>

Against other code: epsilon at delta 1e-5 of 180 right among 200 guesses on 1,000 is 1.80 (`epsilon_lower`) and 2.90
for a Gaussian mechanism; the published code of the f-DP bound gives 2.88 to 2.91. On equal arrays of 64 references
(`tests/test_peers.py`) offline RMIA ranks as ml_privacy_meter does (rank correlation 0.98, theirs having ties), LiRA
as LeakPro (0.9999; offline 1). The attacks of `ppbench.audit` on the outputs of one trained model and its references:

<<audits-beside-others>>

## Exact batches

`spear` separates whole batches exactly behind one layer of ReLUs. Dimitrov et al. report batches up to about 25 on a
GPU with wider layers; no setting of theirs was repeated.

<<exact-batches>>

Features behind convolutions (float32, CIFAR-10, three seeds) are exact to 6e-7 of their norm: AlexNet at batch 8 in 1
to 2 s, VGG16 at batch 4 in 0.1 to 0.3 s, of `cnn` with hidden=64 and average pools two batches of 8 of three.
`spear_features` makes of one batch of 4 of that `cnn` 26.4 to 33.9 dB in 16 s, and nothing on digits behind `cnn` (7
dB) or on `lenet_baffle` with ReLUs (9 to 14 dB).

## Rows of tables

`tableak` finds batches of 4 where no ReLU sorts them; behind ReLUs `spear` is exact and gradient matching is not. At
batch 8 `tableak` is near blind behind ReLUs. More evaluations do not mend ReLU at batch 4: with 24,000 it has 0.44 (4
of 20) in 5 s.

<<rows-of-tables>>

## Texts

`token_rows` beside DAGER's own code (commit 4383e25; its `reconstruct`, with the settings of its scripts). Both get the
same gradients, know the public network, and see no gradient of an embedding. Shares of tokens in place, exact texts.

<<texts-beside-dager>>

One batch a row, which is few; of two others each, `token_rows` reads every token, too. DAGER's decoder reads nothing of
batches at its default tolerance, which takes the ranks 134 and 247 to be 118 and 195. At `--rank_tol` 1e-7 it reads
batch 4; batch 8 had not ended after 75 s of wall time.

`lamp` beside LAMP's own code, on the same gradients and about as many seconds. Both leave single words; the rows of the
gradient give these texts whole (above).

<<texts-beside-lamp>>

Letters under noise, and who was trained on, in one federation each (quick preset, seed 0; intervals of 95 %;
`OMP_NUM_THREADS=1 python benchmarks/measure_letters.py OUT`, 2026-11-28; every figure is in
`benchmarks/results/letters.json`). Noise of s on an m x n gradient drowns singular values below s (sqrt m + sqrt n):
so the law of `token_rows` says where rows stop telling. `dp_sgd` clips gradients of norm 12 to 14 to 1.

<<letters-law>>

**Membership outlives what is read.** Rows stop telling first, under `dp` a search (`dlg`) a hundred times later, and
canaries are found where neither reads a token, at 0.1. At 1 the model learns the letters and no canary: LiRA, which
knows how hard each letter is, has an AUC of 0.49, so the 0.58 of the loss is no memory. Audits train on some 120
canaries under wrong or random classes beside 440 letters: hence accuracies near 70 % where the same training without
them has 93 to 100 %. No model but that of `full_noise` is at chance. `dp_sgd` has no reference runs: its members are
found by the loss.

<<letters>>

AUC of each attack, on letters / on canaries:

<<letters-members>>

## Looking victims up

An attacker who holds the public data set can look victims up: compute each known image's update and take the nearest.
That is exact where reconstruction has 10 dB, so a row on public data also measures the dictionary. From sigma 0.01 on
noise hides from it too.

<<looked-up-digits>>

`warped:DATA` bends every image by a secret. **That does not take the dictionary away**: at sigma 0.001 to 0.01 an
attacker with the originals still sees 5 to 7 dB more than our best. The grain of each pixel, which no prior knows,
stops the fit near 34 dB. Only data that nobody has leave no dictionary.

<<looked-up-warped>>

<<warped-beside-originals>>

## Trying often

Does the ledger let noise move a row? 20 trials, each with a secret, trainings and victims of its own (digits on
`dlnet`, batch 1, `init`, 24 victims). Submissions that see nothing are judged one after another (1,000 and 250 a
trial), then a better attack, as the first try and as the last. The level falls from 0.019 (try 1) to 0.000019 (try
100) and 6.0e-7 (try 1,001); 24 victims can show 1.2e-7. `OMP_NUM_THREADS=1 python benchmarks/bench_ledger.py`
(2026-11-25, 782 s of a core).

<<ledger>>

Answers must also fit their own victims better than one another's. Without that rule naming the commonest class for
all (`bench_ledger.py majority`) would move a row of labels at the first try in 2,756 of 3,000 simulations; with it in
none. 250 hostile files end in one sentence each, write nothing and cost 176 MB at most
(`pytest tests/test_ledger_hostile.py -s`).

## Servers that act

Trap weights (`imprint`, `imprint_quiet`) sort a batch into bins. With H equally likely bins an image of a batch of B
is alone with probability (1 - 1/H)^(B-1): 0.78 at 256 and 64, 0.94 at 1,024 and 64, 0.78 at 1,024 and 256. Networks
with maximum pools before the layer, without a hidden linear layer, or with residuals are refused. No setting of the
papers (ImageNet, other networks) was run.

<<trap-weights>>

<<fishing>>

Under the defenses:

<<active-server>>

`spear`, of a server that does not act, has 100 % of `none` and `spn` at batch 8, 1 % of `secagg` and `pbpfl_ext`, 0 %
elsewhere and at batch 64. Sums of `secagg` fall with and without sybils (97 % at batch 8, 4 clients; 45 % at batch
64, 10 clients). One trap for everybody, which clients that compare notes would not notice, shows 23 % of the sum's
images at batch 8, and 97 % with sybils. `detection_auc` is 1 in every cell: a client that looks cannot miss it, and
no client of these protocols looks.

## Defenses that only pretend

Twelve kinds of planted pretence, one that behaves in probes alone, and honest defenses beside them:

<<lies>>

The `secagg` row is no false alarm: the sum is the gradient of a batch of ten, and on this network such a batch is
rebuilt.

More lies, of channels beside the sum, of noise that somebody knows and of replay (`tests/lies/ppbench_channels.py`),
and honest defenses (2026-11-28, `python benchmarks/measure_lies.py OUT`). "Both tests" need no attack: two worlds, and
probes beside training.

<<power>>

## Speed

<<ratios>>

The first two rows: `pytest benchmarks/bench_ig.py --benchmark-only`; the others
`pytest benchmarks/bench_references.py --benchmark-only`.

DLG beside its authors' loop at equal stopping loss, LeNet of 100 classes, CPU seconds with those of failures
(2026-11-28; `PPBENCH_BENCH_FIRST=40000 PPBENCH_BENCH_VICTIMS=8 pytest benchmarks/bench_dlg.py --benchmark-only`). At
both losses the loop fails on the same three. The last two rows, on the same images, stop by their own rules
(`against_breaching.py --rows lenet100 --victims 8`):

<<dlg>>

<<speed>>

<<default-command>>

Leaving `dlg` out of the default portfolio costs little: over 98 rows no row that falls loses a tenth of a decibel of
its median or an image above 20 dB; rows that stay below 20 dB fall by 2.0 dB at most, `full_noise` by 2.7
(2026-11-23). It is alone in rebuilding 3 of 24 undefended images of batches of 8 after training. `torch.compile` on
LeNet: 107 s of warm-up, then 1.38 ms an iteration beside 1.04 ms in eager mode, so `compile` is off.

### BAFFLE's memory is bought with time

A client runs its models one after the other on 8 examples at a time where that keeps its peak below
backpropagation's. The paper's 0.104 is met in slices, and not with whole batches or slices on both sides, so the
claim is left open.

<<baffle-memory>>

### Where a suite's seconds go

<<attack-shares>>

The slowest boards spend 70 to 87 % of their hours in attacks, nearly all of it in searches. So one evaluation of the
matching loss was made cheaper: a hand-written chain of layers instead of vmap, inference mode, and from 150
evaluations of one shape on a trace without Python between operations (0.68 to 0.75 of the time with eight images,
half with one; `ppbench/attacks/reconstruction/fastpath`). Whole commands gain less:

<<pairs>>

<<searches-beside-1fcb34d>>

Stopping earlier gains nothing more: under noise of 0.1 or more a search already ends after 201 of 1,800 evaluations,
a window of half the length would save at most 16 %, and 21 % are spent on victims that end above 30 dB.

## What is not trusted

<<not-trusted>>

## Sweeps, pages, comparisons

<<sweeps-pages>>

How size costs (2026-11-28, one process each, `python benchmarks/bench_scale.py clients|cells|page`,
`benchmarks/lose_node.py`; MNIST on LeNet, label recovery):

<<scale>>

Before, a client's cost was measured in a round of all clients, 60,000 client computations beside 6,000 of training:
`dp` had not ended after 500 s. What is still linear in the clients is set-up, where each registers. `spn` keeps the
secret head and moments of each client that took part.

What `compare` finds with 80 % probability, and how often reruns of one defense raise a false alarm, is in
[compare.md](compare.md).
"""


def page() -> str:
    """Return the page, every place of a table filled."""
    tables = measured() | {name: make() for name, make in TABLES.items()}
    used = PLACE.findall(TEXT)
    if left := tables.keys() - used:
        raise SystemExit(f"no place on the page for {', '.join(sorted(left))}")
    return PLACE.sub(lambda match: tables[match[1]], TEXT)


def main(words: list[str]) -> int:
    """Write the page, or with --check say whether it is what the results give; the exit code."""
    if words not in ([], ["--check"]):
        print("usage: python docs/make_benchmarks.py [--check]", file=sys.stderr)
        return 2
    if words and PAGE.read_text(encoding="utf-8") != page():
        print("docs/benchmarks.md is not what the results give; run: python docs/make_benchmarks.py", file=sys.stderr)
        return 1
    if not words:
        PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
