"""What a checkpoint holds besides a model: the training's settings, the optimiser's state, and where training stands.

All of it is checked before training goes on: a run that went on from half an optimiser would end in another number.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastweights.learners.saved import COUNTED_LATER, COUNTERS, Saved, Tensors, check_counters, is_finite
from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError

MOMENTS: dict[type[torch.optim.Optimizer], frozenset[str]] = {
    torch.optim.AdamW: frozenset(["step", "exp_avg", "exp_avg_sq"]),
    torch.optim.SGD: frozenset(["momentum_buffer"]),
}
"""What an optimiser remembers of each parameter that has stepped."""


def training_of(saved: Saved) -> TrainSettings:
    """The settings by which a model was trained."""
    try:
        return TrainSettings.from_json(saved.training)
    except UserError as error:
        raise UserError(f"{saved.path}: {error}") from None


def check_place(saved: Saved, settings: TrainSettings, sections: set[str]) -> None:
    """Refuse, by a ValueError, a checkpoint that lacks something, holds too much, or is beyond the end of its run."""
    counters = saved.counters
    check_counters(counters)
    for name in sorted(set(COUNTERS) - set(counters) - COUNTED_LATER):
        raise ValueError(f"it does not count {name}")
    if counters["step"] > settings.steps:
        raise ValueError(f"it is at step {counters['step']} of {settings.steps}")
    wanted = sections | ({"optimizer"} if counters["step"] else set())
    if set(saved.sections) != wanted:
        raise ValueError(f"it holds {', '.join(saved.sections)}, not {', '.join(sorted(wanted))}")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """An optimiser's moments and step counts, named by parameter number."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{name}": torch.as_tensor(value) for i, entry in state.items() for name, value in entry.items()}


def fill_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors, steps: int | None = None) -> None:
    """The inverse of `optimizer_tensors`, of an optimiser that has taken so many steps, where that is known.

    An empty dict is an optimiser that has not stepped yet.
    """
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor.clone()
    if steps is not None and bool(state) != (steps > 0):
        raise ValueError(f"an optimiser of {len(state)} parameters after {steps} steps")
    _check_moments(optimizer, state, steps)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, loaded in optimizer.state.items():
        for name, tensor in loaded.items():
            if tensor.shape == parameter.shape:  # as the parameter lies in memory: fused optimisers insist on it
                loaded[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def _check_moments(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Tensor]], steps: int | None
) -> None:
    """Refuse, by a ValueError, moments that are not those of the optimiser's parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entry in state.items():
        if not 0 <= number < len(parameters) or set(entry) != MOMENTS.get(type(optimizer), set(entry)):
            raise ValueError(f"the optimiser's parameter {number} with {', '.join(sorted(entry))}")
        for name, tensor in entry.items():
            shape = () if name == "step" else tuple(parameters[number].shape)
            if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not is_finite(tensor):
                raise ValueError(f"the optimiser's {number}.{name}: {tensor.dtype} of {tuple(tensor.shape)}")
        counted = float(entry.get("step", torch.ones(())))
        if counted < 1 or counted > (counted if steps is None else steps) or counted != int(counted):
            raise ValueError(f"the optimiser's {number}.step is {counted:g}")
        if float(entry.get("exp_avg_sq", torch.zeros(())).min()) < 0:
            raise ValueError(f"the optimiser's {number}.exp_avg_sq is negative")
