"""Take optimizer steps from a stored rollout under torchrun on GPUs; each rank writes its results.

torchrun --nproc_per_node 2 -m tests.gpu.one_step job.pkl out
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch


def main(job_file: str, out: str) -> None:
    from tests import parity_cases as cases

    # A reference in float64 is met by float32 arithmetic only, not by TF32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    job = pickle.loads(Path(job_file).read_bytes())
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parallel = cases.join(cases.settings(**next(iter(job["runs"].values()))), world)
    found = {
        key: cases.train(rank, world, job["path"], cases.settings(**run), job["batches"], parallel=parallel)
        for key, run in job["runs"].items()
    }
    memory = torch.cuda.max_memory_allocated() / 2**20
    Path(out, f"rank{rank}.pkl").write_bytes(pickle.dumps({"found": found, "device": torch.cuda.get_device_name(), "peak_mib": memory}))
    from megatron_grpo.core.parallel.state import stop

    stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
