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
import time
from typing import Any

import torch

from scripts.origin import origin, write_results
from scripts.timing import attend_and_back, kernel_milliseconds, make_inputs
from torchtitan_wlb.context_parallel.selection import KINDS, attention_seconds, build_plan
from torchtitan_wlb.cost.kernel_cost import KernelCost, measured_kernel_cost
from torchtitan_wlb.data.sources import synthetic_lengths
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.models.kernels import KERNELS, SDPA, Kernel, Segments, select_kernel

BUDGET_S = 380  # of which the plans get what is left


def parity(device, dtype) -> list[dict]:
    """Rows of relative errors of every kernel that runs on the device, a row with the reason for one that does not."""
    segments = Segments.of([300, 1, 299, 300], [300, 1, 699, 999], device)
    rows: list[dict] = []
    for name in KERNELS:
        try:
            kernel = select_kernel(device.type, dtype, name)
        except ConfigError as error:
            rows.append({"kernel": name, "skipped": error.problems[0]})
            continue
        for heads, kv_heads in ((8, 8), (8, 2)):
            torch.manual_seed(0)
            tensors = make_inputs(device, dtype, 900, 1999, heads, kv_heads, 128)
            truth = attend_and_back(SDPA, [t.float() for t in tensors], segments)
            got = attend_and_back(kernel, tensors, segments)
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
            tensors = make_inputs(device, dtype, q, k, heads, heads, 128)
            forward, backward = kernel_milliseconds(
                kernel, tensors, Segments.of([q], [k], device), runs=3 if q * k > 2**28 else 7
            )
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
                    queries, keys, positions = plan.segments(rank)
                    sizes = int(queries.sum()), len(positions)
                    tensors = make_inputs(device, dtype, *sizes, heads, heads, 128)
                    segments = Segments.of(queries, keys, device)
                    measured.append(sum(kernel_milliseconds(kernel, tensors, segments)))
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
