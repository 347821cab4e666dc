"""Where to compute: on a device that is there."""

import os
import platform

import torch

from fastweights.utils.arguments import require
from fastweights.utils.errors import UserError

ITEMS_AT_ONCE = {"cpu": 512, "cuda": 16384}
"""About how many items go through an encoder in one batch: what stays in a CPU's cache, what fills a GPU."""
MPS_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""By which NVIDIA's multi-process service (MPS) limits a process to a share of a GPU's processors."""


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


def check_unlimited(device: torch.device) -> None:
    """Refuse a GPU limited by MPS: of an H200 limited to 40 %, cuDNN's convolutions were NaN in most passes."""
    share = os.environ.get(MPS_LIMIT, "100")
    if device.type == "cuda" and share != "100":
        raise UserError(
            f"{MPS_LIMIT} is {share}: on a part of a GPU cuDNN's convolutions were NaN now and then, so no result is "
            "recorded; unset it."
        )


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
