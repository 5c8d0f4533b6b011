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

size_t cudnnGetVersion(void) { return 91300; }
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
