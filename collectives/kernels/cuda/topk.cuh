// The largest of n numbers as indices and values, exactly, and back.
//
// Magnitudes are compared as the integers that their bits are ("keys"). Exact selection finds the k-th largest key digit by digit,
// from histograms of 11, 10 and 10 bits: the first of all numbers, the others only of those that share the digits found so far. The
// pass that makes the second histogram also marks, a bit each, the numbers that may be among the k. What comes after looks only at
// marked numbers, so that in all, numbers are read twice, and once more where they are marked. A launch begins where the one before
// it ended; each of its blocks finds for itself what the histogram of that says, and nothing waits for another block.

// Step 1 of top-k: sums, and the histogram of their first digits.
template <bool FEEDBACK, bool MOMENTUM, class Number>
__global__ void __launch_bounds__(THREADS) accumulate(const __grid_constant__ Selection s) {
    __shared__ word room[2 << BITS_1];
    Histogram<BITS_1> histogram(room);
    const Run run(s);
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        Four numbers[VECTORS];
        load_sums<FEEDBACK, MOMENTUM, Number>(s, Place(s, chunk), numbers);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) histogram.add(key_of(numbers[v].at[i]) >> (BITS_2 + BITS_3));
    }
    histogram.add_to(s.scratch->histogram_1);
}

// Step 1 with a threshold: sums, marks on those that reach it, and how many.
template <bool FEEDBACK, class Number>
__global__ void __launch_bounds__(THREADS) reach(const __grid_constant__ Selection s) {
    __shared__ word room[WARPS];
    const word least = key_of(*s.tau);
    const Run run(s);
    word count = 0;
    for (long long chunk = run.begin; chunk < run.end; ++chunk) {
        const Place place(s, chunk);
        Four numbers[VECTORS];
        load_sums<FEEDBACK, false, Number>(s, place, numbers);
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

// out = (ADD: out, else 0) + values * scale at their indices. Indices outside are passed over.
template <bool ADD, class Number>
__global__ void __launch_bounds__(THREADS) scatter(const __grid_constant__ Selection s) {
    const int* indices = reinterpret_cast<const int*>(s.wire + s.header);
    const float* values = reinterpret_cast<const float*>(indices + s.slots);
    const int sent = s.header ? *reinterpret_cast<const int*>(s.wire) : s.k;
    const int at = blockIdx.x * THREADS + threadIdx.x;
    if (at >= min(sent, s.slots)) return;
    const int index = indices[at];
    if (index < 0 || index >= s.numel) return;
    const float number = values[at] * s.scale;
    Number* to = static_cast<Number*>(s.values) + index;
    store(to, (ADD ? widened(*to) : 0.0f) + number);
}
