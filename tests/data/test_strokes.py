"""The built-in dataset: the same bytes everywhere, the promised sizes, and neither trivial nor hopeless."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support import Loaded

from fastweights.data import strokes
from fastweights.data.items import Dataset
from fastweights.data.prepared import content_hash
from fastweights.tasks.episodes import EvaluationTasks
from fastweights.utils.errors import UserError

TINY_HASH = "bc43876cd7f71d94bf839f3b1ead564df8699f15a3f2bcc3af53f79777f78785"
"""Of make(6, 3, seed=0). If it changes, every drawing did: raise strokes.VERSION along with it."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few classes, for tests of the cache."""
    monkeypatch.setattr(strokes, "SPLITS", {"train": 5, "val": 3, "test": 2})


def digest(images: np.ndarray) -> str:
    return hashlib.sha256(images.tobytes()).hexdigest()


def nearest_pixels(dataset: Dataset, tasks: int) -> float:
    """How often the one support image nearest in Euclidean distance has the right class, 5-way 1-shot."""
    drawn = EvaluationTasks(dataset, "test", way=5, shot=1, queries=10, tasks=tasks)
    right = []
    for positions in drawn:
        episode = drawn.sampler.episode(positions)
        distance = torch.cdist(episode.query_x.flatten(2).float(), episode.support_x.flatten(2).float())
        right.append((distance.argmin(-1) == episode.query_y).float().mean(-1))
    return torch.cat(right).mean().item()


def test_same_seed_same_bytes() -> None:
    first, second = strokes.make(30, 3, seed=7), strokes.make(30, 3, seed=7)
    assert np.array_equal(first, second)


def test_bytes_are_pinned() -> None:
    """Only operations that every machine rounds alike are used, so the bytes can be written down."""
    assert digest(strokes.make(6, 3, seed=0)) == TINY_HASH


def test_same_bytes_in_another_process() -> None:
    code = (
        "import hashlib; from fastweights.data.strokes import make;"
        "print(hashlib.sha256(make(6, 3, seed=0).tobytes()).hexdigest())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == digest(strokes.make(6, 3, seed=0))


def test_other_seeds_differ() -> None:
    assert len({digest(strokes.make(4, 2, seed=seed)) for seed in range(5)}) == 5


def test_random_state_of_the_caller_is_left_alone() -> None:
    np.random.seed(3)
    torch.manual_seed(3)
    strokes.make(4, 2, seed=0)
    after = np.random.random(), torch.rand(()).item()
    np.random.seed(3)
    torch.manual_seed(3)
    assert after == (np.random.random(), torch.rand(()).item())


def test_negative_seed_is_refused() -> None:
    with pytest.raises(UserError, match="-1"):
        strokes.make(4, 2, seed=-1)


def test_shape_of_a_small_make() -> None:
    images = strokes.make(1, 2, seed=1)
    assert images.shape == (1, 2, 28, 28, 1)
    assert images.dtype == np.uint8


def test_progress_rises_to_one(loaded_strokes: Loaded) -> None:
    assert loaded_strokes.fractions == sorted(loaded_strokes.fractions)
    assert len(loaded_strokes.fractions) > 10
    assert 0 < loaded_strokes.fractions[0] < 0.1
    assert loaded_strokes.fractions[-1] == 1.0


def test_made_in_time(loaded_strokes: Loaded) -> None:
    assert loaded_strokes.seconds < 30


@pytest.mark.parametrize(("split", "classes"), [("train", 1000), ("val", 200), ("test", 400)])
def test_split(loaded_strokes: Loaded, split: str, classes: int) -> None:
    items = loaded_strokes.dataset.splits[split]
    assert items.values.shape == (classes * 20, 28, 28, 1)
    assert items.values.dtype == torch.uint8
    assert items.offsets.dtype == torch.int64
    assert items.offsets.tolist() == list(range(0, classes * 20 + 1, 20))
    assert len(set(items.names)) == items.classes == classes
    assert items.names[7] == f"{split}-0007"


def test_dataset(loaded_strokes: Loaded) -> None:
    dataset = loaded_strokes.dataset
    assert dataset.full_name == "strokes"
    assert list(dataset.splits) == ["train", "val", "test"]
    assert dataset.content_hash == dataset.manifest["content_hash"]
    assert dataset.manifest["seed"] == 0
    assert dataset.folder == loaded_strokes.root / "prepared" / "strokes-v1-seed0"


def test_no_drawing_and_no_class_occurs_twice(loaded_strokes: Loaded) -> None:
    drawings = [image.tobytes() for items in loaded_strokes.dataset.splits.values() for image in items.values.numpy()]
    assert len(set(drawings)) == len(drawings) == 1600 * 20
    characters = strokes.invent(1600, np.random.Generator(np.random.PCG64(0)))
    assert len({program.tobytes() for program in characters.controls.round(2)}) == 1600


def test_drawings_of_a_class_vary_but_belong_together(loaded_strokes: Loaded) -> None:
    """Blurred a little, a drawing is nearer to its own class's mean than to another's, yet never the same."""
    values = loaded_strokes.dataset.splits["val"].values
    blurred = torch.nn.functional.avg_pool2d(values.float().view(-1, 1, 28, 28), 4).view(200, 20, -1)
    within = (blurred - blurred.mean(1, keepdim=True)).norm(dim=-1)
    between = (blurred - blurred.mean(1).roll(1, 0).unsqueeze(1)).norm(dim=-1)
    assert within.min() > 0
    assert within.mean() < 0.8 * between.mean()


def test_ink_is_white_on_black_and_not_cut_off(loaded_strokes: Loaded) -> None:
    values = loaded_strokes.dataset.splits["test"].values[..., 0]
    assert (values.amax((1, 2)) == 255).all()
    share = values.float().mean((1, 2)) / 255
    assert share.min() > 0.03
    assert share.max() < 0.5
    lit = values > 0
    assert (lit.any(1).sum(-1) <= 25).all()
    assert (lit.any(2).sum(-1) <= 25).all()


def test_pixels_alone_do_not_solve_it(loaded_strokes: Loaded) -> None:
    assert 0.4 < nearest_pixels(loaded_strokes.dataset, tasks=1000) < 0.6


def test_ink_agrees_with_the_distance_to_every_piece() -> None:
    """Only pixels near each piece of a stroke are computed; the plain way gives the same image."""
    rng = np.random.Generator(np.random.PCG64(5))
    begin = rng.random((8, 3, 1, 2)) * 12 + 8
    lines = begin + np.cumsum(rng.random((8, 3, 9, 2)) * 2 - 0.8, axis=2)
    pen = np.linspace(*strokes.PEN, 8)
    pixel = np.stack(np.meshgrid(np.arange(28), np.arange(28)), -1).reshape(-1, 1, 2)
    for image, line, radius in zip(strokes.ink(lines, pen), lines, pen, strict=True):
        a, step = line[:, :-1].reshape(-1, 2), np.diff(line, axis=1).reshape(-1, 2)
        t = np.clip(((pixel - a) * step).sum(-1) / (step * step).sum(-1), 0, 1)
        distance = np.sqrt(((pixel - a - t[..., None] * step) ** 2).sum(-1)).min(-1)
        expected = np.clip(radius + 0.5 - distance, 0, 1).reshape(28, 28) * 255
        assert np.abs(image - expected).max() <= 0.51


def test_ink_beyond_the_edge_is_cut_off() -> None:
    lines = np.array([[[[-40.0, 14.0], [-39.0, 14.0]]], [[[60.0, 70.0], [61.0, 70.0]]], [[[-0.5, 14.0], [0.5, 14.0]]]])
    images = strokes.ink(lines, np.ones(3))
    assert images[:2].max() == 0
    assert images[2, 14, 0] == 255
    assert images[2, :, 5:].max() == 0


def test_second_load_reads_the_cache(loaded_strokes: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strokes, "make", None)
    begin = time.perf_counter()
    again = strokes.load(root=loaded_strokes.root)
    assert time.perf_counter() - begin < 1
    assert again.content_hash == loaded_strokes.dataset.content_hash
    for split, items in loaded_strokes.dataset.splits.items():
        assert torch.equal(again.splits[split].values, items.values)
        assert torch.equal(again.splits[split].offsets, items.offsets)


@pytest.mark.usefixtures("small")
def test_content_hash_is_of_the_arrays(tmp_path: Path) -> None:
    dataset = strokes.load(root=tmp_path)
    arrays = {f"{split}_values": items.values.numpy() for split, items in dataset.splits.items()}
    arrays |= {f"{split}_offsets": items.offsets.numpy() for split, items in dataset.splits.items()}
    assert dataset.content_hash == content_hash(arrays)


@pytest.mark.usefixtures("small")
def test_each_seed_has_its_own_cache(tmp_path: Path) -> None:
    first, second = strokes.load(root=tmp_path, seed=0), strokes.load(root=tmp_path, seed=1)
    assert first.content_hash != second.content_hash
    assert strokes.load(root=tmp_path, seed=0).content_hash == first.content_hash


@pytest.mark.usefixtures("small")
def test_default_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(tmp_path))
    assert strokes.load().folder == tmp_path / "prepared" / "strokes-v1-seed0"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("broken", ["fastweights.data.strokes.draw", "numpy.save"])
def test_interrupted_making_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(broken, interrupt)
        with pytest.raises(KeyboardInterrupt):
            strokes.load(root=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.name != "prepared"] == []
    assert strokes.load(root=tmp_path).splits["train"].classes == 5
