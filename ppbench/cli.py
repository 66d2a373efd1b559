"""The command line: parses, calls, prints; no logic. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ppbench import __version__
from ppbench.base.errors import ProtocolError, UsageError
from ppbench.commands import boards, compare, sweep

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="How much private data does a federated-learning defense really let leak?\n\n"
    "Trains a federation under the defense, attacks exactly what each party saw, scores the attacks against the truth, "
    "and keeps a leaderboard.",
)


class What(str, Enum):
    """What `ppbench list` can list."""

    all = "all"
    defenses = "defenses"
    attacks = "attacks"
    datasets = "datasets"
    models = "models"
    suites = "suites"


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ppbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_(what: Annotated[What, typer.Argument(help="Which group.")] = What.all) -> None:
    """List the defenses, attacks, data sets and models that are installed, in-tree and third-party, and the suites."""
    from ppbench.base.registry import GROUPS, plugins, summary

    for group in GROUPS:
        if what.value not in (group, "all"):
            continue
        typer.echo(f"{group}:")
        for plugin in plugins(group).values():
            origin = "" if plugin.distribution == "ppbench" else f" [{plugin.distribution}]"
            typer.echo(f"  {plugin.name:<16}{origin} {summary(plugin)}")
    if what.value in ("suites", "all"):
        from ppbench.suites import titles

        typer.echo("suites:")
        for name, title in titles().items():
            typer.echo(f"  {name:<16} {title}")


@app.command()
def evaluate(
    defense: Annotated[str, typer.Option(help="What to evaluate; see `ppbench list defenses`.")],
    dataset: Annotated[
        str | None, typer.Option(help="NAME or NAME:ARGUMENT, as parquet:FOLDER; see `ppbench list datasets`.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="See `ppbench list models`.")] = None,
    attack: Annotated[
        str | None, typer.Option(help="Names with commas between, standard (the quick portfolio), or all that apply.")
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="quick, paper, or values of the control parameter, as 0.01,0.1.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value of the defense, model.name=value, or ATTACK.name=value. Repeatable."),
    ] = None,
    train: Annotated[int | None, typer.Option(help="Training examples that the clients share; all by default.")] = None,
    public: Annotated[
        float | None,
        typer.Option(help="Share of the training part that no client holds and adversaries may use, as 0.5."),
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a training batch.")] = None,
    local_epochs: Annotated[int | None, typer.Option(help="Epochs of a client's local training (delta).")] = None,
    attack_batch: Annotated[str | None, typer.Option(help="Sizes of victims' batches, as 1,4,8.")] = None,
    probe: Annotated[
        str | None, typer.Option(help="gradient or local: what a probed client does with the victims' batch.")
    ] = None,
    probe_rounds: Annotated[int | None, typer.Option(help="Rounds that it holds the batch.")] = None,
    victims: Annotated[int | None, typer.Option(help="Victim images a cell.")] = None,
    candidates: Annotated[
        int | None, typer.Option(help="Members, and as many other records, whose membership is asked.")
    ] = None,
    tuning: Annotated[
        int | None, typer.Option(help="Test images on which an attack's settings are tried before the victims.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Gradient evaluations a victim of attacks that search.")] = None,
    references: Annotated[
        int | None, typer.Option(help="Reference runs of an audit: an even number, 0 for none.")
    ] = None,
    canaries: Annotated[int | None, typer.Option(help="Canaries of each of three families in an audit.")] = None,
    stage: Annotated[
        str | None,
        typer.Option(help="init, iterate, final, audit (membership with canaries and references); commas between."),
    ] = None,
    threat: Annotated[
        str | None, typer.Option(help="server/1, client/1, eavesdropper/1, collusion/1; commas between.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="iid, imbalanced, dirichlet:ALPHA or domains.")] = None,
    schedule: Annotated[str | None, typer.Option(help="round_robin or parallel.")] = None,
    loss: Annotated[str | None, typer.Option(help="cross_entropy, squared, or bce for masks.")] = None,
    upload: Annotated[
        str | None, typer.Option(help="delta (FedAvg: local epochs) or gradient (FedSGD: one batch a round).")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adam or sgd: the clients', or with gradients the server's.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of that optimizer.")] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="AlexNet's convolutions for LPIPS and Feat-MSE; default: PPBENCH_WEIGHTS, else torchvision's cache, "
            "else null."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Master seed: one seed, one result.")] = None,
    preset: Annotated[
        str,
        typer.Option(help="quick; portfolio: every attack, and an audit, long; paper: the SPN paper's set-up, hours."),
    ] = "quick",
    workers: Annotated[int | None, typer.Option(help="Processes; by default one a core.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of results.")] = Path("ppbench-results"),
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
) -> None:
    """Evaluate a defense: train, attack, score, record, and say what was found.

    Exit code 0: the controls hold; 2: input that cannot be used; 3: a control failed or did not run, trust nothing.
    """
    from ppbench.base.bars import Bars
    from ppbench.commands.terminal import as_json, report
    from ppbench.run.config import configure
    from ppbench.run.evaluation import evaluate as run
    from ppbench.run.options import assignments, names, numbers, resolve_device, sizes

    settings, model_options = assignments(set_ or [])
    given = {
        "dataset": dataset,
        "model": model,
        "model_options": model_options or None,
        "attacks": names(attack),
        "grid": numbers(grid),
        "settings": settings or None,
        "train": train,
        "public": public,
        "clients": clients,
        "rounds": rounds,
        "batch_size": batch_size,
        "local_epochs": local_epochs,
        "attack_batch": sizes(attack_batch),
        "probe": probe,
        "probe_rounds": probe_rounds,
        "victims": victims,
        "candidates": candidates,
        "tuning": tuning,
        "budget": budget,
        "references": references,
        "canaries": canaries,
        "stages": names(stage),
        "threats": names(threat),
        "partition": partition,
        "schedule": schedule,
        "loss": loss,
        "upload": upload,
        "optimizer": optimizer,
        "lr": lr,
        "weights": weights,
        "seed": seed,
        "device": resolve_device(device),
    }
    config = configure(preset, defense=defense, **{key: value for key, value in given.items() if value is not None})
    with Bars(quiet=json_) as bars:
        result = run(config, out=out, workers=workers, progress=bars)
    if json_:
        typer.echo(json.dumps(as_json(result), indent=1))
    else:
        report(result)
    if not result.reliable:
        raise typer.Exit(3)


for command in (sweep.sweep, boards.leaderboard, boards.verify, boards.pack, compare.compare, boards.claims):
    app.command()(command)
app.add_typer(compare.baseline, name="baseline")


INTERRUPTED = 130


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    warnings.showwarning = lambda message, *_: typer.echo(f"warning: {message}", err=True)
    try:
        code = app(standalone_mode=False)
    except (UsageError, ProtocolError) as error:
        typer.echo(f"ppbench: {error}", err=True)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:
        if not hasattr(error, "show"):  # the parser's own errors know how to show themselves
            raise
        error.show()
        sys.exit(error.exit_code if hasattr(error, "exit_code") else 2)
    if code == INTERRUPTED:  # some versions of typer turn the interrupt into this code
        typer.echo("ppbench: interrupted; what is finished is kept, and the same command goes on from there.", err=True)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
