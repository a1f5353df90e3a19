"""Train the same documents with several packings, interleaved, and compare tokens/s: this machine as a small cluster.

    python scripts/benchmark_step.py --layout dp4 [--cpu-share F] [--schedule S ...] --json OUT

1. Starts its own ranks. More ranks than cores get equal CPU shares of 0.9 x cores / ranks (scripts/cpu_cluster.py).
2. Profiles attention and the rest of a layer on all ranks at once; packing and predictions use this profile.
3. Every strategy plans 50 steps without training, so that its queues are in steady state, then trains --steps in
   --rounds rounds; in a round each strategy trains its next steps, in an order that rotates. In some
   rounds every micro-batch of those steps is then run alone, one on each rank at a time (--alone-every).
4. Lengths have the paper's shape, scaled to the window. Of 600 orders of the documents (N = 4, fewer with more
   micro-batches, whose steps differ less) the most typical is trained, by
   prediction (nothing is timed for this choice): work per trained token within 2% of the whole stream's for every
   strategy that keeps documents whole (else a row is marked invalid), then tokens/s over the first strategy's as near
   as possible to what it is over 3 x 400 steps.

A row is one schedule and strategy. efficiency = ideal / measured with ideal = sum of the times alone / ranks x
(M + PP - 1) / M. predicted_* come from lengths alone: the profile, the time model of the schedule, and the time of a
step of almost empty micro-batches. The speed of a shared machine drifts: a fixed piece of work is timed with the
profile and again before and after each strategy of a round (slowness_rounds). Predicted step times are multiplied by
it; *_at_equal_speed are measured, with times divided by it. Totals are over all steps; *_rounds show the spread.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scripts.benchmark_rank import LAYOUTS, TYPICAL, Bench, choose_seed, split_of, work_per_token
from scripts.cpu_cluster import as_ranks, enter_group
from scripts.origin import write_results
from torchtitan_wlb.data.step_builder import StepBatch
from torchtitan_wlb.models.model_args import llama_configs
from torchtitan_wlb.packing.planner import StepPlan
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.parallelisms.schedules import schedule_problem

STRATEGIES = ("plain", "plain_whole", "fixed", "wlb")


def step_memory(bench: Bench, variant: tuple[str, str], batch: StepBatch) -> float:
    """Megabytes that a training step adds to the memory of the rank that needs most."""

    def of_this_process(field: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])

    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed before does not count
    Path("/proc/self/clear_refs").write_text("5")
    before = of_this_process("VmRSS")
    bench.train(*variant, batch)
    peak = torch.tensor((of_this_process("VmHWM") - before) / 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return peak.item()


def measure(bench: Bench, arguments: argparse.Namespace, schedules: list[str]) -> Iterator[dict[str, Any]]:
    """Train all schedules and strategies in interleaved rounds; the rows, on every rank."""
    strategies = tuple(arguments.strategies.split(","))
    plans = bench.shared(choose_seed(bench, schedules[0], strategies, arguments.steps) if bench.rank == 0 else None)
    gc.disable()  # as in train.py: all collect at the same time
    enter_group()
    per_round = arguments.steps // arguments.rounds
    variants = [(schedule, strategy) for schedule in schedules for strategy in strategies]
    steps, warm_up, overhead = {}, {}, {schedule: bench.overhead(schedule) for schedule in schedules}
    for schedule, strategy in variants:
        settings, state, planned = plans[strategy]
        layout = bench.shard_plans(strategy, schedule)
        steps[schedule, strategy] = bench.batches(settings, layout, state)
        # Warm up with the step that needs most memory.
        largest = max(range(len(planned)), key=lambda i: (planned[i].padded.max(), planned[i].padded.sum()))
        before = planned[largest - 1].state if largest else state
        warm_up[schedule, strategy] = next(bench.batches(settings, layout, before))
        bench.train(schedule, strategy, warm_up[schedule, strategy])
        bench.run_alone([planned[largest]])
    memory = dict.fromkeys(variants, 0.0)
    if arguments.memory:
        memory = {v: step_memory(bench, v, warm_up[v]) for v in variants}
        for variant in variants:  # touches again what was given back for measuring, so that no timed step has to
            bench.train(*variant, warm_up[variant])
    seconds: dict[tuple[str, str], list[list[float]]] = {v: [] for v in variants}
    predicted: dict[tuple[str, str], list[list[float]]] = {v: [] for v in variants}
    alone: dict[str, list[float]] = {s: [] for s in strategies}
    # Of the machine in every round: time of the reference over that with the profile.
    slowness: dict[tuple[str, str], list[float]] = {v: [] for v in variants}
    reference = bench.reference()
    for r in range(arguments.rounds):
        shift = r % len(variants)
        for schedule, strategy in variants[shift:] + variants[:shift]:
            batches = list(islice(steps[schedule, strategy], per_round))
            gc.collect()
            dist.barrier()
            timed = [bench.train(schedule, strategy, batch) for batch in batches]
            seconds[schedule, strategy].append([t for t, _ in timed])
            predicted[schedule, strategy].append([p + overhead[schedule] for _, p in timed])
            earlier, reference = reference, bench.reference()
            slowness[schedule, strategy].append((earlier + reference) / 2 / bench.reference_then)
            if arguments.alone_every and r % arguments.alone_every == 0 and schedule == schedules[0]:
                mine = plans[strategy][2][r * per_round : (r + 1) * per_round]
                alone[strategy].append(bench.run_alone(mine))
        if bench.rank == 0:
            done = {f"{s} {k}": round(sum(seconds[s, k][-1]) / per_round, 2) for s, k in variants}
            print(f"{bench.layout} round {r + 1} of {arguments.rounds}, seconds a step: {done}", flush=True)
    for schedule, strategy in variants:
        yield row(
            bench, schedule, strategy, plans[strategy], seconds[schedule, strategy], predicted[schedule, strategy],
            slowness[schedule, strategy], alone[strategy], arguments.alone_every,
        ) | {"peak_memory_mb": memory[schedule, strategy], "overhead_s": overhead[schedule]}  # fmt: skip


def row(
    bench: Bench,
    schedule: str,
    strategy: str,
    planned: tuple[PackingSettings, dict, list[StepPlan]],
    rounds: list[list[float]],
    predicted: list[list[float]],
    slowness: list[float],
    alone: list[float],
    alone_every: int,
) -> dict[str, Any]:
    """The row of a schedule and strategy.

    Args:
        planned: settings, planner state and plans (choose_seed).
        rounds, predicted: seconds of every step, by round.
        slowness: of the machine, by round. alone: seconds of the micro-batches alone, in every alone_every-th round.
    """
    settings, _, plans = planned
    n = len(rounds[0])
    tokens = [sum(p.tokens for p in plans[i : i + n]) for i in range(0, len(plans), n)]
    measured = [sum(x) for x in rounds]
    flat = [x for each in rounds for x in each]
    scaled = [x * s for each, s in zip(predicted, slowness) for x in each]
    m = settings.n // bench.dims.dp
    timed_alone = np.array(measured)[:: max(1, alone_every)]  # the rounds in which they were
    ideal = np.array(alone) / bench.world_size * (m + bench.dims.pp - 1) / m
    relative = work_per_token(bench, plans)
    return {
        "strategy": strategy,
        "layout": bench.layout,
        "tokens_per_s": sum(tokens) / sum(measured),
        "attended_pairs_per_s": sum(p.attended_pairs for p in plans) / sum(measured),
        "efficiency": float(ideal.sum() / timed_alone.sum()) if alone else None,
        "step_time_s": sum(measured) / len(plans),
        "predicted_step_time_s": sum(scaled) / len(plans),
        "work_per_token_vs_stream": relative,
        "valid": strategy == "plain" or bool(abs(relative - 1) <= TYPICAL),
        "schedule": schedule if bench.dims.pp > 1 else "",
        "recompute": bench.recomputes,
        "micro_batches": settings.n,
        "delay": float(np.average([p.delay[0] for p in plans], weights=[p.tokens for p in plans])),
        "window": bench.window,
        "cpu_share": bench.share,
        "seed": settings.seed,
        "prediction_error": statistics.mean(abs(p - t) / t for p, t in zip(scaled, flat)),
        "predicted_tokens_per_s": sum(tokens) / sum(sum(each) for each in predicted),
        "long_token_over_short": bench.long_token_over_short,
        "attention_share": float(sum(p.attention.sum() for p in plans) / sum(p.work.sum() for p in plans)),
        "imbalance": float(np.mean([p.imbalance for p in plans])),
        "tokens_per_s_at_equal_speed": sum(tokens) / sum(t / s for t, s in zip(measured, slowness)),
        "tokens_per_s_rounds": [a / b for a, b in zip(tokens, measured)],
        "slowness_rounds": slowness,
        "efficiency_rounds": (ideal / timed_alone).tolist() if alone else None,
        "step_times_s": flat,
        "predicted_step_times_s": scaled,
    }


def add_gains(rows: list[dict[str, Any]], base: str = "plain") -> None:
    """Tokens/s over those of a strategy under the same schedule: of all steps, median over rounds, predicted."""
    for r in rows:
        other = next((p for p in rows if p["strategy"] == base and p["schedule"] == r["schedule"]), None)
        if other:
            by_round = [a / b for a, b in zip(r["tokens_per_s_rounds"], other["tokens_per_s_rounds"])]
            r[f"over_{base}"] = r["tokens_per_s"] / other["tokens_per_s"]
            r[f"over_{base}_median_of_rounds"] = statistics.median(by_round)
            r[f"over_{base}_at_equal_speed"] = r["tokens_per_s_at_equal_speed"] / other["tokens_per_s_at_equal_speed"]
            r[f"over_{base}_predicted"] = r["predicted_tokens_per_s"] / other["predicted_tokens_per_s"]


def work(arguments: argparse.Namespace) -> None:
    """One rank."""
    schedules = arguments.schedule.split(",")
    rows = list(measure(Bench(arguments, arguments.layout, schedules), arguments, schedules))
    add_gains(rows)
    if dist.get_rank() == 0:
        write_results(arguments.json, rows, "cpu")
        for r in rows:
            efficiency = f"{r['efficiency']:.3f}" if r["efficiency"] else "-"
            print(
                f"{r['layout']:7} {r['schedule']:24} {r['strategy']:12} {r['tokens_per_s']:8,.0f} tokens/s  "
                f"x{r.get('over_plain', 0):.3f} (at equal speed {r.get('over_plain_at_equal_speed', 0):.3f}, predicted "
                f"{r.get('over_plain_predicted', 0):.3f})  efficiency {efficiency}  step {r['step_time_s']:.3f} s, "
                f"predicted {r['predicted_step_time_s']:.3f} ({r['prediction_error']:.1%})  "
                f"work {r['work_per_token_vs_stream']:.3f}  peak {r['peak_memory_mb']:.0f} MB"
            )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", required=True, choices=LAYOUTS)
    parser.add_argument("--json", required=True)
    parser.add_argument("--cpu-share", dest="cpu_share", type=float, help="of a core for every rank")
    parser.add_argument("--schedule", default="1F1B", help="comma-separated; S/1 and S/2 for stages a rank")
    parser.add_argument(
        "--strategies", default=",".join(STRATEGIES), help="wlb:2 splits every window into 2 micro-batches; wlb_equal"
    )
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--micro-batches", dest="micro_batches", type=int, default=0, help="N; 0: of the layout")
    parser.add_argument("--window", type=int, default=0, help="0: of the layout")
    parser.add_argument("--flavor", default="", choices=["", *llama_configs], help="empty: of the layout")
    parser.add_argument("--seq-len-multiple", dest="seq_len_multiple", type=int, default=-1)
    parser.add_argument(
        "--alone-every", dest="alone_every", type=int, default=-1,
        help="rounds from one to the next with micro-batches run alone; -1: 2, for 8 ranks half of them; 0: never",
    )  # fmt: skip
    parser.add_argument("--recompute", action="store_true", help="full activation checkpointing")
    parser.add_argument("--memory", action="store_true", help="measure the memory of the largest step")
    parser.add_argument("--cache", default=".cache/torchtitan_wlb")
    return parser


def main(argv: list[str]) -> None:
    arguments = parser().parse_args(argv)
    problems = []
    cores = os.cpu_count() or 1
    layout = LAYOUTS[arguments.layout]
    n, ranks = arguments.micro_batches or layout.n, layout.ranks
    if arguments.alone_every == -1:
        arguments.alone_every = arguments.rounds // 2 if ranks > 4 else 2
    for name in arguments.schedule.split(","):
        schedule = name.partition("/")[0]
        for split in {split_of(s) for s in arguments.strategies.split(",")}:
            if problem := schedule_problem(schedule, layout.pp, split * n // layout.dp):
                problems.append(problem)
    if arguments.steps % arguments.rounds:
        problems.append("--steps must be a multiple of --rounds")
    if problems:
        parser().error("; ".join(problems))
    if arguments.cpu_share is None and ranks > cores:
        arguments.cpu_share = 0.9 * cores / ranks
    share = ["--cpu-share", str(arguments.cpu_share)] if arguments.cpu_share else []
    as_ranks(partial(work, arguments), [__file__, *argv, *share], ranks, arguments.cpu_share, timeout=1800)


if __name__ == "__main__":
    main(sys.argv[1:])
