// SharedPrefixAttention over its floor without Python: the rows of `python -m bench kernel`, fp16, head size
// 128, medians of replays of a CUDA graph of 16 launches or more that rotate over copies of the cache.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/check.h"
#include "kernels/shared_prefix_attention.h"
#include "kvcache/attention_plan.h"

namespace parrot {
namespace {

constexpr double kBandwidth = 4.2e12;   // bytes/s that the floor assumes
constexpr double kMatrixRate = 790e12;  // FLOP/s that the floor assumes
constexpr int kHeads = 32, kHeadDim = 128, kBlock = 16, kMaxRows = 64, kReplays = 30, kMinLaunches = 16;
constexpr size_t kMinBytes = 400'000'000;  // of all copies of the cache: several times the L2

struct Row {
    int kv_heads, requests, prefix, suffix;
};

constexpr int kShapes[][3] = {{8, 6000, 256},   {16, 6000, 256},  {32, 6000, 256},
                              {64, 6000, 256},  {64, 2000, 256},  {128, 6000, 256},
                              {16, 32000, 256}, {64, 6000, 1024}, {64, 16, 1024}};

struct Free {
    void operator()(void* pointer) const { cudaFree(pointer); }
};

// Device memory, filled from the host.
class Buffer {
  public:
    explicit Buffer(size_t bytes) {
        void* pointer = nullptr;
        PARROT_CUDA(cudaMalloc(&pointer, bytes));
        memory_.reset(pointer);
        PARROT_CUDA(cudaMemset(pointer, 0, bytes));
    }
    template <typename T>
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
        PARROT_CUDA(cudaMemcpy(memory_.get(), values.data(), values.size() * sizeof(T), cudaMemcpyDefault));
    }
    // Repeats `values` over the whole buffer.
    Buffer(size_t bytes, const std::vector<__half>& values) : Buffer(bytes) {
        const size_t chunk = values.size() * sizeof(__half);
        for (size_t at = 0; at < bytes; at += chunk) {
            PARROT_CUDA(cudaMemcpy(static_cast<char*>(memory_.get()) + at, values.data(),
                                   std::min(chunk, bytes - at), cudaMemcpyDefault));
        }
    }
    std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_.get()); }

  private:
    std::unique_ptr<void, Free> memory_;
};

// A row's batch: tables of shuffled blocks, the prefix's first.
struct Batch {
    int num_blocks, max_blocks;
    std::vector<int32_t> block_tables, seq_lens;

    explicit Batch(const Row& row) {
        const int shared = row.prefix / kBlock, own = (row.suffix + kBlock - 1) / kBlock;
        num_blocks = shared + row.requests * own;
        max_blocks = shared + own;
        std::vector<int32_t> order(num_blocks);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(0));
        for (int r = 0; r < row.requests; ++r) {
            const auto first = order.begin() + shared + r * own;
            block_tables.insert(block_tables.end(), order.begin(), order.begin() + shared);
            block_tables.insert(block_tables.end(), first, first + own);
            seq_lens.push_back(shared * kBlock + row.suffix);
        }
    }
};

double floor_us(const Row& row, const Batch& batch) {
    const double tokens = row.prefix / kBlock * kBlock + double(row.requests) * row.suffix;
    const double bytes = 4 * tokens * row.kv_heads * kHeadDim + 4.0 * row.requests * kHeads * kHeadDim;
    const double flops = 4.0 * row.requests * batch.seq_lens[0] * kHeads * kHeadDim;
    return 1e6 * std::max(bytes / kBandwidth, flops / kMatrixRate);
}

// Median microseconds of a launch; `launch` takes its number and the stream.
template <typename Launch>
double time_graph(int launches, Launch launch) {
    cudaStream_t stream = nullptr;
    PARROT_CUDA(cudaStreamCreate(&stream));
    launch(0, stream);
    PARROT_CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    PARROT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) launch(i, stream);
    PARROT_CUDA(cudaStreamEndCapture(stream, &graph));
    PARROT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    cudaEvent_t start = nullptr, end = nullptr;
    PARROT_CUDA(cudaEventCreate(&start));
    PARROT_CUDA(cudaEventCreate(&end));
    std::vector<float> times(kReplays);
    for (float& milliseconds : times) {
        PARROT_CUDA(cudaEventRecord(start, stream));
        PARROT_CUDA(cudaGraphLaunch(replay, stream));
        PARROT_CUDA(cudaEventRecord(end, stream));
        PARROT_CUDA(cudaEventSynchronize(end));
        PARROT_CUDA(cudaEventElapsedTime(&milliseconds, start, end));
    }
    PARROT_CUDA(cudaEventDestroy(end));
    PARROT_CUDA(cudaEventDestroy(start));
    PARROT_CUDA(cudaGraphExecDestroy(replay));
    PARROT_CUDA(cudaGraphDestroy(graph));
    PARROT_CUDA(cudaStreamDestroy(stream));
    std::sort(times.begin(), times.end());
    return 1000.0 * times[times.size() / 2] / launches;
}

std::vector<__half> random_values(size_t count) {
    std::mt19937 random(0);
    std::normal_distribution<float> normal;
    std::vector<__half> values(count);
    for (__half& value : values) value = __float2half(normal(random));
    return values;
}

void measure(const Row& row) {
    const Batch batch(row);
    AttentionPlanOptions options;
    options.group_size = kHeads / row.kv_heads;
    options.num_kv_heads = row.kv_heads;
    options.num_workers = shared_prefix_attention_grid(kHeadDim);
    options.max_rows = kMaxRows;
    options.entry_tokens = 20;  // as SharedPrefixAttention's PlanCosts
    options.row_tokens = 6;
    options.work_percent = 75;
    const AttentionPlan plan = plan_attention(batch.block_tables, batch.seq_lens, options);
    const std::vector<int32_t> num_entries{int32_t(plan.entries.size() / 8)};
    const size_t parts = std::max(1, plan.part_begin.back());
    const size_t rows = size_t(row.requests) * kHeads;
    const Buffer entries(plan.entries), count(num_entries), members(plan.members),
        part_begin(plan.part_begin), tables(batch.block_tables), next_work(2 * sizeof(int32_t)),
        part_output(parts * kHeads * kHeadDim * sizeof(float)),
        part_max_sum(parts * kHeads * 2 * sizeof(float)), output(rows * kHeadDim * sizeof(__half));
    // A prime number of values, so that no two blocks are alike.
    const std::vector<__half> values = random_values(4'000'037);
    const Buffer query(rows * kHeadDim * sizeof(__half), values);
    const size_t cache_bytes = size_t(batch.num_blocks) * kBlock * row.kv_heads * kHeadDim * sizeof(__half);
    std::vector<std::pair<Buffer, Buffer>> caches;
    while (caches.size() < 2 || caches.size() * 2 * cache_bytes < kMinBytes) {
        caches.emplace_back(Buffer(cache_bytes, values), Buffer(cache_bytes, values));
    }
    const auto launch = [&](int i, cudaStream_t stream) {
        const auto& [keys, cached_values] = caches[i % caches.size()];
        shared_prefix_attention({query.address(),
                                 keys.address(),
                                 cached_values.address(),
                                 output.address(),
                                 tables.address(),
                                 entries.address(),
                                 count.address(),
                                 members.address(),
                                 part_begin.address(),
                                 part_output.address(),
                                 part_max_sum.address(),
                                 next_work.address(),
                                 row.requests,
                                 batch.num_blocks,
                                 batch.max_blocks,
                                 kHeads,
                                 row.kv_heads,
                                 kHeadDim,
                                 false,
                                 0.08838834764f,
                                 reinterpret_cast<std::uintptr_t>(stream)});
    };
    const int copies = int(caches.size()), rounds = (kMinLaunches + copies - 1) / copies;
    const double time_us = time_graph(copies * rounds, launch), floor = floor_us(row, batch);
    std::printf("%d/%d %dx%d +%d%*s %9.1f us  floor %7.1f  x%5.2f\n", kHeads, row.kv_heads, row.requests,
                row.prefix, row.suffix, 2, "", time_us, floor, time_us / floor);
    std::fflush(stdout);
}

}  // namespace
}  // namespace parrot

int main() try {
    for (int kv_heads : {32, 8}) {
        for (const auto& [requests, prefix, suffix] : parrot::kShapes) {
            parrot::measure({kv_heads, requests, prefix, suffix});
        }
    }
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bench: %s\n", error.what());
    return 1;
}
