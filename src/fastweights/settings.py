"""Everything that can be chosen about a learner and its training, in two flat dataclasses: what a checkpoint holds."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from fastweights.errors import UserError


@dataclass(frozen=True)
class _Settings:
    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        kinds = {field.name: field.type for field in fields(cls)}
        unknown = sorted(set(values) - set(kinds))
        if unknown:
            raise UserError(f"unknown settings {', '.join(unknown)}; was this file written by a newer version?")
        settings = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        check_kinds(settings, kinds)
        return cls(**settings)


KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple[int, ...]: "whole numbers separated by commas",
    tuple[str, ...]: "words separated by commas",
}
"""What a setting may be, in words."""


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Refuse values that are not of their setting's type."""
    for name, value in values.items():
        if not is_of(value, kinds[name]):
            raise UserError(f"the setting {name} wants {KINDS[kinds[name]]}, not {value!r}.")


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a setting's type; no setting is infinite."""
    if kind == tuple[int, ...]:
        return isinstance(value, tuple) and len(value) > 0 and all(type(number) is int for number in value)
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(type(word) is str for word in value)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


@dataclass(frozen=True)
class LearnerSettings(_Settings):
    """What a learner is built from."""

    system: str = "fast-weights"
    """Which kind of learner: a key of `learners.SYSTEMS`."""
    encoder: str = "cnn"
    """Which network computes the keys: a key of `learners.ENCODERS`."""
    item_shape: tuple[int, ...] = (28, 28, 1)
    """Height, width and channels of the images; (length,) of sentences."""
    vocabulary: int = 0
    """Number of tokens of a text; 0 for images."""
    slots: int = 5
    """Label slots (C): the most classes a task may have."""

    layers: int = 5
    """Convolution layers of the CNN, or layers of the LSTM."""
    filters: int = 64
    """Filters in each convolution of the CNN."""
    batch_norm: int = 5
    """How many of the CNN's layers, from the first, are batch-normalised."""
    conv_bias: bool = False
    """Whether the CNN's convolutions have biases."""
    blocks: tuple[int, ...] = (64, 96, 128, 256)
    """Filters in each residual block of the ResNet."""
    features: int = 1024
    """Filters of the ResNet's last, 1x1 convolution."""
    features_norm: bool = True
    """Whether batch norm follows that convolution."""
    embedding: int = 300
    """Width of the LSTM's word embeddings."""
    units: int = 200
    """Units in each layer of the LSTM."""
    readout: str = "end"
    """Where the LSTM's state becomes the key: at the end of the sentence, or at the blank."""
    bidirectional: bool = False
    """Whether a second LSTM reads the sentence from its end."""
    dropout: float = 0.0
    """Probability that the ResNet or the LSTM drops an activation in training."""

    placement: str = "fc"
    """Which layers have fast weights: a key of `learners.fast_weights.PLACEMENTS`."""
    rule: str = "hebb"
    """How fast weights are written: a key of `rules.RULES`."""
    width: int = 288
    """Units of the fully connected layer (d_L)."""
    bias: bool = True
    """Whether the slow paths of the top layers have biases."""
    label_noise: float = 0.0
    """Uniform noise added to the one-hot labels in training, at most this much either way."""

    inner_steps: int = 5
    """Gradient steps MAML takes on a task's description."""
    inner_rate: float = 0.01
    """Step size of these."""
    first_order: bool = False
    """Whether MAML's meta-gradient leaves out second derivatives."""

    def __post_init__(self) -> None:
        may_be_zero = {"vocabulary", "batch_norm"}
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if field.type in (int, tuple[int, ...]) and min(numbers) < (0 if field.name in may_be_zero else 1):
                raise UserError(f"{field.name} is {value}, which is too small.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is a probability from 0 up to, but not including, 1; not {self.dropout}.")
        if not 0 <= self.label_noise < math.inf:
            raise UserError(f"label_noise is a number of at least 0, not {self.label_noise}.")
        if not 0 < self.inner_rate < math.inf:
            raise UserError(f"inner_rate is a positive number, not {self.inner_rate}.")


OF_ENCODER: dict[str, tuple[str, ...]] = {
    "cnn": ("layers", "filters", "batch_norm", "conv_bias"),
    "resnet": ("blocks", "features", "features_norm", "dropout"),
    "lstm": ("layers", "embedding", "units", "readout", "bidirectional", "dropout"),
}
OF_SYSTEM: dict[str, tuple[str, ...]] = {
    "fast-weights": ("placement", "rule", "width", "bias", "label_noise"),
    "matching": (),
    "prototypical": (),
    "maml": ("inner_steps", "inner_rate", "first_order"),
}
"""Which settings of a learner its encoder, and what is above it, are built from: others have no effect on it."""


@dataclass(frozen=True)
class TrainSettings(_Settings):
    """How a learner is trained."""

    dataset: str = "strokes"
    """Name of the dataset."""
    variant: str = ""
    """Which split or protocol of it, where it has several."""
    data_hash: str = ""
    """Content hash of the data trained on."""
    way: int = 5
    """Classes in a task (N)."""
    shot: int = 1
    """Examples to learn each class from (K)."""
    queries: int = 15
    """Questions asked per class (Q)."""
    train_way: int = 0
    """Classes in a training task, where they are more than in validation and test; 0: as many."""
    train_shot: int = 0
    """Examples per class in a training task; 0: as many as in validation and test."""
    train_queries: int = 0
    """Questions per class in a training task; 0: as many as in validation and test."""
    steps: int = 2000
    """Updates of the slow weights."""
    settle_steps: int = 0
    """How many of these, the last, are on tasks as validation and test have them, whatever those before were on, and
    without label smoothing."""
    seconds: float = 0.0
    """Wall-clock budget that ends training early, pre-training counted; 0 is none. Over before pre-training is done, it
    interrupts the run, which can be resumed with more."""
    tasks_per_step: int = 4
    """Tasks behind each update."""
    optimizer: str = "adam"
    """What takes the steps: adam, or sgd with Nesterov's momentum."""
    learning_rate: float = 1e-3
    """Its step size."""
    schedule: str = "constant"
    """How the step size changes over the run: constant or cosine."""
    weight_decay: float = 0.0
    """Its weight decay: decoupled with adam, part of the gradient with sgd."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss."""
    encoder_rate: float = 1.0
    """The encoder's step size as a share of the learning rate."""
    head_steps: int = 0
    """How many steps, the first, the layers above the encoder take alone: so that it need not follow their errors."""
    key_length: float = 0.0
    """Mean length at which the layers above the encoder first see its keys, by a factor that stays; 0 is no factor."""
    length_penalty: float = 0.0
    """Weight of a penalty on classes whose keys' sums are unequally long: see `objectives.unequal_lengths`."""
    classify: float = 0.0
    """Weight of telling all training classes apart by the queries' keys, besides answering tasks."""
    validate_every: int = 400
    """Training tasks between two validations."""
    validation_tasks: int = 400
    """Tasks in each validation."""
    test_tasks: int = 600
    """Tasks of the one test at the end."""
    log_every: int = 20
    """Steps between two lines of the log."""
    pretrain_steps: int = 0
    """Updates of the encoder as a plain classifier of all training classes, before the meta-training."""
    pretrain_batch: int = 512
    """Items in each of them."""
    pretrain_optimizer: str = "adam"
    """What takes them, as `optimizer`."""
    pretrain_learning_rate: float = 1e-3
    """Its step size, with cosine decay."""
    pretrain_weight_decay: float = 0.0
    """Its weight decay, as `weight_decay`."""
    pretrain_label_smoothing: float = 0.1
    """Label smoothing in them."""
    pretrain_mixup: bool = False
    """Whether they see every image blended with another, and are asked for both."""
    pretrain_turns: bool = False
    """Whether they see images turned by multiples of 90 degrees, and are asked for the turn, too."""
    pretrain_length_penalty: float = 0.0
    """Weight of the penalty on keys of unequal length in them."""
    average: float = 0.0
    """Decay of the moving average of the weights that is validated and kept; 0 keeps the weights themselves."""
    augment: tuple[str, ...] = ()
    """Changes made to training images, each in its own way: see `augment`."""
    train_on_validation: bool = False
    """Whether validation classes are trained on, too: for a last run, once everything is chosen. The last weights are
    kept then, since validations say nothing of unseen classes any more."""
    new_classes: tuple[str, ...] = ()
    """Changes made alike to all images of a class in a training task, which make another class of it."""
    precision: str = "float32"
    """What the encoder computes in: float32 or bfloat16."""
    seed: int = 0
    """Seeds the weights and every training task."""

    @property
    def training_task(self) -> tuple[int, int, int]:
        """Way, shot and queries of the tasks trained on."""
        return self.train_way or self.way, self.train_shot or self.shot, self.train_queries or self.queries

    @property
    def slots(self) -> int:
        """The most classes any task of this training has: as many label slots a learner needs."""
        return max(self.way, self.train_way)
