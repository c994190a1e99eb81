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

}  // namespace

template <class Visit>
void EnginePool::Rows::for_each(Visit visit) {
    for (std::vector<double>* column :
         {&step_us, &per_sequence_us, &per_prefill_token_us, &per_kv_token_us, &prefill_until_us,
          &mean_finish_us, &steps_per_us, &weight, &displaced, &load, &bound, &room[0][0], &room[0][1],
          &room[1][0], &room[1][1], &places}) {
        visit(*column);
    }
}

void EnginePool::add(Engine& engine) {
    engine.pool = this;
    engine.bound = std::min(options_.latency_capacity_tokens, engine.cost.capacity_tokens);
    engine.pace_ns = std::llround(engine.cost.step_us(16, 16 * 512) * 1000);
    engines_.insert(std::ranges::lower_bound(engines_, engine.id, {}, &Engine::id), &engine);
    rebuild();
    mark_changed(engine);
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
    for (size_t row = 0; row < num_rows; ++row) {
        engines_[row]->row = static_cast<uint32_t>(row);
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
                              std::vector<Engine*>& best) {
    best_.clear();
    double limit = kInadmissible;
    for (size_t block = 0; block < with_room_.size(); ++block) {
        if (admissible && with_room_[block] == 0) continue;
        const size_t begin = block * kBlock;
        const size_t end = std::min(begin + kBlock, engines_.size());
        score_block(calls, static_cast<double>(now_us), begin, end);
        keep_admissible(calls, admissible, begin, end);
        for (size_t row = begin; row < end; ++row) {
            if (!(scores_[row] < limit)) continue;
            const auto after =
                std::ranges::upper_bound(best_, scores_[row], {}, &std::pair<double, Engine*>::first);
            best_.insert(after, {scores_[row], engines_[row]});
            if (best_.size() > count) best_.pop_back();
            if (best_.size() == count) limit = best_.back().first;
        }
    }
    best.clear();
    for (const auto& [score, engine] : best_) best.push_back(engine);
}

// EngineFinder::score without a prefix, written so that the compiler makes several engines of it at once.
void EnginePool::score_block(const CallShape& calls, double now_us, size_t begin, size_t end) {
    const double more = calls.num_calls - 1;
    const double added_kv = calls.prompt_tokens + calls.new_tokens / 2;
    const double steps = calls.decode_steps + 1;
    const bool latency = calls.latency && options_.objective_aware;
    const double own_weight = (latency ? kLatencyWeight : 1) * calls.num_calls;
    const double* const step = rows_.step_us.data();
    const double* const per_sequence = rows_.per_sequence_us.data();
    const double* const per_prefill = rows_.per_prefill_token_us.data();
    const double* const per_kv = rows_.per_kv_token_us.data();
    const double* const until = rows_.prefill_until_us.data();
    const double* const mean_finish = rows_.mean_finish_us.data();
    const double* const steps_per_us = rows_.steps_per_us.data();
    const double* const weight = rows_.weight.data();
    double* const scores = scores_.data();
    for (size_t row = begin; row < end; ++row) {
        const double compute_us = per_prefill[row] * calls.prompt_tokens;
        const double step_us = step[row] + per_sequence[row] * more;
        const double decode_us = calls.decode_steps * (step_us + per_kv[row] * added_kv);
        const double left_steps = std::max(1.0, (mean_finish[row] - now_us) * steps_per_us[row]);
        const double longer_us = per_sequence[row] * calls.num_calls + per_kv[row] * added_kv;
        const double delay_us = compute_us + longer_us * std::min(steps, left_steps);
        scores[row] = std::max(0.0, until[row] - now_us) + step_us + compute_us + decode_us +
                      weight[row] * delay_us / own_weight;
    }
    if (!latency) return;
    const double tokens = calls.prompt_tokens + calls.new_tokens;
    for (size_t row = begin; row < end; ++row) {
        const double ends_us =
            step[row] + per_sequence[row] * more + per_prefill[row] * calls.prompt_tokens +
            calls.decode_steps * (step[row] + per_sequence[row] * more + per_kv[row] * added_kv);
        const double over = std::max(0.0, 1 - rows_.bound[row] / (rows_.load[row] + tokens));
        scores[row] += rows_.displaced[row] * over * ends_us / own_weight;
    }
}

void EnginePool::keep_admissible(const CallShape& calls, bool admissible, size_t begin, size_t end) {
    if (!admissible) {
        for (size_t row = begin; row < end; ++row) {
            if (engines_[row]->held_for != nullptr) scores_[row] = kInadmissible;
        }
        return;
    }
    const double tokens = calls.prompt_tokens + calls.new_tokens;
    const double* const rooms = rows_.room[calls.latency][calls.num_calls > 1].data();
    const double* const places = rows_.places.data();
    double* const scores = scores_.data();
    for (size_t row = begin; row < end; ++row) {
        const bool fits = tokens <= rooms[row] && calls.num_calls <= places[row];
        scores[row] = fits ? scores[row] : kInadmissible;
    }
}

double EnginePool::plain_score(const CallShape& calls, const Engine& engine, int64_t now_us) {
    score_block(calls, static_cast<double>(now_us), engine.row, engine.row + 1);
    return scores_[engine.row];
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
