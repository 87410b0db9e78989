"""The plan report: batch sizes, training schedule, memory and cost of a run, computed from its settings. Does not import torch."""
