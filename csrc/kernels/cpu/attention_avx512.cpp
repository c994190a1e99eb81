// Attention with AVX-512 (F, BW, DQ, VL).
#if defined(__x86_64__)
#include "kernels/cpu/attention_avx512.h"

#include "kernels/cpu/attention_item.h"

namespace parrot::cpu {

const AttentionKernels kAttentionAvx512[2] = {
    {AttentionItemKernel<Avx512, float>::attend, AttentionItemKernel<Avx512, float>::merge},
    {AttentionItemKernel<Avx512, uint16_t>::attend, AttentionItemKernel<Avx512, uint16_t>::merge},
};

}  // namespace parrot::cpu
#endif
