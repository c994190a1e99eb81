// Who has which token prefix (paper section 5.3): PrefixTable with a list of owners at every node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler/prefix_table.h"

namespace parrot::scheduler {

using OwnerId = int64_t;

class PrefixIndex {
  public:
    PrefixIndex(const HashKey& key, bool constant_hash);

    // Throws std::invalid_argument for an owner that is there already, and for bad boundaries.
    void insert(OwnerId owner, const PrefixScope& scope, std::span<const int32_t> token_ids,
                std::span<const int32_t> boundaries);

    // These two throw UnknownId for an owner that is not there.
    void remove(OwnerId owner);
    void shorten(OwnerId owner, int64_t length);

    // (boundary, owners in ascending order) for every boundary that somebody has, longest first.
    std::vector<std::pair<int32_t, std::vector<OwnerId>>> match(const PrefixScope& scope,
                                                                std::span<const int32_t> token_ids,
                                                                std::span<const int32_t> boundaries) const;

    // Number of distinct prefixes with an owner.
    size_t size() const { return num_prefixes_; }
    int64_t num_collisions() const { return table_.num_collisions(); }

  private:
    // `slot` is where the owner's record keeps this node, so that both sides are updated in O(1).
    struct Member {
        OwnerId owner;
        uint32_t slot;
    };
    struct Registration {
        NodeId node;
        int32_t length;
        uint32_t position;  // in members_[node]
    };

    std::vector<Registration>& registrations(OwnerId owner);
    void drop_last(std::vector<Registration>& registered);

    PrefixTable table_;
    size_t num_prefixes_ = 0;
    std::vector<std::vector<Member>> members_;  // by NodeId
    std::unordered_map<OwnerId, std::vector<Registration>> owners_;
};

}  // namespace parrot::scheduler
