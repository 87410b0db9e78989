"""What one GRPO step executes. Imports nothing of the package outside itself."""
