"""Tokenising: memory by the size of documents, and tokens/s against `datasets.map` with the same tokenizer.

    python scripts/studies/benchmark_prepare.py --out assets/results/prepare.json

1. Peak memory of one process that tokenises 20 MB as 10,000 documents of 2 KB and as 40 of 0.5 MB.
2. Tokens/s with 1 and 2 processes, interleaved with `datasets.load_dataset(...).map(...)`, medians over rounds; both
   from a process that has just started, with everything that it imports. The tokenizer, a byte-level BPE, is learned
   here from the standard library.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

from scripts.origin import write_results

OURS = """
import sys
from pathlib import Path
from torchtitan_wlb.data.prepare import prepare
from torchtitan_wlb.data.source_spec import SourceSpec
from torchtitan_wlb.data.tokenizer import Tokenizer
path, tokenizer, cache, processes = sys.argv[1:]
spec = SourceSpec("json", path, "text", "", 4096, "split")
prepare(spec, Tokenizer(tokenizer, eos="<|endoftext|>"), cache, int(processes))
# Not ru_maxrss, which begins with that of the process that started this one.
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""
THEIRS = """
import sys
import datasets
from torchtitan_wlb.data.tokenizer import Tokenizer
path, tokenizer, cache, processes = sys.argv[1:]
if __name__ == "__main__":
    datasets.disable_progress_bars()
    t = Tokenizer(tokenizer, eos="<|endoftext|>")
    raw = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
    n = int(processes)
    done = raw.map(
        lambda b: {"input_ids": t.encode_documents(b["text"])}, batched=True, remove_columns=raw.column_names,
        num_proc=n if n > 1 else None,
    )
    done.save_to_disk(cache + "/saved")
    print(0)
"""


def learn_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    reader = Tokenizer(models.BPE())
    reader.pre_tokenizer, reader.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    reader.train([str(p) for p in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))], trainer)
    reader.save(str(path))


def write_corpus(path: Path, text: str, size: int, n: int) -> None:
    """n documents of about `size` characters of a text, over and over."""
    twice = text + text
    with path.open("w") as out:
        for i in range(n):
            start = i * size % len(text)
            out.write(json.dumps({"text": twice[start : start + size], "meta": i}) + "\n")


def run(code: str, *args) -> tuple[float, int]:
    """(seconds, what the program printed last)."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, check=True)
    return time.perf_counter() - began, int(done.stdout.split()[-1])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=20)
    parser.add_argument("--out", required=True)
    a = parser.parse_args(argv)
    stdlib = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    text = "\n".join(p.read_text(errors="replace") for p in stdlib[:800])
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        learn_tokenizer(folder / "tokenizer.json")
        corpora = {2_000: folder / "small.jsonl", 500_000: folder / "large.jsonl"}
        for size, path in corpora.items():
            write_corpus(path, text, size, a.mb * 1_000_000 // size)
            _, kilobytes = run(OURS, path, folder / "tokenizer.json", folder / f"memory-{size}", 1)
            rows.append({"kind": "memory", "document_bytes": size, "corpus_mb": a.mb, "peak_mb": kilobytes / 1024})
        seconds: dict[tuple[str, int], list[float]] = {}
        for r in range(a.rounds):
            for processes in (1, 2):
                for name, code in (("prepare", OURS), ("datasets.map", THEIRS)):
                    cache = folder / f"{name}-{processes}-{r}"
                    took, _ = run(code, corpora[2_000], folder / "tokenizer.json", cache, processes)
                    seconds.setdefault((name, processes), []).append(took)
        for (name, processes), all_rounds in seconds.items():
            speed = {"mb_per_s": a.mb / median(all_rounds), "seconds": all_rounds}
            rows.append({"kind": "speed", "by": name, "processes": processes, **speed})
    for row in rows:
        print(row)
    write_results(a.out, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
