// Interned token prefixes: one node for each distinct (scope, tokens[0, boundary)) that somebody refers to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "scheduler/chunked.h"
#include "scheduler/linear_hash.h"
#include "scheduler/prefix_hash.h"
#include "scheduler/prefix_symbols.h"

namespace parrot::scheduler {

using NodeId = uint32_t;
inline constexpr NodeId kNoNode = std::numeric_limits<NodeId>::max();

// One boundary of one prompt. `previous` is the boundary before it in that prompt (0 for the first), so that
// the entry stands for the tokens [previous, length).
struct PathEntry {
    NodeId node = kNoNode;
    int32_t length = 0;
    int32_t previous = 0;
};

using Path = std::vector<PathEntry>;

// A node owns the tokens after its parent's, so a prefix shared by many prompts is stored once. Nodes are
// found by hash and then compared by content: a collision costs time and never yields a wrong node.
//
//   [ scope ] <- [ segment ] <- [ segment ]      the root of every path is a node of its scope, of length 0;
//                            <- [ segment ]      a node's tokens are the segments from there to it
//
// A prompt that begins with published text has two scopes. The public one is the root; the domain's is a node
// without tokens, the *seam*, where the published text ends:
//
//   [ public ] <- [ segment ] <- [ seam: domain 1 ] <- [ segment ]
//                             <- [ seam: domain 2 ] <- [ segment ]
//
// A node lives while references (one per path that holds it, one per child) remain, and no longer. It takes
// 64 bytes, about 18 in the hash table, and for a segment of more than 32 bytes a block of that size.
//
// Prompts may have variables without a value (PromptView); a prefix behind one is known by the variable's id.
class PrefixTable {
  public:
    PrefixTable(const HashKey& key, bool constant_hash)
        : key_(key), constant_hash_(constant_hash), origin_{{}, PrefixHasher(key, {}), {}} {
        origin_.hash = digest(origin_.hasher);
    }
    PrefixTable(const PrefixTable&) = delete;
    PrefixTable& operator=(const PrefixTable&) = delete;
    ~PrefixTable();

    // The node of every boundary, made where missing; takes one reference on each. A seam is at a boundary
    // (require_seam).
    Path acquire(const PrefixScope& scope, const PromptView& prompt, std::span<const int32_t> boundaries);

    // Fills `found` with the node of every boundary, kNoNode where nobody has it.
    void find(const PrefixScope& scope, const PromptView& prompt, std::span<const int32_t> boundaries,
              std::vector<NodeId>& found) const;

    // Gives one reference back.
    void release(NodeId node);

    // A word for whoever uses the table; kNoNode in a new node.
    uint32_t& label(NodeId node) { return nodes_[node].label; }
    uint32_t label(NodeId node) const { return nodes_[node].label; }

    // Labels are ids of items in `pool`: the item of a node is loaded while the node's content is compared.
    template <class T>
    void set_labelled(const Pool<T>& pool) {
        labelled_ = &pool;
        fetch_labelled_ = [](const void* labelled, uint32_t label) {
            __builtin_prefetch(&(*static_cast<const Pool<T>*>(labelled))[label]);
        };
    }

    std::vector<Symbol> symbols_of(NodeId node) const;
    // Of the last token of a node's prefix.
    PrefixScope scope_of(NodeId node) const;

    // Every NodeId is below this; ids of released nodes are used again, the lowest first.
    size_t num_slots() const { return nodes_.num_slots(); }
    size_t size() const { return nodes_.size(); }
    // How often a look-up met another prefix of the same hash, which only the comparison told apart.
    int64_t num_collisions() const { return num_collisions_; }
    size_t num_bytes() const { return nodes_.num_bytes() + by_hash_.num_bytes() + segments_.num_bytes(); }

    void check_invariants() const;

  private:
    static constexpr size_t kNearBytes = 32;
    static constexpr uint32_t kMaxSymbols = (1U << 28) - 1;

    // A cache line. Of the 128 bits of the hash 96 are kept: they only select what is compared.
    struct alignas(64) Node {
        uint64_t hash_low = 0;
        uint32_t hash_high = 0;
        NodeId parent = kNoNode;
        int32_t length = 0;
        uint32_t references = 0;
        uint32_t label = kNoNode;
        uint32_t count : 28 = 0;  // symbols of the segment
        uint32_t width : 4 = 0;   // bytes of one
        union {
            std::array<uint8_t, kNearBytes> near{};  // a short segment, or the scope of a root or seam
            SegmentArena::Block far;
        };

        bool has_hash(const Hash128& hash) const {
            return hash_low == hash.low && hash_high == static_cast<uint32_t>(hash.high);
        }
        bool is_scope() const { return count == 0; }  // a root or a seam
        size_t num_bytes() const { return size_t{count} * width; }
        bool is_far() const { return num_bytes() > kNearBytes; }
        const uint8_t* segment() const { return is_far() ? far.bytes : near.data(); }
        int32_t begin() const { return length - static_cast<int32_t>(count); }
    };
    static_assert(sizeof(Node) == 64);

    // The hash where all prompts of a scope begin.
    struct Origin {
        PrefixScope scope;
        PrefixHasher hasher;
        Hash128 hash;
    };

    // Where a walk along the boundaries of one prompt has come to.
    struct Walk {
        const PromptView& prompt;
        NodeId scope;          // the root, or the seam once it is passed
        NodeId deepest;        // the longest node seen to hold a prefix of the prompt
        int32_t previous = 0;  // the last boundary
    };

    static uint32_t bucket_hash(uint64_t low) { return static_cast<uint32_t>(low); }

    template <class Resolve>
    void visit(PrefixHasher& hasher, Walk& walk, std::span<const int32_t> boundaries, Resolve resolve) const;
    void fetch_ahead(std::span<const Hash128> hashes) const;
    const Origin& origin_of(const PrefixScope& scope) const;
    Hash128 digest(const PrefixHasher& hasher) const;
    template <class Resolve, class ResolveSeam>
    void visit_scopes(const PrefixScope& scope, const Origin& origin, Walk& walk,
                      std::span<const int32_t> boundaries, Resolve resolve, ResolveSeam resolve_seam) const;
    NodeId find_root(const Origin& origin) const;
    NodeId find_seam(const Hash128& hash, const Walk& walk, const PrefixScope& scope) const;
    NodeId find_node(const Hash128& hash, const Walk& walk, int32_t length) const;
    bool has_content(NodeId node, const Walk& walk) const;
    NodeId add_root(const Origin& origin);
    NodeId add_seam(const Hash128& hash, const Walk& walk, const PrefixScope& scope);
    PrefixScope stored_scope(NodeId node) const;
    NodeId add_node(const Hash128& hash, const Walk& walk, int32_t length);
    NodeId link(const Hash128& hash);
    void forget(NodeId node);
    void check_node(NodeId id) const;

    HashKey key_;
    bool constant_hash_;
    Pool<Node> nodes_;
    LinearHash by_hash_;
    SegmentArena segments_;
    const void* labelled_ = nullptr;
    void (*fetch_labelled_)(const void* labelled, uint32_t label) = nullptr;
    mutable Origin origin_;  // of the scope that was asked for last
    mutable int64_t num_collisions_ = 0;
};

}  // namespace parrot::scheduler
