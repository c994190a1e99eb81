// Attention with AVX2 and FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels/cpu/attention_item.h"

namespace parrot::cpu {
namespace {

struct Avx2 {
    using Reg = __m256;
    static constexpr int kWidth = 8;
    static constexpr int kRegisters = 12;
    static constexpr bool kDotsPairs = false;

    static Reg zero() { return _mm256_setzero_ps(); }
    static Reg set1(float x) { return _mm256_set1_ps(x); }
    static Reg load(const float* from) { return _mm256_loadu_ps(from); }
    static void store(float* to, Reg x) { _mm256_storeu_ps(to, x); }
    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
    static Reg fmadd(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static bool any_above(Reg x, float y) {
        return _mm256_movemask_ps(_mm256_cmp_ps(x, set1(y), _CMP_GT_OQ)) != 0;
    }
    static float first(Reg x) { return _mm256_cvtss_f32(x); }

    static float hmax(Reg x) {
        __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_max_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
    }
    static float hsum(Reg x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }

    static Reg keep_first(Reg x, int count) {
        if (count >= kWidth) return x;
        const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
        return _mm256_blendv_ps(set1(-__builtin_huge_valf()), x, _mm256_castsi256_ps(keep));
    }

    // 2^x = 2^n * 2^f with f in [-1/2, 1/2]; the polynomial is within 8e-8 of 2^f. Adding 1.5 * 2^23 + 127
    // leaves in the low bits n + 127, the exponent of 2^n. A NaN stays one, whatever its bits. 0 below
    // 2^-100: products with smaller weights would be denormal, which takes a hundred cycles.
    static Reg exp2(Reg x) {
        const Reg shift = set1(12583039), least = set1(-100);
        const Reg clamped = _mm256_max_ps(least, x);  // in this order a NaN stays one
        const Reg shifted = add(clamped, shift);
        const Reg f = _mm256_sub_ps(clamped, _mm256_sub_ps(shifted, shift));
        Reg p = set1(1.3276457e-3f);
        p = fmadd(p, f, set1(9.6755419e-3f));
        p = fmadd(p, f, set1(5.5507135e-2f));
        p = fmadd(p, f, set1(2.4022120e-1f));
        p = fmadd(p, f, set1(6.9314694e-1f));
        p = fmadd(p, f, set1(1.0000001f));
        const Reg power = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
        return _mm256_and_ps(mul(p, power), _mm256_cmp_ps(x, least, _CMP_NLT_UQ));
    }

    static Reg load_bf16(const uint16_t* from) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static void store_bf16(uint16_t* to, Reg x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i upper = _mm256_srli_epi32(rounded, 16);
        const __m128i packed =
            _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
    }

    static Reg low_bf16(Reg x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x), 16)); }
    static Reg high_bf16(Reg x) {
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(-65536)));
    }
    static Reg keep_lower_halves(Reg x) {
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0xffff)));
    }
};

}  // namespace

const AttentionKernels kAttentionAvx2[2] = {
    {AttentionItemKernel<Avx2, float>::attend, AttentionItemKernel<Avx2, float>::merge},
    {AttentionItemKernel<Avx2, uint16_t>::attend, AttentionItemKernel<Avx2, uint16_t>::merge},
};

}  // namespace parrot::cpu
#endif
