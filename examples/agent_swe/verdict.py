"""The reward of an episode: 1 if the module that the agent leaves passes the hidden tests. They run in the sandbox of the reward `code`."""

from megatron_grpo import run_program

MOST = 100_000  # characters of a module


def passed(row, folder, output, messages):
    path = folder / row["module"]
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST:
        return 0.0
    program = f"{path.read_text(errors='replace')}\n\n{row['tests']}\nprint('all passed')\n"
    ran = run_program(program, seconds=10.0, memory_mb=512, as_main=False)
    return float(ran.clean and ran.output.strip().endswith("all passed"))
