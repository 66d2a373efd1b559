"""`ppbench leaderboard`, `verify`, `claims` and `pack`: results derived from a folder of records, or an archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import Exit, UsageError


def leaderboard(
    folder: Annotated[Path, typer.Argument(help="A folder of results, or an archive of one.")],
    out: Annotated[
        Path | None, typer.Option(help="For an archive: the new folder to unpack it into, and draw.")
    ] = None,
) -> None:
    """Rebuild leaderboard.csv, worst_case.csv, leaderboard.html and the figures from the records in FOLDER.

    leaderboard.csv has one row per cell and always the same columns; worst_case.csv one row per defense and control
    value on the boards of reconstruction, without empty columns. docs/columns.md explains every column, and
    ppbench.load reads FOLDER into pandas.

    Exit code 0: all records are on the board; 1: some could not be read (named on the page and stderr); 2: none could.
    """
    from ppbench.base.files import kind_of
    from ppbench.claims.check import PAPER_CLAIMS
    from ppbench.records.archive import unpack_archive
    from ppbench.records.store import open_results
    from ppbench.report.page.board import rebuild

    if (kind_of(folder) == "file") != (out is not None):
        raise UsageError(
            f"{folder}: --out FOLDER is where an archive is unpacked and drawn; give it with archives only."
        )
    open_results(folder)  # raises UsageError before anything is unpacked
    damaged = unpack_archive(folder, out) if out is not None else []
    written = rebuild(open_results(out or folder), PAPER_CLAIMS)
    for problem in (*damaged, *written.problems):
        typer.echo(f"warning: {problem}", err=True)
    for path in written.paths:
        typer.echo(str(path))
    if written.figures:
        typer.echo(f"{len(written.figures)} figures in {written.figures[0].parent}")
    if damaged or written.problems:
        raise typer.Exit(Exit.FOUND)


def pack(
    folder: Annotated[Path, typer.Argument(help="A folder of results.")],
    archive: Annotated[Path | None, typer.Argument(help="The file to write; FOLDER.zip by default.")] = None,
) -> None:
    """Write FOLDER as one file that leaderboard, verify, compare, baseline and claims take in its place.

    It contains records, times, reconstructions and tables, byte for byte, but no caches, and neither the page nor its
    figures, which are drawn from the records.
    """
    from ppbench.base.files import kind_of
    from ppbench.records.archive import pack_archive
    from ppbench.records.store import open_results

    if kind_of(folder) == "file" or not open_results(folder).ids():
        raise UsageError(f"{folder} holds no records; give the --out of an evaluation.")
    target = archive or folder.with_name(f"{folder.resolve().name}.zip")
    left_out = pack_archive(folder, target)
    typer.echo(str(target))
    if left_out:
        typer.echo(f"left out: {', '.join(left_out)}", err=True)


def verify(folder: Annotated[Path, typer.Argument(help="A folder of results, or an archive of one.")]) -> None:
    """Recompute what can be recomputed in FOLDER, report differences, and list what could not be checked.

    Aggregates, tables and flags from per-victim scores, scores of images from the kept reconstructions, epsilon from
    the mechanism, victims and originals from the data set where it is at hand; docs/verify.md says what that
    shows. Exit code 0: nothing differs; 1: something does; 2: FOLDER holds no results.
    """
    from ppbench.records.store import open_results
    from ppbench.verification.recheck import full_findings

    findings = full_findings(open_results(folder).out)
    for problem in findings.problems:
        typer.echo(problem)
    if not findings.problems:
        typer.echo("Every record, artifact and table row agrees with the per-victim scores.")
    typer.echo(f"Not checked: {'; '.join(findings.unchecked)}.")
    if findings.problems:
        raise typer.Exit(Exit.FOUND)


def claims(
    folders: Annotated[list[Path], typer.Argument(help="Folders of results, or archives.")],
    to: Annotated[Path | None, typer.Option(help="File for the table; the screen by default.")] = None,
    figures: Annotated[list[Path] | None, typer.Option(help="JSON of benchmark figures. Repeatable.")] = None,
) -> None:
    """Compare what papers claim about their defenses with the records in FOLDERS, as a table in Markdown."""
    from ppbench.base.files import kind_of, write_output
    from ppbench.claims.page import write_claims

    text = write_claims(folders, figures or [])
    if to is None:
        typer.echo(text, nl=False)
        return
    if kind_of(to.parent) != "folder":
        raise UsageError(f"There is no folder {to.parent} for the table; make it, or give another --to.")
    write_output(to, text.encode())
    typer.echo(str(to))
