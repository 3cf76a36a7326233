"""What surrounds the steps of a run: checkpoints, optimizers, shards, logs, time."""
