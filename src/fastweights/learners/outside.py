"""Learners from outside the package: a class, or a function that makes a learner, in a Python file of one's own."""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fastweights.learners.base import Learner
from fastweights.learners.registry import PRESETS, SYSTEMS, Preset, register
from fastweights.nn.encoders import ENCODERS
from fastweights.utils.errors import UserError, unknown

Maker = Callable[..., Learner]


def is_outside(name: str) -> bool:
    """Whether a name means a file: my_file.py:MyLearner."""
    return ".py:" in name


def find(name: str, what: str = "learner", like: str = "MyLearner") -> Maker:
    """What stands behind my_file.py:MyLearner; the file is run, which may register learners."""
    file, _, wanted = name.rpartition(":")
    path = Path(file)
    if not is_outside(name) or not path.is_file():
        raise UserError(f"{name!r} is no {what} in a file; write my_file.py:{like}, with a file that exists.")
    try:
        module = _run(path.resolve(), path.stat().st_mtime)
    except (Exception, SystemExit) as error:  # a script that ends by `sys.exit(main())` would end us, too
        raise UserError(f"{path} cannot be imported ({type(error).__name__}: {error}).") from error
    found = getattr(module, wanted, None)
    if not callable(found):
        raise unknown(f"class or function in {path} called", wanted, _callables(module))
    return found


def _callables(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


@functools.cache  # the classes of a file must be the same whenever it is named, until it changes
def _run(path: Path, changed: float) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fastweights_outside_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules[module.__name__] = module  # dataclasses look their module up
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


def preset_of(found: Maker, vocabulary: int) -> str | None:
    """The first model of a registered class that reads such items; None where the class is not registered."""
    system = next((name for name, cls in SYSTEMS.items() if cls is found), None)
    if system is None:
        return None
    readers = [name for name in ENCODERS if ENCODERS[name].reads_text == (vocabulary > 0)]
    fitting = [name for name, p in PRESETS.items() if p.system == system and p.encoder in readers]
    if not fitting:
        encoder = readers[0]
        fitting = [f"{system}-{encoder}"]
        register(system, {fitting[0]: Preset(f"{system} on the {encoder} encoder", encoder=encoder)})(SYSTEMS[system])
    return fitting[0]


def make(found: Maker, *, item_shape: tuple[int, ...], vocabulary: int, way: int) -> Learner:
    """Call a class or function with whichever of `item_shape`, `vocabulary` and `way` it names."""
    known: dict[str, Any] = {"item_shape": item_shape, "vocabulary": vocabulary, "way": way}
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):  # a class of Python's own, say
        raise UserError(f"{found.__name__} is no fastweights.Learner; derive it from that class.") from None
    required = [
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    odd = [name for name in required if name not in known]
    if odd:
        raise UserError(f"{found.__name__} needs {odd[0]}, but is given only {', '.join(known)}; give it a default.")
    learner = found(**{name: value for name, value in known.items() if name in parameters})
    if not isinstance(learner, Learner):
        raise UserError(f"{found.__name__} is no fastweights.Learner; derive it from that class.")
    return learner
