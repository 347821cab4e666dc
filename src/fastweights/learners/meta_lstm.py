"""Meta-learner LSTM (Ravi & Larochelle, 2017): an LSTM that is the optimiser of each task's own network.

The network of a task, an encoder and a linear head, takes `inner_steps` steps on the support set. A step is the cell
update of an LSTM whose cell is a weight w and whose candidate is the negative gradient,

    w = f w - i g,    f = sigmoid(W_f [h, w, f] + b_f),    i = sigmoid(W_i [h, w, i] + b_i)

where f and i on the right are those of the step before (at first 0), and h is the output of an ordinary LSTM that reads
the gradient g and the loss of the support set, each as logarithm and sign (Andrychowicz et al., 2016, p = 10). Every
coordinate has states of its own; all share the weights of both LSTMs. The weights from which tasks start are learned.

First-order, as its authors': losses and gradients are data to the meta-learner, which is not differentiated through
them. All support examples are in every step: 12 steps for one shot, 5 for more. Gates start at f = 0.99 and i = 0.01,
about gradient descent.

Our readings: the authors' batch norm normalises by the batch while a task is learned and in meta-training, and by
averages over the task's steps when it is tested; ours always by the batch, so it is **transductive** like our MAML.
Ours clips no meta-gradients, theirs at a norm of 0.25.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.kernels.available import has_triton
from fastweights.learners.checks import State
from fastweights.learners.maml import AdaptedNetwork
from fastweights.learners.registry import Preset, register
from fastweights.learners.slots import bound_logits
from fastweights.nn.coordinates import log_and_sign
from fastweights.nn.each_task import each_task
from fastweights.nn.encoders import images_to_float
from fastweights.nn.init import Shapes
from fastweights.utils.precision import full_precision
from fastweights.utils.settings import Settings, option

LOG_RANGE = 10.0
"""p of `log_and_sign`."""
PRESETS = {
    "meta-lstm-cnn": Preset(
        "Meta-learner LSTM: a learned optimiser of each task's network",
        {"layers": 4, "slope": 0.0},
        training={"learning_rate": 1e-3, "tasks_per_step": 1, "steps": 50_000},
    )
}


@dataclass(frozen=True)
class MetaLSTMSettings(Settings):
    inner_steps: int = option(12, at_least=1, at_most=10_000)
    """Steps of the learned optimiser on a task's support set."""
    hidden: int = option(20, at_least=1, at_most=10**6)
    """Units of the LSTM that reads gradients and losses."""


@register("meta-lstm", PRESETS)
class MetaLSTM(AdaptedNetwork):
    """A network for each task, whose weights, one vector per task, are the cells of an LSTM."""

    Settings = MetaLSTMSettings
    allows_tf32 = True

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__(encoder, slots)
        s = MetaLSTMSettings(**options)
        self.inner_steps, self.optimiser = s.inner_steps, LearnedOptimiser(s.hidden)

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """The authors' choices by the number of shots."""
        return {"inner_steps": 12 if shot == 1 else 5}

    def adapted(self, x: Tensor, y: Tensor, slots: Tensor) -> dict[str, Tensor]:
        parameters = self.by_name(self.adapt(x, y, slots))
        return {"weights": torch.cat([parameter.flatten(1) for parameter in parameters.values()], dim=1)}

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        parameters = self.by_name(state["weights"], channels_last=False)
        return bound_logits(self.call_each(parameters, query_x), state["slots"])

    @property
    def state_shapes(self) -> Shapes:
        return {"slots": (None,), "weights": (sum(p.numel() for p in self.network.parameters()),)}

    def adapt(self, x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
        """The weights (T, P) that suit tasks: items (T, n, *item) with labels (T, n), bound to output units (T, N)."""
        weights, goals = self.start.expand(len(x), -1), self.goals(y, slots)
        if x.dtype == torch.uint8:  # images, of which every step would make numbers again
            x = images_to_float(x.flatten(0, 1)).permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
        shares = goals.to(weights.dtype) / -x.shape[1]

        @torch.no_grad()
        def seen(weights: Tensor) -> tuple[Tensor, Tensor]:
            gradients, logarithms = each_task(self.gradient, x, weights.detach(), goals, slots)
            return gradients, (logarithms * shares).sum((1, 2))

        return self.optimiser.run(weights, seen, self.inner_steps)


Memory = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of each coordinate: output and cell of the LSTM that reads (T P, hidden), and the last gates (T, P, 2). The fourth is
the matrix by which gates are computed, which is made in the first step."""


class LearnedOptimiser(nn.Module):
    """Steps on weights (T, P), each coordinate by itself, with gradients (T, P) and losses (T)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden, self.lstm = hidden, nn.LSTMCell(4, hidden)
        self.gates = nn.Linear(hidden + 2, 2)  # forget and input, each by [h, w, its last value]
        nn.init.uniform_(self.gates.weight, -0.01, 0.01)
        with torch.no_grad():
            self.gates.bias[0].uniform_(4, 6)
            self.gates.bias[1].uniform_(-5, -4)

    def run(self, weights: Tensor, seen: Callable[[Tensor], tuple[Tensor, Tensor]], steps: int) -> Tensor:
        """The weights after steps with the gradients and losses, constants, that are seen at each."""
        if self._can_be_fused(weights):
            return self._run_fused(weights, seen, steps)
        memory = None
        for _ in range(steps):
            weights, memory = self(weights, *seen(weights), memory)
        return weights

    def _run_fused(self, start: Tensor, seen: Callable[[Tensor], tuple[Tensor, Tensor]], steps: int) -> Tensor:
        from fastweights.kernels.learned_optimiser import Parameters, Steps, result  # deferred: needs Triton

        parameters = Parameters(*self.lstm.parameters(), *self.gates.parameters())
        taken = Steps(start, parameters, steps, LOG_RANGE, keeps=torch.is_grad_enabled())
        weights = start
        for _ in range(steps):
            weights = taken.take(*seen(weights))
        return result(taken, start, parameters)

    def _can_be_fused(self, weights: Tensor) -> bool:
        """Whether the fused kernels compute this: float32 on a GPU, with not too many units."""
        numbers = {weights.dtype, *(p.dtype for p in self.parameters())}
        if not (weights.is_cuda and numbers == {torch.float32} and has_triton()):
            return False
        from fastweights.kernels.learned_optimiser import fits  # deferred: needs Triton

        return fits(self.hidden)

    @full_precision
    def forward(
        self, weights: Tensor, gradients: Tensor, losses: Tensor, memory: Memory | None
    ) -> tuple[Tensor, Memory]:
        features = log_and_sign(torch.cat([gradients, losses.unsqueeze(1)], dim=1), LOG_RANGE)
        of_gradients, of_loss = features[:, :-1], features[:, -1:].expand(-1, weights.shape[1], -1)
        seen = torch.cat([of_gradients, of_loss], dim=-1).flatten(0, 1)
        output, cell = self.lstm(seen, None if memory is None else memory[:2])
        last, matrix = (
            (weights.new_zeros(*weights.shape, 2), self._weights_of_gates()) if memory is None else memory[2:]
        )
        seen_by_gates = torch.cat([output.view(*weights.shape, -1), weights.unsqueeze(-1), last], dim=-1)
        gates = F.linear(seen_by_gates, matrix, self.gates.bias).sigmoid()
        forget, admit = gates.unbind(-1)
        return torch.addcmul(forget * weights, admit, gradients, value=-1), (output, cell, gates, matrix)

    def _weights_of_gates(self) -> Tensor:
        """By [h, w, last forget gate, last input gate], of which each gate sees its own last value alone."""
        by_others, by_last = self.gates.weight.tensor_split((-1,), dim=1)
        return torch.cat([by_others, by_last.squeeze(1).diag_embed()], dim=1)
