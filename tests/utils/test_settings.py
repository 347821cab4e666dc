"""Settings: declared once, checked when they are made, parsed as they are typed, with their help beside them."""

from dataclasses import dataclass, replace

import pytest

from fastweights.training.settings import TrainSettings
from fastweights.utils.errors import UserError, did_you_mean, unknown
from fastweights.utils.settings import Settings, help_texts, option, parse


@dataclass(frozen=True)
class Small(Settings):
    steps: int = option(5, at_least=1)
    """Gradient steps on
    the support set."""
    rate: float = option(0.1, above=0, at_most=1)
    """Their size."""
    share: float = option(0.0, at_least=0, below=1)
    kind: str = option("adam", choices=("adam", "sgd"))
    widths: tuple[int, ...] = option((4, 8), at_least=2)
    names: tuple[str, ...] = option(())
    on: bool = option(False)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"steps": 0}, "steps must be at least 1, not 0."),
        ({"steps": 1.5}, "the setting steps wants a whole number, not 1.5."),
        ({"steps": True}, "the setting steps wants a whole number, not True."),
        ({"rate": 0.0}, "rate must be above 0, not 0.0."),
        ({"rate": 1.1}, "rate must be at most 1, not 1.1."),
        ({"rate": float("nan")}, "the setting rate wants a number, not nan."),
        ({"share": 1}, "share must be below 1, not 1."),
        ({"share": -0.1}, "share must be at least 0, not -0.1."),
        ({"kind": "adma"}, "there is no kind 'adma' (did you mean adam?); there are adam, sgd."),
        ({"widths": (4, 1)}, "widths must be at least 2, not 1."),
        ({"widths": ()}, "the setting widths wants whole numbers separated by commas, not ()."),
        ({"names": "flip"}, "the setting names wants words separated by commas, not 'flip'."),
        ({"on": 1}, "the setting on wants true or false, not 1."),
    ],
)
def test_wrong_values_are_refused_when_settings_are_made(wrong, says):
    for make in (lambda: Small(**wrong), lambda: replace(Small(), **wrong), lambda: Small.from_json(wrong)):
        with pytest.raises(UserError) as refused:
            make()
        assert str(refused.value) == says


def test_right_values_are_kept_and_come_back_from_json():
    small = Small(steps=1, rate=1, share=0.999, kind="sgd", widths=(2,), names=("a", "b"), on=True)
    assert Small.from_json({**small.to_json(), "widths": [2], "names": ["a", "b"]}) == small
    with pytest.raises(UserError, match=r"unknown setting stpes \(did you mean steps\?\); was this file written by"):
        Small.from_json({"stpes": 1})


def test_help_is_the_docstring_under_the_field():
    assert help_texts(Small) == {"steps": "Gradient steps on the support set.", "rate": "Their size."}
    assert set(help_texts(TrainSettings)) == set(TrainSettings().to_json())


def test_values_as_they_are_typed():
    assert [parse("3", int), parse("0.5", float), parse("False", bool)] == [3, 0.5, False]
    assert [parse("4,8", tuple[int, ...]), parse("flip,crop", tuple[str, ...]), parse("", tuple[str, ...])] == [
        (4, 8),
        ("flip", "crop"),
        (),
    ]
    assert [parse("x", int), parse("4,x", tuple[int, ...]), parse("maybe", bool)] == ["x", "4,x", "maybe"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"augment": ""},
        {"augment": ("flop",)},
        {"class_augment": ("jitter",)},
        {"schedule": "linear"},
        {"precision": "float16"},
        {"seed": -1},
        {"seed": 2**63},
        {"key_norm": 1.0, "classifier_weight": 1.0},
    ],
)
def test_a_training_that_could_not_be_loaded_again_is_not_even_begun(wrong):
    with pytest.raises(UserError):
        TrainSettings(**wrong)


def test_the_nearest_name_is_suggested():
    assert did_you_mean("fwcn-hebb", ["fwcnn-hebb", "maml-cnn"]) == " (did you mean fwcnn-hebb?)"
    assert did_you_mean("zebra", ["fwcnn-hebb", "maml-cnn"]) == ""
    assert str(unknown("model", "zebra", ["a", "b"])) == "there is no model 'zebra'; there are a, b."


@pytest.mark.parametrize("wrong", [{"steps": 2**63}, {"widths": (2**70,)}, {"rate": 10**400}, {"rate": -(10**400)}])
def test_numbers_that_nothing_could_hold_are_refused(wrong):
    with pytest.raises(UserError, match=r"must be at most|wants a number"):
        Small(**wrong)
