"""Compare all packing strategies on one stream of document lengths: no tensors, no process group.

    python scripts/simulate_packing.py --job.config_file F.toml --lengths L.json --steps 500 --seed 0 --json OUT [--plot
    P.png]

L.json is a list of lengths; longer ones follow training.long_documents. Statistics (packing/quality.py says what they
mean) are over --steps steps after 50 of warm-up. step_time_s is the predicted step of the recipe's layout and
schedule, over_plain what follows from it in tokens/s. The last row is the strategy wlb with the recipe's setting.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.profile import build_cost_model, detect_device
from torchtitan_wlb.cost.step_time import StepModel
from torchtitan_wlb.data.documents import apply_length_policy
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.models.llama import ModelArgs, llama_configs
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.quality import Quality, measure
from torchtitan_wlb.packing.settings import PackingSettings, resolve_settings
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.pipeline_llama import plan_pipeline

WARMUP = 50
COLUMNS = (
    "imbalance_mean",
    "imbalance_p99",
    "time_vs_ideal",
    "delay_mean_steps",
    "delay_max_steps",
    "plan_ms_mean",
    "pad_fraction",
    "step_time_s",
    "over_plain",
)


class Stream:
    """Documents of a list of lengths (times scale), after the length policy of a recipe."""

    def __init__(self, path: str, config: JobConfig, scale: float = 1.0):
        rows = np.ceil(np.asarray(json.loads(Path(path).read_text())) * scale).astype(np.int64)
        table, _ = apply_length_policy(rows, config.training.seq_len, config.training.long_documents)
        self.lengths = table[:, 2] - table[:, 1]
        self.lengths = self.lengths[self.lengths > 1]

    def planner(self, settings: PackingSettings) -> StepPlanner:
        return StepPlanner(settings, [len(self.lengths)], [1.0], lambda ids: self.lengths[ids])


def recipe_args(config: JobConfig) -> ModelArgs:
    vocab_size = Tokenizer(config.model.tokenizer).padded_vocab_size
    return replace(llama_configs[config.model.flavor], vocab_size=vocab_size)


def recipe_settings(config: JobConfig, seed: int) -> PackingSettings:
    """Settings of a recipe for its own layout, "auto" left open."""
    p = config.parallelism
    dp = p.data_parallel_replicate_degree * max(1, p.data_parallel_shard_degree)
    device = detect_device(config.cost_model.device)
    cost = build_cost_model(
        config.cost_model.profile,
        device,
        recipe_args(config),
        tp=p.tensor_parallel_degree,
        cp=p.context_parallel_degree,
    )
    return resolve_settings(
        config.training, config.packing, seed=seed, dp=dp, pp=p.pipeline_parallel_degree, cost=cost, documents=""
    )


def recipe_pipelines(config: JobConfig, settings: PackingSettings) -> tuple[StepModel, int]:
    """The time model of a recipe's pipelines, and how many there are."""
    p = config.parallelism
    dp = p.data_parallel_replicate_degree * max(1, p.data_parallel_shard_degree)
    args = recipe_args(config)
    plan = plan_pipeline(
        args,
        schedule=p.pipeline_parallel_schedule,
        pp=p.pipeline_parallel_degree,
        stages_per_rank=p.pipeline_parallel_stages_per_rank,
        m=settings.n // dp,
        seq_len=config.training.seq_len,
        cost=settings.cost,
        device=DEVICES[detect_device(config.cost_model.device)],
        bytes_per_token=2 * args.dim / (p.tensor_parallel_degree * p.context_parallel_degree),
        recomputed=config.activation_checkpoint.recomputed,
    )
    return plan.step_model, dp


def settings_to_compare(base: PackingSettings, target: float, stream: Stream) -> Iterator[tuple[str, PackingSettings]]:
    """(setting, settings) of every row."""
    yield "-", replace(base, strategy="plain")
    yield "-", replace(base, strategy="plain_whole")
    for window in (1, 2, 4, 8):
        yield f"window {window}", replace(base, strategy="fixed", window=window)
    yield f"window 1, {base.solver_nodes} nodes", replace(base, strategy="fixed_solver", window=1)
    s = base.seq_len
    # 40K and 80K at a window of 128K, and the same shares of other windows.
    for share in ((10,), (10, 20), (8, 14, 22)):
        thresholds = tuple(s * x // 32 for x in share)
        yield f"queues {' '.join(map(str, thresholds))}", replace(base, strategy="wlb_paper", thresholds=thresholds)
    wlb = replace(base, strategy="wlb")
    for price in (0.05, 0.1, 0.2, 0.4):
        yield f"delay_price {price}", replace(wlb, delay_price=price)
    recipe = tune(wlb, target, stream.planner)
    yield f"delay_price {recipe.delay_price:.3g} (recipe)", recipe


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", required=True)
    parser.add_argument("--plot", default="")
    arguments, rest = parser.parse_known_args(argv)
    config = load_config(rest)
    stream = Stream(arguments.lengths, config)
    base = recipe_settings(config, arguments.seed)
    model, dp = recipe_pipelines(config, base)
    print(f"{len(stream.lengths):,} documents, mean {stream.lengths.mean():,.0f} tokens; {base.describe()}")
    rows: list[dict] = []
    traces = {}
    print(
        f"{'strategy':13} {'setting':32} "
        + " ".join(f"{c.replace('_steps', '').replace('imbalance', 'imb'):>13}" for c in COLUMNS)
    )
    for setting, settings in settings_to_compare(base, config.packing.target_delay, stream):
        planner = stream.planner(settings)
        quality, trace = simulate(planner, arguments.steps, f"{settings.strategy} {setting}", model, dp)
        rows.append({"strategy": settings.strategy, "setting": setting} | quality.row())
        rows[-1]["over_plain"] = (quality.tokens_per_step / quality.step_time_s) / (
            rows[0]["tokens_per_step"] / rows[0]["step_time_s"]
        )
        traces[f"{settings.strategy} {setting}"] = trace
        print(f"{settings.strategy:13} {setting:32} " + " ".join(f"{rows[-1][c]:13.4f}" for c in COLUMNS), flush=True)
    Path(arguments.json).write_text(json.dumps(rows, indent=1))
    if arguments.plot:
        plot(traces, arguments.plot)


def simulate(
    planner: StepPlanner, steps: int, name: str, model: StepModel | None = None, dp: int = 1
) -> tuple[Quality, dict[str, list]]:
    """Quality of a planner and its trace: imbalance of every step, (delay, tokens) of every span; with a progress bar
    on a terminal."""
    trace: dict[str, list] = {"imbalance": [], "delay": [], "tokens": []}
    shown = [0.0]

    def each(plan) -> None:
        trace["imbalance"].append(plan.imbalance)
        trace["delay"] += (plan.step - plan.spans[:, 3]).tolist()
        trace["tokens"] += (plan.spans[:, 2] - plan.spans[:, 1]).tolist()
        if sys.stderr.isatty() and time.monotonic() - shown[0] > 0.2:
            shown[0] = time.monotonic()
            print(f"\\r{name}: step {plan.step - WARMUP} of {steps} ", end="", file=sys.stderr, flush=True)

    quality = measure(planner, steps, WARMUP, each, model, dp)
    if sys.stderr.isatty():
        print("\\r" + " " * 80 + "\\r", end="", file=sys.stderr, flush=True)
    return quality, trace


def plot(traces: dict[str, dict[str, list]], path: str) -> None:
    """Imbalance over steps, and the share of tokens by delay, one line a strategy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wanted = [n for n in traces if n.startswith(("plain -", "fixed window 4", "wlb_paper")) or "(recipe)" in n]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    for name in wanted:
        trace = traces[name]
        left.plot(np.sort(trace["imbalance"])[::-1], label=name)
        tokens = np.bincount(trace["delay"], trace["tokens"])
        right.plot(1 - np.cumsum(tokens) / tokens.sum(), marker=".", label=name)
    left.set(xlabel="steps, most imbalanced first", ylabel="max / mean predicted work", title="imbalance of the steps")
    right.set(xlabel="steps", ylabel="share of tokens", title="tokens that wait longer", yscale="log", ylim=(1e-5, 1))
    left.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    with exit_on_config_error():
        main(sys.argv[1:])
