"""Where to compute: on a device that is there."""

import torch

from fastweights.errors import UserError


def find_device(name: torch.device | str) -> torch.device:
    """The device of a name, or a sentence that there is none; `auto` is a GPU if there is one."""
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
