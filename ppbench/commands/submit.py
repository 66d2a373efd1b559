"""`ppbench submit`: results of somebody's defense or attack are checked and handed in, or received and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import UsageError
from ppbench.base.exits import Exit
from ppbench.commands.sweep import Place, Weights, Workers

WHAT = "A folder of results of one suite; with --check the archive that was handed in."
SHARE = (
    "Share of the cells that is computed again, from 0 to 1: of what is handed in and of all else, one at least each."
)
SEED = "What these cells are drawn with, to draw the same again; by default a number that nobody knows before."
SALT = "With --check: the submitter's file OUT/salt, where the cells were drawn with a secret."


def submit(
    what: Annotated[Path, typer.Argument(help=WHAT)],
    check: Annotated[bool, typer.Option("--check", help="Judge an archive that was handed in; write nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="The archive to write; FOLDER-submission.zip by default.")] = None,
    paper: Annotated[str, typer.Option(help="Where the method is described.")] = "",
    reference: Annotated[str, typer.Option(help="Where its code or page is.")] = "",
    licence: Annotated[str, typer.Option(help="Licence of its code, as Apache-2.0.")] = "",
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help=SHARE)] = 0.1,
    seed: Annotated[int | None, typer.Option(min=0, help=SEED)] = None,
    salt: Annotated[Path | None, typer.Option(help=SALT)] = None,
    dataset: Place = None,
    weights: Weights = None,
    workers: Workers = None,
) -> None:
    """Hand in results of a defense or attack of your own package: check them, and write them as one archive.

    Before and after, the same is asked: does `ppbench verify` find nothing, do the controls hold, is the code the one
    that is installed, are all cells there of the suite as it is shipped, and do some, computed again, agree bit for
    bit, or within the tolerance that is told where processor or versions differ.

    Exit code 0: all holds, and without --check the archive is written; 1: something does not hold; 2: input that cannot
    be used, also what is handed in but not installed here.
    """
    from ppbench.base.bars import Bars
    from ppbench.base.files import kind_of, scratch
    from ppbench.ledger.case import Terms, of_archive, of_folder
    from ppbench.ledger.examine import examined
    from ppbench.ledger.form import written
    from ppbench.records.archive import pack

    describes = any([paper, reference, licence, out])
    if check and describes:
        raise UsageError("--out, --paper, --reference and --licence are for who hands in; leave them out with --check.")
    target = out or what.with_name(f"{what.resolve().name}-submission.zip")
    if not check and kind_of(target, follow=False) is not None:
        raise UsageError(f"{target} is there already; give another --out.")
    with scratch("ppbench-submit") as home, Bars() as bars:
        terms = Terms(share, seed, dataset, weights, salt, workers, bars)
        case = of_archive(what, home, terms) if check else of_folder(what, home, terms, paper, reference, licence)
        holds = True
        for one in examined(case):
            word = {True: "pass", False: "FAIL", None: "not made"}[one.ok]
            typer.echo(f"{word:<9}{one.name:<9} {one.sentence}")
            holds = holds and one.ok is True
    if not holds:
        typer.echo("Not accepted." if check else "Nothing was written.")
        raise typer.Exit(Exit.FOUND)
    if check:
        typer.echo("Accepted.")
        return
    pack(what, target, written(case.about))
    typer.echo(str(target))
