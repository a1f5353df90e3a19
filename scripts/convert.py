"""A checkpoint of ours as a folder that transformers loads: config.json, *.safetensors, the tokenizer's files.

    python scripts/convert.py outputs/checkpoint/step-100 --out my_model [--dtype bfloat16]

The way in needs no script: --checkpoint.initial_load_path takes a Hugging Face folder. Tensors are read, cast and
written a file at a time, so memory is that of one file, whatever the model.
"""

import argparse
import json
import math
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from torchtitan_wlb.checkpoint import check_metadata
from torchtitan_wlb.config_manager import exit_on_config_error
from torchtitan_wlb.data.tokenizer import build_tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.initial_weights import parameter_shapes
from torchtitan_wlb.logger import init_logger
from torchtitan_wlb.models.hf import hf_name, write_hf_config
from torchtitan_wlb.parallelisms.tied_embeddings import COPY
from torchtitan_wlb.run_state import read_run_state

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)


def split_into_files(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in order, as many to a file as fit into a limit of bytes (at least one)."""
    files: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return files


def convert(checkpoint: Path, out: Path, dtype: torch.dtype, file_bytes: int) -> None:
    """Write the model of a checkpoint folder step-N.

    Raises:
        ConfigError: no checkpoint, or `out` exists and holds something.
    """
    state = read_run_state(checkpoint)
    check_metadata(checkpoint)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty")
    out.mkdir(parents=True, exist_ok=True)
    args, shapes = state.args, parameter_shapes(state.args)
    if args.is_tied:
        shapes.pop(COPY)
    files = split_into_files({k: math.prod(s) * dtype.itemsize for k, s in shapes.items()}, file_bytes)
    index: dict[str, str] = {}
    for i, names in enumerate(files, 1):
        name = f"model-{i:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        read = {f"model.{k}": torch.empty(shapes[k]) for k in names}
        dcp.load(read, checkpoint_id=str(checkpoint), no_dist=True)
        tensors = {}
        for k in names:
            x = read.pop(f"model.{k}").to(dtype)
            is_vocabulary = k in ("tok_embeddings.weight", COPY)
            tensors[hf_name(k)] = x[: args.n_ids].contiguous() if is_vocabulary else x
        save_file(tensors, out / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(math.prod(s) * dtype.itemsize for s in shapes.values())
        table = {"metadata": {"total_size": total}, "weight_map": index}
        (out / "model.safetensors.index.json").write_text(json.dumps(table, indent=2))

    context = max(args.trained_context, state.settings.seq_len)
    config = write_hf_config(args, context, str(dtype).removeprefix("torch."))
    copied = []
    if Path(state.model.tokenizer).exists():
        tokenizer = build_tokenizer(state.model)
        config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        folder = Path(state.model.tokenizer)
        folder = folder if folder.is_dir() else folder.parent
        copied = [file for file in TOKENIZER_FILES if (folder / file).is_file()]
        for file in copied:
            shutil.copyfile(folder / file, out / file)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    print(f"{out}: {args.family}, {len(index)} tensors in {len(files)} files, {dtype}, context {context:,}")
    print(f"tokenizer: {', '.join(copied) or f'{state.model.tokenizer} has no files to copy'}")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder step-N of a run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--file_gb", type=float, default=5.0, help="of one file of weights")
    a = parser.parse_args(argv)
    convert(a.checkpoint, a.out, getattr(torch, a.dtype), int(a.file_gb * 1e9))


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(sys.argv[1:])
