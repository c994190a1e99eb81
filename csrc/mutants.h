// Faults that the tests must notice: switched on by name, at run time, in test builds only.
#pragma once

#ifdef PARROT_MUTANTS
#include <cstdlib>
#include <string_view>
#endif

namespace parrot {

#ifdef PARROT_MUTANTS
// Whether the environment variable PARROT_MUTANT, read once, names this fault.
inline bool mutant(std::string_view name) {
    static const char* const chosen = std::getenv("PARROT_MUTANT");
    return chosen != nullptr && name == chosen;
}
#else
constexpr bool mutant(const char*) { return false; }
#endif

}  // namespace parrot
