"""Texts: letters that are generated, and a file with a column of texts; token numbers, and a public vocabulary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from ppbench.base.errors import UsageError, because, listed, shown, unknown
from ppbench.base.seeds import Seeds
from ppbench.base.vocabulary import PADDING, UNKNOWN, Style, Vocabulary
from ppbench.task.dataset import Dataset, Split, existing, holds, no_argument
from ppbench.task.partition import hold_out
from ppbench.task.user_data import saved_by_datasets

if TYPE_CHECKING:
    import pandas as pd

KIND = "text"
"""The modality of these data sets."""
RESERVED_TOKENS = ("[pad]", "[unknown]")
"""The first tokens of a vocabulary of words, `PADDING` and `UNKNOWN`."""
_TOKENS = re.compile(r"[^\W\d_]+|\d|[^\w\s]|_")
"""A word, one digit, or one mark: digits stand alone, so that any number can be written."""


def word_tokens(text: str) -> list[str]:
    """Return the words, digits and marks of a text."""
    return _TOKENS.findall(text)


def texts_dataset(
    name: str,
    parts: Sequence[tuple[Sequence[Sequence[int]], Sequence[int]]],
    classes: int,
    length: int,
    vocabulary: Vocabulary,
    notes: tuple[str, ...] = (),
) -> Dataset:
    """Return a data set of texts, cut to `length` tokens or filled up with padding.

    parts: token numbers and classes of the training and the test part.
    """
    train, test = (Split(_padded(rows, length), torch.tensor(labels), classes) for rows, labels in parts)
    ends = (0.0, float(len(vocabulary) - 1))
    return Dataset(name, train, test, classes, (length,), ends, KIND, vocabulary=vocabulary, notes=notes)


def _padded(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    out = torch.full((len(rows), length), float(PADDING))
    for row, tokens in zip(out, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens[:length], dtype=torch.float32)
    return out


# -- Letters of patients, customers and employees, drawn from a grammar --

LETTERS, LETTER_LENGTH = 800, 24


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GREETINGS = ("Dear {title} {last},", "Good morning {title} {last},", "Hello,", "To whom it may concern,")
TITLES = ("Dr", "Mr", "Mrs", "Ms", "Professor")
SIGNATURES = ("{first} {last}, {city}", "Regards, {first} {last}", "{first} {last}", "Yours, {first} {last}, {city}")
FIRST = _words(
    "Anna Boris Clara David Elena Farid Greta Hassan Irene Jonas Karim Laura Marco Nadia Oscar Paula Quentin Rosa "
    "Samir Teresa Ulrich Vera Walter Xenia Yusuf Zoe Amina Bruno Carla Dmitri"
)
LAST = _words(
    "Adler Bauer Costa Dubois Eriksen Fischer Garcia Hoffmann Ivanov Jensen Keller Lopez Moreau Novak Olsen Petrov "
    "Quinn Rossi Schmidt Tanaka Ueda Vogel Weber Xu Yilmaz Zimmer Andersen Becker Conti Delgado"
)
CITIES = _words(
    "Aachen Basel Cologne Dublin Essen Florence Geneva Hamburg Innsbruck Jena Krakow Lyon Milan Nantes Oslo Porto "
    "Rome Seville Turin Utrecht Vienna Warsaw Zurich"
)
COMPLAINTS: dict[str, tuple[str, ...]] = {
    "billing": (
        "invoice {four} charges {three} euros twice",
        "the {two} euros of invoice {four} were paid in {month}",
        "you booked {three} euros from account {four}",
        "please refund {three} euros of my order {four}",
    ),
    "clinic": (
        "my chest hurts since {month}, {drug} {two} mg does not help",
        "the {drug} of {month} gave me a rash",
        "my blood pressure is {three} with {drug}",
        "room {three} has no record of my {drug} allergy",
    ),
    "personnel": (
        "my salary of {four} euros did not arrive in {month}",
        "i was ill for {two} days in {month}",
        "my manager refused {two} days of leave in {month}",
        "the contract of employee {four} ends in {month}",
    ),
    "support": (
        "device {four} shows error {two} after the update",
        "my password for account {four} expired in {month}",
        "the printer in room {three} shows error {two}",
        "order {four} came without its charger",
    ),
}
"""What a letter says, by the department that must answer it: the class."""
MONTHS = _words("January February March April May June July August September October November December")
DRUGS = _words("aspirin insulin metformin ibuprofen warfarin cortisone heparin codeine")


@holds("text")
def letters(argument: str, *, seed: int, root: Path) -> Dataset:
    """Generated letters of patients, customers and employees, 24 tokens, 4 departments, 640 + 160; no download.

    Each has names, places, amounts and a complaint, as what must not leak has, and no word of a real person. The class
    is the department that answers. Tokens are words, digits and marks; the vocabulary is that of the grammar. Letters
    and the split 80 : 20 are a function of `seed`. Raises UsageError: an argument was given.
    """
    no_argument("letters", argument)
    generator = np.random.default_rng(Seeds(seed).seed("letters"))
    vocabulary = Vocabulary((*RESERVED_TOKENS, *sorted(_grammar_words())))
    labels = np.arange(LETTERS) % len(COMPLAINTS)
    texts = [_letter(list(COMPLAINTS.values())[label], generator) for label in labels]
    rows = encode_words(texts, vocabulary)
    parts = hold_out(torch.from_numpy(labels), 5, seed)
    both = [([rows[i] for i in part.tolist()], [int(labels[i]) for i in part]) for part in parts]
    return texts_dataset("letters", both, len(COMPLAINTS), LETTER_LENGTH, vocabulary)


def encode_words(texts: Sequence[str], vocabulary: Vocabulary) -> list[list[int]]:
    """Return the token numbers of texts by words; `UNKNOWN` of a word that the vocabulary lacks."""
    numbers = {word: number for number, word in enumerate(vocabulary.words)}
    return [[numbers.get(word, UNKNOWN) for word in word_tokens(text)] for text in texts]


def _letter(complaints: Sequence[str], generator: np.random.Generator) -> str:
    def one(some: Sequence[str]) -> str:
        return some[int(generator.integers(len(some)))]

    frame = f"{one(GREETINGS)} {one(complaints)}. {one(SIGNATURES)}."
    digits = {"two": 2, "three": 3, "four": 4}
    while "{" in frame:
        slot = frame[frame.index("{") + 1 : frame.index("}")]
        if slot in digits:
            filler = str(int(generator.integers(10 ** (digits[slot] - 1), 10 ** digits[slot])))
        else:
            filler = one(_FILLERS[slot])
        frame = frame.replace(f"{{{slot}}}", filler, 1)
    return frame


_FILLERS = {"title": TITLES, "first": FIRST, "last": LAST, "city": CITIES, "month": MONTHS, "drug": DRUGS}


def _grammar_words() -> set[str]:
    frames = [*GREETINGS, *SIGNATURES, *(one for some in COMPLAINTS.values() for one in some), "."]
    plain = {word for frame in frames for word in word_tokens(re.sub(r"\{\w+\}", " ", frame))}
    return plain | {word for some in _FILLERS.values() for word in some} | set("0123456789")


# -- Texts of a file --

MOST_WORDS = 8192
"""Words of a vocabulary that is made of the texts, the most frequent ones."""


@dataclass(frozen=True)
class TextOptions:
    """The options of `text:FILE?...`, see `load`; "" or 0 for what is left out."""

    text: str = ""
    label: str = ""
    length: int = 64
    tokenizer: str = ""


@holds("text")
def load(argument: str, *, seed: int, root: Path) -> Dataset:
    """Texts of a file: text:FILE?text=COLUMN&label=COLUMN&length=64&tokenizer=FILE; .csv, .tsv or .parquet.

    Or of a folder that the library `datasets` saved (save_to_disk), with its splits train and test where it has both.

    `label` is the column of the class, by default the one named label, class or target, else the last; its distinct
    values, sorted, are the classes. `text` is that of texts, by default of the others the one of the longest. Texts are
    cut to `length` tokens. `tokenizer` is a file tokenizer.json of the Hugging Face format, or its folder, and needs
    the package `tokenizers`; without it tokens are words, digits and marks, and the vocabulary the `MOST_WORDS` most
    frequent of the file, which counts as public. Rows without a token or a class are left out. The split 80 : 20 is
    stratified, a function of `seed`.

    Raises UsageError: a file, column or tokenizer that cannot be used, or an unknown option.
    """
    text, _, query = argument.partition("?")
    path, options = existing("text", text), _options(query)
    frames = _frames(path)
    column, label = _columns(frames[0], options, path)
    texts, values = ([one for some in frames for one in _entries(some[name])] for name in (column, label))
    labelled = [text if value else "" for text, value in zip(texts, values, strict=True)]  # others give no words
    tokens, vocabulary = _encoded(labelled, options)
    kept = [k for k, text in enumerate(labelled) if text and any(token != PADDING for token in tokens[k])]
    classes = sorted({values[k] for k in kept})
    if not 2 <= len(classes) <= len(kept) // 2:
        fault = f"has {len(classes)} distinct values in {len(kept)} rows"
        raise UsageError(f"The column {shown(label)} of {path} {fault}; name the column of classes, 'label=COLUMN'.")
    labels, ends = torch.tensor([classes.index(values[k]) for k in kept]), sum(k < len(frames[0]) for k in kept)
    halves = hold_out(labels, 5, seed) if len(frames) == 1 else torch.arange(len(kept)).tensor_split([ends])
    parts = [([tokens[kept[i]] for i in part.tolist()], labels[part].tolist()) for part in halves]
    notes = (
        f"texts of column {column}, {len(classes)} classes of {label}: {listed(classes[:8])}; {len(vocabulary)} tokens",
        *_remarks(tokens, len(kept), options.length, vocabulary),
    )
    return texts_dataset(f"text:{path.name}", parts, len(classes), options.length, vocabulary, notes)


def _entries(column: pd.Series) -> list[str]:
    """Return the entries of a column as texts without spaces around them, "" for none."""
    return ["" if gone else str(entry).strip() for entry, gone in zip(column, column.isna(), strict=True)]


def _remarks(tokens: Sequence[Sequence[int]], kept: int, length: int, vocabulary: Vocabulary) -> Iterator[str]:
    """Yield remarks on rows that were left out, on texts that were cut, and on a token that counts as padding."""
    if kept < len(tokens):
        yield f"{len(tokens) - kept} of {len(tokens)} rows have no text or no class and are left out"
    if cut := sum(len(row) > length for row in tokens):
        yield f"{cut} of {len(tokens)} texts were cut to {length} tokens"
    if "pad" not in (word := vocabulary.words[PADDING]).lower():
        yield f"token {PADDING}, {word!r}, counts as padding: it is passed over in texts"


def _options(query: str) -> TextOptions:
    values: dict[str, Any] = dict(parse_qsl(query, keep_blank_values=True))
    known = [field.name for field in fields(TextOptions)]
    for name in values:
        if name not in known:
            raise unknown("option of the data set 'text'", name, known)
    if "length" in values:
        if not (str(values["length"]).isdecimal() and 1 <= int(values["length"]) <= 4096):
            raise UsageError(f"Option length={shown(values['length'])} cannot be used: it must be 1 to 4096 tokens.")
        values["length"] = int(values["length"])
    return TextOptions(**values)


def _frames(path: Path) -> list[pd.DataFrame]:
    """Return the rows of a file, or of a saved folder's training part, or of both of its parts."""
    import pandas as pd

    if path.is_dir():
        saved = saved_by_datasets(path)
        parts = [saved[name] for name in ("train", "test") if name in saved] if isinstance(saved, Mapping) else [saved]
        if not parts:
            raise UsageError(f"{path} has the splits {listed(sorted(saved))}; it must have one called train.")
        return [part.to_pandas() for part in parts]
    literal = {"dtype": str, "keep_default_na": False}  # a class may be called None, a text may read NA
    readers = {
        ".csv": (pd.read_csv, literal),
        ".tsv": (pd.read_csv, literal | {"sep": "\t"}),
        ".parquet": (pd.read_parquet, {}),
    }
    if path.suffix not in readers:
        raise UsageError(f"{path} is no file of texts; give one that ends in {', '.join(readers)}.")
    read, options = readers[path.suffix]
    try:
        return [read(path, **options)]
    except Exception as cause:
        raise UsageError(f"{path} cannot be read: {because(cause)}.") from cause


def _columns(frame: pd.DataFrame, options: TextOptions, path: Path) -> tuple[str, str]:
    """Return the names of the columns of texts and of classes."""
    import pandas as pd

    names = [str(name) for name in frame.columns]
    for name in filter(None, (options.text, options.label)):
        if name not in names:
            raise unknown("column", name, names)
    frame.columns = pd.Index(names)
    if len(names) < 2 or not len(frame):
        raise UsageError(f"{path} has {len(names)} columns and {len(frame)} rows; it needs a text and a class in each.")
    if options.text and options.text == options.label:
        raise UsageError(f"The column {shown(options.text)} cannot be both text and class; name two columns.")
    usual = (name for name in names if name.lower() in ("label", "class", "target") and name != options.text)
    label = options.label or next(usual, "")
    others = [name for name in names if name != label]
    text = options.text or max(others, key=lambda name: frame[name].astype(str).str.len().mean())
    return text, label or [name for name in names if name != text][-1]


def _encoded(texts: Sequence[str], options: TextOptions) -> tuple[list[list[int]], Vocabulary]:
    """Return the token numbers of texts and the vocabulary."""
    if options.tokenizer:
        return _by_tokenizer(texts, options.tokenizer)
    counts = Counter(word for text in texts for word in word_tokens(text))
    words = (word for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
    vocabulary = Vocabulary((*RESERVED_TOKENS, *[word for word, _ in zip(words, range(MOST_WORDS), strict=False)]))
    return encode_words(texts, vocabulary), vocabulary


def _by_tokenizer(texts: Sequence[str], place: str) -> tuple[list[list[int]], Vocabulary]:
    """Return the token numbers of texts by a tokenizer's file, with its padding as number 0."""
    path = Path(place).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as cause:
        raise UsageError("The option `tokenizer` needs the package `tokenizers`; pip install tokenizers.") from cause
    try:
        tokenizer = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as cause:
        raise UsageError(f"{path} is no tokenizer of the Hugging Face format: {because(cause)}.") from cause
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words = [tokenizer.id_to_token(number) or "" for number in range(tokenizer.get_vocab_size())]
    rows = [list(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
    return rows, Vocabulary(tuple(words), _style(words))


def _style(words: Sequence[str]) -> Style:
    """Return how a tokenizer marks words, by the mark that most tokens have."""
    counts: dict[Style, int] = {
        "wordpiece": sum(word.startswith("##") for word in words),
        "bytes": sum(word.startswith("Ġ") for word in words),
        "pieces": sum(word.startswith("▁") for word in words),
        "words": 1,
    }
    return max(counts, key=lambda style: counts[style])
