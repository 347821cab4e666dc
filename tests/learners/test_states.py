"""What users may ask of a described task: to add to it, to forget a class of it, to keep it on disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

from fastweights.learners import Learner, build_learner
from fastweights.learners.base import UNSEEN
from fastweights.learners.checks import count_classes
from fastweights.learners.examples import PixelNearestNeighbour
from fastweights.learners.registry import LearnerSettings
from fastweights.learners.saved import check_contents, load_state, save, save_state
from fastweights.learners.slots import add_slots
from fastweights.utils.devices import ITEMS_AT_ONCE
from fastweights.utils.errors import UserError

SLOTS = 6


def narrow(**chosen: str) -> Callable[[], Learner]:
    width = {} if "system" in chosen else {"width": 10}
    settings = LearnerSettings(item_shape=(12, 12, 1), slots=SLOTS, filters=4, layers=2, **width, **chosen)
    return lambda: build_learner(settings)


CHANGEABLE = {
    "hebb": narrow(),
    "normalised": narrow(rule="normalised"),
    "optimal": narrow(rule="optimal"),
    "fc-fast-only": narrow(placement="fc-fast-only"),
    "truncated": narrow(placement="truncated"),
    "softmax": narrow(placement="softmax"),
    "softmax-fast-only, optimal": narrow(placement="softmax-fast-only", rule="optimal"),
    "pixels": PixelNearestNeighbour,
}
FIXED = {
    "gradient": narrow(rule="gradient"),
    "fc+softmax": narrow(placement="fc+softmax"),
}
for system in tiny.IMAGE_SYSTEMS:  # the others say themselves whether they can extend and forget
    if system != "fast-weights":
        (CHANGEABLE if narrow(system=system)().can_extend else FIXED)[system] = narrow(system=system)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def assert_same_answers(learner: Learner, one: dict[str, Tensor], other: dict[str, Tensor], query_x: Tensor) -> None:
    torch.testing.assert_close(learner.predict(one, query_x), learner.predict(other, query_x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_examples_are_encoded_in_pieces_unless_batch_norm_sees_them_together(monkeypatch, training: bool) -> None:
    monkeypatch.setitem(ITEMS_AT_ONCE, "cpu", 10)
    learner, episode = narrow()().train(training), tiny.noise_episode()  # 3 tasks of 8 examples
    at_once: list[int] = []
    learner.encoder.register_forward_pre_hook(lambda _, items: at_once.append(len(items[0])))
    keys = learner.embed(episode.support_x)
    assert at_once == ([24] if training else [10, 10, 4])
    torch.testing.assert_close(keys, learner.encoder(episode.support_x.flatten(0, 1)).unflatten(0, (3, 8)))


@pytest.mark.parametrize("name", CHANGEABLE)
def test_extending_is_describing_all_at_once(name: str) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode(shot=3)
    x, y = episode.support_x, episode.support_y
    first, later = [0, 1, 3, 6, 9], [2, 4, 5, 7, 8, 10, 11]
    state = learner.describe(x[:, first], y[:, first], 4)
    extended = learner.extend(state, x[:, later], y[:, later])
    assert_same_answers(learner, extended, learner.describe(x, y), episode.query_x)


@pytest.mark.parametrize("name", CHANGEABLE)
def test_extending_may_bring_new_classes(name: str) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode(way=SLOTS, shot=2)
    x, y = episode.support_x, episode.support_y
    state = learner.describe(x[:, :8], y[:, :8])
    assert learner.predict(state, episode.query_x).shape[-1] == 4
    extended = learner.extend(state, x[:, 8:], y[:, 8:])
    assert_same_answers(learner, extended, learner.describe(x, y), episode.query_x)


@pytest.mark.parametrize("name", CHANGEABLE)
def test_forgetting_is_never_having_seen(name: str) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode(shot=2)
    x, y = episode.support_x, episode.support_y
    others = [0, 1, 4, 5, 6, 7]
    state = learner.forget(learner.describe(x, y), 1)
    assert_same_answers(learner, state, learner.describe(x[:, others], y[:, others], 4), episode.query_x)
    again = learner.extend(state, x[:, 2:4], y[:, 2:4])
    assert_same_answers(learner, again, learner.describe(x, y), episode.query_x)


@pytest.mark.parametrize("name", CHANGEABLE)
def test_what_is_left_after_forgetting_can_be_saved(name: str, tmp_path: Path) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode()
    state = learner.forget(learner.describe(episode.support_x, episode.support_y), 1)
    save_state(tmp_path / "state", state, learner)
    loaded = load_state(tmp_path / "state", learner=learner)
    assert torch.equal(learner.predict(loaded, episode.query_x), learner.predict(state, episode.query_x))


@pytest.mark.parametrize("name", ["prototypical", "matching", "pixels", "softmax-fast-only, optimal"])
def test_a_forgotten_class_is_not_predicted(name: str) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode()
    state = learner.forget(learner.describe(episode.support_x, episode.support_y), 2)
    logit = learner.predict(state, episode.support_x)[..., 2]
    if name.startswith("softmax"):
        assert not logit.any()
    else:
        torch.testing.assert_close(logit, torch.full_like(logit, UNSEEN))


def test_a_forgotten_class_keeps_what_the_slow_path_gives_it() -> None:
    learner, episode = CHANGEABLE["hebb"]().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    for label in range(4):
        state = learner.forget(state, label)
    slow = learner.output.slow(learner.hidden.activate(learner.hidden.slow(learner.embed(episode.query_x))))
    torch.testing.assert_close(learner.predict(state, episode.query_x), slow[..., :4])


@pytest.mark.parametrize("name", CHANGEABLE)
def test_changes_leave_the_given_state_alone_and_let_gradients_through(name: str) -> None:
    learner, episode = CHANGEABLE[name](), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y, 4)
    before = {key: tensor.clone() for key, tensor in state.items()}
    changed = learner.forget(learner.extend(state, episode.query_x, episode.query_y, 4), 0)
    assert all(torch.equal(before[key], state[key]) for key in state)
    parameters = list(learner.parameters())
    if parameters:
        gradients = torch.autograd.grad(
            learner.predict(changed, episode.query_x)[..., 1].sum(), parameters, allow_unused=True
        )
        assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_new_classes_get_free_slots_also_after_a_random_draw() -> None:
    taken = torch.tensor([[4, 0], [2, 5]])
    assert torch.equal(add_slots(taken, 4, SLOTS), torch.tensor([[4, 0, 1, 2], [2, 5, 0, 1]]))
    assert torch.equal(add_slots(taken, 1, SLOTS), taken)


@pytest.mark.parametrize("name", FIXED)
def test_learners_that_cannot_say_so_in_one_sentence(name: str) -> None:
    learner, episode = FIXED[name]().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    with pytest.raises(UserError, match=r"cannot add examples to a described task; .*\.$"):
        learner.extend(state, episode.support_x, episode.support_y)
    with pytest.raises(UserError, match=r"cannot forget a class; .*\.$"):
        learner.forget(state, 0)


def test_mistakes_are_named() -> None:
    learner, episode = CHANGEABLE["hebb"]().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    with pytest.raises(UserError, match="no label 4 to forget"):
        learner.forget(state, 4)
    for label in (True, "2", 1.0, [1]):
        with pytest.raises(UserError, match="a label to forget is a whole number, not"):
            learner.forget(state, label)
    with pytest.raises(UserError, match="6 label slots"):
        learner.extend(state, episode.support_x, episode.support_y + 3)
    with pytest.raises(UserError, match=r"need labels \(3, 8\)"):
        learner.describe(episode.support_x, episode.support_y[:, :5])
    with pytest.raises(UserError, match="-1 is none"):
        learner.describe(episode.support_x, episode.support_y - 1)
    for labels in (episode.support_y.float(), episode.support_y.int()):
        with pytest.raises(UserError, match="labels are int64"):
            learner.describe(episode.support_x, labels)
    with pytest.raises(UserError, match="at least one label, not 0"):
        learner.describe(episode.support_x[:, :0], episode.support_y[:, :0])


@pytest.mark.parametrize(("label", "says"), [(-1, "whole numbers from 0; -1 is none"), (5, "`way` be at least 6")])
@pytest.mark.parametrize("name", {**CHANGEABLE, **FIXED})
def test_labels_beyond_the_way_that_is_given_are_refused(name: str, label: int, says: str) -> None:
    learner, episode = {**CHANGEABLE, **FIXED}[name]().eval(), tiny.noise_episode()
    x, y = episode.support_x, episode.support_y
    beyond = y.clone()
    beyond[1, 3] = label
    with pytest.raises(UserError, match=says):
        learner.describe(x, beyond, 4)
    state = learner.describe(x, y, 4)
    if name in CHANGEABLE:
        with pytest.raises(UserError, match=says):
            learner.extend(state, x, beyond, 4)


def test_given_the_way_nobody_waits_for_labels_on_another_device() -> None:
    unreadable = torch.empty(1, 4, dtype=torch.int64, device="meta")
    assert count_classes(unreadable, 4) == 4
    assert count_classes(unreadable, 4, known=5) == 5


@pytest.mark.parametrize("name", CHANGEABLE)
def test_extending_by_a_smaller_way_takes_no_class_away(name: str) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode()
    x, y = episode.support_x, episode.support_y
    state = learner.describe(x[:, ::2], y[:, ::2], 4)
    extended = learner.extend(state, x[:, 1::2], y[:, 1::2], 2)
    assert_same_answers(learner, extended, learner.describe(x, y), episode.query_x)


@pytest.mark.parametrize("name", [*CHANGEABLE, *FIXED])
def test_a_state_of_other_tasks_is_refused(name: str) -> None:
    learner, episode = {**CHANGEABLE, **FIXED}[name]().eval(), tiny.noise_episode(tasks=3)
    one = learner.describe(episode.support_x[:1], episode.support_y[:1])
    with pytest.raises(UserError, match="items of 3 tasks were given with a state of 1 tasks"):
        learner.predict(one, episode.query_x)
    if name in CHANGEABLE:
        with pytest.raises(UserError, match="items of 3 tasks were given with a state of 1 tasks"):
            learner.extend(one, episode.support_x, episode.support_y)


@pytest.mark.parametrize(
    ("whose", "asked"),
    [
        ("hebb", "softmax"),
        ("hebb", "optimal"),
        ("optimal", "hebb"),
        ("gradient", "hebb"),
        ("hebb", "maml"),
        ("fc+softmax", "softmax"),
        ("matching", "prototypical"),
        ("maml", "hebb"),
    ],
)
def test_a_state_of_another_learner_is_refused(whose: str, asked: str) -> None:
    makers, episode = {**CHANGEABLE, **FIXED}, tiny.noise_episode()
    state = makers[whose]().eval().describe(episode.support_x, episode.support_y)
    with pytest.raises(UserError, match="needs a state of"):
        makers[asked]().eval().predict(state, episode.query_x)
    if asked in CHANGEABLE:
        with pytest.raises(UserError, match="needs a state of"):
            makers[asked]().eval().forget(state, 0)


@pytest.mark.parametrize("name", [*CHANGEABLE, *FIXED])
def test_a_state_is_made_of_what_its_learner_says(name: str) -> None:
    learner, episode = {**CHANGEABLE, **FIXED}[name]().eval(), tiny.noise_episode()
    learner.check_state(learner.describe(episode.support_x, episode.support_y), episode.query_x)


@pytest.mark.parametrize("change", [{"slots": 4}, {"filters": 8}])
@pytest.mark.parametrize("rule", ["hebb", "optimal", "gradient"])
def test_a_state_of_another_model_is_refused(rule: str, change: dict[str, int]) -> None:
    settings = LearnerSettings(item_shape=(12, 12, 1), slots=5, filters=4, layers=2, width=10, rule=rule)
    one, other = build_learner(settings).eval(), build_learner(replace(settings, **change)).eval()
    episode = tiny.noise_episode()
    state = one.describe(episode.support_x, episode.support_y)
    if (rule, change) == ("gradient", {"slots": 4}):  # its memory is not of label slots
        assert other.predict(state, episode.query_x).shape[-1] == episode.way
        return
    with pytest.raises(UserError, match=r"of another model: its hidden\.\w+ has the shape"):
        other.predict(state, episode.query_x)


@pytest.mark.parametrize("name", ["hebb", "softmax", "normalised"])
def test_what_is_recalled_is_in_the_order_of_the_labels(name: str) -> None:
    learner, episode = CHANGEABLE[name]().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    recalled = learner.recall(state, episode.query_x)
    assert recalled is not None
    assert recalled.shape == (*episode.query_y.shape, episode.way)
    order = torch.tensor([2, 0, 3, 1])
    renamed = learner.describe(episode.support_x, order[episode.support_y])
    torch.testing.assert_close(learner.recall(renamed, episode.query_x)[..., order], recalled, rtol=1e-4, atol=1e-4)
    assert CHANGEABLE["prototypical"]().recall(state, episode.query_x) is None


@pytest.mark.parametrize("name", [*CHANGEABLE, *FIXED])
def test_a_state_survives_the_disk(name: str, tmp_path: Path) -> None:
    learner, episode = {**CHANGEABLE, **FIXED}[name]().eval(), tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    assert {tensor.shape[0] for tensor in state.values()} == {3}
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state")
    assert list(tmp_path.iterdir()) == [tmp_path / "state"]
    assert torch.equal(learner.predict(loaded, episode.query_x), learner.predict(state, episode.query_x))


def test_broken_missing_and_unwritable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"not a state")
    for name in ("broken", "missing"):
        with pytest.raises(UserError, match=f"{name} cannot be read as a safetensors file"):
            load_state(tmp_path / name)
    with pytest.raises(UserError, match="cannot be written"):
        save_state(tmp_path / "broken" / "state", {"sums": torch.zeros(1)})
    save_state(tmp_path / "new folder" / "state", {"sums": torch.zeros(1)})
    assert load_state(tmp_path / "new folder" / "state").keys() == {"sums"}


def test_a_failed_save_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    save_state(path, {"sums": torch.ones(1)})

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    with pytest.raises(UserError, match="disk full"):
        save_state(path, {"sums": torch.zeros(1)})
    assert torch.equal(load_state(path)["sums"], torch.ones(1))
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_of_a_model_that_has_changed_is_refused(tmp_path: Path) -> None:
    """Two models alike in everything but their weights: shapes do not tell them apart."""
    learner, other = CHANGEABLE["hebb"]().eval(), CHANGEABLE["hebb"]().eval()
    episode = tiny.noise_episode()
    state = learner.describe(episode.support_x, episode.support_y)
    save_state(tmp_path / "of one", state, learner)
    save_state(tmp_path / "of anyone", state)
    for name, who in (("of one", learner), ("of one", None), ("of anyone", other)):
        loaded = load_state(tmp_path / name, learner=who)
        assert_same_answers(learner, loaded, state, episode.query_x)
    with pytest.raises(UserError, match="of one was described by another model"):
        load_state(tmp_path / "of one", learner=other)
    other.load_state_dict(learner.state_dict())
    load_state(tmp_path / "of one", learner=other)
    with torch.no_grad():
        next(learner.parameters()).view(-1)[0] += 1e-3
    with pytest.raises(UserError, match="before this one was trained on"):
        load_state(tmp_path / "of one", learner=learner)


def described(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor], Learner]:
    learner = CHANGEABLE["hebb"]().eval()
    episode = tiny.noise_episode()
    state = {name: t.clone() for name, t in learner.describe(episode.support_x, episode.support_y).items()}
    return tmp_path / "state", state, learner


def test_a_flipped_bit_in_a_state_is_noticed(tmp_path: Path) -> None:
    path, state, learner = described(tmp_path)
    save_state(path, state, learner)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"state is damaged.*describe the task again"):
        load_state(path)


def test_a_state_of_an_older_version_is_read_with_a_sentence(tmp_path: Path) -> None:
    path, state, learner = described(tmp_path)
    save_file({name: t.contiguous() for name, t in state.items()}, path)
    with pytest.warns(UserWarning, match="older version, without a digest"):
        assert set(load_state(path, learner=learner)) == set(state)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("slots", -1, "below 0"),
        ("slots", 1, "one label slot twice"),
        ("slots", 99, "slots holds 99, but this model has"),
        ("counts", -1.0, "below 0"),
        ("counts", float("nan"), "NaN or infinite"),
    ],
)
def test_states_of_nonsense_are_refused(tmp_path: Path, name: str, value: float, says: str) -> None:
    path, state, learner = described(tmp_path)
    state[name][0, 0] = value
    save_state(path, state, learner)
    with pytest.raises(UserError, match=rf"state is no state of a task \(.*{says}.*describe the task again"):
        load_state(path, learner=learner)


def test_a_state_lacks_nothing_and_is_of_one_number_of_tasks(tmp_path: Path) -> None:
    path, state, learner = described(tmp_path)
    for wrong in (
        {name: t for name, t in state.items() if name != "slots"},
        {**state, "more": state["slots"]},
        {**state, "slots": state["slots"][:1]},
        {**state, "slots": state["slots"].int()},
    ):
        save_state(path, wrong, learner)
        with pytest.raises(UserError, match="is no state of a task"):
            load_state(path, learner=learner)


def test_a_model_is_no_state(tmp_path: Path) -> None:
    _, _, learner = described(tmp_path)
    save(tmp_path / "model", {"best": learner.state_dict()}, LearnerSettings(), {}, {})
    with pytest.raises(UserError, match="model is no state"):
        load_state(tmp_path / "model")


@pytest.mark.parametrize("labels", [[[5, 0, 1]], [[-2, 0, 1]], [[[0.5, 0.5]]], [[[1.0, 1.0]]]])
def test_labels_of_states_are_classes(labels: list[list[object]]) -> None:
    with pytest.raises(ValueError, match="labels"):
        check_contents({"slots": torch.tensor([[1, 0]]), "labels": torch.tensor(labels)})
