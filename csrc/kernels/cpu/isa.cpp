#include "kernels/cpu/isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "concat.h"

namespace parrot::cpu {
namespace {

constexpr int kUnset = -1;
std::atomic<int> g_current{kUnset};

Isa detect() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!avx2) return Isa::kScalar;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!avx512) return Isa::kAvx2;
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
#else
    return Isa::kScalar;
#endif
}

Isa find(const std::string& name, const char* argument) {
    for (int i = 0; i < kNumIsas; ++i) {
        const Isa isa = static_cast<Isa>(i);
        if (name != isa_name(isa)) continue;
        if (isa > detected_isa()) {
            throw std::invalid_argument(concat(argument, " = \"", name, "\": this CPU supports no more than ",
                                               isa_name(detected_isa())));
        }
        return isa;
    }
    throw std::invalid_argument(
        concat(argument, " = \"", name, "\" is none of scalar, avx2, avx512, avx512bf16"));
}

Isa initial() {
    const char* wanted = std::getenv("PARROT_CPU_ISA");
    return wanted != nullptr && *wanted != '\0' ? find(wanted, "PARROT_CPU_ISA") : detected_isa();
}

}  // namespace

const char* isa_name(Isa isa) {
    static constexpr const char* kNames[kNumIsas] = {"scalar", "avx2", "avx512", "avx512bf16"};
    return kNames[static_cast<int>(isa)];
}

Isa detected_isa() {
    static const Isa detected = detect();
    return detected;
}

Isa current_isa() {
    int current = g_current.load(std::memory_order_relaxed);
    if (current == kUnset) {
        current = static_cast<int>(initial());
        g_current.store(current, std::memory_order_relaxed);
    }
    return static_cast<Isa>(current);
}

void set_isa(const std::string& name) {
    const Isa isa = name.empty() ? initial() : find(name, "isa");
    g_current.store(static_cast<int>(isa), std::memory_order_relaxed);
}

}  // namespace parrot::cpu
