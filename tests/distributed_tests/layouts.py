"""Train one step in a layout with the code that train.py uses, and write down what every rank saw."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan_wlb.context_parallel.selection import KINDS, choose_plan
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.cost.step_time import stages_of
from torchtitan_wlb.data.micro_batch import pack_documents, padded_length
from torchtitan_wlb.evaluation import add_losses, with_lengths
from torchtitan_wlb.initial_weights import InitialWeights
from torchtitan_wlb.models.kernels import SDPA
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.parallelisms.gradients import clip_grad_norm
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.parallelize_llama import build_stage
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline, split_layers
from torchtitan_wlb.parallelisms.schedules import count_stages, schedule_actions
from torchtitan_wlb.parallelisms.step_sums import gather_step, read_steps
from torchtitan_wlb.parallelisms.tied_embeddings import COPY
from torchtitan_wlb.profiling import MicroBatchClock

N_IDS = 259
KERNEL_COST = analytic_kernel_cost(DEVICES["cpu"], 1.0, 1.0)
ARGS = ModelArgs(dim=64, n_layers=8, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=384, n_ids=N_IDS)
COUNTED = ("dp2", "dp2-always")  # cases whose all-gathers of parameters are counted
MAX_POSITION, MULTIPLE, LOSS_CHUNK, SEED = 256, 12, 48, 7


@dataclass(frozen=True)
class Case:
    """A layout and how its micro-batches are cut."""

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    m: int = 2
    schedule: str = "1F1B"
    sharding: str = "per_document"
    ac: str | int = "none"
    recompute_kv: bool = False
    stages_per_rank: int = 2
    compile: str = ""
    reshard: str = "default"
    reduces_each: bool = False
    args: ModelArgs = ARGS
    weights: str = ""  # folder of those to start from

    @property
    def dims(self) -> ParallelDims:
        return ParallelDims(dp_replicate=self.dp_replicate, dp_shard=self.dp_shard, cp=self.cp, tp=self.tp, pp=self.pp)


EDGES = (4, 16, 64)  # of the buckets of lengths and positions in evaluation


def make_documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, labels) of documents of 1 to 201 tokens, nothing divisible by anything; the first two identical, the
    last three without any valid label (long enough that a whole rank can be without)."""
    rng = np.random.default_rng(3)
    documents = []
    for length in (53, 53, 201, 1, 2, 97, 31, 7, 13, 11, 64, 5, 45, 3, 19):
        tokens = rng.integers(0, N_IDS, length)
        documents.append((tokens, np.append(tokens[1:], -100)))
    documents[1] = documents[0]
    for i in (-3, -2, -1):
        documents[i] = (documents[i][0], np.full(len(documents[i][0]), -100))
    return documents


def group_documents(n: int, m: int, count: int) -> list[list[int]]:
    """Deal documents to n micro-batches of very unequal length: long ones together, the unlabelled ones alone in the
    last one (in the last m, if there are several data-parallel ranks)."""
    unlabelled = [count - 3, count - 2, count - 1]
    rest = list(range(count - 3))
    last = m if n > m else 1
    groups: list[list[int]] = [[] for _ in range(n)]
    for j, i in enumerate(unlabelled):
        groups[n - 1 - j % last].append(i)
    head = n - last
    for j, i in enumerate(rest):
        groups[0 if j < 6 else j % head].append(i)
    return groups


def run_case(case: Case, documents, flip: tuple[int, int] | None, out: Path) -> None:
    """One step with all gradients, then the same step again with token flip = (document, position) changed."""
    dims, device = case.dims, torch.device("cpu")
    rank = dist.get_rank()
    my = dims.coordinates(rank)
    mesh = dims.build_mesh("cpu")
    args = case.args
    stages = split_layers(args.n_layers, count_stages(case.schedule, dims.pp, case.stages_per_rank), 1.0, 0.5)
    actions = schedule_actions(case.schedule, dims.pp, case.m, case.stages_per_rank, split=case.ac == "none")
    reshards = {"always": True, "never": False, "default": dims.pp == 1 and case.m == 1}[case.reshard]
    models = [
        build_stage(
            args, stages[i], mesh, dims,
            n_ids=args.n_ids, max_position=MAX_POSITION, loss_chunk=LOSS_CHUNK, seed=SEED, device=device,
            kernel=SDPA, param_dtype=torch.float32, reduce_dtype=torch.float32,
            ac=case.ac, compile=case.compile, recompute_kv=case.recompute_kv,
            reshard_after_forward=reshards,
        )
        for i in stages_of(actions[my["pp"]])
    ]  # fmt: skip
    pipeline = Pipeline(
        models, actions=actions, world_mesh=mesh, device=device, dtype=torch.float32, dim=args.dim, tp=dims.tp,
        clock=MicroBatchClock(device, timed=False), gathers_once=not reshards,
        reduces_each=case.reduces_each,
    )  # fmt: skip

    if case.weights:
        InitialWeights(case.weights, args).load(models)
    hidden: list[torch.Tensor] = []
    if models[-1].norm is not None:

        def keep(_module, _args, output):
            output = output.to_local() if isinstance(output, DTensor) else output
            hidden.append(output.detach()[0].clone())

        models[-1].norm.register_forward_hook(keep)

    groups = group_documents(case.m * dims.dp, case.m, len(documents))
    my_groups = groups[my["dp"] * case.m : (my["dp"] + 1) * case.m]
    n_targets = sum(int((labels != -100).sum()) for _, labels in documents)
    saved = {"hidden": [], "owners": [], "gradients": {}}

    def step(docs, run=pipeline.forward_backward) -> torch.Tensor:
        micro_batches, owners = [], []
        for number, group in enumerate(my_groups):
            lengths = [len(docs[i][0]) for i in group]
            total = padded_length(sum(lengths), dims.cp, dims.tp, MULTIPLE)
            sharding = KINDS[number % 3] if case.sharding == "alternating" else case.sharding
            plan = choose_plan(lengths, total, dims.cp, sharding, KERNEL_COST)
            mb = pack_documents([docs[i][0] for i in group], [docs[i][1] for i in group], plan, my["cp"])
            micro_batches.append(with_lengths(mb, plan, my["cp"]))
            # (document, position) of every local token under sequence parallelism; -1 for padding
            real = [(i, t) for i, d in zip(group, lengths) for t in range(d)]
            owner = np.array(real + [(-1, -1)] * (total - sum(lengths)))
            owners.append(owner[plan.token_index(my["cp"])].reshape(dims.tp, -1, 2)[my["tp"]])
        hidden.clear()
        loss = run(micro_batches, 1.0 / n_targets)
        if hidden:
            saved["hidden"].append(list(hidden))
            saved["owners"] = owners
        return loss

    def sum_up(losses, micro_batches, table) -> torch.Tensor:
        for mb, of_tokens in zip(micro_batches, losses):
            if my["tp"] == 0:
                add_losses(table, mb, of_tokens, EDGES)
        return torch.zeros(())

    def total(share: torch.Tensor) -> float:
        """The loss over all ranks."""
        counted = share if my["tp"] == 0 else torch.zeros_like(share)
        return read_steps([gather_step(counted, "0" * 12, (1.0, 1.0), 1.0, {}, counts=True, all_kinds=())], ()).loss

    def forget_gradients() -> None:
        for p in parameters.values():
            p.grad = None

    parameters = {name: p for model in models for name, p in model.named_parameters()}
    # A step like that of train.py: not the first one, and right after a validation.
    step(documents)
    forget_gradients()
    table = torch.zeros(2, len(EDGES) + 1, len(EDGES) + 1, dtype=torch.float64)
    step(documents, lambda micro_batches, _: sum_up(pipeline.evaluate(micro_batches), micro_batches, table))
    dist.all_reduce(table)
    saved["validation"] = table
    saved.update(hidden=[], owners=[])
    with torch.profiler.profile() if case.name in COUNTED else contextlib.nullcontext() as profile:
        saved["loss"] = total(step(documents))
    saved["gathers"] = sum(e.name == "fsdp::all_gather_copy_in" for e in profile.events()) if profile else 0
    for name, p in parameters.items():
        assert p.grad is not None, f"{case.name}: rank {rank} has no gradient for {name}"
        full = p.grad.full_tensor()
        if my["dp"] == my["cp"] == my["tp"] == 0:
            saved["gradients"][re.sub(r"_checkpoint_wrapped_module\.|_orig_mod\.", "", name)] = full
    saved["grad_norm"] = clip_grad_norm(parameters, 0.0, device, (COPY,) if args.is_tied else ()).item()
    forget_gradients()
    if flip is not None:
        tokens = documents[flip[0]][0].copy()
        tokens[flip[1]] = (tokens[flip[1]] + 1) % N_IDS
        step([(tokens, d[1]) if i == flip[0] else d for i, d in enumerate(documents)])
    torch.save(saved, out / f"{case.name}-{rank}.pt")


def run_cases(cases: list[Case], flip, out: Path) -> None:
    documents = make_documents()
    for case in cases:
        run_case(case, documents, flip, out)


def initial_weights() -> dict[str, torch.Tensor]:
    """The weights that every layout starts from, made without any parallelism."""
    model = Transformer(ARGS, n_ids=N_IDS, max_position=MAX_POSITION)
    model.init_weights(SEED, torch.device("cpu"))
    return dict(model.named_parameters())
