// Inputs of a linear layer in the order in which its kernels read them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/linear_kernels.h"

namespace parrot::cpu {

struct LinearInput {
    const void* x;  // [rows, in_features], fp32 or bf16
    DType dtype;
    int64_t rows;
    const float* norm = nullptr;  // [in_features]: x goes through RMSNorm with this weight first (fp32 only)
    float eps = 0;
};

// [depth][rows] for as many rows at a time as fit the kernels' registers, evenly; where the last panel has
// fewer, its last row is repeated. Kernels that multiply pairs of bf16 get [depth / 2][rows] pairs.
class Panels {
  public:
    // `storage` is the caller's, kept from call to call.
    Panels(const LinearKernels& kernels, const LinearInput& input, int64_t in_features, int64_t depth,
           bool pairs, std::vector<float>& storage);

    void pack();

    int64_t count() const { return count_; }
    int64_t rows() const { return rows_; }
    const float* panel(int64_t index) const { return storage_.data() + index * rows_ * depth_; }

  private:
    void pack_panel(int64_t index);
    void pack_block(const float* x, int64_t begin, int64_t end, float* panel, int64_t r) const;
    float norm_scale(int64_t row) const;
    const float* read(int64_t row, int64_t begin, int64_t end, float scale, float* buffer) const;

    const LinearKernels& kernels_;
    const LinearInput& input_;
    const int64_t in_features_, depth_;
    const bool pairs_;
    std::vector<float>& storage_;
    int64_t count_, rows_;
};

}  // namespace parrot::cpu
