#include "kernels/cpu/linear_panels.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kSerialElements = 4096;  // fewer inputs are packed before a second thread would have woken
constexpr int64_t kPackBlock = 256;        // even, so that no pair is cut

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

Panels::Panels(const LinearKernels& kernels, const LinearInput& input, int64_t in_features, int64_t depth,
               bool pairs, std::vector<float>& storage)
    : kernels_(kernels),
      input_(input),
      in_features_(in_features),
      depth_(depth),
      pairs_(pairs),
      storage_(storage),
      count_(ceil_div(input.rows, kernels.max_rows)),
      rows_(ceil_div(input.rows, count_)) {
    const size_t needed = static_cast<size_t>(count_ * rows_ * depth_);
    if (storage.size() < needed) storage.resize(needed);
}

void Panels::pack() {
    if (count_ == 1 || input_.rows * in_features_ < kSerialElements) {
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
    float* panel = storage_.data() + index * rows_ * depth_;
    for (int64_t begin = 0; begin < in_features_; begin += kPackBlock) {
        const int64_t end = std::min(begin + kPackBlock, in_features_);
        for (int64_t r = 0; r < rows_; ++r) {
            float buffer[kPackBlock];
            pack_block(read(row(r), begin, end, scales[r], buffer), begin, end, panel, r);
        }
    }
    if (!pairs_ && depth_ > in_features_) std::fill_n(panel + in_features_ * rows_, rows_, 0.0F);
}

// x [end - begin] into column r of the panel.
void Panels::pack_block(const float* x, int64_t begin, int64_t end, float* panel, int64_t r) const {
    if (!pairs_) {
        for (int64_t k = begin; k < end; ++k) panel[k * rows_ + r] = x[k - begin];
        return;
    }
    uint32_t pairs[kPackBlock / 2];
    const int64_t count = ceil_div(end - begin, 2);
    pairs[count - 1] = 0;  // where there is no odd last input
    kernels_.round(x, end - begin, reinterpret_cast<uint16_t*>(pairs));
    uint32_t* to = reinterpret_cast<uint32_t*>(panel) + begin / 2 * rows_ + r;
    for (int64_t i = 0; i < count; ++i) to[i * rows_] = pairs[i];
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
