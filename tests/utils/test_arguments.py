"""Whole numbers are whole, and sentences stay short."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fastweights.utils.arguments import a_path, require, shown, whole_number
from fastweights.utils.errors import UserError


@pytest.mark.parametrize("five", [5, np.int64(5), np.uint8(5), torch.tensor(5)])
def test_a_whole_number_may_be_one_of_numpys(five):
    number = whole_number("way", five, 1, 5)
    assert number == 5
    assert type(number) is int


@pytest.mark.parametrize("value", [5.0, "5", None, True, np.float64(5), torch.zeros(2), torch.tensor(1.5), [5], b"5"])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(UserError, match=r"^way is a whole number, not .*\.$"):
        whole_number("way", value, 1)


def test_bounds_are_told():
    with pytest.raises(UserError, match=r"^way must be at least 2, not 1\.$"):
        whole_number("way", 1, 2)
    with pytest.raises(UserError, match=r"^way must be at most 1,000, not 1001\.$"):
        whole_number("way", 1001, 2, 1000)


def test_what_is_shown_is_short_and_on_one_line():
    assert shown("a\nb") == r"'a\nb'"
    assert shown(np.zeros((100, 100))) == "a ndarray"
    assert shown([1] * 1000).endswith("...")
    assert shown(10**5000) == "a huge int"
    assert len(shown("x" * 1000)) < 70


def test_kinds_and_paths():
    require("a state", {}, dict, "a dict")
    with pytest.raises(UserError, match=r"^a state is a dict, not None\.$"):
        require("a state", None, dict, "a dict")
    assert a_path("a folder", "x") == Path("x")
    with pytest.raises(UserError, match=r"^a folder is a path or a text, not 5\.$"):
        a_path("a folder", 5)
