// What the sparse codecs share: the sums that they draw from, where a block works on these, and their histograms.
//
// A block works on a run of consecutive chunks, so that a sum over the blocks before it is the place where its output begins.

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
    void* values;  // what is encoded, or what becomes of the code
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

// What is selected from, once values, and with MOMENTUM the momentum, have been added to the residual. Without a residual, values
// are float.
template <bool FEEDBACK>
__device__ __forceinline__ const float* sums_of(const Selection& s) {
    return FEEDBACK ? s.residual : static_cast<const float*>(s.values);
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
    // Four numbers at a time will do for the whole warp.
    template <class Number>
    __device__ __forceinline__ bool vectors(const Number* buffer) const {
        return left + threadIdx.x % 32 * 4 >= TILE && aligned(buffer);
    }
    template <class Number>
    __device__ __forceinline__ void load(const Number* buffer, Four* numbers) const {
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
template <bool FEEDBACK, bool MOMENTUM, class Number>
__device__ __forceinline__ void load_sums(const Selection& s, const Place& place, Four* numbers) {
    place.load(static_cast<const Number*>(s.values), numbers);
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
