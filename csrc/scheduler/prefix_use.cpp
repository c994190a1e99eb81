#include "scheduler/prefix_use.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "scheduler/flat_map.h"

namespace parrot::scheduler {

void PrefixUse::grow(size_t num_slots) {
    if (num_slots > nodes_.size()) nodes_.resize(num_slots);
}

void PrefixUse::enter(Call& call, std::vector<Call*>& company) {
    for (const PathEntry& step : call.path) {
        Node& node = nodes_[step.node];
        if (node.alone != nullptr) company.push_back(node.alone);
        node.alone = nullptr;
        ++node.num_calls;
    }
}

void PrefixUse::leave(const Call& call) {
    for (const PathEntry& step : call.path) {
        Node& node = nodes_[step.node];
        --node.num_calls;
        node.alone = nullptr;
    }
}

void PrefixUse::enter_queue(const Call& call) {
    for (const PathEntry& step : call.path) ++nodes_[step.node].num_queued;
}

void PrefixUse::leave_queue(const Call& call) {
    for (const PathEntry& step : call.path) --nodes_[step.node].num_queued;
}

PathEntry PrefixUse::longest_queued(const Call& call) const {
    const auto shared = std::find_if(call.path.rbegin(), call.path.rend(),
                                     [&](const PathEntry& step) { return nodes_[step.node].num_queued > 1; });
    return shared == call.path.rend() ? PathEntry{} : *shared;
}

PrefixUse::Shareable PrefixUse::shareable(const Call& call) const {
    size_t shared = call.path.size();
    while (shared > 0 && nodes_[call.path[shared - 1].node].num_calls < 2) --shared;
    Shareable found;
    found.chain = mixed(static_cast<uint64_t>(call.spec.scope.model) * 2 + (call.spec.latency ? 1 : 0));
    for (size_t i = 0; i < shared; ++i) found.chain = mixed(found.chain + call.path[i].node);
    if (shared > 0) found.tokens = call.path[shared - 1].length;
    return found;
}

PrefixUse::Shareable PrefixUse::watch(Call& call) {
    for (size_t i = call.path.size(); i-- > 0 && nodes_[call.path[i].node].num_calls == 1;) {
        nodes_[call.path[i].node].alone = &call;
    }
    return shareable(call);
}

void PrefixUse::check_invariants(const std::vector<const Call*>& calls) const {
    std::vector<Node> expected(nodes_.size());
    for (const Call* call : calls) {
        for (const PathEntry& step : call->path) {
            ++expected[step.node].num_calls;
            if (call->engine == nullptr) ++expected[step.node].num_queued;
        }
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {
        const Node& node = nodes_[i];
        const bool sound = node.num_calls == expected[i].num_calls &&
                           node.num_queued == expected[i].num_queued &&
                           (node.alone == nullptr || node.num_calls == 1);
        if (!sound) throw std::logic_error("the count of calls at prefix " + std::to_string(i) + " is off");
    }
}

}  // namespace parrot::scheduler
