"""What decides packing in a recipe, resolved as train.py does it, without any training: layout, costs, settings."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch

from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_checks import validate
from torchtitan_wlb.cost.devices import DEVICES, find_device
from torchtitan_wlb.cost.profile import Profile, build_cost_model, read_profile
from torchtitan_wlb.cost.step_time import StepModel
from torchtitan_wlb.data.dataloader import make_planner
from torchtitan_wlb.data.documents import Documents, load_documents
from torchtitan_wlb.data.prepare import apply_length_policy
from torchtitan_wlb.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.layout_packing import resolve_packing
from torchtitan_wlb.models.hf import find_model, resolve_model
from torchtitan_wlb.models.model_args import ModelArgs
from torchtitan_wlb.packing.document_order import DocumentOrder
from torchtitan_wlb.packing.planner import StepPlanner
from torchtitan_wlb.packing.settings import PackingSettings
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.parallel_dims import ParallelDims
from torchtitan_wlb.parallelisms.pipeline_llama import PipelinePlan, plan_pipeline

MakePlanner = Callable[[PackingSettings], StepPlanner]


@dataclass(frozen=True)
class Recipe:
    """A recipe whose packing is resolved.

    Attributes:
        dims: parallel degrees.
        args: the model, its vocabulary resolved.
        device: key of DEVICES. profile: of cost_model.profile, None without one.
        candidates: settings as configured; what is "auto" is open (see `tuned`).
    """

    config: JobConfig
    dims: ParallelDims
    args: ModelArgs
    device: str
    profile: Profile | None
    candidates: list[PackingSettings]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its files need to be there for documents only, unless it decides the vocabulary."""
        return build_tokenizer(self.config.model)

    @property
    def settings(self) -> PackingSettings:
        """As configured, with one micro-batch for a window of tokens where their number is "auto"."""
        return self.candidates[0]

    def tuned(self, make_planner: MakePlanner, strategy: str = "") -> PackingSettings:
        """Settings with "auto" found on the documents of a planner; with another strategy, if one is given."""
        several = [replace(s, strategy=strategy or s.strategy) for s in self.candidates]
        return tune(several, self.config.packing.target_delay, make_planner)

    def own_documents(self) -> Documents:
        """The documents of the recipe, from the cache or prepared now."""
        return load_documents(self.config.training, self.tokenizer, chat_template=self.config.model.chat_template)

    def own_planner(self) -> MakePlanner:
        """Planner on the documents of the recipe for given settings."""
        return partial(make_planner, self.own_documents())

    def step_model(self, n: int = 0) -> StepModel:
        """The time model of one of the recipe's pipelines; n: see pipeline_plan."""
        return self.pipeline_plan(n).step_model

    def pipeline_plan(self, n: int = 0) -> PipelinePlan:
        """How one of the recipe's pipelines is cut and scheduled.

        Args:
            n: micro-batches of a step over all pipelines; 0: the recipe's.
        """
        p, dims = self.config.parallelism, self.dims
        value_bytes = getattr(torch, self.config.training.mixed_precision_param).itemsize
        return plan_pipeline(
            self.args,
            schedule=p.pipeline_parallel_schedule,
            pp=dims.pp,
            stages_per_rank=p.pipeline_parallel_stages_per_rank,
            m=(n or self.settings.n) // dims.dp,
            seq_len=self.config.training.seq_len,
            cost=self.settings.cost,
            device=DEVICES[self.device],
            bytes_per_token=self.args.dim * value_bytes / (dims.tp * dims.cp),
            ranks=dims.world_size,
            ac=self.config.activation_checkpoint.kept,
        )


def resolve_recipe(config: JobConfig, *, ranks: int = 0, seed: int | None = None) -> Recipe:
    """Resolve what decides packing.

    Args:
        ranks: processes of the run; 0: as many as the degrees need, with one data-parallel rank where that degree is
            left open.
        seed: of the order of the documents, debug.seed without.

    Raises:
        ConfigError: the recipe could not be trained.
    """
    p = config.parallelism
    least = p.data_parallel_replicate_degree * max(1, p.data_parallel_shard_degree) * p.context_parallel_degree
    least *= p.tensor_parallel_degree * p.pipeline_parallel_degree
    config.checkpoint.initial_load_path = ""  # no script needs weights
    dims = validate(config, ranks or least)
    has_vocabulary = find_model(config.model).vocab_size != -1
    args = resolve_model(config.model, 0 if has_vocabulary else build_tokenizer(config.model).n_ids)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    device = find_device(config.cost_model.device, name, config.cost_model.profile)
    profile = read_profile(config.cost_model.profile, args, tp=dims.tp)
    cost = build_cost_model(profile, device, args, tp=dims.tp, cp=dims.cp)
    return Recipe(config, dims, args, device, profile, list(resolve_packing(config, dims, cost, seed)))


class Lengths:
    """Documents of a JSON list of lengths (times scale), after the length policy of a recipe; they have no tokens.

    Raises:
        ConfigError: the file is not such a list.
    """

    def __init__(self, path: str, config: JobConfig, scale: float = 1.0):
        try:
            listed = np.asarray(json.loads(Path(path).read_bytes()), dtype=np.float64)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"--lengths {path}: not a JSON list of lengths ({error})") from error
        rows = np.ceil(listed * scale).astype(np.int64)
        table, _ = apply_length_policy(rows, config.training.seq_len, config.training.long_documents)
        self.lengths = table[:, 2] - table[:, 1]
        self.lengths = self.lengths[self.lengths > 1]

    def planner(self, settings: PackingSettings) -> StepPlanner:
        """Planner on these documents for given settings."""
        order = DocumentOrder([len(self.lengths)], [1.0], self.lengths.__getitem__, settings.seed, settings.epochs)
        return StepPlanner(settings, order)
