// A linear layer whose weight is laid out in the order in which it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/cpu/dtype.h"
#include "kernels/cpu/linear_kernels.h"
#include "kernels/cpu/linear_panels.h"

namespace parrot::cpu {

// y = x W^T, for W [out_features, in_features]. The weight is cut into tiles of 32 outputs, each [in][32] so
// that one pass over memory serves all rows (bf16: [in / 2][32][2], pairs as dpbf16 takes them); missing
// outputs and an odd last input are zeros. A gated layer has W = [gate; up]; its tiles are 16 rows of each,
// and it gives silu(x gate^T) * (x up^T), out_features / 2 outputs. Sums and outputs are fp32. Inputs stay
// fp32 too, except that with AVX512-BF16 they are rounded to bf16 for a bf16 weight. Immutable; forward may
// run in several threads.
class PackedLinear {
  public:
    PackedLinear(const void* weight, DType dtype, int64_t out_features, int64_t in_features, bool gated);

    // out [rows, num_outputs()]; `add` adds to what is there.
    void forward(const LinearInput& input, float* out, bool add) const;

    // Row `row` of the weight as fp32 [in_features]; of a layer that is not gated.
    void read_row(int64_t row, float* out) const;

    int64_t out_features() const { return out_features_; }
    int64_t in_features() const { return in_features_; }
    int64_t num_outputs() const { return gated_ ? out_features_ / 2 : out_features_; }
    int64_t num_bytes() const { return num_tiles_ * tile_bytes(); }
    DType dtype() const { return dtype_; }
    bool gated() const { return gated_; }

  private:
    class Product;

    int64_t outputs_per_tile() const;
    int64_t tile_bytes() const;
    int64_t weight_row(int64_t tile, int64_t column) const;  // -1: padding
    void pack_tile(const void* weight, int64_t tile);
    Ahead ahead(int64_t index, int64_t use, int64_t num_uses) const;
    const std::byte* tile(int64_t index) const { return data_.get() + index * tile_bytes(); }

    DType dtype_;
    int64_t out_features_, in_features_;
    bool gated_;
    int64_t depth_, num_tiles_;
    std::shared_ptr<std::byte> data_;
};

}  // namespace parrot::cpu
