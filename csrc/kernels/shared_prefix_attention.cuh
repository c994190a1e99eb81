// SharedPrefixAttention: decode attention over a tree of shared prefixes (paper section 5.3).
//
// One persistent launch runs a flat work list. An entry is a range of tokens in the KV cache and the requests
// (members) that all attend to it; each of its K/V tiles is read from memory once and multiplied with the
// queries of every member on tensor cores. A request's result is the merge of the partial results of its
// entries: whoever finishes a request's last part merges it, in the fixed order of the parts, so that a given
// plan always gives the same bits. Compiles with CUDA headers alone; checks live in the .cu file.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace parrot {

constexpr int kBlockTokens = 16;   // KV slots in a cache block
constexpr int kTileTokens = 64;    // tokens of one pipeline stage
constexpr int kWarps = 4;          // warps in a thread block
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpRows = 16;      // query rows of one tensor-core tile
constexpr int kMaxRows = kWarps * kWarpRows;
constexpr int kEntryFields = 8;    // representative, begin, end, first member, members, three unused

struct SharedPrefixAttentionParams {
    const void* query;              // [num_requests, num_heads, head_dim], half or bfloat16
    const void* key_cache;          // [num_blocks, 16, num_kv_heads, head_dim]
    const void* value_cache;        // [num_blocks, 16, num_kv_heads, head_dim]
    void* output;                   // [num_requests, num_heads, head_dim]
    const int32_t* block_tables;    // [num_requests, max_blocks]
    const int32_t* entries;         // [num_entries, 8]
    const int32_t* num_entries;     // [1], on the device so that a CUDA graph can be replayed on another plan
    const int32_t* members;         // [num_members, 2]: request, part
    const int32_t* part_begin;      // [num_requests + 1]: the parts of request r are [part_begin[r], part_begin[r + 1])
    float* part_output;             // [max_parts, num_heads, head_dim], unnormalised
    float2* part_max_sum;           // [max_parts, num_heads]: running max (base 2) and sum
    int32_t* arrivals;              // [num_requests, num_kv_heads], zero before and after
    int32_t* next_work;             // [2], zero before and after
    int32_t max_blocks;
    int32_t num_heads;
    int32_t num_kv_heads;
    float scale_log2;               // softmax scale times log2(e)
};

template <typename T>
struct Packed;
template <>
struct Packed<__half> {
    static __device__ uint32_t pack(float low, float high) {
        __half2 pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&pair);
    }
    static __device__ __half from_float(float value) { return __float2half_rn(value); }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};
template <>
struct Packed<__nv_bfloat16> {
    static __device__ uint32_t pack(float low, float high) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t*>(&pair);
    }
    static __device__ __nv_bfloat16 from_float(float value) { return __float2bfloat16_rn(value); }
    static __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes zeros where the token is out of range: garbage in unused slots must not reach
// the product with V, where even a zero weight would turn NaN into NaN.
__device__ inline void copy_async_16(uint32_t destination, const void* source, bool valid) {
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes));
}
__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;\n"); }
template <int kPending>
__device__ inline void copy_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

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
    int representative;  // request whose block table names the blocks of [begin, end)
    int begin;
    int end;
    int first_member;
    int num_members;
    int group;  // query heads per KV head; row r is head r % group of member r / group
    int num_rows;
};

__device__ inline WorkItem read_work(const SharedPrefixAttentionParams& p, int work) {
    const int4* entry = reinterpret_cast<const int4*>(p.entries) + (work / p.num_kv_heads) * (kEntryFields / 4);
    const int4 first = entry[0];
    const int group = p.num_heads / p.num_kv_heads;
    const int num_members = entry[1].x;
    return {work % p.num_kv_heads, first.x, first.y, first.z, first.w, num_members, group, num_members * group};
}

// State of one warp: a tile of 16 query rows. A thread holds rows lane / 4 and lane / 4 + 8.
template <typename T, int kHeadDim>
struct WarpTile {
    uint32_t query[kHeadDim / 16][4];
    float output[kHeadDim / 8][4];
    float row_max[2];
    float row_sum[2];

    __device__ void load_query(const SharedPrefixAttentionParams& p, const WorkItem& item, int first_row) {
        const int lane = threadIdx.x % 32;
        const uint32_t* rows[2];
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + 8 * half;
            rows[half] = nullptr;
            if (row < item.num_rows) {
                const int request = p.members[2 * (item.first_member + row / item.group)];
                const int head = item.kv_head * item.group + row % item.group;
                rows[half] = reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.query) +
                                                               (size_t(request) * p.num_heads + head) * kHeadDim);
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
            for (int i = 0; i < 4; ++i) output[n][i] = 0.0f;
        }
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
    }

    // Online softmax over kTokens tokens at rows [token, token + kTokens) of the K and V tiles in shared memory.
    // `position` is the absolute position of the first of them; positions outside [begin, end) are masked.
    template <int kTokens>
    __device__ void attend(uint32_t key_tile, uint32_t value_tile, int token, int position, const WorkItem& item,
                           float scale_log2) {
        const int lane = threadIdx.x % 32;
        float scores[kTokens / 8][4];
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
            for (int n = 0; n < kTokens / 16; ++n) {
                uint32_t b[4];
                const int row = token + n * 16 + lane % 8 + (lane / 16) * 8;
                const int chunk = k * 2 + (lane / 8) % 2;
                load_matrices(b, key_tile + tile_offset(row, chunk));
                Packed<T>::mma(scores[2 * n], query[k], b[0], b[1]);
                Packed<T>::mma(scores[2 * n + 1], query[k], b[2], b[3]);
            }
        }
        const bool partial = position < item.begin || position + kTokens > item.end;
        if (partial) {
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n) {
                for (int i = 0; i < 4; ++i) {
                    const int at = position + n * 8 + (lane % 4) * 2 + i % 2;
                    if (at < item.begin || at >= item.end) scores[n][i] = -INFINITY;
                }
            }
        }
        rescale<kTokens>(scores, scale_log2);
#pragma unroll
        for (int n = 0; n < kTokens / 16; ++n) {
            const uint32_t a[4] = {Packed<T>::pack(scores[2 * n][0], scores[2 * n][1]),
                                   Packed<T>::pack(scores[2 * n][2], scores[2 * n][3]),
                                   Packed<T>::pack(scores[2 * n + 1][0], scores[2 * n + 1][1]),
                                   Packed<T>::pack(scores[2 * n + 1][2], scores[2 * n + 1][3])};
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; ++d) {
                uint32_t b[4];
                const int row = token + n * 16 + lane % 16;
                load_matrices_transposed(b, value_tile + tile_offset(row, d * 2 + lane / 16));
                Packed<T>::mma(output[2 * d], a, b[0], b[1]);
                Packed<T>::mma(output[2 * d + 1], a, b[2], b[3]);
            }
        }
    }

    // Byte offset of a 16-byte chunk in a tile of rows of kHeadDim elements; chunks are swizzled so that the
    // eight rows of a matrix lie in different banks.
    static __device__ uint32_t tile_offset(int row, int chunk) {
        return row * (kHeadDim * 2) + ((chunk ^ (row % 8)) * 16);
    }

  private:
    template <int kTokens>
    __device__ void rescale(float (&scores)[kTokens / 8][4], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n) {
                top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
            const float new_max = fmaxf(row_max[half], top * scale_log2);
            // All tokens so far masked: keep exp2 away from inf - inf.
            const float base = new_max == -INFINITY ? 0.0f : new_max;
            const float factor = exp2f(row_max[half] - base);
            row_max[half] = new_max;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2f(scores[n][i] * scale_log2 - base);
                    sum += scores[n][i];
                }
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            row_sum[half] = row_sum[half] * factor + sum;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                output[n][2 * half] *= factor;
                output[n][2 * half + 1] *= factor;
            }
        }
    }
};

// Reads the K and V rows of one tile of an item into a pipeline stage.
template <typename T, int kHeadDim>
__device__ inline void load_tile(const SharedPrefixAttentionParams& p, const WorkItem& item, int position,
                                 uint32_t key_tile, uint32_t value_tile) {
    constexpr int kChunks = kHeadDim / 8;
    constexpr int kRowsPerPass = kThreads / kChunks;
    const int chunk = threadIdx.x % kChunks;
    const int32_t* table = p.block_tables + size_t(item.representative) * p.max_blocks;
    const size_t token_stride = size_t(p.num_kv_heads) * kHeadDim;
    const T* keys = static_cast<const T*>(p.key_cache) + size_t(item.kv_head) * kHeadDim + chunk * 8;
    const T* values = static_cast<const T*>(p.value_cache) + size_t(item.kv_head) * kHeadDim + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < kTileTokens / kRowsPerPass; ++pass) {
        const int row = threadIdx.x / kChunks + pass * kRowsPerPass;
        const int at = position + row;
        const bool valid = at >= item.begin && at < item.end;
        size_t offset = 0;
        if (valid) {
            offset = (size_t(table[at / kBlockTokens]) * kBlockTokens + at % kBlockTokens) * token_stride;
        }
        const uint32_t target = WarpTile<T, kHeadDim>::tile_offset(row, chunk);
        copy_async_16(key_tile + target, keys + offset, valid);
        copy_async_16(value_tile + target, values + offset, valid);
    }
}

// Writes one row's result: straight to the output when the request has one part, else as a partial.
template <typename T, int kHeadDim>
struct RowSink {
    T* output;
    float* part;
    float2* max_sum;

    __device__ RowSink(const SharedPrefixAttentionParams& p, const WorkItem& item, int row) {
        const int* member = p.members + 2 * (item.first_member + row / item.group);
        const int request = member[0], part_index = member[1];
        const int head = item.kv_head * item.group + row % item.group;
        const bool whole = p.part_begin[request + 1] - p.part_begin[request] == 1;
        output = whole ? static_cast<T*>(p.output) + (size_t(request) * p.num_heads + head) * kHeadDim : nullptr;
        const size_t slot = size_t(part_index) * p.num_heads + head;
        part = p.part_output + slot * kHeadDim;
        max_sum = p.part_max_sum + slot;
    }
    __device__ void store(int dim, float value, float sum) const {
        if (output) {
            output[dim] = Packed<T>::from_float(value / sum);
        } else {
            __stcg(part + dim, value);
        }
    }
    __device__ void store_pair(int dim, float first, float second, float sum) const {
        if (output) {
            *reinterpret_cast<uint32_t*>(output + dim) = Packed<T>::pack(first / sum, second / sum);
        } else {
            __stcg(reinterpret_cast<float2*>(part + dim), make_float2(first, second));
        }
    }
};

// Rows over warps: each warp wrote its own 16 rows of the tile.
template <typename T, int kHeadDim>
__device__ inline void store_rows(const SharedPrefixAttentionParams& p, const WorkItem& item,
                                  const WarpTile<T, kHeadDim>& tile, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= item.num_rows) continue;
        const RowSink<T, kHeadDim> sink(p, item, row);
        const float sum = tile.row_sum[half];
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const int dim = n * 8 + (lane % 4) * 2;
            sink.store_pair(dim, tile.output[n][2 * half], tile.output[n][2 * half + 1], sum);
        }
        if (!sink.output && lane % 4 == 0) __stcg(sink.max_sum, make_float2(tile.row_max[half], sum));
    }
}

// Tokens over warps: all warps hold the same 16 rows for different tokens; merge them through shared memory.
template <typename T, int kHeadDim>
__device__ inline void merge_warps_and_store(const SharedPrefixAttentionParams& p, const WorkItem& item,
                                             const WarpTile<T, kHeadDim>& tile, float* scratch) {
    float2* stats = reinterpret_cast<float2*>(scratch + kWarps * kWarpRows * kHeadDim);  // [kWarps, 16]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        if (row >= item.num_rows) continue;
        float* target = scratch + (warp * kWarpRows + row) * kHeadDim;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            *reinterpret_cast<float2*>(target + n * 8 + (lane % 4) * 2) =
                make_float2(tile.output[n][2 * half], tile.output[n][2 * half + 1]);
        }
        if (lane % 4 == 0) stats[warp * kWarpRows + row] = make_float2(tile.row_max[half], tile.row_sum[half]);
    }
    __syncthreads();
    for (int index = threadIdx.x; index < item.num_rows * kHeadDim; index += kThreads) {
        const int row = index / kHeadDim, dim = index % kHeadDim;
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) top = fmaxf(top, stats[w * kWarpRows + row].x);
        float value = 0.0f, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = exp2f(stats[w * kWarpRows + row].x - top);
            value += weight * scratch[(w * kWarpRows + row) * kHeadDim + dim];
            sum += weight * stats[w * kWarpRows + row].y;
        }
        const RowSink<T, kHeadDim> sink(p, item, row);
        sink.store(dim, value, sum);
        if (!sink.output && dim == 0) __stcg(sink.max_sum, make_float2(top, sum));
    }
}

// Merges all parts of one request for the heads of one KV head.
template <typename T, int kHeadDim>
__device__ inline void merge_parts(const SharedPrefixAttentionParams& p, int request, int kv_head) {
    const int group = p.num_heads / p.num_kv_heads;
    const int begin = p.part_begin[request], end = p.part_begin[request + 1];
    for (int index = threadIdx.x; index < group * kHeadDim; index += kThreads) {
        const int head = kv_head * group + index / kHeadDim, dim = index % kHeadDim;
        float top = -INFINITY, value = 0.0f, sum = 0.0f;
        for (int part = begin; part < end; ++part) {
            const size_t slot = size_t(part) * p.num_heads + head;
            const float2 max_sum = __ldcg(p.part_max_sum + slot);
            const float partial = __ldcg(p.part_output + slot * kHeadDim + dim);
            const float new_top = fmaxf(top, max_sum.x);
            const float old_weight = exp2f(top - new_top), weight = exp2f(max_sum.x - new_top);
            value = value * old_weight + partial * weight;
            sum = sum * old_weight + max_sum.y * weight;
            top = new_top;
        }
        static_cast<T*>(p.output)[(size_t(request) * p.num_heads + head) * kHeadDim + dim] =
            Packed<T>::from_float(value / sum);
    }
}

// Counts this item's parts as arrived and merges the requests for which it was the last.
template <typename T, int kHeadDim>
__device__ inline void arrive_and_merge(const SharedPrefixAttentionParams& p, const WorkItem& item, int* complete) {
    __threadfence();
    __syncthreads();
    for (int m = threadIdx.x; m < item.num_members; m += kThreads) {
        const int request = p.members[2 * (item.first_member + m)];
        const int num_parts = p.part_begin[request + 1] - p.part_begin[request];
        int* arrivals = p.arrivals + size_t(request) * p.num_kv_heads + item.kv_head;
        const bool last = num_parts > 1 && atomicAdd(arrivals, 1) == num_parts - 1;
        if (last) *arrivals = 0;
        complete[m] = last ? request : -1;
    }
    __syncthreads();
    __threadfence();
    for (int m = 0; m < item.num_members; ++m) {
        if (complete[m] >= 0) merge_parts<T, kHeadDim>(p, complete[m], item.kv_head);
    }
}

template <int kHeadDim, int kStages>
constexpr int shared_bytes() {
    return kStages * 2 * kTileTokens * kHeadDim * 2;
}

template <typename T, int kHeadDim, int kStages>
__device__ inline void run_item(const SharedPrefixAttentionParams& p, const WorkItem& item, uint8_t* memory,
                                int* complete) {
    constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
    const uint32_t base = shared_address(memory);
    const int warp = threadIdx.x / 32;
    const bool rows_over_warps = item.num_rows > kWarpRows;
    const int first = item.begin / kBlockTokens * kBlockTokens;
    const int num_tiles = (item.end - first + kTileTokens - 1) / kTileTokens;

    for (int s = 0; s < kStages - 1; ++s) {
        if (s < num_tiles) {
            const uint32_t stage = base + s * 2 * kTileBytes;
            load_tile<T, kHeadDim>(p, item, first + s * kTileTokens, stage, stage + kTileBytes);
        }
        copy_commit();
    }
    WarpTile<T, kHeadDim> tile;
    tile.load_query(p, item, rows_over_warps ? warp * kWarpRows : 0);
    for (int t = 0; t < num_tiles; ++t) {
        copy_wait<kStages - 2>();
        __syncthreads();
        const int ahead = t + kStages - 1;
        if (ahead < num_tiles) {
            const uint32_t stage = base + (ahead % kStages) * 2 * kTileBytes;
            load_tile<T, kHeadDim>(p, item, first + ahead * kTileTokens, stage, stage + kTileBytes);
        }
        copy_commit();
        const uint32_t keys = base + (t % kStages) * 2 * kTileBytes;
        const int position = first + t * kTileTokens;
        if (rows_over_warps) {
            if (warp * kWarpRows < item.num_rows) {
#pragma unroll
                for (int part = 0; part < kTileTokens; part += 32) {
                    if (position + part < item.end) {
                        tile.template attend<32>(keys, keys + kTileBytes, part, position + part, item, p.scale_log2);
                    }
                }
            }
        } else if (position + warp * 16 < item.end) {
            tile.template attend<16>(keys, keys + kTileBytes, warp * 16, position + warp * 16, item, p.scale_log2);
        }
    }
    copy_wait<0>();
    if (rows_over_warps) {
        store_rows<T, kHeadDim>(p, item, tile, warp * kWarpRows);
    } else {
        merge_warps_and_store<T, kHeadDim>(p, item, tile, reinterpret_cast<float*>(memory));
    }
    arrive_and_merge<T, kHeadDim>(p, item, complete);
}

template <typename T, int kHeadDim, int kStages, int kBlocksPerSm>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    shared_prefix_attention_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ int complete[kMaxRows];
    __shared__ int next;
    const int total = *p.num_entries * p.num_kv_heads;
    int work = blockIdx.x;
    while (work < total) {
        if (threadIdx.x == 0) next = gridDim.x + atomicAdd(p.next_work, 1);
        run_item<T, kHeadDim, kStages>(p, read_work(p, work), memory, complete);
        __syncthreads();
        work = next;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(p.next_work + 1, 1) == int(gridDim.x) - 1) {
            p.next_work[0] = 0;
            p.next_work[1] = 0;
        }
    }
}

}  // namespace parrot
