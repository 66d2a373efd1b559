"""A submission under judgement: opened from a folder of results, or from a submitted archive."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ppbench.base.bars import Bars
from ppbench.base.errors import UsageError, first_of, shown
from ppbench.base.files import kind_of
from ppbench.base.registry import GROUP_NOUNS, find
from ppbench.ledger.rerun import RERUN_SHARE
from ppbench.ledger.submission import Submission, describe_submission, submission_of, suite_of
from ppbench.records.archive import unpack_archive
from ppbench.records.salt import SALT_FILE, commitment, keep_salt, salt_of
from ppbench.records.schema import Record
from ppbench.records.store import Store, open_results
from ppbench.run.schedule import Progress


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of one check. ok: None if the check was not made; sentence: the finding."""

    name: str
    ok: bool | None
    sentence: str


@dataclass(frozen=True)
class RerunTerms:
    """How cells are recomputed. share: fraction of cells; seed: of their draw, None for a random one.

    dataset, weights: where data and AlexNet's weights lie here; salt: a file with the secret of the draws.
    """

    share: float = RERUN_SHARE
    seed: int | None = None
    dataset: str | None = None
    weights: str | None = None
    salt: Path | None = None
    workers: int | None = None
    progress: Progress = field(default_factory=lambda: Bars(quiet=True))


@dataclass(frozen=True)
class SubmissionCase:
    """A submission: its folder of results, its readable records, its own description.

    home: folder for recomputed cells, which does not exist yet. salt: the secret of all draws, "" for none.
    """

    store: Store
    records: tuple[Record, ...]
    about: Submission
    home: Path
    terms: RerunTerms
    salt: str

    @property
    def defenses(self) -> list[str]:
        """The submitted defenses."""
        return [one.name for one in self.about.plugins if one.group == "defenses"]

    @property
    def attacks(self) -> list[str]:
        """The submitted attacks."""
        return [one.name for one in self.about.plugins if one.group == "attacks"]


def case_of_folder(
    folder: Path, scratch: Path, terms: RerunTerms, paper: str = "", reference: str = "", licence: str = ""
) -> SubmissionCase:
    """Return a folder of results as a case. scratch: an empty folder to compute in.

    Raises UsageError: no records, records of no suite or of several, or no plugin of another package.
    """
    store = open_results(folder)
    if kind_of(folder) == "file":
        raise UsageError(f"{folder} is an archive; give the folder of results, or --check.")
    records, _ = store.readable()
    if not records:
        raise UsageError(f"{folder} holds no records that can be read; give the --out of a sweep.")
    about = describe_submission(records, paper, reference, licence)
    return _case(store, records, about, scratch, terms, salt_of(folder, fresh=False))


def case_of_archive(archive: Path, scratch: Path, terms: RerunTerms) -> SubmissionCase:
    """Unpack a submitted archive into `scratch`, an empty folder, and return it as a case.

    Raises UsageError: it is no submission, or damaged, or its plugins are not installed here.
    """
    if kind_of(archive) != "file":
        raise UsageError(f"{archive} is no file; give the archive that `ppbench submit` wrote.")
    about = submission_of(open_results(archive).files)
    for one in about.plugins:
        if find(one.group, one.name) is None:
            raise UsageError(
                f"The {GROUP_NOUNS[one.group]} {shown(one.name)} is not installed here; install {one.package} in "
                f"version {one.version}, with the code {one.code}."
            )
    folder = scratch / "received"
    if damaged := unpack_archive(archive, folder):
        raise UsageError(f"{archive} is damaged: {first_of(damaged)}.")
    store = Store(folder)
    records, _ = store.readable()
    suite_of(records)
    return _case(store, records, about, scratch, terms, "")


def _case(
    store: Store, records: list[Record], about: Submission, scratch: Path, terms: RerunTerms, salt: str
) -> SubmissionCase:
    """Return a case with the secret of its draws, if they have one (UsageError: it is missing)."""
    needed = {record.config.data.salt for record in records} - {""}
    if needed and terms.salt is not None:
        salt = _secret(terms.salt)
    if needed - {commitment(salt)}:
        raise UsageError(
            "The cells were drawn with a secret, which no archive holds; give its holder's "
            f"OUT/{SALT_FILE}, as --salt FILE."
        )
    if needed and store.out.is_relative_to(scratch):
        keep_salt(store.out, salt)  # verification draws the victims again
    return SubmissionCase(store, tuple(records), about, scratch / "again", terms, salt if needed else "")


def _secret(path: Path) -> str:
    """Return the secret in a file named like OUT/salt, or in its folder."""
    folder = path if kind_of(path) == "folder" else path.parent
    if kind_of(folder / SALT_FILE) != "file":
        raise UsageError(f"There is no file {folder / SALT_FILE}; give the secret as the file of that name.")
    return salt_of(folder, fresh=False)
