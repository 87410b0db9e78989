"""Python API: `GRPOTrainer`, `plan` and `score`. It starts the ranks of a run, or runs in ranks that a launcher started."""
