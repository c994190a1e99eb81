// The vector type of AVX-512 (F, BW, DQ, VL) for attention_tile.h. In an anonymous namespace, because two
// sources with different flags include it (see isa.h).
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace parrot::cpu {
namespace {

struct Avx512 {
    using Reg = __m512;
    static constexpr int kWidth = 16;
    static constexpr int kRegisters = 24;
    static constexpr bool kDotsPairs = false;

    static Reg zero() { return _mm512_setzero_ps(); }
    static Reg set1(float x) { return _mm512_set1_ps(x); }
    static Reg load(const float* from) { return _mm512_loadu_ps(from); }
    static void store(float* to, Reg x) { _mm512_storeu_ps(to, x); }
    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
    static Reg fmadd(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static float first(Reg x) { return _mm512_cvtss_f32(x); }
    static bool any_above(Reg x, float y) { return _mm512_cmp_ps_mask(x, set1(y), _CMP_GT_OQ) != 0; }
    static float hmax(Reg x) { return _mm512_reduce_max_ps(x); }
    static float hsum(Reg x) { return _mm512_reduce_add_ps(x); }

    static Reg keep_first(Reg x, int count) {
        if (count >= kWidth) return x;
        const __mmask16 keep = count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
        return _mm512_mask_mov_ps(set1(-__builtin_huge_valf()), keep, x);
    }

    // 2^x = 2^n * 2^f with f in [-1/2, 1/2]; the polynomial is within 8e-8 of 2^f. 0 below 2^-100: products
    // with smaller weights would be denormal, which takes a hundred cycles.
    static Reg exp2(Reg x) {
        const Reg n = _mm512_roundscale_ps(x, 0);
        const Reg f = _mm512_sub_ps(x, n);  // a NaN for -inf, which the mask takes out
        Reg p = set1(1.3276457e-3f);
        p = fmadd(p, f, set1(9.6755419e-3f));
        p = fmadd(p, f, set1(5.5507135e-2f));
        p = fmadd(p, f, set1(2.4022120e-1f));
        p = fmadd(p, f, set1(6.9314694e-1f));
        p = fmadd(p, f, set1(1.0000001f));
        return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set1(-100), _CMP_NLT_UQ), p, n);
    }

    static Reg load_bf16(const uint16_t* from) {
        const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    static void store_bf16(uint16_t* to, Reg x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }

    static Reg low_bf16(Reg x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x), 16)); }
    static Reg high_bf16(Reg x) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536)));
    }

    static Reg keep_lower_halves(Reg x) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0xffff)));
    }

    // For interleave_avx512.h. Within lanes of 128 bits first, then the lanes.
    static void transpose(Reg (&r)[16]) {
        Reg t[16];
        for (int i = 0; i < 16; i += 4) {
            const Reg a = _mm512_unpacklo_ps(r[i], r[i + 1]), b = _mm512_unpackhi_ps(r[i], r[i + 1]);
            const Reg c = _mm512_unpacklo_ps(r[i + 2], r[i + 3]), d = _mm512_unpackhi_ps(r[i + 2], r[i + 3]);
            t[i] = _mm512_shuffle_ps(a, c, 0x44);
            t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
            t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
            t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            const Reg a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
            const Reg b = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
            const Reg c = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
            const Reg d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
            r[i] = _mm512_shuffle_f32x4(a, c, 0x88);
            r[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
            r[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
            r[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
        }
    }
};

}  // namespace
}  // namespace parrot::cpu
