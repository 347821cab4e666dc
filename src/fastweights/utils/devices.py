"""Where to compute: on a device that is there."""

import os
import platform

import torch

from fastweights.utils.arguments import require
from fastweights.utils.errors import UserError

ITEMS_AT_ONCE = {"cpu": 512, "cuda": 16384}
"""About how many items go through an encoder in one batch: what stays in a CPU's cache, what fills a GPU."""
MPS_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""Where NVIDIA's multi-process service limits a process to a share of a GPU's processors."""


def items_at_once(device: torch.device) -> int:
    return ITEMS_AT_ONCE.get(device.type, 512)


def find_device(name: torch.device | str) -> torch.device:
    """The device of a name, or a sentence that there is none; `auto` is a GPU if there is one."""
    require("a device", name, (str, torch.device), "a name such as cpu, or one of torch's")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the device {name} is not available here ({reason}); name cpu or auto.") from None
    if device.type == "meta":
        raise UserError("the device meta computes nothing; name cpu or cuda.")
    return device


def check_whole(device: torch.device) -> None:
    """That a GPU's results can be trusted: on an H200 limited to 40 %, cuDNN's convolutions were NaN in most passes of
    the ResNet, and trainings without a NaN came out up to two points away from what they do otherwise."""
    share = os.environ.get(MPS_LIMIT, "100")
    if device.type == "cuda" and share != "100":
        raise UserError(
            f"{MPS_LIMIT} is {share}: on a part of a GPU the vendor's convolutions were seen to give wrong numbers; "
            "unset it for results that are recorded."
        )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
