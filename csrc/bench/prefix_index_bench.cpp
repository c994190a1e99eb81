// Measures PrefixIndex without Python: prefix_index_bench lookups|calls|long|variables ENTRIES EVENTS.
// Prints one line of JSON. Run by `python -m bench prefix-index`.
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "bench/measure.h"
#include "bench/radix_tree.h"
#include "scheduler/prefix_index.h"

namespace parrot::bench {

namespace {

using scheduler::OwnerKind;
using scheduler::PrefixIndex;
using scheduler::PromptView;

constexpr scheduler::HashKey kKey{0x0706050403020100, 0x0f0e0d0c0b0a0908};
constexpr scheduler::PrefixScope kScope{1, 0, 0};
constexpr int32_t kVocabulary = 30'000;
constexpr uint64_t kNumFamilies = 50;

using Ids = std::vector<int32_t>;
using Answer = std::pair<int32_t, int64_t>;  // (longest known boundary, its newest owner)

PromptView view(const Ids& ids) { return std::span(ids); }

// Prompt number `i`: the head of one of 50 families, then ids of its own. The same for the same number.
struct Prompts {
    size_t head;
    size_t length;

    Ids operator()(uint64_t i) const {
        Ids ids(length);
        for (size_t at = 0; at < length; ++at) {
            ids[at] = token(at < head ? i % kNumFamilies : i + kNumFamilies, at);
        }
        return ids;
    }

    static int32_t token(uint64_t stream, uint64_t at) {
        uint64_t mixed = (stream << 16 | at) * 0x9e3779b97f4a7c15ULL;
        mixed = (mixed ^ mixed >> 31) * 0xbf58476d1ce4e5b9ULL;
        return static_cast<int32_t>((mixed >> 32) % kVocabulary);
    }
};

// Of `count` prompts, half of them among the first `num_known`, half unknown but for their head.
std::vector<Ids> wanted_prompts(const Prompts& prompts, uint64_t num_known, size_t count, double known) {
    std::mt19937_64 random(5);
    std::vector<Ids> wanted;
    for (size_t i = 0; i < count; ++i) {
        const uint64_t number = random() % num_known;
        const bool is_known = static_cast<double>(random() % 1000) < known * 1000;
        wanted.push_back(prompts(is_known ? number : number + (uint64_t{1} << 40)));
    }
    return wanted;
}

// A prompt comes from the tokenizer, so it is in the cache when it is looked up.
void warm(const Ids& prompt) {
    [[maybe_unused]] static volatile int32_t sum;
    int32_t total = 0;
    for (const int32_t id : prompt) total ^= id;
    sum = total;
}

Answer longest(const PrefixIndex& index, const Ids& prompt, std::span<const int32_t> boundaries) {
    const auto& matches = index.match(kScope, view(prompt), boundaries, 1);
    return matches.calls.empty() ? Answer{} : Answer{matches.rows[0].boundary, matches.calls[0]};
}

// One key of 32 tokens per entry: fill, look up, remove.
void measure_lookups(Json& json, size_t num_entries, size_t num_events) {
    const Prompts prompts{16, 32};
    const Ids boundaries{32};
    Times inserts(num_entries), matches(num_events), removals(num_entries);
    PrefixIndex index(kKey, false);
    const std::vector<Ids> wanted = wanted_prompts(prompts, num_entries, 2 * num_events, 1);
    const int64_t before = resident_bytes();
    for (size_t i = 0; i < num_entries; ++i) {
        const Ids prompt = prompts(i);
        inserts.time([&] {
            index.insert(OwnerKind::kCall, static_cast<int64_t>(i) + 1, kScope, view(prompt), boundaries);
        });
    }
    json.add("bytes_per_entry", static_cast<double>(index.num_bytes()) / static_cast<double>(num_entries));
    json.add("resident_per_entry",
             static_cast<double>(resident_bytes() - before) / static_cast<double>(num_entries));
    size_t found = 0;
    json.add("matches_per_s", rate_of(num_events, [&] {
                 for (size_t i = 0; i < num_events; ++i) {
                     __builtin_prefetch(wanted[i + 1].data());  // warm, as above
                     __builtin_prefetch(wanted[i + 1].data() + 16);
                     found += longest(index, wanted[i], boundaries).second != 0;
                 }
             }));
    for (size_t i = num_events; i < 2 * num_events; ++i) {
        warm(wanted[i]);
        matches.time([&] { found += longest(index, wanted[i], boundaries).second != 0; });
    }
    std::mt19937_64 random(7);
    std::vector<int64_t> order(num_entries);
    for (size_t i = 0; i < num_entries; ++i) order[i] = static_cast<int64_t>(i) + 1;
    std::shuffle(order.begin(), order.end(), random);
    for (const int64_t owner : order) removals.time([&] { index.remove(OwnerKind::kCall, owner); });
    index.check_invariants();
    json.add("insert", inserts.json());
    json.add("match", matches.json());
    json.add("remove", removals.json());
    json.add("bytes_left", static_cast<double>(index.num_bytes()));
    json.add("all_found", found == 2 * num_events ? "true" : "false");
}

// The newest owner of the longest boundary, by looking at every entry token by token.
Answer by_comparison(const std::vector<Ids>& entries, const Ids& prompt,
                     std::span<const int32_t> boundaries) {
    Answer best{0, 0};
    for (size_t i = 0; i < entries.size(); ++i) {
        const auto end = std::ranges::mismatch(entries[i], prompt).in1;
        const auto shared = static_cast<int32_t>(end - entries[i].begin());
        for (const int32_t boundary : boundaries) {
            if (boundary <= shared && boundary >= best.first) best = {boundary, static_cast<int64_t>(i) + 1};
        }
    }
    return best;
}

struct Rivals {
    PrefixIndex index{kKey, false};
    RadixTree tree;
};

// Fills one after the other and reports memory and rate.
template <class Insert>
void fill(Json& json, const char* bytes_name, const char* rate_name, const std::vector<Ids>& entries,
          Insert insert) {
    const int64_t before = resident_bytes();
    json.add(rate_name, rate_of(entries.size(), [&] {
                 for (size_t i = 0; i < entries.size(); ++i) insert(static_cast<int64_t>(i) + 1, entries[i]);
             }));
    json.add(bytes_name,
             static_cast<double>(resident_bytes() - before) / static_cast<double>(entries.size()));
}

// Live calls of 200 tokens with boundaries at 128 and 200, against a radix tree and plain comparison.
void measure_calls(Json& json, size_t num_entries, size_t num_events) {
    const Prompts prompts{128, 200};
    const Ids boundaries{128, 200};
    std::vector<Ids> entries;
    for (size_t i = 0; i < num_entries; ++i) entries.push_back(prompts(i));
    const std::vector<Ids> wanted = wanted_prompts(prompts, num_entries, num_events, 0.5);
    const auto rivals = std::make_unique<Rivals>();
    fill(json, "index_bytes", "index_inserts_per_s", entries, [&](int64_t owner, const Ids& prompt) {
        rivals->index.insert(OwnerKind::kCall, owner, kScope, view(prompt), boundaries);
    });
    fill(json, "tree_bytes", "tree_inserts_per_s", entries,
         [&](int64_t owner, const Ids& prompt) { rivals->tree.insert(owner, prompt, boundaries); });
    Times index_times(num_events), tree_times(num_events), comparison_times(num_events);
    std::vector<Answer> index_answers(num_events), tree_answers(num_events);
    constexpr size_t kTurn = 100;  // look-ups of one before it is the other's turn
    for (size_t i = 0; i < num_events; i += kTurn) {
        const size_t end = std::min(i + kTurn, num_events);
        for (size_t at = i; at < end; ++at) {
            warm(wanted[at]);
            index_times.time([&] { index_answers[at] = longest(rivals->index, wanted[at], boundaries); });
        }
        for (size_t at = i; at < end; ++at) {
            warm(wanted[at]);
            tree_times.time([&] { tree_answers[at] = rivals->tree.find(wanted[at]); });
        }
    }
    bool same = index_answers == tree_answers;
    for (size_t i = 0; i < std::min<size_t>(num_events, 40); ++i) {
        Answer answer;
        comparison_times.time([&] { answer = by_comparison(entries, wanted[i], boundaries); });
        same = same && answer == index_answers[i];
    }
    Times index_removals(num_entries), tree_removals(num_entries);
    for (size_t i = num_entries; i-- > 0;) {
        const auto owner = static_cast<int64_t>(i) + 1;
        index_removals.time([&] { rivals->index.remove(OwnerKind::kCall, owner); });
        tree_removals.time([&] { rivals->tree.remove(owner); });
    }
    json.add("index", index_times.json());
    json.add("tree", tree_times.json());
    json.add("comparison", comparison_times.json());
    json.add("index_remove", index_removals.json());
    json.add("tree_remove", tree_removals.json());
    same = same && rivals->index.size() == 0 && rivals->tree.num_nodes() == 1;
    json.add("same_answers", same ? "true" : "false");
}

// Prompts of 6,000 tokens with a boundary every 16, in an index that has many entries already.
void measure_long(Json& json, size_t num_entries, size_t num_events) {
    constexpr size_t kLength = 6000, kStride = 16;
    const Prompts prompts{0, kLength};
    const Prompts others{16, 32};
    Ids boundaries;
    for (size_t at = kStride; at <= kLength; at += kStride) boundaries.push_back(static_cast<int32_t>(at));
    const auto rivals = std::make_unique<Rivals>();
    for (size_t i = 0; i < num_entries; ++i) {
        rivals->index.insert(OwnerKind::kCall, static_cast<int64_t>(i) + 1, kScope, view(others(i)), Ids{32});
    }
    std::vector<Ids> wanted;
    for (size_t i = 0; i < num_events; ++i) wanted.push_back(prompts(i));
    Times inserts(num_events), matches(5 * num_events), tree_matches(5 * num_events), removals(num_events);
    for (size_t i = 0; i < num_events; ++i) {
        const auto context = static_cast<int64_t>(i) + 1;
        inserts.time(
            [&] { rivals->index.insert(OwnerKind::kContext, context, kScope, view(wanted[i]), boundaries); });
        rivals->tree.insert(context, wanted[i], boundaries);
    }
    bool same = true;
    for (size_t i = 0; i < 5 * num_events; ++i) {
        const Ids& prompt = wanted[i * 7 % num_events];
        warm(prompt);
        scheduler::PrefixMatches found;
        Answer answer;
        matches.time([&] { found = rivals->index.match(kScope, view(prompt), boundaries, 16); });
        tree_matches.time([&] { answer = rivals->tree.find(prompt); });
        same =
            same && found.rows.size() == 1 && answer == Answer{found.rows[0].boundary, found.contexts.at(0)};
    }
    for (size_t i = 0; i < num_events; ++i) {
        removals.time([&] { rivals->index.remove(OwnerKind::kContext, static_cast<int64_t>(i) + 1); });
    }
    json.add("insert", inserts.json());
    json.add("match", matches.json());
    json.add("tree_match", tree_matches.json());
    json.add("remove", removals.json());
    json.add("same_answers", same ? "true" : "false");
}

// Each variable has `num_entries` calls that wait for it; its text comes.
void measure_variables(Json& json, size_t num_entries, size_t num_events) {
    constexpr size_t kHead = 1000, kTail = 72, kText = 100;
    const Prompts prompts{kHead, kHead + 1 + kTail};
    const Ids boundaries{int32_t{kHead}, int32_t{kHead + 1}, int32_t{kHead + 1 + kTail}};
    PrefixIndex index(kKey, false);
    Times sets(num_events);
    bool same = true;
    for (size_t event = 0; event < num_events; ++event) {
        const std::vector<int64_t> variables{static_cast<int64_t>(event)};
        for (size_t i = 0; i < num_entries; ++i) {
            Ids prompt = prompts(i * kNumFamilies);
            prompt[kHead] = -1;
            index.insert(OwnerKind::kCall, static_cast<int64_t>(i) + 1, kScope, PromptView(prompt, variables),
                         boundaries);
        }
        const Ids text = Prompts{0, kText}(event);
        sets.time([&] { same = same && index.set_variable(variables[0], text) == num_entries; });
        Ids full = prompts((num_entries - 1) * kNumFamilies);
        full.erase(full.begin() + kHead);
        full.insert(full.begin() + kHead, text.begin(), text.end());
        const Ids whole{static_cast<int32_t>(full.size())};
        same = same && longest(index, full, whole) == Answer{whole[0], static_cast<int64_t>(num_entries)};
        for (size_t i = 0; i < num_entries; ++i) {
            index.remove(OwnerKind::kCall, static_cast<int64_t>(i) + 1);
        }
    }
    json.add("set", sets.json());
    json.add("same_answers", same ? "true" : "false");
}

int run(std::span<char*> arguments) {
    using Measure = void (*)(Json&, size_t, size_t);
    constexpr std::pair<const char*, Measure> kParts[] = {{"lookups", measure_lookups},
                                                          {"calls", measure_calls},
                                                          {"long", measure_long},
                                                          {"variables", measure_variables}};
    if (arguments.size() == 4) {
        const size_t num_entries = std::strtoul(arguments[2], nullptr, 10);
        const size_t num_events = std::strtoul(arguments[3], nullptr, 10);
        for (const auto& [name, measure] : kParts) {
            if (std::strcmp(name, arguments[1]) != 0 || num_entries == 0 || num_events == 0) continue;
            Json json;
            measure(json, num_entries, num_events);
            json.print();
            return 0;
        }
    }
    std::fprintf(stderr, "usage: prefix_index_bench lookups|calls|long|variables ENTRIES EVENTS\n");
    return 2;
}

}  // namespace

}  // namespace parrot::bench

int main(int argc, char** argv) {
    try {
        return parrot::bench::run(std::span(argv, static_cast<size_t>(argc)));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "prefix_index_bench: %s\n", error.what());
        return 1;
    }
}
