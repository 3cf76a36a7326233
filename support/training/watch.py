"""Says if a file of the data changes while a run trains on it: its size or its time of change."""

import os
import time

from support.data import sources
from support.errors import RankError
from support.terminal import warn
from support.training import runs

EVERY = 1.0  # seconds between looks at the files of the source, which may be many


def stamp(path):
    """(size, time of change) of a file; (0, 0) if it is gone."""
    try:
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    except OSError:
        return 0, 0


class Watch:
    """The files that a run learns from: what it prepared, and what it prepared that from."""

    def __init__(self, run):
        self.run = run
        folder = runs.data_folder(run.config)
        self.ids = {folder / name: stamp(folder / name) for name in sources.NAMES}
        self.source = {}
        if not sources.is_ids(run.config.data):
            self.source = {path: stamp(path) for path in sources.files_of(run.config.data)}
        self.looked = time.monotonic()
        self.said = set()

    def check(self):
        """Warn of what has changed, once of each; raise RankError if ids that are read are gone.

        Reading a file that is mapped into memory beyond its new end would kill the process.
        """
        for path, (size, _) in self.changed(self.ids):
            now, _ = stamp(path)
            is_mapped = self.run.corpus.train.device.type == "cpu" and os.path.exists(path)
            if is_mapped and now < size:
                advice = runs.go_on(self.run, "its former content there")
                raise RankError(f"{path} was cut to {now} bytes while the run reads it. {advice}")
            what = "the run may read either content, and --resume will refuse it"
            self.say(path, f"{what}; restore it")
        if time.monotonic() - self.looked > EVERY:
            self.looked = time.monotonic()
            for path, _ in self.changed(self.source):
                self.say(path, "the run goes on with what it prepared at its start")

    def changed(self, files):
        """[(path, former stamp)] of the files whose stamp has changed."""
        return [item for item in files.items() if stamp(item[0]) != item[1]]

    def say(self, path, what):
        if path not in self.said:
            self.said.add(path)
            warn(f"{path} has changed since the run began: {what}")
