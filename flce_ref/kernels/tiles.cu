// Tiles of the vocabulary: a row's part in T of the V columns, merged into what is known of the row, or overwritten by
// its gradient once all of the row is known.
//
// Where the row kernel has a whole row in hand, these see one tile of it at a time, and each tile twice, in two launches
// with every other tile in between. So there is nothing to keep on chip; a block reads its part of a row once, with loads
// that run ahead, and what must survive until the next tile is four numbers per row in memory.
//
//   1. merge_stats   (max, Σ exp(z − max), z_y, Σ w (z − max)) of the columns so far, brought up to date by a tile
//   2. write_grad    the tile becomes its own gradient
//
// cuda_tiles.py defines, for each configuration, what row.cuh and device.cuh need; a row has one block, so CLUSTER is 1.

#include "row.cuh"

// In memory the maximum of no words, or of masked ones alone, is −∞; in `Stats` it is LOWEST.
__device__ float stored(float max) { return max == LOWEST ? __int_as_float(0xff800000) : max; }

// A target's column in the tile, or −1.
__device__ int column_in_tile(long long target, long long first_column, long long width) {
    const long long column = target - first_column;
    return column >= 0 && column < width ? int(column) : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_stats(
    Scalar* tile,               // (C, T), rows row_stride apart: raw logits of columns first_column and on
    long long row_stride, long long width, long long first_column,
    const long long* target,    // (C,)
    const float* class_weight,  // of the tile's columns, (T,), or null
    const float* weight_sums,   // (2,): Σ w over the columns before the tile, and over the tile's; or null for w = 1
    float* row_max,             // (C,) and so on: of the columns before, overwritten by those with the tile's
    float* sumexp,
    float* target_logit,
    float* smooth_sum,
    float* highest,             // (C,) the maximum in the tile alone, or null
    float softcap) {
    const long long r = blockIdx.x;
    const Row row(tile + r * row_stride, int(width), 0);
    const int y = column_in_tile(target[r], first_column, width);
    const float z_0 = capped(to_float(row.z[0]), softcap);
    const Objective objective = {class_weight, softcap, is_finite(z_0) ? z_0 : 0.0f};

    Stats s = {LOWEST, 0, 0};
    for_each_vector<4, THREADS>(row.vectors, row.begin, row.end, [&](int i, uint4 v) {
        float x[WIDTH];
        unpack(v, x);
        objective.add_to(s, x, row.first_column + i * WIDTH);
    });
    if (row.edge >= 0) {
        float x[1] = {to_float(row.z[row.edge])};
        objective.add_to(s, x, row.edge);
    }
    s = merged_over_group<1, WARPS>(s, 0);
    if (threadIdx.x != 0) return;

    const float before = row_max[r], both = fmaxf(before, s.max), shift = both == LOWEST ? 0.0f : both;
    if (SMOOTHING) {
        const float weight_before = weight_sums ? weight_sums[0] : float(first_column);
        const float weight_here = weight_sums ? weight_sums[1] : float(width);
        // Of no columns, or of masked words alone, there is nothing that a shift could move.
        const float moved = before < LOWEST ? 0.0f : weight_before * (before - shift);
        smooth_sum[r] += moved + s.smooth + weight_here * (objective.reference - shift);
    }
    sumexp[r] = sumexp[r] * exponential(before - both) + s.sumexp * exponential(s.max - both);
    row_max[r] = stored(both);
    if (y >= 0) target_logit[r] = capped(to_float(row.z[y]), softcap);
    if (highest) highest[r] = stored(s.max);
}

extern "C" __global__ void __launch_bounds__(THREADS) write_grad(
    Scalar* tile,               // (C, T), rows row_stride apart; overwritten by the gradient
    long long row_stride, long long width, long long first_column,
    const long long* target,    // (C,)
    const float* class_weight,  // of the tile's columns, (T,), or null
    const float* row_max,       // (C,) of the whole row, as is sumexp
    const float* sumexp,
    const float* on_probability,  // (C,) the three numbers of `grad_coefficients`
    const float* on_target,
    const float* on_smooth,
    long long ignore_index, float softcap) {
    const long long r = blockIdx.x, target_word = target[r];
    const Row row(tile + r * row_stride, int(width), 0);
    if (target_word == ignore_index) {  // not by coefficients of zero: its logits need not be finite
        row.fill(0);
        return;
    }
    const Objective objective = {class_weight, softcap, 0};
    const float shift = sumexp[r] == 0 ? 0.0f : row_max[r];
    const Gradient gradient = {shift, on_probability[r] / sumexp[r], on_target[r], on_smooth[r],
                               column_in_tile(target_word, first_column, width)};
    float edge[1];
    if (row.edge >= 0) edge[0] = to_float(row.z[row.edge]);
    overwrite<4>(row, row.vectors, edge, gradient, objective);
}
