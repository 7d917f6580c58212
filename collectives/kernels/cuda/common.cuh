// What the kernels share. Compiled by NVRTC without any header, for sm_80 and later, without fused multiply-add and with denormals.

typedef unsigned char byte;
typedef unsigned short half_word;
typedef unsigned int word;
typedef unsigned long long address;

[[maybe_unused]] constexpr word ALL_LANES = 0xFFFFFFFFu;
[[maybe_unused]] constexpr word NAN_BITS = 0x7FC00000u;
[[maybe_unused]] constexpr word INFINITY_BITS = 0x7F800000u;
[[maybe_unused]] constexpr int THREADS = 256;  // of every block

__device__ __forceinline__ word magnitude_bits(float number) { return __float_as_uint(number) & 0x7FFFFFFFu; }

// A random number of 32 bits for a position (lowbias32, C. Wellons 2018). The host gives the same for the same seed.
__device__ __forceinline__ word random_bits(word index, word seed) {
    word x = index * 0x9E3779B9u + seed;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ float uniform(word index, word seed) {
    return (float)(random_bits(index, seed) >> 8) * (1.0f / 16777216.0f);
}

template <class First, class Second>
struct IsSame {
    static constexpr bool VALUE = false;
};
template <class Same>
struct IsSame<Same, Same> {
    static constexpr bool VALUE = true;
};

template <bool CONDITION, class First, class Second>
struct Choose {
    typedef First type;
};
template <class First, class Second>
struct Choose<false, First, Second> {
    typedef Second type;
};

// Numbers in memory are float, Float16 or Bfloat16: the template parameter Number. All arithmetic is of float.

struct Float16 {
    half_word bits;
};
struct Bfloat16 {
    half_word bits;
};

__device__ __forceinline__ float widened(float number) { return number; }

__device__ __forceinline__ float widened(Float16 number) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number.bits));
    return wide;
}

__device__ __forceinline__ float widened(Bfloat16 number) { return __uint_as_float((word)number.bits << 16); }

// Two numbers in a word, each rounded to nearest even.
template <class Number>
__device__ __forceinline__ word narrowed(float low, float high) {
    word both;
    if constexpr (IsSame<Number, Float16>::VALUE)
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ void store(float* to, float number) { *to = number; }

template <class Number>
__device__ __forceinline__ void store(Number* to, float number) {
    to->bits = (half_word)narrowed<Number>(number, 0.0f);
}

struct Four {
    float at[4];
};

// Whether load_four() and store_four() can be used.
template <class Number>
__device__ __forceinline__ bool aligned(const Number* pointer) {
    return ((address)pointer & (4 * sizeof(Number) - 1)) == 0;
}

// Four numbers, of which `left` are there; the others are 0.
template <class Number>
__device__ __forceinline__ Four load_some(const Number* from, long long left) {
    Four numbers;
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers.at[i] = i < left ? widened(from[i]) : 0.0f;
    return numbers;
}

template <class Number>
__device__ __forceinline__ void store_some(Number* to, const Four& numbers, long long left) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < left) store(to + i, numbers.at[i]);
}

__device__ __forceinline__ Four load_four(const float* from) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    return {v.x, v.y, v.z, v.w};
}

template <class Number>
__device__ __forceinline__ Four load_four(const Number* from) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    const half_word bits[4] = {(half_word)v.x, (half_word)(v.x >> 16), (half_word)v.y, (half_word)(v.y >> 16)};
    return {widened(Number{bits[0]}), widened(Number{bits[1]}), widened(Number{bits[2]}), widened(Number{bits[3]})};
}

__device__ __forceinline__ void store_four(float* to, const Four& numbers) {
    *reinterpret_cast<float4*>(to) = make_float4(numbers.at[0], numbers.at[1], numbers.at[2], numbers.at[3]);
}

template <class Number>
__device__ __forceinline__ void store_four(Number* to, const Four& numbers) {
    const float* at = numbers.at;
    *reinterpret_cast<uint2*>(to) = make_uint2(narrowed<Number>(at[0], at[1]), narrowed<Number>(at[2], at[3]));
}

// Among 32 / FIELD neighbouring lanes, field f of lane l, of FIELD bits, becomes field l of lane f.
template <int FIELD>
__device__ __forceinline__ word transpose(word fields, int lane) {
#pragma unroll
    for (int half = 16; half >= FIELD; half /= 2) {
        const word low = half == 16 ? 0x0000FFFFu : half == 8 ? 0x00FF00FFu : 0x0F0F0F0Fu;
        const word other = __shfl_xor_sync(ALL_LANES, fields, half / FIELD);
        fields = lane & (half / FIELD) ? (fields & ~low) | ((other & ~low) >> half) : (fields & low) | ((other & low) << half);
    }
    return fields;
}

__device__ __forceinline__ long long padded(long long bytes) { return (bytes + 15) & ~15LL; }
