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

// The mean of the magnitudes that reach `least` or, with BELOW, of the others, added one after the other; 0 of none. A NaN reaches all.
template <bool BELOW>
__device__ __forceinline__ float mean_of(const float* sent, int count, float least) {
    float total = 0.0f;
    int number = 0;
#pragma unroll 8
    for (int e = 0; e < count; ++e) {
        const float magnitude = fabsf(sent[e]);
        const bool wanted = (magnitude < least) == BELOW;
        total += wanted ? magnitude : 0.0f;  // to add 0 changes no bit, and takes no branch
        number += wanted ? 1 : 0;
    }
    return number > 0 ? total / (float)number : 0.0f;
}

// How many keys of the block reach `least`. `room`: WARPS words of shared memory, others than in the call before.
__device__ __forceinline__ word number_reaching(const word* keys, word least, word* room) {
    word here = 0, total = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) here += keys[i] >= least ? 1 : 0;
    here = __reduce_add_sync(ALL_LANES, here);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = here;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += room[warp];
    return total;
}

// A thread has the numbers v * 4 * THREADS + 4 * threadIdx.x + (0..3) of its part, v < OWN / 4.
template <bool FEEDBACK, class Number>
__global__ void __launch_bounds__(THREADS) encode_chunk(const __grid_constant__ Selection s) {
    __shared__ word places[MOST];
    __shared__ float sent[MOST];
    __shared__ word rooms[2][WARPS];
    __shared__ float mean;
    __shared__ half_word scales[2];
    const long long first = (long long)blockIdx.x * CUT + 4 * threadIdx.x;
    const Entries to(s, blockIdx.x);
    const Number* values = static_cast<const Number*>(s.values);
    const bool vectors = to.length == CUT && aligned(values) && (!FEEDBACK || aligned(s.residual));
    const auto load = [&](const auto* from, int v) {
        const int at = v * 4 * THREADS, left = to.length - at - 4 * (int)threadIdx.x;
        return vectors ? load_four(from + first + at) : load_some(from + first + at, left);
    };

    Four numbers[OWN / 4];
    word keys[OWN];  // of numbers that are not there: 0, and they are behind all others
#pragma unroll
    for (int v = 0; v < OWN / 4; ++v) {
        numbers[v] = load(values, v);
        if constexpr (FEEDBACK) {
            const Four before = load(s.residual, v);
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[v].at[i] += before.at[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) keys[4 * v + i] = key_of(numbers[v].at[i]);
    }

    int turn = 0;
    word low = 0, high = NAN_KEY;
    while (low < high) {  // for the largest key that `count` of them reach, or a lower one that no others reach
        const word middle = high - (high - low) / 2, reaching = number_reaching(keys, middle, rooms[turn ^= 1]);
        if (reaching >= to.count)
            low = middle;
        else
            high = middle - 1;
        if (reaching == to.count) break;
    }
    const word taken = to.count - number_reaching(keys, low + 1, rooms[turn ^= 1]);
    word above = 0, tied = 0, mine = 0;  // mine: a bit for each of this thread's numbers that is sent
#pragma unroll
    for (int v = 0; v < OWN / 4; ++v) {
        word both = 0, all;  // 16 bits for each of both counts
#pragma unroll
        for (int i = 0; i < 4; ++i) both += (keys[4 * v + i] > low ? 1 : 0) + (keys[4 * v + i] == low ? 1 << 16 : 0);
        both = (above | tied << 16) + sum_before(both, rooms[0], all);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const word key = keys[4 * v + i];
            if (key > low || (key == low && both >> 16 < taken)) {
                const word at = (both & 0xFFFF) + min(both >> 16, taken);
                places[at] = (v * THREADS + threadIdx.x) * 4 + i;
                sent[at] = numbers[v].at[i];
                mine |= 1u << (4 * v + i);
            }
            both += (key > low ? 1 : 0) + (key == low ? 1 << 16 : 0);
        }
        above += all & 0xFFFF;
        tied += all >> 16;
    }
    __syncthreads();

    if (threadIdx.x == 0) mean = mean_of<false>(sent, to.count, 0.0f);
    __syncthreads();
    const bool finite = mean < __uint_as_float(INFINITY_BITS);
    if (threadIdx.x == 0)
        to.scales[0] = scales[0] = finite ? bfloat16_of(mean_of<true>(sent, to.count, mean)) : NAN_BITS >> 16;
    if (threadIdx.x == 32)
        to.scales[1] = scales[1] = finite ? bfloat16_of(mean_of<false>(sent, to.count, mean)) : NAN_BITS >> 16;

    for (int j = threadIdx.x; j < s.k / 4; j += THREADS) {
        word code = 0;
        for (int e = 4 * j; e < min(4 * j + 4, to.count); ++e)
            code |= ((sent[e] < 0.0f ? 2 : 0) | (fabsf(sent[e]) >= mean ? 1 : 0)) << (2 * (e % 4));
        to.codes[j] = (byte)code;
    }
    for (int j = threadIdx.x; j < s.k / 2; j += THREADS) {
        const word one = 2 * j < to.count ? places[2 * j] : 0, other = 2 * j + 1 < to.count ? places[2 * j + 1] : 0;
        to.indices[3 * j] = (byte)one;
        to.indices[3 * j + 1] = (byte)(one >> 8 | (other & 0xF) << 4);
        to.indices[3 * j + 2] = (byte)(other >> 4);
    }
    if constexpr (FEEDBACK) {
        __syncthreads();  // the scales have been written
#pragma unroll
        for (int v = 0; v < OWN / 4; ++v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& number = numbers[v].at[i];
                if (keys[4 * v + i] >= INFINITY_BITS) {
                    number = 0.0f;
                } else if (mine >> (4 * v + i) & 1) {
                    const float magnitude = float_of(scales[fabsf(number) >= mean ? 1 : 0]);
                    number = magnitude_bits(magnitude) < INFINITY_BITS ? number - (number < 0.0f ? -magnitude : magnitude) : 0.0f;
                }
            }
            const int at = v * 4 * THREADS;
            if (vectors)
                store_four(s.residual + first + at, numbers[v]);
            else
                store_some(s.residual + first + at, numbers[v], to.length - at - 4 * (int)threadIdx.x);
        }
    }
    if (blockIdx.x == gridDim.x - 1) {  // what fills up each section to 16 bytes
        byte* ends[3] = {to.indices + 3 * s.k / 2, to.codes + s.k / 4, reinterpret_cast<byte*>(to.scales + 2)};
        for (int section = 0; section < 3; ++section)
            if (threadIdx.x < (16 - (address)ends[section] % 16) % 16) ends[section][threadIdx.x] = 0;
    }
}

// out = (ADD: out, else 0) + values * scale at their indices. Indices outside are passed over.
template <bool ADD, class Number>
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
    Number* to = static_cast<Number*>(s.values) + part * CUT + place;
    store(to, (ADD ? widened(*to) : 0.0f) + (code >= 2 ? -magnitude : magnitude));
}
