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
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan_wlb.checkpoint import CheckpointManager, find_checkpoint, read_run_state
from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_manager import (
    ConfigError,
    batch_problems,
    exit_on_config_error,
    load_config,
    validate,
)
from torchtitan_wlb.context_parallel.shard_plan import BUILDERS
from torchtitan_wlb.data.dataloader import StepDataset, build_dataloader, make_planner
from torchtitan_wlb.data.documents import load_documents
from torchtitan_wlb.data.micro_batch import Layout
from torchtitan_wlb.data.tokenizer import Tokenizer
from torchtitan_wlb.logger import init_logger, logger
from torchtitan_wlb.metrics import MetricLogger, peak_flops
from torchtitan_wlb.models.attention import select_attention
from torchtitan_wlb.models.llama import Transformer, llama_configs
from torchtitan_wlb.optimizer import Optimizers, lr_factor
from torchtitan_wlb.packing.cost_model import DEVICES
from torchtitan_wlb.packing.profile import build_cost_model, detect_device
from torchtitan_wlb.packing.settings import fields_left_open, reconcile, resolve_settings
from torchtitan_wlb.packing.simulate import measure
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.distributed import (
    check_agreement,
    clip_grad_norm,
    gather_step,
    init_distributed,
    set_timeouts,
)
from torchtitan_wlb.parallelisms.parallelize_llama import parallelize_llama
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline, my_stages, split_layers
from torchtitan_wlb.profiling import maybe_memory_snapshot, maybe_profile

COMPARED_STEPS = 1000  # at most so many steps are planned again with `plain` for the closing comparison


def main(config: JobConfig) -> None:
    began = time.perf_counter()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dims = validate(config, world_size)
    training, parallelism = config.training, config.parallelism
    if config.job.description:
        logger.info(config.job.description)

    # Documents. The first process of a machine tokenises what is not in the cache, the others wait at a file lock.
    tokenizer = Tokenizer(config.model.tokenizer, config.model.add_bos, config.model.add_eos)
    documents = load_documents(training, tokenizer, training.dataset, training.dataset_path, training.dataset_weight)
    for name, counts in zip(training.dataset, documents.counts()):
        shown = ", ".join(f"{k} {v:,}" for k, v in counts.items())
        logger.info(f"Documents of {name}: {shown} (long ones: {training.long_documents})")

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
    run_state = read_run_state(checkpoint) if checkpoint else None
    if run_state:
        settings = reconcile(
            run_state["settings"], settings, fields_left_open(training, config.packing, config.cost_model)
        )
    else:
        settings = tune(settings, config.packing.target_delay, plan_steps)
    my = dims.coordinates(rank)
    n_stages, stage_indices = my_stages(
        my["pp"],
        dims.pp,
        parallelism.pipeline_parallel_schedule,
        parallelism.pipeline_parallel_stages_per_rank,
    )
    if problems := batch_problems(settings.n, dims, parallelism.pipeline_parallel_schedule, n_stages):
        raise ConfigError(*problems)

    # Loader workers start here, before CUDA and process groups.
    layout = Layout(
        dp=dims.dp,
        dp_rank=my["dp"],
        cp=dims.cp,
        cp_rank=my["cp"],
        tp=dims.tp,
        tp_rank=my["tp"],
        sharding=config.context_parallel.sharding,
        tile=DEVICES[cost_device].tile,
    )
    dataset = StepDataset(documents, settings, layout, run_state["planner"] if run_state else None)
    steps = iter(build_dataloader(dataset, training.num_workers, pin_memory=torch.cuda.is_available()))

    # Process groups and the device mesh; from here on all ranks must agree on what they are about to do.
    device = init_distributed(config.comm.init_timeout_seconds)
    if dist.get_world_size() > 1 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)
    mesh, cp_group = dims.build_mesh(device.type), dims.build_cp_group()
    check_agreement({"packing settings": settings.hash(), "resumed step": str(run_state["step"] if run_state else 0)})
    logger.info(f"{dims} on {device.type}; {settings.describe()}")

    # The model: this rank's stages on the meta device, made parallel, then filled in place.
    dtype = getattr(torch, training.mixed_precision_param)
    kernel_name, kernel = select_attention(device.type, dtype)
    stages = split_layers(
        model_args.n_layers,
        n_stages,
        layer_cost=model_args.layer_flops_per_token + model_args.layer_flops_per_pair * training.seq_len / 2,
        head_cost=model_args.head_flops_per_token(model_args.vocab_size),
    )
    reshard = {"always": True, "never": False, "default": dims.pp == 1}[parallelism.reshard_after_forward]
    models = []
    for i in stage_indices:
        with torch.device("meta"):
            model = Transformer(
                model_args,
                n_ids=tokenizer.n_ids,
                max_position=training.seq_len,
                loss_chunk=training.loss_chunk_size,
                layers=stages[i],
            )
        parallelize_llama(
            model,
            mesh,
            dims,
            cp_group,
            kernel=kernel,
            param_dtype=dtype,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            ac_mode=config.activation_checkpoint.mode,
            ac_every=config.activation_checkpoint.selective_every,
            compile=config.compile.enable,
            reshard_after_forward=reshard,
        )
        model.to_empty(device=device)
        model.init_weights(config.debug.seed, device)
        models.append(model)
    parameters = [p for model in models for p in model.parameters()]
    logger.info(
        f"Model {config.model.flavor}, layers of the stages {[f'{r.start}..{r.stop - 1}' for r in stages]}, "
        f"attention kernel {kernel_name}, {dtype}"
    )

    pipeline = Pipeline(
        models,
        stage_indices=stage_indices,
        n_stages=n_stages,
        schedule=parallelism.pipeline_parallel_schedule,
        n_micro_batches=settings.n // dims.dp,
        mesh=mesh,
        device=device,
        dtype=dtype,
        dim=model_args.dim,
        tp=dims.tp,
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
    step = run_state["step"] if run_state else 0
    first_step = step + 1
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    metrics = MetricLogger(
        config, model_args, rank=rank, world_size=world_size, resumed_step=step, peak=peak_flops(device_name)
    )
    evaluate = (
        build_validation(config, settings, layout, tokenizer, pipeline, device) if config.validation.enable else None
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
            batch = next(steps, None)
            if batch is None:
                logger.info(f"The data has ended after step {step}")
                break
            step += 1
            micro_batches = [mb.to(device) for mb in batch.micro_batches]
            loss = pipeline.forward_backward(micro_batches, 1.0 / max(1, batch.n_targets))
            grad_norm = clip_grad_norm(parameters, training.max_norm, device)
            lr = config.optimizer.lr * lr_factor(step, training.steps, config.lr_scheduler)
            optimizers.step(lr)
            optimizers.zero_grad()

            # One collective: the loss over all ranks, and proof that all trained the same plan.
            sums = gather_step(
                loss if layout.counts_loss else torch.zeros_like(loss),
                batch.plan_hash,
                cp_work=batch.cp_work,
                kinds=batch.cp_sharding,
                counts=my["pp"] == my["cp"] == my["tp"] == 0,
                all_kinds=("whole", *BUILDERS),
            )
            metrics.add(batch.stats["tokens"], batch.stats["attended_pairs"])
            if step % config.metrics.log_freq == 0 or step == first_step or step == training.steps:
                metrics.log(
                    {
                        "step": step,
                        "loss": sums.loss,
                        "grad_norm": grad_norm.item(),
                        "lr": lr,
                        **batch.stats,
                        "imbalance_cp": sums.cp_work_max / sums.cp_work_mean,
                        "cp_sharding": sums.sharding,
                        "data_hash": batch.plan_hash,
                    }
                )
            if step == first_step:
                set_timeouts(config.comm.train_timeout_seconds, mesh, cp_group)

            pause = time.perf_counter()
            run_state = {"step": step, "settings": asdict(settings), "planner": batch.state}
            if checkpoints and step % config.checkpoint.interval == 0:
                checkpoints.save(run_state)
            if evaluate and step % config.validation.freq == 0:
                metrics.log_validation(step, *evaluate())
            if step % training.gc_freq == 0:
                gc.collect(1)
            metrics.pause(time.perf_counter() - pause)
            if profiler:
                profiler.step()

    if checkpoints:
        if step >= first_step and step % config.checkpoint.interval:
            checkpoints.save(run_state)
        checkpoints.finish()
    if step >= first_step and rank == 0:
        last = min(step, first_step + COMPARED_STEPS - 1)
        ours, plain = (
            measure(plan_steps(replace(settings, strategy=name)), last - first_step + 1, first_step - 1).imbalance_mean
            for name in (settings.strategy, "plain")
        )
        logger.info(
            f"Predicted imbalance of micro-batches, steps {first_step}..{last}: {settings.strategy} {ours:.3f}, "
            f"plain on the same documents {plain:.3f}"
        )
    metrics.close()
    logger.info(f"Done after step {step}, {time.perf_counter() - began:.1f} s")
    dist.barrier()
    dist.destroy_process_group()


def build_validation(
    config: JobConfig,
    settings,
    layout: Layout,
    tokenizer: Tokenizer,
    pipeline: Pipeline,
    device: torch.device,
):
    """A function that evaluates one pass over the validation documents: (mean loss, targets)."""
    v = config.validation
    documents = load_documents(config.training, tokenizer, v.dataset, v.dataset_path)
    held_out = replace(settings, strategy="plain", epochs=1, documents=documents.fingerprint)

    def evaluate() -> tuple[float, int]:
        total, targets = torch.zeros((), dtype=torch.float64, device=device), 0
        for i, batch in enumerate(StepDataset(documents, held_out, layout)):
            if i == v.steps:
                break
            share = pipeline.evaluate([mb.to(device) for mb in batch.micro_batches], 1.0)
            total += share.double() if layout.counts_loss else 0.0
            targets += batch.n_targets
        dist.all_reduce(total)
        return total.item() / max(1, targets), targets

    return evaluate


if __name__ == "__main__":
    init_logger()
    try:
        main(load_config(sys.argv[1:]))
    except ConfigError as error:
        exit_on_config_error(error)
