"""Downloads that arrive whole or not at all: mirrors in order, resumed where they stopped, checked by contents.

A server is not trusted: it may redirect to https alone, or to where it was asked; what it sends is bounded in size and
time, whatever it says of its length.
"""

import hashlib
import http.client
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fastweights.utils.errors import UserError
from fastweights.utils.files import claim
from fastweights.utils.progress import Report, silent

PIECE = 2**18
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as cut."""
SLOWEST, HEAD_START = 10_000.0, 60.0
"""Bytes a second, on average, below which a connection counts as cut, once it has had so many seconds."""
TRIES, PAUSE = 5, 0.5
"""Attempts at one mirror, each resuming the last, and seconds before the second; each further pause is this longer."""
LARGEST = 2**28
"""Bytes; nothing that is downloaded here is nearly as large."""


class _Cut(Exception):
    """The connection ended early; what has arrived is worth keeping."""


class _Refused(Exception):
    """This mirror does not have the file."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to https, or to the same server by the same scheme, and nowhere else."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        try:
            target = urllib.parse.urljoin(req.full_url, headers.get("Location", ""))
            old, new = (urllib.parse.urlsplit(url) for url in (req.full_url, target))
            if new.scheme != "https" and (new.scheme, new.netloc) != (old.scheme, old.netloc):
                raise _Refused(f"it redirects to {_shown(target)}, which is neither https nor the same server")
            return super().http_error_302(req, fp, code, msg, headers)
        finally:
            fp.close()

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


_OPENER = urllib.request.OpenerDirector()
"""Knows http and https alone: no file:, no ftp:, no data:."""
for _handler in (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
    _Redirects,
):
    _OPENER.add_handler(_handler())


def _shown(url: str) -> str:
    """The beginning of an address, on one line."""
    return ascii(url[:80])[1:-1]


def fetch(urls: Sequence[str], target: Path, check: Callable[[Path], None], progress: Report = silent) -> None:
    """Download the file from the first mirror that has it, with contents that pass `check` (which raises UserError).

    Between attempts the part that has arrived is kept under another name, so that a later call resumes it; the file
    appears under its own name only when it is complete and checked.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        failures = []
        for url in urls:
            part = target.with_name(f".part-{hashlib.sha256(url.encode()).hexdigest()[:8]}-{target.name}")
            try:
                _from_mirror(url, part, target, check, progress)
                return
            except (_Cut, _Refused) as failure:
                failures.append(f"{url}: {failure}")
                if isinstance(failure, _Refused) or not part.stat().st_size:
                    part.unlink()
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror or error}).") from None
    raise UserError(
        f"{target.name} could not be downloaded ({'; '.join(failures)}); try again later to resume, or get the file by "
        "other means and hand it over."
    )


def _from_mirror(url: str, part: Path, target: Path, check: Callable[[Path], None], progress: Report) -> None:
    resumed = part.exists() and part.stat().st_size > 0
    with part.open("ab") as file:
        claim(file, f"another process is downloading {part}; let it finish.")
        # A resumed beginning may be of an older version of the file: it is then downloaded once more from the start.
        for fresh in (not resumed, True):
            _download(url, file, target.name, progress)
            file.flush()
            try:
                check(part)
                break
            except UserError as wrong:
                file.truncate(0)
                if fresh:
                    raise _Refused(f"wrong contents: {str(wrong).rstrip('.')}") from None
        part.replace(target)


def _download(url: str, file: BinaryIO, what: str, progress: Report) -> None:
    """Append to the file until it is complete."""
    for attempt in range(1, TRIES):
        try:
            return _append(url, file, what, progress)
        except _Cut:
            time.sleep(PAUSE * attempt)
    return _append(url, file, what, progress)


def _append(url: str, file: BinaryIO, what: str, progress: Report) -> None:
    have = file.seek(0, 2)
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "fastweights"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        with _answer(request) as response:
            if response.status != 206:  # the mirror starts from the beginning, so do we
                file.truncate(0)
                have = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise _Refused("another part of the file than the requested one")
            _copy(response, file, have, what, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # nothing after what we have: the check of contents decides
            return
        raise (_Cut if error.code >= 500 else _Refused)(f"HTTP {error.code}") from None
    except urllib.error.URLError as error:
        raise _Cut(f"no connection ({error.reason})") from None
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _Cut(f"connection cut ({str(error) or type(error).__name__})") from None
    except ValueError as error:  # an address, or a header, that is none
        raise _Refused(f"an answer that makes no sense ({error})") from None


def _answer(request: urllib.request.Request) -> http.client.HTTPResponse:
    """The beginning of an answer. In a thread: TIMEOUT is for each byte, and a server may send its headers forever."""
    answers: list[http.client.HTTPResponse | Exception] = []
    late = threading.Event()

    def ask() -> None:
        try:
            answers.append(_OPENER.open(request, timeout=TIMEOUT))
        except Exception as error:
            answers.append(error)
        if late.is_set() and isinstance(answers[0], http.client.HTTPResponse):
            answers[0].close()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HEAD_START)
    if not answers:
        late.set()
        raise _Cut(f"no answer within {HEAD_START:g} seconds")
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def _copy(response: http.client.HTTPResponse, file: BinaryIO, have: int, what: str, progress: Report) -> None:
    length = response.headers.get("Content-Length", "")
    total = have + int(length) if length.isascii() and length.isdecimal() else None
    if (total or 0) > LARGEST:
        raise _Refused(f"more than {LARGEST:,} bytes")
    began, before = time.monotonic(), have
    while piece := _read(response):
        if have + len(piece) > LARGEST:
            file.truncate(0)
            raise _Refused(f"more than {LARGEST:,} bytes")
        file.write(piece)
        have += len(piece)
        seconds = time.monotonic() - began
        if seconds > HEAD_START and have - before < SLOWEST * seconds:
            raise _Cut(f"too slow: {(have - before) / seconds:,.0f} bytes a second")
        progress(f"downloading {what}", have, total or have)
    if total is not None and have < total:
        raise _Cut(f"connection cut after {have:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(PIECE)  # what has arrived: a server that trickles is not waited for
    except (OSError, http.client.HTTPException) as error:  # here, so as not to be taken for errors of the disk
        raise _Cut(f"connection cut ({str(error) or type(error).__name__})") from None
