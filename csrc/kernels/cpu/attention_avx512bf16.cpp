// Attention with AVX-512 and its bfloat16 dot product, for scores of bfloat16 (exact: products of two of them
// fit fp32). Weights times values stay in fp32: rounding the weights would cost precision.
#if defined(__x86_64__)
#include "kernels/cpu/attention_avx512.h"
#include "kernels/cpu/attention_item.h"

namespace parrot::cpu {
namespace {

struct Avx512Bf16 : Avx512 {
    static constexpr bool kDotsPairs = true;

    static Reg dot_pairs(Reg a, Reg b, Reg c) {
        return _mm512_dpbf16_ps(c, __m512bh(_mm512_castps_si512(a)), __m512bh(_mm512_castps_si512(b)));
    }
};

}  // namespace

const AttentionKernels kAttentionAvx512Bf16 = {AttentionItemKernel<Avx512Bf16, uint16_t>::attend,
                                               AttentionItemKernel<Avx512Bf16, uint16_t>::merge};

}  // namespace parrot::cpu
#endif
