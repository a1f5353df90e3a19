"""Rates of kinds of devices, for predictions without a profile."""

from dataclasses import dataclass, replace

from torchtitan_wlb.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """Rates of a kind of device.

    Attributes:
        matmul: FLOP/s of matrix products in training.
        knots, rates: FLOP/s of attention, forward and backward together, on one document by its length.
        link, network: bytes/s it can send to a device of its machine, and of another one.
        machine: devices of a machine.
        latency: seconds a collective takes at least.
        tile: queries of a kernel tile; a shorter chunk costs a whole one.
        memory: bytes.
    """

    matmul: float
    knots: tuple[int, ...]
    rates: tuple[float, ...]
    link: float
    network: float
    machine: int
    latency: float
    tile: int
    memory: float

    def reach(self, ranks: int) -> float:
        """Bytes/s a device can send in a group that lies within so many ranks in a row; the slowest of its links
        counts."""
        return self.link if ranks <= self.machine else self.network


def _tflops(*values: float) -> tuple[float, ...]:
    return tuple(v * 1e12 for v in values)


# cpu: one core of a 2-core x86 CPU in fp32, measured with scripts/profile_costs.py (debugmodel at 8K). h100 (bf16): the
# shape of the attention curve is our fit of a published forward curve (130 TFLOP/s at 1K tokens, 260 at 4K, 341 at 64K,
# head dimension 128), shorter lengths by tiles of 128 queries, times 0.68 for forward and backward together; matrix
# products 550 TFLOP/s, NVLink 380 GB/s, between machines one 400 Gb/s adapter a device. With these, attention of one
# document equals its linear part at about 28K tokens for 7B with TP=8, where the WLB-LLM paper profiles it. h200: the
# same chip, more memory. b200: not measured: an H100 times the ratio of the peaks, twice its NVLink.
_H100 = Device(
    matmul=550e12,
    knots=(128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072),
    rates=_tflops(30, 51, 71, 88, 132, 177, 202, 221, 230, 232),
    link=380e9,
    network=50e9,
    machine=8,
    latency=15e-6,
    tile=128,
    memory=80e9,
)


def _scaled(device: Device, factor: float) -> Device:
    return replace(device, matmul=device.matmul * factor, rates=tuple(r * factor for r in device.rates))


DEVICES = {
    "cpu": Device(
        matmul=58e9,
        knots=(64, 256, 512, 1024, 2048, 8192),
        rates=(10e9, 30e9, 41e9, 62e9, 81e9, 98e9),
        link=4e9,
        network=4e9,
        machine=8,
        latency=50e-6,
        tile=1,
        memory=8e9,
    ),
    "h100": _H100,
    "h200": replace(_H100, memory=141e9),
    "b200": replace(_scaled(_H100, 2250 / 989), link=760e9, memory=180e9),
}


# Dense bf16 FLOP/s by the vendors' data sheets; of several names that a device's contains the first one counts.
PEAK_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H20": 148e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}


def peak_flops(name: str) -> float | None:
    """Dense bf16 FLOP/s of a device, by the name that its driver gives; None where it is unknown."""
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def find_device(configured: str, name: str, profile: str = "") -> str:
    """Key of DEVICES: the configured one, or for "auto" the one that this machine's device name contains.

    Args:
        profile: cost_model.profile; with one, a device without rates of its own is taken for an H100, whose link then
            counts only.

    Raises:
        ConfigError: nothing is known of the device.
    """
    if configured != "auto":
        return configured
    known = next((key for key in DEVICES if key in name.lower()), None)
    if known is None and not profile:
        raise ConfigError(
            f"--cost_model.device auto: nothing is known of the speed of {name}; name a device like it "
            f"({', '.join(DEVICES)}), or measure it with scripts/profile_costs.py and give --cost_model.profile"
        )
    return known or "h100"
