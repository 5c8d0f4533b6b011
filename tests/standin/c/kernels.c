/* Kernels. They do nothing, but for those by which code under test can bring about an error, or a delay:
   torch._assert_async fails the device as CUDA does, torch.cuda._sleep holds up the stream. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>

#define MOST_KNOWN 64
#define CYCLES_PER_SECOND 1.5e9

enum kind { ASSERTION, DELAY };

static struct {
    const void *function;
    enum kind kind;
    size_t size; /* of an element of the tensor that is asserted on */
} known[MOST_KNOWN];
static int known_count;

struct kernel_work {
    struct work base;
    const void *data;
    size_t size;
    double until;
};

/* Bytes of the type that a mangled template name ends with: "...kernelIdEv..." for double. */
static size_t element_size(const char *after) {
    if (*after != 'I') return 1;
    switch (after[1]) {
    case 'd': case 'l': case 'x': case 'm': return 8;
    case 'f': case 'i': case 'j': return 4;
    case 's': case 't': return 2;
    case 'b': case 'a': case 'h': return 1;
    default: return strstr(after, "complexId") ? 16 : strstr(after, "complexIf") ? 8 : 2; /* Half, BFloat16 */
    }
}

void __cudaRegisterFunction(void **binary UNUSED, const char *host_function, char *device_function UNUSED,
                            const char *name) {
    static const char assertion[] = "_assert_async_cuda_kernel", delay[] = "spin_kernel";
    const char *found;
    if (known_count == MOST_KNOWN) return;
    if ((found = strstr(name, assertion))) {
        known[known_count].kind = ASSERTION;
        known[known_count].size = element_size(found + sizeof assertion - 1);
    } else if (strstr(name, delay)) {
        known[known_count].kind = DELAY;
    } else {
        return;
    }
    known[known_count++].function = host_function;
}

static void check(struct work *work) {
    struct kernel_work *kernel = (struct kernel_work *)work;
    for (size_t i = 0; i < kernel->size; i++)
        if (((const char *)kernel->data)[i]) return;
    fail_for_good(cudaErrorAssert);
}

static bool has_passed(struct work *work) { return seconds() >= ((struct kernel_work *)work)->until; }

static void nothing(struct work *work UNUSED) {}

struct work *work_of_kernel(const void *host_function, void **arguments) {
    for (int i = 0; i < known_count; i++) {
        if (known[i].function != host_function) continue;
        struct kernel_work *kernel = calloc(1, sizeof *kernel);
        if (known[i].kind == ASSERTION) {
            kernel->base.execute = check;
            kernel->data = *(const void **)arguments[0];
            kernel->size = known[i].size;
        } else {
            kernel->base.ready = has_passed;
            kernel->base.execute = nothing;
            kernel->until = seconds() + (double)*(int64_t *)arguments[0] / CYCLES_PER_SECOND;
        }
        return &kernel->base;
    }
    return NULL;
}

/* --- what the compiler generates calls of --- */

void **__cudaRegisterFatBinary(void *binary UNUSED) {
    static void *handle;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle UNUSED) {}
void __cudaUnregisterFatBinary(void **handle UNUSED) {}
void __cudaRegisterVar(void) {}
char __cudaInitModule(void **handle UNUSED) { return 1; }

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}

/* --- launches --- */

static cudaError_t launch(const void *function, void **arguments, cudaStream_t on) {
    NEEDS_CONTEXT;
    struct work *work = work_of_kernel(function, arguments);
    if (work) submit(stream_of(on), work);
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid UNUSED, dim3 block UNUSED, void **arguments,
                             size_t shared UNUSED, cudaStream_t on) {
    return launch(function, arguments, on);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid UNUSED, dim3 block UNUSED, void **arguments,
                                        size_t shared UNUSED, cudaStream_t on) {
    return launch(function, arguments, on);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
    return launch(function, arguments, how->stream);
}

cudaError_t __cudaGetKernel(void **kernel, const void *function) {
    *kernel = (void *)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid UNUSED, dim3 block UNUSED, void **arguments, size_t shared UNUSED,
                               cudaStream_t on) {
    return launch(kernel, arguments, on);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function UNUSED) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function UNUSED, enum cudaFuncAttribute attribute UNUSED, int value UNUSED) {
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel UNUSED, enum cudaFuncAttribute attribute UNUSED,
                                            int value UNUSED, int device UNUSED) {
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function UNUSED, int size UNUSED,
                                                          size_t shared UNUSED) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function UNUSED,
                                                                   int size UNUSED, size_t shared UNUSED,
                                                                   unsigned flags UNUSED) {
    *blocks = 2;
    return cudaSuccess;
}
