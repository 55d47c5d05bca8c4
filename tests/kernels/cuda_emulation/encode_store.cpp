// The emulated launches of csrc/cuda/encode_store.cu.
#include "encode_store.cu"

extern "C" void launch_antkv_encode_store(const int* sizes, void** a) {
    emulation::launch(sizes, [=] { antkv_encode_store(*(Layer*)a[0], *(Step*)a[1], *(Rows*)a[2], *(Rows*)a[3]); });
}
