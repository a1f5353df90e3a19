"""Train a Llama on packed documents: `torchrun --nproc-per-node N train.py --job.config_file F.toml [--section.key
value ...]`.

Read from top to bottom, `main` is one training run.
"""

import gc
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_wlb.checkpoint import CheckpointManager, find_checkpoint, read_run_state, set_aside_later
from torchtitan_wlb.config import ConfigError, JobConfig
from torchtitan_wlb.config_checks import batch_problems, settings_without_effect, validate
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.context_parallel.kernel_cost import build_kernel_cost
from torchtitan_wlb.data.dataloader import StepDataset, build_dataloader, make_planner
from torchtitan_wlb.data.documents import Documents, load_documents
from torchtitan_wlb.data.micro_batch import Layout
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.logger import init_logger, logger
from torchtitan_wlb.metrics import ALL_SHARDINGS, MetricLogger, peak_flops
from torchtitan_wlb.models.attention import select_kernel
from torchtitan_wlb.models.llama import llama_configs
from torchtitan_wlb.optimizer import Optimizers, lr_factor
from torchtitan_wlb.packing.cost_model import DEVICES
from torchtitan_wlb.packing.profile import build_cost_model, detect_device
from torchtitan_wlb.packing.settings import PackingSettings, fields_left_open, reconcile, resolve_settings
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.distributed import (
    check_agreement,
    clip_grad_norm,
    gather_step,
    init_distributed,
    measured_imbalance,
    select_device,
    set_timeouts,
)
from torchtitan_wlb.parallelisms.parallelize_llama import build_stage
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline, plan_pipeline
from torchtitan_wlb.profiling import MicroBatchClock, maybe_memory_snapshot, maybe_profile
from torchtitan_wlb.simulation.step_time import stages_of

COMPARED_STEPS = 300  # at most so many steps are planned again with `plain` for the closing line


def main(config: JobConfig) -> None:
    began = time.perf_counter()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dims = validate(config, world_size)
    training, parallelism = config.training, config.parallelism
    if config.job.description:
        logger.info(config.job.description)
    for warning in settings_without_effect(config):
        logger.info(warning)
    try:
        Path(config.job.dump_folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--job.dump_folder {config.job.dump_folder}: {error.strerror}") from error

    # Documents. The first process of a machine tokenises what is not in the cache, the others wait at a file lock.
    tokenizer = Tokenizer(config.model.tokenizer, config.model.add_bos, config.model.add_eos)
    documents = load_documents(training, tokenizer, training.dataset, training.dataset_path, training.dataset_weight)
    for name, counts in zip(training.dataset, documents.counts()):
        shown = ", ".join(f"{k} {v:,}" for k, v in counts.items())
        logger.info(f"Documents of {name}: {shown} (long ones: {training.long_documents})")
    held_out = None
    if (v := config.validation).enable:
        held_out = load_documents(training, tokenizer, v.dataset, v.dataset_path, section="validation")

    # What decides packing is resolved once; a resumed run takes it from the checkpoint, whatever its layout.
    model_args = replace(llama_configs[config.model.flavor], vocab_size=tokenizer.padded_vocab_size)
    cost_device = detect_device(config.cost_model.device)
    cost = build_cost_model(config.cost_model.profile, cost_device, model_args, tp=dims.tp, cp=dims.cp)
    settings = resolve_settings(
        training,
        config.packing,
        seed=config.debug.seed,
        dp=dims.dp,
        pp=dims.pp,
        cost=cost,
        documents=documents.fingerprint,
    )
    plan_steps = partial(make_planner, documents)
    checkpoint_folder = Path(config.job.dump_folder) / config.checkpoint.folder
    checkpoint = find_checkpoint(checkpoint_folder, config.checkpoint.load_step) if config.checkpoint.enable else None
    made_with = {"model.flavor": config.model.flavor, "optimizer.name": config.optimizer.name}
    run_state = read_run_state(checkpoint, made_with) if checkpoint else None
    if run_state:
        settings = reconcile(
            run_state["settings"], settings, fields_left_open(training, config.packing, config.cost_model)
        )
    else:
        settings = tune(settings, config.packing.target_delay, plan_steps)
    my = dims.coordinates(rank)
    if problems := batch_problems(settings.n, dims, parallelism.pipeline_parallel_schedule):
        raise ConfigError(*problems)

    # Loader workers start here, before process groups; pinning memory needs to know the device.
    device = select_device()
    dtype = getattr(torch, training.mixed_precision_param)
    kernel = select_kernel(device.type, dtype, config.model.attention)
    ac = config.activation_checkpoint
    plan = plan_pipeline(
        model_args,
        schedule=parallelism.pipeline_parallel_schedule,
        pp=dims.pp,
        stages_per_rank=parallelism.pipeline_parallel_stages_per_rank,
        m=settings.n // dims.dp,
        seq_len=training.seq_len,
        cost=settings.cost,
        device=DEVICES[cost_device],
        bytes_per_token=model_args.dim * dtype.itemsize / (dims.cp * dims.tp),
        recomputed=ac.recomputed,
    )
    layout = Layout(
        dp=dims.dp,
        dp_rank=my["dp"],
        cp=dims.cp,
        cp_rank=my["cp"],
        tp=dims.tp,
        tp_rank=my["tp"],
        sharding=config.context_parallel.sharding,
        kernel_cost=build_kernel_cost(
            config.cost_model.profile,
            DEVICES[cost_device],
            layer_flops_per_pair=model_args.layer_flops_per_pair,
            kv_dim=model_args.n_kv_heads * model_args.head_dim,
            tp=dims.tp,
            bytes_per_value=dtype.itemsize,
        ),
        step_model=plan.step_model,
    )
    dataset = StepDataset(documents, settings, layout, run_state["planner"] if run_state else None)
    steps = iter(build_dataloader(dataset, training.num_workers, pin_memory=device.type == "cuda"))

    # Process groups and the device mesh; from here on all ranks must agree on what they are about to do.
    init_distributed(device, config.comm.init_timeout_seconds)
    if dist.get_world_size() > 1 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    mesh, cp_group = dims.build_mesh(device.type), dims.build_cp_group()
    check_agreement(
        {
            "packing settings": settings.hash(),
            "resumed step": str(run_state["step"] if run_state else 0),
            "choice of shard plans": f"{layout.sharding} {layout.kernel_cost.hash()}",
        }
    )
    logger.info(f"{dims} on {device.type}; {settings.describe()}")

    # The model: this rank's stages.
    reshard = {"always": True, "never": False, "default": dims.pp == 1}[parallelism.reshard_after_forward]
    models = [
        build_stage(
            model_args,
            plan.stages[i],
            mesh,
            dims,
            cp_group,
            n_ids=tokenizer.n_ids,
            max_position=training.seq_len,
            loss_chunk=training.loss_chunk_size,
            seed=config.debug.seed,
            device=device,
            kernel=kernel,
            param_dtype=dtype,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            ac_mode=ac.mode,
            ac_every=ac.selective_every,
            compile=config.compile.enable,
            recompute_kv=config.context_parallel.recompute_kv,
            reshard_after_forward=reshard,
        )
        for i in stages_of(plan.actions[my["pp"]])
    ]
    parameters = [p for model in models for p in model.parameters()]
    logger.info(
        f"Model {config.model.flavor}, layers of the stages {[f'{r.start}..{r.stop - 1}' for r in plan.stages]}, "
        f"attention kernel {kernel.name}, {dtype}"
    )

    clock = MicroBatchClock(device, config.metrics.time_micro_batches)
    pipeline = Pipeline(
        models,
        actions=plan.actions,
        mesh=mesh,
        device=device,
        dtype=dtype,
        dim=model_args.dim,
        tp=dims.tp,
        clock=clock,
    )
    optimizers = Optimizers(models, config.optimizer)
    checkpoints = None
    if config.checkpoint.enable:
        checkpoints = CheckpointManager(
            checkpoint_folder,
            optimizers,
            config.checkpoint.keep_latest_k,
            config.checkpoint.async_mode == "async",
        )
        if checkpoint:
            checkpoints.load(checkpoint)
            if rank == 0:
                set_aside_later(checkpoint)
    step = run_state["step"] if run_state else 0
    first_step = step + 1
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    metrics = MetricLogger(
        config.metrics,
        asdict(config),
        model_args,
        dump_folder=Path(config.job.dump_folder),
        rank=rank,
        world_size=world_size,
        resumed_step=step,
        peak=peak_flops(device_name),
    )

    # Collect garbage at the same step on all ranks, not whenever one of them happens to.
    gc.disable()
    logger.info(
        f"Training starts at step {first_step} of {training.steps}, {time.perf_counter() - began:.1f} s after start"
    )
    metrics.start_window()
    with (
        maybe_profile(config.profiling, config.job.dump_folder, rank) as profiler,
        maybe_memory_snapshot(config.profiling, config.job.dump_folder, rank),
    ):
        while step < training.steps:
            # All ranks run out of data at the same step: they plan the same steps.
            waited = time.perf_counter()
            batch = next(steps, None)
            if batch is None:
                logger.info(f"The data has ended after step {step}")
                break
            data_time = time.perf_counter() - waited
            step += 1
            micro_batches = [mb.to(device) for mb in batch.micro_batches]
            loss = pipeline.forward_backward(micro_batches, 1.0 / max(1, batch.n_targets))
            grad_norm = clip_grad_norm(parameters, training.max_norm, device)
            lr = config.optimizer.lr * lr_factor(step, training.steps, config.lr_scheduler)
            optimizers.step(lr)
            optimizers.zero_grad()

            # One collective: the loss over all ranks, and proof that all trained the same plan.
            table = gather_step(
                loss if layout.counts_loss else torch.zeros_like(loss),
                batch.plan_hash,
                cp_work=batch.cp_work,
                step_seconds=batch.step_time.seconds,
                kinds=batch.cp_sharding,
                counts=my["pp"] == my["cp"] == my["tp"] == 0,
                all_kinds=ALL_SHARDINGS,
            )
            record = {
                "step": step,
                "grad_norm": grad_norm,
                "lr": lr,
                "data_time_s": data_time,
                **batch.stats,
                "bubble": batch.step_time.bubble,
                "data_hash": batch.plan_hash,
            }
            if clock.timed:
                record["imbalance_measured"] = measured_imbalance(clock.seconds(), dims, device)
            metrics.add(record, table)
            if step % config.metrics.log_freq == 0 or step == first_step:
                metrics.log()
            if step == first_step:
                set_timeouts(config.comm.train_timeout_seconds, mesh, cp_group)

            pause = time.perf_counter()
            last_state = {"step": step, "settings": asdict(settings), "planner": batch.state, "made_with": made_with}
            if checkpoints and step % config.checkpoint.interval == 0:
                metrics.check()
                checkpoints.save(last_state)
            if held_out and step % config.validation.freq == 0:
                metrics.log_validation(step, *evaluate(pipeline, held_out, settings, layout, config.validation.steps))
            if step % training.gc_freq == 0:
                gc.collect(1)
            metrics.pause(time.perf_counter() - pause)
            if profiler:
                profiler.step()

    metrics.log()
    metrics.close()
    if checkpoints:
        if step >= first_step and step % config.checkpoint.interval:
            checkpoints.save(last_state)
        checkpoints.finish()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0 and step >= first_step:
        log_comparison(plan_steps, settings, run_state, min(COMPARED_STEPS, step - first_step + 1))
    logger.info(f"Done after step {step}, {time.perf_counter() - began:.1f} s")


def log_comparison(plan_steps, settings: PackingSettings, run_state: dict | None, n: int) -> None:
    """Plan the first n steps of this run again, on lengths: as they were packed, and with `plain` on the same
    documents."""
    means = []
    for strategy in (settings.strategy, "plain"):
        planner = plan_steps(replace(settings, strategy=strategy))
        if run_state:
            state = run_state["planner"]
            # Another strategy has another state; it starts with the same next document and nothing waiting.
            planner.restore(state if strategy == settings.strategy else state | {"packer": planner.packer.state()})
        means.append(np.mean([plan.imbalance for plan in islice(planner, n)]))
    logger.info(
        f"Predicted imbalance of micro-batches over {n} steps: {settings.strategy} {means[0]:.3f}, "
        f"plain on the same documents {means[1]:.3f}"
    )


def evaluate(
    pipeline: Pipeline, documents: Documents, settings: PackingSettings, layout: Layout, n: int
) -> tuple[float, int]:
    """(mean loss, targets) of the first n steps of a pass over held-out documents, packed with `plain`. All ranks call
    it."""
    held_out = replace(settings, strategy="plain", epochs=1, documents=documents.fingerprint)
    device = next(pipeline.models[0].parameters()).device
    total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in islice(StepDataset(documents, held_out, layout), n):
        share = pipeline.evaluate([mb.to(device) for mb in batch.micro_batches], 1.0)
        total += share.double() if layout.counts_loss else 0.0
        targets += batch.n_targets
    dist.all_reduce(total)
    return total.item() / max(1, targets), targets


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(load_config(sys.argv[1:]))
