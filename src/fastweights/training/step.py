"""One update of the slow weights: drawing, forward, backward and optimiser, with no wait for the device.

On a GPU the whole step is captured once as a CUDA graph and replayed, so that the host only says "again". A graph has
random numbers, memory and a stream of its own: several of them may be replayed side by side.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.training.distributed import ALONE, Ranks
from fastweights.utils.errors import UserError
from fastweights.utils.memory import keep_freed_memory
from fastweights.utils.seeds import seed_of

Part = tuple[float, Iterable[Tensor]]
"""Parameters, and the share of the step size they are given."""
METRICS_KEPT = 1024
"""Steps whose metrics have a place on the device; then they are put aside."""
EAGER_STEPS = 3
"""Steps taken one operation at a time before a graph is captured: libraries choose their algorithms in them."""


@dataclass(frozen=True)
class Rate:
    """The step size over a run."""

    peak: float
    schedule: str = "constant"
    """constant, cosine or halving."""
    halvings: float = 0.0
    """How often the step size is halved in a whole run by the schedule halving; the others ask nothing of it."""

    def at(self, done: float) -> float:
        """The step size with this share of the run behind us."""
        if self.schedule == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        if self.schedule == "halving":
            return self.peak * 0.5 ** math.floor(done * self.halvings + 1e-9)  # a share of steps may be rounded down
        return self.peak


@dataclass
class _Shape:
    """How far the steps of one shape of batches are: some are taken plainly, then one is captured and replayed."""

    wants_graph: bool
    plain_steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    draws: torch.Generator | None = None


Objective = Callable[[], tuple[Tensor, Tensor]]
"""Draws a batch by torch's generator and answers it: the loss, and the share of right answers."""


class TrainStep:
    """Takes steps towards an objective; losses stay on the device until somebody asks for them."""

    def __init__(
        self,
        objective: Objective,
        parts: Sequence[Part],
        rate: Rate,
        *,
        seed: str,
        weight_decay: float = 0.0,
        optimizer: str = "adam",
        clip_norm: float = 0.0,
        device: torch.device,
        ema: "EMA | None" = None,
        graph: bool = False,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        ranks: Ranks = ALONE,
    ) -> None:
        """`context` is entered for every step that is taken or captured, forwards and backwards."""
        self.objective, self.rate, self.seed, self.ema = objective, rate, seed, ema
        self.ranks, self.device, self.context, self.clip_norm = ranks, device, context, clip_norm
        if device.type == "cpu":
            keep_freed_memory()
        self.optimizer = make_optimizer(parts, rate.peak, weight_decay, device, optimizer)
        self._may_capture = graph and device.type == "cuda" and not ranks.several
        self._shapes = dict[Hashable, _Shape]()
        self.expect_change()
        self._metrics = torch.zeros(METRICS_KEPT, 2, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._taken, self._put_aside = 0, list[Tensor]()
        self._rates: list[float] = []

    def expect_change(self, shape: Hashable = None) -> None:
        """Say that the objective draws batches of another shape from now on, of which a graph has to be captured.

        Shapes that come again have a name: their graphs are kept.
        """
        fresh = _Shape(self._may_capture)
        self._shape = fresh if shape is None else self._shapes.setdefault(shape, fresh)

    @property
    def is_graph(self) -> bool:
        """Whether steps are replayed as a CUDA graph."""
        return self._shape.graph is not None

    def set_share(self, part: int, share: float) -> None:
        """Give a part another share of the step size from now on."""
        for group in self.optimizer.param_groups:
            if group["part"] == part:
                group["share"] = share

    def __call__(self, step: int, done: float) -> None:
        """Take step number `step`, with the share `done` of the run behind us.

        Everything random in it (tasks, label noise, dropout) is a function of the seed and the step.
        """
        self._set_learning_rate(self.rate.at(done))
        if self._shape.wants_graph and self._shape.plain_steps >= EAGER_STEPS:
            self._capture()
        seed, shape = seed_of(f"{self.seed} step {step}"), self._shape
        if shape.graph is not None and shape.draws is not None:
            shape.draws.manual_seed(seed)
            shape.graph.replay()
        else:
            seed_generators(seed, self.device)
            self._step_aside() if shape.wants_graph else self._step()
        self._taken += 1
        if self._taken == METRICS_KEPT:
            self._put_metrics_aside()

    def _set_learning_rate(self, rate: float) -> None:
        """On a GPU that is a kernel for each group of parameters: only where it changes."""
        rates = [group["share"] * rate for group in self.optimizer.param_groups]
        if rates != self._rates:
            set_learning_rate(self.optimizer, rate)
            self._rates = rates

    def _step(self) -> None:
        with self.context():
            loss, right = self.objective()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
        if self.clip_norm:
            groups = self.optimizer.param_groups
            nn.utils.clip_grad_norm_((p for group in groups for p in group["params"]), self.clip_norm)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        self._metrics.index_copy_(0, self._place, torch.stack([loss.detach().float(), right]).unsqueeze(0))
        self._place.add_(1)

    def _step_aside(self) -> None:
        """A step on a stream of its own, as the capture of a graph wants its precursors."""
        stream = _stream_to_capture()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._shape.plain_steps += 1

    def _capture(self) -> None:
        self._shape.wants_graph = False
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)  # gradients must live in the graph's own memory
        graph = torch.cuda.CUDAGraph()
        try:
            with _own_random_numbers() as draws, torch.cuda.graph(graph, stream=_stream_to_capture()):
                self._step()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"No CUDA graph ({reason}): going on without, more slowly.", stacklevel=2)
            torch.cuda.synchronize()
        else:
            self._shape.graph, self._shape.draws = graph, draws

    def _put_metrics_aside(self) -> None:
        self._put_aside.append(self._metrics[: self._taken].clone())
        self._place.zero_()
        self._taken = 0

    def metrics(self) -> Tensor:
        """(steps, 2) loss and accuracy of the steps since the last call. Waits for the device."""
        self._put_metrics_aside()
        taken = self.ranks.mean(torch.cat(self._put_aside)).cpu()
        self._put_aside.clear()
        return taken


def _stream_to_capture() -> torch.cuda.Stream:
    """The current stream, unless it is the default one, on which nothing can be captured.

    Matrix products share a workspace by stream: graphs captured on one stream must not be replayed at the same time.
    """
    current = torch.cuda.current_stream()
    return torch.cuda.Stream() if current == torch.cuda.default_stream() else current


@contextmanager
def _own_random_numbers() -> Iterator[torch.Generator]:
    """A generator that a graph captured in this context draws from, it alone."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    shared, own = default.graphsafe_get_state(), default.clone_state()
    default.graphsafe_set_state(own)
    try:
        yield own
    finally:
        default.graphsafe_set_state(shared)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what is drawn from on a device. `torch.manual_seed`, for all devices, takes half a millisecond on a CPU."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def mean_of_finite(metrics: Tensor, last_step: int, what: str) -> tuple[float, float]:
    """Mean loss and accuracy (steps, 2); a UserError naming the first step, counted back from the last, gone wrong."""
    bad = (~metrics.isfinite().all(-1)).nonzero()
    if len(bad):
        raise UserError(
            f"the loss is NaN or infinite from {what} {last_step - len(metrics) + int(bad[0]) + 1} on: nothing after "
            "the last checkpoint was kept; try a lower learning rate."
        )
    loss, accuracy = metrics.double().mean(0).tolist()
    return loss, accuracy


class EMA:
    """The exponential moving average of a module's weights and running statistics; updated within a CUDA graph."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.names = [name for name, tensor in module.state_dict().items() if tensor.is_floating_point()]
        self.values = [tensor.clone() for tensor in self._current()]

    def _current(self) -> list[Tensor]:
        state = self.module.state_dict()
        return [state[name].detach() for name in self.names]

    def restart(self) -> None:
        """Begin again from the weights as they are."""
        torch._foreach_copy_(self.values, self._current())

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from averages that were saved."""
        for name, value in zip(self.names, self.values, strict=True):
            value.copy_(weights[name])

    def update(self) -> None:
        torch._foreach_lerp_(self.values, self._current(), 1 - self.decay)

    def weights(self) -> dict[str, Tensor]:
        """The module's state with the averages in it."""
        return {**self.module.state_dict(), **self.averages()}

    def averages(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.values, strict=True))


def make_optimizer(
    parts: Sequence[Part], rate: float, weight_decay: float, device: torch.device, kind: str = "adam"
) -> torch.optim.Optimizer:
    """AdamW, or SGD with Nesterov's momentum; on a GPU one kernel for all parameters, with the step size where a graph
    can read it.

    Only matrices and filters decay: pulling biases, gains and scales towards zero regularises nothing.
    """
    on_gpu = device.type == "cuda"
    groups: list[dict[str, Any]] = []
    for part, (share, parameters) in enumerate(parts):
        every = list(parameters)
        decaying, others = [p for p in every if p.dim() > 1], [p for p in every if p.dim() <= 1]
        for chosen, decay in ((decaying, weight_decay), (others, 0.0)):
            lr = torch.tensor(share * rate, device=device) if on_gpu else share * rate
            groups.append({"params": chosen, "weight_decay": decay, "part": part, "share": share, "lr": lr})
    groups = [group for group in groups if group["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True, fused=on_gpu)
    return torch.optim.AdamW(groups, fused=True, capturable=on_gpu)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(group["share"] * rate)
        else:
            group["lr"] = group["share"] * rate
