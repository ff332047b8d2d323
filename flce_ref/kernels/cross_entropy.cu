// The row kernel: one launch turns a chunk of logits into the loss and lse of each row and, in place, their gradient.
//
// The formulas are those of flce_ref/objective.py; this file is about bytes. A row of V logits is far larger than a
// thread's registers and is needed twice: once for its maximum and Σ exp, then again for exp(z − max) / Σ exp. Reading it
// twice from memory is a third of the traffic. So a row is given to a *cluster* of CLUSTER blocks, which on Hopper can
// see each other's shared memory: each block keeps its share of the row on chip, and the row crosses the memory bus
// once in and once out. Where the row does not fit (HOLD_ROW = 0) it is read a second time, with luck from L2.
//
//   1. numbers      bfloat16, float16 and float32, 16 bytes at a time
//   2. statistics   (max, Σ exp(z − max)) of a part of a row, and how two parts are merged
//   3. the group    merging over the threads of a warp, a block and a cluster
//   4. a row        who owns which columns, whatever the alignment
//   5. the kernel   first pass: statistics; loss; second pass: gradient
//   6. the scaling  a second, small kernel: a gradient times a factor that is known only in backward
//
// Compiled at run time by NVRTC, which has no header files to include; cuda.py defines, for each configuration:
//   BFLOAT16 | FLOAT16 | FLOAT32    the dtype of the logits
//   CLUSTER, THREADS, MIN_BLOCKS    blocks per row, threads per block, blocks that must fit a multiprocessor at once
//   HOLD_ROW                        1: the row is kept in shared memory between the passes
//   BULK_COPY                       1: ... and is brought there by Hopper's copy engine
//   SMOOTHING, SOFTCAP, WRITE_GRAD  parts of the objective that cost time for every logit, 0 or 1
//   SOURCE                          what the scaling reads: Scalar, or float

// ---------------------------------------------------------------------------------------------------- 1. numbers

#if defined(FLOAT32)
typedef float Scalar;
#else
typedef unsigned short Scalar;  // bfloat16 or float16, by its bits
#endif

constexpr int WIDTH = 16 / sizeof(Scalar);  // logits in the widest access a thread can make: 16 bytes
constexpr int WARPS = THREADS / 32;
constexpr int PIECES = 8;
constexpr float LOWEST = -3.402823466e38f;
constexpr float LOG2_E = 1.442695041f;

#if defined(FLOAT32)

__device__ float to_float(Scalar x) { return x; }
__device__ Scalar to_scalar(float x) { return x; }

__device__ void unpack(uint4 v, float (&x)[WIDTH]) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}

__device__ uint4 pack(const float (&x)[WIDTH]) {
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
}

__device__ float exponential(float x) { return expf(x); }

#else

#if defined(BFLOAT16)

__device__ float to_float(Scalar x) { return __uint_as_float(unsigned(x) << 16); }

__device__ unsigned pack_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else  // Turing has no bfloat16 arithmetic: round to nearest, ties to even, on the bits
    auto round = [](float x) {
        const unsigned bits = __float_as_uint(x);
        return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
#endif
}

#else  // FLOAT16

__device__ float to_float(Scalar x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
}

__device__ unsigned pack_pair(float low, float high) {
    Scalar l, h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(l) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(high));
    return l | unsigned(h) << 16;
}

#endif

__device__ Scalar to_scalar(float x) { return Scalar(pack_pair(x, 0)); }

__device__ void unpack(uint4 v, float (&x)[WIDTH]) {
    const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = to_float(pairs[i] & 0xffff), x[2 * i + 1] = to_float(pairs[i] >> 16);
}

__device__ uint4 pack(const float (&x)[WIDTH]) {
    return {pack_pair(x[0], x[1]), pack_pair(x[2], x[3]), pack_pair(x[4], x[5]), pack_pair(x[6], x[7])};
}

// One instruction of the special-function unit, right to 2 ulp of float32: far below the half ulp of a 16-bit gradient.
__device__ float exponential(float x) {
    float e;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * LOG2_E));
    return e;
}

#endif

__device__ bool is_finite(float x) { return fabsf(x) <= -LOWEST; }

// (1 − e) / (1 + e) loses the digits of a small x to the subtraction; there the series is exact to 1e-9. tanhf would do,
// but it branches, and every logit needs it twice.
__device__ float hyperbolic_tangent(float x) {
    const float e = exponential(-2 * fabsf(x)), square = x * x;
    const float large = copysignf(__fdividef(1 - e, 1 + e), x);
    return fabsf(x) < 0.05f ? x - x * square * (1.0f / 3 - square * (2.0f / 15)) : large;
}

__device__ float capped(float x, float softcap) {
#if SOFTCAP
    return softcap * hyperbolic_tangent(x / softcap);
#else
    return x;
#endif
}

// ------------------------------------------------------------------------------------------------- 2. statistics

// Of the logits seen so far. `max` starts at the lowest finite float, not at −∞: then exp(−∞ − max) is 0, not NaN, for a
// masked word, and Σ exp is 0 exactly if every word was masked. `smooth` is Σ w (z − reference): see `first_pass`.
struct Stats {
    float max, sumexp, smooth;
};

__device__ void merge(Stats& a, const Stats& b) {
    const float max = fmaxf(a.max, b.max);
    a.sumexp = a.sumexp * exponential(a.max - max) + b.sumexp * exponential(b.max - max);
    a.smooth += b.smooth;
    a.max = max;
}

// The online softmax: whenever the maximum rises, what was summed before is moved to the new one.
template <int N>
__device__ void add(Stats& s, const float (&z)[N]) {
    float max = s.max;
#pragma unroll
    for (int i = 0; i < N; ++i) max = fmaxf(max, z[i]);
    if (max > s.max) {
        s.sumexp *= exponential(s.max - max);
        s.max = max;
    }
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += exponential(z[i] - max);
    s.sumexp += sum;
}

// -------------------------------------------------------------------------------------------------- 3. the group

// A block may write into another's shared memory only once that one runs: say so early, wait as late as possible.
__device__ void cluster_arrive() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ void cluster_wait() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ Stats merged_over_warp(Stats s) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        merge(s, {__shfl_xor_sync(~0u, s.max, lanes), __shfl_xor_sync(~0u, s.sumexp, lanes),
                  SMOOTHING ? __shfl_xor_sync(~0u, s.smooth, lanes) : 0.0f});
    }
    return s;
}

// The statistics of the whole row, to every thread of the group. Each warp leaves its part in the shared memory of every
// block of the cluster, lane b writing to block b; after one barrier each warp merges all parts for itself.
__device__ Stats merged_over_group(Stats s, int block) {
    __shared__ Stats parts[CLUSTER * WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    s = merged_over_warp(s);
#if CLUSTER > 1
    cluster_wait();
    if (lane < CLUSTER) {
        unsigned here = unsigned(__cvta_generic_to_shared(&parts[block * WARPS + warp])), there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(s.max) : "memory");
        asm volatile("st.shared::cluster.f32 [%0+4], %1;" ::"r"(there), "f"(s.sumexp) : "memory");
        asm volatile("st.shared::cluster.f32 [%0+8], %1;" ::"r"(there), "f"(s.smooth) : "memory");
    }
    __syncwarp();  // the barrier is .aligned: all lanes must come to it together
    cluster_arrive();
    cluster_wait();
#else
    if (lane == 0) parts[warp] = s;
    __syncthreads();
#endif
    s = {LOWEST, 0, 0};
    for (int i = lane; i < CLUSTER * WARPS; i += 32) merge(s, parts[i]);
    return merged_over_warp(s);
}

// ------------------------------------------------------------------------------------------------------ 4. a row

// Rows start anywhere (V may be odd), but a 16-byte access must be aligned. So a row is a few single logits, the *edges*
// at its two ends, and between them vectors of WIDTH logits. Block 0 takes the edges, one per thread; the vectors are
// divided among the blocks.
struct Row {
    Scalar* z;
    uint4* vectors;
    int first_column;  // of vector 0: as many edges are on the left
    int begin, end;    // the vectors of this block
    int edge;          // the column of this thread's edge, or −1

    __device__ Row(Scalar* z, int vocab_size, int block) : z(z) {
        const int misaligned = int((unsigned long long)z % 16 / sizeof(Scalar));
        first_column = min((WIDTH - misaligned) % WIDTH, vocab_size);
        vectors = (uint4*)(z + first_column);
        const int count = (vocab_size - first_column) / WIDTH, share = (count + CLUSTER - 1) / CLUSTER;
        begin = min(block * share, count);
        end = min(begin + share, count);
        const int edges = vocab_size - count * WIDTH, t = threadIdx.x;
        edge = block > 0 || t >= edges ? -1 : t < first_column ? t : t + count * WIDTH;
    }

    __device__ int piece(int p) const { return min(begin + p * ((end - begin + PIECES - 1) / PIECES), end); }

    __device__ void fill(float value) const {
        float copies[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) copies[k] = value;
        for (int i = begin + threadIdx.x; i < end; i += THREADS) vectors[i] = pack(copies);
        if (edge >= 0) z[edge] = to_scalar(value);
    }
};

// The vectors of this block, from the first pass to the second.
extern __shared__ uint4 held[];

#if BULK_COPY
// Hopper's copy engine brings the block's share in PIECES, all asked for at once by one thread; a barrier in shared
// memory counts the bytes of each piece as they land, so the first can be read while the last is on its way.
__shared__ unsigned long long landed[PIECES];

__device__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

__device__ void start_copy(const Row& row) {
    if (threadIdx.x == 0) {
        for (int p = 0; p < PIECES; ++p)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&landed[p])) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int p = 0; p < PIECES; ++p) {
            const int begin = row.piece(p), bytes = (row.piece(p + 1) - begin) * 16;
            const unsigned barrier = shared_address(&landed[p]);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
            if (bytes == 0) continue;
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                             shared_address(held + begin - row.begin)),
                         "l"(__cvta_generic_to_global(row.vectors + begin)), "r"(bytes), "r"(barrier)
                         : "memory");
        }
    }
    __syncthreads();
}

__device__ void await_piece(int p) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(&landed[p]))
        : "memory");
}
#endif

// -------------------------------------------------------------------------------------------------- 5. the kernel

struct Objective {
    const float* class_weight;  // (V,) or null for weights of one
    float softcap;
    float reference;  // a logit of the row, so that Σ w (z − reference) keeps its digits under a large common offset

    __device__ float weight(int column) const { return class_weight ? class_weight[column] : 1.0f; }

    template <int N>
    __device__ void add_to(Stats& s, float (&x)[N], int column) const {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            x[k] = capped(x[k], softcap);
            if (SMOOTHING) s.smooth += weight(column + k) * (x[k] - reference);
        }
        add(s, x);
    }
};

// dz_j = scale · exp(z_j − shift) − target · 1[j = y] − smooth · w_j: the three numbers of `grad_coefficients`.
struct Gradient {
    float shift, scale, target, smooth;
    int y;

    template <int N>
    __device__ void replace(float (&x)[N], int column, const Objective& objective) const {
        float slope[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float z = capped(x[k], objective.softcap), t = SOFTCAP ? z / objective.softcap : 0.0f;
            slope[k] = 1 - t * t;
            x[k] = scale * exponential(z - shift);
            if (SMOOTHING) x[k] -= smooth * objective.weight(column + k);
        }
        if (unsigned(y - column) < N) {  // in float32: after rounding p to bfloat16, p − 1 is 0 for every p above 0.998
#pragma unroll
            for (int k = 0; k < N; ++k) x[k] -= k == y - column ? target : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = SOFTCAP ? x[k] * slope[k] : x[k];
    }
};

// Calls use(i, vector) for each vector of this block. Loads run ahead of their use, to cover the latency of memory.
template <int AHEAD, typename Use>
__device__ void for_each_vector(const uint4* vectors, int begin, int end, Use use) {
    for (int i = begin + threadIdx.x; i < end; i += AHEAD * THREADS) {
        uint4 v[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * THREADS < end) v[u] = vectors[i + u * THREADS];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * THREADS < end) use(i + u * THREADS, v[u]);
    }
}

__device__ Stats first_pass(const Row& row, const Objective& objective, float (&edge)[1]) {
    Stats s = {LOWEST, 0, 0};
    auto add_vector = [&](int i, uint4 v) {
        if (HOLD_ROW && !BULK_COPY) held[i - row.begin] = v;
        float x[WIDTH];
        unpack(v, x);
        objective.add_to(s, x, row.first_column + i * WIDTH);
    };
#if BULK_COPY
    start_copy(row);
    for (int p = 0; p < PIECES; ++p) {
        await_piece(p);
        for_each_vector<1>(held - row.begin, row.piece(p), row.piece(p + 1), add_vector);
    }
#else
    for_each_vector<4>(row.vectors, row.begin, row.end, add_vector);
#endif
    if (row.edge >= 0) {
        float x[1] = {edge[0] = to_float(row.z[row.edge])};
        objective.add_to(s, x, row.edge);
    }
    return s;
}

// Without HOLD_ROW every thread comes back to the columns that it read before, so none is overwritten unread.
__device__ void second_pass(const Row& row, const Objective& objective, const Gradient& gradient, float (&edge)[1]) {
    for_each_vector<HOLD_ROW ? 2 : 4>(HOLD_ROW ? held - row.begin : row.vectors, row.begin, row.end, [&](int i, uint4 v) {
        float x[WIDTH];
        unpack(v, x);
        gradient.replace(x, row.first_column + i * WIDTH, objective);
        row.vectors[i] = pack(x);
    });
    if (row.edge >= 0) {
        gradient.replace(edge, row.edge, objective);
        row.z[row.edge] = to_scalar(edge[0]);
    }
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
    cluster_arrive();

    // Before the barriers of the merge: afterwards these logits may already be gradients.
    const float z_y = capped(to_float(row.z[y]), softcap), z_0 = capped(to_float(row.z[0]), softcap);
    const Objective objective = {class_weight, softcap, is_finite(z_0) ? z_0 : 0.0f};
    float edge[1];
    const Stats s = merged_over_group(first_pass(row, objective, edge), block);

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
    second_pass(row, objective, {shift, on_probability / s.sumexp, on_target * up, smooth * up, int(y)}, edge);
}

// ------------------------------------------------------------------------------------------------- 6. the scaling

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
