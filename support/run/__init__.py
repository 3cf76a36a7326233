"""What surrounds the steps of a run: checkpoints, optimizers, ranks, the log, time, evaluation."""
