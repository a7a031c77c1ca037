/* The CPU kernels of Tournant: row-wise operations, writes to the KV cache, paged attention, choice of
 * blocks, block copies.
 *
 * Compiled at run time by kernels/cpu/build.py, called through kernels/cpu/native.py, which has checked the arguments.
 * Nothing here allocates, keeps state between calls or reads memory that the arguments do not name.
 */

#include "attention.h"
#include "bounds.h"
#include "quantized.h"

#define LARGEST_fp32 3.40282347e38f /* that a type holds */
#define LARGEST_fp16 65504.0f
#define LARGEST_bf16 3.38953139e38f
#define PARALLEL_ELEMENTS 32768 /* below this a second thread costs more than it saves */

struct store { /* arguments of store_kv; every field 8 bytes; strides in elements */
    void *q; /* or NULL: store only */
    const void *k, *v;
    void *kv; /* K of the layer, block 0 */
    const float *cos_sin;
    const int64_t *positions; /* or NULL: short_positions */
    const int32_t *short_positions;
    const int64_t *slots;
    float *scales; /* of e4m3: K of the layer, block 0; else NULL */
    int64_t q_stride, k_stride, v_stride, block_stride, value_offset, scale_stride;
    int64_t num_rows, num_heads, num_kv_heads, head_size, block_tokens, rotary_dim, max_positions, num_slots;
    int64_t form, num_threads;
};

struct layer_weights { /* of one decoder layer; every field 8 bytes */
    const struct matrix *qkv, *o, *gate_up, *down;
    const void *mlp_norm, *next_norm; /* [hidden_size]; next_norm: of the layer after it, or the last norm */
    const float *cos_sin;             /* or NULL: nothing is rotated */
    int64_t mlp_norm_wide, next_norm_wide, rotary_dim, max_positions, window; /* wide: a norm in float32 */
};

struct step { /* arguments of decoder_layers; every field 8 bytes; strides in elements */
    void *hidden, *residual; /* [rows][hidden_size] */
    void *qkv, *attended, *gate_up, *gated; /* scratch: [rows] of (heads + 2 kv_heads) * head_size, heads * head_size,
                                             * 2 * inner_size, inner_size */
    void *kv;                /* K of layer 0, block 0 */
    const int64_t *positions;
    const int32_t *short_positions;
    const int64_t *slots;
    float *scales; /* of e4m3: K of layer 0, block 0; else NULL */
    int64_t rows, num_tokens, hidden_size, inner_size, num_heads, num_kv_heads, head_size;
    int64_t block_tokens, num_slots, block_stride, layer_stride, value_offset, scale_stride, form, gelu, num_threads;
    const void *below; /* K of layer 0 of the block `first_below`, or NULL */
    int64_t below_stride, first_below, below_layer_stride;
    double eps;
    float scale, softcap;
};

/* The least power of two s with largest <= 448 s, 448 = 1.75 * 2^8; at least 2^-60. */
INLINE float e4m3_scale(float largest) {
    int32_t bits;
    memcpy(&bits, &largest, sizeof bits);
    bits = ((bits + 0x1fffff) >> 23) - 8;
    bits = (bits > 67 ? bits : 67) << 23;
    memcpy(&largest, &bits, sizeof bits);
    return largest;
}

/* First row with a slot or position out of range, or -1. Padding rows (slot -1) are not looked at further. */
int64_t first_bad_row(const struct store *s) {
    for (int64_t r = 0; r < s->num_rows; r++) {
        if (s->slots[r] == -1) continue;
        if (s->slots[r] < -1 || s->slots[r] >= s->num_slots) return r;
        if (!s->q) continue;
        int64_t position = s->positions ? s->positions[r] : s->short_positions[r];
        if (position < 0 || position >= s->max_positions) return r;
    }
    return -1;
}

#define FORM wide
#define WORD_ELEMENTS 1
#define MULTIPLY_ADD(acc, x, y) ((acc) + (vf)(x) * (vf)(y))
#include "tiles.inc"

#ifdef __AVX512BF16__
#define FORM pair
#define WORD_ELEMENTS 2
#define MULTIPLY_ADD(acc, x, y) ((vf)_mm512_dpbf16_ps((__m512)(acc), (__m512bh)(x), (__m512bh)(y)))
#include "tiles.inc"
#endif

#define T fp32
#define PAIR 0
INLINE vf load_part_fp32(const fp32 *p, int count);
#include "rows.inc"
#include "attention.inc"
#include "bounds.inc"
#include "layers.inc"
#undef T

#define T fp16
#include "rows.inc"
#include "attention.inc"
#include "bounds.inc"
#include "layers.inc"
#undef T
#undef PAIR

#define T bf16
#ifdef __AVX512BF16__
#define PAIR 1
#else
#define PAIR 0
#endif
#include "rows.inc"
#include "attention.inc"
#include "bounds.inc"
#include "layers.inc"

void cut_into_units(struct plan *p, struct unit *units, struct split *splits, int num_threads) {
    cut(p, units, splits, num_threads);
}

void choose_blocks(const struct choice *c) { choose(c); }

void pack_blocks(const struct packing *p) { pack(p); }

void copy_blocks(char *kv, const int64_t *from, const int64_t *to, int64_t count, int64_t block_bytes, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) memcpy(kv + to[i] * block_bytes, kv + from[i] * block_bytes, block_bytes);
}
