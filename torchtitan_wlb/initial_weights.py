"""Weights that a fresh run starts from: of a Hugging Face folder or of a checkpoint of ours, read straight into the
shards of whatever layout."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_wlb.checkpoint import check_metadata
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.logger import logger
from torchtitan_wlb.models.hf import hf_name
from torchtitan_wlb.models.llama import Transformer
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.parallelisms.tied_embeddings import COPY

_FLAG = "--checkpoint.initial_load_path"
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
_NO_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$")  # tables that old files hold


class InitialWeights:
    """A folder whose weights are those of a model: names and shapes are compared at once, before anything is built.

    Args:
        path: a folder with *.safetensors, or a folder step-N of CheckpointManager.
        args: of the whole model.

    Raises:
        ConfigError: the folder is neither, is damaged, or holds other weights: every missing, unknown and misshapen one
            by name.
    """

    def __init__(self, path: str, args: ModelArgs):
        self.path, self.args = path, args
        self.is_hf = any(Path(path).glob("*.safetensors"))
        if not self.is_hf and not (Path(path) / ".metadata").is_file():
            raise ConfigError(f"{_FLAG} {path}: neither a folder with *.safetensors nor a checkpoint folder step-N")
        if not self.is_hf:
            check_metadata(Path(path))
        self._reader = HuggingFaceStorageReader(path) if self.is_hf else dcp.FileSystemReader(path)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # whatever a reader says of a file that was cut or changed
            raise ConfigError(f"{_FLAG} {path} cannot be read ({str(error)[:200]})") from None
        _compare(path, metadata, {self._outside(k): v for k, v in parameter_shapes(args).items()}, args)
        self._stored = cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)

    def _outside(self, name: str) -> str:
        """What a parameter of ours is called in the folder."""
        if self.is_hf:
            return hf_name(name, self.args.is_tied)
        return f"model.{'tok_embeddings.weight' if self.args.is_tied and name == COPY else name}"

    def load(self, model_parts: Sequence[nn.Module]) -> None:
        """Fill the parameters of this rank's stages. All ranks call it; none waits for another."""
        for part in model_parts:
            parameters = {self._outside(_WRAPPERS.sub("", name)): p.detach() for name, p in part.named_parameters()}
            # A vocabulary that is padded here only: read whole, cut into shards below.
            sizes = {k: self._stored[k].size for k in parameters}
            whole = {k: torch.empty(sizes[k]) for k, p in parameters.items() if sizes[k] != p.shape}
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # every rank reads for itself
                    dcp.load({**parameters, **whole}, storage_reader=self._reader, no_dist=True)
            except (Exception, CheckpointException) as error:  # the latter is no Exception
                raise ConfigError(f"{_FLAG} {self.path} cannot be loaded ({str(error)[:300]})") from None
            for name, rows in whole.items():
                p = parameters[name]
                padded = torch.zeros(p.shape, dtype=p.dtype)
                padded[: len(rows)] = rows
                if isinstance(p, DTensor):
                    padded = distribute_tensor(padded.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
                p.copy_(padded)
        logger.info(f"Weights from {self.path}")


def parameter_shapes(args: ModelArgs) -> dict[str, torch.Size]:
    """{name: shape} of all parameters."""
    with torch.device("meta"):
        whole = Transformer(args, n_ids=args.n_ids, max_position=1)
    return {name: p.shape for name, p in whole.named_parameters()}


def _compare(path: str, metadata: Metadata, wanted: dict[str, torch.Size], args: ModelArgs) -> None:
    """Names and shapes of a file's weights are those of the model; the vocabulary may be padded here only."""
    found = {k: v.size for k, v in metadata.state_dict_metadata.items() if hasattr(v, "size")}
    found = {k: v for k, v in found.items() if not _NO_WEIGHTS.search(k) and not k.startswith("optimizer.")}
    if args.is_tied:
        found.pop("lm_head.weight", None)
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is unknown" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        shape, here = list(found[name]), list(wanted[name])
        if shape != here and [args.n_ids, *here[1:]] != shape:
            problems.append(f"{name} is {shape}, the model has {here}")
    if problems:
        shown = "; ".join(problems[:8])
        raise ConfigError(f"{_FLAG} {path}: {len(problems)} weights are not those of --model.flavor: {shown}")
