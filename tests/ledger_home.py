"""A small published ledger for tests: digits, an MLP, four views, twelve victims each, and files of guesses on them."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from ppbench.adversary.attack import Guess
from ppbench.ledger.form import GuessAbout
from ppbench.ledger.publish import compute_views, publish
from ppbench.ledger.score import save_guesses
from ppbench.ledger.transcript import load_transcript
from ppbench.records.store import Store

SALT = "5a" * 32
VICTIMS = 12
SUITE = f"""\
schema = "ppbench.run.suite/1"
id = "tiny-ledger"
version = 1
title = "A ledger of four views"

[task]
dataset = "digits"
model = "mlp"
clients = 3
train = 240

[federation]
rounds = 1

[questions]
attacks = ["dlg", "analytic", "label_recovery"]
attack_batch = [1]
victims = {VICTIMS}
candidates = 8
tuning = 0
stages = ["init"]
threats = ["server/1"]

[attack.dlg]
restarts = 0
budget = 30

[[defense]]
id = "spn"
grid = [0.1]

[[defense]]
id = "dp"
grid = [10]
"""


@dataclass(frozen=True)
class Home:
    """A published ledger. truth: the organizer's folder; out: the transcripts; ids: of each, by defense."""

    truth: Path
    out: Path
    ids: dict[str, str]

    def transcript(self, defense: str) -> Path:
        return self.out / self.ids[defense]

    def frozen(self, defense: str):
        return load_transcript(self.transcript(defense))

    def images(self, defense: str) -> torch.Tensor:
        """Return the true images [Q, U * B, *shape]."""
        return load_file(self.truth / "truth" / f"{self.ids[defense]}.safetensors")["x"]

    def labels(self, defense: str) -> torch.Tensor:
        """Return the true labels [Q, U * B]."""
        return load_file(self.truth / "truth" / f"{self.ids[defense]}.safetensors")["y"].argmax(-1)

    def records(self, defense: str, kind="reconstruction"):
        """Return our own cells of a view, by attack."""
        kept = Store(self.truth).load_all()
        return {r.config.attack.id: r for r in kept if (r.config.defense.id, r.config.attack.kind) == (defense, kind)}


def made(home: Path) -> Home:
    """Publish the suite above with a secret that is always the same."""
    suite, truth, out = home / "tiny.toml", home / "truth", home / "out"
    suite.write_text(SUITE)
    Store(truth).prepare()
    (truth / "salt").write_text(SALT)
    compute_views(str(suite), truth, workers=1)
    publish(truth, out)
    index = json.loads((out / "index.json").read_text())
    return Home(truth, out, {one["title"].split()[0].rstrip(","): one["id"] for one in index})


def about(transcript: str, kind="reconstruction", name="somebodys", **more) -> GuessAbout:
    """Return what stands beside guesses."""
    description = {
        "version": "1",
        "reference": "https://example.org/somebodys",
        "licence": "MIT",
        "knows": False,
        **more,
    }
    return GuessAbout(transcript=transcript, kind=kind, name=name, **description)


def answered(folder: Path, transcript: str, x=None, y=None, name="g", attack="somebodys", **more) -> Path:
    """Write guesses x [Q, U * B, *shape] or y [Q, U * B] of an attack to a file; return it."""
    kind, rows = ("label", y) if x is None else ("reconstruction", x)
    one = [Guess(y=row) if x is None else Guess(x=row.float()) for row in rows]
    return save_guesses(folder / f"{name}.json", about(transcript, kind, attack, **more), one)
