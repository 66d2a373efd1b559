"""`ppbench evaluate`: one defense, trained, attacked and scored."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ppbench.federation.threats import THREATS

# Options of `EvaluateConfig` in the order of `--help`. They are listed here because the fields import torch, which is
# too slow for `--help`. An option has the name of its field, except in `FIELDS`.
WEIGHTS_HELP = (
    "AlexNet's convolutions for LPIPS and Feat-MSE; default: PPBENCH_WEIGHTS, else torchvision's cache, else null."
)
TF32_HELP = (
    "Let a GPU round factors of convolutions and matrix products to TF32: faster, and other numbers; records say so."
)
ISOLATE_HELP = (
    "Run other packages' attacks in processes of their own, kept from files, network and truth as far as this system "
    "can, on victims that a secret in OUT/salt takes part in drawing."
)
JSON_HELP = "Print the result as JSON and nothing else; cells have the fields of leaderboard.csv, with whole metrics."
OPTIONS: dict[str, tuple[type, str]] = {
    "dataset": (
        str,
        "NAME or NAME:ARGUMENT, as parquet:FOLDER (`ppbench list datasets`), or MODULE:FUNCTION of yours.",
    ),
    "model": (str, "NAME (`ppbench list models`), or MODULE:FACTORY of yours: any nn.Module that classifies."),
    "attack": (
        str,
        "Names separated by commas, quick (few, where they show something), standard (every cell), or all.",
    ),
    "grid": (str, "quick, paper, or values of the control parameter, as 0.01,0.1."),
    "set": (list[str], "name=value of the defense, model.name=value, or ATTACK.name=value. Repeatable."),
    "train": (int, "Training examples that the clients share; all by default."),
    "public": (float, "Share of the training part that no client has and adversaries may use, as 0.5."),
    "clients": (int, "Number of clients."),
    "rounds": (int, "Rounds of training."),
    "batch_size": (int, "Examples in a training batch."),
    "local_epochs": (int, "Epochs of a client's local training (delta)."),
    "attack_batch": (str, "Sizes of victims' batches, as 1,8."),
    "probe": (str, "gradient or local: what a probed client does with the victims' batch."),
    "probe_rounds": (int, "Rounds in which it holds the batch."),
    "victims": (int, "Victim images per cell."),
    "batches": (int, "Least number of batches per cell, where fewer would hold the victims."),
    "candidates": (int, "Members, and as many non-members, that are attacked."),
    "tuning": (int, "Test images on which an attack's settings are tuned."),
    "budget": (int, "Gradient evaluations per victim, for attacks that search."),
    "references": (int, "Reference runs of an audit: an even number, 0 for none."),
    "canaries": (int, "Canaries of each of three families in an audit."),
    "canary_clients": (int, "Clients of an audit whose gradients are random directions: epsilon of a client."),
    "stage": (str, "init, iterate, final, audit (membership with canaries and references); separated by commas."),
    "threat": (str, f"{', '.join(THREATS)}; separated by commas."),
    "partition": (str, "iid, imbalanced, dirichlet:ALPHA or domains."),
    "schedule": (str, "round_robin or parallel."),
    "loss": (str, "cross_entropy, squared, or bce for masks."),
    "upload": (str, "delta (FedAvg: local epochs) or gradient (FedSGD: one batch a round)."),
    "optimizer": (str, "adam or sgd: the clients', or with gradients the server's."),
    "lr": (float, "Learning rate of that optimizer."),
    "weights": (str, WEIGHTS_HELP),
    "device": (str, "auto, cpu, cuda, or as torch names it."),
    "tf32": (bool, TF32_HELP),
    "seed": (int, "Master seed: one seed, one result."),
    "isolate": (bool, ISOLATE_HELP),
}
FIELDS = {"attack": "attacks", "stage": "stages", "threat": "threats"}
DEFAULTS = {"device": "auto"}


def evaluate(
    *,
    defense: Annotated[str, typer.Option(help="What to evaluate; see `ppbench list defenses`.")],
    preset: Annotated[
        str,
        typer.Option(
            help="quick; portfolio: every attack and an audit, long; paper: its paper's settings, for a GPU or hours."
        ),
    ] = "quick",
    workers: Annotated[int | None, typer.Option(help="Processes; by default one per core.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("ppbench-results"),
    json_: Annotated[bool, typer.Option("--json", help=JSON_HELP)] = False,
    full: Annotated[bool, typer.Option("--full", help="Print all tables, sentences and controls.")] = False,
    **options: Any,
) -> None:
    """Evaluate a defense: train, attack, score, record, and report the result.

    Exit code 0: all cells are there and the controls hold; 1: cells failed, or none of the defense is complete; 2:
    input that cannot be used; 3: nothing can be concluded: a control failed or did not run, or the undefended model
    learned too little and nothing leaks.
    """
    from ppbench.commands.terminal import Live, as_json, report
    from ppbench.records.run_files import typed_command
    from ppbench.report.controls import exit_of
    from ppbench.run.config import configure
    from ppbench.run.evaluation import evaluate as run

    config = configure(preset, defense=defense, **_fields(options))
    with Live(quiet=json_) as bars:
        result = run(config, out=out, workers=workers, progress=bars, command=typed_command())
    if json_:
        typer.echo(json.dumps(as_json(result), indent=1))
    else:
        report(result, full)
    if code := exit_of(result.records, result.reliable):
        raise typer.Exit(code)


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """Return the given fields of the configuration, from the values of `OPTIONS`. UsageError: bad values."""
    from ppbench.run.config import assignments, names, numbers, resolve_device, sizes

    parse: dict[str, Callable[[Any], Any]] = {
        **{name: partial(names, option=f"--{name}") for name in FIELDS},
        "grid": numbers, "attack_batch": sizes, "device": resolve_device,
    }  # fmt: skip
    settings, model_options = assignments(options.pop("set") or [])
    fields = {"settings": settings or None, "model_options": model_options or None}
    fields |= {FIELDS.get(name, name): parse.get(name, lambda word: word)(word) for name, word in options.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _signature() -> inspect.Signature:
    """Return the signature for typer: the function's own parameters, with `OPTIONS` after the defense."""
    first, *rest = list(inspect.signature(evaluate, eval_str=True).parameters.values())[:-1]
    table = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS.get(name),
            annotation=Annotated[kind if name in DEFAULTS else kind | None, typer.Option(help=words)],
        )
        for name, (kind, words) in OPTIONS.items()
    ]
    return inspect.Signature([first, *table, *rest])


evaluate.__signature__ = _signature()  # type: ignore[attr-defined]
