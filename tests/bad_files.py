"""Damaged and hostile files: data sets, weights, suites, folders of results. Each maker writes into a folder."""

import gzip
import io
import json
import pickle
import random
import struct
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from faulty_files import EVERY
from PIL import Image
from safetensors.torch import save_file


def noise(draw: random.Random, most: int = 4000) -> bytes:
    """Return some random bytes."""
    return draw.randbytes(draw.randint(1, most))


def put(name, content, folder, draw):
    """Write `content`, or what it returns for `draw`, to `name` in `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    made = content(draw) if callable(content) else content
    path.write_bytes(made.encode() if isinstance(made, str) else made)


def png(size=(8, 8), mode="L", color=None, draw=None) -> bytes:
    """Return an image in PNG: of one color, or of noise."""
    file = io.BytesIO()
    if color is not None:
        Image.new(mode, size, color).save(file, "PNG")
    else:
        shape = (*size[::-1], 3) if mode == "RGB" else size[::-1]
        Image.fromarray(np.random.default_rng(draw.randrange(999)).integers(0, 256, shape).astype("uint8")).save(
            file, "PNG"
        )
    return file.getvalue()


def bomb(width=60_000, height=60_000) -> bytes:
    """Return a PNG of a few bytes that says it is huge."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def table(images, labels, folder, draw):
    """Write d.parquet, images in a struct beside labels."""
    made = images(draw) if callable(images) else images
    pq.write_table(pa.table({"image": made, "label": labels}), folder / "d.parquet")


def structs(cells, kind=None):
    """Return a column of structs with a field `bytes`."""
    return pa.array([{"bytes": one} for one in cells], pa.struct([("bytes", kind or pa.binary())]))


def cut(draw):
    """Return a parquet file that ends too early, or has flipped bytes."""
    file = io.BytesIO()
    cells = structs([png(draw=draw) for _ in range(20)])
    pq.write_table(pa.table({"image": cells, "label": list(range(10)) * 2}), file)
    whole = bytearray(file.getvalue())
    if draw.random() < 0.5:
        return bytes(whole[: draw.randrange(len(whole) - 8)])
    end = len(whole) - 8
    for _ in range(20):
        whole[draw.randrange(end - struct.unpack("<I", whole[end : end + 4])[0], end)] ^= 255
    return bytes(whole)


def twenty(image):
    """Return a maker of a column of twenty images."""
    return lambda draw: structs([image(draw) for _ in range(20)])


def broken_png(draw):
    """Return a PNG that is cut or has noise within."""
    whole = png((32, 32), draw=draw)
    return whole[: draw.randrange(60)] if draw.random() < 0.5 else whole[:45] + noise(draw, 100)


def packed(draw):
    """Return rows in gzip, of which the stream is damaged."""
    whole = bytearray(gzip.compress(("a,b\n" + "1,2\n3,4\n" * 400).encode()))
    for place in range(12, len(whole)):
        whole[place] ^= draw.randrange(1, 256)
    return bytes(whole)


def folders(image, folder, draw):
    """Write class folders of images."""
    for name in range(3):
        for place in range(6):
            put(f"f/c{name}/{place}.png", image, folder, draw)


def masked(masks, folder, draw):
    """Write images with masks."""
    for place in range(6):
        put(f"f/images/{place}.png", partial(lambda draw: png((16, 16), draw=draw)), folder, draw)
        if masks is not None:
            put(f"f/masks/{place}.png", masks, folder, draw)


ROWS = "1,2,x\n3,4,y\n"
LABELS = list(range(10)) * 2
DATA = {
    "random parquet": ("parquet:d.parquet", partial(put, "d.parquet", noise)),
    "cut parquet": ("parquet:d.parquet", partial(put, "d.parquet", cut)),
    "bytes are text": ("parquet:d.parquet", partial(table, structs(["a"] * 20, pa.string()), LABELS)),
    "bytes are numbers": ("parquet:d.parquet", partial(table, structs([3] * 20, pa.int64()), LABELS)),
    "bytes are lists": ("parquet:d.parquet", partial(table, structs([[3]] * 20, pa.list_(pa.int64())), LABELS)),
    "no bytes": ("parquet:d.parquet", partial(table, structs([None] * 20), LABELS)),
    "images are noise": ("parquet:d.parquet", partial(table, twenty(noise), LABELS)),
    "images are cut": ("parquet:d.parquet", partial(table, twenty(broken_png), LABELS)),
    "bombs": ("parquet:d.parquet", partial(table, twenty(lambda draw: bomb()), LABELS)),
    "one color": ("parquet:d.parquet", partial(table, twenty(lambda draw: png(color=draw.randrange(256))), LABELS)),
    "labels below 0": ("parquet:d.parquet", partial(table, twenty(lambda draw: png(draw=draw)), [-1] * 20)),
    "no labels": (
        "parquet:d.parquet",
        partial(table, twenty(lambda draw: png(draw=draw)), pa.array([None] * 20, pa.int64())),
    ),
    "labels far": ("parquet:d.parquet", partial(table, twenty(lambda draw: png(draw=draw)), [2**40] * 20)),
    "labels are text": ("parquet:d.parquet", partial(table, twenty(lambda draw: png(draw=draw)), ["a"] * 20)),
    "no rows": ("parquet:d.parquet", partial(table, structs([]), pa.array([], pa.int64()))),
    "sizes differ": (
        "parquet:d.parquet",
        partial(table, lambda draw: structs([png((8 + k, 8), draw=draw) for k in range(20)]), LABELS),
    ),
    "binary csv": ("csv:d.csv", partial(put, "d.csv", noise)),
    "no gzip": ("csv:d.csv.gz", partial(put, "d.csv.gz", noise)),
    "bad stream": ("csv:d.csv.gz", partial(put, "d.csv.gz", packed)),
    "cut gzip": (
        "csv:d.csv.gz",
        partial(put, "d.csv.gz", lambda draw: gzip.compress(ROWS.encode() * 200)[: draw.randrange(11, 40)]),
    ),
    "bomb of one line": ("csv:d.csv.gz", partial(put, "d.csv.gz", lambda draw: gzip.compress(b"a" * 3_000_000, 1))),
    "one column": ("csv:d.csv", partial(put, "d.csv", "a\n" + "1\n2\n" * 30)),
    "zero bytes": ("csv:d.csv", partial(put, "d.csv", "a,b,c\n" + "1,\0,x\n\0,4,y\n" * 30 + '"')),
    "nan": ("csv:d.csv", partial(put, "d.csv", "a,b,c\n" + ROWS * 30 + ",3,x\n")),
    "no target": ("csv:d.csv?target=q", partial(put, "d.csv", "a,b,c\n" + ROWS * 30)),
    "odd option": ("csv:d.csv?sep=ab", partial(put, "d.csv", "a,b,c\n" + ROWS * 30)),
    "text to fit": ("csv:d.csv?task=regression", partial(put, "d.csv", "a,b,c\n" + ROWS * 30)),
    "no images": ("imagefolder:f", partial(put, "f/c0/readme.txt", "x")),
    "one color each": ("imagefolder:f", partial(folders, lambda draw: png(color=draw.randrange(256)))),
    "noise in folders": ("imagefolder:f", partial(folders, noise)),
    "bombs in folders": ("imagefolder:f", partial(folders, lambda draw: bomb(20_000, 20_000))),
    "a file": ("imagefolder:f", partial(put, "f", noise)),
    "no test": ("imagefolder:f", partial(put, "f/train/c0/0.png", b"x")),
    "no masks": ("segmentation:f", partial(masked, None)),
    "masks of noise": ("segmentation:f", partial(masked, lambda draw: png((16, 16), draw=draw))),
    "masks too small": ("segmentation:f", partial(masked, lambda draw: png((8, 8), color=255))),
    "masks are no images": ("segmentation:f", partial(masked, noise)),
}
DATA |= {name: (case.dataset, case.make) for name, case in EVERY.items() if case.words}


def IDX(folder, draw):
    """Write MNIST's and Fashion-MNIST's files, damaged: noise, or a shape that is far more than there is."""
    for home in ("MNIST", "FashionMNIST"):
        for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
            axes = int(name[-1])
            huge = struct.pack(">BBBB", 0, 0, 8, axes) + struct.pack(f">{axes}I", *[2**31 - 1] * axes) + noise(draw, 99)
            put(f"data/{home}/raw/{name}-ubyte", draw.choice([huge, noise(draw), b"", b"\0\0\x08\x03"]), folder, draw)


class Code:
    """What runs code when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("harm"),))


def saved(content):
    """Return a checkpoint as torch writes it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def tensors(folder, draw):
    """Write a safetensors file of other names."""
    save_file({"a": torch.zeros(3)}, folder / "o.safetensors")


WEIGHTS = {
    "w.pth": partial(put, "w.pth", noise),
    "c.pth": partial(put, "c.pth", lambda draw: saved({"a": Code()})),
    "p.pth": partial(put, "p.pth", lambda draw: pickle.dumps(Code())),
    "n.pth": partial(put, "n.pth", lambda draw: saved([1, 2, 3])),
    "s.pth": partial(put, "s.pth", lambda draw: saved({"features.0.weight": torch.zeros(draw.randrange(1, 9))})),
    "e.pth": partial(put, "e.pth", b""),
    "z.pth": partial(put, "z.pth", lambda draw: saved({"a": torch.zeros(9)})[: draw.randrange(30, 400)]),
    "r.safetensors": partial(put, "r.safetensors", noise),
    "h.safetensors": partial(put, "h.safetensors", lambda draw: struct.pack("<Q", 2**62) + noise(draw)),
    "o.safetensors": tensors,
    "none.pth": partial(put, "other.pth", b""),
}
HEAD = 'schema = "ppbench.run.suite/1"\nid = "s"\nversion = 1\ntitle = "T"\n'
BODY = '[[defense]]\nid = "dp"\ngrid = [0.1]\n'
WRONG = [
    "clients = 0",
    "clients = -1",
    "clients = 1e400",
    "clients = nan",
    "clients = 999999999",
    'clients = "x"',
    "client = 2",
    "train = 0",
    'dataset = "none"',
    'dataset = "parquet:\\u0000"',
    'model = "x"',
    "public = 1.0",
    'partition = "x"',
    "model_options = { q = 1 }",
    "model_options = []",
    "clients = []",
    'loss = "x"',
    "train = 1e9",
    "dataset = 3",
    "clients = 12345678901234567890123",
]
SUITES = [
    partial(put, "s.toml", noise),
    partial(put, "s.toml", ""),
    partial(put, "s.toml", HEAD),
    partial(put, "other.toml", ""),
    partial(put, "s.toml/x", ""),
    partial(put, "s.toml", b"\xff\xfe\x00"),
    partial(put, "s.toml", HEAD + "a = " + "[" * 3000 + "]" * 3000),
    partial(put, "s.toml", "[a" + ".b" * 3000 + "]"),
    partial(put, "s.toml", HEAD + "#" * 1_100_000),
    partial(put, "s.toml", HEAD + "seeds = []\n" + BODY),
    partial(put, "s.toml", HEAD + "seeds = [-1]\n" + BODY),
    partial(put, "s.toml", HEAD + "seeds = [" + "9" * 5000 + "]\n" + BODY),
    partial(put, "s.toml", HEAD.replace('"s"', '"../s"') + BODY),
    partial(put, "s.toml", HEAD.replace("= 1", "= 0") + BODY),
    partial(put, "s.toml", HEAD.replace("suite/1", "suite/9") + BODY),
    partial(put, "s.toml", HEAD + BODY.replace("[0.1]", "[nan]")),
    partial(put, "s.toml", HEAD + BODY.replace("[0.1]", str(list(range(1001))))),
    partial(put, "s.toml", HEAD + BODY.replace("[0.1]", "[-1]")),
    partial(put, "s.toml", HEAD + BODY.replace("dp", "d\\u0000p")),
    partial(put, "s.toml", HEAD + BODY.replace("dp", "x" * 99_000)),
    partial(put, "s.toml", HEAD + BODY + "set = { q = 1 }\n"),
    partial(put, "s.toml", HEAD + BODY + "set = { sigma = 1e308 }\ngrid2 = 1"),
    partial(put, "s.toml", HEAD + "[attack.dlg]\nbudget = 0\n" + BODY),
    partial(put, "s.toml", HEAD + "[attack.nosuch]\n" + BODY),
    partial(put, "s.toml", HEAD + "[attack.dlg]\nbudget = 1e9\n" + BODY),
    *(partial(put, "s.toml", f"{HEAD}[task]\n{line}\n{BODY}") for line in WRONG),
    lambda folder, draw: put("s.toml", "".join(draw.sample(HEAD + BODY, len(HEAD + BODY))), folder, draw),
]


def archive(folder, draw):
    """Write a zip whose member leads out of it."""
    with zipfile.ZipFile(folder / "r", "w") as file:
        file.writestr(draw.choice(["../x", "/etc/x", "ppbench.json", "a" * 300]), noise(draw))


def nothing(folder, draw):
    """Write nothing at all."""


RESULTS = {
    "nothing": nothing,
    "noise": partial(put, "r", noise),
    "archive": archive,
    "foreign": partial(put, "r/thesis.tex", "x"),
    "empty file": partial(put, "r", b""),
    "marker of noise": partial(put, "r/ppbench-results.json", noise),
    "deep JSON": partial(put, "r", "[" * 3000),
    "empty folder": lambda folder, draw: (folder / "r").mkdir(),
    "a list": partial(put, "r", json.dumps([1])),
}
