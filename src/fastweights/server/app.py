"""The HTTP interface, version 1: memories, their examples, questions to them, and memories as files.

Reading changes nothing; whoever knows the identifier of a memory may do everything with it. Every error is JSON with
one sentence: {"error": "..."}. Bodies are received here and worked on in threads.
"""

import asyncio
import base64
import errno
import json
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from importlib.resources import files as package_files
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Body, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.staticfiles import StaticFiles

from fastweights import __version__
from fastweights.classifier.encoders import Encoder
from fastweights.server import gallery
from fastweights.server.bodies import DESCRIBED, file_name, inputs_of, named, received
from fastweights.server.errors import Refusal
from fastweights.server.guard import API, Access, Guard, error_body
from fastweights.server.limits import Limits
from fastweights.server.memories import Memories
from fastweights.server.seeing import Seers
from fastweights.server.store import Kept, Store
from fastweights.utils.errors import UserError

THREADS = 32
"""Requests that are worked on at a time; most of them wait for the encoder."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why nothing more can be written."""
PAGE = package_files("fastweights.server") / "page"
Done = TypeVar("Done")


class Made(BaseModel):
    """What a new memory is to be."""

    title: str = ""
    model: str | None = Field(
        None,
        description="A model of the service (the one it was started with, if none is named), or null for embeddings.",
    )


class Titled(BaseModel):
    title: str


class Labelled(BaseModel):
    label: str


class MemoryOut(BaseModel):
    id: str = Field(description="Who knows it may do everything with the memory; it cannot be guessed.")
    title: str
    model: str | None
    takes: str = Field(description="pictures, texts, embeddings, or pictures or texts.")
    ink: bool = Field(description="Whether pictures are seen as bright ink on dark paper.")
    width: int | None = Field(description="Numbers of a key.")
    classes: int
    examples: int
    undoable: int = Field(description="Changes that can be undone.")
    half_life: float | None = Field(description="Days after which an example weighs half as much; null for never.")
    made: float = Field(description="Seconds since 1970.")


class MemoriesOut(BaseModel):
    memories: list[MemoryOut]
    unusable: dict[str, str] = Field(
        default_factory=dict, description="Why, of those that cannot be used: damaged on the disk, say."
    )


class ExampleOut(BaseModel):
    id: int
    name: str
    picture: str | None = Field(None, description="As the model sees it: a small PNG in base64.")


class ClassOut(BaseModel):
    label: str
    count: int
    examples: list[ExampleOut] = Field(description="At most 100, the newest last.")


class ClassesOut(BaseModel):
    classes: list[ClassOut]
    total: int


class AddedOut(BaseModel):
    examples: list[int]
    classes: int
    undoable: int


class ForgottenOut(BaseModel):
    forgotten: int
    undoable: int


class RelabelledOut(BaseModel):
    renamed: int = Field(description="Examples that go by the new name.")
    undoable: int


class UndoneOut(BaseModel):
    undone: str
    undoable: int


class LikelyOut(BaseModel):
    label: str
    probability: float = Field(description="Given that it is one of the classes.")
    similarity: float = Field(description="The cosine of the key with the sum of the class.")
    examples: int


class SpokeOut(BaseModel):
    id: int
    part: float = Field(description="What the example adds to the similarity.")


class AnswerOut(BaseModel):
    label: str | None = Field(description="The likeliest class, or null: none of these.")
    known: float = Field(description="The probability that it is any of the classes.")
    likely: list[LikelyOut]
    examples: list[SpokeOut] = Field(description="Those that spoke for the likeliest class, the loudest first.")
    note: str | None


class AnswersOut(BaseModel):
    answers: list[AnswerOut]


class RowOut(LikelyOut):
    sum: list[float] = Field(description="The sum of the keys of the class: its row of the memory.")
    length: float


class ExplainedOut(BaseModel):
    answer: AnswerOut | None
    key: list[float]
    rows: list[RowOut]
    picture: str | None


class ErrorOut(BaseModel):
    error: str


class Service:
    """All that the routes stand on."""

    def __init__(self, store: Store, limits: Limits, seers: Seers, model: str) -> None:
        self.limits, self.seers = limits, seers
        self.model = model
        """Of memories for which nobody says otherwise."""
        self.memories = Memories(store, self.seers, limits)
        self.store = store
        self.pool = ThreadPoolExecutor(THREADS, "answering")

    async def work(self, function: Callable[..., Done], *arguments: Any, **named: Any) -> Done:
        """In a thread; to its end, even if the client hangs up."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self.pool, lambda: function(*arguments, **named)))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.store.close()

    def shown(self, kept: Kept) -> MemoryOut:
        taught = self.memories.find(kept.id)
        memory = taught.memory
        return MemoryOut(
            id=kept.id,
            title=kept.title,
            model=kept.model,
            takes=taught.seer.takes,
            ink=taught.seer.inky,
            width=memory.width or None,
            classes=memory.classes,
            examples=len(memory),
            undoable=self.store.undoable(kept.id),
            half_life=kept.stream.half_life,
            made=kept.made,
        )

    def one(self, memory: str) -> MemoryOut:
        return self.shown(self.store.find(memory))


def create_app(
    store: Store,
    *,
    limits: Limits | None = None,
    access: Access | None = None,
    device: str = "cpu",
    encoder: Encoder | None = None,
    model: str = "drawings",
) -> FastAPI:
    """The application. It closes the store when it ends."""
    limits, access = limits or Limits(), access or Access()
    service = Service(store, limits, Seers(limits, device, encoder), model)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="fastweights",
        version=__version__,
        description="Teach classes by an example or more each, and ask. See docs/serve.md.",
        docs_url=None,  # these would load scripts from elsewhere; api.html shows the same
        redoc_url=None,
        lifespan=lifespan,
        responses={code: {"model": ErrorOut} for code in (403, 404, 413, 422, 507)},
    )
    app.state.service = service
    app.include_router(_about(service, access))
    app.include_router(_memories(service, access))
    app.include_router(_examples(service))
    app.include_router(_questions(service))
    _handle_errors(app)
    app.mount("/", StaticFiles(directory=str(PAGE), html=True))
    app.add_middleware(Guard, limits=limits, access=access)
    return app


def _about(service: Service, access: Access) -> APIRouter:
    routes = APIRouter(prefix=API, tags=["about"])

    @routes.get("", summary="What this service is, and what it takes")
    async def about() -> dict[str, Any]:
        return {"fastweights": __version__, "models": service.seers.models, "limits": asdict(service.limits)}

    @routes.get("/tasks/characters", summary="A ready-made task: five invented characters, four drawings of each")
    async def characters(seed: Annotated[int, Query(ge=0, lt=gallery.SEEDS)]) -> dict[str, Any]:
        return {"classes": await service.work(gallery.characters, seed)}

    return routes


def _memories(service: Service, access: Access) -> APIRouter:
    routes = APIRouter(prefix=API, tags=["memories"])
    memories, store, limits = service.memories, service.store, service.limits

    @routes.post("/memories", status_code=201, summary="Make a memory", response_model=MemoryOut)
    async def make(said: Annotated[Made | None, Body()] = None) -> MemoryOut:
        said = said or Made()  # type: ignore[call-arg]
        title = named(said.title, limits, "memory") if said.title else ""
        model = said.model if "model" in said.model_fields_set else service.model
        return await service.work(lambda: service.one(memories.make(title, model)))

    @routes.get("/memories", summary="List memories", response_model=MemoriesOut)
    async def listed(
        id: Annotated[
            list[str] | None, Query(description="Memories by their identifiers; all, for those who have the token.")
        ] = None,
    ) -> MemoriesOut:
        if id is None and not access.token:
            raise Refusal(403, "Name the identifiers of your memories; only with a token all are listed.")
        return await service.work(_listed, service, id)

    @routes.get("/memories/{memory}", summary="Look at a memory", response_model=MemoryOut)
    async def look(memory: str) -> MemoryOut:
        return await service.work(service.one, memory)

    @routes.patch("/memories/{memory}", summary="Give it another title", response_model=MemoryOut)
    async def rename(memory: str, said: Titled) -> MemoryOut:
        title = named(said.title, limits, "memory")
        await service.work(memories.rename, memory, title)
        return await service.work(service.one, memory)

    @routes.delete("/memories/{memory}", status_code=204, summary="Delete a memory for good")
    async def delete(memory: str) -> Response:
        await service.work(memories.delete, memory)
        return Response(status_code=204)

    @routes.post("/memories/{memory}/undo", summary="Take the last change back", response_model=UndoneOut)
    async def undo(memory: str) -> UndoneOut:
        what = await service.work(memories.undo, memory)
        return UndoneOut(undone=what, undoable=await service.work(store.undoable, memory))

    @routes.get("/memories/{memory}/file", summary="Download it as a .fw file", response_class=Response)
    async def download(memory: str) -> Response:
        data = await service.work(memories.file, memory)
        headers = {"Content-Disposition": 'attachment; filename="memory.fw"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    body = {"required": True, "content": {"application/octet-stream": {"schema": {"type": "string"}}}}

    @routes.post(
        "/files",
        status_code=201,
        summary="Make a memory from a .fw file",
        response_model=MemoryOut,
        openapi_extra={"requestBody": body},
    )
    async def upload(request: Request, title: str = "") -> MemoryOut:
        if request.headers.get("content-type", "").split(";")[0] != "application/octet-stream":
            raise Refusal(415, "Send the .fw file as application/octet-stream.")
        name = named(title, limits, "memory") if title else ""
        data = await request.body()
        return await service.work(lambda: service.one(memories.take_in(name, data)))

    return routes


def _listed(service: Service, identifiers: list[str] | None) -> MemoriesOut:
    most = service.limits.inputs
    if identifiers is not None and len(identifiers) > most:
        raise Refusal(422, f"Name at most {most} memories at a time.")
    wanted = service.store.identifiers() if identifiers is None else identifiers
    found, unusable = [], {}
    for identifier in wanted:
        try:
            found.append(service.one(identifier))
        except Refusal as refusal:
            if refusal.status != 404:
                unusable[identifier] = str(refusal)
    return MemoriesOut(memories=found, unusable=unusable)


def _examples(service: Service) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/memories/{{memory}}", tags=["examples"])
    memories, store, limits = service.memories, service.store, service.limits

    @routes.post(
        "/examples",
        status_code=201,
        summary="Show examples of a class, new or known",
        response_model=AddedOut,
        openapi_extra={"requestBody": DESCRIBED},
    )
    async def add(
        request: Request,
        memory: str,
        label: Annotated[str | None, Query(description="The class, unless the body names it.")] = None,
        name: Annotated[str, Query(description="What to call the example.")] = "",
    ) -> AddedOut:
        body = await received(request, limits)

        def work() -> AddedOut:
            inputs, said = inputs_of(body, limits)
            if name and len(inputs) == 1:
                inputs = replace(inputs, names=[file_name(name, limits)])
            numbers = memories.add(memory, named(said if label is None else label, limits), inputs)
            now = memories.find(memory).memory
            return AddedOut(
                examples=numbers,
                classes=now.classes,
                undoable=store.undoable(memory),
            )

        return await service.work(work)

    @routes.get("/classes", summary="What it knows: classes and their examples", response_model=ClassesOut)
    async def classes(
        memory: str,
        first: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        pictures: bool = False,
    ) -> ClassesOut:
        return await service.work(_classes, service, memory, first, limit, pictures)

    async def forgotten(memory: str, **what: Any) -> ForgottenOut:
        count = await service.work(memories.forget, memory, **what)
        return ForgottenOut(forgotten=count, undoable=await service.work(store.undoable, memory))

    @routes.patch(
        "/classes",
        summary="Give a class another name; under a name that is known they become one",
        response_model=RelabelledOut,
    )
    async def relabel(memory: str, label: str, said: Labelled) -> RelabelledOut:
        count = await service.work(memories.relabel, memory, label, named(said.label, limits))
        return RelabelledOut(renamed=count, undoable=await service.work(store.undoable, memory))

    @routes.delete("/classes", summary="Forget a class, as if it had never been there", response_model=ForgottenOut)
    async def forget(memory: str, label: str) -> ForgottenOut:
        return await forgotten(memory, label=label)

    @routes.delete("/examples/{example}", summary="Forget a single example", response_model=ForgottenOut)
    async def forget_example(memory: str, example: int) -> ForgottenOut:
        if not 0 <= example < 2**63:
            raise Refusal(404, "There is no such example; it may have been forgotten.")
        return await forgotten(memory, number=example)

    @routes.delete("/examples", summary="Forget everything", response_model=ForgottenOut)
    async def reset(memory: str) -> ForgottenOut:
        return await forgotten(memory)

    return routes


def _classes(service: Service, memory: str, first: int, limit: int, pictures: bool) -> ClassesOut:
    service.store.find(memory)
    rows, _ = service.store.examples(memory)
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row)
    some = list(groups.items())[first : first + limit]
    wanted = [row.number for _, members in some for row in members[-100:]] if pictures else []
    drawn = service.store.pictures(memory, wanted)
    found = [
        ClassOut(
            label=label,
            count=len(members),
            examples=[
                ExampleOut(id=row.number, name=row.name, picture=_as_text(drawn.get(row.number)))
                for row in members[-100:]
            ],
        )
        for label, members in some
    ]
    return ClassesOut(classes=found, total=len(groups))


def _questions(service: Service) -> APIRouter:
    routes = APIRouter(prefix=f"{API}/memories/{{memory}}", tags=["questions"])
    memories, limits = service.memories, service.limits
    Top = Annotated[int, Query(ge=1, le=100, description="How many likely classes to name.")]

    @routes.post(
        "/predict", summary="Which class is it?", response_model=AnswersOut, openapi_extra={"requestBody": DESCRIBED}
    )
    async def predict(request: Request, memory: str, top: Top = 5) -> Response:
        body = await received(request, limits)

        def work() -> bytes:
            inputs, _ = inputs_of(body, limits)
            return json.dumps({"answers": memories.answers(memory, inputs, top)}).encode()

        return Response(await service.work(work), media_type="application/json")

    @routes.post(
        "/explain",
        summary="Which class is one input, with all the numbers that say so",
        response_model=ExplainedOut,
        openapi_extra={"requestBody": DESCRIBED},
    )
    async def explain(request: Request, memory: str, top: Top = 12) -> Response:
        body = await received(request, limits)

        def work() -> bytes:
            inputs, _ = inputs_of(body, limits)
            if len(inputs) != 1:
                raise Refusal(422, "Ask about one at a time here; predict takes several.")
            found = memories.explained(memory, inputs, top)
            return json.dumps({**found, "picture": _as_text(found["picture"])}).encode()

        return Response(await service.work(work), media_type="application/json")

    return routes


def _as_text(picture: bytes | None) -> str | None:
    return None if picture is None else base64.b64encode(picture).decode()


def _handle_errors(app: FastAPI) -> None:
    def refused(status: int, error: Exception | str) -> Response:
        body = error_body(error if isinstance(error, Exception) else Exception(error))
        headers = {"Connection": "close"} if status in (408, 413) else None  # the rest of the body is not read
        return Response(body, status, headers, "application/json")

    @app.exception_handler(Refusal)
    async def refusal(request: Request, error: Refusal) -> Response:
        return refused(error.status, error)

    @app.exception_handler(UserError)
    async def wrong(request: Request, error: UserError) -> Response:
        return refused(422, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or "the body"
        return refused(422, f"{where}: {first['msg'][:200].lower()}.")

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        said = {404: "There is nothing here.", 405: "This cannot be asked in this way."}
        return refused(error.status_code, said.get(error.status_code, f"{str(error.detail).rstrip('.')}."))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return refused(400, "The client has hung up.")

    @app.exception_handler(sqlite3.Error)
    async def unkept(request: Request, error: sqlite3.Error) -> Response:
        return refused(503, f"The database cannot be used ({error}); look at the disk.")

    @app.exception_handler(OSError)
    async def full(request: Request, error: OSError) -> Response:
        if error.errno not in FULL:
            raise error
        return refused(507, f"There is no room for this ({error.strerror}); make room on the disk and try again.")

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return refused(500, "Something went wrong here that should not; the log says what.")
