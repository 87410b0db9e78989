"""The mathematics of GRPO and its relatives: advantages, token weights, the loss, corrections. Pure: no process groups, no model."""
