"""A submitter's answers to a transcript: NAME.json (`GuessAbout`) and NAME.safetensors, checked before scoring.

Tensors, one row per question in the transcript's order: x float32 [Q, U * B, *shape], in the data's range, not clipped;
y int64 [Q, U * B]; confidence float64 [Q], smaller is surer; evaluations int64 [Q], gradients spent. Tensors that a
kind of question does not need may be missing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ppbench.adversary.attack import Guess
from ppbench.base.errors import UsageError, because, shown
from ppbench.base.files import write_output
from ppbench.base.tree import update_digest
from ppbench.ledger.form import GuessAbout, parse_json, read_bounded, to_json
from ppbench.ledger.transcript import FrozenView
from ppbench.questions.base import question_of

DTYPES = {"x": torch.float32, "y": torch.int64, "confidence": torch.float64, "evaluations": torch.int64}
HEADER_BYTES = 1 << 16
"""Bytes that a file may have beside its tensors."""


def save_guesses(path: Path | str, about: GuessAbout, guesses: Sequence[Guess]) -> Path:
    """Write an attack's guesses, one per question in order, as NAME.json and NAME.safetensors; return the JSON's path.

    Raises UsageError: only some guesses have x or y, or the files cannot be written.
    """
    tensors = {"evaluations": torch.tensor([guess.evaluations for guess in guesses])}
    for name in ("x", "y"):
        parts = [part for guess in guesses if (part := getattr(guess, name)) is not None]
        if parts and len(parts) != len(guesses):
            raise UsageError(f"{len(parts)} of {len(guesses)} guesses have {name}; give all of them one, or none.")
        if parts:
            tensors[name] = torch.stack([part.detach().cpu() for part in parts]).to(DTYPES[name])
    sure = [guess.confidence for guess in guesses]
    if None not in sure:
        tensors["confidence"] = torch.tensor([float(one) for one in sure if one is not None], dtype=torch.float64)
    target = Path(path).with_suffix(".json")
    write_output(target.with_suffix(".safetensors"), save(tensors))
    write_output(target, to_json(about))
    return target


def read_guesses(path: Path | str, frozen: FrozenView) -> tuple[GuessAbout, list[Guess], str]:
    """Return the content of NAME.json, the guesses, one per question, and their SHA-256 in hex.

    Raises UsageError: form, names, shapes, types or values do not fit the transcript, or they answer another one.
    """
    json_path = Path(path) if Path(path).suffix == ".json" else Path(path).with_suffix(".json")
    about, beside = parse_json(GuessAbout, json_path), json_path.with_suffix(".safetensors")
    if about.transcript != frozen.about.id:
        raise UsageError(
            f"{json_path} answers transcript {about.transcript}, and this is {frozen.about.id}; give its own."
        )
    if about.kind not in frozen.about.kinds:
        raise UsageError(
            f"{json_path} answers {shown(about.kind)}; the transcript asks for {' or '.join(frozen.about.kinds)}."
        )
    data = read_bounded(beside, _most(frozen))
    tensors = _tensors(data, beside)
    count = len(frozen.challenges)
    for name, tensor in tensors.items():
        _check(name, tensor, frozen, beside)
    guesses = [_guess(tensors, place) for place in range(count)]
    question = question_of(about.kind)
    for place, (guess, challenge) in enumerate(zip(guesses, frozen.challenges, strict=True)):
        for fault in question.malformed(guess, challenge, frozen.view.plan):
            raise UsageError(f"{beside}, question {place}: {fault}.")
    return about, guesses, answers_digest(tensors)


def answers_digest(tensors: dict[str, Tensor]) -> str:
    """Return the SHA-256 of answers, of x and y alone."""
    digest = hashlib.sha256()
    for name in sorted({"x", "y"} & set(tensors)):
        digest.update(name.encode())
        update_digest(digest, tensors[name])
    return digest.hexdigest()


def _most(frozen: FrozenView) -> int:
    """Return the largest size in bytes of a file of answers; no more is read."""
    images = sum(len(challenge.unit) * challenge.batch for challenge in frozen.challenges)
    return HEADER_BYTES + images * (4 * math.prod(frozen.view.plan.spec.shape) + 8) + 16 * len(frozen.challenges)


def _tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as cause:
        raise UsageError(f"{path} is no safetensors file ({because(cause)}); write one of x, y.") from cause
    if odd := sorted(set(tensors) - set(DTYPES)):
        raise UsageError(f"{path} holds a tensor {shown(odd[0])}; it may hold {', '.join(DTYPES)}.")
    return tensors


def _check(name: str, tensor: Tensor, frozen: FrozenView, path: Path) -> None:
    count = len(frozen.challenges)
    images = len(frozen.challenges[0].unit) * frozen.about.batch
    right = {"x": (count, images, *frozen.view.plan.spec.shape), "y": (count, images)}.get(name, (count,))
    if tensor.dtype != DTYPES[name] or tuple(tensor.shape) != right:
        shape = f"of {tensor.dim():,} axes" if tensor.dim() > len(right) + 1 else tuple(tensor.shape)
        seen = f"{tensor.dtype} {shape}".removeprefix("torch.")
        raise UsageError(f"{path}: {name} is {seen}; it must be {str(DTYPES[name])[6:]} of shape {right}.")
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise UsageError(f"{path}: {name} holds values that are not finite; answer with any number instead.")
    if name == "evaluations" and bool((tensor < 0).any()):
        raise UsageError(f"{path}: evaluations holds {int(tensor.min())}; counts are 0 or more.")


def _guess(tensors: dict[str, Tensor], place: int) -> Guess:
    x, y = (tensors[name][place] if name in tensors else None for name in ("x", "y"))
    sure = float(tensors["confidence"][place]) if "confidence" in tensors else None
    spent = int(tensors["evaluations"][place]) if "evaluations" in tensors else 0
    return Guess(x=x, y=y, confidence=sure, evaluations=spent)
