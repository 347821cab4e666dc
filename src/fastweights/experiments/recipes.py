"""How models are trained for the tables, as plain data: the paper's way, and the best way we know.

A recipe is a list of changes to the defaults of `LearnerSettings` and `TrainSettings`, each for the models that a
pattern names ("omniglot-20way-*/fwcnn-*": training/learner). All that match apply, from the top; later ones win.

`best` keeps architecture and rule. It was chosen on validation tasks, `search` keeps the record of what was
compared; results/notes.md says what was not compared but judged.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from fastweights.errors import UserError
from fastweights.experiments.tables import parse_experiment
from fastweights.presets import preset
from fastweights.settings import LearnerSettings, TrainSettings

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Changes:
    """What differs from the defaults."""

    training: Values = field(default_factory=dict)
    """Of `TrainSettings`."""
    learner: Values = field(default_factory=dict)
    """Of `LearnerSettings`, beyond the preset."""

    def then(self, later: "Changes") -> "Changes":
        return Changes({**self.training, **later.training}, {**self.learner, **later.learner})


TASKS: dict[str, Changes] = {
    "omniglot-*": Changes({"queries": 10, "test_tasks": 10_000}),
    "mini-imagenet-*": Changes({"queries": 15, "test_tasks": 5_000}),
    # The paper asks 400 random tasks of one query per word: an interval of 2 points. Ten times as many: 0.7.
    "ptb-*": Changes({"queries": 1, "test_tasks": 4_000}),
}
"""What both recipes are asked."""

PAPER: dict[str, Changes] = {
    "*": Changes({"learning_rate": 1e-3, "schedule": "constant", "tasks_per_step": 4, "log_every": 100}),
    "omniglot-*": Changes({"steps": 75_000, "validate_every": 6_000, "validation_tasks": 400}),
    "mini-imagenet-*": Changes({"steps": 50_000, "validate_every": 400, "validation_tasks": 400}),
    "mini-imagenet-*/fwresnet-*": Changes({"steps": 12_500}),
    "ptb-*": Changes({"steps": 20_000, "tasks_per_step": 16, "validate_every": 3_200, "validation_tasks": 400}),
}

OPEN_CHOICES: tuple[tuple[str, str, str], ...] = (
    ("batch norm", "after every convolution, running statistics at test", "not mentioned; inductive"),
    ("pooling", "rounds up", "the only way from 84 pixels to 288 keys in five layers"),
    ("tasks per update", "4; 16 for text", "not said; one, in the first author's earlier code, learns slower"),
    ("ways in training", "as at test", "not said"),
    (
        "queries per class in training",
        "10 Omniglot, 15 mini-ImageNet, 1 Penn Treebank",
        "images: as in the earlier code; text: as at test",
    ),
    ("training classes of Omniglot", "1,100, before turning", "100 of the text's 1,200 are kept for validation"),
    ("loss", "cross-entropy, mean over the queries", "the sum, in the text; Adam does not feel the difference"),
    (
        "length",
        "300,000 tasks Omniglot, 200,000 mini-ImageNet (fwResNet 50,000), 320,000 Penn Treebank",
        "not said; what minutes on one GPU allow",
    ),
    (
        "validation",
        "400 tasks every 400 on mini-ImageNet, as in the text; every 6,000 on Omniglot and 3,200 on Penn Treebank",
        "said for mini-ImageNet alone; the best weights are tested once, at the end",
    ),
    ("augmentation", "none; on Omniglot turned characters are classes of their own", "as in the text"),
    ("label noise", "0.01 for fwCNN (Hebb), in training alone", "when it is added is not said"),
    ("label projection", "drawn once, never trained", "whether it is trained is not said"),
    (
        "test tasks",
        "10,000 Omniglot, 5,000 mini-ImageNet, 4,000 random and 5 x 200 all-inclusive",
        "400 and 200 of text",
    ),
)
"""What the text leaves open, what `paper` does, and why. Frozen: a change is a new recipe."""

BEST: dict[str, Changes] = {
    "*": Changes(
        {
            "learning_rate": 2e-3,
            "schedule": "cosine",
            "tasks_per_step": 64,
            "validation_tasks": 1_000,
            "log_every": 100,
        }
    ),
    "omniglot-*": Changes(
        {
            "augment": ("affine",),
            "weight_decay": 0.01,
            "label_smoothing": 0.05,
            "average": 0.999,
            "validate_every": 128_000,
            "validation_tasks": 3_000,
        }
    ),
    "omniglot-5way-*/*-hebb": Changes({"length_penalty": 1.0}),
    "omniglot-*-5shot/*-hebb": Changes({"length_penalty": 5.0}),
    "omniglot-5way-1shot/*": Changes({"steps": 16_000}),
    "omniglot-5way-1shot/fwcnn-hebb": Changes(
        {"steps": 32_000, "settle_steps": 4_000, "length_penalty": 10.0, "train_on_validation": True}
    ),
    "omniglot-5way-5shot/*": Changes({"steps": 8_000}),
    "omniglot-5way-5shot/fwcnn-hebb": Changes(
        {"steps": 32_000, "settle_steps": 4_000, "train_shot": 1, "new_classes": ("flip",), "train_on_validation": True}
    ),
    "omniglot-5way-5shot/fwcnn-gradient*": Changes({"steps": 16_000}),
    "omniglot-20way-1shot/*": Changes({"steps": 12_000, "tasks_per_step": 32, "validate_every": 64_000}),
    "omniglot-20way-5shot/*": Changes(
        {"steps": 8_000, "tasks_per_step": 32, "train_queries": 5, "validate_every": 64_000}
    ),
    "omniglot-20way-5shot/fwcnn-hebb": Changes({"steps": 16_000, "settle_steps": 4_000}),
    "omniglot-20way-5shot/fwcnn-gradient*": Changes({"steps": 24_000, "settle_steps": 4_000}),
    "mini-imagenet-*": Changes(
        {
            "augment": ("flip", "crop", "jitter"),
            "weight_decay": 0.02,
            "average": 0.99,
            "steps": 6_000,
            "validate_every": 32_000,
            "pretrain_steps": 10_000,
            "pretrain_batch": 512,
            "pretrain_optimizer": "sgd",
            "pretrain_learning_rate": 0.1,
            "pretrain_weight_decay": 5e-4,
            "pretrain_label_smoothing": 0.1,
        }
    ),
    "mini-imagenet-*/fwcnn-gradient*": Changes({"steps": 3_000}),
    "mini-imagenet-5way-1shot/fwcnn-hebb": Changes({"length_penalty": 10.0}),
    "mini-imagenet-5way-5shot/fwcnn-hebb": Changes(
        {
            "steps": 12_000,
            "length_penalty": 5.0,
            "key_length": 3.0,
            "head_steps": 100,
            "schedule": "constant",
            "average": 0.998,
            "validation_tasks": 2_000,
        }
    ),
    "mini-imagenet-*/fwresnet-*": Changes(
        {
            "augment": ("flip", "resized-crop", "jitter"),
            "tasks_per_step": 16,
            "steps": 400,
            "learning_rate": 3e-4,
            "weight_decay": 0.05,
            "validate_every": 1_600,
            "pretrain_steps": 20_000,
            "pretrain_batch": 256,
            "pretrain_turns": True,
        },
        {"dropout": 0.1},
    ),
    # The layers above a pre-trained ResNet start from nothing: they take larger steps than it, lest they spoil it.
    "mini-imagenet-*/fwresnet-normalised": Changes(
        {"learning_rate": 1e-3, "encoder_rate": 0.1, "key_length": 3.0, "head_steps": 50}
    ),
    "mini-imagenet-5way-5shot/fwresnet-gradient*": Changes({"learning_rate": 1e-3, "encoder_rate": 0.1, "steps": 800}),
    "ptb-*": Changes(
        {
            "learning_rate": 1e-3,
            "tasks_per_step": 256,
            "steps": 1_500,
            "validate_every": 38_400,
            "validation_tasks": 2_000,
            "pretrain_steps": 5_000,
            "pretrain_batch": 2_048,
            "pretrain_learning_rate": 2e-3,
            "pretrain_label_smoothing": 0.0,
            "average": 0.995,
        },
        {"dropout": 0.4},
    ),
    "*/maml-*": Changes(
        {"pretrain_steps": 0, "average": 0.0, "tasks_per_step": 16, "steps": 6_000, "validate_every": 9_600}
    ),
}

RECIPES: dict[str, dict[str, Changes]] = {"paper": PAPER, "best": BEST}

PLACED = ("softmax-fast-only", "softmax", "fc+softmax", "truncated", "fc-fast-only")
CHANGES_OF_VARIANTS: dict[str, Changes] = {
    **{placement: Changes(learner={"placement": placement}) for placement in PLACED},
    "no-pretraining": Changes({"pretrain_steps": 0}),
    "adam-pretraining": Changes(
        {"pretrain_optimizer": "adam", "pretrain_learning_rate": 2e-3, "pretrain_weight_decay": 0.0}
    ),
    "no-turns": Changes({"pretrain_turns": False}),
    "no-augmentation": Changes({"augment": ()}),
    "no-weight-decay": Changes({"weight_decay": 0.0}),
    "no-label-smoothing": Changes({"label_smoothing": 0.0, "pretrain_label_smoothing": 0.0}),
    "no-length-penalty": Changes({"length_penalty": 0.0}),
    "no-averaging": Changes({"average": 0.0}),
    "no-dropout": Changes(learner={"dropout": 0.0}),
    "constant-rate": Changes({"schedule": "constant"}),
    "no-settling": Changes({"settle_steps": 0}),
    "no-validation-classes": Changes({"train_on_validation": False}),
}
BACK_TO_PAPER = {"paper-rate": "learning_rate", "paper-tasks": "tasks_per_step"}
"""Variants that give a setting the value it has in `paper` for the same model; updates stay as many as they were."""
VARIANTS = (*CHANGES_OF_VARIANTS, *BACK_TO_PAPER)
"""Ablations: where the fast weights are, and `best` with one of its departures taken back."""
DEPARTURES = tuple(name for name in VARIANTS if name not in PLACED)

TASKS_PER_SECOND: dict[str, float] = {
    "*": 1_000,
    "omniglot-5way-*": 25_000,
    "omniglot-20way-*": 6_000,
    "mini-imagenet-*": 5_000,
    "mini-imagenet-*/fwresnet-*": 300,
    "ptb-*": 6_000,
    "*/maml-*": 1_000,
    "mini-imagenet-*/maml-*": 240,
}
"""Roughly, on one H200 with 64 tasks a step: for plans where nothing was measured yet."""
STEPS_PER_SECOND = 500.0
"""Likewise, at most, however small the steps."""


def changes_of(recipe: str, training: str, learner: str, variant: str = "") -> Changes:
    """Everything a recipe changes for a model: (omniglot-5way-1shot, fwcnn-hebb)."""
    if recipe not in RECIPES:
        raise UserError(f"there is no recipe {recipe!r}; there are {' and '.join(RECIPES)}.")
    if variant and variant not in VARIANTS:
        raise UserError(f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}.")
    merged = Changes()
    for changes in (*matching(TASKS, training, learner), *matching(RECIPES[recipe], training, learner)):
        merged = merged.then(changes)
    if variant in BACK_TO_PAPER:
        return merged.then(_back_to_paper(BACK_TO_PAPER[variant], merged, training, learner))
    return merged.then(CHANGES_OF_VARIANTS[variant]) if variant else merged


def _back_to_paper(setting: str, best: Changes, training: str, learner: str) -> Changes:
    value = changes_of("paper", training, learner).training[setting]
    if setting != "tasks_per_step":
        return Changes({setting: value})
    every = best.training["validate_every"] * value // best.training[setting]  # counted in tasks: as often as before
    return Changes({setting: value, "validate_every": every})


def settings_by(
    recipe: str,
    training: str,
    learner: str,
    variant: str,
    item_shape: tuple[int, ...],
    vocabulary: int,
    of_the_run: Values,
) -> tuple[LearnerSettings, TrainSettings]:
    """Everything a recipe settles for a model on such items; `of_the_run` are settings that no recipe is about."""
    experiment, changes = parse_experiment(training), changes_of(recipe, training, learner, variant)
    settings = replace(TrainSettings(way=experiment.way, shot=experiment.shot), **{**of_the_run, **changes.training})
    made_of = preset(
        learner,
        dataset=settings.dataset,
        item_shape=item_shape,
        vocabulary=vocabulary,
        way=settings.slots,
        shot=experiment.shot,
        **changes.learner,
    )
    return made_of, settings


def departures_of(training: str, learner: str) -> tuple[str, ...]:
    """The variants that take something back which `best` does for a model."""

    def felt(variant: str) -> Changes:
        """All settings but those of a pre-training that does not take place."""
        changes = changes_of("best", training, learner, variant)
        trained = {**asdict(TrainSettings()), **changes.training}
        if not trained["pretrain_steps"]:
            trained = {name: value for name, value in trained.items() if not name.startswith("pretrain_")}
        return Changes(trained, {**asdict(LearnerSettings()), **changes.learner})

    return tuple(variant for variant in DEPARTURES if felt(variant) != felt(""))


def matching(patterns: Mapping[str, Any], training: str, learner: str) -> list[Any]:
    """The values whose pattern fits; one without a learner fits all learners."""
    name = f"{training}/{learner}"
    return [value for pattern, value in patterns.items() if fnmatchcase(name, pattern)]
