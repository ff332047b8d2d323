// A row of logits, or a tile's part of one: which thread has which columns, what is added up and what is written.
//
//   1. a row          vectors of 16 bytes and a few single logits at the ends, whatever the alignment
//   2. the objective  what a logit adds to the statistics, and the gradient that takes its place
//
// The formulas are those of flce_ref/objective.py. To be defined before this is included, beside what device.cuh needs:
//   CLUSTER, THREADS    blocks per row, threads per block

#pragma once

#include "device.cuh"

constexpr int WARPS = THREADS / 32;

// ------------------------------------------------------------------------------------------------------------ 1. a row

// Rows start anywhere (V may be odd), but a 16-byte access must be aligned. So a row is a few single logits, the *edges*
// at its two ends, and between them vectors of WIDTH logits. Block 0 takes the edges, one per thread; the vectors are
// divided among the blocks.
struct Row {
    Scalar* z;
    uint4* vectors;
    int first_column;  // of vector 0: as many edges are on the left
    int begin, end;    // the vectors of this block
    int edge;          // the column of this thread's edge, or −1

    __device__ Row(Scalar* z, int width, int block) : z(z) {
        const int misaligned = int((unsigned long long)z % 16 / sizeof(Scalar));
        first_column = min((WIDTH - misaligned) % WIDTH, width);
        vectors = (uint4*)(z + first_column);
        const int count = (width - first_column) / WIDTH, share = (count + CLUSTER - 1) / CLUSTER;
        begin = min(block * share, count);
        end = min(begin + share, count);
        const int edges = width - count * WIDTH, t = threadIdx.x;
        edge = block > 0 || t >= edges ? -1 : t < first_column ? t : t + count * WIDTH;
    }

    __device__ void fill(float value) const {
        float copies[WIDTH];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) copies[k] = value;
        for (int i = begin + threadIdx.x; i < end; i += THREADS) vectors[i] = pack(copies);
        if (edge >= 0) z[edge] = to_scalar(value);
    }
};

// ---------------------------------------------------------------------------------------------------- 2. the objective

struct Objective {
    const float* class_weight;  // of column 0 and on, or null for weights of one
    float softcap;
    float reference;  // a logit of the row, so that Σ w (z − reference) keeps its digits under a large common offset

    __device__ float weight(int column) const { return class_weight ? class_weight[column] : 1.0f; }

    // Of N neighbours, 16 bytes at a time where they are aligned: in whole vectors always or never in a row.
    template <int N>
    __device__ void weights(float (&w)[N], int column) const {
        if (N % 4 == 0 && class_weight && (unsigned long long)(class_weight + column) % 16 == 0) {
#pragma unroll
            for (int k = 0; k < N / 4; ++k) {
                const float4 v = ((const float4*)(class_weight + column))[k];
                w[4 * k] = v.x, w[4 * k + 1] = v.y, w[4 * k + 2] = v.z, w[4 * k + 3] = v.w;
            }
        } else {
#pragma unroll
            for (int k = 0; k < N; ++k) w[k] = weight(column + k);
        }
    }

    template <int N>
    __device__ void add_to(Stats& s, float (&x)[N], int column) const {
        float w[N];
        if (SMOOTHING) weights(w, column);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            x[k] = capped(x[k], softcap);
            if (SMOOTHING) s.smooth += w[k] * (x[k] - reference);
        }
        add(s, x);
    }
};

// dz_j = scale · exp(z_j − shift) − target · 1[j = y] − smooth · w_j: the three numbers of `grad_coefficients`. Under a
// soft cap z = softcap · t, and the raw logit has 1 − t² of that gradient.
struct Gradient {
    float shift, scale, target, smooth;
    int y;

    template <int N>
    __device__ void replace(float (&x)[N], int column, const Objective& objective) const {
        float slope[N], w[N];
        if (SMOOTHING) objective.weights(w, column);
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const float t = SOFTCAP ? squashed(x[k], objective.softcap) : 0.0f;
            slope[k] = 1 - t * t;
            x[k] = scale * exponential((SOFTCAP ? objective.softcap * t : x[k]) - shift);
            if (SMOOTHING) x[k] -= smooth * w[k];
        }
        if (unsigned(y - column) < N) {  // in float32: after rounding p to bfloat16, p − 1 is 0 for every p above 0.998
#pragma unroll
            for (int k = 0; k < N; ++k) x[k] -= k == y - column ? target : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = SOFTCAP ? x[k] * slope[k] : x[k];
    }
};

// The part of a row that this thread has becomes its gradient; its vectors are read at `from`, its edge is at hand.
template <int AHEAD>
__device__ void overwrite(const Row& row, const uint4* from, float (&edge)[1], const Gradient& gradient,
                          const Objective& objective) {
    for_each_vector<AHEAD, THREADS>(from, row.begin, row.end, [&](int i, uint4 v) {
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
