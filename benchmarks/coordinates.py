"""Mapping coordinates by the gradient rule's MLP: the plain path against the fused kernels, launched in several ways.

    python benchmarks/coordinates.py                                 # needs a GPU and Triton
    python benchmarks/coordinates.py --blocks 64 128 --precisions tf32x3 --preprocessed

Milliseconds of the forward pass alone and of forward and backward together, by replays of a CUDA graph, and relative
errors against the plain path in float64: of the values, of the gradient at the coordinates, and the largest of those at
the parameters. Where an activation is next to zero rounding decides its slope, so with millions of coordinates the
plain path in float32 has errors in its gradients too: those are the ones to compare with. Both kernels are launched
alike, so the best backward launch is the one with the smallest difference of the two times;
`fastweights.kernels.coordinate_mlp.LAUNCH` has one for each.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fastweights import bench
from fastweights.kernels.available import has_triton
from fastweights.nn.rules import Gradient

SIZES = ((64, 288, 288), (64, 64, 288))
"""Tasks, key width and value width: the memories of a training step on mini-ImageNet and on Omniglot."""
BLOCKS, WARPS, PROGRAMS = (64, 128, 256), (4, 8), (132, 264, 528, 1056)
PRECISIONS = ("tf32x3", "ieee")


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
        rule = Gradient(self.rule.preprocessed).to(self.x.device).double()
        rule.load_state_dict(self.rule.state_dict())
        return Mapping(rule, self.x.detach().double(), self.grad.double()).both()


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


def measure_fused(
    launches: Iterable[tuple[str, int, int, int]], mapping: Mapping, exact: Sequence[Tensor], runs: int, seconds: float
) -> Iterator[str]:
    """A line for each precision, block, number of warps and number of programs."""
    from triton.runtime.errors import OutOfResources  # deferred: needs Triton

    from fastweights.kernels import coordinate_mlp as coordinates

    used = coordinates.PRECISION, dict(coordinates.LAUNCH)
    yield measure(f"fused, as it is used ({used[0]})", mapping, exact, runs, seconds)
    try:
        for precision, block, warps, programs in launches:
            coordinates.PRECISION = precision
            coordinates.LAUNCH |= dict.fromkeys(coordinates.LAUNCH, coordinates.Launch(block, warps, programs))
            name = f"{precision}, block {block}, {warps} warps, {programs} programs"
            try:
                yield measure(name, mapping, exact, runs, seconds)
            except OutOfResources as problem:
                yield f"{name:44} does not fit: {str(problem).splitlines()[0]}"
    finally:
        coordinates.PRECISION = used[0]
        coordinates.LAUNCH |= used[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preprocessed", action="store_true", help="give the MLP logarithms and signs")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS)
    parser.add_argument("--warps", type=int, nargs="+", default=WARPS)
    parser.add_argument("--programs", type=int, nargs="+", default=PROGRAMS)
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=(*PRECISIONS, "tf32"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05, help="how long a run is, about")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or not has_triton():
        print("benchmarks/coordinates.py times GPU kernels: it needs a CUDA device and Triton.", file=sys.stderr)
        raise SystemExit(2)
    device = torch.device("cuda")
    for size in SIZES:
        mapping = draw(size, options.preprocessed, device)
        exact = mapping.exactly()
        print(f"{' x '.join(map(str, size))} coordinates, {bench.device_name(device)}, torch {torch.__version__}")
        print(f"{'':44} {'forward':>11} {'+ backward':>11}   errors: values, at x, at parameters", flush=True)
        mapping.rule.fusible = False
        print(measure("plain", mapping, exact, options.runs, options.seconds), flush=True)
        mapping.rule.fusible = True
        launches = itertools.product(options.precisions, options.blocks, options.warps, options.programs)
        for line in measure_fused(launches, mapping, exact, options.runs, options.seconds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
