"""What a step of a few blocks runs, by activation checkpointing and compilation: graphs, attention, matrix products.

Compiled with the partitioner that chooses what is kept and without generating code, which is slow and changes nothing of
this. No mode is silently eager, attention and its exchange run once a layer forward and once backward whatever is computed
again, and `op` repeats no matrix product (eager with tensor parallelism one: parallelize_llama._keep_products).
"""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed_tests.ranks import run_ranks
from torchtitan_wlb.context_parallel.shard_plan import per_document, whole
from torchtitan_wlb.data.micro_batch import pack_documents
from torchtitan_wlb.models.kernels import SDPA
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.parallelize_llama import build_stage

ARGS = ModelArgs(dim=64, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=128, vocab_size=128)
MODES = ["none", "op", "full", 2]
LENGTHS = [[30, 50, 16], [40, 8, 100, 3, 41], [128, 64], [5] * 48]  # of the micro-batches; the last one is counted
NAMES = {
    "aten::mm": "products", "torchtitan_wlb::packed_attention": "forward", "torchtitan_wlb::shard_attention": "forward",
    "torchtitan_wlb::packed_attention_backward": "backward", "torchtitan_wlb::shard_attention_backward": "backward",
    "_c10d_functional::all_gather_into_tensor": "gathers", "_c10d_functional::reduce_scatter_tensor": "scatters",
}  # fmt: skip


class Counting(TorchDispatchMode):
    """Counts operators that are computed. What checkpointing finds in its cache does not come here."""

    def __init__(self):
        super().__init__()
        self.names: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _rows(tp: int, cp: int) -> list[dict]:
    rows = []
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=cp, tp=tp, pp=1)
    mesh = dims.build_mesh("cpu")
    rank = dims.coordinates(dist.get_rank())["cp"]
    compiled = MODES if "SLOW_TESTS" in os.environ else ["op", "full"] if tp == cp == 1 else ["op"]
    for compile, ac in [*((False, ac) for ac in MODES), *((True, ac) for ac in compiled)]:
        torch._dynamo.reset()
        counters.clear()
        model = build_stage(
            ARGS, range(3), mesh, dims, kernel=SDPA, n_ids=128, max_position=128, loss_chunk=1024, seed=0,
            device=torch.device("cpu"), param_dtype=torch.float32, reduce_dtype=torch.float32, ac=ac,
            compile="aot_eager_decomp_partition" if compile else "",
            reshard_after_forward=False,
        )  # fmt: skip

        def step(lengths, model=model):
            tokens = [torch.arange(n).numpy() % 128 for n in lengths]
            total = -(-sum(lengths) // 16) * 16
            plan = whole(lengths, total) if cp == 1 else per_document(lengths, total, cp)
            mb = pack_documents(tokens, tokens, plan, rank)
            out = model(mb.tokens, positions=mb.positions, meta=mb.attention, labels=mb.labels, loss_scale=1.0)
            out.backward()
            return out.item()

        for lengths in LENGTHS[:-1]:
            step(lengths)
        model.zero_grad()
        graphs = counters["stats"]["unique_graphs"]
        if compile:
            with torch.profiler.profile() as profile:
                loss = step(LENGTHS[-1])
            names = Counter(e.name for e in profile.events())
        else:
            with Counting() as counting:
                loss = step(LENGTHS[-1])
            names = counting.names
        norm = sum(p.grad.full_tensor().square().sum() for p in model.parameters()).sqrt().item()
        row = {"compile": compile, "ac": ac, "graphs": graphs, "loss": loss, "norm": norm}
        rows.append(row | dict.fromkeys(NAMES.values(), 0))
        for name, count in names.items():
            if name in NAMES:
                rows[-1][NAMES[name]] += count
        rows[-1]["new_graphs"] = counters["stats"]["unique_graphs"] - graphs
    return rows


def _write(tp: int, cp: int, out: Path) -> None:
    rows = _rows(tp, cp)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))


def _write_both(folder: Path) -> None:
    _write(2, 1, folder / "tp2.json")
    _write(1, 2, folder / "cp2.json")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    run_ranks(1, _write, 1, 1, folder / "one.json")
    run_ranks(2, _write_both, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("one", "tp2", "cp2")}


@pytest.mark.parametrize("layout", ["one", "tp2", "cp2"])
def test_what_runs(table, layout, capsys):
    rows = table[layout]
    with capsys.disabled():
        print(f"\n{layout}")
        for r in rows:
            print("  " + "  ".join(f"{k} {v:.5g}" if isinstance(v, float) else f"{k} {v}" for k, v in r.items()))
    eager_none = rows[0]
    layers, head = ARGS.n_layers, 4
    again = {"none": 0, "op": 0, "full": 6 * layers, 2: 6 * 2}  # every second of three blocks is two
    for r in rows:
        assert r["loss"] == pytest.approx(eager_none["loss"], rel=1e-5), r
        assert r["norm"] == pytest.approx(eager_none["norm"], rel=1e-4), r
        assert r["forward"] == r["backward"] == layers, r
        extra = layers if layout == "tp2" and r["ac"] == "op" and not r["compile"] else 0
        assert r["products"] == 21 * layers + head + again[r["ac"]] + extra, r
        assert r["new_graphs"] == 0 and r["graphs"] <= 3 if r["compile"] else r["graphs"] == 0, r
        assert r["graphs"] >= 1 if r["compile"] else True
