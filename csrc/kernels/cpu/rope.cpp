#include "kernels/cpu/rope.h"

#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kSerialRows = 4;

inline void put(float* out, float value) { *out = value; }
inline void put(uint16_t* out, float value) { *out = float_to_bf16(value); }

template <class Element>
class Row {
  public:
    Row(const RopeAppendCall& call, int64_t row)
        : call_(call), half_(call.head_dim / 2), cos_(call.cos + row * half_), sin_(call.sin + row * half_) {}

    void rotate(const float* heads, int64_t num_heads, Element* out) const {
        for (int64_t h = 0; h < num_heads; ++h, heads += call_.head_dim, out += call_.head_dim) {
            for (int64_t i = 0; i < half_; ++i) {
                const float first = heads[i], second = heads[i + half_];
                put(out + i, first * cos_[i] - second * sin_[i]);
                put(out + i + half_, second * cos_[i] + first * sin_[i]);
            }
        }
    }

    void copy(const float* heads, int64_t num_heads, Element* out) const {
        for (int64_t i = 0; i < num_heads * call_.head_dim; ++i) put(out + i, heads[i]);
    }

  private:
    const RopeAppendCall& call_;
    int64_t half_;
    const float* cos_;
    const float* sin_;
};

template <class Element>
void append_row(const RopeAppendCall& call, int64_t index) {
    const Row<Element> row(call, index);
    const int64_t query_size = call.heads * call.head_dim, kv_size = call.kv_heads * call.head_dim;
    const float* qkv = call.qkv + index * (query_size + 2 * kv_size);
    const int64_t slot = call.slots[index] * kv_size;
    row.rotate(qkv, call.heads, static_cast<Element*>(call.query) + index * query_size);
    row.rotate(qkv + query_size, call.kv_heads, static_cast<Element*>(call.key_cache) + slot);
    row.copy(qkv + query_size + kv_size, call.kv_heads, static_cast<Element*>(call.value_cache) + slot);
}

void append_slice(const RopeAppendCall& call, Slice slice) {
    for (int64_t i = slice.begin; i < slice.end; ++i) {
        if (call.dtype == DType::kFloat32) {
            append_row<float>(call, i);
        } else {
            append_row<uint16_t>(call, i);
        }
    }
}

}  // namespace

void rope_append(const RopeAppendCall& call) {
    if (call.rows <= kSerialRows) {
        append_slice(call, {0, call.rows});
        return;
    }
    const int threads = num_threads();
    parallel(threads, [&](int part) { append_slice(call, slice_of(call.rows, part, threads)); });
}

}  // namespace parrot::cpu
