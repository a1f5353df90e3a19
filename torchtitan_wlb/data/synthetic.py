"""Lengths of the `synthetic` source: a file of them, or a named distribution."""

from pathlib import Path
from typing import Annotated

import numpy as np

from torchtitan_wlb.errors import ConfigError

# Quantiles (probability, tokens) of long-context mixtures, for benchmarks without data: a log-linear fit of our own to
# the length histogram published in the WLB-LLM paper (Figure 3: mean about 4K, longest 125K). Between two points
# lengths are log-uniform.
_NAMED_LENGTHS = {
    "wlb_128k": [
        (0.0, 64), (0.05, 700), (0.1, 1100), (0.25, 2000), (0.5, 3230), (0.75, 4400), (0.9, 5790),
        (0.97, 10500), (0.99, 26000), (0.995, 52000), (0.999, 120000), (1.0, 125000),
    ],
}  # fmt: skip


def synthetic_lengths(path: str) -> np.ndarray:
    """Lengths [n] int32 of a `synthetic` source.

    Args:
        path: a JSON list of lengths, or NAME[:n[:scale]] with NAME one of the built-in distributions; scale multiplies
            all lengths.

    Raises:
        ConfigError: neither.
    """
    if Path(path).is_file():
        from pydantic import ConfigDict, Field, TypeAdapter  # the named ones need numpy only

        lengths = TypeAdapter(list[Annotated[int, Field(ge=0, lt=2**31)]], config=ConfigDict(strict=True))
        try:
            return np.asarray(lengths.validate_json(Path(path).read_bytes()), dtype=np.int32)
        except ValueError as error:
            raise ConfigError(f"--training.dataset_path {path}: not a JSON list of lengths") from error
    name, *rest = path.split(":")
    if name not in _NAMED_LENGTHS:
        raise ConfigError(f"--training.dataset_path {path}: neither a JSON file nor one of {', '.join(_NAMED_LENGTHS)}")
    try:
        n, scale = int((rest or ["100_000"])[0]), float([*rest, "1", "1"][1])
        if not (0 < n <= 2**28 and 0 < scale < 1e4 and len(rest) <= 2):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--training.dataset_path {path}: must be NAME, NAME:n or NAME:n:scale, positive") from None
    p, tokens = np.array(_NAMED_LENGTHS[name]).T
    u = np.random.default_rng(0).random(n)
    return np.maximum(2, np.exp(np.interp(u, p, np.log(tokens))) * scale).astype(np.int32)
