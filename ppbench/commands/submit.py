"""`ppbench submit`: check and submit results of a defense or attack, or check a submission."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import UsageError
from ppbench.base.exits import Exit
from ppbench.commands.sweep import Place, WeightsOption, Workers

SUBMITTED_WHAT = "A folder of results of one suite; with --check the submitted archive."
SHARE_HELP = (
    "Share of the cells that is computed again, from 0 to 1: of the submitted and of all others, at least one each."
)
SEED_HELP = "Seed with which these cells are drawn, to repeat the draw; random by default."
SALT_HELP = "With --check: the submitter's file OUT/salt, where the cells were drawn with a secret."


def submit(
    what: Annotated[Path, typer.Argument(help=SUBMITTED_WHAT)],
    check: Annotated[bool, typer.Option("--check", help="Judge a submitted archive; write nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="The archive to write; FOLDER-submission.zip by default.")] = None,
    paper: Annotated[str, typer.Option(help="Where the method is described.")] = "",
    reference: Annotated[str, typer.Option(help="Where its code or page is.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of its code, as Apache-2.0.")] = "",
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help=SHARE_HELP)] = 0.1,
    seed: Annotated[int | None, typer.Option(min=0, help=SEED_HELP)] = None,
    salt: Annotated[Path | None, typer.Option(help=SALT_HELP)] = None,
    dataset: Place = None,
    weights: WeightsOption = None,
    workers: Workers = None,
) -> None:
    """Submit results of a defense or attack of your own package: check them, and write them as one archive.

    Submitter and receiver run the same checks: `ppbench verify` finds nothing, the controls hold, the code is the
    installed one, all cells of the shipped suite are there, and some of them, computed again, agree bit for bit, or
    within a reported tolerance where processor or versions differ.

    Exit code 0: all checks pass, and without --check the archive is written; 1: some check fails; 2: input that cannot
    be used, such as a submitted plugin that is not installed here.
    """
    from ppbench.base.bars import Bars
    from ppbench.base.files import kind_of, scratch
    from ppbench.ledger.case import RerunTerms, case_of_archive, case_of_folder
    from ppbench.ledger.examine import run_checks
    from ppbench.ledger.form import to_json
    from ppbench.records.archive import pack_archive

    describes = any([paper, reference, licence, out])
    if check and describes:
        raise UsageError(
            "--out, --paper, --reference and --licence are for the submitter; leave them out with --check."
        )
    target = out or what.with_name(f"{what.resolve().name}-submission.zip")
    if not check and kind_of(target, follow=False) is not None:
        raise UsageError(f"{target} is there already; give another --out.")
    with scratch("ppbench-submit") as home, Bars() as bars:
        terms = RerunTerms(share, seed, dataset, weights, salt, workers, bars)
        case = (
            case_of_archive(what, home, terms)
            if check
            else case_of_folder(what, home, terms, paper, reference, licence)
        )
        holds = True
        for one in run_checks(case):
            word = {True: "pass", False: "FAIL", None: "not made"}[one.ok]
            typer.echo(f"{word:<9}{one.name:<9} {one.sentence}")
            holds = holds and one.ok is True
    if not holds:
        typer.echo("Not accepted." if check else "Nothing was written.")
        raise typer.Exit(Exit.FOUND)
    if check:
        typer.echo("Accepted.")
        return
    pack_archive(what, target, to_json(case.about))
    typer.echo(str(target))
