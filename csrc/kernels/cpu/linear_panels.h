// Inputs of a linear layer in the order in which its kernels read them.
#pragma once

#include <cstdint>

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

// So many panels each thread packs for itself, which is sooner done than fetching them from another's cache.
inline constexpr int64_t kOwnPanels = 2;

// [depth][rows] for as many rows at a time as fit the kernels' registers, evenly; where the last panel has
// fewer, its last row is repeated. Kernels that multiply pairs of bf16 get [depth / 2][rows] pairs.
class Panels {
  public:
    Panels(const LinearKernels& kernels, const LinearInput& input, int64_t in_features, int64_t depth,
           bool pairs);

    // Into `storage` of size() floats, by this thread alone where there are at most kOwnPanels.
    void pack(float* storage);

    int64_t size() const { return count_ * rows_ * depth_; }
    int64_t count() const { return count_; }
    int64_t rows() const { return rows_; }
    const float* panel(int64_t index) const { return storage_ + index * rows_ * depth_; }

  private:
    void pack_panel(int64_t index);
    float norm_scale(int64_t row) const;
    const float* read(int64_t row, int64_t begin, int64_t end, float scale, float* buffer) const;
    const float* read_pairs(int64_t row, int64_t begin, int64_t end, float scale, float* buffer) const;

    const LinearKernels& kernels_;
    const LinearInput& input_;
    const int64_t in_features_, depth_;
    const bool pairs_;
    float* storage_ = nullptr;
    int64_t count_, rows_;
};

}  // namespace parrot::cpu
