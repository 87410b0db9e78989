"""Sampling: prompts in, groups of completions out. `engine` defines the interfaces; every other module implements one, or a part of one."""
