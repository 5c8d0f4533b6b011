"""Say why parts of the surface of torch are not drawn: a row for each reason."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tests.surface.demands import Variant, matches


class LeftOut(NamedTuple):
    """A part of the surface that the suite does not draw on purpose.

    Attributes:
        path, parameter, value: patterns of names, separated by spaces; ``*`` stands for any text.
    """

    reason: str
    path: str
    parameter: str = "*"
    value: str = "*"

    def covers(self, variant: Variant) -> bool:
        """Return whether the row is about a variant."""
        return all(map(matches, variant, self[1:]))


_DIST = "torch.distributed."
_FUNCTIONAL = "torch.distributed._functional_collectives."
_CUDA = "torch.cuda."


def _of(prefix: str, names: str) -> str:
    return " ".join(prefix + name for name in names.split())


LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("a part of torch's own implementation, which programs do not call",
        _of(_FUNCTIONAL, "*_backward *_setup_context *_inplace backend_impl allow_inflight_* "
            "AsyncCollectiveTensor.*")
        + " torch.distributed.nn.Function*"
        " torch.nn.parallel.DistributedDataParallel.gather torch.nn.parallel.DistributedDataParallel.scatter"
        " torch.nn.parallel.DistributedDataParallel.to_kwargs"),
    LeftOut("an abstract class: checks draw its subclasses",
        _of(_DIST, "checkpoint.LoadPlanner* checkpoint.SavePlanner* checkpoint.StorageReader* "
            "checkpoint.StorageWriter* algorithms.Join*Hook* algorithms.Joinable*")),
    LeftOut("the engine calls it before each test, and fails without it",
        _of(_DIST, "init_process_group is_available rendezvous register_rendezvous_handler")),
    LeftOut("about another backend than NCCL and gloo, or a plug-in",
        _of(_DIST, "Backend.* is_mpi_available is_ucc_available is_backend_available get_backend_config "
            "get_default_backend_for_device")),
    LeftOut("the backend for an option of NCCL, which the simulated node lacks",
        _of(_DIST, "*"), "backend_override pg_options backend device_id"),
    LeftOut("NCCL alone has it, and the simulated node runs gloo", _of(_DIST, "split_group shrink_group")),
    LeftOut("for people who debug: it prints, waits for input, or marks a trace",
        _of(_DIST, "breakpoint get_pg_count record_comm *.print_readable *.info")
        + " " + _of(_CUDA, "nvtx.* *.debug_dump *.enable_debug_mode check_error")),
    LeftOut("it uses torch.distributed.rpc, which runs functions of other processes",
        _of(_DIST, "nn.RemoteModule optim.DistributedOptimizer* optim.as_functional_optim")),
    LeftOut("it needs files of Hugging Face, and their packages", _of(_DIST, "checkpoint.*HuggingFace*")),
    LeftOut("it traces a model by torch.export; the suite divides models by hand",
        _of(_DIST, "pipelining.Pipe* pipelining.pipeline pipelining.pipe_split pipelining.build_stage")),
    LeftOut("it changes how a program is started, or its text in logs, never a result",
        _of(_DIST, "*"), "timeout group_desc mesh_dim_names fallback_rank"),
    LeftOut("a name of a group in an older form, beside the group itself", _of(_FUNCTIONAL, "*"), "tag"),
    LeftOut("it accepts strided tensors only, the default", "torch.distributed.tensor.[a-z]*", "layout"),
    LeftOut("the acceptance reads it from the driver", _of(_CUDA, "temperature power_draw utilization clock_rate "
        "memory_usage device_memory_used list_gpu_processes")),
    LeftOut("it replaces the allocator of the process, or its memory, which the simulated node refuses",
        _of(_CUDA, "CUDAPluggableAllocator* MemPool* use_mem_pool GreenContext* change_current_allocator "
            "caching_allocator_* *ipc* get_stream_from_external *_per_process_memory_fraction")),
    LeftOut("a figure about the build or the process, without effect on a result",
        _of(_CUDA, "can_device_access_peer get_arch_list get_gencode_flags get_allocator_backend "
            "current_blas_handle current_solver_handle "
            "is_tf32_supported is_bf16_supported get_sync_debug_mode set_sync_debug_mode memory_snapshot "
            "memory_summary host_memory_stats* reset_*host_memory_stats")),
    LeftOut("another name of a function that is drawn",
        _of(_CUDA, "reset_max_memory_allocated reset_max_memory_cached stream")),
    LeftOut("torch passes it between its own planners and storages",
        _of(_DIST, "checkpoint.LoadPlan checkpoint.Metadata checkpoint.WriteItem"),
        "planner_data storage_data storage_meta version bytes_io_data"),
    LeftOut("it needs the package safetensors", _DIST + "checkpoint.FileSystemWriter", "serialization_format"),
    LeftOut("each checkpoint would start a process on each rank, which imports torch",
        _DIST + "checkpoint.async_save", "async_checkpointer_type", "PROCESS"),
    LeftOut("loops of uneven lengths are gated by `assert_loader_covers` and `assert_step_scales`",
        _of(_DIST, "algorithms.Join*") + " torch.nn.parallel.DistributedDataParallel.join"),
    LeftOut("torch develops FSDP2 in its place; `mgpu-check model` trains with it",
        _of(_DIST, "fsdp.FullyShardedDataParallel* fsdp.MixedPrecision fsdp.CPUOffload fsdp.StateDictSettings fsdp.wrap.*")),
    LeftOut("deprecated: torch warns of each use, and names get_state_dict and set_state_dict in its place",
        _of(_DIST, "fsdp.FullyShardedDataParallel.*state_dict_type fsdp.StateDictSettings"), "state_dict_type"),
    LeftOut("deprecated: torch warns of each use, and names get_state_dict and set_state_dict in its place",
        _of(_DIST, "fsdp.FullyShardedDataParallel.*optim_state_dict fsdp.*StateDictConfig "
            "checkpoint.load_sharded_optimizer_state_dict")),
    LeftOut("deprecated: torch warns of each use", _of(_DIST, "checkpoint.state_dict.*"),
        "submodules keep_submodule_prefixes"),
    LeftOut("for an optimizer or a policy whose class torch keeps private",
        _of(_DIST, "fsdp.FullyShardedDataParallel.optim_state_dict_to_load")
        + " torch.nn.parallel.DistributedDataParallel", "is_named_optimizer mixed_precision"),
    LeftOut("it moves parameters to the host within a step, which the simulated node refuses",
        _of(_DIST, "fsdp.CPUOffload fsdp.FullyShardedDataParallel"), "offload_params cpu_offload"),
    LeftOut("NCCL alone has such memory, and the simulated node runs gloo",
        _of(_DIST, "fsdp.FSDPModule.set_symm_mem_for_comm "
            "fsdp.FSDPModule.set_allocate_memory_from_process_group_for_comm")),
    LeftOut("torch names such a group by its ranks, and a second one in a process finds the addresses of the first",
        _of(_DIST, "new_group"), "use_local_synchronization", "True"),
    LeftOut("torch names such a group by its ranks, and a second one in a process finds the addresses of the first",
        _of(_DIST, "fsdp.FSDPModule.set_separate_reduce_scatter_group")),
    LeftOut("an interface whose method the returned object replaces", _DIST + "fsdp.UnshardHandle.wait"),
    LeftOut("it needs a process group of torch's C++ that only C++ makes", _of(_CUDA, "nccl.*"), "comms"),
    LeftOut("another name of a parameter that is drawn", _of(_CUDA, "nccl.reduce"), "outputs"),
    LeftOut("with a backward pass in two parts torch receives in another order than it sends: pytorch#178815",
        _of(_DIST, "pipelining.Schedule*"), "defer_pp_recv"),
    LeftOut("an optimizer of the older kind, whose parts fully_shard has too; or of local SGD, an approximation",
        _of(_DIST, "optim.ZeroRedundancyOptimizer* optim.PostLocalSGDOptimizer*")),
    LeftOut("it changes files, plans or threads of a checkpoint; or saves in one process, or in a group",
        _of(_DIST, "checkpoint.async_save checkpoint.load checkpoint.save checkpoint.Default*Planner "
            "checkpoint.FileSystemWriter"),
        "flatten_* allow_partial_load dedup_* enable_plan_caching single_file_per_rank sync_files thread_count "
        "per_thread_copy_ahead cache_staged_state_dict overwrite storage_* planner process_group async_stager no_dist "
        "use_collectives"),
    LeftOut("torch passes plans between its own planners", _of(_DIST, "checkpoint.SavePlan"), "usable"),
    LeftOut("torch calls it for a checkpoint that a stager of another class copies",
        _of(_DIST, "checkpoint.FileSystemWriter.stage")),
    LeftOut("it delays gradients to overlap them, and no check has a use of it",
        "torch.nn.parallel.DistributedDataParallel", "delay_all_reduce_named_params param_to_hook_all_reduce"),
    LeftOut("it reads a variable of the environment that the launcher sets",
        _of(_DIST, "get_node_local_rank is_torchelastic_launched")),
    LeftOut("it replays or times the work of one device", _of(_CUDA, "CUDAGraph* graph* make_graphed_callables "
        "is_current_stream_capturing Event.elapsed_time Event.query")),
)  # fmt: skip


@functools.cache
def reason_for(variant: Variant) -> str:
    """Return the reason of the first row that is about a variant; "" without one."""
    return next((row.reason for row in LEFT_OUT if row.covers(variant)), "")
