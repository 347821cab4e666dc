"""One update of the slow weights: drawing, forward, backward and optimiser, with no wait for the device.

On a GPU the whole step is captured once as a CUDA graph and replayed, so that the host only says "again".
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fastweights.episodes import EpisodeSampler, seed_of
from fastweights.learners import Learner
from fastweights.precision import autocast
from fastweights.settings import TrainSettings

EAGER_STEPS = 3
"""Steps taken one operation at a time before a graph is captured: libraries choose their algorithms in them."""


class TrainStep:
    """Takes steps; losses stay on the device until somebody asks for them."""

    def __init__(
        self,
        learner: Learner,
        sampler: EpisodeSampler,
        settings: TrainSettings,
        graph: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        self.learner, self.sampler, self.settings, self.say = learner, sampler, settings, say
        self.device = sampler.items.device
        self.optimizer = make_optimizer(learner, settings, self.device)
        self._wants_graph, self._graph, self._eager_steps = graph, None, 0
        self._latest = torch.zeros(2, device=self.device)
        self._metrics: list[Tensor] = []

    _graph: torch.cuda.CUDAGraph | None

    def __call__(self, step: int, done: float) -> None:
        """Take step number `step`, with the share `done` of the run behind us."""
        seed_step(self.settings.seed, step)
        set_learning_rate(self.optimizer, learning_rate(self.settings, done))
        if self._wants_graph and self._eager_steps >= EAGER_STEPS:
            self._capture()
            seed_step(self.settings.seed, step)
        if self._graph is not None:
            self._graph.replay()
        elif self._wants_graph:
            self._step_aside()
        else:
            self._step()
        self._metrics.append(self._latest.clone())

    def _step_aside(self) -> None:
        """A step on a stream of its own, as the capture of a graph wants its precursors."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self._eager_steps += 1

    def _step(self) -> None:
        episode = self.sampler.draw(self.settings.tasks_per_step)
        with autocast(self.settings.precision, self.device):
            logits = self.learner(episode)
        loss = F.cross_entropy(
            logits.flatten(0, 1), episode.query_y.flatten(), label_smoothing=self.settings.label_smoothing
        )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        right = (logits.detach().argmax(-1) == episode.query_y).float().mean()
        self._latest.copy_(torch.stack([loss.detach().float(), right]))

    def _capture(self) -> None:
        self._wants_graph = False
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)  # gradients shall live in the graph's own memory
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            self.say(f"No CUDA graph ({str(error).splitlines()[0]}): going on without, more slowly.")
            torch.cuda.synchronize()
        else:
            self._graph = graph

    def metrics(self) -> Tensor:
        """(steps, 2) loss and accuracy of the steps since the last call. Waits for the device."""
        taken = torch.stack(self._metrics).cpu()
        self._metrics.clear()
        return taken


def make_optimizer(learner: Learner, settings: TrainSettings, device: torch.device) -> torch.optim.AdamW:
    """AdamW; on a GPU one kernel for all parameters, with the step size where a graph can read it."""
    if device.type != "cuda":
        return torch.optim.AdamW(learner.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    rate = torch.tensor(settings.learning_rate, device=device)
    return torch.optim.AdamW(
        learner.parameters(), lr=rate, weight_decay=settings.weight_decay, fused=True, capturable=True
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def seed_step(seed: int, step: int) -> None:
    """Make everything random in a step (tasks, label noise, dropout) a function of (seed, step).

    A run that is resumed needs no other memory of its randomness.
    """
    torch.manual_seed(seed_of(f"seed {seed} step {step}"))


def learning_rate(settings: TrainSettings, done: float) -> float:
    if settings.schedule == "constant":
        return settings.learning_rate
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
