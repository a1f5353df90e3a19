"""Checks and measurements on one GPU (run by scripts/gpu_check.sh): what cannot be seen on a CPU.

1. Parity: every kernel that runs here against the plain reference in fp32, on chunks, overlapping key ranges and
   one-token documents, with GQA.
2. Grid: milliseconds of the kernel's forward and of its backward over (query, key) lengths (WLB-LLM Figure 10).
3. Plans: the ranks of per_sequence, per_document and hybrid plans for CP 2, 4 and 8 one after the other, forward and
   backward; the slowest rank counts (Figure 15).

Needs torch and numpy only, and the repository on PYTHONPATH. Without a GPU it runs a small version on the CPU, to see
that it works.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch

from scripts.origin import origin, write_results
from torchtitan_wlb.context_parallel.selection import KINDS, attention_seconds, build_plan
from torchtitan_wlb.cost.kernel_cost import KernelCost, measured_kernel_cost
from torchtitan_wlb.data.sources import synthetic_lengths
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.models.kernels import SDPA, Kernel, Segments, select_kernel

BUDGET_S = 380  # of which the plans get what is left


def run(kernel: Kernel, tensors: list[torch.Tensor], segments: Segments):
    """(output, dq, dk, dv)."""
    q, k, v, g = tensors
    out, lse = kernel.forward(q, k, v, segments)
    return out, *kernel.backward(g, q, k, v, out, lse, segments)


def milliseconds(kernel: Kernel, tensors: list[torch.Tensor], segments: Segments, runs: int) -> tuple[float, float]:
    """Medians of (forward, backward)."""
    q, k, v, g = tensors

    def clock() -> float:
        if q.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    for _ in range(runs + 1):
        began = clock()
        out, lse = kernel.forward(q, k, v, segments)
        between = clock()
        kernel.backward(g, q, k, v, out, lse, segments)
        times.append((between - began, clock() - between))
    forwards, backwards = zip(*times[1:])  # the first one warms up
    return statistics.median(forwards) * 1e3, statistics.median(backwards) * 1e3


def make(device, dtype, q: int, k: int, heads: int, kv_heads: int, dim: int):
    """q, k, v and a gradient of the output."""
    shapes = ((q, heads), (k, kv_heads), (k, kv_heads), (q, heads))
    return [torch.randn(n, h, dim, device=device, dtype=dtype) for n, h in shapes]


def parity(device, dtype) -> list[dict]:
    """Rows of relative errors of every kernel that runs on the device, a row with the reason for one that does not."""
    segments = [(0, 300, 0, 300), (300, 301, 300, 301), (301, 600, 301, 1000), (600, 900, 301, 1300)]
    rows: list[dict] = []
    for name in ("sdpa", "varlen", "flash"):
        try:
            kernel = select_kernel(device.type, dtype, name)
        except ConfigError as error:
            rows.append({"kernel": name, "skipped": error.problems[0]})
            continue
        for heads, kv_heads in ((8, 8), (8, 2)):
            torch.manual_seed(0)
            tensors = make(device, dtype, 900, 1300, heads, kv_heads, 128)
            truth = run(SDPA, [t.float() for t in tensors], segments)
            got = run(kernel, tensors, segments)
            errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, truth)]
            rows.append(
                {
                    "kernel": name,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "errors_out_dq_dk_dv": errors,
                    "ok": max(errors) < 2e-2,
                }
            )
    return rows


def grid(kernel: Kernel, device, dtype, longest: int, heads: int) -> list[dict]:
    """Rows q, k, forward_ms, backward_ms of one segment of q queries that ends at key k."""
    rows: list[dict] = []
    knots = [2**i for i in range(6, 18) if 2**i <= longest]
    for k in knots:
        for q in [x for x in knots if k // 256 <= x <= k]:
            tensors = make(device, dtype, q, k, heads, heads, 128)
            forward, backward = milliseconds(kernel, tensors, [(0, q, 0, k)], 3 if q * k > 2**28 else 7)
            rows.append({"q": q, "k": k, "forward_ms": forward, "backward_ms": backward})
    return rows


def plans(kernel: Kernel, device, dtype, cost: KernelCost, window: int, heads: int, deadline: float) -> list[dict]:
    """Rows of the slowest rank, measured and predicted, for every plan of up to 20 micro-batches, until a time of
    time.monotonic()."""
    rng = random.Random(0)
    pool = synthetic_lengths(f"wlb_128k:20000:{window / 131072}").tolist()
    rows: list[dict] = []
    for i in range(20):
        lengths: list[int] = []
        while sum(lengths) < window:
            lengths.append(min(rng.choice(pool), window - sum(lengths)))
        for cp in (2, 4, 8):
            for kind in KINDS:
                if time.monotonic() > deadline:
                    return rows
                plan = build_plan(kind, lengths, window, cp, cost)
                measured = []
                for rank in range(cp):
                    tensors = make(device, dtype, window // cp, window, heads, heads, 128)
                    segments = [tuple(s) for s in plan.segments(rank).tolist()]
                    measured.append(sum(milliseconds(kernel, tensors, segments, 3)))
                predicted = float(attention_seconds(plan, cost).max()) * 1e3
                rows.append(
                    {
                        "micro_batch": i,
                        "cp": cp,
                        "sharding": kind,
                        "measured_ms": max(measured),
                        "predicted_ms": predicted,
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    began = time.monotonic()
    on_gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if on_gpu else (torch.device("cpu"), torch.float32)
    heads, longest = (8, 131072) if on_gpu else (1, 2048)
    kernel = select_kernel(device.type, dtype)
    results: dict[str, Any] = {
        **origin(device.type),
        "dry_run": not on_gpu,
        "kernel": kernel.name,
        "heads": heads,
        "parity": parity(device, dtype),
    }
    print(json.dumps(results, indent=1), flush=True)
    results["grid"] = grid(kernel, device, dtype, longest, heads)
    seconds = [(r["q"], r["k"], (r["forward_ms"] + r["backward_ms"]) * 1e-3) for r in results["grid"]]
    cost = measured_kernel_cost(seconds, 4 * heads * 128 * 3.5, 0.0, 0.0)
    results["plans"] = plans(kernel, device, dtype, cost, longest, heads, began + (BUDGET_S if on_gpu else 40))
    for cp in (2, 4, 8):
        mine = [r for r in results["plans"] if r["cp"] == cp]
        n = min(sum(r["sharding"] == k for r in mine) for k in KINDS)
        by = {k: [r["measured_ms"] for r in mine if r["sharding"] == k][:n] for k in KINDS}
        paper = sum(min(a, b) for a, b in zip(by["per_sequence"], by["per_document"]))
        ours = sum(min(x) for x in zip(*by.values()))
        if ours:
            results[f"cp{cp}"] = {k: sum(v) for k, v in by.items()} | {
                "paper_choice_over_best": paper / ours,
                "micro_batches": n,
            }
            print(cp, results[f"cp{cp}"], flush=True)
    write_results(arguments.out, results, device.type)
    print(f"{arguments.out}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
