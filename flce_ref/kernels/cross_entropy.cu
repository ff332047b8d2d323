// The row kernel: one launch turns a chunk of logits into the loss and lse of each row and, in place, their gradient.
//
// The formulas are in row.cuh; this file is about bytes. A row of V logits is far larger than a thread's registers and
// is needed twice: once for its maximum and Σ exp, then again for exp(z − max) / Σ exp. Reading it twice from memory is
// a third of the traffic. So a row is given to a *cluster* of CLUSTER blocks, which on Hopper can see each other's
// shared memory: each block keeps its share of the row on chip, and the row crosses the memory bus once in and once out.
// Where the row does not fit (HOLD_ROW = 0) it is read a second time, with luck from L2.
//
//   1. the kernel   first pass: statistics; loss; second pass: gradient
//   2. the scaling  a second, small kernel: a gradient times a factor that is known only in backward
//
// cuda.py defines, for each configuration, beside what row.cuh needs:
//   MIN_BLOCKS                      blocks that must fit a multiprocessor at once
//   HOLD_ROW                        1: the row is kept in shared memory between the passes
//   BULK_COPY                       1: ... and is brought there by Hopper's copy engine
//   WRITE_GRAD                      0: the logits are left alone
//   SOURCE                          what the scaling reads: Scalar, or float

#include "row.cuh"

// ------------------------------------------------------------------------------------------------------- 1. the kernel

// The vectors of this block, from the first pass to the second.
extern __shared__ uint4 held[];

#if BULK_COPY
constexpr int PIECES = 8;  // that the copy engine brings a row in

__device__ int piece(const Row& row, int p) {
    return min(row.begin + p * ((row.end - row.begin + PIECES - 1) / PIECES), row.end);
}

// All pieces are asked for at once by one thread, so that the first can be read while the last is on its way.
__shared__ unsigned long long landed[PIECES];

__device__ void start_copies(const Row& row) {
    if (threadIdx.x == 0) {
        for (int p = 0; p < PIECES; ++p) make_barrier(&landed[p]);
        publish_barriers();
        for (int p = 0; p < PIECES; ++p) {
            const int begin = piece(row, p), bytes = (piece(row, p + 1) - begin) * 16;
            start_copy(held + begin - row.begin, row.vectors + begin, bytes, &landed[p]);
        }
    }
    __syncthreads();
}
#endif

__device__ Stats first_pass(const Row& row, const Objective& objective, float (&edge)[1]) {
    Stats s = {LOWEST, 0, 0};
    auto add_vector = [&](int i, uint4 v) {
        if (HOLD_ROW && !BULK_COPY) held[i - row.begin] = v;
        float x[WIDTH];
        unpack(v, x);
        objective.add_to(s, x, row.first_column + i * WIDTH);
    };
#if BULK_COPY
    start_copies(row);
    for (int p = 0; p < PIECES; ++p) {
        await_copy(&landed[p], 0);
        for_each_vector<1, THREADS>(held - row.begin, piece(row, p), piece(row, p + 1), add_vector);
    }
#else
    for_each_vector<4, THREADS>(row.vectors, row.begin, row.end, add_vector);
#endif
    if (row.edge >= 0) {
        float x[1] = {edge[0] = to_float(row.z[row.edge])};
        objective.add_to(s, x, row.edge);
    }
    return s;
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, MIN_BLOCKS) cross_entropy(
    Scalar* logits,              // (C, V), rows row_stride apart; overwritten by the gradient under WRITE_GRAD
    long long row_stride,        // in elements; 64 bits, as C · V passes 2³¹
    long long vocab_size,
    const long long* target,     // (C,)
    const float* class_weight,   // (V,) or null
    const float* total_weight,   // Σ class_weight, or null
    const float* grad_loss,      // (C,) upstream gradient of each loss, or null for 1
    const float* grad_lse,       // (C,) upstream gradient of each lse, or null for 0
    float* loss,                 // (C,)
    float* lse,                  // (C,)
    long long ignore_index, float smoothing, float z_loss, float softcap) {
    const int block = blockIdx.x % CLUSTER;
    const long long r = blockIdx.x / CLUSTER, y = target[r];
    const bool first_thread = block == 0 && threadIdx.x == 0;
    const Row row(logits + r * row_stride, int(vocab_size), block);

    // Rows that need no softmax are not read: ignored ones are 0 whatever their logits hold, and a target that is no
    // word makes NaN, loudly. No thread of the group gets past here, so no barrier waits for them.
    if (y == ignore_index || y < 0 || y >= vocab_size) {
        const float value = y == ignore_index ? 0.0f : __int_as_float(0x7fc00000);
        if (first_thread) loss[r] = lse[r] = value;
        if (WRITE_GRAD) row.fill(value);
        return;
    }
    cluster_arrive<CLUSTER>();

    // Before the barriers of the merge: afterwards these logits may already be gradients.
    const float z_y = capped(to_float(row.z[y]), softcap), z_0 = capped(to_float(row.z[0]), softcap);
    const Objective objective = {class_weight, softcap, is_finite(z_0) ? z_0 : 0.0f};
    float edge[1];
    const Stats s = merged_over_group<CLUSTER, WARPS>(first_pass(row, objective, edge), block);

    const float shift = s.sumexp == 0 ? 0.0f : s.max;
    const float log_sumexp = logf(s.sumexp), row_lse = shift + log_sumexp;
    const float on_target = (1 - smoothing) * objective.weight(int(y));
    const float smooth = smoothing / vocab_size, total = class_weight && SMOOTHING ? *total_weight : float(vocab_size);
    if (first_thread) {
        // log Σ exp(z − max) − (z_y − max): the two maxima of a large common offset never meet in a sum.
        float value = on_target * (log_sumexp - (z_y - shift));
        if (SMOOTHING) value += smooth * (total * (log_sumexp - (objective.reference - shift)) - s.smooth);
        if (z_loss != 0) value += z_loss * row_lse * row_lse;
        loss[r] = value;
        lse[r] = row_lse;
    }
    if (!WRITE_GRAD) return;

    const float up = grad_loss ? grad_loss[r] : 1.0f;
    float on_probability = on_target + smooth * total;
    if (z_loss != 0) on_probability += 2 * z_loss * row_lse;
    on_probability = on_probability * up + (grad_lse ? grad_lse[r] : 0.0f);
    // Without HOLD_ROW every thread comes back to the columns that it read before, so none is overwritten unread.
    const uint4* from = HOLD_ROW ? held - row.begin : row.vectors;
    const Gradient gradient = {shift, on_probability / s.sumexp, on_target * up, smooth * up, int(y)};
    overwrite<HOLD_ROW ? 2 : 4>(row, from, edge, gradient, objective);
}

// ------------------------------------------------------------------------------------------------------ 2. the scaling

// What is left for backward: out = in · factor, where the factor, a number on the device, is known only then. PyTorch's
// own product with such a number takes three to four times as long. SOURCE is float where a sum is also rounded to Scalar.

#ifndef SOURCE
#define SOURCE Scalar
#endif

__device__ void load(const Scalar* in, float (&x)[WIDTH]) { unpack(*(const uint4*)in, x); }

#ifndef FLOAT32
__device__ void load(const float* in, float (&x)[WIDTH]) {
#pragma unroll
    for (int k = 0; k < WIDTH; k += 4) {
        const float4 v = ((const float4*)in)[k / 4];
        x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
    }
}

__device__ float to_float(float x) { return x; }
#endif

extern "C" __global__ void scale(const SOURCE* in, Scalar* out, long long count, const float* factor) {
    const float f = *factor;
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
    const long long vectors = count / WIDTH;
    for (long long i = first; i < vectors; i += step) {
        float x[WIDTH];
        load(in + i * WIDTH, x);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) x[k] *= f;
        ((uint4*)out)[i] = pack(x);
    }
    for (long long i = vectors * WIDTH + first; i < count; i += step) out[i] = to_scalar(to_float(in[i]) * f);
}
