// The vector type of linear_tile.h for AVX-512; include it inside an anonymous namespace's file only.
#pragma once

#include <cstdint>

// GCC 12 warns of the undefined registers that its own header passes on (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace parrot::cpu {
namespace {

struct V {
    using Reg = __m512;
    static constexpr int kWidth = 16,
                         kVectors = 2;  // 12 rows: 24 sums, 4 weights and an input in 32 registers

    static Reg zero() { return _mm512_setzero_ps(); }
    static Reg broadcast(float x) { return _mm512_set1_ps(x); }
    static Reg load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, Reg x) { _mm512_storeu_ps(p, x); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
    static Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
    static Reg round(Reg x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Reg exp2_int(Reg x) { return _mm512_scalef_ps(_mm512_set1_ps(1.0F), x); }
    static void load_pairs(const uint16_t* p, Reg& even, Reg& odd) {
        const __m512i pairs = _mm512_loadu_si512(p);
        even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

}  // namespace
}  // namespace parrot::cpu
