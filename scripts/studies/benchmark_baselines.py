"""Compare with what a PyTorch user writes without this project: same model, FSDP2 and documents, one process a core.

    python scripts/studies/benchmark_baselines.py --json OUT [--windows 1024,2048,4096,8192]

dense_mask:     rows of whole documents (next fit), one scaled_dot_product_attention with a [T, T] document mask.
document_loop:  the same rows, a loop of causal scaled_dot_product_attention over the documents.
wlb:            ours.

Measured like scripts/benchmark_step.py, whose rows these are; over_document_loop* are tokens/s over those of the loop.
"""

import argparse
import sys
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from scripts import benchmark_step
from scripts.benchmark_rank import Bench
from scripts.cpu_cluster import as_ranks
from scripts.origin import write_results
from torchtitan_wlb.models.attention import AttentionMeta

TOKENS = 2 * 8192  # a step, whatever the window


class DenseMask(nn.Module):
    """One attention over the whole row; the document mask is made by the first layer and kept for the others."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [1, T, Hq, D], k, v [1, T, Hkv, D] -> [1, T, Hq, D]."""
        if not hasattr(meta, "mask"):
            tokens = q.shape[1]
            document = torch.arange(tokens)  # padding: each token on its own
            for start, stop in pairwise(meta.bounds()):
                document[start:stop] = start
            same = document[:, None] == document
            meta.mask = same & torch.ones(tokens, tokens, dtype=torch.bool).tril()  # type: ignore[attr-defined]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=meta.mask, enable_gqa=True)  # type: ignore[attr-defined]
        return out.transpose(1, 2)


class DocumentLoop(nn.Module):
    """A causal attention for every document."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """q [1, T, Hq, D], k, v [1, T, Hkv, D] -> [1, T, Hq, D], zero on padding."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        parts = [
            F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, enable_gqa=True)
            for a, b in pairwise(meta.bounds())
        ]
        parts.append(torch.zeros_like(q[:, :, meta.bounds()[-1] :]))
        return torch.cat(parts, dim=2).transpose(1, 2)


BASELINES: dict[str, nn.Module] = {"dense_mask": DenseMask(), "document_loop": DocumentLoop()}


def work(arguments: argparse.Namespace) -> None:
    """One rank."""
    rows = []
    for window in map(int, arguments.windows.split(",")):
        options = benchmark_step.parser().parse_args(
            f"--layout dp2 --json - --window {window} --micro-batches {TOKENS // window} --alone-every 0 "
            f"--steps {arguments.steps} --rounds {arguments.rounds} "
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
        write_results(arguments.json, rows, "cpu")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--windows", default="1024,2048,4096,8192")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cache", default=".cache/torchtitan_wlb")
    arguments = parser.parse_args(argv)
    as_ranks(partial(work, arguments), [__file__, *argv], 2, None, timeout=3600)


if __name__ == "__main__":
    main(sys.argv[1:])
