"""Lets the trainer compute with the sampler's arithmetic on a CPU, so that their log-probs are equal in every bit (docs/proof.md)."""
