// Paged attention of one step on the CPU: decodes, which read what they share once (paper section 5.3), and
// chunks of prefill, mixed.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cpu/attention_work.h"

namespace parrot::cpu {

// One call's tensors as their owner describes them; strides in elements.
struct AttentionCall {
    const void* query;   // [num_rows, num_heads, head_dim], rows query_stride apart
    const void* keys;    // [num_blocks] of kv_block.h
    const void* values;  // the same
    void* output;        // [num_rows, num_heads, head_dim], rows output_stride apart
    int64_t query_stride;
    int64_t output_stride;
    float scale;
};

// Plan once per step, run once per layer. One thread at a time: the one that has claimed it.
class PagedAttention {
  public:
    // Throws std::invalid_argument for a shape the kernels do not have.
    PagedAttention(const AttentionShape& shape, KvType type);

    // Held from what is checked against the plan to the end of its use. Throws std::logic_error if another
    // thread has it.
    std::unique_lock<std::mutex> claim();

    // Copies the step first. Throws std::invalid_argument, and then has no plan.
    void plan(const AttentionStep& step, const AttentionOptions& options);

    // Throws std::logic_error without a plan.
    void check_planned() const;

    // Throws std::logic_error without a plan. What lies past a sequence's end in the cache is not used.
    void run(const AttentionCall& call);

    const AttentionShape& shape() const { return shape_; }
    KvType type() const { return type_; }
    // Of the plan.
    int32_t num_rows() const { return num_rows_; }
    int32_t num_blocks() const { return num_blocks_; }
    const AttentionWork& work() const { return work_; }

  private:
    struct FreeAligned {
        void operator()(float* memory) const;
    };

    void allocate();
    AttentionScratch scratch(int thread) const;
    void run_item(const AttentionKernels& kernels, const AttentionTensors& tensors, size_t index,
                  const AttentionScratch& scratch);
    void describe_items();
    void merge_finished(const AttentionKernels& kernels, const AttentionTensors& tensors,
                        const AttentionWorkItem& item);

    const AttentionShape shape_;
    const KvType type_;
    bool planned_ = false;
    int32_t num_rows_ = 0;
    int32_t num_blocks_ = 0;
    int num_threads_ = 1;
    std::vector<int32_t> query_start_, seq_lens_, block_tables_;  // of the step
    AttentionPlanner planner_;
    AttentionWork work_;
    std::vector<AttentionItem> items_;  // of work_
    AttentionPartials partials_{};
    std::vector<std::atomic<int32_t>> waiting_;  // [units], items that have not ended in this run
    std::unique_ptr<float, FreeAligned> memory_;
    size_t capacity_ = 0;        // of memory_, in floats
    size_t scratch_floats_ = 0;  // of one thread
    std::mutex busy_;
};

}  // namespace parrot::cpu
