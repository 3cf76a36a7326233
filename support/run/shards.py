"""--shard: weights, gradients, optimizer state and averages split over ranks, with PyTorch's FSDP2.

docs/scale.md says what each rank holds and sends, and which model fits on which machine.
torch.distributed is imported inside functions: the import is slow, and some systems do not have it.
"""

import contextlib
import functools
import math
import shutil
import warnings
from pathlib import Path

import torch
from torch import distributed

from nanomdlm.support.cli import files
from nanomdlm.support.errors import RankError, UserError
from nanomdlm.support.run import ranks

ALL = -1  # --shard without a value: all ranks share one model


# ---- How many ranks share a model
def check(shard, world):
    """Raise UserError if --shard cannot work with `world` ranks."""
    if not ranks.CONTROL:
        raise UserError(f"--shard={shard}, of this run, needs torchrun; or give --shard=0")
    if world % sharing(shard, world):
        raise UserError(f"--shard={shard} does not divide the {world} ranks; give one that does")


def sharing(shard, world):
    """Return how many ranks share one model."""
    return world if shard == ALL else shard or 1


def make_shard_fn(shard, device, dtype, world):
    """Return a function that moves a module to the device, with --shard only this rank's part.

    Each parameter is split by rows over groups of `shard` ranks; all groups hold the same model.
    While a module computes, FSDP gathers its parameters in `dtype`; it sums gradients in float32.
    """
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--shard is not for --device={device}; give --device=cpu, or --shard=0")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP2 shards over the last dimension of a mesh, and replicates over the first of two.
    n = sharing(shard, world)
    if n == world:
        shape = (n,)
        names = ("shards",)
    else:
        shape = (world // n, n)
        names = ("groups", "shards")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    return functools.partial(fully_shard, mesh=mesh, reshard_after_forward=True, mp_policy=policy)


def exchanger(network):
    """Return a function f(now) to call before each backward pass of a network.

    f(True): the backward pass sums gradients over ranks. f(False): it only accumulates them on this
    rank, for gradient accumulation.
    """
    if isinstance(network, torch.nn.parallel.DistributedDataParallel):
        return functools.partial(setattr, network, "require_backward_grad_sync")
    return network.set_requires_gradient_sync


# ---- Tensors of which each rank holds a part (DTensors)
def is_spread(t):
    """Whether a tensor is a DTensor, split over the ranks."""
    return hasattr(t, "to_local")


def local(t):
    """Return this rank's part of a tensor, or the tensor itself if it is not split."""
    return t.to_local() if is_spread(t) else t


@torch.no_grad()
def fill(p, whole):
    """Copy a whole tensor, which every rank has, into a parameter that may be split."""
    if is_spread(p):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.to(p.device), p.device_mesh, p.placements)
    p.copy_(whole)


class MatrixShuffle:
    """All-to-all exchange, so that each rank orthogonalizes whole matrices for Muon.

    n matrices of shape (A, B) are split by rows over the ranks. `gather` gives each rank about
    n / ranks whole matrices; `scatter` returns the updated rows to the ranks that hold them.

    p: one of the matrices, a DTensor
    n_before: number of matrices that earlier shuffles distributed. Counting on from there keeps
        the first ranks from always getting one matrix more.
    """

    def __init__(self, p, n, n_before):
        self.A = len(p)
        self.group = p.device_mesh.get_group(p.device_mesh.ndim - 1)
        n_ranks = self.group.size()
        self.rank = self.group.rank()
        rows = [len(chunk) for chunk in torch.arange(len(p)).chunk(n_ranks)]
        self.rows = rows + [0] * (n_ranks - len(rows))  # rows of every matrix that each rank holds
        # The numbers of the matrices that each rank orthogonalizes.
        self.assigned = [range((rank - n_before) % n_ranks, n, n_ranks) for rank in range(n_ranks)]

    def exchange(self, tensors, shapes):
        """Send tensors[k] to rank k; return the tensors received, of these shapes, by rank."""
        sizes = [math.prod(shape) for shape in shapes]
        sent = torch.cat([t.flatten() for t in tensors])
        received = sent.new_empty(sum(sizes))
        distributed.all_to_all_single(
            received, sent, sizes, [t.numel() for t in tensors], self.group
        )
        return [t.view(shape) for t, shape in zip(received.split(sizes), shapes)]

    def gather(self, x):
        """Exchange this rank's rows of all matrices (n, rows, B) for m whole matrices (m, A, B)."""
        m = len(self.assigned[self.rank])
        by_rank = [x[list(numbers)] for numbers in self.assigned]
        return torch.cat(self.exchange(by_rank, [(m, rows, x.shape[2]) for rows in self.rows]), 1)

    def scatter(self, x):
        """Undo gather: exchange whole matrices (m, A, B) for this rank's rows (n, rows, B)."""
        rows = self.rows[self.rank]
        shapes = [(len(numbers), rows, x.shape[2]) for numbers in self.assigned]
        out = x.new_empty(sum(map(len, self.assigned)), rows, x.shape[2])
        received = self.exchange(x.split(self.rows, 1), shapes)
        for numbers, matrices in zip(self.assigned, received):
            out[list(numbers)] = matrices
        return out


# ---- Checkpoints
@contextlib.contextmanager
def saving(out_dir, weights, tensors):
    """Context manager: write tensors to temporary files in out_dir, for a checkpoint.

    weights: dict of name -> tensor, which the first rank joins in one file, a tensor at a time
    tensors: dict of name -> tensor; each rank writes its part to a file of its own

    Yields a function for the first rank, which returns a dict of file name -> Path. The files are
    removed at the end unless they have been moved. They are written as safetensors, without
    pickles, by torch.distributed.checkpoint. Raises UserError if a rank cannot write.
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
                # CONTROL is a gloo group, so the exchange of metadata does not need a GPU.
                save(tensors, storage_writer=state, process_group=ranks.CONTROL)
                save(weights, storage_writer=model, process_group=ranks.CONTROL)
            except CheckpointException as e:
                raise min(e.failures.items())[1][0] from e  # the error of the first failed rank
        own_files = f"shard-{distributed.get_rank() + 1:05}-*"
        n_files = ranks.all_reduce(torch.tensor(len([*(folder / "state").glob(own_files)])))
        yield lambda: written_files(folder, int(n_files))
    finally:
        if ranks.is_first_rank():
            shutil.rmtree(folder, ignore_errors=True)


def written_files(folder, n_files):
    """Return the files that the ranks have written to a folder: name in the checkpoint -> Path.

    Raises UserError unless there are n_files of them: ranks on other nodes may have written to a
    local disk with the same path.
    """
    with files.writing(folder):
        paths = sorted((folder / "state").iterdir())
    n = len(paths)
    if n != n_files:
        why = f"{n_files} ranks wrote a file to {folder}, but the first rank sees {n}"
        raise UserError(f"{why}; give an --out_dir that all ranks share")
    names = (f"state-{i + 1:05}-of-{n:05}.safetensors" for i in range(n))
    whole = next((folder / "model").glob("*.safetensors"))
    return {"model.safetensors": whole} | dict(zip(names, paths))


def load(folder, into):
    """Fill tensors, split or not, from the safetensors files of a checkpoint.

    into: dict of name -> tensor. Raises UserError if a tensor is missing or has another shape, and
    on all ranks if one is not finite.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load
    from torch.distributed.checkpoint.api import CheckpointException

    reader = HuggingFaceStorageReader(folder)
    group = ranks.CONTROL
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns if there is no process group
            load(into, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as e:
        why = min(e.failures.items())[1][0]
        raise UserError(f"{folder} does not fit its config: {why}") from e
    fix = "use an earlier checkpoint, or train again"

    def check():
        for name, t in into.items():
            if not local(t).isfinite().all():
                raise RankError(f"{name} is not finite in {folder}; {fix}")

    ranks.together(check)
