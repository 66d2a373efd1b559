"""Wheels that stand in for packages: `pip install` as people type it, in an empty environment, without a network.

A stand-in has the name, version, requirements and entry points of a distribution that this environment has; instead of
its files it brings a `.pth` line to a folder of links to them. So pip resolves and installs in earnest, a command or a
module is there only if a requirement names its distribution, and nobody downloads torch.
"""

import base64
import hashlib
import importlib
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ppbench.base.registry import DISTRIBUTION
from ppbench.base.version import __version__

ROOT = Path(__file__).resolve().parent.parent

EXTRAS = {DISTRIBUTION: {""}, "pytest": {""}, "setuptools": {""}}
"""What people are told to install, with the extras that they name."""
WHEEL = "Wheel-Version: 1.0\nGenerator: wheelhouse\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def wheelhouse(folder):
    """Fill a folder with stand-ins of what people install and of all that this requires; return the folder.

    The checkout is not read through the installed package's metadata, which may be old, but through its own project.
    """
    left, made = list(EXTRAS), set()
    while left:
        name = canonicalize_name(left.pop())
        if name in made:
            continue
        made.add(name)
        version, requires, entries, parts = checkout() if name == DISTRIBUTION else installed(name)
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
        lines += [f"Requires-Dist: {requirement}\n" for requirement in requires]
        lines += [f"Provides-Extra: {extra}\n" for extra in sorted(EXTRAS.get(name, set()) - {""})]
        write(folder, name, version, {"METADATA": "".join(lines), "entry_points.txt": entries}, parts)
        left += [requirement.name for requirement in requires]
    return folder


def checkout():
    """Return version, requirements, entry points and top-level parts of the checkout."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"console_scripts": told["scripts"], **told["entry-points"]}
    entries = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in groups.items())
    return __version__, wanted(DISTRIBUTION, told["dependencies"]), entries, [ROOT / "ppbench", ROOT / "ppbench_fl.py"]


def installed(name):
    """Return the same of a distribution of this environment."""
    found = metadata.distribution(name)
    tops = {Path(file).parts[0] for file in found.files or () if file.suffix != ".pyc"}
    parts = [found.locate_file(top) for top in sorted(tops) if not top.startswith("..") and "-info" not in top]
    return found.version, wanted(name, found.requires or ()), found.read_text("entry_points.txt") or "", parts


def wanted(name, requirements):
    """Return the requirements that hold here, of the extras that are asked for."""
    every = [Requirement(text) for text in requirements]
    extras = EXTRAS.get(name, {""})
    return [one for one in every if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def write(folder, name, version, info, parts):
    """Write the wheel of one stand-in, and the folder of links that it leads to."""
    links, escaped = folder / "links" / name, name.replace("-", "_")
    links.mkdir(parents=True)
    for part in parts:
        (links / Path(part).name).symlink_to(part)
    files = {f"{escaped}_stand_in.pth": f"{links}\n"}
    files |= {f"{escaped}-{version}.dist-info/{file}": text for file, text in {**info, "WHEEL": WHEEL}.items()}
    record = f"{escaped}-{version}.dist-info/RECORD"
    rows = [f"{file},sha256={digest(text)},{len(text.encode())}\n" for file, text in files.items()]
    with zipfile.ZipFile(folder / f"{escaped}-{version}-py3-none-any.whl", "w") as wheel:
        for file, text in {**files, record: "".join([*rows, f"{record},,\n"])}.items():
            wheel.writestr(file, text)


def digest(text):
    """Return the digest of a file as a wheel's record writes it."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
