#include "kernels/cpu/rope.h"

#include <cstring>

#include "kernels/cpu/kv_block.h"
#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kSerialRows = 4;

inline void put(float* out, float value) { *out = value; }
inline void put(uint16_t* out, float value) { *out = float_to_bf16(value); }

// Where a token of a block takes its place, head by head.
template <class Element>
class BlockToken {
  public:
    BlockToken(const RopeAppendCall& call, int64_t slot)
        : call_(call), block_(slot / kBlockTokens), token_(slot % kBlockTokens) {}

    // In words, of which each goes to a line of its own.
    void put_key(const Element* from, int64_t head) const {
        Element* to = head_of(call_.key_cache, head) + token_ * kPair;
        for (int64_t i = 0; i < call_.head_dim; i += kPair, to += kBlockTokens * kPair) {
            std::memcpy(to, from + i, sizeof(uint32_t));
        }
    }

    void put_value(const Element* from, int64_t head) const {
        Element* to =
            head_of(call_.value_cache, head) + token_ / kPair * call_.head_dim * kPair + token_ % kPair;
        for (int64_t i = 0; i < call_.head_dim; ++i) to[i * kPair] = from[i];
    }

  private:
    static constexpr int kPair = KvBlock<Element>::kPair;

    Element* head_of(void* cache, int64_t head) const {
        return static_cast<Element*>(cache) +
               KvBlock<Element>::head_at(block_, head, call_.kv_heads, call_.head_dim);
    }

    const RopeAppendCall& call_;
    int64_t block_;
    int64_t token_;
};

template <class Element>
void append_row(const RopeAppendCall& call, int64_t index) {
    const int64_t d = call.head_dim, half = d / 2;
    const float* cos = call.cos + index * half;
    const float* sin = call.sin + index * half;
    const auto rotate = [&](const float* head, Element* out) {
        for (int64_t i = 0; i < half; ++i) {
            const float first = head[i], second = head[i + half];
            put(out + i, first * cos[i] - second * sin[i]);
            put(out + i + half, second * cos[i] + first * sin[i]);
        }
    };
    const float* from = call.qkv + index * (call.heads + 2 * call.kv_heads) * d;
    Element* query = static_cast<Element*>(call.query) + index * call.heads * d;
    for (int64_t h = 0; h < call.heads; ++h, from += d, query += d) rotate(from, query);
    const BlockToken<Element> token(call, call.slots[index]);
    Element head[kMaxHeadDim];
    for (int64_t h = 0; h < call.kv_heads; ++h, from += d) {
        rotate(from, head);
        token.put_key(head, h);
    }
    for (int64_t h = 0; h < call.kv_heads; ++h, from += d) {
        for (int64_t i = 0; i < d; ++i) put(head + i, from[i]);
        token.put_value(head, h);
    }
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
