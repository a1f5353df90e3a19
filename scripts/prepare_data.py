"""Tokenise the sources of a recipe ahead of time, with several processes, and print what the length policy did.

    python scripts/prepare_data.py --job.config_file F.toml [--section.key value ...]

Training finds the result in training.dataset_cache. An interrupted preparation goes on where it was.
"""

import sys
import time

import numpy as np

from torchtitan_wlb.config_checks import per_source_problems, source_problems
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.data.documents import load_documents
from torchtitan_wlb.data.tokenizer import build_tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import init_logger


def main(argv: list[str]) -> None:
    config = load_config(argv)
    t = config.training
    problems = list(source_problems("training", t.dataset, t.dataset_path, t.dataset_weight))
    if problems := problems + list(per_source_problems("training", t)):
        raise ConfigError(*problems)
    began = time.perf_counter()
    tokenizer = build_tokenizer(config.model)
    documents = load_documents(t, tokenizer, chat_template=config.model.chat_template)
    for name, counts in zip(t.dataset, documents.counts()):
        print(f"{name}: " + ", ".join(f"{k} {v:,}" for k, v in counts.items()))
    seconds = time.perf_counter() - began
    lengths = documents.lengths(np.arange(len(documents)))
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99])
    print(
        f"{len(documents):,} documents of at most {t.seq_len:,} tokens: mean {lengths.mean():,.0f}, p50 {p50:,.0f}, "
        f"p90 {p90:,.0f}, p99 {p99:,.0f}, max {lengths.max():,}; {seconds:.1f} s, "
        f"{lengths.sum() / seconds:,.0f} tokens/s"
    )


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])
