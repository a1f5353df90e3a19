"""Measure shard plans on real micro-batches: one attention layer, forward and backward, over context-parallel ranks.

    torchrun --nproc-per-node CP scripts/benchmark_cp.py --json OUT [--summary S.json]

1. The kernel is profiled on these ranks, all at once, and so is the exchange.
2. 60 micro-batches of 8K to 16K tokens with lengths of the paper's shape are attended to with per_sequence,
   per_document, hybrid and adaptive plans, in interleaved rounds. A row has medians over rounds of the slowest rank:
   forward, backward and both together (measured_ms).
3. Predictions are scaled by a reference that is measured during the profile and during the rounds, since the speed of a
   shared machine drifts.
4. The summary picks the best plan of each micro-batch on odd rounds (the oracle) and scores all on even ones.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from scripts.origin import write_results
from scripts.timing import attend_and_back, make_inputs
from torchtitan_wlb.context_parallel.attention import ContextParallelAttention
from torchtitan_wlb.context_parallel.exchange import ShardMeta, shard_meta
from torchtitan_wlb.context_parallel.selection import KINDS, choose_plan, latency
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.cost.kernel_cost import KernelCost, measured_kernel_cost
from torchtitan_wlb.data.micro_batch import padded_length
from torchtitan_wlb.data.synthetic import synthetic_lengths
from torchtitan_wlb.models.kernels import Segments, select_kernel
from torchtitan_wlb.parallelisms.distributed import init_distributed, select_device

SHARDINGS = (*KINDS, "adaptive")
WINDOWS = (8192, 12288, 16384)


class Bench:
    """One attention layer of given heads on this rank."""

    def __init__(self, device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
        self.device, self.heads, self.kv_heads, self.head_dim, self.dtype = device, heads, kv_heads, head_dim, dtype
        self.kernel = select_kernel(device.type, dtype)
        assert dist.group.WORLD is not None
        self.together = ContextParallelAttention(self.kernel, dist.group.WORLD)
        self.pair_flops = 4 * heads * head_dim * 3.5

    def tensors(self, q: int, k: int) -> list[torch.Tensor]:
        shapes = ((1, q, self.heads), (1, k, self.kv_heads), (1, k, self.kv_heads))
        return [
            torch.randn(*s, self.head_dim, device=self.device, dtype=self.dtype, requires_grad=True) for s in shapes
        ]

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def slowest(self, *parts: Callable[[], object]) -> list[float]:
        """Milliseconds of the slowest rank, started together: of every part, and of all together."""
        dist.barrier()
        clocks = [self.clock()]
        for part in parts:
            part()
            clocks.append(self.clock())
        took = [b - a for a, b in pairwise(clocks)] + [clocks[-1] - clocks[0]]
        slowest = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return [x * 1e3 for x in slowest.tolist()]

    def attend(self, meta: ShardMeta, tokens: int) -> list[float]:
        """Milliseconds of (forward, backward, both) on the slowest rank."""
        inputs, out = self.tensors(tokens, tokens), []
        return self.slowest(
            lambda: out.append(self.together(*inputs, meta)),
            lambda: torch.autograd.grad(out[0], inputs, torch.ones_like(out[0])),
        )

    def alone(self, q: int, k: int) -> float:
        """Milliseconds, on the slowest rank, of the kernel for q queries of which the last sees k keys."""
        tensors = make_inputs(self.device, self.dtype, q, k, self.heads, self.kv_heads, self.head_dim)
        return self.slowest(partial(attend_and_back, self.kernel, tensors, Segments.of([q], [k], self.device)))[-1]

    def reference(self) -> float:
        """Milliseconds of one fixed piece of work: how fast the machine is at this moment."""
        return self.alone(4096, 4096)

    def profile(self) -> tuple[KernelCost, float]:
        """(kernel cost measured on all ranks at once, median of the reference meanwhile)."""
        rows, references = [], []
        knots = [2**i for i in range(4, 15)]
        for k in knots:
            references += [self.reference() for _ in range(3)]
            for q in [x for x in knots if k // 64 <= x <= k]:
                runs = 2 if q * k > 4096 * 4096 else 3 if q * k > 512 * 2048 else 9
                self.alone(q, k)
                ms = statistics.median(self.alone(q, k) for _ in range(runs))
                rows.append((q, k, ms * 1e-3))
        times = []
        for tokens in (256, 4096):
            kv = torch.randn(tokens, 2, self.kv_heads, self.head_dim, device=self.device, dtype=self.dtype)
            splits = [tokens // dist.get_world_size()] * dist.get_world_size()
            kv = kv[: sum(splits)]
            exchange = partial(dist.all_to_all_single, torch.empty_like(kv), kv, splits, splits)
            there = [self.slowest(exchange)[-1] for _ in range(15)]
            times.append(2 * statistics.median(there) * 1e-3)  # forward and backward
        per_token = max(
            0.0, (times[1] - times[0]) / (4096 - 256) * dist.get_world_size() / max(1, dist.get_world_size() - 1)
        )
        cost = measured_kernel_cost(rows, self.pair_flops, per_token, max(0.0, times[0] - 256 * per_token))
        return cost, statistics.median(references)


def make_micro_batches(n: int, cp: int) -> list[tuple[list[int], int]]:
    """(lengths, T): documents of the paper's shape scaled to windows of 8K to 16K, the last one cut."""
    rng = random.Random(0)
    out = []
    for i in range(n):
        window = WINDOWS[i % len(WINDOWS)]
        pool = synthetic_lengths(f"wlb_128k:20000:{window / 131072}").tolist()
        lengths: list[int] = []
        while sum(lengths) < window:
            lengths.append(min(rng.choice(pool), window - sum(lengths)))
        out.append((lengths, padded_length(window, cp, 1, 64)))
    return out


def summarise(rows: list[dict], n: int) -> dict:
    """Totals of n micro-batches on even rounds, oracle chosen on odd ones, and the prediction error."""
    rounds = {(r["micro_batch"], r["sharding"]): r["rounds_ms"] for r in rows}
    odd = {key: statistics.median(x[1::2]) for key, x in rounds.items()}
    even = {key: statistics.median(x[0::2]) for key, x in rounds.items()}
    oracle = sum(even[i, min(KINDS, key=lambda kind: odd[i, kind])] for i in range(n))
    total = {s: sum(even[i, s] for i in range(n)) for s in SHARDINGS}
    errors = [abs(r["predicted_ms"] - r["measured_ms"]) / r["measured_ms"] for r in rows]
    adaptive = total["adaptive"]
    # What adaptive chose was measured twice, as adaptive and as its kind: the difference is noise.
    chosen = {r["micro_batch"]: r["plan"] for r in rows if r["sharding"] == "adaptive"}
    return {
        "total_ms": total,
        "oracle_ms": oracle,
        "adaptive_over_oracle": adaptive / oracle,
        "adaptive_over_better_fixed": adaptive / min(total[k] for k in KINDS),
        "per_sequence_over_adaptive": total["per_sequence"] / adaptive,
        "better_paper_choice_over_adaptive": sum(min(even[i, k] for k in KINDS[:2]) for i in range(n)) / adaptive,
        "same_plan_measured_twice": sum(even[i, "adaptive"] for i in chosen)
        / sum(even[i, k] for i, k in chosen.items()),
        "mean_absolute_prediction_error": statistics.mean(errors),
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--summary", default="")
    parser.add_argument("--micro_batches", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args(argv)
    device = select_device()
    init_distributed(device, 600)
    torch.set_num_threads(1)
    rank, cp = dist.get_rank(), dist.get_world_size()
    bench = Bench(device, 2, 1, 64, torch.float32 if device.type == "cpu" else torch.bfloat16)
    cost, reference = bench.profile()
    boxed = [cost]
    dist.broadcast_object_list(boxed)  # all ranks choose with the same numbers
    cost = boxed[0]
    cases: list[tuple[int, str, ShardPlan]] = []
    for i, (lengths, total) in enumerate(make_micro_batches(arguments.micro_batches, cp)):
        cases += [(i, s, choose_plan(lengths, total, cp, s, cost)) for s in SHARDINGS]
    # Milliseconds (forward, backward, both) of every round.
    rounds: dict[tuple[int, str], list[list[float]]] = {(i, s): [] for i, s, _ in cases}
    references: list[float] = []
    for r in range(arguments.rounds):
        order = list(cases)
        random.Random(r).shuffle(order)
        for number, (i, sharding, plan) in enumerate(order):
            if number % 16 == 0:
                references.append(bench.reference())
            meta = shard_meta(plan, rank).map(lambda x: x.to(device))
            rounds[i, sharding].append(bench.attend(meta, plan.n_tokens // cp))
        if rank == 0:
            print(f"round {r + 1} of {arguments.rounds}", flush=True)
    if rank == 0:
        # A shared machine changes its speed over minutes; the reference says by how much since the profile.
        drift = statistics.median(references) / reference
        rows = []
        for i, sharding, plan in cases:
            forward, backward, both = zip(*rounds[i, sharding])
            rows.append({
                "micro_batch": i, "sharding": sharding, "measured_ms": statistics.median(both),
                "forward_ms": statistics.median(forward), "backward_ms": statistics.median(backward),
                "predicted_ms": latency(plan, cost) * 1e3 * drift, "tokens": sum(plan.lengths),
                "attended_pairs": sum(d * (d + 1) // 2 for d in plan.lengths), "plan": plan.kind, "rounds_ms": both,
            })  # fmt: skip
        write_results(arguments.json, rows, device.type)
        summary = summarise(rows, arguments.micro_batches)
        summary |= {"ranks": cp, "threads_a_rank": 1, "speed_drift_since_profile": drift}
        summary["chosen"] = {k: sum(p.kind == k for _, s, p in cases if s == "adaptive") for k in KINDS}
        print(json.dumps(summary, indent=1))
        if arguments.summary:
            write_results(arguments.summary, summary, device.type)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
