"""Loss over held-out documents: of every set, by length of the document and by position in it.

Documents are packed whole, so a document's loss depends on nothing but the document, whatever the layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_wlb.config import Validation
from torchtitan_wlb.context_parallel.shard_plan import ShardPlan
from torchtitan_wlb.data.dataloader import StepPlans, build_dataloader
from torchtitan_wlb.data.documents import PER_SOURCE, Documents
from torchtitan_wlb.data.micro_batch import MicroBatch
from torchtitan_wlb.data.step_builder import Layout, StepBuilder
from torchtitan_wlb.loss import IGNORE_INDEX
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline

# Buckets [0, 256), [256, 1K), ... by powers of four: few enough to read, and a context window of any size fills some.
EDGES = tuple(256 * 4**i for i in range(10))
ONE_SET = "validation"


def bucket_name(i: int) -> str:
    """Of bucket i: "0-256", "256-1K", ... A document is in the one that holds its last position."""
    return f"{_short(EDGES[i - 1]) if i else 0}-{_short(EDGES[i])}" if i < len(EDGES) else f"{_short(EDGES[-1])}-"


def _short(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}K" if n >= 1 << 10 else str(n)


def sets_of(validation: Validation) -> dict[str, Validation]:
    """{name: its sources}, in order; one set where validation.dataset_name gives no names."""
    v = validation
    names = v.dataset_name or (ONE_SET,) * len(v.dataset)
    found = {}
    for name in dict.fromkeys(names):
        mine = [i for i, other in enumerate(names) if other == name]
        kept = {k: tuple(getattr(v, k)[i] for i in mine) for k in ("dataset", "dataset_path") if getattr(v, k)}
        kept |= {k: tuple(values[i % len(values)] for i in mine) for k in PER_SOURCE if (values := getattr(v, k))}
        found[name] = v.model_copy(update=kept)
    return found


@dataclass
class HeldOut(MicroBatch):
    """A micro-batch that knows how long its documents are.

    Attributes:
        document_lengths: int64 [1, T/CP], of every token's document.
    """

    document_lengths: torch.Tensor


class HeldOutBuilder(StepBuilder):
    """Builds micro-batches for evaluation."""

    def micro_batch(self, spans, at_least=0):
        mb, shards = super().micro_batch(spans, at_least)
        return with_lengths(mb, shards, self.layout.cp_rank), shards


def with_lengths(mb: MicroBatch, shards: ShardPlan, cp_rank: int) -> HeldOut:
    """What a context-parallel rank has of a micro-batch, with the lengths of its tokens' documents."""
    of_document = np.array([*shards.lengths, shards.n_tokens - sum(shards.lengths)])
    of_token = np.repeat(of_document, of_document)[shards.token_index(cp_rank)]
    return HeldOut(**vars(mb), document_lengths=torch.from_numpy(of_token)[None])


def add_losses(table: torch.Tensor, mb: HeldOut, losses: torch.Tensor, edges: Sequence[int] = EDGES) -> None:
    """Sum the losses of a micro-batch into a table.

    Args:
        table: fp64 [2, buckets of the document's length, buckets of the position]: losses, targets.
        losses: of every token [T/CP], 0 where there is no target.
    """
    ends = torch.tensor(edges, device=losses.device)
    by_length = torch.bucketize(mb.document_lengths[0] - 1, ends, right=True)
    by_position = torch.bucketize(mb.positions[0], ends, right=True)
    index = by_length * (len(edges) + 1) + by_position
    is_target = mb.labels[0] != IGNORE_INDEX
    for sums, values in zip(table.view(2, -1), (losses, is_target)):
        sums.index_add_(0, index, values.to(sums.dtype))


def read_table(table: torch.Tensor) -> dict:
    """{"loss", "targets", "by_length", "by_position"} of a whole set, buckets without a target left out; the loss is
    None where there is no target at all."""

    def of(losses: float, targets: float) -> dict:
        return {"loss": losses / targets if targets else None, "targets": int(targets)}

    result = of(*table.sum((1, 2)).tolist())
    for name, axis in (("by_length", 2), ("by_position", 1)):
        rows = table.sum(axis).T.tolist()
        result[name] = {bucket_name(i): of(*row) for i, row in enumerate(rows) if row[1]}
    return result


def evaluate(
    pipeline: Pipeline,
    held_out: dict[str, Documents],
    settings: PackingSettings,
    layout: Layout,
    steps: int,
) -> dict[str, dict]:
    """{set: see read_table} of the first steps of a pass over held-out documents (0: all). All ranks call it."""
    whole = replace(settings, strategy="plain_whole", micro_batch_tokens=settings.seq_len, epochs=1)
    device = next(pipeline.model_parts[0].parameters()).device
    n = len(EDGES) + 1
    tables = torch.zeros(len(held_out), 2, n, n, dtype=torch.float64, device=device)
    for table, documents in zip(tables, held_out.values()):
        batches = build_dataloader(StepPlans(documents, whole), HeldOutBuilder(documents, whole, layout))
        for batch in islice(batches, steps or None):
            micro_batches: Sequence = [mb.to(device) for mb in batch.micro_batches]
            for mb, losses in zip(micro_batches, pipeline.evaluate(list(micro_batches))):
                if layout.counts_loss:
                    add_losses(table, mb, losses)
    dist.all_reduce(tables)
    return {name: read_table(table.cpu()) for name, table in zip(held_out, tables)}


def over_all(sets: dict[str, dict]) -> tuple[float | None, int]:
    """(mean loss, targets) over all sets."""
    targets = sum(s["targets"] for s in sets.values())
    losses = sum(s["loss"] * s["targets"] for s in sets.values() if s["targets"])
    return losses / targets if targets else None, targets


def in_words(result: dict) -> str:
    """One line for the console: loss, and perplexity by position."""
    if result["loss"] is None:
        return f"no loss over {result['targets']:,} targets"
    losses = {name: r["loss"] for name, r in result["by_position"].items() if r["loss"] is not None}
    perplexity = ", ".join(f"{name} {math.exp(min(loss, 700)):.3g}" for name, loss in losses.items())
    return f"loss {result['loss']:.4f} over {result['targets']:,} targets; perplexity by position: {perplexity}"


def as_scalars(sets: dict[str, dict]) -> dict[str, float]:
    """{flat name: loss} for TensorBoard and Weights & Biases."""
    found = {}
    for name, result in sets.items():
        found[f"validation/{name}/loss"] = result["loss"]
        for axis in ("length", "position"):
            found |= {f"validation/{name}/{axis}/{k}": r["loss"] for k, r in result[f"by_{axis}"].items()}
    return {k: v for k, v in found.items() if v is not None}
