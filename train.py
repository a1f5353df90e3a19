"""Train a Llama on packed documents: `torchrun --nproc-per-node N train.py --job.config_file F.toml [--section.key
value ...]`.

Read from top to bottom, `main` is one training run.
"""

import gc
import math
import os
import sys
import time
from functools import partial
from pathlib import Path

from torchtitan_wlb.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the slow imports: the launcher may be killed while they run

import torch
import torch.distributed as dist

from torchtitan_wlb.checkpoint import CheckpointManager, find_checkpoint, set_aside_later
from torchtitan_wlb.config import JobConfig
from torchtitan_wlb.config_checks import settings_without_effect, validate
from torchtitan_wlb.config_manager import exit_on_config_error, load_config
from torchtitan_wlb.cost.devices import DEVICES, find_device, peak_flops
from torchtitan_wlb.cost.profile import build_cost_model, build_kernel_cost, read_profile
from torchtitan_wlb.cost.step_time import stages_of
from torchtitan_wlb.data.dataloader import StepPlans, build_dataloader, make_planner
from torchtitan_wlb.data.documents import load_documents
from torchtitan_wlb.data.step_builder import Layout, StepBuilder
from torchtitan_wlb.data.tokenizer import build_tokenizer
from torchtitan_wlb.errors import ConfigError
from torchtitan_wlb.evaluation import evaluate, sets_of
from torchtitan_wlb.folders import prove_writable, set_aside, take
from torchtitan_wlb.initial_weights import InitialWeights
from torchtitan_wlb.layout_packing import batch_problems, reshards_parameters, resolve_packing
from torchtitan_wlb.logger import init_logger, logger
from torchtitan_wlb.metrics import ALL_SHARDINGS, MetricLogger
from torchtitan_wlb.models.hf import resolve_model
from torchtitan_wlb.models.kernels import select_kernel
from torchtitan_wlb.optimizer import build_optimizers, lr_factor
from torchtitan_wlb.packing.tuning import tune
from torchtitan_wlb.parallelisms.distributed import (
    check_agreement,
    init_distributed,
    select_device,
    set_timeouts,
)
from torchtitan_wlb.parallelisms.gradients import clip_grad_norm
from torchtitan_wlb.parallelisms.memory_estimate import estimate_memory, in_words
from torchtitan_wlb.parallelisms.parallelize_llama import build_stage
from torchtitan_wlb.parallelisms.pipeline_llama import Pipeline, plan_pipeline
from torchtitan_wlb.parallelisms.step_sums import gather_step, measured_imbalance
from torchtitan_wlb.parallelisms.tied_embeddings import COPY
from torchtitan_wlb.profiling import MicroBatchClock, maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan_wlb.run_state import check_identity, identity, rates, read_run_state, read_settings, write_settings


def main(job_config: JobConfig) -> None:
    began = time.perf_counter()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    parallel_dims = validate(job_config, world_size)
    training, parallelism = job_config.training, job_config.parallelism
    dump_folder = Path(job_config.job.dump_folder)
    if job_config.job.description:
        logger.info(job_config.job.description)
    if job_config.job.print_args:
        logger.info(job_config.model_dump_json(indent=2))
    for warning in settings_without_effect(job_config):
        logger.info(warning)
    checkpoint_folder = dump_folder / job_config.checkpoint.folder
    if rank == 0:
        folders = {f"--job.dump_folder {dump_folder}": dump_folder}
        if job_config.checkpoint.enable:
            folders[f"--checkpoint.folder {job_config.checkpoint.folder}"] = checkpoint_folder
        prove_writable(folders)
        _lock = take(dump_folder)

    # A resumed run goes on with the packing that was resolved at its first step, whatever the layout is now.
    checkpoint, run_state = None, None
    if job_config.checkpoint.enable:
        checkpoint = find_checkpoint(checkpoint_folder, job_config.checkpoint.load_step)
        run_state = read_run_state(checkpoint) if checkpoint else None
    exclude = job_config.checkpoint.exclude_from_loading
    keeps_packing = run_state is not None and "dataloader" not in exclude
    step = run_state.step if run_state else 0
    if rank == 0 and not checkpoint:
        written = ("metrics.jsonl", job_config.metrics.save_tb_folder, job_config.profiling.save_traces_folder)
        set_aside(dump_folder / name for name in written)
    device = select_device()
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    if parallelism.enable_async_tensor_parallel and device.type != "cuda":
        raise ConfigError("--parallelism.enable_async_tensor_parallel: needs CUDA, this machine has none")
    kind = find_device(job_config.cost_model.device, device_name, job_config.cost_model.profile)
    dtype = getattr(torch, training.mixed_precision_param)
    kernel = select_kernel(device.type, dtype, job_config.model.attention)
    tokenizer = build_tokenizer(job_config.model)
    model_args = resolve_model(job_config.model, tokenizer.n_ids)
    start = "" if checkpoint else job_config.checkpoint.initial_load_path
    initial_weights = InitialWeights(start, model_args) if start else None
    if start and model_args.trained_context and training.seq_len > model_args.trained_context:
        logger.warning(
            f"The model has seen documents of at most {model_args.trained_context:,} tokens, --training.seq_len is "
            f"{training.seq_len:,}: see --model.rope_scaling"
        )
    profile = read_profile(job_config.cost_model.profile, model_args, tp=parallel_dims.tp)
    cost = build_cost_model(profile, kind, model_args, tp=parallel_dims.tp, cp=parallel_dims.cp)
    candidates = list(resolve_packing(job_config, parallel_dims, cost))
    made_with = identity(job_config, model_args, tokenizer, profile)
    if run_state:
        check_identity(run_state, made_with, candidates[0], job_config, exclude)
        for flag, value in rates(job_config).items():
            if run_state.rates.get(flag) != value:
                logger.info(f"From now on --{flag} is {value}; it was {run_state.rates.get(flag)}")
    kept = None
    if run_state and keeps_packing:
        kept = run_state.settings
    elif job_config.packing.settings_from:
        kept = read_settings(Path(job_config.packing.settings_from), candidates[0], job_config)
    if kept:
        if problems := list(batch_problems(kept.n, parallel_dims, parallelism.pipeline_parallel_schedule)):
            raise ConfigError(*problems)
        if kept.objective != candidates[0].objective:
            logger.info(f"Documents are packed for {kept.objective}; this layout is {candidates[0].objective}")
        candidates = [kept]

    # Documents. The first process of a machine tokenises what is not in the cache, the others wait at a file lock.
    template = job_config.model.chat_template
    documents = load_documents(training, tokenizer, chat_template=template)
    for name, counts in zip(training.dataset, documents.counts()):
        shown = ", ".join(f"{k} {v:,}" for k, v in counts.items())
        logger.info(f"Documents of {name}: {shown} (long ones: {training.long_documents})")
    held_out = None
    if (validation := job_config.validation).enable:
        held_out = {name: load_documents(training, tokenizer, v, template) for name, v in sets_of(validation).items()}

    made_with["training.dataset_path"] = f"content {documents.content}"
    planner_state = None
    if run_state and keeps_packing:
        check_identity(run_state, made_with, candidates[0], job_config, exclude)
        planner_state = run_state.planner.model_dump()
    settings = tune(candidates, job_config.packing.target_delay, partial(make_planner, documents))
    if rank == 0:
        write_settings(dump_folder / "packing_settings.json", settings)
    plans = StepPlans(documents, settings, planner_state)
    about_run = {"settings": settings, "made_with": made_with, "rates": rates(job_config)}
    about_run |= {"model": job_config.model, "args": model_args}

    # Process groups and the device mesh; from here on all ranks must agree on what they are about to do.
    comm = job_config.comm
    init_distributed(device, comm.init_timeout_seconds, comm.trace_buf_size, str(dump_folder / "comm_trace"))
    if world_size > 1 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if job_config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    world_mesh = parallel_dims.build_mesh(device.type)
    my = parallel_dims.coordinates(rank)

    # The pipeline: which layers a stage has, and what every rank computes in which order.
    plan = plan_pipeline(
        model_args,
        schedule=parallelism.pipeline_parallel_schedule,
        pp=parallel_dims.pp,
        stages_per_rank=parallelism.pipeline_parallel_stages_per_rank,
        m=settings.n // parallel_dims.dp,
        seq_len=training.seq_len,
        cost=settings.cost,
        device=DEVICES[kind],
        bytes_per_token=model_args.dim * dtype.itemsize / (parallel_dims.cp * parallel_dims.tp),
        ranks=parallel_dims.world_size,
        ac=job_config.activation_checkpoint.kept,
    )
    layout = Layout(
        dp=parallel_dims.dp,
        dp_rank=my["dp"],
        cp=parallel_dims.cp,
        cp_rank=my["cp"],
        tp=parallel_dims.tp,
        tp_rank=my["tp"],
        sharding=job_config.context_parallel.sharding,
        kernel_cost=build_kernel_cost(
            profile,
            kind,
            model_args,
            tp=parallel_dims.tp,
            cp=parallel_dims.cp,
            bytes_per_value=dtype.itemsize,
        ),
        step_model=plan.step_model,
    )
    check_agreement(
        {
            "packing settings": settings.hash(),
            "documents": documents.content,
            "resumed step": str(step),
            "choice of shard plans": f"{layout.sharding} {layout.kernel_cost.hash()}",
        }
    )
    logger.info(f"{parallel_dims} on {device.type}; {settings.describe()}")

    # The model: this rank's stages.
    reshards = reshards_parameters(job_config, parallel_dims, settings.n)
    model_parts = [
        build_stage(
            model_args,
            plan.stages[i],
            world_mesh,
            parallel_dims,
            kernel=kernel,
            n_ids=model_args.n_ids,
            max_position=training.seq_len,
            loss_chunk=training.loss_chunk(model_args.vocab_size // parallel_dims.tp),
            seed=job_config.debug.seed,
            device=device,
            param_dtype=dtype,
            reduce_dtype=getattr(torch, training.mixed_precision_reduce),
            ac=job_config.activation_checkpoint.kept,
            compile=job_config.compile.backend if job_config.compile.enable else "",
            async_tp=parallelism.enable_async_tensor_parallel,
            recompute_kv=job_config.context_parallel.recompute_kv,
            reshard_after_forward=reshards,
            cpu_offload=training.enable_cpu_offload and device.type == "cuda",
        )
        for i in stages_of(plan.actions[my["pp"]])
    ]
    held = estimate_memory(job_config, parallel_dims, model_args, plan, settings, reshards=reshards)
    logger.info(f"Memory of the fullest rank, estimated: {in_words(held)}")
    parameters = {name: p for part in model_parts for name, p in part.named_parameters()}
    copies = (COPY,) if model_args.is_tied else ()
    layers = [f"{r.start}..{r.stop - 1}" for r in plan.stages]
    logger.info(f"Model {job_config.model.flavor}, layers of the stages {layers}, kernel {kernel.name}, {dtype}")
    clock = MicroBatchClock(device, job_config.metrics.time_micro_batches)
    pipeline = Pipeline(
        model_parts,
        actions=plan.actions,
        world_mesh=world_mesh,
        device=device,
        dtype=dtype,
        dim=model_args.dim,
        tp=parallel_dims.tp,
        clock=clock,
        gathers_once=not reshards,
        reduces_each=parallelism.reduce_every_micro_batch,
    )
    optimizers = build_optimizers(model_parts, job_config.optimizer)

    # State: weights and optimizer from the checkpoint, the documents from its planner's state.
    if initial_weights:
        initial_weights.load(model_parts)
    checkpoints = None
    if job_config.checkpoint.enable:
        checkpoints = CheckpointManager(
            checkpoint_folder,
            optimizers,
            job_config.checkpoint.keep_latest_k,
            job_config.checkpoint.async_mode == "async",
        )
        if checkpoint:
            checkpoints.load(checkpoint, job_config.checkpoint.exclude_from_loading)
            if rank == 0:
                set_aside_later(checkpoint)
    builder = StepBuilder(documents, settings, layout)
    steps = build_dataloader(plans, builder, training.num_workers, pin_memory=device.type == "cuda")
    metrics = MetricLogger(
        job_config.metrics,
        job_config.model_dump(),
        model_args,
        dump_folder=dump_folder,
        rank=rank,
        world_size=world_size,
        resumed_step=step,
        peak=peak_flops(device_name),
    )

    # Collect garbage at the same step on all ranks, not whenever one of them happens to.
    gc.disable()
    first_step = step + 1
    seconds = time.perf_counter() - began
    if step < training.steps:
        logger.info(f"Training starts at step {first_step} of {training.steps}, {seconds:.1f} s after start")
    else:
        logger.info(f"Nothing to train: the checkpoint is of step {step}, --training.steps is {training.steps}")
    metrics.start_window()
    skipped_steps = skipped_in_a_row = 0
    with (
        maybe_enable_profiling(job_config.profiling, job_config.job.dump_folder, rank) as profiler,
        maybe_enable_memory_snapshot(job_config.profiling, job_config.job.dump_folder, rank),
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
            lr = job_config.optimizer.lr * lr_factor(step, training.steps, job_config.lr_scheduler)
            loss, grad_norm = torch.zeros((), device=device), None
            if batch.n_targets:
                micro_batches = [mb.to(device) for mb in batch.micro_batches]
                loss = pipeline.forward_backward(micro_batches, 1.0 / batch.n_targets)
                # All ranks get the same norm, so all update or none does.
                grad_norm = clip_grad_norm(parameters, training.max_norm, device, copies).item()
                if math.isfinite(grad_norm):
                    optimizers.step(lr)
                    skipped_in_a_row = 0
                optimizers.zero_grad()
            if grad_norm is None or not math.isfinite(grad_norm):
                reason = "it has no target" if grad_norm is None else f"its gradient has norm {grad_norm}"
                logger.warning(
                    f"Step {step} changes no weight: {reason}; documents {batch.documents.tolist()[:20]} ..."
                )
                skipped_steps += 1
                skipped_in_a_row += grad_norm is not None

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
                "skipped_steps": skipped_steps,
                "data_time_s": data_time,
                **batch.stats,
                "bubble": batch.step_time.bubble,
                "data_hash": batch.plan_hash,
            }
            if clock.timed and batch.n_targets:
                record["imbalance_measured"] = measured_imbalance(clock.seconds(), parallel_dims, device)
            metrics.add(record, table)
            if held_out and step % validation.freq == 0:
                pause = time.perf_counter()
                metrics.add_validation(evaluate(pipeline, held_out, settings, layout, validation.steps))
                metrics.pause(time.perf_counter() - pause)
                metrics.log()
            elif step % job_config.metrics.log_freq == 0 or step == first_step:
                metrics.log()
            if step == first_step:
                set_timeouts(comm.train_timeout_seconds, parallel_dims.groups(world_mesh))

            if skipped_in_a_row >= training.max_skipped_steps:
                raise RuntimeError(
                    f"{skipped_in_a_row} steps in a row had a gradient that is not finite "
                    "(--training.max_skipped_steps)"
                )

            pause = time.perf_counter()
            last_state = batch.state
            if checkpoints and step % job_config.checkpoint.interval == 0:
                metrics.check()
                checkpoints.save(about_run | {"step": step, "planner": last_state})
            if step % training.gc_freq == 0:
                gc.collect(1)
            metrics.pause(time.perf_counter() - pause)
            if profiler:
                profiler.step()

    metrics.log()
    metrics.close()
    if checkpoints:
        if step >= first_step and step % job_config.checkpoint.interval:
            checkpoints.save(about_run | {"step": step, "planner": last_state})
        checkpoints.finish()
    dist.barrier()
    dist.destroy_process_group()
    logger.info(f"Done after step {step}, {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    init_logger()
    with exit_on_config_error():
        main(load_config(sys.argv[1:]))
    # All is written and closed. Threads of gloo outlive their groups, and at a normal exit they now and then abort a
    # rank that has succeeded.
    sys.stdout.flush()
    os._exit(0)
