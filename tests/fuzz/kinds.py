"""The kinds of files: how an intact one is made, taken apart, signed again, and read as the program reads it.

What was read and what a file says are compared as plain values: numbers and texts as they are, tensors by their digest.
"""

import contextlib
import functools
import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from classifier.drawn import drawing, write_model
from experiments.conftest import made_up
from safetensors import safe_open
from safetensors.torch import save_file
from support import blobs

from fastweights.classifier import Classifier, files
from fastweights.classifier.adapter import Adapter, load_adapter
from fastweights.classifier.calibration import Calibration
from fastweights.classifier.key_cache import FILE, KeyCache
from fastweights.classifier.memory import unit
from fastweights.classifier.sight import Sight
from fastweights.data import prepared
from fastweights.data.items import Dataset
from fastweights.experiments import ledger
from fastweights.learners import build_learner, saved
from fastweights.learners.registry import LearnerSettings
from fastweights.server import rows
from fastweights.server.errors import Refusal
from fastweights.server.limits import Limits
from fastweights.server.memories import Memories
from fastweights.server.seeing import Seers
from fastweights.server.seeing import digest_of as digest_of_sight
from fastweights.server.store import New, Store
from fastweights.training.checkpoint import training_of
from fastweights.training.loop import CHECKPOINT, Training, resume
from fastweights.training.pretraining import EncoderCache, Pretraining
from fastweights.training.settings import TrainSettings
from fastweights.utils.digests import digest_of, digest_of_json
from fastweights.utils.errors import UserError

LEARNER = LearnerSettings(item_shape=(8, 8, 1), filters=4, layers=2, batch_norm=1, width=8, label_noise=0.01, slots=4)
TRAINING = TrainSettings(
    steps=3, way=3, queries=2, tasks_per_step=2, validate_every=4, validation_tasks=3, test_tasks=3, log_every=1,
    ema_decay=0.5, classifier_weight=0.5, pretrain_steps=2, pretrain_batch=4,
)  # fmt: skip


@dataclass
class Parts:
    """What a file says."""

    tensors: dict[str, Any] = field(default_factory=dict)
    header: Any = None
    texts: dict[str, str] = field(default_factory=dict)
    """Metadata that is not JSON."""
    sign: bool = True
    """Whether a fresh digest is written; without one the former stays."""


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    make: Callable[[Path], Path]
    """Writes an intact one into a folder."""
    apart: Callable[[Path], Parts]
    together: Callable[[Path, Parts], None]
    """Writes parts in place of an intact file, signed afresh."""
    read: Callable[[Path], Any]
    """Opens one as the program does, and returns what it says."""
    says: Callable[[Parts], Any]
    """The same of its parts, without the program."""
    strict: tuple[str, ...] = ()
    """Entries of the header under which every value has its type and is not negative."""
    optional: tuple[str, ...] = ()
    """Entries of the header that may be missing, or in which anything may: older versions had fewer settings."""
    may_end_early: bool = False
    """Whether a file that ends behind any of its lines is a whole one."""
    forgiving: bool = False
    """Whether damaged entries are left out: a cache asks again for them."""


@functools.cache
def dataset() -> Dataset:
    splits = {name: blobs(8, 6, seed) for seed, name in enumerate(("train", "val", "test"))}
    return Dataset("blobs", splits, content_hash="blobs")


def digest(tensor: Any) -> str:
    array = tensor.detach().cpu().contiguous().reshape(-1) if isinstance(tensor, torch.Tensor) else tensor
    data = array.view(torch.uint8).numpy() if isinstance(array, torch.Tensor) else np.ascontiguousarray(array)
    return f"{tensor.dtype}{tuple(tensor.shape)}{digest_of([data.tobytes()])}"


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in sorted(tensors.items())}


def plain(values: Any) -> Any:
    """As JSON has it: tuples are lists."""
    return json.loads(json.dumps(values))


# Models, checkpoints, cached encoders: safetensors with a header of JSON


def apart(path: Path, entry: str = "fastweights") -> Parts:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        texts = file.metadata()
    header = json.loads(texts.pop(entry)) if entry in texts else None
    texts.pop("digest")
    return Parts(tensors, header, texts)


def dumped(values: Any) -> str:
    """JSON of values among which there may be some that JSON is not made of."""
    return values.text if isinstance(values, Written) else json.dumps(values)


class Written:
    """JSON that `json.dumps` would not write: a key twice, say."""

    def __init__(self, text: str) -> None:
        self.text = text


def together(path: Path, parts: Parts, entry: str = "fastweights") -> None:
    metadata = {**parts.texts, **({} if parts.header is None else {entry: dumped(parts.header)})}
    signed = {**metadata, "digest": saved.digest_of_file(parts.tensors, metadata)}
    save_file(parts.tensors, path, metadata=signed)


def header_of(one: saved.Saved, training: TrainSettings) -> dict[str, Any]:
    return plain(
        {
            "learner": one.learner.to_json(),
            "training": training.to_json(),
            "counters": one.counters,
            "sections": one.sections,
        }
    )


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    path = folder / "model.safetensors"
    saved.save(path, {"best": build_learner(LEARNER).state_dict()}, LEARNER, TRAINING.to_json(), {"step": 3})
    return path


def read_model(path: Path) -> Any:
    learner, one = saved.load_learner(path)
    return {
        "tensors": digests({f"best.{n}": t for n, t in learner.state_dict().items()}),
        **header_of(one, training_of(one)),
    }


def says(parts: Parts) -> Any:
    return {
        "tensors": digests(parts.tensors),
        **{name: value for name, value in parts.header.items() if name != "classifier"},
    }


def make_checkpoint(folder: Path) -> Path:
    run = folder / "run"
    Training(LEARNER, TRAINING, dataset(), folder=run, cache=EncoderCache(folder / "cache")).run(test=False)
    for other in run.iterdir():
        if other.name != CHECKPOINT:
            other.unlink()
    return run / CHECKPOINT


def read_checkpoint(path: Path) -> Any:
    training = resume(path.parent, dataset())
    one = saved.load(path)
    sections = {
        "best": training.best,
        "model": training.learner.state_dict(),
        "average": training.ema.averages(),
        "classifier": training.classifier.state_dict(),
        "optimizer": _state_of(training.take_step.optimizer),
    }
    tensors = {f"{section}.{name}": t for section, of in sections.items() for name, t in of.items()}
    return {"tensors": digests(tensors), **header_of(one, training.settings)}


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {f"{number}.{name}": tensor for number, entry in state.items() for name, tensor in entry.items()}


def make_encoder(folder: Path) -> Path:
    """An encoder that is half pre-trained."""
    cache, settings = EncoderCache(folder / "cache"), TRAINING
    work = _pretraining(settings)
    work.run(lambda progress: False)
    cache.put(work, LEARNER, _of_the_data(settings), 1.5)
    return cache.path(LEARNER, _of_the_data(settings))


def _of_the_data(settings: TrainSettings) -> TrainSettings:
    return replace(settings, dataset="blobs", data_hash="blobs")


def _pretraining(settings: TrainSettings) -> Pretraining:
    learner = build_learner(LEARNER)
    head = torch.nn.Linear(int(learner.encoder.width), dataset().splits["train"].classes)
    return Pretraining(learner, head, dataset().splits["train"], settings, graph=False)


def read_encoder(path: Path) -> Any:
    work, settings = _pretraining(TRAINING), _of_the_data(TRAINING)
    cache = EncoderCache(path.parent)
    path.rename(cache.path(LEARNER, settings))
    seconds = cache.take(work, LEARNER, settings)
    sections = {name: module.state_dict() for name, module in work.modules.items()}
    sections["optimizer"] = _state_of(work.take_step.optimizer)
    tensors = {f"{section}.{name}": t for section, of in sections.items() for name, t in of.items()}
    counters = {"seconds": seconds, "step": work.step}
    return {"tensors": digests(tensors), "counters": counters}


def says_encoder(parts: Parts) -> Any:
    """Whose encoder it was and how that one was trained, besides pre-training, is of no concern to whom it is for."""
    return {"tensors": digests(parts.tensors), "counters": parts.header["counters"]}


# States


def make_state(folder: Path) -> Path:
    torch.manual_seed(0)
    learner, items = build_learner(LEARNER).eval(), dataset().splits["train"]
    x, y = items.values[:12].unsqueeze(0), torch.arange(3).repeat_interleave(4).unsqueeze(0)
    saved.save_state(folder / "state", learner.describe(x, y), learner)
    return folder / "state"


@functools.cache
def _describer() -> Any:
    torch.manual_seed(0)
    return build_learner(LEARNER).eval()


def read_state(path: Path) -> Any:
    state = saved.load_state(path, learner=_describer())
    _describer().predict(state, dataset().splits["val"].values[: 2 * len(state["slots"])].unflatten(0, (-1, 2)))
    return {"tensors": digests(state)}


# Classifiers


def make_pictures(folder: Path) -> Path:
    model = write_model(folder / "tiny.safetensors")
    shown = {name: [np.asarray(drawing(name, shift)) for shift in (0, 4)] for name in ("bar", "ring", "tee")}
    Classifier(model).fit(shown).save(folder / "pictures.fw")
    model.unlink()
    return folder / "pictures.fw"


def make_embeddings(folder: Path) -> Path:
    X = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    Classifier(half_life=100).fit(X, [0, 1, 2] * 3).save(folder / "embeddings.fw")
    return folder / "embeddings.fw"


def make_texts(folder: Path) -> Path:
    shown = {"sea": ["waves and salt", "the tide"], "hill": ["stones, goats", "a steep path"]}
    Classifier("texts").fit(shown).save(folder / "texts.fw")
    return folder / "texts.fw"


def apart_classifier(path: Path) -> Parts:
    return apart(path, "classifier")


def sign_classifier(path: Path, parts: Parts) -> None:
    together(path, parts, "classifier")


def read_classifier(path: Path) -> Any:
    stored = files.read(path)
    memory, model = stored.memory, stored.model
    tensors = {"memory.keys": torch.from_numpy(memory.keys.copy())}
    tensors["memory.class_of"] = torch.from_numpy(memory.class_of.copy())
    said: dict[str, Any] = {"labels": list(memory.labels), "examples": list(memory.names)}
    said["model"], weights = files._described(stored.sight)
    tensors |= {f"model.{name}": tensor for name, tensor in weights.items()}
    streamed = stored.stream.to_json(memory)
    memory.cosines(memory.keys[:1])
    if model is not None:
        model.keys(np.zeros((1, *model.preparation.shape), np.uint8))
    return plain({"tensors": digests(tensors), **said, **({"stream": streamed} if streamed else {})})


def says_classifier(parts: Parts) -> Any:
    return plain({"tensors": digests(parts.tensors), **parts.header})


# Adapters


def make_adapter(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    weight, bias = (draw.normal(size=shape).astype(np.float32) for shape in ((4, 6), (4,)))
    Adapter(weight, bias, Calibration()).save(folder / "adapter.safetensors")
    return folder / "adapter.safetensors"


def apart_adapter(path: Path) -> Parts:
    return apart(path, "calibration")


def sign_adapter(path: Path, parts: Parts) -> None:
    together(path, parts, "calibration")


def read_adapter(path: Path) -> Any:
    adapter = load_adapter(path)
    adapter.keys(np.ones((2, adapter.inputs), np.float32))
    return plain({"tensors": digests(adapter.tensors()), **adapter.calibration.to_json()})


# Prepared datasets


def make_images(folder: Path) -> Path:
    splits = {
        name: prepared.Split(items.values.numpy(), items.sizes.tolist(), items.names)
        for name, items in dataset().splits.items()
    }
    return prepared.save_splits(folder / "images", splits, {"name": "/data/mine", "variant": "", "size": 8})


def make_sentences(folder: Path) -> Path:
    draw, words = np.random.default_rng(0), ["", "?", "_", *(f"word{number}" for number in range(20))]
    splits = {}
    for name in ("train", "val", "test"):
        values = draw.integers(3, len(words), (6, 7)).astype(np.int32)
        each = {"sentence_of": np.arange(6), "target_of": np.full(6, -1, np.int32)}
        splits[name] = prepared.Split(values, [2, 4], [f"{name} a", f"{name} b"], **each)
    about = {"name": "/data/texts.csv", "variant": "", "blanked": False, "length": 7}
    return prepared.save_splits(folder / "texts", splits, about, words)


def apart_prepared(path: Path) -> Parts:
    manifest = json.loads((path / prepared.MANIFEST).read_text())
    manifest.pop("digest")
    return Parts({file.stem: np.load(file) for file in sorted(path.glob("*.npy"))}, manifest)


def sign_prepared(path: Path, parts: Parts) -> None:
    shutil.rmtree(path)
    path.mkdir()
    for name, array in parts.tensors.items():
        np.save(path / f"{name}.npy", array)
    if isinstance(parts.header, dict):
        whole = {**parts.header}
        if "content_hash" in whole and parts.sign:
            whole["content_hash"] = prepared.content_hash(parts.tensors)
        whole["digest"] = digest_of_json(whole)
        (path / prepared.MANIFEST).write_text(json.dumps(whole))
    else:
        (path / prepared.MANIFEST).write_text(dumped(parts.header))


def read_prepared(path: Path) -> Any:
    if not prepared.is_prepared(path):
        return None  # as if it were not there: it is prepared anew
    found = prepared.open_dataset(path)
    tensors = {}
    for split, items in found.splits.items():
        tensors |= {f"{split}_{name}": x for name, x in vars(items).items() if isinstance(x, torch.Tensor)}
        items.gather(torch.arange(int(items.offsets[-1])))
    names = {split: list(items.names) for split, items in found.splits.items()}
    header = {name: value for name, value in found.manifest.items() if name not in ("digest", "content_hash")}
    return plain({"tensors": digests(tensors), **header, "classes": names})


def says_prepared(parts: Parts) -> Any:
    tensors = {name: torch.from_numpy(array) for name, array in parts.tensors.items() if name != "visible"}
    if "visible" in parts.tensors:
        tensors |= {f"{split}_visible": torch.from_numpy(parts.tensors["visible"]) for split in parts.header["classes"]}
    header = {name: value for name, value in parts.header.items() if name != "content_hash"}
    return plain({"tensors": digests(tensors), **header})


# The ledger


def make_ledger(folder: Path) -> Path:
    records = [made_up(seed=seed) for seed in (0, 1)]
    path = folder / "runs.jsonl"
    ledger.append(path, [line for line, _ in records], [details for _, details in records])
    return path


def make_details(folder: Path) -> Path:
    return ledger.details_path(make_ledger(folder))


def apart_ledger(path: Path) -> Parts:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return Parts({}, [{name: value for name, value in line.items() if name != "digest"} for line in lines])


def sign_ledger(path: Path, parts: Parts) -> None:
    if not isinstance(parts.header, list):
        path.write_text(f"{dumped(parts.header)}\n")
        return
    lines = [{**line, "digest": digest_of_json(line)} if isinstance(line, dict) else line for line in parts.header]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def read_ledger(path: Path) -> Any:
    is_details = path.name.endswith(".details.jsonl")
    runs = path.with_name(path.name.replace(".details", ""))
    records = ledger.read_details(runs).values() if is_details else ledger.read(path)
    return plain([vars(record) for record in records])


def says_ledger(parts: Parts) -> Any:
    return plain(parts.header)


# Vectors of a slow encoder


def names() -> list[bytes]:
    return [digest_of([bytes([number])]).encode()[:8] * 4 for number in range(6)]


def make_vectors(folder: Path) -> Path:
    vectors = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    KeyCache(folder, "encoder").keep(dict(zip(names(), vectors, strict=True)))
    return folder / FILE


def apart_vectors(path: Path) -> Parts:
    with sqlite3.connect(path) as store:
        rows = store.execute("SELECT name, vector FROM vectors ORDER BY name").fetchall()
    store.close()
    return Parts({name.hex(): np.frombuffer(data, "<f4").copy() for name, data in rows}, None)


def says_vectors(parts: Parts) -> Any:
    """Whatever is given becomes a row of floats."""
    return {"tensors": digests({name: np.ravel(np.asarray(one, "<f4")) for name, one in parts.tensors.items()})}


def sign_vectors(path: Path, parts: Parts) -> None:
    path.unlink()
    KeyCache(path.parent, "encoder").keep({bytes.fromhex(name): vector for name, vector in parts.tensors.items()})


def read_vectors(path: Path) -> Any:
    found = KeyCache(path.parent, "encoder").find(names())
    return {"tensors": digests({name.hex(): vector for name, vector in found.items()})}


# What the service keeps


def make_store(folder: Path) -> Path:
    store = Store(folder / "memories.sqlite")
    draw = np.random.default_rng(0)
    for chosen in ({"audit": True, "half_life": 3.0}, {"limit": {"c1": 2}, "calibration": Calibration().to_json()}):
        memory = store.make("mine", None, digest_of_sight(Sight()), 4, 9, start=str(len(chosen)), chosen=chosen)
        for number in range(3):
            key, seen = unit(draw.normal(size=(1, 4)))[0], 1e9 + number if "half_life" in chosen else None
            store.add(memory, [New(f"c{number}", "", key, b"picture", seen)], 9)
        store.forget(memory, 9, label="c0")
        store.relabel(memory, 9, "c1", "c9")
    store.close()
    return folder / "memories.sqlite"


def apart_store(path: Path) -> Parts:
    """All rows, keys as tensors, and everything else as values."""
    header: dict[str, Any] = {}
    with sqlite3.connect(path) as database:
        for table, columns in rows.SIGNED.items():
            found = database.execute(f"SELECT {', '.join(columns)} FROM {table}").fetchall()
            header[table] = [dict(zip(columns, row, strict=True)) for row in found]
    database.close()
    tensors = {str(row["number"]): _floats(row.pop("key")) for row in header["examples"]}
    return Parts(tensors, header)


def _floats(data: bytes) -> Any:
    return np.frombuffer(data, "<f4" if len(data) % 4 == 0 else np.uint8).copy()


def sign_store(path: Path, parts: Parts) -> None:
    """Write rows in place of others, whatever they say. What is no row is not written: the file says what it can."""
    header = parts.header if isinstance(parts.header, dict) else {}
    with sqlite3.connect(path) as database:
        database.create_function("signature", -1, rows.signature)
        for table, columns in rows.SIGNED.items():
            database.execute(f"DELETE FROM {table}")
            for row in _several(header.get(table)):
                values = {column: _kept(row.get(column)) for column in columns} if isinstance(row, dict) else {}
                if table == "examples":
                    key = parts.tensors.get(str(values.get("number")))
                    values["key"] = None if key is None else np.ascontiguousarray(key).tobytes()
                marks = ", ".join("?" * len(columns))
                with contextlib.suppress(sqlite3.IntegrityError):  # nothing where something has to be
                    given = [values.get(column) for column in columns]
                    database.execute(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", given)
            database.execute(f"UPDATE {table} SET signed = signature({', '.join(columns)})")
    database.close()
    there = apart_store(path)
    parts.header, parts.tensors = there.header, there.tensors


def _several(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _kept(value: Any) -> Any:
    """As SQLite may have it."""
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return 2**62 if isinstance(value, int) and abs(value) >= 2**63 else value


@functools.cache
def _seers() -> Seers:
    return Seers(Limits())


def read_store(path: Path) -> Any:
    """Every memory as the service opens, asks and hands it out."""
    store = Store(path)
    try:
        memories = Memories(store, _seers(), Limits())
        found = {}
        for memory in store.identifiers():
            taught, kept = memories.find(memory), store.find(memory)
            if len(taught.memory):
                taught.answers(taught.memory.keys[:1], 3, 3)
                memories.file(memory)
            examples, keys = store.examples(memory)
            store.pictures(memory, [one.number for one in examples])
            found[memory] = {
                **{name: value for name, value in vars(kept).items() if name != "id"},
                "examples": [[*vars(one).values(), digest(key)] for one, key in zip(examples, keys, strict=True)],
                "undoable": store.undoable(memory),
                "log": store.log(memory),
            }
        return plain(found)
    except Refusal as refusal:
        raise UserError(f"{path.name}: {refusal}") from None
    finally:
        store.close()


def says_store(parts: Parts) -> Any:
    said = {}
    for kept in parts.header["memories"]:
        of_it = {
            table: [row for row in parts.header[table] if row["memory"] == kept["id"]]
            for table in ("examples", "changes", "log")
        }
        said[kept["id"]] = {
            **{name: kept[name] for name in ("title", "model", "digest", "width", "made")},
            "chosen": kept["stream"],
            "examples": [
                [
                    *(row[name] for name in ("number", "label", "name", "seen")),
                    digest(parts.tensors[str(row["number"])]),
                ]
                for row in sorted(of_it["examples"], key=lambda row: row["number"])
                if row["gone"] is None
            ],
            "undoable": len(of_it["changes"]),
            "log": [json.loads(row["entry"]) for row in sorted(of_it["log"], key=lambda row: row["number"])],
        }
    return plain(said)


def says_tensors(parts: Parts) -> Any:
    return {"tensors": digests(parts.tensors)}


SETTINGS = ("learner", "training", "counters")
KINDS: dict[str, Kind] = {
    "model": Kind(make_model, apart, together, read_model, says, SETTINGS, ("learner", "training", "counters")),
    "checkpoint": Kind(
        make_checkpoint, apart, together, read_checkpoint, says, SETTINGS, ("learner", "training", "side_by_side")
    ),
    "encoder": Kind(make_encoder, apart, together, read_encoder, says_encoder, ("learner", "counters")),
    "state": Kind(make_state, apart, together, read_state, says_tensors),
    "pictures": Kind(
        make_pictures, apart_classifier, sign_classifier, read_classifier, says_classifier, optional=("learner",)
    ),
    "embeddings": Kind(make_embeddings, apart_classifier, sign_classifier, read_classifier, says_classifier),
    "texts": Kind(make_texts, apart_classifier, sign_classifier, read_classifier, says_classifier),
    "images": Kind(make_images, apart_prepared, sign_prepared, read_prepared, says_prepared),
    "sentences": Kind(make_sentences, apart_prepared, sign_prepared, read_prepared, says_prepared),
    "ledger": Kind(
        make_ledger, apart_ledger, sign_ledger, read_ledger, says_ledger, optional=("side_by_side",), may_end_early=True
    ),
    "details": Kind(make_details, apart_ledger, sign_ledger, read_ledger, says_ledger, may_end_early=True),
    "adapter": Kind(make_adapter, apart_adapter, sign_adapter, read_adapter, says_classifier),
    "store": Kind(make_store, apart_store, sign_store, read_store, says_store),
    "vectors": Kind(make_vectors, apart_vectors, sign_vectors, read_vectors, says_vectors, forgiving=True),
}
