"""Files as people have them: with a fault that is read right, or refused in a sentence with what would read it right.

A case is a data set, what makes its files, and the same data without the fault. Everything is a function of the draw.
"""

import gzip
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Make = Callable[[Path, random.Random], None]
COUNT = 60
"""Rows of a table."""


@dataclass(frozen=True)
class Faulty:
    """A data set whose files, which `make` writes, have a fault.

    words: of the sentence that refuses it; none where it is read right at once. remedy: what the sentence names, behind
    which it is read right, "" where only the files can be repaired. right: the same data without the fault.
    """

    dataset: str
    make: Make
    words: tuple[str, ...] = ()
    remedy: str = ""
    right: tuple[str, Make] | None = None


# -- tables ------------------------------------------------------------------------------------------------------------
def clean(draw: random.Random) -> list[list[str]]:
    """Return rows: two numbers, of which one has always two decimals, a word and a class."""
    made = []
    for row in range(COUNT):
        number = draw.choice([-1, 1]) * (draw.randrange(100, 999999) + draw.choice([0.25, 0.5, 0.75]))
        made.append([f"{number:.2f}", str(draw.randrange(1, 5000)), "rst"[row % 3], ["no", "yes"][row % 2]])
    return made


HEADER = "a,b,w,y"


def text(rows: list[list[str]], sep: str = ",", header: str = HEADER) -> str:
    return "\n".join([*([header.replace(",", sep)] if header else []), *(sep.join(row) for row in rows)]) + "\n"


def changed(column: int, change: Callable[[str, int], str], rows: list[list[str]]) -> list[list[str]]:
    """Return rows with each entry of a column changed, a function of it and its row."""
    return [[*row[:column], change(row[column], at), *row[column + 1 :]] for at, row in enumerate(rows)]


def csv(made: Callable[[list[list[str]]], str | bytes], name: str = "d.csv") -> Make:
    """Return a maker of a table from rows without a fault, which are the same for one draw."""

    def make(folder: Path, draw: random.Random) -> None:
        content = made(clean(draw))
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def grouped(mark: str, point: str = "."):
    return lambda entry, at: f"{float(entry):,.2f}".replace(".", "!").replace(",", mark).replace("!", point)


def mark(some: dict[int, str]):
    """Return a change of some rows' entries."""
    return lambda entry, at: some.get(at, entry)


def without(rows: list[list[str]], some) -> list[list[str]]:
    return [row for at, row in enumerate(rows) if at not in some]


MARKS = {4: "?", 9: "-", 30: "unknown"}
STANDARD = {3: "NA", 8: "n/a", 40: ""}


def table(made, *words: str, remedy: str = "", query: str = "", right=text) -> Faulty:
    """Return a table with a fault. right: the text without it, None for none."""
    other = ("csv:clean.csv", csv(right, "clean.csv")) if right is not None else None
    return Faulty(f"csv:d.csv{query}", csv(made), words, remedy, other)


def comma(rows):
    return changed(0, lambda entry, at: entry.replace(".", ","), rows)


def at(column, change):
    """Return a maker of the text whose column is changed."""
    return lambda rows: text(changed(column, change, rows))


def code(entry, row):
    return f"{int(entry) % 7 + 1230:05}"


TABLES = {
    "decimal commas": table(lambda r: text(comma(r), ";"), "'a'", "'decimal=,'", remedy="?decimal=,"),
    "decimal commas in quotes": table(
        lambda r: text([[f'"{row[0]}"', *row[1:]] for row in comma(r)]), "'decimal=,'", remedy="?decimal=,"
    ),
    "decimal commas without quotes": table(lambda r: text(comma(r)), "Line 2", "more fields", "5, not 4", right=None),
    "thousands": table(
        lambda r: text(changed(0, lambda e, i: f'"{float(e):,.2f}"', r)), "'thousands=,'", remedy="?thousands=,"
    ),
    "thousands alone": table(
        lambda r: text(changed(1, lambda e, i: f'"{int(e) + 1000:,}"', r)),
        "'decimal=,'",
        "'thousands=,'",
        remedy="?thousands=,",
        right=at(1, lambda e, i: str(int(e) + 1000)),
    ),
    "thousands as in Germany": table(
        lambda r: text(changed(0, grouped(".", ","), r), ";"),
        "'decimal=,&thousands=.'",
        remedy="?decimal=,&thousands=.",
    ),
    "points between thousands alone": table(
        lambda r: text(changed(1, lambda e, i: f"{int(e):,}".replace(",", "."), r), ";"),
        "'b'",
        "'decimal=,&thousands=.'",
        remedy="?target=y&drop=a&decimal=,&thousands=.",
        right=lambda r: text([row[1:] for row in r], header="b,w,y"),
    ),
    "thousands as in France": table(
        lambda r: text(changed(0, grouped("\u202f", ","), r), ";"),
        "'decimal=,&thousands=space'",
        remedy="?decimal=,&thousands=space",
    ),
    "thousands as in Switzerland": table(
        lambda r: text(changed(0, grouped("'"), r)), "thousands='", remedy="?thousands='"
    ),
    "half of it with commas": table(
        lambda r: text(changed(0, lambda e, i: e.replace(".", ",") if i % 2 else e, r), ";"), "'a'", right=None
    ),
    "decimals in two ways": table(
        lambda r: text([[row[0], row[1] + ",5", *row[2:]] for row in r], ";"),
        "'a'",
        "in one way",
        query="?decimal=,",
        right=None,
    ),
    "question marks": table(
        at(0, mark({4: "?", 9: "?"})), "'na=?'", remedy="?na=?", right=lambda r: text(without(r, (4, 9)))
    ),
    "marks": table(
        at(1, mark(MARKS)), "57 of 60", "na=", remedy="?na=?,-,unknown", right=lambda r: text(without(r, MARKS))
    ),
    "marks with spaces": table(
        at(1, mark({4: " ? "})), "'na=?'", remedy="?na=?", right=lambda r: text(without(r, (4,)))
    ),
    "usual marks": table(
        at(1, mark(STANDARD)), "Row 3", "'b'", "'na='", remedy="?na=", right=lambda r: text(without(r, STANDARD))
    ),
    "marks among decimal commas": table(
        lambda r: text(changed(0, mark({4: "?"}), comma(r)), ";"),
        "'decimal=,&na=?'",
        remedy="?decimal=,&na=?",
        right=lambda r: text(without(r, (4,))),
    ),
    "mostly marks": table(
        at(1, lambda e, i: e if i % 5 == 0 else "?"), "'na=?'", remedy="?na=?", right=lambda r: text(r[::5])
    ),
    "a word among numbers": table(at(1, mark({5: "n/a - refused"})), "59 of 60", "n/a - refused", right=None),
    "broken cells of a spreadsheet": table(at(0, mark({5: "#DIV/0!", 6: "#VALUE!"})), "na=#DIV/0!,#VALUE!", right=None),
    "a number too large": table(at(0, mark({5: "1e300"})), "Row 5", "1e+300", "single precision", right=None),
    "infinite": table(at(0, mark({5: "-inf"})), "Row 5", "-inf", right=None),
    "no header": table(lambda r: text(r, header=""), "'header=none'", remedy="?header=none"),
    "no header, words": table(
        lambda r: text([[row[2], row[3]] for row in r], header=""),
        "'header=none'",
        remedy="?header=none",
        right=lambda r: text([[row[2], row[3]] for row in r], header="w,y"),
    ),
    "no header, commas and semicolons": table(
        lambda r: text([[row[0]] * 3 for row in comma(r)], ";", ""),
        "'sep=;'",
        query="?header=none&task=regression",
        remedy="?header=none&task=regression&sep=;&decimal=,",
        right=None,
    ),
    "names are numbers": table(lambda r: text(r, header="2019,2020,w,y"), "'2019'", "'header=1'", remedy="?header=1"),
    "comments": table(lambda r: f"# made up\n# 2026\n{text(r)}", "'header=3'", remedy="?header=3"),
    "a comment is the header": table(lambda r: "# " + text(r), "'header=1'", remedy="?header=1"),
    "a comment at the end": table(lambda r: text(r) + "# end\n", "Line 62", "fewer fields", right=None),
    "a title": table(lambda r: "Patients\n" + text(r), "Line 2", "header=", remedy="?header=2"),
    "a title among commas": table(lambda r: "Patients,,,\n" + text(r), "no name", "header=2", remedy="?header=2"),
    "empty lines before": table(lambda r: "\n\n" + text(r)),
    "the hint of a spreadsheet": table(lambda r: "sep=;\n" + text(r, ";"), "'header=2'", remedy="?header=2"),
    "an index": table(
        lambda r: text([[str(i), *row] for i, row in enumerate(r)], header="," + HEADER), "drop=1", remedy="?drop=1"
    ),
    "a comma at the end of lines": table(
        lambda r: text([[*row, ""] for row in r], header=HEADER + ","), "drop=5", remedy="?drop=5"
    ),
    "a column without values": table(
        lambda r: text([["", *row] for row in r], header="z," + HEADER), "'drop=z'", remedy="?drop=z"
    ),
    "two names alike": table(lambda r: text(r, header="a,a,w,y"), "two columns are called 'a'", right=None),
    "the header again": table(lambda r: text(r) + HEADER + "\n", "stands among its entries", right=None),
    "a short row": table(lambda r: text([*r, r[0][:3]]), "Line 62", "3, not 4", right=None),
    "a long row": table(lambda r: text([*r, [*r[0], "x"]]), "Line 62", "5, not 4", right=None),
    "nothing": table(lambda r: "", "cannot be read", right=None),
    "a header alone": table(lambda r: text([]), "0 rows", right=None),
    "one class": table(at(3, lambda e, i: "no"), "1 distinct", right=None),
    "a constant": table(at(1, lambda e, i: "7"), right=at(1, lambda e, i: "7.0")),
    "percent": table(at(1, lambda e, i: e + "%"), "'b'", "bare numbers", right=None),
    "dollars": table(at(1, lambda e, i: "$" + e), "bare numbers", right=None),
    "brackets of accountants": table(at(1, lambda e, i: f"({e})" if i % 2 else e), "bare numbers", right=None),
    "units": table(at(0, lambda e, i: e + " kg"), "'a'", "bare numbers", right=None),
    "base 16": table(at(1, lambda e, i: hex(int(e))), "bare numbers", right=None),
    "codes": table(
        at(1, code),
        "'b'",
        "'categories=b'",
        remedy="?categories=b",
        right=at(1, lambda e, i: "z" + code(e, i)),
    ),
    "underlines between thousands": table(
        lambda r: text(changed(0, lambda e, i: f"{float(e):_.2f}", r)), "'thousands=_'", remedy="?thousands=_"
    ),
    "thousands as in India": table(
        lambda r: text(changed(1, lambda e, i: f'"12,34,{int(e) % 900 + 100}"', r)),
        "'thousands=,'",
        remedy="?thousands=,",
        right=at(1, lambda e, i: f"1234{int(e) % 900 + 100}"),
    ),
    "a row of units": table(lambda r: text([["kg", "cm", "", ""], *r]), "'a'", "others 'kg'", right=None),
    "quotes of another kind": table(at(1, lambda e, i: f"'{e}'"), "'b'", "bare numbers", right=None),
    "JSON": table(lambda r: "".join(json.dumps({"w": row[2], "y": row[3]}) + "\n" for row in r), "JSON", right=None),
    "minus signs of typesetters": table(at(0, lambda e, i: e.replace("-", "\u2212"))),
    "full-width digits": table(at(1, lambda e, i: "".join(chr(ord(c) + 0xFEE0) for c in e))),
    "spaces around": table(lambda r: text([[f" {e}  " for e in row] for row in r])),
    "spaces in names": table(lambda r: text(r, header=" a , b, w , y "), query="?target=y"),
    "exponents with a comma": table(
        lambda r: text(changed(0, lambda e, i: f"{float(e):.9e}".replace(".", ","), r), ";"),
        "'decimal=,'",
        remedy="?decimal=,",
    ),
    "dates": table(at(1, lambda e, i: f"2026-0{1 + i % 9}-11"), "'b'", "dates or times", right=None),
    "months": table(at(1, lambda e, i: f"2026-{1 + i % 12:02}"), "dates or times", right=None),
    "ranges": table(at(1, lambda e, i: ["0-9", "10-19", "20+"][i % 3]), right=at(1, lambda e, i: "jkl"[i % 3])),
    "numbers with a last one open": table(
        at(1, lambda e, i: ["0", "1", "2", "3+"][i % 4]), "repair", "'3+'", right=None
    ),
    "times of day": table(at(1, lambda e, i: f"{i % 24}:30"), "dates or times", right=None),
    "names of rows": table(
        at(2, lambda e, i: f"p{i}x"),
        "60 distinct",
        "'drop=w'",
        remedy="?drop=w",
        right=lambda r: text([[row[0], row[1], row[3]] for row in r], header="a,b,y"),
    ),
    "sentences": table(at(2, lambda e, i: f"he said {i}; and left"), "60 distinct", right=None),
    "capitals": table(at(3, lambda e, i: e.title() if i % 4 == 0 else e), "'No' and 'no'", "case", right=None),
    "truth and nothing": table(
        at(2, lambda e, i: ["true", "FALSE", ""][i % 3]), right=at(2, lambda e, i: ["t", "f", ""][i % 3])
    ),
    "huge whole numbers": table(at(1, lambda e, i: e + "0" * 25)),
    "a quoted line end in a name": table(lambda r: text(r, header='a,"b\nin mm",w,y')),
    "a separator in a name": table(lambda r: text(r, ";").replace("a;b", '"a, in m; or so";b', 1)),
    "two separators": table(lambda r: text(r, header="a;b,w;x"), "fields", right=None),
    "UTF-16": table(lambda r: text(r).encode("utf-16"), "'encoding=utf-16'", remedy="?encoding=utf-16"),
    "UTF-16 without its mark": table(
        lambda r: text(r).encode("utf-16-le"), "'encoding=utf-16-le'", remedy="?encoding=utf-16-le"
    ),
    "latin letters": table(
        lambda r: text(changed(2, lambda e, i: e + "é", r)).encode("cp1252"),
        "'encoding=cp1252'",
        remedy="?encoding=cp1252",
        right=at(2, lambda e, i: e + "é"),
    ),
    "a mark at the start": table(lambda r: text(r).encode("utf-8-sig")),
    "lines of Windows": table(lambda r: text(r).replace("\n", "\r\n")),
    "tabs": table(lambda r: text(r, "\t")),
    "an archive by another name": table(lambda r: gzip.compress(text(r).encode()), ".gz", right=None),
    "fractions as classes": table(
        at(3, lambda e, i: ["0", "10.7", "21.4"][i % 3]),
        "'task=regression'",
        "'categories=y'",
        remedy="?categories=y",
        right=at(3, lambda e, i: ["j", "k", "l"][i % 3]),
    ),
    "a price as a class": table(
        lambda r: text([[*row[1:], row[0]] for row in r], header="b,w,y,a"),
        "'task=regression'",
        remedy="?task=regression",
        right=None,
    ),
    "an age as a class": table(at(3, lambda e, i: str(20 + 13 * i % 71)), "'task=regression'", right=None),
    "a name as a class": table(at(3, lambda e, i: f"p{i}x"), "'y'", "60 distinct", right=None),
    "whole classes with points": table(at(3, lambda e, i: f"{i % 3}.0"), right=at(3, lambda e, i: "jkl"[i % 3])),
    "classes without a value": table(
        at(3, mark({7: "", 8: "NaN"})), "Row 7", "'na='", remedy="?na=", right=lambda r: text(without(r, (7, 8)))
    ),
    "a target with commas": table(
        lambda r: text([[*row[1:], row[0]] for row in comma(r)], ";", "b,w,y,a"), "'a'", "'decimal=,'", right=None
    ),
}


def composed(draw: random.Random) -> tuple[str, Make, tuple[str, Make]]:
    """Return a table of several faults at once, its data set with all options that they need, and what is right."""
    point, between = draw.choice([". ", ".,", ", ", ",.", ".'", ". ", ",'"])
    between = between.strip() if draw.random() < 0.5 else between
    sep = draw.choice([",", ";", "\t", "|"])
    before = draw.choice(["", "", "# made up\n", "A title\n", None])
    missing = {row: draw.choice(["?", "-", "NA", ""]) for row in draw.sample(range(COUNT), draw.choice([0, 3]))}
    encoding = draw.choice(["utf-8", "utf-8-sig", "utf-16", "cp1252"])
    end, quotes = draw.choice(["\n", "\r\n"]), {'"'} if sep in (point, between) else {'"', ""}
    quote = draw.choice(sorted(quotes))

    def number(entry: str, at: int) -> str:
        return quote + missing.get(at, grouped(between, point)(entry, at)) + quote

    def faulty(rows: list[list[str]]) -> bytes:
        table = text(changed(0, number, rows), sep, HEADER if before is not None else "")
        return ((before or "") + table).replace("\n", end).encode(encoding)

    options = ["sep=" + {"\t": "tab"}.get(sep, sep), f"decimal={point}", "encoding=" + encoding]
    options += [f"thousands={'space' if between == ' ' else between}"] if between else []
    options += ["na=?,-"] if missing else []
    options += ["header=none"] if before is None else ["header=2"] if before else []
    right = ("csv:clean.csv", csv(lambda rows: text(without(rows, missing)), "clean.csv"))
    return "csv:d.csv?" + "&".join(options), csv(faulty), right


# -- images ------------------------------------------------------------------------------------------------------------
def arrays(draw: random.Random, color: bool = True, count: int = 12, size: int = 8) -> list[np.ndarray]:
    """Return images uint8 [size, size(, 3)] of noise, the same for one draw."""
    noise = np.random.default_rng(draw.randrange(10**6))
    return [noise.integers(0, 256, (size, size, 3) if color else (size, size), dtype=np.uint8) for _ in range(count)]


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(array: np.ndarray) -> bytes:
    return encoded(Image.fromarray(array))


def palette(array: np.ndarray) -> np.ndarray:
    """Return an image whose colors a palette can hold exactly."""
    return array // 128 * 255


def from_palette(array: np.ndarray) -> bytes:
    colors, places = np.unique(palette(array).reshape(-1, 3), axis=0, return_inverse=True)
    image = Image.fromarray(places.reshape(array.shape[:2]).astype(np.uint8), "P")
    image.putpalette(colors.flatten().tolist())
    return encoded(image)


def opaque(array: np.ndarray, alpha: int = 255) -> bytes:
    return encoded(Image.fromarray(np.dstack([array, np.full(array.shape[:2], alpha, np.uint8)]), "RGBA"))


def turned(array: np.ndarray) -> bytes:
    """Return an image that its EXIF says to turn by a quarter to become `array`."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    return encoded(Image.fromarray(np.ascontiguousarray(np.rot90(array))), exif=exif)


def deep_png(array: np.ndarray) -> bytes:
    """Return an image of 16 bits a channel, which Pillow opens as one of 8."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in array.astype(np.uint16) * 16)
    head = struct.pack(">IIBBBBB", array.shape[1], array.shape[0], 16, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def frames(array: np.ndarray) -> bytes:
    first, second = Image.fromarray(array), Image.fromarray(255 - array)
    return encoded(first, "GIF", save_all=True, append_images=[second])


def drawn_in_alpha(array: np.ndarray) -> bytes:
    return encoded(Image.fromarray(np.dstack([np.zeros_like(array), array[..., 0]]), "RGBA"))


def folder(
    name: str,
    encode=plain,
    change=lambda array: array,
    color: bool = True,
    one=None,
    more=None,
    layout: str = "c{}/{}.png",
) -> Make:
    """Return a maker of class folders. one: encodes the sixth image alone; more: also done to the folder."""

    def make(home: Path, draw: random.Random) -> None:
        for place, array in enumerate(arrays(draw, color)):
            path = home / name / layout.format(place % 3, place, part="test" if place > 8 else "train")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((one if one is not None and place == 5 else encode)(change(array)))
        if more is not None:
            more(home / name)

    return make


def pictures(*words: str, right=None, remedy: str = "", color: bool = True, clean_layout: str = "c{}/{}.png", **faults):
    """Return class folders with a fault. right: what was done to the images, None for nothing."""
    other = folder("clean", change=right or (lambda array: array), color=color, layout=clean_layout)
    return Faulty(
        "imagefolder:f", folder("f", color=color, **faults), words, remedy,
        None if words and not remedy else ("imagefolder:clean", other),
    )  # fmt: skip


def files(**contents: bytes):
    """Return what writes files; "__" in a name stands for a folder."""

    def write(home: Path) -> None:
        for name, content in contents.items():
            path = home / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    return write


def left_behind(home: Path) -> None:
    """Leave what archivers and systems leave behind."""
    files(c0__Thumbs_dot_db=b"x", c1___dot_DS_Store=b"x", c2__notes_dot_txt=b"x", __MACOSX___dot__x_dot_png=b"x")(home)
    for path in ("__MACOSX/c0/._0.png", "c0/._0.png", "@eaDir/c0/0.png", ".ipynb_checkpoints/0.png"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_bytes(b"no image")


def linked(home: Path) -> None:
    """Let a class be a link to a folder elsewhere."""
    (home / "c1").rename(home.parent / "elsewhere")
    (home / "c1").symlink_to(home.parent / "elsewhere", target_is_directory=True)


def lost(home: Path) -> None:
    (home / "c9").symlink_to(home / "nowhere", target_is_directory=True)


PARTS = "{part}/c{}/{}.png"
FOLDERS = {
    "what systems leave behind": pictures(more=left_behind),
    "a linked class": pictures(more=linked),
    "a lost link": pictures("leads nowhere", more=lost),
    "from a palette": pictures(encode=from_palette, right=palette),
    "opaque": pictures(encode=opaque),
    "four colors of print": pictures(
        encode=lambda a: encoded(
            Image.fromarray(255 - np.dstack([a, np.full(a.shape[:2], 255, np.uint8)]), "CMYK"), "TIFF"
        )
    ),
    "drawn in transparency": pictures("f/c2/5.png", "transparency", one=drawn_in_alpha),
    "turned by EXIF": pictures(encode=turned),
    "turned, among others": pictures(one=turned),
    "16 bits of color": pictures("f/c2/5.png", "16 bits", one=deep_png),
    "16 bits of grey": pictures(
        "f/c2/5.png", "I;16", color=False, one=lambda array: plain(array.astype(np.uint16) * 256)
    ),
    "several frames": pictures("f/c2/5.png", "several frames", one=frames),
    "one frame": pictures(encode=lambda a: encoded(Image.fromarray(a), "WEBP", lossless=True)),
    "suffixes in capitals": pictures(layout="c{}/{}.PNG"),
    "named as another kind": pictures(encode=lambda a: encoded(Image.fromarray(a), "BMP")),
    "black and white": pictures(
        color=False,
        encode=lambda a: encoded(Image.fromarray(a > 127)),
        right=lambda a: (a > 127).astype(np.uint8) * 255,
    ),
    "an empty file": pictures("f/c2/5.png", "cannot be decoded", one=lambda array: b""),
    "a cut file": pictures("f/c2/5.png", "cannot be decoded", one=lambda array: plain(array)[:80]),
    "a page for an image": pictures("f/c2/5.png", "cannot be decoded", one=lambda array: b"<html>not found</html>"),
    "two sizes": pictures("f/c2/5.png is 4x8", one=lambda array: plain(array[:, :4].copy())),
    "an image beside the classes": pictures("f/x.png lies beside", more=files(x_dot_png=b"x")),
    "images in a folder of a class": pictures("images in its folder old", more=files(c0__old__x_dot_png=b"x")),
    "a folder too high": pictures("'imagefolder:f/all'", layout="all/c{}/{}.png"),
    "a class without images": pictures("c9 has no image", more=files(c9__x_dot_heic=b"x")),
    "one class": pictures("1 classes", layout="c/{}-{}.png"),
    "a part for validation": pictures(layout=PARTS, clean_layout=PARTS, more=files(val__c0__x_dot_png=b"x")),
    "a class for testing alone": pictures(
        "class 'cx'",
        "no image for training",
        layout=PARTS,
        more=files(test__cx__x_dot_png=plain(np.eye(8, dtype=np.uint8))),
    ),
}


# -- parquet -----------------------------------------------------------------------------------------------------------
STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def frame(draw: random.Random, encode=plain, count: int = 60, **columns) -> pa.Table:
    """Return images and class numbers, or other columns."""
    cells = [{"bytes": encode(array), "path": None} for array in arrays(draw, count=count)]
    return pa.table({"image": pa.array(cells, STRUCT), **(columns or {"label": [row % 3 for row in range(count)]})})


def written(*names: str, **options) -> Make:
    def make(home: Path, draw: random.Random) -> None:
        for name in names:
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(frame(draw, **options), home / name)

    return make


def shards(*words: str, **options) -> Faulty:
    right = None if words else ("parquet:clean.parquet", written("clean.parquet"))
    return Faulty("parquet:d.parquet", written("d.parquet", **options), words, "", right)


def hub(*names: str) -> Faulty:
    """Return a folder as the hub lays it out."""
    right = written("clean/train.parquet", "clean/test.parquet")
    return Faulty("parquet:d", written(*names), right=("parquet:clean", right))


def saved(home: Path, draw: random.Random) -> None:
    """Write what tells a folder of the library `datasets`."""
    (home / "d").mkdir()
    (home / "d" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))


LABELS = [row % 3 for row in range(60)]
PARQUET = {
    "in data/": hub("d/data/train-00000-of-00001.parquet", "d/data/test-00000-of-00001.parquet"),
    "a folder a part": hub("d/train/0000.parquet", "d/test/0000.parquet"),
    "validation, too": hub(*(f"d/data/{part}-0.parquet" for part in ("train", "test", "validation"))),
    "saved by datasets": Faulty("parquet:d", saved, ("'hf:d'",)),
    "floats as labels": shards(label=[float(label) for label in LABELS]),
    "fractions as labels": shards("Row 1 of d.parquet has label 10.7", label=[0.0, 10.7, 21.4] * 20),
    "labels of a dictionary": shards("columns", label=pa.array(["a", "b", "c"] * 20).dictionary_encode()),
    "decimals as labels": shards("columns", label=pa.array(LABELS, pa.decimal128(4, 1))),
    "times as labels": shards("columns", label=pa.array(LABELS, pa.timestamp("s"))),
    "lists as labels": shards("columns", label=[[label] for label in LABELS]),
    "a missing label": shards("Row 5", "None", label=[*LABELS[:5], None, *LABELS[6:]]),
    "labels from 1": shards("labels from 1 on", label=[label + 1 for label in LABELS]),
    "labels with gaps": shards("3 labels, the largest 21", label=[[0, 10, 21][label] for label in LABELS]),
    "names of rows": shards("60 labels in 60 examples", id=list(range(60))),
    "numbers of patients beside words": shards(
        "columns", patient=[row % 7 for row in range(60)], label=["a", "b"] * 30
    ),
    "an image for nobody": shards("row 0", "no image bytes", encode=lambda array: b""),
    "turned in parquet": shards(encode=turned),
    "16 bits in parquet": shards("row 0", "16 bits", encode=deep_png),
}
EVERY = {**{f"csv: {n}": c for n, c in TABLES.items()}, **{f"images: {n}": c for n, c in FOLDERS.items()}}
EVERY |= {f"parquet: {n}": c for n, c in PARQUET.items()}
