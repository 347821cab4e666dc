"""A function of one task's tensors, for each of several tasks: all at once or, where that is quicker, one by one.

With filters of each task's own, `vmap` makes a convolution of as many groups as tasks, and its tensors are in an order
that torch's CPU kernels are slow with. So on a CPU tasks of many numbers are up to twice as fast one by one; of few,
the time goes into Python, which `vmap` spends once.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vmap

Outputs = TypeVar("Outputs", Tensor, tuple[Tensor, ...])
MANY = 10_000
"""Numbers in the items of a task with which a CPU takes tasks one by one: 13 images of Omniglot, one photograph."""


def each_task(function: Callable[..., Outputs], items: Tensor, *others: Tensor) -> Outputs:
    """What a function makes of each task's items and further tensors, stacked; all have tasks as first dimension.

    Random numbers in it differ from task to task.
    """
    if items.device.type != "cpu" or items.shape[1:].numel() < MANY:
        return vmap(function, randomness="different")(items, *others)
    outputs = [function(*task) for task in zip(items, *others, strict=True)]
    if isinstance(outputs[0], Tensor):
        return torch.stack(outputs)
    return tuple(torch.stack(several) for several in zip(*outputs, strict=True))
