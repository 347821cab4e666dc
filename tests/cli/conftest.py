"""The look-alikes of the benchmarks, for the data commands too."""

import pytest
from data.conftest import omniglot_root, ptb_root, small_omniglot, small_ptb  # noqa: F401
from experiments.conftest import small_benchmarks  # noqa: F401


@pytest.fixture
def nothing_outside(tmp_path, monkeypatch):
    """No test of the data commands reads or writes the user's own cache."""
    monkeypatch.delenv("FASTWEIGHTS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
