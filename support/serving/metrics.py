"""What a server has done, as text that Prometheus reads (its exposition format, version 0.0.4)."""

import time
from collections import Counter
from dataclasses import asdict

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
        waiting, active = engine.waiting()
        totals = dict(prompt_tokens=self.prompt_tokens, tokens=self.tokens) | asdict(engine.counts)
        now = dict(waiting=waiting, active=active, start_time_seconds=self.started)
        lines = ["# TYPE mdlm_requests_total counter"]
        for (path, status), n in sorted(self.requests.items()):
            lines.append(f'mdlm_requests_total{{path="{path}",status="{status}"}} {n}')
        lines += self.histogram()
        for name, value in totals.items():
            lines += [f"# TYPE mdlm_{name}_total counter", f"mdlm_{name}_total {value:.10g}"]
        for name, value in now.items():
            lines += [f"# TYPE mdlm_{name} gauge", f"mdlm_{name} {value:.10g}"]
        return "\n".join(lines) + "\n"

    def histogram(self):
        name = "mdlm_request_seconds"
        lines = [f"# TYPE {name} histogram"]
        for path in sorted(self.seconds):
            total = sum(n for (other, _), n in self.requests.items() if other == path)
            for bucket in BUCKETS:
                n = self.within[path, bucket]
                lines.append(f'{name}_bucket{{path="{path}",le="{bucket}"}} {n}')
            lines.append(f'{name}_bucket{{path="{path}",le="+Inf"}} {total}')
            lines.append(f'{name}_sum{{path="{path}"}} {self.seconds[path]:.10g}')
            lines.append(f'{name}_count{{path="{path}"}} {total}')
        return lines
