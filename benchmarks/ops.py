"""Kernels of a training step and the bytes they move, counted without a GPU: what a captured step costs.

    python benchmarks/ops.py omniglot-5way-1shot/maml-cnn                 # by the recipe own
    python benchmarks/ops.py --recipe paper --lines 20 omniglot-5way-1shot/fwcnn-hebb
    python benchmarks/ops.py --lines 20 --by bytes mini-imagenet-5way-1shot/snail-resnet

A step is taken on tensors without numbers (torch's fake tensors) that say they are on a GPU. Every operation that is
more than a view or an allocation is counted: drawing tasks, forward, backward and optimiser, with the megabytes of the
tensors it reads and writes; `strided` is the share of copies of what does not lie together. `--lines` names the lines
of this library that start the most, or move the most. What Triton's kernels do in encoders of images is counted as
plain operations, so these look larger than they are: `encoder` is their share; those of MAML and Meta-LSTM, whose tasks
have encoders of their own, are counted as they are launched. The vendor's LSTM is guessed at two kernels a word and
layer.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
UNREAD = {"copy_", "fill_", "full_like", "new_ones", "new_zeros", "ones_like", "zero_", "zeros_like"}
"""Operations that do not read their first argument."""
PICKING = {"embedding", "gather", "index", "index_select"}
"""Operations that read no more of their first argument than they give back."""
COPIES = {"_to_copy", "clone", "contiguous", "copy_"}
VENDOR = 2
"""Kernels of the vendor's LSTM for a word in a layer, forwards or backwards."""


class Counted(TorchDispatchMode):
    """Counts kernels and bytes by phase, whether they are the encoder's, and line: backward that of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes, self.strided = (Counter[tuple[str, bool, str]]() for _ in range(3))
        self.phase, self.depth = PHASES[0], 0
        self._places: dict[int, tuple[bool, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name not in FREE:
            kernels = sum(args[-1]) if name == "convolution_backward" else SEVERAL.get(name, 1)
            self.add(kernels, bytes_moved(name, args, kwargs, result), strided=is_strided_copy(name, args, result))
        return result

    def add(self, kernels: int, moved: int = 0, *, strided: bool = False) -> None:
        node = torch._C._current_autograd_node()
        place = self.depth > 0, calling_line()
        if node is not None and self.phase == "backward":
            place = self._places.get(node._sequence_nr(), (False, "elsewhere"))
        elif self.phase == "forward":
            number = torch.autograd._get_sequence_nr()
            self._places |= {number: place, number - 1: place}
        self.kernels[(self.phase, *place)] += kernels
        self.bytes[(self.phase, *place)] += moved
        self.strided[(self.phase, *place)] += moved if strided else 0

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1

    def of(self, phase: str, *, encoder: bool | None = None) -> int:
        return sum(n for (p, e, _), n in self.kernels.items() if p == phase and encoder in (None, e))


def bytes_moved(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Of the tensors that an operation reads, and of those that it writes."""
    written = sum(map(size_of, tree_leaves(result)))
    read = args[1:] if name in UNREAD | PICKING else args
    return sum(map(size_of, tree_leaves((read, kwargs)))) + written * (2 if name in PICKING else 1)


def size_of(x: Any) -> int:
    """The bytes of a tensor; what is repeated by a stride of 0 is there once."""
    if not isinstance(x, Tensor):
        return 0
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


def is_strided_copy(name: str, args: Any, result: Any) -> bool:
    """Whether numbers lie in another order in the copy, or lay apart."""
    return name in COPIES and args[name == "copy_"].stride() != result.stride()


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


def fused_cell(x: Tensor, state: tuple[Tensor, Tensor], w: Tensor, u: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.ops.aten._thnn_fused_lstm_cell(F.linear(x, w), F.linear(state[0], u), state[1], b, c)[:2]


def launched(kernel: Any, *args: Any, **options: Any) -> None:
    """One of Triton's kernels, which computes nothing. Of sequences it moves the share of one word (`kernels.lstm`)."""
    if VendorLSTM.counted is not None:
        words = args[kernel.arg_names.index("words")] if "words" in kernel.arg_names else 1
        VendorLSTM.counted.add(1, sum(map(size_of, args)) // words)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have tensors on a CPU take the ways of those on a GPU, but for Triton's kernels in encoders of images."""
    patches: dict[str, Any] = {
        "torch.Tensor.is_cuda": property(lambda _: True),
        "torch._VF.lstm_cell": fused_cell,
        "torch._VF.lstm": lambda words, _, weights, *__: (VendorLSTM.apply(words, *weights), None, None),
        "torch.lstm": lambda words, _, weights, *__: (VendorLSTM.apply(words, *weights), None, None),
        "torch._meta_registrations.rnn_cell_checkSizes": lambda *_, **__: None,
        "fastweights.kernels.available.has_triton": lambda: False,
        "fastweights.learners.checks.is_at_hand": lambda _: False,
    }
    if find_spec("triton"):
        patches |= {
            "fastweights.kernels.per_task.has_kernels": lambda _: True,
            "triton.runtime.jit.JITFunction.run": launched,
            "triton.runtime.interpreter.GridExecutor.__call__": launched,
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
    parser.add_argument("--lines", type=int, default=0, help="so many lines that start or move the most")
    parser.add_argument("--by", default="kernels", choices=("kernels", "bytes", "strided"), help="what lines do most")
    options = parser.parse_args()
    for cell in options.cells:
        counted = count(cell, options.recipe)
        phases = ", ".join(f"{phase} {counted.of(phase)}" for phase in PHASES)
        encoder = sum(counted.of(phase, encoder=True) for phase in PHASES)
        megabytes = f"{megabytes_of(counted.bytes)} MB, {megabytes_of(counted.strided)} of them strided"
        of_encoder = {place: moved for place, moved in counted.bytes.items() if place[1]}
        encoders = f"encoder {encoder}, {megabytes_of(of_encoder)} MB"
        print(f"{cell}: {counted.kernels.total():,} kernels, {megabytes}; {phases}; {encoders}", flush=True)
        for place, _ in getattr(counted, options.by).most_common(options.lines):
            moved, strided = (each[place] / 1e6 for each in (counted.bytes, counted.strided))
            print(f"  {counted.kernels[place]:6,}  {moved:9,.1f} MB {strided:9,.1f}  {place[0]:9} {place[2]}")


def megabytes_of(moved: Mapping[Any, int]) -> str:
    return f"{sum(moved.values()) / 1e6:,.0f}"


if __name__ == "__main__":
    main()
