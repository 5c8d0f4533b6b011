"""Say why parts of the surface of torch are not drawn: a row for each reason."""

from __future__ import annotations

import functools
from typing import NamedTuple

from mgpu_check.suite.surface.demands import Variant, matches


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
        + " torch.distributed.nn.Function* torch.optim.Optimizer.profile_hook_step torch.optim.*.get_lr"
        " torch.nn.parallel.DistributedDataParallel.gather torch.nn.parallel.DistributedDataParallel.scatter"
        " torch.nn.parallel.DistributedDataParallel.to_kwargs torch.optim.lr_scheduler.*.recursive_undo"
        " operators.slice_inverse"),
    *(LeftOut("a signature of torch names it, but the function refuses it, or accepts the default only",
        f"operators.{name}", options) for name, options in (
            ("elu", "scale"), ("hash_tensor", "mode"), ("index_reduce", "include_input"), ("msort", "descending"),
            ("nuclear_norm", "dtype"), ("segment_reduce", "indices"), ("to", "layout"))),
    LeftOut("the suite draws it, but torch does not pass it to a mode, which is what records",
        "operators.l1_loss", "weight"),
    LeftOut("it chooses a kernel of CUDA in Python, below the simulated device: the suite draws it on real devices",
        "operators.linear_cross_entropy", "options"),
    LeftOut("an abstract class: checks draw its subclasses",
        _of(_DIST, "checkpoint.LoadPlanner* checkpoint.SavePlanner* checkpoint.StorageReader* "
            "checkpoint.StorageWriter* algorithms.Join*Hook* algorithms.Joinable* "
            "algorithms.model_averaging.averagers.ModelAverager*")
        + " torch.optim.Optimizer torch.optim.Optimizer.step torch.optim.lr_scheduler.LRScheduler"),
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
    LeftOut("it accepts meshes of one dimension only", "torch.distributed.tensor.parallel.parallelize_module",
        "device_mesh", "mesh?of?2"),
    LeftOut("the suite continues a schedule from its state instead, which has the epoch",
        "torch.optim.*", "last_epoch"),
    LeftOut("deprecated: all schedulers but CosineAnnealingWarmRestarts count their steps",
        "torch.optim.lr_scheduler.*.step", "epoch"),
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
    LeftOut("a part of torchdata's pipes, which torch no longer extends",
        "torch.utils.data.*DataPipe* torch.utils.data.DFIterDataPipe* torch.utils.data.DataChunk* "
        "torch.utils.data.*_datapipe* torch.utils.data.runtime_validation* torch.utils.data.argument_validation "
        "torch.utils.data.non_deterministic* torch.utils.data.guaranteed_*"),
    LeftOut("torch passes it between its own planners and storages",
        _of(_DIST, "checkpoint.LoadPlan checkpoint.Metadata checkpoint.WriteItem"),
        "planner_data storage_data storage_meta version bytes_io_data"),
    LeftOut("it needs the package safetensors", _DIST + "checkpoint.FileSystemWriter", "serialization_format"),
    LeftOut("each checkpoint would start a process on each rank, which imports torch",
        _DIST + "checkpoint.async_save", "async_checkpointer_type", "PROCESS"),
    LeftOut("deprecated: torch warns of each use, and names get_state_dict and set_state_dict in its place",
        _of(_DIST, "fsdp.FullyShardedDataParallel.*state_dict_type fsdp.StateDictSettings"), "state_dict_type"),
    LeftOut("deprecated: torch warns of each use, and names get_state_dict and set_state_dict in its place",
        _of(_DIST, "fsdp.FullyShardedDataParallel.*optim_state_dict fsdp.*StateDictConfig "
            "checkpoint.load_sharded_optimizer_state_dict")),
    LeftOut("deprecated: torch warns of each use", _of(_DIST, "checkpoint.state_dict.*"),
        "submodules keep_submodule_prefixes"),
    LeftOut("deprecated: torch ignores it, and warns", "torch.utils.data.DataLoader", "pin_memory_device"),
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
    LeftOut("its backward pass has sums only, and raises for others",
        _of(_FUNCTIONAL, "reduce_scatter_*_autograd"), "reduceOp"),
    LeftOut("with a backward pass in two parts torch receives in another order than it sends: pytorch#178815",
        _of(_DIST, "pipelining.Schedule*"), "defer_pp_recv"),
    LeftOut("an experimental overlap, whose hooks are in no public module",
        _DIST + "optim.ZeroRedundancyOptimizer", "overlap_with_ddp"),
    LeftOut("it reads a variable of the environment that the launcher sets",
        _of(_DIST, "get_node_local_rank is_torchelastic_launched")),
    LeftOut("an address of a graph, its description, or marks in a trace, for other libraries and tools",
        _of(_CUDA, "CUDAGraph.raw_cuda_graph* CUDAGraph.get_graph_data")),
    LeftOut("an address of a graph, its description, or marks in a trace, for other libraries and tools",
        _CUDA + "graph", "enable_annotations"),
    LeftOut("it makes sparse tensors by an old constructor, which the simulated node lacks",
        "torch.optim.SparseAdam*"),
    LeftOut("quotients of inner products, which narrow dtypes round too coarsely to compare", "torch.optim.LBFGS",
        "params", "*float16"),
    LeftOut("torch has it for the CPU only", "torch.optim.Adagrad", "fused", "True"),
    LeftOut("it must be given together with another parameter that torch recommends in its place",
        "operators.*", "size_average reduce"),
    LeftOut("the result goes to a tensor that is given, from the same kernel", "operators.*", "out"),
    LeftOut("only memory of the host can be pinned", "operators.*_like operators.to", "pin_memory"),
    LeftOut("an operator of sparse, quantized or other tensors that are not dense tensors of CUDA",
        _of("operators.", "q_* *quantize* fake_* fused_moving* *quantized* fbgemm* miopen* mkldnn* sparse* hspmm smm "
            "sspaddmm *_indices *indices_copy coalesce is_coalesced dense_dim to_sparse to_mkldnn int_repr qscheme "
            "ipu xpu mtia is_distributed choose_qparams* ccol_indices* col_indices* resize_as_sparse "
            "native_channel_shuffle native_norm")),
    LeftOut("it returns a property of a tensor, or converts it for Python, and computes nothing",
        _of("operators.", "repr reduce_ex setstate array array_wrap dlpack dlpack_device complex long nonzero reversed "
            "storage storage_type const_data_ptr get_device is_* ndimension nelement numel dim_order type "
            "module_load map map2 apply sym_* result_type can_cast deepcopy len contains int float bool "
            "index hash format iter dir")),
    LeftOut("it differs from an operator that is drawn in that it copies, for functionalization",
        _of("operators.", "*_copy")),
    LeftOut("it draws random numbers, and another check judges their distribution, or that of an operator which draws "
        "in the same way",
        _of("operators.", "alpha_dropout binomial cauchy dropout1d dropout2d dropout3d exponential lobpcg "
            "feature_alpha_dropout feature_dropout fractional_max_pool* geometric gumbel_softmax log_normal "
            "native_dropout pca_lowrank poisson rand svd_lowrank")),
    LeftOut("it draws random numbers with this option",
        _of("operators.", "rrelu kaiming_uniform normal random uniform scaled_dot_product_attention"),
        "lower upper training mode nonlinearity generator mean std from to dropout_p"),
    LeftOut("a histogram that torch has for the CPU only", _of("operators.", "histogram histogramdd")),
    LeftOut("CUDA alone has it: the CPU refuses it, so there is no reference",
        _of("operators.", "linalg.lu linalg.lu_factor linalg.lu_factor_ex lu"), "pivot", "False"),
    LeftOut("CUDA alone has it: the CPU refuses it, so there is no reference",
        _of("operators.", "linalg.svd linalg.svdvals"), "driver"),
    LeftOut("it moves a tensor of the host, or the memory of one, and computes nothing",
        _of("operators.", "cuda pin_memory record_stream share_memory set indices values")),
    LeftOut("SyncBatchNorm calls it within autograd, where calls are not recorded, and a check of it judges the result",
        _of("operators.", "batch_norm_*")),
    LeftOut("torch calls another function for it, which is drawn",
        _of("operators.", "max_pool?d adaptive_max_pool?d"), "return_indices", "True"),
    LeftOut("torch.spmm is the same function, so its calls are recorded there", "operators.mm", "input mat2 out_dtype"),
    LeftOut("a part of autograd that runs on the host, without a kernel",
        _of("operators.", "backward register_post_accumulate_grad_hook retain_grad")),
    LeftOut("it sets an attribute of the result, not its elements",
        _of("operators.", "empty_like full_like ones_like zeros_like"), "layout requires_grad dtype"),
    LeftOut("its gradient or operand is sparse", _of("operators.", "gather to_dense spmm"),
        "sparse_grad masked_grad dtype out_dtype"),
)  # fmt: skip


@functools.cache
def reason_for(variant: Variant) -> str:
    """Return the reason of the first row that is about a variant; "" without one."""
    return next((row.reason for row in LEFT_OUT if row.covers(variant)), "")
