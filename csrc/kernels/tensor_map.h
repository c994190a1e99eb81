// Descriptions of matrices in device memory for bulk tensor copies (Hopper and later).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/check.h"

namespace parrot {

// Describes a matrix [rows, columns] of half or bfloat16 in boxes of `box_rows` rows and 64 columns, which a
// copy lays out in the 128-byte swizzle. `address` is a multiple of 16 bytes, as `columns` * 2 is. What a box
// has beyond the matrix is zero. Throws std::invalid_argument for what the driver refuses.
inline CUtensorMap make_tensor_map(std::uintptr_t address, bool is_bfloat16, std::int64_t rows,
                                   std::int64_t columns, int box_rows) {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        PARROT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                     cudaEnableDefault, &found));
        PARROT_CHECK(found == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(rows)};
    const cuuint64_t strides[] = {cuuint64_t(columns) * 2};
    const cuuint32_t box[] = {64, cuuint32_t(box_rows)}, steps[] = {1, 1};
    CUtensorMap map{};
    const CUresult status = encode(
        &map, is_bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
        pointer<void>(address), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    PARROT_CHECK(status == CUDA_SUCCESS, "cuTensorMapEncodeTiled failed with ", int(status), " for [", rows,
                 ", ", columns, "]");
    return map;
}

}  // namespace parrot
