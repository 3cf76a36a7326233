"""Evaluate and compare runs."""

import json
import sys
from pathlib import Path


def plot_losses(out_dirs, path):
    """Loss curves of runs, from log.jsonl, as a PNG: training batches, and validation with its error."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for i, out_dir in enumerate(out_dirs):
        lines = [json.loads(line) for line in (Path(out_dir) / "log.jsonl").read_text().splitlines()]
        train = [(r["step"], r["loss"]) for r in lines if "loss" in r]
        if train:
            ax.plot(*zip(*train, strict=True), lw=0.7, alpha=0.45, color=f"C{i}",
                    label=f"{out_dir}: training batches")
        for key, name in (("val_nelbo", "NELBO"), ("val_nll", "NLL")):
            val = [(r["step"], r[key], 2 * (r[f"{key}_se"] or 0)) for r in lines if key in r]
            if val:
                x, y, error = zip(*val, strict=True)
                ax.errorbar(x, y, error, fmt="o-", ms=4, lw=1.6, capsize=2, color=f"C{i}",
                            label=f"{out_dir}: validation {name}, last {y[-1]:.3f}")
    ax.set(xlabel="step", ylabel="nats per token")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    fig.savefig(path, dpi=150)
    plt.close(fig)
