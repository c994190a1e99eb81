// Element types of weights and caches, and bf16 as bits.
#pragma once

#include <bit>
#include <cstdint>

namespace parrot::cpu {

enum class DType { kFloat32, kBFloat16 };

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// To the nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<uint16_t>(value == value ? rounded : 0x7fc0U);
}

}  // namespace parrot::cpu
