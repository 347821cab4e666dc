"""Given a server that cuts, lies and forgets, what arrives under its name is whole and right, or does not arrive."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fastweights.data import download
from fastweights.utils.errors import UserError

from .lookalikes import leftovers

DATA = bytes(range(256)) * 2000


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.over = threading.Event()
        self.cuts = 0
        """How many answers are still to be cut in the middle."""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        kind = self.path.strip("/")
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        if kind in ("404", "500"):
            return self.send_error(int(kind))
        if kind in ODD:
            return ODD[kind](self)
        body = b"<html>please log in</html>" if kind == "wrong" else DATA
        first = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and kind != "no-ranges" else 0
        if first and first >= len(body):
            return self.send_error(416)
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first + (kind == 'shifted')}-{len(body) - 1}/{len(body)}")
        rest = body[first:]
        if kind != "no-length":
            self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if self.server.cuts:
            self.server.cuts -= 1
            rest = rest[: min(len(rest) // 2, 100_000)]
        self.wfile.write(rest)

    def log_message(self, *_: object) -> None:
        pass


def redirect(to: str):
    def answer(handler: Handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", to.format(port=handler.server.server_port))
        handler.end_headers()

    return answer


def claim(length: str, body: bytes = DATA):
    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", length)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def forever(piece: bytes, pause: float, *, in_header: bool = False):
    """An answer without an end, which stops when nobody listens any more or the test is over."""

    def answer(handler: Handler) -> None:
        if in_header:
            handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
        else:
            handler.send_response(200)
            handler.end_headers()
        with suppress(OSError):
            while not handler.server.over.wait(pause):
                handler.wfile.write(piece)

    return answer


ODD = {
    "to-file": redirect("file:///etc/hostname"),
    "to-data": redirect("data:text/plain,hello"),
    "to-ftp": redirect("ftp://127.0.0.1/x"),
    "elsewhere": redirect("http://localhost:{port}/good"),
    "other-port": redirect("http://127.0.0.1:1/good"),
    "nonsense": redirect("http://[::1/good"),
    "here": redirect("/good"),
    "in-circles": redirect("/in-circles"),
    "claims-more": claim(str(len(DATA) + 1)),
    "claims-less": claim(str(len(DATA) - 1)),
    "claims-all": claim(str(10**15)),
    "claims-nonsense": claim("-5"),
    "endless": forever(bytes(10_000), 0),
    "trickle": forever(b"x", 0.01),
    "trickling-header": forever(b"x", 0.01, in_header=True),
}
"""Answers of servers that are broken, or worse."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "PAUSE", 0)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def check(path):
    if path.read_bytes() != DATA:
        raise UserError("that is not it.")


def test_a_file_arrives_with_progress(server, tmp_path, watcher):
    seen, progress = watcher
    download.fetch([server.url("good")], tmp_path / "sub" / "x.zip", check, progress)
    assert (tmp_path / "sub" / "x.zip").read_bytes() == DATA
    assert leftovers(tmp_path) == ["sub/x.zip"]
    assert seen[-1] == ("downloading x.zip", len(DATA), len(DATA))


@pytest.mark.parametrize("kind", ["good", "no-ranges"])
def test_a_cut_download_goes_on(server, tmp_path, kind):
    server.cuts = 2
    download.fetch([server.url(kind)], tmp_path / "x", check)
    assert (tmp_path / "x").read_bytes() == DATA
    assert len(server.ranges) == 3
    assert server.ranges[1] == "bytes=100000-"


def test_an_interrupted_download_goes_on_in_another_run(server, tmp_path):
    server.cuts = download.TRIES
    with pytest.raises(
        UserError,
        match=r"x could not be downloaded .*connection cut after .* to resume, or .* hand it over\.$",
    ):
        download.fetch([server.url("good")], tmp_path / "x", check)
    assert not (tmp_path / "x").exists()
    assert len(leftovers(tmp_path)) == 1
    server.ranges.clear()
    download.fetch([server.url("good")], tmp_path / "x", check)
    assert server.ranges == [f"bytes={sum(_halves())}-"]
    assert leftovers(tmp_path) == ["x"]


def _halves() -> list[int]:
    got: list[int] = []
    for _ in range(download.TRIES):
        got.append(min((len(DATA) - sum(got)) // 2, 100_000))
    return got


@pytest.mark.parametrize("bad", ["404", "500", "wrong"])
def test_the_next_mirror_serves_where_one_fails(server, tmp_path, bad):
    download.fetch([server.url(bad), server.url("good")], tmp_path / "x", check)
    assert (tmp_path / "x").read_bytes() == DATA


def test_wrong_bytes_are_thrown_away(server, tmp_path):
    with pytest.raises(UserError, match=r"wrong contents: that is not it; .*404"):
        download.fetch([server.url("wrong"), server.url("404")], tmp_path / "x", check)
    assert leftovers(tmp_path) == []


def test_an_existing_file_survives_a_failed_download(server, tmp_path):
    (tmp_path / "x").write_bytes(b"old but whole")
    with pytest.raises(UserError):
        download.fetch([server.url("wrong")], tmp_path / "x", check)
    assert (tmp_path / "x").read_bytes() == b"old but whole"


@pytest.mark.parametrize("stale", [b"older version" * 1000, DATA + b"too long"])
def test_a_stale_beginning_is_not_kept(server, tmp_path, stale):
    url = server.url("good")
    (tmp_path / f".part-{hashlib.sha256(url.encode()).hexdigest()[:8]}-x").write_bytes(stale)
    download.fetch([url], tmp_path / "x", check)
    assert server.ranges == [f"bytes={len(stale)}-", None]
    assert (tmp_path / "x").read_bytes() == DATA
    assert leftovers(tmp_path) == ["x"]


def test_a_server_that_answers_with_another_range_is_not_believed(server, tmp_path):
    server.cuts = 1
    with pytest.raises(UserError, match="another part of the file"):
        download.fetch([server.url("shifted")], tmp_path / "x", check)


def test_without_a_length_the_contents_decide(server, tmp_path):
    server.cuts = 1
    with pytest.raises(UserError, match="wrong contents"):
        download.fetch([server.url("no-length")], tmp_path / "x", check)
    download.fetch([server.url("no-length")], tmp_path / "x", check)
    assert (tmp_path / "x").read_bytes() == DATA


def test_nobody_there(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0)
    with pytest.raises(UserError, match="no connection"):
        download.fetch(["http://127.0.0.1:1/x"], tmp_path / "x", check)


def test_too_much_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 1000)
    with pytest.raises(UserError, match="more than 1,000 bytes"):
        download.fetch([server.url("good")], tmp_path / "x", check)


def test_two_downloads_of_one_file_do_not_mix(server, tmp_path):
    def meanwhile(path):
        with pytest.raises(UserError, match="another process"):
            download.fetch([server.url("good")], tmp_path / "x", check)
        check(path)

    download.fetch([server.url("good")], tmp_path / "x", meanwhile)
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("kind", ["to-file", "to-data", "to-ftp", "elsewhere", "other-port"])
def test_a_redirect_to_anything_but_https_or_the_same_server_is_refused(server, tmp_path, kind):
    with pytest.raises(UserError, match=r"it redirects to .*, which is neither https nor the same server"):
        download.fetch([server.url(kind)], tmp_path / "x", check)
    assert leftovers(tmp_path) == []
    assert len(server.ranges) == 1


def test_a_redirect_within_a_server_is_followed(server, tmp_path):
    download.fetch([server.url("here")], tmp_path / "x", check)
    assert (tmp_path / "x").read_bytes() == DATA


@pytest.mark.parametrize("kind", ["nonsense", "in-circles"])
def test_a_redirect_that_leads_nowhere_is_one_sentence(server, tmp_path, kind):
    with pytest.raises(UserError, match="x could not be downloaded"):
        download.fetch([server.url(kind)], tmp_path / "x", check)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:,hello", "nothing"])
def test_only_the_web_is_asked(tmp_path, url):
    with pytest.raises(UserError, match="x could not be downloaded"):
        download.fetch([url], tmp_path / "x", check)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("kind", ["claims-more", "claims-less"])
def test_a_server_that_lies_about_a_length_delivers_nothing(server, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(download, "TRIES", 2)
    with pytest.raises(UserError, match=r"connection cut after|wrong contents"):
        download.fetch([server.url(kind)], tmp_path / "x", check)
    assert not (tmp_path / "x").exists()


def test_a_length_that_is_none_is_not_believed(server, tmp_path):
    download.fetch([server.url("claims-nonsense")], tmp_path / "x", check)
    assert (tmp_path / "x").read_bytes() == DATA


def test_too_much_is_refused_as_soon_as_it_is_announced(server, tmp_path):
    with pytest.raises(UserError, match=r"more than [\d,]+ bytes"):
        download.fetch([server.url("claims-all")], tmp_path / "x", check)
    assert leftovers(tmp_path) == []


def test_an_answer_without_end_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 100_000)
    with pytest.raises(UserError, match="more than 100,000 bytes"):
        download.fetch([server.url("endless")], tmp_path / "x", check)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("kind", "why"), [("trickle", "too slow: "), ("trickling-header", "no answer within 0.3 ")])
def test_a_server_that_trickles_is_not_waited_for(server, tmp_path, monkeypatch, kind, why):
    monkeypatch.setattr(download, "TRIES", 2)
    monkeypatch.setattr(download, "HEAD_START", 0.3)
    with pytest.raises(UserError, match=why):
        download.fetch([server.url(kind)], tmp_path / "x", check)
    assert not (tmp_path / "x").exists()
