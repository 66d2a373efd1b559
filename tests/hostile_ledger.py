"""Hostile guess, transcript, truth and book files: each maker writes into a folder and returns words for `ppbench`.

Who makes a transcript knows the format: digests and ids are made again after each change.
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import struct
import zipfile
from functools import partial

import torch
from ledger_home import VICTIMS, about
from safetensors.torch import save

from ppbench.records.store import canonical_json

GIB = 1 << 30
SHAPE = (1, 8, 8)
GUESSES, TRANSCRIPTS, ORGANIZERS = {}, {}, {}
"""Cases by name: (home, folder) to words."""


def words(transcript, guesses, truth):
    return ["score", str(transcript), str(guesses), "--truth", str(truth)]


def framed(header, body=b""):
    """Return a safetensors file of a header, JSON or bytes, and a body."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype="F32", shape=(VICTIMS, 1, *SHAPE), span=(0, VICTIMS * 256)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


def body(count=VICTIMS * 256):
    return b"\0" * count


def packed(**tensors):
    return save(tensors)


def right(**changed):
    """Return answers as they must be, but for what is `changed`; None leaves one out."""
    whole = {"x": torch.full((VICTIMS, 1, *SHAPE), 0.5), "evaluations": torch.zeros(VICTIMS, dtype=torch.int64)}
    return {name: value for name, value in (whole | changed).items() if value is not None}


def right_guesses(folder, home):
    (folder / "g.json").write_bytes(canonical_json(about(home.ids["dp"])))
    (folder / "g.safetensors").write_bytes(packed(**right()))


# -- guesses ----------------------------------------------------------------------------------------------------------
def guess_data(data, kind, home, folder):
    """Write these bytes, or what they are made by, as the tensors of guesses."""
    (folder / "g.json").write_bytes(canonical_json(about(home.ids["dp"], kind)))
    (folder / "g.safetensors").write_bytes(data() if callable(data) else data)
    return words(home.transcript("dp"), folder / "g.json", home.truth)


def guess_said(change, home, folder):
    """Write the right tensors, and a JSON that `change` makes of the right one: a dict, text or bytes."""
    transcript = json.loads(canonical_json(about(home.ids["dp"])))
    made = change(transcript)
    made = transcript if made is None else made
    made = json.dumps(made) if isinstance(made, dict) else made
    (folder / "g.json").write_bytes(made.encode() if isinstance(made, str) else made)
    (folder / "g.safetensors").write_bytes(packed(**right()))
    return words(home.transcript("dp"), folder / "g.json", home.truth)


def guess_place(change, home, folder):
    """Write right guesses, and let `change` put something in the place of a file; it may return another one."""
    right_guesses(folder, home)
    other = change(folder)
    return words(home.transcript("dp"), folder / "g.json" if other is None else other, home.truth)


def sparse(path, size):
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


def replaced(name, make, folder):
    (folder / name).unlink()
    make(folder / name)


def changed(**values):
    return lambda transcript: transcript.update(values)


def textual(old, new):
    """Return a change of the JSON's text."""
    return lambda transcript: json.dumps(transcript).replace(old, new)


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"\0" * 50_000_000)
    return file.getvalue()


LIED = VICTIMS * 256
TENSORS = {
    "empty file": b"",
    "truncated header length": b"\x08\0\0",
    "truncated tensors": lambda: packed(**right())[:-100],
    "trailing bytes": lambda: packed(**right()) + b"\0" * 64,
    "10 GB claimed by offsets": lambda: framed({"x": entry(shape=(10 * GIB // 4,), span=(0, 10 * GIB))}, body()),
    "header of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "header of 2^64 - 1 bytes": struct.pack("<Q", (1 << 64) - 1) + b"{}",
    "header of 100 MB of spaces": lambda: framed(b" " * 100_000_000),
    "header of spaces that may be read": lambda: framed(b" " * 10_000),
    "header that is no JSON": lambda: framed(b"{'x': 1}" * 9),
    "header that is a list": lambda: framed(b"[]"),
    "header nested deep": lambda: framed(b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    "header with a key twice": lambda: framed(
        f'{{"x": {json.dumps(entry())}, "x": {json.dumps(entry(span=(LIED, 2 * LIED)))}}}'.encode(), body(2 * LIED)
    ),
    "tensors that share bytes": lambda: framed(
        {"x": entry(), "y": entry("I64", (VICTIMS, 1), (0, VICTIMS * 8))}, body()
    ),
    "offsets backwards": lambda: framed({"x": entry(span=(LIED, 0))}, body()),
    "offsets below zero": lambda: framed({"x": entry(span=(-LIED, 0))}, body()),
    "shape whose product wraps": lambda: framed({"x": entry(shape=(1 << 32, 1 << 32), span=(0, 0))}),
    "shape below zero": lambda: framed({"x": entry(shape=(-VICTIMS, 1, *SHAPE))}, body()),
    "shape of 2^200": lambda: framed({"x": entry(shape=(1 << 200,))}, body()),
    "shape of thousands of axes": lambda: framed({"x": entry(shape=(1,) * 5000 + (LIED // 4,))}, body()),
    "type that is not known": lambda: framed({"x": entry("F128")}, body()),
    "pickle": b"\x80\x04cos\nsystem\n(X\x08\0\0\0touch pwtR.",
    "zip bomb renamed": zipped,
    "gzip": lambda: gzip.compress(packed(**right())),
    "no tensors": lambda: framed({}),
    "missing x": lambda: packed(**right(x=None)),
    "extra tensor": lambda: packed(**right(), more=torch.zeros(3)),
    "tensor named like a path": lambda: packed(**right(), **{"../../x": torch.zeros(1)}),
    "tensor named in HTML": lambda: packed(**right(), **{"<script>alert(1)</script>\x1b[31m": torch.zeros(1)}),
    "x in float64": lambda: packed(**right(x=torch.zeros(VICTIMS, 1, *SHAPE, dtype=torch.float64))),
    "x in bfloat16": lambda: packed(**right(x=torch.zeros(VICTIMS, 1, *SHAPE, dtype=torch.bfloat16))),
    "x in float8": lambda: framed({"x": entry("F8_E4M3", span=(0, LIED // 4))}, body(LIED // 4)),
    "x of too few questions": lambda: packed(**right(x=torch.zeros(VICTIMS - 1, 1, *SHAPE))),
    "x of too many questions": lambda: packed(**right(x=torch.zeros(VICTIMS + 1, 1, *SHAPE))),
    "x of other images": lambda: packed(**right(x=torch.zeros(VICTIMS, 1, 3, 8, 8))),
    "x without axes": lambda: packed(**right(x=torch.tensor(0.5))),
    "x with NaN": lambda: packed(**right(x=torch.full((VICTIMS, 1, *SHAPE), torch.nan))),
    "x with infinity": lambda: packed(**right(x=torch.full((VICTIMS, 1, *SHAPE), -torch.inf))),
    "y in int32": lambda: packed(**right(y=torch.zeros(VICTIMS, 1, dtype=torch.int32))),
    "y beside images out of range": lambda: packed(**right(y=torch.full((VICTIMS, 1), 10))),
    "confidence that is not finite": lambda: packed(
        **right(confidence=torch.full((VICTIMS,), torch.nan, dtype=torch.float64))
    ),
    "evaluations below zero": lambda: packed(**right(evaluations=torch.full((VICTIMS,), -1))),
}  # fmt: skip
LABELS = {
    "class -1": lambda: packed(y=torch.full((VICTIMS, 1), -1)),
    "class 2^62": lambda: packed(y=torch.full((VICTIMS, 1), 1 << 62)),
    "no labels": lambda: packed(evaluations=torch.zeros(VICTIMS, dtype=torch.int64)),
}
SAID = {
    "JSON: empty": lambda transcript: "",
    "JSON: not UTF-8": lambda transcript: b'{"schema": "\xff\xfe"}',
    "JSON: nested deep": lambda transcript: "[" * 100_000,
    "JSON: a list": lambda transcript: "[]",
    "JSON: twice": lambda transcript: json.dumps(transcript) * 2,
    "JSON: a key twice": lambda transcript: json.dumps(transcript)[:-1] + ', "name": "other"}',
    "JSON: NaN": textual('"seconds": null', '"seconds": NaN'),
    "JSON: Infinity": textual('"seconds": null', '"seconds": Infinity'),
    "JSON: 1e400": textual('"seconds": null', '"seconds": 1e400'),
    "JSON: 2^200": textual('"evaluations": null', f'"evaluations": {1 << 200}'),
    "JSON: a number of 5000 digits": textual('"evaluations": null', '"evaluations": ' + "9" * 5000),
    "JSON: evaluations below zero": textual('"evaluations": null', '"evaluations": -5'),
    "JSON: a surrogate": textual("somebodys", "\\ud800"),
    "JSON: an unknown field": changed(price=3),
    "JSON: a word for a yes": changed(knows="yes"),
    "JSON: another schema": changed(schema="ppbench.guesses/9"),
    "JSON: nothing of a transcript": changed(transcript="0" * 32),
    "JSON: a transcript that is a path": changed(transcript="../../../etc/passwd"),
    "JSON: a question that is not asked": changed(kind="membership"),
    "JSON: a question that is a path": changed(kind="../../x"),
    "JSON: an attack that is a path": changed(name="../../x"),
    "JSON: an absolute attack": changed(name="/etc/passwd"),
    "JSON: an attack with NUL": changed(name="a\0b"),
    "JSON: an attack with a line's end": changed(name="somebodys\n"),
    "JSON: an attack in HTML": changed(name="<script>alert(1)</script>"),
    "JSON: an attack of 100,000 letters": changed(name="a" * 100_000),
    "JSON: a reference of 20 MB": changed(reference="a" * 20_000_000),
}
PLACES = {
    "nothing there": lambda folder: folder / "no.json",
    "a name with NUL": lambda folder: f"{folder}/a\0b.json",
    "a name of 5000 letters": lambda folder: folder / ("a" * 5000),
    "JSON is a link to /etc/passwd": partial(replaced, "g.json", lambda p: p.symlink_to("/etc/passwd")),
    "JSON is a link to guesses": partial(replaced, "g.json", lambda p: p.symlink_to(p.with_name("g.safetensors"))),
    "JSON is a pipe": partial(replaced, "g.json", os.mkfifo),
    "JSON is a folder": partial(replaced, "g.json", os.mkdir),
    "JSON is a link in a circle": partial(replaced, "g.json", lambda p: p.symlink_to(p)),
    "JSON of 10 GB": lambda folder: sparse(folder / "g.json", 10 * GIB),
    "tensors are a link": partial(replaced, "g.safetensors", lambda p: p.symlink_to("/etc/passwd")),
    "tensors are a link to a device": partial(replaced, "g.safetensors", lambda p: p.symlink_to("/dev/zero")),
    "tensors are a pipe": partial(replaced, "g.safetensors", os.mkfifo),
    "tensors are a folder": partial(replaced, "g.safetensors", os.mkdir),
    "tensors of 10 GB": lambda folder: sparse(folder / "g.safetensors", 10 * GIB),
    "tensors of 900 MB": lambda folder: sparse(folder / "g.safetensors", 900_000_000),
    "guesses are a device": lambda folder: "/dev/zero",
    "no tensors beside": lambda folder: (folder / "g.safetensors").unlink(),
}  # fmt: skip
GUESSES |= {name: partial(guess_data, data, "reconstruction") for name, data in TENSORS.items()}
GUESSES |= {name: partial(guess_data, data, "label") for name, data in LABELS.items()}
GUESSES |= {name: partial(guess_said, change) for name, change in SAID.items()}
GUESSES |= {name: partial(guess_place, change) for name, change in PLACES.items()}


# -- transcripts ------------------------------------------------------------------------------------------------------
def copied(home, folder):
    folder.mkdir(exist_ok=True)
    return shutil.copytree(home.transcript("dp"), folder / "t")


def signed(transcript):
    """Give what a transcript says the id that belongs to it."""
    rest = {name: value for name, value in transcript.items() if name != "id"}
    try:
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    except ValueError:
        return transcript
    return rest | {"id": hashlib.sha256(text.encode()).hexdigest()[:32]}


def edited(change, home, folder):
    """Change what a transcript says; text is written as it is."""
    at = copied(home, folder)
    transcript = json.loads((at / "transcript.json").read_text())
    made = change(transcript)
    if not isinstance(made, str | bytes):
        made = json.dumps(signed(transcript))
    (at / "transcript.json").write_bytes(made.encode() if isinstance(made, str) else made)
    return scored(home, folder, at)


def scored(home, folder, at):
    right_guesses(folder, home)
    return words(at, folder / "g.json", home.truth)


def seen(change, home, folder):
    """Change the file of a view: bytes to bytes."""
    at = copied(home, folder)
    data = change((at / "view.safetensors").read_bytes())
    (at / "view.safetensors").write_bytes(data)
    transcript = json.loads((at / "transcript.json").read_text())
    transcript["files"]["view.safetensors"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (at / "transcript.json").write_text(json.dumps(signed(transcript)))
    return scored(home, folder, at)


def retold(change):
    """Return a change of a view's tree: it may return another one, or its text."""

    def act(data):
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        whole = json.loads(header["__metadata__"]["tree"])
        made = change(whole)
        made = whole if made is None else made
        header["__metadata__"]["tree"] = made if isinstance(made, str) else json.dumps(made)
        return framed(header, data[8 + size :])

    return act


def at(*path):
    """Return a setter of a place in what a transcript says."""

    def setter(value):
        def act(transcript):
            for key in path[:-1]:
                transcript = transcript[key]
            transcript[path[-1]] = value

        return act

    return setter


def letters(whole):
    """Return the messages in a view's tree."""
    return whole["list"][0]["list"]


def nested(depth, whole):
    """Return the text of a tree whose public examples are a list in a list, and so on."""
    whole["list"][3] = {"value": "deep"}
    return json.dumps(whole).replace('{"value": "deep"}', '{"list": [' * depth + '{"value": null}' + "]}" * depth)


def reshaped(whole):
    """Let weights and uploads hold a tensor of another shape, the same in both."""
    text = json.dumps(letters(whole))
    moved = re.sub(
        r'"features.1.bias", {"tensor": "t(\d+)"}', lambda m: m[0].replace(f"t{m[1]}", f"t{int(m[1]) + 2}"), text
    )
    whole["list"][0]["list"] = json.loads(moved)


def every_message(message, whole):
    for one in letters(whole):
        one["tuple"][6] = message


def first_letter(place, value):
    def act(whole):
        next(iter(letters(whole)[0].values()))[place] = value

    return act


def renamed(transcript):
    transcript["plan"]["spec"]["model"] = transcript["model"]["id"] = "resnet20"


def place_of(change, home, folder):
    """Let `change` put something in the place of a transcript's file or folder."""
    there = copied(home, folder)
    change(there)
    return scored(home, folder, there)


def agreeing(**network):
    """Return a change of the network in both places that tell of it."""

    def act(transcript):
        transcript["plan"]["spec"].update(network)
        transcript["model"].update(network)

    return act


TOLD = {
    "transcript: altered": lambda transcript: json.dumps(transcript | {"title": "another"}),
    "transcript: another threat": lambda transcript: at("threat")("nobody/1")(transcript),
    "transcript: a threat that is a path": at("threat")("../../x"),
    "transcript: a party that is none": at("party")(77),
    "transcript: a party of 2^200": at("party")(1 << 200),
    "transcript: 10^9 clients": at("plan", "clients")(10**9),
    "transcript: -1 clients": at("plan", "clients")(-1),
    "transcript: no plan": at("plan")({}),
    "transcript: a plan of something else": at("plan", "spec")({"model": "mlp", "shape": "x", "classes": 2}),
    "transcript: a network for 3 TB, told twice": agreeing(shape=[3, 1_000_000, 1_000_000]),
    "transcript: a network for 4 GB, told twice": agreeing(shape=[1, 8, 8], classes=1_000_000),
    "transcript: a network of 2^60 inputs, told twice": agreeing(shape=[1 << 20, 1 << 20, 1 << 20]),
    "transcript: other inputs, told twice": agreeing(shape=[3, 32, 32]),
    "transcript: other classes, told twice": agreeing(classes=11),
    "transcript: inputs of five axes, told twice": agreeing(shape=[1, 1, 1, 8, 8]),
    "transcript: another network, told twice": renamed,
    "transcript: a wide network": lambda transcript: transcript["plan"]["spec"].update(options=[["hidden", 10**9]]),
    "transcript: a network for 3 TB": at("plan", "spec", "shape")([1_000_000, 1_000_000, 3]),
    "transcript: a network for 2^62 classes": at("plan", "spec", "classes")(1 << 62),
    "transcript: a network for 10^9 classes": at("plan", "spec", "classes")(10**9),
    "transcript: -3 classes": at("plan", "spec", "classes")(-3),
    "transcript: no classes": at("plan", "spec", "classes")(0),
    "transcript: inputs without axes": at("plan", "spec", "shape")([]),
    "transcript: inputs of 0": at("plan", "spec", "shape")([0, 0, 0]),
    "transcript: inputs of -8": at("plan", "spec", "shape")([1, -8, -8]),
    "transcript: inputs of a thousand axes": at("plan", "spec", "shape")([1] * 1000),
    "transcript: other inputs than the view's": at("plan", "spec", "shape")([3, 32, 32]),
    "transcript: options of a network": at("plan", "spec", "options")([["width", 10**9]]),
    "transcript: a range of nothing": at("plan", "data_range")([0.5, 0.5]),
    "transcript: a range backwards": at("plan", "data_range")([1.0, 0.0]),
    "transcript: a range of NaN": at("plan", "data_range")([float("nan"), 1.0]),
    "transcript: a loss that is none": at("plan", "loss")("os:system"),
    "transcript: 10^9 local epochs": at("plan", "local", "epochs")(-1),
    "transcript: a network that is none": at("plan", "spec", "model")("no-such-network"),
    "transcript: a network at an address": at("plan", "spec", "model")("antigravity:fly"),
    "transcript: a network at os:system": at("plan", "spec", "model")("os:system"),
    "transcript: a network's weights": at("plan", "spec", "options")([["weights", "/etc/passwd"]]),
    "transcript: a defense at an address": at("defense", "id")("flower:antigravity:fly"),
    "transcript: a defense that is a path": at("defense", "id")("../../x"),
    "transcript: a defense with NUL": at("defense", "id")("a\0b"),
    "transcript: a defense that is not installed": at("defense", "id")("no-such-defense"),
    "transcript: a defense of another version": at("defense", "version")("99"),
    "transcript: a defense with noise below zero": at("defense", "parameters", "sigma")(-1.0),
    "transcript: a defense with noise of 1e30": at("defense", "parameters", "sigma")(1e30),
    "transcript: a defense with another parameter": at("defense", "parameters", "more")(1),
    "transcript: a defense with words for numbers": at("defense", "parameters", "sigma")("much"),
    "transcript: a batch of 0": at("batch")(0),
    "transcript: a batch of 2^62": at("batch")(1 << 62),
    "transcript: a batch of 10^9": at("batch")(10**9),
    "transcript: no questions": at("questions")([]),
    "transcript: a question twice": lambda transcript: transcript["questions"].append(transcript["questions"][0]),
    "transcript: a slot twice": at("questions", 0)({"unit": [[0, 0], [0, 0]]}),
    "transcript: units of two sizes": at("questions", 0)({"unit": [[0, 0], [0, 1]]}),
    "transcript: a slot that is not in the view": at("questions", 0)({"unit": [[10**6, 0]]}),
    "transcript: a client that is none": at("questions", 0)({"unit": [[0, 10**6]]}),
    "transcript: a slot below zero": at("questions", 0)({"unit": [[-5, -7]]}),
    "transcript: a slot of words": at("questions", 0)({"unit": [["a", "b"]]}),
    "transcript: a million questions": (
        lambda transcript: transcript.update(questions=transcript["questions"][:1] * 1_000_000)
    ),
    "transcript: sessions of words": at("sessions")([["a", 1, "x"]]),
    "transcript: sessions of two": at("sessions")([[0, 1]]),
    "transcript: a session twice": at("sessions")([[0, 1, "x"], [0, 1, "y"]]),
    "transcript: a session of 2^200": at("sessions")([[1 << 200, 1, "x"]]),
    "transcript: kinds that are none": at("kinds")(["no-such-question"]),
    "transcript: kinds of models": at("kinds")(["membership"]),
    "transcript: kinds twice": at("kinds")(["label", "label"]),
    "transcript: a title in HTML is no reason, its digest is": (
        lambda transcript: json.dumps(transcript | {"title": "<script>"})
    ),
    "transcript: files outside": at("files")({"../../x": {"sha256": "0" * 64, "bytes": 3}}),
    "transcript: an absolute file": at("files")({"/etc/passwd": {"sha256": "0" * 64, "bytes": 3}}),
    "transcript: no files": at("files")({}),
    "transcript: an id that is a path": lambda transcript: json.dumps(transcript | {"id": "../../x"}),
    "transcript: a key twice": lambda transcript: json.dumps(transcript)[:-1] + ', "batch": 1}',
    "transcript: a key twice within": textual('"clients": 3', '"clients": 3, "clients": 3'),
    "transcript: NaN": lambda transcript: json.dumps(transcript).replace('"batch": 1', '"batch": NaN'),
    "transcript: nested deep": lambda transcript: '{"plan": ' + "[" * 200_000,
    "transcript: empty": lambda transcript: "",
    "transcript: not UTF-8": lambda transcript: b"\xff\xfe{}",
    "transcript: a plan nested deep": textual('"plan": {', '"plan": {"a": ' + "[" * 5000 + "]" * 5000 + ","),
    "transcript: draws of 2^63": at("draws")({"dlg": 1 << 63}),
    "transcript: draws below zero": at("draws")({"dlg": -5}),
}  # fmt: skip
SEEN = {
    "view: empty": lambda data: b"",
    "view: truncated": lambda data: data[:-1000],
    "view: 10 GB claimed": lambda data: framed({"t0": entry(shape=(10 * GIB // 4,), span=(0, 10 * GIB))}, body()),
    "view: a header of 2^63": lambda data: struct.pack("<Q", 1 << 63) + data[8:],
    "view: no tree": lambda data: framed({"t0": entry()}, body()),
    "view: a tree that is no JSON": retold(lambda tree: "{"),
    "view: a tree that is null": retold(lambda tree: "null"),
    "view: a tree nested deep": retold(lambda tree: '{"list": [' * 30_000 + "]}" * 30_000),
    **{
        f"view: a tree nested {depth} deep": retold(partial(nested, depth)) for depth in (150, 300, 450, 700, 950)
    },
    "view: a header of 90 MB": lambda data: framed(b'{"__metadata__": {"tree": "' + b"[[],[]]," * 11_000_000 + b'"}}'),
    "view: gradients of another shape": retold(reshaped),
    "view: a number of 5000 digits": retold(lambda tree: '{"value": ' + "9" * 5000 + "}"),
    "view: a class that is none": retold(lambda tree: tree["list"].__setitem__(3, {"node": "os.system", "fields": []})),
    "view: a class of another shape": retold(
        lambda tree: tree["list"].__setitem__(3, {"node": "ppbench.federation.plan.Data", "fields": []})
    ),
    "view: data of words": retold(
        lambda tree: tree["list"].__setitem__(
            3, {"node": "ppbench.federation.plan.Data", "fields": [{"value": "a"}, {"value": 1 << 200}]}
        )
    ),
    "view: three parts": retold(lambda tree: tree["list"].pop()),
    "view: a tensor that is not there": retold(first_letter(6, {"tensor": "t9999"})),
    "view: a kind that is none": retold(lambda tree: {"exec": "1"}),
    "view: two kinds": retold(lambda tree: {"list": [], "tuple": []}),
    "view: a dict of lists": retold(lambda tree: {"dict": [[[], {"value": 1}]]}),
    "view: mail that is no list": retold(lambda tree: tree["list"].__setitem__(0, {"value": 5})),
    "view: mail of words": retold(lambda tree: tree["list"].__setitem__(0, {"list": [{"value": "abcdefg"}]})),
    "view: mail of two": retold(lambda tree: tree["list"].__setitem__(0, {"list": [{"list": [{"value": 1}] * 2}]})),
    "view: no mail": retold(lambda tree: tree["list"].__setitem__(0, {"list": []})),
    "view: a sender of words": retold(first_letter(3, {"value": "server"})),
    "view: a sender of 0.5": retold(first_letter(3, {"value": 0.5})),
    "view: a receiver of words": retold(first_letter(4, {"value": "me"})),
    "view: a receiver that is a list": retold(first_letter(4, {"list": []})),
    "view: sizes of words": retold(first_letter(5, {"value": "big"})),
    "view: a message of words": retold(partial(every_message, {"value": "x"})),
    "view: messages without tensors": retold(partial(every_message, {"dict": []})),
    "view: states of words": retold(lambda tree: tree["list"].__setitem__(1, {"list": [{"value": "abcde"}]})),
    "view: data of two probes": retold(lambda tree: tree["list"].__setitem__(2, {"list": [{"list": [{"value": 0}]}]})),
    "view: public that is none": retold(lambda tree: tree["list"].__setitem__(3, {"value": 3})),
}  # fmt: skip
THERE = {
    "folder: nothing": shutil.rmtree,
    "folder: a file": lambda there: (shutil.rmtree(there), there.write_text("x")),
    "folder: empty": lambda there: [path.unlink() for path in there.iterdir()],
    "folder: a pipe": lambda there: (shutil.rmtree(there), os.mkfifo(there)),
    "folder: JSON is a link": lambda there: replaced("transcript.json", lambda p: p.symlink_to("/etc/passwd"), there),
    "folder: JSON is a pipe": lambda there: replaced("transcript.json", os.mkfifo, there),
    "folder: JSON is a device": lambda there: replaced("transcript.json", lambda p: p.symlink_to("/dev/zero"), there),
    "folder: JSON of 10 GB": lambda there: sparse(there / "transcript.json", 10 * GIB),
    "folder: view is a link": lambda there: replaced("view.safetensors", lambda p: p.symlink_to("/etc/passwd"), there),
    "folder: view is a pipe": lambda there: replaced("view.safetensors", os.mkfifo, there),
    "folder: view is a folder": lambda there: replaced("view.safetensors", os.mkdir, there),
    "folder: view of 10 GB": lambda there: sparse(there / "view.safetensors", 10 * GIB),
    "folder: view is another's": lambda there: (there / "view.safetensors").write_bytes(packed(**right())),
}
TRANSCRIPTS |= {name: partial(edited, change) for name, change in TOLD.items()}
TRANSCRIPTS |= {name: partial(seen, change) for name, change in SEEN.items()}
TRANSCRIPTS |= {name: partial(place_of, change) for name, change in THERE.items()}


# -- the organizer's own files ----------------------------------------------------------------------------------------
def truth_with(change, home, folder):
    """Let `change` alter a copy of the organizer's folder: (truth, id) to nothing."""
    truth = shutil.copytree(home.truth, folder / "truth", ignore=shutil.ignore_patterns("cache"))
    change(truth, home.ids["dp"])
    (folder / "g.json").write_bytes(canonical_json(about(home.ids["dp"])))
    (folder / "g.safetensors").write_bytes(packed(**right()))
    return words(home.transcript("dp"), folder / "g.json", truth)


def on(name, act):
    """Return a change of one file of the truth."""
    return lambda truth, stem: act(truth / "truth" / name.replace("ID", stem))


def book(text):
    return lambda truth, stem: (truth / "ledger.jsonl").write_text(text)


def kept(**tensors):
    """Return a change of the tensors of the truth; None takes one away."""

    def act(path):
        from safetensors.torch import load

        whole = load(path.read_bytes()) | tensors
        path.write_bytes(save({name: value for name, value in whole.items() if value is not None}))

    return on("ID.safetensors", act)


def other_cell(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cell": "0" * 32}))


def foreign(truth, stem):
    (truth / "external").mkdir()
    (truth / "external" / "x").touch()


def nonce(path):
    path.write_text(path.read_text().replace('"nonce": "', '"nonce": "0')[:-1])


ORGANIZERS |= {
    name: partial(truth_with, change)
    for name, change in {
        "truth: no folder": lambda truth, stem: shutil.rmtree(truth),
        "truth: nothing": on("", shutil.rmtree),
        "truth: JSON is a pipe": on("ID.json", lambda p: (p.unlink(), os.mkfifo(p))),
        "truth: JSON is a link": on("ID.json", lambda p: (p.unlink(), p.symlink_to("/etc/passwd"))),
        "truth: JSON is damaged": on("ID.json", lambda p: p.write_text("{")),
        "truth: another nonce": on("ID.json", nonce),
        "truth: another cell": on("ID.json", other_cell),
        "truth: tensors are a pipe": on("ID.safetensors", lambda p: (p.unlink(), os.mkfifo(p))),
        "truth: tensors are truncated": on("ID.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-10])),
        "truth: tensors are empty": on("ID.safetensors", lambda p: p.write_bytes(b"")),
        "truth: no x": kept(x=None),
        "truth: another x": kept(x=torch.zeros(VICTIMS, 1, *SHAPE)),
        "truth: x of bfloat16": kept(x=torch.zeros(VICTIMS, 1, *SHAPE, dtype=torch.bfloat16)),
        "truth: another mean": kept(mean=torch.zeros(3, 3)),
        "truth: a mean of bfloat16": kept(mean=torch.zeros(*SHAPE, dtype=torch.bfloat16)),
        "truth: another gallery": kept(gallery=torch.zeros(5)),
        "truth: classes of another gallery": kept(classes=torch.zeros(3)),
        "book: a line that is none": book("{}\n"),
        "book: no JSON": book("x\n"),
        "book: an empty line": book("\n\n"),
        "book: nested deep": book("[" * 100_000 + "\n"),
        "book: not UTF-8": lambda truth, stem: (truth / "ledger.jsonl").write_bytes(b"\xff\xfe\n"),
        "book: a pipe": lambda truth, stem: os.mkfifo(truth / "ledger.jsonl"),
        "book: a link": lambda truth, stem: (truth / "ledger.jsonl").symlink_to("/etc/passwd"),
        "book: a folder": lambda truth, stem: (truth / "ledger.jsonl").mkdir(),
        "book: 10 GB": lambda truth, stem: sparse(truth / "ledger.jsonl", 10 * GIB),
        "external: a file": lambda truth, stem: (truth / "external").write_text("x"),
        "external: a link": lambda truth, stem: (truth / "external").symlink_to("/tmp"),
        "external: a link to results": lambda truth, stem: (truth / "external").symlink_to(truth),
        "external: somebody's folder": foreign,
        "records: damaged": lambda truth, stem: next((truth / "records").glob("*[0-9a-f].json")).write_text("{"),
    }.items()
}  # fmt: skip
EVERY = GUESSES | TRANSCRIPTS | ORGANIZERS
