#include "kernels/cpu/linear_panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kPackBlock = 256;  // even, so that no pair is cut

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

Panels::Panels(const LinearKernels& kernels, const LinearInput& input, int64_t in_features, int64_t depth,
               bool pairs)
    : kernels_(kernels),
      input_(input),
      in_features_(in_features),
      depth_(depth),
      pairs_(pairs),
      count_(ceil_div(input.rows, kernels.max_rows)),
      rows_(ceil_div(input.rows, count_)) {}

void Panels::pack(float* storage) {
    storage_ = storage;
    if (count_ <= kOwnPanels) {
        for (int64_t i = 0; i < count_; ++i) pack_panel(i);
        return;
    }
    WorkCounter counter(count_);
    parallel(num_threads(), [&](int) {
        for (int64_t i; counter.next(i);) pack_panel(i);
    });
}

// In blocks of inputs, so that the part of the panel that all rows write stays in the L1 cache.
void Panels::pack_panel(int64_t index) {
    float scales[kMaxPanelRows];
    const auto row = [&](int64_t r) { return std::min(index * rows_ + r, input_.rows - 1); };
    for (int64_t r = 0; r < rows_; ++r) scales[r] = norm_scale(row(r));
    float* panel = storage_ + index * rows_ * depth_;
    for (int64_t begin = 0; begin < in_features_; begin += kPackBlock) {
        const int64_t end = std::min(begin + kPackBlock, in_features_);
        alignas(64) float buffers[kMaxPanelRows * kPackBlock];
        const float* words[kMaxPanelRows];
        for (int64_t r = 0; r < rows_; ++r) {
            float* buffer = buffers + r * kPackBlock;
            words[r] = pairs_ ? read_pairs(row(r), begin, end, scales[r], buffer)
                              : read(row(r), begin, end, scales[r], buffer);
        }
        const int64_t first = pairs_ ? begin / 2 : begin,
                      count = pairs_ ? ceil_div(end - begin, 2) : end - begin;
        kernels_.interleave(words, rows_, count, panel + first * rows_);
    }
    if (!pairs_ && depth_ > in_features_) std::fill_n(panel + in_features_ * rows_, rows_, 0.0F);
}

// The same in pairs of bf16, of which the last one is zero where their number is odd.
const float* Panels::read_pairs(int64_t row, int64_t begin, int64_t end, float scale, float* buffer) const {
    const int64_t count = end - begin;
    buffer[(count - 1) / 2] = 0;
    auto* bits = reinterpret_cast<uint16_t*>(buffer);
    if (input_.dtype == DType::kBFloat16) {
        const uint16_t* from = static_cast<const uint16_t*>(input_.x) + row * in_features_ + begin;
        std::memcpy(bits, from, static_cast<size_t>(count) * sizeof(uint16_t));
        return buffer;
    }
    float floats[kPackBlock];
    kernels_.round(read(row, begin, end, scale, floats), count, bits);
    return buffer;
}

float Panels::norm_scale(int64_t row) const {
    if (input_.norm == nullptr) return 1;
    const float* x = static_cast<const float*>(input_.x) + row * in_features_;
    const float mean = kernels_.sum_squares(x, in_features_) / static_cast<float>(in_features_);
    return 1.0F / std::sqrt(mean + input_.eps);
}

// Inputs [begin, end) of a row as fp32 and normalised: in place where they are both, else in `buffer`.
const float* Panels::read(int64_t row, int64_t begin, int64_t end, float scale, float* buffer) const {
    if (input_.dtype == DType::kBFloat16) {
        const uint16_t* bits = static_cast<const uint16_t*>(input_.x) + row * in_features_;
        for (int64_t k = begin; k < end; ++k) buffer[k - begin] = bf16_to_float(bits[k]);
        return buffer;
    }
    const float* x = static_cast<const float*>(input_.x) + row * in_features_ + begin;
    if (input_.norm == nullptr) return x;
    kernels_.scale(x, scale, input_.norm + begin, buffer, end - begin);
    return buffer;
}

}  // namespace parrot::cpu
