"""Compare loss, gradients and weights of every parallel layout with a float64 reference, and write the matrix of docs/parity.md.

    python tools/parity.py [--layouts "TP2 SP" CP2 ...] [--models dense biases MoE MLA GLM OLMo Gemma]
                           [--only losses|shared|offload|replay|sequences|zero_gradient]
    python tools/parity.py --odd 240 [--seed 0] [--layouts 1 "TP2 SP" ...]

Ranks are processes connected by gloo. The reference is transformers' model with the written-out equations, in one process. A complete run
takes an hour on two cores; with --layouts, --models or --only the page is not written. `--odd N` draws N models with unusual sizes over all
families (tests/odd_sizes.py) and compares one step of each; refused models are printed with their error. The exit code is 1 if any
difference exceeds the limits.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: ranks share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script, only its own folder is on the path

from megatron_grpo.core.weights.shape import ModelShape  # noqa: E402
from tests import parity_cases as cases  # noqa: E402
from tests.ranks import RanksFailed  # noqa: E402

STEPS = 3
MODELS = cases.MODELS | cases.FAMILIES  # the page has the first ones only
LIMITS = {"loss": 1e-6, "gradient": 1e-5, "weight": 1e-5}


def main() -> int:
    """Run the selected comparison and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=[], choices=cases.LAYOUTS, metavar="LAYOUT")
    parser.add_argument("--models", nargs="+", default=list(cases.MODELS), choices=MODELS)
    parser.add_argument("--only", choices=["losses", "shared", "offload", "replay", "sequences", "zero_gradient"],
                        help="run one of the two tables, or training with offload, forced experts, sequence-level losses or groups of "
                        "equal rewards; no page is written",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "parity.md")
    parser.add_argument("--odd", type=int, metavar="N", help="compare N models of unusual sizes in each layout (default layout: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the models that --odd draws")
    args = parser.parse_args()
    if args.odd is not None:
        return compare_odd_sizes(args.odd, args.seed, args.layouts or ["1"])
    if args.only == "offload":
        return compare_offload()
    if args.only == "replay":
        return compare_replays([model for model in args.models if model in cases.WITH_EXPERTS], args.layouts or list(cases.LAYOUTS))
    if args.only == "zero_gradient":
        return compare_zero_gradient(args.layouts or list(cases.ZERO_GRADIENT_LAYOUTS))
    if args.only == "sequences":
        return compare_sequence_losses(args.models, args.layouts or list(cases.LAYOUTS))
    with tempfile.TemporaryDirectory() as folder:
        layouts, in_part = args.layouts or list(cases.LAYOUTS), bool(args.layouts or args.only or args.models != list(cases.MODELS))
        matrices = {model: Matrix(model, Path(folder)) for model in (args.models if args.only != "shared" else ())}
        table = {model: matrix.run(layouts) for model, matrix in matrices.items()}
        shared = {model: compare_shared_prompts(model, Path(folder), layouts) for model in (args.models if args.only != "losses" else ())}
        ways = {} if in_part else compare_other_ways(matrices, Path(folder))
    everything = list_cells(table, ways, shared)
    red = [distance for distance in everything if not distance.within(**LIMITS)]
    if not in_part:
        publish(args.out, make_page(table, ways, shared))
        print(f"wrote {args.out}")
    print(f"{len(everything)} cells, {len(red)} beyond {LIMITS}")
    return 1 if red else 0


def compare_odd_sizes(count: int, seed: int, layouts: list[str]) -> int:
    """Compare one step of random models of all families with transformers; return the exit code.

    Args:
        count: Number of models.
        seed: Seed of their sizes.
        layouts: Names of the layouts.
    """
    from transformers.utils import logging

    from tests import odd_sizes as odd

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    red = 0
    for layout in layouts:
        start, kinds, worst = time.perf_counter(), Counter[str](), [0.0, 0.0]
        for first in range(0, count, 48):  # models whose files are on disk at the same time
            with tempfile.TemporaryDirectory() as folder:
                numbers = range(first, min(first + 48, count))
                found = odd.outcomes(Path(folder), numbers, seed, cases.LAYOUTS[layout])
            for (number, family), (one, changes) in found.items():
                kinds[one.kind] += 1
                if one.kind == "equal":
                    worst = [max(worst[0], one.logprob), max(worst[1], one.gradient)]
                else:
                    drawn = f" {changes}" if one.kind in ("wrong", "crashed") else ""
                    print(f"{layout}, {number} ({family}) {one.kind}: {one.said}{drawn}", flush=True)
        red += kinds["wrong"] + kinds["crashed"]
        counts, seconds = ", ".join(f"{number} {kind}" for kind, number in kinds.items()), time.perf_counter() - start
        print(f"{layout}: {counts} of {count} (transformers rejects the others); worst log-prob {worst[0]:.1e}, "
              f"worst gradient {worst[1]:.1e} ({seconds:.0f} s)", flush=True)  # fmt: skip
    return 1 if red else 0


def compare_offload() -> int:
    """Compare training with all memory offloaded between phases, with resumes, to training without, bit for bit; return the exit code."""
    from tests import offload_cases
    from tests.ranks import run_ranks

    red = 0
    for name, dtype in ((name, dtype) for name in offload_cases.LAYOUTS for dtype in ("float32", "bfloat16")):
        with tempfile.TemporaryDirectory() as folder:
            path, world, settings = offload_cases.read_size_inputs(name, dtype, Path(folder))
            found = run_ranks(offload_cases.differences, world, path, settings, Path(folder), timeout=300)
        wrong = [one for rank in found for problems in rank.values() for one in problems]
        red += bool(wrong)
        print(f"{name}, {dtype}: {'; '.join(wrong[:6]) or 'bit-equal, and all memory is released'}", flush=True)
    print(f"{2 * len(offload_cases.LAYOUTS)} runs, {red} of them wrong")
    return 1 if red else 0


def compare_replays(models: list[str], layouts: list[str]) -> int:
    """Compare steps with forced random experts, or none, for weights and adapters, with and without shared prompts; return the exit code.

    Args:
        models: Names of models with experts.
        layouts: Names of the layouts.
    """
    from tests.lora_cases import write_random_adapter
    from tests.tiny_models import write_tiny

    count = red = 0
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            path = write_tiny(Path(folder) / "model", **MODELS[model])
            own = dict(router_replay_mode="R3", beta=0.05) | cases.MODEL_SETTINGS.get(model, {})
            moe_layers = sum(ModelShape.from_pretrained(path).moe.layers)
            batches = [cases.with_routes(step, moe_layers, seed=i) for i, step in enumerate(cases.shared_rollout(path, num_steps=STEPS))]
            tuners = {
                "weights": own,
                "adapters": own | dict(tuner_type="lora", adapters=str(write_random_adapter(path, Path(folder) / "adapter"))),
            }
            right = {tuner: cases.reference(path, cases.settings(**chosen), batches) for tuner, chosen in tuners.items()}
            for name in (name for name in layouts if cases.suits(cases.LAYOUTS[name], model)):
                runs = {
                    (tuner, cut, share): tuners[tuner] | sizes | dict(share_prefix=share)
                    for tuner in tuners
                    for cut, sizes in cases.SHARED_CUTS.items()
                    for share in ("true", "false")
                    if cases.is_legal(cases.LAYOUTS[name], sizes, cases.SHARED_ROWS)
                }
                found = cases.compare(model, path, cases.LAYOUTS[name], runs, batches, {key: right[key[0]] for key in runs})
                wrong = sum(not distance.within(**LIMITS) for distance in found.values())
                count, red = count + len(found), red + wrong
                print(f"{model:4} {name:18} {len(found):3} runs, worst: {describe(cases.merge_worst(list(found.values())))}", flush=True)
    print(f"{count} runs, {red} beyond {LIMITS}")
    return 1 if red else 0


def compare_sequence_losses(models: list[str], layouts: list[str]) -> int:
    """Compare losses that use other tokens of a sequence or other sequences of a group; return the exit code.

    The limit of the loss is wider: vespo raises a product over a sequence to a power, which amplifies the rounding of log-probs.
    """
    cells, limits = [], LIMITS | {"loss": 1e-5}
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            matrix = Matrix(model, Path(folder), cases.SEQUENCE_LOSSES)
            cells += [(model, *key, distance) for key, distance in matrix.run(layouts).items()]
    for loss in cases.SEQUENCE_LOSSES:
        found = [distance for _, _, its, _, distance in cells if its == loss]
        print(f"{loss}: {len(found)} runs, worst: {describe(cases.merge_worst(found))}")
    red = [cell[:4] for cell in cells if not cell[4].within(**limits)]
    print(f"{len(cells)} cells, {len(red)} beyond {limits}: {red[:8]}")
    return 1 if red else 0


def compare_zero_gradient(layouts: list[str]) -> int:
    """Compare steps in which two of four groups, or all, have equal rewards, with their rows skipped and computed; return the exit code."""
    from tests.tiny_models import write_tiny

    cells = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in ("dense", "MoE"):
            path = write_tiny(Path(folder) / model, **MODELS[model])
            *first, last = cases.stored_rollout(path, num_steps=STEPS, vocab=MODELS[model]["vocab"])
            batches = [*cases.with_zero_std(first, 0, 2), *cases.with_zero_std([last], 0, 1, 2, 3)]
            right = {loss: cases.reference(path, cases.settings(**chosen), batches) for loss, chosen in cases.ZERO_GRADIENT_LOSSES.items()}
            for name in (name for name in layouts if cases.suits(cases.LAYOUTS[name], model)):
                layout = cases.LAYOUTS[name]
                runs = {
                    (loss, cut, is_computed): chosen | sizes | dict(compute_zero_advantage_rows=is_computed, moe_z_loss_coeff=None)
                    for loss, chosen in cases.ZERO_GRADIENT_LOSSES.items()
                    for cut, sizes in cases.CUTS.items()
                    for is_computed in (False, True)
                    if cases.is_legal(layout, sizes)
                }
                found = cases.compare(model, path, layout, runs, batches, {key: right[key[0]] for key in runs})
                cells |= {(model, name, *key): distance for key, distance in found.items()}
                for is_computed, how in ((False, "left out"), (True, "computed")):
                    worst = cases.merge_worst([distance for key, distance in found.items() if key[2] == is_computed])
                    print(f"{model:5} {name:8} {how}, {len(found) // 2} runs, worst: {describe(worst)}", flush=True)
    red = [key for key, distance in cells.items() if not distance.within(**LIMITS | {"loss": 1e-5})]
    print(f"{len(cells)} cells, {len(red)} beyond {LIMITS | {'loss': 1e-5}}: {red[:8]}")
    return 1 if red else 0


def list_cells(table, ways, shared) -> list[cases.Distance]:
    """Return the distances of all tables."""
    return [distance for cells in (*table.values(), *shared.values(), ways) for distance in cells.values()]


class Matrix:
    """Comparisons of one model in all layouts, losses and batch splits.

    Args:
        model: Name of the model.
        folder: Folder of its checkpoint.
        losses: Settings of each loss.
    """

    def __init__(self, model: str, folder: Path, losses=cases.LOSSES):
        from tests.tiny_models import write_tiny

        self.losses = losses
        self.model, self.path = model, write_tiny(folder / model, **MODELS[model])
        self.batches = cases.stored_rollout(self.path, num_steps=STEPS, vocab=MODELS[model]["vocab"])
        own = cases.MODEL_SETTINGS.get(model, {})
        self.references = {
            loss: cases.reference(self.path, cases.settings(**own, **chosen), self.batches) for loss, chosen in losses.items()
        }

    def run(self, layouts: list[str]) -> dict[tuple[str, str, str], cases.Distance]:
        """Compare all cases in the given layouts; return the distance by (layout, loss, batch split)."""
        cells = {}
        for name in layouts:
            layout = cases.LAYOUTS[name]
            if not cases.suits(layout, self.model):
                continue
            start = time.perf_counter()
            runs = {(loss, cut): self.losses[loss] | cases.CUTS[cut] for loss in self.losses for cut in cases.CUTS
                    if cases.is_legal(layout, cases.CUTS[cut])}  # fmt: skip
            found = self.compare(layout, runs)
            cells |= {(name, *key): distance for key, distance in found.items()}
            worst, seconds = cases.merge_worst(list(found.values())), time.perf_counter() - start
            print(f"{self.model:7} {name:18} {len(runs):3} runs, worst: {describe(worst)} ({seconds:.0f} s)", flush=True)
        return cells

    def compare(self, layout, runs):
        """Return the distances of some runs in one layout; those of a failed layout are infinite."""
        references = {key: self.references[key[0]] for key in runs}
        try:
            return cases.compare(self.model, self.path, layout, runs, self.batches, references)
        except RanksFailed as error:  # continue with the other layouts
            print(f"{error}", file=sys.stderr)
            return dict.fromkeys(runs, cases.Distance.failed())


# Columns of the second table: trained parameters, and whether each prompt is computed once.
COLUMNS = {(tuner, once): dict(share_prefix=str(once).lower()) for tuner in ("weights", "adapters") for once in (True, False)}


def compare_shared_prompts(model: str, folder: Path, layouts: list[str]) -> dict[tuple[str, tuple[str, bool]], cases.Distance]:
    """Compare shared prompts and adapters; return the worst distance over losses and batch splits by (layout, column).

    Groups differ in size and length. Sliding windows are widened to cover whole sequences, because a narrow window leaves no prompt to
    share.
    """
    from tests.lora_cases import BESIDE_ATTENTION, ODD, write_random_adapter
    from tests.tiny_models import write_tiny

    wide = {"sliding_window": 512} if "sliding_window" in MODELS[model] else {}
    path = write_tiny(folder / f"{model}, shared", **MODELS[model] | wide)
    batches, own = cases.shared_rollout(path, num_steps=STEPS), cases.MODEL_SETTINGS.get(model, {})
    adapters = own | dict(tuner_type="lora", adapters=str(write_random_adapter(path, folder / f"{model}, adapter",
                                                                          BESIDE_ATTENTION if model == "gpt-oss" else ODD)))  # fmt: skip
    settings, found = {"weights": own, "adapters": adapters}, {}
    references = {
        (tuner, loss): cases.reference(path, cases.settings(**chosen, **cases.LOSSES[loss]), batches)
        for tuner, chosen in settings.items()
        for loss in ("dapo", "dr_grpo", "GSPO", "cispo")
    }
    for name, column in ((name, column) for name in layouts if cases.suits(cases.LAYOUTS[name], model) for column in COLUMNS):
        layout, tuner = cases.LAYOUTS[name], column[0]
        cuts = [cut for cut, sizes in cases.SHARED_CUTS.items() if cases.is_legal(layout, sizes, cases.SHARED_ROWS)]
        runs = {
            (tuner, loss, cut): settings[tuner] | cases.LOSSES[loss] | cases.SHARED_CUTS[cut] | COLUMNS[column]
            for tuner, loss in (key for key in references if key[0] == tuner)
            for cut in cuts
        }
        try:
            distances = cases.compare(model, path, layout, runs, batches, {key: references[key[:2]] for key in runs})
            found[name, column] = cases.merge_worst(list(distances.values()))
        except RanksFailed as error:  # continue with the other layouts
            print(f"{error}", file=sys.stderr)
            found[name, column] = cases.Distance.failed()
        how = f"{tuner}, prompts {'once' if column[1] else 'G times'}"
        print(f"{model:7} {name:18} {how}, worst: {describe(found[name, column])}", flush=True)
    return found


def compare_other_ways(matrices: dict[str, Matrix], folder: Path) -> dict[str, cases.Distance]:
    """Compare other settings that must give the same step; return the distance by name.

    Args:
        matrices: Matrices by model; missing ones are added.
        folder: Folder of the checkpoints.
    """
    found = {}
    for name, (layout, chosen) in cases.WAYS.items():
        model = "MoE" if cases.LAYOUTS[layout].needs_experts else "dense"
        if model not in matrices:
            matrices[model] = Matrix(model, folder)
        found[name] = matrices[model].compare(cases.LAYOUTS[layout], {("dapo", name): cases.LOSSES["dapo"] | chosen})["dapo", name]
        print(f"{model:7} {name}: {describe(found[name])}", flush=True)
    return found


def describe(distance) -> str:
    """Return a phrase with the numbers of a distance."""
    return f"loss {distance.loss:.0e}, norm {distance.grad_norm:.0e}, gradient {distance.gradient:.0e}, weights {distance.weight:.0e}"


def publish(path: Path, matrix: str) -> None:
    """Replace the generated part of the page, or write a page of the matrix only."""
    begin, end = "<!-- parity -->\n", "<!-- /parity -->"
    before = path.read_text(encoding="utf-8") if path.exists() else f"# Gradient parity\n\n{begin}{end}\n"
    head, _, rest = before.partition(begin)
    path.write_text(f"{head}{begin}{matrix}{end}{rest.partition(end)[2]}", encoding="utf-8")


def make_page(table, ways, shared) -> str:
    """Return the part of docs/parity.md that a complete run writes."""
    import megatron.core
    import torch
    import transformers

    everything = list_cells(table, ways, shared)
    lines = [
        "## The matrix", "",
        f"Run on {time.strftime('%Y-%m-%d')} with megatron-core {megatron.core.__version__}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}: {len(everything)} runs; the worst gradient tensor is off by "
        f"{max(d.gradient for d in everything):.1e}.", "",
        "Each cell is the **worst relative error of any gradient tensor** (norm of the difference over norm of the tensor) over every "
        f"batch split ({', '.join(cases.CUTS)}). The row `1` is one rank, nothing sharded: the error of float32 itself.", "",
        "Eight completions of 1 to 12 tokens, two of each of four prompts of 1 to 11; a vocabulary of 125; half of the completions stale, "
        f"some tokens not trained; {STEPS} AdamW steps with clipping and weight decay. Models of four layers: dense (Qwen3, tied "
        "embeddings), biases (Qwen2), MoE (Qwen3-MoE, four experts, two a token, with z-loss), MLA (DeepSeek-V3: latent attention, one "
        "dense layer, shared experts, sigmoid router).", "",
        "SP: sequence parallel. VPP: interleaved stages. EP, ETP: expert parallel, expert tensor parallel. DPn: n data-parallel ranks, "
        "with the distributed optimizer.", "",
    ]  # fmt: skip
    for model, cells in table.items():
        lines += [f"### {model}", "", "| layout | " + " | ".join(cases.LOSSES) + " | loss | gradient norm | weights after 3 steps |"]
        lines += ["|---" * (len(cases.LOSSES) + 4) + "|"]
        for name in dict.fromkeys(layout for layout, _, _ in cells):
            row = {key[1:]: distance for key, distance in cells.items() if key[0] == name}
            worst = cases.merge_worst(list(row.values()))
            errors = [max(d.gradient for (loss, _), d in row.items() if loss == chosen) for chosen in cases.LOSSES]
            numbers = [*errors, worst.loss, worst.grad_norm, worst.weight]
            lines.append(f"| {name} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |")
        lines.append("")
    lines += make_shared_section(shared)
    lines += ["### Other ways to run the same step", ""]
    lines += ["| way | layout | gradient | loss | gradient norm | weights after 3 steps |", "|---" * 6 + "|"]
    for name, d in ways.items():
        lines.append(f"| {name} | {cases.WAYS[name][0]} | {d.gradient:.1e} | {d.loss:.1e} | {d.grad_norm:.1e} | {d.weight:.1e} |")
    return "\n".join(lines) + "\n"


def make_shared_section(shared) -> list[str]:
    """Return the lines of the table of shared prompts and adapters."""
    lines = [
        "### Shared prompts and adapters", "",
        "[Shared prompts](shared_prompts.md): sixteen completions in five groups of 8 and 2, of 1 to 20 tokens, behind prompts of 1 to 40; "
        "one begins like another, two are equal, two groups have one prompt. [Adapters](lora.md): on every linear layer, experts each with "
        "their own, three ranks and two alphas; the other side is PEFT. Worst relative error of any gradient over four losses (dapo, "
        f"dr_grpo, GSPO, cispo) and {len(cases.SHARED_CUTS)} cuts, with each prompt computed once in each micro-batch, or for every "
        "completion; then the worst of the four columns.", "",
        "| model | layout | weights, once | weights, G times | adapters, once | adapters, G times | loss | gradient norm | after 3 steps |",
        "|---" * 9 + "|",
    ]  # fmt: skip
    for model, cells in shared.items():
        for name in dict.fromkeys(layout for layout, _ in cells):
            row = [cells[name, column] for column in COLUMNS]
            worst = cases.merge_worst(row)
            numbers = [*(d.gradient for d in row), worst.loss, worst.grad_norm, worst.weight]
            lines.append(f"| {model} | {name} | " + " | ".join(f"{number:.1e}" for number in numbers) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(main())
