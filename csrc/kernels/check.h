// Checks that throw, and what a caller hands over by its address: launchers never abort the process.
#pragma once

#include <cstdint>
#include <initializer_list>
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

namespace parrot {

// What a caller names by its address on the device, and the alignment in bytes that a kernel counts on.
struct Buffer {
    const char* name;
    std::uintptr_t address;
    int alignment;
};

// Throws std::invalid_argument for the first buffer that is null or not aligned.
inline void check_buffers(std::initializer_list<Buffer> buffers) {
    for (const Buffer& buffer : buffers) {
        PARROT_CHECK(buffer.address != 0, buffer.name, " is null");
        PARROT_CHECK(buffer.address % buffer.alignment == 0, buffer.name, " = ", buffer.address,
                     " is not aligned to ", buffer.alignment, " bytes");
    }
}

template <typename T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

}  // namespace parrot
