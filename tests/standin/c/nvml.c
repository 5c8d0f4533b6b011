/* NVML: counts all devices of the machine, masked or not, whatever becomes of CUDA. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvml_result;
enum { NVML_SUCCESS, NVML_INVALID_ARGUMENT = 2, NVML_NOT_SUPPORTED = 3 };

nvml_result nvmlInit(void) { return NVML_SUCCESS; }
nvml_result nvmlInit_v2(void) { return NVML_SUCCESS; }
nvml_result nvmlInitWithFlags(unsigned flags UNUSED) { return NVML_SUCCESS; }
nvml_result nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(nvml_result result UNUSED) { return "an error of the stand-in's NVML"; }

nvml_result nvmlDeviceGetCount_v2(unsigned *count) {
    *count = physical_count();
    return NVML_SUCCESS;
}

/* The handle of a device is its number, plus one. */
nvml_result nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index >= physical_count()) return NVML_INVALID_ARGUMENT;
    *device = (void *)(intptr_t)(index + 1);
    return NVML_SUCCESS;
}

nvml_result nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    int number = (int)strtol(bus + strlen("0000:"), NULL, 16);
    if (number < 1 || number > physical_count()) return NVML_INVALID_ARGUMENT;
    *device = (void *)(intptr_t)number;
    return NVML_SUCCESS;
}

nvml_result nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = (unsigned)(intptr_t)device - 1;
    return NVML_SUCCESS;
}

nvml_result nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
    uuid_text((int)(intptr_t)device - 1, text, size);
    return NVML_SUCCESS;
}

nvml_result nvmlDeviceGetCudaComputeCapability(void *device UNUSED, int *major, int *minor) {
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

nvml_result nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.00");
    return NVML_SUCCESS;
}

nvml_result nvmlDeviceGetPciInfo_v3(void *device UNUSED, void *info UNUSED) { return NVML_NOT_SUPPORTED; }
nvml_result nvmlDeviceGetNvLinkState(void) { return NVML_NOT_SUPPORTED; }
nvml_result nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NVML_NOT_SUPPORTED; }
nvml_result nvmlDeviceGetNvLinkCapability(void) { return NVML_NOT_SUPPORTED; }
nvml_result nvmlDeviceGetP2PStatus(void) { return NVML_NOT_SUPPORTED; }
nvml_result nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NVML_NOT_SUPPORTED; }
