"""What the four programs share: refusals, flags from a dataclass, and folders of files never half-written.

None of this is about diffusion: read mdlm.py first. A checkpoint is a folder out/step-N/ with a manifest of
sizes and sha256. It is written under a temporary name, synced and renamed, so it is complete or not there,
and renamed again before it is removed; `out/latest` names the last one; the last two are kept. Weights are
safetensors and the rest is JSON: nothing is ever unpickled.
"""

import argparse
import contextlib
import dataclasses
import difflib
import hashlib
import http.client
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from pathlib import Path


class Refusal(ValueError):
    """A user's mistake, in one sentence: what was given, what is accepted, what to do. The exit code is 2."""


def run(main, argv):
    """Run a program's main(argv), return its exit code; a Refusal is one sentence on stderr and code 2."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode))
        with contextlib.suppress(AttributeError):  # where the terminal has no "█" it shows "?"
            getattr(sys, name).reconfigure(errors="replace" if mode == "w" else None)
    try:
        code = main(argv)
        sys.stdout.flush()  # here, where a full disk is caught
        return code
    except Refusal as e:
        warn(f"{Path(sys.argv[0]).name}: {e}")
        for folder in MADE:
            with contextlib.suppress(OSError):
                folder.rmdir()  # if nothing came into it
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read standard output has seen enough (| head)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains again when it ends
        return 141
    except OSError as e:
        warn(f"{Path(sys.argv[0]).name}: {e.strerror or e}: {e.filename or 'standard output'}; "
             "check that path, and the room there")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 2


def warn(message):
    if os.environ.get("RANK", "0") == "0":  # several ranks say the same thing: once is enough
        print(message, file=sys.stderr)


# ------------------------------------------------------------------------------------------------------------
# Flags


def opt(default, meaning, *choices, bounds=None):
    """A dataclass field and flag with this default, line of help, and choices or (low, high) bounds."""
    return dataclasses.field(default=default,
                             metadata={"help": meaning, "choices": choices, "bounds": bounds})


def check_fields(config):
    """Refuse a dataclass of such fields with a value of a wrong type, no choice, or out of bounds."""
    for f in dataclasses.fields(config):
        value, choices, bounds = getattr(config, f.name), f.metadata["choices"], f.metadata["bounds"]
        if (type(value) not in ((int, float) if f.type is float else (f.type,))
                or (choices and value not in choices)):
            raise Refusal(f"--{f.name}={str(value)[:40]!r} is not accepted; "
                          f"give {', '.join(choices) or f.type.__name__}")
        if bounds and not bounds[0] <= value <= bounds[1]:
            raise Refusal(f"--{f.name}={value} is not accepted; "
                          f"give a number from {bounds[0]} to {bounds[1]}")


def read_fields(cls, path, check):
    """The dataclass in a config.json; a missing, unknown or unacceptable (by check) setting is refused."""
    d = read_json(path, "config")
    if (d.get("format"), d.get("version")) != ("mdlm", 1) or not isinstance(d.get("config"), dict):
        raise Refusal(f"{path} has version {d.get('version')!r} of format {d.get('format')!r}; "
                      "this program reads version 1 of mdlm")
    for name in sorted({f.name for f in dataclasses.fields(cls)} ^ d["config"].keys()):
        raise Refusal(f"{path} is no config of this version: the setting {name} is unknown or missing; "
                      "use the version that wrote it, or train anew")
    config = cls(**d["config"])
    check(config)
    return config


def parse_bool(text):
    if text.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        return text.lower() in ("true", "1", "yes", "on")
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            flag = unknown[1].split("=")[0]
            near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.0)[0]
            message = f"there is no flag {flag}; the nearest is {near} (--help lists all)"
        raise Refusal(message)


def parse_flags(fields_of, argv, description, epilog=""):
    """The flags that were given, as a dict; every one is a field of the dataclass `fields_of`."""
    parser = Parser(description=description, allow_abbrev=False, epilog=epilog,
                    argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in dataclasses.fields(fields_of):
        if f.type is bool:
            kind = dict(type=parse_bool, nargs="?", const=True, metavar="BOOL")
        else:
            kind = dict(type=f.type, choices=f.metadata["choices"] or None)
        text = f"{f.metadata['help']} (default: {f.default!r})".replace("%", "%%")
        parser.add_argument(f"--{f.name}", help=text, **kind)
    return vars(parser.parse_args(argv))


# ------------------------------------------------------------------------------------------------------------
# Files

TMP = ".mdlm-tmp-"  # begins the name of whatever is not complete yet


@contextlib.contextmanager
def writing(path):
    """Within, the system's refusal to write is a Refusal that names path."""
    try:
        yield
    except OSError as e:
        raise Refusal(f"{path} cannot be written ({e.strerror or e}); make room or use another --out_dir. "
                      "Complete checkpoints stay as they are, and --resume goes on from the last one") from e


@contextlib.contextmanager
def new_folder(parent):
    """Yield a temporary folder in `parent`, to be filled and renamed; if that fails it vanishes."""
    tmp = Path(tempfile.mkdtemp(dir=parent, prefix=TMP))
    try:
        os.chmod(tmp, 0o755)  # mkdtemp gives 0700
        yield tmp
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def write_atomically(path, content):
    """Write bytes under a temporary name, sync, rename: the name never holds half a file."""
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=TMP)
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(tmp, 0o644)  # mkstemp gives 0600
        os.replace(tmp, path)
    finally:
        Path(tmp).unlink(missing_ok=True)


def remove(path):
    """Remove a file, a link or a folder. A folder is renamed first: no final name ever holds half of it."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(TMP):
            remove(path.with_name(TMP + path.name))
            path = path.rename(path.with_name(TMP + path.name))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(out_dir):
    """Remove what a killed run left incomplete."""
    for stale in Path(out_dir).glob(f"{TMP}*"):
        remove(stale)


HELD = []  # the folder of the run in this process, locked: the system unlocks it, however the process ends
MADE = []  # what was not there before: a run that is refused at its start leaves nothing


def take(out_dir):
    """Make the folder of a run, writable and clean, and refuse one in which another process is training."""
    release()
    with writing(out_dir):
        if not out_dir.exists():
            MADE.append(out_dir)
        out_dir.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):  # Windows cannot lock a folder
            import fcntl
            HELD.append(os.open(out_dir, os.O_RDONLY))
            try:
                fcntl.flock(HELD[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                release()
                raise Refusal(f"--out_dir={out_dir} is in use: another run is training there; "
                              "stop it, or give another --out_dir") from None
            except OSError:  # some network file systems have no locks
                release()
        clean(out_dir)
        with new_folder(out_dir):
            pass  # it can be written


def release():
    """Another process may train in our folder now."""
    while HELD:
        os.close(HELD.pop())


def fetch(url, timeout, limit):
    """The bytes behind a url. Raises OSError if they are not there within timeout seconds or limit bytes."""
    def work():
        try:
            with urllib.request.urlopen(url, timeout=timeout) as response:
                while (chunk := response.read1(1 << 16)) and sum(map(len, chunks)) <= limit:
                    chunks.append(chunk)
            done.append(None)
        except (OSError, ValueError, http.client.HTTPException) as e:
            done.append(e)

    # In a thread: a name server that is silent, or a header that comes a byte at a time, has no time-out.
    chunks, done, worker = [], [], threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(timeout)
    if not done or sum(map(len, chunks)) > limit:
        raise OSError(f"not finished after {timeout:.0f} s or {limit} bytes")
    if done[0]:
        raise OSError(f"{done[0]!r}") from done[0]
    return b"".join(chunks)


def download(url, sha256, path, timeout=15.0, limit=1 << 22):
    """Fetch url to path unless the right file is there. Raises OSError if that cannot be done in time."""
    if path.exists() and sha256_of(path) == sha256:
        return
    content = fetch(url, timeout, limit)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise OSError("what arrived has the wrong checksum")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


SMALL = 1 << 26  # bytes of JSON that anybody needs


def read_small(path):
    """The text of a UTF-8 file of at most SMALL bytes. Raises OSError or ValueError for any other."""
    if not Path(path).is_file():
        raise FileNotFoundError("it is missing or no file")
    if Path(path).stat().st_size > SMALL:
        raise ValueError(f"it has more than {SMALL} bytes")
    return Path(path).read_text(encoding="utf-8")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_folder(folder):
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# ------------------------------------------------------------------------------------------------------------
# Checkpoints

MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors")
CHECKPOINT_FILES = (*MODEL_FILES, "state.json", "state.safetensors")  # the last two: to resume


def checkpoints(out_dir):
    """The checkpoint folders of a run: first the one that `latest` names, then by falling step.

    step-N.old is a step-N that was about to be replaced when its run was killed.
    """
    found = [p for p in Path(out_dir).glob("step-*") if re.fullmatch(r"step-\d{1,12}(\.old)?", p.name)]
    with contextlib.suppress(OSError, ValueError):
        latest = read_small(Path(out_dir) / "latest").strip()
        return sorted(found, key=lambda p: (p.name != latest, -number(p), p.name))
    return sorted(found, key=lambda p: (-number(p), p.name))


def number(checkpoint):
    return int(re.search(r"\d+", checkpoint.name)[0])


def write_checkpoint(out_dir, name, contents):
    """Write `contents` (name -> bytes) as out_dir/name, point `latest` to it, keep the last two; its path.

    Whenever the process is killed, the checkpoint that was last complete is there under a name of its own.
    """
    final, old = Path(out_dir) / name, Path(out_dir) / f"{name}.old"
    files = {n: dict(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for n, data in contents.items()}
    manifest = json.dumps(dict(format="mdlm", version=1, files=files), indent=1).encode()
    with writing(final):
        with new_folder(out_dir) as tmp:
            for n, data in (contents | {"manifest.json": manifest}).items():
                with open(tmp / n, "wb") as f:
                    f.write(data)
                    f.flush()
                    os.fsync(f.fileno())
            sync_folder(tmp)
            if final.exists():  # the same step once more, or a damaged one
                remove(old)
                os.rename(final, old)
            os.rename(tmp, final)
        sync_folder(out_dir)
        write_atomically(final.parent / "latest", name.encode())
        sync_folder(out_dir)
        earlier = (p for p in checkpoints(out_dir) if number(p) < number(final))
        before = max(earlier, key=lambda p: (number(p), p.suffix != ".old"), default=final)
        for other in checkpoints(out_dir):  # those behind it belong to a future that did not happen
            if other not in (final, before):
                remove(other)
    return final


def verify(folder):
    """Raise Refusal unless every file of a checkpoint has the size and the sha256 that its manifest names."""
    try:
        manifest = json.loads(read_small(folder / "manifest.json"))
        if (manifest["format"], manifest["version"]) != ("mdlm", 1):
            raise ValueError(f"it has version {manifest['version']!r}, this program reads version 1")
        for name in MODEL_FILES if set(manifest["files"]) == set(MODEL_FILES) else CHECKPOINT_FILES:
            wanted, size = manifest["files"][name], (folder / name).stat().st_size
            if size != wanted["size"]:
                raise ValueError(f"{name} has {size} bytes instead of {str(wanted['size'])[:20]}")
            if name.endswith(".json") and size > SMALL:
                raise ValueError(f"{name} has {size} bytes, more than {SMALL}")
            if sha256_of(folder / name) != wanted["sha256"]:
                raise ValueError(f"{name} does not have the checksum of the manifest")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        why = f"manifest.json lacks {e}" if isinstance(e, KeyError) else e
        raise Refusal(f"the checkpoint {folder} is damaged or incomplete: {why}") from e


def find_checkpoint(path):
    """A run or a checkpoint -> an intact checkpoint; a damaged one is named and the one before it is used."""
    path = Path(path)
    if (path / "manifest.json").exists():
        try:
            verify(path)
            return path
        except Refusal as e:
            raise Refusal(f"{e}; restore it from a copy, or give another checkpoint") from e
    for folder in checkpoints(path):
        try:
            verify(folder)
            return folder
        except Refusal as e:
            warn(f"{e}; trying the one before it")
    raise Refusal(f"{path} holds no intact checkpoint; train one with: python mdlm.py --out_dir={path}")


def read_json(path, what):
    """The JSON object in a file, or a Refusal that names it."""
    try:
        d = json.loads(read_small(path))
        if not isinstance(d, dict):
            raise ValueError("not an object")
        return d
    except (OSError, ValueError, RecursionError) as e:
        raise Refusal(f"{path} is no {what} of this program: {e}") from e


def read_tensors(path, expected=None):
    """A safetensors file of float32 as a dict; names and shapes must be those of `expected`, if given."""
    from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, "pt") as f:  # compared before any of it is read
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (f is no dict)
            found = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
            wanted = found if expected is None else {n: ("F32", list(t.shape)) for n, t in expected.items()}
            wrong = sorted(n for n in found | wanted if found.get(n) != wanted.get(n))
            if wrong:
                raise Refusal(f"{path} does not fit its config: "
                              f"{wrong[0]} is missing, unexpected or misshapen")
            return {name: f.get_tensor(name) for name in found}
    except (SafetensorError, OSError, KeyError, OverflowError, MemoryError) as e:
        raise Refusal(f"{path} is no safetensors file: {e}") from e


# ------------------------------------------------------------------------------------------------------------
# Several ranks

CONTROL = None  # their gloo group: messages of control travel there and never wait for a GPU
STORE = None  # where they found each other


def join_ranks():
    """(rank, number of ranks, rank on this machine) of this process; under torchrun it meets the others."""
    global CONTROL, STORE
    rank, world, local = (int(os.environ.get(k, v))
                          for k, v in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if world > 1:
        import torch
        from torch import distributed as dist
        # torchrun keeps one store for all its attempts: without a prefix, ranks of a second one may find the
        # addresses of the first one's, who are dead, and hang.
        STORE = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
                                 next(dist.rendezvous("env://"))[0])
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                store=STORE, rank=rank, world_size=world)
        CONTROL = dist.new_group(backend="gloo")
    return rank, world, local


def leave_ranks():
    """Wait until all ranks are here, then part.

    They meet in the store, not in a collective: whoever is through with its last message closes its
    connections, and a rank that is slow to read may find them reset.
    """
    if CONTROL:
        from torch import distributed as dist
        STORE.set(f"left {dist.get_rank()}", "")
        with contextlib.suppress(RuntimeError):  # gone, with the rank that kept it and had seen all of us
            STORE.wait([f"left {rank}" for rank in range(dist.get_world_size())])
        dist.destroy_process_group()


def all_reduce(values, how="SUM"):
    """The sum, or MAX, over ranks of a CPU tensor."""
    if CONTROL:
        import torch
        torch.distributed.all_reduce(values, getattr(torch.distributed.ReduceOp, how), CONTROL)
    return values


def on_first_rank(do):
    """Call do() on the first rank while the others wait. What it refuses all refuse: nobody hangs."""
    import torch
    refusal = None
    if os.environ.get("RANK", "0") == "0":
        try:
            do()
        except Refusal as e:
            refusal = e
    if all_reduce(torch.tensor(float(refusal is not None))):
        raise refusal or Refusal("the first rank refused")


def launch():
    """What names this torchrun in all its attempts, and no other one; "" without torchrun."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("attempt_")[0]


def was_restarted(out_dir):
    """Whether torchrun restarts a run that has saved since this launch: then it resumes by itself."""
    import torch
    ours = 0.0
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) and os.environ["RANK"] == "0" and launch():
        with contextlib.suppress(Refusal):
            state = read_json(find_checkpoint(out_dir) / "state.json", "training state")
            ours = float(state.get("launch") == launch())
    return all_reduce(torch.tensor(ours)).item() > 0


# ------------------------------------------------------------------------------------------------------------
# A run as one sees and steers it


def pick_device(name):
    """'auto' or a device's name -> torch.device, checked to exist."""
    import torch
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    with contextlib.suppress(RuntimeError):
        device = torch.device(name)
        if device.type == "cpu" or device.type == "mps" and torch.backends.mps.is_available() or \
                device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
            return device
    raise Refusal(f"--device={name} is not on this machine; use cpu, cuda, cuda:N, mps or auto")


def is_async(device):
    """Whether Python runs ahead of the device, and waits for it when it reads a number."""
    return device.type == "cuda"


def to_device(x, device):
    """x on `device`; a GPU fetches it from the CPU when its turn comes, and nobody waits for that."""
    if is_async(device) and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def clip_gradients(params, most):
    """Scale the gradients down to a total norm of `most` (0: leave them); returns the norm that they had.

    Where a number may be read at no cost, gradients that are small enough, the usual case, stay untouched.
    """
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm
    norm = get_total_norm([p.grad for p in params if p.grad is not None])
    if most and (is_async(norm.device) or norm > most):
        clip_grads_with_norm_(params, most, norm)
    return norm


def pick_dtype(name, device):
    """'auto' -> bfloat16 if the hardware multiplies it (CUDA from Ampere on, some CPUs), else float32."""
    import torch
    if name != "auto":
        return getattr(torch, name)
    cpu = getattr(torch.cpu, "get_capabilities", dict)() if device.type == "cpu" else {}
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8
    return torch.bfloat16 if cpu.get("amx_bf16") or cpu.get("avx512_bf16") or ampere else torch.float32


def can_build(*compilers):
    """Whether one of these compilers is there, and Python's headers: what Triton and inductor build with."""
    headers = (sysconfig.get_config_var("INCLUDEPY") or "", sysconfig.get_path("include"))
    return any(map(shutil.which, compilers)) and any(Path(d, "Python.h").exists() for d in headers)


def c_compilers():
    return (os.environ["CC"],) if os.environ.get("CC") else ("gcc", "clang")


def can_compile(device):
    """Whether torch.compile can work for a device: Linux, Triton (for inductor's own sake), a compiler."""
    compilers = {"cpu": ("g++",), "cuda": c_compilers()}.get(device.type, ())
    return (sys.platform == "linux" and importlib.util.find_spec("triton") is not None
            and can_build(*compilers))


def should_compile(asked, device, long):
    """Whether to torch.compile: as --compile says; if auto, for a GPU or a long run. Says so if it cannot."""
    able = can_compile(device)
    if asked == "on" and not able and sys.platform == "linux":
        warn("--compile=on needs Triton, a C++ compiler and Python's headers; going on without it")
        return False
    return asked == "on" or (asked == "auto" and able and (long or device.type == "cuda"))


# dense bf16, makers' sheets
PEAK_TFLOPS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40": 181, "4090": 165}


def peak_flops(device, dtype):
    """FLOP/s that MFU is a share of: the maker's figure of a known GPU, else the most that products reach."""
    import torch
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype == torch.bfloat16 else ""
    for key, tflops in PEAK_TFLOPS.items():
        if key in name:
            return tflops * 1e12
    best, times, n = 0.0, [0.0], 256
    while n < 1024 or (min(times) < 0.004 and n < 8192):  # the best of short ones: others interrupt the long
        n, times = 2 * n, []
        a = torch.randn(n, n, device=device, dtype=dtype)
        while len(times) < 8 or sum(times) < 0.05:
            t = time.perf_counter()
            (a @ a)[0, 0].item()
            times.append(time.perf_counter() - t)
        best = max(best, 2 * n**3 / min(times))
    return best


class Interrupt:
    """Ctrl-C and SIGTERM ask for a stop at the next step boundary; a second Ctrl-C leaves at once."""

    SAYS = b"\nstopping after this step; a second Ctrl-C leaves at once, without saving\n"

    def __init__(self):
        self.signal = 0
        signal.signal(signal.SIGINT, self.ask)
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, number, frame):
        if self.signal and number == signal.SIGINT:
            os._exit(130)
        self.signal = number
        if os.environ.get("RANK", "0") == "0":
            os.write(2, self.SAYS)  # print may be what was interrupted


class Log:
    """log.jsonl, the terminal, and wandb and TensorBoard on request. Only the first rank's speaks."""

    def __init__(self, config, silent):
        self.silent, self.path, self.bar, self.wandb, self.board = (
            silent, Path(config.out_dir) / "log.jsonl", None, None, None)
        if silent:
            return
        try:
            if config.wandb:
                import wandb
                self.wandb = wandb.init(project=config.wandb, config=dataclasses.asdict(config))
            if config.tensorboard:
                from torch.utils.tensorboard import SummaryWriter
                self.board = SummaryWriter(config.out_dir)
        except ImportError as e:
            raise Refusal(f"{e}; install it with pip, or leave --wandb and --tensorboard out") from None

    def begin(self, step, total):
        """Keep the lines up to the step that a run resumes from (-1: none), start the progress bar."""
        if self.silent:
            return
        kept = []
        for line in self.path.read_bytes().splitlines(True) if step >= 0 and self.path.exists() else ():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # what a crash cut off
                kept += [line] * (json.loads(line)["step"] <= step and line.endswith(b"\n"))
        with writing(self.path):
            write_atomically(self.path, b"".join(kept))
        if sys.stderr.isatty():
            from tqdm import tqdm
            self.bar = tqdm(total=total, initial=max(step, 0), unit="step", dynamic_ncols=True)

    def record(self, **values):
        if self.silent:
            return
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        with writing(self.path), open(self.path, "a") as f:
            f.write(json.dumps(values) + "\n")
        numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
        if self.wandb:
            self.wandb.log(numbers, step=values["step"])
        for k, v in numbers.items() if self.board else ():
            self.board.add_scalar(k, v, values["step"])

    def say(self, text):
        if self.bar:
            self.bar.write(text)
        elif not self.silent:
            print(text, flush=True)

    def progress(self, step, text):
        if self.bar:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif not self.silent:
            print(f"step {step}: {text}", file=sys.stderr, flush=True)

    def close(self):
        for one in (self.bar, self.board):
            if one:
                one.close()
        if self.wandb:
            self.wandb.finish()
        release()
