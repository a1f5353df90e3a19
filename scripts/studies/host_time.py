"""Host time of attention in all layers of a micro-batch: metadata, calls and exchange, with kernels that do nothing.

    python scripts/studies/host_time.py [--json OUT]

32 layers forward and backward on one of 8 context-parallel ranks whose collectives are not carried out, for few and
many documents, hybrid and per_document plans, with and without recomputation of the exchange. On a GPU this is what the
host does while the device computes; tensors are tiny here, so that their arithmetic hardly counts.
"""

import argparse
import statistics
import time
from itertools import product

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from scripts.origin import write_results
from torchtitan_wlb.context_parallel.attention import ContextParallelAttention
from torchtitan_wlb.context_parallel.exchange import shard_meta
from torchtitan_wlb.context_parallel.selection import choose_plan
from torchtitan_wlb.cost.devices import DEVICES
from torchtitan_wlb.cost.kernel_cost import analytic_kernel_cost
from torchtitan_wlb.models import kernels
from torchtitan_wlb.models.kernels import Kernel

LAYERS, CP, RUNS, TOKENS = 32, 8, 20, 1024
NOTHING = Kernel("nothing", lambda *_: None, lambda g, q, k, v, *_: (q, k, v))


def main(argv: list[str] | None = None) -> list[dict]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    kernels.KERNELS["nothing"] = NOTHING
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=CP)
    assert dist.group.WORLD is not None
    cost = analytic_kernel_cost(DEVICES["h100"], 4 * 128 * 8 * 3.5, 2 * 2 * 1024)
    rows = []
    for documents, sharding, recompute in product((33, 300), ("hybrid", "per_document"), (False, True)):
        lengths = np.random.default_rng(0).lognormal(0, 1.2, documents)
        lengths = np.maximum(1, lengths / lengths.sum() * (TOKENS - documents)).astype(int).tolist()
        plan = choose_plan(lengths, TOKENS, CP, sharding, cost)
        meta = shard_meta(plan, 1)
        attention = ContextParallelAttention(NOTHING, dist.group.WORLD, recompute_kv=recompute)
        q, k, v = (torch.randn(1, TOKENS // CP, 1, 1, requires_grad=True) for _ in range(3))
        times = []
        for _ in range(RUNS + 1):
            began = time.perf_counter()
            x = q
            for _ in range(LAYERS):
                x = attention(x, k, v, meta)
            x.backward(torch.ones_like(x))
            times.append((time.perf_counter() - began) * 1e3)
        rows.append(
            {
                "documents": documents,
                "sharding": sharding,
                "recompute_kv": recompute,
                "host_ms": statistics.median(times[1:]),
            }
        )
        print(rows[-1], flush=True)
    dist.destroy_process_group()
    if arguments.json:
        write_results(arguments.json, rows, "cpu")
    return rows


if __name__ == "__main__":
    main()
