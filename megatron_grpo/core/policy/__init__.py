"""The sharded model in training.

`model` builds it, `passes` runs it through Megatron-Core's pipeline schedule, `optimizer` updates its weights, and `policy` is its
interface to the training loop.
"""
