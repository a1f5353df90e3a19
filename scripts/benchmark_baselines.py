"""Compare with what a PyTorch user writes without this project: same model, FSDP2 and documents, one process a core.

    python scripts/benchmark_baselines.py --json OUT [--windows 1024,2048,4096,8192]

dense_mask:     rows of whole documents (next fit), one scaled_dot_product_attention with a [T, T] document mask.
document_loop:  the same rows, a loop of causal scaled_dot_product_attention over the documents.
wlb:            ours.

Measured like scripts/benchmark_step.py, whose rows these are; over_document_loop* are tokens/s over those of the loop.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import benchmark_step
from benchmark_rank import Bench
from cpu_cluster import as_ranks

from torchtitan_wlb.data.micro_batch import AttentionMeta

TOKENS = 2 * 8192  # a step, whatever the window


def attend_with_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
    """q, k, v [1, T, H, D] -> [1, T, H, D]. The mask is made by the first layer and kept for the others."""
    if not hasattr(meta, "mask"):
        tokens = q.shape[1]
        document = torch.arange(tokens)  # padding: each token on its own
        for start, stop, *_ in meta.segments:
            document[start:stop] = start
        meta.mask = (document[:, None] == document) & torch.ones(tokens, tokens, dtype=torch.bool).tril()  # type: ignore[attr-defined]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=meta.mask, enable_gqa=True)  # type: ignore[attr-defined]
    return out.transpose(1, 2)


def attend_in_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
    """q, k, v [1, T, H, D] -> [1, T, H, D]; padding gives zero."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    parts = [
        F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, enable_gqa=True)
        for a, b, *_ in meta.segments
    ]
    if meta.n_padding:
        parts.append(torch.zeros_like(q[:, :, q.shape[2] - meta.n_padding :]))
    return torch.cat(parts, dim=2).transpose(1, 2)


BASELINES = {"dense_mask": attend_with_mask, "document_loop": attend_in_loop}


def work(arguments: argparse.Namespace) -> None:
    rows = []
    for window in map(int, arguments.windows.split(",")):
        options = benchmark_step.parser().parse_args(
            f"--layout dp2 --json - --window {window} --micro-batches {TOKENS // window} --alone-every 0 "
            f"--strategies document_loop,dense_mask,wlb --cache {arguments.cache}".split()
        )
        bench = Bench(options, "dp2", ["1F1B"], BASELINES)
        found = list(benchmark_step.measure(bench, options, ["1F1B"]))
        benchmark_step.add_gains(found, "document_loop")
        for r in found:
            if r["strategy"] == "dense_mask":
                del r["over_document_loop_predicted"]  # the profile knows nothing of masks
            if dist.get_rank() == 0:
                print(
                    f"{window:6} {r['strategy']:14} {r['tokens_per_s']:8,.0f} tokens/s  over the loop "
                    f"x{r['over_document_loop']:.3f} (rounds {r['over_document_loop_median_of_rounds']:.3f}, "
                    f"predicted {r.get('over_document_loop_predicted', float('nan')):.3f})",
                    flush=True,
                )
        rows += found
    if dist.get_rank() == 0:
        Path(arguments.json).write_text(json.dumps(rows, indent=1))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--windows", default="1024,2048,4096,8192")
    parser.add_argument("--cache", default=".cache/torchtitan_wlb")
    arguments = parser.parse_args(argv)
    as_ranks(partial(work, arguments), [__file__, *argv], 2, None, timeout=3600)


if __name__ == "__main__":
    main(sys.argv[1:])
