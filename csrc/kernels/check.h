// Checks that throw: launchers never abort the process.
#pragma once

#include <stdexcept>

#include "concat.h"

// Throws std::invalid_argument with the parts of the message, the condition and where it stands.
#define PARROT_CHECK(condition, ...)                                                              \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            throw std::invalid_argument(                                                          \
                parrot::concat(__VA_ARGS__, " [" #condition ", ", __FILE__, ":", __LINE__, "]")); \
        }                                                                                         \
    } while (false)

// Throws std::runtime_error when a CUDA call fails.
#define PARROT_CUDA(call)                                                                                 \
    do {                                                                                                  \
        const cudaError_t parrot_status = (call);                                                         \
        if (parrot_status != cudaSuccess) {                                                               \
            throw std::runtime_error(parrot::concat(#call, ": ", cudaGetErrorString(parrot_status), " [", \
                                                    __FILE__, ":", __LINE__, "]"));                       \
        }                                                                                                 \
    } while (false)
