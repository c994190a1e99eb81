// The candidates of the decisions for calls in flight, for explain(): at most 16 each, shared by the calls
// that were placed together.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/slab.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

struct Scored {
    Engine* engine = nullptr;
    Candidate candidate;
    double step_us = 0;     // one decode step at the resulting batch
    double compute_us = 0;  // the part of prefill_us that grows with the uncached tokens
};

class Decisions {
  public:
    static constexpr size_t kMaxCandidates = 16;

    // The best of `candidates`; nobody has it yet.
    uint32_t record(std::span<const Scored> candidates);
    void retain(uint32_t decision) { ++records_[decision].num_holders; }
    void drop(uint32_t decision);
    // Admissible candidates first, then by score.
    std::vector<Candidate> candidates(uint32_t decision) const;

    static std::vector<Candidate> best_first(std::vector<Candidate> candidates);

    size_t size() const { return records_.size(); }

  private:
    struct Compact {
        EngineId engine_id;
        double score_us;
        float queue_us;
        float prefill_us;
        float decode_us;
        float harm_us;
        int32_t prefix_len;
        bool admissible;
    };
    struct Record {
        uint32_t num_holders = 0;
        uint32_t size = 0;
        std::array<Compact, kMaxCandidates> candidates;
    };

    Slab<Record> records_;
    std::vector<Scored> sorted_;  // scratch
};

}  // namespace parrot::scheduler
