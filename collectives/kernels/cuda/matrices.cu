// The arithmetic of powersgd on a batch of matrices of one shape. What it computes: reference/matrices.py.

#include "common.cuh"
#include "factors.cuh"

[[maybe_unused]] constexpr int MEMBERS = 448;  // matrices of a launch: their addresses fit into its parameters, of at most 4096 bytes
[[maybe_unused]] constexpr int VECTORS = 4;
[[maybe_unused]] constexpr int PIECE = VECTORS * 4 * THREADS;  // numbers that a block adds
[[maybe_unused]] constexpr int ROWS = 8, COLUMNS = 128;        // of the part of a product that a warp computes

struct Batch {
    float* errors;
    const float* left;
    const float* right;
    long long rows, columns;
    int rank;
    int blocks;  // that work on one matrix
    void* tensors[MEMBERS];
};

// errors += tensors. A thread adds the numbers v * 4 * THREADS + 4 * threadIdx.x + (0..3) of its block's piece, v < VECTORS.
template <class Number>
__global__ void __launch_bounds__(THREADS) accumulate(const __grid_constant__ Batch batch) {
    const long long numel = batch.rows * batch.columns;
    const int matrix = blockIdx.x / batch.blocks;
    const long long begin = (long long)(blockIdx.x % batch.blocks) * PIECE + 4 * threadIdx.x;
    const Number* from = static_cast<const Number*>(batch.tensors[matrix]) + begin;
    float* to = batch.errors + matrix * numel + begin;
    const bool vectors = begin + PIECE - 4 * THREADS + 4 <= numel && aligned(to) && aligned(from);
    Four numbers[VECTORS], sums[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = v * 4 * THREADS;
        numbers[v] = vectors ? load_four(from + at) : load_some(from + at, numel - begin - at);
        sums[v] = vectors ? load_four(to + at) : load_some(to + at, numel - begin - at);
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int at = v * 4 * THREADS;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[v].at[i] += numbers[v].at[i];
        if (vectors)
            store_four(to + at, sums[v]);
        else
            store_some(to + at, sums[v], numel - begin - at);
    }
}

// tensors = left^T right or, with SUBTRACT, errors -= left^T right. A lane computes 4 columns of its warp's part.
template <class Number, bool SUBTRACT>
__global__ void __launch_bounds__(THREADS) multiply(const __grid_constant__ Batch batch) {
    const int matrix = blockIdx.x / batch.blocks, across = (int)((batch.columns + COLUMNS - 1) / COLUMNS);
    const int part = blockIdx.x % batch.blocks * (THREADS / 32) + threadIdx.x / 32;
    const long long row = (long long)(part / across) * ROWS, column = part % across * COLUMNS + threadIdx.x % 32 * 4;
    const long long rows = batch.rows - row, columns = batch.columns - column;  // from there on
    if (rows <= 0 || columns <= 0) return;
    const float* left = batch.left + (long long)matrix * batch.rank * batch.rows + row;
    const float* right = batch.right + (long long)matrix * batch.rank * batch.columns + column;
    const bool whole = columns >= 4 && batch.columns % 4 == 0;  // then all rows are aligned as the first
    const bool vectors = whole && aligned(right);

    Number* to = SUBTRACT ? reinterpret_cast<Number*>(batch.errors + matrix * batch.rows * batch.columns)
                          : static_cast<Number*>(batch.tensors[matrix]);
    to += row * batch.columns + column;
    const bool stores_vectors = whole && aligned(to);
    Four before[ROWS], product[ROWS] = {};
    if constexpr (SUBTRACT) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const Number* from = to + r * batch.columns;
            if (r < rows) before[r] = stores_vectors ? load_four(from) : load_some(from, columns);
        }
    }
    for (int vector = 0; vector < batch.rank; ++vector) {
        const Four q = vectors ? load_four(right) : load_some(right, columns);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float p = r < rows ? left[r] : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) product[r].at[i] = vector == 0 ? p * q.at[i] : product[r].at[i] + p * q.at[i];
        }
        left += batch.rows;
        right += batch.columns;
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r < rows) {
            if constexpr (SUBTRACT) {
#pragma unroll
                for (int i = 0; i < 4; ++i) product[r].at[i] = before[r].at[i] - product[r].at[i];
            }
            if (stores_vectors)
                store_four(to, product[r]);
            else
                store_some(to, product[r], columns);
            to += batch.columns;
        }
    }
}
