"""Reward of an episode: 1 if the module that the agent leaves passes the hidden tests, in the sandbox of the reward `code`."""

from megatron_grpo import run_program

MAX_CHARACTERS = 100_000  # of a module


def passed(row, folder, output, messages):
    """Return 1.0 if `row["tests"]` pass on the module in `folder`, else 0.0."""
    path = folder / row["module"]
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_CHARACTERS:
        return 0.0
    program = f"{path.read_text(errors='replace')}\n\n{row['tests']}\nprint('all passed')\n"
    result = run_program(program, seconds=10.0, memory_mb=512, as_main=False)
    return float(result.clean and result.output.strip().endswith("all passed"))
