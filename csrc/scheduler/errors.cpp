#include "scheduler/errors.h"

#include <algorithm>

namespace parrot::scheduler {

namespace {

void require_token_ids(std::span<const int32_t> token_ids, std::span<const int64_t> variables) {
    if (token_ids.size() > kMaxPromptTokens) {
        throw std::invalid_argument("token_ids has " + std::to_string(token_ids.size()) + " ids, more than " +
                                    std::to_string(kMaxPromptTokens));
    }
    const int64_t least = -static_cast<int64_t>(variables.size());
    const auto bad = std::ranges::find_if(token_ids, [&](int32_t id) { return id < least; });
    if (bad != token_ids.end()) {
        const bool has_variables = !variables.empty();
        throw std::invalid_argument("token_ids[" + std::to_string(bad - token_ids.begin()) +
                                    "] = " + std::to_string(*bad) +
                                    (has_variables ? " is below -len(variables) = " + std::to_string(least)
                                                   : std::string(" is negative")));
    }
    for (size_t i = 0; i < variables.size(); ++i) {
        if (variables[i] >= 0) continue;
        throw std::invalid_argument("variables[" + std::to_string(i) + "] = " + std::to_string(variables[i]) +
                                    " is negative");
    }
}

}  // namespace

void require_prompt(std::span<const int32_t> token_ids, std::span<const int32_t> boundaries,
                    std::span<const int64_t> variables) {
    require_token_ids(token_ids, variables);
    int32_t previous = 0;
    for (size_t i = 0; i < boundaries.size(); ++i) {
        const int32_t boundary = boundaries[i];
        if (boundary <= previous || static_cast<size_t>(boundary) > token_ids.size()) {
            throw std::invalid_argument(
                "boundaries[" + std::to_string(i) + "] = " + std::to_string(boundary) + " is not in (" +
                std::to_string(previous) + ", " + std::to_string(token_ids.size()) + "]");
        }
        previous = boundary;
    }
}

void require_public_len(int64_t public_len, std::span<const int32_t> token_ids,
                        std::span<const int32_t> boundaries) {
    require_within("public_len", public_len, 0, static_cast<int64_t>(token_ids.size()));
    if (public_len == 0) return;
    if (!std::ranges::binary_search(boundaries, static_cast<int32_t>(public_len))) {
        throw std::invalid_argument("public_len = " + std::to_string(public_len) +
                                    " is not one of boundaries");
    }
    const auto text = token_ids.first(static_cast<size_t>(public_len));
    const auto variable = std::ranges::find_if(text, [](int32_t id) { return id < 0; });
    if (variable != text.end()) {
        throw std::invalid_argument("public_len = " + std::to_string(public_len) +
                                    " is behind the variable at " + std::to_string(variable - text.begin()));
    }
}

}  // namespace parrot::scheduler
