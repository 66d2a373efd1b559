"""Tutorials, followed to the letter: their files are written and their commands run, in the order in which they stand.

- A line that ends in "`PATH`:" and a fence below it are a file to save.
- An `sh` fence is typed, in one shell from the first to the last.
- A fence without a language below it is what came out. Lines may be left out where "..." stands.
- A `console` fence cannot be run on one machine: nothing is done with it.

`python tests/tutorials.py PAGE...` follows pages and writes the figures that came out into what they quote.
"""

import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from wheelhouse import wheelhouse

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIRST = {"tutorial-attack.md": ("tutorial-defense.md", "## 2. ")}
"""Pages that go on from another, and the heading there before which they do."""
FENCE = re.compile(
    r"(?:^.*`(?P<path>[^`\n]+)`[^`\n]*:\n+)?^```(?P<language>\w*)\n(?P<text>(?:.*\n)*?)```$", re.MULTILINE
)
TIME = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:-\d+(?:\.\d+)?)?(?= (?:s|ms|min)\b|x\b)|\d+:\d\d:\d\d")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?")
NEAR, SHARE = 1.0, 0.1
"""How far a figure may lie from the quoted one: so much, or this share of it. Processors round differently."""


@dataclass(frozen=True)
class Block:
    """One fence of a page. quoted: what a page says came out of it, "" where it says nothing."""

    page: str
    line: int
    language: str
    path: str
    text: str
    quoted: str = ""

    @property
    def place(self):
        return f"{self.page}:{self.line}"


def blocks(page, until=""):
    """Return the fences of a page in order, up to a heading; what commands print is with the commands."""
    text, result = (DOCS / page).read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text.partition(f"\n{until}")[0] if until else text):
        line = text[: match.start("text")].count("\n")
        if match["language"]:
            result.append(Block(page, line, match["language"], match["path"] or "", match["text"]))
        else:
            assert result and result[-1].language == "sh" and not result[-1].quoted, f"{page}:{line}: of what is this?"
            result[-1] = replace(result[-1], quoted=match["text"])
    return result


def script(page, folder, until=""):
    """Return the shell script of a page, and its blocks of commands; what each prints goes to folder/N."""
    every = [*(blocks(*FIRST[page]) if page in FIRST else ()), *blocks(page, until)]
    lines, typed = ["set -e"], []
    for block in every:
        if block.language == "sh":
            lines += [f"echo '{block.place}' > {folder}/at", "{", block.text, f"}} > {folder}/{len(typed)} 2>&1"]
            typed.append(block)
        elif block.language != "console":
            assert block.path, f"{block.place}: no line above says where this is saved"
            lines += [f"cat > '{block.path}' <<'END OF FILE'\n{block.text}END OF FILE"]
    return "\n".join(lines), typed


def follow(page, home, until=""):
    """Follow a page, up to a heading, in an empty folder of `home`; return its commands, each with what it printed.

    AssertionError where a command fails, with what was printed.
    """
    printed, work = home / "printed", home / "work"
    for folder in (printed, work):
        folder.mkdir()
    wheels = wheelhouse(home / "wheels")
    text, typed = script(page, printed, until)
    done = subprocess.run(["bash", "-c", text], cwd=work, env=environment(home, wheels), capture_output=True, text=True)
    outputs = [path.read_text() for path in (printed / str(place) for place in range(len(typed))) if path.exists()]
    at = (printed / "at").read_text().strip()
    assert not done.returncode, f"{at}: exit code {done.returncode}\n{outputs[-1]}\n{done.stderr}"
    return list(zip(typed, outputs, strict=True))


def environment(home, wheels):
    """Return the variables of somebody who has Python and nothing else; pip finds stand-ins, and no network."""
    (home / "bin").mkdir()  # a Python's own folder may hold commands that were installed into it
    (home / "bin/python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))
    pip = {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": os.devnull, "DISABLE_PIP_VERSION_CHECK": "1"}
    variables = {"PATH": f"{home}/bin:/usr/bin:/bin", "HOME": str(home), "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    return {**variables, **{f"PIP_{name}": value for name, value in pip.items()}}


def words(text):
    """Return the words of a text: without its times, rules and bullets, however wide its lines and columns are."""
    return re.sub(r"[─━]{3,}|^\s*[•*] ", " ", TIME.sub("TIME", text), flags=re.MULTILINE).split()


def same(quoted, printed):
    """Return whether two words say the same: letter by letter, and figures to their last digits."""
    if shape(quoted) != shape(printed):
        return False
    pairs = zip(map(float, NUMBER.findall(quoted)), map(float, NUMBER.findall(printed)), strict=True)
    return all(math.isclose(a, b, rel_tol=SHARE, abs_tol=NEAR) for a, b in pairs)


def shape(text):
    """Return a text without its figures."""
    return NUMBER.sub("#", text)


def place(part, printed, alike):
    """Return where words first stand in others; -1 where they do not. alike: whether two words are the same."""
    starts = range(len(printed) - len(part) + 1)
    return next((at for at in starts if all(map(alike, part, printed[at : at + len(part)]))), -1)


def lacking(block, printed):
    """Return the parts of what a page quotes that did not come out, in this order; "..." stands for anything."""
    left, wrong = words(printed), []
    for text in filter(None, map(str.strip, block.quoted.split("..."))):
        part = words(text)
        at = place(part, left, same)
        if at < 0:
            wrong.append(f"{block.place}: {text}")
        else:
            left = left[at + len(part) :]
    return wrong


def requoted(block, printed):
    """Return what a page should quote: its words, with the figures that stand among the same words in what came out."""
    result, parts = printed.split(), re.split(r"(\.\.\.)", block.quoted)
    for number, text in enumerate(parts):
        at = place(text.split(), result, lambda one, other: shape(one) == shape(other))
        if text.strip(". \n") and at >= 0:
            figures = iter(NUMBER.findall(" ".join(result[at : at + len(text.split())])))
            parts[number] = NUMBER.sub(lambda _, left=figures: next(left), text)
    return "".join(parts)


def main(pages):
    """Follow pages, write the figures that came out into them, and print all that came out and what differs still."""
    for page in pages:
        with tempfile.TemporaryDirectory() as home:
            for block, printed in follow(page, Path(home)):
                print(f"--- {block.place}\n{block.text}---\n{printed}")
                if lacking(block, printed):
                    better = replace(block, quoted=requoted(block, printed))
                    text = (DOCS / block.page).read_text(encoding="utf-8")
                    (DOCS / block.page).write_text(text.replace(block.quoted, better.quoted), encoding="utf-8")
                    print("".join(f"differs: {part}\n" for part in lacking(better, printed)))


if __name__ == "__main__":
    main(sys.argv[1:])
