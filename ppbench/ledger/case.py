"""A submission as it is judged: opened from a folder to be handed in, or from an archive that was."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError, first_of, shown
from ppbench.base.files import kind_of
from ppbench.base.registry import GROUP_NOUNS, find
from ppbench.ledger.rerun import SHARE
from ppbench.ledger.submission import Submission, described, submission_of, suite_of
from ppbench.records.archive import unpack
from ppbench.records.salt import NAME, commitment, keep_salt, salt_of
from ppbench.records.schema import Record
from ppbench.records.store import Store, results
from ppbench.run.schedule import Progress


@dataclass(frozen=True)
class Outcome:
    """What one check gave. ok: None where it was not made; sentence: what was found."""

    name: str
    ok: bool | None
    sentence: str


@dataclass(frozen=True)
class Terms:
    """How cells are computed again. share: of them; seed: what they are drawn with, None: nobody knows before.

    dataset, weights: where data and AlexNet's weights lie here; salt: a file with the secret of their draws.
    """

    share: float = SHARE
    seed: int | None = None
    dataset: str | None = None
    weights: str | None = None
    salt: Path | None = None
    workers: int | None = None
    progress: Progress = field(default_factory=lambda: Bars(quiet=True))


@dataclass(frozen=True)
class Case:
    """A submission: its folder of results with the records that can be read, and what it says of itself.

    home: where cells are computed again, which does not exist yet. salt: the secret of all draws, "" where none is.
    """

    store: Store
    records: tuple[Record, ...]
    about: Submission
    home: Path
    terms: Terms
    salt: str

    @property
    def defenses(self) -> list[str]:
        """The defenses handed in."""
        return [one.name for one in self.about.plugins if one.group == "defenses"]

    @property
    def attacks(self) -> list[str]:
        """The attacks handed in."""
        return [one.name for one in self.about.plugins if one.group == "attacks"]


def of_folder(
    folder: Path, scratch: Path, terms: Terms, paper: str = "", reference: str = "", licence: str = ""
) -> Case:
    """Return what would be handed in of a folder of results. scratch: an empty folder to compute in.

    Raises UsageError: it holds no records, those of several suites or of none, or nothing of another package.
    """
    store = results(folder)
    if kind_of(folder) == "file":
        raise UsageError(f"{folder} is an archive; give the folder of results, or --check.")
    records, _ = store.readable()
    if not records:
        raise UsageError(f"{folder} holds no records that can be read; give the --out of a sweep.")
    about = described(records, paper, reference, licence)
    return _case(store, records, about, scratch, terms, salt_of(folder, fresh=False))


def of_archive(archive: Path, scratch: Path, terms: Terms) -> Case:
    """Return what an archive hands in, unpacked into `scratch`, an empty folder.

    Raises UsageError: it is no submission, or damaged, or what it hands in is not installed here.
    """
    if kind_of(archive) != "file":
        raise UsageError(f"{archive} is no file; give the archive that `ppbench submit` wrote.")
    about = submission_of(results(archive).files)
    for one in about.plugins:
        if find(one.group, one.name) is None:
            raise UsageError(
                f"The {GROUP_NOUNS[one.group]} {shown(one.name)} is not installed here; install {one.package} in "
                f"version {one.version}, with the code {one.code}."
            )
    folder = scratch / "received"
    if damaged := unpack(archive, folder):
        raise UsageError(f"{archive} is damaged: {first_of(damaged)}.")
    store = Store(folder)
    records, _ = store.readable()
    suite_of(records)
    return _case(store, records, about, scratch, terms, "")


def _case(store: Store, records: list[Record], about: Submission, scratch: Path, terms: Terms, salt: str) -> Case:
    """Return a case whose secret is at hand, if its cells have one (UsageError: it is not)."""
    needed = {record.config.data.salt for record in records} - {""}
    if needed and terms.salt is not None:
        salt = _secret(terms.salt)
    if needed - {commitment(salt)}:
        raise UsageError(
            f"The cells were drawn with a secret, which no archive holds; give its holder's OUT/{NAME}, as --salt FILE."
        )
    if needed and store.out.is_relative_to(scratch):
        keep_salt(store.out, salt)  # victims are drawn again by who verifies, too
    return Case(store, tuple(records), about, scratch / "again", terms, salt if needed else "")


def _secret(path: Path) -> str:
    """Return the secret in a file called as OUT/salt is, or in the folder of one."""
    folder = path if kind_of(path) == "folder" else path.parent
    if kind_of(folder / NAME) != "file":
        raise UsageError(f"There is no file {folder / NAME}; give the secret as the file of that name.")
    return salt_of(folder, fresh=False)
