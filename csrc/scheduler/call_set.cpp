#include "scheduler/call_set.h"

#include <algorithm>
#include <tuple>

namespace parrot::scheduler {

CallSet::CallSet(std::span<Call* const> calls, bool completes_together)
    : pool(calls.front()->pool),
      num_calls(static_cast<int32_t>(calls.size())),
      completes_together(completes_together) {
    for (const Call* call : calls) {
        add(*call);
        if (num_calls > 1) merged_.insert(merged_.end(), call->path.begin(), call->path.end());
    }
    if (num_calls == 1) {
        only = calls.front();
        entries = only->path;
    } else {
        const auto key = [](const PathEntry& entry) { return std::tuple(entry.node, entry.previous); };
        std::ranges::sort(merged_, {}, key);
        const auto repeated = std::ranges::unique(merged_, {}, key);
        merged_.erase(repeated.begin(), repeated.end());
        entries = merged_;
    }
    for (const PathEntry& entry : entries) prompt_tokens += entry.length - entry.previous;
}

CallSet::CallSet(const Call& call) : pool(call.pool), only(&call), num_calls(1), entries(call.path) {
    add(call);
    for (const PathEntry& entry : entries) prompt_tokens += entry.length - entry.previous;
}

void CallSet::add(const Call& call) {
    const int32_t shareable = call.path.empty() ? 0 : call.path.back().length;
    const double steps = std::max(0, call.spec.max_new_tokens - 1);  // prefill yields the first token
    latency |= call.spec.latency;
    prompt_tokens += call.prompt_len - shareable;
    new_tokens += call.spec.max_new_tokens;
    decode_steps = completes_together ? std::max(decode_steps, steps) : decode_steps + steps / num_calls;
}

CallShape CallSet::shape() const {
    return {static_cast<double>(num_calls),
            static_cast<double>(prompt_tokens),
            static_cast<double>(new_tokens),
            decode_steps,
            latency,
            completes_together,
            0};
}

}  // namespace parrot::scheduler
