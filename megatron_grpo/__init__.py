"""megatron_grpo: GRPO on Megatron-Core, sampled by vLLM. Start reading at train.py."""

from functools import cache

__version__ = "0.1.0"


@cache
def installed_version(distribution: str) -> str | None:
    """Version of another distribution; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
