"""megatron_grpo: GRPO on Megatron-Core, sampled by vLLM. Start reading at train.py."""

__version__ = "0.1.0"
