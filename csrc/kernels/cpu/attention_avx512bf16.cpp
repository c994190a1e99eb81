// Attention with AVX-512 and its bfloat16 dot product.
#if defined(__x86_64__)
#include "kernels/cpu/attention_avx512.h"
#include "kernels/cpu/attention_item.h"

namespace parrot::cpu {
namespace {

struct Avx512Bf16 : Avx512 {
    static constexpr bool kDotsPairs = true;

    static void store_bf16(uint16_t* to, Reg x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), __m256i(_mm512_cvtneps_pbh(x)));
    }
    // As Avx512::exp2 for a weight that is rounded to bfloat16 next: within 8e-5 of 2^x, a 26th of that.
    static Reg exp2_rough(Reg x) {
        const Reg n = _mm512_roundscale_ps(x, 0);
        const Reg f = _mm512_sub_ps(x, n);  // a NaN for -inf, which the mask takes out
        Reg p = set1(5.5171670e-2f);
        p = fmadd(p, f, set1(2.4261114e-1f));
        p = fmadd(p, f, set1(6.9326099e-1f));
        p = fmadd(p, f, set1(9.9992807e-1f));
        return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, set1(-100), _CMP_NLT_UQ), p, n);
    }
    static Reg dot_pairs(Reg a, Reg b, Reg c) {
        return _mm512_dpbf16_ps(c, __m512bh(_mm512_castps_si512(a)), __m512bh(_mm512_castps_si512(b)));
    }
};

}  // namespace

const AttentionKernels kAttentionAvx512Bf16 = {AttentionItemKernel<Avx512Bf16, uint16_t>::attend,
                                               AttentionItemKernel<Avx512Bf16, uint16_t>::merge};

}  // namespace parrot::cpu
#endif
