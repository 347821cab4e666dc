"""MAML (Finn et al., 2017): an initialisation from which a few gradient steps on the description learn the task.

The state is a network per task: encoder and linear head after `inner_steps` steps of gradient descent on the support
set's cross-entropy, for each task (`nn.each_task`). `first_order` treats the inner gradients as constants.
Its authors take more steps at test than in training (`test_steps`).

By the recipe `own` it has their settings: four ReLU layers, 32 filters for mini-ImageNet and 64 for Omniglot. Ours
differ in that the inner loss is the mean over the support set, where their code takes the sum over classes, in the
start (He's, theirs Xavier's with a small head), in layers that are max-pooled on Omniglot, too, where theirs have
strides, in pooling that rounds up, and in meta-gradients that are not clipped.

**Transductive at query time** where the encoder has batch norm: as in the original, activations are normalised by their
own batch, so the queries of a task depend on one another. With `batch_norm` 0 the learner is inductive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn import functional as F

from fastweights.kernels import per_task
from fastweights.learners.base import Learner
from fastweights.learners.checks import State, check_labels, check_way, count_classes
from fastweights.learners.registry import Preset, register
from fastweights.learners.slots import bound_logits, draw_slots
from fastweights.nn.batch_statistics import normalise_by_batch
from fastweights.nn.each_task import each_task
from fastweights.nn.init import Shapes, he_init
from fastweights.utils.errors import UserError
from fastweights.utils.precision import at_least_float32, check_precise, full_precision
from fastweights.utils.settings import Settings, option

Parameters = dict[str, Tensor]
STRIDE = 16
"""The weights of tasks lie a multiple of so many numbers apart, so that kernels can load several at once."""


@dataclass(frozen=True)
class MAMLSettings(Settings):
    inner_steps: int = option(5, at_least=1, at_most=10_000)
    """Gradient steps on a task's support set."""
    test_steps: int = option(0, at_least=0, at_most=10_000)
    """As many of them in validation and test; 0: as many as in training."""
    inner_rate: float = option(0.01, above=0)
    """Step size of these."""
    first_order: bool = option(False)
    """Whether the meta-gradient leaves out second derivatives."""


PRESETS = {
    "maml-cnn": Preset("MAML: a few gradient steps on each task"),
    "maml-first-order-cnn": Preset("MAML without second derivatives", {"first_order": True}),
}


class AdaptedNetwork(Learner):
    """Gives each task a network of its own, an encoder and a linear head: `adapted` says how a support set makes it."""

    has_slots = adapts_encoder = True

    def __init__(self, encoder: nn.Module, slots: int) -> None:
        super().__init__()
        if not getattr(encoder, "vmappable", True):
            name = self._name.lower()
            raise UserError(
                f"{name} adapts all tasks at once, which this encoder does not allow; choose cnn or resnet."
            )
        adapt_by_task(encoder)
        self.network, self.slots = Classifier(encoder, slots), slots

    @property
    def encoder(self) -> nn.Module:  # type: ignore[override]
        return self.network.encoder

    def describe(self, support_x: Tensor, support_y: Tensor, way: int | None = None) -> dict[str, Tensor]:
        self.check_items(support_x)
        check_labels(support_x, support_y)
        way = count_classes(support_y, way)
        check_way(way, self.slots)
        # Describing takes gradients even where the caller wants none. Tensors made in inference mode allow none, copies
        # made outside it do; leaving that mode switches gradients on, so what the caller had is put back.
        wanted = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(wanted):
            slots = draw_slots(len(support_x), way, self.slots, support_x.device, shuffled=self.training)
            return {"slots": slots, **self.adapted(support_x.clone(), support_y.clone(), slots)}

    def adapted(self, x: Tensor, y: Tensor, slots: Tensor) -> dict[str, Tensor]:
        """What is kept of tasks: items (T, n, *item) with labels (T, n), bound to output units (T, N)."""
        raise NotImplementedError

    @property
    def start(self) -> Tensor:
        """The weights from which tasks start, end to end: (P), as `by_name` has them."""
        pieces = [_channels_last(parameter).flatten() for parameter in self.network.parameters()]
        beyond = -sum(map(len, pieces)) % STRIDE
        return torch.cat([*pieces, pieces[0].new_zeros(beyond)])

    def by_name(self, weights: Tensor, *, channels_last: bool = True) -> Parameters:
        """Weights (..., P) as the parameters of the network, with the numbers of filters (F, D, 3, 3) in the order of
        (3, 3, D, F), in which kernels read them, or in their own. What is beyond the last parameter is of no use."""
        parameters, leading, shaped = dict(self.network.named_parameters()), weights.shape[:-1], {}
        sizes = [parameter.numel() for parameter in parameters.values()]
        *pieces, _ = weights.split([*sizes, weights.shape[-1] - sum(sizes)], dim=-1)
        for (name, parameter), piece in zip(parameters.items(), pieces, strict=True):
            if channels_last and parameter.dim() == 4:
                shaped[name] = piece.view(*leading, *_channels_last(parameter).shape).movedim((-1, -2), (-4, -3))
            else:
                shaped[name] = piece.view((*leading, *parameter.shape))
        return shaped

    def call(self, parameters: Parameters, x: Tensor) -> Tensor:
        """The logits (n, C) of items (n, *item) by the network of one task."""
        output = functional_call(self.network, parameters, (x,))
        assert isinstance(output, Tensor)
        return output

    def call_each(self, parameters: Parameters, x: Tensor) -> Tensor:
        """The same for each task: parameters with tasks as their first dimension, and items (T, n, *item)."""

        def call(x: Tensor, *tensors: Tensor) -> Tensor:
            return self.call(dict(zip(parameters, tensors, strict=True)), x)

        return each_task(call, x, *parameters.values())

    def goals(self, y: Tensor, slots: Tensor) -> Tensor:
        """Labels (T, n), bound to output units (T, N), as ones among zeros (T, n, N): by unit if all are bound, so that
        no step need bring them into the order of the labels."""
        y = slots.gather(1, y) if slots.shape[1] == self.slots else y
        return (y.unsqueeze(2) == torch.arange(slots.shape[1], device=y.device)).view(torch.uint8)

    def gradient(self, x: Tensor, weights: Tensor, goal: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Of the mean cross-entropy of items (n, *item) with goals (n, N) at the weights (P) of a network, and the
        logarithms of its probabilities (n, N).

        Written out, it takes a third of the kernels of `grad`. Autocast is over when gradients are taken: what is below
        the head knows its format, and the head has full precision.
        """

        def logits(weights: Tensor) -> Tensor:
            outputs = self.call(self.by_name(weights), x)
            return outputs if goal.shape[1] == self.slots else outputs.gather(1, slots.expand(len(x), -1))

        found, pull_back = vjp(logits, weights)  # type: ignore[misc]
        with torch.autocast(x.device.type, enabled=False):
            logarithms = found.log_softmax(1)
            return pull_back((logarithms.exp() - goal) / len(x))[0], logarithms


@register("maml", PRESETS)
class MAML(AdaptedNetwork):
    """Its parameters are adapted by gradient descent: one set of them per task (and step) is kept."""

    Settings = MAMLSettings

    def __init__(self, encoder: nn.Module, *, slots: int, **options: Any) -> None:
        super().__init__(encoder, slots)
        s = MAMLSettings(**options)
        self.inner_steps, self.test_steps = s.inner_steps, s.test_steps
        self.inner_rate, self.first_order = s.inner_rate, s.first_order

    @classmethod
    def defaults_for(cls, item_shape: tuple[int, ...], vocabulary: int, shot: int) -> Mapping[str, Any]:
        """The authors' choices: one large step for drawings, five small ones for photographs."""
        return {"inner_steps": 5, "inner_rate": 0.01} if max(item_shape) > 32 else {"inner_steps": 1, "inner_rate": 0.4}

    def adapted(self, x: Tensor, y: Tensor, slots: Tensor) -> dict[str, Tensor]:
        start = self.start.expand(len(x), -1)  # here, so that gradients at all tasks' weights are added up once
        return self.by_name(each_task(self.adapt, x, start, self.goals(y, slots), slots))

    def predict(self, state: State, query_x: Tensor) -> Tensor:
        self.check_items(query_x)
        self.check_state(state, query_x)
        parameters = {name: tensor for name, tensor in state.items() if name != "slots"}
        return bound_logits(self.call_each(parameters, query_x), state["slots"])

    @property
    def state_shapes(self) -> Shapes:
        return {"slots": (None,), **{name: tuple(p.shape) for name, p in self.network.named_parameters()}}

    def adapt(self, x: Tensor, weights: Tensor, goal: Tensor, slots: Tensor) -> Tensor:
        """The weights (P) that suit one task: items (n, *item) with goals (n, N), bound to output units (N)."""
        for _ in range(self.inner_steps if self.training else self.test_steps or self.inner_steps):
            step, _ = self.gradient(x, weights, goal, slots)
            weights = weights.add(step.detach() if self.first_order else step, alpha=-self.inner_rate)
        return weights


class Classifier(nn.Module):
    def __init__(self, encoder: nn.Module, slots: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = he_init(nn.Linear(int(encoder.width), slots), 1.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(at_least_float32(self.encoder(x)))

    @full_precision
    def classify(self, keys: Tensor) -> Tensor:
        check_precise(self.head.weight)
        return self.head(keys)


class _BatchStatistics(nn.Module):
    """Batch norm by the statistics of the current batch, always."""

    by_batch = True

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return normalise_by_batch(x, self.weight, self.bias, self.eps)

    def pooled(self, x: Tensor, slope: float) -> Tensor:
        """Batch norm, 2x2 max-pooling that rounds up, and leaky ReLU."""
        if per_task.has_kernels(x):
            from fastweights.kernels.per_task_norm import fits, normalise_and_pool  # deferred: needs Triton

            if fits(x):
                return normalise_and_pool(x, self.weight, self.bias, self.eps, slope)
        x = F.max_pool2d(self(x), 2, ceil_mode=True)
        return F.leaky_relu(x, slope, inplace=x.device.type == "cpu")


class _OwnFilters(nn.Module):
    """A 3x3 convolution whose filters are each task's own: quick on a GPU."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, x: Tensor) -> Tensor:
        if not (x.is_cuda or per_task.has_kernels(x)):
            return F.conv2d(x, self.weight, self.bias, padding=1)
        y = per_task.convolve(x, self.weight)
        return y if self.bias is None else y + self.bias.view(-1, 1, 1).to(y.dtype)


def adapt_by_task(module: nn.Module) -> None:
    """Replace layers within a network, in place, by such as tasks can have of their own: batch norms by ones without
    running statistics, convolutions by ones that are quick."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, _BatchStatistics(child))
        elif isinstance(child, nn.Conv2d) and (child.kernel_size, child.padding) == ((3, 3), (1, 1)):
            setattr(module, name, _OwnFilters(child))
        else:
            adapt_by_task(child)


def _channels_last(parameter: Tensor) -> Tensor:
    """Filters (F, D, H, W) as (H, W, D, F); others as they are."""
    return parameter.permute(2, 3, 1, 0) if parameter.dim() == 4 else parameter
