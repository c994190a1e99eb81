// Attention without particular instructions: four lanes in plain C++, which a compiler may turn into whatever
// every CPU of its target has.
#include <cstring>

#include "kernels/cpu/attention_item.h"

namespace parrot::cpu {
namespace {

struct Scalar {
    struct Reg {
        float lane[4];
    };
    static constexpr int kWidth = 4;
    static constexpr int kRegisters = 12;
    static constexpr bool kDotsPairs = false;

    template <class Lane>
    static Reg each(Lane lane) {
        return {{lane(0), lane(1), lane(2), lane(3)}};
    }

    static Reg zero() { return set1(0); }
    static Reg set1(float x) { return {{x, x, x, x}}; }
    static Reg load(const float* from) {
        Reg result;
        std::memcpy(result.lane, from, sizeof result.lane);  // also of what was written as bfloat16
        return result;
    }
    static void store(float* to, Reg x) { std::memcpy(to, x.lane, sizeof x.lane); }
    static Reg add(Reg a, Reg b) {
        return each([&](int i) { return a.lane[i] + b.lane[i]; });
    }
    static Reg mul(Reg a, Reg b) {
        return each([&](int i) { return a.lane[i] * b.lane[i]; });
    }
    static Reg max(Reg a, Reg b) {
        return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static Reg fmadd(Reg a, Reg b, Reg c) {
        return each([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
    }
    static float first(Reg x) { return x.lane[0]; }
    static bool any_above(Reg x, float y) {
        return x.lane[0] > y || x.lane[1] > y || x.lane[2] > y || x.lane[3] > y;
    }
    static float hmax(Reg x) {
        const float a = x.lane[0] > x.lane[1] ? x.lane[0] : x.lane[1];
        const float b = x.lane[2] > x.lane[3] ? x.lane[2] : x.lane[3];
        return a > b ? a : b;
    }
    static float hsum(Reg x) { return (x.lane[0] + x.lane[1]) + (x.lane[2] + x.lane[3]); }
    static Reg keep_first(Reg x, int count) {
        return each([&](int i) { return i < count ? x.lane[i] : -__builtin_huge_valf(); });
    }

    // 2^x = 2^n * 2^f with f in [-1/2, 1/2]; the polynomial is within 8e-8 of 2^f. Adding 1.5 * 2^23 + 127
    // leaves in the low bits n + 127, the exponent of 2^n. A NaN stays one, whatever its bits. 0 below
    // 2^-100: products with smaller weights would be denormal, which takes a hundred cycles.
    static float exp2(float x) {
        if (x < -100) return 0;
        const float shifted = x + 12583039;
        const float f = x - (shifted - 12583039);
        float p = 1.3276457e-3f;
        p = p * f + 9.6755419e-3f;
        p = p * f + 5.5507135e-2f;
        p = p * f + 2.4022120e-1f;
        p = p * f + 6.9314694e-1f;
        p = p * f + 1.0000001f;
        return p * from_bits(bits(shifted) << 23);
    }
    static Reg exp2(Reg x) {
        return each([&](int i) { return exp2(x.lane[i]); });
    }

    static uint32_t bits(float x) {
        uint32_t result;
        std::memcpy(&result, &x, sizeof result);
        return result;
    }
    static float from_bits(uint32_t x) {
        float result;
        std::memcpy(&result, &x, sizeof result);
        return result;
    }

    static Reg load_bf16(const uint16_t* from) {
        return each([&](int i) { return from_bits(uint32_t(from[i]) << 16); });
    }
    static void store_bf16(uint16_t* to, Reg x) {
        for (int i = 0; i < 4; ++i) {
            const uint32_t value = bits(x.lane[i]);
            to[i] = static_cast<uint16_t>((value + 0x7fff + (value >> 16 & 1)) >> 16);
        }
    }
    static Reg low_bf16(Reg x) {
        return each([&](int i) { return from_bits(bits(x.lane[i]) << 16); });
    }
    static Reg high_bf16(Reg x) {
        return each([&](int i) { return from_bits(bits(x.lane[i]) & 0xffff0000u); });
    }
    static Reg keep_lower_halves(Reg x) {
        return each([&](int i) { return from_bits(bits(x.lane[i]) & 0xffffu); });
    }
};

}  // namespace

const AttentionKernels kAttentionScalar[2] = {
    {AttentionItemKernel<Scalar, float>::attend, AttentionItemKernel<Scalar, float>::merge},
    {AttentionItemKernel<Scalar, uint16_t>::attend, AttentionItemKernel<Scalar, uint16_t>::merge},
};

}  // namespace parrot::cpu
