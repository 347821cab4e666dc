"""Several processes training one learner: `torchrun --nproc-per-node 2 -m fastweights train ...`.

Every rank draws the same tasks and takes its slice of them, gradients are averaged (DistributedDataParallel), and rank
0 alone writes. Batch norm uses a rank's own tasks; the running statistics kept for evaluation are rank 0's.
"""

import gc
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fastweights.utils.errors import UserError


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1

    @property
    def several(self) -> bool:
        return self.world > 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, tasks: int) -> slice:
        """This rank's slice of a step's tasks."""
        if tasks % self.world:
            raise UserError(f"tasks_per_step {tasks} cannot be shared evenly by {self.world} processes.")
        each = tasks // self.world
        return slice(self.rank * each, (self.rank + 1) * each)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks."""
        if not self.several:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total / self.world

    def follow_first(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with what they are on the first rank."""
        if self.several:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def largest(self, value: float, device: torch.device) -> float:
        """The largest value over ranks: the same answer everywhere, so that all take the same turn."""
        if not self.several:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.item()


ALONE = Ranks()


def join(device: torch.device) -> tuple[Ranks, torch.device]:
    """Join the processes that torchrun started; alone where there are none."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return ALONE, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Of filters for one colour, whose strides can be written in two ways; nothing is copied that need not be.
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(dist.get_rank(), dist.get_world_size()), device


def leave() -> None:
    """Leave the other processes. A training that is still referred to holds its connections until Python ends, which
    may then end in an abort: let go of it first."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # modules that refer to one another hold connections, too
