"""Learners by name: systems, presets of them, and the settings that a learner is built from.

Every file of this folder registers its system. Installed packages add theirs by an entry point of the group
`fastweights.learners`, which names a module to import.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from types import NoneType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.modules import module as registrations
from torch.overrides import TorchFunctionMode

from fastweights.learners.base import Learner
from fastweights.nn.encoders import ENCODERS, Encoder
from fastweights.utils import retired
from fastweights.utils.arguments import require, shown, whole_number
from fastweights.utils.errors import UserError, unknown
from fastweights.utils.settings import Settings, check_kind, check_value, option, parse, tupled

ENTRY_POINTS = "fastweights.learners"


@dataclass(frozen=True)
class Preset:
    """A model by name."""

    what: str
    """One line for the list of models."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Where it differs from the defaults of its system and its encoder."""
    encoder: str = "cnn"
    training: Mapping[str, Any] = field(default_factory=dict)
    """Where the training that its authors recommend differs from the defaults, the optimiser's among them."""
    system: str = ""
    """Filled in by `register`."""


SYSTEMS: dict[str, type[Learner]] = {}
"""All systems there are, by name."""
PRESETS: dict[str, Preset] = {}
"""All models there are, by name."""

Registered = TypeVar("Registered", bound=type[Learner])
Found = TypeVar("Found")


def register(name: str, presets: Mapping[str, Preset] | None = None) -> Callable[[Registered], Registered]:
    """Make a learner known by a name, and models of it by theirs."""
    require("the name of a system", name, str, "a text")
    require("the models of a system", presets, (Mapping, NoneType), "a dict of Preset")

    def add(cls: Registered) -> Registered:
        if not (isinstance(cls, type) and issubclass(cls, Learner)):
            raise UserError(f"what is registered as {name} is a subclass of Learner, not {shown(cls)}.")
        SYSTEMS[name] = cls
        for called, chosen in (presets or {}).items():
            PRESETS[called] = Preset(chosen.what, chosen.settings, chosen.encoder, chosen.training, name)
        return cls

    return add


@functools.cache
def load_installed() -> None:
    """Import what installed packages add."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            raise UserError(f"the installed learner {point.name} cannot be imported ({error}).") from None


def find_system(name: str) -> type[Learner]:
    return _find("system", name, SYSTEMS)


def find_encoder(name: str) -> type[Encoder]:
    return _find("encoder", name, ENCODERS)


def find_preset(name: str) -> Preset:
    return _find("model", name, PRESETS)


def _find(what: str, name: str, known: Mapping[str, Found]) -> Found:
    if name not in known:
        load_installed()
    if name not in known:
        raise unknown(what, name, known)
    return known[name]


@dataclass(frozen=True, init=False)
class LearnerSettings:
    """What a learner is built from: a system, an encoder, its items, and settings of both, which are given and read as
    if they were its own: `LearnerSettings(filters=32).filters`.
    """

    system: str = option("fast-weights")
    """Which kind of learner: a key of `SYSTEMS`; for a learner that is not registered, the name of its class."""
    encoder: str = option("cnn")
    """Which network computes the keys: a key of `ENCODERS`."""
    item_shape: tuple[int, ...] = option((28, 28, 1), at_least=1, at_most=2**20)
    """Height, width and channels of the images; (length,) of sentences."""
    vocabulary: int = option(0, at_least=0, at_most=2**24)
    """Number of tokens of a text; 0 for images."""
    slots: int = option(5, at_least=1, at_most=2**20)
    """Label slots (C): the most classes a task may have."""
    of_system: Settings = field(default=None)  # type: ignore[assignment]
    of_encoder: Settings = field(default=None)  # type: ignore[assignment]

    def __init__(
        self,
        system: str = "fast-weights",
        encoder: str = "cnn",
        item_shape: tuple[int, ...] = (28, 28, 1),
        vocabulary: int = 0,
        slots: int = 5,
        of_system: Settings | None = None,
        of_encoder: Settings | None = None,
        **options: Any,
    ) -> None:
        for what, given in (("system", system), ("encoder", encoder)):
            require(f"the setting {what}", given, str, "a word")
        for what, settings in (("of_system", of_system), ("of_encoder", of_encoder)):
            require(what, settings, (Settings, NoneType), "Settings")
        kinds = [cls.Settings for cls in (SYSTEMS.get(system, Learner), ENCODERS.get(encoder, Encoder))]
        both = [_with(kind, given, options) for kind, given in zip(kinds, (of_system, of_encoder), strict=True)]
        common = {"system": system, "encoder": encoder, "item_shape": item_shape, "vocabulary": vocabulary}
        for name in options:
            if not any(name in names_of(kind) for kind in kinds):
                raise unknown(
                    f"setting of {system} on {encoder} called", name, [n for kind in kinds for n in names_of(kind)]
                )
        for name, value in {**common, "slots": slots, "of_system": both[0], "of_encoder": both[1]}.items():
            object.__setattr__(self, name, value)
        for one in fields(self):
            if one.name in COMMON:
                check_value(one, getattr(self, one.name))
        if math.prod(item_shape) > LARGEST_ITEM:
            raise UserError(f"items of the shape {item_shape} are larger than any that a model sees.")

    def __getattr__(self, name: str) -> Any:
        for settings in (self.__dict__.get("of_system"), self.__dict__.get("of_encoder")):
            if settings is not None and name in names_of(type(settings)):
                return getattr(settings, name)
        raise AttributeError(f"{self.__dict__.get('system')} has no setting {name!r}")

    @property
    def common(self) -> dict[str, Any]:
        """The settings that every learner has."""
        return {name: getattr(self, name) for name in COMMON}

    def to_json(self) -> dict[str, Any]:
        return {**self.common, **self.of_encoder.to_json(), **self.of_system.to_json()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Settings as a file holds them. Old files hold those of all systems and encoders: others are left out."""
        settings = tupled(retired.current(values))
        system, encoder = settings.get("system", "fast-weights"), settings.get("encoder", "cnn")
        if system not in SYSTEMS or encoder not in ENCODERS:
            load_installed()
        theirs = {*names_of(SYSTEMS.get(system, Learner).Settings), *names_of(ENCODERS.get(encoder, Encoder).Settings)}
        others = all_settings() - theirs
        unregistered = system not in SYSTEMS
        return cls(**{n: v for n, v in settings.items() if n in COMMON or not (n in others or unregistered)})


COMMON = ("system", "encoder", "item_shape", "vocabulary", "slots")
"""Settings that every learner has."""
DRAWN_IN_PLACE = frozenset(["normal_", "uniform_", "bernoulli_", "exponential_", "random_", "trunc_normal_"])
"""How torch draws random numbers into a tensor."""
LARGEST_ITEM = 2**26
"""Numbers in an item: a picture of 4000 x 4000 pixels in colour has fewer."""
OF_THE_DATA = ("item_shape", "vocabulary")
"""Those of them that follow from the data."""


def names_of(settings: type[Settings]) -> list[str]:
    return [one.name for one in fields(settings)]


def all_settings() -> set[str]:
    """The settings of all systems and all encoders."""
    kinds = [cls.Settings for cls in SYSTEMS.values()] + [cls.Settings for cls in ENCODERS.values()]
    return {name for kind in kinds for name in names_of(kind)}


def _with(kind: type[Settings], given: Settings | None, options: Mapping[str, Any]) -> Settings:
    """Settings of a kind: as given, if they are of that kind, with the options that are its own."""
    before = given.to_json() if type(given) is kind else {}
    return kind(**{**before, **{name: value for name, value in options.items() if name in names_of(kind)}})


def outline(settings: LearnerSettings, tensors: int) -> dict[str, Tensor] | None:
    """Names, shapes and types of the weights that a learner would have, as tensors without numbers.

    A file may claim anything: nothing of the size it claims is made, and a network is given up that outgrows a file of
    so many tensors. None of a learner from elsewhere that cannot be built without numbers.
    """
    try:
        return dict(sketched(settings, 1000 + 100 * tensors).state_dict())
    except (UserError, _OutgrownError):
        raise
    except (RuntimeError, ValueError, TypeError, ArithmeticError, MemoryError, NotImplementedError) as error:
        if not _is_ours(settings):
            return None
        raise UserError(f"there is no network of such settings ({' '.join(str(error).split())[:120]}).") from None


def sketched(settings: LearnerSettings, parts: int = 100_000) -> Learner:
    """A learner without numbers, of at most so many modules and tensors."""
    with torch.device("meta"), _Undrawn(), _at_most(parts):
        return build_learner(settings)


def undrawn(settings: LearnerSettings) -> Learner:
    """A learner whose weights are whatever was in memory, since others are going to replace them: much is saved."""
    if not _is_ours(settings):
        return build_learner(settings)
    with _Undrawn():
        return build_learner(settings)


def _is_ours(settings: LearnerSettings) -> bool:
    of = find_system(settings.system), find_encoder(settings.encoder)
    return all(cls.__module__.partition(".")[0] == __package__.partition(".")[0] for cls in of)


class _OutgrownError(UserError):
    pass


class _Undrawn(TorchFunctionMode):
    """Draws nothing: of weights without numbers torch would import its compiler to do so, others are replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        fills = name in DRAWN_IN_PLACE or (getattr(func, "__module__", "") == "torch.nn.init" and name.endswith("_"))
        if fills:
            return args[0] if args else kwargs["tensor"]
        if func in (torch.rand, torch.randn):
            return torch.empty(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
        return func(*args, **kwargs)


@contextmanager
def _at_most(parts: int) -> Iterator[None]:
    """Have a network given up that has more than so many modules and tensors."""
    left, here = parts, threading.get_ident()

    def count(*_: Any) -> None:
        nonlocal left
        left -= threading.get_ident() == here
        if left < 0:
            raise _OutgrownError("its settings call for a larger network than it holds the weights of.")

    hooks = [
        registrations.register_module_module_registration_hook(count),
        registrations.register_module_parameter_registration_hook(count),
        registrations.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def build_learner(settings: LearnerSettings) -> Learner:
    """A learner with fresh weights, drawn from torch's generator."""
    require("what a learner is built from", settings, LearnerSettings, "a LearnerSettings")
    system, encoder = find_system(settings.system), find_encoder(settings.encoder)
    network = encoder.build(settings.item_shape, settings.vocabulary, settings.of_encoder)
    learner = system.build(network, settings.slots, settings.of_system)
    learner.settings = settings
    return learner


def preset(
    name: str, *, dataset: str, item_shape: tuple[int, ...], vocabulary: int, way: int, shot: int, **overrides: Any
) -> LearnerSettings:
    """The settings of a model for a benchmark, with as many label slots as a task has classes unless overridden.

        preset("fwcnn-hebb", dataset="mini-imagenet", item_shape=(84, 84, 3), vocabulary=0, way=5, shot=1)

    What its authors chose by benchmark is chosen from the items (`defaults_for`). Everything can be overridden.
    """
    require("the name of a model", name, str, "a text")
    require("the shape of items", item_shape or None, (tuple, list), "a tuple of whole numbers")
    item_shape = tuple(whole_number("the size of an item", size, 1) for size in item_shape)
    vocabulary, way, shot = (
        whole_number(what, value, least)
        for what, value, least in (("vocabulary", vocabulary, 0), ("way", way, 1), ("shot", shot, 1))
    )
    chosen = find_preset(name)
    check_overrides(name, overrides)
    system = find_system(overrides.get("system", chosen.system))
    encoder = find_encoder(overrides.get("encoder", chosen.encoder))
    check_items(name, encoder, dataset, vocabulary)
    shape, felt = tuple(item_shape), {*names_of(system.Settings), *names_of(encoder.Settings)}
    by_benchmark = {**encoder.defaults_for(shape, vocabulary, shot), **system.defaults_for(shape, vocabulary, shot)}
    of_preset = {key: value for key, value in chosen.settings.items() if key in felt}
    common = {"system": chosen.system, "encoder": chosen.encoder, "item_shape": shape, "vocabulary": vocabulary}
    return LearnerSettings(**{**common, "slots": way, **by_benchmark, **of_preset, **overrides})


def check_items(name: str, encoder: type[Encoder], dataset: str, vocabulary: int) -> None:
    """Refuse a model that cannot read the items of a dataset."""
    is_text = vocabulary > 0
    if encoder.reads_text == is_text:
        return
    kinds = {True: "sentences", False: "images"}
    fitting = [other for other, chosen in PRESETS.items() if find_encoder(chosen.encoder).reads_text == is_text]
    raise UserError(
        f"{name} is for {kinds[encoder.reads_text]}, but {dataset} holds {kinds[is_text]}; for these there are "
        f"{', '.join(fitting)}."
    )


def settings_of(name: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The type of each setting that has an effect on a model: a comparison of others would compare nothing."""
    chosen, changed = find_preset(name), overrides or {}
    system = find_system(changed.get("system", chosen.system))
    encoder = find_encoder(changed.get("encoder", chosen.encoder))
    own = {one.name: one.type for kind in (system, encoder) for one in fields(kind.Settings)}
    return {"system": str, "encoder": str, "slots": int, **own}


def check_overrides(name: str, overrides: Mapping[str, Any]) -> None:
    """Refuse settings that a model does not have and values of the wrong type."""
    kinds = settings_of(name, overrides)
    for setting, value in overrides.items():
        if setting in OF_THE_DATA:
            raise UserError(f"the setting {setting} follows from the data and cannot be changed.")
        if setting not in kinds and setting in all_settings():
            raise UserError(f"the setting {setting} has no effect on {name}; there are {', '.join(sorted(kinds))}.")
        if setting not in kinds:
            raise unknown(f"setting of {name} called", setting, sorted(kinds))
        check_kind(setting, value, kinds[setting])


def parse_overrides(name: str, assignments: Iterable[str]) -> dict[str, Any]:
    """Overrides of a model as they are typed, "filters=32", "blocks=64,96" or "bias=false", as values."""
    pairs = [assignment.partition("=") for assignment in assignments]
    for setting, equals, text in pairs:
        if not equals:
            raise UserError(f"a setting is given as name=value, not {setting + equals + text!r}.")
    chosen = {setting: text.strip() for setting, _, text in pairs if setting in ("system", "encoder")}
    kinds = settings_of(name, chosen)
    overrides = {setting: parse(text.strip(), kinds.get(setting)) for setting, _, text in pairs}
    check_overrides(name, overrides)
    return overrides


def encoder_of(name: str) -> str:
    """Which network a model sees items by."""
    return find_preset(name).encoder


def reads_text(name: str) -> bool:
    """Whether a model is for sentences, not for images."""
    return find_encoder(encoder_of(name)).reads_text


def count_parameters(settings: LearnerSettings) -> int:
    """Learned numbers of a model; nothing is computed and no random number is drawn."""
    return sum(parameter.numel() for parameter in sketched(settings).parameters())
