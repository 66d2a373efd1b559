"""`ppbench publish`, `score` and `ledger`: publish what an adversary saw, score others' guesses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.base.errors import Exit, UsageError
from ppbench.commands.running import Only, Place, Preset, WeightsOption, Workers, filters

if TYPE_CHECKING:
    from ppbench.ledger.examination import RerunTerms, SubmissionCase

PUBLISHED_WHAT = "A shipped suite, a TOML file of one, or a folder that `publish --truth` made."
TRUTH_HELP = (
    "The organizer's folder: results of the same cells, the secret of their draws, the truth. Never give it away."
)
TrustOption = Annotated[bool, typer.Option("--trust", help="Import networks and defenses that are code at an address.")]
TruthOption = Annotated[Path, typer.Option(help=TRUTH_HELP)]


def publish(
    what: Annotated[str, typer.Argument(help=PUBLISHED_WHAT)],
    out: Annotated[Path, typer.Option(help="Folder for the transcripts, which are public.")],
    truth: Annotated[Path | None, typer.Option(help=f"{TRUTH_HELP} WHAT itself where that is such a folder.")] = None,
    preset: Preset = "",
    only: Only = None,
    dataset: Place = None,
    weights: WeightsOption = None,
    workers: Workers = None,
) -> None:
    """Publish what the adversary of each cell saw, so that others can attack it; the truth stays in TRUTH.

    A suite is computed first, on victims drawn with a new secret: its cells are the worst case that guesses must beat.
    Exit code 0: published; 2: input that cannot be used, or a transcript would give the truth away.
    """
    from ppbench.base.bars import Bars
    from ppbench.base.files import kind_of
    from ppbench.ledger.publish import BOARD_BYTES, compute_views
    from ppbench.ledger.publish import publish as run
    from ppbench.records.run_files import typed_command

    folder = kind_of(Path(what)) == "folder"
    if folder == (truth is not None):
        raise UsageError(
            f"{what}: give --truth FOLDER with a suite, and none with a folder of results, which is that folder itself."
        )
    home = truth or Path(what)
    if not folder:
        with Bars() as bars:
            compute_views(what, home, preset, filters(only or []), dataset, weights, workers, bars, typed_command())
    published = run(home, out, dataset, weights)
    for about in published.transcripts:
        typer.echo(f"{about.id}  {about.title}")
    typer.echo(
        f"{len(published.transcripts)} transcripts, {published.bytes / 1e6:.1f} MB, in {out}; the truth is in {home}."
    )
    for sentence in (*published.left_out, *published.remarks):
        typer.echo(f"note: {sentence}", err=True)
    if published.bytes > BOARD_BYTES:
        typer.echo(f"note: this is a public download; more than {BOARD_BYTES / 1e6:.0f} MB is a lot.", err=True)


def score(
    transcript: Annotated[Path, typer.Argument(help="A published transcript: a folder.")],
    guesses: Annotated[Path, typer.Argument(help="NAME.json, beside NAME.safetensors.")],
    truth: TruthOption,
    weights: WeightsOption = None,
    trust: TrustOption = False,
) -> None:
    """Score submitted guesses as our own cells are scored, and report whether the worst case of their row moves.

    The record is kept in TRUTH/external, the decision in TRUTH/ledger.jsonl. Only the last line is for the submitter:
    figures of guesses that do not move the row could reveal the truth. Exit code 0: the worst case moves; 1: it stands;
    2: input that cannot be used, of which nothing is kept.
    """
    from ppbench.ledger.score import score as run
    from ppbench.ledger.transcript import load_transcript

    scored = run(load_transcript(transcript, trust=trust), guesses, truth, weights)
    config, before, decision = scored.record.config, scored.before, scored.decision
    stands = "nothing" if before is None else before.name
    typer.echo(f"{config.attack.id} {config.attack.version} on {scored.scene}: {decision.reason}.")
    typer.echo(f"{decision.metric}: {decision.after:.4g}; before, by {stands}: {decision.before or 0:.4g}.")
    typer.echo(f"For the submitter: {scored.receipt}.")
    if not decision.moved:
        raise typer.Exit(Exit.FOUND)


def ledger(
    transcripts: Annotated[Path, typer.Argument(help="The folder that `ppbench publish` made.")],
    truth: TruthOption,
    out: Annotated[Path, typer.Option(help="Folder for the site, which any static host serves.")],
) -> None:
    """Write the ledger as a static site: the state of each row, who moved it when, and the transcripts.

    It contains no picture and no figure of a single victim. Exit code 0: written; 2: input that cannot be used.
    """
    from ppbench.ledger.site import build_site

    rows = build_site(transcripts, truth, out)
    moved = sum(len(row.history) for row in rows)
    typer.echo(f"{len(rows)} rows, {moved} moved by guesses of others: {out / 'index.html'}")


# -- `ppbench submit`: check and submit results of a defense or attack, or check a submission --

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
    from ppbench.base.files import scratch
    from ppbench.base.registry import close_attacks

    close_attacks()  # before anything imports torch
    from ppbench.ledger.examination import RerunTerms

    if check and any([paper, reference, licence, out]):
        wrong = "--out, --paper, --reference and --licence are for the submitter"
        raise UsageError(f"{wrong}; leave them out with --check.")
    with scratch("ppbench-submit") as home, Bars() as bars:
        terms = RerunTerms(share, seed, dataset, weights, salt, workers, bars)
        described = paper, reference, licence
        holds, last = _judged(what, home, terms) if check else _submitted(what, home, terms, out, described)
    typer.echo(last)
    if not holds:
        raise typer.Exit(Exit.FOUND)


def _judged(archive: Path, home: Path, terms: RerunTerms) -> tuple[bool, str]:
    """Check a submitted archive in the empty folder `home`; return whether all checks hold, and the last line."""
    from ppbench.ledger.examination import case_of_archive

    holds = _passes(case_of_archive(archive, home, terms))
    return holds, "Accepted." if holds else "Not accepted."


def _submitted(
    folder: Path, home: Path, terms: RerunTerms, out: Path | None, described: tuple[str, str, str]
) -> tuple[bool, str]:
    """Check a folder of results in the empty folder `home`, and write it as an archive where all checks hold.

    Return whether they do, and the last line. described: paper, reference and licence of the method.
    """
    from ppbench.base.files import kind_of
    from ppbench.ledger.examination import case_of_folder
    from ppbench.records.archive import pack_archive
    from ppbench.records.store import canonical_json

    target = out or folder.with_name(f"{folder.resolve().name}-submission.zip")
    if kind_of(target, follow=False) is not None:
        raise UsageError(f"{target} is there already; give another --out.")
    case = case_of_folder(folder, home, terms, *described)
    if not _passes(case):
        return False, "Nothing was written."
    pack_archive(folder, target, canonical_json(case.about))
    return True, str(target)


def _passes(case: SubmissionCase) -> bool:
    """Make the checks of a submission, print each as it ends, and return whether all hold."""
    from ppbench.ledger.examination import run_checks

    holds = True
    for one in run_checks(case):
        word = {True: "pass", False: "FAIL", None: "not made"}[one.ok]
        typer.echo(f"{word:<9}{one.name:<9} {one.sentence}")
        holds = holds and one.ok is True
    return holds
