"""The classes of mistakes that are known by name, each with what to do about it and a page that explains it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CLASSES", "MistakeClass"]

_PAGES = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes/"


@dataclass(frozen=True)
class MistakeClass:
    """A common mistake in code for several devices.

    Attributes:
        name: for example "mean-of-means"; its page has the same name.
        title: what goes wrong, in one clause.
        advice: what to do, in one line.
    """

    name: str
    title: str
    advice: str

    @property
    def page(self) -> str:
        """The address of its page."""
        return f"{_PAGES}{self.name}.md"


_ALL = (
    # gradients
    MistakeClass(
        "gradients-not-synchronized",
        "gradients of some parameters stay on each rank",
        "wrap every trained parameter in DistributedDataParallel, after the last change to the model; call the "
        "wrapper, not the module inside; keep the wrapper until backward has run; leave no_sync() before the last "
        "backward of a step; set find_unused_parameters=True if a step leaves parameters unused",
    ),
    MistakeClass(
        "world-size-factor",
        "a result is off by a factor that depends on the number of ranks",
        "average once: DistributedDataParallel divides by the world size already, all_reduce with SUM does not",
    ),
    MistakeClass(
        "loss-term-factor",
        "one term of the loss counts once for each rank, or one over the number of ranks, and the others do not",
        "scale all terms alike: if gradients are summed over ranks, divide an auxiliary loss or a penalty by the "
        "number of ranks, too; if they are averaged, multiply each term that is divided by a global count",
    ),
    MistakeClass(
        "expert-gradients-factor",
        "gradients of experts are off by the size of the group that shares the experts out",
        "scale the gradients of experts like all others: an expert sees the tokens of all ranks of its group, so its "
        "gradient is their sum; if the other gradients are averaged over ranks, divide it by the size of the group",
    ),
    MistakeClass(
        "accumulation-factor",
        "a result is off by the number of micro-batches",
        "divide each micro-batch's loss by the number of micro-batches of its own window, the last and incomplete one "
        "included, or sum and divide once by the count",
    ),
    MistakeClass(
        "mean-of-means",
        "a mean over each part's own samples or tokens is averaged over the parts",
        "sum over each rank's own samples or tokens, and divide by the global count, all-reduced first",
    ),
    MistakeClass(
        "clipped-before-synchronization",
        "gradients are clipped by a norm that is not the norm of the whole, averaged gradient",
        "synchronize (and unscale) first, then clip by the norm of the whole gradient: all-reduce the sum of squares "
        "of what each rank holds a part of",
    ),
    MistakeClass(
        "wrong-process-group",
        "a collective runs over the wrong ranks, not over those that hold the parts",
        "pass group= to the collective, and divide by the size of the group, not by the world size",
    ),
    MistakeClass(
        "stale-gradients",
        "gradients of an earlier step or micro-batch are added in",
        "call optimizer.zero_grad() on every rank before each window, and do not reduce what is reduced already",
    ),
    MistakeClass(
        "partial-result-added-on-every-rank",
        "a term that belongs to the result once is added on every rank, before the sum",
        "add the bias (or residual) after the all_reduce, or on one rank only",
    ),
    # models
    MistakeClass(
        "batch-statistics-per-rank",
        "each rank takes statistics over its own shard, but one device takes them over the whole batch",
        "convert BatchNorm with torch.nn.SyncBatchNorm.convert_sync_batchnorm, all-reduce or gather other statistics "
        "of the batch, or compare with a reference that takes the batch shard by shard",
    ),
    MistakeClass(
        "buffers-drift",
        "buffers differ between ranks",
        "leave broadcast_buffers=True, or synchronize running statistics before they are used or saved",
    ),
    MistakeClass(
        "different-initialization",
        "ranks start from different parameters",
        "seed all ranks alike before the model is built, or broadcast the parameters from rank 0; offset seeds after "
        "that",
    ),
    MistakeClass(
        "random-numbers-per-rank",
        "a result depends on random numbers that are drawn rank by rank",
        "draw numbers that must be the same on all ranks from a generator with one seed; for the comparison, switch "
        "dropout and augmentation off",
    ),
    # sequences
    MistakeClass(
        "positions-restart",
        "positions start again on each rank's part of a sequence",
        "add the offset of the rank's part: torch.arange(length) + index * length",
    ),
    MistakeClass(
        "labels-shifted-after-split",
        "labels are shifted after the sequence is split, so the last token of each part has no label, or a wrong one",
        "shift labels on the whole sequence, and split inputs and labels after that",
    ),
    # the optimizer
    MistakeClass(
        "optimizer-differs",
        "gradients are right, but the optimizer updates the parameters differently than on one device",
        "after wrapping, compare learning rates, parameter groups and their settings with those of one device; step a "
        "scheduler once per optimizer step; take norms and other products of whole tensors, not of shards",
    ),
    # data
    MistakeClass(
        "padding-counted",
        "samples that were repeated to fill the last shards are counted",
        "drop the repeated samples: keep the first len(dataset) after the gather, or use a sampler that does not pad",
    ),
    MistakeClass(
        "dataset-not-split",
        "every rank sees all samples",
        "give the loader a DistributedSampler; split an IterableDataset by rank (and by worker) in its __iter__",
    ),
    MistakeClass(
        "samples-missed",
        "some samples are never seen",
        "check the bounds of the shards; drop_last drops up to world size times batch size samples of each epoch",
    ),
    MistakeClass(
        "epochs-not-reshuffled",
        "each epoch visits the samples in the same order",
        "call sampler.set_epoch(epoch) before each epoch",
    ),
    MistakeClass(
        "split-differs-between-ranks",
        "ranks split the data into training and validation differently",
        "pass generator=torch.Generator().manual_seed(seed) to random_split, with one seed for all ranks",
    ),
    MistakeClass(
        "not-scattered",
        "non-tensor arguments reach every replica whole, not split",
        "make tensors of lists before DataParallel scatters the batch",
    ),
    MistakeClass(
        "gathered-in-other-order",
        "gathered values are in the order of the ranks, not of the samples",
        "undo the interleaving of the sampler: torch.stack(parts, dim=1).flatten(0, 1); gather tensors one by one, and "
        "concatenate them after that",
    ),
    # collectives
    MistakeClass(
        "value-of-one-rank",
        "a value that all ranks use is right on one rank only, or differs between ranks",
        "all_reduce where every rank needs the result; reduce and gather deliver to dst only",
    ),
    MistakeClass(
        "uneven-gather",
        "tensors of different sizes are gathered as if they were alike",
        "gather the sizes first, pad to the longest, and cut the padding off again",
    ),
    MistakeClass(
        "aliased-gather-list",
        "the list that a collective fills holds one tensor several times",
        "allocate each entry: [torch.empty_like(x) for _ in range(world_size)]",
    ),
    MistakeClass(
        "result-discarded",
        "a collective ran on a temporary copy, or its result was written over",
        "keep the contiguous copy, reduce it, and copy it back; add to what was reduced before, and do not write over "
        "it",
    ),
    MistakeClass(
        "strided-view",
        "a collective ran on a view with gaps",
        "communicate tensor.contiguous(), and copy the result back",
    ),
    MistakeClass(
        "memory-formats-differ",
        "ranks hand a collective tensors that lie in memory in another order of dimensions",
        "give all ranks one memory format, and communicate tensor.contiguous(): a collective combines elements by "
        "their places in memory, not by their indices",
    ),
    MistakeClass(
        "reduced-again",
        "a running sum is reduced after each batch although it already contains reduced values",
        "keep each rank's own sum, and reduce it once, at the end; or reduce only the new values, and add the result",
    ),
    MistakeClass(
        "not-waited",
        "the result of an asynchronous collective is used before it is there",
        "call wait() on the handle before the tensor is read, changed or freed",
    ),
    MistakeClass(
        "gradient-cut-by-collective",
        "gradients do not flow through a collective",
        "use torch.distributed.nn.functional, which is differentiable, or put the rank's own tensor back into what "
        "all_gather gives",
    ),
    MistakeClass(
        "wrong-reduction",
        "values are combined by a different operation than on one device",
        "choose the op that matches: SUM of sums and counts, MAX of flags; the mean or norm of the parts is not that "
        "of the whole",
    ),
    # control flow
    MistakeClass(
        "decision-per-rank",
        "each rank decides by its own values what all ranks must do alike",
        "all-reduce the value (loss, overflow flag, stop signal) before it decides about a step, a scale, a rate or "
        "the end",
    ),
    MistakeClass(
        "uneven-steps",
        "ranks take different numbers of steps, and wait for each other in the last",
        "give every rank as many batches: a sampler that pads or drops, or DistributedDataParallel's join() context",
    ),
    MistakeClass(
        "set-order",
        "ranks go through a set, each in an order of its own",
        "iterate over sorted(names), or over a list or dict, which keep the order of insertion",
    ),
    # precision
    MistakeClass(
        "low-precision-overflow",
        "a sum over ranks overflows the narrow dtype that it is communicated in",
        "divide before the sum, or reduce in float32",
    ),
    MistakeClass(
        "integer-division",
        "a mean, or a share of a count, loses its fraction",
        "divide with /, and not with //, in floating point, and convert integers before they are averaged",
    ),
    MistakeClass(
        "low-precision-arithmetic",
        "values are rounded to a narrower dtype than on one device",
        "reduce and accumulate in float32",
    ),
    # state
    MistakeClass(
        "state-not-restored",
        "something is not saved, or not loaded, with a checkpoint",
        "save and load optimizer, scheduler, scaler, sampler position and RNG states beside the parameters",
    ),
    MistakeClass(
        "restored-on-one-rank",
        "a checkpoint is loaded on some ranks only",
        "load on every rank (map_location to its own device), or broadcast what one rank has loaded, the optimizer "
        "included",
    ),
    MistakeClass(
        "evaluation-differs",
        "ranks give different answers in evaluation mode",
        "synchronize buffers before evaluation, and call eval() on every rank",
    ),
)

CLASSES: dict[str, MistakeClass] = {entry.name: entry for entry in _ALL}
"""All classes by name."""
