"""Kernels of a training step, counted without a GPU: with few tasks a step, their number is what a captured step costs.

    python benchmarks/ops.py omniglot-5way-1shot/maml-cnn                 # by the recipe own
    python benchmarks/ops.py --recipe paper --lines 20 omniglot-5way-1shot/fwcnn-hebb

A step is taken on tensors without numbers (torch's fake tensors) that say they are on a GPU. Every operation that is
more than a view or an allocation is counted: drawing tasks, forward, backward and optimiser. `--lines` names the lines
of this library that start the most. What Triton's kernels do is counted as plain operations, so encoders of images look
larger than they are: `encoder` is their share. The vendor's LSTM is guessed at two kernels a word and layer.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.data.items import Items, TextItems
from fastweights.experiments.recipes import RECIPES, settings_by
from fastweights.learners import build_learner
from fastweights.nn.encoders import Encoder
from fastweights.tasks.episodes import SPARE, EpisodeSampler
from fastweights.training.loop import accelerated, rate_of
from fastweights.training.objectives import MetaObjective
from fastweights.training.step import EMA, TrainStep

ITEMS = {"omniglot": ((28, 28, 1), 1200, 20), "mini-imagenet": ((84, 84, 3), 64, 600), "ptb": ((50,), 1000, 30)}
"""The shape of an item, classes, and items of each."""
WORDS = 10_000
PHASES = ("drawing", "forward", "backward", "optimiser")
FREE = {
    "_record_function_enter_new", "_record_function_exit", "_reshape_alias", "_unsafe_view", "alias", "as_strided",
    "detach", "device", "diagonal", "empty", "empty_like", "empty_permuted", "empty_strided", "expand", "is_same_size",
    "lift_fresh", "new_empty", "new_empty_strided", "permute", "promote_types", "scalar_tensor", "select", "slice",
    "split", "split_with_sizes", "squeeze", "sym_numel", "sym_size", "sym_stride", "t", "transpose", "unbind", "unfold",
    "unsqueeze", "view",
}  # fmt: skip
"""Operations that start no kernel: views, allocations and questions."""
SEVERAL = {
    "embedding_dense_backward": 4, "max_pool2d_with_indices_backward": 2, "native_batch_norm": 3,
    "native_batch_norm_backward": 2, "nll_loss_backward": 2, "sort": 2, "topk": 2,
}  # fmt: skip
"""How many kernels an operation starts, where it is not one."""
VENDOR = 2
"""Kernels of the vendor's LSTM for a word in a layer, forwards or backwards."""


class Counted(TorchDispatchMode):
    """Counts kernels by phase, whether they are the encoder's, and line. Backward, the line is that of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = Counter[tuple[str, bool, str]]()
        self.phase, self.depth = PHASES[0], 0
        self._places: dict[int, tuple[bool, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in FREE:
            self.add(sum(args[-1]) if name == "convolution_backward" else SEVERAL.get(name, 1))
        return result

    def add(self, kernels: int) -> None:
        node = torch._C._current_autograd_node()
        place = self.depth > 0, calling_line()
        if node is not None and self.phase == "backward":
            place = self._places.get(node._sequence_nr(), (False, "elsewhere"))
        elif self.phase == "forward":
            number = torch.autograd._get_sequence_nr()
            self._places |= {number: place, number - 1: place}
        self.kernels[(self.phase, *place)] += kernels

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1

    def of(self, phase: str, *, encoder: bool | None = None) -> int:
        return sum(n for (p, e, _), n in self.kernels.items() if p == phase and encoder in (None, e))


def calling_line() -> str:
    """The innermost line of this library."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "fastweights" in path.parts and path.name not in ("ops.py", "precision.py"):
            return f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


class FakeSampler(EpisodeSampler):
    """Draws as on a GPU, without a look at what is drawn."""

    def __init__(self, items: Items, way: int, shot: int, queries: int, largest: int) -> None:
        self.items, self.way, self.shot, self.queries, self._largest_class = items, way, shot, queries, largest

    def positions(self, tasks: int, generator: torch.Generator | None = None) -> Tensor:
        if not self.items.has_invalid_tasks:
            return self._candidates(tasks, generator)
        drawn = self._candidates(2 * tasks + SPARE, generator)
        return drawn[self.items.invalid(drawn).to(torch.uint8).argsort(stable=True)[:tasks]]


class VendorLSTM(torch.autograd.Function):
    counted: Counted | None = None

    @staticmethod
    def forward(ctx: Any, words: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(words, *weights)
        ctx.kernels = VENDOR * words.shape[1] * len(weights) // 4
        if VendorLSTM.counted is not None:
            VendorLSTM.counted.add(ctx.kernels)
        return words.new_empty(*words.shape[:-1], weights[1].shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if VendorLSTM.counted is not None:
            VendorLSTM.counted.add(ctx.kernels)
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class MappedCoordinates(torch.autograd.Function):
    """As `kernels.coordinate_mlp`: a kernel forwards, and one backwards with a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grads[0] * 1).sum()
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def fused_cell(x: Tensor, state: tuple[Tensor, Tensor], w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.ops.aten._thnn_fused_lstm_cell(F.linear(x, w), F.linear(state[0], u), state[1], b, c)[:2]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have tensors on a CPU take the ways of those on a GPU, without Triton."""
    patches: dict[str, Any] = {
        "torch.Tensor.is_cuda": property(lambda _: True),
        "torch._VF.lstm_cell": fused_cell,
        "torch._VF.lstm": lambda words, _, weights, *__: (VendorLSTM.apply(words, *weights), None, None),
        "torch.lstm": lambda words, _, weights, *__: (VendorLSTM.apply(words, *weights), None, None),
        "torch._meta_registrations.rnn_cell_checkSizes": lambda *_, **__: None,
        "fastweights.kernels.available.has_triton": lambda: False,
        "fastweights.learners.checks.is_at_hand": lambda _: False,
        "fastweights.nn.rules.Gradient.map_gradient": lambda self, x: MappedCoordinates.apply(
            x, *self.mlp.parameters()
        ),
    }
    started = [mock.patch(name, value) for name, value in patches.items()]
    for patch in started:
        patch.start()
    try:
        yield
    finally:
        for patch in started:
            patch.stop()


def without_numbers(learner: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the parameters and buffers of a learner, in place."""
    made: dict[int, Any] = {}
    for module in learner.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    fake = mode.from_tensor(tensor.detach())
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake, tensor
                if tensor is not None:
                    tensors[name] = made[id(tensor)][0]
        if isinstance(module, nn.LSTM):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def count(cell: str, recipe: str = "own") -> Counted:
    """The kernels of a training step of a cell: omniglot-5way-1shot/maml-cnn."""
    training, name = cell.split("/")
    shape, classes, size = ITEMS[training.rsplit("-", 2)[0]]
    words = WORDS if len(shape) == 1 else 0
    settings, s = settings_by(recipe, training, name, "", shape, words, {"precision": "bfloat16"})
    with as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with torch.utils._python_dispatch._disable_current_modes():
            learner = accelerated(build_learner(settings)).train()
        without_numbers(learner, mode)
        step, counted = prepared_step(learner, items_of(shape, classes, size), s, size)
        with torch.autograd.set_multithreading_enabled(False):
            step._step()  # the optimiser makes its state
            VendorLSTM.counted = counted
            try:
                with counted:
                    step._step()
            finally:
                VendorLSTM.counted = None
    return counted


def items_of(shape: tuple[int, ...], classes: int, size: int) -> Items:
    offsets, count = torch.empty(classes + 1, dtype=torch.int64), classes * size
    if len(shape) == 3:
        return Items(torch.empty(count, *shape, dtype=torch.uint8), offsets)
    values, targets, visible = (torch.empty(*each, dtype=torch.int32) for each in ((count, *shape), (count,), (WORDS,)))
    return TextItems(values, offsets, (), torch.empty(count, dtype=torch.int64), targets, visible)


def prepared_step(learner: Any, items: Items, s: Any, largest: int) -> tuple[TrainStep, Counted]:
    """A step as `Training` takes it on a GPU, which tells the count when a phase begins."""
    counted = Counted()
    objective = MetaObjective(learner, FakeSampler(items, *s.training_task, largest), s)
    draw = objective.draw

    def begin(phase: str) -> None:
        counted.phase = phase

    def drawn() -> Any:
        begin("drawing")
        episode = draw()
        begin("forward")
        return episode

    def loss() -> tuple[Tensor, Tensor]:
        result = objective()
        begin("backward")
        return result

    objective.draw = drawn  # type: ignore[method-assign]
    for module in learner.modules():
        if isinstance(module, Encoder):
            module.register_forward_pre_hook(counted.enter)
            module.register_forward_hook(counted.leave)
    ema = EMA(learner, s.ema_decay) if s.ema_decay else None
    step = TrainStep(loss, [(1.0, learner.parameters())], rate_of(s), seed="", device=torch.device("cpu"), ema=ema)
    groups = [{"params": group["params"]} for group in step.optimizer.param_groups]
    step.optimizer = torch.optim.AdamW(groups, fused=True)
    step.optimizer.register_step_pre_hook(lambda *_: begin("optimiser"))
    return step, counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="CELL")
    parser.add_argument("--recipe", default="own", choices=RECIPES)
    parser.add_argument("--lines", type=int, default=0, help="so many lines that start the most kernels")
    options = parser.parse_args()
    for cell in options.cells:
        counted = count(cell, options.recipe)
        phases = ", ".join(f"{phase} {counted.of(phase)}" for phase in PHASES)
        encoder = sum(counted.of(phase, encoder=True) for phase in PHASES)
        print(f"{cell}: {counted.kernels.total():,} kernels; {phases}; encoder {encoder}", flush=True)
        for (phase, _, line), kernels in counted.kernels.most_common(options.lines):
            print(f"  {kernels:6,}  {phase:9} {line}")


if __name__ == "__main__":
    main()
