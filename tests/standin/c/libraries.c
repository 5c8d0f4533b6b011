/* The few functions of cuBLAS, cuDNN and the like that must give something back. All others are generated, and do nothing. */
#include "standin.h"

static char something[64]; /* what handles point to; nobody looks at it */

#define CREATES(name)         \
    int name(void **handle) { \
        *handle = something;  \
        return 0;             \
    }

CREATES(cublasCreate_v2)
CREATES(cublasLtCreate)
CREATES(cudnnCreate)
CREATES(cusolverDnCreate)
CREATES(cusparseCreate)

enum { CUDNN_MAJOR = 9, CUDNN_MINOR = 24 }; /* at least what torch was compiled with */

size_t cudnnGetVersion(void) { return CUDNN_MAJOR * 10000 + CUDNN_MINOR * 100; }

int cudnnGetProperty(int property, int *value) { /* major, minor, patch level */
    *value = property == 0 ? CUDNN_MAJOR : property == 1 ? CUDNN_MINOR : 0;
    return 0;
}

size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
const char *cudnnGetErrorString(int status UNUSED) { return "an error of the stand-in's cuDNN"; }
const char *cublasGetStatusString(int status UNUSED) { return "an error of the stand-in's cuBLAS"; }
const char *cusparseGetErrorString(int status UNUSED) { return "an error of the stand-in's cuSPARSE"; }

/* One algorithm, so that torch does not look for another way. */
int cublasLtMatmulAlgoGetHeuristic(void *handle UNUSED, void *operation UNUSED, void *a UNUSED, void *b UNUSED,
                                   void *c UNUSED, void *d UNUSED, void *preference UNUSED, int wanted UNUSED,
                                   void *results UNUSED, int *found) {
    *found = 1;
    return 0;
}

/* One engine for each operation of cuDNN's graphs, without workspace or remarks; the numbers are those of cudnn_backend.h. */
enum { CUDNN_TYPE_INT64 = 3, CUDNN_TYPE_BACKEND_DESCRIPTOR = 15 };

int cudnnBackendGetAttribute(void *descriptor UNUSED, int attribute UNUSED, int type, int64_t wanted, int64_t *count,
                             void *elements) {
    bool given = wanted > 0 && (type == CUDNN_TYPE_INT64 || type == CUDNN_TYPE_BACKEND_DESCRIPTOR);
    if (count) *count = given;
    if (given && elements && type == CUDNN_TYPE_INT64) *(int64_t *)elements = 0;
    return 0;
}

int cudnnBackendCreateDescriptor(int kind UNUSED, void **descriptor) {
    *descriptor = something;
    return 0;
}

/* Sizes of workspaces, which would else be whatever lay there: the last argument says where they go. */
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *handle UNUSED, int mode UNUSED, int what UNUSED,
                                                             void *x UNUSED, void *z UNUSED, void *y UNUSED,
                                                             void *parameters UNUSED, void *activation UNUSED,
                                                             size_t *size) {
    *size = 0;
    return 0;
}

int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *handle UNUSED, int mode UNUSED, int what UNUSED, void *x UNUSED,
                                                      void *y UNUSED, void *dy UNUSED, void *dz UNUSED, void *dx UNUSED,
                                                      void *parameters UNUSED, void *activation UNUSED, size_t *size) {
    *size = 0;
    return 0;
}

int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *handle UNUSED, int mode UNUSED, int what UNUSED,
                                                         void *activation UNUSED, void *x UNUSED, size_t *size) {
    *size = 0;
    return 0;
}

int cudnnDropoutGetStatesSize(void *handle UNUSED, size_t *size) {
    *size = 0;
    return 0;
}
