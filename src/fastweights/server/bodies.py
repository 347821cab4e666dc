"""From the body of a request to pictures, texts or embeddings: a picture as it is, a form with files, or JSON."""

import base64
import binascii
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.requests import Request

from fastweights.server.errors import Refusal
from fastweights.server.limits import Limits
from fastweights.server.seeing import Inputs

KINDS = ("pictures", "texts", "embeddings")
ACCEPTED = (
    "a picture (image/png, image/jpeg, image/webp, image/gif, image/bmp), multipart/form-data or application/json"
)
PICTURES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
DESCRIBED: dict[str, Any] = {
    "required": True,
    "content": {
        **{kind: {"schema": {"type": "string", "format": "binary"}} for kind in PICTURES},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "label": {"type": "string", "description": "The class, where examples are shown."},
                    "pictures": {"type": "array", "items": {"type": "string", "format": "binary"}},
                },
            }
        },
        "application/json": {
            "schema": {
                "type": "object",
                "properties": {
                    "label": {"type": "string", "description": "The class, where examples are shown."},
                    "pictures": {"type": "array", "items": {"type": "string", "format": "byte"}},
                    "texts": {"type": "array", "items": {"type": "string"}},
                    "embeddings": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
                },
                "description": "One of pictures (in base64), texts and embeddings.",
            }
        },
    },
}
"""What a body may be, for the documentation."""


@dataclass(frozen=True)
class Received:
    """A body that has come in whole, yet to be looked at."""

    kind: str
    data: bytes = b""
    label: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()


async def received(request: Request, limits: Limits) -> Received:
    """Wait for the body; the guard sees to it that this is neither long nor large."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind in PICTURES or kind == "application/json":
        return Received(kind, await request.body())
    if kind != "multipart/form-data":
        raise Refusal(415, f"Send {ACCEPTED}, not {kind or 'something without a content type'}.")
    async with request.form(max_files=limits.inputs, max_fields=8) as form:
        files, label = [], None
        for name, value in form.multi_items():
            if isinstance(value, UploadFile):
                files.append((file_name(value.filename or "", limits), await value.read()))
            elif name == "label":
                label = value
    return Received(kind, label=label, files=tuple(files))


def inputs_of(body: Received, limits: Limits) -> tuple[Inputs, str | None]:
    """What was shown, and the class that the body names, if it does."""
    if body.kind == "multipart/form-data":
        return Inputs(pictures=[data for _, data in body.files], names=[name for name, _ in body.files]), body.label
    if body.kind != "application/json":
        return Inputs(pictures=[body.data]), None
    said = as_object(body.data)
    if unknown := sorted(set(said) - {*KINDS, "label"}):
        raise Refusal(422, f"There is no field {unknown[0]!r}; there are {', '.join(KINDS)} and label.")
    given = [kind for kind in KINDS if kind in said]
    if len(given) != 1 or not isinstance(said[given[0]], list):
        raise Refusal(422, f"Send a list of one kind: {', '.join(KINDS)}.")
    return _listed(given[0], said[given[0]], limits), said.get("label")


def as_object(data: bytes) -> dict[str, Any]:
    """JSON, as an object."""
    try:
        said = json.loads(data)
    except (ValueError, RecursionError):
        raise Refusal(400, "The body is no JSON.") from None
    if not isinstance(said, dict):
        raise Refusal(422, "The body is to be an object: {...}.")
    return said


def named(label: Any, limits: Limits, what: str = "class") -> str:
    """A name that people can read: any Unicode, but nothing invisible alone and nothing endless."""
    if not isinstance(label, str) or not label.strip():
        raise Refusal(422, f"Name the {what}: label is a text.")
    if len(label) > limits.name:
        raise Refusal(422, f"The name of a {what} has at most {limits.name} characters.")
    if any(unicodedata.category(mark) in ("Cc", "Cs") for mark in label):
        raise Refusal(422, f"The name of a {what} has no control characters, and is a whole text.")
    return label.strip()


def file_name(name: str, limits: Limits) -> str:
    """What a file is called, without the folders it was in."""
    last = re.split(r"[\\/]", name)[-1]
    return "".join(mark for mark in last if unicodedata.category(mark) not in ("Cc", "Cs"))[: limits.name]


def _listed(kind: str, values: list[Any], limits: Limits) -> Inputs:
    if len(values) > limits.inputs:
        raise Refusal(413, f"Send at most {limits.inputs} at a time.")
    if kind == "pictures":
        return Inputs(pictures=[_decoded(value) for value in values])
    if kind == "texts":
        if any(not isinstance(value, str) or not value or len(value) > limits.text for value in values):
            raise Refusal(422, f"Texts have 1 to {limits.text:,} characters.")
        return Inputs(texts=values)
    for value in values:
        if not isinstance(value, list) or any(type(number) not in (int, float) for number in value):
            raise Refusal(422, "An embedding is a list of numbers.")
    return Inputs(embeddings=values)


def _decoded(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error):
        raise Refusal(422, "Pictures in JSON are texts in base64.") from None
