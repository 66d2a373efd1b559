"""The page of results through a local server, drawn from the records again whenever they change: `ppbench view`.

Nothing is written, so archives, folders that may not be written, and folders that a sweep fills are served alike. The
address is of the loopback interface: of this machine, but of all its users. A page of another site must not read it:
requests whose Host is not local (DNS rebinding) are refused, and answers are of this origin alone. A
`leaderboard.html` that lies in the folder is never served: whoever made it could have put a script in it.
"""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import unquote

from ppbench.base.errors import UsageError
from ppbench.base.files import kind_of, listing
from ppbench.records.store import TIMES_FOLDER, open_results
from ppbench.report.page.board import loaded_records, page_of
from ppbench.report.page.html import FIGURE_FILE, assets
from ppbench.report.page.profiles import PaperClaims

LOOPBACK = "127.0.0.1"
_LOCAL = re.compile(rf"(?:localhost|{re.escape(LOOPBACK)})(?::\d{{1,5}})?", re.IGNORECASE)
"""Hosts that a request may name; any port, as a tunnel has another one."""
_FOR_FIGURES = "default-src 'none'; style-src 'unsafe-inline'; sandbox; frame-ancestors 'none'"
_FOR_TEXT = "default-src 'none'; frame-ancestors 'none'"
_ALWAYS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",  # originals of victims are on the page
}
_SECONDS = 30  # after which a silent connection is closed


@dataclass(frozen=True)
class _Answer:
    """What is sent. policy: the content security policy."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    policy: str = _FOR_TEXT
    status: HTTPStatus = HTTPStatus.OK


class LivePage:
    """The page of a folder or an archive, drawn anew when a file of the results has changed since it was drawn."""

    def __init__(self, path: Path, claims: PaperClaims) -> None:
        """Draw the page of `path`. Raises UsageError: no results are there, or none can be read."""
        self.path, self._claims = path, claims
        self._lock = Lock()
        self._state, self._drawn = self._files(), self._draw()

    def html(self) -> bytes:
        """Return the page as it is now, in UTF-8. Raises UsageError: no record can be read any more."""
        with self._lock:
            state = self._files()  # before the records are read: what is written meanwhile is drawn by the next call
            if state != self._state:
                self._drawn, self._state = self._draw(), state
            return self._drawn

    def figure(self, name: str) -> bytes | None:
        """Return a file of figures/ by its name, None without such a file; links are not followed."""
        if not FIGURE_FILE.fullmatch(name):
            return None
        with suppress(OSError):
            return open_results(self.path).files.read(f"figures/{name}")
        return None

    def _draw(self) -> bytes:
        store = open_results(self.path)
        with loaded_records(store) as (records, problems):
            if not records:
                raise UsageError(f"{self.path} holds no records that can be read; give the --out of an evaluation.")
            return page_of(store, records, problems, self._claims).html().encode()

    def _files(self) -> frozenset[tuple[str, int, int]]:
        """Return name, time and size of every file that the page may depend on."""
        folders = [self.path, self.path / "records", self.path / TIMES_FOLDER]
        files = [path for folder in folders if kind_of(folder) == "folder" for path in listing(folder)]
        state = set()
        for path in files or [self.path]:
            with suppress(OSError):  # the temporary file of a running sweep is gone
                about = path.stat()
                state.add((str(path), about.st_mtime_ns, about.st_size))
        return frozenset(state)


class _Server(ThreadingHTTPServer):
    """Threads, as a browser opens connections that it may never use."""

    daemon_threads = True
    page: LivePage

    def handle_error(self, request: object, client_address: object) -> None:
        """Report what a handler raised, but not that a browser went away."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page and its figures; everything else is refused in a line of text."""

    server: _Server
    server_version, sys_version = "ppbench", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        """Answer with headers and body."""
        self._send(self._answer())

    def do_HEAD(self) -> None:
        """Answer with the headers of GET."""
        self._send(self._answer())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what the base class refuses: requests that are malformed, and all other methods."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send(_refusal(status, f"{status.phrase}."))

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the terminal shows the address."""

    def _answer(self) -> _Answer:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):
            return _refusal(HTTPStatus.FORBIDDEN, f"Only requests to localhost or {LOOPBACK} are answered.")
        path = unquote(self.path.partition("?")[0])
        try:
            if path == "/":
                policy = f"{assets().policy}; frame-ancestors 'none'"
                return _Answer(self.server.page.html(), "text/html; charset=utf-8", policy)
            figure = self.server.page.figure(path.removeprefix("/figures/"))
        except UsageError as error:  # the folder was moved away, or its records are damaged now
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        if figure is None or not path.startswith("/figures/"):
            return _refusal(HTTPStatus.NOT_FOUND, "There is the page, /, and its figures, /figures/NAME.")
        return _Answer(figure, "image/svg+xml" if path.endswith(".svg") else "image/png", _FOR_FIGURES)

    def _send(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        about = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body))}
        allowed = {"Allow": "GET, HEAD"} if answer.status == HTTPStatus.METHOD_NOT_ALLOWED else {}
        for name, value in {**about, **allowed, "Content-Security-Policy": answer.policy, **_ALWAYS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)


def _refusal(status: HTTPStatus, sentence: str) -> _Answer:
    return _Answer(f"{sentence}\n".encode(), status=status)


class PageServer:
    """A server of a page that listens once it is made. address: of the page."""

    def __init__(self, page: LivePage, port: int = 0) -> None:
        """Listen on a port of 127.0.0.1, 0: a free one. Raises UsageError: the port cannot be used."""
        try:
            self._server = _Server((LOOPBACK, port), _Handler)
        except OSError as cause:
            why = "is in use" if cause.errno == errno.EADDRINUSE else f"cannot be used ({cause.strerror})"
            raise UsageError(
                f"Port {port} of {LOOPBACK} {why}; give another --port, or none for a free one."
            ) from cause
        self._server.page = page
        self.address = f"http://{LOOPBACK}:{self._server.server_port}/"

    def run(self, announce: Callable[[], None]) -> None:
        """Answer requests until Ctrl-C, which is how this ends: it does not raise KeyboardInterrupt.

        announce: called once, as soon as Ctrl-C ends it so.
        """
        with self._server, _interrupts(), suppress(KeyboardInterrupt):
            announce()
            self._server.serve_forever()


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt past `ppbench.base.errors.stopping`, for which it is a failure."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
