"""The whole configuration: one class per TOML section.

Type, range and default stand on the field, and the string under it is its help text (`train.py --help` prints it).
Names are torchtitan's where the thing is the same; [packing], [context_parallel] and [cost_model] are ours.
config_manager.py reads files and flags, config_checks.py knows what does not go together. Degrees and counts of -1 mean
"resolved at start", as the help text says.
"""

from torchtitan_wlb.config.method import ContextParallel, CostModel, Model, Packing, Parallelism, Training
from torchtitan_wlb.config.run import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Debug,
    Job,
    LRScheduler,
    Metrics,
    Optimizer,
    Profiling,
    Validation,
)
from torchtitan_wlb.config_types import Section

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Compile",
    "ContextParallel",
    "CostModel",
    "Debug",
    "Job",
    "JobConfig",
    "LRScheduler",
    "Metrics",
    "Model",
    "Optimizer",
    "Packing",
    "Parallelism",
    "Profiling",
    "Training",
    "Validation",
]


class JobConfig(Section):
    job: Job = Job()
    model: Model = Model()
    training: Training = Training()
    packing: Packing = Packing()
    context_parallel: ContextParallel = ContextParallel()
    cost_model: CostModel = CostModel()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    validation: Validation = Validation()
    debug: Debug = Debug()
