// Stands in for NVIDIA's driver, libcuda.so.1: launches are counted, and nothing runs. No function reads its arguments but
// where a caller waits for an answer. What Triton's own launcher calls (triton/backends/nvidia/driver.c), and no more.

#include <stdint.h>

int64_t num_launches;

int cuLaunchKernelEx(void) { return num_launches++, 0; }
int cuLaunchKernel(void) { return num_launches++, 0; }

int cuCtxGetCurrent(void **context) { return *context = &num_launches, 0; }
int cuPointerGetAttribute(uint64_t *address, int attribute, uint64_t pointer) { return *address = pointer, 0; }

#define ANSWERS_NOTHING(name) \
    int name(void) { return 0; }
ANSWERS_NOTHING(cuCtxGetDevice)
ANSWERS_NOTHING(cuCtxGetLimit)
ANSWERS_NOTHING(cuCtxSetCurrent)
ANSWERS_NOTHING(cuCtxSetLimit)
ANSWERS_NOTHING(cuDeviceGet)
ANSWERS_NOTHING(cuDeviceGetAttribute)
ANSWERS_NOTHING(cuDevicePrimaryCtxRetain)
ANSWERS_NOTHING(cuDriverGetVersion)
ANSWERS_NOTHING(cuFuncGetAttribute)
ANSWERS_NOTHING(cuFuncSetAttribute)
ANSWERS_NOTHING(cuFuncSetCacheConfig)
ANSWERS_NOTHING(cuGetErrorString)
ANSWERS_NOTHING(cuModuleGetFunction)
ANSWERS_NOTHING(cuModuleLoadData)
ANSWERS_NOTHING(cuModuleUnload)
ANSWERS_NOTHING(cuStreamIsCapturing)
