"""`megatron-grpo serve`: one vLLM engine behind HTTP, which a run owns, pushes weights to and samples from."""
