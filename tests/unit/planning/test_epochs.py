"""Ends of epochs: against TRL's trainer, and against loops written after verl, SkyRL, slime and Megatron-SWIFT."""

from __future__ import annotations

import io
import json
from itertools import count

import pytest

from megatron_grpo.commands.planning.command import Plan, make_plan
from megatron_grpo.commands.planning.figure import draw
from megatron_grpo.commands.planning.report import print_report
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.core.batching.schedule import TrainingSchedule
from megatron_grpo.core.policy.requirements import make_lr_schedule
from megatron_grpo.run.schedule import schedule_run
from tests.checked import check


def make_run_plan(words: str, rows: int | None) -> Plan:
    return make_plan(schedule_run(check(words.split()), rows))


def catch_error(words: str, rows: int) -> str:
    with pytest.raises(ConfigError) as error:
        make_run_plan(words, rows)
    return str(error.value)


def load_plan_json(made: Plan) -> dict:
    """Of plan --json."""
    return json.loads(made.as_json())


def list_steps(schedule: TrainingSchedule) -> list[int]:
    """The optimizer step of each micro-step of the run."""
    assert schedule.num_steps is not None
    return [schedule.find_step(s) for s in range(schedule.find_first_micro_step(schedule.num_steps))]


# ---- TRL ---------------------------------------------------------------------------------------------------------------------------------


def list_steps_of_trl(tmp_path, rows: int, words: dict[str, float]) -> tuple[list[int], list[float]]:
    """(optimizer step of each micro-step, learning rates) of transformers' Trainer with the sampler and the loader of TRL's."""
    pytest.importorskip("trl", reason="TRL is a test-only dependency: pip install megatron-grpo[dev]")
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    class StepRecordingTrainer(transformers.Trainer):
        get_train_dataloader, _get_train_sampler = GRPOTrainer.get_train_dataloader, GRPOTrainer._get_train_sampler

        def _prepare_inputs(self, inputs):
            return inputs

        def compute_loss(self, model, inputs, **others):
            found.append(self.state.global_step)
            if not self.state.global_step or found[-1] != found[-2]:
                rates.append(self.lr_scheduler.get_last_lr()[0])
            return model.weight.sum() * 0

    found: list[int] = []
    rates: list[float] = []
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
                      logging_strategy="no", gradient_checkpointing=False, remove_unused_columns=False, **words)  # fmt: skip
    trainer = StepRecordingTrainer(
        model=torch.nn.Linear(1, 1), args=args, train_dataset=[{"n": n} for n in range(rows)], data_collator=list
    )
    trainer.num_generations, trainer.num_iterations, trainer.shuffle_dataset = args.num_generations, args.num_iterations, True
    trainer.train()
    return found, rates[:1] + [rate for rate, before in zip(rates[1:], rates) if rate != before]


TRL = [  # rows, G, per device, A, W in micro-steps, mu, epochs, max_steps
    (8, 4, 2, 3, 2, 1, 3, -1),  # an epoch of 8 rollouts, 16 micro-steps: 18 optimizer steps, and 16 if they went on
    (9, 4, 4, 3, 2, 1, 2, -1),  # a prompt is left over
    (10, 2, 2, 4, 3, 2, 1, -1),
    (7, 2, 2, 4, 3, 1, 2.5, -1),  # half an epoch
    (10, 2, 2, 2, 2, 1, 1.1, -1),  # 1.1 x 10 is 11.000000000000002 for it
    (3, 2, 2, 8, 2, 1, 3, -1),  # an epoch is shorter than a step
    (8, 4, 2, 3, 2, 1, 1, 8),  # max_steps: epochs end all the same
    (16, 4, 4, 2, 4, 1, 2, -1),  # all comes out even
]  # fmt: skip


@pytest.mark.parametrize("case", TRL, ids=str)
def test_epoch_micro_steps_belong_to_same_optimizer_steps_as_in_trl(tmp_path, case):
    rows, group, size, a, window, passes, epochs, most = case
    words = {"num_generations": group, "per_device_train_batch_size": size, "gradient_accumulation_steps": a, "num_iterations": passes,
             "steps_per_generation": window, "num_train_epochs": epochs, "max_steps": most, "learning_rate": 1e-3}  # fmt: skip
    theirs, rates = list_steps_of_trl(tmp_path, rows, words)
    made = make_run_plan("--dialect trl " + " ".join(f"--{name} {value}" for name, value in words.items()), rows)
    assert list_steps(made.schedule) == theirs
    num_steps, optimizer = made.schedule.num_steps, made.checked.config.optimizer
    course = make_lr_schedule(optimizer, num_steps)
    assert rates == pytest.approx([1e-3 * (1 - step / course.decay) for step in range(num_steps)])


def test_epoch_rest_dropped_by_trl_is_reported_in_plan():
    words = "--dialect trl --per_device_train_batch_size 4 --gradient_accumulation_steps 3 --steps_per_generation 2 --num_generations 4 "
    made, told = make_run_plan(f"{words} --num_train_epochs 3 --plan_rollouts 4", 9), io.StringIO()
    found = load_plan_json(made)
    assert found["epochs"] == {
        "prompts": 8, "dropped_prompts": 1, "optimizer_steps": 3, "micro_steps_of_last_step": 2, "ends_after_steps": [3, 6, 9]}  # fmt: skip
    assert [row["optimizer_step"] for row in found["timetable"]] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert "--dataset_drop_last true" in found["native_flags"]
    print_report(made, file=told)
    said = " ".join(told.getvalue().split())
    assert "9 optimizer steps, 12 rollouts over 9 prompts" in said
    assert (
        "3 optimizer steps of 8 prompts, the last with 2 of 3 micro-steps; 1 prompts do not fill a rollout and are dropped; epochs end in"
        in said
    )
    assert "steps 2, 5, 8" in said and "left out, always the last ones" not in said
    figure = [line.plain for line in draw(made.schedule, 4, width=100)]
    assert [place for place, line in enumerate(figure) if "end of epoch 0" in line] == [2 + 7]
    assert figure[-1].startswith("└ ") and max(map(len, figure)) <= 100
    unshuffled = io.StringIO()
    print_report(make_run_plan(f"{words} --shuffle_dataset false", 9), file=unshuffled)
    assert "always the last ones" in " ".join(unshuffled.getvalue().split())


def test_epoch_with_streaming_continues_rollout_into_next_with_note():
    words = "--dialect trl --num_generations 8 --dataset_streaming true --max_prompt_length 9 --max_steps 5"
    made = make_run_plan(words, None)
    assert not made.checked.config.data.dataset_drop_last
    assert any(warning.startswith("streaming: TRL drops prompts that do not fill a rollout") for warning in made.warnings)
    said = catch_error("--streaming true --max_prompt_length 9 --max_steps 5 --dataset_drop_last true", 8)
    assert "Omit dataset_drop_last" in said


# ---- the others --------------------------------------------------------------------------------------------------------------------------


def count_verl_steps(rows, batch, mini, n, epochs, most=None) -> int:
    """RayPPOTrainer of verl and SkyRL: a loader with drop_last=True, whose batches are trained in mini-batches; a batch is a step there."""
    loader = [range(i, i + batch) for i in range(0, rows, batch) if i + batch <= rows]
    assert loader, "Train dataloader is empty!"
    total, rollouts, steps = most or len(loader) * epochs, 0, 0
    for _ in range(epochs):
        for prompts in loader:
            rollouts += 1
            steps += len(prompts) * n // (mini * n)
            if rollouts >= total:
                return steps
    return steps


def count_slime_steps(rows, batch, mini, n, epochs) -> int:
    num_rollout = rows // batch * epochs  # get_num_rollout_per_epoch
    assert num_rollout > 0
    return sum(batch * n // (mini * n) for _ in range(num_rollout))


def count_swift_steps(rows, batch, mini, n, epochs, *, unit=1) -> int:
    """init_iters, and cyclic_iter, which ends a run one step after the one that finds the last epoch at its end."""
    train_iters, iteration, steps = rows // unit * unit * n * epochs // (mini * n), 0, batch // mini
    state = {"train_iters": train_iters}

    def cyclic():
        for epoch in count():
            yield from range(rows // unit * unit)
            if epoch >= epochs - 1:
                state["train_iters"] = iteration + 1

    prompts = cyclic()
    while iteration < state["train_iters"]:
        if iteration % steps == 0:
            for _ in range(batch):
                next(prompts)
        iteration += 1
    return iteration


SIZES = [  # rows, prompts a rollout, prompts a step, completions a prompt, epochs
    (1500, 1024, 256, 5, 2), (1024, 1024, 256, 4, 3), (1900, 1024, 256, 2, 1), (2047, 1024, 1024, 2, 3), (2300, 1024, 256, 2, 2),
    (40, 8, 8, 2, 2), (45, 8, 4, 2, 3), (47, 16, 4, 2, 1),
]  # fmt: skip
WORDS = {
    "verl": lambda batch, mini, n, epochs: (
        f"data.train_batch_size={batch} actor_rollout_ref.actor.ppo_mini_batch_size={mini} actor_rollout_ref.rollout.n={n} "
        f"trainer.total_epochs={epochs} trainer.n_gpus_per_node=2 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    ),
    "skyrl": lambda batch, mini, n, epochs: (
        f"trainer.train_batch_size={batch} trainer.policy_mini_batch_size={mini} generator.n_samples_per_prompt={n} trainer.epochs={epochs}"
    ),
    "slime": lambda batch, mini, n, epochs: (
        f"--rollout-batch-size {batch} --global-batch-size {mini * n} --n-samples-per-prompt {n} --num-epoch {epochs} "
        "--actor-num-gpus-per-node 1 --colocate"
    ),
    "swift": lambda batch, mini, n, epochs: (
        f"--steps_per_generation {batch // mini} --global_batch_size {mini * n} --num_generations {n} --num_train_epochs {epochs}"
    ),
}


def split_words(dialect: str, *sizes: int) -> str:
    return f"--dialect {dialect} {WORDS[dialect](*sizes)}"


@pytest.mark.parametrize("case", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dialect", "theirs"),
    [("verl", count_verl_steps), ("skyrl", count_verl_steps), ("slime", count_slime_steps), ("swift", count_swift_steps)],
)
def test_epoch_number_of_steps_equals_that_of_the_framework(dialect, theirs, case):
    rows, *sizes = case
    made = make_run_plan(split_words(dialect, *sizes), rows)
    assert made.schedule.num_steps == theirs(*case)
    assert made.schedule.drops_last == (dialect in ("verl", "skyrl"))
    again = make_run_plan(made.rest()["native_flags"], rows)  # the same run, natively: what was worked out stands in it
    assert again.schedule == made.schedule


def test_epoch_rest_dropped_by_megatron_swift_is_noted():
    words = split_words("swift", 8, 4, 2, 3) + " --micro_batch_size 2 --world_size 2"
    made = make_run_plan(words, 45)
    assert made.schedule.num_steps == count_swift_steps(45, 8, 4, 2, 3, unit=4) == 33
    said = " ".join(made.warnings)
    assert "rows of an epoch that do not fill micro_batch_size x dp_size are dropped there, and used here" in said
    assert "3 epochs of 45 prompts are 33 optimizer steps in Megatron-SWIFT: max_steps 33." in said
    assert make_run_plan(words, None).schedule.num_steps is None


@pytest.mark.parametrize(("dialect", "most"), [("verl", "trainer.total_training_steps"), ("skyrl", "trainer.max_training_steps")])
def test_epochs_limit_the_number_of_rollouts(dialect, most):
    """Two epochs of two rollouts, and nine asked for, and three."""
    words = split_words(dialect, 16, 8, 2, 2)
    for asked in (9, 3):
        made = make_run_plan(f"{words} {most}={asked}", 45)
        assert made.schedule.num_steps == count_verl_steps(45, 16, 8, 2, 2, most=asked) == 2 * min(asked, 4)
        assert ("2 epochs of 45 prompts are 8 optimizer steps in" in " ".join(made.warnings)) == (asked == 9)
    assert make_run_plan(f"{words} {most}=9 --dataset_drop_last false", 45).schedule.num_steps == 18


@pytest.mark.parametrize("dialect", ["trl", *WORDS])
def test_dataset_smaller_than_a_rollout_with_drop_last_is_rejected(dialect):
    words = (
        split_words(dialect, 64, 64, 2, 1) if dialect in WORDS else "--dialect trl --per_device_train_batch_size 128 --num_generations 2"
    )
    assert "Nothing would be trained: the data set has 60 prompts, a rollout takes 64" in catch_error(words, 60)
    make_run_plan(words, 64)
    assert make_run_plan("--global_batch_size 128 --num_generations 2", 60).schedule.num_steps == 1, "here it goes on into the next epoch"


def test_epoch_with_dynamic_sampling_of_verl_gives_a_note():
    words = split_words("verl", 16, 8, 2, 2)
    assert any(
        "prompts that dynamic_sample samples in addition shorten an epoch there" in one
        for one in make_run_plan(f"{words} --dynamic_sample", 45).warnings
    )
    assert not any("samples in addition" in one for one in make_run_plan(words, 45).warnings)


def test_epoch_last_step_incompatible_with_interleaved_pipeline_is_rejected():
    words = "--world_size 2 --pipeline_model_parallel_size 2 --virtual_pipeline_model_parallel_size 2 --num_generations 2 "
    words += "--micro_batch_size 2 --global_batch_size 8 --generation_batch_size 6 --allow_unaligned_generation true "
    said = catch_error(f"{words} --dataset_drop_last true", 9)
    assert "has 1 micro-steps, but the interleaved pipeline schedule requires a multiple of pipeline_model_parallel_size (2)" in said
    make_run_plan(words, 9)
    make_run_plan(f"{words} --dataset_drop_last true --max_steps 2", 9)  # which does not come to it
    words += "--dataset_drop_last true"
    make_run_plan(words, 12)


def test_plan_without_dataset_notes_that_epoch_length_is_unknown():
    words = "--global_batch_size 8 --num_generations 2 --max_steps 4 --dataset_drop_last true"
    assert ["the length of an epoch is unknown" in " ".join(make_run_plan(words, rows).warnings) for rows in (None, 16)] == [True, False]


def test_plan_shows_steps_in_which_epochs_end():
    """14 prompts, 4 a step."""
    made, told = make_run_plan("--global_batch_size 8 --num_generations 2 --num_train_epochs 3", 14), io.StringIO()
    assert load_plan_json(made)["epochs"] == {
        "prompts": 14, "dropped_prompts": 0, "optimizer_steps": 3.5, "micro_steps_of_last_step": 8,
        "ends_after_steps": [4, 7, 11]}  # fmt: skip
    print_report(made, file=told)
    assert "3.5 optimizer steps of 14 prompts; epochs end in steps 3, 6, 10" in " ".join(told.getvalue().split())
    assert "epochs" not in load_plan_json(make_run_plan("--global_batch_size 8 --num_generations 2", None))
