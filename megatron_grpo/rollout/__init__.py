"""Sampling: prompts in, groups of completions out. `engine` says what a sampler is; every other file is one, or a part of one."""
