"""The command line: parses, calls, prints; no logic. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
import warnings
from enum import Enum
from typing import Annotated

import typer

from ppbench.base.errors import ProtocolError, UsageError
from ppbench.base.version import __version__
from ppbench.commands.boards import claims, leaderboard, pack, verify
from ppbench.commands.compare import baseline, compare
from ppbench.commands.evaluate import evaluate
from ppbench.commands.sweep import sweep
from ppbench.commands.words import check_words

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
            origin = "" if plugin.ours else f" [{plugin.distribution}]"
            typer.echo(f"  {plugin.name:<16}{origin} {summary(plugin)}")
    if what.value in ("suites", "all"):
        from ppbench.suites import titles

        typer.echo("suites:")
        for name, title in titles().items():
            typer.echo(f"  {name:<16} {title}")


for command in (evaluate, sweep, leaderboard, verify, pack, compare, claims):
    app.command()(command)
app.add_typer(baseline, name="baseline")


INTERRUPTED = 130


def main() -> None:
    """Run the command line; bad input is one sentence on stderr and exit code 2."""
    warnings.showwarning = lambda message, *_: typer.echo(f"warning: {message}", err=True)
    try:
        check_words(sys.argv[1:])
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
