"""Measure what documents cost on this device, for cost_model.profile: attention over (query, key) lengths, the rest of
a layer over tokens.

    python scripts/profile_costs.py --job.config_file F.toml --out P.json [--check 50]

Forward and backward, medians, one process, for the recipe's model, precision and tensor-parallel degree. With --check
N, N micro-batches of the recipe's documents are then packed, trained and compared with their prediction (without tensor
parallelism only).
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.context_parallel.attention import context_parallel_attention
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.profile import build_cost_model, detect_device
from torchtitan_wlb.cost.step_time import without_pipelining
from torchtitan_wlb.data.dataloader import make_planner
from torchtitan_wlb.data.documents import load_documents
from torchtitan_wlb.data.micro_batch import IGNORE_INDEX, AttentionMeta, Layout, build_micro_batch
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.models.attention import select_kernel
from torchtitan_wlb.models.llama import LossHead, ModelArgs, Transformer, TransformerBlock, llama_configs, rotary_table
from torchtitan_wlb.packing.quality import measure
from torchtitan_wlb.packing.settings import resolve_settings
from torchtitan_wlb.packing.tuning import tune

MIN_SECONDS, MIN_RUNS = 0.2, 3  # per measurement


def clock() -> float:
    """Seconds, when all work so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(forward: Callable[[], torch.Tensor], clock: Callable[[], float] = clock) -> tuple[float, float]:
    """Median milliseconds of (forward, backward) of a function that returns a tensor with a graph."""
    runs: list[tuple[float, float]] = []
    began = time.perf_counter()
    while len(runs) < MIN_RUNS + 1 or time.perf_counter() - began < MIN_SECONDS:
        a = clock()
        out = forward()
        b = clock()
        out.backward(torch.ones_like(out))
        runs.append((b - a, clock() - b))
    forwards, backwards = zip(*runs[1:])  # the first one warms up
    return statistics.median(forwards) * 1e3, statistics.median(backwards) * 1e3


def measure_attention(
    args: ModelArgs,
    tp: int,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    clock: Callable[[], float] = clock,
    whole_only: bool = False,
) -> list[dict]:
    """Rows q, k, forward_ms, backward_ms of one layer on one rank: k = q are whole documents, k > q chunks at the end
    of one."""
    kernel = select_kernel(device.type, dtype)
    heads, kv_heads = args.n_heads // tp, max(1, args.n_kv_heads // tp)
    knots = [x for x in (2**i for i in range(4, 30)) if x < longest] + [longest]
    rows = []
    for k in knots:
        for q in [x for x in knots if x == k or (k // 64 <= x < k and not whole_only)]:
            x = [
                torch.randn(n, h, args.head_dim, dtype=dtype, device=device)
                for n, h in ((q, heads), (k, kv_heads), (k, kv_heads))
            ]
            query, key, value = (t.requires_grad_() for t in x)
            meta = AttentionMeta([(0, q, 0, k)])
            attend = partial(context_parallel_attention, query[None], key[None], value[None], meta, kernel, None)
            forward_ms, backward_ms = timed(attend, clock)
            rows.append({"q": q, "k": k, "forward_ms": forward_ms, "backward_ms": backward_ms})
    return rows


def measure_linear(
    args: ModelArgs,
    n_ids: int,
    tp: int,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    clock: Callable[[], float] = clock,
) -> list[dict]:
    """Rows tokens, layer_ms, head_ms (forward + backward): a layer whose attention is free, and head with loss."""
    if tp > 1:  # one rank's share of every matrix; activations between them stay whole
        args = replace(
            args, n_heads=args.n_heads // tp, n_kv_heads=max(1, args.n_kv_heads // tp), ffn_dim=args.ffn_dim // tp
        )
    block = TransformerBlock(args).to(device, dtype)
    block.attention.attend = lambda q, k, v, meta: q + 0 * (k.sum() + v.sum())  # type: ignore[method-assign]
    head = LossHead(args.dim, args.vocab_size // tp, min(n_ids, args.vocab_size // tp), 1024).to(device, dtype)
    torch.nn.init.normal_(head.weight, 0.0, 0.02)
    rope = rotary_table(args, longest, device)
    rows = []
    for tokens in sorted({max(64, longest * i // 8) for i in (1, 2, 3, 4, 6, 8, 12)}):
        x = torch.randn(1, tokens, args.dim, dtype=dtype, device=device, requires_grad=True)
        labels = torch.randint(0, head.n_ids, (1, tokens), device=device)
        positions = torch.arange(tokens, device=device) % longest
        layer = timed(partial(block, x, rope=rope[positions], meta=AttentionMeta([])), clock)
        top = timed(partial(head, x, labels), clock)
        rows.append({"tokens": tokens, "layer_ms": sum(layer), "head_ms": sum(top)})
    return rows


def check(config: JobConfig, profile: str, args: ModelArgs, tokenizer: Tokenizer, n: int, device: torch.device) -> dict:
    """Train n micro-batches of the recipe's documents one by one and compare with the prediction."""
    t = config.training
    documents = load_documents(t, tokenizer, t.dataset, t.dataset_path, t.dataset_weight)
    planner = partial(make_planner, documents)
    report: dict = {}
    for name, path in (("analytic", ""), ("profiled", profile)):
        cost = build_cost_model(path, detect_device(config.cost_model.device), args, tp=1, cp=1)
        settings = resolve_settings(t, config.packing, seed=0, dp=1, pp=1, cost=cost, documents=documents.fingerprint)
        settings = replace(settings, n=4)
        wlb = tune(replace(settings, strategy="wlb"), config.packing.target_delay, planner)
        paper = tune(replace(settings, strategy="wlb_paper"), config.packing.target_delay, planner)
        report[name] = {
            "equal_length": cost.equal_length(),
            "auto_delay_price": wlb.delay_price,
            "auto_outlier_thresholds": paper.thresholds,
            "imbalance_mean_wlb": measure(planner(wlb), 200, 50).imbalance_mean,
        }
    model = Transformer(args, n_ids=tokenizer.n_ids, max_position=t.seq_len).to(device)
    model.init_weights(0, device)
    unused = analytic_kernel_cost(DEVICES["cpu"], 1.0, 1.0)  # one rank has nothing to choose
    layout = Layout(
        dp=1, dp_rank=0, cp=1, cp_rank=0, tp=1, tp_rank=0, sharding="adaptive", kernel_cost=unused,
        step_model=without_pipelining(1),
    )  # fmt: skip
    rows = []
    for plan in planner(replace(wlb, strategy="plain")):  # different work in every micro-batch
        for b in range(4):
            mb = build_micro_batch(plan.micro_batch(b), documents, layout, t.length_multiple).to(device)
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
                    "measured_ms": sum(timed(run)),
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
    if config.model.flavor not in llama_configs:
        raise ConfigError(f"--model.flavor {config.model.flavor}: legal are {', '.join(llama_configs)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # as under torchrun
    dtype = getattr(torch, config.training.mixed_precision_param)
    tokenizer = Tokenizer(config.model.tokenizer)
    args = replace(llama_configs[config.model.flavor], vocab_size=tokenizer.padded_vocab_size)
    tp, longest = config.parallelism.tensor_parallel_degree, config.training.seq_len
    profile: dict = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "one core of an x86 CPU",
        "torch": torch.__version__.split("+")[0],
        "flavor": config.model.flavor,
        "model": {k: getattr(args, k) for k in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")},
        "dtype": config.training.mixed_precision_param,
        "tp": tp,
        "attention": measure_attention(args, tp, dtype, device, longest),
        "linear": measure_linear(args, tokenizer.n_ids, tp, dtype, device, longest),
    }
    Path(arguments.out).write_text(json.dumps(profile, indent=1))
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
        if tp > 1 or dtype != torch.float32:
            raise ConfigError("--check works without tensor parallelism and in float32 only")
        report = check(config, arguments.out, args, tokenizer, arguments.check, device)
        profile["check"] = report
        Path(arguments.out).write_text(json.dumps(profile, indent=1))
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
