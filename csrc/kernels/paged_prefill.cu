// Checks, dispatch and launch of paged prefill.
#include <algorithm>
#include <cmath>

#include "kernels/check.h"
#include "kernels/paged_prefill.cuh"
#include "kernels/paged_prefill.h"
#include "kernels/tensor_map.h"

namespace parrot {
namespace {

struct Device {
    int num_multiprocessors = 0;
    int l2_bytes = 0;
    int major = 0;
    int minor = 0;
};

Device current_device() {
    int device = 0;
    Device result;
    PARROT_CUDA(cudaGetDevice(&device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.num_multiprocessors, cudaDevAttrMultiProcessorCount, device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.l2_bytes, cudaDevAttrL2CacheSize, device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.major, cudaDevAttrComputeCapabilityMajor, device));
    PARROT_CUDA(cudaDeviceGetAttribute(&result.minor, cudaDevAttrComputeCapabilityMinor, device));
    return result;
}

void check(const PagedPrefillCall& call) {
    PARROT_CHECK(call.head_dim == 64 || call.head_dim == 128, "head_dim = ", call.head_dim,
                 ", need 64 or 128");
    PARROT_CHECK(call.num_kv_heads > 0 && call.num_heads > 0 && call.num_heads % call.num_kv_heads == 0,
                 "num_heads = ", call.num_heads, " is not a multiple of num_kv_heads = ", call.num_kv_heads);
    const struct {
        const char* name;
        int size;
    } sizes[] = {{"num_rows", call.num_rows},
                 {"num_tiles", call.num_tiles},
                 {"num_tokens", call.num_tokens},
                 {"num_blocks", call.num_blocks},
                 {"max_blocks", call.max_blocks}};
    for (const auto& size : sizes)
        PARROT_CHECK(size.size > 0, size.name, " = ", size.size, ", need 1 or more");
    PARROT_CHECK(std::isfinite(call.softmax_scale) && call.softmax_scale > 0,
                 "softmax_scale = ", call.softmax_scale, ", need a positive number");
    check_buffers({{"query", call.query, 16},
                   {"key_cache", call.key_cache, 16},
                   {"value_cache", call.value_cache, 16},
                   {"output", call.output, 16},
                   {"tiles", call.tiles, 16},
                   {"block_tables", call.block_tables, 4},
                   {"next_work", call.next_work, 4}});
}

// As many heads as have their keys and values in half of the L2 at once, at least those of one KV head.
int section_heads(const PagedPrefillCall& call, const Device& device) {
    const std::int64_t head_bytes = std::int64_t(call.num_tokens) * call.head_dim * 4;
    const std::int64_t kv_heads = std::max<std::int64_t>(1, device.l2_bytes / 2 / head_bytes);
    return int(std::min<std::int64_t>(kv_heads, call.num_kv_heads)) * (call.num_heads / call.num_kv_heads);
}

prefill::Params make_params(const PagedPrefillCall& call, const Device& device) {
    const auto map = [&](std::uintptr_t address, std::int64_t rows, int heads, int box_rows) {
        return make_tensor_map(address, call.is_bfloat16, rows, std::int64_t(heads) * call.head_dim,
                               box_rows);
    };
    const std::int64_t slots = std::int64_t(call.num_blocks) * prefill::kBlockTokens;
    prefill::Params params{};
    params.query_map = map(call.query, call.num_rows, call.num_heads, prefill::kRows);
    params.key_map = map(call.key_cache, slots, call.num_kv_heads, prefill::kBlockTokens);
    params.value_map = map(call.value_cache, slots, call.num_kv_heads, prefill::kBlockTokens);
    params.value_cache = pointer<const void>(call.value_cache);
    params.output = pointer<void>(call.output);
    params.tiles = pointer<const int4>(call.tiles);
    params.block_tables = pointer<const int32_t>(call.block_tables);
    params.next_work = pointer<uint32_t>(call.next_work);
    params.num_tiles = call.num_tiles;
    params.max_blocks = call.max_blocks;
    params.num_heads = call.num_heads;
    params.num_kv_heads = call.num_kv_heads;
    params.section_heads = section_heads(call, device);
    params.scale_log2 = call.softmax_scale * 1.4426950408889634f;
    return params;
}

template <typename T, int kHeadDim>
void launch(const PagedPrefillCall& call, const Device& device) {
    constexpr int bytes = prefill::shared_bytes<kHeadDim>();
    const auto kernel = prefill::paged_prefill_kernel<T, kHeadDim>;
    PARROT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const int blocks = std::min(device.num_multiprocessors, call.num_tiles * call.num_heads);
    kernel<<<blocks, prefill::kThreads, bytes, pointer<CUstream_st>(call.stream)>>>(
        make_params(call, device));
    PARROT_CUDA(cudaGetLastError());
}

template <typename T>
void dispatch_head_dim(const PagedPrefillCall& call, const Device& device) {
    if (call.head_dim == 128) {
        launch<T, 128>(call, device);
    } else {
        launch<T, 64>(call, device);
    }
}

}  // namespace

bool has_paged_prefill() {
    const Device device = current_device();
    if (device.major != 9 || device.minor != 0) return false;
    cudaFuncAttributes attributes{};
    PARROT_CUDA(cudaFuncGetAttributes(&attributes, prefill::paged_prefill_kernel<__half, 64>));
    return attributes.sharedSizeBytes > 0;  // the kernel is empty where it was not compiled for sm_90a
}

int paged_prefill_rows() { return prefill::kRows; }

void paged_prefill(const PagedPrefillCall& call) {
    check(call);
    const Device device = current_device();
    PARROT_CHECK(has_paged_prefill(), "compute capability ", device.major, ".", device.minor,
                 ", need 9.0 and a build for sm_90a");
    if (call.is_bfloat16) {
        dispatch_head_dim<__nv_bfloat16>(call, device);
    } else {
        dispatch_head_dim<__half>(call, device);
    }
}

}  // namespace parrot
