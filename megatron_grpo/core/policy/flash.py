"""Which heads flash attention on GPUs supports. No torch."""

from __future__ import annotations

MOST_FLASH_CHANNELS = 256


def flash_obstacle(dtype: str, channels: int) -> str | None:
    """Return why flash attention on GPUs does not support these heads, as a phrase; None if it does.

    `policy.attention` checks the GPU itself.

    Args:
        dtype: Name of the dtype, such as "bfloat16".
    """
    if dtype not in ("bfloat16", "float16"):
        return f"flash attention supports bfloat16 and float16, not {dtype}"
    if channels > MOST_FLASH_CHANNELS or channels % 8:
        return f"flash attention supports head dimensions up to {MOST_FLASH_CHANNELS} that are multiples of 8, not {channels}"
    return None
