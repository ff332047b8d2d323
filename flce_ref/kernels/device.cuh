// What any kernel of this folder needs: numbers, statistics of a part of a row, and threads working together.
//
//   1. numbers      bfloat16, float16 and float32, 16 bytes at a time
//   2. statistics   (max, Σ exp(z − max)) of a part of a row, and how two parts are merged
//   3. moving       vectors through registers, and Hopper's copy engine
//   4. the group    merging over the threads of a warp, a block and a cluster
//
// Compiled at run time by NVRTC, which has no header files of CUDA to include. To be defined before this is included:
//   BFLOAT16 | FLOAT16 | FLOAT32    the dtype of the logits
//   SMOOTHING, SOFTCAP              parts of the objective that cost time for every logit, 0 or 1

#pragma once

// ---------------------------------------------------------------------------------------------------------- 1. numbers

#if defined(FLOAT32)
typedef float Scalar;
#else
typedef unsigned short Scalar;  // bfloat16 or float16, by its bits
#endif

constexpr int WIDTH = 16 / sizeof(Scalar);  // logits in the widest access a thread can make: 16 bytes
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

// One instruction, right to 1 ulp; __fdividef takes three more for arguments near the ends of float32's range.
__device__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// Into [−limit, limit]; NaN stays NaN, which fminf would drop.
__device__ float clamped(float x, float limit) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, %1;\n max.NaN.f32 %0, %0, %2;" : "+f"(x) : "f"(limit), "f"(-limit));
    return x;
#else
    return fabsf(x) > limit ? copysignf(limit, x) : x;
#endif
}

// x P(x²) / Q(x²), the best such quotient of degree 4 on [−8, 8] (within 7e-9), where float32 ends at 1 − 6e-8; with its
// own roundings right to 3e-7. tanhf branches, and exponentials would take the special-function unit twice as long.
__device__ float hyperbolic_tangent(float x) {
    x = clamped(x, 8);
    const float s = x * x;
    const float p = fmaf(fmaf(fmaf(fmaf(1.5230532e-08f, s, 2.1894744e-05f), s, 0.003571603f), s, 0.13444503f), s, 1);
    const float q = fmaf(fmaf(fmaf(fmaf(8.5224934e-07f, s, 0.00034113001f), s, 0.026164463f), s, 0.4677783f), s, 1);
    return x * p * reciprocal(q);
}

// A logit under its soft cap is softcap · squashed. The reciprocal is the same for all: one division, outside the loops.
__device__ float squashed(float x, float softcap) { return hyperbolic_tangent(x * (1 / softcap)); }

__device__ float capped(float x, float softcap) { return SOFTCAP ? softcap * squashed(x, softcap) : x; }

// ------------------------------------------------------------------------------------------------------- 2. statistics

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

// ----------------------------------------------------------------------------------------------------------- 3. moving

__device__ unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

// Calls use(i, vector) for the vectors from begin to end, in a block of BLOCK_SIZE threads. Loads run ahead of their
// use, to cover the latency of memory.
template <int AHEAD, int BLOCK_SIZE, typename Use>
__device__ void for_each_vector(const uint4* vectors, int begin, int end, Use use) {
    for (int i = begin + threadIdx.x; i < end; i += AHEAD * BLOCK_SIZE) {
        uint4 v[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * BLOCK_SIZE < end) v[u] = vectors[i + u * BLOCK_SIZE];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u)
            if (i + u * BLOCK_SIZE < end) use(i + u * BLOCK_SIZE, v[u]);
    }
}

#if __CUDA_ARCH__ >= 900
// Hopper's copy engine moves a stretch of memory into shared memory while the threads do something else. A *barrier* in
// shared memory counts the bytes as they land: it is made once, told how many to expect, and waited for.
__device__ void make_barrier(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// By one thread; both addresses and `bytes` are multiples of 16.
__device__ void start_copy(void* shared, const void* global, int bytes, unsigned long long* barrier) {
    const unsigned there = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(there), "r"(bytes) : "memory");
    if (bytes == 0) return;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(there)
                 : "memory");
}

// Until the bytes of the barrier's `phase`-th use (0, then 1, then 0 …) are there.
__device__ void await_copy(unsigned long long* barrier, int phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}
#endif

// -------------------------------------------------------------------------------------------------------- 4. the group

// A block may write into another's shared memory only once that one runs: say so early, wait as late as possible.
template <int BLOCKS>
__device__ void cluster_arrive() {
    if constexpr (BLOCKS > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

template <int BLOCKS>
__device__ void cluster_wait() {
    if constexpr (BLOCKS > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ Stats merged_over_warp(Stats s) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        merge(s, {__shfl_xor_sync(~0u, s.max, lanes), __shfl_xor_sync(~0u, s.sumexp, lanes),
                  SMOOTHING ? __shfl_xor_sync(~0u, s.smooth, lanes) : 0.0f});
    }
    return s;
}

// Over WARPS warps of each of BLOCKS blocks, to every thread of them. Each warp leaves its part in the shared memory of
// every block of the cluster, lane b writing to block b; after one barrier each warp merges all parts for itself.
// `block` is this block's number in the cluster, whose blocks have all called `cluster_arrive` before.
template <int BLOCKS, int WARPS>
__device__ Stats merged_over_group(Stats s, int block) {
    __shared__ Stats parts[BLOCKS * WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    s = merged_over_warp(s);
    if constexpr (BLOCKS > 1) {
        cluster_wait<BLOCKS>();
        if (lane < BLOCKS) {
            unsigned here = shared_address(&parts[block * WARPS + warp]), there;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(s.max) : "memory");
            asm volatile("st.shared::cluster.f32 [%0+4], %1;" ::"r"(there), "f"(s.sumexp) : "memory");
            asm volatile("st.shared::cluster.f32 [%0+8], %1;" ::"r"(there), "f"(s.smooth) : "memory");
        }
        __syncwarp();  // the barrier is .aligned: all lanes must come to it together
        cluster_arrive<BLOCKS>();
        cluster_wait<BLOCKS>();
    } else {
        if (lane == 0) parts[warp] = s;
        __syncthreads();
    }
    s = {LOWEST, 0, 0};
    for (int i = lane; i < BLOCKS * WARPS; i += 32) merge(s, parts[i]);
    return merged_over_warp(s);
}
