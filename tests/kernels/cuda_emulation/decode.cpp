// The emulated launches of csrc/cuda/decode.cu.
#include "decode.cu"

extern "C" void launch_antkv_decode(const int* sizes, void** a) {
    emulation::launch(sizes, [=] {
        antkv_decode(*(Layer*)a[0], *(Step*)a[1], *(Rows*)a[2], *(Rows*)a[3], *(Rows*)a[4], *(i64*)a[5],
                     *(float**)a[6]);
    });
}

extern "C" void launch_antkv_merge(const int* sizes, void** a) {
    emulation::launch(sizes, [=] {
        antkv_merge(*(Layer*)a[0], *(Step*)a[1], *(Rows*)a[2], *(float**)a[3], *(i64*)a[4], *(float**)a[5]);
    });
}

// Columns that the lane reads, for the test of bank conflicts. In step `step` of its pairs of K, and of its sets of V.
extern "C" int key_column(int lane, int step) {
    return key_quad(lane % 4, lane / 4 % kOrders, step / 2, step % 2) * kQuadBytes;
}
extern "C" int value_column(int lane, int step) {
    return value_quad(lane / 4, value_set(lane % 4, step)) * kQuadBytes;
}
