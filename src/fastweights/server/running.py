"""From a port to a running service that stops cleanly, and does not wait for clients that say nothing."""

import asyncio
import errno
import hashlib
import os
import signal
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import h11
import torch
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fastweights.classifier.encoders import Encoder
from fastweights.server.app import Service, create_app
from fastweights.server.guard import Access
from fastweights.server.limits import Limits
from fastweights.server.store import Store
from fastweights.utils.errors import UserError

HOME = "home"
"""What stands for the memory of a service that was started without a file."""
GRACE = 5
"""Seconds that requests have to end when the service is stopped."""


def default_store() -> Path:
    """Where memories are kept unless something else is said: with the user's data, which is no cache."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home()))
    else:
        base = Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local" / "share"))
    return base / "fastweights" / "memories.sqlite"


def have_the_process() -> None:
    """What a service sets for the whole process, if it has that to itself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who is told to stop stops as by Ctrl-C
    torch.set_num_threads(1)  # several requests keep several cores busy; one alone is hardly faster by more
    warnings.filterwarnings("ignore", module="PIL")  # about odd pictures; what matters is checked


def listening(host: str, port: int) -> socket.socket:
    """A socket that accepts connections."""
    bound = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(512)
    except (OSError, OverflowError) as error:
        if bound is not None:
            bound.close()
        code, why = getattr(error, "errno", None), getattr(error, "strerror", None) or error
        if isinstance(error, socket.gaierror) or code == errno.EADDRNOTAVAIL:
            said = f"there is no address {host!r} here; take 127.0.0.1, or 0.0.0.0 for all networks."
        elif code == errno.EADDRINUSE:
            said = f"port {port} of {host} is taken, perhaps by another `fastweights serve`; choose another --port."
        else:
            said = f"port {port} of {host} cannot be had ({why}); choose another --port."
        raise UserError(said) from None
    bound.set_inheritable(True)
    return bound


class Serving:
    """A service that is ready to run."""

    def __init__(
        self,
        store: Path,
        sock: socket.socket,
        *,
        file: Path | None = None,
        model: str = "drawings",
        access: Access | None = None,
        limits: Limits | None = None,
        device: str = "cpu",
        encoder: Encoder | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.sock = sock
        model = model if encoder is None else encoder.name
        how: dict[str, Any] = {"access": access, "device": device, "encoder": encoder, "model": model}
        fresh = not store.exists()
        self.app = create_app(Store(store, self.limits.store), limits=self.limits, **how)
        try:
            self.memory = _first_memory(self.app.state.service, file)
        except BaseException:
            self.app.state.service.close()
            if fresh:  # nothing is left behind of a service that never was
                store.unlink()
            raise
        patience = self.limits.head_seconds

        class Patient(H11Protocol):
            """Hangs up on those who do not say what they want."""

            _waiting: asyncio.TimerHandle | None = None

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                self._wait()

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                if self.conn.their_state is not h11.IDLE:
                    self._stop_waiting()
                elif self._waiting is None:
                    self._wait()

            def connection_lost(self, exc: Exception | None) -> None:
                self._stop_waiting()
                super().connection_lost(exc)

            def _wait(self) -> None:
                self._waiting = self.loop.call_later(patience, self.transport.close)

            def _stop_waiting(self) -> None:
                if self._waiting is not None:
                    self._waiting.cancel()
                    self._waiting = None

        config = uvicorn.Config(
            self.app,
            http=Patient,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE,
        )
        self.server = uvicorn.Server(config)

    @property
    def address(self) -> str:
        host, port = self.sock.getsockname()[:2]
        host = "127.0.0.1" if host == "0.0.0.0" else "::1" if host == "::" else host
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self) -> None:
        """Until Ctrl-C; requests under way are answered first."""
        try:
            self.server.run(sockets=[self.sock])
        except KeyboardInterrupt:  # uvicorn has stopped, and passes on what stopped it
            pass
        finally:
            self.sock.close()


def _first_memory(service: Service, file: Path | None) -> str:
    """The memory that the page opens with: the one of last time, or a new one, with the classes of a file if given."""
    if file is None:
        start, data = f"{HOME}:{service.model}", b""
    else:
        if not file.is_file():
            raise UserError(f"{file} is no file; name a classifier that `fastweights learn` made.")
        data = file.read_bytes()
        start = hashlib.sha256(data).hexdigest()
    known = service.store.started_with(start)
    if known is not None:
        return known
    if file is None:
        return service.memories.make("", service.model, start=start)
    return service.memories.take_in(file.stem[: service.limits.name], data, start=start)
