"""Narrow versions of every image preset meta-learn the built-in dataset through the one training loop."""

import pytest
import tiny

from fastweights.learners.registry import PRESETS, encoder_of, preset, reads_text, settings_of

NARROW = {"cnn": {"filters": 16}, "resnet": {"blocks": (8, 8, 16, 32), "features": 64, "width": 64}}
ELSEWHERE = ("mann-", "snail-", "metanet-", "ada", "siamese-", "hebbian-softmax-", "meta-lstm-", "matching-cnn-fce")
"""Models whose own tests have them learn, most of them on these characters, too."""
USUAL_STEPS = 100
STEPS = {
    "fwcnn-hebb": 450,
    "fwcnn-gradient": 450,
    "fwcnn-gradient1": 450,
    "fwcnn-normalised": 450,
    "fwresnet-hebb": 120,
    "fwresnet-gradient": 120,
    "fwresnet-gradient1": 300,
    "fwresnet-normalised": 120,
}
"""Of models that start slowly; all others have the usual number."""


SLOW = {"fwresnet-gradient1", "fwresnet-open", "maml-first-order-cnn", "ridge-cnn"}
"""Left to the slow tests: their encoder and their rule are each in a quicker model, too."""
NAMES = [name for name in PRESETS if not reads_text(name) and not name.startswith(ELSEWHERE)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in NAMES],
)
def test_a_narrow_preset_learns_strokes(name, loaded_strokes):
    """At least 55 % of three ways (chance: 33 %) on 200 tasks of characters never seen."""
    changes = {key: value for key, value in NARROW[encoder_of(name)].items() if key in settings_of(name)}
    learner = preset(name, dataset="strokes", item_shape=(28, 28, 1), vocabulary=0, way=3, shot=1, **changes)
    steps = STEPS.get(name, USUAL_STEPS)
    assert tiny.strokes_accuracy(learner, loaded_strokes.dataset, way=3, steps=steps) > 0.55
