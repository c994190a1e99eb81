#include "scheduler/engine_pool.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace parrot::scheduler {

namespace {

constexpr double kInadmissible = std::numeric_limits<double>::infinity();

// No target takes an engine from the others beyond this share of the bound that holds without one.
constexpr int64_t kLeastShare = 6;

// A step that takes longer counts as this long, so that the load of 90 million calls fits int64.
constexpr double kSlowestPaceUs = 100e6;

}  // namespace

template <class Visit>
void EnginePool::Rows::for_each(Visit visit) {
    for (std::vector<double>* column :
         {&step_us, &per_sequence_us, &per_prefill_token_us, &per_kv_token_us, &prefill_until_us,
          &mean_finish_us, &steps_per_us, &weight, &displaced, &load, &bound, &room[0][0], &room[0][1],
          &room[1][0], &room[1][1], &places, &batch, &pace_us}) {
        visit(*column);
    }
}

void EnginePool::add(Engine& engine) {
    engine.pool = this;
    engine.plain_bound = std::min(options_.latency_capacity_tokens, engine.cost.capacity_tokens);
    set_pace(engine);
    engines_.insert(std::ranges::lower_bound(engines_, engine.id, {}, &Engine::id), &engine);
    rebuild();
    mark_changed(engine);
}

void EnginePool::set_slowdown(Engine& engine, double slowdown) {
    engine.slowdown = slowdown;
    engine.cost.base_us = engine.measured.base_us * slowdown;
    engine.cost.per_sequence_us = engine.measured.per_sequence_us * slowdown;
    engine.cost.per_prefill_token_us = engine.measured.per_prefill_token_us * slowdown;
    engine.cost.per_kv_token_us = engine.measured.per_kv_token_us * slowdown;
    set_pace(engine);
    refresh(engine);
    mark_changed(engine);  // a bound that follows from a target may have grown
}

void EnginePool::set_cost(Engine& engine, const CostModel& cost) {
    const CostModel joined = std::exchange(engine.measured, cost);
    engine.measured.capacity_tokens = joined.capacity_tokens;
    engine.measured.max_batch_size = joined.max_batch_size;
    set_slowdown(engine, 1);
}

// What the tightest target of its latency-bound calls allows, at the batch that is there and one call more. A
// target that not even a call by itself could keep is no reason to hold others up.
void EnginePool::set_bound(Engine& engine) {
    engine.bound = engine.plain_bound;
    if (engine.num_targeted == 0) return;
    const CostModel& cost = engine.cost;
    auto bound = static_cast<double>(engine.num_targeted < engine.num_latency ? engine.plain_bound
                                                                              : cost.capacity_tokens);
    for (const Call* call : engine.calls) {
        if (!call->spec.is_targeted()) continue;
        const double alone_us = cost.step_us(1, call->tokens());
        if (call->spec.per_token_us < alone_us) {
            bound = std::min(bound, static_cast<double>(engine.plain_bound));
            continue;
        }
        const double left_us = call->spec.per_token_us - cost.step_us(engine.batch() + 1, 0);
        if (left_us < cost.per_kv_token_us * bound) bound = std::max(0.0, left_us / cost.per_kv_token_us);
    }
    engine.bound = std::max(static_cast<int64_t>(bound), engine.plain_bound / kLeastShare);
}

void EnginePool::set_pace(Engine& engine) {
    engine.pace_ns = std::llround(std::min(engine.cost.step_us(16, 16 * 512), kSlowestPaceUs) * 1000);
}

void EnginePool::remove(Engine& engine) {
    std::erase(engines_, &engine);
    std::erase(changed_, &engine);
    rebuild();
}

void EnginePool::rebuild() {
    const size_t num_rows = engines_.size();
    rows_.for_each([&](std::vector<double>& column) { column.assign(num_rows, 0); });
    scores_.assign(num_rows, 0);
    shares_.assign(num_rows, {});
    with_room_.assign((num_rows + kBlock - 1) / kBlock, 0);
    num_with_room_ = 0;
    num_places_ = num_in_flight_ = load_ns_ = 0;
    rows_of_slots_.clear();
    for (size_t row = 0; row < num_rows; ++row) {
        engines_[row]->row = static_cast<uint32_t>(row);
        const auto slot = static_cast<size_t>(engines_[row]->slot);
        if (slot >= rows_of_slots_.size()) rows_of_slots_.resize(slot + 1, kNoSlot);
        rows_of_slots_[slot] = engines_[row]->row;
        refresh(*engines_[row]);
    }
}

EnginePool::Share EnginePool::share_of(const Engine& engine) const {
    Share share;
    share.with_room = engine.has_room() ? 1 : 0;
    share.places = engine.has_room() ? engine.cost.max_batch_size - engine.batch() : 0;
    share.in_flight = engine.batch();
    share.load_ns = engine.batch() * engine.pace_ns;
    return share;
}

void EnginePool::refresh(Engine& engine) {
    set_bound(engine);
    const Share now = share_of(engine);
    Share& before = shares_[engine.row];
    with_room_[engine.row / kBlock] += now.with_room - before.with_room;
    num_with_room_ += now.with_room - before.with_room;
    num_places_ += now.places - before.places;
    num_in_flight_ += now.in_flight - before.in_flight;
    load_ns_ += now.load_ns - before.load_ns;
    before = now;
    write_row(engine);
}

void EnginePool::write_row(const Engine& engine) {
    const size_t row = engine.row;
    const CostModel& cost = engine.cost;
    const double latency_weight = options_.objective_aware ? kLatencyWeight : 1;
    const double step_us = cost.step_us(engine.batch(), engine.kv_tokens());
    rows_.step_us[row] = step_us + cost.per_sequence_us;
    rows_.per_sequence_us[row] = cost.per_sequence_us;
    rows_.per_prefill_token_us[row] = cost.per_prefill_token_us;
    rows_.per_kv_token_us[row] = cost.per_kv_token_us;
    rows_.prefill_until_us[row] = engine.prefill_until_us;
    rows_.mean_finish_us[row] = engine.mean_finish_us();
    rows_.steps_per_us[row] = step_us > 0 ? 1 / step_us : kInadmissible;
    rows_.weight[row] =
        latency_weight * engine.num_latency + static_cast<double>(engine.batch() - engine.num_latency);
    rows_.displaced[row] = engine.num_latency > 0 ? 0 : engine.batch();
    rows_.load[row] = static_cast<double>(engine.load_tokens);
    rows_.bound[row] = static_cast<double>(engine.bound);
    for (const bool latency : {false, true}) {
        for (const bool is_set : {false, true}) {
            rows_.room[latency][is_set][row] =
                static_cast<double>(engine.room(latency, options_.objective_aware, is_set));
        }
    }
    rows_.batch[row] = engine.batch();
    rows_.pace_us[row] = static_cast<double>(engine.pace_ns) / 1000;
    rows_.places[row] = shares_[row].places;
}

void EnginePool::mark_changed(Engine& engine) {
    if (engine.changed) return;
    engine.changed = true;
    changed_.push_back(&engine);
}

void EnginePool::clear_changed() {
    for (Engine* engine : changed_) engine->changed = false;
    changed_.clear();
}

int64_t EnginePool::changed_room(bool latency) const {
    int64_t most = -1;
    for (const Engine* engine : changed_) {
        most = std::max(most, engine->room(latency, options_.objective_aware));
    }
    return most;
}

void EnginePool::least_loaded(const CallShape& calls, int64_t now_us, size_t count, bool admissible,
                              const Slots& slots, std::vector<Engine*>& best) {
    best_.clear();
    const bool some = !slots.engines.empty();
    if (some) note_excluded(slots);
    double limit = kInadmissible;
    for (size_t block = 0; block < with_room_.size(); ++block) {
        if (admissible && with_room_[block] == 0) continue;
        const size_t begin = block * kBlock;
        const size_t end = std::min(begin + kBlock, engines_.size());
        score_block(calls, static_cast<double>(now_us), begin, end);
        if (some) exclude(begin, end);
        if (!(keep_admissible(calls, admissible, begin, end) < limit)) continue;
        for (size_t row = begin; row < end; ++row) {
            if (!(scores_[row] < limit)) continue;
            const double score = scores_[row] + rare_parts(calls, row);
            if (!(score < limit)) continue;
            const auto after = std::ranges::upper_bound(best_, score, {}, &std::pair<double, Engine*>::first);
            best_.insert(after, {score, engines_[row]});
            if (best_.size() > count) best_.pop_back();
            if (best_.size() == count) limit = best_.back().first;
        }
    }
    best.clear();
    for (const auto& [score, engine] : best_) best.push_back(engine);
}

void EnginePool::note_excluded(const Slots& slots) {
    excluded_.assign(engines_.size(), slots.only ? kInadmissible : 0);
    for (const int32_t slot : slots.engines) {
        const auto at = static_cast<size_t>(slot);
        const uint32_t row = at < rows_of_slots_.size() ? rows_of_slots_[at] : kNoSlot;
        if (row != kNoSlot) excluded_[row] = slots.only ? 0 : kInadmissible;
    }
}

void EnginePool::exclude(size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) scores_[row] += excluded_[row];
}

// EngineFinder::score without its rare parts, which only add to it. No branch, no array that may overlap
// another: the compiler makes it several engines at a time.
void EnginePool::score_block(const CallShape& calls, double now_us, size_t begin, size_t end) {
    const double num_calls = calls.num_calls;
    const double more = num_calls - 1;
    const double prompt = calls.prompt_tokens;
    const double added_kv = prompt + calls.new_tokens / 2;
    const double decode_steps = calls.decode_steps;
    const double steps = decode_steps + 1;
    const double share = own_share(calls);
    const double* __restrict const step = rows_.step_us.data();
    const double* __restrict const per_sequence = rows_.per_sequence_us.data();
    const double* __restrict const per_prefill = rows_.per_prefill_token_us.data();
    const double* __restrict const per_kv = rows_.per_kv_token_us.data();
    const double* __restrict const until = rows_.prefill_until_us.data();
    const double* __restrict const mean_finish = rows_.mean_finish_us.data();
    const double* __restrict const steps_per_us = rows_.steps_per_us.data();
    const double* __restrict const weight = rows_.weight.data();
    double* __restrict const scores = scores_.data();
    for (size_t row = begin; row < end; ++row) {
        const double compute_us = per_prefill[row] * prompt;
        const double step_us = step[row] + per_sequence[row] * more;
        const double decode_us = decode_steps * (step_us + per_kv[row] * added_kv);
        const double to_go = (mean_finish[row] - now_us) * steps_per_us[row];
        const double left_steps = to_go > 1 ? to_go : 1;
        const double longer_us = per_sequence[row] * num_calls + per_kv[row] * added_kv;
        const double delay_us = compute_us + longer_us * (steps < left_steps ? steps : left_steps);
        const double wait_us = until[row] - now_us;
        scores[row] =
            (wait_us > 0 ? wait_us : 0) + step_us + compute_us + decode_us + weight[row] * delay_us * share;
    }
}

double EnginePool::own_share(const CallShape& calls) const {
    return 1 / ((calls.latency && options_.objective_aware ? kLatencyWeight : 1) * calls.num_calls);
}

// What a first latency-bound call displaces, and a crowded engine: EngineFinder::lost_capacity and
// crowding_of.
double EnginePool::rare_parts(const CallShape& calls, size_t row) const {
    const double displaced = calls.latency && options_.objective_aware ? rows_.displaced[row] : 0;
    const double batch = rows_.batch[row] + calls.num_calls;
    const bool may_crowd =
        options_.replication && calls.cached_tokens > 0 && !calls.completes_together && batch > kNeverCrowded;
    if (displaced == 0 && !may_crowd) return 0;
    const double added_kv = calls.prompt_tokens + calls.new_tokens / 2;
    const double step_us = rows_.step_us[row] + rows_.per_sequence_us[row] * (calls.num_calls - 1);
    const double ends_us = step_us + rows_.per_prefill_token_us[row] * calls.prompt_tokens +
                           calls.decode_steps * (step_us + rows_.per_kv_token_us[row] * added_kv);
    const double tokens = calls.prompt_tokens + calls.new_tokens;
    const double over = std::max(0.0, 1 - rows_.bound[row] / (rows_.load[row] + tokens));
    const double lost_us = displaced * over * ends_us * own_share(calls);
    if (!may_crowd) return lost_us;
    const double pace_us = rows_.pace_us[row];
    const double mean_us = (load_us() + calls.num_calls * pace_us) / static_cast<double>(engines_.size());
    const double crowding = batch * pace_us / (kCrowdedOverMean * mean_us) - 1;
    if (!(crowding > 0)) return lost_us;
    return lost_us + rows_.per_prefill_token_us[row] * calls.cached_tokens + crowding * ends_us;
}

// The lowest score that is left.
double EnginePool::keep_admissible(const CallShape& calls, bool admissible, size_t begin, size_t end) {
    double* __restrict const scores = scores_.data();
    double lowest = kInadmissible;
    if (!admissible) {
        for (size_t row = begin; row < end; ++row) {
            if (engines_[row]->is_closed()) scores[row] = kInadmissible;
            lowest = std::min(lowest, scores[row]);
        }
        return lowest;
    }
    const double tokens = calls.prompt_tokens + calls.new_tokens;
    const double num_calls = calls.num_calls;
    const double* __restrict const rooms = rows_.room[calls.latency][num_calls > 1].data();
    const double* __restrict const places = rows_.places.data();
    for (size_t row = begin; row < end; ++row) {
        const double by_room = tokens <= rooms[row] ? scores[row] : kInadmissible;
        scores[row] = num_calls <= places[row] ? by_room : kInadmissible;
    }
    for (size_t row = begin; row < end; ++row) lowest = std::min(lowest, scores[row]);
    return lowest;
}

// Whether an engine without a prefix of the call can take it.
bool EnginePool::admits_plainly(const CallShape& calls) const {
    const double tokens = calls.prompt_tokens + calls.new_tokens;
    const std::vector<double>& rooms = rows_.room[calls.latency][calls.num_calls > 1];
    for (size_t block = 0; block < with_room_.size(); ++block) {
        if (with_room_[block] == 0) continue;
        const size_t end = std::min((block + 1) * kBlock, engines_.size());
        for (size_t row = block * kBlock; row < end; ++row) {
            if (tokens <= rooms[row] && calls.num_calls <= rows_.places[row]) return true;
        }
    }
    return false;
}

void EnginePool::check_invariants() const {
    Share sum;
    int32_t holds = 0;
    for (size_t row = 0; row < engines_.size(); ++row) {
        const Share share = share_of(*engines_[row]);
        sum.with_room += share.with_room;
        sum.places += share.places;
        sum.in_flight += share.in_flight;
        sum.load_ns += share.load_ns;
        holds += engines_[row]->held_for != nullptr ? 1 : 0;
        const bool is_fresh = engines_[row]->row == row &&
                              rows_.room[0][0][row] ==
                                  static_cast<double>(engines_[row]->room(false, options_.objective_aware)) &&
                              rows_.load[row] == static_cast<double>(engines_[row]->load_tokens);
        if (!is_fresh) {
            throw std::logic_error("the row of engine " + std::to_string(engines_[row]->id) + " is stale");
        }
    }
    if (sum.with_room != num_with_room_ || sum.places != num_places_ || sum.in_flight != num_in_flight_ ||
        sum.load_ns != load_ns_ || holds != num_holds) {
        throw std::logic_error("a sum over the engines of a model is off");
    }
}

}  // namespace parrot::scheduler
