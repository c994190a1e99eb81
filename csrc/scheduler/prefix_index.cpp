#include "scheduler/prefix_index.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "concat.h"
#include "mutants.h"
#include "scheduler/errors.h"

namespace parrot::scheduler {

namespace {

constexpr OwnerId kMaxOwnerId = (OwnerId{1} << 62) - 1;
constexpr size_t kMaxValueTokens = size_t{1} << 24;

const char* name_of(OwnerKind kind) { return kind == OwnerKind::kCall ? "call_id" : "context_id"; }

// A prompt in which a variable has been replaced by its text.
struct Rewritten {
    std::vector<int32_t> token_ids;
    std::vector<VariableId> variables;
    std::vector<int32_t> boundaries;
};

void append_symbol(Rewritten& prompt, Symbol symbol) {
    if (symbol >= 0) {
        prompt.token_ids.push_back(static_cast<int32_t>(symbol));
    } else {
        prompt.variables.push_back(~symbol);
        prompt.token_ids.push_back(-static_cast<int32_t>(prompt.variables.size()));
    }
}

// Boundaries that an empty text leaves at the same place become one; those beyond the longest prompt go.
Rewritten substitute(std::span<const Symbol> symbols, std::span<const int32_t> boundaries,
                     VariableId variable, std::span<const int32_t> token_ids) {
    Rewritten prompt;
    size_t next = 0;
    for (size_t i = 0; i < symbols.size(); ++i) {
        if (prompt.token_ids.size() > kMaxPromptTokens - kMaxValueTokens) break;
        if (symbols[i] == ~variable) {
            prompt.token_ids.insert(prompt.token_ids.end(), token_ids.begin(), token_ids.end());
        } else {
            append_symbol(prompt, symbols[i]);
        }
        if (static_cast<size_t>(boundaries[next]) != i + 1) continue;
        ++next;
        const auto boundary = static_cast<int32_t>(prompt.token_ids.size());
        const int32_t last = prompt.boundaries.empty() ? 0 : prompt.boundaries.back();
        if (boundary > last) prompt.boundaries.push_back(boundary);
    }
    return prompt;
}

}  // namespace

void PrefixIndex::insert(OwnerKind kind, OwnerId id, const PrefixScope& scope, const PromptView& prompt,
                         std::span<const int32_t> boundaries) {
    require_within(name_of(kind), id, 1, kMaxOwnerId);
    require_prompt(prompt.token_ids, boundaries, prompt.variables);
    require_public_len(scope.public_len, prompt.token_ids, boundaries);
    if (kind == OwnerKind::kContext && !prompt.variables.empty()) {
        throw std::invalid_argument(concat("context_id = ", id, " has ", prompt.variables.size(),
                                           " variables; what an engine holds has none"));
    }
    const OwnerKey key = key_of(kind, id);
    if (find_owner(key) != kNone) {
        throw std::invalid_argument(concat(name_of(kind), " = ", id, " is there already"));
    }
    const Path path = table_.acquire(scope, prompt, boundaries);
    const OwnerSlot slot = owners_.allocate();
    owners_[slot].key = key;
    by_key_.insert(hash_of(key), slot);
    register_at(owners_[slot], path);
    if (!path.empty()) wait_for_variables(slot, prompt, static_cast<size_t>(path.back().length));
}

void PrefixIndex::remove(OwnerKind kind, OwnerId id) {
    const OwnerSlot slot = require_owner(kind, id);
    if (owners_[slot].waits) stop_waiting(slot);
    for (RegistrationId last = owners_[slot].longest; last != kNone;) last = drop(last);
    by_key_.erase(hash_of(owners_[slot].key), slot);
    owners_.free(slot);
}

void PrefixIndex::shorten_context(OwnerId id, int64_t length) {
    require_at_least("length", length, 0);
    if (mutant("stale_entry_kept")) return;
    Owner& owner = owners_[require_owner(OwnerKind::kContext, id)];
    while (owner.longest != kNone && registrations_[owner.longest].length > length) {
        owner.longest = drop(owner.longest);
    }
}

size_t PrefixIndex::set_variable(VariableId variable, std::span<const int32_t> token_ids) {
    require_at_least("variable_id", variable, 0);
    require_within("len(token_ids)", static_cast<int64_t>(token_ids.size()), 0, kMaxValueTokens);
    require_prompt(token_ids, {});
    std::vector<OwnerSlot> waiting;
    for (auto at = waiting_.lower_bound({variable, 0}); at != waiting_.end() && at->first == variable; ++at) {
        waiting.push_back(at->second);
    }
    for (const OwnerSlot slot : waiting) rekey(slot, variable, token_ids);
    return waiting.size();
}

const PrefixMatches& PrefixIndex::match(const PrefixScope& scope, const PromptView& prompt,
                                        std::span<const int32_t> boundaries, size_t max_owners) const {
    require_prompt(prompt.token_ids, boundaries, prompt.variables);
    require_public_len(scope.public_len, prompt.token_ids, boundaries);
    table_.find(scope, prompt, boundaries, nodes_);
    PrefixMatches& matches = matches_;
    matches.rows.clear();
    matches.calls.clear();
    matches.contexts.clear();
    for (size_t i = nodes_.size(); i-- > 0;) {
        if (nodes_[i] == kNoNode || table_.label(nodes_[i]) == kNone) continue;
        const size_t num_listed = matches.calls.size() + matches.contexts.size();
        list_owners(table_.label(nodes_[i]), max_owners, matches);
        if (matches.calls.size() + matches.contexts.size() == num_listed) continue;
        matches.rows.push_back({boundaries[i], matches.calls.size(), matches.contexts.size()});
        if (matches.calls.size() == max_owners && matches.contexts.size() == max_owners) break;
    }
    return matches;
}

// Appends the owners in a node's list that are not listed yet. Listed ones are few: searching beats a set.
void PrefixIndex::list_owners(RegistrationId first, size_t max_owners, PrefixMatches& matches) const {
    const auto list = [max_owners](std::vector<OwnerId>& listed, OwnerId id) {
        if (std::ranges::find(listed, id) == listed.end()) listed.push_back(id);
        return listed.size() < max_owners;
    };
    for (RegistrationId id = first; id != kNone; id = registrations_[id].next) {
        const OwnerKey owner = registrations_[id].owner;
        if (is_context(owner) || matches.calls.size() >= max_owners) break;
        if (!list(matches.calls, owner / 2)) break;
    }
    for (RegistrationId id = registrations_[first].previous;; id = registrations_[id].previous) {
        const OwnerKey owner = registrations_[id].owner;
        if (!is_context(owner) || matches.contexts.size() >= max_owners) break;
        if (!list(matches.contexts, owner / 2) || id == first) break;
    }
}

uint32_t PrefixIndex::hash_of(OwnerKey key) {
    const auto mixed = static_cast<uint64_t>(key) * 0x9e3779b97f4a7c15ULL;
    return static_cast<uint32_t>(mixed >> 32);
}

PrefixIndex::OwnerSlot PrefixIndex::find_owner(OwnerKey key) const {
    return by_key_.find(hash_of(key), [&](OwnerSlot slot) { return owners_[slot].key == key; });
}

PrefixIndex::OwnerSlot PrefixIndex::require_owner(OwnerKind kind, OwnerId id) const {
    require_within(name_of(kind), id, 1, kMaxOwnerId);
    const OwnerSlot slot = find_owner(key_of(kind, id));
    if (slot == kNone) throw UnknownId(name_of(kind), id);
    return slot;
}

// Takes over the references of `path`. The owner has no registration.
void PrefixIndex::register_at(Owner& owner, std::span<const PathEntry> path) {
    for (const PathEntry& step : path) {
        const RegistrationId id = registrations_.allocate();
        Registration& added = registrations_[id];
        added.owner = owner.key;
        added.node = step.node;
        added.length = step.length;
        added.shorter = owner.longest;
        owner.longest = id;
        attach(id);
    }
}

void PrefixIndex::attach(RegistrationId id) {
    Registration& added = registrations_[id];
    RegistrationId& first = table_.label(added.node);
    if (first == kNone) {
        ++num_prefixes_;
        added.previous = id;
        first = id;
        return;
    }
    const RegistrationId last = registrations_[first].previous;
    added.previous = last;
    registrations_[first].previous = id;
    if (is_context(added.owner)) {
        registrations_[last].next = id;
    } else {
        added.next = first;
        first = id;
    }
}

void PrefixIndex::detach(RegistrationId id) {
    const Registration& gone = registrations_[id];
    RegistrationId& first = table_.label(gone.node);
    if (id == first) {
        first = gone.next;
        if (first == kNone) --num_prefixes_;
    } else {
        registrations_[gone.previous].next = gone.next;
    }
    const RegistrationId behind = gone.next != kNone ? gone.next : first;
    if (behind != kNone) registrations_[behind].previous = gone.previous;
}

// Returns the owner's next shorter one.
PrefixIndex::RegistrationId PrefixIndex::drop(RegistrationId id) {
    detach(id);
    const Registration gone = registrations_[id];
    registrations_.free(id);
    table_.release(gone.node);
    return gone.shorter;
}

void PrefixIndex::wait_for_variables(OwnerSlot slot, const PromptView& prompt, size_t length) {
    if (prompt.variables.empty()) return;
    for (size_t i = 0; i < length; ++i) {
        if (prompt[i] < 0) waiting_.emplace(~prompt[i], slot);
        owners_[slot].waits |= prompt[i] < 0;
    }
}

void PrefixIndex::stop_waiting(OwnerSlot slot) {
    const NodeId longest = registrations_[owners_[slot].longest].node;
    for (const Symbol symbol : table_.symbols_of(longest)) {
        if (symbol < 0) waiting_.erase({~symbol, slot});
    }
    owners_[slot].waits = false;
}

// The new path is taken before the old one is released, so that what they share stays.
void PrefixIndex::rekey(OwnerSlot slot, VariableId variable, std::span<const int32_t> token_ids) {
    Owner& owner = owners_[slot];
    std::vector<int32_t> boundaries;
    for (RegistrationId id = owner.longest; id != kNone; id = registrations_[id].shorter) {
        boundaries.push_back(registrations_[id].length);
    }
    std::ranges::reverse(boundaries);
    const NodeId longest = registrations_[owner.longest].node;
    const Rewritten prompt = substitute(table_.symbols_of(longest), boundaries, variable, token_ids);
    stop_waiting(slot);
    const PromptView view(prompt.token_ids, prompt.variables);
    const Path path = table_.acquire(table_.scope_of(longest), view, prompt.boundaries);
    for (RegistrationId last = owner.longest; last != kNone;) last = drop(last);
    owner.longest = kNone;
    register_at(owner, path);
    if (!path.empty()) wait_for_variables(slot, view, static_cast<size_t>(path.back().length));
}

size_t PrefixIndex::num_bytes() const {
    return table_.num_bytes() + registrations_.num_bytes() + owners_.num_bytes() + by_key_.num_bytes();
}

void PrefixIndex::check_invariants() const {
    table_.check_invariants();
    by_key_.check_invariants();
    size_t num_registrations = 0, num_waiting = 0;
    for (OwnerSlot slot = 0; slot < owners_.num_slots(); ++slot) {
        if (!owners_.contains(slot)) continue;
        num_waiting += owners_[slot].waits;
        int64_t length = std::numeric_limits<int64_t>::max();
        for (RegistrationId id = owners_[slot].longest; id != kNone; id = registrations_[id].shorter) {
            const Registration& registration = registrations_[id];
            const bool is_sound = registration.owner == owners_[slot].key && registration.length < length;
            if (!is_sound) throw std::logic_error(concat("registration ", id, " is corrupt"));
            check_list(table_.label(registration.node));
            length = registration.length;
            ++num_registrations;
        }
    }
    if (num_registrations != registrations_.size() || owners_.size() != by_key_.size() ||
        num_waiting > waiting_.size()) {
        throw std::logic_error(concat(owners_.size(), " owners have ", num_registrations,
                                      " registrations of ", registrations_.size()));
    }
    if (owners_.size() == 0 && (table_.size() != 0 || !waiting_.empty())) {
        throw std::logic_error(concat(table_.size(), " prefixes are left without an owner"));
    }
}

void PrefixIndex::check_list(RegistrationId first) const {
    RegistrationId previous = registrations_[first].previous;
    bool seen_context = false;
    for (RegistrationId id = first; id != kNone; id = registrations_[id].next) {
        const Registration& registration = registrations_[id];
        const bool is_sound = registration.previous == previous &&
                              registration.node == registrations_[first].node &&
                              (!seen_context || is_context(registration.owner));
        if (!is_sound) throw std::logic_error(concat("the list with registration ", id, " is corrupt"));
        seen_context = is_context(registration.owner);
        previous = id;
    }
    if (previous != registrations_[first].previous) throw std::logic_error("a list of owners lacks its end");
}

}  // namespace parrot::scheduler
