"""HTTP: routes, limits, and errors as OpenAI has them.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

No text of a client is in any log, and in no error beyond the words that it is about.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from nanomdlm.support.cli import out_of_memory
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.constrain.automaton import still_wanted
from nanomdlm.support.errors import TooLong, UserError
from nanomdlm.support.serving import answers, requests
from nanomdlm.support.serving.engine import Closed, Engine, Full, GivenUp, Request, TookTooLong
from nanomdlm.support.serving.metrics import Metrics

BODY_SECONDS = 30.0  # in which a body must have come
PING_SECONDS = 15.0  # after which a stream without news gets a comment
WATCH_SECONDS = 0.25  # after which the page is told how many calls were made
BUILDERS = 2  # requests whose patterns are built at a time
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
TYPES |= {500: "server_error", 503: "server_error"}
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
}
# Without a key: programs that watch a server have none; the page asks for it.
OPEN = ("/health", "/")


@dataclass
class Server:
    """What the routes share."""

    engine: Engine
    prepare: Callable  # prepare(job) -> (what `write` needs, tokens of given text); UserError
    write: Callable  # write(job, prepared, stand_in, emit) -> what answers make JSON of
    name: str  # of the model
    created: int  # when its checkpoint was written, Unix time
    limits: requests.Limits
    host: str = "127.0.0.1"
    api_key: str = ""
    origins: tuple = ()
    max_body: int = 1 << 20
    time_limit: float = 600.0
    page: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    building: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BUILDERS))
    draining: bool = False
    running: int = 0  # requests that are answered now
    preparing: int = 0  # those of them that are not in the engine yet


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status, message, param=None, code=None, wait=None):
        super().__init__(message)
        kind = TYPES.get(status, "invalid_request_error")
        self.status = status
        self.content = {"error": dict(message=message, type=kind, param=param, code=code)}
        self.headers = {"retry-after": str(wait)} if wait else {}

    def response(self):
        return to_response(self.content, self.status, self.headers)


def explained(error):
    """The Refused of any exception of a request."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):  # of Starlette: 404 and 405
        return Refused(error.status_code, f"{error.detail}: see docs/serving.md for the paths")
    if isinstance(error, requests.Invalid):
        return Refused(error.status, str(error), error.param, error.code)
    if isinstance(error, UserError):
        # Flags of sample.py, as fields of a request.
        sentence = re.sub(r"--(?=\w)", "", str(error)).replace("max_gap", "max_tokens")
        name = sentence.partition("=")[0]
        param = name if name in (*requests.SETTINGS, "passes") else None
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return Refused(400, sentence, param, code)
    if isinstance(error, Full):
        return Refused(429, "too many requests wait; try again later", code="queue_full", wait=1)
    if isinstance(error, Closed):
        return Refused(503, "the server stops; try again later", code="stopping", wait=5)
    if isinstance(error, TookTooLong):
        what = "the request took longer than this server allows; ask for fewer tokens"
        return Refused(503, what, code="time_limit")
    if isinstance(error, GivenUp):
        return Refused(499, "the client has left")  # as nginx has it: nobody reads this
    if out_of_memory.is_full(error):
        what = "out of memory; try again later, or ask for fewer tokens"
        return Refused(503, what, code="memory", wait=5)
    at = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(at[-1].filename).name}:{at[-1].lineno}" if at else ""
    warn(f"serve.py: a request failed with {type(error).__name__}{where}")
    return Refused(500, "the server failed at this request; its log says where", code="failed")


def to_response(content, status=200, headers=None):
    """JSON without spaces, as llama.cpp writes it: llama.vim looks for '"content":"'."""
    body = json.dumps(content, separators=(",", ":"))
    return Response(body, status, headers, "application/json")


def to_event(content):
    if not isinstance(content, str):
        content = json.dumps(content, separators=(",", ":"))
    return f"data: {content}\n\n"


# ---- Who may ask
class Guard:
    """ASGI middleware: checks who asks, adds headers of safety, and counts."""

    def __init__(self, app, server):
        self.app = app
        self.server = server

    async def __call__(self, scope, receive, send):
        began = time.monotonic()
        status = 499  # if nothing is sent

        async def watched(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        self.server.running += 1
        try:
            self.check(scope["path"], Headers(scope=scope))
            await self.app(scope, receive, watched)
        except Refused as e:
            await e.response()(scope, receive, watched)
        finally:
            self.server.running -= 1
            path = "/v1/models" if scope["path"].startswith("/v1/models/") else scope["path"]
            path = path if path in PATHS else "other"
            self.server.metrics.count(path, status, time.monotonic() - began)

    def check(self, path, headers):
        """Raise Refused for a page of another site, for a name of this machine that a page may have
        made to point here, and without the key."""
        for name in ("host", "origin", "authorization"):
            if len(headers.getlist(name)) > 1:
                raise Refused(400, f"the request has two headers {name}; send one")
        server = self.server
        host = headers.get("host", "")
        name = re.sub(r":\d*$", "", host).strip("[]")
        known = [*LOOPBACK, *(re.sub(r"^https?://|:\d+$", "", each) for each in server.origins)]
        if server.host in LOOPBACK and name not in known:
            what = "this server answers to localhost alone; use that name, or give --origin"
            raise Refused(403, what)
        origin = headers.get("origin", "")
        if origin and origin not in (f"http://{host}", f"https://{host}", *server.origins):
            what = "pages of other sites may not use this server; allow them by --origin"
            raise Refused(403, what)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        # The comparison takes as long for any wrong key.
        is_right = hmac.compare_digest(given.encode(), server.api_key.encode())
        if server.api_key and path not in OPEN and not is_right:
            what = "the key is missing or wrong; send the header Authorization: Bearer KEY"
            raise Refused(401, what, code="invalid_api_key")


# ---- Requests that write
async def read_body(request, limit):
    """The bytes of a body; Refused for one that is too large or too slow."""
    too_large = Refused(413, f"the body has more than {limit} bytes; send less", code="too_large")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_large

    async def parts():
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > limit:
                raise too_large
        return content

    try:
        return await asyncio.wait_for(parts(), BODY_SECONDS)
    except asyncio.TimeoutError:
        what = f"the body did not come within {BODY_SECONDS:g} s; send it faster"
        raise Refused(408, what, code="too_slow") from None


async def until_disconnected(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def prepared(server, job):
    """What `server.prepare` makes of a Job, in a thread: patterns may take seconds to build. Once
    nobody waits for it, the thread ends."""
    left = threading.Event()

    def check():
        if left.is_set():
            raise GivenUp()
        if server.engine.closing:
            raise Closed()

    still_wanted.set(check)  # in the context that asyncio.to_thread copies
    try:
        async with server.building if job.must_match else contextlib.nullcontext():
            return await asyncio.to_thread(server.prepare, job)
    finally:
        left.set()


class Computation:
    """A Job that the engine computes. `next` gives what it emits, pairs (what, value): "part" of a
    stream, and at last "done" or "failed"."""

    def __init__(self, server, job, work, answer, deadline):
        loop = asyncio.get_running_loop()
        self.job = job
        self.answer = answer
        self.queue = asyncio.Queue()
        self.progress = {}

        def emit(what, value):
            loop.call_soon_threadsafe(self.queue.put_nowait, (what, value))

        def done(result, error):
            emit(*(("failed", error) if error else ("done", result)))

        self.emit = emit
        self.request = Request(
            lambda stand_in: server.write(job, work, stand_in, self.part), done, deadline
        )
        server.engine.submit(self.request)

    def part(self, index, text, is_finished=False):
        """Emit what is new of a Text; returns whether the client needs no more of it. (In the
        engine's thread.) For the page `text` is an event."""
        if self.job.watch:
            self.emit("part", dict(tried=self.request.calls) | text)
        if self.job.watch or not self.job.stream:
            return False
        if index not in self.progress:
            self.progress[index] = answers.Progress(self.job)
        progress = self.progress[index]
        if is_finished:
            self.emit("part", self.answer.last_part(index, progress.finish(text), text))
        elif new := progress.grow(text):
            self.emit("part", self.answer.part(index, new))
        return progress.is_done

    async def next(self, patience):
        """The next pair; ("ping", None) if there is no news for `patience` seconds."""
        try:
            return await asyncio.wait_for(self.queue.get(), patience)
        except asyncio.TimeoutError:
            return "ping", None

    async def events(self, first):
        """The server-sent events of a stream: what is written once it cannot change any more."""
        what, value = first
        patience = WATCH_SECONDS if self.job.watch else PING_SECONDS
        while what not in ("done", "failed"):
            if what == "part":
                yield to_event(value)
            elif self.job.watch:
                yield to_event(dict(tried=self.request.calls))
            else:
                yield ": still writing\n\n"
            what, value = await self.next(patience)
        if what == "failed":
            yield to_event(explained(value).content)
        for event in self.answer.end():
            yield to_event(event)


async def within(work, left, deadline):
    """The result of a coroutine, unless the client leaves or the time is over before."""
    task = asyncio.ensure_future(work)
    seconds = max(0.0, deadline - time.monotonic())
    await asyncio.wait((task, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    raise GivenUp() if left.done() else TookTooLong()


async def write(model, make_answer, server, request):
    """Answer a request that writes. model: of its fields."""
    deadline = time.monotonic() + server.time_limit
    if server.draining:
        raise Closed()
    body = requests.read(model, await read_body(request, server.max_body))
    job = body.to_job(server.limits)
    if model is not requests.Infill:  # editors name any
        check_name(server, getattr(body, "model", None))
    waiting, active = server.engine.waiting()
    if waiting + active + server.preparing >= server.engine.room:
        raise Full()
    answer = make_answer(job, server.name)
    left = asyncio.ensure_future(until_disconnected(request.receive))
    computation = None
    try:
        server.preparing += 1
        try:
            work, answer.prompt_tokens = await within(prepared(server, job), left, deadline)
        finally:
            server.preparing -= 1
        computation = Computation(server, job, work, answer, deadline)
        if job.stream:
            first = await within(computation.next(PING_SECONDS), left, deadline)
            if first[0] == "failed":
                raise first[1]
            stream = Stream(server, computation, first)
            computation = None  # the Stream finishes it
            return stream
        # The engine itself ends what takes too long.
        what, value = await within(computation.next(None), left, deadline + PING_SECONDS)
        if what == "failed":
            raise value
        return to_response(answer.whole(value))
    finally:
        left.cancel()
        if computation:
            finish(server, computation)


class Stream(StreamingResponse):
    """The events of a Computation, which ends when the client leaves."""

    def __init__(self, server, computation, first):
        super().__init__(computation.events(first), media_type="text/event-stream")
        self.finish = lambda: finish(server, computation)

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.finish()


def finish(server, computation):
    computation.request.give_up()
    server.metrics.prompt_tokens += computation.answer.prompt_tokens
    server.metrics.tokens += computation.answer.tokens


def check_name(server, name):
    if name and name != server.name:  # "": clients that need none
        what = f"there is no model of that name here; give {server.name}"
        raise Refused(404, what, "model", "model_not_found")


# ---- Other requests
async def show_models(server, request):
    name = request.path_params.get("name")
    check_name(server, name)
    one = dict(id=server.name, object="model", created=server.created, owned_by="mdlm")
    return to_response(one if name else dict(object="list", data=[one]))


async def show_health(server, request):
    status = "stopping" if server.draining else "ok"
    return to_response(dict(status=status), 503 if server.draining else 200)


async def show_page(server, request):
    """The page, whose one script alone may run."""
    script = re.search(r"<script>(.*?)</script>", server.page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    policy += "; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    headers = {"content-security-policy": policy}
    return Response(server.page, 200, headers, "text/html")


async def show_metrics(server, request):
    return PlainTextResponse(
        server.metrics.text(server.engine), media_type="text/plain; version=0.0.4"
    )


WRITES = {
    "/v1/completions": (requests.Completion, answers.Completion),
    "/v1/chat/completions": (requests.Chat, answers.Chat),
    "/infill": (requests.Infill, answers.Infill),
    "/v1/fix": (requests.Fix, answers.Listed),
    "/v1/score": (requests.Score, answers.Listed),
    "/page": (requests.Page, answers.Watched),  # what the page calls
}
SHOWS = {
    "/v1/models": show_models,
    "/v1/models/{name:path}": show_models,
    "/health": show_health,
    "/": show_page,
    "/metrics": show_metrics,
}
PATHS = {*WRITES, *SHOWS}


def make_app(server):
    """The Starlette application."""

    def endpoint(function, *args):
        async def answer(request):
            try:
                return await function(*args, server, request)
            except Exception as e:
                return explained(e).response()

        return answer

    async def explain(request, error):
        return explained(error).response()

    posts = [Route(path, endpoint(write, *how), methods=["POST"]) for path, how in WRITES.items()]
    gets = [Route(path, endpoint(function), methods=["GET"]) for path, function in SHOWS.items()]
    cors = dict(allow_methods=["GET", "POST"], allow_headers=["authorization", "content-type"])
    allowed = [Middleware(CORSMiddleware, allow_origins=server.origins, **cors)]
    return Starlette(
        routes=posts + gets,
        middleware=allowed * bool(server.origins) + [Middleware(Guard, server=server)],
        exception_handlers={HTTPException: explain},
    )
