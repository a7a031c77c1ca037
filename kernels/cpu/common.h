/* Vectors of LANES floats, conversions between storage types and float32, exponentials.
 *
 * Everything here is lane-wise with a fixed sequence of operations, so a value's bits never depend on its neighbours.
 * Portable vector extensions as wide as the CPU's registers; intrinsics appear only where GCC has no good code for a
 * conversion, with equal bits.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")
#define VECTOR(bytes) __attribute__((vector_size(bytes)))

enum form { PLAIN, E4M3, E5M2 }; /* of stored KV: the type of the activations, float8_e4m3fn with scales, float8_e5m2 */

typedef float vf VECTOR(4 * LANES);
typedef int32_t vi VECTOR(4 * LANES);
typedef uint32_t vu VECTOR(4 * LANES);
typedef uint16_t vs VECTOR(2 * LANES);
typedef uint16_t vp VECTOR(4 * LANES);
typedef _Float16 vh VECTOR(2 * LANES);

typedef uint8_t vb VECTOR(LANES);

typedef uint16_t bf16;
typedef _Float16 fp16;
typedef float fp32;

INLINE vf splat(float x) { return x - (vf){}; }
INLINE vu splat_u32(uint32_t x) { return x + (vu){}; }
INLINE vi lane_numbers(void) {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi x;
    memcpy(&x, numbers, sizeof x);
    return x;
}
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vf vmax(vf a, vf b) { /* a > b ? a : b */
#ifdef __AVX512F__
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return vselect(a > b, a, b);
#endif
}

INLINE vf load_fp32(const fp32 *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_fp32(fp32 *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vu load_u32(const uint32_t *p) {
    vu x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_u32(uint32_t *p, vu x) { memcpy(p, &x, sizeof x); }

INLINE vf load_bf16(const bf16 *p) {
#ifdef __AVX512F__
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    vs x;
    memcpy(&x, p, sizeof x);
    return (vf)(__builtin_convertvector(x, vu) << 16);
#endif
}
/* Rounds to nearest, ties to even; NaN stays NaN. */
INLINE void store_bf16(bf16 *p, vf x) {
    vu bits = (vu)x, is_nan = (vu)(x != x);
    vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    vu upper = ((rounded & ~is_nan) | ((bits | 0x400000u) & is_nan)) >> 16;
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)upper));
#else
    vs half = __builtin_convertvector(upper, vs);
    memcpy(p, &half, sizeof half);
#endif
}
INLINE vf widen_fp16(vs bits) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)bits);
#else
    return __builtin_convertvector((vh)bits, vf);
#endif
}
INLINE vf load_fp16(const fp16 *p) {
    vs bits;
    memcpy(&bits, p, sizeof bits);
    return widen_fp16(bits);
}
INLINE void store_fp16(fp16 *p, vf x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    vh half = __builtin_convertvector(x, vh);
    memcpy(p, &half, sizeof half);
#endif
}

/* fp8 codes as float32, exactly. e4m3 has the exponent of a float16 1/256 as large, and no infinities. */
INLINE vf load_fp8(const uint8_t *p, enum form form) {
    vs code;
#ifdef __AVX512F__
    code = (vs)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    vb codes;
    memcpy(&codes, p, sizeof codes);
    code = __builtin_convertvector(codes, vs);
#endif
    if (form == E5M2) return widen_fp16(code << 8);
    vs size = code & 0x7f, is_nan = (vs)(size == 0x7f);
    return widen_fp16((code & 0x80) << 8 | size << 7 | (is_nan & 0x7c00)) * splat(256);
}
/* Rounds to nearest, ties to even; saturates; NaN becomes NaN. */
INLINE void store_fp8(uint8_t *p, vf x, enum form form) {
    const int mantissa = form == E4M3 ? 3 : 2, bias = form == E4M3 ? 7 : 15, drop = 23 - mantissa;
    const float largest = form == E4M3 ? 448.0f : 57344.0f;
    /* Below the smallest normal number codes count steps of 2^(1 - bias - mantissa): adding 2^(24 - bias - mantissa)
     * rounds to such a step and leaves the count in the lowest bits. */
    const float smallest_normal = form == E4M3 ? 0x1p-6f : 0x1p-14f, lift = form == E4M3 ? 0x1p14f : 0x1p7f;
    vu sign = (vu)x >> 24 & 0x80u;
    vf size = (vf)((vu)x & 0x7fffffffu);
    size = vselect(size > splat(largest), splat(largest), size);
    vu bits = (vu)size, is_nan = (vu)(x != x), is_small = (vu)(size < splat(smallest_normal));
    vu normal = ((bits + ((1u << (drop - 1)) - 1) + (bits >> drop & 1u)) >> drop) - ((127u - bias) << mantissa);
    vu small = (vu)(size + splat(lift)) & 0xffu;
    vu code = (small & is_small) | (normal & ~is_small) | sign;
    code |= is_nan & 0x7fu;
#ifdef __AVX512F__
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)code));
#else
    vb codes = __builtin_convertvector(code, vb);
    memcpy(p, &codes, sizeof codes);
#endif
}
#ifdef __AVX512BF16__
/* 2 * LANES fp8 codes, or half as many and zeros, as bfloat16, exactly. */
INLINE vu load_fp8_pairs(const uint8_t *p, int half, enum form form) {
    const uint16_t step = form == E4M3 ? 0x3b00 : 0x3780; /* 2^-9, 2^-16: of the subnormal numbers */
    const int mantissa = form == E4M3 ? 3 : 2, up = form == E4M3 ? 120 : 112; /* difference of exponents */
    static const uint16_t counted[32] __attribute__((aligned(64))) = /* 0 to 7, as bfloat16 less that of 1 */
        {0, 0, 0x80, 0xc0, 0x100, 0x120, 0x140, 0x160};
    __m512i code = _mm512_cvtepu8_epi16(half ? _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p))
                                             : _mm256_loadu_si256((const __m256i *)p));
    if (half) code = _mm512_maskz_mov_epi16(0xffff, code);
    __m512i size = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(size, 7 - mantissa), _mm512_set1_epi16(up << 7));
    __m512i steps = _mm512_maskz_add_epi16(_mm512_test_epi16_mask(size, size), _mm512_set1_epi16(step),
                                           _mm512_permutexvar_epi16(size, _mm512_load_si512(counted)));
    value = _mm512_mask_mov_epi16(value, _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(1 << mantissa)), steps);
    __mmask32 not_finite = _mm512_cmpge_epu16_mask(size, _mm512_set1_epi16(form == E4M3 ? 0x7f : 0x7c));
    value = _mm512_mask_add_epi16(value, not_finite, value, _mm512_set1_epi16(up << 7));
    return (vu)_mm512_or_si512(value, _mm512_slli_epi16(_mm512_andnot_si512(size, code), 8));
}
#endif

/* Sum and maximum over the lanes, always in the same tree. */
INLINE float sum_lanes(vf x) {
    float part[LANES];
    memcpy(part, &x, sizeof x);
    UNROLL for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}
/* Lane i: the sum of the lanes of x[i], always in the same tree; x is overwritten. */
INLINE vf sum_each(vf x[LANES]) {
    UNROLL for (int step = 1; step < LANES; step *= 2) {
        const vi lane = lane_numbers(), others = (vi)splat_u32(step);
        const vi low = (lane & ~others) + (((lane & others) != 0) & (vi)splat_u32(LANES));
        UNROLL for (int i = 0; i < LANES; i += 2 * step)
            x[i] = __builtin_shuffle(x[i], x[i + step], low) + __builtin_shuffle(x[i], x[i + step], low + others);
    }
    return x[0];
}
INLINE float max_lanes(vf x) {
    float part[LANES];
    memcpy(part, &x, sizeof x);
    UNROLL for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++)
        part[i] = part[i] > part[i + half] ? part[i] : part[i + half];
    return part[0];
}

#define ROUND_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer in the low mantissa bits */

/* e^x, relative error below 2e-7; x is clamped to [-87, 88]. Taylor of degree 6 on |r| <= ln2 / 2. */
INLINE vf vexp(vf x) {
    x = vmax(x, splat(-87.0f));
    x = -vmax(-x, splat(-88.0f));
    vf shifted = x * splat(1.44269504f) + splat(ROUND_MAGIC);
    vf n = shifted - splat(ROUND_MAGIC);
    vf r = x - n * splat(0.693145752f); /* ln2 in two parts, the first exact when multiplied by n */
    r = r - n * splat(1.42860677e-6f);
    vf p = splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    return (vf)((vi)p + ((vi)shifted << 23));
}
