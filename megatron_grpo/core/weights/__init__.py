"""Conversion of Hugging Face weights to Megatron shards and back. Works with plain integers and cannot reach a process group.

Reading order: `shape` (sizes of a model, from its config.json), `families` (one row per supported architecture), `mapping` (tensors from
one layout to the other), `rope`, and `hf_files` (safetensors on disk). `shape` and `families` import no torch.
"""
