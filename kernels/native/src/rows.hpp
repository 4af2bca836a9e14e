// What a row kernel is given: one head of one sequence, for a block of tokens, all small operands already in f32.
#pragma once

#include "core.hpp"

namespace qwen_npu {

constexpr int kGroup = 4;        // rows handled together: their dot products are independent chains
constexpr int kCopiedRows = 4 * kGroup;  // of scratch: a group, its neighbour, and the two they read ahead
constexpr int kLaneAlign = 16;   // row strides of scratch are a multiple of the widest vector

// Into which cache rows are asked for long before they are read. none: the processor finds f32 rows by itself; 16-bit rows and
// slots that are only written are asked for into the second cache even so.
enum class Ahead { none, first_cache, second_cache };

struct Head {
  const void* source;   // [dv, dk] of the state dtype; null: start from `carried`
  float* carried;       // [dv, stride]: state between blocks of a long sequence; null when one block is all
  Ahead ahead;
  bool keep;            // leave the state in `carried` for the next block
  float* group;         // [2 * kGroup, stride] scratch: two row groups in f32
  int64_t dv, dk, stride, v_stride;
  int tokens;
  const float* key;     // [tokens, stride], zero behind dk
  const float* decayed; // [tokens, stride]: key times decay, where the decay is a vector
  const float* query;   // [tokens, stride]: scaled
  const float* decay;   // [tokens] or, for a vector decay, [tokens, stride]
  const float* value;   // [tokens, v_stride]; where v_stride is a padded dv, the last value is repeated behind dv
  const float* beta;    // [tokens]
  float* out;           // [tokens, v_stride]
  void* const* slots;   // [tokens]: [dv, dk] that takes the state after the token, or null
};

// One per instruction set; chosen once at run time.
struct RowKernels {
  const char* name;
  void (*head)(const Head& head, DType state, bool vector_decay);
  void (*widen)(DType from, const void* source, float* target, int64_t count, float factor);
  void (*narrow)(DType to, const float* source, void* target, int64_t count);
  void (*scale)(float* data, int64_t count, float factor);
};

extern const RowKernels kPlainRows;
#ifdef QWEN_NPU_X86
extern const RowKernels kAvx2Rows;
extern const RowKernels kAvx512Rows;
#endif

}  // namespace qwen_npu
