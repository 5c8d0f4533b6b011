/* The driver, as far as torch asks it directly: initialization, contexts, and functions by name. */
#include "standin.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static CUresult unsupported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

CUresult cuInit(unsigned flags UNUSED) { return (CUresult)initialize(__func__); }

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    *count = visible_count();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
    if (index < 0 || index >= visible_count()) return CUDA_ERROR_INVALID_DEVICE;
    *device = index;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int size, CUdevice device UNUSED) {
    snprintf(name, size, "NVIDIA Stand-In");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    uuid_bytes(physical(device), (unsigned char *)uuid->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device UNUSED) {
    *bytes = total_memory();
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}

/* The handle of a context is the number of its device, plus one. */
static CUcontext handle(int device) { return (CUcontext)(intptr_t)(device + 1); }

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = has_context(current_device) ? handle(current_device) : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    if (context) current_device = (int)(intptr_t)context - 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device;
    return has_context(current_device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = handle(device);
    return (CUresult)make_context(device);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* A function by its name, in the version that there is; one that refuses for what is not imitated. */
static void *by_name(const char *name) {
    char versioned[128];
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *function = dlsym(RTLD_DEFAULT, versioned);
    if (!function) function = dlsym(RTLD_DEFAULT, name);
    return function ? function : (void *)unsupported;
}

#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(const char *name, void **function, int version UNUSED, cuuint64_t flags UNUSED,
                             CUdriverProcAddressQueryResult *status) {
    *function = by_name(name);
    if (status) *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version UNUSED,
                                             unsigned long long flags UNUSED,
                                             enum cudaDriverEntryPointQueryResult *status) {
    *function = by_name(name);
    if (status) *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
