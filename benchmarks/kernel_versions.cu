// The row kernel of chapter 7, built up version by version: each does the same for a chunk of logits (C, V), stored in
// Scalar. loss[r] becomes log Σ exp(z) − z[y], and the logits become softmax − one-hot. Nothing else of the objective,
// and V a multiple of WIDTH, so that what differs between the versions is only how the bytes move.
//
// kernel_versions.py defines THREADS and CLUSTER, beside what device.cuh needs (SMOOTHING and SOFTCAP are 0).

#include "device.cuh"

constexpr int WARPS = THREADS / 32;

__device__ float loss_of(const Stats& s, float z_y) { return logf(s.sumexp) - (z_y - s.max); }

__device__ float gradient(float z, const Stats& s, bool is_target) {
    return exponential(z - s.max) / s.sumexp - (is_target ? 1.0f : 0.0f);
}

// row_loop: one thread takes a whole row and goes over it three times. Neighbouring threads are a row apart in memory,
// so each of their loads fetches a sector of 32 bytes for the 2 that it wants.
extern "C" __global__ void row_loop(Scalar* logits, int rows, int V, const long long* target, float* loss) {
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows) return;
    Scalar* z = logits + (long long)row * V;
    const int y = int(target[row]);
    Stats s = {LOWEST, 0, 0};
    for (int j = 0; j < V; ++j) s.max = fmaxf(s.max, to_float(z[j]));
    for (int j = 0; j < V; ++j) s.sumexp += exponential(to_float(z[j]) - s.max);
    loss[row] = loss_of(s, to_float(z[y]));
    for (int j = 0; j < V; ++j) z[j] = to_scalar(gradient(to_float(z[j]), s, j == y));
}
// [end]

// coalesced: one block takes a row: neighbouring threads read neighbouring logits, and a warp's 32 loads are two full
// sectors. Still three passes, each with a reduction over the block.
extern "C" __global__ void coalesced(Scalar* logits, int rows, int V, const long long* target, float* loss) {
    Scalar* z = logits + (long long)blockIdx.x * V;
    const int y = int(target[blockIdx.x]);
    const float z_y = to_float(z[y]);
    Stats s = {LOWEST, 0, 0};
    for (int j = threadIdx.x; j < V; j += THREADS) s.max = fmaxf(s.max, to_float(z[j]));
    s = merged_over_group<1, WARPS>(s, 0);
    s.sumexp = 0;
    for (int j = threadIdx.x; j < V; j += THREADS) s.sumexp += exponential(to_float(z[j]) - s.max);
    __syncthreads();  // all have read the maximum: the room it was merged in may be used again
    s = merged_over_group<1, WARPS>(s, 0);
    if (threadIdx.x == 0) loss[blockIdx.x] = loss_of(s, z_y);
    for (int j = threadIdx.x; j < V; j += THREADS) z[j] = to_scalar(gradient(to_float(z[j]), s, j == y));
}
// [end]

__device__ void store_gradient(uint4* vector, int column, uint4 v, const Stats& s, int y) {
    float z[WIDTH];
    unpack(v, z);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) z[k] = gradient(z[k], s, column + k == y);
    *vector = pack(z);
}

// wide: three passes as before, but 16 bytes a load, and four loads under way before the first of them is used.
extern "C" __global__ void wide(Scalar* logits, int rows, int V, const long long* target, float* loss) {
    Scalar* row = logits + (long long)blockIdx.x * V;
    uint4* vectors = (uint4*)row;
    const int y = int(target[blockIdx.x]);
    const float z_y = to_float(row[y]);
    Stats s = {LOWEST, 0, 0};
    for_each_vector<4, THREADS>(vectors, 0, V / WIDTH, [&](int, uint4 v) {
        float z[WIDTH];
        unpack(v, z);
        for (int k = 0; k < WIDTH; ++k) s.max = fmaxf(s.max, z[k]);
    });
    s = merged_over_group<1, WARPS>(s, 0);
    s.sumexp = 0;
    for_each_vector<4, THREADS>(vectors, 0, V / WIDTH, [&](int, uint4 v) {
        float z[WIDTH];
        unpack(v, z);
        for (int k = 0; k < WIDTH; ++k) s.sumexp += exponential(z[k] - s.max);
    });
    __syncthreads();
    s = merged_over_group<1, WARPS>(s, 0);
    if (threadIdx.x == 0) loss[blockIdx.x] = loss_of(s, z_y);
    for_each_vector<4, THREADS>(vectors, 0, V / WIDTH, [&](int i, uint4 v) { store_gradient(vectors + i, i * WIDTH, v, s, y); });
}
// [end]

// online: the online softmax, maximum and sum in one pass, so two passes in all.
extern "C" __global__ void online(Scalar* logits, int rows, int V, const long long* target, float* loss) {
    Scalar* row = logits + (long long)blockIdx.x * V;
    uint4* vectors = (uint4*)row;
    const int y = int(target[blockIdx.x]);
    const float z_y = to_float(row[y]);
    Stats s = {LOWEST, 0, 0};
    for_each_vector<4, THREADS>(vectors, 0, V / WIDTH, [&](int, uint4 v) {
        float z[WIDTH];
        unpack(v, z);
        add(s, z);
    });
    s = merged_over_group<1, WARPS>(s, 0);
    if (threadIdx.x == 0) loss[blockIdx.x] = loss_of(s, z_y);
    for_each_vector<4, THREADS>(vectors, 0, V / WIDTH, [&](int i, uint4 v) { store_gradient(vectors + i, i * WIDTH, v, s, y); });
}
// [end]

// on_chip: the row stays in the shared memory of CLUSTER blocks from the first pass to the second: it is read from
// memory once and written once, which is all that has to be moved.
extern __shared__ uint4 held[];

#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
#else
extern "C" __global__ void
#endif
on_chip(Scalar* logits, int rows, int V, const long long* target, float* loss) {
    const int block = blockIdx.x % CLUSTER, r = blockIdx.x / CLUSTER;
    cluster_arrive<CLUSTER>();
    Scalar* row = logits + (long long)r * V;
    uint4* vectors = (uint4*)row;
    const int share = (V / WIDTH + CLUSTER - 1) / CLUSTER;
    const int begin = min(block * share, V / WIDTH), end = min(begin + share, V / WIDTH);
    const int y = int(target[r]);
    const float z_y = to_float(row[y]);
    Stats s = {LOWEST, 0, 0};
    for_each_vector<4, THREADS>(vectors, begin, end, [&](int i, uint4 v) {
        held[i - begin] = v;
        float z[WIDTH];
        unpack(v, z);
        add(s, z);
    });
    s = merged_over_group<CLUSTER, WARPS>(s, block);
    if (block == 0 && threadIdx.x == 0) loss[r] = loss_of(s, z_y);
    for (int i = begin + threadIdx.x; i < end; i += THREADS) store_gradient(vectors + i, i * WIDTH, held[i - begin], s, y);
}
// [end]
