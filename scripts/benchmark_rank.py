"""One rank of the step benchmarks: its profile, its model with a pipeline for every schedule, typical documents."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from cpu_cluster import enter_group, leave_group
from profile_costs import measure_attention, measure_linear

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.context_parallel.selection import choose_plan
from torchtitan_wlb.cost.devices import DEVICES, Device
from torchtitan_wlb.cost.kernel_cost import build_kernel_cost
from torchtitan_wlb.cost.profile import read_profile
from torchtitan_wlb.cost.step_time import StepModel, stages_of, without_pipelining
from torchtitan_wlb.data.dataloader import StepBatch, StepDataset, make_planner
from torchtitan_wlb.data.documents import Documents, load_documents
from torchtitan_wlb.data.micro_batch import IGNORE_INDEX, Layout, MicroBatch, build_micro_batch, pack_documents
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.models.attention import SDPA
from torchtitan_wlb.models.llama import Transformer, llama_configs
from torchtitan_wlb.optimizer import Optimizers
from torchtitan_wlb.packing.planner import StepPlan
from torchtitan_wlb.packing.quality import predict_step
from torchtitan_wlb.packing.settings import PackingSettings, resolve_settings
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.distributed import clip_grad_norm, gather_step, read_steps
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.parallelize_llama import build_stage
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline, plan_pipeline
from torchtitan_wlb.profiling import MicroBatchClock

# degrees (dp, pp, cp), micro-batches a step, context window, model (a pipeline needs layers to cut)
LAYOUTS = {
    "dp2": (2, 1, 1, 2, 8192, "debugmodel_long"),
    "pp2": (1, 2, 1, 2, 8192, "debugmodel_long"),
    "cp2": (1, 1, 2, 2, 8192, "debugmodel_long"),
    "dp4": (4, 1, 1, 4, 8192, "debugmodel_longer"),  # else FSDP's collectives are 5% of so short a step
    "pp4": (1, 4, 1, 4, 8192, "debugmodel_long"),
    "dp2pp4": (2, 4, 1, 8, 8192, "debugmodel_small"),
    "dp4cp2": (4, 1, 2, 4, 8192, "debugmodel_long"),
}
PLANNED, LONG, ORDERS, TYPICAL = 50, 400, 600, 0.02
DEVICE, DTYPE = torch.device("cpu"), torch.float32


def load_synthetic(config: JobConfig, window: int) -> Documents:
    """Documents of the paper's length shape scaled to a window, tokens random; the configuration is set to them."""
    t = config.training
    t.dataset, t.dataset_path, t.seq_len = ("synthetic",), (f"wlb_128k:100000:{window / 131072}",), window
    return load_documents(t, Tokenizer("bytes"), t.dataset, t.dataset_path)


class Bench:
    """One rank: its profile, documents, and a model with its pipeline for every schedule.

    Args:
        baselines: strategies that pack like plain_whole and have an attention function of their own
            (scripts/benchmark_baselines.py).
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        layout: str,
        schedules: list[str],
        baselines: dict[str, Callable] | None = None,
    ):
        self.baselines = baselines or {}
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        dp, pp, cp, n, window, flavor = LAYOUTS[layout]
        self.layout, self.n, self.window = layout, arguments.micro_batches or n, arguments.window or window
        self.dims = ParallelDims(dp_replicate=1, dp_shard=dp, cp=cp, tp=1, pp=pp)
        self.share, self.recomputes = arguments.cpu_share or 1.0, arguments.recompute
        self.tokenizer = Tokenizer("bytes")
        # Hardly padded: the head of so small a model is a large part of its stage.
        vocab_size = -(-self.tokenizer.n_ids // 8) * 8
        self.args = replace(llama_configs[arguments.flavor or flavor], vocab_size=vocab_size)
        self.config = JobConfig()
        t = self.config.training
        t.seq_len_multiple, t.dataset_cache, t.global_batch_size = arguments.seq_len_multiple, arguments.cache, self.n
        enter_group()
        profile, self.device = self.shared((self._profile(), self._device()))
        leave_group()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(profile)
            file.flush()
            self.cost = read_profile(file.name, self.args, tp=1, cp=cp)
            self.kernel_cost = build_kernel_cost(
                file.name if cp > 1 else "", self.device, layer_flops_per_pair=self.args.layer_flops_per_pair,
                kv_dim=self.args.n_kv_heads * self.args.head_dim, tp=1, bytes_per_value=4,
            )  # fmt: skip
        self.documents = load_synthetic(self.config, self.window)
        lengths = self.documents.lengths(np.arange(sum(self.documents.sizes)))
        self.stream_work = self.cost.documents(lengths).sum() / lengths.sum()  # predicted, a token
        short, long = self.cost.documents(np.array([64, self.window])) / (64, self.window)
        self.long_token_over_short = float(long / short)
        self.mesh, self.cp_group = self.dims.build_mesh("cpu"), self.dims.build_cp_group()
        self.pipelines = {s: self._pipeline(s) for s in schedules}
        self.alone = Transformer(self.args, n_ids=self.tokenizer.n_ids, max_position=self.window)
        self.alone.init_weights(0, DEVICE)
        enter_group()  # as for the profile: a piece of work takes more CPU seconds under quotas
        self.reference_then = statistics.median(self.reference() for _ in range(5))
        leave_group()

    def shared(self, thing: Any) -> Any:
        """What rank 0 has."""
        boxed = [thing]
        dist.broadcast_object_list(boxed)
        return boxed[0]

    def _profile(self) -> str:
        """Profile in wall milliseconds under the CPU share: CPU seconds, measured on all ranks at once under their
        quotas (caches are cold after every period), over the share. (The wall time of a short run has a whole period of
        waiting in it, or none.)"""
        dist.barrier()
        longest = self.window
        attention = measure_attention(
            self.args, 1, DTYPE, DEVICE, longest, time.process_time, whole_only=self.dims.cp == 1
        )
        linear = measure_linear(self.args, self.tokenizer.n_ids, 1, DTYPE, DEVICE, longest, time.process_time)
        for row in attention + linear:
            row.update({k: v / self.share for k, v in row.items() if k.endswith("_ms")})
        dist.barrier()
        model = {k: getattr(self.args, k) for k in ("dim", "n_heads", "n_kv_heads", "ffn_dim")}
        return json.dumps({"device": "cpu", "model": model, "tp": 1, "attention": attention, "linear": linear})

    def _device(self) -> Device:
        """The CPU with the link between ranks as it is under their shares: a message costs sender and receiver CPU
        seconds, all of whose waiting is latency."""
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        seconds, values = [], 1 << 19
        for size in (1, values):
            out, inbound = torch.zeros(size), torch.empty(size)
            dist.barrier()
            began = time.process_time()
            for _ in range(20):
                ring = [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, inbound, before)]
                for message in dist.batch_isend_irecv(ring):
                    message.wait()
            seconds.append((time.process_time() - began) / 20 / self.share)
        latency, took = seconds
        return replace(DEVICES["cpu"], latency=latency, link=4 * values / max(took - latency, 1e-9))

    def _pipeline(self, schedule: str):
        """(pipeline, parameters, optimizers, time model) of a schedule."""
        dims, args, my = self.dims, self.args, self.dims.coordinates(self.rank)
        schedule, _, count = schedule.partition("/")
        per_rank = int(count or 2)
        plan = plan_pipeline(
            args, schedule=schedule, pp=dims.pp, stages_per_rank=per_rank, m=self.n // dims.dp,
            seq_len=self.window // 4, cost=self.cost, recomputed=float(self.recomputes), device=self.device,
            bytes_per_token=args.dim * 4 / dims.cp,
        )  # fmt: skip
        models = [
            build_stage(
                args, plan.stages[i], self.mesh, dims, self.cp_group,
                n_ids=self.tokenizer.n_ids, max_position=self.window, loss_chunk=1024, seed=0, device=DEVICE,
                kernel=SDPA, param_dtype=DTYPE, reduce_dtype=DTYPE, reshard_after_forward=False,
                ac_mode="full" if self.recomputes else "none",
            )
            for i in stages_of(plan.actions[my["pp"]])
        ]  # fmt: skip
        pipeline = Pipeline(
            models, actions=plan.actions, mesh=self.mesh, device=DEVICE, dtype=DTYPE, dim=args.dim, tp=1,
            clock=MicroBatchClock(DEVICE, timed=False),
        )  # fmt: skip
        parameters = [p for m in models for p in m.parameters()]
        return pipeline, parameters, Optimizers(models, self.config.optimizer), plan.step_model

    def settings(self, strategy: str, seed: int) -> PackingSettings:
        config = self.config
        config.packing.strategy = "plain_whole" if strategy in self.baselines else strategy  # type: ignore[assignment]
        return resolve_settings(
            config.training, config.packing, seed=seed, dp=self.dims.dp, pp=self.dims.pp, cost=self.cost,
            documents=self.documents.fingerprint,
        )  # fmt: skip

    def shard_plans(self, strategy: str, step_model: StepModel) -> Layout:
        """How a strategy cuts micro-batches over context-parallel ranks: the paper's baselines by sequence, fixed by
        document, ours adaptively."""
        sharding = {"wlb": "adaptive", "fixed": "per_document"}.get(strategy, "per_sequence")
        my, dims = self.dims.coordinates(self.rank), self.dims
        return Layout(
            dp=dims.dp, dp_rank=my["dp"], cp=dims.cp, cp_rank=my["cp"], tp=1, tp_rank=0, sharding=sharding,
            kernel_cost=self.kernel_cost, step_model=step_model,
        )  # fmt: skip

    def run_alone(self, plans: list[StepPlan]) -> float:
        """Seconds of all micro-batches of some steps, each on a single rank; one on each rank at a time."""
        one = Layout(1, 0, 1, 0, 1, 0, "adaptive", self.kernel_cost, without_pipelining(1))
        took = torch.zeros(1, dtype=torch.float64)
        pairs = sorted(((plan.work[b], i, b) for i, plan in enumerate(plans) for b in range(self.n)), reverse=True)
        for _, i, b in pairs[self.rank :: self.world_size]:
            plan, multiple = plans[i], self.config.training.length_multiple
            mb = build_micro_batch(plan.micro_batch(b), self.documents, one, multiple, int(plan.padded[b]))
            began = time.perf_counter()
            self._forward_alone(mb).backward()
            took += time.perf_counter() - began
            self.alone.zero_grad()
        dist.all_reduce(took)
        return took.item()

    def reference(self) -> float:
        """CPU seconds of a fixed piece of work, mean over ranks: how fast the machine is at this moment."""
        lengths = [self.window // 16] * 4 + [self.window // 4]
        total = sum(lengths)
        plan = choose_plan(lengths, total, 1, "adaptive", self.kernel_cost)
        tokens = np.zeros(total, np.int64)
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        mb = pack_documents(parts, parts, plan, 0)
        dist.barrier()
        began = time.process_time()
        self._forward_alone(mb).backward()
        took = torch.tensor(time.process_time() - began, dtype=torch.float64)
        self.alone.zero_grad()
        dist.all_reduce(took)
        return took.item() / self.world_size

    def _forward_alone(self, mb: MicroBatch) -> torch.Tensor:
        n = max(1, int((mb.labels != IGNORE_INDEX).sum()))
        return self.alone(mb.tokens, positions=mb.positions, meta=mb.attention, labels=mb.labels, loss_scale=1 / n)

    def train(self, schedule: str, strategy: str, batch: StepBatch) -> tuple[float, float]:
        """(seconds of a training step, predicted seconds of its forward and backward on the slowest rank)."""
        pipeline, parameters, optimizers, _ = self.pipelines[schedule]
        for attention in (block.attention for model in pipeline.models for block in model.layers.values()):
            attention.attend = self.baselines.get(strategy, partial(type(attention).attend, attention))
        began = time.perf_counter()
        loss = pipeline.forward_backward(batch.micro_batches, 1.0 / max(1, batch.n_targets))
        clip_grad_norm(parameters, 1.0, DEVICE)
        optimizers.step(1e-4)
        optimizers.zero_grad()
        table = gather_step(loss, batch.plan_hash, batch.cp_work, batch.step_time.seconds, {}, True, ())
        sums = read_steps([table], ())  # all ranks meet here
        return time.perf_counter() - began, sums.step_seconds_max

    def overhead(self, schedule: str) -> float:
        """Seconds of a step beside its forward and backward: median over steps of almost empty micro-batches."""
        settings = replace(self.settings("plain", 0), seq_len=self.config.training.length_multiple)
        steps = iter(StepDataset(self.documents, settings, self.shard_plans("plain", self.pipelines[schedule][3])))
        took = [self.train(schedule, "plain", batch) for batch in islice(steps, 9)]
        return max(0.0, statistics.median(a - b for a, b in took[2:]))


def work_per_token(bench: Bench, plans: list[StepPlan]) -> float:
    """Predicted work a trained token, relative to the whole stream's."""
    work, tokens = 0.0, 0
    for plan in plans:
        d = plan.spans[:, 2] - plan.spans[:, 1]
        work, tokens = work + bench.cost.documents(d).sum(), tokens + plan.tokens
    return float(work / tokens / bench.stream_work)


def plan_steps(bench: Bench, settings: PackingSettings, steps: int) -> tuple[dict[str, Any], list[StepPlan]]:
    """(planner state after the untrained steps, the steps to train)."""
    planner = make_planner(bench.documents, settings)
    planned = list(islice(planner, PLANNED + steps))
    return planned[PLANNED - 1].state, planned[PLANNED:]


def choose_seed(
    bench: Bench, schedule: str, strategies: tuple[str, ...], steps: int
) -> dict[str, tuple[PackingSettings, dict, list]]:
    """Settings, state and plans of every strategy for the most typical order of the documents (see
    benchmark_step.py)."""
    model, dp = bench.pipelines[schedule][3], bench.dims.dp
    price = tune(bench.settings("wlb", 0), 0.45, partial(make_planner, bench.documents)).delay_price

    def speed(settings: PackingSettings, plans: list[StepPlan]) -> float:
        return sum(p.tokens for p in plans) / sum(predict_step(p, model, dp, settings.balances) for p in plans)

    def settings_of(strategy: str, seed: int) -> PackingSettings:
        return replace(bench.settings(strategy, seed), delay_price=price)

    usual = {}
    for strategy in strategies:
        several = [settings_of(strategy, seed) for seed in range(3)]
        usual[strategy] = statistics.mean(speed(s, plan_steps(bench, s, LONG)[1]) for s in several)
    best, least = None, float("inf")
    for seed in range(ORDERS):
        found: dict[str, tuple[PackingSettings, dict, list]] = {}
        speeds: dict[str, float] = {}
        for strategy in sorted(strategies, key="plain".__eq__):
            settings = settings_of(strategy, seed)
            state, plans = plan_steps(bench, settings, steps)
            if strategy != "plain" and abs(work_per_token(bench, plans) - 1) > TYPICAL:
                break
            speeds[strategy] = speed(settings, plans)
            found[strategy] = settings, state, plans
        else:
            relative = [speeds[s] / speeds[strategies[0]] * usual[strategies[0]] / usual[s] for s in strategies]
            if max(abs(x - 1) for x in relative) < least:
                best, least = found, max(abs(x - 1) for x in relative)
    if best is None:
        raise RuntimeError(f"none of {ORDERS} orders of the documents is typical over {steps} steps")
    return best
