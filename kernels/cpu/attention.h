/* Shared parts of paged attention: the description of a step, its cutting into units of work, exponentials, folds. */
#pragma once

#include "common.h"

#define PIECE 256 /* keys of one piece: the unit of the fixed order of summation */
#define MAX_ROWS 6
#if LANES == 16 || defined(__aarch64__)
#define MAX_GROUPS 4 /* MAX_ROWS x MAX_GROUPS sums of a micro-kernel fill the 32 vector registers */
#else
#define MAX_GROUPS 2 /* of 16 */
#endif
#define CHUNK 64      /* keys prepared at once where a single tile of rows uses them */
#define AHEAD 48      /* keys between a prefetch and its use */
#define AHEAD_LEVEL 2 /* into the second-level cache: the first is busy with the scratch of a piece */
#define TILE_ROWS 96  /* query rows (tokens x heads of one KV head) that share a prepared piece */
#define MAX_HEAD 256
#define MIN_BLOCK_TOKENS 8
#define MAX_BLOCK_TOKENS 256
#define LOG2E 1.44269504f
#define PARTIAL_EXTRA 16 /* floats after the sums of a partial row: maximum, total */

/* One step, laid out by kernels/cpu/native.py; every field 8 bytes. */
struct plan {
    const int32_t *block_tables; /* [num_seqs][max_blocks] */
    const int32_t *query_start;  /* [num_seqs + 1] */
    const int32_t *context_lens; /* [num_seqs] */
    const struct unit *units;
    const struct split *splits;
    float *partials; /* [num_partials][head_size + PARTIAL_EXTRA]: sums, maximum, total */
    int64_t num_seqs, max_blocks, num_heads, num_kv_heads, block_tokens, head_size;
    int64_t num_units, num_splits, num_partials;
    int64_t first_piece, end_piece; /* of every sequence only these are walked; end_piece 0: all */
};
/* Query tokens of one sequence x heads of one KV head, over a range of pieces. */
struct unit {
    int32_t seq, kv_head, token, num_tokens, piece, piece_end;
    int64_t partial; /* first partial row, or -1: all pieces of the walk are here */
};
/* A tile whose pieces were done by several units. */
struct split {
    int32_t seq, kv_head, token, num_tokens, piece, piece_end;
    int64_t partial;
};
/* One layer's tensors. */
struct layer {
    const void *q, *kv; /* kv: K of this layer, block 0 */
    void *out;
    float *lse;                                                /* [rows][num_heads] or null */
    const float *scales;                                       /* of e4m3: K of this layer, block 0; else null */
    int64_t q_stride, out_stride, block_stride, value_offset; /* elements */
    int64_t scale_stride, form;
    int64_t window;                                            /* keys a row sees, itself included; 0: all before it */
    float scale, softcap;                                      /* softcap 0: none */
    int64_t num_threads;
    const int64_t *addresses; /* [num_seqs][max_blocks]: bytes from kv to each block's K of this layer; null: by id */
    float *state;             /* [rows][num_heads][head_size + PARTIAL_EXTRA]: of walks that end before a row's last key */
    const void *below;        /* K of this layer of the block `first_below`, or null; ids before it are blocks of kv */
    int64_t below_stride, first_below;
};

/* Pieces of a tile of query tokens whose last one sees `limit` keys. */
INLINE int num_pieces(int64_t limit) { return (limit + PIECE - 1) / PIECE; }

static int tile_tokens(int group) { return group < TILE_ROWS ? TILE_ROWS / group : 1; }

/* Cuts a step into units of about equal work. With units == 0 only counts (into p->num_units etc.). */
static void cut(struct plan *p, struct unit *units, struct split *splits, int num_threads) {
    int group = p->num_heads / p->num_kv_heads, tokens = tile_tokens(group);
    double total = 0, target = 0;
    p->num_units = p->num_splits = p->num_partials = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t s = 0; s < p->num_seqs; s++) {
            int count = p->query_start[s + 1] - p->query_start[s], past = p->context_lens[s] - count;
            if (!count) continue;
            for (int token = (count - 1) / tokens * tokens; token >= 0; token -= tokens) {
                int here = count - token < tokens ? count - token : tokens;
                int from = p->first_piece, to = num_pieces(past + token + here), rows = here * group;
                if (p->end_piece && p->end_piece < to) to = p->end_piece;
                int pieces = to - from;
                if (pieces <= 0) continue;
                double work = (double)pieces * (rows + 8); /* 8: preparing a piece costs about as much as 8 rows */
                if (pass == 0) {
                    total += work * p->num_kv_heads;
                    continue;
                }
                int parts = work > target ? work / target + 1 : 1;
                if (parts > pieces) parts = pieces;
                for (int h = 0; h < p->num_kv_heads; h++) {
                    int64_t partial = p->num_partials;
                    for (int i = 0; i < parts; i++) {
                        int first = (int64_t)pieces * i / parts, last = (int64_t)pieces * (i + 1) / parts;
                        if (units)
                            units[p->num_units] = (struct unit){s, h, token, here, from + first, from + last,
                                                                parts > 1 ? partial + (int64_t)first * rows : -1};
                        p->num_units++;
                    }
                    if (parts == 1) continue;
                    if (splits) splits[p->num_splits] = (struct split){s, h, token, here, from, to, partial};
                    p->num_splits++;
                    p->num_partials += (int64_t)pieces * rows;
                }
            }
        }
        target = num_threads > 1 ? total / (4 * num_threads) : total;
    }
}

/* 2^x for x <= 0, relative error below 2e-7; x is clamped to -125. */
INLINE vf vexp2(vf x) {
    x = vmax(x, splat(-125.0f));
    vf shifted = x + splat(ROUND_MAGIC);
    vf r = x - (shifted - splat(ROUND_MAGIC));
    vf p = splat(0.0013276472f);
    p = p * r + splat(0.00967554133f);
    p = p * r + splat(0.0555071327f);
    p = p * r + splat(0.240221197f);
    p = p * r + splat(0.693146967f);
    p = p * r + splat(1.0f);
    return (vf)((vi)p + ((vi)shifted << 23));
}

/* tanh, absolute error below 4e-7: 1 - 2 / (e^2x + 1) for x >= 0, odd. */
INLINE vf vtanh(vf x) {
    vf size = vmax(x, -x), e = vexp2(size * splat(-2 * LOG2E)), t = (splat(1) - e) / (splat(1) + e);
    return vselect(x < splat(0), -t, t);
}

/* Scores (in place) to softcap * tanh(score * scale / softcap). */
static void cap_scores(float *scores, int groups, float scale, float softcap) {
    for (int g = 0; g < groups; g++)
        store_fp32(scores + g * LANES, vtanh(load_fp32(scores + g * LANES) * splat(scale / softcap)) * splat(softcap));
}

/* Scores (in place) times the scales of their keys. */
static void scale_scores(float *scores, int groups, const float *scales) {
    for (int g = 0; g < groups; g++)
        store_fp32(scores + g * LANES, load_fp32(scores + g * LANES) * load_fp32(scales + g * LANES));
}

/* Adds a piece (sums, maximum, total of one row) to a row's running state; total 0 means nothing yet, or nothing to
 * add. One copy of this code, so that every path rounds alike. */
static __attribute__((noinline)) void fold(float *sums, float *maximum, float *total, const float *piece_sums,
                                           float piece_maximum, float piece_total, int head_size) {
    if (piece_total == 0) return;
    if (*total == 0) {
        memcpy(sums, piece_sums, head_size * sizeof(float));
        *maximum = piece_maximum;
        *total = piece_total;
        return;
    }
    float top = *maximum > piece_maximum ? *maximum : piece_maximum;
    vf old = vexp2(splat(*maximum - top)), new = vexp2(splat(piece_maximum - top));
    for (int d = 0; d < head_size; d += LANES)
        store_fp32(sums + d, load_fp32(piece_sums + d) * new + load_fp32(sums + d) * old);
    *total = *total * old[0] + piece_total * new[0];
    *maximum = top;
}

/* LANES x LANES transpose of 32-bit words in place: pairs of rows by words, then by double words, then 128-bit lanes. */
typedef uint64_t vd VECTOR(4 * LANES);
#if LANES == 16
#define LOW_WORDS 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_WORDS 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define LOW_DOUBLES 0, 8, 2, 10, 4, 12, 6, 14
#define HIGH_DOUBLES 1, 9, 3, 11, 5, 13, 7, 15
#define EVEN_LANES 0, 1, 4, 5, 8, 9, 12, 13
#define ODD_LANES 2, 3, 6, 7, 10, 11, 14, 15
#elif LANES == 8
#define LOW_WORDS 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_WORDS 2, 10, 3, 11, 6, 14, 7, 15
#define LOW_DOUBLES 0, 4, 2, 6
#define HIGH_DOUBLES 1, 5, 3, 7
#define EVEN_LANES 0, 1, 4, 5
#define ODD_LANES 2, 3, 6, 7
#else
#define LOW_WORDS 0, 4, 1, 5
#define HIGH_WORDS 2, 6, 3, 7
#define LOW_DOUBLES 0, 2
#define HIGH_DOUBLES 1, 3
#endif
#define WORDS(a, b, which) (vu) __builtin_shufflevector(a, b, which)
#define DOUBLES(a, b, which) (vu) __builtin_shufflevector((vd)(a), (vd)(b), which)

INLINE void transpose(vu x[LANES]) {
    vu y[LANES];
    UNROLL for (int i = 0; i < LANES; i += 2) {
        y[i] = WORDS(x[i], x[i + 1], LOW_WORDS);
        y[i + 1] = WORDS(x[i], x[i + 1], HIGH_WORDS);
    }
    UNROLL for (int i = 0; i < LANES; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        x[i + 2 * j] = DOUBLES(y[i + j], y[i + j + 2], LOW_DOUBLES);
        x[i + 2 * j + 1] = DOUBLES(y[i + j], y[i + j + 2], HIGH_DOUBLES);
    }
#if LANES > 4 /* x[i]: word i % 4 of every 128-bit lane, of rows i / 4 * 4 to i / 4 * 4 + 3 */
    UNROLL for (int step = 4; step < LANES; step *= 2) {
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            int a = i / step * 2 * step + i % step, b = a + step;
            y[a] = DOUBLES(x[a], x[b], EVEN_LANES);
            y[b] = DOUBLES(x[a], x[b], ODD_LANES);
        }
        UNROLL for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
#endif
}
