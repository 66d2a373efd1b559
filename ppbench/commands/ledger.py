"""`ppbench publish` and `ppbench score`: what an adversary saw goes out, guesses of others come in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.base.errors import UsageError
from ppbench.base.exits import Exit
from ppbench.commands.sweep import Only, Place, Preset, Weights, Workers, filters

WHAT = "A shipped suite, a TOML file of one, or the folder that `publish --truth` made before."
TRUTH = "The organizer's folder: results of the same cells, the secret of their draws, the truth. Never give it away."
Trust = Annotated[bool, typer.Option("--trust", help="Import networks and defenses that are code at an address.")]
Truth = Annotated[Path, typer.Option(help=TRUTH)]


def publish(
    what: Annotated[str, typer.Argument(help=WHAT)],
    out: Annotated[Path, typer.Option(help="Folder for the transcripts, which anybody may have.")],
    truth: Annotated[Path | None, typer.Option(help=f"{TRUTH} WHAT itself where that is such a folder.")] = None,
    preset: Preset = "",
    only: Only = None,
    dataset: Place = None,
    weights: Weights = None,
    workers: Workers = None,
) -> None:
    """Freeze what the adversary of each cell saw, so that others can attack it; the truth stays in TRUTH.

    A suite is computed first, on victims that a new secret chooses: its cells are the worst case that guesses must
    beat. Exit code 0: published; 2: input that cannot be used, or a transcript would give the truth away.
    """
    from ppbench.base.bars import Bars
    from ppbench.base.files import kind_of
    from ppbench.ledger.publish import LARGEST, computed
    from ppbench.ledger.publish import publish as run
    from ppbench.records.origin import typed

    folder = kind_of(Path(what)) == "folder"
    if folder == (truth is not None):
        raise UsageError(f"{what}: give --truth FOLDER with a suite, and with a folder of results none: it is that.")
    home = truth or Path(what)
    if not folder:
        with Bars() as bars:
            computed(what, home, preset, filters(only or []), dataset, weights, workers, bars, typed())
    published = run(home, out, dataset, weights)
    for about in published.transcripts:
        typer.echo(f"{about.id}  {about.title}")
    typer.echo(
        f"{len(published.transcripts)} transcripts, {published.bytes / 1e6:.1f} MB, in {out}; the truth is in {home}."
    )
    for sentence in (*published.left_out, *published.remarks):
        typer.echo(f"note: {sentence}", err=True)
    if published.bytes > LARGEST:
        typer.echo(f"note: people fetch this; more than {LARGEST / 1e6:.0f} MB is a lot.", err=True)


def score(
    transcript: Annotated[Path, typer.Argument(help="A published transcript: a folder.")],
    guesses: Annotated[Path, typer.Argument(help="NAME.json, beside NAME.safetensors.")],
    truth: Truth,
    weights: Weights = None,
    trust: Trust = False,
) -> None:
    """Score somebody's guesses as our own cells are, and say whether the worst case of their row moves.

    The record is kept in TRUTH/external, the decision in TRUTH/ledger.jsonl. The last line alone is for the submitter:
    figures of what did not move would lead to the truth. Exit code 0: the worst case moves; 1: it stands; 2: input that
    cannot be used, of which nothing is kept.
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
    truth: Truth,
    out: Annotated[Path, typer.Option(help="Folder for the site, which any static host serves.")],
) -> None:
    """Write the ledger as a static site: what stands in each row, who moved it when, the transcripts to fetch.

    It holds no picture and no figure of a single victim. Exit code 0: written; 2: input that cannot be used.
    """
    from ppbench.ledger.site import build

    rows = build(transcripts, truth, out)
    moved = sum(len(row.history) for row in rows)
    typer.echo(f"{len(rows)} rows, {moved} moved by guesses of others: {out / 'index.html'}")
