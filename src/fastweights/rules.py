"""Fast-weight rules: how a layer's memory is written in the description phase and read in the prediction phase.

A rule is one interface of two methods over a flat dict of tensors, its *trace*:

    trace = rule.write(keys, labels)      keys (T, n, D), labels (T, n, C) one-hots, perhaps noisy
    answer = rule.read(trace, queries)    queries (T, q, D) -> association with each label slot (T, q, C)

The layer turns an association into its read-out with the label projection R (see `layers.FastLinear`), which is the
same as storing projected labels: M = S'R. Costs below are multiplications per task, against n stored examples, q
queries, C label slots, key width D and value width E; memory is floats in the trace.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from fastweights import memory

Trace = Mapping[str, Tensor]


class Hebb(nn.Module):
    """The paper's rule (eq. 1-3): the summed outer product of keys and label values.

    Write n C D, read q C (D + E), memory C D whatever the number of examples.
    """

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__()
        self.rate = rate

    def write(self, keys: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"sums": memory.write_sums(keys, labels, self.rate)}

    def read(self, trace: Trace, queries: Tensor) -> Tensor:
        return memory.read_sums(trace["sums"], queries)
