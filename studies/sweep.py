"""Train a run for each combination of some settings and seeds, and compare them.

    python studies/sweep.py --out=sweep muon_lr=0.01,0.02 seed=0,1,2 -- --max_steps=500

What follows `--` are flags of mdlm.py for all runs. A run that is there already is continued, or
left as it is when it is finished, so the same command goes on after a crash. At the end
`eval.py --compare` draws the curves of all, and groups those that differ in the seed alone.
"""

import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # python studies/sweep.py, from anywhere

from nanomdlm.support.cli import entry

entry.start(__name__)

from nanomdlm.support.errors import UserError


def python(*command):
    """Run a program of the project; UserError if it fails."""
    command = [str(part) for part in command]
    if subprocess.run([sys.executable, str(ROOT / command[0]), *command[1:]]).returncode:
        raise UserError(f"this failed: python {' '.join(command)}")


def main(argv):
    own, flags = argv, []
    if "--" in argv:
        own, flags = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    out = Path("sweep")
    values = {}
    for word in own:
        name, is_setting, several = word.partition("=")
        if name == "--out":
            out = Path(several)
        elif is_setting and not name.startswith("-"):
            values[name] = several.split(",")
        else:
            raise UserError(f"{word!r} is not NAME=VALUE,VALUE,...")
    found = []
    for chosen in itertools.product(*values.values()):
        settings = [f"{name}={value}" for name, value in zip(values, chosen)]
        run = out / "_".join(settings or ["run"])
        given = [f"--{setting}" for setting in settings]
        python("mdlm.py", *flags, *given, f"--out_dir={run}", "--resume=auto")
        found.append(run)
    if len(found) > 1:
        python("eval.py", "--compare=" + ",".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main, sys.argv[1:]))
