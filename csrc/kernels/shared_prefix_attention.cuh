// SharedPrefixAttention: decode attention over a tree of shared prefixes (paper section 5.3).
//
// One persistent launch runs a flat work list. An entry is a range of tokens in the KV cache and the requests
// (members) that all attend to it; each of its K/V tiles is read from memory once and multiplied with the
// queries of every member on tensor cores. A second, small launch merges the partial results of each request
// in the fixed order of its parts, so that a given plan always gives the same bits; it is launched early
// (programmatic dependent launch) and waits on the device. Compiles with CUDA headers alone; checks live in the
// .cu file.
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
constexpr int kEntryFields = 8;    // representative, begin, end, first member, members, part, two unused
constexpr int kMergeRows = 8;      // rows of a warp merged at once through shared memory

struct SharedPrefixAttentionParams {
    const void* query;              // [num_requests, num_heads, head_dim], half or bfloat16
    const void* key_cache;          // [num_blocks, 16, num_kv_heads, head_dim]
    const void* value_cache;        // [num_blocks, 16, num_kv_heads, head_dim]
    void* output;                   // [num_requests, num_heads, head_dim]
    const int32_t* block_tables;    // [num_requests, max_blocks]
    const int32_t* entries;         // [num_entries, 8]
    const int32_t* num_entries;     // [1], on the device so that a CUDA graph can be replayed on another plan
    const int32_t* members;         // [num_members, 2]: request, part; part -1: the request has no other part
    const int32_t* part_begin;      // [num_requests + 1]: the parts of request r are [part_begin[r], part_begin[r + 1])
    float* part_output;             // [max_parts, num_heads, head_dim], unnormalised
    float2* part_max_sum;           // [max_parts, num_heads]: running max (base 2) and sum
    int32_t* next_work;             // [2], zero before and after
    int32_t num_requests;           // rows of the merge; those without parts in the plan are skipped
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

// 2^x in one instruction; -inf gives 0.
__device__ inline float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

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
    int representative;  // request whose block table names the blocks of [begin, end); the first member
    int begin;
    int end;
    int first_member;
    int num_members;
    int part;      // of the first member
    int num_rows;  // row r is query head r % group of member r / group

    __device__ int first_token() const { return begin / kBlockTokens * kBlockTokens; }
    __device__ int num_tiles() const { return (end - first_token() + kTileTokens - 1) / kTileTokens; }

    // Request and part of a member; an entry of one request needs no look-up.
    __device__ int2 member(const SharedPrefixAttentionParams& p, int index) const {
        if (num_members == 1) return make_int2(representative, part);
        return reinterpret_cast<const int2*>(p.members)[first_member + index];
    }
};

__device__ inline WorkItem read_work(const SharedPrefixAttentionParams& p, int work) {
    const int4* entry = reinterpret_cast<const int4*>(p.entries) + (work / p.num_kv_heads) * (kEntryFields / 4);
    const int4 low = entry[0], high = entry[1];
    const int group = p.num_heads / p.num_kv_heads;
    return {work % p.num_kv_heads, low.x, low.y, low.z, low.w, high.x, high.y, high.x * group};
}

// State of one warp: a tile of 16 query rows. A thread holds rows lane / 4 and lane / 4 + 8.
template <typename T, int kHeadDim>
struct WarpTile {
    uint32_t query[kHeadDim / 16][4];
    float output[kHeadDim / 8][4];
    float row_max[2];
    float row_sum[2];

    __device__ void load_query(const SharedPrefixAttentionParams& p, const WorkItem& item, int first_row) {
        const int lane = threadIdx.x % 32, group = p.num_heads / p.num_kv_heads;
        const uint32_t* rows[2];
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + 8 * half;
            rows[half] = nullptr;
            if (row < item.num_rows) {
                const int request = item.member(p, row / group).x;
                const int head = item.kv_head * group + row % group;
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
            const float factor = exp2_fast(row_max[half] - base);
            row_max[half] = new_max;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_fast(scores[n][i] * scale_log2 - base);
                    sum += scores[n][i];
                }
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            row_sum[half] = row_sum[half] * factor + sum;
            if (__any_sync(0xffffffff, factor != 1.0f)) {
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    output[n][2 * half] *= factor;
                    output[n][2 * half + 1] *= factor;
                }
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
        const int group = p.num_heads / p.num_kv_heads;
        const int2 member = item.member(p, row / group);  // request, part
        const int head = item.kv_head * group + row % group;
        const bool whole = member.y < 0;
        output = whole ? static_cast<T*>(p.output) + (size_t(member.x) * p.num_heads + head) * kHeadDim : nullptr;
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

// Tokens over warps: several warps hold the same rows for different tokens; merge them through `scratch`
// [kWarps, kMergeRows, kHeadDim], the two rows of a thread one after the other.
template <typename T, int kHeadDim>
__device__ inline void merge_warps_and_store(const SharedPrefixAttentionParams& p, const WorkItem& item,
                                             const WarpTile<T, kHeadDim>& tile, int warps_m, float* scratch) {
    float2* stats = reinterpret_cast<float2*>(scratch + kWarps * kMergeRows * kHeadDim);  // [kWarps, kMergeRows]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first_row = (warp % warps_m) * kWarpRows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half * kMergeRows >= item.num_rows) break;
        __syncthreads();
        const int slot = warp * kMergeRows + lane / 4;
        if (first_row + half * kMergeRows + lane / 4 < item.num_rows) {
            float* target = scratch + slot * kHeadDim + (lane % 4) * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                *reinterpret_cast<float2*>(target + n * 8) =
                    make_float2(tile.output[n][2 * half], tile.output[n][2 * half + 1]);
            }
            if (lane % 4 == 0) stats[slot] = make_float2(tile.row_max[half], tile.row_sum[half]);
        }
        __syncthreads();
        for (int index = threadIdx.x; index < warps_m * kMergeRows * (kHeadDim / 2); index += kThreads) {
            const int local = index / (kHeadDim / 2), dim = index % (kHeadDim / 2) * 2;
            const int row = local / kMergeRows * kWarpRows + half * kMergeRows + local % kMergeRows;
            if (row >= item.num_rows) continue;
            float top = -INFINITY, first = 0.0f, second = 0.0f, sum = 0.0f;
            for (int w = local; w < kWarps * kMergeRows; w += warps_m * kMergeRows) top = fmaxf(top, stats[w].x);
            for (int w = local; w < kWarps * kMergeRows; w += warps_m * kMergeRows) {
                const float weight = exp2_fast(stats[w].x - top);
                const float2 value = *reinterpret_cast<const float2*>(scratch + w * kHeadDim + dim);
                first += weight * value.x;
                second += weight * value.y;
                sum += weight * stats[w].y;
            }
            const RowSink<T, kHeadDim> sink(p, item, row);
            sink.store_pair(dim, first, second, sum);
            if (!sink.output && dim == 0) __stcg(sink.max_sum, make_float2(top, sum));
        }
    }
}

// Merges the parts of one request and head: a thread block each, its warps take turns at the parts and a lane
// has kHeadDim / 32 dims.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads) merge_parts_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
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
            const float2* source = reinterpret_cast<const float2*>(part_output + size_t(part) * p.num_heads * kHeadDim);
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
    return kStages * 2 * kTileTokens * kHeadDim * 2 + kWarps * kMergeRows * (kHeadDim * 4 + 8);
}

// The tiles of consecutive work items as one stream through the pipeline stages: the loads of the next item
// start while the last tiles of the current one are computed.
template <typename T, int kHeadDim, int kStages>
class TileStream {
  public:
    static constexpr int kTileBytes = kTileTokens * kHeadDim * 2;

    __device__ TileStream(const SharedPrefixAttentionParams& p, uint32_t stages) : p_(p), stages_(stages) {}

    // Issues loads until the stages are full or both items are exhausted; `loaded` counts the current item's
    // tiles that were issued, `ahead` those of the next.
    __device__ void fill(const WorkItem& current, const WorkItem& next, bool has_next) {
        while (issued_ - consumed_ < kStages - 1) {
            if (loaded_ < current.num_tiles()) {
                issue(current, loaded_++);
            } else if (has_next && ahead_ < next.num_tiles()) {
                issue(next, ahead_++);
            } else {
                return;
            }
        }
    }

    // Waits until the next tile to be consumed has arrived, for all threads.
    __device__ void wait() const {
        if (issued_ - consumed_ >= kStages - 1) {
            copy_wait<kStages - 2>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
    }

    __device__ uint32_t take() { return stages_ + (consumed_++ % kStages) * 2 * kTileBytes; }

    __device__ void next_item() {
        loaded_ = ahead_;
        ahead_ = 0;
    }

  private:
    __device__ void issue(const WorkItem& item, int tile) {
        const uint32_t stage = stages_ + (issued_++ % kStages) * 2 * kTileBytes;
        load_tile<T, kHeadDim>(p_, item, item.first_token() + tile * kTileTokens, stage, stage + kTileBytes);
        copy_commit();
    }

    const SharedPrefixAttentionParams& p_;
    uint32_t stages_;
    unsigned issued_ = 0, consumed_ = 0;
    int loaded_ = 0, ahead_ = 0;
};

template <typename T, int kHeadDim, int kStages>
__global__ void __launch_bounds__(kThreads, 2)
    shared_prefix_attention_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    extern __shared__ __align__(128) uint8_t memory[];
    __shared__ int claimed;
    using Stream = TileStream<T, kHeadDim, kStages>;
    float* scratch = reinterpret_cast<float*>(memory + kStages * 2 * Stream::kTileBytes);
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    const int total = *p.num_entries * p.num_kv_heads;
    const int warp = threadIdx.x / 32;
    if (int(blockIdx.x) < total) {
        Stream stream(p, shared_address(memory));
        WorkItem item = read_work(p, blockIdx.x);
        for (;;) {
            if (threadIdx.x == 0) claimed = gridDim.x + atomicAdd(p.next_work, 1);
            stream.fill(item, item, false);
            // Warps split the rows first, then the tokens of a tile.
            const int warps_m = item.num_rows > 2 * kWarpRows ? 4 : item.num_rows > kWarpRows ? 2 : 1;
            const int first_row = (warp % warps_m) * kWarpRows;
            const int tokens = kTileTokens * warps_m / kWarps, first_token = warp / warps_m * tokens;
            WarpTile<T, kHeadDim> tile;
            tile.load_query(p, item, first_row);
            __syncthreads();
            const bool has_next = claimed < total;
            const WorkItem next = has_next ? read_work(p, claimed) : item;
            const int num_tiles = item.num_tiles();
            for (int t = 0; t < num_tiles; ++t) {
                stream.wait();
                const uint32_t keys = stream.take();
                stream.fill(item, next, has_next);
                const int position = item.first_token() + t * kTileTokens + first_token;
                if (first_row >= item.num_rows) continue;
                const uint32_t values = keys + Stream::kTileBytes;
                if (warps_m == 1) {
                    if (position < item.end) {
                        tile.template attend<16>(keys, values, first_token, position, item, p.scale_log2);
                    }
                } else if (warps_m == 2) {
                    if (position < item.end) {
                        tile.template attend<32>(keys, values, first_token, position, item, p.scale_log2);
                    }
                } else {
                    tile.template attend<64>(keys, values, 0, position, item, p.scale_log2);
                }
            }
            if (warps_m == kWarps) {
                store_rows<T, kHeadDim>(p, item, tile, first_row);
            } else {
                merge_warps_and_store<T, kHeadDim>(p, item, tile, warps_m, scratch);
            }
            if (!has_next) break;
            item = next;
            stream.next_item();
            __syncthreads();
        }
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
