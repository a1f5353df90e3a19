"""Workload-balanced long-context LLM training on native PyTorch (WLB-LLM, OSDI'25)."""
