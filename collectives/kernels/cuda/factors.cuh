// Gram-Schmidt on the factors of powersgd. A block works on those of one matrix; the sums have the order of reference/blocks.py.

[[maybe_unused]] constexpr int PARTIALS = 128;  // element e of a vector is in the partial sum e % PARTIALS, which one thread adds
[[maybe_unused]] constexpr int TOGETHER = 16;   // vectors from which another is projected out at a time
[[maybe_unused]] constexpr int LOADS = 8;       // of a thread that are under way at a time: a block has few threads for long vectors
[[maybe_unused]] constexpr double LOST = 1e-12;

struct Factors {
    const float* vectors;  // (matrices, rank, length)
    float* out;            // in their place, or apart from them
    double* room;          // as many numbers
    const float* first;
    float* errors;
    long long length;
    long long numel;  // of an error
    int rank;
};

// Do something for one of `threads` threads with what it loads of every element e from e = own on: use(e, load(e)).
template <int threads, class Load, class Use>
__device__ __forceinline__ void each(int own, long long length, const Load& load, const Use& use) {
    for (long long begin = own; begin < length; begin += LOADS * threads) {
        decltype(load(begin)) loaded[LOADS] = {};
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (begin + i * threads < length) loaded[i] = load(begin + i * threads);
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (begin + i * threads < length) use(begin + i * threads, loaded[i]);
    }
}

template <class Number>
struct Two {
    Number one, other;
};

// This thread's partial sum of a * b.
template <class Number>
__device__ __forceinline__ double partial_dot(int own, const Number* a, const Number* b, long long length) {
    double sum = 0.0;
    each<PARTIALS>(
        own, length, [&](long long e) { return Two<Number>{a[e], b[e]}; },
        [&](long long, Two<Number> numbers) { sum += (double)numbers.one * (double)numbers.other; });
    return sum;
}

// All lanes find the same, since addition commutes.
__device__ __forceinline__ double total(const double* partials) {
    const double* own = partials + threadIdx.x % 32 * 4;
    double sum = (own[0] + own[1]) + (own[2] + own[3]);
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, half);
    return sum;
}

// Each vector is projected out of all later ones as soon as it is done, so that many sums are under way between two barriers; every
// single vector passes through the same operations as if it were projected on the earlier ones when its turn comes. With NEXT, a
// lost vector is replaced with that of `first`, and if any number is not finite, all vectors are, and the error becomes 0.
template <bool NEXT>
__global__ void __launch_bounds__(THREADS) orthonormalize(const __grid_constant__ Factors f) {
    __shared__ double partials[TOGETHER][PARTIALS];
    __shared__ word broken;
    const int group = threadIdx.x / PARTIALS, own = threadIdx.x % PARTIALS;
    const long long numbers = f.rank * f.length, begin = blockIdx.x * numbers;
    const float* vectors = f.vectors + begin;
    float* out = f.out + begin;
    double* room = f.room + begin;
    if (threadIdx.x == 0) broken = 0;
    __syncthreads();
    each<THREADS>(
        threadIdx.x, numbers, [&](long long e) { return vectors[e]; },
        [&](long long e, float number) {
            room[e] = number;
            if (NEXT && magnitude_bits(number) >= INFINITY_BITS) broken = 1;
        });
    __syncthreads();
    for (int a = 0; a < f.rank; ++a) {
        const long long place = a * f.length;
        double* vector = room + place;
        partials[group][own] = group == 0 ? partial_dot(own, vectors + place, vectors + place, f.length)
                                          : partial_dot(own, vector, vector, f.length);
        __syncthreads();
        const double before = total(partials[0]), after = total(partials[1]), norm = sqrt(after);
        const bool lost = after <= LOST * before && before < __longlong_as_double(0x7FF0000000000000LL);
        const bool replaced = NEXT && (lost || broken);
        each<THREADS>(
            threadIdx.x, f.length, [&](long long e) { return vector[e]; },
            [&](long long e, double number) {
                number = lost ? 0.0 : number / norm;
                vector[e] = number;
                out[place + e] = replaced ? f.first[begin + place + e] : (float)number;
            });
        for (int least = a + 1; least < f.rank; least += TOGETHER) {
            const int end = min(least + TOGETHER, f.rank);
            __syncthreads();  // the vector is done, and all have read the sums from before
            for (int b = least + group; b < end; b += THREADS / PARTIALS)
                partials[b - least][own] = partial_dot(own, vector, room + b * f.length, f.length);
            __syncthreads();
            for (int b = least + group; b < end; b += THREADS / PARTIALS) {
                const double part = total(partials[b - least]);
                double* other = room + b * f.length;
                each<PARTIALS>(
                    own, f.length, [&](long long e) { return Two<double>{other[e], vector[e]}; },
                    [&](long long e, Two<double> numbers) { other[e] = numbers.one - part * numbers.other; });
            }
        }
        __syncthreads();
    }
    if (NEXT && broken)
        for (long long e = threadIdx.x; e < f.numel; e += THREADS) f.errors[blockIdx.x * f.numel + e] = 0.0f;
}
