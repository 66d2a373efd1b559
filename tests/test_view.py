"""`ppbench view`: what its server sends, what it refuses, and how it ends."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from ppbench import commands as cli
from ppbench.claims.check import PAPER_CLAIMS
from ppbench.records.archive import pack_archive
from ppbench.records.store import Store
from ppbench.report.page.html import assets
from ppbench.report.page.live_page import LOOPBACK, LivePage, PageServer
from ppbench.report.page.live_page import _Server as Server

WAIT_S, KIND = 120, "reconstruction"


@pytest.fixture
def folder(fabricate, tmp_path):
    """A folder with two cells, a figure, and what nobody should be sent."""
    out = tmp_path / "results"
    for record in (fabricate("none", None, "dlg", KIND), fabricate("spn", 0.1, "dlg", KIND, control="alpha2")):
        Store(out).save(record)
    (out / "figures").mkdir()
    (out / "figures/tradeoff-x.svg").write_text("<svg/>")
    (out / "figures/private.txt").write_text("private")
    (out / "leaderboard.html").write_text("<script>planted</script>")
    (tmp_path / "secret.svg").write_text("secret")
    (out / "figures/link.svg").symlink_to(tmp_path / "secret.svg")
    return out


@contextmanager
def served(path):
    """Yield the port of a server of `path`, in a thread of this process."""
    server = PageServer(LivePage(path, PAPER_CLAIMS))
    thread = Thread(target=server._server.serve_forever)
    thread.start()
    try:
        yield server._server.server_port
    finally:
        server._server.shutdown()
        server._server.server_close()
        thread.join()


def ask(port, path="/", method="GET", **headers):
    """Return status, headers and body."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=WAIT_S)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_is_drawn_from_the_records_and_sent_with_the_policy_that_it_states(folder):
    with served(folder) as port:
        status, headers, body = ask(port)
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"planted" not in body and b"alpha2" in body, "what lies in the folder is not trusted"
        policy = headers["Content-Security-Policy"]
        assert policy == f"{assets().policy}; frame-ancestors 'none'" and str(assets().policy) in body.decode()
        assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["Server"].strip() == "ppbench"
        assert ask(port, method="HEAD") == (200, {**headers, "Date": ask(port, method="HEAD")[1]["Date"]}, b"")
        status, headers, body = ask(port, "/figures/tradeoff-x.svg")
        assert (status, body, headers["Content-Type"]) == (200, b"<svg/>", "image/svg+xml")
        assert "sandbox" in headers["Content-Security-Policy"] and "script" not in headers["Content-Security-Policy"]


REFUSED = (
    "/figures/", "/figures", "/figures/private.txt", "/figures/link.svg", "/figures/none.svg", "/records/",
    "/ppbench.json", "/leaderboard.html", "/../secret.svg", "/figures/../../secret.svg", "/figures/%2e%2e/x.svg",
    "/figures/..%2f..%2fsecret.svg", "//etc/passwd", "/figures//etc/passwd", "/figures/%00.svg", "tradeoff-x.svg",
    "http://localhost/", "/tradeoff-x.svg", "/figures/figures/tradeoff-x.svg",
)  # fmt: skip


def test_nothing_but_the_page_and_its_figures_is_sent(folder):
    with served(folder) as port:
        for path in REFUSED:
            status, headers, body = ask(port, path)
            assert status == 404 and headers["Content-Security-Policy"].startswith("default-src 'none'"), path
            assert body == b"There is the page, /, and its figures, /figures/NAME.\n", path


def test_other_methods_and_other_hosts_are_refused(folder):
    with served(folder) as port:
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"):
            status, headers, body = ask(port, method=method)
            assert (status, headers["Allow"], body) == (405, "GET, HEAD", b"Method Not Allowed.\n")
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost@evil", "", "0.0.0.0"):
            status, _, body = ask(port, Host=host)
            assert status == 403 and body.startswith(b"Only requests to localhost"), host
        for host in ("localhost", "LOCALHOST:8000", f"127.0.0.1:{port}"):
            assert ask(port, Host=host)[0] == 200, host
        for text in (b"GET / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"):
            with socket.create_connection((LOOPBACK, port), WAIT_S) as raw:
                raw.sendall(text)
                assert raw.recv(100).startswith(b"HTTP/1.0 403 ")


def test_new_records_are_on_the_page_and_unchanged_ones_are_not_drawn_again(folder, fabricate, monkeypatch):
    with served(folder) as port:
        before = ask(port)[2]
        Store(folder).save(fabricate("dp", 0.5, "dlg", KIND, control="sigma"))
        after = ask(port)[2]
        assert before.count(b"sigma") < after.count(b"sigma")
        monkeypatch.setattr(LivePage, "_draw", lambda self: pytest.fail("drawn again"))
        assert ask(port)[2] == after
        monkeypatch.undo()
        shutil.rmtree(folder / "records")
        status, _, body = ask(port)
        assert status == 503 and b"holds no records that can be read" in body


def test_an_archive_and_a_folder_that_cannot_be_written_are_shown(folder, tmp_path):
    page = LivePage(folder, PAPER_CLAIMS).html()
    (folder / "figures/link.svg").unlink()
    pack_archive(folder, tmp_path / "results.zip")
    with served(tmp_path / "results.zip") as port:
        assert ask(port)[2] == page and ask(port, "/figures/tradeoff-x.svg")[0] == 404
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for path in (folder, *before):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with served(folder) as port:
            assert ask(port)[2] == page
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "nothing is written"
    finally:
        for path in (folder, *before):
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_browser_that_went_away_is_no_news_and_an_error_of_ours_is(capfd):
    with Server((LOOPBACK, 0), None) as server:
        for error, heard in ((BrokenPipeError(), False), (ZeroDivisionError("planted"), True)):
            try:
                raise error
            except (BrokenPipeError, ZeroDivisionError):
                server.handle_error(None, (LOOPBACK, 1))
            assert ("planted" in capfd.readouterr().err) == heard


def refusal(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["ppbench", "view", "--no-browser", *words])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr().err


def test_what_cannot_be_shown_ends_in_a_sentence(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, err = refusal(monkeypatch, capsys)
    assert code == 2 and err.startswith("ppbench: ppbench-results is no folder and no archive of results;")
    code, err = refusal(monkeypatch, capsys, str(tmp_path))
    assert code == 2 and "holds files that are not ppbench's" in err
    (tmp_path / "empty").mkdir()
    code, err = refusal(monkeypatch, capsys, "empty")
    assert (code, err) == (2, "ppbench: empty holds no records that can be read; give the --out of an evaluation.\n")
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        code, err = refusal(monkeypatch, capsys, str(folder), "--port", str(port))
    assert code == 2
    assert err == f"ppbench: Port {port} of 127.0.0.1 is in use; give another --port, or none for a free one.\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly)]
)
def test_it_opens_the_browser_at_its_address_and_ends_with_ctrl_c(folder, tmp_path, number, code):
    browser, place = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {place}.part && mv {place}.part {place}\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "ppbench", "view", str(folder)]
    about = {**os.environ, "BROWSER": f"{browser} %s"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=about) as running:
        address, _, rest = running.stdout.readline().partition(" ")
        port = int(address.removeprefix(f"http://{LOOPBACK}:").removesuffix("/"))
        assert rest == f"shows {folder}; Ctrl-C ends it.\n" and ask(port)[0] == 200
        running.send_signal(number)
        _, err = running.communicate(timeout=WAIT_S)
    assert running.returncode == code and ("terminated" in err or not err), err
    if number == signal.SIGINT:
        assert Path(place).read_text() == address


def test_a_browser_shows_it_without_a_complaint(folder):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with served(folder) as port, playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page, heard = browser.new_page(), []
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(f"http://localhost:{port}/")
        page.wait_for_selector("#b1 .tabulator-row", timeout=WAIT_S * 1000)
        browser.close()
    assert [text for text in heard if "404" not in text] == [], "only a missing icon may be named"
