// Calls that one decision is about.
#pragma once

#include <cstdint>
#include <span>

#include "scheduler/engine_pool.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// Calls that are looked at as one, with the prefixes they share among themselves counted once.
class CallSet {
  public:
    // `completes_together`: only the end of the last one matters (a task group), else the mean end.
    CallSet(std::span<Call* const> calls, bool completes_together);
    explicit CallSet(const Call& call);
    CallSet(const CallSet&) = delete;
    CallSet& operator=(const CallSet&) = delete;

    CallShape shape() const;

    EnginePool* pool = nullptr;
    const Call* only = nullptr;  // the call, when it is one
    int32_t num_calls = 0;
    bool latency = false;
    bool completes_together = false;
    int64_t prompt_tokens = 0;
    int64_t new_tokens = 0;
    double decode_steps = 0;
    std::span<const PathEntry> entries;  // distinct

  private:
    void add(const Call& call);

    Path merged_;  // of several calls
};

}  // namespace parrot::scheduler
