// The dense quantizers: numbers to blocks of small codes with a scale each, and back. What the bytes mean: reference/quantize.py.
//
// A warp works on a tile of VECTORS * 128 elements. Lane l holds the elements v * 128 + 4 l + (0..3), v < VECTORS, in registers:
// each of its loads is of four numbers, and all are under way before the first is used. So memory is read once and written once. A block
// is BLOCK consecutive elements: some vectors of all lanes or, if it is shorter than 128, one vector of some lanes.

#include "common.cuh"
#include "codecs.cuh"

struct Arguments {
    void* values;  // what is encoded, or what becomes of the code
    float* residual;
    byte* wire;
    long long numel;
    word seed;
    float scale;  // the factor of every decoded number
};

// How the codes of a tile lie in its lanes' words, and where in memory. `packed`: per vector, 4 codes, the first in the lowest bits.
// Nothing behind `bytes` is touched.
template <class Codec>
struct Codes {
    static constexpr int BITS = Codec::BITS, VECTORS = Codec::VECTORS;
    static constexpr int FIELDS = BITS < 4 ? 8 / BITS : 1;  // vectors whose codes share a word
    static constexpr long long BYTES = Codec::TILE * BITS / 8;
    typedef typename Choose<BITS == 16, address, word>::type Packed;
    typedef typename Choose<BITS == 16, address, typename Choose<BITS == 4, half_word, word>::type>::type Stored;

    // Fields of FIELDS vectors are exchanged among as many lanes, so that each has 4 consecutive bytes of one vector.
    static __device__ __forceinline__ long long place(long long begin, int v, int lane) {
        return begin + (v + lane % FIELDS) * (16 * BITS) + lane / FIELDS * (int)sizeof(Stored);
    }
    static __device__ __forceinline__ void store(byte* codes, long long bytes, word tile, int lane, const Packed* packed) {
#pragma unroll
        for (int v = 0; v < VECTORS; v += FIELDS) {
            Packed fields = packed[v];
            if constexpr (FIELDS > 1) {
#pragma unroll
                for (int f = 1; f < FIELDS; ++f) fields |= packed[v + f] << (4 * BITS * f);
                fields = transpose<4 * BITS>(fields, lane);
            }
            const long long at = place(tile * BYTES, v, lane);
            if (at < bytes) *reinterpret_cast<Stored*>(codes + at) = (Stored)fields;
        }
    }
    static __device__ __forceinline__ void load(const byte* codes, long long bytes, word tile, int lane, Packed* packed) {
#pragma unroll
        for (int v = 0; v < VECTORS; v += FIELDS) {
            const long long at = place(tile * BYTES, v, lane);
            packed[v] = at < bytes ? *reinterpret_cast<const Stored*>(codes + at) : 0;
        }
        if constexpr (FIELDS > 1) {
#pragma unroll
            for (int v = 0; v < VECTORS; v += FIELDS) {
                const word fields = transpose<4 * BITS>(packed[v], lane);
#pragma unroll
                for (int f = 0; f < FIELDS; ++f) packed[v + f] = fields >> (4 * BITS * f);
            }
        }
    }
};

// Where a warp is.
template <class Codec>
struct Tile {
    const Arguments& arguments;
    word number;  // of the tile in the tensor
    int lane;
    long long begin;  // its first element
    long long left;   // elements from there on
    long long code_bytes, blocks;

    explicit __device__ __forceinline__ Tile(const Arguments& arguments)
        : arguments(arguments),
          number(blockIdx.x * (THREADS / 32) + threadIdx.x / 32),
          lane(threadIdx.x % 32),
          begin((long long)number * Codec::TILE),
          left(arguments.numel - begin),
          code_bytes(padded((arguments.numel * Codec::BITS + 7) / 8)),
          blocks((arguments.numel + Codec::BLOCK - 1) / Codec::BLOCK) {}

    __device__ __forceinline__ long long block(int v) const {
        return (long long)number * (Codec::TILE / Codec::BLOCK) + v * 128 / Codec::BLOCK + lane / Codec::LANES;
    }
    __device__ __forceinline__ byte* scales() const { return arguments.wire + code_bytes; }
    __device__ __forceinline__ long long left_of(int v) const { return left - v * 128 - lane * 4; }
    // The tile's part of a buffer, from this lane's first element on.
    template <class Number>
    __device__ __forceinline__ Number* at(Number* buffer) const {
        return buffer + begin + lane * 4;
    }
    __device__ __forceinline__ bool whole() const { return left >= Codec::TILE; }
};

template <class Codec, bool FEEDBACK, class Number>
__global__ void __launch_bounds__(THREADS) encode(const __grid_constant__ Arguments arguments) {
    constexpr int VECTORS = Codec::VECTORS, BITS = Codec::BITS;
    const Tile<Codec> tile(arguments);
    if (tile.left <= 0) return;
    const Number* values = tile.at(static_cast<const Number*>(arguments.values));
    float* residual = FEEDBACK ? tile.at(arguments.residual) : nullptr;
    const bool vectors = tile.whole() && aligned(values) && aligned(residual);

    Four numbers[VECTORS], lost[VECTORS];
    if (vectors) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            numbers[v] = load_four(values + v * 128);
            if constexpr (FEEDBACK) lost[v] = load_four(residual + v * 128);
        }
    } else {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            numbers[v] = load_some(values + v * 128, tile.left_of(v));
            if constexpr (FEEDBACK) lost[v] = load_some(residual + v * 128, tile.left_of(v));
        }
    }
    if constexpr (FEEDBACK) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
#pragma unroll
            for (int i = 0; i < 4; ++i) numbers[v].at[i] += lost[v].at[i];
    }

    typename Codes<Codec>::Packed packed[VECTORS];
#pragma unroll
    for (int first = 0; first < VECTORS; first += Codec::SPAN) {
        const long long block = tile.block(first);
        const int count = (int)min((long long)Codec::BLOCK, arguments.numel - block * Codec::BLOCK);
        const Scaling scaling = Codec::scaling(numbers + first, count);
        if (tile.lane % Codec::LANES == 0 && block < tile.blocks) Codec::store(tile.scales(), block, scaling.scale, scaling.broken);
#pragma unroll
        for (int v = first; v < first + Codec::SPAN; ++v) {
            packed[v] = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const word index = (word)tile.begin + v * 128 + tile.lane * 4 + i;
                const word code = Codec::encode(numbers[v].at[i], scaling, index, arguments.seed) & ((1u << BITS) - 1);
                packed[v] |= (typename Codes<Codec>::Packed)code << (i * BITS);
                if constexpr (FEEDBACK) {
                    const float decoded = Codec::decode(code, scaling.scale);
                    const bool gone = Codec::SCALE_BYTES > 0 ? scaling.broken : magnitude_bits(decoded) >= INFINITY_BITS;
                    numbers[v].at[i] = gone ? 0.0f : numbers[v].at[i] - decoded;
                }
            }
            if (scaling.broken) packed[v] = 0;
            if constexpr (BITS == 1)  // an element that is not there would be taken for a positive one
                packed[v] &= (1u << min(max(tile.left_of(v), 0LL), 4LL)) - 1;
        }
    }
    Codes<Codec>::store(arguments.wire, tile.code_bytes, tile.number, tile.lane, packed);
    if (tile.left <= Codec::TILE) {
        const long long at = tile.blocks * Codec::SCALE_BYTES + tile.lane;
        if (at < padded(tile.blocks * Codec::SCALE_BYTES)) tile.scales()[at] = 0;
    }

    if constexpr (FEEDBACK) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            if (vectors)
                store_four(residual + v * 128, numbers[v]);
            else
                store_some(residual + v * 128, numbers[v], tile.left_of(v));
    }
}

template <class Codec, bool ADD, class Number>
__global__ void __launch_bounds__(THREADS) decode(const __grid_constant__ Arguments arguments) {
    constexpr int VECTORS = Codec::VECTORS, BITS = Codec::BITS;
    const Tile<Codec> tile(arguments);
    if (tile.left <= 0) return;
    Number* out = tile.at(static_cast<Number*>(arguments.values));
    const bool vectors = tile.whole() && aligned(out);

    typename Codes<Codec>::Packed packed[VECTORS];
    float scale[VECTORS];
    Four before[VECTORS];
    Codes<Codec>::load(arguments.wire, tile.code_bytes, tile.number, tile.lane, packed);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        scale[v] = tile.block(v) < tile.blocks ? Codec::load(tile.scales(), tile.block(v)) : 0.0f;
        if constexpr (ADD) before[v] = vectors ? load_four(out + v * 128) : load_some(out + v * 128, tile.left_of(v));
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Four numbers;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const word code = (word)(packed[v] >> (i * BITS)) & ((1u << BITS) - 1);
            const float number = Codec::decode(code, scale[v]) * arguments.scale;
            numbers.at[i] = ADD ? before[v].at[i] + number : number;
        }
        if (vectors)
            store_four(out + v * 128, numbers);
        else
            store_some(out + v * 128, numbers, tile.left_of(v));
    }
}
