"""A learner from outside the package: registered or not, it trains, resumes, evaluates, is timed and drawn."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import Lines
from torch import nn
from torch.nn import functional as F

from fastweights import bench
from fastweights.cli.main import main
from fastweights.evaluation import evaluate
from fastweights.learners import KeyLearner, Learner, LearnerSettings, Preset, build_learner, preset, register, registry
from fastweights.learners.outside import find, make, preset_of
from fastweights.learners.saved import load, load_learner
from fastweights.pictures import draw_task
from fastweights.tasks.episodes import EpisodeSampler, EvaluationTasks
from fastweights.training.loop import CHECKPOINT, MODEL, Training, resume
from fastweights.utils.errors import UserError
from fastweights.utils.settings import Settings, option


@dataclass(frozen=True)
class ManhattanSettings(Settings):
    scale: float = option(0.1, above=0)
    """What distances are multiplied by."""


class Manhattan(KeyLearner):
    """The nearest class mean by the sum of absolute differences."""

    Settings = ManhattanSettings

    def __init__(self, encoder: nn.Module, scale: float) -> None:
        super().__init__()
        self.encoder, self.scale = encoder, scale

    def bind(self, keys, labels, way):
        one_hots = F.one_hot(labels, way).to(keys.dtype)
        return {"means": one_hots.mT @ keys / one_hots.sum(1).unsqueeze(-1)}

    def answer(self, state, queries):
        return -self.scale * torch.cdist(queries, state["means"], p=1)

    @property
    def state_shapes(self):
        return {"means": (None, self.encoder.width)}


class Plain(Learner):
    """All that a learner needs: a linear map of pixels, and nearest examples."""

    def __init__(self, item_shape: tuple[int, ...], width: int = 16) -> None:
        super().__init__()
        self.map = nn.Linear(item_shape[0] * item_shape[1] * item_shape[2], width)

    def describe(self, support_x, support_y, way=None):
        return {"keys": self.map(support_x.flatten(2).float() / 255), "labels": F.one_hot(support_y, way).float()}

    def predict(self, state, query_x):
        queries = self.map(query_x.flatten(2).float() / 255)
        return torch.softmax(-torch.cdist(queries, state["keys"]), -1) @ state["labels"] * 10


class Paired(Manhattan):
    """A loss of its own, and an answer of its own in the prediction phase."""

    asked = 0

    def training_loss(self, episode, label_smoothing=0.0):
        logits = self(episode)
        return 3.0 * F.cross_entropy(logits.flatten(0, 1), episode.query_y.flatten()) + 1.0, logits

    def predict(self, state, query_x):
        Paired.asked += 1
        return super().predict(state, query_x)


@pytest.fixture
def registered(monkeypatch):
    """The learner under a name, for the length of a test."""
    monkeypatch.setattr(registry, "SYSTEMS", registry.SYSTEMS)
    monkeypatch.setitem(registry.SYSTEMS, "manhattan", Manhattan)
    small = {"filters": 8, "layers": 3, "batch_norm": 3}
    models = {"manhattan-cnn": Preset("nearest mean by absolute differences", small, training={"learning_rate": 0.005})}
    before = dict(registry.PRESETS)
    register("manhattan", models)(Manhattan)
    yield "manhattan-cnn"
    registry.PRESETS.clear()
    registry.PRESETS.update(before)


def test_a_registered_learner_goes_all_the_way(registered, dataset, train_settings, tmp_path):
    about = {"dataset": "blobs", "item_shape": (8, 8, 1), "vocabulary": 0, "way": 5, "shot": 1}
    settings = preset(registered, **about, scale=0.2)
    assert (settings.scale, settings.filters) == (0.2, 8)
    with pytest.raises(UserError, match="scale must be above 0"):
        preset(registered, **about, scale=0.0)
    whole = Lines()
    outcome = Training(settings, train_settings, dataset, sinks=[whole]).run()
    first = Training(settings, train_settings, dataset, folder=tmp_path)
    lines = Lines()
    first.sinks = [lines, SimpleNamespace(write=lambda line: _stop(first, line), close=lambda: None)]
    assert first.run().interrupted
    rest = Lines()
    resumed = resume(tmp_path, dataset, sinks=[rest]).run()
    assert lines.losses() + rest.losses() == whole.losses()
    assert torch.equal(resumed.test.per_task, outcome.test.per_task)
    learner, saved = load_learner(tmp_path)
    assert isinstance(learner, Manhattan)
    assert learner.scale == saved.learner.scale == 0.2
    tasks = EvaluationTasks(dataset, "test", way=5, shot=1, queries=3, tasks=30)
    assert torch.equal(evaluate(learner, dataset.splits["test"], tasks).per_task, outcome.test.per_task)
    job = bench.Job("strokes", way=3, shot=1, queries=1, tasks=2)
    timed = preset(registered, **{**about, "item_shape": (28, 28, 1)})
    line = bench.measure(registered, timed, job, torch.device("cpu"), "float32", runs=1)
    assert line["memory_ms"]
    episode = EpisodeSampler(dataset.splits["test"], 5, 1, 2).draw(1)
    draw_task(learner, episode, tmp_path / "task.png")
    assert (tmp_path / "task.png").stat().st_size > 1000
    with pytest.raises(UserError, match="Manhattan cannot add examples"):
        learner.extend(learner.describe(episode.support_x, episode.support_y), episode.support_x, episode.support_y)
    assert not learner.can_extend


def _stop(training, line):
    training.request.asked = line["step"] == 10


def test_a_plain_learner_trains_as_an_instance_and_resumes_when_given_again(dataset, train_settings, tmp_path):
    torch.manual_seed(0)
    learner = Plain((8, 8, 1))
    before = learner.map.weight.clone()
    training = Training(learner, train_settings, dataset, folder=tmp_path)
    training.sinks = [SimpleNamespace(write=lambda line: _stop(training, line), close=lambda: None)]
    assert training.run().interrupted
    assert not torch.equal(before, training.learner.map.weight.detach())
    with pytest.raises(UserError, match="holds the weights of Plain, which is not registered here"):
        resume(tmp_path, dataset)
    outcome = resume(tmp_path, dataset, learner=Plain((8, 8, 1))).run()
    assert outcome.counters.step == 30
    with pytest.raises(UserError, match="not registered"):
        load_learner(tmp_path)
    again, saved = load_learner(tmp_path, learner=Plain((8, 8, 1)))
    assert (saved.learner.system, saved.learner.item_shape) == ("Plain", (8, 8, 1))
    tasks = EvaluationTasks(dataset, "test", way=5, shot=1, queries=3, tasks=30)
    assert torch.equal(evaluate(again, dataset.splits["test"], tasks).per_task, outcome.test.per_task)


def test_an_instance_that_was_built_is_saved_with_its_settings(dataset, learner_settings, train_settings, tmp_path):
    Training(build_learner(learner_settings), train_settings, dataset, folder=tmp_path).run()
    assert load(tmp_path / MODEL).learner == load(tmp_path / CHECKPOINT).learner == learner_settings


def test_what_a_subclass_overrides_is_what_training_and_evaluation_call(dataset, train_settings):
    """Its own loss is minimised, and its own `predict` answers, although its parent is asked by keys."""
    encoder = build_learner(LearnerSettings(item_shape=(8, 8, 1), filters=8, layers=3)).encoder
    learner = Paired(encoder, 0.1)
    assert (Manhattan.by_keys, Paired.by_keys) == (True, False)
    lines = Lines()
    Paired.asked = 0
    Training(learner, train_settings, dataset, sinks=[lines]).run()
    assert min(lines.losses()) > 1.0
    assert Paired.asked > train_settings.steps
    with pytest.raises(UserError, match="norm_penalty"):
        Training(learner, type(train_settings)(norm_penalty=1.0, queries=3), dataset)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pretrain_steps": 3}, "Plain has no encoder"),
        ({"freeze_encoder_steps": 2}, "Plain has no encoder"),
        ({"key_norm": 1.0}, "Plain does not"),
    ],
)
def test_what_a_plain_learner_cannot_do_is_refused(dataset, changes, says):
    from fastweights.training.settings import TrainSettings

    with pytest.raises(UserError, match=says):
        Training(Plain((8, 8, 1)), TrainSettings(queries=3, **changes), dataset)


class Wordy(Plain):
    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        pass


class Lazy(Plain):
    def __init__(self, item_shape):
        super().__init__(item_shape)
        self.above = torch.nn.LazyLinear(3)


@pytest.mark.parametrize(("kind", "kept"), [(Wordy, "_extra_state"), (Lazy, r"above\.weight")])
def test_what_no_checkpoint_can_hold_is_refused_before_the_training(dataset, train_settings, kind, kept):
    with pytest.raises(UserError, match=f"{kind.__name__} keeps {kept}, which is no tensor of a known shape"):
        Training(kind((8, 8, 1)), train_settings, dataset)


def test_a_learner_without_parameters_is_not_trained(dataset, train_settings):
    from fastweights.learners.examples import PixelNearestNeighbour

    with pytest.raises(UserError, match="no parameters to train"):
        Training(PixelNearestNeighbour(), train_settings, dataset)


FILE = '''
import torch
from fastweights import Learner

class Mine(Learner):
    """Nearest pixels, with a learned scale."""

    def __init__(self, item_shape):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def describe(self, support_x, support_y, way=None):
        return {"x": support_x.flatten(2).float(), "y": torch.nn.functional.one_hot(support_y, way).float()}

    def predict(self, state, query_x):
        return torch.softmax(-self.scale * torch.cdist(query_x.flatten(2).float(), state["x"]) / 100, -1) @ state["y"]

def wants(colour):
    return Mine((1,))

number = 5
'''


def test_a_learner_in_a_file(tmp_path):
    path = tmp_path / "my_file.py"
    path.write_text(FILE)
    found = find(f"{path}:Mine")
    assert preset_of(found, 0) is None
    assert type(make(found, item_shape=(8, 8, 1), vocabulary=0, way=5)).__name__ == "Mine"
    for name, says in {
        f"{path}:Mien": r"called 'Mien' \(did you mean Mine\?\)",
        f"{path}:number": "no class or function in .*my_file.py called 'number'",
        f"{tmp_path}/other.py:Mine": "with a file that exists",
        "Mine": "write my_file.py:MyLearner",
    }.items():
        with pytest.raises(UserError, match=says):
            find(name)
    with pytest.raises(UserError, match="wants needs colour"):
        make(find(f"{path}:wants"), item_shape=(8, 8, 1), vocabulary=0, way=5)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(UserError, match=r"broken.py cannot be imported \(ZeroDivisionError"):
        find(f"{tmp_path}/broken.py:Mine")


def call(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fastweights", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_the_command_line_takes_a_file(tmp_path, monkeypatch, dataset, capsys):
    """Train, resume, evaluate, draw and time, by commands."""
    (tmp_path / "my_file.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: dataset)
    quick = ["--queries", "2", "--validation-tasks", "5", "--test-tasks", "5", "--steps"]
    mine = ["--learner", "my_file.py:Mine"]
    for words in (
        ["train", *mine, "--out", "run", *quick, "3"],
        ["train", *mine, "--out", "run", "--resume", "--steps", "5"],
        ["evaluate", "run", *mine, "--tasks", "5"],
        ["episodes", "run", *mine, "-o", "task.png"],
        ["bench", "my_file.py:Mine", "--shape", "strokes", "--runs", "1", "--out", "bench.jsonl"],
    ):
        assert call(monkeypatch, *words) == 0, words
    assert load(tmp_path / "run" / CHECKPOINT).counters["step"] == 5
    assert (tmp_path / "task.png").exists()
    assert "my_file.py:Mine" in (tmp_path / "bench.jsonl").read_text()
    assert call(monkeypatch, "evaluate", "run") == 2
    assert "name it with --learner my_file.py:MyLearner" in capsys.readouterr().err


def test_installed_packages_add_learners_by_an_entry_point(monkeypatch):
    def load_it():
        register("plugged", {"plugged-cnn": Preset("from a package")})(Manhattan)

    point = SimpleNamespace(name="plugged", value="package:module", load=load_it)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "fastweights.learners" else [])
    registry.load_installed.cache_clear()
    before = dict(registry.PRESETS), dict(registry.SYSTEMS)
    try:
        assert registry.find_preset("plugged-cnn").system == "plugged"
        assert registry.find_system("plugged") is Manhattan
        point.load = lambda: 1 / 0
        registry.load_installed.cache_clear()
        with pytest.raises(UserError, match=r"installed learner plugged cannot be imported"):
            registry.load_installed()
    finally:
        for kept, known in zip(before, (registry.PRESETS, registry.SYSTEMS), strict=True):
            known.clear()
            known.update(kept)
        registry.load_installed.cache_clear()


def test_the_example_in_contributing_works(tmp_path, monkeypatch):
    """CONTRIBUTING shows a learner of one's own: it is run as it stands there."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert "@register(" in code
    assert len(code.splitlines()) <= 35
    (tmp_path / "my_system.py").write_text(code)
    found = find(f"{tmp_path}/my_system.py:Cosine")
    try:
        name = preset_of(found, 0)
        settings = preset(name, dataset="blobs", item_shape=(8, 8, 1), vocabulary=0, way=5, shot=1)
        episode = noise()
        assert build_learner(settings)(episode).shape == (2, 10, 5)
    finally:
        for known in (registry.PRESETS, registry.SYSTEMS):
            for called in [key for key in known if key.startswith("cosine")]:
                del known[called]


def noise():
    import tiny

    return tiny.noise_episode(2, 5, 1, 2, (8, 8, 1))


def test_a_registered_learner_in_a_file_brings_its_own_optimiser_defaults(tmp_path, monkeypatch, dataset):
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    (tmp_path / "my_system.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastweights.data.load", lambda *arguments: dataset)
    small = ["--set", "filters=8", "--set", "layers=2", "--set", "scale=20", "--queries", "2", "--steps", "2"]
    few = ["--validation-tasks", "5", "--test-tasks", "5", "--out", "run"]
    try:
        assert call(monkeypatch, "train", "--learner", "my_system.py:Cosine", *small, *few) == 0
        saved = load(tmp_path / "run" / MODEL)
        assert (saved.learner.system, saved.learner.scale, saved.training["learning_rate"]) == ("cosine", 20.0, 2e-3)
        again = ["train", "--resume", "--out", "run", "--steps", "3", "--learner", "my_system.py:Cosine", *small[:6]]
        assert call(monkeypatch, *again) == 0
    finally:
        for known in (registry.PRESETS, registry.SYSTEMS):
            for called in [key for key in known if key.startswith("cosine")]:
                del known[called]
