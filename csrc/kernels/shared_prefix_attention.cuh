// SharedPrefixAttention: decode attention over a tree of shared prefixes (paper section 5.3).
//
// One persistent launch runs a flat work list. An entry is a range of tokens in the KV cache and the requests
// (members) that all attend to it; each of its K/V tiles is read from memory once and multiplied with the
// queries of every member on tensor cores. A second, small launch merges the partial results of each request
// in the fixed order of its parts, so that a given plan always gives the same bits; it is launched early
// (programmatic dependent launch) and waits on the device. Compiles with CUDA headers alone; checks live in
// the .cu file.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace parrot {

constexpr int kBlockTokens = 16;  // KV slots in a cache block
constexpr int kTileTokens = 64;   // tokens of one pipeline stage
constexpr int kWarps = 4;         // warps of a thread block that compute; one more loads
constexpr int kThreads = 32 * kWarps;
// A loading warp follows the computing warps. On Hopper it stands in a warp group of its own, which gives its
// registers to the computing one; the launcher reads the block size off the compiled kernel.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kBlockThreads = 2 * kThreads;
#else
constexpr int kBlockThreads = kThreads + 32;
#endif
constexpr int kHalfBytes = kTileTokens * 128;  // a tile lies in columns of 64 elements, 128 bytes a row
constexpr int kWarpRows = 16;                  // query rows of one tensor-core tile
constexpr int kMaxRows = kWarps * kWarpRows;
constexpr int kEntryFields = 8;  // representative, begin, end, first member, members, part, two unused

struct SharedPrefixAttentionParams {
    CUtensorMap key_map;  // [num_blocks * 16, num_kv_heads * head_dim] in boxes of 16 x 64; Hopper and later
    CUtensorMap value_map;
    const void* query;            // [num_requests, num_heads, head_dim], half or bfloat16
    const void* key_cache;        // [num_blocks, 16, num_kv_heads, head_dim]
    const void* value_cache;      // [num_blocks, 16, num_kv_heads, head_dim]
    void* output;                 // [num_requests, num_heads, head_dim]
    const int32_t* block_tables;  // [num_requests, max_blocks]
    const int32_t* entries;       // [num_entries, 8]
    const int32_t* num_entries;   // [1], on the device so that a CUDA graph can be replayed on another plan
    const int32_t* members;       // [num_members, 2]: request, part; part -1: the request has no other part
    const int32_t*
        part_begin;      // [num_requests + 1]: the parts of request r are [part_begin[r], part_begin[r + 1])
    float* part_output;  // [max_parts, num_heads, head_dim], unnormalised
    float2* part_max_sum;  // [max_parts, num_heads]: running max (base 2) and sum
    int32_t* next_work;    // [2], zero before and after
    int32_t num_requests;  // rows of the merge; those without parts in the plan are skipped
    int32_t max_blocks;
    int32_t num_heads;
    int32_t num_kv_heads;
    float scale_log2;  // softmax scale times log2(e)
};

template <typename T>
struct Packed;
template <>
struct Packed<__half> {
    static constexpr bool kIsHalf = true;
    static __device__ uint32_t pack(float low, float high) {
        __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&pair);
    }
    static __device__ __half from_float(float value) { return __float2half_rn(value); }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
template <>
struct Packed<__nv_bfloat16> {
    static constexpr bool kIsHalf = false;
    static __device__ uint32_t pack(float low, float high) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&pair);
    }
    static __device__ __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// 2^x in one instruction; -inf gives 0.
__device__ inline float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }\n" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }\n"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
    }
}

// Waits for the computing warps only.
__device__ inline void sync_computing() { asm volatile("bar.sync 1, %0;\n" ::"n"(kThreads) : "memory"); }

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// One work item: an entry for one KV head, with what its threads need to find rows and tokens.
struct WorkItem {
    int kv_head;
    int representative;  // request whose block table names the blocks of [begin, end); the first member
    int begin;
    int end;
    int first_member;
    int num_members;
    int part;      // of the first member
    int num_rows;  // row r is query head r % group of member r / group

    __device__ int first_token() const { return begin / kBlockTokens * kBlockTokens; }

    // Request and part of a member; an entry of one request needs no look-up.
    __device__ int2 member(const SharedPrefixAttentionParams& p, int index) const {
        if (num_members == 1) return make_int2(representative, part);
        return reinterpret_cast<const int2*>(p.members)[first_member + index];
    }
};

__device__ inline WorkItem read_work(const SharedPrefixAttentionParams& p, int work) {
    const int4* entry =
        reinterpret_cast<const int4*>(p.entries) + (work / p.num_kv_heads) * (kEntryFields / 4);
    const int4 low = entry[0], high = entry[1];
    const int group = p.num_heads / p.num_kv_heads;
    return {work % p.num_kv_heads, low.x, low.y, low.z, low.w, high.x, high.y, high.x * group};
}

// D += A * B on Hopper's tensor cores: A 64 x 16 in registers, B 16 x 64 in shared memory (a descriptor),
// asynchronous.
template <typename T, bool kTransposed>
__device__ inline void wgmma(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
#define PARROT_WGMMA(TYPE)                                                                                  \
    asm volatile(                                                                                           \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                         \
        " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; " \
        "}\n"                                                                                               \
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),         \
          "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),         \
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),         \
          "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),         \
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),         \
          "+f"(d[7][2]), "+f"(d[7][3])                                                                      \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0))
    if constexpr (Packed<T>::kIsHalf) {
        PARROT_WGMMA("f16");
    } else {
        PARROT_WGMMA("bf16");
    }
#undef PARROT_WGMMA
}
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_finish() {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n" ::: "memory");
}
// Describes a column of 64 elements of a tile: rows of 128 bytes, 128-byte swizzle, 1024 bytes per eight
// rows.
__device__ inline uint64_t matrix_descriptor(uint32_t address) {
    return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(1024 >> 4) << 32 |
           uint64_t(1) << 62;
}

// The query rows of an item and their running result. The four computing warps hold 16 rows each; a thread
// has rows lane / 4 and lane / 4 + 8 of its warp.
template <typename T, int kHeadDim>
struct RowTile {
    uint32_t query[kHeadDim / 16][4];
    float output[kHeadDim / 64][8][4];
    float row_max[2];
    float row_sum[2];

    __device__ void load_query(const SharedPrefixAttentionParams& p, const WorkItem& item, int first_row) {
        const int lane = threadIdx.x % 32, group = p.num_heads / p.num_kv_heads;
        const uint32_t* rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + 8 * half;
            rows[half] = nullptr;
            if (row < item.num_rows) {
                const int request = item.member(p, row / group).x;
                const int head = item.kv_head * group + row % group;
                rows[half] = reinterpret_cast<const uint32_t*>(
                    static_cast<const T*>(p.query) + (size_t(request) * p.num_heads + head) * kHeadDim);
            }
        }
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t* row = rows[i % 2];
                query[k][i] = row ? row[k * 8 + lane % 4 + (i / 2) * 4] : 0u;
            }
        }
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            for (int i = 0; i < 4; ++i) output[n / 8][n % 8][i] = 0.0f;
        }
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
    }

    // Online softmax over one tile, whose first token has the absolute position `position`; positions outside
    // [begin, end) are masked. All computing warps call this; `active`: this one has rows.
    __device__ void attend(uint32_t keys, uint32_t values, int position, const WorkItem& item, bool active,
                           float scale_log2) {
        const int lane = threadIdx.x % 32;
        const bool partial = position < item.begin || position + kTileTokens > item.end;
        if (partial) clear_values(values, position, item);
#if __CUDA_ARCH__ < 900
        if (!active) return;
#endif
        float scores[kTileTokens / 8][4];
        multiply_keys(scores, keys);
        uint32_t weights[kTileTokens / 16][4] = {};
        if (active) {
            if (partial) {
#pragma unroll
                for (int n = 0; n < kTileTokens / 8; ++n) {
                    for (int i = 0; i < 4; ++i) {
                        const int at = position + n * 8 + (lane % 4) * 2 + i % 2;
                        if (at < item.begin || at >= item.end) scores[n][i] = -INFINITY;
                    }
                }
            }
            softmax_step(scores, scale_log2);
#pragma unroll
            for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &scores[2 * n + i / 2][i % 2 * 2];
                    weights[n][i] = Packed<T>::pack(pair[0], pair[1]);
                }
            }
        }
        multiply_values(weights, values);
    }

    // Byte offset of 16-byte chunk `chunk` of a row: columns of 128 bytes, in which chunks are swizzled so
    // that the eight rows of a matrix lie in different banks (the hardware's 128-byte swizzle).
    static __device__ uint32_t tile_offset(int row, int chunk) {
        return chunk / 8 * kHalfBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
    }

  private:
    // Zeroes the V rows outside [begin, end): whole pages were loaded, and what unused slots hold, NaN
    // perhaps, must not reach the product, where even a zero weight would spread it.
    __device__ void clear_values(uint32_t values, int position, const WorkItem& item) {
        for (int index = threadIdx.x; index < kTileTokens * (kHeadDim / 8); index += kThreads) {
            const int row = index / (kHeadDim / 8), chunk = index % (kHeadDim / 8);
            if (position + row >= item.begin && position + row < item.end) continue;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(values + tile_offset(row, chunk)),
                         "r"(0)
                         : "memory");
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
        sync_computing();
    }

    __device__ void multiply_keys(float (&scores)[kTileTokens / 8][4], uint32_t keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            wgmma<T, false>(scores, query[k], matrix_descriptor(keys + k / 4 * kHalfBytes + k % 4 * 32),
                            k > 0);
        }
        wgmma_finish();
#else
        const int lane = threadIdx.x % 32;
        // Rows advance by 16 at a time, so that a lane's swizzle is fixed and only the chunk's bits flip.
        const uint32_t key_lane = keys + tile_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < kTileTokens / 8; ++n) {
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
            for (int n = 0; n < kTileTokens / 16; ++n) {
                uint32_t b[4];
                load_matrices(b, (key_lane ^ (k % 4 * 32)) + k / 4 * kHalfBytes + n * 16 * 128);
                Packed<T>::mma(scores[2 * n], query[k], b[0], b[1]);
                Packed<T>::mma(scores[2 * n + 1], query[k], b[2], b[3]);
            }
        }
#endif
    }

    __device__ void multiply_values(const uint32_t (&weights)[kTileTokens / 16][4], uint32_t values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
            for (int half = 0; half < kHeadDim / 64; ++half) {
                wgmma<T, true>(output[half], weights[n],
                               matrix_descriptor(values + half * kHalfBytes + n * 16 * 128), 1);
            }
        }
        wgmma_finish();
#else
        const int lane = threadIdx.x % 32;
        const uint32_t value_lane = values + tile_offset(lane % 16, lane / 16);
#pragma unroll
        for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; ++d) {
                uint32_t b[4];
                load_matrices_transposed(b, (value_lane ^ (d % 4 * 32)) + d / 4 * kHalfBytes + n * 16 * 128);
                Packed<T>::mma(output[d / 4][d % 4 * 2], weights[n], b[0], b[1]);
                Packed<T>::mma(output[d / 4][d % 4 * 2 + 1], weights[n], b[2], b[3]);
            }
        }
#endif
    }

    // Turns scores into weights relative to the new running max, and rescales what came before.
    __device__ void softmax_step(float (&scores)[kTileTokens / 8][4], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
                top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
            const float new_max = fmaxf(row_max[half], top * scale_log2);
            // All tokens so far masked: keep exp2 away from inf - inf.
            const float base = new_max == -INFINITY ? 0.0f : new_max;
            const float factor = exp2_fast(row_max[half] - base);
            row_max[half] = new_max;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_fast(fmaf(scores[n][i], scale_log2, -base));
                    sum += scores[n][i];
                }
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            row_sum[half] = row_sum[half] * factor + sum;
            if (__any_sync(0xffffffff, factor != 1.0f)) {
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    output[n / 8][n % 8][2 * half] *= factor;
                    output[n / 8][n % 8][2 * half + 1] *= factor;
                }
            }
        }
    }
};

// Reads the K and V pages of one tile of an item into a pipeline stage, whole pages at a time; one warp.
// `filled` is completed when all bytes are there.
template <typename T, int kHeadDim>
__device__ inline void load_tile(const SharedPrefixAttentionParams& p, const WorkItem& item, int position,
                                 uint32_t stage, uint32_t filled) {
    constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
    const int lane = threadIdx.x % 32;
    const int32_t* table =
        p.block_tables + size_t(item.representative) * p.max_blocks + position / kBlockTokens;
    const int num_pages = min(kTileTokens, item.end - position + kBlockTokens - 1) / kBlockTokens;
#if __CUDA_ARCH__ >= 900
    constexpr int kHalves = kHeadDim / 64;
    if (lane == 0) {
        const int bytes = num_pages * kBlockTokens * kHeadDim * 2 * 2;
        asm volatile(
            "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }\n" ::"r"(filled),
            "r"(bytes)
            : "memory");
    }
    __syncwarp();
    const int page = lane / (2 * kHalves), half = lane / 2 % kHalves, is_value = lane % 2;
    if (page < num_pages) {
        const uint32_t target = stage + is_value * kTileBytes + half * kHalfBytes + page * kBlockTokens * 128;
        const void* map = is_value ? &p.value_map : &p.key_map;
        const int column = item.kv_head * kHeadDim + half * 64, row = table[page] * kBlockTokens;
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
            "%4}], [%2];\n" ::"r"(target),
            "l"(map), "r"(filled), "r"(column), "r"(row)
            : "memory");
    }
#else
    constexpr int kChunks = kHeadDim / 8;
    const size_t token_stride = size_t(p.num_kv_heads) * kHeadDim;
    const int chunk = lane % kChunks;
    const T* keys = static_cast<const T*>(p.key_cache) + size_t(item.kv_head) * kHeadDim + chunk * 8;
    const T* values = static_cast<const T*>(p.value_cache) + size_t(item.kv_head) * kHeadDim + chunk * 8;
    for (int row = lane / kChunks; row < num_pages * kBlockTokens; row += 32 / kChunks) {
        const size_t offset =
            (size_t(table[row / kBlockTokens]) * kBlockTokens + row % kBlockTokens) * token_stride;
        const uint32_t target = stage + RowTile<T, kHeadDim>::tile_offset(row, chunk);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target), "l"(keys + offset)
                     : "memory");
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target + kTileBytes),
                     "l"(values + offset)
                     : "memory");
    }
    __threadfence_block();
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(filled) : "memory");
#endif
}

// Writes one row's result: straight to the output when the request has one part, else as a partial.
template <typename T, int kHeadDim>
struct RowSink {
    T* output;
    float* part;
    float2* max_sum;

    __device__ RowSink(const SharedPrefixAttentionParams& p, const WorkItem& item, int row) {
        const int group = p.num_heads / p.num_kv_heads;
        const int2 member = item.member(p, row / group);  // request, part
        const int head = item.kv_head * group + row % group;
        const bool whole = member.y < 0;
        output =
            whole ? static_cast<T*>(p.output) + (size_t(member.x) * p.num_heads + head) * kHeadDim : nullptr;
        const size_t slot = size_t(whole ? 0 : member.y) * p.num_heads + head;
        part = p.part_output + slot * kHeadDim;
        max_sum = p.part_max_sum + slot;
    }
    __device__ void store_pair(int dim, float first, float second, float sum) const {
        if (output) {
            *reinterpret_cast<uint32_t*>(output + dim) = Packed<T>::pack(first / sum, second / sum);
        } else {
            __stcg(reinterpret_cast<float2*>(part + dim), make_float2(first, second));
        }
    }
};

// Writes the rows of this warp.
template <typename T, int kHeadDim>
__device__ inline void store_rows(const SharedPrefixAttentionParams& p, const WorkItem& item,
                                  const RowTile<T, kHeadDim>& tile, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= item.num_rows) continue;
        const RowSink<T, kHeadDim> sink(p, item, row);
        const float sum = tile.row_sum[half];
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const float* pair = &tile.output[n / 8][n % 8][2 * half];
            sink.store_pair(n * 8 + (lane % 4) * 2, pair[0], pair[1], sum);
        }
        if (!sink.output && lane % 4 == 0) __stcg(sink.max_sum, make_float2(tile.row_max[half], sum));
    }
}

// Merges the parts of one request and head: a thread block each, its warps take turns at the parts and a lane
// has kHeadDim / 32 dims.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    merge_parts_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    constexpr int kDims = kHeadDim / 32;
    constexpr int kInFlight = 4;
    __shared__ float values[kWarps][kHeadDim];
    __shared__ float sums[kWarps];
    const int request = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = p.part_begin[request], end = p.part_begin[request + 1];
    if (end - begin < 2) return;
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
    const float2* max_sum = p.part_max_sum + head;
    const float* part_output = p.part_output + size_t(head) * kHeadDim + lane * kDims;
    float top = -INFINITY;
    for (int part = begin + lane; part < end; part += 32) {
        top = fmaxf(top, __ldcg(max_sum + size_t(part) * p.num_heads).x);
    }
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    float value[kDims] = {}, sum = 0.0f;
    for (int first = begin + warp; first < end; first += kWarps * kInFlight) {
        float2 stats[kInFlight];
        float2 pairs[kInFlight][kDims / 2];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int part = min(first + i * kWarps, end - 1);
            stats[i] = __ldcg(max_sum + size_t(part) * p.num_heads);
            const float2* source =
                reinterpret_cast<const float2*>(part_output + size_t(part) * p.num_heads * kHeadDim);
#pragma unroll
            for (int d = 0; d < kDims / 2; ++d) pairs[i][d] = __ldcg(source + d);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const float weight = first + i * kWarps < end ? exp2_fast(stats[i].x - top) : 0.0f;
            sum += weight * stats[i].y;
#pragma unroll
            for (int d = 0; d < kDims / 2; ++d) {
                value[2 * d] += weight * pairs[i][d].x;
                value[2 * d + 1] += weight * pairs[i][d].y;
            }
        }
    }
#pragma unroll
    for (int d = 0; d < kDims; ++d) values[warp][lane * kDims + d] = value[d];
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x < kHeadDim) {
        float total = 0.0f, total_sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            total += values[w][threadIdx.x];
            total_sum += sums[w];
        }
        static_cast<T*>(p.output)[(size_t(request) * p.num_heads + head) * kHeadDim + threadIdx.x] =
            Packed<T>::from_float(total / total_sum);
    }
}

template <int kHeadDim, int kStages>
constexpr int shared_bytes() {
    return 1024 + kStages * 2 * kTileTokens * kHeadDim * 2;
}

// The stages between the loading warp and the computing warps.
template <int kStages>
struct Pipeline {
    uint64_t filled[kStages];   // completed when a stage's tile has arrived
    uint64_t drained[kStages];  // completed when all computing warps are done with it
    int work[kStages];          // work item of the tile in the stage, -1: no more

    __device__ void init() {
#if __CUDA_ARCH__ >= 900
        constexpr int kLoadArrivals = 1;
#else
        constexpr int kLoadArrivals = 32;
#endif
        for (int s = 0; s < kStages; ++s) {
            barrier_init(shared_address(&filled[s]), kLoadArrivals);
            barrier_init(shared_address(&drained[s]), kWarps);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
    }
};

// The loading warp: claims work items and streams their tiles through the stages, always as far ahead as
// there are stages, across the borders of items.
template <typename T, int kHeadDim, int kStages>
__device__ inline void load_work(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline,
                                 uint32_t stages) {
    constexpr int kStageBytes = 2 * kTileTokens * kHeadDim * 2;
    const int total = *p.num_entries * p.num_kv_heads, lane = threadIdx.x % 32;
    int stage = 0;
    uint32_t parity = 1;  // a fresh barrier counts as drained
    const auto advance = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };
    for (int work = blockIdx.x; work < total;) {
        int next = 0;
        if (lane == 0) next = gridDim.x + atomicAdd(p.next_work, 1);
        const WorkItem item = read_work(p, work);
        for (int position = item.first_token(); position < item.end; position += kTileTokens) {
            barrier_wait(shared_address(&pipeline.drained[stage]), parity);
            if (lane == 0) pipeline.work[stage] = work;
            load_tile<T, kHeadDim>(p, item, position, stages + stage * kStageBytes,
                                   shared_address(&pipeline.filled[stage]));
            advance();
        }
        work = __shfl_sync(0xffffffff, next, 0);
    }
    barrier_wait(shared_address(&pipeline.drained[stage]), parity);
    if (lane == 0) pipeline.work[stage] = -1;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_arrive(shared_address(&pipeline.filled[stage]));
#else
    __syncwarp();
    barrier_arrive(shared_address(&pipeline.filled[stage]));
#endif
}

// The computing warps: one item after the other, its tiles in order.
template <typename T, int kHeadDim, int kStages>
__device__ inline void compute_work(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline,
                                    uint32_t stages) {
    constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
    const int first_row = threadIdx.x / 32 * kWarpRows;
    int stage = 0;
    uint32_t parity = 0;
    for (;;) {
        barrier_wait(shared_address(&pipeline.filled[stage]), parity);
        const int work = pipeline.work[stage];
        if (work < 0) return;
        const WorkItem item = read_work(p, work);
        RowTile<T, kHeadDim> tile;
        tile.load_query(p, item, first_row);
        for (int position = item.first_token(); position < item.end; position += kTileTokens) {
            barrier_wait(shared_address(&pipeline.filled[stage]), parity);
            const uint32_t keys = stages + stage * 2 * kTileBytes;
            tile.attend(keys, keys + kTileBytes, position, item, first_row < item.num_rows, p.scale_log2);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&pipeline.drained[stage]));
            if (++stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
        store_rows<T, kHeadDim>(p, item, tile, first_row);
    }
}

template <typename T, int kHeadDim, int kStages>
__global__ void __launch_bounds__(kBlockThreads, 2)
    shared_prefix_attention_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    extern __shared__ uint8_t memory[];
    __shared__ Pipeline<kStages> pipeline;
    uint8_t* stages =
        memory + (1024 - shared_address(memory) % 1024) % 1024;  // the swizzle repeats every 1024 bytes
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    if (threadIdx.x >= kThreads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
#endif
        if (threadIdx.x < kThreads + 32) load_work<T, kHeadDim, kStages>(p, pipeline, shared_address(stages));
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
#endif
        compute_work<T, kHeadDim, kStages>(p, pipeline, shared_address(stages));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(p.next_work + 1, 1) == int(gridDim.x) - 1) {
            p.next_work[0] = 0;
            p.next_work[1] = 0;
        }
    }
}

}  // namespace parrot
