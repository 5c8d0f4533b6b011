/* What the parts of the stand-in share: the machine that is imitated, its streams, and what kernels do. */
#ifndef STANDIN_H
#define STANDIN_H

#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 64
#define UNUSED __attribute__((unused))

/* --- machine.c: the devices, who has contexts and memory on them, and the log --- */

/* Number `name` of the environment, or `otherwise`. */
long setting(const char *name, long otherwise);

/* Write "<pid> <text>" to the file STANDIN_LOG, if there is one. */
void tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The directory by which the processes of one imitated machine know of each other. */
const char *machine_directory(void);

/* How many devices the machine has, whatever is masked. */
int physical_count(void);

/* The 16 bytes of the UUID of a physical device, and the same as NVML writes it. */
void uuid_bytes(int physical, unsigned char bytes[16]);
void uuid_text(int physical, char *text, size_t size);

/* Initialize CUDA in this process; what cuInit would return. Once a process is initialized its forks are refused. */
cudaError_t initialize(const char *caller);

/* Devices that this process sees, and the physical device behind one of them. */
int visible_count(void);
int physical(int device);

/* Make the primary context of a device, if there is none. */
cudaError_t make_context(int device);
bool has_context(int device);

/* Account for memory of a device: false if there is not as much. Free bytes, among all living processes. */
bool take_memory(int device, size_t bytes);
void return_memory(int device, size_t bytes);
size_t total_memory(void);
size_t free_memory(int device);

/* --- streams.c: work in order, which a collective, an event or a long kernel holds up --- */

struct work { /* one step of a stream */
    bool (*ready)(struct work *);  /* may post something the first time; NULL for always */
    void (*execute)(struct work *);
    struct work *next;
};

struct stream;

extern __thread int current_device;

struct stream *stream_of(cudaStream_t handle);
int device_of(const struct stream *stream);
/* Append to a stream, and do what can be done now. `work` was allocated with malloc, and is freed when it is done. */
void submit(struct stream *stream, struct work *work);
/* Do what can be done; wait until one stream, or (NULL) all streams of all devices, have nothing left. */
cudaError_t wait_for(struct stream *stream, const char *caller);
/* The error that this process will not get rid of; with `look`, one that a kernel has met and nobody was told of yet. */
cudaError_t sticky_error(bool look);
void fail_for_good(cudaError_t error);
cudaError_t remember(cudaError_t error); /* for cudaGetLastError */
double seconds(void);

/* --- kernels.c --- */

/* What a kernel does that does more than nothing; NULL for all others. */
struct work *work_of_kernel(const void *host_function, void **arguments);

/* Return an error from a function of the runtime, and remember it. */
#define RETURN(expression) return remember(expression)
/* What most functions begin with: CUDA is initialized; and also: the current device has a context, and no error. */
#define NEEDS_CUDA                                  \
    do {                                            \
        cudaError_t _error = initialize(__func__);  \
        if (_error) return remember(_error);        \
    } while (0)
#define NEEDS_CONTEXT                                                \
    do {                                                             \
        NEEDS_CUDA;                                                  \
        cudaError_t _made = make_context(current_device);            \
        if (_made) return remember(_made);                           \
        if (sticky_error(false)) return remember(sticky_error(false)); \
    } while (0)

#endif
