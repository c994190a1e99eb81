// Checks that throw: launchers never abort the process.
#pragma once

#include <sstream>
#include <stdexcept>

namespace parrot {

// Throws std::invalid_argument with the condition, its values and where it stands.
#define PARROT_CHECK(condition, ...)                                                                     \
    do {                                                                                                 \
        if (!(condition)) {                                                                              \
            std::ostringstream parrot_message;                                                           \
            parrot_message << __VA_ARGS__ << " [" #condition ", " << __FILE__ << ':' << __LINE__ << ']'; \
            throw std::invalid_argument(parrot_message.str());                                           \
        }                                                                                                \
    } while (false)

// Throws std::runtime_error when a CUDA call fails.
#define PARROT_CUDA(call)                                                                                   \
    do {                                                                                                    \
        const cudaError_t parrot_status = (call);                                                           \
        if (parrot_status != cudaSuccess) {                                                                 \
            std::ostringstream parrot_message;                                                              \
            parrot_message << #call << ": " << cudaGetErrorString(parrot_status) << " [" << __FILE__ << ':' \
                           << __LINE__ << ']';                                                              \
            throw std::runtime_error(parrot_message.str());                                                 \
        }                                                                                                   \
    } while (false)

}  // namespace parrot
