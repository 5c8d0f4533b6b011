/* NCCL between processes of one machine: a rank posts what it contributes when its stream gets there, and goes on when all
   others have posted theirs. Numbers are right, as far as what kernels should have computed is not needed for them.

   As with NCCL, a communicator is made only when all ranks are there, and refused where two of them are on one device; a
   send waits for its receive; what is grouped is one step. Contributions lie in files of STANDIN_DIR. */
#include "standin.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 64
#define ID_BYTES 128

typedef enum { ncclSuccess = 0, ncclSystemError = 2, ncclInvalidArgument = 4, ncclInvalidUsage = 5 } ncclResult_t;
typedef struct { char internal[ID_BYTES]; } ncclUniqueId;
typedef int ncclDataType_t;
typedef int ncclRedOp_t;
typedef struct ncclComm *ncclComm_t;

struct shared { /* of one communicator, in all of its ranks */
    _Atomic int arrived;
    _Atomic int device[MOST_RANKS]; /* physical */
    _Atomic long posted[MOST_RANKS], finished[MOST_RANKS]; /* collectives */
    _Atomic long sent[MOST_RANKS][MOST_RANKS], received[MOST_RANKS][MOST_RANKS];
    _Atomic int split, split_left, color[MOST_RANKS], key[MOST_RANKS];
};

struct ncclComm {
    char path[400];
    struct shared *shared;
    int size, rank;
    bool aborted;
    long collectives, sends[MOST_RANKS], receives[MOST_RANKS], splits;
};

enum kind { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, SEND, RECEIVE };
static const char *const names[] = {"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send", "recv"};

struct operation {
    enum kind kind;
    struct ncclComm *comm;
    const void *from;
    void *to;
    size_t count; /* elements that this rank contributes; of what it gets, in a reduce_scatter */
    int type, reduction, peer;
    long number; /* from 1, in the order of the communicator; of a message, among those of its two ranks */
    struct stream *stream;
    bool posted;
};

#define MOST_GROUPED 512
struct group_work {
    struct work base;
    int count;
    struct operation operations[];
};

static __thread int depth;
static __thread struct operation grouped[MOST_GROUPED];
static __thread int grouped_count;
static __thread char last_error[200];

static void nap(void) {
    struct timespec pause = {0, 500000};
    nanosleep(&pause, NULL);
}

/* --- arithmetic --- */

static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE };

static bool is_integer(int type) { return type <= UINT64; }

static int64_t integer(const void *data, size_t i, int type) {
    switch (type) {
    case INT8: return ((const int8_t *)data)[i];
    case UINT8: return ((const uint8_t *)data)[i];
    case INT32: return ((const int32_t *)data)[i];
    case UINT32: return ((const uint32_t *)data)[i];
    default: return ((const int64_t *)data)[i];
    }
}

static void put_integer(void *data, size_t i, int type, int64_t value) {
    switch (sizes[type]) {
    case 1: ((int8_t *)data)[i] = (int8_t)value; break;
    case 4: ((int32_t *)data)[i] = (int32_t)value; break;
    default: ((int64_t *)data)[i] = value;
    }
}

static double real(const void *data, size_t i, int type) {
    switch (type) {
    case HALF: return (double)((const _Float16 *)data)[i];
    case FLOAT: return ((const float *)data)[i];
    case DOUBLE: return ((const double *)data)[i];
    default: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
    }
}

static void put_real(void *data, size_t i, int type, double value) {
    switch (type) {
    case HALF: ((_Float16 *)data)[i] = (_Float16)value; break;
    case FLOAT: ((float *)data)[i] = (float)value; break;
    case DOUBLE: ((double *)data)[i] = value; break;
    default: {
        float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        if (value == value) bits += 0x7fff + (bits >> 16 & 1); /* round to nearest, ties to even; NaN stays */
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    }
    }
}

/* Combine `count` elements of each of `ranks` contributions into `to`, which may be one of them. */
static void reduce(void *to, const char *const *contributions, int ranks, size_t count, int type, int reduction) {
    for (size_t i = 0; i < count; i++) {
        if (is_integer(type)) {
            int64_t total = integer(contributions[0], i, type);
            for (int r = 1; r < ranks; r++) {
                int64_t value = integer(contributions[r], i, type);
                total = reduction == PRODUCT   ? total * value
                        : reduction == MAXIMUM ? (total > value ? total : value)
                        : reduction == MINIMUM ? (total < value ? total : value)
                                               : total + value;
            }
            put_integer(to, i, type, reduction == AVERAGE ? total / ranks : total);
        } else {
            double total = real(contributions[0], i, type);
            for (int r = 1; r < ranks; r++) {
                double value = real(contributions[r], i, type);
                total = reduction == PRODUCT   ? total * value
                        : reduction == MAXIMUM ? (total > value ? total : value)
                        : reduction == MINIMUM ? (total < value ? total : value)
                                               : total + value;
            }
            put_real(to, i, type, reduction == AVERAGE ? total / ranks : total);
        }
    }
}

/* --- contributions --- */

static void contribution_path(const struct operation *op, int rank, char *path, size_t size) {
    if (op->kind == SEND)
        snprintf(path, size, "%s-%d-to-%d-%ld", op->comm->path, rank, op->peer, op->number);
    else if (op->kind == RECEIVE)
        snprintf(path, size, "%s-%d-to-%d-%ld", op->comm->path, rank, op->comm->rank, op->number);
    else
        snprintf(path, size, "%s-%ld-%d", op->comm->path, op->number, rank);
}

static size_t contributed(const struct operation *op) {
    size_t bytes = op->count * sizes[op->type];
    return op->kind == REDUCE_SCATTER ? bytes * op->comm->size : bytes;
}

static void contribute(const struct operation *op) {
    if (op->kind == BROADCAST && op->peer != op->comm->rank) return;
    char path[500];
    contribution_path(op, op->comm->rank, path, sizeof path);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file < 0) return;
    for (size_t done = 0, size = contributed(op); done < size;) {
        ssize_t written = write(file, (const char *)op->from + done, size - done);
        if (written <= 0) break;
        done += written;
    }
    close(file);
}

/* What a rank has contributed, as memory of at least `size` bytes, zeros where it gave less. */
static char *contribution(const struct operation *op, int rank, size_t size) {
    char path[500];
    contribution_path(op, rank, path, sizeof path);
    char *data = calloc(1, size ? size : 1);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    for (size_t done = 0; file >= 0 && done < size;) {
        ssize_t got = read(file, data + done, size - done);
        if (got <= 0) break;
        done += got;
    }
    if (file >= 0) close(file);
    return data;
}

static void forget(const struct operation *op, int rank) {
    char path[500];
    contribution_path(op, rank, path, sizeof path);
    unlink(path);
}

/* --- steps --- */

static void post(struct operation *op) {
    struct ncclComm *comm = op->comm;
    op->posted = true;
    if (op->kind != RECEIVE) contribute(op);
    if (op->kind == SEND)
        comm->shared->sent[comm->rank][op->peer] = op->number;
    else if (op->kind == RECEIVE)
        comm->shared->received[op->peer][comm->rank] = op->number;
    else
        comm->shared->posted[comm->rank] = op->number;
}

static bool can_go_on(struct operation *op) {
    struct ncclComm *comm = op->comm;
    struct shared *shared = comm->shared;
    if (comm->aborted) return true;
    if (op->kind == SEND) return shared->received[comm->rank][op->peer] >= op->number;
    if (op->kind == RECEIVE) return shared->sent[op->peer][comm->rank] >= op->number;
    for (int r = 0; r < comm->size; r++)
        if (shared->posted[r] < op->number) return false;
    return true;
}

/* The collectives of a communicator follow each other in the order of the program, whatever their streams. */
static bool has_its_turn(const struct group_work *group, int at) {
    const struct operation *op = &group->operations[at];
    if (op->kind == SEND || op->kind == RECEIVE || op->comm->aborted) return true;
    for (int i = 0; i < at; i++) {
        const struct operation *other = &group->operations[i];
        if (other->comm == op->comm && other->kind != SEND && other->kind != RECEIVE) return other->posted;
    }
    return op->comm->shared->finished[op->comm->rank] >= op->number - 1;
}

static bool group_ready(struct work *work) {
    struct group_work *group = (struct group_work *)work;
    bool ready = true;
    for (int i = 0; i < group->count; i++) {
        struct operation *op = &group->operations[i];
        if (!op->posted && has_its_turn(group, i)) post(op);
        ready &= op->posted;
    }
    for (int i = 0; i < group->count; i++) ready &= can_go_on(&group->operations[i]);
    return ready;
}

static void finish_collective(struct operation *op) {
    struct ncclComm *comm = op->comm;
    size_t size = contributed(op), bytes = op->count * sizes[op->type];
    const char *all[MOST_RANKS] = {0};
    bool wanted = op->kind != REDUCE || op->peer == comm->rank;
    for (int r = 0; wanted && r < comm->size; r++)
        if (op->kind != BROADCAST || r == op->peer) all[r] = contribution(op, r, size);
    if (op->kind == BROADCAST)
        memcpy(op->to, all[op->peer], bytes);
    else if (op->kind == ALL_GATHER)
        for (int r = 0; r < comm->size; r++) memcpy((char *)op->to + r * bytes, all[r], bytes);
    else if (wanted) {
        const char *parts[MOST_RANKS];
        for (int r = 0; r < comm->size; r++) parts[r] = all[r] + (op->kind == REDUCE_SCATTER ? comm->rank * bytes : 0);
        reduce(op->to, parts, comm->size, op->count, op->type, op->reduction);
    }
    for (int r = 0; r < comm->size; r++) free((void *)all[r]);
    comm->shared->finished[comm->rank] = op->number;
    for (int r = 0; r < comm->size; r++)
        if (comm->shared->finished[r] < op->number) return;
    for (int r = 0; r < comm->size; r++) forget(op, r); /* the last turns the light off */
}

static void group_executes(struct work *work) {
    struct group_work *group = (struct group_work *)work;
    for (int i = 0; i < group->count; i++) {
        struct operation *op = &group->operations[i];
        if (op->comm->aborted || op->kind == SEND) continue;
        if (op->kind == RECEIVE) {
            size_t size = op->count * sizes[op->type];
            char *data = contribution(op, op->peer, size);
            memcpy(op->to, data, size);
            free(data);
            forget(op, op->peer);
        } else {
            finish_collective(op);
        }
    }
}

static void submit_group(const struct operation *operations, int count) {
    struct group_work *group = calloc(1, sizeof *group + count * sizeof *operations);
    group->base.ready = group_ready;
    group->base.execute = group_executes;
    group->count = count;
    memcpy(group->operations, operations, count * sizeof *operations);
    submit(operations[0].stream, &group->base);
}

ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (--depth) return ncclSuccess;
    while (grouped_count) { /* one step for each stream */
        struct operation mine[MOST_GROUPED];
        struct stream *stream = grouped[0].stream;
        int count = 0, left = 0;
        for (int i = 0; i < grouped_count; i++) {
            if (grouped[i].stream == stream)
                mine[count++] = grouped[i];
            else
                grouped[left++] = grouped[i];
        }
        grouped_count = left;
        submit_group(mine, count);
    }
    return ncclSuccess;
}

static ncclResult_t enqueue(struct operation op, cudaStream_t on) {
    struct ncclComm *comm = op.comm;
    cudaError_t sticky = sticky_error(false);
    if (sticky) return 1; /* ncclUnhandledCudaError */
    bool reduces = op.kind == ALL_REDUCE || op.kind == REDUCE || op.kind == REDUCE_SCATTER;
    if (op.type < 0 || op.type > (reduces ? BFLOAT16 : FLOAT8_E5M2) || op.reduction > AVERAGE)
        return ncclInvalidArgument; /* float8 is copied, and not reduced */
    op.number = op.kind == SEND      ? ++comm->sends[op.peer]
                : op.kind == RECEIVE ? ++comm->receives[op.peer]
                                     : ++comm->collectives;
    op.stream = stream_of(on);
    tell("nccl %s %ld of %zu elements, rank %d of %d", names[op.kind], op.number, op.count, comm->rank, comm->size);
    if (depth) {
        if (grouped_count == MOST_GROUPED) return ncclInvalidUsage;
        grouped[grouped_count++] = op;
    } else {
        submit_group(&op, 1);
    }
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t comm, cudaStream_t on) {
    return enqueue((struct operation){ALL_REDUCE, comm, from, to, count, type, reduction}, on);
}

ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction, int root,
                        ncclComm_t comm, cudaStream_t on) {
    return enqueue((struct operation){REDUCE, comm, from, to, count, type, reduction, root}, on);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t on) {
    return enqueue((struct operation){BROADCAST, comm, from, to, count, type, SUM, root}, on);
}

ncclResult_t ncclBcast(void *data, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t on) {
    return ncclBroadcast(data, data, count, type, root, comm, on);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t on) {
    return enqueue((struct operation){ALL_GATHER, comm, from, to, count, type, SUM}, on);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                               ncclComm_t comm, cudaStream_t on) {
    return enqueue((struct operation){REDUCE_SCATTER, comm, from, to, count, type, reduction}, on);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
    return enqueue((struct operation){SEND, comm, from, NULL, count, type, SUM, peer}, on);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
    return enqueue((struct operation){RECEIVE, comm, NULL, to, count, type, SUM, peer}, on);
}

ncclResult_t ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          cudaStream_t on) {
    ncclGroupStart();
    for (int r = 0; r < comm->size; r++) {
        ncclSend((const char *)from + r * count * sizes[type], count, type, r, comm, on);
        ncclRecv((char *)to + r * count * sizes[type], count, type, r, comm, on);
    }
    return ncclGroupEnd();
}

/* --- communicators --- */

static struct ncclComm *open_comm(const char *name, int size, int rank) {
    struct ncclComm *comm = calloc(1, sizeof *comm);
    snprintf(comm->path, sizeof comm->path, "%s/%s", machine_directory(), name);
    int file = open(comm->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *comm->shared)) return NULL;
    comm->shared = mmap(NULL, sizeof *comm->shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    comm->size = size;
    comm->rank = rank;
    comm->shared->device[rank] = physical(current_device);
    return comm;
}

static ncclResult_t make_comm(ncclComm_t *made, int size, const char *name, int rank) {
    if (size > MOST_RANKS || make_context(current_device)) return ncclSystemError;
    struct ncclComm *comm = open_comm(name, size, rank);
    if (!comm) return ncclSystemError;
    tell("communicator of %d ranks, rank %d on gpu %d", size, rank, physical(current_device));
    comm->shared->arrived++;
    while (comm->shared->arrived < size) nap();
    for (long waited = 0, whole = setting("STANDIN_NCCL_INIT_MS", 0) * 2; waited < whole; waited++) nap();
    for (int r = 0; r < size; r++)
        if (r != rank && comm->shared->device[r] == comm->shared->device[rank]) {
            snprintf(last_error, sizeof last_error, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", rank,
                     r, (comm->shared->device[rank] + 1) << 12);
            return ncclInvalidUsage;
        }
    *made = comm;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    static _Atomic int made;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, ID_BYTES, "nccl-%d-%d", getpid(), made++);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    return make_comm(comm, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, void *config UNUSED) {
    return make_comm(comm, size, id.internal, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int size, int rank, int ids UNUSED, ncclUniqueId *id,
                                      void *config UNUSED) {
    return make_comm(comm, size, id->internal, rank);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int size, const int *devices) {
    ncclUniqueId id;
    int before = current_device;
    ncclGetUniqueId(&id);
    tell("communicator of %d devices of one process", size);
    for (int rank = 0; rank < size; rank++) {
        current_device = devices ? devices[rank] : rank;
        if (make_context(current_device) || !(comms[rank] = open_comm(id.internal, size, rank))) return ncclSystemError;
    }
    current_device = before;
    return ncclSuccess;
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t *made, void *config UNUSED) {
    struct shared *shared = parent->shared;
    int before = (int)parent->splits * parent->size, size = 0, rank = 0;
    shared->color[parent->rank] = color;
    shared->key[parent->rank] = key;
    shared->split++;
    while (shared->split < before + parent->size) nap();
    for (int r = 0; r < parent->size; r++) {
        if (shared->color[r] != color) continue;
        size++;
        rank += shared->key[r] < key || (shared->key[r] == key && r < parent->rank);
    }
    shared->split_left++; /* nobody writes its next color before all have read these */
    while (shared->split_left < before + parent->size) nap();
    char name[ID_BYTES];
    snprintf(name, sizeof name, "%.80s-split-%ld-%d", strrchr(parent->path, '/') + 1, parent->splits++, color);
    *made = NULL;
    return color < 0 ? ncclSuccess : make_comm(made, size, name, rank);
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    tell("communicator aborted, rank %d of %d", comm->rank, comm->size);
    comm->aborted = true;
    return ncclSuccess;
}

/* A communicator is never given back to the heap: its last operations may still be queued. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    tell("communicator destroyed, rank %d of %d", comm->rank, comm->size);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm UNUSED) { return ncclSuccess; }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm UNUSED, ncclResult_t *error) {
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t comm, int *count) {
    *count = comm->size;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}

ncclResult_t ncclGetVersion(int *version) {
    *version = 22907;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t error) {
    return error == ncclInvalidUsage ? "invalid usage (run with NCCL_DEBUG=WARN for details)" : "an error of the stand-in";
}

const char *ncclGetLastError(ncclComm_t comm UNUSED) { return last_error; }
