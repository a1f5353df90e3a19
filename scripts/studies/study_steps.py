"""Predicted step of the 7B recipe in layouts that this machine cannot run: which part of the method gives how much.

    python scripts/studies/study_steps.py --lengths L.json --out assets/results/step_model_7b.json

For every layout and part (packing and context-parallel sharding) the steps of one stream of documents, 50 of warm-up
and then --steps / DP (at least 40), go through the time model of the recipe's schedule: attention of a micro-batch
takes as long as on the slowest context-parallel rank under its shard plan, with its exchange over the link that it has
there, everything else what its padded tokens cost. Nothing is measured: costs are those of the built-in H100 model.
`over_plain` is tokens/s over packing and sharding of the first part; plain cuts documents at the window and so has less
work a token than the others (work_per_token, relative to it).

L.json is a list of lengths for a window of 128K; they are scaled to other windows.
"""

import argparse
import sys
from itertools import islice

import numpy as np

from scripts.origin import write_results
from scripts.recipe import Lengths, resolve_recipe
from scripts.simulate_packing import WARMUP
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.context_parallel.selection import choose_plan, latency
from torchtitan_wlb.cost.profile import build_kernel_cost
from torchtitan_wlb.data.micro_batch import padded_length
from torchtitan_wlb.packing.planner import StepPlan
from torchtitan_wlb.packing.quality import slowest_pipeline
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.spans import lengths

# With micro-batches of a window on average, as the paper's.
RECIPE = [
    "--job.config_file", "train_configs/llama_7b_128k_wlb.toml",
    "--training.global_batch_size", "-1", "--training.micro_batch_tokens", "-1",
]  # fmt: skip
# window, (TP, CP, PP, DP): the paper's 7B, then more replicas, then a longer context-parallel group.
LAYOUTS = (
    (65536, (4, 2, 4, 1)),
    (131072, (8, 2, 4, 1)),
    (131072, (8, 2, 4, 2)),
    (131072, (8, 2, 4, 8)),
    (131072, (8, 2, 4, 32)),
    (131072, (8, 8, 4, 1)),
    (131072, (8, 8, 4, 8)),
)
PARTS = (
    ("plain", "per_sequence"),
    ("plain", "per_document"),
    ("plain", "adaptive"),
    ("plain_whole", "per_sequence"),
    ("wlb", "per_sequence"),
    ("wlb", "adaptive"),
)


class Layout:
    """A layout of the recipe: its time model and costs.

    Args:
        rest: flags that override the recipe.
    """

    def __init__(self, window: int, degrees: tuple[int, int, int, int], rest: list[str]):
        tp, self.cp, pp, self.dp = degrees
        flags = {
            "training.seq_len": window,
            "parallelism.tensor_parallel_degree": tp,
            "parallelism.context_parallel_degree": self.cp,
            "parallelism.pipeline_parallel_degree": pp,
            "parallelism.data_parallel_shard_degree": self.dp,
        }
        words = [x for k, v in flags.items() for x in (f"--{k}", str(v))]
        self.recipe = recipe = resolve_recipe(load_config([*RECIPE, *words, *rest]), seed=0)
        self.model, self.layers, self.tp = recipe.step_model(), recipe.args.n_layers, tp
        self.kernel = build_kernel_cost(
            recipe.profile, recipe.device, recipe.args, tp=tp, cp=self.cp, bytes_per_value=2
        )

    def step_seconds(self, plan: StepPlan, settings: PackingSettings, sharding: str) -> float:
        """Predicted seconds of the slowest pipeline."""
        tokens = np.array([padded_length(int(t), self.cp, self.tp, 1) for t in plan.padded])
        attention = np.zeros(len(tokens))
        for b, t in enumerate(tokens.tolist()):
            shards = choose_plan(lengths(plan.micro_batch(b)).tolist(), t, self.cp, sharding, self.kernel)
            attention[b] = self.layers * latency(shards, self.kernel)
        linear = settings.cost.token_cost * tokens + settings.cost.fixed_cost
        return slowest_pipeline(plan, attention, linear, tokens, settings, self.model, self.dp)


def study(layout: Layout, documents: Lengths, steps: int) -> list[dict]:
    """A row for every part."""
    rows: list[dict] = []
    for strategy, sharding in PARTS:
        settings = layout.recipe.tuned(documents.planner, strategy)
        plans = list(islice(documents.planner(settings), WARMUP, WARMUP + steps))
        seconds = [layout.step_seconds(p, settings, sharding) for p in plans]
        tokens = sum(p.tokens for p in plans)
        row = {
            "packing": strategy,
            "sharding": sharding,
            "step_time_s": float(np.mean(seconds)),
            "tokens_per_s": tokens / sum(seconds),
            "work_per_token": float(sum(settings.cost.documents(lengths(p.spans)).sum() for p in plans)) / tokens,
            "imbalance": float(np.mean([p.imbalance for p in plans])),
        }
        rows.append(row)
    first = rows[0].copy()
    for row in rows:
        row["over_plain"] = row["tokens_per_s"] / first["tokens_per_s"]
        row["work_per_token"] /= first["work_per_token"]
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", required=True)
    arguments, rest = parser.parse_known_args(argv)
    results = []
    for window, degrees in LAYOUTS:
        layout = Layout(window, degrees, rest)
        documents = Lengths(arguments.lengths, layout.recipe.config, scale=window / 131072)
        # The same number of micro-batches planned for every layout, within reason.
        steps = max(min(40, arguments.steps), arguments.steps // layout.dp)
        for row in study(layout, documents, steps):
            results.append({"window": window, **dict(zip(("tp", "cp", "pp", "dp"), degrees)), "steps": steps} | row)
            print(results[-1], flush=True)
    write_results(arguments.out, results, "cpu")


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
