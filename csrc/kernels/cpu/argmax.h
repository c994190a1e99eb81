// Greedy choice: the largest logit of each row.
#pragma once

#include <cstdint>

namespace parrot::cpu {

// ids[i] = index of the largest of logits[i], the lowest of equal ones; -1 for a row with a NaN or an
// infinity.
void argmax_rows(const float* logits, int64_t rows, int64_t columns, int64_t* ids);

}  // namespace parrot::cpu
