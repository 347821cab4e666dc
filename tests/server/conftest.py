"""A service for a test, in a thread, and the command in a process of its own."""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from classifier.drawn import drawing

from fastweights.classifier.encoders import Encoder
from fastweights.server.guard import Access
from fastweights.server.limits import Limits
from fastweights.server.running import Serving, listening

PNG = {"Content-Type": "image/png"}


def png(name: str, shift: int = 0) -> bytes:
    data = io.BytesIO()
    drawing(name, shift).save(data, "PNG")
    return data.getvalue()


class Asked:
    """A client with the few questions that tests ask all the time."""

    def __init__(self, http: httpx.Client, server: Any = None) -> None:
        self.http, self.server = http, server
        self.memory = ""

    def close(self) -> None:
        self.http.close()
        if self.server is not None:
            self.server.stop()

    def make(self, **said: Any) -> str:
        answer = self.http.post("/v1/memories", json=said)
        assert answer.status_code == 201, answer.text
        self.memory = answer.json()["id"]
        return self.memory

    @property
    def path(self) -> str:
        return f"/v1/memories/{self.memory}"

    def show(self, label: str, picture: bytes) -> httpx.Response:
        return self.http.post(f"{self.path}/examples", params={"label": label}, content=picture, headers=PNG)

    def embed(self, label: str, *rows: list[float]) -> httpx.Response:
        return self.http.post(f"{self.path}/examples", json={"label": label, "embeddings": list(rows)})

    def ask(self, picture: bytes, **query: Any) -> dict[str, Any]:
        answer = self.http.post(f"{self.path}/predict", params=query, content=picture, headers=PNG)
        assert answer.status_code == 200, answer.text
        return answer.json()["answers"][0]

    def classes(self) -> dict[str, int]:
        found = self.http.get(f"{self.path}/classes", params={"limit": 1000}).json()["classes"]
        return {one["label"]: one["count"] for one in found}


Serve = Callable[..., Asked]


class Threaded:
    """A service in a thread of this process."""

    def __init__(self, data: Path, limits: Limits, access: Access | None, port: int = 0, **how: Any) -> None:
        self.serving = Serving(data, listening("127.0.0.1", port), limits=limits, access=access, **how)
        self.address = self.serving.address
        self.service = self.serving.app.state.service
        self.thread = threading.Thread(target=self.serving.run)
        self.thread.start()
        while not self.serving.server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self.serving.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a service with limits and access as told."""
    open_ones: list[Asked] = []

    def start(*, access: Access | None = None, encoder: Encoder | None = None, **limits: Any) -> Asked:
        server = Threaded(tmp_path / "memories.sqlite", Limits(**limits), access, encoder=encoder)
        one = Asked(httpx.Client(base_url=server.address, timeout=30, verify=False, trust_env=False), server)
        open_ones.append(one)
        return one

    yield start
    for one in open_ones:
        one.close()


@pytest.fixture
def asked(serve: Serve) -> Asked:
    """A service with an empty memory."""
    one = serve()
    one.make()
    return one


class Running:
    """`fastweights serve` in a process of its own."""

    def __init__(self, data: Path, *arguments: str) -> None:
        self.log = data.with_suffix(".log")
        command = [sys.executable, "-c", "from fastweights.cli.main import main; main()", "serve", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--data", str(data)], stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + 90
        while not (found := re.search(r"(http://\S+)/#(\S+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        self.address, self.memory = found.groups()

    def client(self, **options: Any) -> Asked:
        one = Asked(httpx.Client(base_url=self.address, timeout=30, verify=False, trust_env=False, **options))
        one.memory = self.memory
        return one

    def stop(self, how: int = signal.SIGINT) -> SimpleNamespace:
        self.process.send_signal(how)
        code = self.process.wait(20)
        return SimpleNamespace(code=code, said=self.log.read_text())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts the command."""
    started: list[Running] = []

    def start(*arguments: str) -> Running:
        started.append(Running(tmp_path / "run.sqlite", *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
