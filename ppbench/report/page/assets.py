"""Scripts and style sheets that go into the page: our own, and third-party builds kept in `vendor/` with their digests.

The page's content security policy allows a script by its digest alone, so what stands in the file is what runs.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"
SCRIPT, STYLE = VENDOR / "tabulator.min.js", VENDOR / "tabulator_simple.min.css"
OWN = (TEMPLATES / "tables.js", TEMPLATES / "page.js")
_MAP = re.compile(r"^//# sourceMappingURL=.*$|/\*# sourceMappingURL=.*?\*/", re.MULTILINE)


@dataclass(frozen=True)
class Assets:
    """What a page carries. scripts: in the order in which they run; digests: of each, as a policy names them."""

    scripts: tuple[Markup, ...]
    digests: tuple[str, ...]
    style: Markup


def digest(script: str) -> str:
    """Return the source expression of a content security policy that allows `script`, e.g. "sha256-...="."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@lru_cache(maxsize=1)
def assets() -> Assets:
    """Return the scripts and the style of a page; source maps, which a browser might ask for, are not named in them.

    Raises ValueError where a script would end its own element: an update of `vendor/` that cannot be inlined.
    """
    script, style = (_MAP.sub("", path.read_text(encoding="utf-8")).strip() for path in (SCRIPT, STYLE))
    scripts = (script, "\n".join(path.read_text(encoding="utf-8") for path in OWN))
    if any(re.search(r"</script|<!--", one, re.IGNORECASE) for one in scripts):
        raise ValueError("a script holds '</script' or '<!--' and cannot stand inside a page")
    own = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    return Assets(tuple(map(Markup, scripts)), tuple(map(digest, scripts)), Markup(f"{style}\n{own}"))
