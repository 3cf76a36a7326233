"""Serve a trained model over HTTP: OpenAI's completions with a suffix, llama.cpp's infill.

    python serve.py --out_dir=out                    # http://127.0.0.1:8000
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "ROMEO:", "max_tokens": 80}'

Many clients are computed together: each request runs what sample.py runs, and the network calls of
all that wait are one call (support/serving/engine.py). The same seed gives the text that sample.py
gives, whatever else is computed. docs/serving.md says what each field means for a model that writes
everywhere at once. Needs the packages pydantic, starlette, uvicorn and greenlet.
"""

from nanomdlm.support.cli import entry, terminal

entry.start(__name__)

import asyncio
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import mdlm
import sample
from nanomdlm.support.cli import environment, products
from nanomdlm.support.cli.devices import load_in, pick_device
from nanomdlm.support.cli.settings import Bounds, Context, Reads, names_of, shown
from nanomdlm.support.cli.settings import parse as parse_settings
from nanomdlm.support.errors import UserError
from nanomdlm.support.infill.ensemble import read_newest
from nanomdlm.support.run import checkpoint_score
from nanomdlm.support.run.checkpoint import default_run

KEY = "MDLM_API_KEY"  # the environment variable in place of --api_key
END_SECONDS = 5.0  # after --drain, in which what is cut short is told so
HEADER_BYTES = 1 << 15


Seconds = Annotated[float, Bounds(0, 24 * 3600)]
Port = Annotated[int, Bounds(0, 65535)]
Tokens = Annotated[int, Bounds(1, 1 << 20)]
Some = Annotated[int, Bounds(1, 4096)]


@dataclass
class Place:
    """What is served, and where."""

    out_dir: Reads = ""  # run, or checkpoint; A,B: their mean (default: out, or what ships)
    host: str = "127.0.0.1"  # address to listen on; beyond this machine it needs --api_key
    port: Port = 8000  # port to listen on (0: any that is free)
    api_key: str = ""  # key that clients must send (default: the variable MDLM_API_KEY, if set)
    origin: str = ""  # sites whose pages may use it, as https://example.org,https://...
    device: str = "auto"  # cpu, cuda, cuda:1 or mps; auto: a GPU if there is one
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of weights; auto: bfloat16 on a GPU
    trust_remote_code: bool = False  # allow custom code from the checkpoint
    drain: Seconds = 10.0  # after SIGTERM, seconds to finish what has begun


@dataclass
class RequestLimits:
    """Per-request limits."""

    max_tokens: Tokens = 2048  # tokens written after a prompt
    max_prompt: Tokens = 8192  # tokens of a prompt
    max_gap: Context = 0  # longest fill of a gap, in tokens (0: 16; 32 with objective ar)
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

    @property
    def origins(self):
        return [part.strip().lower() for part in self.origin.split(",") if part.strip()]


# ---- The process
def check(options):
    """Raise UserError for flags that contradict each other."""
    if options.host not in products.serving().app.LOOPBACK and not options.api_key:
        what = f"--host={options.host} can be reached from other machines"
        raise UserError(f"{what}; give --api_key=KEY, or leave --host out")
    for origin in options.origins:
        scheme, _, rest = origin.partition("://")
        if scheme not in ("http", "https") or not rest or "/" in rest:
            what = f"--origin={shown(origin)} is no origin"
            raise UserError(f"{what}; give it as https://example.org, without a path")
    if not options.api_key.isascii() or any(c.isspace() for c in options.api_key):
        raise UserError("--api_key has characters that no header can have; give ASCII, no spaces")


def load(options):
    """(Writer, name, folders, config, device)"""
    device = pick_device(options.device)
    run = default_run(options.out_dir)
    how = dict(device=device, trust_remote_code=options.trust_remote_code)
    read = partial(load_in, options.dtype, mdlm.load, **how)
    folders, (model, tokenizer, config) = read_newest(run, read)
    filler = model
    if config.infill_share:  # learned to fill gaps too, by another View
        filler = read(folders[0], whole=True)[0]
        for name, p in model.named_parameters():  # the same numbers, once
            owner, _, key = name.rpartition(".")
            setattr(filler.get_submodule(owner), key, p)
    if config.chat_column:
        tokenizer.chat.run = products.serving().rendering.Renderer()
    name = ",".join(Path(part).resolve().name for part in names_of(run))
    writer = products.serving().writing.Writer(
        model, filler, tokenizer, sampler, options.max_prompt
    )
    return writer, name, folders, config, device


def sampler(model, tokenizer, settings):
    """The sample.Writer of a dict of settings."""
    resolved = sample.resolve(sample.SamplerSettings(**settings), model)
    return sample.Writer(model, tokenizer, resolved)


def bind(options):
    """A socket of the address, which is taken before the model is loaded; UserError if it cannot
    be used."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    if os.name != "nt":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((options.host, options.port))
    except OSError as e:
        refuse(options, e)
    sock.setblocking(False)
    return sock


def refuse(options, e):
    """Raise UserError: the address cannot be used, as the OSError `e` says."""
    where = f"{options.host}:{options.port}"
    fix = "give another --port (0: any that is free) or --host"
    raise UserError(f"{where} cannot be listened on ({e.strerror or e}); {fix}") from None


async def serve(server, options, sock):
    """Answer until SIGTERM, SIGINT or SIGHUP; then finish what has begun, within --drain."""
    uvicorn = environment.optional("uvicorn", "serve.py")
    config = uvicorn.Config(
        products.serving().app.make_app(server),
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",  # nothing that a client has sent
        access_log=False,
        server_header=False,
        limit_concurrency=options.max_connections + 1,  # uvicorn refuses from this many on
        timeout_graceful_shutdown=int(END_SECONDS) + 1,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    host = uvicorn.Server(config)
    try:
        sock.listen(config.backlog)  # another program may have begun to, since it was bound
    except OSError as e:
        refuse(options, e)
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
    sock = bind(options)
    writer, name, folders, config, device = load(options)
    checkpoint_score.introduce(folders, options.out_dir)
    parts = products.serving()
    engine = parts.engine.Engine(device, options.max_active, options.max_waiting)
    created = int((folders[0] / "config.json").stat().st_mtime)
    server = parts.app.Server(engine, writer, name, created, options)
    about = f"{name}: {config.n_layer} layers x {config.n_embd}, context {config.block_size}"
    device_name = "GPU" if device.type == "cuda" else device.type.upper()
    server.page = parts.served_page.page(writer, about, device_name, options)
    thread = parts.engine.start(engine)
    asyncio.run(serve(server, options, sock))
    thread.join(END_SECONDS)  # Python must not end while it computes
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
