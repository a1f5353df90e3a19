"""Where a result comes from: every row or file that a script writes says the type of hardware, torch and the commit."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]


def hardware(device_type: str = "") -> str:
    """Type of the device that ran: the CUDA device's name, or the number of cores and the kind of CPU.

    Args:
        device_type: "cuda" or "cpu"; "": CUDA if there is any.
    """
    if device_type != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    machine = platform.machine()
    kind = {"x86_64": "x86", "amd64": "x86", "aarch64": "ARM", "arm64": "ARM"}.get(machine.lower(), machine)
    return f"{os.cpu_count()}-core {kind} CPU"


def commit(root: Path = ROOT) -> str:
    """Short hash of HEAD, with "-dirty" where a tracked file differs from it (results under assets/ do not count);
    "unknown" where root is not a git checkout."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)

    if not (root / ".git").exists():
        return "unknown"
    try:
        head = git("rev-parse", "--short", "HEAD")
        if head.returncode:
            return "unknown"
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":!assets").returncode
    except OSError:  # no git
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changed else "")


def origin(device_type: str = "") -> dict[str, str]:
    """{"hardware", "torch", "commit"} of what this process measures; device_type: see hardware."""
    return {
        "hardware": hardware(device_type),
        "torch": torch.__version__.split("+")[0],
        "commit": commit(),
    }


def write_results(path: str, results: Any, device_type: str = "") -> None:
    """Write results as JSON with their origin: in every row of a list, at the top of a dict."""
    here = origin(device_type)
    if isinstance(results, list):
        results = [row | here for row in results]
    else:
        results = here | results
    Path(path).write_text(json.dumps(results, indent=1))
