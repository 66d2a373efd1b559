"""Write docs/benchmarks.md from benchmarks/results: `python docs/make_benchmarks.py [--check]`.

Tables come from the result files: those of one benchmark each, and `measured.json`, which keeps tables that were
written down by hand, each with its date, command and setting. The paragraphs stand in benchmarks/page.md.in.
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
TEMPLATE = PAGE.parent.parent / "benchmarks" / "page.md.in"
RESULTS = TEMPLATE.parent / "results"
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
        attacks = point["audit"]["attacks"]
        attack = "mia_lira" if "mia_lira client/1" in attacks else "mia_loss"
        figures = attacks[f"{attack} client/1"]
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
        [
            noise,
            *(" / ".join(f"{attacks[name][key][0]:.2f}" for key in AREAS) if name in attacks else "" for name in names),
        ]
        for noise, point in points_of_letters()
        for attacks in [point["audit"]["attacks"]]
    ]
    return table(["noise", *(f"`{name.split()[0]}`" for name in names)], rows)


def exposure() -> str:
    """Return by how many bits planted letters are exposed under noise, as a classification and by next tokens."""
    rows = []
    kept = read("exposure")["rows"]
    for key in dict.fromkeys((row["defense"], row["sigma"]) for row in kept):
        pair = [row for row in kept if (row["defense"], row["sigma"]) == key]
        cells = []
        for row in pair:
            first, absent = f"{number(100 * row['secrets_first'][0], 0)} %", f"{row['exposure_absent'][0]:.1f}"
            value, low, high = row["exposure"]
            cells += [f"{value:.1f} ({low:.1f} to {high:.1f})", first, absent, f"{row['auc_planted'][0]:.2f}"]
        rows.append([f"`{key[0]}`" + (f" {key[1]:g}" if key[1] else ""), *cells])
    head = [[f"{task}: bits", "first", "absent", "`mia_loss`, AUC"] for task in ("classes", "next tokens")]
    return table(["noise", *head[0], *head[1]], rows)


def adapters() -> str:
    """Return what one gradient of adapters gives away of one text, by rank and network."""
    kept = read("adapters")["rows"]
    networks = list(dict.fromkeys(row["network"] for row in kept))
    by_rank = {(row["network"], row["rank"]): row for row in kept}
    rows = []
    for rank in dict.fromkeys(row["rank"] for row in kept):
        some = [by_rank[network, rank] for network in networks]
        cells = [f"{row['right']:.0%}, {row['exact']} of {row['texts']}, {row['seconds']:.1f} s" for row in some]
        rows.append([str(rank), *cells])
    heads = [f"{name}: {next(row['tokens'] for row in kept if row['network'] == name)} tokens" for name in networks]
    return table(["rank", *heads], rows)


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
    "exposure": exposure,
    "adapters": adapters,
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


def page() -> str:
    """Return the page, every place of a table filled."""
    tables = measured() | {name: make() for name, make in TABLES.items()}
    text = TEMPLATE.read_text(encoding="utf-8")
    used = PLACE.findall(text)
    if left := tables.keys() - used:
        raise SystemExit(f"no place on the page for {', '.join(sorted(left))}")
    return PLACE.sub(lambda match: tables[match[1]], text)


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
