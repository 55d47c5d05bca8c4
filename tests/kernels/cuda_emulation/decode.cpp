// The emulated launches of csrc/cuda/decode.cu.
#include "decode.cu"

extern "C" void launch_antkv_decode(const int* sizes, void** a) {
    emulation::launch(sizes, [=] {
        antkv_decode(*(Layer*)a[0], *(Step*)a[1], *(Rows*)a[2], *(Rows*)a[3], *(Rows*)a[4], *(Results*)a[5]);
    });
}

// Quads that the lane reads, for the tests of memory accesses. In step `step` of its pairs of K, and of its sets of V.
extern "C" int key_quad(int lane, int step) {
    return Tables::key_quad(lane % 4, lane / 4 % Tables::kOrders, step / 2, step % 2);
}
extern "C" int value_quad(int lane, int step) {
    return Tables::value_quad(lane / 4, Tables::value_set(lane % 4, step));
}
