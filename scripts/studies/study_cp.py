"""What shard plans promise, from a list of document lengths: balance, predicted latency with a GPU kernel curve, K/V
traffic.

    python scripts/studies/study_cp.py --lengths L.json [--curve C.csv] --out assets/results/cp_plans.json [--plot
    assets/images/cp_plans.png]

Micro-batches are filled with whole documents drawn from the list, the last one cut at the window. The curve is a CSV
with columns L, cp, tp, duration_per_doc (milliseconds of one causal forward of 64 heads of 128); without it the
built-in H100 model is used. Torch's own balancers need lengths divisible by 2 CP: they get the lengths rounded up.
"""

import argparse
import csv
import json
import random
import sys
import time
from pathlib import Path

import numpy as np
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as native

from scripts.origin import write_results
from torchtitan_wlb.context_parallel.exchange import shard_meta
from torchtitan_wlb.context_parallel.selection import KINDS, attention_seconds, build_plan, choose_plan
from torchtitan_wlb.context_parallel.shard_plan import per_document, per_sequence
from torchtitan_wlb.context_parallel.traffic import chunk_table, received_tokens
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import SHORT_QUERIES, KernelCost, analytic_kernel_cost
from torchtitan_wlb.data.micro_batch import padded_length

WINDOW = 131072


def fill(lengths: list[int], n: int) -> list[list[int]]:
    """n micro-batches of exactly one window."""
    rng = random.Random(0)
    out = []
    for _ in range(n):
        mb: list[int] = []
        while sum(mb) < WINDOW:
            mb.append(min(rng.choice(lengths), WINDOW - sum(mb)))
        out.append(mb)
    return out


def curve_cost(path: str) -> KernelCost:
    """Kernel cost from a measured curve: rates by number of keys, queries padded to 128, less of the rate below 256
    queries."""
    with open(path) as file:
        rows = [r for r in csv.DictReader(file) if r["cp"] == r["tp"] == "1"]
    flops = 4 * 64 * 128
    rates = {
        float(r["L"]): flops * float(r["L"]) * (float(r["L"]) + 1) / 2 / (float(r["duration_per_doc"]) * 1e-3)
        for r in rows
    }
    q_knots = (1.0, 255.0, 256.0, float(WINDOW))
    grid = tuple(tuple(r * (SHORT_QUERIES if q < 256 else 1.0) for r in rates.values()) for q in q_knots)
    return KernelCost(flops, 128, q_knots, tuple(rates), grid)


def native_balance(kind: str, lengths: list[int], cp: int) -> float:
    """max / mean of attended pairs over ranks with a balancer of torch, on lengths rounded up as it needs."""
    rounded = [-(-d // (2 * cp)) * 2 * cp for d in lengths]
    position = np.concatenate([np.arange(d) for d in rounded])
    head_tail = kind == "torch_head_tail"
    balancer: native._LoadBalancer = (
        native._HeadTailLoadBalancer(len(position), cp, "cpu")
        if head_tail
        else native._PerDocumentHeadTailLoadBalancer([rounded], cp, "cpu")
    )
    order = balancer._generate_indices()[0].numpy()  # type: ignore[index]
    work = (position[order] + 1).reshape(cp, -1).sum(axis=1)
    return float(work.max() / work.mean())


def balance(micro_batches: list[list[int]]) -> list[dict]:
    """Rows cp, plan, mean and worst of max / mean attended pairs."""
    rows = []
    for cp in (2, 4, 8, 16):
        values: dict[str, list[float]] = {}
        for i, mb in enumerate(micro_batches):
            for build in (per_document, per_sequence):
                work = build(mb, WINDOW, cp).attended_pairs()
                values.setdefault(build.__name__, []).append(float(work.max() / work.mean()))
            if i < 100:  # slow, and does not change
                for kind in ("torch_per_document", "torch_head_tail"):
                    values.setdefault(kind, []).append(native_balance(kind, mb, cp))
        for plan, x in values.items():
            rows.append({"cp": cp, "plan": plan, "micro_batches": len(x), "mean": float(np.mean(x)), "worst": max(x)})
            print(rows[-1], flush=True)
    return rows


def latencies(micro_batches: list[list[int]], cost: KernelCost) -> list[dict]:
    """Rows cp and what the slowest rank's predicted attention comes to for each plan."""
    rows = []
    for cp in (2, 4, 8, 16):
        seconds: dict[str, list[float]] = {k: [] for k in (*KINDS, "perfect")}
        received, cut = [], []
        for mb in micro_batches:
            plans = {k: build_plan(k, mb, WINDOW, cp, cost) for k in KINDS}
            for kind, plan in plans.items():
                seconds[kind].append(float(attention_seconds(plan, cost).max()))
            seconds["perfect"].append(float(cost.seconds(np.array(mb), np.array(mb)).sum()) / cp)
            received.append(received_tokens(plans["hybrid"]).mean() / ((cp - 1) / cp * WINDOW))
            owners: dict[int, set[int]] = {d: set() for d in range(len(mb))}
            for doc, _, _, owner, _ in chunk_table(plans["hybrid"])[0].tolist():
                owners[doc].add(owner)
            cut.append(sum(mb[d] for d, o in owners.items() if len(o) > 1) / WINDOW)
        x = {k: np.array(v) for k, v in seconds.items()}
        paper = np.minimum(x["per_sequence"], x["per_document"])
        adaptive = np.minimum(paper, x["hybrid"])
        row: dict = {"cp": cp, "micro_batches": len(micro_batches)}
        row |= {f"{k}_over_perfect": float(v.sum() / x["perfect"].sum()) for k, v in x.items() if k != "perfect"}
        row |= {
            "paper_choice_over_perfect": float(paper.sum() / x["perfect"].sum()),
            "adaptive_over_perfect": float(adaptive.sum() / x["perfect"].sum()),
            "speedup_over_paper_choice_mean": float((paper / adaptive).mean()),
            "speedup_over_paper_choice_total": float(paper.sum() / adaptive.sum()),
            "received_of_all_gather": float(np.mean(received)),
            "tokens_of_cut_documents": float(np.mean(cut)),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def planning_times(lengths: list[int]) -> list[dict]:
    """Milliseconds to build, choose and index the plan of one micro-batch at CP=16, best of 7."""
    cost = analytic_kernel_cost(DEVICES["h100"], 4 * 64 * 128 * 3.5, 2 * 2 * 4096)
    rows = []
    for n in (64, 2000):
        mb = random.Random(0).sample(lengths, n)
        total = padded_length(sum(mb), 16, 1, 64)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            shard_meta(choose_plan(mb, total, 16, "adaptive", cost), 3)
            times.append((time.perf_counter() - began) * 1e3)
        rows.append({"documents": n, "cp": 16, "ms": min(times)})
        print(rows[-1], flush=True)
    return rows


def plot(rows: list[dict], path: str) -> None:
    """Bars of the slowest rank over perfect for every CP and choice of plan."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    names = ("per_sequence", "per_document", "paper_choice", "adaptive")
    for i, name in enumerate(names):
        values = [100 * (r[f"{name}_over_perfect"] - 1) for r in rows]
        bars = axis.bar([x + (i - 1.5) * 0.2 for x in range(len(rows))], values, 0.2, label=name.replace("_", " "))
        axis.bar_label(bars, fmt="%.0f", fontsize=8)
    axis.set(
        xticks=range(len(rows)),
        ylabel="slowest rank over perfect, %",
        title="predicted attention latency, 128K, H100 curve",
    )
    axis.set_xticklabels([f"CP={r['cp']}" for r in rows])
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--curve", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--plot", default="")
    arguments = parser.parse_args(argv)
    lengths = [min(d, WINDOW) for d in json.loads(Path(arguments.lengths).read_text())]
    cost = curve_cost(arguments.curve) if arguments.curve else analytic_kernel_cost(DEVICES["h100"], 4 * 64 * 128, 0.0)
    results: dict = {
        "kernel": "H100 curve, predicted",
        "latency": latencies(fill(lengths, 200), cost),
        "balance": balance(fill(lengths, 1000)),
        "planning": planning_times(lengths),
    }
    write_results(arguments.out, results, "cpu")
    if arguments.plot:
        plot(results["latency"], arguments.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
