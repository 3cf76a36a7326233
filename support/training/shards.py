"""--shard: weights, gradients, moments and averages spread over ranks, by PyTorch's own FSDP2.

Imports of torch.distributed wait until they are needed: they are slow, and not on all systems.
What a rank holds, what it sends, and which model fits on which machine: docs/scale.md.
"""

import contextlib
import functools
import math
import shutil
import warnings
from pathlib import Path

import torch
from torch import distributed

from support import files, ranks
from support.errors import RankError, UserError

ALL = -1  # --shard without a value: all ranks share one model


def check(shard, world):
    """Raise UserError for a --shard that cannot work with `world` ranks."""
    given = "--shard, given here or when the run began,"
    if shard and not ranks.CONTROL:
        fix = "start with torchrun --standalone --nproc_per_node=RANKS mdlm.py, or give --shard=0"
        raise UserError(f"{given} spreads a model over ranks, and there are none; {fix}")
    if world % sharing(shard, world):
        why = f"is {shard}, which does not divide the {world} ranks"
        raise UserError(f"{given} {why}; give a number that does, or --shard for all of them")


def sharing(shard, world):
    """How many ranks share a model."""
    return world if shard == ALL else shard or 1


def make_shard_fn(shard, device, dtype, world):
    """A function of a module: move it to the device; with --shard only this rank's part of it.

    Parts are rows of each parameter, on groups of `shard` ranks; the groups hold the same. In
    computations a module's parameters are whole, in `dtype`; their gradients are summed in float32.
    """
    if not shard:
        return lambda module: module.to(device)
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--shard is not for --device={device}; give --device=cpu, or --shard=0")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    n = sharing(shard, world)
    shape = (n,) if n == world else (world // n, n)
    names = ("groups", "shards")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    return functools.partial(fully_shard, mesh=mesh, reshard_after_forward=True, mp_policy=policy)


def exchange_nothing(now):
    """What `exchanger` returns for a single rank."""


def exchanger(network):
    """f(now): whether the next backward of a network exchanges gradients between the ranks, or adds
    them up here."""
    if isinstance(network, torch.nn.parallel.DistributedDataParallel):
        return functools.partial(setattr, network, "require_backward_grad_sync")
    return getattr(network, "set_requires_gradient_sync", exchange_nothing)


def is_spread(t):
    return hasattr(t, "to_local")  # a DTensor


def local(t):
    """This rank's part of a tensor; the tensor itself if it is not spread."""
    return t.to_local() if is_spread(t) else t


def spread_like(p, t):
    """The tensor (A, ...) of which each rank holds a part t, cut like the parameter p (A, ...)."""
    if not is_spread(p) or is_spread(t) or t.dim() == 0:
        return t
    from torch.distributed.tensor import DTensor

    whole = torch.empty(p.shape[0], *t.shape[1:], device="meta")
    how = dict(shape=whole.shape, stride=whole.stride())
    return DTensor.from_local(t, p.device_mesh, p.placements, run_check=False, **how)


@torch.no_grad()
def fill(p, whole):
    """Copy a whole tensor, which every rank has, into a parameter."""
    if is_spread(p):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.to(p.device), p.device_mesh, p.placements)
    p.copy_(whole)


class MatrixShuffle:
    """n alike matrices (A, B), their rows spread over the ranks; each matrix is one rank's turn.

    first: how many had their turn before, so that no rank gets more than its share.
    """

    def __init__(self, p, n, first):
        self.A = len(p)
        self.group = p.device_mesh.get_group(p.device_mesh.ndim - 1)
        ranks = self.group.size()
        self.rank = self.group.rank()
        rows = [len(part) for part in torch.arange(len(p)).chunk(ranks)]
        self.rows = rows + [0] * (ranks - len(rows))  # of each rank, of every matrix
        self.turns = [range((rank - first) % ranks, n, ranks) for rank in range(ranks)]

    def exchange(self, parts, shapes):
        """Send the k-th of `parts` to rank k; returns what the ranks sent here, of these shapes."""
        sizes = [math.prod(shape) for shape in shapes]
        sent = torch.cat([part.flatten() for part in parts])
        got = sent.new_empty(sum(sizes))
        distributed.all_to_all_single(got, sent, sizes, [p.numel() for p in parts], self.group)
        return [part.view(shape) for part, shape in zip(got.split(sizes), shapes)]

    def gather(self, x):
        """Parts (n, rows of this rank, B) of all matrices -> (m, A, B), whole: its turn."""
        m = len(self.turns[self.rank])
        parts = [x[list(turn)] for turn in self.turns]
        return torch.cat(self.exchange(parts, [(m, rows, x.shape[2]) for rows in self.rows]), 1)

    def scatter(self, x):
        """The reverse: (m, A, B) -> (n, rows of this rank, B)."""
        rows = self.rows[self.rank]
        shapes = [(len(turn), rows, x.shape[2]) for turn in self.turns]
        out = x.new_empty(sum(map(len, self.turns)), rows, x.shape[2])
        for turn, part in zip(self.turns, self.exchange(x.split(self.rows, 1), shapes)):
            out[list(turn)] = part
        return out


@contextlib.contextmanager
def saving(out_dir, weights, tensors):
    """Within, tensors lie in files of out_dir, one a rank, and the weights in one.

    Yields a function that names them, for the first rank: a dict of name -> Path. What writes is
    PyTorch's torch.distributed.checkpoint, as safetensors, without pickles; the first rank joins
    the weights, one tensor at a time. UserError if any rank cannot write.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    folder = Path(out_dir) / f"{files.TMP}shards"
    writer = functools.partial(HuggingFaceStorageWriter, save_distributed=True)
    state = writer(folder / "state")
    model = writer(folder / "model", enable_consolidation=True)
    try:
        with files.writing(out_dir):
            try:
                save(tensors, storage_writer=state, process_group=ranks.CONTROL)
                save(weights, storage_writer=model, process_group=ranks.CONTROL)
            except CheckpointException as e:
                raise min(e.failures.items())[1][0] from e  # that of the first rank that failed
        mine = f"shard-{distributed.get_rank() + 1:05}-*"
        written = ranks.all_reduce(torch.tensor(len([*(folder / "state").glob(mine)])))
        yield lambda: found_in(folder, int(written))
    finally:
        if ranks.is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)


def found_in(folder, written):
    with files.writing(folder):
        parts = sorted((folder / "state").iterdir())
    if len(parts) != written:
        why = f"{written} ranks wrote a part to {folder}, and the first one sees {len(parts)}"
        raise UserError(f"{why}; give an --out_dir that all share")
    names = (f"state-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts)))
    whole = next((folder / "model").glob("*.safetensors"))
    return {"model.safetensors": whole} | dict(zip(names, parts))


def load(folder, into):
    """Fill tensors, spread or not, from the safetensors files of a checkpoint."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    reader = HuggingFaceStorageReader(folder)
    group = ranks.CONTROL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no group
            load(into, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as e:
        why = min(e.failures.items())[1][0]
        raise UserError(f"{folder} does not fit its config: {why}") from e
    where = f"in {folder}; take an earlier checkpoint, or train again"
    ranks.on_all_ranks(lambda: check_finite(into, where))


def check_finite(tensors, where):
    """Raise RankError unless all that this rank holds is finite."""
    for name, t in tensors.items():
        if not local(t).isfinite().all():
            raise RankError(f"{name} is not finite {where}")
