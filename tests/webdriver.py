"""A headless Chromium for the tests, by the WebDriver protocol (w3.org/TR/webdriver2)."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request

import pytest

CHROME = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
KEYS = dict(left="\ue012", up="\ue013", right="\ue014", down="\ue015", end="\ue010", home="\ue011",
            escape="\ue00c", tab="\ue004", space=" ", control="\ue009", enter="\ue007")  # fmt: skip


class Browser:
    """A headless Chromium; every command is one HTTP request to chromedriver."""

    def __init__(self, *flags):
        driver = shutil.which("chromedriver")
        if not (driver and CHROME):
            pytest.skip(
                "no chromium and chromedriver; Debian: apt install chromium chromium-driver"
            )
        self.http = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # for what it leaves
        env = {**os.environ, "TMPDIR": self.folder.name}
        self.process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, text=True, env=env
        )
        lines = iter(self.process.stdout.readline, "")
        port = next(m[1] for line in lines if (m := re.search(r"successfully on port (\d+)", line)))
        self.url = f"http://127.0.0.1:{port}/session"
        options = dict(
            binary=CHROME, args=["--headless=new", "--no-sandbox", *(flags or ["--disable-gpu"])]
        )
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self.url += "/" + self.call("", capabilities=dict(alwaysMatch=wanted))["sessionId"]
        except OSError:
            self.end()
            raise

    def call(self, command, method="POST", **body):
        request = urllib.request.Request(self.url + command, method=method)
        if method == "POST":
            request.data = json.dumps(body).encode()
        with self.http.open(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def js(self, code):
        return self.call("/execute/sync", script=f"return {code}", args=[])

    def wait(self, condition, seconds=60):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, f"{condition}: {self.call('/se/log', type='browser')}"
            time.sleep(0.02)

    def cdp(self, command, **params):
        return self.call("/goog/cdp/execute", cmd=command, params=params)

    def type(self, text):
        strokes = [dict(type=t, value=c) for c in text for t in ("keyDown", "keyUp")]
        self.call("/actions", actions=[dict(type="key", id="keyboard", actions=strokes)])

    def chord(self, *names):
        """Press keys together."""
        strokes = [dict(type="keyDown", value=KEYS[name]) for name in names]
        strokes += [dict(type="keyUp", value=KEYS[name]) for name in reversed(names)]
        self.call("/actions", actions=[dict(type="key", id="keyboard", actions=strokes)])

    def emulate(self, **features):
        features = [dict(name=k.replace("_", "-"), value=v) for k, v in features.items()]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def size(self, width, height):
        metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.cdp("Emulation.setDeviceMetricsOverride", **metrics)

    def press(self, *names):
        self.type([KEYS[name] for name in names])

    def mouse(self, selector, dx=0, click=False):
        """Move the mouse to the middle of an element, and dx pixels to the right of it."""
        box = self.js(
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
        )
        x, y = round(box["x"] + box["width"] / 2 + dx), round(box["y"] + box["height"] / 2)
        moves = [dict(type="pointerMove", duration=0, x=x, y=y)]
        if click:
            moves += [dict(type="pointerDown", button=0), dict(type="pointerUp", button=0)]
        pointer = dict(
            type="pointer", id="mouse", parameters=dict(pointerType="mouse"), actions=moves
        )
        self.call("/actions", actions=[pointer])

    def close(self):
        with contextlib.suppress(OSError):
            self.call("", method="DELETE")
        self.end()

    def end(self):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()
        self.folder.cleanup()
