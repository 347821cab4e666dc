"""Downloads that arrive whole or not at all: mirrors in order, resumed where they were cut, checked by contents."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fastweights.data.progress import Report, silent
from fastweights.errors import UserError
from fastweights.files import claim

PIECE = 2**18
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as cut."""
TRIES = 5
"""Attempts at one mirror; each goes on where the last was cut."""
PAUSE = 0.5
"""Seconds before the second attempt; before each further one, as many more."""
LARGEST = 2**31
"""Bytes; nothing that is downloaded here is nearly as large."""


class _Cut(Exception):
    """The connection ended early; what has arrived is worth keeping."""


class _Refused(Exception):
    """This mirror does not have the file."""


def fetch(urls: Sequence[str], target: Path, check: Callable[[Path], None], progress: Report = silent) -> None:
    """Download the file from the first mirror that has it, with contents that pass `check` (which raises UserError).

    What has arrived is kept under another name between attempts, so that an interrupted download goes on later; under
    its own name the file appears only whole and checked.
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
        f"{target.name} could not be downloaded ({'; '.join(failures)}); try again later to go on where it stopped, or "
        "get it by other means and hand it over with --from."
    )


def _from_mirror(url: str, part: Path, target: Path, check: Callable[[Path], None], progress: Report) -> None:
    resumed = part.exists() and part.stat().st_size > 0
    with _locked(part) as file:
        # A resumed beginning may stem from an older version of the file: it is then fetched once more, from nothing.
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


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    with part.open("ab") as file:
        claim(file, f"another process is downloading {part}; let it finish.")
        yield file


def _download(url: str, file: BinaryIO, what: str, progress: Report) -> None:
    """Append to the file until the mirror's is there whole."""
    for attempt in range(1, TRIES + 1):
        try:
            return _append(url, file, what, progress)
        except _Cut:
            if attempt == TRIES:
                raise
            time.sleep(PAUSE * attempt)


def _append(url: str, file: BinaryIO, what: str, progress: Report) -> None:
    have = file.seek(0, 2)
    request = urllib.request.Request(url, headers={"User-Agent": "fastweights"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            if response.status != 206:  # the mirror starts from the beginning, so do we
                file.truncate(0)
                have = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise _Refused("another part of the file than the one asked for")
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            _copy(response, file, have, total, what, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing after what we have: the check of contents decides
            return
        raise (_Cut if error.code >= 500 else _Refused)(f"HTTP {error.code}") from None
    except urllib.error.URLError as error:
        raise _Cut(f"no connection ({error.reason})") from None
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _Cut(f"connection cut ({str(error) or type(error).__name__})") from None


def _copy(
    response: http.client.HTTPResponse, file: BinaryIO, have: int, total: int | None, what: str, progress: Report
) -> None:
    while piece := _read(response):
        file.write(piece)
        have += len(piece)
        if have > LARGEST:
            file.truncate(0)
            raise _Refused(f"more than {LARGEST:,} bytes")
        progress(f"downloading {what}", have, total or have)
    if total is not None and have < total:
        raise _Cut(f"connection cut after {have:,} of {total:,} bytes")


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(PIECE)
    except (OSError, http.client.HTTPException) as error:  # told apart here from errors of the disk
        raise _Cut(f"connection cut ({str(error) or type(error).__name__})") from None
