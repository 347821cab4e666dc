"""How fast a GPU begins kernels: graphs of kernels that do nothing, on one stream and on several.

A training of small steps is a graph of some hundred short kernels. Where five graphs of as many empty kernels take as
long as five trainings side by side, it is the beginning of kernels that bounds them, neither the work in them nor the
host, which says "again" once for each graph. With `--out` a line for each is added to a record.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from fastweights.bench import append
from fastweights.experiments.run import find_commit
from fastweights.utils.devices import device_name
from fastweights.utils.errors import UserError

REPLAYS = 300


def captured(kernels: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    number, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(kernels):
            number.add_(1)
    return graph


def seconds_of(graphs: list[tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]], replays: int) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(replays):
        for stream, graph in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(kernels: int, streams: int, replays: int = REPLAYS) -> dict:
    made = [torch.cuda.Stream() for _ in range(streams)]
    graphs = [(stream, captured(kernels, stream)) for stream in made]
    seconds_of(graphs, 10)
    taken = seconds_of(graphs, replays)
    return {
        "job": f"launches: {streams} graphs of {kernels} empty kernels",
        "kernels": kernels,
        "streams": streams,
        "round_us": round(1e6 * taken / replays, 1),
        "kernel_ns": round(1e9 * taken / (replays * streams * kernels), 1),
        "device": device_name(torch.device("cuda")),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, nargs="+", default=[162, 663], help="of a graph")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 5, 8])
    parser.add_argument("--commit", default="", help="of this code, where git cannot tell")
    parser.add_argument("--out", type=Path, help="the record to append to")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here, and this measures one.")
    try:
        commit = find_commit(options.commit) if options.out else options.commit
    except UserError as error:
        parser.error(str(error))
    for kernels in options.kernels:
        for streams in options.streams:
            line = {**measure(kernels, streams), "commit": commit}
            if options.out:
                append(options.out, [line])
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
