"""Everything around the steps of a run: checkpoints, optimizers, ranks, log, time, evaluation."""
