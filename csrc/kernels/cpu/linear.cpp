#include "kernels/cpu/linear.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "concat.h"
#include "kernels/cpu/huge_pages.h"
#include "kernels/cpu/linear_kernels.h"
#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kPanelsPerItem = 8;     // of a large batch; a tile is read from the L2 cache for each
constexpr int64_t kPrefetchBytes = 4096;  // ahead of what is multiplied, by when memory has answered
constexpr int64_t kItemsPerThread = 4;    // about: a late thread costs little, and tiles follow each other

const LinearKernels& kernels() {
#if defined(__x86_64__)
    return for_current_isa<LinearKernels>({&kLinearScalar, &kLinearAvx2, &kLinearAvx512, &kLinearAvx512Bf16});
#else
    return kLinearScalar;
#endif
}

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// The size of an item, so that a thread's share is about kItemsPerThread of them, of one size where it can
// be: 9 tiles as 3 times 3, since two threads that take turns at items of 2 would end up with 8 and 10.
int64_t even_part(int64_t share) {
    for (const int64_t items : {kItemsPerThread, kItemsPerThread - 1, kItemsPerThread + 1}) {
        if (share % items == 0) return share / items;
    }
    return ceil_div(share, kItemsPerThread);
}

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

// One forward: packed inputs times tiles, and what becomes of the sums.
class PackedLinear::Product {
  public:
    Product(const PackedLinear& linear, const LinearKernels& kernels, const LinearInput& input, float* out,
            bool add)
        : linear_(linear), kernels_(kernels), input_(input), out_(out), add_(add) {}

    void run() const {
        const bool pairs = linear_.dtype_ == DType::kBFloat16 && kernels_.bf16_pairs;
        Panels shared(kernels_, input_, linear_.in_features_, linear_.depth_, pairs);
        const bool each_packs = shared.count() <= kOwnPanels;
        const int threads = num_threads();
        thread_local std::vector<float> storage;
        const auto needed = static_cast<size_t>(shared.size() * (each_packs ? threads : 1));
        if (storage.size() < needed) storage.resize(needed);
        float* const memory = storage.data();  // of this thread, in all of them
        if (!each_packs) shared.pack(memory);
        const int64_t panel_groups = ceil_div(shared.count(), kPanelsPerItem);
        const int64_t num_pieces = linear_.num_tiles_ * panel_groups;
        const int64_t tiles_per_item = even_part(ceil_div(num_pieces, threads));
        const int64_t tile_groups = ceil_div(linear_.num_tiles_, tiles_per_item);
        WorkCounter counter(tile_groups * panel_groups);
        parallel(threads, [&](int part) {
            int64_t item;
            if (!counter.next(item)) return;
            Panels panels = shared;
            if (each_packs) panels.pack(memory + part * panels.size());
            do {
                const int64_t first_panel = item / tile_groups * kPanelsPerItem;
                const int64_t first_tile = item % tile_groups * tiles_per_item;
                compute(panels, {first_tile, std::min(first_tile + tiles_per_item, linear_.num_tiles_)},
                        {first_panel, std::min(first_panel + kPanelsPerItem, panels.count())});
            } while (counter.next(item));
        });
    }

  private:
    void compute(const Panels& inputs, Slice tiles, Slice panels) const {
        const TileKernel* table = linear_.dtype_ == DType::kFloat32 ? kernels_.fp32 : kernels_.bf16;
        const TileKernel multiply = table[inputs.rows() - 1];
        const int64_t num_uses = panels.end - panels.begin;
        for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
            for (int64_t panel = panels.begin; panel < panels.end; ++panel) {
                alignas(64) float sums[kMaxPanelRows * kTileColumns];
                multiply(inputs.panel(panel), linear_.tile(tile), linear_.depth_,
                         linear_.ahead(tile, panel - panels.begin, num_uses), sums);
                write(sums, panel * inputs.rows(), inputs.rows(), tile);
            }
        }
    }

    // The sums of one tile, for at most so many rows from `first` on.
    void write(const float* sums, int64_t first, int64_t most, int64_t tile) const {
        const int64_t rows = std::min(most, input_.rows - first);
        const int64_t width = linear_.outputs_per_tile(), column = tile * width;
        const int64_t num_outputs = linear_.num_outputs(), count = std::min(width, num_outputs - column);
        alignas(64) float gated[kMaxPanelRows * kTileColumns / 2];
        if (linear_.gated_) kernels_.silu_mul(sums, rows, gated);
        const float* values = linear_.gated_ ? gated : sums;
        float* out = out_ + first * num_outputs + column;
        for (int64_t r = 0; r < rows; ++r, values += width, out += num_outputs) {
            if (add_) {
                for (int64_t i = 0; i < count; ++i) out[i] += values[i];
            } else {
                std::memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
            }
        }
    }

    const PackedLinear& linear_;
    const LinearKernels& kernels_;
    const LinearInput& input_;
    float* const out_;
    const bool add_;
};

void PackedLinear::forward(const LinearInput& input, float* out, bool add) const {
    if (input.rows == 0) return;
    Product(*this, kernels(), input, out, add).run();
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
