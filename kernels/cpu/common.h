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

typedef float vf VECTOR(4 * LANES);
typedef int32_t vi VECTOR(4 * LANES);
typedef uint32_t vu VECTOR(4 * LANES);
typedef uint16_t vs VECTOR(2 * LANES);
typedef uint16_t vp VECTOR(4 * LANES);
typedef _Float16 vh VECTOR(2 * LANES);

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
INLINE vf load_fp16(const fp16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vh x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vf);
#endif
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

/* Sum and maximum over the lanes, always in the same tree. */
INLINE float sum_lanes(vf x) {
    float part[LANES];
    memcpy(part, &x, sizeof x);
    UNROLL for (int half = LANES / 2; half; half /= 2) UNROLL for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
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
