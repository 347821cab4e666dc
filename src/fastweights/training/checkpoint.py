"""What a checkpoint holds besides a model: the training's settings and the optimiser's state."""

import torch
from torch import Tensor

from fastweights.learners.saved import Saved, Tensors
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError


def training_of(saved: Saved) -> TrainSettings:
    """The settings by which a model was trained."""
    try:
        return TrainSettings.from_json(saved.training)
    except UserError as error:
        raise UserError(f"{saved.path}: {error}") from None


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """An optimiser's moments and step counts, named by parameter number."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": torch.as_tensor(value) for i, entry in state.items() for name, value in entry.items()}


def fill_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    """The inverse of `optimizer_tensors`; an empty dict is an optimiser that has not stepped yet."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, loaded in optimizer.state.items():
        for name, tensor in loaded.items():
            if tensor.shape == parameter.shape:  # as the parameter lies in memory: fused optimisers insist on it
                loaded[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
