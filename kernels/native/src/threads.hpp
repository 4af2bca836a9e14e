// The library's threads: they spin while calls follow each other closely, and sleep otherwise.
#pragma once

#include <cstdint>

#include "core.hpp"

namespace qwen_npu {

using TaskBody = void (*)(void* context, int64_t task);

// Runs body(context, 0 .. tasks-1), each once, on at most `threads` threads including the caller; returns when all are done.
// A second caller at the same time, and a child after fork(), run alone on their own thread.
void parallel_for(int64_t tasks, int threads, TaskBody body, void* context);

// QWEN_NPU_THREADS, or the processors that this process may run on.
QWEN_NPU_EXPORT int default_threads();
QWEN_NPU_EXPORT void set_threads(int threads);  // 0: the default again
QWEN_NPU_EXPORT int threads();

}  // namespace qwen_npu
