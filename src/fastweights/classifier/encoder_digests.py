"""Whether an encoder is still the same: digests of its code and settings, and of the weights of its networks.

Everything is followed that an encoder refers to: what is wrapped, bound or given to a `partial`, the globals and
outer variables that a function uses, what objects and containers hold. Of installed libraries the objects are looked
into, such as the transforms of a picture, but not their code. What somebody computes and keeps meanwhile, a counter
say, counts as a setting: then the encoder is taken for another one, which is the safe mistake. The package that an
encoder is of is no library to it.
"""

import functools
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from fastweights.learners.saved import bytes_of

MOST = 100_000
"""Objects that are looked at; a vocabulary that is larger still counts by its beginning."""
PLAIN = (str, bytes, bool, int, float, complex, type(None), PurePath, np.generic)
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib"))


def digests_of(parts: Sequence[Any]) -> tuple[str, str]:
    """Of the code and the settings of all parts, and of the weights of their networks (empty where there are none)."""
    own = {_package(_code(_bare(part))) for part in parts if not isinstance(_bare(part), nn.Module)}
    found = list(_within(parts, own))
    code = hashlib.sha256()
    for text in (*map(_source, parts), *(_text_of(one, own) for one in found)):
        code.update(text.encode("utf-8", "surrogatepass") + b"\0")
    networks = [one for one in found if isinstance(one, nn.Module)]
    weights = hashlib.sha256()
    for network in networks:
        for name, tensor in sorted(network.state_dict().items()):
            if isinstance(tensor, torch.Tensor):
                weights.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
                weights.update(bytes_of(tensor))
    return code.hexdigest(), weights.hexdigest() if networks else ""


def _bare(part: Any) -> Any:
    """What is wrapped by a `partial` or bound to a network."""
    while isinstance(part, functools.partial):
        part = part.func
    bound = getattr(part, "__self__", None)
    return bound if isinstance(bound, nn.Module) else part


def _text_of(one: Any, own: Collection[str]) -> str:
    """What one part says about the whole."""
    if isinstance(one, PLAIN):
        return repr(one)
    if isinstance(one, nn.Module):
        return ADDRESS.sub("", repr(one))  # with what its layers were made with
    if isinstance(one, torch.Tensor):
        dense = one.layout == torch.strided and not (one.is_quantized or one.is_meta)
        return f"{one.dtype}{tuple(one.shape)}{hashlib.sha256(bytes_of(one)).hexdigest() if dense else ''}"
    if isinstance(one, np.ndarray):
        held = b"" if one.dtype.hasobject else np.ascontiguousarray(one).tobytes()
        return f"{one.dtype}{one.shape}{hashlib.sha256(held).hexdigest()}"
    return "" if _is_foreign(one, own) else _source(one)


def _within(parts: Sequence[Any], own: Collection[str]) -> Iterator[Any]:
    """All that some things consist of, each once, in an order that depends on names alone."""
    waiting, seen = list(reversed(parts)), dict[int, Any]()  # which are kept, lest another take the number of one
    while waiting and len(seen) < MOST:
        one = waiting.pop()
        if isinstance(one, PLAIN):
            yield one
        elif id(one) not in seen:
            seen[id(one)] = one
            yield one
            waiting += reversed(_held_by(one, own))


def _held_by(one: Any, own: Collection[str]) -> list[Any]:
    """What is directly in it, sorted by name."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *_values(one.keywords)]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, dict):
        return [part for key in sorted(one, key=repr) for part in (key, one[key])]
    if isinstance(one, (list, tuple)):
        return list(one)
    if isinstance(one, (set, frozenset)):
        return sorted(one, key=repr)
    if isinstance(one, (nn.Module, np.ndarray, torch.Tensor, type, ModuleType, BuiltinFunctionType)):
        return []
    inner = inspect.unwrap(one) if callable(one) else one
    if isinstance(inner, FunctionType):
        return [] if _is_foreign(inner, own) else _used_by(inner)
    if _is_within(_code(one), LIBRARIES[:1]):  # locks, loggers and the like
        return []
    written = {} if _is_foreign(one, own) else vars(type(one))
    methods = {name: value for name, value in written.items() if isinstance(value, FunctionType)}
    return [*_values(getattr(one, "__dict__", {})), *_values(methods)]


def _used_by(function: FunctionType) -> list[Any]:
    defaults = [*(function.__defaults__ or ()), *_values(function.__kwdefaults__ or {})]
    try:
        used = inspect.getclosurevars(function)
    except ValueError:  # an outer variable that has no value yet
        return defaults
    return [*_values({**used.globals, **used.nonlocals}), *defaults]


def _values(named: Mapping[str, Any]) -> list[Any]:
    return [named[name] for name in sorted(named)]


def _is_foreign(one: Any, own: Collection[str]) -> bool:
    """Whether its code, or that of its kind, belongs to a library."""
    code = _code(one)
    return _package(code) not in own and _is_within(code, LIBRARIES)


def _package(code: Any) -> str:
    return str(getattr(code, "__module__", "")).partition(".")[0]


def _is_within(code: Any, libraries: Sequence[Path]) -> bool:
    try:
        file = Path(inspect.getfile(code)).resolve()
    except (OSError, TypeError):
        return getattr(code, "__module__", "") == "builtins"
    return any(file.is_relative_to(library) for library in libraries)


def _code(one: Any) -> Any:
    """What of it was written down: a function, or the class of an object."""
    inner = inspect.unwrap(one) if callable(one) else one
    return inner if inspect.isroutine(inner) else type(inner)


def _source(one: Any) -> str:
    code = _code(one)
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # typed at a prompt, or not written in Python
        return f"{getattr(code, '__module__', '')}.{getattr(code, '__qualname__', repr(code))}"
