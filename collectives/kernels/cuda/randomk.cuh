// Numbers at indices that are drawn from a seed, and back.

// The index that random-k takes from the j-th of k parts of a ring of n, which begins anywhere.
__device__ __forceinline__ long long drawn(const Selection& s, int j) {
    const long long n = s.numel, begin = j * n / s.k, end = (j + 1) * n / s.k;
    const long long first = (long long)((address)random_bits(s.k, s.seed) * n >> 32);
    const long long index = first + begin + (long long)((address)random_bits(j, s.seed) * (end - begin) >> 32);
    return index < n ? index : index - n;
}

// Step 1 of random-k: sums, and whether all are finite.
template <bool FEEDBACK, class Number>
__global__ void __launch_bounds__(THREADS) examine(const __grid_constant__ Selection s) {
    const Run run(s);
    word most = 0;
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        Four numbers[VECTORS];
        load_sums<FEEDBACK, false, Number>(s, Place(s, chunk), numbers);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) most = max(most, magnitude_bits(numbers[v].at[i]));
    }
    if (most >= INFINITY_BITS) s.scratch->not_finite = 1;
}

// Step 2 of random-k.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) draw(const __grid_constant__ Selection s) {
    const bool finite = !s.scratch->not_finite;
    const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
    word* to = reinterpret_cast<word*>(s.wire);
    for (int j = thread; j < s.slots; j += threads) {
        if (j >= s.k) {
            to[j] = 0;
            continue;
        }
        const long long index = drawn(s, j);
        to[j] = finite ? __float_as_uint(sums_of<FEEDBACK>(s)[index]) : NAN_BITS;
        if constexpr (FEEDBACK) s.residual[index] = 0.0f;
    }
    if (FEEDBACK && !finite)
        for (long long index = thread; index < s.numel; index += threads)
            if (magnitude_bits(s.residual[index]) >= INFINITY_BITS) s.residual[index] = 0.0f;
}

template <bool ADD, class Number>
__global__ void __launch_bounds__(THREADS) place(const __grid_constant__ Selection s) {
    const float* values = reinterpret_cast<const float*>(s.wire);
    const int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= s.k) return;
    const long long index = drawn(s, j);
    const float number = values[j] * s.scale;
    Number* to = static_cast<Number*>(s.values) + index;
    store(to, (ADD ? widened(*to) : 0.0f) + number);
}
