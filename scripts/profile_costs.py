"""Measure what documents cost on this device, for cost_model.profile: attention over (query, key) lengths, the rest of
a layer over tokens.

    python scripts/profile_costs.py --job.config_file F.toml --out P.json [--check 50]

Forward and backward, medians, one process, for the recipe's model, precision and tensor-parallel degree. With --check
N, N micro-batches of the recipe's documents are then packed, trained and compared with their prediction (without tensor
parallelism only).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from scripts.origin import hardware, write_results
from scripts.recipe import Recipe, resolve_recipe
from scripts.timing import Clock, FreeAttention, block_share, kernel_milliseconds, make_inputs, medians
from torchtitan_wlb.config import JobConfig, Parallelism
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.step_time import without_pipelining
from torchtitan_wlb.data.dataloader import make_planner
from torchtitan_wlb.data.step_builder import Layout, StepBuilder
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.loss import IGNORE_INDEX
from torchtitan_wlb.models.attention import AttentionMeta
from torchtitan_wlb.models.kernels import Segments, select_kernel
from torchtitan_wlb.models.llama import LossHead, Transformer
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.models.rotary import rotary_table
from torchtitan_wlb.packing.quality import measure

ENOUGH: dict[str, Any] = {"least_seconds": 0.2, "runs": 3}  # of a measurement
FILLED = 65536  # queries of a call on a GPU


def timed(forward: Callable[[], torch.Tensor], device: torch.device, clock: Clock) -> tuple[float, float]:
    """Median milliseconds of (forward, backward) of a function that returns a tensor with a graph."""
    return medians(device, forward, lambda out: out.backward(torch.ones_like(out)), clock=clock, **ENOUGH)


def measure_attention(
    args: ModelArgs,
    tp: int,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    clock: Clock = time.perf_counter,
    whole_only: bool = False,
) -> list[dict]:
    """Rows q, k, forward_ms, backward_ms of one layer on one rank: k = q are whole documents, k > q chunks at the end
    of one. On a GPU a call is filled with equal segments, as it is in training: a short one alone would leave most of
    the device idle and be timed for that."""
    kernel = select_kernel(device.type, dtype)
    heads, kv_heads = args.n_heads // tp, max(1, args.n_kv_heads // tp)
    knots = [x for x in (2**i for i in range(4, 30)) if x < longest] + [longest]
    rows = []
    for k in knots:
        for q in [x for x in knots if x == k or (k // 64 <= x < k and not whole_only)]:
            n = max(1, min(FILLED // q, 16 * FILLED // k)) if device.type == "cuda" else 1
            tensors = make_inputs(device, dtype, n * q, n * k, heads, kv_heads, args.head_dim)
            segments = Segments.of([q] * n, [k] * n, device)
            forward_ms, backward_ms = kernel_milliseconds(kernel, tensors, segments, clock=clock, **ENOUGH)
            rows.append({"q": q, "k": k, "forward_ms": forward_ms / n, "backward_ms": backward_ms / n})
    return rows


def measure_linear(
    args: ModelArgs,
    n_ids: int,
    tp: int,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    clock: Clock = time.perf_counter,
) -> list[dict]:
    """Rows tokens, layer_ms, head_ms (forward + backward): a layer whose attention is free, and head with loss."""
    block = block_share(args, tp, FreeAttention()).to(device, dtype)
    head = LossHead(args.dim, args.vocab_size // tp, min(n_ids, args.vocab_size // tp), 1024).to(device, dtype)
    torch.nn.init.normal_(head.weight, 0.0, 0.02)
    rope = rotary_table(args, longest, device)
    rows = []
    for tokens in sorted({max(64, longest * i // 8) for i in (1, 2, 3, 4, 6, 8, 12)}):
        x = torch.randn(1, tokens, args.dim, dtype=dtype, device=device, requires_grad=True)
        labels = torch.randint(0, head.n_ids, (1, tokens), device=device)
        positions = torch.arange(tokens, device=device) % longest
        layer = timed(partial(block, x, rope=rope[positions], meta=AttentionMeta.of([])), device, clock)
        top = timed(partial(head, x, labels), device, clock)
        rows.append({"tokens": tokens, "layer_ms": sum(layer), "head_ms": sum(top)})
    return rows


def on_one_rank(config: JobConfig, profile: str) -> Recipe:
    """The recipe as one process would run it, with 4 micro-batches a step; profile: of its costs, "" for none."""
    config = config.model_copy(deep=True)
    config.parallelism = Parallelism()
    config.training.global_batch_size = 4
    config.cost_model.profile = profile
    return resolve_recipe(config, seed=0)


def check(config: JobConfig, profile: str, n: int, device: torch.device) -> dict:
    """Train n micro-batches of the recipe's documents one by one and compare with the prediction."""
    documents = on_one_rank(config, "").own_documents()
    planner = partial(make_planner, documents)
    report: dict = {}
    for name, path in (("analytic", ""), ("profiled", profile)):
        recipe = on_one_rank(config, path)
        cost = recipe.settings.cost
        wlb, paper = recipe.tuned(planner, "wlb"), recipe.tuned(planner, "wlb_paper")
        report[name] = {
            "equal_length": cost.equal_length(),
            "auto_delay_price": wlb.delay_price,
            "auto_outlier_thresholds": paper.thresholds,
            "imbalance_mean_wlb": measure(planner(wlb), 200, 50).imbalance_mean,
        }
    model = Transformer(recipe.args, n_ids=recipe.args.n_ids, max_position=config.training.seq_len).to(device)
    model.init_weights(0, device)
    unused = analytic_kernel_cost(DEVICES["cpu"], 1.0, 1.0)  # one rank has nothing to choose
    layout = Layout(
        dp=1, dp_rank=0, cp=1, cp_rank=0, tp=1, tp_rank=0, sharding="adaptive", kernel_cost=unused,
        step_model=without_pipelining(1),
    )  # fmt: skip
    plain = replace(wlb, strategy="plain")  # different work in every micro-batch
    builder = StepBuilder(documents, plain, layout)
    rows = []
    for plan in planner(plain):
        for b in range(plain.n):
            mb = builder.micro_batch(plan.micro_batch(b))[0].to(device)
            valid = int((mb.labels != IGNORE_INDEX).sum())

            def run(mb=mb, valid=valid):
                return model(
                    mb.tokens, positions=mb.positions, meta=mb.attention, labels=mb.labels, loss_scale=1 / valid
                )

            predicted = float(cost.documents(np.array(mb.lengths)).sum()) + cost.fixed_cost
            rows.append(
                {
                    "tokens": mb.n_tokens,
                    "documents": len(mb.lengths),
                    "predicted_ms": predicted * 1e3,
                    "measured_ms": sum(timed(run, device, time.perf_counter)),
                }
            )
        if len(rows) >= n:
            break
    errors = [abs(r["predicted_ms"] - r["measured_ms"]) / r["measured_ms"] for r in rows[:n]]
    report |= {"mean_absolute_error": statistics.mean(errors), "largest_error": max(errors), "micro_batches": rows[:n]}
    return report


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--check", type=int, default=0)
    arguments, rest = parser.parse_known_args(argv)
    config = load_config(rest)
    config.cost_model.profile = ""  # which may be the file that is to be written
    recipe = resolve_recipe(config)
    args, tp = recipe.args, recipe.dims.tp
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as under torchrun
    dtype, longest = getattr(torch, config.training.mixed_precision_param), config.training.seq_len
    if arguments.check and (tp > 1 or dtype != torch.float32):
        raise ConfigError("--check works without tensor parallelism and in float32 only")
    profile: dict = {
        "device": hardware() if device.type == "cuda" else f"one core of a {hardware()}",
        "flavor": config.model.flavor,
        "model": {k: getattr(args, k) for k in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")},
        "dtype": config.training.mixed_precision_param,
        "tp": tp,
        "attention": measure_attention(args, tp, dtype, device, longest),
        "linear": measure_linear(args, recipe.args.n_ids, tp, dtype, device, longest),
    }
    write_results(arguments.out, profile)
    for row in profile["attention"]:
        if row["q"] == row["k"]:
            print(
                f"attention of one layer, {row['q']:7,} tokens: {row['forward_ms']:9.3f} + {row['backward_ms']:9.3f} ms"
            )
    for row in profile["linear"]:
        print(
            f"{row['tokens']:7,} tokens: layer without attention {row['layer_ms']:9.3f} ms, "
            f"head and loss {row['head_ms']:9.3f} ms"
        )
    if arguments.check:
        report = check(config, arguments.out, arguments.check, device)
        write_results(arguments.out, profile | {"check": report})
        print(
            f"{len(report['micro_batches'])} micro-batches: mean absolute error {report['mean_absolute_error']:.1%}, "
            f"largest {report['largest_error']:.1%}"
        )
        for name in ("analytic", "profiled"):
            print(name, report[name])


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])
