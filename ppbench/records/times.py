"""How long a client takes beside an undefended one: OUT/times/<training>.json, one file per training.

Equal runs give equal records byte for byte; times differ, so records contain none, and nothing depends on them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pydantic import ValidationError

from ppbench.base.errors import UsageError
from ppbench.base.files import make_folder, read_regular, write_atomic
from ppbench.records.schema import DataInfo, FederationInfo, ModelInfo, Record, Scalar, Strict
from ppbench.records.scores import Amount, AtLeastOne, Count
from ppbench.records.store import TIMES_FOLDER, canonical_json


class EncryptionTime(Strict):
    """The time that real encryption adds to a round, in wall-clock seconds: seconds per operation times their number.

    client: including decryption if clients decrypt. server: adding up and decrypting. library: the timed library with
    its version. reason: why nothing was timed, else "".
    """

    client: Amount | None
    server: Amount | None
    library: str
    reason: str


class ClientTime(Strict):
    """A client's part of a round in wall-clock time, in pairs with an undefended client.

    ratio, seconds, undefended_seconds: medians; low, high: of 95 % or more, null below six pairs; machine: the GPU's
    name if one was used; encryption: of a defense that encrypts, not part of `seconds`.
    """

    ratio: Amount
    low: Amount | None
    high: Amount | None
    pairs: Count
    seconds: Amount
    undefended_seconds: Amount
    machine: str
    threads: AtLeastOne
    encryption: EncryptionTime | None = None


def training_id(
    ppbench: str,
    defense: tuple[str, str, dict[str, Scalar]],
    parts: tuple[DataInfo, ModelInfo, FederationInfo],
    seed: int,
) -> str:
    """Return the name of a training: a hash of all that determines it, including the version of ppbench."""
    about = [ppbench, *defense, seed, *(part.model_dump(mode="json") for part in parts)]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


def training_of(record: Record) -> str:
    """Return the name of the training that a record is from."""
    config, defense = record.config, record.config.defense
    parts = config.data, config.model, config.federation
    return training_id(
        record.environment.ppbench, (defense.id, defense.edition, defense.parameters), parts, config.seed
    )


def save_time(out: Path, training: str, time: ClientTime) -> None:
    """Keep a training's client time, whole or not at all. Raises UsageError: it cannot be written."""
    write_atomic(make_folder(out / TIMES_FOLDER) / f"{training}.json", canonical_json(time))


def time_of(out: Path, record: Record) -> ClientTime | None:
    """Return the client time of a record's training, or None; UsageError: the file holds something else."""
    path = out / TIMES_FOLDER / f"{training_of(record)}.json"
    try:
        return ClientTime.model_validate_json(read_regular(path), strict=True)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as cause:
        raise UsageError(f"{path} holds no times of a client; delete it, the page does without.") from cause
