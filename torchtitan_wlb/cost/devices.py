"""Rates of kinds of devices, for predictions without a profile."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Device:
    """Rates of a kind of device.

    Attributes:
        matmul: FLOP/s of matrix products in training.
        knots, rates: FLOP/s of attention, forward and backward together, on one document by its length.
        link, latency: bytes/s a device can send to its neighbours (tensor and context parallelism), seconds a
            collective takes at least.
        tile: queries of a kernel tile; a shorter chunk costs a whole one.
        memory: bytes.
    """

    matmul: float
    knots: tuple[int, ...]
    rates: tuple[float, ...]
    link: float
    latency: float
    tile: int
    memory: float


def _tflops(*values: float) -> tuple[float, ...]:
    return tuple(v * 1e12 for v in values)


# cpu: one core of a 2-core x86 CPU in fp32, measured with scripts/profile_costs.py (debugmodel at 8K). h100 (bf16): the
# shape of the attention curve is our fit of a published forward curve (130 TFLOP/s at 1K tokens, 260 at 4K, 341 at 64K,
# head dimension 128), shorter lengths by tiles of 128 queries, times 0.68 for forward and backward together; matrix
# products 550 TFLOP/s, NVLink 380 GB/s. With these, attention of one document equals its linear part at about 28K
# tokens for 7B with TP=8, where the WLB-LLM paper profiles it. h200: the same chip, more memory.
_H100 = Device(
    matmul=550e12,
    knots=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
    rates=_tflops(30, 51, 71, 88, 132, 177, 202, 221, 230, 232),
    link=380e9,
    latency=15e-6,
    tile=128,
    memory=80e9,
)
DEVICES = {
    "cpu": Device(
        matmul=58e9,
        knots=(64, 256, 512, 1024, 2048, 8192),
        rates=(10e9, 30e9, 41e9, 62e9, 81e9, 98e9),
        link=4e9,
        latency=50e-6,
        tile=1,
        memory=8e9,
    ),
    "h100": _H100,
    "h200": replace(_H100, memory=141e9),
}


def find_device(configured: str, name: str) -> str:
    """Key of DEVICES: the configured one, or for "auto" the one that this machine's device name contains (h100 for
    devices without rates of their own)."""
    if configured != "auto":
        return configured
    return next((key for key in DEVICES if key in name.lower()), "h100")
