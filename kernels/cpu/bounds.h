/* Which blocks a row reads: the description of its bounds, and the choice by them. */
#pragma once

#include "attention.h"

#define BOUNDS_AHEAD 64 /* blocks between a prefetch and its use */

/* Bounds of a row's scores in blocks; every field 8 bytes. */
struct bounds {
    const void *q;         /* [num_heads][head_size] */
    const void *bounds;    /* of a layer: [num_kv_heads][places][2: least, largest][head_size] */
    const int64_t *places; /* [num_blocks], of each block; below 0: it has no bounds, what is found means nothing */
    float *found;          /* [num_heads][num_blocks] */
    int64_t num_blocks, num_heads, num_kv_heads, head_size, head_stride; /* stride in elements */
    int64_t num_threads;
    float scale, softcap;
};

/* The blocks in which a KV head's queries may come nearest to the best that each may reach; every field 8 bytes. */
struct choice {
    float *found;          /* of `bounds`; overwritten */
    const uint32_t *known; /* [num_blocks]: all ones, or 0: it has no bounds, is read and not counted */
    uint32_t *far;         /* [num_kv_heads][num_blocks] scratch */
    float *terms;          /* [num_kv_heads][num_blocks] scratch */
    uint8_t *mask;         /* [num_kv_heads][num_blocks]: 1 where a head reads a block */
    uint8_t *read;         /* [num_blocks]: 1 where any head reads one that has bounds */
    float *most;           /* [num_heads]: log of the sum of exponentials of the bounds of what is not read */
    float *missed;         /* [num_heads]: its share of the sum over all blocks that have bounds */
    int64_t num_blocks, num_heads, num_kv_heads;
    int64_t count; /* of blocks with places, to be read by each KV head; at most as many as there are */
};

/* A number that `count` of `far` do not exceed, or the least one that more do not. */
static uint32_t nearest(const uint32_t *far, int64_t num, int64_t count) {
    uint32_t least = 0x7fffffff;
    for (int bit = 30; bit >= 0; bit--) {
        uint32_t tried = least - (1u << bit);
        int32_t within = 0;
        for (int64_t i = 0; i < num; i++) within += far[i] <= tried;
        if (within >= count) least = tried;
        if (within == count) break;
    }
    return least;
}

/* The largest of x, and of `least`. */
static float largest(const float *x, int64_t num, float least) {
    vf top = splat(least);
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) top = vmax(top, load_fp32(x + i));
    least = max_lanes(top);
    for (; i < num; i++) least = x[i] > least ? x[i] : least;
    return least;
}

static float log_sum(const float *x, int64_t num) {
    const float none = -__builtin_inff(), top = largest(x, num, none);
    if (top == none) return none;
    float rest[LANES];
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) sum += vexp(load_fp32(x + i) - splat(top));
    for (int at = 0; at < LANES; at++) rest[at] = i + at < num ? x[i + at] : none;
    return top + logf(sum_lanes(sum + vexp(load_fp32(rest) - splat(top))));
}

/* Sums of exponentials of a row: `most`, log of the sum over what is not read, and its share of the sum over all. */
static void shares(const float *row, const uint8_t *mask, float *terms, int64_t num, float *most, float *missed) {
    const float none = -__builtin_inff(), top = largest(row, num, none);
    float left = 0, all = 0;
    vf sum = splat(0), rest = splat(0);
    int64_t i = 0;
    for (; top > none && i + LANES <= num; i += LANES) {
        vf x = vexp(load_fp32(row + i) - splat(top));
        sum += x;
        store_fp32(terms + i, x);
    }
    for (int64_t at = 0; at < i; at++) terms[at] = mask[at] ? 0 : terms[at];
    for (int64_t at = 0; at < i; at += LANES) rest += load_fp32(terms + at);
    all = sum_lanes(sum);
    left = sum_lanes(rest);
    for (; top > none && i < num; i++) {
        float x = expf(row[i] - top);
        all += x;
        left += mask[i] ? 0 : x;
    }
    *missed = left > 0 ? left / all : 0;
    *most = left > 0 ? top + logf(left) : none;
}

static void choose_of_head(const struct choice *c, int64_t kv_head) {
    const int64_t num = c->num_blocks, group = c->num_heads / c->num_kv_heads;
    const uint32_t *known = c->known, none = 0xff800000; /* the bits of -infinity */
    float *found = c->found + kv_head * group * num;
    uint32_t *far = c->far + kv_head * num;
    uint8_t *mask = c->mask + kv_head * num;
    for (int64_t i = 0; i < num; i++) far[i] = INT32_MAX;
    for (int64_t r = 0; r < group; r++) {
        float *row = found + r * num, best;
        for (int64_t i = 0; i < num; i++) {
            uint32_t bits;
            memcpy(&bits, row + i, sizeof bits);
            bits = (bits & known[i]) | (none & ~known[i]);
            memcpy(row + i, &bits, sizeof bits);
        }
        best = largest(row, num, -__builtin_inff());
        for (int64_t i = 0; i < num; i++) { /* numbers from 0 up are in the order of their bits */
            float distance = best - row[i];
            uint32_t bits;
            memcpy(&bits, &distance, sizeof bits);
            bits &= INT32_MAX;
            far[i] = bits < far[i] ? bits : far[i];
        }
    }
    for (int64_t i = 0; i < num; i++) far[i] |= ~known[i];
    uint32_t last = nearest(far, num, c->count);
    int64_t spare = c->count; /* of those exactly as far as the last: the first ones */
    for (int64_t i = 0; i < num; i++) {
        mask[i] = (far[i] < last) | !known[i];
        c->read[i] |= far[i] < last;
    }
    for (int64_t i = 0; i < num; i++) spare -= far[i] < last;
    for (int64_t i = 0; i < num && spare > 0; i++) {
        if (far[i] != last) continue;
        mask[i] = c->read[i] = 1;
        spare--;
    }
    for (int64_t r = 0; r < group; r++) {
        float *row = found + r * num, *most = c->most + kv_head * group + r;
        shares(row, mask, c->terms + kv_head * num, num, most, c->missed + kv_head * group + r);
        if (*most != -__builtin_inff()) continue;
        for (int64_t i = 0; i < num; i++) row[i] = mask[i] ? -__builtin_inff() : row[i];
        *most = log_sum(row, num); /* nothing is left, or too little beside the best */
    }
}

/* Blocks of one sequence by place: those of source s begin `strides[s]` bytes apart at `bases[s]`. */
struct packing {
    const uint8_t *mask;                              /* [num_kv_heads][num_blocks] */
    const int64_t *sources, *ids;                     /* [num_blocks] */
    int64_t bases[3], strides[3];                     /* of the sources */
    int64_t *chosen;                                  /* [num_kv_heads][width]: addresses of the head's K, ascending */
    int64_t *lengths;                                 /* [num_kv_heads]: blocks that it reads; if above width, the first */
    int64_t num_blocks, num_kv_heads, width, panel;   /* panel: bytes from head to head */
};

static void pack_of_head(const struct packing *p, int64_t kv_head) {
    const uint8_t *mask = p->mask + kv_head * p->num_blocks;
    int64_t *chosen = p->chosen + kv_head * p->width, count = 0;
    int64_t i = 0;
    for (; i < p->num_blocks && count < p->width; i++) { /* what is not read is written over: no branch to guess */
        chosen[count] = p->bases[p->sources[i]] + p->ids[i] * p->strides[p->sources[i]] + kv_head * p->panel;
        count += mask[i];
    }
    if (count < p->width) chosen[count] = 0;
    for (; i < p->num_blocks; i++) count += mask[i];
    p->lengths[kv_head] = count;
}

static void choose(const struct choice *c) {
    memset(c->read, 0, c->num_blocks);
    for (int64_t head = 0; head < c->num_kv_heads; head++) choose_of_head(c, head);
}

static void pack(const struct packing *p) {
    for (int64_t head = 0; head < p->num_kv_heads; head++) pack_of_head(p, head);
}
