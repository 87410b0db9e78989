"""Rollout servers (`megatron-grpo serve`): a vLLM engine behind HTTP that a run owns, updates with weights and samples from."""
