"""Mathematics of GRPO and related objectives: advantages, token weights, the loss, corrections.

Pure functions of tensors and arrays: no process groups, no model.
"""
