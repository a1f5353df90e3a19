"""What only a GPU can tell, in about seven minutes (run by scripts/gpu_check.sh); written after each section.

kernels  which attention kernels run here, and why others do not
parity   each against the reference in fp32: grouped heads, one-token documents, 300 documents, none, chunks
grid     milliseconds over (query, key) lengths, forward and backward, in calls filled with equal segments and alone
calls    long and short documents in one call or in two
plans    local and later segments of every rank of the three shard plans (WLB-LLM Figure 15), measured and predicted
layer    one TP8 rank's share of a 7B layer: time, host time and kept memory, eager and compiled, by checkpointing mode
model    550M on one device: tokens/s, MFU, memory; loss and norm against fp32; lengths that were never seen

Needs torch (2.11 or newer) and numpy only, and the repository on PYTHONPATH. Without a GPU it runs a small version on
the CPU, to see that it works. A section that fails says so and the next one runs.
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from scripts.origin import origin, write_results
from scripts.timing import attend_and_back, block_share, kernel_milliseconds, make_inputs, medians
from torchtitan_wlb.context_parallel.selection import KINDS, attention_seconds, build_plan
from torchtitan_wlb.cost.devices import peak_flops
from torchtitan_wlb.cost.kernel_cost import measured_kernel_cost
from torchtitan_wlb.cost.memory import block_bytes
from torchtitan_wlb.data.synthetic import synthetic_lengths
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.models.attention import AttentionMeta, PackedAttention
from torchtitan_wlb.models.kernels import KERNELS, LARGEST_ERROR, SDPA, Segments, select_kernel
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import llama_configs
from torchtitan_wlb.models.rotary import rotary_table

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = (torch.device("cuda"), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
HEADS, LONGEST, FILLED = (8, 131072, 65536) if ON_GPU else (1, 2048, 0)
SECONDS = {"grid": 90, "plans": 110, "layer": 70, "model": 80} if ON_GPU else dict.fromkeys(("grid", "plans"), 10)
Rows = list[dict[str, Any]]


def documents_of(window: int, seed: int) -> list[int]:
    """Lengths of the paper's shape that fill a window, the last one cut."""
    rng, pool = random.Random(seed), synthetic_lengths(f"wlb_128k:20000:{window / 131072}").tolist()
    lengths: list[int] = []
    while sum(lengths) < window:
        lengths.append(min(rng.choice(pool), window - sum(lengths)))
    return lengths


def kernels(results: dict) -> Rows:
    rows = []
    for name in KERNELS:
        try:
            rows.append({"kernel": select_kernel(DEVICE.type, DTYPE, name).name, "runs": True})
        except ConfigError as error:
            rows.append({"kernel": name, "runs": False, "reason": error.problems[0]})
    results["kernel"] = select_kernel(DEVICE.type, DTYPE).name
    return rows


def parity(results: dict) -> Rows:
    cases = {
        "whole, one token, chunks": ([300, 1, 299, 300], [300, 1, 699, 999]),
        "300 documents": ([7] * 300, [7] * 300),
        "nothing": ([], []),
    }
    rows = []
    for name in [r["kernel"] for r in results["kernels"] if r["runs"]]:
        kernel = select_kernel(DEVICE.type, DTYPE, name)
        for case, (q, k) in cases.items():
            for heads, kv_heads, dim in ((8, 8, 128), (8, 1, 128), (8, 2, 64)):
                torch.manual_seed(0)
                tensors = make_inputs(DEVICE, DTYPE, sum(q), sum(k), heads, kv_heads, dim)
                segments = Segments.of(q, k, DEVICE)
                row = {"kernel": name, "case": case, "heads": heads, "kv_heads": kv_heads, "head_dim": dim}
                if q:
                    truth = attend_and_back(SDPA, [t.float() for t in tensors], segments)
                    got = attend_and_back(kernel, tensors, segments)
                    row["error"] = max(((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, truth))
                    torch.use_deterministic_algorithms(True, warn_only=True)
                    twice = [attend_and_back(kernel, tensors, segments) for _ in range(2)]
                    torch.use_deterministic_algorithms(False)
                    row["same_twice_if_deterministic"] = all(map(torch.equal, *twice))
                rows.append(row | {"ok": row.get("error", 0.0) < LARGEST_ERROR})
    return rows


def grid(results: dict) -> Rows:
    kernel, deadline = select_kernel(DEVICE.type, DTYPE), time.monotonic() + SECONDS["grid"]
    rows: Rows = []
    knots = [2**i for i in range(6, 18) if 2**i <= LONGEST]
    for k in knots:
        for q in [x for x in knots if k // 256 <= x <= k]:
            if time.monotonic() > deadline:
                return rows
            row: dict[str, Any] = {"q": q, "k": k}
            for name, n in (("alone", 1), ("filled", max(1, min(FILLED // q, 16 * FILLED // k)))):
                tensors = make_inputs(DEVICE, DTYPE, n * q, n * k, HEADS, HEADS, 128)
                took = kernel_milliseconds(kernel, tensors, Segments.of([q] * n, [k] * n, DEVICE))
                row |= {f"{name}_forward_ms": took[0] / n, f"{name}_backward_ms": took[1] / n}
            rows.append(row)
    return rows


def calls(results: dict) -> Rows:
    kernel, rows = select_kernel(DEVICE.type, DTYPE), []
    for n in (31, 200, 300):
        pool = [d for d in synthetic_lengths("wlb_128k:20000:1").tolist() if d >= 16]
        lengths = sorted(random.Random(n).sample(pool, n), reverse=True)
        scale = min(1.0, LONGEST / sum(lengths))
        lengths = [max(1, int(d * scale)) for d in lengths]

        def took(part: list[int]) -> float:
            tensors = make_inputs(DEVICE, DTYPE, sum(part), sum(part), HEADS, HEADS, 128)
            return sum(kernel_milliseconds(kernel, tensors, Segments.of(part, None, DEVICE), runs=5))

        long = [d for d in lengths if d > sum(lengths) / n]
        two = took(long) + took(lengths[len(long) :])
        rows.append({"documents": n, "long": len(long), "one_call_ms": took(lengths), "two_calls_ms": two})
    return rows


def plans(results: dict) -> Rows:
    kernel, deadline = select_kernel(DEVICE.type, DTYPE), time.monotonic() + SECONDS["plans"]
    kind = "filled" if ON_GPU else "alone"
    seconds = [(r["q"], r["k"], (r[f"{kind}_forward_ms"] + r[f"{kind}_backward_ms"]) * 1e-3) for r in results["grid"]]
    cost = measured_kernel_cost(seconds, 4 * HEADS * 128 * 3.5, 0.0, 0.0)
    rows: Rows = []
    for i in range(20):
        lengths = documents_of(LONGEST, i)
        for cp in (2, 4, 8):
            for sharding in KINDS:
                if time.monotonic() > deadline:
                    return rows
                plan = build_plan(sharding, lengths, LONGEST, cp, cost)
                measured = []
                for rank in range(cp):
                    queries, keys, _ = plan.segments(rank)
                    n_local = int((plan.chunks[rank][: len(queries), 1] == 0).sum())
                    took = 0.0
                    for part in (slice(0, n_local), slice(n_local, None)):
                        if len(queries[part]):
                            q, k = queries[part].tolist(), keys[part].tolist()
                            tensors = make_inputs(DEVICE, DTYPE, sum(q), sum(k), HEADS, HEADS, 128)
                            took += sum(kernel_milliseconds(kernel, tensors, Segments.of(q, k, DEVICE)))
                    measured.append(took)
                predicted = float(attention_seconds(plan, cost).max()) * 1e3
                row = {"micro_batch": i, "cp": cp, "sharding": sharding, "measured_ms": max(measured)}
                rows.append(row | {"predicted_ms": predicted})
    return rows


def layer(results: dict) -> Rows:
    from torchtitan_wlb.parallelisms.parallelize_llama import apply_ac, apply_compile

    args, tp = (llama_configs["7B"], 8) if ON_GPU else (llama_configs["debugmodel"], 2)
    rows: Rows = []
    for tokens in (16384, 65536, 98304) if ON_GPU else (256,):
        meta = AttentionMeta.of(documents_of(tokens, 0), DEVICE)
        rope = rotary_table(args, tokens, DEVICE)
        for compiled in (False, True) if ON_GPU else (False,):
            for ac in ("none", "op", "full"):
                kernel = select_kernel(DEVICE.type, DTYPE)
                block = block_share(args, tp, PackedAttention(kernel)).to(DEVICE, DTYPE)
                holder = torch.nn.Module()
                holder.layers = torch.nn.ModuleDict({"0": block})
                apply_ac(holder, ac)  # type: ignore[arg-type]
                if compiled:
                    apply_compile(holder)  # type: ignore[arg-type]
                module = holder.layers["0"]
                x = torch.randn(1, tokens, args.dim, device=DEVICE, dtype=DTYPE, requires_grad=True)
                hosts: list[float] = []
                kept: list[int] = []

                def forward(module=module, x=x, rope=rope, meta=meta, hosts=hosts, kept=kept):
                    before, began = torch.cuda.memory_allocated() if ON_GPU else 0, time.perf_counter()
                    out = module(x, rope=rope, meta=meta)
                    hosts.append((time.perf_counter() - began) * 1e3)
                    kept.append((torch.cuda.memory_allocated() if ON_GPU else 0) - before)
                    return out

                forward_ms, backward_ms = medians(DEVICE, forward, lambda out: out.backward(torch.ones_like(out)))
                # Nothing is scattered here: between the matrices every token is whole.
                kept_by = block_bytes(args, tp=tp, value_bytes=DTYPE.itemsize, ac=ac)
                kept_by |= {k: args.dim * DTYPE.itemsize for k in ("input", "residual") if k in kept_by}
                rows.append({
                    "tokens": tokens, "compiled": compiled, "ac": ac, "forward_ms": forward_ms,
                    "backward_ms": backward_ms, "host_forward_ms": statistics.median(hosts[1:]),
                    "kept_mb": statistics.median(kept) / 1e6, "table_mb": sum(kept_by.values()) * tokens / 1e6,
                })  # fmt: skip
    return rows


def model(results: dict) -> Rows:
    from torchtitan_wlb.parallelisms.parallelize_llama import apply_compile

    flavor = "550M" if ON_GPU else "debugmodel_small"
    args = replace(llama_configs[flavor], vocab_size=32_000 if ON_GPU else 384)
    windows = (8192, 32768, 131072) if ON_GPU else (256,)

    def build(dtype: torch.dtype, compiled: bool) -> Transformer:
        kernel = select_kernel(DEVICE.type, dtype)
        built = Transformer(args, n_ids=256, max_position=windows[-1], kernel=kernel, loss_chunk=2048).to(DEVICE)
        built.init_weights(0, DEVICE)
        rope = built.rope
        built.to(dtype)
        built.rope = rope  # positions stay in fp32
        if compiled:
            apply_compile(built)
        return built

    def step(built: Transformer, lengths: list[int]) -> torch.Tensor:
        torch.manual_seed(0)
        tokens = torch.randint(0, 256, (1, sum(lengths)), device=DEVICE)
        positions = torch.cat([torch.arange(d) for d in lengths])[None].to(DEVICE)
        meta = AttentionMeta.of(lengths, DEVICE)
        return built(tokens, positions=positions, meta=meta, labels=tokens, loss_scale=1 / sum(lengths))

    def norm(built: Transformer) -> float:
        return math.sqrt(sum(p.grad.float().square().sum().item() for p in built.parameters() if p.grad is not None))

    rows: Rows = []
    trained = build(DTYPE, ON_GPU)
    for window in windows:
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        lengths = documents_of(window, 1)
        took = medians(DEVICE, partial(step, trained, lengths), torch.Tensor.backward)
        flops = args.training_flops(window, sum(d * (d + 1) // 2 for d in lengths))
        peak = peak_flops(torch.cuda.get_device_name()) if ON_GPU else None
        rows.append({
            "window": window, "tokens_per_s": window / sum(took) * 1e3,
            "mfu": flops / (sum(took) * 1e-3) / peak if peak else None,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else None,
        })  # fmt: skip
    lengths = documents_of(windows[0], 2)
    found = []
    for built in (trained, build(torch.float32, False)):
        built.zero_grad()
        loss = step(built, lengths)
        loss.backward()
        found.append((loss.item(), norm(built)))
    rows.append({"loss": found[0][0], "loss_fp32": found[1][0], "norm": found[0][1], "norm_fp32": found[1][1]})
    new = []
    for i in range(50 if ON_GPU else 3):
        began = time.perf_counter()
        step(trained, documents_of(windows[0] - 64 * i, 3 + i)).backward()
        if ON_GPU:
            torch.cuda.synchronize()
        new.append((time.perf_counter() - began) * 1e3)
    return [*rows, {"new_lengths": len(new), "median_ms": statistics.median(new), "slowest_ms": max(new)}]


def table(rows: Rows) -> str:
    """Rows with the same columns one below the other."""
    lines, columns = [], None
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            lines.append(" | ".join(columns))
        lines.append(" | ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    return "\n".join(lines)


SECTIONS: tuple[Callable[[dict], Rows], ...] = (kernels, parity, grid, calls, plans, layer, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    began = time.monotonic()
    name = torch.cuda.get_device_name() if ON_GPU else "cpu"
    results: dict[str, Any] = {**origin(DEVICE.type), "dry_run": not ON_GPU, "device": name, "heads": HEADS}
    for section in SECTIONS:
        start = time.monotonic()
        try:
            results[section.__name__] = section(results)
        except Exception as error:  # the sections after it are worth their time all the same
            results[section.__name__] = [{"failed": f"{type(error).__name__}: {str(error)[:300]}"}]
        shown = results[section.__name__]
        print(f"\n## {section.__name__}, {time.monotonic() - start:.0f} s\n{table(shown)}", flush=True)
        write_results(arguments.out, results, DEVICE.type)
    failed = [s.__name__ for s in SECTIONS if any("failed" in row for row in results[s.__name__])]
    print(json.dumps({"out": arguments.out, "seconds": round(time.monotonic() - began), "failed": failed}))


if __name__ == "__main__":
    main()
