"""What a server has done, as text that Prometheus reads (its exposition format, version 0.0.4)."""

import time
from collections import Counter

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)  # seconds


class Metrics:
    """Counts requests and what was written. All methods are called from one thread."""

    def __init__(self):
        self.started = time.time()
        self.requests = Counter()  # (path, status) -> how many
        self.within = Counter()  # (path, bucket) -> requests that took no longer
        self.seconds = Counter()  # path -> their sum
        self.prompt_tokens = 0
        self.tokens = 0  # that were written

    def count(self, path, status, seconds):
        """A request that ended. path: one of the server's, as clients may ask for any."""
        self.requests[path, status] += 1
        self.seconds[path] += seconds
        for bucket in BUCKETS:
            if seconds <= bucket:
                self.within[path, bucket] += 1

    def text(self, engine):
        """All of it, with what an Engine has counted."""
        lines = []

        def add(name, kind, meaning, values):
            lines.append(f"# HELP mdlm_{name} {meaning}")
            lines.append(f"# TYPE mdlm_{name} {kind}")
            lines.extend(f"mdlm_{name}{labels} {value:.10g}" for labels, value in values)

        def one(name, kind, meaning, value):
            add(name, kind, meaning, [("", value)])

        requests = [
            (f'{{path="{path}",status="{status}"}}', n)
            for (path, status), n in sorted(self.requests.items())
        ]
        add("requests_total", "counter", "Requests that ended, by path and HTTP status.", requests)
        lines += self.histogram()
        counts = engine.counts
        waiting, active = engine.waiting()
        one("prompt_tokens_total", "counter", "Tokens of given text.", self.prompt_tokens)
        one("tokens_total", "counter", "Tokens written.", self.tokens)
        one("calls_total", "counter", "Network calls.", counts.calls)
        one("merged_calls_total", "counter", "Calls of requests that these were.", counts.views)
        one("rows_total", "counter", "Sequences in network calls.", counts.sequences)
        one("network_tokens_total", "counter", "Tokens in network calls.", counts.tokens)
        one("network_seconds_total", "counter", "Seconds in network calls.", counts.seconds)
        one("busy_seconds_total", "counter", "Seconds of work.", counts.busy_seconds)
        one("given_up_total", "counter", "Requests whose clients had left.", counts.given_up)
        one("shed_total", "counter", "Calls taken apart as memory was full.", counts.shed)
        one("waiting", "gauge", "Requests that have not begun.", waiting)
        one("active", "gauge", "Requests that are computed.", active)
        one("start_time_seconds", "gauge", "When the server began, Unix time.", self.started)
        return "\n".join(lines) + "\n"

    def histogram(self):
        name = "mdlm_request_seconds"
        lines = [f"# HELP {name} Seconds of requests.", f"# TYPE {name} histogram"]
        for path in sorted(self.seconds):
            total = sum(n for (other, _), n in self.requests.items() if other == path)
            for bucket in BUCKETS:
                n = self.within[path, bucket]
                lines.append(f'{name}_bucket{{path="{path}",le="{bucket}"}} {n}')
            lines.append(f'{name}_bucket{{path="{path}",le="+Inf"}} {total}')
            lines.append(f'{name}_sum{{path="{path}"}} {self.seconds[path]:.10g}')
            lines.append(f'{name}_count{{path="{path}"}} {total}')
        return lines
