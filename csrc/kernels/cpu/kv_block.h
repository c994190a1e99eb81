// How the CPU orders a block of the KV cache: so that its kernels multiply what they load, without moving it
// around first. Blocks are [kv_heads] of what one head has of 16 tokens, in words of 32 bits, each of one
// fp32 element or of two bfloat16 ones:
//   keys    [head_dim / kPair][16]: word w of token t holds its elements w * kPair and following
//   values  [16 / kPair][head_dim]: word i of row r holds element i of the tokens r * kPair and following
#pragma once

#include <cstdint>

namespace parrot::cpu {

inline constexpr int kBlockTokens = 16;
inline constexpr int kMaxHeadDim = 512;

namespace {  // each instruction set has its own, see isa.h

template <class T>
struct KvBlock {
    static constexpr int kPair = 4 / int(sizeof(T));                       // elements of a word
    static constexpr int kValueRows = kBlockTokens / kPair;                // of a block
    static constexpr int lines(int head_dim) { return head_dim / kPair; }  // of 64 bytes: keys, or values

    // Where a head's elements begin, in elements.
    static int64_t head_at(int64_t block, int64_t head, int64_t kv_heads, int64_t head_dim) {
        return (block * kv_heads + head) * kBlockTokens * head_dim;
    }
};

}  // namespace
}  // namespace parrot::cpu
