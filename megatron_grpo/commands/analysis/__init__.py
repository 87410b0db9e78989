"""Offline analysis of a run: differences between trainer and sampler, replay of a step, and the effect of other loss settings."""
