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
#include <string>
#include <utility>
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

// A node of a tree of prefixes: its tokens, and what is below it: requests, or other nodes.
struct Node {
    int tokens, requests;
    std::vector<Node> below;
};

struct Row {
    std::string shape;
    int kv_heads, suffix;
    std::vector<Node> tree;
};

constexpr int kShapes[][3] = {{8, 6000, 256},   {16, 6000, 256},  {32, 6000, 256},
                              {64, 6000, 256},  {64, 2000, 256},  {128, 6000, 256},
                              {16, 32000, 256}, {64, 6000, 1024}, {64, 16, 1024}};

// As all_rows() of bench/kernel_rows.py.
std::vector<Row> all_rows() {
    std::vector<Node> unequal;
    for (int i = 0; i < 16; ++i) unequal.push_back({512 * (1 + i), i + 1, {}});
    const std::vector<Node> leaves(4, {512, 8, {}});
    const std::vector<Node> wide{{3072, 0, {{1024, 0, leaves}, {1024, 0, leaves}}}};
    const Node left{2048, 0, {{512, 20, {}}, {256, 4, {}}}}, right{512, 0, {{1024, 6, {}}, {64, 2, {}}}};
    std::vector<Row> rows;
    for (const int kv_heads : {kHeads, kHeads / 4}) {
        for (const auto& [requests, prefix, suffix] : kShapes) {
            const std::string shape = std::to_string(requests) + "x" + std::to_string(prefix);
            rows.push_back({shape, kv_heads, suffix, {{prefix, requests, {}}}});
        }
        rows.push_back({"4 groups of 16x6000", kv_heads, 256, std::vector<Node>(4, {6000, 16, {}})});
        rows.push_back({"16 unequal groups", kv_heads, 256, unequal});
        rows.push_back({"64 on 3072, 2x1024, 8x512", kv_heads, 256, wide});
        rows.push_back({"32 on 4096, 2048 or 512, 64-1024", kv_heads, 256, {{4096, 0, {left, right}}}});
    }
    return rows;
}

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

// A row's batch: tables of shuffled blocks, those of each node once.
struct Batch {
    int num_blocks = 0;
    size_t max_blocks = 0;
    int64_t num_tokens = 0;  // in the cache
    std::vector<int32_t> block_tables, seq_lens;

    explicit Batch(const Row& row) {
        for (const Node& node : row.tree) add(node, {}, row.suffix);
        for (const auto& path : paths_) max_blocks = std::max(max_blocks, path.size());
        std::vector<int32_t> order(static_cast<size_t>(num_blocks));
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), std::mt19937(0));
        block_tables.assign(paths_.size() * max_blocks, -1);
        for (size_t r = 0; r < paths_.size(); ++r) {
            for (size_t b = 0; b < paths_[r].size(); ++b) {
                block_tables[r * max_blocks + b] = order[size_t(paths_[r][b])];
            }
        }
    }
    int num_requests() const { return int(seq_lens.size()); }

  private:
    void add(const Node& node, std::vector<int32_t> path, int suffix) {
        append(path, node.tokens / kBlock);
        num_tokens += node.tokens / kBlock * kBlock;
        for (const Node& deeper : node.below) add(deeper, path, suffix);
        for (int i = 0; i < node.requests; ++i) {
            paths_.push_back(path);
            append(paths_.back(), (suffix + kBlock - 1) / kBlock);
            num_tokens += suffix;
            seq_lens.push_back(int32_t(path.size()) * kBlock + suffix);
        }
    }
    void append(std::vector<int32_t>& path, int count) {
        for (int i = 0; i < count; ++i) path.push_back(num_blocks++);
    }

    std::vector<std::vector<int32_t>> paths_;  // blocks before they are shuffled
};

double floor_us(const Row& row, const Batch& batch) {
    const int64_t attended = std::accumulate(batch.seq_lens.begin(), batch.seq_lens.end(), int64_t{0});
    const double rows = double(batch.num_requests()) * kHeads;
    const double bytes = 4.0 * double(batch.num_tokens) * row.kv_heads * kHeadDim + 4.0 * rows * kHeadDim;
    const double flops = 4.0 * double(attended) * kHeads * kHeadDim;
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
    const AttentionPlan plan = plan_attention(batch.block_tables, batch.seq_lens, options);
    const std::vector<int32_t> num_entries{int32_t(plan.entries.size() / 8)};
    const size_t parts = std::max(1, plan.part_begin.back());
    const size_t rows = size_t(batch.num_requests()) * kHeads;
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
                                 batch.num_requests(),
                                 batch.num_blocks,
                                 int(batch.max_blocks),
                                 kHeads,
                                 row.kv_heads,
                                 kHeadDim,
                                 false,
                                 0.08838834764f,
                                 reinterpret_cast<std::uintptr_t>(stream)});
    };
    const int copies = int(caches.size()), rounds = (kMinLaunches + copies - 1) / copies;
    const double time_us = time_graph(copies * rounds, launch), floor = floor_us(row, batch);
    const std::string name = std::to_string(kHeads) + "/" + std::to_string(row.kv_heads) + " " + row.shape +
                             " +" + std::to_string(row.suffix);
    std::printf("%-42s %9.1f us  floor %7.1f  x%5.2f\n", name.c_str(), time_us, floor, time_us / floor);
    std::fflush(stdout);
}

}  // namespace
}  // namespace parrot

int main() try {
    for (const parrot::Row& row : parrot::all_rows()) parrot::measure(row);
    return 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "kernel_bench: %s\n", error.what());
    return 1;
}
