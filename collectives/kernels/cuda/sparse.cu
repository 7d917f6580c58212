// The sparse codecs. What the bytes mean: reference/sparse.py.

#include "common.cuh"
#include "sums.cuh"
#include "topk.cuh"
#include "randomk.cuh"
#include "chunks.cuh"
