#include "kernels/cpu/attention.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "concat.h"
#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int64_t kCostPerThread = 6'000;  // a dozen microseconds; a thread is not woken for less
constexpr int32_t kMaxHeads = 1 << 16;     // so that rows and costs can be counted
constexpr float kLog2E = 1.44269504f;

const AttentionKernels& kernels_for(KvType type) {
    const int i = static_cast<int>(type);
    const AttentionKernels& scalar = kAttentionScalar[i];
#if defined(__x86_64__)
    const bool is_bfloat16 = type == KvType::kBfloat16;
    return for_current_isa<AttentionKernels>({&scalar, &kAttentionAvx2[i], &kAttentionAvx512[i],
                                              is_bfloat16 ? &kAttentionAvx512Bf16 : &kAttentionAvx512[i]});
#else
    return scalar;
#endif
}

size_t round_to_line(size_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

void PagedAttention::FreeAligned::operator()(float* memory) const {
    ::operator delete(memory, std::align_val_t(64));
}

PagedAttention::PagedAttention(const AttentionShape& shape, KvType type) : shape_(shape), type_(type) {
    if (shape.num_kv_heads < 1 || shape.num_heads < shape.num_kv_heads ||
        shape.num_heads % shape.num_kv_heads != 0) {
        throw std::invalid_argument(
            concat("num_heads = ", shape.num_heads,
                   " is no positive multiple of num_kv_heads = ", shape.num_kv_heads));
    }
    if (shape.num_heads > kMaxHeads) {
        throw std::invalid_argument(
            concat("num_heads = ", shape.num_heads, " is more than ", kMaxHeads, ", the most there can be"));
    }
    if (shape.head_dim < 16 || shape.head_dim > kMaxHeadDim || shape.head_dim % 16 != 0) {
        throw std::invalid_argument(
            concat("head_dim = ", shape.head_dim, " is no multiple of 16 in [16, ", kMaxHeadDim, "]"));
    }
}

std::unique_lock<std::mutex> PagedAttention::claim() {
    std::unique_lock lock(busy_, std::try_to_lock);
    if (!lock.owns_lock()) throw std::logic_error("PagedAttention is in use by another thread");
    return lock;
}

void PagedAttention::plan(const AttentionStep& step, const AttentionOptions& options) {
    planned_ = false;
    work_ = {};
    items_.clear();
    AttentionStep kept = step;
    const auto keep = [](std::vector<int32_t>& copy, std::span<const int32_t>& values) {
        copy.assign(values.begin(), values.end());
        values = copy;
    };
    keep(query_start_, kept.query_start);
    keep(seq_lens_, kept.seq_lens);
    keep(block_tables_, kept.block_tables);
    work_ = make_attention_work(shape_, kept, options, planner_);
    const auto useful = std::max<int64_t>(1, work_.cost / kCostPerThread);
    num_threads_ = static_cast<int>(
        std::min<int64_t>({options.num_threads, useful, static_cast<int64_t>(work_.items.size())}));
    waiting_ = std::vector<std::atomic<int32_t>>(work_.units.size());
    for (size_t i = 0; i < work_.units.size(); ++i) waiting_[i] = work_.units[i].num_items;
    allocate();
    describe_items();
    num_blocks_ = step.num_blocks;
    num_rows_ = query_start_.back();
    planned_ = true;
}

void PagedAttention::allocate() {
    const auto d = static_cast<size_t>(shape_.head_dim);
    const auto states = static_cast<size_t>(work_.max_states);
    const auto partials = static_cast<size_t>(work_.num_partials) * static_cast<size_t>(shape_.num_heads);
    scratch_floats_ = 2 * kTileTokens * d + kMaxTileRows * kTileTokens + 2 * states * d +
                      round_to_line(states) + states * kSumLanes;
    const size_t numerators = partials * d, max_sums = round_to_line(2 * partials);
    const size_t needed = numerators + max_sums + static_cast<size_t>(num_threads_) * scratch_floats_;
    if (needed > capacity_) {
        memory_.reset();
        capacity_ = 0;
        memory_.reset(static_cast<float*>(::operator new(needed * sizeof(float), std::align_val_t(64))));
        capacity_ = needed;
    }
    partials_ = {memory_.get(), memory_.get() + numerators};
}

AttentionScratch PagedAttention::scratch(int thread) const {
    const auto d = static_cast<size_t>(shape_.head_dim);
    const auto states = static_cast<size_t>(work_.max_states);
    float* at = memory_.get() + capacity_ - static_cast<size_t>(thread + 1) * scratch_floats_;
    AttentionScratch result{};
    const auto take = [&](float*& part, size_t floats) {
        part = at;
        at += floats;
    };
    take(result.keys, kTileTokens * d);
    take(result.values, kTileTokens * d);
    take(result.scores, size_t{kMaxTileRows} * kTileTokens);
    take(result.query, states * d);
    take(result.output, states * d);
    take(result.reference, round_to_line(states));
    take(result.sum, states * kSumLanes);
    return result;
}

void PagedAttention::check_planned() const {
    if (!planned_) throw std::logic_error("PagedAttention has no plan; call plan() first");
}

void PagedAttention::run(const AttentionCall& call) {
    check_planned();
    const AttentionTensors tensors{
        call.query,         call.keys,        call.values,         call.output,     call.query_stride,
        call.output_stride, shape_.num_heads, shape_.num_kv_heads, shape_.head_dim, call.scale * kLog2E};
    const AttentionKernels& kernels = kernels_for(type_);
    WorkCounter counter(static_cast<int64_t>(work_.items.size()));
    parallel(num_threads_, [&](int thread) {
        const AttentionScratch own = scratch(thread);
        for (int64_t i; counter.next(i);) {
            run_item(kernels, tensors, static_cast<size_t>(i), own);
        }
    });
}

void PagedAttention::run_item(const AttentionKernels& kernels, const AttentionTensors& tensors, size_t index,
                              const AttentionScratch& scratch) {
    kernels.attend(tensors, items_[index], partials_, scratch);
    merge_finished(kernels, tensors, work_.items[index]);
}

// Items as the kernels take them, with what each asks for.
void PagedAttention::describe_items() {
    const auto rows = [&](const AttentionWorkItem& item) { return item.num_members * shape_.group_size(); };
    size_t num_long = work_.items.size();  // up to the last one that multiplies longer than it reads
    while (num_long > 0 && rows(work_.items[num_long - 1]) <= kMaxTileRows) --num_long;
    const auto num_short = static_cast<int32_t>(work_.items.size() - num_long);
    items_.resize(work_.items.size());
    for (size_t i = 0; i < items_.size(); ++i) {
        const AttentionWorkItem& item = work_.items[i];
        const size_t following = i + static_cast<size_t>(num_threads_);  // where threads take turns
        items_[i] = {item.block_table,
                     item.begin,
                     item.end,
                     &work_.members[static_cast<size_t>(item.first_member)],
                     item.num_members,
                     item.head_begin,
                     item.head_end,
                     following < items_.size() ? &items_[following] : nullptr,
                     nullptr,
                     0,
                     0};
        const auto first = static_cast<int32_t>(i), step = static_cast<int32_t>(num_long);
        if (i >= num_long || first >= num_short || rows(item) <= kMaxTileRows) continue;
        items_[i].later = &items_[num_long + i];
        items_[i].later_step = step;
        items_[i].num_later = (num_short - first + step - 1) / step;
    }
}

// Merges the units of which this item was the last: in the order of their parts, whoever does it.
void PagedAttention::merge_finished(const AttentionKernels& kernels, const AttentionTensors& tensors,
                                    const AttentionWorkItem& item) {
    int32_t previous = -1;
    for (int32_t m = 0; m < item.num_members; ++m) {
        const int32_t index = work_.members[static_cast<size_t>(item.first_member + m)].unit;
        if (index < 0 || index == previous) continue;
        previous = index;
        std::atomic<int32_t>& waiting = waiting_[static_cast<size_t>(index)];
        if (waiting.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
        const AttentionUnit& unit = work_.units[static_cast<size_t>(index)];
        waiting.store(unit.num_items, std::memory_order_relaxed);  // for the next run
        for (int32_t r = 0; r < unit.num_rows; ++r) {
            kernels.merge(tensors, partials_, unit.first_partial + r, unit.num_rows, unit.num_parts,
                          unit.first_row + r);
        }
    }
}

}  // namespace parrot::cpu
