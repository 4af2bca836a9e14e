// A test program: checks that go on after a failure, and an exit code.
#pragma once

#include <cstdio>
#include <string>

namespace check {

inline int failures = 0, checks = 0;

inline bool that(bool holds, const std::string& what, const char* file, int line) {
    ++checks;
    if (!holds && ++failures <= 40) std::printf("FAILED %s:%d: %s\n", file, line, what.c_str());
    return holds;
}

inline int done(const char* name) {
    std::printf("%s: %d checks, %d failed\n", name, checks, failures);
    return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace check

#define CHECK(condition, ...) check::that((condition), std::string(#condition) + " " + std::string(__VA_ARGS__), __FILE__, __LINE__)
