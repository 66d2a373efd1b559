"""Commands on folders of records and archives, from `leaderboard` and `view` to `compare` and `baseline`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import Exit, UsageError

# -- ppbench leaderboard, view, pack, verify and claims --


def leaderboard(
    folder: Annotated[Path, typer.Argument(help="A folder of results, or an archive of one.")],
    out: Annotated[
        Path | None, typer.Option(help="For an archive: the new folder to unpack it into, and draw.")
    ] = None,
    summary: Annotated[
        Path | None, typer.Option(help="Write only a short page, one table: to FILE.md or FILE.html.")
    ] = None,
) -> None:
    """Rebuild leaderboard.csv, worst_case.csv, leaderboard.html and the figures from the records in FOLDER.

    leaderboard.csv has one row per cell and always the same columns; worst_case.csv one row per defense and control
    value on the boards of reconstruction, without empty columns. docs/columns.md explains every column, and
    ppbench.load reads FOLDER into pandas. --summary shows each defense at its best usable setting, and what to choose.

    Exit code 0: all records are on the board; 1: some could not be read (named on the page and stderr); 2: none could.
    """
    if summary is not None:
        _summarized(folder, out, summary)
    else:
        _drawn(folder, out)


def _drawn(folder: Path, out: Path | None) -> None:
    """Draw the board of a folder, or of an archive in the folder `out`."""
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


def _summarized(folder: Path, out: Path | None, target: Path) -> None:
    """Write the summary of a folder or an archive."""
    from ppbench.base.files import write_output
    from ppbench.records.store import open_results
    from ppbench.report.page.board import summary_of

    if out is not None or target.suffix not in (".md", ".html"):
        raise UsageError(f"{target}: --summary is a file that ends with .md or .html, without --out.")
    board = summary_of(open_results(folder), folder.resolve().name)
    for problem in board.problems:
        typer.echo(f"warning: {problem}", err=True)
    write_output(target, (board.markdown() if target.suffix == ".md" else board.html()).encode())
    typer.echo(str(target))
    if board.problems:
        raise typer.Exit(Exit.FOUND)


def view_page(
    folder: Annotated[Path, typer.Argument(help="A folder of results, or an archive of one.")] = Path(
        "ppbench-results"
    ),
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of 127.0.0.1; a free one by default.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address alone.")] = False,
) -> None:
    """Show the page of FOLDER in the browser, from a server on this machine that ends with Ctrl-C.

    Nothing is written. The page is drawn from the records again when they have changed, so reloading it follows a
    running sweep. Only this machine reaches the address, but every user of it does.
    """
    import webbrowser
    from threading import Thread

    from ppbench.claims.check import PAPER_CLAIMS
    from ppbench.report.page.live_page import LivePage, PageServer

    server = PageServer(LivePage(folder, PAPER_CLAIMS), port or 0)

    def announce() -> None:
        typer.echo(f"{server.address} shows {folder}; Ctrl-C ends it.")
        if not no_browser:  # in a thread: a browser in the terminal returns only when it is closed
            Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()

    server.run(announce)


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
    """Recompute what can be recomputed in FOLDER; report how much could not be checked, and what differs.

    It recomputes aggregates, tables, page and flags from per-victim scores, scores of images from the kept
    reconstructions, epsilon from the mechanism, and victims, originals and their uploads from the data set if it is
    available; docs/verify.md lists what that shows. Exit code 0: nothing differs; 1: something does; 2: FOLDER holds
    no results.
    """
    from ppbench.records.store import open_results
    from ppbench.verification.recheck import full_findings

    findings = full_findings(open_results(folder).out)
    typer.echo(str(findings))
    if findings.problems:
        raise typer.Exit(Exit.FOUND)


def claims(
    folders: Annotated[list[Path], typer.Argument(help="Folders of results, or archives.")],
    to: Annotated[Path | None, typer.Option(help="File for the tables; the screen by default.")] = None,
    figures: Annotated[list[Path] | None, typer.Option(help="JSON of benchmark figures. Repeatable.")] = None,
) -> None:
    """Compare what papers claim about their defenses with the records in FOLDERS, as tables in Markdown."""
    from ppbench.base.files import kind_of, write_output
    from ppbench.claims.page import write_claims

    text = write_claims(folders, figures or [])
    if to is None:
        typer.echo(text, nl=False)
        return
    if kind_of(to.parent) != "folder":
        raise UsageError(f"There is no folder {to.parent} for the tables; make it, or give another --to.")
    write_output(to, text.encode())
    typer.echo(str(to))


# -- ppbench compare and ppbench baseline accept: is a defense worse than the accepted results? --

Baseline = Annotated[
    Path, typer.Argument(metavar="BASELINE", help="Accepted results, or any folder or archive of results.")
]
New = Annotated[Path, typer.Argument(metavar="NEW", help="The folder or archive of results to judge.")]
GitHub = Annotated[
    bool, typer.Option("--github", help="Print annotations, and append Markdown to $GITHUB_STEP_SUMMARY.")
]


def compare(
    baseline: Baseline,
    new: New,
    markdown: Annotated[Path | None, typer.Option(help="File for the comparison in Markdown.")] = None,
    junit: Annotated[Path | None, typer.Option(help="File for JUnit XML.")] = None,
    github: GitHub = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON and nothing else.")] = False,
) -> None:
    """Compare NEW with BASELINE, victim by victim: does a defense leak more, or cost more accuracy, than before?

    Exit code 0: no regression found; 1: regression; 2: input that cannot be used; 3: a control changed or failed,
    rows cannot be compared, or nothing could have been found (too few victims, no row judged); 4: rows of BASELINE are
    missing.
    """
    from ppbench.base.files import kind_of, write_output
    from ppbench.report.compare import report
    from ppbench.report.compare.outcome import compare as run

    if github and json_:
        raise UsageError("Options --github and --json both write to standard output; give one of them.")
    for option, path in (("--markdown", markdown), ("--junit", junit)):
        if path is not None and kind_of(path.parent) != "folder":
            raise UsageError(f"There is no folder {path.parent} for {option}; make it, or give another file.")
    result = run(baseline, new)
    if markdown is not None:
        write_output(markdown, report.markdown(result).encode())
    if junit is not None:
        write_output(junit, report.junit(result))
    if json_:
        typer.echo(report.comparison_json(result))
    else:
        report.print_report(result)
    if github:
        for line in report.workflow_commands(result):
            typer.echo(line)
        _summarize(report.markdown(result))
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _summarize(text: str) -> None:
    """Append `text` to the summary of the GitHub Actions job, if there is one."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as cause:
        raise UsageError(f"$GITHUB_STEP_SUMMARY names {name!r}, which cannot be written ({cause.strerror}).") from cause


BASELINE_HELP = "Accepted results that later ones are compared with."
# With a callback its one command keeps its name.
baseline = typer.Typer(no_args_is_help=True, help=BASELINE_HELP, callback=lambda: None)


@baseline.command("accept")
def accept(
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The folder or archive of results to accept.")],
    folder: Annotated[Path, typer.Argument(metavar="BASELINE", help="The baseline to move, or a folder to be made.")],
    reason: Annotated[str, typer.Option(help="Why the baseline moves; kept in BASELINE/accepted.jsonl.")],
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep cells that NEW lacks, of the same suite, as for one seed at a time.")
    ] = False,
) -> None:
    """Make the results in NEW the baseline: verified, without images, completely or not at all, with a recorded reason.

    Exit code 2: NEW has problems (see `ppbench verify`), failed cells, or controls that do not hold; or no reason was
    given.
    """
    from ppbench.verification.baseline import accept as run
    from ppbench.verification.recheck import recheck

    line = run(new, folder, reason, recheck, keep=keep)
    moved = line.moved
    typer.echo(f"{line.cells} cells: {moved.added} added, {moved.removed} removed, {moved.changed} changed; {folder}")
