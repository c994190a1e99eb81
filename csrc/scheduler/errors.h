// What native entries throw: UnknownId for an id that does not exist (KeyError in Python), and
// std::invalid_argument for a value out of range (ValueError); both name the argument and the value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace parrot::scheduler {

class UnknownId : public std::runtime_error {
  public:
    UnknownId(const std::string& name, int64_t value)
        : std::runtime_error(name + " = " + std::to_string(value) + " is unknown") {}
};

// One more call does not fit into the queue (_core.QueueFull in Python).
class QueueFull : public std::runtime_error {
  public:
    QueueFull(const std::string& bound, int64_t value)
        : std::runtime_error("the queue is full: " + bound + " = " + std::to_string(value)) {}
    QueueFull(const std::string& bound, int64_t value, int64_t tenant)
        : std::runtime_error("the queue of tenant " + std::to_string(tenant) + " is full: " + bound + " = " +
                             std::to_string(value)) {}
};

inline void require_at_least(const char* name, int64_t value, int64_t low) {
    if (value < low) {
        throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + " is below " +
                                    std::to_string(low));
    }
}

inline void require_within(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + " is not in [" +
                                    std::to_string(low) + ", " + std::to_string(high) + "]");
    }
}

inline constexpr size_t kMaxPromptTokens = (size_t{1} << 28) - 1;

// Token ids are non-negative, or -1 - i for variables[i]; boundaries ascend strictly within
// (0, len(token_ids)].
void require_prompt(std::span<const int32_t> token_ids, std::span<const int32_t> boundaries,
                    std::span<const int64_t> variables = {});

// The published beginning of a prompt that passed require_prompt: 0, or one of the boundaries, with no
// variable before it.
void require_public_len(int64_t public_len, std::span<const int32_t> token_ids,
                        std::span<const int32_t> boundaries);

}  // namespace parrot::scheduler
