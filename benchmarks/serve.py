"""The service under load: requests a second and how long they take, at 1, 16 and 64 clients, on this machine alone.

    python benchmarks/serve.py [--seconds 20] [--longest 60]

Starts `fastweights serve` on a free port of 127.0.0.1 with a database of its own, teaches it 20 characters, one drawing
each, and has clients ask one picture a request over connections that stay open, each as soon as it is answered. Before
and after, `Classifier.predict` is timed on the same pictures, one at a time, in this process. The largest number of
clients is held for `--longest` seconds. Clients share the processor with the service.
"""

import argparse
import asyncio
import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from PIL import Image

from fastweights import Classifier, bench
from fastweights.data import strokes

CLASSES, DRAWINGS, SIDE = 20, 6, 140
CLIENTS = (1, 16, 64)
BARE = 3.0
"""Seconds for which the bare classifier is timed, before and after."""


def pictures(seed: int = 7) -> list[list[bytes]]:
    """Drawings of each class, as a browser would send them."""
    made = strokes.make(CLASSES, DRAWINGS, seed)[..., 0]
    return [[_png(drawing) for drawing in some] for some in made]


def _png(drawing: np.ndarray) -> bytes:
    data = io.BytesIO()
    Image.fromarray(255 - drawing).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(data, "PNG")
    return data.getvalue()


@contextmanager
def service(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Host, port and the first memory of a service that runs meanwhile."""
    log = folder / "log"
    code = "from fastweights.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--data", str(folder / "memories.sqlite")]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"http://([\d.]+):(\d+)/#(\S+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the service does not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1], int(found[2]), found[3]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def post(host: str, port: int, path: str, body: bytes) -> Any:
    request = Request(f"http://{host}:{port}{path}", body, {"Content-Type": "image/png"})
    with urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


async def client(
    host: str, port: int, path: str, asked: Sequence[bytes], until: float
) -> tuple[list[float], list[str]]:
    """Seconds of every answer, and what went wrong."""
    times: list[float] = []
    wrong: list[str] = []
    reader, writer = await asyncio.open_connection(host, port)
    number = 0
    while time.perf_counter() < until:
        body = asked[number % len(asked)]
        number += 1
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
        begin = time.perf_counter()
        writer.write(head.encode() + body)
        try:
            status = await reader.readline()
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                if name.lower() == b"content-length":
                    length = int(value)
            await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError) as error:
            wrong.append(repr(error))
            break
        times.append(time.perf_counter() - begin)
        if b" 200 " not in status:
            wrong.append(status.decode())
    writer.close()
    return times, wrong


async def load(host: str, port: int, path: str, asked: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """What so many clients see for so long."""
    begin = time.perf_counter()
    shifts = [asked[k % len(asked) :] + asked[: k % len(asked)] for k in range(clients)]  # type: ignore[operator]
    some = await asyncio.gather(*(client(host, port, path, mine, begin + seconds) for mine in shifts))
    took = time.perf_counter() - begin
    times = np.array([one for mine, _ in some for one in mine])
    wrong = [one for _, mine in some for one in mine]
    p50, p95, p99 = np.percentile(1000 * times, [50, 95, 99]) if len(times) else (0.0, 0.0, 0.0)
    return {
        "clients": clients,
        "seconds": round(took, 1),
        "requests": len(times),
        "errors": len(wrong),
        "requests_per_second": round(len(times) / took, 1),
        "p50_ms": round(float(p50), 2),
        "p95_ms": round(float(p95), 2),
        "p99_ms": round(float(p99), 2),
    }


def bare(examples: Sequence[Sequence[bytes]], asked: Sequence[bytes], seconds: float) -> float:
    """Predictions a second of the classifier itself, one picture at a time."""
    classifier = Classifier("drawings").fit({f"c{place}": list(some[:1]) for place, some in enumerate(examples)})
    for picture in asked[:10]:
        classifier.predict([picture])
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        classifier.predict([asked[count % len(asked)]])
        count += 1
    return count / (time.perf_counter() - begin)


def measure(clients: Sequence[int], seconds: float, longest: float, alone: float = BARE) -> list[dict[str, Any]]:
    """A line for the record for each number of clients."""
    drawn = pictures()
    asked = [picture for some in drawn for picture in some[1:]]
    rates, lines = [bare(drawn, asked, alone)], []
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as (host, port, memory):
        path = f"/v1/memories/{memory}"
        for place, some in enumerate(drawn):
            post(host, port, f"{path}/examples?label=c{place}", some[0])
        right = sum(
            post(host, port, f"{path}/predict", picture)["answers"][0]["likely"][0]["label"] == f"c{place}"
            for place, some in enumerate(drawn)
            for picture in some[1:]
        )
        for count in clients:
            held = longest if count == max(clients) else seconds
            lines.append(asyncio.run(load(host, port, f"{path}/predict", asked, count, held)))
    rates.append(bare(drawn, asked, alone))
    shared = {
        "classes": CLASSES,
        "right": f"{right} of {len(asked)}",
        "bare_per_second": [round(rate, 1) for rate in rates],
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "model": "drawings",
        "precision": "float32",
        "device": bench.device_name(torch.device("cpu")),
        "torch": torch.__version__,
    }
    for line in lines:
        line["of_bare"] = round(line["requests_per_second"] / statistics.mean(rates), 2)
    return [{"job": f"serve, {line['clients']} clients", **line, **shared} for line in lines]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--longest", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("results/bench.jsonl"))
    options = parser.parse_args(arguments)
    lines = measure(options.clients, options.seconds, options.longest)
    bench.append(options.out, lines)
    for line in lines:
        print(
            f"{line['clients']:3} clients: {line['requests_per_second']:7.1f}/s ({line['of_bare']:.2f} of bare), "
            f"p50 {line['p50_ms']:.1f}, p95 {line['p95_ms']:.1f}, p99 {line['p99_ms']:.1f} ms, {line['errors']} errors"
        )


if __name__ == "__main__":
    main()
