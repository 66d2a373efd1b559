"""`ppbench evaluate` and `ppbench sweep`: cells of one defense, or the missing ones of a suite, are computed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppbench.base.errors import UsageError, shown
from ppbench.run.options import (
    DefenseOptions,
    FederationOptions,
    QuestionOptions,
    RunOptions,
    TaskOptions,
    offered,
)

if TYPE_CHECKING:
    from ppbench.run.sweep import SweepResult

# -- ppbench evaluate --

JSON_HELP = "Print the result as JSON and nothing else; cells have the fields of leaderboard.csv, with whole metrics."
SET_HELP = "name=value of the defense, model.name=value, or ATTACK.name=value. Repeatable."
GROUPS = (TaskOptions, QuestionOptions, FederationOptions, RunOptions)
FIELDS = {"attack": "attacks", "stage": "stages", "threat": "threats"}
"""Options whose field has another name; each takes one word with commas."""
_WORDS = {field: word for word, field in FIELDS.items()}
OPTIONS: dict[str, tuple[type, str]] = {
    **offered(DefenseOptions),
    "set": (list[str], SET_HELP),
    **{_WORDS.get(name, name): option for group in GROUPS for name, option in offered(group).items()},
}
"""Type and help of each option, in the order of `--help`."""
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
    _close_attacks(bool(options.get("isolate")))
    from ppbench.commands.terminal import Live, evaluation_json, evaluation_report
    from ppbench.records.run_files import typed_command
    from ppbench.report.controls import exit_of
    from ppbench.run.config import configure
    from ppbench.run.evaluation import evaluate as run

    config = configure(preset, defense=defense, **_fields(options))
    with Live(quiet=json_) as bars:
        result = run(config, out=out, workers=workers, progress=bars, command=typed_command())
    if json_:
        typer.echo(json.dumps(evaluation_json(result), indent=1))
    else:
        evaluation_report(result, full)
    if code := exit_of(result.records, result.reliable):
        raise typer.Exit(code)


def _close_attacks(isolate: bool) -> None:
    """Close the packages of isolated attacks, before anything imports torch, which tries to import modules."""
    from ppbench.base.registry import close_attacks

    if isolate:
        close_attacks()


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


# -- ppbench audit: a model that is already trained --

ModelAddress = Annotated[str, typer.Option(help="The function that makes the network, as my_code:network.")]
FinishedWeights = Annotated[Path, typer.Option(help="Its weights: FILE.safetensors, or a state dict of torch.")]
SET_WORDS = "a folder of class folders, FILE.safetensors (x, y), FILE.parquet, FILE.csv, hf:FOLDER, or MODULE:FUNCTION"
MembersOption = Annotated[str, typer.Option(help=f"Its training data, or a part: {SET_WORDS}.")]
NonmembersOption = Annotated[str, typer.Option(help="Data of the same form and source that it was not trained on.")]
TrainOption = Annotated[
    str | None, typer.Option(help="Function of x, y (and seed) that trains such a network: adds LiRA and RMIA.")
]
ReferencesOption = Annotated[int | None, typer.Option(help="Models trained by --train, even; 16 by default.")]
MaxAsr = Annotated[float | None, typer.Option(help="Limit on the share of right decisions; guessing is 0.5.")]
MaxTpr = Annotated[float | None, typer.Option(help="Limit on the share of members found at an FPR of 1 %.")]
CandidatesOption = Annotated[int, typer.Option(help="Largest number of members, and of non-members, under attack.")]
OutputOption = Annotated[
    str | None, typer.Option(help="Key, index or attribute of the logits in the network's output.")
]


def audit(
    *,
    model: ModelAddress,
    weights: FinishedWeights,
    members: MembersOption,
    nonmembers: NonmembersOption,
    train: TrainOption = None,
    references: ReferencesOption = None,
    max_asr: MaxAsr = None,
    max_tpr: MaxTpr = None,
    candidates: CandidatesOption = 5000,
    output: OutputOption = None,
    seed: Annotated[int, typer.Option(help="Seed of all draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or as torch names it.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder of the report, figures and scores.")] = Path("ppbench-audit"),
) -> None:
    """Audit a model that is already trained: can members of its training data be recognized? One page of HTML to print.

    Example: ppbench audit --model my_code:network --weights net.safetensors --members data/train --nonmembers data/test
    --max-asr 0.6

    Exit code 0: within the limits, or no limits; 1: an attack's whole interval lies beyond a limit; 2: input that
    cannot be used; 3: nothing can be concluded: a control failed, or a limit lies inside an interval.
    """
    from ppbench.commands.terminal import audited_report
    from ppbench.run.config import resolve_device
    from ppbench.run.model_audit import AuditOrder, audit_files, limits_of, training_function

    _check_free(out)
    function = None if train is None else training_function(train)
    part = int(output) if output is not None and output.isdecimal() else output
    limits, where = limits_of(max_asr, max_tpr), resolve_device(device)
    order = AuditOrder(function, references, limits, candidates, part, seed, where, _say_step)
    result = audit_files(model, weights, members, nonmembers, order)
    audited_report(result, result.save(out))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _check_free(out: Path) -> None:
    """Raise UsageError, before what may take hours, if something else than a folder is at `out`."""
    from ppbench.base.files import kind_of

    if kind_of(out) not in (None, "folder"):
        raise UsageError(f"--out {out} is no folder; give one, or a name that is free.")


def _say_step(line: str) -> None:
    typer.echo(f"{line} ...", err=True)


# -- ppbench sweep --

SuiteArgument = Annotated[str, typer.Argument(help="A shipped suite (`ppbench list suites`) or a TOML file.")]
Preset = Annotated[str, typer.Option(help="One of the suite's presets, as two-cores.")]
Engine = Annotated[
    str, typer.Option(help="local (processes), inline (this one) or ray (a cluster; needs the extra `ray`).")
]
Workers = Annotated[
    int | None, typer.Option(help="Cells at the same time; by default one per core, or as many as fit a cluster.")
]
Address = Annotated[str | None, typer.Option(help="Address of a running Ray cluster, as auto or HOST:6379.")]
ONLY_HELP = "defense=spn,dp; also control, attack, kind, threat, stage, batch, model, seed. Repeatable. Controls stay."
Only = Annotated[list[str] | None, typer.Option(help=ONLY_HELP)]
Added = Annotated[list[str] | None, typer.Option(help="An installed defense that the suite does not list. Repeatable.")]
Place = Annotated[
    str | None, typer.Option(help="Where the suite's data are here, as parquet:FOLDER; checked by content.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or as torch names it.")]
Tf32 = Annotated[bool, typer.Option("--tf32/--no-tf32", help=OPTIONS["tf32"][1])]
WeightsOption = Annotated[str | None, typer.Option(help="AlexNet's convolutions for LPIPS, as for evaluate.")]
Out = Annotated[Path | None, typer.Option(help="Folder of results; ppbench-sweeps/SUITE by default.")]
SWEEP_ISOLATE_HELP = OPTIONS["isolate"][1].removesuffix(".") + "; by default where a suite has any."
Isolate = Annotated[bool | None, typer.Option("--isolate/--no-isolate", help=SWEEP_ISOLATE_HELP)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be computed, and compute nothing.")]


def sweep(
    suite: SuiteArgument,
    preset: Preset = "",
    engine: Engine = "local",
    workers: Workers = None,
    address: Address = None,
    only: Only = None,
    add: Added = None,
    dataset: Place = None,
    device: Device = "auto",
    tf32: Tf32 = False,
    weights: WeightsOption = None,
    out: Out = None,
    isolate: Isolate = None,
    dry_run: DryRun = False,
    full: Annotated[bool, typer.Option("--full", help="Print all sentences and controls.")] = False,
) -> None:
    """Compute the missing cells of a suite, and write its leaderboard.

    Exit code 0: all cells are there and the controls hold; 1: cells failed, or none of a defense is complete; 2: input
    that cannot be used; 3: a control failed or did not run: conclude nothing.
    """
    _close_attacks(isolate is not False)
    from ppbench.commands.terminal import planned_report
    from ppbench.run.config import resolve_device
    from ppbench.run.suite import load_suite
    from ppbench.run.sweep import default_out, plan_sweep
    from ppbench.run.sweep import sweep as run

    where, chosen = resolve_device(device), filters(only or [])
    loaded = load_suite(
        suite, preset, add=add or (), dataset=dataset, device=where, tf32=tf32, weights=weights, isolate=isolate
    )
    if dry_run:
        planned_report(plan_sweep(loaded, out or default_out(loaded), chosen))
        return
    start = partial(run, loaded, out=out, engine=engine, workers=workers, address=address, only=chosen, device=where)
    _sweep_and_report(start, full)


def _sweep_and_report(start: Callable[..., SweepResult], full: bool) -> None:
    """Run a sweep with progress bars and print its result; exits as its records and controls demand."""
    from ppbench.base.bars import Bars
    from ppbench.commands.terminal import swept_report
    from ppbench.records.run_files import typed_command
    from ppbench.report.controls import exit_of

    with Bars() as bars:
        swept = start(progress=bars, command=typed_command())
    swept_report(swept, full)
    if code := exit_of(swept.records, swept.reliable):
        raise typer.Exit(code)


def filters(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Return words key=a,b as {key: (a, b)}. Raises UsageError where one has another form."""
    chosen: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, values = word.partition("=")
        parts = tuple(value.strip() for value in values.split(",") if value.strip())
        if not equals or not key.strip() or not parts:
            raise UsageError(f"Option --only {shown(word)} cannot be used; give key=value, as defense=spn,dp.")
        chosen[key.strip()] = (*chosen.get(key.strip(), ()), *parts)
    return chosen
