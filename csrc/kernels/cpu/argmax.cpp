#include "kernels/cpu/argmax.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kBlock = 2048;  // logits between looks at the best so far
constexpr int32_t kExponent = 0x7f800000;

// An integer that is ordered as the float is; the two zeros are one.
inline int32_t ordered(float value) {
    const int32_t bits = std::bit_cast<int32_t>(value + 0.0F);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

// In integers, which the compiler vectorises: a maximum of floats has to mind NaN.
int64_t argmax(const float* logits, int64_t columns) {
    int32_t best = std::numeric_limits<int32_t>::min();
    int64_t best_block = 0;
    for (int64_t begin = 0; begin < columns; begin += kBlock) {
        const int64_t end = std::min(begin + kBlock, columns);
        int32_t most = std::numeric_limits<int32_t>::min(), not_finite = 0;
        for (int64_t i = begin; i < end; ++i) {
            most = std::max(most, ordered(logits[i]));
            not_finite |= (std::bit_cast<int32_t>(logits[i]) & kExponent) == kExponent;
        }
        if (not_finite != 0) return -1;
        if (begin == 0 || most > best) {
            best = most;
            best_block = begin;
        }
    }
    int64_t index = best_block;
    while (ordered(logits[index]) != best) ++index;
    return index;
}

}  // namespace

void argmax_rows(const float* logits, int64_t rows, int64_t columns, int64_t* ids) {
    WorkCounter counter(rows);
    parallel(static_cast<int>(std::min<int64_t>(num_threads(), rows)), [&](int) {
        for (int64_t row; counter.next(row);) ids[row] = argmax(logits + row * columns, columns);
    });
}

}  // namespace parrot::cpu
