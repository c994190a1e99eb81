#include "scheduler/prefix_table.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "concat.h"
#include "mutants.h"

namespace parrot::scheduler {

namespace {

// Boundaries whose cache misses overlap.
constexpr size_t kFetchedAhead = 16;

}  // namespace

PrefixTable::~PrefixTable() {
    for (NodeId id = 0; id < nodes_.num_slots(); ++id) {
        if (nodes_.contains(id) && nodes_[id].is_far())
            segments_.free(nodes_[id].far, nodes_[id].num_bytes());
    }
}

// Calls resolve(boundary, its hash, the node that is there or kNoNode), which returns the node it is now.
template <class Resolve>
void PrefixTable::visit(PrefixHasher& hasher, Walk& walk, std::span<const int32_t> boundaries,
                        Resolve resolve) const {
    std::array<Hash128, kFetchedAhead> hashes;
    while (!boundaries.empty()) {
        const auto group = boundaries.first(std::min(boundaries.size(), kFetchedAhead));
        for (size_t i = 0; i < group.size(); ++i) {
            extend(hasher, walk.prompt, static_cast<size_t>(walk.previous), static_cast<size_t>(group[i]));
            hashes[i] = digest(hasher);
            by_hash_.prefetch(bucket_hash(hashes[i].low));
            walk.previous = group[i];
        }
        if (group.size() > 1) fetch_ahead(std::span(hashes).first(group.size()));
        for (size_t i = 0; i < group.size(); ++i) {
            const NodeId known = find_node(hashes[i], walk, group[i]);
            const NodeId node = resolve(group[i], hashes[i], known);
            if (node != kNoNode) walk.deepest = node;
        }
        boundaries = boundaries.subspan(group.size());
    }
}

// The same, first for the boundaries in the public scope, then for those in the domain's own. In between
// calls resolve_seam(its hash, the seam that is there or kNoNode), which returns what it is now; where it is
// kNoNode nothing behind it is visited.
template <class Resolve, class ResolveSeam>
void PrefixTable::visit_scopes(const PrefixScope& scope, const Origin& origin, Walk& walk,
                               std::span<const int32_t> boundaries, Resolve resolve,
                               ResolveSeam resolve_seam) const {
    PrefixHasher hasher = origin.hasher;
    auto behind = boundaries.end();
    if (scope.has_seam()) behind = std::ranges::upper_bound(boundaries, scope.public_len);
    auto part = boundaries.first(static_cast<size_t>(behind - boundaries.begin()));
    boundaries = boundaries.subspan(part.size());
    while (true) {  // one call of visit, which is inlined then
        visit(hasher, walk, part, resolve);
        if (boundaries.empty()) return;
        if (!mutant("seam_ignored")) hasher.enter_domain(scope.domain);
        const Hash128 hash = digest(hasher);
        const bool is_known = nodes_[walk.deepest].length == scope.public_len;
        const NodeId seam = resolve_seam(hash, is_known ? find_seam(hash, walk, scope) : kNoNode);
        if (seam == kNoNode) return;
        walk.scope = walk.deepest = seam;
        part = std::exchange(boundaries, {});
    }
}

// Starts to load the nodes that these hashes probably lead to, and what they point at.
void PrefixTable::fetch_ahead(std::span<const Hash128> hashes) const {
    std::array<NodeId, kFetchedAhead> nodes;
    for (size_t i = 0; i < hashes.size(); ++i) {
        nodes[i] = by_hash_.find(bucket_hash(hashes[i].low), [](NodeId) { return true; });
        if (nodes[i] != kNoNode) __builtin_prefetch(&nodes_[nodes[i]]);
    }
    for (size_t i = 0; i < hashes.size(); ++i) {
        if (nodes[i] != kNoNode) __builtin_prefetch(nodes_[nodes[i]].segment());
    }
}

Path PrefixTable::acquire(const PrefixScope& scope, const PromptView& prompt,
                          std::span<const int32_t> boundaries) {
    Path path;
    if (boundaries.empty()) return path;
    path.reserve(boundaries.size());
    const Origin& origin = origin_of(scope);
    NodeId root = find_root(origin);
    if (root == kNoNode) root = add_root(origin);
    Walk walk{prompt, root, root};
    int32_t previous = 0;
    const auto resolve = [&](int32_t boundary, const Hash128& hash, NodeId known) {
        const NodeId node = known != kNoNode ? known : add_node(hash, walk, boundary);
        ++nodes_[node].references;
        path.push_back({node, boundary, previous});
        previous = boundary;
        return node;
    };
    visit_scopes(scope, origin, walk, boundaries, resolve, [&](const Hash128& hash, NodeId known) {
        return known != kNoNode ? known : add_seam(hash, walk, scope);
    });
    return path;
}

void PrefixTable::find(const PrefixScope& scope, const PromptView& prompt,
                       std::span<const int32_t> boundaries, std::vector<NodeId>& found) const {
    found.clear();
    const Origin& origin = origin_of(scope);
    const NodeId root = find_root(origin);
    if (root == kNoNode) return found.resize(boundaries.size(), kNoNode);
    Walk walk{prompt, root, root};
    const auto resolve = [&](int32_t, const Hash128&, NodeId known) {
        found.push_back(known);
        return known;
    };
    visit_scopes(scope, origin, walk, boundaries, resolve,
                 [](const Hash128&, NodeId known) { return known; });
    found.resize(boundaries.size(), kNoNode);
}

void PrefixTable::release(NodeId node) {
    while (node != kNoNode && --nodes_[node].references == 0) {
        const NodeId parent = nodes_[node].parent;
        forget(node);
        node = parent;
    }
}

std::vector<Symbol> PrefixTable::symbols_of(NodeId node) const {
    std::vector<NodeId> path;
    for (; node != kNoNode; node = nodes_[node].parent) path.push_back(node);
    std::vector<Symbol> symbols;
    for (size_t i = path.size(); i-- > 0;) {
        const Node& part = nodes_[path[i]];
        unpack(part.segment(), part.width, part.count, symbols);
    }
    return symbols;
}

PrefixScope PrefixTable::scope_of(NodeId node) const {
    while (!nodes_[node].is_scope()) node = nodes_[node].parent;
    return stored_scope(node);
}

PrefixScope PrefixTable::stored_scope(NodeId node) const {
    PrefixScope scope;
    std::memcpy(&scope, nodes_[node].near.data(), sizeof(scope));
    return scope;
}

// Where the prompts of a scope begin.
const PrefixTable::Origin& PrefixTable::origin_of(const PrefixScope& scope) const {
    PrefixScope first = scope;
    if (scope.public_len > 0) first = scope.public_part();
    if (first != origin_.scope) {
        origin_ = {first, PrefixHasher(key_, first), {}};
        origin_.hash = digest(origin_.hasher);
    }
    return origin_;
}

Hash128 PrefixTable::digest(const PrefixHasher& hasher) const {
    return constant_hash_ ? Hash128{} : hasher.digest();
}

NodeId PrefixTable::find_root(const Origin& origin) const {
    return by_hash_.find(bucket_hash(origin.hash.low), [&](NodeId id) {
        if (!nodes_[id].has_hash(origin.hash)) return false;
        const bool is_same = nodes_[id].parent == kNoNode && stored_scope(id) == origin.scope;
        if (!is_same) ++num_collisions_;
        return is_same;
    });
}

// Behind the deepest node, which is at the end of the published text.
NodeId PrefixTable::find_seam(const Hash128& hash, const Walk& walk, const PrefixScope& scope) const {
    return by_hash_.find(bucket_hash(hash.low), [&](NodeId id) {
        const Node& node = nodes_[id];
        if (!node.has_hash(hash)) return false;
        const bool is_same = node.is_scope() && node.parent == walk.deepest &&
                             (stored_scope(id) == scope || mutant("seam_ignored"));
        if (!is_same) ++num_collisions_;
        return is_same;
    });
}

NodeId PrefixTable::find_node(const Hash128& hash, const Walk& walk, int32_t length) const {
    return by_hash_.find(bucket_hash(hash.low), [&](NodeId id) {
        const Node& node = nodes_[id];
        if (!node.has_hash(hash)) return false;
        if (labelled_ != nullptr && node.label != kNoNode) fetch_labelled_(labelled_, node.label);
        const bool is_same = node.length == length && has_content(id, walk);
        if (!is_same) ++num_collisions_;
        return is_same;
    });
}

// The comparison ends where the node's path meets one that has been compared already.
bool PrefixTable::has_content(NodeId id, const Walk& walk) const {
    while (id != walk.deepest && id != walk.scope) {
        const Node& node = nodes_[id];
        if (node.is_scope()) return false;  // another one
        if (!equals_packed(walk.prompt, static_cast<size_t>(node.begin()), static_cast<size_t>(node.length),
                           node.width, node.segment())) {
            return false;
        }
        id = node.parent;
    }
    return true;
}

NodeId PrefixTable::add_root(const Origin& origin) {
    static_assert(sizeof(PrefixScope) <= kNearBytes);
    const NodeId id = link(origin.hash);
    std::memcpy(nodes_[id].near.data(), &origin.scope, sizeof(origin.scope));
    return id;
}

NodeId PrefixTable::add_seam(const Hash128& hash, const Walk& walk, const PrefixScope& scope) {
    const NodeId id = link(hash);
    Node& node = nodes_[id];
    ++nodes_[walk.deepest].references;
    node.parent = walk.deepest;
    node.length = nodes_[walk.deepest].length;
    std::memcpy(node.near.data(), &scope, sizeof(scope));
    return id;
}

NodeId PrefixTable::add_node(const Hash128& hash, const Walk& walk, int32_t length) {
    const NodeId id = link(hash);
    Node& node = nodes_[id];
    Node& parent = nodes_[walk.deepest];
    ++parent.references;
    node.parent = walk.deepest;
    node.length = length;
    const auto begin = static_cast<size_t>(parent.length), end = static_cast<size_t>(length);
    node.count = static_cast<uint32_t>(end - begin) & kMaxSymbols;
    node.width = packed_width(walk.prompt, begin, end) & 15;
    uint8_t* segment = node.near.data();
    if (node.is_far()) {
        node.far = segments_.allocate(node.num_bytes());
        segment = node.far.bytes;
    }
    pack(walk.prompt, begin, end, node.width, segment);
    return id;
}

NodeId PrefixTable::link(const Hash128& hash) {
    const NodeId id = nodes_.allocate();
    nodes_[id].hash_low = hash.low;
    nodes_[id].hash_high = static_cast<uint32_t>(hash.high);
    by_hash_.insert(bucket_hash(hash.low), id);
    return id;
}

// Nobody refers to the node any more: it must not be found again.
void PrefixTable::forget(NodeId id) {
    Node& node = nodes_[id];
    by_hash_.erase(bucket_hash(node.hash_low), id);
    if (node.is_far()) segments_.free(node.far, node.num_bytes());
    nodes_.free(id);
}

void PrefixTable::check_invariants() const {
    by_hash_.check_invariants();
    size_t num_live = 0;
    for (NodeId id = 0; id < nodes_.num_slots(); ++id) {
        if (!nodes_.contains(id)) continue;
        check_node(id);
        ++num_live;
    }
    if (num_live != size() || by_hash_.size() != size()) {
        throw std::logic_error(concat("the prefix table has ", num_live, " nodes, finds ", by_hash_.size(),
                                      " and counts ", size()));
    }
}

void PrefixTable::check_node(NodeId id) const {
    const Node& node = nodes_[id];
    const bool is_root = node.parent == kNoNode;
    const int32_t parent_length = is_root ? 0 : nodes_[node.parent].length;
    const NodeId found =
        by_hash_.find(bucket_hash(node.hash_low), [&](NodeId candidate) { return candidate == id; });
    const bool is_sound = node.references > 0 && found == id && node.begin() == parent_length &&
                          (is_root || nodes_.contains(node.parent)) && is_root == (node.length == 0) &&
                          (!is_root || node.is_scope());
    const bool is_seam = node.is_scope() && !is_root;
    const PrefixScope outside = is_seam ? scope_of(node.parent) : PrefixScope{};
    const bool is_inside =
        !is_seam || (outside == stored_scope(id).public_part() && stored_scope(id).public_len == node.length);
    if (!is_sound || !is_inside) throw std::logic_error(concat("prefix node ", id, " is corrupt"));
}

}  // namespace parrot::scheduler
