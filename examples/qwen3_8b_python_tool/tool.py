"""A Python tool. Each call runs one program in the sandbox of the reward `code`, with limits of time, memory, files and network."""

from megatron_grpo import run_program

SECONDS, MEMORY_MB, MAX_CHARACTERS = 10.0, 512, 4000


def python(code: str):
    """Runs a Python program and returns what it prints. Nothing is kept from one call to the next.

    Args:
        code: the program; print what you want to see
    """
    result = run_program(code, seconds=SECONDS, memory_mb=MEMORY_MB, as_main=True)
    if result.timed_out:
        return f"Error: it took more than {SECONDS:g} s"
    if result.exceeded:
        return f"Error: it used too much of {result.exceeded}"
    text = result.output if result.clean else f"{result.output}\n{result.errors[-1000:]}"
    return text.strip()[:MAX_CHARACTERS] or "(it printed nothing)"
