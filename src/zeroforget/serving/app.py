"""The HTTP side: what can be asked, what is refused and with which words."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zeroforget._version import __version__
from zeroforget.files.hashes import Digest
from zeroforget.serving import schemas
from zeroforget.serving.batching import Batcher
from zeroforget.serving.catalog import Catalog, Snapshot
from zeroforget.serving.decoding import Stopped
from zeroforget.serving.gate import Gate, Guests, Keys
from zeroforget.serving.metrics import Metrics
from zeroforget.serving.settings import Settings
from zeroforget.serving.together import PULSE_S, Together
from zeroforget.store import TaskFacts, Unreadable
from zeroforget.store.errors import ModelError, TooManyPixels
from zeroforget.store.folder import as_path

PATHS = ("/", "/predict", "/tasks", "/health", "/metrics", "/openapi.json")
PARAMETERS = ("task", "top")
NOT_PICTURES = ("multipart/", "application/json", "text/")
GUARD = (
    "default-src 'none'; img-src blob: data:; style-src {style}; script-src {script}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load: its own style and script, known by their hashes, and nothing else."""
CLOSE = {"Connection": "close"}
BODY = {"required": True, "content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}}
REFUSALS = {
    401: "A key is needed.", 403: "A page of another site posts.", 404: "No such task.",
    408: "The picture did not arrive in time.", 413: "Too many bytes or pixels.",
    415: "The body is not a picture itself.", 421: "Not a name of this server.",
    422: "Not a picture that can be read, or a wrong parameter.", 429: "More requests than the key's rate.",
    503: "Too many requests are waiting; come again.",
}  # fmt: skip


class Server:
    """A model's folder and all that serves it; `app` is the ASGI application."""

    def __init__(self, path: str | Path, settings: Settings | None = None, together: Together | None = None) -> None:
        self.settings, self.together = settings or Settings(), together
        file = self.settings.key_file
        self.keys = None if file is None else Keys(file, together)
        self.metrics = Metrics()
        self.catalog = Catalog(
            as_path(path), poll_seconds=self.settings.poll_seconds, verify_seconds=self.settings.verify_seconds,
            shadow=self.settings.shadow, together=together,
        )  # fmt: skip
        self.batcher = Batcher(self.settings, self.metrics, lambda: self.catalog.candidate, together)
        self.guests = Guests(self.settings)
        self.waiting, self.held = 0, 0
        """Requests that wait for an answer, and the bytes of their pictures. Only the event loop changes them."""
        self.page = (files("zeroforget.serving") / "page.html").read_text(encoding="utf-8")
        self.guard = {"Content-Security-Policy": _guard(self.page)}
        self.app = self._app()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.catalog.start()
        self.batcher.start()
        pulse = asyncio.create_task(self._pulse())
        try:
            yield
        finally:
            pulse.cancel()
            await asyncio.to_thread(self.batcher.stop)
            await asyncio.to_thread(self.catalog.stop)

    async def _pulse(self) -> None:
        """Report to the other processes of this server, if there are any, as long as requests are answered."""
        while self.together is not None:
            self.together.pulse(self.catalog.snapshot.chain.head, *self._state(), self._counts())
            await asyncio.sleep(PULSE_S)

    def _app(self) -> FastAPI:
        # FastAPI's own pages of documentation load scripts from elsewhere; this server makes nobody do that.
        app = FastAPI(
            title="zeroforget", version=__version__, lifespan=self._lifespan, docs_url=None, redoc_url=None,
            description="Tasks of one growing network, served together.",
        )  # fmt: skip
        refusals: dict[int | str, dict[str, object]] = {
            status: {"model": schemas.Problem, "description": why} for status, why in REFUSALS.items()
        }
        app.post(
            "/predict", response_model=schemas.Prediction, responses=refusals, openapi_extra={"requestBody": BODY}
        )(self.predict)
        app.get("/tasks", response_model=schemas.Tasks)(self.tasks)
        app.get("/health", response_model=schemas.Health, responses={503: {"model": schemas.Health}})(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        app.get("/", response_class=HTMLResponse, include_in_schema=False)(self.home)
        app.add_middleware(Gate, settings=self.settings, keys=self.keys)
        app.add_middleware(Counted, metrics=self.metrics)
        app.exception_handler(AnyHTTPException)(_refused)
        app.exception_handler(RequestValidationError)(_wrong_parameter)
        app.exception_handler(ClientDisconnect)(_gone)
        app.exception_handler(Exception)(_failed)
        return app

    # What can be asked -----------------------------------------------------------------------------------------

    async def predict(
        self,
        request: Request,
        task: Annotated[str | None, Query(description="The task; without it, the likeliest is guessed.")] = None,
        top: Annotated[int, Query(ge=1, le=100_000, description="How many classes to name.")] = 5,
    ) -> Response:
        """Classify the picture that is the request's body."""
        began = time.monotonic()
        _check_parameters(request)
        snapshot = self.catalog.snapshot
        chosen = _task(snapshot, task)
        _check_kind(request)
        self._check_room()
        content = await self._body(request)
        try:
            with self._room():  # not before all has come: who sends slowly takes nobody's place
                answer = await self.batcher.ask(snapshot, chosen, content)
        except TooManyPixels as error:
            raise HTTPException(413, f"the upload {error}") from None
        except Stopped:
            raise _full("the server stops") from None
        except Unreadable as error:
            raise HTTPException(422, f"the upload {error}") from None
        finally:
            self.held -= len(content)
        self.metrics.answered(time.monotonic() - began)
        return JSONResponse(schemas.prediction(answer, snapshot.chain.head, top))

    async def tasks(self) -> schemas.Tasks:
        """The tasks that are served, what each added, and whether it verifies."""
        return schemas.tasks(self.catalog).model_copy(
            update={"shadow": schemas.compared(self.catalog, self.batcher.shadow)}
        )

    async def health(self) -> Response:
        """Whether the server can answer: 200, or 503."""
        status, reason = self._state()
        if self.together is not None and status != "failing":
            status, reason = self.together.trouble() or (status, reason)
        body = schemas.Health(
            status=status, reason=reason, tasks=len(self.catalog.snapshot.tasks), waiting=self.waiting
        )
        return JSONResponse(body.model_dump(), 503 if status == "failing" else 200)

    def _state(self) -> tuple[str, str | None]:
        """How this process is, and why."""
        report, trouble = self.catalog.report, self.catalog.trouble
        status, reason = "ok", None
        if trouble or (report is not None and not report.holds):
            why = "the folder cannot be read as it is" if trouble else "the model does not verify"
            status, reason = "degraded", f"{why}; see /tasks"
        stuck = self.batcher.stuck
        if stuck or not self.batcher.alive:
            why = stuck or "pictures are not classified any more"
            status, reason = "failing", f"{why}; start the server again"
        return status, reason

    async def prometheus(self) -> PlainTextResponse:
        """Counts and times, as Prometheus reads them."""
        own = self._counts()
        text = own if self.together is None else self.together.metrics(own)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _counts(self) -> str:
        report, networks = self.catalog.report, self.batcher.networks
        verified = float("nan") if report is None else float(report.holds)
        gauges = {
            "waiting_requests": ("Requests that wait for an answer.", self.waiting),
            "waiting_bytes": ("Bytes of their pictures.", self.held),
            "shadow_compared_total": (
                "Guesses of a task compared with the newest state.",
                self.batcher.shadow.compared,
            ),
            "shadow_other_total": ("Of these, those that would be of another task.", self.batcher.shadow.other),
            "tasks": ("Tasks that are served.", len(self.catalog.snapshot.tasks)),
            "verified": ("1 if the model verifies, 0 if not, NaN while it is not known.", verified),
            "readable": ("1 if the folder can be read as it is now.", self.catalog.trouble is None),
            "model_changes_total": ("How often the folder had changed.", self.catalog.changes),
            "decoders_killed_total": ("Processes ended over a picture.", self.batcher.decoders.killed),
            "networks_ready": ("Tasks' own networks that are kept ready.", len(networks)),
            "networks_bytes": ("Bytes of these.", networks.bytes),
            "networks_cut_total": ("How often a task's network was cut from the growing one.", networks.cuts),
        }
        return self.metrics.text(gauges)

    async def home(self) -> HTMLResponse:
        """The page."""
        return HTMLResponse(self.page, headers=self.guard)

    # Limits ----------------------------------------------------------------------------------------------------

    def _check_room(self) -> None:
        if self.waiting >= self.settings.queue:
            raise _full(f"{self.waiting} requests are waiting, and no more may")

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        self._check_room()
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    async def _body(self, request: Request) -> bytes:
        """The picture, as far as the limits allow. Its bytes are counted as held until the caller lets them go."""
        content, refusal, dropped = bytearray(), None, 0
        try:
            async with asyncio.timeout(self.settings.upload_seconds):
                async for part in _parts(request):
                    # A refused upload is read to its end, within reason: most clients listen only when all is sent.
                    if refusal is None:
                        content += part
                        self.held += len(part)
                        refusal = self._beyond(len(content))
                    else:
                        self.held -= len(content)
                        content.clear()
                        dropped += len(part)
                        if dropped > 4 * self.settings.upload:
                            break
            if refusal is not None:
                raise refusal
            if not content:
                raise HTTPException(422, "the upload is empty: send its bytes as the request's body")
        except BaseException as error:
            self.held -= len(content)
            if isinstance(error, TimeoutError):
                seconds = self.settings.upload_seconds
                raise HTTPException(408, f"the upload did not arrive within {seconds:g} seconds") from None
            raise
        return bytes(content)

    def _beyond(self, size: int) -> HTTPException | None:
        """The refusal that a picture of so many bytes has earned."""
        if size > self.settings.upload:
            most = self.settings.upload
            return HTTPException(413, f"the upload has too many bytes; at most {most:,} are taken", CLOSE)
        if self.held > self.settings.uploads:
            return _full("pictures that wait take all the room there is")
        return None


def _guard(page: str) -> str:
    """The page's policy."""
    kinds = {kind: re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL) for kind in ("style", "script")}
    digests = {
        kind: " ".join(f"'sha256-{b64encode(Digest(text.encode()).digest()).decode()}'" for text in texts)
        for kind, texts in kinds.items()
    }
    return GUARD.format(**digests)


async def _parts(request: Request) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


class Counted:
    """Middleware that counts answers by path and status; what can be got can be asked for its head."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.metrics.request(path, message["status"])
            await send(message)

        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] != "/predict":
            scope = {**scope, "method": "GET"}  # the server beneath leaves out the body
        await self.app(scope, receive, counted if scope["type"] == "http" else send)


def _check_parameters(request: Request) -> None:
    """A misspelt one would be passed over, and the task be guessed."""
    given = [name for name, _ in request.query_params.multi_items()]
    if strange := [name for name in given if name not in PARAMETERS]:
        raise HTTPException(422, f"no parameter {strange[0][:80]!r}; there are {' and '.join(map(repr, PARAMETERS))}")
    if twice := [name for name in PARAMETERS if given.count(name) > 1]:
        raise HTTPException(422, f"{twice[0]}: is given twice")


def _task(snapshot: Snapshot, name: str | None) -> TaskFacts | None:
    names = [task.name for task in snapshot.tasks]
    if not names:
        raise HTTPException(404, "the model has no task yet; 'zeroforget learn' adds one")
    if name is None:
        return None
    try:
        return snapshot.chain.find(name)
    except ModelError:
        raise HTTPException(404, f"no task {name[:80]!r} in this model; its tasks are: {', '.join(names)}") from None


def _check_kind(request: Request) -> None:
    kind = request.headers.get("content-type", "").lower()
    if kind.startswith(NOT_PICTURES):
        raise HTTPException(
            415, f"the body must be the picture itself, not {kind.split(';')[0][:80]}: curl --data-binary @picture.jpg"
        )


def _full(why: str) -> HTTPException:
    return HTTPException(503, f"{why}; try again in a moment", {"Retry-After": "1"})


# Refusals as JSON ----------------------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, AnyHTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _wrong_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
    return JSONResponse({"error": wrong}, 422)


async def _gone(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the client went away before the picture had arrived"}, 400)


async def _failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log says why"}, 500)
