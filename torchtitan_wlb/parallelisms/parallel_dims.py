"""Parallel degrees, the one device mesh they form, and what schedules demand of micro-batch counts.

Ranks are laid out from the slowest to the fastest link: pp, dp_replicate, dp_shard, cp, tp. FSDP2 shards over dp_shard
x cp
as one mesh dimension and replicates over dp_replicate: context-parallel ranks hold the same parameters and different
tokens, so to FSDP they are data-parallel ranks.
"""

from dataclasses import dataclass

import numpy as np

LOOPED_SCHEDULES = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # stage i on rank i mod PP
V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")  # two stages a rank: r on the way down, 2 PP - 1 - r on the way up


@dataclass(frozen=True)
class ParallelDims:
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int

    @classmethod
    def resolve(cls, *, dp_replicate: int, dp_shard: int, cp: int, tp: int, pp: int, world_size: int) -> "ParallelDims":
        """Degrees with dp_shard = -1 replaced by all ranks that are left (at least 1)."""
        if dp_shard == -1:
            dp_shard = max(1, world_size // (dp_replicate * cp * tp * pp))
        return cls(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp)

    @property
    def dp(self) -> int:
        """Ranks with documents of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"pp", "dp", "cp", "tp"} of a global rank, without a process group (loader workers start before it)."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def build_mesh(self, device_type: str):
        """The device mesh (needs the default process group): pp, dp_replicate, dp_shard_cp, tp."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            device_type,
            (self.pp, self.dp_replicate, self.dp_shard * self.cp, self.tp),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard_cp", "tp"),
        )

    def build_cp_group(self):
        """Process group of the ranks that share this rank's micro-batches; None without context parallelism."""
        if self.cp == 1:
            return None
        import torch.distributed as dist

        ranks = (
            np.arange(self.world_size).reshape(self.pp, self.dp, self.cp, self.tp).swapaxes(2, 3).reshape(-1, self.cp)
        )
        return dist.new_subgroups_by_enumeration(ranks.tolist())[0]

    def fsdp_mesh(self, mesh):
        """Mesh for fully_shard: 1-D, or (replicate, shard) for HSDP."""
        return mesh["dp_replicate", "dp_shard_cp"] if self.dp_replicate > 1 else mesh["dp_shard_cp"]


def schedule_problem(schedule: str, pp: int, m: int) -> str:
    """Why a schedule refuses M micro-batches, "" if it accepts (the rules of torch.distributed.pipelining)."""
    if pp == 1:
        return ""
    flag = f"--parallelism.pipeline_parallel_degree {pp}"
    if schedule == "1F1B" and m < pp:
        return f"1F1B needs at least {pp} ({flag})"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and (m < pp or m % max(1, m // pp)):
        return f"{schedule} needs M >= {pp} with M divisible by M // {pp} ({flag})"
    if schedule == "ZBVZeroBubble" and m < pp:
        return f"ZBVZeroBubble needs at least {pp} ({flag})"
    if schedule == "DualPipeV" and m < 2 * pp:
        return f"DualPipeV needs at least {2 * pp} ({flag})"
    return ""


def count_stages(schedule: str, pp: int, stages_per_rank: int) -> int:
    """Stages of the whole pipeline; without pipelining there is one, whatever the schedule."""
    if pp == 1:
        return 1
    return pp * (stages_per_rank if schedule in LOOPED_SCHEDULES else 2 if schedule in V_SCHEDULES else 1)
