/* Products with matrices of 4- or 8-bit weights, as GGUF's types Q4_0, Q4_1 and Q8_0 have them.
 *
 * Rows of x are quantised to int8 in groups of GROUP elements, each group with one scale s; a weight is d * q + m, with
 * d and m of its output and group. Then
 *   y[o] = bias[o] + sum over groups, in order, of ((s * d) * dot(q, a) + m * (s * sum(a)))     (Q4_0, Q8_0: no m)
 * The few groups of a row whose largest element is FINE_FROM times the row's mean of these or more (outliers: most of
 * the rounding error is theirs) are fine: what rounding left of them is quantised too, with a scale of s / 254, and added by the same
 * formula behind the group. Here dot and sum are integers and everything else is float32, each operation rounded by itself: this file is compiled
 * with -ffp-contract=off. A row's bits are therefore the same for every number of rows and threads, on every CPU, and in
 * the plain-PyTorch twin (kernels/quantized.py).
 *
 * Weights lie in tiles of TILE outputs, each filled up to ALIGNMENT bytes:
 *   words of 4 weights [group][4 or 8][TILE] (word j holds elements 4j to 4j+3 of a group; of 4 bits in the low halves,
 *   and 16+4j to 19+4j in the high ones), d float16 [group][TILE], and for Q4_1 m float16 [group][TILE].
 * Quantised rows lie in panels of up to PANEL rows: codes int8 [group][row][codes, fine codes][GROUP], terms
 * [group][s, s*sum, sum, fine s, fine s*sum, fine sum][row], the last three 0 where the group is not fine.
 */

#include "common.h"
#include "quantized.h"

#define GROUP 32
#define TILE 32
#define PANEL 6
#define ALIGNMENT 64
#define CACHE_LINE 64
#define PARTS (TILE / LANES)
#define ROW_CODES (2 * GROUP)
#define ROW_TERMS 6
#define FINE_FROM 2.0f /* times the mean: a larger element makes a group fine */
#define FINE_STEPS 254 /* fine codes -127 to 127 span what rounding leaves of one step */
#define SCRATCH_BYTES (640 << 10)  /* of quantised rows: what a core's cache keeps */
#define SERIAL_ELEMENTS 4096       /* fewer are quantised by one thread: another barrier would cost more */
#define SERIAL_PRODUCTS (1 << 18)  /* fewer are multiplied by one thread */
#define AHEAD_BYTES 8192           /* how far ahead of use weights are asked for; measured best of 2 to 8 KiB */
#define LEAST 1e-30f               /* a group of smaller values counts as zeros: their reciprocals are not finite */

struct chunk { /* rows first to first + rows, quantised, in panels of `height` */
    int64_t first, rows, height;
    int8_t *codes;
    uint32_t *terms;
};

typedef int8_t codes_of_lanes VECTOR(LANES);

/* dot[lane] += the four unsigned bytes of the lane's weights times the four signed bytes of `codes`. */
INLINE vi dot4(vi dot, vu weights, uint32_t codes) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)dot, (__m512i)weights, _mm512_set1_epi32(codes));
#else /* as 16-bit numbers, bytes 0 and 2 apart from bytes 1 and 3 */
    uint32_t even = (uint16_t)(int8_t)codes | (uint32_t)(int8_t)(codes >> 16) << 16;
    uint32_t odd = (uint16_t)(int8_t)(codes >> 8) | (uint32_t)(int8_t)(codes >> 24) << 16;
    vu low = weights & 0x00ff00ffu, high = (weights >> 8) & 0x00ff00ffu;
#if LANES == 16 && defined(__AVX512BW__)
    dot += (vi)_mm512_madd_epi16((__m512i)low, _mm512_set1_epi32(even));
    return dot + (vi)_mm512_madd_epi16((__m512i)high, _mm512_set1_epi32(odd));
#elif LANES == 8 && defined(__AVX2__)
    dot += (vi)_mm256_madd_epi16((__m256i)low, _mm256_set1_epi32(even));
    return dot + (vi)_mm256_madd_epi16((__m256i)high, _mm256_set1_epi32(odd));
#else
    dot += (vi)(low & 0xffffu) * (int32_t)(int16_t)even + (vi)(low >> 16) * (int32_t)(int16_t)(even >> 16);
    return dot + (vi)(high & 0xffffu) * (int32_t)(int16_t)odd + (vi)(high >> 16) * (int32_t)(int16_t)(odd >> 16);
#endif
#endif
}

INLINE int64_t group_words(int kind) { return (kind == Q8_0 ? 8 : 4) * TILE; }
INLINE int64_t tile_bytes(int kind, int64_t groups) {
    int64_t bytes = groups * (4 * group_words(kind) + (kind == Q4_1 ? 4 : 2) * TILE);
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}
INLINE uint32_t load_code(const int8_t *p) {
    uint32_t code;
    memcpy(&code, p, sizeof code);
    return code;
}

/* (s * d) * dot of one row's fine codes with one group of a tile. */
INLINE void fine_terms(int kind, const uint32_t *words, const fp16 *d, const int8_t *codes, float scale, int32_t sum,
                       vf *term) {
    vi dot[PARTS];
    UNROLL for (int p = 0; p < PARTS; p++) dot[p] = (vi){} - (kind == Q4_1 ? 0 : (kind == Q4_0 ? 8 : 128) * sum);
    UNROLL for (int j = 0; j < (kind == Q8_0 ? 8 : 4); j++) UNROLL for (int p = 0; p < PARTS; p++) {
        vu word = load_u32(words + j * TILE + p * LANES);
        dot[p] = dot4(dot[p], kind == Q8_0 ? word : word & 0x0f0f0f0fu, load_code(codes + 4 * j));
        if (kind != Q8_0) dot[p] = dot4(dot[p], (word >> 4) & 0x0f0f0f0fu, load_code(codes + 16 + 4 * j));
    }
    UNROLL for (int p = 0; p < PARTS; p++)
        term[p] = scale * load_fp16(d + p * LANES) * __builtin_convertvector(dot[p], vf);
}

/* sums[row][output] of one tile and the `rows` rows of one panel. `lines` cache lines per group are asked for from
 * `ahead` on. */
INLINE void tile_rows(int kind, int rows, int64_t groups, const uint8_t *tile, const int8_t *codes,
                      const uint32_t *terms, float *sums, const uint8_t *ahead, int lines) {
    const uint32_t *words = (const uint32_t *)tile;
    const fp16 *d = (const fp16 *)(words + groups * group_words(kind)), *m = d + groups * TILE;
    const int split = rows <= 3; /* few rows would wait for their own sums: add up in two */
    vf total[PANEL][PARTS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < PARTS; p++) total[r][p] = splat(0);
    for (int64_t g = 0; g < groups; g++) {
        const float *scales = (const float *)terms, *scaled_sums = scales + rows;
        const int32_t *code_sums = (const int32_t *)terms + 2 * rows;
        vi dot[2][PANEL][PARTS];
        for (int line = 0; line < lines; line++, ahead += CACHE_LINE) __builtin_prefetch(ahead);
        UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < PARTS; p++) {
            dot[0][r][p] = (vi){} - (kind == Q4_1 ? 0 : (kind == Q4_0 ? 8 : 128) * code_sums[r]);
            dot[1][r][p] = (vi){};
        }
        UNROLL for (int j = 0; j < (kind == Q8_0 ? 8 : 4); j++) {
            vu word[PARTS];
            UNROLL for (int p = 0; p < PARTS; p++) word[p] = load_u32(words + j * TILE + p * LANES);
            int first = kind == Q8_0 && split ? j % 2 : 0;
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t code = load_code(codes + r * ROW_CODES + 4 * j);
                UNROLL for (int p = 0; p < PARTS; p++)
                    dot[first][r][p] = dot4(dot[first][r][p], kind == Q8_0 ? word[p] : word[p] & 0x0f0f0f0fu, code);
            }
            if (kind == Q8_0) continue;
            UNROLL for (int r = 0; r < rows; r++) {
                uint32_t code = load_code(codes + r * ROW_CODES + 16 + 4 * j);
                UNROLL for (int p = 0; p < PARTS; p++)
                    dot[split][r][p] = dot4(dot[split][r][p], (word[p] >> 4) & 0x0f0f0f0fu, code);
            }
        }
        UNROLL for (int p = 0; p < PARTS; p++) {
            vf factor = load_fp16(d + p * LANES), minimum = kind == Q4_1 ? load_fp16(m + p * LANES) : splat(0);
            UNROLL for (int r = 0; r < rows; r++) {
                vi whole = split ? dot[0][r][p] + dot[1][r][p] : dot[0][r][p];
                vf term = scales[r] * factor * __builtin_convertvector(whole, vf);
                total[r][p] += kind == Q4_1 ? term + minimum * scaled_sums[r] : term;
            }
        }
        UNROLL for (int r = 0; r < rows; r++) if (terms[3 * rows + r]) {
            vf term[PARTS];
            fine_terms(kind, words, d, codes + r * ROW_CODES + GROUP, scales[3 * rows + r], code_sums[3 * rows + r], term);
            UNROLL for (int p = 0; p < PARTS; p++) {
                vf minimum = kind == Q4_1 ? load_fp16(m + p * LANES) : splat(0);
                total[r][p] += kind == Q4_1 ? term[p] + minimum * scaled_sums[3 * rows + r] : term[p];
            }
        }
        words += group_words(kind), d += TILE, m += TILE, codes += rows * ROW_CODES, terms += ROW_TERMS * rows;
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < PARTS; p++)
        store_fp32(sums + r * TILE + p * LANES, total[r][p]);
}

typedef void tile_function(int64_t groups, const uint8_t *tile, const int8_t *codes, const uint32_t *terms, float *sums,
                           const uint8_t *ahead, int lines);
#define TILE_OF(kind, rows) \
    static void tile_##kind##_##rows(int64_t groups, const uint8_t *tile, const int8_t *codes, const uint32_t *terms, \
                                     float *sums, const uint8_t *ahead, int lines) { \
        tile_rows(kind, rows, groups, tile, codes, terms, sums, ahead, lines); \
    }
#define TILES_OF(kind) \
    TILE_OF(kind, 1) TILE_OF(kind, 2) TILE_OF(kind, 3) TILE_OF(kind, 4) TILE_OF(kind, 5) TILE_OF(kind, 6)
TILES_OF(Q4_0)
TILES_OF(Q4_1)
TILES_OF(Q8_0)
#define NAMES_OF(kind) \
    {tile_##kind##_1, tile_##kind##_2, tile_##kind##_3, tile_##kind##_4, tile_##kind##_5, tile_##kind##_6}
static tile_function *const TILES[3][PANEL] = {NAMES_OF(Q4_0), NAMES_OF(Q4_1), NAMES_OF(Q8_0)};

INLINE vf load_as(int type, const void *p, int64_t i) {
    if (type == TYPE_fp32) return load_fp32((const fp32 *)p + i);
    return type == TYPE_fp16 ? load_fp16((const fp16 *)p + i) : load_bf16((const bf16 *)p + i);
}

INLINE vi larger_of(vi a, vi b) {
#if LANES == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    vi larger = a > b;
    return (a & larger) | (b & ~larger);
#endif
}
/* The largest lane, and the sum of all, in lane 0. */
INLINE int32_t largest_lane(vi x) {
    UNROLL for (int half = LANES / 2; half; half /= 2) {
        x = larger_of(x, __builtin_shuffle(x, lane_numbers() ^ half));
    }
    return x[0];
}
INLINE int32_t sum_of_lanes(vi x) {
    UNROLL for (int half = LANES / 2; half; half /= 2) x += __builtin_shuffle(x, lane_numbers() ^ half);
    return x[0];
}

/* value * inverse to the nearest, ties to even; the sum of all goes to `sum`. */
INLINE void round_group(const vf *value, float inverse, int8_t *codes, vi *code, int32_t *sum) {
    vi sums = {};
    UNROLL for (int i = 0; i < GROUP / LANES; i++) {
        code[i] = (vi)(value[i] * splat(inverse) + splat(ROUND_MAGIC)) - (vi)splat(ROUND_MAGIC);
        codes_of_lanes narrow = __builtin_convertvector(code[i], codes_of_lanes);
        memcpy(codes + i * LANES, &narrow, sizeof narrow);
        sums += code[i];
    }
    *sum = sum_of_lanes(sums);
}
INLINE void store_terms(uint32_t *terms, int rows, float scale, int32_t sum) {
    float scaled = scale * (float)sum;
    memcpy(terms, &scale, sizeof scale);
    memcpy(terms + rows, &scaled, sizeof scaled);
    memcpy(terms + 2 * rows, &sum, sizeof sum);
}

/* One row into its place in a panel of `rows` rows. NaN or infinity in a group makes all outputs NaN. */
INLINE void quantize_as(int type, const void *x, int64_t groups, int rows, int8_t *codes, uint32_t *terms) {
    float mean = 0;
    int8_t *first_codes = codes;
    uint32_t *first_terms = terms;
    for (int64_t g = 0; g < groups; g++, codes += rows * ROW_CODES, terms += ROW_TERMS * rows) {
        vf value[GROUP / LANES];
        vi largest = {}, code[GROUP / LANES];
        UNROLL for (int i = 0; i < GROUP / LANES; i++) {
            value[i] = load_as(type, x, g * GROUP + i * LANES);
            largest = larger_of(largest, (vi)value[i] & 0x7fffffff); /* ordered as absolute values, NaN above all */
        }
        int32_t top = largest_lane(largest), sum;
        float most;
        memcpy(&most, &top, sizeof most);
        mean += most;
        round_group(value, most >= LEAST ? 127 / most : 0, codes, code, &sum);
        store_terms(terms, rows, most < LEAST ? 0 : most / 127, sum);
        store_terms(terms + 3 * rows, rows, 0, 0);
    }
    float limit = FINE_FROM * (mean / (float)groups / 127); /* of the scale; NaN makes no group fine */
    codes = first_codes, terms = first_terms;
    for (int64_t g = 0; g < groups; g++, codes += rows * ROW_CODES, terms += ROW_TERMS * rows) {
        float scale;
        memcpy(&scale, terms, sizeof scale);
        if (!(scale > limit)) continue;
        vf left[GROUP / LANES];
        vi code[GROUP / LANES];
        int32_t sum;
        float fine = scale / FINE_STEPS;
        UNROLL for (int i = 0; i < GROUP / LANES; i++) {
            codes_of_lanes narrow;
            memcpy(&narrow, codes + i * LANES, sizeof narrow);
            left[i] = load_as(type, x, g * GROUP + i * LANES) - __builtin_convertvector(narrow, vf) * splat(scale);
        }
        round_group(left, 1 / fine, codes + GROUP, code, &sum);
        store_terms(terms + 3 * rows, rows, fine, sum);
    }
}

static void quantize_row(const struct matrix *m, const struct product *p, const struct chunk *c, int64_t row) {
    int64_t groups = m->columns / GROUP, before = row / c->height * c->height;
    int rows = c->rows - before < c->height ? c->rows - before : c->height;
    const char *x = (const char *)p->x + (c->first + row) * p->x_stride * (p->x_type == TYPE_fp32 ? 4 : 2);
    int8_t *codes = c->codes + (before * groups + row - before) * ROW_CODES;
    uint32_t *terms = c->terms + before * ROW_TERMS * groups + (row - before);
    if (p->x_type == TYPE_fp32)
        quantize_as(TYPE_fp32, x, groups, rows, codes, terms);
    else if (p->x_type == TYPE_fp16)
        quantize_as(TYPE_fp16, x, groups, rows, codes, terms);
    else
        quantize_as(TYPE_bf16, x, groups, rows, codes, terms);
}

INLINE void store_as(int type, void *out, const float *values, const float *bias, int count) {
    char buffer[4 * TILE];
    UNROLL for (int i = 0; i < TILE; i += LANES) {
        vf value = load_fp32(values + i);
        if (bias) value += load_fp32(bias + i);
        if (type == TYPE_fp32)
            store_fp32((fp32 *)buffer + i, value);
        else if (type == TYPE_fp16)
            store_fp16((fp16 *)buffer + i, value);
        else
            store_bf16((bf16 *)buffer + i, value);
    }
    int size = type == TYPE_fp32 ? 4 : 2;
    if (count == TILE)
        memcpy(out, buffer, TILE * size);
    else
        memcpy(out, buffer, count * size);
}

/* One tile of outputs for all rows of a chunk. */
static void multiply_tile(const struct matrix *m, const struct product *p, const struct chunk *c, int64_t tile) {
    float sums[PANEL * TILE] __attribute__((aligned(64))), padded[TILE] = {0};
    int64_t groups = m->columns / GROUP, output = tile * TILE;
    int count = m->outputs - output < TILE ? m->outputs - output : TILE, size = p->out_type == TYPE_fp32 ? 4 : 2;
    int64_t bytes = tile_bytes(m->kind, groups), panels = (c->rows + c->height - 1) / c->height;
    const uint8_t *weights = m->tiles + tile * bytes;
    /* one panel: weights soon to be used; several: each asks for its share of the next tile */
    int64_t lines = (bytes / groups + panels * CACHE_LINE - 1) / (panels * CACHE_LINE);
    const uint8_t *ahead = weights + (panels == 1 ? AHEAD_BYTES : bytes);
    const float *bias = m->bias ? memcpy(padded, m->bias + output, count * sizeof(float)) : 0;
    for (int64_t before = 0; before < c->rows; before += c->height, ahead += lines * CACHE_LINE * groups) {
        int rows = c->rows - before < c->height ? c->rows - before : c->height;
        TILES[m->kind][rows - 1](groups, weights, c->codes + before * groups * ROW_CODES,
                                 c->terms + before * groups * ROW_TERMS, sums,
                                 ahead, ahead < weights + 2 * bytes ? lines : 0);
        for (int r = 0; r < rows; r++) {
            char *out = (char *)p->out + ((c->first + before + r) * p->out_stride + output) * size;
            if (p->out_type == TYPE_fp32)
                store_as(TYPE_fp32, out, sums + r * TILE, bias, count);
            else if (p->out_type == TYPE_fp16)
                store_as(TYPE_fp16, out, sums + r * TILE, bias, count);
            else
                store_as(TYPE_bf16, out, sums + r * TILE, bias, count);
        }
    }
}

/* out[row][output] for all rows. columns: a multiple of GROUP, so few that PANEL rows fit the scratch. */
void quantized_linear(const struct matrix *m, const struct product *p) {
    char scratch[SCRATCH_BYTES] __attribute__((aligned(64)));
    int64_t row_codes = m->columns / GROUP * ROW_CODES;
    int64_t row_bytes = row_codes + m->columns / GROUP * ROW_TERMS * sizeof(uint32_t);
    int64_t most = SCRATCH_BYTES / row_bytes / PANEL * PANEL, tiles = (m->outputs + TILE - 1) / TILE;
    int serial = p->rows * m->columns <= SERIAL_ELEMENTS;
    struct chunk c = {.codes = (int8_t *)scratch};
    for (; c.first < p->rows; c.first += c.rows) {
        c.rows = p->rows - c.first < most ? p->rows - c.first : most;
        int64_t panels = (c.rows + PANEL - 1) / PANEL;
        c.height = (c.rows + panels - 1) / panels;
        c.terms = (uint32_t *)(c.codes + c.rows * row_codes);
        if (serial)
            for (int64_t row = 0; row < c.rows; row++) quantize_row(m, p, &c, row);
#pragma omp parallel num_threads(p->num_threads) if (p->rows * m->outputs * m->columns > SERIAL_PRODUCTS)
        {
            if (!serial) {
#pragma omp for schedule(static)
                for (int64_t row = 0; row < c.rows; row++) quantize_row(m, p, &c, row);
            }
#pragma omp for schedule(static) nowait
            for (int64_t tile = 0; tile < tiles; tile++) multiply_tile(m, p, &c, tile);
        }
    }
}
