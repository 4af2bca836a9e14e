// The gated delta rule over a pool of states: what one call is, and how to run it. Knows neither Python nor onnxruntime.
#pragma once

#include <cstddef>
#include <cstdint>

#define QWEN_NPU_EXPORT __attribute__((visibility("default")))

namespace qwen_npu {

enum class DType : int { f32 = 0, f16 = 1, bf16 = 2 };

inline int64_t size_of(DType type) { return type == DType::f32 ? 4 : 2; }

// One call. All arrays are C-contiguous; all counts are elements; offsets are computed in 64 bits.
// state_in and state_out may be one buffer; they may not overlap otherwise.
struct Call {
  DType activation;  // of query, key, value, beta and out
  DType state;
  const void* query;  // [T, NK, DK]
  const void* key;    // [T, NK, DK]
  const void* value;  // [T, NV, DV]
  const void* beta;   // [T, NV]
  const float* g;     // [T, NV] or null
  const float* gk;    // [T, NV] or [T, NV, DK] or null
  bool gk_vector;
  const void* state_in;  // [S, NV, DV, DK]
  void* state_out;       // [S, NV, DV, DK]
  void* out;             // [T, NV, DV]
  int64_t nk, nv, dk, dv;
  float scale;
  // The plan: what was checked before anything is written.
  int64_t sequences;
  const int64_t* start;   // [sequences] first token
  const int64_t* length;  // [sequences] tokens, 0 allowed: nothing happens
  const int64_t* read;    // [sequences] slot of state_in to start from
  const int64_t* write;   // [T] slot of state_out that takes the state after token t, or -1 for none
};

// Tasks of a call: one per (sequence, head), in this order. Any two of a checked plan are independent.
inline int64_t task_count(const Call& call) { return call.sequences * call.nv; }
QWEN_NPU_EXPORT void run_tasks(const Call& call, int64_t first, int64_t last);

// All tasks on at most `threads` threads of this library's own pool, the caller being one of them.
QWEN_NPU_EXPORT void run(const Call& call, int threads);

// In-place read-modify-write (x *= factor): the yardstick that the kernel is measured against.
QWEN_NPU_EXPORT void read_modify_write(float* data, int64_t count, float factor, int threads);

// "plain", "avx2" or "avx512": the best this processor has, unless select_instruction_set() chose another.
QWEN_NPU_EXPORT const char* instruction_set();
// Returns false when this processor or build does not have it. "" goes back to the best.
QWEN_NPU_EXPORT bool select_instruction_set(const char* name);

}  // namespace qwen_npu
