// Checks, dispatch and launch of SharedPrefixAttention.
#include <cmath>

#include "kernels/check.h"
#include "kernels/merge_parts.cuh"
#include "kernels/shared_prefix_attention.cuh"
#include "kernels/shared_prefix_attention.h"
#include "kernels/tensor_map.h"

namespace parrot {
namespace {

struct Device {
    int num_multiprocessors = 0;
    int shared_bytes_per_multiprocessor = 0;
    int major = 0;
};

Device current_device() {
    int device = 0;
    Device result;
    PARROT_CUDA(cudaGetDevice(&device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.num_multiprocessors, cudaDevAttrMultiProcessorCount, device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.shared_bytes_per_multiprocessor,
                                       cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.major, cudaDevAttrComputeCapabilityMajor, device));
    return result;
}

// Three stages where two such blocks fit a multiprocessor (Hopper and later data-centre parts), else two.
template <int kHeadDim>
bool has_three_stages(const Device& device) {
    return device.shared_bytes_per_multiprocessor >= 2 * (shared_bytes<kHeadDim, 3>() + 4096);
}

// Blocks of the kernel that run at once.
template <typename T, int kHeadDim, int kStages>
int prepare(const Device& device) {
    constexpr int bytes = shared_bytes<kHeadDim, kStages>();
    const auto kernel = shared_prefix_attention_kernel<T, kHeadDim, kStages>;
    PARROT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int blocks = 0;
    PARROT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kBlockThreads, bytes));
    return blocks * device.num_multiprocessors;
}

template <int kHeadDim>
int grid_size(const Device& device) {
    return has_three_stages<kHeadDim>(device) ? prepare<__half, kHeadDim, 3>(device)
                                              : prepare<__half, kHeadDim, 2>(device);
}

// Launches so that the kernel may start before the one ahead of it ends: kernels wait on the device where
// they first need its results (Hopper and later).
template <typename Kernel>
void launch_early(Kernel kernel, int blocks, int threads, size_t bytes,
                  const SharedPrefixAttentionParams& params, const Device& device, cudaStream_t stream) {
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = device.major >= 9 ? 1 : 0;
    PARROT_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

template <typename T, int kHeadDim, int kStages>
void launch_attention(const SharedPrefixAttentionParams& params, const Device& device, cudaStream_t stream) {
    launch_early(shared_prefix_attention_kernel<T, kHeadDim, kStages>, prepare<T, kHeadDim, kStages>(device),
                 kBlockThreads, shared_bytes<kHeadDim, kStages>(), params, device, stream);
}

// As many warps for a row as keep the device busy.
template <typename T, int kHeadDim>
void launch_merge(SharedPrefixAttentionParams params, const Device& device, cudaStream_t stream) {
    const int rows = params.num_requests * params.num_heads;
    params.merge_warps = kMergeWarps;
    while (params.merge_warps > 1 && rows * params.merge_warps > 32 * device.num_multiprocessors) {
        params.merge_warps /= 2;
    }
    const int blocks = (rows * params.merge_warps + kMergeWarps - 1) / kMergeWarps;
    launch_early(merge_parts_kernel<T, kHeadDim>, blocks, 32 * kMergeWarps, 0, params, device, stream);
}

template <typename T, int kHeadDim>
void launch(const SharedPrefixAttentionParams& params, cudaStream_t stream) {
    const Device device = current_device();
    if (has_three_stages<kHeadDim>(device)) {
        launch_attention<T, kHeadDim, 3>(params, device, stream);
    } else {
        launch_attention<T, kHeadDim, 2>(params, device, stream);
    }
    launch_merge<T, kHeadDim>(params, device, stream);
}

// Describes a cache [num_blocks * 16, num_kv_heads * head_dim] in boxes of one block and 64 columns.
CUtensorMap make_map(std::uintptr_t address, const SharedPrefixAttentionCall& call) {
    return make_tensor_map(address, call.is_bfloat16, call.num_blocks * std::int64_t(kBlockTokens),
                           std::int64_t(call.num_kv_heads) * call.head_dim, kBlockTokens);
}

template <typename T>
void dispatch_head_dim(const SharedPrefixAttentionParams& params, int head_dim, cudaStream_t stream) {
    if (head_dim == 128) {
        launch<T, 128>(params, stream);
    } else {
        launch<T, 64>(params, stream);
    }
}

void check(const SharedPrefixAttentionCall& call) {
    PARROT_CHECK(call.head_dim == 64 || call.head_dim == 128, "head_dim = ", call.head_dim,
                 ", need 64 or 128");
    PARROT_CHECK(call.num_kv_heads > 0 && call.num_heads > 0 && call.num_heads % call.num_kv_heads == 0,
                 "num_heads = ", call.num_heads, " is not a multiple of num_kv_heads = ", call.num_kv_heads);
    PARROT_CHECK(call.num_heads / call.num_kv_heads <= kMaxRows,
                 "num_heads / num_kv_heads = ", call.num_heads / call.num_kv_heads, ", at most ", kMaxRows);
    PARROT_CHECK(call.num_requests > 0, "num_requests = ", call.num_requests);
    PARROT_CHECK(call.num_blocks > 0 && call.max_blocks > 0, "num_blocks = ", call.num_blocks,
                 ", max_blocks = ", call.max_blocks);
    PARROT_CHECK(std::isfinite(call.softmax_scale), "softmax_scale = ", call.softmax_scale);
    check_buffers({{"query", call.query, 16},
                   {"key_cache", call.key_cache, 16},
                   {"value_cache", call.value_cache, 16},
                   {"output", call.output, 16},
                   {"block_tables", call.block_tables, 4},
                   {"entries", call.entries, 16},
                   {"num_entries", call.num_entries, 4},
                   {"members", call.members, 8},
                   {"part_begin", call.part_begin, 4},
                   {"part_output", call.part_output, 16},
                   {"part_max_sum", call.part_max_sum, 8},
                   {"next_work", call.next_work, 4}});
}

}  // namespace

int shared_prefix_attention_grid(int head_dim) {
    PARROT_CHECK(head_dim == 64 || head_dim == 128, "head_dim = ", head_dim, ", need 64 or 128");
    return head_dim == 128 ? grid_size<128>(current_device()) : grid_size<64>(current_device());
}

void shared_prefix_attention(const SharedPrefixAttentionCall& call) {
    check(call);
    SharedPrefixAttentionParams params{};
    params.query = pointer<const void>(call.query);
    params.key_cache = pointer<const void>(call.key_cache);
    params.value_cache = pointer<const void>(call.value_cache);
    params.output = pointer<void>(call.output);
    params.block_tables = pointer<const int32_t>(call.block_tables);
    params.entries = pointer<const int32_t>(call.entries);
    params.num_entries = pointer<const int32_t>(call.num_entries);
    params.members = pointer<const int32_t>(call.members);
    params.part_begin = pointer<const int32_t>(call.part_begin);
    params.part_output = pointer<float>(call.part_output);
    params.part_max_sum = pointer<float2>(call.part_max_sum);
    params.next_work = pointer<int32_t>(call.next_work);
    params.num_requests = call.num_requests;
    params.max_blocks = call.max_blocks;
    params.num_heads = call.num_heads;
    params.num_kv_heads = call.num_kv_heads;
    if (current_device().major >= 9) {
        params.key_map = make_map(call.key_cache, call);
        params.value_map = make_map(call.value_cache, call);
    }
    params.scale_log2 = call.softmax_scale * 1.4426950408889634f;
    const auto stream = pointer<CUstream_st>(call.stream);
    if (call.is_bfloat16) {
        dispatch_head_dim<__nv_bfloat16>(params, call.head_dim, stream);
    } else {
        dispatch_head_dim<__half>(params, call.head_dim, stream);
    }
}

}  // namespace parrot
