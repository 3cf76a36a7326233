"""Serve a trained model over HTTP: OpenAI's completions with a suffix, llama.cpp's infill.

    python serve.py --out_dir=out                    # http://127.0.0.1:8000
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "ROMEO:", "max_tokens": 80}'

Many clients are computed together: each request runs what sample.py runs, and the network calls of
all that wait are one call (support/serving/engine.py). The same seed gives the text that sample.py
gives, whatever else is computed. docs/serving.md says what each field means for a model that writes
everywhere at once. Needs the packages starlette, uvicorn and greenlet.
"""

from nanomdlm.support.cli import entry, terminal

entry.start(__name__)

import asyncio
import bisect
import contextlib
import json
import math
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch

import mdlm
import sample
from nanomdlm.support import abilities
from nanomdlm.support.cli import environment
from nanomdlm.support.cli.devices import pick_device
from nanomdlm.support.cli.settings import Bounds, Context, Reads, names_of, shown
from nanomdlm.support.cli.settings import parse as parse_settings
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill import templates
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.infill.templates import (
    Gap,
    encode_segments,
    joined,
    of_prompt,
    one_of,
    parse,
    to_ids,
    to_texts,
)
from nanomdlm.support.run import checkpoint_score
from nanomdlm.support.run.checkpoint import default_run
from nanomdlm.support.serving import app, completions, engine
from nanomdlm.support.serving.completions import Invalid, Text
from nanomdlm.support.web.served_page import page
from nanomdlm.support.web.viewer import HtmlRecorder

KEY = "MDLM_API_KEY"  # the environment variable in place of --api_key
HEAD_SECONDS = 10.0  # in which the head of a request must have come, and between two of them
SHOWN = 5  # ranked fills on the page
TOLD = 4  # texts that the network sees in a search, after which the page is told their number
END_SECONDS = 5.0  # after --drain, in which what is cut short is told so
HEADER_BYTES = 1 << 15


Seconds = Annotated[float, Bounds(0, 24 * 3600)]
Port = Annotated[int, Bounds(0, 65535)]
Tokens = Annotated[int, Bounds(1, 1 << 20)]
Some = Annotated[int, Bounds(1, 4096)]


@dataclass
class Place:
    """What is served, and where."""

    out_dir: Reads = ""  # run or checkpoint, or several, A,B: their mean (default: out or weights/)
    host: str = "127.0.0.1"  # address to listen on; beyond this machine it needs --api_key
    port: Port = 8000  # port to listen on (0: any that is free)
    api_key: str = ""  # key that clients must send (default: the variable MDLM_API_KEY, if set)
    origin: str = ""  # sites whose pages may use it, as https://example.org,https://...
    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    trust_remote_code: bool = False  # allow custom code from the checkpoint
    drain: Seconds = 10.0  # after SIGTERM, seconds to finish what has begun


@dataclass
class RequestLimits:
    """Per-request limits."""

    max_tokens: Tokens = 2048  # tokens written after a prompt
    max_prompt: Tokens = 8192  # tokens of a prompt
    max_gap: Context = 16  # longest fill of a gap, in tokens
    max_prompts: Some = 16  # prompts of a request
    max_n: Some = 16  # texts of a prompt
    max_body: Annotated[int, Bounds(1 << 10, 1 << 30)] = 1 << 20  # bytes of a request
    time_limit: Annotated[float, Bounds(0.1, 24 * 3600)] = 600.0  # seconds of a request


@dataclass
class ConcurrencyLimits:
    """Concurrency limits."""

    max_active: Some = 64  # requests that are computed at a time
    max_waiting: Annotated[int, Bounds(0, 1 << 16)] = 256  # requests that wait until others end
    max_connections: Annotated[int, Bounds(1, 1 << 16)] = 512  # open connections


@dataclass
class Options(Place, RequestLimits, ConcurrencyLimits):
    """All flags."""


# ---- What is written for a Job (in a greenlet of the engine; see support/serving/engine.py)
class Writer:
    """Writes what Jobs ask for, as sample.py does."""

    def __init__(self, model, filler, tokenizer, max_prompt=8192):
        self.model = model  # that goes on
        self.filler = filler  # that fills gaps: the same, or loaded with whole=True
        self.tokenizer = tokenizer
        self.max_prompt = max_prompt

    def model_of(self, job):
        return self.model if job.goes_on or job.kind == "score" else self.filler

    # ---- What is asked for, as segments of templates
    def segments(self, job, prompt):
        """The segments of a prompt of a Job; UserError for one that cannot be written."""
        if job.kind == "chat":
            return self.continued(job, self.asked(prompt))
        if job.kind == "continue":
            return self.continued(job, prompt)
        if not job.max_tokens:
            return []
        config = self.filler.config
        if config.prompt_column:
            what = "this model answers prompts, it fills no gaps; send a prompt without a suffix"
            raise Invalid(what, "suffix", code="unsupported")
        if job.kind == "template":
            segments = parse(prompt, self.tokenizer, config.block_size)
        else:
            segments = self.around_gap(job, *prompt)
        templates.check_lengths(segments, job.max_tokens)
        if not self.is_searched(job, segments):
            sample.Writer(self.filler, self.tokenizer, None).check(segments)
        return segments

    def is_searched(self, job, segments):
        """Whether gaps get their likeliest fills, in place of a draw."""
        return not job.watch or job.rank or templates.has_open(segments)

    def asked(self, messages):
        """The messages of a conversation as a prompt; Invalid if the model cannot answer them."""
        config = self.model.config
        if config.chat_column:
            return json.dumps(messages, ensure_ascii=False)
        how = dict(param="messages", code="unsupported")
        if not config.prompt_column:
            what = "this model has learned no conversations; use /v1/completions"
            raise Invalid(what, **how)
        if len(messages) != 1 or messages[0]["role"] != "user":
            what = "this model has learned answers to single prompts; send one message of the user"
            raise Invalid(what, **how)
        return messages[0]["content"]

    def continued(self, job, prompt):
        """A prompt, and what is written after it."""
        model = self.model
        most = 1 << 30
        segments = of_prompt(prompt, self.tokenizer, most, model.config)
        n = sum(segment.size for segment in segments if not segment.is_gap)
        self.check_length(n)
        if abilities.knows_lengths(model):  # a length is drawn, within the context
            most = model.config.block_size
        else:
            most = n + job.max_tokens
        return of_prompt(prompt, self.tokenizer, most, model.config)

    def check_length(self, n):
        if n > self.max_prompt:
            what = f"the prompt has {n} tokens, and this server takes {self.max_prompt}; shorten it"
            raise Invalid(what, "prompt", status=422, code="context_length_exceeded")

    def around_gap(self, job, before, after):
        """The texts before and after a gap, cut to what the tokenizer knows and to the context if
        the Job says so."""
        L = self.filler.config.block_size
        if job.cut:
            room = L - min(job.max_tokens, max(1, L // 2))
            before, after = self.cut(before, after, room)
        gap = Gap(pattern=job.regex or "")
        if job.choices:
            gap = one_of(job.choices)
        segments = [segment for segment in (before, gap, after) if segment != ""]
        segments = encode_segments(segments, self.tokenizer)
        n = len(to_ids(segments, self.tokenizer))
        if n > L:
            what = f"prompt and suffix have {n - 1} tokens, and the context {L}; shorten them"
            raise Invalid(what, "prompt", status=422, code="context_length_exceeded")
        return segments

    def cut(self, before, after, room):
        """The end of `before` and the beginning of `after`, `room` tokens together: of `after` at
        most a quarter, or what `before` leaves."""
        parts = partial(known_part, self.tokenizer)
        before, n_before = parts(before, room, is_end=True)
        after, n_after = parts(after, room, is_end=False)
        after, n_after = parts(after, max(room // 4, room - n_before), is_end=False)
        before, _ = parts(before, room - n_after, is_end=True)
        return before, after

    def count(self, job):
        """Tokens of given text of a Job; UserError for what cannot be written."""
        if job.kind in ("score", "fix"):
            texts = ["".join(prompt) for prompt in job.prompts]
            sizes = [len(self.tokenizer.encode_lossless(text)) for text in texts]
            self.check_length(max(sizes))
            return sum(sizes)
        sample.resolve(sample.SamplerSettings(**job.settings), self.model_of(job))
        given = 0
        for prompt in job.prompts:
            segments = self.segments(job, prompt)
            given += sum(segment.size for segment in segments if not segment.is_gap)
        return given

    # ---- Writing
    def write(self, job, stand_in, emit):
        """The completions.Texts of all prompts of a Job: n of the first, then n of the second ...

        emit(index, written, text): what of a text cannot change any more, and at its end the Text;
        it returns whether no more of that text is needed.
        """
        model = stand_in(self.model_of(job))
        if job.kind == "fix" and job.watch:
            changes = sample.fix(model, self.tokenizer, job.prompts[0], job.caution).changes
            emit(0, dict(done=True, changes=[change._asdict() for change in changes]))
            return []
        if job.kind == "fix":
            return [sample.fix(model, self.tokenizer, one, job.caution) for one in job.prompts]
        if job.kind == "score":
            return sample.score(
                model, self.tokenizer, job.prompts, job.passes, job.settings["seed"]
            )
        settings = sample.resolve(sample.SamplerSettings(**job.settings), model)
        writer = sample.Writer(model, self.tokenizer, settings)
        texts = []
        for prompt in job.prompts:
            segments = self.segments(job, prompt)
            tell = partial(tell_from, emit, len(texts))
            if job.watch:
                show = self.show_fills if self.is_searched(job, segments) else self.show
                show(writer, segments, job, emit)
            elif not job.max_tokens:
                texts.append(Text("", "", 0))
            elif job.goes_on:
                texts += self.go_on(writer, segments, job, tell)
            else:
                texts += self.fill(writer, segments, job, tell)
        return texts

    def fill(self, writer, segments, job, tell):
        """The n likeliest fills, as `sample.py --infill --candidates=n` finds them."""
        texts = []
        deadline = time.monotonic() + job.seconds
        found = writer.filling(segments, job.n, job.max_tokens, deadline=deadline)
        for i, one in enumerate(found.finish()):
            is_filled = [value is not None for value in one.drawn]
            texts.append(Text("".join(one.fills), one.text, sum(is_filled), is_ended=True))
            if job.logprobs is not None:
                drawn = drawn_of(one)
                tokens = sample.token_logprobs(
                    writer.model, self.tokenizer, one.ids, drawn, job.logprobs
                )
                texts[-1].logprobs = [token for token in tokens if token.drawn is not None]
            tell(i, texts[-1].filled, texts[-1])
        return texts

    def go_on(self, writer, segments, job, tell):
        """n texts after a prompt, with the numbers 0 .. n - 1 of the seed."""
        texts = []
        for rows in writer.batches(segments, job.n, False):
            chunks = list(rows.chunks())
            told = [0] * len(rows.x)  # up to where each row was sent
            done = [False] * len(rows.x)
            first = int(rows.samples[0])
            for step in rows.steps():
                if not job.stream:
                    continue
                chunk = max((c for c in chunks if c.first < step.number), key=lambda c: c.first)
                final = chunk.settled(step.x, writer.model.mask_id).tolist()
                for row, ids in enumerate(step.x.tolist()):
                    if final[row] > told[row]:
                        told[row] = final[row]
                        written = self.text_of(segments, ids[: final[row]], job).filled
                        done[row] |= tell(first + row, written)
                if all(done):
                    break
            for row, (ids, drawn) in enumerate(zip(rows.x.tolist(), rows.drawn)):
                texts.append(self.text_of(segments, ids, job))
                if job.logprobs is not None:
                    texts[-1].logprobs = self.logprobs_of(writer.model, segments, ids, drawn, job)
                tell(first + row, texts[-1].filled, texts[-1])
        return texts

    def logprobs_of(self, model, segments, ids, drawn, job):
        """The TokenLogprobs of what was written after a prompt."""
        given = given_ids(segments)
        n = min(len(given) + job.max_tokens, len(ids))
        tokens = sample.token_logprobs(model, self.tokenizer, ids, drawn, job.logprobs, n)
        return tokens[len([i for i in given if i != self.tokenizer.end_id]) :]

    def text_of(self, segments, ids, job):
        """The Text of the ids of a text that goes on, or of its beginning."""
        given = [segment for segment in segments if not segment.is_gap]
        n = len(given_ids(segments))
        written = ids[n : n + job.max_tokens]
        end = self.tokenizer.end_id
        is_ended = end is not None and end in written
        n_written = written.index(end) if is_ended else len(written)
        if not n_written:
            return Text("", "".join(given), 0, is_ended)
        parts = to_texts([*given, Gap(n_written)], ids[: n + n_written], self.tokenizer)
        filled = "".join(part for part, is_filled in parts if is_filled)
        return Text(filled, joined(parts), n_written, is_ended)

    # ---- For the page: it gets dicts, which support/web/assets/live.js reads
    def show(self, writer, segments, job, emit):
        """Write a text; emit what each network call draws, and at last the whole film of it."""
        began = time.monotonic()
        mask = writer.model.mask_id
        (rows,) = writer.batches(segments, 1, job.kind == "template")
        ids = torch.tensor(to_ids(segments, self.tokenizer, mask), dtype=torch.int64)
        film = HtmlRecorder(self.tokenizer, ids, mask)
        n = length_without_end(rows.x[0].tolist(), self.tokenizer)
        tokens, given = film.shown()
        steps = sum(chunk.steps for chunk in rows.chunks())
        emit(0, dict(tokens=tokens[:n], given=given[:n], steps=steps))
        facts = dict(calls=0, seconds=0.0)
        for step in rows.steps():
            facts = dict(calls=int(step.calls[0]), seconds=time.monotonic() - began)
            if film.add(step, 0):
                emit(0, facts | dict(frame=film.newest()))
        emit(0, dict(done=True, sample=facts | film.page(rows.x[0].tolist())))

    def show_fills(self, writer, segments, job, emit):
        """Emit the likeliest fills of a template, with the share of each among them."""
        n = SHOWN if job.rank else 1
        seen = 0

        def update(new):
            nonlocal seen
            seen += new
            if seen % TOLD < new:
                emit(0, dict(tried=seen))

        found = writer.filling(segments, n, job.max_tokens, update).finish()
        p = torch.tensor([one.logp for one in found], dtype=torch.float64).softmax(0).tolist()
        shown = [
            dict(share=q, p=one.p, logp=one.logp) | self.still(one) for one, q in zip(found, p)
        ]
        about = dict(proven=found.proven, compares_lengths=found.compares_lengths)
        about |= dict(bound=max(found.bound, -1e300), tried=found.sequences, seconds=found.seconds)
        emit(0, dict(done=True, fills=shown) | about)

    def still(self, one):
        """A filling.Candidate as a film of one frame."""
        tokens = self.tokenizer.pieces(one.ids)
        frame = [
            [i, tokens[i], round(math.exp(logp), 4), []]
            for i, logp in enumerate(one.drawn)
            if logp is not None
        ]
        given = [logp is None for logp in one.drawn]
        return dict(tokens=tokens, given=given, frames=[frame])


def drawn_of(one):
    """(T,) log p of each token of a filling.Candidate when it was filled, else NaN."""
    values = [math.nan if value is None else value for value in one.drawn]
    return torch.tensor(values, dtype=torch.float64)


def given_ids(segments):
    """The ids of the given text."""
    return [id for segment in segments if not segment.is_gap for id in segment.ids]


def known_part(tokenizer, text, most, is_end):
    """The longest end of a text, or beginning if not is_end, that the tokenizer can encode and that
    has at most `most` tokens. Returns (this part, its tokens).

    The text may be a whole file: no more of it is encoded than may fit.
    """

    def part(n):
        return text[len(text) - n :] if is_end else text[:n]

    def tokens(n):
        """Those of part(n), or more than `most` if it cannot be encoded."""
        with contextlib.suppress(UserError):
            return len(tokenizer.encode_lossless(part(n), after_gap=not is_end))
        return most + 1

    high = max(1, most)  # characters, doubled until they are too many tokens
    while high < len(text) and tokens(high) <= most:
        high *= 2
    high = min(high, len(text))
    n = bisect.bisect_right(range(1, high + 1), most, key=tokens)
    return part(n), tokens(n)


def length_without_end(ids, tokenizer):
    """How many ids precede [END]."""
    return ids.index(tokenizer.end_id) if tokenizer.end_id in ids else len(ids)


def tell_from(emit, first, index, *written):
    return emit(first + index, *written)


# ---- The process
def check(options):
    """Raise UserError for flags that contradict each other."""
    if options.host not in app.LOOPBACK and not options.api_key:
        what = f"--host={options.host} can be reached from other machines"
        raise UserError(f"{what}; give --api_key=KEY, or leave --host out")
    for origin in origins(options):
        scheme, _, rest = origin.partition("://")
        if scheme not in ("http", "https") or not rest or "/" in rest:
            what = f"--origin={shown(origin)} is no origin"
            raise UserError(f"{what}; give it as https://example.org, without a path")
    if not options.api_key.isascii() or any(c.isspace() for c in options.api_key):
        raise UserError("--api_key has characters that no header can have; give ASCII, no spaces")


def origins(options):
    return tuple(part.strip() for part in options.origin.split(",") if part.strip())


def load(options):
    """(Writer, name, folders, config, device)"""
    device = pick_device(options.device)
    run = default_run(options.out_dir)
    read = partial(mdlm.load, device=device, trust_remote_code=options.trust_remote_code)
    folders, (model, tokenizer, config) = read_newest(run, read)
    filler = model
    if config.infill_share:  # learned to fill gaps too, by another View
        filler = mdlm.load(folders[0], device, whole=True)[0]
        for name, p in model.named_parameters():  # the same numbers, once
            owner, _, key = name.rpartition(".")
            setattr(filler.get_submodule(owner), key, p)
    name = ",".join(Path(part).resolve().name for part in names_of(run))
    return Writer(model, filler, tokenizer, options.max_prompt), name, folders, config, device


def listen(options):
    """A socket that listens; UserError if that cannot be."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if os.name != "nt":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as e:
        where = f"{options.host}:{options.port}"
        fix = "give another --port (0: any that is free) or --host"
        raise UserError(f"{where} cannot be listened on ({e.strerror or e}); {fix}") from None
    sock.setblocking(False)
    return sock


def make_protocol(most):
    """uvicorn's protocol of a connection, with bounds that it lacks: how long the head of a request
    may take, and how many connections there are. Errors before a request are JSON too."""
    h11_impl = environment.optional("uvicorn.protocols.http.h11_impl", "serve.py")
    idle = {}  # connections without a request in progress, the oldest first

    class Bounded(h11_impl.H11Protocol):
        timer = None

        def connection_made(self, transport):
            super().connection_made(transport)
            self.wait()
            if len(self.connections) > most:
                oldest = next(iter(idle))
                oldest.refuse(503, "too many connections; try again later")

        def connection_lost(self, error):
            self.stop_waiting()
            super().connection_lost(error)

        def handle_events(self):
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                self.stop_waiting()

        def on_response_complete(self):
            self.wait()
            super().on_response_complete()

        def wait(self):
            """A request must begin within HEAD_SECONDS."""
            self.stop_waiting()
            idle[self] = True
            self.timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

        def stop_waiting(self):
            idle.pop(self, None)
            if self.timer:
                self.timer.cancel()
                self.timer = None

        def refuse(self, status, message):
            """Answer without a request, and close."""
            idle.pop(self, None)
            body = json.dumps(app.error_of(status, message)).encode()
            about = f"content-type: application/json\r\ncontent-length: {len(body)}"
            head = f"HTTP/1.1 {status} Refused\r\n{about}\r\nconnection: close\r\n\r\n"
            if not self.transport.is_closing():
                self.transport.write(head.encode() + body)
                self.transport.close()

        def send_400_response(self, message):
            self.refuse(400, "this is no HTTP request that is accepted; send HTTP/1.1")

    return Bounded


async def serve(server, options, sock):
    """Answer until SIGTERM, SIGINT or SIGHUP; then finish what has begun, within --drain."""
    uvicorn = environment.optional("uvicorn", "serve.py")
    config = uvicorn.Config(
        app.make_app(server),
        http=make_protocol(options.max_connections),
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        backlog=128,
        timeout_keep_alive=int(HEAD_SECONDS),
        timeout_graceful_shutdown=int(END_SECONDS) + 1,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    host = uvicorn.Server(config)
    stop = asyncio.Event()
    on_signals(stop.set)
    running = asyncio.ensure_future(host._serve([sock]))
    while not host.started and not running.done():
        await asyncio.sleep(0.01)
    say_ready(options, sock)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    server.draining = True
    stop.clear()
    terminal.warn(f"serve.py: stopping; finishing {server.running} requests")
    deadline = time.monotonic() + options.drain
    # A second signal ends it at once.
    while server.running and time.monotonic() < deadline and not stop.is_set():
        await asyncio.sleep(0.05)
    server.engine.close()
    deadline = time.monotonic() + END_SECONDS
    while server.running and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    host.should_exit = True
    await running


def on_signals(function):
    """Call a function in the event loop at a signal that ends the program."""
    loop = asyncio.get_running_loop()
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is None or signal.getsignal(number) == signal.SIG_IGN:  # as nohup does
            continue
        try:
            loop.add_signal_handler(number, function)
        except NotImplementedError:  # Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(function))


def say_ready(options, sock):
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    print(f"serving on http://{host}:{port}; Ctrl-C stops it", flush=True)


def main(argv):
    options = Options(**parse_settings(Options, argv, __doc__, groups=Options.__bases__))
    options.api_key = options.api_key or os.environ.get(KEY, "")
    check(options)
    for package in ("starlette", "uvicorn", "greenlet"):
        environment.optional(package, "serve.py")
    sock = listen(options)
    writer, name, folders, config, device = load(options)
    checkpoint_score.introduce(folders, config, writer.tokenizer.vocab_size, options.out_dir)
    bounds = completions.Bounds(
        options.max_prompts, options.max_n, options.max_tokens, options.max_gap
    )
    computes = engine.Engine(device, options.max_active, options.max_waiting)
    created = int((folders[0] / "config.json").stat().st_mtime)
    server = app.Server(computes, writer.write, writer.count, name, created, bounds)
    server.host = options.host
    server.api_key = options.api_key
    server.origins = origins(options)
    server.max_body = options.max_body
    server.time_limit = options.time_limit
    about = f"{name}: {config.n_layer} layers x {config.n_embd}, context {config.block_size}"
    device_name = "GPU" if device.type == "cuda" else device.type.upper()
    has_key = bool(options.api_key)
    html = page(
        writer.model,
        writer.filler,
        writer.tokenizer,
        about,
        device_name,
        has_key,
        options.max_tokens,
    )
    app.use_page(server, html)
    engine.start(computes)
    asyncio.run(serve(server, options, sock))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
