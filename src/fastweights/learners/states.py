"""States on disk: what a learner was told of some tasks, as a safetensors file."""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fastweights.learners.base import Learner
from fastweights.learners.checks import State
from fastweights.utils.devices import find_device
from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing

MODEL = "model"
"""The entry of a file's header that says whose state it is."""


def save_state(path: Path | str, state: State, learner: Learner | None = None) -> None:
    """Write a state, and if told by which learner it was described. The file appears whole or not at all."""
    whose = {} if learner is None else {MODEL: fingerprint(learner)}
    try:
        with replacing(Path(path)) as draft:
            # Cloned, since tensors that share memory cannot be stored.
            copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
            save_file(copies, draft, metadata=whose)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the state cannot be written to {path}: {error}.") from None


def load_state(
    path: Path | str, device: torch.device | str = "cpu", learner: Learner | None = None
) -> dict[str, Tensor]:
    """Read a state that `save_state` wrote; where both say whose it is, refuse one that another learner described."""
    try:
        with safe_open(path, framework="pt", device=str(find_device(device))) as file:
            whose = (file.metadata() or {}).get(MODEL)
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a state: {error}.") from None
    if learner is not None and whose is not None and whose != fingerprint(learner):
        raise UserError(f"{path} was described by another model, or before this one was trained on; describe it again.")
    return state


def fingerprint(learner: Learner) -> str:
    """Differs for learners with other weights, wherever they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(learner.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
