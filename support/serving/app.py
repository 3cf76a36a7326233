"""HTTP: routes, limits, and errors as OpenAI has them.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

No text of a client is in any log, and in no error beyond the words that it is about.
"""

import asyncio
import contextlib
import hmac
import json
import re
import threading
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from nanomdlm.support import abilities
from nanomdlm.support.cli.entry import is_out_of_memory
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.constrain.automaton import still_wanted
from nanomdlm.support.errors import TooLong, UserError
from nanomdlm.support.infill import filling, prefixes
from nanomdlm.support.serving import answers, requests
from nanomdlm.support.serving.engine import Closed, Engine, Full, GivenUp, Request, TookTooLong
from nanomdlm.support.serving.metrics import Metrics
from nanomdlm.support.serving.requests import Refused
from nanomdlm.support.serving.writing import Writer

BODY_SECONDS = 30.0  # in which a body must have come
PING_SECONDS = 15.0  # after which a stream without news gets a comment
LEFT_SECONDS = 0.2  # after which a client that has left is noticed
WATCH_SECONDS = 0.25  # after which the page is told how many calls were made
BUILDERS = 2  # requests whose patterns are built at a time
NOTHING_SENT = 499  # the status of a request whose client has left, as nginx has it
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
# What ends a request, as the arguments of Refused.
ENDS = {
    Full: ("too many requests wait; try again later", None, 429, "queue_full", 1),
    Closed: ("the server stops; try again later", None, 503, "stopping", 5),
    TookTooLong: ("this took too long; ask for fewer tokens", None, 503, "time_limit"),
    GivenUp: ("the client has left", None, NOTHING_SENT),  # nobody reads this
    ClientDisconnect: ("the client has left", None, NOTHING_SENT),
}


@dataclass
class Server:
    """What the routes share."""

    engine: Engine
    writer: Writer
    name: str  # of the model
    created: int  # when its checkpoint was written, Unix time
    options: Any  # serve.Options
    page: str = ""
    metrics: Metrics = field(default_factory=Metrics)
    building: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BUILDERS))
    draining: bool = False
    running: int = 0  # requests that are answered now
    preparing: int = 0  # those of them that are not in the engine yet

    def __post_init__(self):
        for model in (self.writer.model, self.writer.filler):
            prefixes.keep(model)
        if not self.options.max_gap and abilities.is_causal(self.writer.filler):
            self.options.max_gap = filling.MAX_LINE


def explained(error):
    """The Refused of any exception of a request."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, HTTPException):  # of Starlette: 404 and 405
        sentence = f"{error.detail}: see docs/serving.md for the paths"
        return Refused(sentence, status=error.status_code)
    if isinstance(error, UserError):
        # Flags of sample.py, as fields of a request.
        sentence = re.sub(r"--(?=\w)", "", str(error)).replace("max_gap", "max_tokens")
        name = sentence.partition("=")[0]
        param = name if name in (*requests.SETTINGS, "passes") else None
        code = "context_length_exceeded" if isinstance(error, TooLong) else None
        return Refused(sentence, param, code=code)
    if type(error) in ENDS:
        return Refused(*ENDS[type(error)])
    if is_out_of_memory(error):
        what = "out of memory; try again later, or ask for fewer tokens"
        return Refused(what, status=503, code="memory", wait=5)
    at = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(at[-1].filename).name}:{at[-1].lineno}" if at else ""
    warn(f"serve.py: a request failed with {type(error).__name__}{where}")
    what = "the server failed at this request; its log says where"
    return Refused(what, status=500, code="failed")


def error_of(refused):
    """The JSON of a Refused."""
    kind = TYPES.get(refused.status, "invalid_request_error")
    about = dict(message=str(refused), type=kind, param=refused.param, code=refused.code)
    return dict(error=about)


def refusal(error):
    """The response to any exception of a request."""
    refused = explained(error)
    headers = {"retry-after": str(refused.wait)} if refused.wait else None
    return to_response(error_of(refused), refused.status, headers)


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
    """ASGI middleware: checks who asks, answers with errors, adds headers of safety, and counts."""

    def __init__(self, app, server):
        self.app = app
        self.server = server

    async def __call__(self, scope, receive, send):
        began = time.monotonic()
        status = NOTHING_SENT

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
        except Exception as e:
            if status != NOTHING_SENT:  # a stream that has begun
                raise
            await refusal(e)(scope, receive, watched)
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
                raise Refused(f"the request has two headers {name}; send one")
        options = self.server.options
        host = headers.get("host", "").lower()
        name = re.sub(r":\d*$", "", host).strip("[]")
        known = [*LOOPBACK, *(re.sub(r"^https?://|:\d+$", "", each) for each in options.origins)]
        if options.host in LOOPBACK and name not in known:
            raise Refused("this server answers to localhost, or to what --origin names", status=403)
        origin = headers.get("origin", "").lower()
        if origin and origin not in (f"http://{host}", f"https://{host}", *options.origins):
            raise Refused("pages of other sites need --origin to use this server", status=403)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        # The comparison takes as long for any wrong key.
        is_right = hmac.compare_digest(given.encode(), options.api_key.encode())
        if options.api_key and path not in OPEN and not is_right:
            what = "the key is missing or wrong; send the header Authorization: Bearer KEY"
            raise Refused(what, status=401, code="invalid_api_key")


# ---- Requests that write
async def read_body(request, limit):
    """The bytes of a body; Refused for one that is too large or too slow."""
    too_large = Refused(f"the body has more than {limit} bytes", status=413, code="too_large")
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
        what = f"the body did not come within {BODY_SECONDS:g} s"
        raise Refused(what, status=408, code="too_slow") from None


async def prepared(server, job):
    """What Writer.prepare makes of a job, in a thread: patterns may take seconds to build. Once
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
            return await asyncio.to_thread(server.writer.prepare, job)
    finally:
        left.set()


class Computation:
    """A job that the engine computes. `next` gives what it emits, pairs (what, value): "part" of a
    stream, and at last "done" or "failed"."""

    def __init__(self, server, job, work, answer, deadline):
        loop = asyncio.get_running_loop()
        self.server = server
        self.job = job
        self.answer = answer
        self.queue = asyncio.Queue()
        self.progress = defaultdict(partial(answers.Progress, job))

        def emit(what, value):
            loop.call_soon_threadsafe(self.queue.put_nowait, (what, value))

        def done(result, error):
            emit("failed" if error else "done", error or result)

        self.emit = emit
        self.request = Request(
            lambda stand_in: server.writer.write(job, work, stand_in, self.part), done, deadline
        )
        server.engine.submit(self.request)

    def finish(self):
        """End it, if it is not done, and count it."""
        self.request.give_up()
        self.server.metrics.prompt_tokens += self.answer.prompt_tokens
        self.server.metrics.tokens += self.answer.tokens

    def part(self, index, text, is_finished=False):
        """Emit what is new of a Text; returns whether the client needs no more of it. (In the
        engine's thread.) For the page `text` is an event."""
        if self.job.watch:
            self.emit("part", dict(tried=self.request.calls) | text)
        if self.job.watch or not self.job.stream:
            return False
        progress = self.progress[index]
        new = progress.grow(text, is_finished)
        if is_finished:
            self.emit("part", self.answer.last_part(index, new, text))
        elif new:
            self.emit("part", self.answer.part(index, new))
        return progress.is_stopped

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
            yield to_event(error_of(explained(value)))
        for event in self.answer.end():
            yield to_event(event)


async def within(work, request, deadline):
    """The result of a coroutine, unless the client leaves or the time is over before."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if await request.is_disconnected():
                raise GivenUp()
            if time.monotonic() > deadline:
                raise TookTooLong()
            await asyncio.wait((task,), timeout=LEFT_SECONDS)
        return task.result()
    finally:
        task.cancel()


async def write(model, make_answer, server, request):
    """Answer a request that writes. model: of its fields."""
    options = server.options
    deadline = time.monotonic() + options.time_limit
    if server.draining:
        raise Closed()
    job = requests.read(model, await read_body(request, options.max_body), options)
    if model is not requests.Infill:  # editors name any
        check_name(server, job.model)
    waiting, active = server.engine.waiting()
    if waiting + active + server.preparing >= server.engine.room:
        raise Full()
    answer = make_answer(job, server.name)
    server.preparing += 1
    try:
        work, answer.prompt_tokens = await within(prepared(server, job), request, deadline)
    finally:
        server.preparing -= 1
    computation = Computation(server, job, work, answer, deadline)
    stream = None
    try:
        # The engine itself ends what takes too long.
        patience = PING_SECONDS if job.stream else None
        first = await within(computation.next(patience), request, deadline + PING_SECONDS)
        what, value = first
        if what == "failed":
            raise value
        if not job.stream:
            return to_response(answer.whole(value))
        stream = Stream(computation, first)
        return stream
    finally:
        if stream is None:  # which finishes it itself
            computation.finish()


class Stream(StreamingResponse):
    """The events of a Computation, which ends when the client leaves."""

    def __init__(self, computation, first):
        super().__init__(computation.events(first), media_type="text/event-stream")
        self.computation = computation

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.computation.finish()


def check_name(server, name):
    if name and name != server.name:  # "": clients that need none
        what = f"there is no model of that name here; give {server.name}"
        raise Refused(what, "model", 404, "model_not_found")


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
    """The page, by its own policy, with which its one script alone may run."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)', server.page)[1]
    headers = {"content-security-policy": f"{policy}; frame-ancestors 'none'"}
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
    "/page": (requests.Page, answers.Answer),  # what the page calls
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

    async def explain(request, error):
        return refusal(error)

    posts = [
        Route(path, partial(write, *how, server), methods=["POST"]) for path, how in WRITES.items()
    ]
    gets = [Route(path, partial(show, server), methods=["GET"]) for path, show in SHOWS.items()]
    middleware = [Middleware(Guard, server=server)]
    if origins := server.options.origins:
        cors = dict(allow_methods=["GET", "POST"], allow_headers=["*"])  # clients have their own
        middleware.insert(0, Middleware(CORSMiddleware, allow_origins=origins, **cors))
    handlers = {HTTPException: explain}  # of others the Guard makes an answer
    return Starlette(routes=posts + gets, middleware=middleware, exception_handlers=handlers)
