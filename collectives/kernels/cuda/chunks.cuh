// chunktopk: of every part of CUT numbers the k largest, as indices of 12 bits and values of 2. A block works on one part.

[[maybe_unused]] constexpr int CUT = 4096;
[[maybe_unused]] constexpr int MOST = 1024;          // of k
[[maybe_unused]] constexpr int OWN = CUT / THREADS;  // numbers of a thread

// Where the entries of a part are in the wire.
struct Entries {
    byte* indices;
    byte* codes;
    half_word* scales;
    int length, count;  // of the part, and how many of its numbers are sent
    __device__ __forceinline__ Entries(const Selection& s, long long part) {
        const long long parts = (s.numel + CUT - 1) / CUT;
        byte* codes_of_all = s.wire + padded(parts * (3 * s.k / 2));
        indices = s.wire + part * (3 * s.k / 2);
        codes = codes_of_all + part * (s.k / 4);
        scales = reinterpret_cast<half_word*>(codes_of_all + padded(parts * (s.k / 4))) + 2 * part;
        length = (int)min((long long)CUT, s.numel - part * CUT);
        count = (length * s.k + CUT - 1) / CUT;
    }
};

__device__ __forceinline__ half_word bfloat16_of(float number) {
    const word bits = __float_as_uint(number);
    return (half_word)((magnitude_bits(number) > INFINITY_BITS ? NAN_BITS : bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

__device__ __forceinline__ float float_of(half_word code) { return __uint_as_float((word)code << 16); }

// The mean of the magnitudes that reach `least` or, with BELOW, of the others, summed one after the other; 0 of none.
template <bool BELOW>
__device__ __forceinline__ float mean_of(const float* sent, int count, float least) {
    float total = 0.0f;
    int number = 0;
    for (int e = 0; e < count; ++e)
        if ((sent[e] >= least) != BELOW) {
            total += sent[e];
            ++number;
        }
    return number > 0 ? total / (float)number : 0.0f;
}

template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) encode_chunk(const __grid_constant__ Selection s) {
    __shared__ word keys[CUT];
    __shared__ word places[MOST];
    __shared__ float sent[MOST];
    __shared__ word room[WARPS];
    __shared__ float mean;
    __shared__ half_word scales[2];
    const long long first = (long long)blockIdx.x * CUT;
    const Entries to(s, blockIdx.x);
    for (int i = threadIdx.x; i < CUT; i += THREADS) {
        word key = 0;  // behind all others of no magnitude
        if (i < to.length) {
            float number = s.values[first + i];
            if constexpr (FEEDBACK) s.residual[first + i] = number = number + s.residual[first + i];
            key = key_of(number);
        }
        keys[i] = key;
    }
    __syncthreads();

    word low = 0, high = NAN_KEY;
    while (low < high) {  // the largest key that `count` of them reach
        const word middle = high - (high - low) / 2;
        word here = 0, reaching;
        for (int i = 0; i < OWN; ++i) here += keys[i * THREADS + threadIdx.x] >= middle ? 1 : 0;
        sum_before(here, room, reaching);
        if (reaching >= to.count)
            low = middle;
        else
            high = middle - 1;
    }
    word both = 0, all;  // 16 bits for each of both counts
    for (int i = 0; i < OWN; ++i) {
        const word key = keys[threadIdx.x * OWN + i];
        both += (key > low ? 1 : 0) + (key == low ? 1 << 16 : 0);
    }
    const word before = sum_before(both, room, all);
    const word taken = to.count - (all & 0xFFFF);
    word above = before & 0xFFFF, tied = before >> 16;
    for (int i = 0; i < OWN; ++i) {
        const word place = threadIdx.x * OWN + i, key = keys[place];
        if (key > low || (key == low && tied < taken)) {
            const word at = above + min(tied, taken);
            places[at] = place;
            sent[at] = fabsf((FEEDBACK ? s.residual : s.values)[first + place]);
        }
        above += key > low ? 1 : 0;
        tied += key == low ? 1 : 0;
    }
    __syncthreads();

    if (threadIdx.x == 0) {
        mean = mean_of<false>(sent, to.count, 0.0f);
        // A NaN is not summed there, but reaches nothing either.
        for (int e = 0; e < to.count; ++e)
            if (sent[e] != sent[e]) mean = __uint_as_float(NAN_BITS);
        const bool finite = mean < __uint_as_float(INFINITY_BITS);
        const float broken = __uint_as_float(NAN_BITS);
        to.scales[0] = scales[0] = bfloat16_of(finite ? mean_of<true>(sent, to.count, mean) : broken);
        to.scales[1] = scales[1] = bfloat16_of(finite ? mean_of<false>(sent, to.count, mean) : broken);
    }
    __syncthreads();

    const float* sums = FEEDBACK ? s.residual : s.values;
    for (int j = threadIdx.x; j < s.k / 4; j += THREADS) {
        word code = 0;
        for (int e = 4 * j; e < min(4 * j + 4, to.count); ++e) {
            const word negative = sums[first + places[e]] < 0.0f ? 2 : 0, reaches = sent[e] >= mean ? 1 : 0;
            code |= (negative | reaches) << (2 * (e % 4));
        }
        to.codes[j] = (byte)code;
    }
    for (int j = threadIdx.x; j < s.k / 2; j += THREADS) {
        const word one = 2 * j < to.count ? places[2 * j] : 0, other = 2 * j + 1 < to.count ? places[2 * j + 1] : 0;
        to.indices[3 * j] = (byte)one;
        to.indices[3 * j + 1] = (byte)(one >> 8 | (other & 0xF) << 4);
        to.indices[3 * j + 2] = (byte)(other >> 4);
    }
    if constexpr (FEEDBACK) {
        __syncthreads();  // the signs have been read
        for (int e = threadIdx.x; e < to.count; e += THREADS) {
            const float magnitude = float_of(scales[sent[e] >= mean ? 1 : 0]);
            float* left = s.residual + first + places[e];
            const float lost = *left - (*left < 0.0f ? -magnitude : magnitude);
            *left = magnitude_bits(magnitude) < INFINITY_BITS ? lost : 0.0f;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < to.length; i += THREADS)
            if (keys[i] >= INFINITY_BITS) s.residual[first + i] = 0.0f;
    }
    if (blockIdx.x == gridDim.x - 1) {  // what fills up each section to 16 bytes
        byte* ends[3] = {to.indices + 3 * s.k / 2, to.codes + s.k / 4, reinterpret_cast<byte*>(to.scales + 2)};
        for (int section = 0; section < 3; ++section)
            if (threadIdx.x < (16 - (address)ends[section] % 16) % 16) ends[section][threadIdx.x] = 0;
    }
}

// residual = (ADD: residual, else 0) + values * scale at their indices. Indices outside are passed over.
template <bool ADD>
__global__ void __launch_bounds__(THREADS) scatter_chunks(const __grid_constant__ Selection s) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x, part = at / s.k;
    const int e = (int)(at % s.k), pair = 3 * (e / 2);
    if (part >= (s.numel + CUT - 1) / CUT) return;
    const Entries from(s, part);
    if (e >= from.count) return;
    const byte* index = from.indices + pair;
    const int place = e % 2 == 0 ? index[0] | (index[1] & 0xF) << 8 : index[1] >> 4 | index[2] << 4;
    if (place >= from.length) return;
    const word code = from.codes[e / 4] >> (2 * (e % 4)) & 3;
    const float magnitude = float_of(from.scales[code & 1]) * s.scale;
    float* to = s.residual + part * CUT + place;
    *to = (ADD ? *to : 0.0f) + (code >= 2 ? -magnitude : magnitude);
}
