"""How fast serve.py answers many clients, whether it answers right, and whether its memory grows.

    python studies/serving.py --mode=speed --out_dir=out-blocks    # 1, 8, 32 clients
    python studies/serving.py --mode=load --clients=64 --seconds=120
    python studies/serving.py --mode=memory --requests=10000

speed: the same requests one after another and by many clients, in turns, and their ratio. load:
clients with mixed requests, some of which leave; every answer must be the text that the sampler
writes alone. memory: the server's resident memory along many requests. Each prints a table for
results/serving.md. Needs the package httpx.
"""

import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanomdlm.support.cli import entry

entry.start(__name__)

import serve
from nanomdlm.support import abilities
from nanomdlm.support.cli import environment
from nanomdlm.support.cli.settings import Amount, Count, Natural, Reads, parse
from nanomdlm.support.serving import answers, requests


@dataclass
class Options:
    out_dir: Reads = ""  # run or checkpoint folder (default: out, or what ships)
    mode: Literal["speed", "load", "memory"] = "speed"  # what to measure
    clients: Count = 64  # clients of --mode=load
    seconds: Amount = 120.0  # how long --mode=load lasts
    requests: Natural = 0  # requests of --mode=memory (0: 10000), or of each turn of speed (0: 32)
    turns: Count = 3  # turns of --mode=speed
    max_tokens: Count = 64  # tokens of each request of --mode=speed


@contextmanager
def serving(options):
    """A server: (its URL, its process)."""
    command = [sys.executable, str(ROOT / "serve.py"), "--port=0", "--device=cpu"]
    command += [f"--out_dir={options.out_dir}"] * bool(options.out_dir)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    try:
        for line in process.stdout:
            if found := re.search(r"http://[^;]+", line):
                break
        yield found[0], process
    finally:
        process.terminate()
        process.wait()


def print_row(*cells):
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*names):
    print_row(*names)
    print_row(*["---"] * len(names))


async def post(client, body, path="/v1/completions"):
    """(the answer, seconds)"""
    began = time.monotonic()
    r = await client.post(path, json=body)
    return r, time.monotonic() - began


async def by_clients(url, n, bodies):
    """Seconds in which n clients have all bodies answered, each one after another."""
    httpx = environment.optional("httpx", "studies/serving.py")
    todo = iter(bodies)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def work():
            for body in todo:
                r, _ = await post(client, body)
                r.raise_for_status()

        began = time.monotonic()
        await asyncio.gather(*(work() for _ in range(n)))
        return time.monotonic() - began


def measure_speed(options):
    n = options.requests or 32
    bodies = [dict(prompt="", max_tokens=options.max_tokens, seed=i) for i in range(n)]
    seconds = {1: [], 8: [], 32: []}
    with serving(options) as (url, _):
        asyncio.run(by_clients(url, 1, bodies[:2]))
        for _ in range(options.turns):
            for clients, measured in seconds.items():
                measured.append(asyncio.run(by_clients(url, clients, bodies)))
    print_head("clients", "requests", "seconds, median", "least", "times as fast as one client")
    for clients, measured in seconds.items():
        # Of each turn, as other work on the machine changes from turn to turn.
        faster = statistics.median(one / each for one, each in zip(seconds[1], measured))
        median = statistics.median(measured)
        print_row(clients, n, f"{median:.2f}", f"{min(measured):.2f}", f"{faster:.2f}")


def mixed_bodies(writer):
    """Different requests that the model can answer."""
    rng = random.Random(0)
    bodies = []
    for i in range(24):
        body = dict(prompt="", max_tokens=rng.choice((8, 32, 100)), seed=i, n=rng.choice((1, 1, 3)))
        body |= rng.choice(
            ({}, dict(temperature=0.7), dict(steps=16), dict(stop=["e"]), dict(top_p=0.9))
        )
        bodies.append(body)
    if abilities.fills_gaps(writer.filler):
        mark = writer.tokenizer.decode([0])
        bodies += [dict(prompt="", suffix=mark, max_tokens=3, seed=i) for i in range(4)]
    return bodies


def alone(writer, body):
    """What the server must answer: the texts that are written without a server."""
    job = requests.read(requests.Completion, json.dumps(body), serve.Options())
    prepared, _ = writer.prepare(job)
    texts = writer.write(job, prepared, lambda model: model, lambda *_: False)
    return [answers.show(text, job).text for text in texts.values()]


async def load(url, options, bodies, wanted):
    httpx = environment.optional("httpx", "studies/serving.py")
    until = time.monotonic() + options.seconds
    seconds = []
    problems = []
    left = 0

    async def client(number):
        nonlocal left
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=600) as connection:
            while time.monotonic() < until:
                i = rng.randrange(len(bodies))
                try:
                    if rng.random() < 0.05:  # it does not wait for the answer
                        left += 1
                        await asyncio.wait_for(post(connection, bodies[i]), 0.05)
                        continue
                    if rng.random() < 0.3:
                        texts, took = await streamed(connection, bodies[i])
                    else:
                        r, took = await post(connection, bodies[i])
                        texts = [choice["text"] for choice in r.json()["choices"]]
                    seconds.append(took)
                    if texts != wanted[i]:
                        problems.append(f"request {i} got another text")
                except asyncio.TimeoutError:
                    pass
                except Exception as e:
                    problems.append(f"request {i}: {e!r}")

    await asyncio.gather(*(client(i) for i in range(options.clients)))
    return seconds, problems, left


async def streamed(connection, body):
    began = time.monotonic()
    texts = [""] * body.get("n", 1)
    async with connection.stream("POST", "/v1/completions", json=body | dict(stream=True)) as r:
        async for line in r.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    return texts, time.monotonic() - began


def measure_load(options):
    writer, *_ = serve.load(serve.Options(out_dir=options.out_dir, device="cpu"))
    bodies = mixed_bodies(writer)
    wanted = [alone(writer, body) for body in bodies]
    with serving(options) as (url, process):
        seconds, problems, left = asyncio.run(load(url, options, bodies, wanted))
        memory = resident(process)
    seconds.sort()
    head = ("clients", "seconds", "answers", "clients that left", "wrong, lost or failed")
    print_head(*head, "seconds of an answer, median", "95th percentile", "resident MB")
    times = ["", ""]
    if seconds:
        times = [f"{seconds[int(q * len(seconds))]:.2f}" for q in (0.5, 0.95)]
    counts = (options.clients, f"{options.seconds:g}", len(seconds), left, len(problems))
    print_row(*counts, *times, f"{memory:.0f}")
    for problem in problems[:10]:
        print(problem)
    return 1 if problems or not seconds else 0


def resident(process):
    """Resident memory of a process in MB (Linux)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


def measure_memory(options):
    n = options.requests or 10_000
    body = dict(prompt="", max_tokens=4, steps=2)
    part = -(-n // 10)
    with serving(options) as (url, process):
        print_head("requests", "resident MB")
        print_row(0, f"{resident(process):.0f}")
        for done in range(0, n, part):
            numbers = range(done, min(done + part, n))
            bodies = [body | dict(seed=i, stream=i % 3 == 0) for i in numbers]
            asyncio.run(by_clients(url, 8, bodies))
            print_row(numbers.stop, f"{resident(process):.0f}")


def main(argv):
    options = Options(**parse(Options, argv, __doc__))
    measures = dict(speed=measure_speed, load=measure_load, memory=measure_memory)
    return measures[options.mode](options) or 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
