"""States on disk: what a learner was told of some tasks, as a safetensors file."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fastweights.errors import UserError
from fastweights.files import replacing
from fastweights.learners.base import State


def save_state(path: Path | str, state: State) -> None:
    """Write a state. The file appears whole or not at all."""
    try:
        with replacing(Path(path)) as draft:
            # Cloned, since tensors that share memory cannot be stored.
            save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}, draft)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the state cannot be written to {path}: {error}.") from None


def load_state(path: Path | str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Read a state that `save_state` wrote."""
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a state: {error}.") from None
