"""In which format matrices are multiplied: TF32 where a learner allows it and its encoder computes in bfloat16."""

import pytest
import torch

from fastweights.utils.precision import products

GPU = torch.device("cuda")  # none is used: the setting is torch's, for all devices


@pytest.fixture
def exact():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_is_for_learners_that_allow_it_beside_bfloat16_on_a_gpu(exact) -> None:
    with products(True, "bfloat16", GPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"
    cpu = torch.device("cpu")
    for allowed, precision, device in [(False, "bfloat16", GPU), (True, "float32", GPU), (True, "bfloat16", cpu)]:
        with products(allowed, precision, device):
            assert torch.get_float32_matmul_precision() == "highest"


def test_an_error_leaves_the_setting_as_it_was(exact) -> None:
    with pytest.raises(ValueError, match="within"), products(True, "bfloat16", GPU):
        raise ValueError("within")
    assert torch.get_float32_matmul_precision() == "highest"
