"""Models and states on disk: safetensors files with the tensors and, as JSON in the metadata, all else. No pickle.

A *model* file holds the best weights, the settings of the learner and those of its training, a plain mapping here. A
*checkpoint* holds besides them what training needs to go on exactly where it stopped: see `training.checkpoint`.

Every file holds a digest of its contents, which is verified when it is read; and what it claims is checked against its
tensors before anything of the size it claims is made.
"""

import hashlib
import json
import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fastweights.learners.base import Learner
from fastweights.learners.checks import FORGOTTEN, State, fits
from fastweights.learners.registry import SYSTEMS, LearnerSettings, outline, undrawn
from fastweights.utils.arguments import shown
from fastweights.utils.devices import find_device
from fastweights.utils.digests import DIGEST, digest_in_pieces, is_digest, parse_written
from fastweights.utils.errors import UserError
from fastweights.utils.files import replacing
from fastweights.utils.settings import WIDEST, is_of

MODEL = "model.safetensors"
"""What the model of a run is called in its folder."""
FORMAT, UNDIGESTED = "fastweights-2", "fastweights-1"
"""What files say they are; those of the older format have no digest."""
STATE = "fastweights-state-2"
"""The same of states; older ones say nothing."""
WHOSE = "model"
"""The entry of a state's header that says which learner described it."""
COUNTERS: dict[str, type] = {
    "step": int,
    "seconds": float,
    "best_accuracy": float,
    "best_step": int,
    "validated_step": int,
    "pretrained": bool,
    "side_by_side": int,
}
"""What may be counted, and as what."""
LEAST = {"slots": 0, "labels": FORGOTTEN, "counts": 0}
"""The least number that these entries of a state may hold."""
COUNTED_LATER = frozenset(["side_by_side"])
"""Those of them that older checkpoints do not have."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights, each of which may be poured into another: a model for use is stored in half precision."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Saved:
    """What a file holds, before it is poured into a learner."""

    path: Path
    learner: LearnerSettings
    training: dict[str, Any]
    """Settings of the training, under the names of the version that wrote the file."""
    counters: dict[str, Any]
    tensors: Tensors
    classifier: dict[str, Any] = field(default_factory=dict)
    """How a classifier uses it, where the file was made for one."""

    def section(self, name: str) -> Tensors:
        """The tensors whose names begin with `name.`, without it."""
        return {key.removeprefix(f"{name}."): t for key, t in self.tensors.items() if key.startswith(f"{name}.")}

    @property
    def sections(self) -> dict[str, int]:
        """How many tensors there are of each section."""
        names = [key.partition(".")[0] for key in self.tensors]
        return {name: names.count(name) for name in sorted(set(names))}


def former_of(path: Path) -> Path:
    """What the file before this one is kept as, where it is kept."""
    return path.with_name(f"{path.stem}.former{path.suffix}")


def save(
    path: Path,
    sections: Mapping[str, Mapping[str, Tensor]],
    learner: LearnerSettings,
    training: Mapping[str, Any],
    counters: Mapping[str, Any],
    classifier: Mapping[str, Any] | None = None,
    *,
    keep_former: bool = False,
) -> None:
    """Write a file in one piece; a process killed meanwhile leaves the former one, which is kept if that is wanted."""
    tensors = _apart(
        {f"{section}.{name}": t.detach().cpu() for section, s in sections.items() for name, t in s.items()}
    )
    header = {"learner": learner.to_json(), "training": dict(training), "counters": dict(counters)}
    header["sections"] = {section: len(of) for section, of in sorted(sections.items()) if of}
    if classifier:
        header["classifier"] = dict(classifier)
    metadata = {"format": FORMAT, "fastweights": json.dumps(header)}
    write_tensors(path, tensors, metadata, former_of(path) if keep_former else None)


def _apart(tensors: Tensors) -> Tensors:
    """The same, each with memory of its own, as the format demands: weights may be tied, or known by two names."""
    taken, apart = set[int](), Tensors()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        place = whole.untyped_storage().data_ptr()
        apart[name] = whole.clone() if place in taken else whole
        taken.add(place)
    return apart


def remedy_for(path: Path) -> str:
    """What to do about a damaged file; the former one is offered where it was kept."""
    former = former_of(path)
    if not former.is_file():
        return "restore it from a copy or train again"
    return f"the one before it was kept, go on from that: mv {shlex.quote(str(former))} {shlex.quote(str(path))}"


def load(path: Path | str, *, remedy: str = "", verified: bool = False) -> Saved:
    """Read a model or a checkpoint, and say what to do where it is damaged.

    Nothing is verified again where somebody has verified the whole file already.
    """
    path = _path(path)
    remedy = remedy or remedy_for(path)
    tensors, metadata = _read_model(path, remedy)
    if not verified:
        verify(path, tensors, metadata, remedy, has_digest=metadata["format"] == FORMAT)
    with _named(path, remedy):
        header = {"classifier": {}, **parse_written(metadata["fastweights"])}
        learner = LearnerSettings.from_json(header["learner"])
        parts = [header[name] for name in ("training", "counters", "classifier")]
        if not all(isinstance(part, dict) for part in parts):
            raise TypeError("settings or counters that are none")
        check_counters(header["counters"])
        saved = Saved(path, learner, parts[0], parts[1], tensors, parts[2])
        if metadata["format"] == FORMAT and header["sections"] != saved.sections:
            raise ValueError(f"it claims the tensors {header['sections']}, but holds {saved.sections}")
    return saved


def settings_in(path: Path | str) -> LearnerSettings:
    """What a file says of its learner: to choose how to load it, for nothing is verified yet."""
    path = _path(path)
    remedy = remedy_for(path)
    _, metadata = _read_model(path, remedy, only_metadata=True)
    with _named(path, remedy):
        return LearnerSettings.from_json(parse_written(metadata["fastweights"])["learner"])


def _read_model(path: Path, remedy: str, **how: bool) -> tuple[Tensors, dict[str, str]]:
    if not path.exists():
        raise UserError(f"{path} does not exist; train a model first, or name another file.")
    tensors, metadata = read_tensors(path, remedy, **how)
    if metadata.get("format") not in (FORMAT, UNDIGESTED):
        raise UserError(f"{path} is a safetensors file, but not one written by this version of fastweights.")
    return tensors, metadata


@contextmanager
def _named(path: Path, remedy: str) -> Iterator[None]:
    """Have whatever is wrong with a header said with the name of the file."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} has a damaged header ({error!r:.200}); {remedy}.") from None


def check_counters(counters: Mapping[str, Any]) -> None:
    """Refuse, by a ValueError, what no training has counted."""
    for name, value in counters.items():
        low, high = (-1, 1) if name == "best_accuracy" else (0, WIDEST)
        if not is_of(value, COUNTERS.get(name)) or not low <= value <= high or -1 < value < 0:
            raise ValueError(f"counters that are not numbers of their kind: {name} is {value!r:.40}")
    latest = counters.get("step", WIDEST)
    if max(counters.get("best_step", 0), counters.get("validated_step", 0)) > latest:
        raise ValueError(f"counters that contradict each other: validated after step {latest}, the last")


def load_learner(
    path: Path | str, device: torch.device | str = "cpu", learner: Learner | None = None
) -> tuple[Learner, Saved]:
    """The learner in a file, or in the folder of a run, with its best weights: to be asked, not to be trained on.

    In eval mode and without gradients, which a state that is added to for days would carry along. A learner that is
    not registered has to be given; its weights are replaced by those of the file.
    """
    path, device = _path(path), find_device(device)
    saved = load(path / MODEL if path.is_dir() else path)
    return learner_in(saved, device, learner), saved


def learner_in(saved: Saved, device: torch.device | str = "cpu", learner: Learner | None = None) -> Learner:
    """The learner in a file that was read already, as `load_learner` returns it."""
    learner = learner or built(saved)
    fill(learner, saved.section("best"), saved.path)
    return learner.to(find_device(device)).eval().requires_grad_(False)


def built(saved: Saved) -> Learner:
    """A learner as a file's settings say, to be filled with its weights."""
    if saved.learner.system not in SYSTEMS:
        raise UserError(
            f"{saved.path} holds the weights of {saved.learner.system}, which is not registered here; import what "
            "registers it, or give the learner itself."
        )
    return built_for(saved.learner, saved.section("best"), saved.path)


def built_for(settings: LearnerSettings, weights: Tensors, path: Path) -> Learner:
    """A learner to be filled with these weights, which are known to fit before anything of the claimed size is made."""
    try:
        wanted = outline(settings, len(weights))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if wanted is not None:
        require_fitting(wanted, weights, path)
    return undrawn(settings)


def fill(module: nn.Module, tensors: Tensors, path: Path) -> None:
    """Pour saved weights into a module of the same shape."""
    require_weights(module.state_dict(), tensors, path)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} does not hold the weights its settings call for ({reason[:200]}).") from None


def require_fitting(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors of other names, shapes or kinds than are wanted."""
    reason = next(_differences(wanted, found), None)
    if reason is not None:
        raise UserError(f"{path} does not hold the weights its settings call for ({reason}); {remedy_for(path)}.")


def _differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(set(wanted) ^ set(found)):
        yield f"{name[:80]} is {'missing' if name in wanted else 'not known'}"
    for name, tensor in wanted.items():
        if not isinstance(tensor, Tensor) or is_lazy(tensor):
            continue
        shape, kind = tuple(found[name].shape), found[name].dtype
        if shape != tuple(tensor.shape):
            yield f"{name} has the shape {shape}, not {tuple(tensor.shape)}"
        if kind != tensor.dtype and not (kind in FLOATS and tensor.dtype in FLOATS):
            yield f"{name} is of {kind}, not of {tensor.dtype}"


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; by its sum, which is several times as fast, where that tells."""
    return not tensor.is_floating_point() or bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def require_weights(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], path: Path) -> None:
    """Refuse tensors of other names, shapes or kinds than are wanted, and such as hold no numbers."""
    require_fitting(wanted, found, path)
    for name, tensor in found.items():
        if not is_finite(tensor):
            raise UserError(f"{path} holds NaN or infinite numbers ({name}); restore it from a copy or make it again.")


def save_state(path: Path | str, state: State, learner: Learner | None = None) -> None:
    """Write a state, and if told by which learner it was described. The file appears whole or not at all."""
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError(f"a state is what `describe` returns, a dict of tensors, not {type(state).__name__}.")
    # Cloned, since tensors that share memory cannot be stored.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    write_tensors(_path(path), copies, {"format": STATE, **({} if learner is None else {WHOSE: fingerprint(learner)})})


def load_state(
    path: Path | str, device: torch.device | str = "cpu", learner: Learner | None = None
) -> dict[str, Tensor]:
    """Read a state that `save_state` wrote; where both say whose it is, refuse one that another learner described."""
    path, device = _path(path), find_device(device)
    remedy = "restore it from a copy, or describe the task again"
    state, metadata = read_tensors(path, remedy)
    if metadata.get("format") not in (STATE, None):
        raise UserError(f"{path} is no state but something else; name a file that save_state wrote.")
    verify(path, state, metadata, remedy, has_digest="format" in metadata)
    try:
        check_contents(state, getattr(learner, "slots", None))
        if learner is not None:
            _check_kind(state, learner)
    except ValueError as error:
        raise UserError(f"{path} is no state of a task ({error}); {remedy}.") from None
    if learner is not None and WHOSE in metadata and metadata[WHOSE] != fingerprint(learner):
        raise UserError(f"{path} was described by another model, or before this one was trained on; describe it again.")
    return {name: tensor.to(device) for name, tensor in state.items()}


def check_contents(state: State, slots: int | None = None) -> None:
    """Refuse, by a ValueError, a state with numbers that no description has."""
    if len({tensor.shape[:1] for tensor in state.values()}) > 1 or not all(t.dim() for t in state.values()):
        raise ValueError("its tensors are not of the same tasks")
    for name, tensor in state.items():
        if not is_finite(tensor):
            raise ValueError(f"{name} holds NaN or infinite numbers")
        if name in LEAST and tensor.numel() and tensor.min() < LEAST[name]:
            raise ValueError(f"{name} holds a number below {LEAST[name]}")
    bound, labels = state.get("slots"), state.get("labels")
    if bound is not None:
        _check_slots(bound, slots)
    if labels is not None and labels.is_floating_point():
        if not ((labels == 0) | (labels == 1)).all() or (labels.sum(-1) > 1).any():
            raise ValueError("labels holds something else than one class for each example")
    elif labels is not None and bound is not None and labels.numel() and labels.max() >= bound.shape[1]:
        raise ValueError(f"labels holds a class beyond the {bound.shape[1]} that are bound")


def _check_kind(state: State, learner: Learner) -> None:
    """Refuse, by a ValueError, a state that this learner cannot have described."""
    try:
        shapes = learner.state_shapes
    except NotImplementedError:  # a learner of one's own need not say
        return
    for name in sorted((set(shapes) ^ set(state)) - {"counts"}):  # which older versions did not count
        raise ValueError(f"{name} is {'missing' if name in shapes else 'not known'}")
    for name, tensor in state.items():
        if name in shapes and not fits(shapes[name], tensor.shape[1:]):
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}")


def _check_slots(bound: Tensor, slots: int | None) -> None:
    if bound.dtype != torch.int64 or bound.dim() != 2:
        raise ValueError(f"slots is of {bound.dtype} and {bound.dim()} dimensions, not of int64 and 2")
    order = bound.sort(1).values
    if (order[:, 1:] == order[:, :-1]).any():
        raise ValueError("slots holds one label slot twice")
    if slots is not None and bound.numel() and bound.max() >= slots:
        raise ValueError(f"slots holds {int(bound.max())}, but this model has {slots} label slots")


def fingerprint(learner: Learner) -> str:
    """Differs for learners with other weights, wherever they are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(learner.state_dict().items()):
        digest.update(name.encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def _path(path: Any) -> Path:
    if not isinstance(path, (str, Path)):
        raise UserError(f"a file is named by a path, not by {shown(path)}.")
    return Path(path)


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's numbers as bytes, which are copied only where they have to be."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def digest_of_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """A digest of everything in a safetensors file."""
    return digest_in_pieces(_parts(tensors, metadata))


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[Any]:
    """All that a digest is of: the metadata besides the digest itself, and names, types, shapes and bytes."""
    said = {name: text for name, text in metadata.items() if name != DIGEST}
    yield json.dumps(said, sort_keys=True).encode()
    for name in sorted(tensors):
        yield f"\0{name}:{tensors[name].dtype}:{tuple(tensors[name].shape)}:".encode("utf-8", "surrogatepass")
        yield bytes_of(tensors[name])


def verify(path: Path, tensors: Tensors, metadata: Mapping[str, str], remedy: str, *, has_digest: bool) -> None:
    """Refuse a file that is not what was written; say so where that cannot be told."""
    if not has_digest and DIGEST not in metadata:
        warnings.warn(
            f"{path} was written by an older version, without a digest: whether it is damaged cannot be told.",
            stacklevel=4,
        )
    elif not is_digest(metadata.get(DIGEST), _parts(tensors, metadata)):
        raise UserError(f"{path} is damaged: its contents do not match their digest; {remedy}.")


def write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str], former: Path | None = None) -> None:
    """Write a safetensors file with a digest of all of it."""
    signed = {**metadata, DIGEST: digest_of_file(tensors, metadata)}
    try:
        with replacing(path, former) as draft:
            save_file(tensors, draft, metadata=signed)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be written ({error}), the former file is kept; make room.") from None


def read_tensors(path: Path, remedy: str, *, only_metadata: bool = False) -> tuple[Tensors, dict[str, str]]:
    """What a safetensors file holds, and its metadata; nothing is verified yet."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no plain file; name another.")
    try:
        with safe_open(path, framework="pt") as file:
            names = [] if only_metadata else file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError, ValueError, RuntimeError, AttributeError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read as a safetensors file ({error!s:.200}); {remedy}.") from None
