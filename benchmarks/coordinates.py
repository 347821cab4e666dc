"""Mapping coordinates by the gradient rule's MLP: the plain path against its straight pieces, on a CPU or a GPU.

    python benchmarks/coordinates.py
    python benchmarks/coordinates.py --blocks 512 1024 --tables 16 64 --preprocessed

Milliseconds of the forward pass alone and of forward and backward together, on a GPU by replays of a graph, and
relative errors against float64: of the values, of the gradient at the coordinates, and the largest of those at the
parameters. Where an activation is next to zero rounding decides its slope, so with millions of coordinates the
plain path in float32 has errors in its gradients too: those are the ones to compare with. On a GPU the kernels of
`fastweights.kernels.coordinate_mlp` are timed as they are launched, and with other blocks, warps and tables of sums.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from fastweights import bench
from fastweights.kernels.available import has_triton
from fastweights.nn import coordinates as ways
from fastweights.nn.rules import Gradient

SIZES = ((64, 288, 288), (64, 64, 288))
"""Tasks, key width and value width: the memories of a training step on mini-ImageNet and on Omniglot."""
TASKS_ON_A_CPU = 4
BLOCKS, WARPS, TABLES = (512, 1024, 2048), (4, 8), (16, 64, 256)


class Mapping:
    """One tensor of coordinates to be mapped by one rule, and the gradient that comes back."""

    def __init__(self, rule: Gradient, x: Tensor, grad: Tensor) -> None:
        self.rule, self.x, self.grad = rule, x.requires_grad_(), grad

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.rule.map_gradient(self.x)

    def both(self) -> list[Tensor]:
        y = self.rule.map_gradient(self.x)
        return [y.detach(), *torch.autograd.grad(y, [self.x, *self.rule.parameters()], self.grad)]

    def exactly(self) -> list[Tensor]:
        """Values and gradients by the plain path in float64."""
        return Mapping(deepcopy(self.rule).double(), self.x.detach().double(), self.grad.double()).both()


def draw(size: tuple[int, ...], preprocessed: bool, device: torch.device) -> Mapping:
    """Coordinates of about the size of gradients, and biases that are not zero."""
    torch.manual_seed(0)
    rule = Gradient(preprocessed).to(device)
    with torch.no_grad():
        for p in rule.parameters():
            if p.dim() == 1:
                p.normal_(std=0.1)
    return Mapping(rule, torch.randn(size, device=device), torch.randn(size, device=device))


def errors(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, float, float]:
    """Relative errors of the values, of the gradient at the coordinates, and the largest of those at the parameters."""
    values, at_x, *at_parameters = (
        ((a - b).norm() / b.norm()).item() for a, b in zip((t.double() for t in ours), exact, strict=True)
    )
    return values, at_x, max(at_parameters)


def measure(name: str, mapping: Mapping, exact: Sequence[Tensor], runs: int, seconds: float) -> str:
    """Times and errors, as a line."""
    device = mapping.x.device
    wrong = errors(mapping.both(), exact)
    forward, both = (
        statistics.median(bench.time_runs(bench.captured(work, device), device, runs, seconds))
        for work in (mapping.forward, mapping.both)
    )
    shown = "  ".join(f"{error:.1e}" for error in wrong)
    return f"{name:44} {forward:8.3f} ms {both:8.3f} ms   {shown}"


def measure_ways(mapping: Mapping, exact: Sequence[Tensor], runs: int, seconds: float) -> Iterator[str]:
    """Of a CPU: a line for the MLP itself and one for its pieces."""
    used = ways.FEW
    try:
        for name, few in (("plain", mapping.x.numel()), ("by pieces", 0)):
            ways.FEW = few
            yield measure(name, mapping, exact, runs, seconds)
    finally:
        ways.FEW = used


def measure_fused(
    launches: Iterable[tuple[int, int, int]], mapping: Mapping, exact: Sequence[Tensor], runs: int, seconds: float
) -> Iterator[str]:
    """A line for each block, number of warps and number of tables."""
    from fastweights.kernels import coordinate_mlp as kernels  # deferred: needs Triton

    mapping.rule.fusible = False
    yield measure("plain", mapping, exact, runs, seconds)
    mapping.rule.fusible = True
    yield measure("by pieces, as it is used", mapping, exact, runs, seconds)
    used = kernels.BLOCK, kernels.WARPS, kernels.TABLES
    try:
        for block, warps, tables in launches:
            kernels.BLOCK, kernels.WARPS, kernels.TABLES = block, warps, tables
            yield measure(f"block {block}, {warps} warps, {tables} tables", mapping, exact, runs, seconds)
    finally:
        kernels.BLOCK, kernels.WARPS, kernels.TABLES = used


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preprocessed", action="store_true", help="give the MLP logarithms and signs")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--warps", type=int, nargs="+", default=WARPS)
    parser.add_argument("--tables", type=int, nargs="+", default=TABLES)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05, help="how long a run is, about")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    if on_gpu and not has_triton():
        parser.error("on a GPU this times kernels in Triton, which is not installed: pip install triton.")
    device = torch.device("cuda" if on_gpu else "cpu")
    for tasks, *widths in SIZES:
        size = (tasks if on_gpu else TASKS_ON_A_CPU, *widths)
        mapping = draw(size, options.preprocessed, device)
        exact = mapping.exactly()
        print(f"{' x '.join(map(str, size))} coordinates, {bench.device_name(device)}, torch {torch.__version__}")
        print(f"{'':44} {'forward':>11} {'+ backward':>11}   errors: values, at x, at parameters", flush=True)
        launches = itertools.product(options.blocks, options.warps, options.tables)
        how = (mapping, exact, options.runs, options.seconds)
        for line in measure_fused(launches, *how) if on_gpu else measure_ways(*how):
            print(line, flush=True)


if __name__ == "__main__":
    main()
