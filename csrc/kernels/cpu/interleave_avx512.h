// Rows of words to columns with AVX-512, for linear_kernels.h; in an anonymous namespace (see isa.h).
#pragma once

#include "kernels/cpu/attention_avx512.h"

namespace parrot::cpu {
namespace {

// At most 16 rows: squares of 16 words, of which a word's rows are stored one beside the other.
void interleave_avx512(const float* const* x, int64_t rows, int64_t count, float* to) {
    const auto kept_rows = static_cast<__mmask16>((1U << rows) - 1);
    for (int64_t i = 0; i < count; i += 16) {
        const int64_t width = count - i < 16 ? count - i : 16;
        const auto kept_words = static_cast<__mmask16>((1U << width) - 1);
        __m512 square[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; ++r) {
            square[r] = r < rows ? _mm512_maskz_loadu_ps(kept_words, x[r] + i) : _mm512_setzero_ps();
        }
        Avx512::transpose(square);
#pragma GCC unroll 16
        for (int w = 0; w < 16; ++w) {
            if (w < width) _mm512_mask_storeu_ps(to + (i + w) * rows, kept_rows, square[w]);
        }
    }
}

}  // namespace
}  // namespace parrot::cpu
