"""Dumps for the referee: by the real TRL with the hook of its page, and by stand-ins of the other frameworks."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch

from tests.reference.packing import MAX_COMPLETION_LENGTH, random_batch

DOCS = Path(__file__).parents[1] / "docs"
G = 4


def read_hook(system: str) -> str:
    """Return the program on a framework's page."""
    return re.search(r"```python\n(.*?)```", (DOCS / f"referee_{system}.md").read_text(), re.DOTALL)[1]


def spoil_class(base: type, faults: dict[str, tuple[str, str]]) -> type:
    """Return a class with copies of TRL's methods in which some text is replaced: method -> (old text, new text)."""
    from trl.trainer import grpo_trainer

    body = ""
    for method, (text, instead) in faults.items():
        source = inspect.getsource(getattr(grpo_trainer.GRPOTrainer, method))
        assert text in source, f"TRL's {method} has no {text!r}"
        body += source.replace(text, instead)
    made: dict = {}
    exec(f"class Spoiled(Base):\n{body}", vars(grpo_trainer) | {"Base": base}, made)
    return made["Spoiled"]


def trainer_class(faults: dict[str, tuple[str, str]]) -> type:
    """Return TRL's trainer on tables of log-probs, with faults, under the hook of the page."""
    from tests.unit.grpo.test_against_trl import TableLogprobTrainer

    class RowTableTrainer(TableLogprobTrainer):
        """A trainer in which the first token of a prompt is the index of its row."""

        def _generate(self, prompts):
            _, *others = super()._generate(prompts)
            return [[100 + i] for i in range(len(prompts))], *others

        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            rows = (input_ids[:, 0] - 100).long()
            found = super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)
            width = input_ids.shape[1] - 1
            return [None if one is None else one[rows][:, :width] for one in found]

    made = {"Base": spoil_class(RowTableTrainer, faults) if faults else RowTableTrainer}
    exec(read_hook("trl").replace("trl.GRPOTrainer", "Base"), made)
    return made["DumpingGRPOTrainer"]


def dump_trl(folder: Path, seed: int, *, micro_batches: int = 1, faults=None, rewards=None, rows: int = 16, dtype=torch.float32, funcs=2,
             weights=None, share_on_policy=0.0, fresh=False, **settings) -> Path:  # fmt: skip
    """Take one optimizer step of TRL's code with its hook; return the directory of its files."""
    from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

    completions = random_batch(seed, rows, share_on_policy=share_on_policy, dtype=torch.float32)
    for c in completions:
        c.mask[0], c.is_zero_std = 1.0, False
        for name in ("mask", "logp", "entropy", "sampler_logp", "ref_logp", "old_logp"):
            array = getattr(c, name)
            if array is not None:
                setattr(c, name, array.detach().to(dtype).requires_grad_(name in ("logp", "entropy")))
        c.is_truncated = len(c.mask) == max(len(one.mask) for one in completions)
    rng = np.random.default_rng([seed, 7])
    weights = weights or [1.0, 0.5][:funcs]
    rewards = np.round(rng.normal(size=(rows, funcs)), 2).astype(np.float32) if rewards is None else rewards
    trainer = trainer_class(faults or {})(completions, rewards, weights, **settings)
    trainer.args.output_dir, trainer.state = str(folder), SimpleNamespace(global_step=0)
    trainer._step, trainer.num_iterations = 0 if fresh else micro_batches, 2
    trainer.args.steps_per_generation = trainer.args.gradient_accumulation_steps = trainer.current_gradient_accumulation_steps = (
        micro_batches
    )
    trainer.args.per_device_train_batch_size = rows // micro_batches
    trainer.args.gradient_accumulation_steps = 2 * micro_batches
    if share_on_policy < 1:
        trainer.args.gradient_accumulation_steps = 2 * micro_batches + 1  # makes TRL ask for old log-probs
    torch.manual_seed(seed)
    out = trainer._generate_and_score_completions([{"prompt": ""} for _ in completions])
    batches = split_tensor_dict(shuffle_sequence_dict(out), micro_batches)
    for batch in batches:
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        trainer._step += 1
    return folder / "referee"


# ---- writers of the others: what their code does, stated again; the hooks of the pages write the files ------------------------------


def make_batch(seed: int, rows: int = 16) -> dict[str, torch.Tensor]:
    """Return padded tensors of a random batch, and rewards."""
    completions = random_batch(seed, rows, share_on_policy=0.0)
    width = MAX_COMPLETION_LENGTH
    found: dict[str, torch.Tensor] = {}
    for name in ("mask", "logp", "old_logp", "ref_logp", "sampler_logp"):
        full = torch.zeros(rows, width)
        for i, c in enumerate(completions):
            values = getattr(c, name).detach().float()
            full[i, : len(values)] = torch.where(values.isnan(), c.old_logp.float(), values)
        found[name] = full
    found["mask"][:, 0] = 1.0
    found["length"] = torch.tensor([len(c.mask) for c in completions])
    found["rewards"] = torch.tensor(np.random.default_rng([seed, 3]).normal(size=rows).round(2), dtype=torch.float32)
    return found


def ppo(logp, old, advantages, low=0.2, high=0.2, dual=None, *, wrong=""):
    """Return -min(r A, clip(r) A), and with `dual` at most -dual A where A < 0: verl's and slime's policy loss."""
    r = torch.exp(logp - old)
    pick = torch.minimum if wrong == "clip" else torch.maximum
    loss = pick(-r * advantages, -r.clamp(1 - low, 1 + high) * advantages)
    return loss if dual is None else torch.where(advantages < 0, torch.minimum(-dual * advantages, loss), loss)


def fake(name: str, **members) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def modules(**named) -> dict[str, ModuleType]:
    """Return modules by dotted name ("a__b" is a.b), with all parents."""
    found: dict[str, ModuleType] = {}
    for name, members in named.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            dotted = ".".join(parts[:end])
            module = found.setdefault(dotted, fake(dotted, __path__=[]))
            if end > 1:
                setattr(found[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(found[".".join(parts)]).update(members)
    return found


def dump_verl(folder: Path, seed: int, *, mode="token-mean", micro_rows=4, wrong="", correction=False, kl=0.0, horizon=None) -> Path:
    """Dump like verl 0.8.0 and 0.9.1: verl/workers/utils/losses.py (ppo_loss), verl/trainer/ppo/core_algos.py (agg_loss, GRPO)."""
    b = make_batch(seed)
    grouped = b["rewards"].view(-1, G)
    std = grouped.std(dim=1, unbiased=wrong != "n", keepdim=True) + 1e-6
    scores = ((grouped - grouped.mean(dim=1, keepdim=True)) / std).view(-1, 1)
    data: dict = {
        "response_mask": b["mask"], "advantages": scores * b["mask"], "old_log_probs": b["old_logp"], "ref_log_prob": b["ref_logp"],
        "token_level_scores": torch.zeros_like(b["mask"]).index_fill_(1, torch.tensor([0]), 1.0) * b["rewards"][:, None],
    }  # fmt: skip
    if correction:
        rho = torch.exp(b["old_logp"] - b["sampler_logp"])
        if wrong == "side":
            rho = 1 / rho
        data |= {"rollout_log_probs": b["sampler_logp"], "rollout_is_weights": rho.clamp(max=2.0) * b["mask"]}

    def agg(loss, mask, tokens, rows):
        if wrong == "padding":
            return (loss * mask).sum() / mask.numel() * len(mask) / rows
        if mode == "token-mean" and wrong not in ("length", "micro"):
            return (loss * mask).sum() / tokens
        if wrong == "micro":
            return (loss * mask).sum() / mask.sum() * len(mask) / rows
        sums = (loss * mask).sum(-1) / (mask.sum(-1) if mode == "seq-mean-token-mean" or wrong == "length" else 1.0)
        return sums.sum() / rows / (horizon or mask.shape[-1] if mode == "seq-mean-token-sum-norm" else 1)

    def ppo_loss(config, model_output, data, dp_group=None):
        log_prob, mask, old = model_output["log_probs"], data["response_mask"], data["old_log_probs"]
        old, dual = log_prob.detach() if wrong == "stale" else old, None if wrong == "dual" else 3.0
        loss = ppo(log_prob, old, data["advantages"], dual=dual, wrong=wrong)
        loss = loss * data.get("rollout_is_weights", torch.ones(())) ** (2 if wrong == "twice" else 1)
        total = agg(loss, mask, data["batch_num_tokens"], data["global_batch_size"])
        if kl:
            d = (data["ref_log_prob"] - log_prob).clamp(-20, 20)
            total = total + kl * agg((d.exp() - d - 1).clamp(-10, 10), mask, data["batch_num_tokens"], data["global_batch_size"])
        return total, {}

    class TrainingWorker:
        engine = SimpleNamespace(get_data_parallel_group=lambda: None)

        def train_mini_batch(self, data):
            self.train_batch(data)

        def train_batch(self, data):
            for first in range(0, 16, micro_rows):
                at, more = slice(first, first + micro_rows), {"batch_num_tokens": b["mask"].sum().item(), "global_batch_size": 16}
                given = {name: x[at] for name, x in data.items() if torch.is_tensor(x)} | more
                config = SimpleNamespace(loss_scale_factor=horizon, loss_agg_mode=mode)
                loss, _ = workers.ppo_loss(config, {"log_probs": b["logp"][at].clone().requires_grad_()}, given)
                loss.backward()

    made = modules(
        verl={"__version__": "0.9.1"}, verl__workers__engine_workers={"TrainingWorker": TrainingWorker, "ppo_loss": ppo_loss},
        verl__workers__utils__padding={"no_padding_2_padding": lambda x, data: x},
    )  # fmt: skip
    workers = made["verl.workers.engine_workers"]
    run_hook("verl", made, folder)
    TrainingWorker().train_mini_batch(data | {"uid": [f"u{i // G}" for i in range(16)]})
    return folder


def run_hook(system: str, made: dict[str, ModuleType], folder: Path) -> dict:
    """Run the program of a page with these modules."""
    folder.mkdir(parents=True, exist_ok=True)
    space: dict = {}
    one = {"get_rank": lambda group=None: 0, "get_world_size": lambda group=None: 1}
    with mock.patch.dict(sys.modules, made):
        exec(read_hook(system), space)
    space["os"] = SimpleNamespace(environ={"REFEREE_DUMP": str(folder)}, makedirs=os.makedirs)
    space["dist"] = SimpleNamespace(**one)
    space["torch"] = fake("torch", **{n: getattr(torch, n) for n in ("is_tensor", "autograd", "cat")}, distributed=space["dist"])
    return space


def dump_slime(folder: Path, seed: int, *, per_token=False, wrong="", kl=0.0) -> Path:
    """Dump like slime 624b824: slime/backends/megatron_utils/loss.py (policy_loss_function), slime/utils/ppo_utils.py."""
    b = make_batch(seed)
    lengths = b["length"].tolist()
    advantages = compute_slime_advantages(b, wrong)

    def cut(x, at):
        return [x[i, : lengths[i]] for i in at]

    def score(logits):
        return None, {"log_probs": logits}

    def policy_loss_function(args, batch, logits, sum_of_sample_mean):
        logps = loss_module.get_log_probs_and_entropy(logits)[1]["log_probs"]
        logp, old, ref = (torch.cat(list(x)) for x in (logps, batch["log_probs"], batch["ref_log_probs"]))
        loss = ppo(logp, logp.detach() if wrong == "stale" else old, torch.cat(batch["advantages"]), wrong=wrong)
        total = sum_of_sample_mean(loss)
        if kl:
            d = ref - logp if wrong != "kl side" else logp - ref
            total = total + kl * sum_of_sample_mean(d.exp() - 1 - d if wrong != "k2" else d * d / 2)
        return total, {}

    made = modules(
        megatron__core={"mpu": SimpleNamespace(get_data_parallel_rank=lambda: 0, get_data_parallel_world_size=lambda: 1)},
        slime__backends__megatron_utils__loss={"get_log_probs_and_entropy": score, "policy_loss_function": policy_loss_function},
        slime__backends__megatron_utils__model={"train_one_step": None},
    )  # fmt: skip
    loss_module, model = (made[f"slime.backends.megatron_utils.{name}"] for name in ("loss", "model"))

    def train_one_step():
        for first in range(0, 16, 4):
            at = range(first, first + 4)
            names = {"loss_masks": "mask", "log_probs": "old_logp", "ref_log_probs": "ref_logp", "rollout_log_probs": "sampler_logp"}
            batch = {name: cut(b[key], at) for name, key in names.items()} | {"response_lengths": [lengths[i] for i in at]}
            batch["advantages"] = [torch.full((lengths[i],), float(advantages[i])) for i in at]
            logits = [x.clone().requires_grad_() for x in cut(b["logp"], at)]

            def reducer(x, batch=batch):
                parts = [(one, m) for one, m in zip(x.split(batch["response_lengths"]), batch["loss_masks"], strict=True)]
                if wrong == "mask":
                    return sum((one * m).sum() / len(m) for one, m in parts)
                return sum((one * m).sum() / (1 if per_token else m.sum()) for one, m in parts)

            space["dumping_loss"](SimpleNamespace(kl_loss_type="k3"), batch, logits, reducer)

    model.train_one_step = train_one_step
    with mock.patch("importlib.metadata.version", lambda name: "0.3.1"):
        space = run_hook("slime", made, folder)
        model.train_one_step()
    return folder


def compute_slime_advantages(b, wrong=""):
    """Return advantages like slime/ray/rollout.py, _post_process_rewards."""
    grouped = b["rewards"].view(-1, G)
    std = grouped.std(dim=-1, keepdim=True, unbiased=wrong != "n")
    centered = grouped - (grouped.mean(dim=-1, keepdim=True) if wrong != "group" else grouped.mean())
    return (centered / (std + 1e-6)).flatten()


def dump_slime_train_data(folder: Path, seed: int, *, wrong="", version=2) -> Path:
    """Dump like slime 624b824, slime/observability/train_data_utils.py (_build_dump_payload)."""
    b = make_batch(seed)
    advantages, lengths = compute_slime_advantages(b, wrong), b["length"].tolist()
    samples = [
        {"data_parallel_rank": i % 2, "rollout_position": i, "tokens": torch.arange(lengths[i] + 2), "response_lengths": lengths[i],
         "loss_masks": b["mask"][i, : lengths[i]].int(), "advantages": torch.full((lengths[i],), float(advantages[i])),
         "log_probs": b["old_logp"][i, : lengths[i]], "rollout_log_probs": b["sampler_logp"][i, : lengths[i]], "truncated": 0}
        for i in range(16)
    ]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    payload = {
        "format_version": version,
        "rollout_id": 7,
        "rank": 0,
        "samples": samples,
        "dp_shards": [],
        "raw_reward": b["rewards"].tolist(),
    }
    torch.save(payload, folder / "train_7.pt")
    return folder / "train_7.pt"


def dump_swift(folder: Path, seed: int, *, loss_type="grpo", wrong="", beta=0.0, overlong=False, mode=None) -> Path:
    """Dump like ms-swift 4.6.0, swift/megatron/trainers/grpo_trainer.py (loss_func)."""
    b = make_batch(seed)
    advantages = torch.randn(16, 1, generator=torch.Generator().manual_seed(seed)).expand(-1, b["mask"].shape[1])
    truncated = b["length"] == b["length"].max()

    class MegatronGRPOTrainer:
        args, _step = SimpleNamespace(output_dir=str(folder)), 3

        def loss_func(self, output_tensor, data):
            g = data["grpo_batch"]
            mask, logps = g.completion_mask.clone(), output_tensor
            if overlong and wrong != "truncated":
                mask[g.truncated_mask] = 0.0
            loss = ppo(logps, g.old_per_token_logps, g.advantages, wrong=wrong)
            if beta:
                d = (g.ref_per_token_logps - logps).clamp(-20, 20)
                loss = loss + (-beta if wrong == "kl" else beta) * (d.exp() - d - 1)
            if mode is not None:
                log_rho = (g.old_per_token_logps - g.rollout_per_token_logps).clamp(-20, 20)
                means = (log_rho * g.completion_mask).sum(-1) / g.completion_mask.sum(-1)
                rho = log_rho.exp()
                weights = {"token_truncate": rho.clamp(max=2.0), "sequence_mask": rho * (means.exp() <= 2.0)[:, None]}[mode]
                loss = loss * weights ** {"twice": 2, "none": 0}.get(wrong, 1)
            if loss_type in ("dapo", "bnpo") and wrong != "micro":
                return (loss * mask).sum() / g.num_items_in_batch * (1 if wrong == "scale" else 4), {}  # 4 micro-batches
            if wrong in ("token mean", "micro"):
                return (loss * mask).sum() / mask.sum(), {}
            return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean(), {}

    made = modules(
        megatron__core={"mpu": SimpleNamespace(get_data_parallel_rank=lambda: 0, get_data_parallel_world_size=lambda: 1)},
        swift={"__version__": "4.6.0"}, swift__megatron__trainers__grpo_trainer={"MegatronGRPOTrainer": MegatronGRPOTrainer},
    )  # fmt: skip
    run_hook("swift", made, folder)
    for first in range(0, 16, 4):
        at = slice(first, first + 4)
        batch = SimpleNamespace(
            completion_mask=b["mask"][at], truncated_mask=truncated[at], advantages=advantages[at], old_per_token_logps=b["old_logp"][at],
            ref_per_token_logps=b["ref_logp"][at], rollout_per_token_logps=b["sampler_logp"][at], num_items_in_batch=b["mask"].sum(),
        )  # fmt: skip
        MegatronGRPOTrainer().loss_func(b["logp"][at].clone().requires_grad_(), {"grpo_batch": batch})
    return folder / "referee"


def write_swift_completions(folder: Path, seed: int, *, wrong="") -> Path:
    """Write completions like ms-swift 4.6.0: rollout_mixin.py and grpo_trainer.py (_build_log_table), rl_core/advantage.py."""
    b = make_batch(seed)
    grouped = b["rewards"].view(-1, G)
    advantages = (
        (grouped - grouped.mean(dim=1, keepdim=True)) / (grouped.std(dim=1, unbiased=wrong != "n", keepdim=True) + 1e-4)
    ).flatten()
    table = {"gen_step": [2] * 16, "prompt": ["p"] * 16, "completion": ["c"] * 16, "accuracy": b["rewards"].tolist()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "completions.jsonl"
    path.write_text(json.dumps(table | {"advantages": advantages.tolist()}) + "\n")
    return path
