// Binds the Scheduler of csrc/scheduler, and its errors to KeyError and ValueError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core_arrays.h"
#include "core_types.h"
#include "scheduler/errors.h"
#include "scheduler/scheduler.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace parrot {
namespace {

using scheduler::Candidate;
using scheduler::HashKey;
using scheduler::Placement;
using scheduler::Reason;
using scheduler::Scheduler;

const char* reason_name(const Placement& placement) {
    switch (placement.reason) {
        case Reason::kGroup:
            return "group";
        case Reason::kSharers:
            return "sharers";
        case Reason::kPrefix:
            return "prefix";
        case Reason::kAlone:
            return "alone";
    }
    return "alone";
}

py::dict counters_of(const Scheduler& scheduler) {
    const scheduler::Counters& counters = scheduler.counters();
    return py::dict("placed"_a = counters.placed, "placed_group"_a = counters.placed_group,
                    "placed_sharers"_a = counters.placed_sharers, "placed_prefix"_a = counters.placed_prefix,
                    "placed_alone"_a = counters.placed_alone, "splits"_a = counters.splits,
                    "replications"_a = counters.replications, "deferred"_a = counters.deferred,
                    "holds"_a = counters.holds);
}

void bind_values(py::module_& module) {
    bind_class<Placement>(module, "Placement", "One decision of Algorithm 1.")
        .def_readonly("call_id", &Placement::call_id)
        .def_readonly("engine_id", &Placement::engine_id)
        .def_readonly("parent_context_id", &Placement::parent_context_id)
        .def_readonly("prefix_len", &Placement::prefix_len)
        .def_property_readonly("reason", &reason_name)
        .def_readonly("score_us", &Placement::score_us);
    bind_class<Candidate>(module, "Candidate", "One engine that FindEngine looked at for a call.")
        .def_readonly("engine_id", &Candidate::engine_id)
        .def_readonly("admissible", &Candidate::admissible)
        .def_readonly("prefix_len", &Candidate::prefix_len)
        .def_readonly("queue_us", &Candidate::queue_us)
        .def_readonly("prefill_us", &Candidate::prefill_us)
        .def_readonly("decode_us", &Candidate::decode_us)
        .def_readonly("harm_us", &Candidate::harm_us)
        .def_readonly("score_us", &Candidate::score_us);
}

// Every option of SchedulerOptions by its name.
std::unique_ptr<Scheduler> make_scheduler(const py::bytes& hash_key, bool group_placement,
                                          bool prefix_affinity, bool splitting, bool replication,
                                          bool objective_aware, bool application_order, bool tenant_shares,
                                          bool aging, int64_t latency_capacity_tokens, int64_t aging_us,
                                          int64_t max_queued, int64_t max_queued_per_tenant, bool full_scan,
                                          bool constant_hash) {
    const scheduler::SchedulerOptions options{.group_placement = group_placement,
                                              .prefix_affinity = prefix_affinity,
                                              .splitting = splitting,
                                              .replication = replication,
                                              .objective_aware = objective_aware,
                                              .application_order = application_order,
                                              .tenant_shares = tenant_shares,
                                              .aging = aging,
                                              .latency_capacity_tokens = latency_capacity_tokens,
                                              .aging_us = aging_us,
                                              .max_queued = max_queued,
                                              .max_queued_per_tenant = max_queued_per_tenant,
                                              .full_scan = full_scan};
    return std::make_unique<Scheduler>(options, hash_key_of(hash_key), constant_hash);
}

void add_engine(Scheduler& scheduler, int64_t engine_id, double base_us, double per_sequence_us,
                double per_prefill_token_us, double per_kv_token_us, int64_t capacity_tokens,
                int32_t max_batch_size, int64_t model) {
    scheduler.add_engine(engine_id, model,
                         {.base_us = base_us,
                          .per_sequence_us = per_sequence_us,
                          .per_prefill_token_us = per_prefill_token_us,
                          .per_kv_token_us = per_kv_token_us,
                          .capacity_tokens = capacity_tokens,
                          .max_batch_size = max_batch_size});
}

void set_cost(Scheduler& scheduler, int64_t engine_id, double base_us, double per_sequence_us,
              double per_prefill_token_us, double per_kv_token_us) {
    scheduler.set_cost(engine_id, {.base_us = base_us,
                                   .per_sequence_us = per_sequence_us,
                                   .per_prefill_token_us = per_prefill_token_us,
                                   .per_kv_token_us = per_kv_token_us});
}

void submit(Scheduler& scheduler, int64_t call_id, int64_t app_id, int64_t app_arrival_us, int64_t now_us,
            int64_t domain, bool latency, int64_t group_id, int32_t depth, const py::object& token_ids,
            const py::object& boundaries, int32_t max_new_tokens, int64_t model, int64_t adapter,
            std::optional<int64_t> tenant, std::optional<int64_t> start_by_us, double per_token_us,
            int32_t public_len, std::optional<int64_t> app_ran_us) {
    scheduler.submit(
        {.call_id = call_id,
         .app_id = app_id,
         .app_arrival_us = app_arrival_us,
         .submit_us = now_us,
         .app_ran_us = app_ran_us.value_or(scheduler::kNoTime),
         .scope = {.model = model, .adapter = adapter, .domain = domain, .public_len = public_len},
         .tenant = tenant.value_or(domain),
         .group_id = group_id,
         .depth = depth,
         .max_new_tokens = max_new_tokens,
         .start_by_us = start_by_us.value_or(scheduler::kNoTime),
         .per_token_us = per_token_us,
         .latency = latency},
        int32_view("token_ids", token_ids), int32_view("boundaries", boundaries));
}

void add_context(Scheduler& scheduler, int64_t engine_id, int64_t context_id, int64_t domain,
                 const py::object& token_ids, const py::object& boundaries, int64_t model, int64_t adapter,
                 int32_t public_len) {
    scheduler.add_context(engine_id, context_id,
                          {.model = model, .adapter = adapter, .domain = domain, .public_len = public_len},
                          int32_view("token_ids", token_ids), int32_view("boundaries", boundaries));
}

std::vector<Candidate> candidates(Scheduler& scheduler, int64_t now_us, int64_t domain, bool latency,
                                  const py::object& token_ids, const py::object& boundaries,
                                  int32_t max_new_tokens, int64_t model, int64_t adapter,
                                  int32_t public_len) {
    return scheduler.candidates(
        {.scope = {.model = model, .adapter = adapter, .domain = domain, .public_len = public_len},
         .max_new_tokens = max_new_tokens,
         .latency = latency},
        int32_view("token_ids", token_ids), int32_view("boundaries", boundaries), now_us);
}

void set_objective(Scheduler& scheduler, int64_t call_id, bool latency, int64_t group_id, int32_t depth,
                   std::optional<int64_t> start_by_us, double per_token_us) {
    scheduler.set_objective(
        call_id, {latency, group_id, depth, start_by_us.value_or(scheduler::kNoTime), per_token_us});
}

// An argument that is True or False and nothing else.
py::arg flag(const char* name) { return py::arg(name).noconvert(); }

void bind_scheduler_class(py::module_& module) {
    bind_class<Scheduler>(module, "Scheduler", "Algorithm 1: events in, placements out.")
        .def(py::init(&make_scheduler), py::kw_only(), "hash_key"_a, flag("group_placement") = true,
             flag("prefix_affinity") = true, flag("splitting") = true, flag("replication") = true,
             flag("objective_aware") = true, flag("application_order") = true, flag("tenant_shares") = true,
             flag("aging") = true, "latency_capacity_tokens"_a = 6144, "aging_us"_a = 10'000'000,
             "max_queued"_a = 1'000'000, "max_queued_per_tenant"_a = 1'000'000, flag("full_scan") = false,
             flag("constant_hash") = false)
        .def("add_engine", &add_engine, "engine_id"_a, py::kw_only(), "base_us"_a, "per_sequence_us"_a,
             "per_prefill_token_us"_a, "per_kv_token_us"_a, "capacity_tokens"_a, "max_batch_size"_a,
             "model"_a = 0)
        .def("remove_engine", &Scheduler::remove_engine, "engine_id"_a)
        .def("set_paused", &Scheduler::set_paused, "engine_id"_a, flag("paused"))
        .def("set_slowdown", &Scheduler::set_slowdown, "engine_id"_a, "slowdown"_a)
        .def("set_cost", &set_cost, "engine_id"_a, py::kw_only(), "base_us"_a, "per_sequence_us"_a,
             "per_prefill_token_us"_a, "per_kv_token_us"_a)
        .def("submit", &submit, "call_id"_a, py::kw_only(), "app_id"_a, "app_arrival_us"_a, "now_us"_a,
             "domain"_a, flag("latency"), "group_id"_a, "depth"_a, "token_ids"_a, "boundaries"_a,
             "max_new_tokens"_a, "model"_a = 0, "adapter"_a = 0, "tenant"_a = py::none(),
             "start_by_us"_a = py::none(), "per_token_us"_a = 0.0, "public_len"_a = 0,
             "app_ran_us"_a = py::none())
        .def("set_objective", &set_objective, "call_id"_a, py::kw_only(), flag("latency"), "group_id"_a,
             "depth"_a, "start_by_us"_a = py::none(), "per_token_us"_a = 0.0)
        .def("cancel", &Scheduler::cancel, "call_id"_a)
        .def("set_tenant_weight", &Scheduler::set_tenant_weight, "tenant"_a, "weight"_a)
        .def("schedule", &Scheduler::schedule, "now_us"_a)
        .def("finish", &Scheduler::finish, "call_id"_a, py::kw_only(), "now_us"_a, "context_id"_a,
             "num_tokens"_a)
        .def("add_context", &add_context, "engine_id"_a, "context_id"_a, py::kw_only(), "domain"_a,
             "token_ids"_a, "boundaries"_a, "model"_a = 0, "adapter"_a = 0, "public_len"_a = 0)
        .def("forget_context", &Scheduler::forget_context, "engine_id"_a, "context_id"_a, "remaining"_a)
        .def("explain", &Scheduler::explain, "call_id"_a)
        .def("candidates", &candidates, py::kw_only(), "now_us"_a, "domain"_a, flag("latency"), "token_ids"_a,
             "boundaries"_a, "max_new_tokens"_a, "model"_a = 0, "adapter"_a = 0, "public_len"_a = 0)
        .def("engine_load", &Scheduler::engine_load, "engine_id"_a)
        .def("check_invariants", &Scheduler::check_invariants)
        .def_property_readonly("num_queued", &Scheduler::num_queued)
        .def_property_readonly("num_in_flight", &Scheduler::num_in_flight)
        .def("counters", &counters_of);
}

}  // namespace

void bind_scheduler(py::module_& module) {
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const scheduler::UnknownId& unknown) {
            PyErr_SetString(PyExc_KeyError, unknown.what());
        }
    });
    py::register_local_exception<scheduler::QueueFull>(module, "QueueFull", PyExc_RuntimeError);
    bind_values(module);
    bind_scheduler_class(module);
}

}  // namespace parrot
