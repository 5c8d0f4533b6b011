/* The CUDA runtime: devices, memory, copies. Memory of devices is memory of the host, and copies are real. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* --- devices --- */

cudaError_t cudaGetDeviceCount(int *count) {
    NEEDS_CUDA;
    *count = visible_count();
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    NEEDS_CUDA;
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    NEEDS_CUDA;
    if (device < 0 || device >= visible_count()) RETURN(cudaErrorInvalidDevice);
    current_device = device;
    NEEDS_CONTEXT; /* since CUDA 12 */
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    NEEDS_CUDA;
    if (device < 0 || device >= visible_count()) RETURN(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, "NVIDIA Stand-In");
    uuid_bytes(physical(device), (unsigned char *)properties->uuid.bytes);
    properties->totalGlobalMem = total_memory();
    properties->major = 9;
    properties->multiProcessorCount = 132;
    properties->warpSize = 32;
    properties->maxThreadsPerMultiProcessor = 2048;
    properties->maxThreadsPerBlock = 1024;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = 227 << 10;
    properties->sharedMemPerMultiprocessor = 228 << 10;
    properties->regsPerMultiprocessor = 65536;
    properties->regsPerBlock = 65536;
    properties->l2CacheSize = 50 << 20;
    properties->pciBusID = physical(device) + 1;
    for (int i = 0; i < 3; i++) {
        properties->maxGridSize[i] = 65535;
        properties->maxThreadsDim[i] = i < 2 ? 1024 : 64;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    NEEDS_CUDA;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrComputeMode: *value = setting("STANDIN_EXCLUSIVE", 0) ? cudaComputeModeExclusiveProcess : 0; break;
    case cudaDevAttrPciBusId: *value = physical(device) + 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02X:00.0", physical(device) + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer && setting("STANDIN_PEERS", 0);
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer UNUSED, unsigned flags UNUSED) {
    if (!setting("STANDIN_PEERS", 0)) RETURN(cudaErrorPeerAccessUnsupported);
    return cudaSuccess;
}

/* --- what is allocated --- */

struct block {
    char *start;
    size_t size;
    int device; /* -1 for pinned memory of the host */
    struct block *next;
};

static struct block *blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *allocate(size_t size, int device) {
    struct block *block = malloc(sizeof *block);
    block->size = (size + 4095) & ~4095UL;
    block->device = device;
    /* Pages that are never written cost nothing. */
    block->start = mmap(NULL, block->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    pthread_mutex_lock(&lock);
    if (device >= 0 && !take_memory(device, block->size)) {
        pthread_mutex_unlock(&lock);
        munmap(block->start, block->size);
        free(block);
        return NULL;
    }
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    return block->start;
}

static void release(void *start) {
    pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->start == start) {
            struct block *block = *at;
            *at = block->next;
            if (block->device >= 0) return_memory(block->device, block->size);
            munmap(block->start, block->size);
            free(block);
            break;
        }
    pthread_mutex_unlock(&lock);
}

/* The block that an address is in: false for memory that CUDA knows nothing of. */
static bool find(const void *address, struct block *found) {
    bool is_known = false;
    pthread_mutex_lock(&lock);
    for (struct block *block = blocks; block && !is_known; block = block->next)
        if ((char *)address >= block->start && (char *)address < block->start + block->size) {
            *found = *block;
            is_known = true;
        }
    pthread_mutex_unlock(&lock);
    return is_known;
}

cudaError_t cudaMalloc(void **start, size_t size) {
    NEEDS_CONTEXT;
    *start = allocate(size, current_device);
    RETURN(*start ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *start) {
    if (!start) return cudaSuccess;
    if (sticky_error(true)) RETURN(sticky_error(true));
    cudaError_t error = wait_for(NULL, __func__);
    if (error) RETURN(error);
    release(start);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    NEEDS_CONTEXT;
    *available = free_memory(current_device);
    *total = total_memory();
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void **start, size_t size, unsigned flags UNUSED) {
    NEEDS_CONTEXT;
    *start = allocate(size, -1);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *start) {
    release(start);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *start UNUSED, size_t size UNUSED, unsigned flags UNUSED) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void *start UNUSED) { return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    struct block block;
    memset(attributes, 0, sizeof *attributes);
    attributes->device = current_device;
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void *)address;
    if (find(address, &block)) {
        attributes->type = block.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
        attributes->devicePointer = (void *)address;
        if (block.device >= 0) {
            attributes->device = block.device;
            attributes->hostPointer = NULL;
        }
    }
    return cudaSuccess;
}

/* --- copies --- */

struct copy_work {
    struct work base;
    void *to;
    const void *from;
    void *staged; /* what was taken from pageable memory when the copy was asked for */
    size_t size;
};

struct fill_work {
    struct work base;
    void *to;
    int value;
    size_t size;
};

static void copy(struct work *work) {
    struct copy_work *step = (struct copy_work *)work;
    memcpy(step->to, step->staged ? step->staged : step->from, step->size);
    free(step->staged);
}

static void fill(struct work *work) {
    struct fill_work *step = (struct fill_work *)work;
    memset(step->to, step->value, step->size);
}

static cudaError_t copy_in_order(void *to, const void *from, size_t size, struct stream *stream, const char *caller) {
    struct block block;
    bool pageable_source = !find(from, &block), pageable_target = !find(to, &block);
    struct copy_work *step = calloc(1, sizeof *step);
    step->base.execute = copy;
    step->to = to;
    step->from = from;
    step->size = size;
    if (pageable_source && size) {
        step->staged = malloc(size);
        memcpy(step->staged, from, size);
    }
    submit(stream, &step->base);
    return pageable_target ? wait_for(stream, caller) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind UNUSED, cudaStream_t on) {
    NEEDS_CONTEXT;
    RETURN(copy_in_order(to, from, size, stream_of(on), __func__));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind UNUSED) {
    NEEDS_CONTEXT;
    cudaError_t error = wait_for(NULL, __func__);
    if (!error) memcpy(to, from, size);
    RETURN(error);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int device UNUSED, const void *from, int other UNUSED, size_t size,
                                cudaStream_t on) {
    NEEDS_CONTEXT;
    RETURN(copy_in_order(to, from, size, stream_of(on), __func__));
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t on) {
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && !error; row++)
        error = cudaMemcpyAsync((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, on);
    return error;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t on) {
    NEEDS_CONTEXT;
    struct fill_work *step = calloc(1, sizeof *step);
    step->base.execute = fill;
    step->to = to;
    step->value = value;
    step->size = size;
    submit(stream_of(on), &step->base);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

/* --- errors in words --- */

static const struct {
    cudaError_t error;
    const char *name, *text;
} errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorDevicesUnavailable, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorSystemNotReady, "cudaErrorSystemNotReady", "system not yet initialized"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].text;
    return "an error that the stand-in has no words for";
}

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error) return errors[i].name;
    return "cudaErrorOther";
}
