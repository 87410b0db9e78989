"""A teacher model that scores sampled tokens."""
