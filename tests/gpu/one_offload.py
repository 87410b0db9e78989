"""Take steps on one GPU with and without offload between them, and write the measurements. Runs in a process of its own.

python -m tests.gpu.one_offload job.pkl out.pkl
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch


def main(job_file: str, out: str) -> None:
    from tests import offload_cases
    from tests import parity_cases as cases

    job = pickle.loads(Path(job_file).read_bytes())
    cfg = cases.settings(**job["settings"])
    parallel = cases.join(cfg, 1)
    assert parallel.device.type == "cuda"
    trails, measured = {}, []

    def allocated() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    for name, offload in (("without", ()), ("away", offload_cases.ALL)):
        policy = offload_cases._policy(job["path"], cfg, parallel, offload)
        trails[name] = []
        for index, rows in enumerate(job["batches"]):
            before = allocated()
            policy.free_memory(keep="weights")
            during_push = allocated()
            policy.free_memory()
            away, reserved = allocated(), torch.cuda.memory_reserved()
            with policy.on_device("weights"):
                score = [values.copy() for values in policy.scorer.score(rows[:2])]
            batch = cases.make_batch(policy, rows, index)
            with policy.on_device("all"):
                back = allocated()
                said = policy.train_step(batch).metrics
            if offload:
                measured.append(
                    dict(before=before, push=during_push, away=away, back=back, reserved=reserved, given=policy.offloader.offloaded_bytes)
                )
            trails[name].append((said["loss"], said["grad_norm"], score))
        with policy.on_device("weights"):
            trails[name].append({key: tensor.cpu() for key, tensor in policy.named_weights()})
        pinned = [chunk.is_pinned() for pieces in policy.offloader._host.values() for chunk in pieces]
        del policy
        torch.cuda.empty_cache()
    Path(out).write_bytes(pickle.dumps({"trails": trails, "measured": measured, "pinned": pinned, "device": torch.cuda.get_device_name()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
