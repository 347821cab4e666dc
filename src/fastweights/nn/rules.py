"""Fast-weight rules: how a layer's memory is written in the description phase and read in the prediction phase.

A rule writes and reads a flat dict of tensors, its *trace*:

    trace = rule.write(keys, signal)      keys (T, n, D) and what to bind them to
    answer = rule.read(trace, queries)    queries (T, q, D)

Rules that learn from labels are given one-hots (T, n, C), perhaps noisy, and answer with the association of a query
with each label slot (T, q, C); the layer multiplies it by the label projection R, which is the same as storing
projected labels (M = S'R, see `memory`). They can also `extend` a trace and `forget` a label slot. The `Gradient` rule
learns from errors at the layer's outputs (T, n, E) and answers with the read-out (T, q, E) itself.

Costs are multiplications per task, with n = N*K support examples, q queries, C label slots, key width D and value
width E; memory is floats in the trace.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastweights.nn import memory
from fastweights.nn.coordinates import coordinate_mlp, map_coordinates
from fastweights.nn.init import Shapes

Trace = Mapping[str, Tensor]


class Rule(nn.Module):
    """How a memory is written and read."""

    needs_errors = False
    """Whether `write` is given the errors at the layer's outputs instead of labels."""
    adds_up = False
    """Whether a class weighs the more the more examples it has, so that its answers want balancing."""

    def trace_shapes(self, slots: int, inputs: int, outputs: int) -> Shapes:
        """The tensors of a trace, behind the task dimension, by C, D and E; None is any size."""
        raise NotImplementedError

    def write(self, keys: Tensor, signal: Tensor) -> dict[str, Tensor]:
        """Bind keys (T, n, D) to a signal: labels (T, n, C) or errors (T, n, E)."""
        raise NotImplementedError

    def read(self, trace: Trace, queries: Tensor) -> Tensor:
        """Read with queries (T, q, D): association with each slot (T, q, C), or read-out (T, q, E)."""
        raise NotImplementedError

    def extend(self, trace: Trace, keys: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The trace of these pairs and the earlier ones together."""
        raise NotImplementedError

    def forget(self, trace: Trace, slot: Tensor) -> dict[str, Tensor]:
        """The trace as if nothing was ever written to one label slot, given as a one-hot (T, C)."""
        raise NotImplementedError


class Hebb(Rule):
    """The paper's rule (eq. 1-3): summed outer products. Write n C D, read q C (D + E), memory C D."""

    adds_up = True

    def trace_shapes(self, slots: int, inputs: int, outputs: int) -> Shapes:
        return {"sums": (slots, inputs)}

    def write(self, keys: Tensor, signal: Tensor) -> dict[str, Tensor]:
        return {"sums": memory.write_sums(keys, signal)}

    def read(self, trace: Trace, queries: Tensor) -> Tensor:
        return memory.read_sums(trace["sums"], queries)

    def extend(self, trace: Trace, keys: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"sums": memory.add(trace["sums"], self.write(keys, labels)["sums"])}

    def forget(self, trace: Trace, slot: Tensor) -> dict[str, Tensor]:
        return {"sums": trace["sums"] * (1 - slot).unsqueeze(-1)}


class Normalised(Hebb):
    """Hebb's rule read with class sums and queries of unit norm, the answer multiplied by a learned scale.

    Every class then counts alike, whatever the number and the norms of its keys and however well they agree. The scale
    starts at 10, about the size of the slow path's activations. Costs as `Hebb`, and (C + q) D for the norms.
    """

    adds_up = False

    def __init__(self, scale: float = 10.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    def read(self, trace: Trace, queries: Tensor) -> Tensor:
        unit_norm = {"sums": F.normalize(trace["sums"], dim=-1)}
        return self.log_scale.exp() * super().read(unit_norm, F.normalize(queries, dim=-1))


class Optimal(Rule):
    """The optimal linear associative memory (the paper's footnote): the pseudo-inverse in place of the transpose.

    Ridge regression from keys to labels with a learned penalty p, the answer multiplied by a learned scale (the
    regression alone answers between 0 and 1, too flat for a softmax), solved in the dual, an n x n system,

        S = Y' (K K' + p I)^-1 K        (C x D, read like the class sums of Hebb's rule)

    which tends to the pseudo-inverse as p goes to 0; p stays above `FLOOR` so that it can be solved. The trace
    keeps keys and labels as well, since another example changes the weights of all earlier ones. Outside of training,
    with `balance`, an example's squared error counts mean count / count of its class times: all classes count alike.
    Write n^2 D + n^3 / 3 + n C (n + D), read q C (D + E), memory n (D + C) + C D.
    """

    FLOOR = 1e-2
    balance = True

    def __init__(self, penalty: float = 1.0, scale: float = 10.0) -> None:
        super().__init__()
        self.log_penalty = nn.Parameter(torch.tensor(math.log(penalty)))
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))

    def trace_shapes(self, slots: int, inputs: int, outputs: int) -> Shapes:
        return {"keys": (None, inputs), "labels": (None, slots), "sums": (slots, inputs)}

    def write(self, keys: Tensor, signal: Tensor) -> dict[str, Tensor]:
        weights = example_weights(signal) if self.balance and not self.training else None
        sums = ridge_sums(keys, signal, self.log_penalty.exp() + self.FLOOR, weights)
        return {"keys": keys, "labels": signal, "sums": sums}

    def read(self, trace: Trace, queries: Tensor) -> Tensor:
        return self.log_scale.exp() * memory.read_sums(trace["sums"], queries)

    def extend(self, trace: Trace, keys: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self.write(torch.cat([trace["keys"], keys], dim=1), torch.cat([trace["labels"], labels], dim=1))

    def forget(self, trace: Trace, slot: Tensor) -> dict[str, Tensor]:
        """Examples are zeroed, not removed, so that tasks stay aligned: a key of zeros has no weight."""
        labels = trace["labels"]
        keep = 1 - (labels * slot.unsqueeze(1)).sum(-1, keepdim=True)
        return self.write(trace["keys"] * keep, labels * keep)


def example_weights(one_hots: Tensor) -> Tensor:
    """What each example (..., n) counts, of labels (..., n, C), so that classes count alike.

    These are exactly 1 where all classes have equally many. A forgotten example, of no class and with a key of zeros,
    counts as one.
    """
    weights = (one_hots * memory.balance(one_hots.sum(-2)).unsqueeze(-2)).sum(-1)
    return weights.masked_fill(weights == 0, 1.0)


def ridge_sums(keys: Tensor, labels: Tensor, penalty: Tensor, weights: Tensor | None = None) -> Tensor:
    """Y' (K K' + p W^-1)^-1 K: the linear map (..., C, D) from keys (..., n, D) to labels (..., n, C) by ridge
    regression, whose squared errors may have weights (..., n), on the diagonal of W.

    By Cholesky, which, unlike `torch.linalg.solve`, does not wait for the device.
    """
    precise = keys.double()  # with large keys the penalty is below float32's rounding
    ridge = penalty.double().expand(keys.shape[:-1]) if weights is None else penalty / weights.double()
    gram = precise @ precise.mT + torch.diag_embed(ridge)
    lower, _ = torch.linalg.cholesky_ex(gram)
    halfway = torch.linalg.solve_triangular(lower, labels.double(), upper=False)
    return (torch.linalg.solve_triangular(lower.mT, halfway, upper=True).mT @ precise).to(keys.dtype)


class Gradient(Rule):
    """Error gradients mapped to fast weights (section 3.3): M = g(sum_i of the gradient of example i's loss by W).

    g is an MLP 1-40-40-1 with leaky ReLU that maps every coordinate of the summed gradient by itself; `preprocessed`
    gives it each coordinate's logarithm and sign (Andrychowicz et al., 2016, p = 7) instead of the raw number. The
    gradient of a layer's weights is the summed outer product of its inputs and the errors at its outputs: Hebb's rule
    with errors in place of values. All of it, errors included, is optimised through; with `first_order`, as in the
    paper, gradients are constants to the optimiser, which then learns g and the slow weights alone.
    Write n D E, and D E numbers mapped by g (`nn.coordinates`); read q D E, memory D E. On a GPU, if `fusible`, kernels
    are used that can be differentiated once only.
    """

    needs_errors = adds_up = True
    HIDDEN = 40
    fusible = True

    def __init__(self, preprocessed: bool = False, first_order: bool = False) -> None:
        super().__init__()
        self.first_order = first_order
        self.mlp = coordinate_mlp(2 if preprocessed else 1, self.HIDDEN)

    def trace_shapes(self, slots: int, inputs: int, outputs: int) -> Shapes:
        return {"memory": (inputs, outputs)}

    def write(self, keys: Tensor, signal: Tensor) -> dict[str, Tensor]:
        gradient = memory.write(keys, signal)
        return {"memory": self.map_gradient(gradient.detach() if self.first_order else gradient)}

    def read(self, trace: Trace, queries: Tensor) -> Tensor:
        return memory.read(trace["memory"], queries)

    def map_gradient(self, gradient: Tensor) -> Tensor:
        """g on each number of a tensor."""
        return map_coordinates(gradient, self.mlp, self.fusible)


RULES: dict[str, Callable[[], Rule]] = {
    "hebb": Hebb,
    "normalised": Normalised,
    "optimal": Optimal,
    "gradient": Gradient,
    "gradient1": partial(Gradient, first_order=True),
    "gradient-log": partial(Gradient, preprocessed=True),
}
