"""Adapters on disk, and the embeddings they are made of: what was written is read, and nothing else."""

import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastweights.classifier import adapter as adapters
from fastweights.classifier.adapter import Adapter, load_adapter, read_embeddings
from fastweights.classifier.calibration import Calibration
from fastweights.classifier.errors import InputError
from fastweights.learners.saved import digest_of_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    weight, bias = (draw.normal(size=shape).astype(np.float32) for shape in ((3, 4), (3,)))
    Adapter(weight, bias, Calibration()).save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def rewritten(path: Path, *, sign: bool = True, drop: str = "", **changes: object) -> Path:
    """The same adapter with other metadata or tensors."""
    tensors = load_file(path)
    metadata = {"format": adapters.FORMAT, "calibration": json.dumps(Calibration().to_json())}
    for name, value in changes.items():
        place = tensors if isinstance(value, torch.Tensor) else metadata
        place[name.replace("__", ".")] = value  # type: ignore[index, assignment]
    metadata.pop(drop, None)
    save_file(tensors, path, metadata={**metadata, "digest": digest_of_file(tensors, metadata)} if sign else metadata)
    return path


def test_an_adapter_is_read_as_it_was_written(path):
    found = load_adapter(path)
    assert found.calibration == Calibration()
    assert found.keys(np.ones((2, 4), np.float32)).shape == (2, 3)
    assert load_adapter(rewritten(path)).digest == found.digest


@pytest.mark.parametrize("place", [20, 150, -1, -20])
def test_a_flipped_bit_is_noticed(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.safetensors .*restore it from a copy, or train the adapter again"):
        load_adapter(path)


def test_one_of_an_older_version_is_taken_with_a_sentence(path):
    rewritten(path, sign=False, format=adapters.UNDIGESTED)
    with pytest.warns(UserWarning, match="older version, without a digest"):
        assert load_adapter(path).width == 3
    rewritten(path, sign=False)
    with pytest.raises(InputError, match="do not match their digest"):
        load_adapter(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"adapter__bias": torch.full((3,), torch.nan)}, "an adapter that is none"),
        ({"adapter__bias": torch.zeros(4)}, "do not belong together"),
        ({"adapter__weight": torch.zeros(3, 4, dtype=torch.int32)}, "no matrix"),
        ({"adapter__extra": torch.zeros(4)}, "something that no adapter has"),
        ({"more": "words"}, "something that no adapter has"),
        ({"calibration": "{"}, "Expecting"),
        ({"calibration": '{"within": 1, "within": 2}'}, "twice"),
        ({"calibration": "[" * 100_000}, "nested too deeply"),
        ({"calibration": "{}"}, "contradicts itself"),
        ({"format": "fastweights-2"}, "is no adapter"),
        ({"drop": "format"}, "is no adapter"),
    ],
)
def test_what_a_signed_adapter_claims_is_checked(path, changes, says):
    with pytest.raises(InputError, match=says) as refused:
        load_adapter(rewritten(path, **changes))
    assert str(path) in str(refused.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_only_plain_files_are_adapters(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match="plain file"):
            load_adapter(path)
    with pytest.raises(InputError, match="cannot be read"):
        load_adapter(tmp_path / "nothing")


def npz(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_embeddings_twice_or_packed_too_well_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((4, 2)))
    np.save(tmp_path / "y.npy", np.arange(4))
    X, y = ((tmp_path / name).read_bytes() for name in ("x.npy", "y.npy"))
    assert read_embeddings(npz(tmp_path / "ok.npz", ("X.npy", X), ("y.npy", y)))[0].shape == (4, 2)
    with pytest.raises(InputError, match=r"two\.npz cannot be read .*it holds 'X\.npy' twice"):
        read_embeddings(npz(tmp_path / "two.npz", ("X.npy", X), ("X.npy", X), ("y.npy", y)))
    with pytest.raises(InputError, match=r"bomb\.npz cannot be read .*zip bomb"):
        read_embeddings(npz(tmp_path / "bomb.npz", ("X.npy", X + bytes(2**23)), ("y.npy", y)))
