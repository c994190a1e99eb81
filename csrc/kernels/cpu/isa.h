// Which SIMD instructions the kernels of this folder use: found out once, when the process runs.
//
// A kernel that exists in several instruction sets is a table of function pointers per set. Its sources are
// compiled with flags by their names (`*_avx2.cpp`, `*_avx512.cpp`, `*_avx512bf16.cpp`; see CMakeLists.txt)
// and must not instantiate inline functions that other sources use too, those of the standard library among
// them: the linker keeps one copy of such a function, which may then hold instructions that the CPU lacks.
// Everything in them is in an anonymous namespace, or a template over a type that is.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace parrot::cpu {

// Each includes the ones before it.
enum class Isa : int { kScalar, kAvx2, kAvx512, kAvx512Bf16 };
inline constexpr int kNumIsas = 4;

// "scalar", "avx2" (with FMA), "avx512" (F, BW, DQ, VL) or "avx512bf16".
const char* isa_name(Isa isa);

// The best that CPU and operating system support.
Isa detected_isa();

// What the kernels use: detected_isa(), or less where PARROT_CPU_ISA or set_isa says so. Throws
// std::invalid_argument when PARROT_CPU_ISA names a set that does not exist or that this CPU lacks.
Isa current_isa();

// Makes the kernels of this process use `name`; empty: as at the start. Throws std::invalid_argument.
void set_isa(const std::string& name);

// The table of the current set. The order is that of Isa; a set without kernels of its own repeats the
// pointer before it.
template <class Kernels>
const Kernels& for_current_isa(const std::array<const Kernels*, kNumIsas>& tables) {
    return *tables[static_cast<size_t>(current_isa())];
}

}  // namespace parrot::cpu
