#include "scheduler/errors.h"

#include <algorithm>

namespace parrot::scheduler {

void require_prompt(std::span<const int32_t> token_ids, std::span<const int32_t> boundaries) {
    const auto negative = std::find_if(token_ids.begin(), token_ids.end(), [](int32_t id) { return id < 0; });
    if (negative != token_ids.end()) {
        throw std::invalid_argument("token_ids[" + std::to_string(negative - token_ids.begin()) +
                                    "] = " + std::to_string(*negative) + " is negative");
    }
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

}  // namespace parrot::scheduler
