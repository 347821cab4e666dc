"""The layer with two paths: each path alone, both together, and what the label projection is."""

import math

import pytest
import torch
from references import read_reference, write_reference
from torch.nn import functional as F

from fastweights.nn.init import SLOPE
from fastweights.nn.layers import FastLinear, disturbed, label_projection
from fastweights.nn.rules import Gradient, Hebb

TASKS, EXAMPLES, QUERIES, SLOTS, WIDTH, OUTPUTS = 2, 6, 4, 5, 7, 8


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_both_paths_are_activated_and_added() -> None:
    """h = act(W'x + b) + act(M'x), with M the Hebbian memory of projected labels, formed in full."""
    layer = FastLinear(WIDTH, OUTPUTS, SLOTS, rule=Hebb())
    keys, queries = torch.randn(TASKS, EXAMPLES, WIDTH), torch.randn(TASKS, QUERIES, WIDTH)
    labels = F.one_hot(torch.randint(SLOTS, (TASKS, EXAMPLES)), SLOTS).float()
    assert layer.slow is not None
    assert layer.projection is not None
    whole = write_reference(keys, labels @ layer.projection)
    slow = F.leaky_relu(queries @ layer.slow.weight.T + layer.slow.bias, SLOPE)
    fast = F.leaky_relu(queries @ whole, SLOPE)
    trace = layer.write(keys, labels)
    torch.testing.assert_close(layer(queries, trace), slow + fast)
    layer.slow = None
    torch.testing.assert_close(layer(queries, trace), fast)
    layer.slow, layer.rule = torch.nn.Linear(WIDTH, OUTPUTS), None
    torch.testing.assert_close(layer(queries, {}), F.leaky_relu(layer.slow(queries), SLOPE))


def test_an_output_layer_binds_one_hots_and_adds_without_activation() -> None:
    layer = FastLinear(WIDTH, SLOTS, SLOTS, rule=Hebb(), projected=False, activated=False)
    keys, queries = torch.randn(TASKS, EXAMPLES, WIDTH), torch.randn(TASKS, QUERIES, WIDTH)
    labels = F.one_hot(torch.randint(SLOTS, (TASKS, EXAMPLES)), SLOTS).float()
    assert layer.slow is not None
    assert layer.projection is None
    expected = layer.slow(queries) + read_reference(keys, labels, queries)
    torch.testing.assert_close(layer(queries, layer.write(keys, labels)), expected)


@pytest.mark.parametrize(("activated", "gain"), [(True, 2 / (1 + SLOPE**2)), (False, 1.0)])
def test_slow_weights_begin_as_wide_as_their_activation_asks(activated: bool, gain: float) -> None:
    layer = FastLinear(500, 400, SLOTS, activated=activated)
    assert layer.slow is not None
    assert layer.slow.weight.var().item() == pytest.approx(gain / 500, rel=0.05)


def test_the_projection_is_uniform_fixed_and_stored() -> None:
    drawn = label_projection(50, 400)
    assert drawn.abs().max() <= 1 / math.sqrt(400)
    torch.testing.assert_close(drawn.std(), torch.tensor(1 / math.sqrt(3 * 400)), rtol=0.02, atol=0)
    layer = FastLinear(WIDTH, OUTPUTS, SLOTS, rule=Hebb())
    assert "projection" in layer.state_dict()
    assert "projection" not in dict(layer.named_parameters())


def test_a_rule_that_learns_from_errors_has_no_projection() -> None:
    assert FastLinear(WIDTH, OUTPUTS, SLOTS, rule=Gradient()).projection is None


def test_disturbed_labels_stay_within_the_noise() -> None:
    labels = F.one_hot(torch.arange(SLOTS), SLOTS).float()
    noisy = disturbed(labels, 0.01)
    assert 0.005 < (noisy - labels).abs().max() <= 0.01 + 1e-7
    assert (noisy - labels).min() < 0
    assert torch.equal(disturbed(labels, 0.0), labels)


def test_truncated_passes_no_learning_signal_to_what_was_written() -> None:
    keys = torch.randn(TASKS, EXAMPLES, WIDTH, requires_grad=True)
    queries = torch.randn(TASKS, QUERIES, WIDTH, requires_grad=True)
    labels = F.one_hot(torch.randint(SLOTS, (TASKS, EXAMPLES)), SLOTS).float()
    for truncated in (True, False):
        layer = FastLinear(WIDTH, OUTPUTS, SLOTS, rule=Hebb(), truncated=truncated)
        to_keys, to_queries = torch.autograd.grad(
            layer(queries, layer.write(keys, labels)).sum(), [keys, queries], allow_unused=True
        )
        assert (to_keys is None) == truncated
        assert to_queries.abs().sum() > 0


def test_a_layer_without_paths_is_refused() -> None:
    with pytest.raises(ValueError, match="computes nothing"):
        FastLinear(WIDTH, OUTPUTS, SLOTS, slow=False)
