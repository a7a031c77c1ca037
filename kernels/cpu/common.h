/* Vectors of 16 floats, conversions between storage types and float32, and exponentials.
 *
 * Everything here is lane-wise with a fixed sequence of operations, so a value's bits never depend on its neighbours.
 * Portable vector extensions; intrinsics appear only where GCC has no good code for a conversion, with equal bits.
 */
#pragma once

#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 64")

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint32_t v16u __attribute__((vector_size(64)));
typedef uint16_t v16s __attribute__((vector_size(32)));
typedef uint16_t v32s __attribute__((vector_size(64)));
typedef _Float16 v16h __attribute__((vector_size(32)));

typedef uint16_t bf16;
typedef _Float16 fp16;
typedef float fp32;

INLINE v16f splat(float x) { return (v16f){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16u splat_u32(uint32_t x) { return (v16u){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16f select16(v16i mask, v16f a, v16f b) { return (v16f)(((v16i)a & mask) | ((v16i)b & ~mask)); }
INLINE v16f max16(v16f a, v16f b) { /* a > b ? a : b */
#ifdef __AVX512F__
    return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select16(a > b, a, b);
#endif
}

INLINE v16f load_fp32(const fp32 *p) {
    v16f x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_fp32(fp32 *p, v16f x) { memcpy(p, &x, sizeof x); }
INLINE v16u load_u32(const uint32_t *p) {
    v16u x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void store_u32(uint32_t *p, v16u x) { memcpy(p, &x, sizeof x); }

INLINE v16f load_bf16(const bf16 *p) {
#ifdef __AVX512F__
    return (v16f)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    v16s x;
    memcpy(&x, p, sizeof x);
    return (v16f)(__builtin_convertvector(x, v16u) << 16);
#endif
}
/* Round to nearest, ties to even; NaN stays NaN. Result in the upper halves of the lanes. */
INLINE v16u round_bf16(v16f x) {
    v16u bits = (v16u)x;
    v16u rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    v16u is_nan = (v16u)(x != x);
    return (rounded & ~is_nan) | ((bits | 0x400000u) & is_nan);
}
INLINE void store_bf16(bf16 *p, v16f x) {
    v16u upper = round_bf16(x) >> 16;
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)upper));
#else
    v16s half = __builtin_convertvector(upper, v16s);
    memcpy(p, &half, sizeof half);
#endif
}
INLINE v16f load_fp16(const fp16 *p) {
#ifdef __AVX512F__
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    v16h x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, v16f);
#endif
}
INLINE void store_fp16(fp16 *p, v16f x) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    v16h half = __builtin_convertvector(x, v16h);
    memcpy(p, &half, sizeof half);
#endif
}

/* Sum and maximum over the lanes, always in the same tree. */
INLINE float sum_lanes(v16f x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    return x[0] + x[1];
}
INLINE float max_lanes(v16f x) {
    x = max16(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    x = max16(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    x = max16(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
    return x[0] > x[1] ? x[0] : x[1];
}

#define ROUND_MAGIC 12582912.0f /* 1.5 * 2^23: adding it rounds |x| < 2^22 to an integer in the low mantissa bits */

/* e^x, relative error below 2e-7; x is clamped to [-87, 88]. Taylor of degree 6 on |r| <= ln2 / 2. */
INLINE v16f exp16(v16f x) {
    x = max16(x, splat(-87.0f));
    x = -max16(-x, splat(-88.0f));
    v16f shifted = x * splat(1.44269504f) + splat(ROUND_MAGIC);
    v16f n = shifted - splat(ROUND_MAGIC);
    v16f r = x - n * splat(0.693145752f);
    r = r - n * splat(1.42860677e-6f);
    v16f p = splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    return (v16f)((v16i)p + ((v16i)shifted << 23));
}
