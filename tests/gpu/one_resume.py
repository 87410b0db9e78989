"""Take three optimizer steps on a GPU, and the third again after a resume from a checkpoint of the second.

Writes the largest weight difference, the step counts and the optimizer classes.

python -m tests.gpu.one_resume job.pkl out.pkl
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path


def compare(path, settings, batches, folder: Path) -> dict:
    from megatron_grpo.core.policy.sharded_state import load_state, sharded_state, steps_counted, torch_optimizers
    from megatron_grpo.run.checkpoint.distributed import read_sharded
    from tests import parity_cases as cases
    from tests.checkpoint_files import write_sharded

    cfg = cases.settings(**settings)
    parallel = cases.join(cfg, 1)

    def steps(policy, first, last):
        for index in range(first, last):
            policy.train_step(cases.make_batch(policy, batches[index], index))
        return {name: tensor.float().cpu() for name, tensor in policy.named_weights()}

    def state(policy, *, is_loading):
        return sharded_state(policy.wrapped, policy.optimizer, policy.scheduler, is_loading=is_loading)

    policy, again = (cases.build(path, cfg, 1, parallel) for _ in range(2))
    steps(policy, 0, 2)
    folder.mkdir()
    write_sharded(state(policy, is_loading=False), folder)
    whole = steps(policy, 2, 3)
    load_state(again.wrapped, again.optimizer, again.scheduler, read_sharded(state(again, is_loading=True), folder))
    counted = steps_counted(again.optimizer)
    resumed = steps(again, 2, 3)
    kinds = sorted({f"{type(one).__module__}.{type(one).__qualname__}" for one in torch_optimizers(again.optimizer)})
    apart = max(float((whole[name] - resumed[name]).abs().max()) for name in whole)
    return {"apart": apart, "counted": counted, "then": steps_counted(again.optimizer), "kinds": kinds}


def main(job_file: str, out: str) -> None:
    job = pickle.loads(Path(job_file).read_bytes())
    Path(out).write_bytes(pickle.dumps(compare(**job)))
    from megatron_grpo.core.parallel.state import stop

    stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
