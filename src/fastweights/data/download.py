"""Downloads that arrive whole or not at all: mirrors in order, resumed where they stopped, checked by contents."""

import hashlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from fastweights.utils.errors import UserError
from fastweights.utils.files import claim
from fastweights.utils.progress import Report, silent

PIECE = 2**18
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as cut."""
TRIES, PAUSE = 5, 0.5
"""Attempts at one mirror, each resuming the last, and seconds before the second; each further pause is this longer."""
LARGEST = 2**31
"""Bytes; nothing that is downloaded here is nearly as large."""


class _Cut(Exception):
    """The connection ended early; what has arrived is worth keeping."""


class _Refused(Exception):
    """This mirror does not have the file."""


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
    request = urllib.request.Request(url, headers={"User-Agent": "fastweights"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            if response.status != 206:  # the mirror starts from the beginning, so do we
                file.truncate(0)
                have = 0
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise _Refused("another part of the file than the requested one")
            _copy(response, file, have, what, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing after what we have: the check of contents decides
            return
        raise (_Cut if error.code >= 500 else _Refused)(f"HTTP {error.code}") from None
    except urllib.error.URLError as error:
        raise _Cut(f"no connection ({error.reason})") from None
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise _Cut(f"connection cut ({str(error) or type(error).__name__})") from None


def _copy(response: http.client.HTTPResponse, file: BinaryIO, have: int, what: str, progress: Report) -> None:
    length = response.headers.get("Content-Length")
    total = have + int(length) if length else None
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
    except (OSError, http.client.HTTPException) as error:  # here, so as not to be taken for errors of the disk
        raise _Cut(f"connection cut ({str(error) or type(error).__name__})") from None
