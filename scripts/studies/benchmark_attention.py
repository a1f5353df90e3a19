"""The CPU attention kernel on one core: chunks and whole documents, packed documents and a dense mask, memory.

    python scripts/studies/benchmark_attention.py --json OUT

1. The two chunks of either rank of one 16K document at CP=2 against half of causal SDPA over the whole document.
2. 64 packed documents of 256 tokens against SDPA with a dense boolean mask.
3. Peak memory of forward and backward over one document of 4K to 64K tokens, each in a process of its own.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from scripts.origin import write_results
from scripts.timing import attend_and_back
from torchtitan_wlb.context_parallel.shard_plan import per_document
from torchtitan_wlb.models.kernels import SDPA, Segments

HEADS, DIM = 2, 64


def tensors(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(tokens, HEADS, DIM) for _ in range(3)]


def kernel(qkv: list[torch.Tensor], segments: Segments) -> None:
    """Forward and backward of the project's kernel."""
    attend_and_back(SDPA, [*qkv, torch.ones_like(qkv[0])], segments)


def torch_sdpa(qkv: list[torch.Tensor], mask: torch.Tensor | None) -> None:
    """Forward and backward of torch's scaled_dot_product_attention, causal without a mask."""
    q, k, v = (x.transpose(0, 1)[None].requires_grad_() for x in qkv)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


def interleaved(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, one after the other in every round, the first round not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(x[1:]) for name, x in times.items()}


def chunks() -> dict:
    """1. of the module docstring."""
    tokens = 16384
    plan = per_document([tokens], tokens, 2)
    whole = tensors(tokens)
    runs: dict[str, Callable[[], None]] = {"whole_causal_sdpa": lambda: torch_sdpa(whole, None)}
    for rank in range(2):
        index = torch.from_numpy(plan.token_index(rank))
        queries, keys, positions = plan.segments(rank)
        gathered = torch.from_numpy(positions)
        mine, segments = [whole[0][index], *(x[gathered] for x in whole[1:])], Segments.of(queries, keys)
        runs[f"rank_{rank}"] = lambda m=mine, s=segments: kernel(m, s)  # type: ignore[misc]
    ms = interleaved(runs, 5)
    slowest = max(ms["rank_0"], ms["rank_1"])
    return {"tokens": tokens, "ms": ms, "slowest_rank_over_half_of_whole": slowest / (ms["whole_causal_sdpa"] / 2)}


def packed() -> dict:
    """2. of the module docstring."""
    n, d = 64, 256
    qkv = tensors(n * d)
    document = torch.arange(n * d) // d
    mask = (document[:, None] == document) & torch.ones(n * d, n * d, dtype=torch.bool).tril()
    segments = Segments.of([d] * n)
    ms = interleaved({"segments": lambda: kernel(qkv, segments), "dense_mask": lambda: torch_sdpa(qkv, mask)}, 3)
    return {"documents": n, "tokens_each": d, "ms": ms, "dense_mask_over_segments": ms["dense_mask"] / ms["segments"]}


def _status(name: str) -> float:
    """A line of this process' memory status, in MiB."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) / 1024


def _peak(tokens: int, queue) -> None:
    torch.set_num_threads(1)
    kernel(tensors(64), Segments.of([64]))
    qkv = tensors(tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _status("VmRSS")
    halves = [x[: tokens // 2] for x in qkv[1:]]
    qkv[1:] = [torch.cat([half, x]) for half, x in zip(halves, qkv[1:])]
    kernel(qkv, Segments.of([tokens // 2, tokens // 2], [tokens // 2, tokens]))
    queue.put(_status("VmHWM") - before)


def memory() -> list[dict]:
    """3. of the module docstring."""
    rows = []
    context = multiprocessing.get_context("spawn")
    for tokens in (4096, 8192, 16384, 32768, 65536):
        queue = context.SimpleQueue()
        process = context.Process(target=_peak, args=(tokens, queue))
        process.start()
        mib = queue.get()
        process.join()
        rows.append({"tokens": tokens, "peak_mib": mib, "mib_per_1k_tokens": mib / (tokens / 1024)})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict = {"threads": 1, "heads": HEADS, "head_dim": DIM}
    results |= {"chunks": chunks(), "packed": packed(), "memory": memory()}
    write_results(arguments.json, results, "cpu")
    print(json.dumps(results, indent=1))
