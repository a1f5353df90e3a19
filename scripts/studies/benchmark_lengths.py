"""What ever new micro-batch lengths cost under tensor parallelism, eager and compiled, for several seq_len_multiple.

    python scripts/studies/benchmark_lengths.py --json OUT

Two ranks, TP=2. For every multiple: steps of 4 micro-batches packed by wlb (new lengths all the time) against steps of
the same documents cut into constant lengths (plain), interleaved, in seconds a token, after some steps of both. Under
torch.compile also the number of graphs of every compiled region over all micro-batches.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist

from scripts.benchmark_rank import DEVICE, DTYPE, load_synthetic
from scripts.cpu_cluster import as_ranks
from scripts.origin import write_results
from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.profile import build_cost_model
from torchtitan_wlb.cost.step_time import without_pipelining
from torchtitan_wlb.data.dataloader import make_planner
from torchtitan_wlb.data.step_builder import Layout, StepBatch, StepBuilder
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.models.hf import resolve_model
from torchtitan_wlb.models.kernels import SDPA
from torchtitan_wlb.models.model_args import llama_configs
from torchtitan_wlb.packing.objective import StepObjective
from torchtitan_wlb.packing.settings import resolve_settings
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.parallelize_llama import build_stage
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline
from torchtitan_wlb.profiling import MicroBatchClock

N, WINDOW, TP = 4, 4096, 2


def build_pipeline(compile: bool) -> Pipeline:
    """debugmodel over two tensor-parallel ranks."""
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=TP, pp=1)
    mesh = dims.build_mesh("cpu")
    tokenizer = Tokenizer("bytes")
    args = resolve_model(JobConfig().model, tokenizer.n_ids)
    model = build_stage(
        args, range(args.n_layers), mesh, dims, kernel=SDPA,
        n_ids=tokenizer.n_ids, max_position=WINDOW, loss_chunk=1024, seed=0, device=DEVICE,
        param_dtype=DTYPE, reduce_dtype=DTYPE, reshard_after_forward=False, compile="inductor" if compile else "",
    )  # fmt: skip
    return Pipeline(
        [model], actions=[], world_mesh=mesh, device=DEVICE, dtype=DTYPE, dim=args.dim, tp=TP,
        clock=MicroBatchClock(DEVICE, timed=False),
    )  # fmt: skip


def steps_of(strategy: str, multiple: int, cache: str) -> tuple[Iterator[StepBatch], int, float]:
    """(endless steps of a strategy, how many lengths of micro-batches occur in 250 steps, share of padding in them)."""
    config = JobConfig()
    t = config.training
    t.seq_len, t.seq_len_multiple, t.global_batch_size, t.dataset_cache = WINDOW, multiple, N, cache
    config.packing.strategy = strategy  # type: ignore[assignment]
    documents = load_synthetic(config, WINDOW)
    args = replace(llama_configs["debugmodel"], vocab_size=384)
    cost = build_cost_model(None, "cpu", args, tp=1, cp=1)
    settings = resolve_settings(t, config.packing, n=N, objective=StepObjective(1, 0.0), seed=0, cost=cost)
    settings = tune([settings], config.packing.target_delay, partial(make_planner, documents))
    layout = Layout(
        dp=1, dp_rank=0, cp=1, cp_rank=0, tp=TP, tp_rank=dist.get_rank(), sharding="adaptive",
        kernel_cost=analytic_kernel_cost(DEVICES["cpu"], 1.0, 1.0), step_model=without_pipelining(N),
    )  # fmt: skip
    plans = list(islice(make_planner(documents, settings), 250))
    lengths = Counter(int(t) for p in plans for t in p.padded)
    padding = 1 - sum(p.tokens for p in plans) / sum(int(p.padded.sum()) for p in plans)
    steps = map(StepBuilder(documents, settings, layout), make_planner(documents, settings))
    return steps, len(lengths), padding


def train(pipeline: Pipeline, batch: StepBatch) -> float:
    """Seconds a token."""
    dist.barrier()
    began = time.perf_counter()
    pipeline.forward_backward(batch.micro_batches, 1.0 / batch.n_targets)
    for p in pipeline.model_parts[0].parameters():
        p.grad = None
    dist.barrier()
    return (time.perf_counter() - began) / sum(sum(mb.lengths) for mb in batch.micro_batches)


def graphs_per_region() -> dict[str, int]:
    """{function and line: graphs that torch.compile made of it} so far."""
    made = Counter(
        f"{m.co_name}:{m.co_firstlineno}"
        for m in torch._dynamo.utils.get_compilation_metrics()
        if m.co_name and not m.fail_type and m.graph_op_count
    )
    return dict(made)


def work(arguments: argparse.Namespace) -> None:
    """One rank."""
    rows = []
    for compile in (False, True):
        for multiple in map(int, arguments.multiples.split(",")):
            torch._dynamo.reset()
            torch._dynamo.utils.clear_compilation_metrics()
            pipeline = build_pipeline(compile)
            variable, distinct, padding = steps_of("wlb", multiple, arguments.cache)
            constant, *_ = steps_of("plain", multiple, arguments.cache)
            for _ in range(arguments.warmup):
                train(pipeline, next(variable))
                train(pipeline, next(constant))
            times = [(train(pipeline, next(variable)), train(pipeline, next(constant))) for _ in range(arguments.steps)]
            ratio = statistics.median(a for a, _ in times) / statistics.median(b for _, b in times)
            rows.append({
                "compiled": compile, "seq_len_multiple": multiple, "distinct_lengths_in_1000": distinct,
                "pad_fraction": padding, "micro_batches": 2 * N * (arguments.warmup + arguments.steps),
                "variable_over_constant": ratio,
                "mean_over_mean": sum(a for a, _ in times) / sum(b for _, b in times),
                "us_a_token_variable": [a * 1e6 for a, _ in times], "us_a_token_constant": [b * 1e6 for _, b in times],
                "graphs": graphs_per_region() if compile else {},
            })  # fmt: skip
            if dist.get_rank() == 0:
                print({k: v for k, v in rows[-1].items() if not k.startswith("us_")}, flush=True)
                write_results(arguments.json, rows, "cpu")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--multiples", default="1,32", help="1: not rounded, 32: the default for this window")
    parser.add_argument("--warmup", type=int, default=20, help="steps of both kinds before measuring")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cache", default=".cache/torchtitan_wlb")
    arguments = parser.parse_args(argv)
    as_ranks(partial(work, arguments), [__file__, *argv], TP, None, timeout=3600)


if __name__ == "__main__":
    main(sys.argv[1:])
