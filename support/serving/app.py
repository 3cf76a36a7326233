"""HTTP: routes, limits, and errors as OpenAI has them, of one sentence each.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

No text of a client is in any log, and in no error beyond the words that it is about.
"""

import asyncio
import base64
import hashlib
import hmac
import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from nanomdlm.support.cli import environment, out_of_memory
from nanomdlm.support.cli.terminal import warn
from nanomdlm.support.errors import UserError
from nanomdlm.support.serving import completions
from nanomdlm.support.serving.completions import Invalid
from nanomdlm.support.serving.engine import Closed, Engine, Full, GivenUp, Request, TookTooLong
from nanomdlm.support.serving.metrics import Metrics

BODY_SECONDS = 30.0  # in which a body must have come
WRITE_SECONDS = 30.0  # in which a client must take what it is sent
PING_SECONDS = 15.0  # after which a stream without news gets a comment
WATCH_SECONDS = 0.25  # after which the page is told how many calls were made
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
TYPES |= {500: "server_error", 503: "server_error"}
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@dataclass
class Server:
    """What the routes share."""

    engine: Engine
    write: Callable  # write(job, models, emit) -> [[completions.Text] of each prompt]
    count: Callable  # count(job) -> tokens of given text; UserError for text that it cannot read
    name: str  # of the model
    created: int  # when its checkpoint was written, Unix time
    bounds: completions.Bounds
    host: str = "127.0.0.1"
    api_key: str = ""
    origins: tuple = ()
    max_body: int = 1 << 20
    time_limit: float = 600.0
    metrics: Metrics = field(default_factory=Metrics)
    page: bytes = b""
    page_policy: str = "script-src 'none'"
    building: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    draining: bool = False
    running: int = 0  # requests that are answered now


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status, message, param=None, code=None, wait=None):
        super().__init__(message)
        self.status = status
        self.content = error_of(status, message, param, code)
        self.headers = {"retry-after": str(wait)} if wait else {}


def error_of(status, message, param=None, code=None):
    kind = TYPES.get(status, "invalid_request_error")
    return {"error": dict(message=message, type=kind, param=param, code=code)}


def explained(error):
    """The Refused of any exception of a request."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Invalid):
        return Refused(error.status, str(error), error.param, error.code)
    if isinstance(error, UserError):
        sentence = re.sub(r"--(?=\w)", "", str(error))
        name = sentence.partition("=")[0]
        return Refused(400, sentence, name if name in completions.SETTINGS else None)
    if isinstance(error, Full):
        return Refused(429, "too many requests wait; try again later", code="queue_full", wait=1)
    if isinstance(error, Closed):
        return Refused(503, "the server stops; try again later", code="stopping", wait=5)
    if isinstance(error, TookTooLong):
        what = "the request took longer than this server allows; ask for fewer tokens"
        return Refused(503, what, code="time_limit")
    if out_of_memory.is_full(error):
        what = "out of memory; try again later, or ask for fewer tokens"
        return Refused(503, what, code="memory", wait=5)
    at = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(at[-1].filename).name}:{at[-1].lineno}" if at else ""
    warn(f"serve.py: a request failed with {type(error).__name__}{where}")
    return Refused(500, "the server failed at this request; its log says where", code="failed")


# ---- Reading a request
async def read_body(receive, headers, most):
    """The body of a request as JSON; Refused for what is too large, too slow, or no JSON."""
    too_large = Refused(413, f"the body has more than {most} bytes; send less", code="too_large")
    length = headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise too_large
    parts = []
    size = 0
    deadline = time.monotonic() + BODY_SECONDS
    more = True
    while more:
        try:
            message = await asyncio.wait_for(receive(), deadline - time.monotonic())
        except asyncio.TimeoutError:
            what = f"the body did not come within {BODY_SECONDS:g} s; send it faster"
            raise Refused(408, what, code="too_slow") from None
        if message["type"] == "http.disconnect":
            raise GivenUp()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise too_large
        more = message.get("more_body", False)
    return to_json(b"".join(parts))


def to_json(content):
    def refuse_constant(name):
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(content.decode("utf-8"), parse_constant=refuse_constant)
    except UnicodeDecodeError as e:
        raise Refused(400, f"the body is not UTF-8 (byte {e.start}); send JSON in UTF-8") from None
    except json.JSONDecodeError as e:
        raise Refused(
            400, f"the body is no JSON ({e.msg}, byte {e.pos}); send a JSON object"
        ) from None
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON that is accepted; send a JSON object") from None


async def until_disconnected(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


def check_key(server, headers):
    """Refused without the key; the comparison takes as long for any wrong one."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = ""
    if server.api_key and not hmac.compare_digest(given.strip().encode(), server.api_key.encode()):
        what = "the key is missing or wrong; send the header Authorization: Bearer KEY"
        raise Refused(401, what, code="invalid_api_key")


def check_origin(server, headers):
    """Refused for pages of other sites, and for names of this machine that are none: a page could
    have made its own name point here. Returns the origin to allow, or ""."""
    host = headers.get("host", "")
    name = re.sub(r":\d*$", "", host).strip("[]")
    known = (*LOOPBACK, *(re.sub(r"^https?://|:\d+$", "", origin) for origin in server.origins))
    if server.host in LOOPBACK and name not in known:
        raise Refused(
            403, "this server answers to localhost alone; use that name, or give --origin"
        )
    origin = headers.get("origin", "")
    if not origin or origin in (f"http://{host}", f"https://{host}"):
        return ""
    if origin not in server.origins:
        raise Refused(403, "pages of other sites may not use this server; allow them by --origin")
    return origin


# ---- Answering
def to_bytes(content):
    """JSON without spaces, as llama.cpp writes it: llama.vim looks for '"content":"'."""
    return json.dumps(content, separators=(",", ":")).encode()


def to_event(data):
    return b"data: " + to_bytes(data) + b"\n\n"


async def send_json(send, status, content, headers=()):
    body = to_bytes(content)
    await send_bytes(send, status, body, b"application/json", headers)


async def send_bytes(send, status, body, kind, headers=()):
    """headers: more of them, pairs of bytes, which replace those of HEADERS."""
    names = {name for name, _ in headers}
    kept = [(name, value) for name, value in HEADERS if name not in names]
    about = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    start = dict(type="http.response.start", status=status, headers=[*about, *kept, *headers])
    await asyncio.wait_for(send(start), WRITE_SECONDS)
    await asyncio.wait_for(send(dict(type="http.response.body", body=body)), WRITE_SECONDS)


class Computation:
    """A Job that the engine computes. `next` gives what it emits, pairs (what, value): "begun" with
    the number of given tokens, "part" of a stream, and at last "done" or "failed"."""

    def __init__(self, server, job, answer):
        loop = asyncio.get_running_loop()
        self.queue = asyncio.Queue()

        def emit(what, value):
            loop.call_soon_threadsafe(self.queue.put_nowait, (what, value))

        def work(stand_in):
            answer.prompt_tokens = server.count(job)
            emit("begun", answer.prompt_tokens)
            return server.write(job, stand_in, partial(self.part, emit, answer))

        def done(result, error):
            emit(*(("failed", error) if error else ("done", result)))

        self.progress = {}
        self.job = job
        deadline = time.monotonic() + server.time_limit
        self.request = Request(work, done, deadline)
        server.engine.submit(self.request)

    def part(self, emit, answer, index, written, text=None):
        """Emit what is new in a text that was `written` so far; text: the completions.Text at its
        end. Returns whether the client needs no more of it. (In the engine's thread.)"""
        job = self.job
        if not job.stream:
            return False
        if job.watch:
            emit("part", dict(tried=self.request.calls) | written)
            return False
        if index not in self.progress:
            self.progress[index] = completions.Progress(job.stop)
        progress = self.progress[index]
        if text is None:
            if new := progress.grow(written):
                emit("part", answer.part(index, new))
            return progress.is_done
        whole, _ = completions.shown_text(text, job)
        emit("part", answer.last_part(index, whole[len(progress.sent) :], text))
        return True

    async def next(self, left, patience=PING_SECONDS):
        """The next pair; ("left", None) if the client leaves before it, ("ping", None) if there is
        no news for `patience` seconds. left: a task that ends when the client leaves."""
        news = asyncio.ensure_future(self.queue.get())
        await asyncio.wait((news, left), timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        if news.done():
            return news.result()
        news.cancel()
        return ("left" if left.done() else "ping"), None


async def answer_whole(computation, answer, send, left):
    while True:
        what, value = await computation.next(left)
        if what == "done":
            await send_json(send, 200, answer.whole(value))
            return 200
        if what == "left":
            return 499  # as nginx has it: nothing is sent
        if what == "failed":
            raise value


async def answer_stream(computation, answer, send, left):
    """Server-sent events: what is written as soon as it cannot change any more."""
    is_open = False

    async def push(content):
        event = dict(type="http.response.body", body=content, more_body=True)
        await asyncio.wait_for(send(event), WRITE_SECONDS)

    is_watched = computation.job.watch
    while True:
        what, value = await computation.next(left, WATCH_SECONDS if is_watched else PING_SECONDS)
        if what == "left":
            return 499
        if what == "failed" and not is_open:
            raise value
        if not is_open and what == "begun":
            kind = (b"content-type", b"text/event-stream; charset=utf-8")
            start = dict(type="http.response.start", status=200, headers=[kind, *HEADERS])
            await asyncio.wait_for(send(start), WRITE_SECONDS)
            is_open = True
        elif what == "part":
            await push(to_event(value))
        elif what == "ping" and is_open:
            tried = dict(tried=computation.request.calls)
            await push(to_event(tried) if is_watched else b": still writing\n\n")
        elif what in ("done", "failed"):
            if what == "failed":
                await push(to_event(explained(value).content))
            else:
                for event in answer.end():
                    await push(to_event(event))
            if isinstance(answer, completions.Completion):
                await push(b"data: [DONE]\n\n")
            await send(dict(type="http.response.body", body=b"", more_body=False))
            return 200 if what == "done" else explained(value).status


async def compute(server, of_body, make_answer, scope, receive, send):
    """Answer a request that writes. Returns the status."""
    headers = headers_of(scope)
    if server.draining:
        raise Closed()
    body = await read_body(receive, headers, server.max_body)
    job = of_body(body, server.bounds)
    if of_body != completions.of_infill:  # editors name any
        check_name(server, body)
    answer = make_answer(job, server.name)
    if job.must_match:  # not in the engine's thread, where all would wait
        async with server.building:
            await asyncio.to_thread(server.count, job)
    computation = Computation(server, job, answer)
    left = asyncio.ensure_future(until_disconnected(receive))
    try:
        respond = answer_stream if job.stream else answer_whole
        return await respond(computation, answer, send, left)
    finally:
        left.cancel()
        computation.request.give_up()
        server.metrics.prompt_tokens += answer.prompt_tokens
        server.metrics.tokens += getattr(answer, "tokens", 0)


def check_name(server, body):
    name = body.get("model")
    if name is not None and name != server.name:
        what = f"there is no model of that name here; give {server.name}"
        raise Refused(404, what, "model", "model_not_found")


def headers_of(scope):
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


# ---- Routes
def model_of(server):
    return dict(id=server.name, object="model", created=server.created, owned_by="mdlm")


async def show_models(server, scope, receive, send):
    name = scope.get("path_params", {}).get("name")
    if name is not None:
        check_name(server, dict(model=name))
        await send_json(send, 200, model_of(server))
    else:
        await send_json(send, 200, dict(object="list", data=[model_of(server)]))
    return 200


async def show_health(server, scope, receive, send):
    status = 503 if server.draining else 200
    await send_json(send, status, dict(status="stopping" if server.draining else "ok"))
    return status


async def show_page(server, scope, receive, send):
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {server.page_policy}"
    policy += "; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    more = [(b"content-security-policy", policy.encode())]
    await send_bytes(send, 200, server.page, b"text/html; charset=utf-8", more)
    return 200


async def show_metrics(server, scope, receive, send):
    content = server.metrics.text(server.engine).encode()
    await send_bytes(send, 200, content, b"text/plain; version=0.0.4; charset=utf-8")
    return 200


WRITES = {
    "/v1/completions": partial(
        compute, of_body=completions.of_completion, make_answer=completions.Completion
    ),
    "/v1/chat/completions": partial(
        compute, of_body=completions.of_chat, make_answer=completions.Chat
    ),
    "/infill": partial(compute, of_body=completions.of_infill, make_answer=completions.Infill),
    "/v1/fix": partial(compute, of_body=completions.of_fix, make_answer=completions.Fixes),
    "/v1/score": partial(compute, of_body=completions.of_score, make_answer=completions.Scores),
}
SHOWS = {
    "/v1/models": show_models,
    "/v1/models/{name:path}": show_models,
    "/health": show_health,
    "/": show_page,
    "/metrics": show_metrics,
}
PAGE = "/page"  # what the page calls
WRITES[PAGE] = partial(compute, of_body=completions.of_page, make_answer=completions.Watched)
# Without a key: programs that watch a server have none; the page asks for it.
OPEN = ("/health", "/")


class Guarded:
    """An ASGI application around one function: checks who asks, counts, and answers errors."""

    def __init__(self, server, path, methods, function):
        self.server = server
        self.path = path
        self.methods = methods
        self.function = function

    async def __call__(self, scope, receive, send):
        began = time.monotonic()
        started = False
        allowed = []

        async def watched(message):
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = message | dict(headers=[*message["headers"], *allowed])
            await send(message)

        self.server.running += 1
        status = 499
        try:
            headers = headers_of(scope)
            if origin := check_origin(self.server, headers):
                allowed += allow(origin)
            if scope["method"] == "OPTIONS" and origin:
                await send_bytes(watched, 204, b"", b"text/plain")
                status = 204
                return
            if scope["method"] not in self.methods:
                what = f"{self.path} takes {' or '.join(self.methods)} alone; use that"
                raise Refused(405, what)
            if self.path not in OPEN:
                check_key(self.server, headers)
            status = await self.function(self.server, scope=scope, receive=receive, send=watched)
        except (GivenUp, asyncio.TimeoutError):  # the client has left, or takes nothing
            status = 499
        except Exception as e:
            refused = explained(e)
            status = refused.status
            if not started:
                more = [(k.encode(), v.encode()) for k, v in refused.headers.items()]
                await send_json(watched, status, refused.content, more)
        finally:
            self.server.running -= 1
            path = self.path.partition("/{")[0]
            self.server.metrics.count(path, status, time.monotonic() - began)


def allow(origin):
    return [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-allow-headers", b"authorization, content-type"),
        (b"access-control-allow-methods", b"GET, POST"),
        (b"vary", b"origin"),
    ]


async def find_nothing(server, scope, receive, send):
    paths = ", ".join(path for path in [*WRITES, *SHOWS] if "{" not in path and path != PAGE)
    raise Refused(404, f"there is no such path here; the paths are {paths}")


def use_page(server, page):
    """Serve a page of HTML at "/", whose one script alone may run."""
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    server.page = page.encode()
    server.page_policy = f"script-src 'sha256-{digest}'"


def make_app(server):
    """The Starlette application."""
    routing = environment.optional("starlette.routing", "serve.py")
    applications = environment.optional("starlette.applications", "serve.py")
    table = [(path, ["POST"], function) for path, function in WRITES.items()]
    table += [(path, ["GET", "HEAD"], function) for path, function in SHOWS.items()]
    # Methods are checked by Guarded, whose errors are JSON.
    routes = [
        routing.Route(path, Guarded(server, path, methods, function))
        for path, methods, function in table
    ]
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
    routes.append(routing.Mount("/", Guarded(server, "other", methods, find_nothing)))
    return applications.Starlette(routes=routes)
