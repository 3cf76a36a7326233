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
import threading
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
from nanomdlm.support.errors import TooLong, UserError
from nanomdlm.support.infill import templates
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.infill.templates import Gap, one_of, to_ids, to_texts
from nanomdlm.support.run import checkpoint_score
from nanomdlm.support.run.checkpoint import default_run
from nanomdlm.support.serving import app, engine, requests
from nanomdlm.support.serving.answers import Text, begins_of
from nanomdlm.support.serving.rendering import Renderer
from nanomdlm.support.serving.requests import Invalid
from nanomdlm.support.web.served_page import page
from nanomdlm.support.web.viewer import HtmlRecorder

KEY = "MDLM_API_KEY"  # the environment variable in place of --api_key
SHOWN = 5  # ranked fills on the page
TOLD = 4  # texts that the network sees in a search, after which the page is told their number
END_SECONDS = 5.0  # after --drain, in which what is cut short is told so
HEADER_BYTES = 1 << 15
MOST_PATTERNS = 64  # gaps of a request that must match,
MOST_PATTERN_SIZE = 1 << 16  # and the characters of their patterns


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


# ---- What is written for a Job
class Writer:
    """Writes what Jobs ask for, as sample.py does: first `prepare`, in any thread, then `write`, in
    a greenlet of the engine (support/serving/engine.py)."""

    def __init__(self, model, filler, tokenizer, max_prompt=8192):
        self.model = model  # that goes on
        self.filler = filler  # that fills gaps: the same, or loaded with whole=True
        self.tokenizer = tokenizer
        self.max_prompt = max_prompt
        self.reading = threading.Lock()  # a tokenizer serves one thread at a time

    # ---- Before anything is computed
    def prepare(self, job):
        """(sampler settings and the segments of each prompt, tokens of given text) of a Job.

        All is counted before the patterns of gaps are built, which takes longest. Raises UserError
        for what cannot be written.
        """
        with self.reading:
            if job.kind in ("score", "fix"):
                sizes = [sum(map(self.size, as_tuple(prompt))) for prompt in job.prompts]
                self.check_length(max(sizes))
                return job.prompts, sum(sizes)
            model = self.model if job.goes_on else self.filler
            settings = sample.resolve(sample.SamplerSettings(**job.settings), model)
            read = self.continued if job.goes_on else self.with_gaps
            todo = [read(job, prompt) for prompt in job.prompts]
        gaps = [s for segments in todo for s in segments if s.is_gap and s.pattern]
        size = sum(len(gap.pattern) for gap in gaps)
        if len(gaps) > MOST_PATTERNS or size > MOST_PATTERN_SIZE:
            what = f"{len(gaps)} gaps that must match, of {size} characters"
            limits = f"{MOST_PATTERNS} and {MOST_PATTERN_SIZE}"
            raise Invalid(f"{what}, are more than {limits}", status=422, code="too_large")
        if not job.goes_on:
            todo = [self.built(job, segments) for segments in todo]
        n = sum(s.size for segments in todo for s in segments if not s.is_gap)
        return (settings, todo), n

    def size(self, text):
        """Tokens of a text, in which proofreading also takes unknown characters."""
        if self.tokenizer.kind == "char":
            return len(text)
        with contextlib.suppress(UserError):
            return len(self.tokenizer.encode(text))
        return len(text)

    def check_length(self, n, limit=None):
        limit = self.max_prompt if limit is None else min(limit, self.max_prompt)
        if n > limit:
            raise TooLong(f"the prompt has {n} tokens, and this server takes {limit}; shorten it")

    def continued(self, job, prompt):
        """The segments of a prompt, and of what is written after it."""
        config = self.model.config
        if job.kind == "chat":
            prompt = self.of_messages(prompt)
        given = self.given(prompt, config, job.max_tokens)
        ends_within = abilities.knows_lengths(self.model) or config.prompt_column
        L = config.block_size
        self.check_length(given.size, L - 1 if ends_within and job.max_tokens else None)
        n = job.max_tokens
        if n and abilities.knows_lengths(self.model):  # a length is drawn, within the context
            n = L - given.size
        elif config.prompt_column:
            n = min(n, L - given.size)
        return [given] * bool(given) + [Gap(n)] * bool(n)

    def given(self, prompt, config, is_followed):
        """The Text of a prompt; if nothing follows it, the last space is a token's too."""
        text = templates.given_text(prompt, self.tokenizer, config)
        if text.lends_space and not is_followed:
            return templates.Text(prompt, self.tokenizer.encode_lossless(prompt))
        return text

    def of_messages(self, messages):
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

    def with_gaps(self, job, prompt):
        """The segments of a text with gaps, whose patterns are not built yet."""
        config = self.filler.config
        if not job.max_tokens:
            text = "".join(as_tuple(prompt))
            return [self.given(text, config, 0)] if job.echo else []
        if config.prompt_column:
            what = "this model answers prompts, it fills no gaps; send a prompt without a suffix"
            raise Invalid(what, "suffix", code="unsupported")
        L = config.block_size
        if job.kind == "template":
            return templates.read(prompt, self.tokenizer, L)
        before, after = prompt
        if job.cut:
            before, after = self.cut(before, after, L - min(job.max_tokens, max(1, L // 2)))
        gap = one_of(job.choices) if job.choices else Gap(pattern=job.regex or "")
        segments = [segment for segment in (before, gap, after) if segment != ""]
        segments = templates.encode_strings(segments, self.tokenizer)
        templates.check_context(segments, L)
        return segments

    def built(self, job, segments):
        """The segments with the automata of their patterns."""
        segments = templates.encode_segments(segments, self.tokenizer)
        templates.check_context(segments, self.filler.config.block_size)
        templates.check_lengths(segments, job.max_tokens)
        if has_gap(segments) and not is_searched(job, segments):
            sample.Writer(self.filler, self.tokenizer, None).check(segments)
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

    # ---- Writing
    def write(self, job, prepared, stand_in, emit):
        """The answers.Texts of all prompts of a Job: n of the first, then n of the second ... (Of
        "score" and "fix": dicts.)

        emit(index, text, is_finished): what of a Text cannot change any more, and at last all of
        it; returns whether no more of it is needed.
        """
        model = stand_in(self.model if job.goes_on or job.kind == "score" else self.filler)
        if job.kind == "score":
            seed = job.settings["seed"]
            scores = sample.score(model, self.tokenizer, job.prompts, job.passes, seed)
            return [dict(object="score") | score._asdict() for score in scores]
        if job.kind == "fix":
            found = [sample.fix(model, self.tokenizer, text, job.caution) for text in job.prompts]
            fixed = [
                dict(text=one.text, changes=[change._asdict() for change in one.changes])
                for one in found
            ]
            if job.watch:
                emit(0, dict(done=True, changes=fixed[0]["changes"]))
            return fixed
        settings, todo = prepared
        writer = sample.Writer(model, self.tokenizer, settings)
        texts = []
        for segments in todo:
            tell = partial(tell_from, emit, len(texts))
            if job.watch:
                show_fills_or = show_fills if is_searched(job, segments) else show
                show_fills_or(writer, segments, job, emit)
            elif not has_gap(segments):
                texts += self.keep(writer, segments, job, tell)
            elif job.goes_on:
                texts += self.go_on(writer, segments, job, tell)
            else:
                texts += self.fill(writer, segments, job, tell)
        return texts

    def keep(self, writer, segments, job, tell):
        """Texts to which nothing is added (max_tokens 0): echoed, perhaps with their scores."""
        ids = to_ids(segments, self.tokenizer)
        text = Text([(str(segment), False) for segment in segments])
        self.add_logprobs(writer, text, job, segments, ids, None)
        for i in range(job.n):
            tell(i, text, True)
        return [text] * job.n

    def fill(self, writer, segments, job, tell):
        """The n likeliest fills, as `sample.py --infill --candidates=n` finds them."""
        texts = []
        deadline = time.monotonic() + job.seconds
        found = writer.filling(segments, job.n, job.max_tokens, deadline=deadline)
        for i, one in enumerate(found.finish()):
            values = [math.nan if value is None else value for value in one.drawn]
            drawn = torch.tensor(values, dtype=torch.float64)
            n = int((~drawn.isnan()).sum())
            text = Text(one.parts, n, is_ended=True)
            self.add_logprobs(writer, text, job, one.segments, one.ids, drawn)
            tell(i, text, True)
            texts.append(text)
        return texts

    def go_on(self, writer, segments, job, tell):
        """n texts after a prompt, with the numbers 0 .. n - 1 of the seed."""
        texts = []
        for rows in writer.batches(segments, job.n, False):
            chunks = list(rows.chunks())
            told = [-1] * len(rows.x)  # up to where each row was sent
            done = [False] * len(rows.x)
            first = int(rows.samples[0])
            for step in rows.steps() if has_gap(segments) else ():
                if not job.stream:
                    continue
                chunk = max((c for c in chunks if c.first < step.number), key=lambda c: c.first)
                final = chunk.settled(step.x, writer.model.mask_id).tolist()
                for row, ids in enumerate(step.x.tolist()):
                    if final[row] > told[row]:
                        told[row] = final[row]
                        text, _ = self.text_of(segments, ids[: final[row]], job)
                        done[row] |= tell(first + row, text, False)
                if all(done) and job.logprobs is None:  # those are of finished texts
                    break
            for row, (ids, drawn) in enumerate(zip(rows.x.tolist(), rows.drawn)):
                text, shape = self.text_of(segments, ids, job)
                self.add_logprobs(writer, text, job, shape, ids, drawn)
                tell(first + row, text, True)
                texts.append(text)
        return texts

    def text_of(self, segments, ids, job):
        """(the Text of the ids of a text that goes on, or of its beginning; its segments)"""
        given = [segment for segment in segments if not segment.is_gap]
        begin = sum(segment.size for segment in given)
        written = ids[begin : begin + job.max_tokens]
        end = self.tokenizer.end_id
        is_ended = end is not None and end in written
        n = written.index(end) if is_ended else len(written)
        shape = [*given, Gap(n)] if n else given
        parts = to_texts(shape, ids[: begin + n], self.tokenizer) if n else []
        parts = parts or [(str(segment), False) for segment in given]
        return Text(parts, n, is_ended), shape

    def add_logprobs(self, writer, text, job, segments, ids, drawn):
        """Add the log-probabilities of its tokens to a Text of these ids.

        With `echo` each is given the tokens before it: their sums are log p, as harnesses that
        score texts need it. Else each is given all others.
        """
        if job.logprobs is None:
            return
        sizes = [segment.size for segment in segments]
        n = sum(sizes)
        is_given = [not segment.is_gap for segment in segments for _ in range(segment.size)]
        first = 0 if job.echo else [*is_given, False].index(False)
        kept = [i for i in range(first, n) if ids[i] != self.tokenizer.end_id]
        if not kept:
            return
        how = dict(k=job.logprobs, n=n, first=first, given_all=not job.echo)
        text.logprobs = sample.token_logprobs(writer.model, self.tokenizer, ids, drawn, **how)
        begins = begins_of(self.tokenizer.pieces(ids[:n]), sizes, text.parts)
        text.begins = [*(begins[i] for i in kept), begins[kept[-1] + 1]]


def as_tuple(prompt):
    return prompt if isinstance(prompt, tuple) else (prompt,)


def has_gap(segments):
    return any(segment.is_gap for segment in segments)


def is_searched(job, segments):
    """Whether gaps get their likeliest fills, in place of a draw."""
    return not job.goes_on and (not job.watch or job.rank or templates.has_open(segments))


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


def tell_from(emit, first, index, *text):
    return emit(first + index, *text)


# ---- For the page: it gets dicts, which support/web/assets/live.js reads
def show(writer, segments, job, emit):
    """Write a text; emit what each network call draws, and at last the whole film of it."""
    began = time.monotonic()
    mask = writer.model.mask_id
    (rows,) = writer.batches(segments, 1, job.kind == "template")
    ids = torch.tensor(to_ids(segments, writer.tokenizer, mask), dtype=torch.int64)
    film = HtmlRecorder(writer.tokenizer, ids, mask)
    n = length_without_end(rows.x[0].tolist(), writer.tokenizer)
    tokens, given = film.shown()
    steps = sum(chunk.steps for chunk in rows.chunks())
    emit(0, dict(tokens=tokens[:n], given=given[:n], steps=steps))
    facts = dict(calls=0, seconds=0.0)
    for step in rows.steps():
        facts = dict(calls=int(step.calls[0]), seconds=time.monotonic() - began)
        if film.add(step, 0):
            emit(0, facts | dict(frame=film.newest()))
    emit(0, dict(done=True, sample=facts | film.page(rows.x[0].tolist())))


def show_fills(writer, segments, job, emit):
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
        dict(share=q, p=one.p, logp=one.logp) | still(writer.tokenizer, one)
        for one, q in zip(found, p)
    ]
    about = dict(proven=found.proven, compares_lengths=found.compares_lengths)
    about |= dict(bound=max(found.bound, -1e300), tried=found.sequences, seconds=found.seconds)
    emit(0, dict(done=True, fills=shown) | about)


def still(tokenizer, one):
    """A filling.Candidate as a film of one frame."""
    tokens = tokenizer.pieces(one.ids)
    frame = [
        [i, tokens[i], round(math.exp(logp), 4), []]
        for i, logp in enumerate(one.drawn)
        if logp is not None
    ]
    given = [logp is None for logp in one.drawn]
    return dict(tokens=tokens, given=given, frames=[frame])


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
    if config.chat_column:
        tokenizer.chat.run = Renderer()
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


async def serve(server, options, sock):
    """Answer until SIGTERM, SIGINT or SIGHUP; then finish what has begun, within --drain."""
    uvicorn = environment.optional("uvicorn", "serve.py")
    config = uvicorn.Config(
        app.make_app(server),
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",  # nothing that a client has sent
        access_log=False,
        server_header=False,
        limit_concurrency=options.max_connections,
        timeout_graceful_shutdown=int(END_SECONDS) + 1,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    host = uvicorn.Server(config)
    stop = asyncio.Event()
    running = asyncio.ensure_future(host.serve([sock]))
    while not host.started and not running.done():
        await asyncio.sleep(0.01)
    on_signals(stop.set)  # after uvicorn has set its own
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
    for package in ("pydantic", "starlette", "uvicorn", "greenlet"):
        environment.optional(package, "serve.py")
    sock = listen(options)
    writer, name, folders, config, device = load(options)
    checkpoint_score.introduce(folders, config, writer.tokenizer.vocab_size, options.out_dir)
    limits = requests.Limits(
        options.max_prompts, options.max_n, options.max_tokens, options.max_gap
    )
    computes = engine.Engine(device, options.max_active, options.max_waiting)
    created = int((folders[0] / "config.json").stat().st_mtime)
    server = app.Server(computes, writer.prepare, writer.write, name, created, limits)
    server.host = options.host
    server.api_key = options.api_key
    server.origins = origins(options)
    server.max_body = options.max_body
    server.time_limit = options.time_limit
    about = f"{name}: {config.n_layer} layers x {config.n_embd}, context {config.block_size}"
    device_name = "GPU" if device.type == "cuda" else device.type.upper()
    has_key = bool(options.api_key)
    server.page = page(
        writer.model,
        writer.filler,
        writer.tokenizer,
        about,
        device_name,
        has_key,
        options.max_tokens,
    )
    engine.start(computes)
    asyncio.run(serve(server, options, sock))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
