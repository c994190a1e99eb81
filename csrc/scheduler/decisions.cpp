#include "scheduler/decisions.h"

#include <algorithm>
#include <cstddef>
#include <tuple>

namespace parrot::scheduler {

namespace {

auto rank(const Candidate& candidate) {
    return std::tuple(!candidate.admissible, candidate.score_us, candidate.engine_id);
}

}  // namespace

uint32_t Decisions::record(std::span<const Scored> candidates) {
    if (candidates.size() > kMaxCandidates) {
        sorted_.assign(candidates.begin(), candidates.end());
        std::ranges::partial_sort(sorted_, sorted_.begin() + kMaxCandidates, {},
                                  [](const Scored& scored) { return rank(scored.candidate); });
        candidates = {sorted_.data(), kMaxCandidates};
    }
    const uint32_t slot = records_.take();
    Record& record = records_[slot];
    record.num_holders = 0;
    record.size = static_cast<uint32_t>(candidates.size());
    for (size_t i = 0; i < candidates.size(); ++i) {
        const Candidate& from = candidates[i].candidate;
        record.candidates[i] = {.engine_id = from.engine_id,
                                .score_us = from.score_us,
                                .queue_us = static_cast<float>(from.queue_us),
                                .prefill_us = static_cast<float>(from.prefill_us),
                                .decode_us = static_cast<float>(from.decode_us),
                                .harm_us = static_cast<float>(from.harm_us),
                                .prefix_len = from.prefix_len,
                                .admissible = from.admissible};
    }
    return slot;
}

void Decisions::drop(uint32_t decision) {
    if (--records_[decision].num_holders == 0) records_.give_as_is(decision);
}

std::vector<Candidate> Decisions::candidates(uint32_t decision) const {
    const Record& record = records_[decision];
    std::vector<Candidate> candidates;
    for (const Compact& from : std::span(record.candidates).first(record.size)) {
        candidates.push_back({from.engine_id, from.admissible, from.prefix_len, from.queue_us,
                              from.prefill_us, from.decode_us, from.harm_us, from.score_us});
    }
    return best_first(std::move(candidates));
}

std::vector<Candidate> Decisions::best_first(std::vector<Candidate> candidates) {
    const size_t kept = std::min(candidates.size(), kMaxCandidates);
    std::ranges::partial_sort(candidates, candidates.begin() + static_cast<std::ptrdiff_t>(kept), {}, rank);
    candidates.resize(kept);
    return candidates;
}

}  // namespace parrot::scheduler
