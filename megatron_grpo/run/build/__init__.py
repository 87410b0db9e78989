"""Configuration -> objects. The only place that decides between implementations, and that may import inside a branch."""
