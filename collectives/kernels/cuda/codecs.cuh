// The dense codecs: how a block of elements, and a single one, becomes codes.

// How the elements of a block become codes.
struct Scaling {
    float scale;    // what a code is multiplied by
    float inverse;  // what an element is multiplied by
    bool broken;    // not finite: the codes are 0, the scale is NaN, and nothing is left in the residual
};

[[maybe_unused]] constexpr word SMALLEST = (127 - 100) << 23;  // of the largest magnitude of a block, as bits: below it is taken for 0
[[maybe_unused]] constexpr word LARGEST = (127 + 127) << 23;   // from here on the block is not finite

// SCALE_BYTES is 0 for codecs without blocks.
template <int BLOCK_, int BITS_, int SCALE_BYTES_>
struct Layout {
    static constexpr int BLOCK = BLOCK_, BITS = BITS_, SCALE_BYTES = SCALE_BYTES_;
    static constexpr int VECTORS = BITS == 1 || BLOCK > 512 ? 8 : 4;
    static constexpr int TILE = VECTORS * 128;
    static constexpr int LANES = BLOCK < 128 ? BLOCK / 4 : 32;  // that share a block
    static constexpr int SPAN = BLOCK < 128 ? 1 : BLOCK / 128;  // vectors of a block
};

// The blocks of one vector, or those that some vectors make up: each of these functions gives the same to all lanes of a block.
template <class Codec>
__device__ __forceinline__ word largest_magnitude(const Four* block) {
    word most = 0;
#pragma unroll
    for (int v = 0; v < Codec::SPAN; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) most = max(most, magnitude_bits(block[v].at[i]));
    if constexpr (Codec::LANES == 32) {
        most = __reduce_max_sync(ALL_LANES, most);
    } else {
#pragma unroll
        for (int half = Codec::LANES / 2; half > 0; half /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, half));
    }
    return most;
}

// Of four partial sums a lane. Both lanes of a pair find the same, since addition commutes: the reference's order in each of them.
template <class Codec>
__device__ __forceinline__ float total(const Four& partial) {
    float sum = (partial.at[0] + partial.at[1]) + (partial.at[2] + partial.at[3]);
#pragma unroll
    for (int half = Codec::LANES / 2; half > 0; half /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, half);
    return sum;
}

template <class Codec>
__device__ __forceinline__ float sum_of_magnitudes(const Four* block) {
    Four sums = {};
#pragma unroll
    for (int v = 0; v < Codec::SPAN; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.at[i] += fabsf(block[v].at[i]);
    return total<Codec>(sums);
}

template <class Codec>
__device__ __forceinline__ float sum_of_squares(const Four* block, float factor) {
    Four sums = {};
#pragma unroll
    for (int v = 0; v < Codec::SPAN; ++v)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float number = block[v].at[i] * factor;
            sums.at[i] += number * number;
        }
    return total<Codec>(sums);
}

// Of a block whose largest magnitude has these bits: `limit` is the code of that.
__device__ __forceinline__ Scaling scaling_to(float limit, word most) {
    const float maximum = __uint_as_float(most);
    if (most < SMALLEST || most >= LARGEST) return {0.0f, 0.0f, most >= LARGEST};
    return {maximum / limit, limit / maximum, false};
}

// Stochastic rounding to one of the two integers beside a number.
__device__ __forceinline__ float round_randomly(float number, word index, word seed) {
    const float below = floorf(number);
    return below + (uniform(index, seed) < number - below ? 1.0f : 0.0f);
}

__device__ __forceinline__ float clamp(float number, float limit) { return fminf(fmaxf(number, -limit), limit); }

__device__ __forceinline__ float signed_code(word code, int bits) { return (float)((int)(code << (32 - bits)) >> (32 - bits)); }

struct Float32Scale {
    static __device__ float load(const byte* scales, long long block) { return reinterpret_cast<const float*>(scales)[block]; }
    static __device__ void store(byte* scales, long long block, float scale, bool broken) {
        reinterpret_cast<word*>(scales)[block] = broken ? NAN_BITS : __float_as_uint(scale);
    }
};

struct Bfloat16Scale {
    static __device__ float load(const byte* scales, long long block) {
        return __uint_as_float((word) reinterpret_cast<const half_word*>(scales)[block] << 16);
    }
    static __device__ void store(byte* scales, long long block, float scale, bool broken) {
        reinterpret_cast<half_word*>(scales)[block] = (half_word)((broken ? NAN_BITS : __float_as_uint(scale)) >> 16);
    }
};

template <int BLOCK, bool STOCHASTIC>
struct Int8 : Layout<BLOCK, 8, 4>, Float32Scale {
    static __device__ Scaling scaling(const Four* block, int) { return scaling_to(127.0f, largest_magnitude<Int8>(block)); }
    static __device__ word encode(float number, const Scaling& s, word index, word seed) {
        // To nearest, no product is rounded to 128: it exceeds 127 by less than two units in the last place.
        const float product = number * s.inverse;
        return (word)(STOCHASTIC ? (int)clamp(round_randomly(product, index, seed), 127.0f) : __float2int_rn(product));
    }
    static __device__ float decode(word code, float scale) { return signed_code(code, 8) * scale; }
};

template <int BLOCK, bool STOCHASTIC>
struct Int4 : Layout<BLOCK, 4, 2>, Bfloat16Scale {
    static __device__ Scaling scaling(const Four* block, int) {
        Scaling s = scaling_to(7.0f, largest_magnitude<Int4>(block));
        s.scale = __uint_as_float((__float_as_uint(s.scale) + 0xFFFF) & 0xFFFF0000u);  // the bfloat16 above
        s.inverse = s.scale > 0.0f ? 1.0f / s.scale : 0.0f;
        return s;
    }
    static __device__ word encode(float number, const Scaling& s, word index, word seed) {
        const float product = number * s.inverse;  // 7 at most, but for two units in the last place
        return (word)(STOCHASTIC ? (int)clamp(round_randomly(product, index, seed), 7.0f) : __float2int_rn(product));
    }
    static __device__ float decode(word code, float scale) { return signed_code(code, 4) * scale; }
};

// FRACTION bits of mantissa: e4m3 (3) or e5m2 (2).
template <int BLOCK, int FRACTION>
struct Fp8 : Layout<BLOCK, 8, 4>, Float32Scale {
    static constexpr float LIMIT = FRACTION == 3 ? 448.0f : 57344.0f;
    static constexpr int BIAS = FRACTION == 3 ? 7 : 15;
    static __device__ Scaling scaling(const Four* block, int) { return scaling_to(LIMIT, largest_magnitude<Fp8>(block)); }
    static __device__ word encode(float number, const Scaling& s, word, word) {
        const float product = number * s.inverse;
#if __CUDA_ARCH__ >= 890
        half_word code;
        if constexpr (FRACTION == 3)
            asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.0f), "f"(product));
        else
            asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.0f), "f"(product));
        return code;
#else
        constexpr int DROPPED = 23 - FRACTION;
        constexpr int LEAST = 1 - BIAS;  // exponent of a normal number
        // Added to a subnormal number, rounds it, and leaves its code in the lowest bits.
        constexpr word ROUNDING = (word)(127 + LEAST - FRACTION + 23) << 23;
        const float size = fminf(fabsf(product), LIMIT);
        const word bits = __float_as_uint(size);
        const word normal = ((bits + (1u << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << FRACTION);
        const word subnormal = __float_as_uint(size + __uint_as_float(ROUNDING)) - ROUNDING;
        const word code = bits < ((word)(127 + LEAST) << 23) ? subnormal : normal;
        return code | ((__float_as_uint(product) >> 24) & 0x80);
#endif
    }
    static __device__ float decode(word code, float scale) {
        // The bits, moved to where float32 has them, are the number but for the bias of the exponent: subnormals too.
        const word bits = ((code & 0x80) << 24) | ((code & 0x7F) << (23 - FRACTION));
        return __uint_as_float(bits) * __uint_as_float((word)(254 - BIAS) << 23) * scale;
    }
};

template <int BLOCK>
struct OneBit : Layout<BLOCK, 1, 4>, Float32Scale {
    static __device__ Scaling scaling(const Four* block, int count) {
        const float sum = sum_of_magnitudes<OneBit>(block);
        if (magnitude_bits(sum) >= INFINITY_BITS) return {0.0f, 0.0f, true};
        return {sum / (float)count, 0.0f, false};
    }
    static __device__ word encode(float number, const Scaling&, word, word) { return number >= 0.0f ? 1 : 0; }
    static __device__ float decode(word code, float scale) { return code & 1 ? scale : -scale; }
};

template <int BLOCK, int LEVELS>
struct Qsgd : Layout<BLOCK, 4, 4>, Float32Scale {
    static __device__ Scaling scaling(const Four* block, int) {
        // Squares of what is left after a division by a power of two, which neither overflow nor vanish.
        const word most = largest_magnitude<Qsgd>(block);
        const bool usual = most >= SMALLEST && most < LARGEST;
        const float power = usual ? __uint_as_float(most & INFINITY_BITS) : 1.0f;
        const float norm = sqrtf(sum_of_squares<Qsgd>(block, 1.0f / power)) * power;
        if (!usual || __float_as_uint(norm) >= LARGEST) return {0.0f, 0.0f, most >= SMALLEST};
        return {norm / (float)LEVELS, (float)LEVELS / norm, false};
    }
    static __device__ word encode(float number, const Scaling& s, word index, word seed) {
        const int level = (int)fminf(round_randomly(fabsf(number) * s.inverse, index, seed), (float)LEVELS);
        return (word)(number < 0.0f ? -level : level);
    }
    static __device__ float decode(word code, float scale) { return signed_code(code, 4) * scale; }
};

template <int BLOCK>
struct TernGrad : Layout<BLOCK, 2, 4>, Float32Scale {
    static __device__ Scaling scaling(const Four* block, int) {
        return scaling_to(1.0f, largest_magnitude<TernGrad>(block));
    }
    static __device__ word encode(float number, const Scaling& s, word index, word seed) {
        return uniform(index, seed) < fabsf(number) * s.inverse ? (number < 0.0f ? 3 : 1) : 0;
    }
    static __device__ float decode(word code, float scale) { return signed_code(code, 2) * scale; }
};

// Codecs without blocks. What decodes to a NaN or Inf leaves nothing in the residual.

struct NoScale {
    static __device__ Scaling scaling(const Four*, int) { return {1.0f, 1.0f, false}; }
    static __device__ float load(const byte*, long long) { return 1.0f; }
    static __device__ void store(byte*, long long, float, bool) {}
};

struct Natural : Layout<512, 8, 0>, NoScale {
    static constexpr int LEAST = -76, NOT_FINITE = 127;  // code 1 stands for 2^LEAST
    static __device__ word encode(float number, const Scaling&, word index, word seed) {
        const word bits = magnitude_bits(number);
        // A carry out of the mantissa rounds up.
        const int code = (int)((bits + (random_bits(index, seed) >> 9)) >> 23) - 127 - LEAST + 1;
        if (bits >= INFINITY_BITS) return NOT_FINITE;
        return (word)min(max(code, 0), NOT_FINITE - 1) | ((__float_as_uint(number) >> 24) & 0x80);
    }
    static __device__ float decode(word code, float) {
        const word exponent = code & 0x7F;
        const word bits = exponent == 0 ? 0 : exponent == NOT_FINITE ? NAN_BITS : (exponent + (word)(127 + LEAST - 1)) << 23;
        return __uint_as_float(bits | ((code & 0x80) << 24));
    }
};

struct Fp16 : Layout<512, 16, 0>, NoScale {
    static __device__ word encode(float number, const Scaling&, word, word) {
        half_word code;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(number));
        return magnitude_bits(number) > INFINITY_BITS ? 0x7E00 : code;
    }
    static __device__ float decode(word code, float) {
        float number;
        asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((half_word)code));
        return number;
    }
};

struct Bf16 : Layout<512, 16, 0>, NoScale {
    static __device__ word encode(float number, const Scaling&, word, word) {
        const word bits = __float_as_uint(number);
        const word code = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
        return magnitude_bits(number) > INFINITY_BITS ? 0x7FC0 : code;
    }
    static __device__ float decode(word code, float) { return __uint_as_float(code << 16); }
};
