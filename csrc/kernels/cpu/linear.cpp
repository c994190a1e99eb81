#include "kernels/cpu/linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "concat.h"
#include "kernels/cpu/huge_pages.h"
#include "kernels/cpu/linear_kernels.h"
#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kSerialElements = 4096;  // fewer inputs are packed before a second thread would have woken
constexpr int64_t kPackBlock = 256;        // even, so that no pair is cut
constexpr int64_t kPanelsPerItem = 8;      // of a large batch; a tile is read from the L2 cache for each
constexpr int64_t kPrefetchBytes = 4096;   // ahead of what is multiplied, by when memory has answered
constexpr int64_t kItemsPerThread = 8;     // so that a thread that is late costs little

const LinearKernels& kernels() {
#if defined(__x86_64__)
    return for_current_isa<LinearKernels>({&kLinearScalar, &kLinearAvx2, &kLinearAvx512, &kLinearAvx512Bf16});
#else
    return kLinearScalar;
#endif
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Inputs in the order in which kernels read them: [depth][rows] for `rows` of them at a time. Where the last
// panel has fewer, its last input is repeated.
class Panels {
  public:
    Panels(const LinearKernels& kernels, const LinearInput& input, int64_t in_features, int64_t depth,
           DType weights, std::vector<float>& storage)
        : kernels_(kernels), input_(input), in_features_(in_features), depth_(depth), storage_(storage) {
        count_ = ceil_div(input.rows, kernels.max_rows);
        rows_ = ceil_div(input.rows, count_);
        pairs_ = weights == DType::kBFloat16 && kernels.bf16_pairs;
        const size_t needed = static_cast<size_t>(count_ * rows_ * depth_);
        if (storage.size() < needed) storage.resize(needed);
    }

    void pack() {
        if (count_ == 1 || input_.rows * in_features_ < kSerialElements) {
            for (int64_t i = 0; i < count_; ++i) pack_panel(i);
            return;
        }
        WorkCounter counter(count_);
        parallel(num_threads(), [&](int) {
            for (int64_t i; counter.next(i);) pack_panel(i);
        });
    }

    int64_t count() const { return count_; }
    int64_t rows() const { return rows_; }
    const float* panel(int64_t index) const { return storage_.data() + index * rows_ * depth_; }

  private:
    // In blocks of inputs, so that the part of the panel that all rows write stays in the L1 cache.
    void pack_panel(int64_t index) {
        thread_local std::vector<float> scratch;
        scratch.resize(static_cast<size_t>(rows_ * depth_));
        const float* rows[kMaxPanelRows];
        for (int64_t r = 0; r < rows_; ++r) {
            rows[r] = read_row(std::min(index * rows_ + r, input_.rows - 1), scratch.data() + r * depth_);
        }
        float* panel = storage_.data() + index * rows_ * depth_;
        for (int64_t begin = 0; begin < in_features_; begin += kPackBlock) {
            const int64_t end = std::min(begin + kPackBlock, in_features_);
            for (int64_t r = 0; r < rows_; ++r) {
                if (pairs_) {
                    pack_pairs(rows[r], begin, end, reinterpret_cast<uint32_t*>(panel) + r);
                } else {
                    for (int64_t k = begin; k < end; ++k) panel[k * rows_ + r] = rows[r][k];
                }
            }
        }
        if (!pairs_ && depth_ > in_features_) std::fill_n(panel + in_features_ * rows_, rows_, 0.0F);
    }

    void pack_pairs(const float* x, int64_t begin, int64_t end, uint32_t* panel) const {
        for (int64_t k = begin; k < end; k += 2) {
            const uint32_t odd = k + 1 < in_features_ ? float_to_bf16(x[k + 1]) : 0;
            panel[k / 2 * rows_] = float_to_bf16(x[k]) | odd << 16;
        }
    }

    // The row as fp32 and normalised, in place where it is both already.
    const float* read_row(int64_t row, float* scratch) const {
        if (input_.dtype == DType::kBFloat16) {
            const uint16_t* bits = static_cast<const uint16_t*>(input_.x) + row * in_features_;
            for (int64_t k = 0; k < in_features_; ++k) scratch[k] = bf16_to_float(bits[k]);
            return scratch;
        }
        const float* x = static_cast<const float*>(input_.x) + row * in_features_;
        if (input_.norm == nullptr) return x;
        const float mean = kernels_.sum_squares(x, in_features_) / static_cast<float>(in_features_);
        kernels_.scale(x, 1.0F / std::sqrt(mean + input_.eps), input_.norm, scratch, in_features_);
        return scratch;
    }

    const LinearKernels& kernels_;
    const LinearInput& input_;
    int64_t in_features_, depth_;
    std::vector<float>& storage_;
    int64_t count_, rows_;
    bool pairs_;
};

// What becomes of the sums of one tile.
class Epilogue {
  public:
    Epilogue(const LinearKernels& kernels, float* out, int64_t num_outputs, bool gated, bool add)
        : kernels_(kernels), out_(out), num_outputs_(num_outputs), gated_(gated), add_(add) {}

    void write(float* sums, int64_t row, int64_t column) const {
        float gated[kTileColumns / 2];
        const float* values = sums;
        if (gated_) {
            kernels_.silu_mul(sums, sums + kTileColumns / 2, gated);
            values = gated;
        }
        float* out = out_ + row * num_outputs_ + column;
        const int64_t width = gated_ ? kTileColumns / 2 : kTileColumns;
        const int64_t count = std::min(width, num_outputs_ - column);
        if (!add_) {
            std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
            return;
        }
        for (int64_t i = 0; i < count; ++i) out[i] += values[i];
    }

  private:
    const LinearKernels& kernels_;
    float* out_;
    int64_t num_outputs_;
    bool gated_, add_;
};

}  // namespace

PackedLinear::PackedLinear(const void* weight, DType dtype, int64_t out_features, int64_t in_features,
                           bool gated)
    : dtype_(dtype), out_features_(out_features), in_features_(in_features), gated_(gated) {
    if (out_features < 1 || in_features < 1 || (gated && out_features % 2 != 0)) {
        throw std::invalid_argument(concat("weight has the shape [", out_features, ", ", in_features,
                                           gated ? "], a gated one needs an even number of rows"
                                                 : "], at least one row and one column are needed"));
    }
    depth_ = dtype == DType::kBFloat16 ? ceil_div(in_features, 2) * 2 : in_features;
    num_tiles_ = ceil_div(num_outputs(), outputs_per_tile());
    data_ = allocate_weights(static_cast<size_t>(num_bytes()));
    WorkCounter counter(num_tiles_);
    parallel(num_threads(), [&](int) {
        for (int64_t tile; counter.next(tile);) pack_tile(weight, tile);
    });
}

int64_t PackedLinear::outputs_per_tile() const { return gated_ ? kTileColumns / 2 : kTileColumns; }

int64_t PackedLinear::tile_bytes() const { return depth_ * kTileColumns * size_of(dtype_); }

int64_t PackedLinear::weight_row(int64_t tile, int64_t column) const {
    const int64_t half = gated_ ? column / outputs_per_tile() : 0;
    const int64_t output = tile * outputs_per_tile() + column % outputs_per_tile();
    return output < num_outputs() ? half * num_outputs() + output : -1;
}

void PackedLinear::pack_tile(const void* weight, int64_t index) {
    std::byte* tile = data_.get() + index * tile_bytes();
    for (int64_t column = 0; column < kTileColumns; ++column) {
        const int64_t row = weight_row(index, column);
        if (row < 0) continue;  // zeros, as the memory came
        for (int64_t k = 0; k < in_features_; ++k) {
            if (dtype_ == DType::kFloat32) {
                reinterpret_cast<float*>(tile)[k * kTileColumns + column] =
                    static_cast<const float*>(weight)[row * in_features_ + k];
            } else {
                reinterpret_cast<uint16_t*>(tile)[(k / 2 * kTileColumns + column) * 2 + k % 2] =
                    static_cast<const uint16_t*>(weight)[row * in_features_ + k];
            }
        }
    }
}

void PackedLinear::forward(const LinearInput& input, float* out, bool add) const {
    if (input.rows == 0) return;
    thread_local std::vector<float> storage;
    const LinearKernels& kernel = kernels();
    Panels panels(kernel, input, in_features_, depth_, dtype_, storage);
    panels.pack();
    const Epilogue epilogue(kernel, out, num_outputs(), gated_, add);
    const TileKernel* table = dtype_ == DType::kFloat32 ? kernel.fp32 : kernel.bf16;
    const TileKernel multiply = table[panels.rows() - 1];
    const int threads = num_threads();
    const int64_t panel_groups = ceil_div(panels.count(), kPanelsPerItem);
    const int64_t tiles_per_item =
        std::max<int64_t>(1, num_tiles_ * panel_groups / (threads * kItemsPerThread));
    const int64_t tile_groups = ceil_div(num_tiles_, tiles_per_item);

    const auto compute = [&](int64_t index, int64_t panel, const Ahead& ahead) {
        alignas(64) float sums[kMaxPanelRows * kTileColumns];
        multiply(panels.panel(panel), tile(index), depth_, ahead, sums);
        const int64_t first = panel * panels.rows();
        const int64_t rows = std::min(panels.rows(), input.rows - first);
        for (int64_t r = 0; r < rows; ++r) {
            epilogue.write(sums + r * kTileColumns, first + r, index * outputs_per_tile());
        }
    };
    WorkCounter counter(tile_groups * panel_groups);
    parallel(threads, [&](int) {
        for (int64_t item; counter.next(item);) {
            const int64_t group = item / tile_groups, first = item % tile_groups * tiles_per_item;
            const int64_t last = std::min(first + tiles_per_item, num_tiles_);
            const int64_t end = std::min((group + 1) * kPanelsPerItem, panels.count());
            for (int64_t index = first; index < last; ++index) {
                const int64_t begin = group * kPanelsPerItem;
                for (int64_t panel = begin; panel < end; ++panel) {
                    compute(index, panel, ahead(index, panel - begin, end - begin));
                }
            }
        }
    });
}

// Where a tile is used once, a bit further on in it; else each of its uses fetches a part of the next tile.
Ahead PackedLinear::ahead(int64_t index, int64_t use, int64_t num_uses) const {
    if (num_uses == 1) return {tile(index) + kPrefetchBytes, kStepBytes};
    return {tile(index + 1) + tile_bytes() * use / num_uses, kStepBytes / num_uses};
}

void PackedLinear::read_row(int64_t row, float* out) const {
    const std::byte* base = tile(row / kTileColumns);
    const int64_t column = row % kTileColumns;
    for (int64_t k = 0; k < in_features_; ++k) {
        if (dtype_ == DType::kFloat32) {
            out[k] = reinterpret_cast<const float*>(base)[k * kTileColumns + column];
        } else {
            out[k] = bf16_to_float(
                reinterpret_cast<const uint16_t*>(base)[(k / 2 * kTileColumns + column) * 2 + k % 2]);
        }
    }
}

}  // namespace parrot::cpu
