/* What the product with quantised weights is told; laid out by kernels/cpu/native.py. See quantized.c. */
#pragma once

#include <stdint.h>

enum kind { Q4_0, Q4_1, Q8_0 };
enum type { TYPE_fp32, TYPE_fp16, TYPE_bf16 };

struct matrix { /* every field 8 bytes */
    const uint8_t *tiles;
    const float *bias; /* [outputs] or NULL */
    int64_t outputs, columns, kind;
};
struct product { /* every field 8 bytes; strides in elements */
    const void *x;
    void *out;
    int64_t rows, x_stride, out_stride, x_type, out_type, num_threads;
};

void quantized_linear(const struct matrix *m, const struct product *p);
