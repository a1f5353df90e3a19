"""Parallel degrees and the one device mesh they form.

Ranks are laid out from the slowest to the fastest link: pp, dp_replicate, dp_shard, cp, tp. FSDP2 shards over dp_shard
and cp flattened to one dimension and replicates over dp_replicate: context-parallel ranks hold the same parameters and
different tokens, so to FSDP they are data-parallel ranks.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan_wlb.torch_private import concatenate_meshes, flatten_mesh


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

    def __str__(self) -> str:
        dp = f"{self.dp_replicate}x{self.dp_shard}" if self.dp_replicate > 1 else str(self.dp)
        return f"TP{self.tp} CP{self.cp} PP{self.pp} DP{dp}"

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"pp", "dp", "cp", "tp"} of a global rank."""
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return {"pp": pp, "dp": dp, "cp": cp, "tp": tp}

    def build_mesh(self, device_type: str) -> DeviceMesh:
        """The device mesh: pp, dp_replicate, dp_shard, cp, tp. Needs the default process group."""
        return init_device_mesh(
            device_type,
            (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp),
            mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
        )

    def fsdp_mesh(self, world_mesh: DeviceMesh) -> DeviceMesh:
        """Mesh for fully_shard: dp_shard and cp flattened, for HSDP with dp_replicate before it."""
        shard = flatten_mesh(world_mesh["dp_shard", "cp"], "dp_shard_cp")
        return concatenate_meshes([world_mesh["dp_replicate"], shard]) if self.dp_replicate > 1 else shard

    def groups(self, world_mesh: DeviceMesh) -> list[dist.ProcessGroup]:
        """All process groups of the mesh that this rank is in."""
        return [*world_mesh.get_all_groups(), *self.fsdp_mesh(world_mesh).get_all_groups()]
