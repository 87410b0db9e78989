"""Python as a tool: each call is a program of its own in the sandbox of the reward `code` (time, memory, files and network are limited)."""

from megatron_grpo import run_program

SECONDS, MEMORY_MB, CHARACTERS = 10.0, 512, 4000


def python(code: str):
    """Runs a Python program and returns what it prints. Nothing is kept from one call to the next.

    Args:
        code: the program; print what you want to see
    """
    ran = run_program(code, seconds=SECONDS, memory_mb=MEMORY_MB, as_main=True)
    if ran.timed_out:
        return f"Error: it took more than {SECONDS:g} s"
    if ran.exceeded:
        return f"Error: it used too much of {ran.exceeded}"
    text = ran.output if ran.clean else f"{ran.output}\n{ran.errors[-1000:]}"
    return text.strip()[:CHARACTERS] or "(it printed nothing)"
