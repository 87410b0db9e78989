"""Hugging Face <-> Megatron weights, in plain integers: nothing here can reach a process group.

Reading order: `shape` (what a model is, from its config.json), `families` (the table of names), `mapping` (tensors from one
layout to the other), `rope`, and `hf_files` (safetensors on disk). `shape` and `families` import no torch.
"""
