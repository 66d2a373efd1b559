"""`ppbench compare` and `ppbench baseline accept`: is a defense worse than the accepted results?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import UsageError

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


baseline = typer.Typer(no_args_is_help=True, help="Accepted results that later ones are compared with.")


@baseline.callback()
def _baseline() -> None:
    """Accepted results that later ones are compared with."""


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
