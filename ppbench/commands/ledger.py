"""`ppbench publish`, `score` and `ledger`: publish what an adversary saw, score others' guesses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import UsageError
from ppbench.base.exits import Exit
from ppbench.commands.sweep import Only, Place, Preset, WeightsOption, Workers, filters

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
    from ppbench.records.origin import typed_command

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
