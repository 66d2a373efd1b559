"""`ppbench leaderboard`, `verify` and `claims`: what is derived from a folder of records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import UsageError


def leaderboard(folder: Annotated[Path, typer.Argument(help="A folder of results.")]) -> None:
    """Rebuild leaderboard.csv, leaderboard.html and the figures from the records in FOLDER.

    Exit code 0: all records are on the board; 1: some could not be read, which the page and stderr name; 2: none could.
    """
    from ppbench.records.store import Store
    from ppbench.report.page.board import rebuild

    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the --out of an evaluation.")
    written = rebuild(Store(folder))
    for problem in written.problems:
        typer.echo(f"warning: {problem}", err=True)
    for path in written.paths:
        typer.echo(str(path))
    if written.problems:
        raise typer.Exit(1)


def verify(folder: Annotated[Path, typer.Argument(help="A folder of results.")]) -> None:
    """Recompute every aggregate in FOLDER from the per-victim scores; exit code 1 where something differs."""
    from ppbench.report.page.board import claimed
    from ppbench.report.verify import verify as check

    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give the --out of an evaluation.")
    problems = check(folder, claimed)
    for problem in problems:
        typer.echo(problem)
    if problems:
        raise typer.Exit(1)
    typer.echo("Every record, artifact and table row agrees with the per-victim scores.")


def claims(
    folders: Annotated[list[Path], typer.Argument(help="Folders of results.")],
    to: Annotated[Path | None, typer.Option(help="File for the table; the screen by default.")] = None,
    figures: Annotated[list[Path] | None, typer.Option(help="JSON of benchmark figures. Repeatable.")] = None,
) -> None:
    """Set what papers claim about their defenses beside the records in FOLDERS, as a table in Markdown."""
    from ppbench.records.files import write_atomic
    from ppbench.report.claims.page import write_claims

    text = write_claims(folders, figures or [])
    if to is None:
        typer.echo(text, nl=False)
        return
    if not to.parent.is_dir():
        raise UsageError(f"There is no folder {to.parent} for the table; make it, or give another --to.")
    write_atomic(to, text.encode())
    typer.echo(str(to))
