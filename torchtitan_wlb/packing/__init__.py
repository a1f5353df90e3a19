"""Documents to micro-batches by predicted work. `Balancer` is the door for other trainers."""

from torchtitan_wlb.packing.balancer import BalancedStep, Balancer

__all__ = ["BalancedStep", "Balancer"]
