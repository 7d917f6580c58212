// The sparse codecs: the largest of n numbers as indices and values, exactly, and back. What is written: reference_sparse.py.
//
// Magnitudes are compared as the integers that their bits are ("keys"). Exact selection finds the k-th largest key digit by digit,
// from histograms of 11, 10 and 10 bits: the first of all numbers, the others only of those that share the digits found so far. The
// pass that makes the second histogram also marks, a bit each, the numbers that may be among the k. What comes after looks only at
// marked numbers, so that in all, numbers are read twice, and once more where they are marked. A launch begins where the one before
// it ended; each of its blocks finds for itself what the histogram of that says, and nothing waits for another block.
//
// A block works on a run of consecutive chunks, so that a sum over the blocks before it is the place where its output begins.

#include "common.cuh"

constexpr int VECTORS = 8;
constexpr int TILE = VECTORS * 128;  // numbers of a warp
constexpr int WARPS = THREADS / 32;
constexpr int CHUNK = WARPS * TILE;  // numbers of a block at a time: 32 a thread, as many as bits in a word
constexpr int BLOCKS = 1024;
constexpr word NAN_KEY = INFINITY_BITS + 1;  // of every NaN
constexpr int BITS_1 = 11, BITS_2 = 10, BITS_3 = 10;

// The scratch memory of a selection; zeros when it begins.
struct Scratch {
    word settled;               // 1: the numbers that reach tau are sent, and there is nothing to select
    word prefix_1, wanted_1;    // the first digit of the k-th largest key, and how many numbers with that digit are among the k
    word prefix_2, wanted_2;    // the first two
    word key, ties;             // all three
    word not_finite;            // of random-k: 1 if any number is not
    word unused[8];
    word histogram_1[1 << BITS_1], histogram_2[1 << BITS_2], histogram_3[1 << BITS_3];
    uint2 counts[BLOCKS];       // a block's numbers above the key, and those that have it
};

struct Selection {
    const float* values;
    float* residual;
    float* momentum;
    float* tau;
    byte* wire;
    Scratch* scratch;
    word* marks;  // one bit per number
    long long numel;
    int k;
    int slack;
    int chunks;   // of a block
    int header;   // bytes of the wire before the indices
    int slots;    // indices, and values, that the wire has room for
    float decay;
    word seed;
    float scale;
};

__device__ __forceinline__ word key_of(float number) { return min(magnitude_bits(number), NAN_KEY); }

// What is selected from, once values, and with MOMENTUM the momentum, have been added to the residual.
template <bool FEEDBACK>
__device__ __forceinline__ const float* sums_of(const Selection& s) {
    return FEEDBACK ? s.residual : s.values;
}

// The sum of the values of the threads before this one, and that of all. `room`: WARPS words of shared memory.
__device__ __forceinline__ word sum_before(word value, word* room, word& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    word sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const word other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();  // what was in the room before has been read
    if (lane == 31) room[warp] = sum;
    __syncthreads();
    word before = sum - value;
    total = 0;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
        if (other < warp) before += room[other];
        total += room[other];
    }
    return before;
}

// The digit of the `wanted`-th largest, and how many with that digit are among the wanted. Numbers whose digit is 0 are not counted.
__device__ __forceinline__ uint2 find(const word* histogram, int digits, word wanted) {
    __shared__ word room[WARPS];
    __shared__ uint2 found;
    const int own = digits / THREADS, highest = digits - 1 - threadIdx.x * own;
    word here = 0, total;
    for (int i = 0; i < own; ++i) here += histogram[highest - i];
    word before = sum_before(here, room, total);
    if (threadIdx.x == 0 && total < wanted) found = make_uint2(0, wanted - total);
    if (before < wanted && before + here >= wanted) {
        int digit = highest;
        while (before + histogram[digit] < wanted) before += histogram[digit--];
        found = make_uint2(digit, wanted - before);
    }
    __syncthreads();
    return found;
}

// Where a block works.
struct Run {
    long long begin, end;  // in chunks
    __device__ __forceinline__ explicit Run(const Selection& s)
        : begin((long long)blockIdx.x * s.chunks), end(min(begin + s.chunks, (s.numel + CHUNK - 1) / CHUNK)) {}
};

// This lane's numbers of its warp's tile in a chunk: at v * 128 + (0..3) from its first.
struct Place {
    long long first;
    long long left;  // numbers from there on
    __device__ __forceinline__ Place(const Selection& s, long long chunk)
        : first(chunk * CHUNK + threadIdx.x / 32 * TILE + threadIdx.x % 32 * 4), left(s.numel - first) {}
    // 16 bytes at a time will do for the whole warp.
    __device__ __forceinline__ bool vectors(const float* buffer) const {
        return left + threadIdx.x % 32 * 4 >= TILE && aligned_to_16(buffer);
    }
    __device__ __forceinline__ void load(const float* buffer, Four* numbers) const {
        if (vectors(buffer)) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load_four(buffer + first + v * 128);
        } else {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) numbers[v] = load_some(buffer + first + v * 128, left - v * 128);
        }
    }
    __device__ __forceinline__ void store(float* buffer, const Four* numbers) const {
        if (vectors(buffer)) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) store_four(buffer + first + v * 128, numbers[v]);
        } else {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) store_some(buffer + first + v * 128, numbers[v], left - v * 128);
        }
    }
};

// Numbers of a lane with at least this key, as a word of marks: that of 32 consecutive numbers, and where it belongs.
__device__ __forceinline__ word marks_of(const Four* numbers, const Place& place, word least) {
    word fields = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        word four = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) four |= (key_of(numbers[v].at[i]) >= least ? 1u : 0u) << i;
        const long long there = place.left - v * 128;
        if (there < 4) four &= (1u << max((int)there, 0)) - 1;
        fields |= four << (4 * v);
    }
    return transpose<4>(fields, threadIdx.x % 32);
}

__device__ __forceinline__ long long marks_at(long long chunk) {
    const int lane = threadIdx.x % 32;
    return chunk * THREADS + threadIdx.x / 32 * 32 + lane % 8 * 4 + lane / 8;
}

// The histogram of a block, in shared memory. Numbers of one digit are spread over two counters, since many have the same.
template <int BITS>
struct Histogram {
    word* counters;
    __device__ __forceinline__ explicit Histogram(word* room) : counters(room) {
        for (int i = threadIdx.x; i < 2 << BITS; i += THREADS) counters[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ void add(word digit) {
        if (digit != 0) atomicAdd(&counters[2 * digit + threadIdx.x % 2], 1u);
    }
    __device__ __forceinline__ void add_to(word* global) {
        __syncthreads();
        for (int i = threadIdx.x; i < 1 << BITS; i += THREADS) {
            const word count = counters[2 * i] + counters[2 * i + 1];
            if (count != 0) atomicAdd(&global[i], count);
        }
    }
};

// The values, or with FEEDBACK the residual, to which they, or with MOMENTUM the momentum with them, are added.
template <bool FEEDBACK, bool MOMENTUM>
__device__ __forceinline__ void load_sums(const Selection& s, const Place& place, Four* numbers) {
    place.load(s.values, numbers);
    if constexpr (MOMENTUM) {
        Four before[VECTORS];
        place.load(s.momentum, before);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[v].at[i] = s.decay * before[v].at[i] + numbers[v].at[i];
        place.store(s.momentum, numbers);
    }
    if constexpr (FEEDBACK) {
        Four before[VECTORS];
        place.load(s.residual, before);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[v].at[i] = before[v].at[i] + numbers[v].at[i];
        place.store(s.residual, numbers);
    }
}

// Step 1 of top-k: sums, and the histogram of their first digits.
template <bool FEEDBACK, bool MOMENTUM>
__global__ void __launch_bounds__(THREADS) accumulate(const __grid_constant__ Selection s) {
    __shared__ word room[2 << BITS_1];
    Histogram<BITS_1> histogram(room);
    const Run run(s);
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        Four numbers[VECTORS];
        load_sums<FEEDBACK, MOMENTUM>(s, Place(s, chunk), numbers);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) histogram.add(key_of(numbers[v].at[i]) >> (BITS_2 + BITS_3));
    }
    histogram.add_to(s.scratch->histogram_1);
}

// Step 1 with a threshold: sums, marks on those that reach it, and how many.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) reach(const __grid_constant__ Selection s) {
    __shared__ word room[WARPS];
    const word least = key_of(*s.tau);
    const Run run(s);
    word count = 0;
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        const Place place(s, chunk);
        Four numbers[VECTORS];
        load_sums<FEEDBACK, false>(s, place, numbers);
        const word marks = marks_of(numbers, place, least);
        s.marks[marks_at(chunk)] = marks;
        count += __popc(marks);
    }
    word total;
    sum_before(count, room, total);
    if (threadIdx.x == 0) s.scratch->counts[blockIdx.x] = make_uint2(total, 0);
}

// Sums of the counts of all blocks before this one, and of all.
__device__ __forceinline__ void counts_before(const Selection& s, uint2& before, uint2& total) {
    __shared__ word room[WARPS];
    word above = 0, ties = 0, all_above = 0, all_ties = 0;
    for (int block = threadIdx.x; block < gridDim.x; block += THREADS) {
        const uint2 count = s.scratch->counts[block];
        all_above += count.x;
        all_ties += count.y;
        if (block < blockIdx.x) {
            above += count.x;
            ties += count.y;
        }
    }
    sum_before(above, room, before.x);
    sum_before(ties, room, before.y);
    sum_before(all_above, room, total.x);
    sum_before(all_ties, room, total.y);
}

// Step 2 with a threshold: if too many or too few have reached it, the histogram of first digits.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) reconsider(const __grid_constant__ Selection s) {
    __shared__ word room[2 << BITS_1];
    uint2 before, total;
    counts_before(s, before, total);
    const bool settled = key_of(*s.tau) > 0 && (int)total.x >= s.k - s.slack && (int)total.x <= s.k + s.slack;
    if (blockIdx.x == 0 && threadIdx.x == 0) s.scratch->settled = settled;
    if (settled) return;
    Histogram<BITS_1> histogram(room);
    const Run run(s);
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        Four numbers[VECTORS];
        Place(s, chunk).load(sums_of<FEEDBACK>(s), numbers);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) histogram.add(key_of(numbers[v].at[i]) >> (BITS_2 + BITS_3));
    }
    histogram.add_to(s.scratch->histogram_1);
}

// The first digit; marks on all numbers that have it or a higher one; the histogram of the second digits of those that have it.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) mark(const __grid_constant__ Selection s) {
    __shared__ word room[2 << BITS_2];
    if (s.scratch->settled) return;
    const uint2 found = find(s.scratch->histogram_1, 1 << BITS_1, s.k);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        s.scratch->prefix_1 = found.x;
        s.scratch->wanted_1 = found.y;
    }
    Histogram<BITS_2> histogram(room);
    const Run run(s);
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        const Place place(s, chunk);
        Four numbers[VECTORS];
        place.load(sums_of<FEEDBACK>(s), numbers);
        s.marks[marks_at(chunk)] = marks_of(numbers, place, found.x << (BITS_2 + BITS_3));
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const word key = key_of(numbers[v].at[i]);
                if (key >> (BITS_2 + BITS_3) == found.x) histogram.add(key >> BITS_3 & ((1 << BITS_2) - 1));
            }
    }
    histogram.add_to(s.scratch->histogram_2);
}

// A thread's word of marks in a chunk, and the number that its first bit stands for.
struct Marked {
    word bits;
    long long first;
    __device__ __forceinline__ Marked(const Selection& s, long long chunk)
        : bits(s.marks[chunk * THREADS + threadIdx.x]), first((chunk * THREADS + threadIdx.x) * 32) {}
};

// The second digit; the histogram of the third of those that have both.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) refine(const __grid_constant__ Selection s) {
    __shared__ word room[2 << BITS_3];
    if (s.scratch->settled) return;
    const uint2 found = find(s.scratch->histogram_2, 1 << BITS_2, s.scratch->wanted_1);
    const word prefix = s.scratch->prefix_1 << BITS_2 | found.x;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        s.scratch->prefix_2 = prefix;
        s.scratch->wanted_2 = found.y;
    }
    Histogram<BITS_3> histogram(room);
    const float* sums = sums_of<FEEDBACK>(s);
    const Run run(s);
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        const Marked marked(s, chunk);
        for (word rest = marked.bits; rest != 0; rest &= rest - 1) {
            const word key = key_of(sums[marked.first + __ffs(rest) - 1]);
            if (key >> BITS_3 == prefix) histogram.add(key & ((1 << BITS_3) - 1));
        }
    }
    histogram.add_to(s.scratch->histogram_3);
}

// The whole key; how many numbers of each block are above it, and how many have it. Marks stay on these, and on what is not finite.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) count(const __grid_constant__ Selection s) {
    __shared__ word room[WARPS];
    if (s.scratch->settled) return;
    const uint2 found = find(s.scratch->histogram_3, 1 << BITS_3, s.scratch->wanted_2);
    const word least = s.scratch->prefix_2 << BITS_3 | found.x;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        s.scratch->key = least;
        s.scratch->ties = found.y;
    }
    const float* sums = sums_of<FEEDBACK>(s);
    const Run run(s);
    word above = 0, ties = 0;
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        const Marked marked(s, chunk);
        word kept = marked.bits;
        for (word rest = marked.bits; rest != 0; rest &= rest - 1) {
            const word key = key_of(sums[marked.first + __ffs(rest) - 1]);
            above += key > least;
            ties += key == least;
            if (key < min(least, INFINITY_BITS)) kept &= ~(rest & -rest);
        }
        s.marks[chunk * THREADS + threadIdx.x] = kept;
    }
    uint2 total;
    sum_before(above, room, total.x);
    sum_before(ties, room, total.y);
    if (threadIdx.x == 0) s.scratch->counts[blockIdx.x] = total;
}

// Write indices and values in the order of the indices; of those that have the key, the first `ties`.
template <bool FEEDBACK, bool MOMENTUM>
__global__ void __launch_bounds__(THREADS) emit(const __grid_constant__ Selection s) {
    __shared__ word room[WARPS];
    const bool settled = s.scratch->settled;
    const word least = settled ? 0 : s.scratch->key, taken = settled ? 0 : s.scratch->ties;
    const float* sums = sums_of<FEEDBACK>(s);
    int* indices = reinterpret_cast<int*>(s.wire + s.header);
    word* values = reinterpret_cast<word*>(indices + s.slots);
    uint2 before, total;
    counts_before(s, before, total);
    // Most blocks have no ties: what is marked is above.
    const bool alike = s.scratch->counts[blockIdx.x].y == 0 && least <= INFINITY_BITS;
    const Run run(s);
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        const Marked marked(s, chunk);
        word above = alike ? marked.bits : 0, ties = 0;
        if (!alike)
            for (word rest = marked.bits; rest != 0; rest &= rest - 1) {
                const word bit = rest & -rest, key = key_of(sums[marked.first + __ffs(rest) - 1]);
                if (key > least) above |= bit;
                if (key == least) ties |= bit;
            }
        word in_chunk;  // 16 bits for each of both counts
        const word of_others = sum_before(__popc(above) | __popc(ties) << 16, room, in_chunk);
        for (word rest = marked.bits; rest != 0; rest &= rest - 1) {
            const word bit = rest & -rest, below = bit - 1;
            const long long index = marked.first + __ffs(rest) - 1;
            const word key = key_of(sums[index]);
            const word tied = before.y + (of_others >> 16) + __popc(ties & below);
            const bool sent = (above & bit) || ((ties & bit) && tied < taken);
            if (sent) {
                const word at = before.x + (of_others & 0xFFFF) + __popc(above & below) + min(tied, taken);
                indices[at] = (int)index;
                values[at] = key == NAN_KEY ? NAN_BITS : __float_as_uint(sums[index]);
            }
            // Numbers that are not finite, and not sent for want of room, would come back in every later sum.
            if (FEEDBACK && (sent || key >= INFINITY_BITS)) {
                s.residual[index] = 0.0f;
                if constexpr (MOMENTUM) s.momentum[index] = 0.0f;
            }
        }
        before.x += in_chunk & 0xFFFF;
        before.y += in_chunk >> 16;
    }

    const int written = settled ? total.x : s.k;
    for (int at = written + blockIdx.x * THREADS + threadIdx.x; at < s.slots; at += gridDim.x * THREADS) {
        indices[at] = 0;
        values[at] = 0;
    }
    if (blockIdx.x == 0 && threadIdx.x < s.header / 4) reinterpret_cast<int*>(s.wire)[threadIdx.x] = threadIdx.x == 0 ? written : 0;
    if (s.tau && blockIdx.x == 0 && threadIdx.x == 0) {
        if (settled)
            *s.tau = *s.tau * (1.0f + (float)(written - s.k) / (float)(8LL * s.k));
        else
            *s.tau = least < INFINITY_BITS ? __uint_as_float(least) : 0.0f;
    }
}

// residual = (ADD: residual, else 0) + values * scale at their indices. Indices outside are passed over.
template <bool ADD>
__global__ void __launch_bounds__(THREADS) scatter(const __grid_constant__ Selection s) {
    const int* indices = reinterpret_cast<const int*>(s.wire + s.header);
    const float* values = reinterpret_cast<const float*>(indices + s.slots);
    const int sent = s.header ? *reinterpret_cast<const int*>(s.wire) : s.k;
    const int at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= min(sent, s.slots)) return;
    const int index = indices[at];
    if (index < 0 || index >= s.numel) return;
    const float number = values[at] * s.scale;
    s.residual[index] = (ADD ? s.residual[index] : 0.0f) + number;
}

// The index that random-k takes from the j-th of k parts of a ring of n, which begins anywhere.
__device__ __forceinline__ long long drawn(const Selection& s, int j) {
    const long long n = s.numel, begin = j * n / s.k, end = (j + 1) * n / s.k;
    const long long first = (long long)((address)random_bits(s.k, s.seed) * n >> 32);
    const long long index = first + begin + (long long)((address)random_bits(j, s.seed) * (end - begin) >> 32);
    return index < n ? index : index - n;
}

// Step 1 of random-k: sums, and whether all are finite.
template <bool FEEDBACK>
__global__ void __launch_bounds__(THREADS) examine(const __grid_constant__ Selection s) {
    const Run run(s);
    word most = 0;
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        Four numbers[VECTORS];
        load_sums<FEEDBACK, false>(s, Place(s, chunk), numbers);
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

template <bool ADD>
__global__ void __launch_bounds__(THREADS) place(const __grid_constant__ Selection s) {
    const float* values = reinterpret_cast<const float*>(s.wire);
    const int j = blockIdx.x * THREADS + threadIdx.x;
    if (j >= s.k) return;
    const long long index = drawn(s, j);
    const float number = values[j] * s.scale;
    s.residual[index] = (ADD ? s.residual[index] : 0.0f) + number;
}
