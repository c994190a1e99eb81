#include "scheduler/prefix_index.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "scheduler/errors.h"

namespace parrot::scheduler {

PrefixIndex::PrefixIndex(const HashKey& key, bool constant_hash) : table_(key, constant_hash) {}

void PrefixIndex::insert(OwnerId owner, const PrefixScope& scope, std::span<const int32_t> token_ids,
                         std::span<const int32_t> boundaries) {
    require_at_least("owner", owner, 1);
    require_prompt(token_ids, boundaries);
    const auto [entry, is_new] = owners_.try_emplace(owner);
    if (!is_new) throw std::invalid_argument("owner = " + std::to_string(owner) + " is there already");
    std::vector<Registration>& registered = entry->second;
    const Path path = table_.acquire(scope, token_ids, boundaries);
    members_.resize(std::max(members_.size(), table_.num_slots()));
    registered.reserve(path.size());
    for (const PathEntry& step : path) {
        std::vector<Member>& members = members_[step.node];
        if (members.empty()) ++num_prefixes_;
        const auto slot = static_cast<uint32_t>(registered.size());
        registered.push_back({step.node, step.length, static_cast<uint32_t>(members.size())});
        members.push_back({owner, slot});
    }
}

void PrefixIndex::remove(OwnerId owner) {
    std::vector<Registration>& registered = registrations(owner);
    while (!registered.empty()) drop_last(registered);
    owners_.erase(owner);
}

void PrefixIndex::shorten(OwnerId owner, int64_t length) {
    require_at_least("length", length, 0);
    std::vector<Registration>& registered = registrations(owner);
    while (!registered.empty() && registered.back().length > length) drop_last(registered);
}

std::vector<std::pair<int32_t, std::vector<OwnerId>>> PrefixIndex::match(
    const PrefixScope& scope, std::span<const int32_t> token_ids, std::span<const int32_t> boundaries) const {
    require_prompt(token_ids, boundaries);
    const std::vector<NodeId> nodes = table_.find(scope, token_ids, boundaries);
    std::vector<std::pair<int32_t, std::vector<OwnerId>>> matches;
    for (size_t i = nodes.size(); i-- > 0;) {
        if (nodes[i] == kNoNode || members_[nodes[i]].empty()) continue;
        std::vector<OwnerId> owners;
        for (const Member& member : members_[nodes[i]]) owners.push_back(member.owner);
        std::sort(owners.begin(), owners.end());
        matches.emplace_back(boundaries[i], std::move(owners));
    }
    return matches;
}

std::vector<PrefixIndex::Registration>& PrefixIndex::registrations(OwnerId owner) {
    const auto entry = owners_.find(owner);
    if (entry == owners_.end()) throw UnknownId("owner", owner);
    return entry->second;
}

void PrefixIndex::drop_last(std::vector<Registration>& registered) {
    const Registration gone = registered.back();
    registered.pop_back();
    std::vector<Member>& members = members_[gone.node];
    const Member moved = members.back();
    members[gone.position] = moved;
    members.pop_back();
    if (gone.position < members.size()) owners_.at(moved.owner)[moved.slot].position = gone.position;
    if (members.empty()) {
        --num_prefixes_;
        std::vector<Member>().swap(members);
    }
    table_.release(gone.node);
}

}  // namespace parrot::scheduler
