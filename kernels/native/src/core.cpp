#include "core.hpp"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "rows.hpp"
#include "threads.hpp"

namespace qwen_npu {
namespace {

// Tokens whose small operands are prepared together; longer sequences carry the state from block to block in f32.
constexpr int kBlock = 32;

// What lies in a processor's last cache but not in its second one, roughly, on any machine of today.
constexpr int64_t kNearFromBytes = int64_t{4} << 20, kNearUpToBytes = int64_t{32} << 20;

// What was measured (kernels/README.md): Intel's processors want to be asked always, AMD's only where the states of a call lie
// in the last cache.
Ahead best_ahead(int64_t states_bytes) {
#ifdef QWEN_NPU_X86
  static const bool intel = __builtin_cpu_is("intel");
  if (intel) return Ahead::first_cache;
#endif
  return states_bytes >= kNearFromBytes && states_bytes <= kNearUpToBytes ? Ahead::second_cache : Ahead::none;
}

const RowKernels* best_rows() {
#ifdef QWEN_NPU_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return &kAvx512Rows;
  }
  if (avx2) return &kAvx2Rows;
#endif
  return &kPlainRows;
}

const RowKernels* chosen_rows = nullptr;

const RowKernels& rows() {
  static const RowKernels* const best = best_rows();
  return chosen_rows ? *chosen_rows : *best;
}

// Scratch of one thread. It grows to the largest call the thread has seen and is then reused: no allocation per call.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  float* take(size_t floats) {
    if (floats > size_) {
      std::free(data_);
      size_ = 0;
      const size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
      data_ = static_cast<float*>(std::aligned_alloc(64, bytes));
      if (!data_) throw std::bad_alloc();
      size_ = floats;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

thread_local Scratch scratch;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline const char* at(const void* base, DType type, int64_t element) {
  return static_cast<const char*>(base) + element * size_of(type);
}

inline char* at(void* base, DType type, int64_t element) { return static_cast<char*>(base) + element * size_of(type); }

void run_one(const Call& c, int64_t task) {
  const RowKernels& kernels = rows();
  const int64_t seq = task / c.nv;
  const int64_t h = task % c.nv;
  const int64_t key_head = h / (c.nv / c.nk);
  const int64_t first = c.start[seq];
  const int64_t length = c.length[seq];
  if (length == 0) return;

  const int64_t stride = round_up(c.dk, kLaneAlign);
  const int64_t v_stride = round_up(c.dv, kGroup);
  const int64_t head_elements = c.dv * c.dk;
  const bool f32_values = c.activation == DType::f32 && v_stride == c.dv;  // value and out are used where they are
  const bool blocks = length > kBlock;
  const int64_t block = blocks ? kBlock : length;

  const size_t small = static_cast<size_t>(block) * (4 * stride + 2 * v_stride + 2);
  float* p = scratch.take(small + kCopiedRows * stride + kLaneAlign + (blocks ? static_cast<size_t>(c.dv) * stride : 0));
  float* const key = p;
  float* const decayed = key + block * stride;
  float* const query = decayed + block * stride;
  float* const decay = query + block * stride;
  float* const value = decay + block * stride;
  float* const out = value + block * v_stride;
  float* const group = out + block * v_stride;
  float* const beta = group + kCopiedRows * stride;
  float* const carried = beta + round_up(block, kLaneAlign);  // inside: small holds 2 floats a token for beta

  void* slots[kBlock];
  Head head;
  head.carried = blocks ? carried : nullptr;
  head.ahead = best_ahead(c.sequences * c.nv * head_elements * size_of(c.state));
  head.group = group;
  head.dv = c.dv;
  head.dk = c.dk;
  head.stride = stride;
  head.v_stride = f32_values ? c.nv * c.dv : v_stride;
  head.key = key;
  head.decayed = decayed;
  head.query = query;
  head.decay = decay;
  head.value = value;
  head.beta = beta;
  head.out = out;
  head.slots = slots;

  for (int64_t t0 = 0; t0 < length; t0 += kBlock) {
    const int64_t tokens = length - t0 < kBlock ? length - t0 : kBlock;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t token = first + t0 + t;
      const int64_t kq = (token * c.nk + key_head) * c.dk;
      const int64_t th = token * c.nv + h;
      float* const k = key + t * stride;
      float* const kd = decayed + t * stride;
      float* const q = query + t * stride;
      kernels.widen(c.activation, at(c.key, c.activation, kq), k, c.dk, 1.0f);
      kernels.widen(c.activation, at(c.query, c.activation, kq), q, c.dk, c.scale);
      float log_decay = c.g ? c.g[th] : 0.0f;
      if (c.gk && c.gk_vector) {
        float* const d = decay + t * stride;
        const float* const gk = c.gk + th * c.dk;
        for (int64_t i = 0; i < c.dk; ++i) d[i] = std::exp(log_decay + gk[i]);
        for (int64_t i = 0; i < c.dk; ++i) kd[i] = d[i] * k[i];
        for (int64_t i = c.dk; i < stride; ++i) d[i] = 0.0f;
      } else {
        if (c.gk) log_decay += c.gk[th];
        decay[t] = std::exp(log_decay);
      }
      for (int64_t i = c.dk; i < stride; ++i) k[i] = kd[i] = q[i] = 0.0f;
      if (!f32_values) {
        float* const v = value + t * v_stride;
        kernels.widen(c.activation, at(c.value, c.activation, th * c.dv), v, c.dv, 1.0f);
        for (int64_t i = c.dv; i < v_stride; ++i) v[i] = v[c.dv - 1];
      }
      kernels.widen(c.activation, at(c.beta, c.activation, th), beta + t, 1, 1.0f);
      const int64_t slot = c.write[token];
      slots[t] = slot < 0 ? nullptr : at(c.state_out, c.state, (slot * c.nv + h) * head_elements);
    }
    head.source = t0 == 0 ? at(c.state_in, c.state, (c.read[seq] * c.nv + h) * head_elements) : nullptr;
    if (f32_values) {
      const int64_t element = ((first + t0) * c.nv + h) * c.dv;
      head.value = static_cast<const float*>(c.value) + element;
      head.out = static_cast<float*>(c.out) + element;
    }
    head.tokens = static_cast<int>(tokens);
    head.keep = t0 + tokens < length;
    kernels.head(head, c.state, c.gk && c.gk_vector);
    for (int64_t t = 0; t < tokens && !f32_values; ++t) {
      const int64_t th = (first + t0 + t) * c.nv + h;
      kernels.narrow(c.activation, out + t * v_stride, at(c.out, c.activation, th * c.dv), c.dv);
    }
  }
}

void run_task(void* context, int64_t task) { run_one(*static_cast<const Call*>(context), task); }

struct Sweep {
  float* data;
  int64_t count, part;
  float factor;
};

void sweep_task(void* context, int64_t task) {
  const Sweep& s = *static_cast<const Sweep*>(context);
  const int64_t first = task * s.part;
  const int64_t count = s.count - first < s.part ? s.count - first : s.part;
  rows().scale(s.data + first, count, s.factor);
}

}  // namespace

void run_tasks(const Call& call, int64_t first, int64_t last) {
  for (int64_t task = first; task < last; ++task) run_one(call, task);
}

void run(const Call& call, int threads) {
  parallel_for(task_count(call), threads, run_task, const_cast<Call*>(&call));
}

void read_modify_write(float* data, int64_t count, float factor, int threads) {
  Sweep sweep{data, count, 16384, factor};
  parallel_for((count + sweep.part - 1) / sweep.part, threads, sweep_task, &sweep);
}

const char* instruction_set() { return rows().name; }

bool select_instruction_set(const char* name) {
  if (!*name) {
    chosen_rows = nullptr;
    return true;
  }
  const RowKernels* known[] = {
      &kPlainRows,
#ifdef QWEN_NPU_X86
      &kAvx2Rows,
      &kAvx512Rows,
#endif
  };
  const RowKernels* best = best_rows();
  bool reached_best = false;  // the list goes from the least to the most demanding
  for (const RowKernels* rows : known) {
    if (reached_best) return false;
    if (std::strcmp(rows->name, name) == 0) {
      chosen_rows = rows;
      return true;
    }
    reached_best = rows == best;
  }
  return false;
}

}  // namespace qwen_npu
