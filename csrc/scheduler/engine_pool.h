// The engines of one model, with what a search needs of each in flat arrays.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/engine.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// A microsecond of a call that somebody waits for counts like this many of calls that nobody waits for.
inline constexpr double kLatencyWeight = 16;

// Calls that are looked at as one, as far as the score of an engine that has none of their prefixes needs it.
struct CallShape {
    double num_calls = 1;
    double prompt_tokens = 0;
    double new_tokens = 0;
    double decode_steps = 0;
    bool latency = false;
    bool completes_together = false;
    double cached_tokens = 0;  // of a prefix that the engines have, which are not among prompt_tokens
};

// An engine with this many times the mean load is crowded, unless it has no more calls than the second.
inline constexpr double kCrowdedOverMean = 1.25;
inline constexpr double kNeverCrowded = 6;

class EnginePool {
  public:
    // Where a search looks: with `engines` by slot, only at those or at all but those.
    struct Slots {
        std::span<const int32_t> engines;
        bool only = false;
    };

    explicit EnginePool(const SchedulerOptions& options) : options_(options) {}

    void add(Engine& engine);
    void remove(Engine& engine);
    // Its steps take so many times what was measured when it joined.
    void set_slowdown(Engine& engine, double slowdown);
    void set_cost(Engine& engine, const CostModel& cost);
    std::span<Engine* const> engines() const { return engines_; }  // ascending by id

    // To be called after every change of an engine's calls, prefill, pause or hold.
    void refresh(Engine& engine);
    // The engine's room has grown, or may have.
    void mark_changed(Engine& engine);
    std::span<Engine* const> changed() const { return changed_; }
    void clear_changed();

    bool has_room() const { return num_with_room_ > 0; }
    // Calls that could enter by the engines' batches.
    int64_t num_places() const { return num_places_; }
    int64_t num_in_flight() const { return num_in_flight_; }
    // Calls in flight by pace, of all engines.
    double load_us() const { return static_cast<double>(load_ns_) / 1000; }
    // The most room of any engine whose room has grown.
    int64_t changed_room(bool latency) const;

    // The `count` engines with the lowest score for calls of which they have no prefix but the cached tokens,
    // lowest first, into `best`: those that can take them, or (`admissible` false) those that are not held;
    // of the engines of these slots, or, if there are none, of all.
    void least_loaded(const CallShape& calls, int64_t now_us, size_t count, bool admissible,
                      const Slots& slots, std::vector<Engine*>& best);
    // Whether some engine can take the calls although it has none of their prefixes.
    bool admits_plainly(const CallShape& calls) const;
    // A call of a tenant that had so much virtual time was placed in this schedule().
    void note_placed(double virtual_time, int64_t tenant, uint64_t run) {
        const std::pair turn(virtual_time, tenant);
        latest_turn_ = run == placed_run_ ? std::max(latest_turn_, turn) : turn;
        placed_run_ = run;
    }
    // Whether that has happened to a tenant whose turn came later.
    bool has_placed_after(double virtual_time, int64_t tenant, uint64_t run) const {
        return run == placed_run_ && std::pair(virtual_time, tenant) < latest_turn_;
    }

    size_t num_queued = 0;  // calls of this model, counted by CallQueue
    int32_t num_holds = 0;  // engines that are held

    // Throws std::logic_error unless the arrays say what the engines say.
    void check_invariants() const;

  private:
    static constexpr size_t kBlock = 64;

    // One value per engine, by row.
    struct Rows {
        std::vector<double> step_us;  // of one call more, with the tokens there now
        std::vector<double> per_sequence_us;
        std::vector<double> per_prefill_token_us;
        std::vector<double> per_kv_token_us;
        std::vector<double> prefill_until_us;
        std::vector<double> mean_finish_us;
        std::vector<double> steps_per_us;
        std::vector<double> weight;     // of the calls in flight
        std::vector<double> displaced;  // calls that a first latency-bound call may displace
        std::vector<double> load;
        std::vector<double> bound;
        std::vector<double> room[2][2];  // by objective (1: latency-bound) and number of calls (1: several)
        std::vector<double> places;
        std::vector<double> batch;
        std::vector<double> pace_us;

        template <class Visit>
        void for_each(Visit visit);
    };
    struct Share {  // of the sums over engines
        int32_t with_room = 0;
        int64_t places = 0;
        int64_t in_flight = 0;
        int64_t load_ns = 0;
    };

    static void set_pace(Engine& engine);
    static void set_bound(Engine& engine);
    Share share_of(const Engine& engine) const;
    void rebuild();
    void write_row(const Engine& engine);
    void score_block(const CallShape& calls, double now_us, size_t begin, size_t end);
    void note_excluded(const Slots& slots);
    void exclude(size_t begin, size_t end);
    double own_share(const CallShape& calls) const;
    double rare_parts(const CallShape& calls, size_t row) const;
    double keep_admissible(const CallShape& calls, bool admissible, size_t begin, size_t end);

    SchedulerOptions options_;
    std::vector<Engine*> engines_;
    std::vector<Engine*> changed_;
    Rows rows_;
    std::vector<Share> shares_;                     // by row
    std::vector<int32_t> with_room_;                // engines of each block of rows that have room
    std::vector<uint32_t> rows_of_slots_;           // by slot; kNoSlot: an engine of another model
    std::vector<double> excluded_;                  // by row: infinite where a search does not look, else 0
    std::vector<double> scores_;                    // scratch, by row
    std::vector<std::pair<double, Engine*>> best_;  // scratch
    uint64_t placed_run_ = 0;
    std::pair<double, int64_t> latest_turn_;
    int32_t num_with_room_ = 0;
    int64_t num_places_ = 0;
    int64_t num_in_flight_ = 0;
    int64_t load_ns_ = 0;
};

}  // namespace parrot::scheduler
