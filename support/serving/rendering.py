"""Runs chat templates in a process of its own, which is ended if one takes too long.

A template comes with a checkpoint, and may have no end, or take all memory. This file is also the
program of that process, which answers lines of JSON: [messages, template, tokens].
"""

import contextlib
import json
import subprocess
import sys
import threading

from nanomdlm.support.cli.environment import ROOT
from nanomdlm.support.data.chat import run
from nanomdlm.support.errors import UserError

SECONDS = 5.0  # of a template
START_SECONDS = 60.0  # until the process is ready: it imports transformers
MEMORY = 4 << 30  # bytes; not every system can limit them


class Renderer:
    """A ChatTemplate's `run`."""

    def __init__(self):
        self.lock = threading.Lock()
        self.process = None

    def __call__(self, messages, template, tokens):
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                self.start()
            line = self.ask(json.dumps([messages, template, tokens]), SECONDS)
            if not line:
                self.process.kill()
                self.process.wait()
        if not line:
            what = f"the chat template takes more than {SECONDS:g} s, or too much memory"
            raise UserError(f"{what}; use /v1/completions")
        text, error = json.loads(line)
        if error:
            raise ValueError(error)
        return text

    def start(self):
        code = "from nanomdlm.support.serving.rendering import main; main()"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, text=True, encoding="utf-8", **pipes
        )
        if not self.ask("", START_SECONDS):
            raise ValueError("its process does not start")

    def ask(self, line, seconds):
        """The line that answers a line; "" if the process ends, or does not answer in time."""
        process = self.process
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline()
        except OSError:  # it has ended
            return ""
        finally:
            timer.cancel()


def main():
    import transformers.utils.chat_template_utils  # noqa: F401 (slow, so before the first request)

    with contextlib.suppress(ImportError, OSError, ValueError):  # another system, a lower limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        text = error = ""
        if line.strip():
            try:
                text = run(*json.loads(line))
            except Exception as e:  # whatever a program raises
                error = " ".join(str(e).split())[:200] or type(e).__name__
        print(json.dumps([text, error]), flush=True)
