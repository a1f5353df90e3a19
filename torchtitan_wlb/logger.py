"""The one logger. Rank 0 prints, the other ranks only warnings and errors."""

import logging
import os
import sys

logger = logging.getLogger("torchtitan_wlb")


def init_logger() -> None:
    """Attach a console handler once; call at the start of every process."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.INFO if int(os.environ.get("RANK", 0)) == 0 else logging.WARNING)


class Color:
    red, green, yellow, blue, magenta, cyan, reset = (f"\033[{c}m" for c in (31, 32, 33, 34, 35, 36, 0))


class NoColor:
    red = green = yellow = blue = magenta = cyan = reset = ""
