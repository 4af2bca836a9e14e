// The onnxruntime op library: domain `qwen_npu`, ops RecurrentGatedDeltaRule and ChunkGatedDeltaRule, each once for every pair
// of activation and state dtype. Lengths, slots and accepted counts may be i32 or i64.
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "core.hpp"
#include "ort_api.hpp"
#include "plan.hpp"

namespace qwen_npu::ort {
namespace {

constexpr int64_t kMaxTokens = 8;  // of a sequence in one call of the op: sizes the on-chip buffers of the real one

const Entry* api = nullptr;

template <class F>
F entry(Index index) {
  return reinterpret_cast<F>(api[index]);
}

Status* fail(const std::string& message, ErrorCode code = kInvalidArgument) {
  return entry<Status* (*)(int, const char*)>(kCreateStatus)(code, message.c_str());
}

// A status of onnxruntime is passed on up to its own caller.
struct Failed {
  Status* status;
};

void check(Status* status) {
  if (status) throw Failed{status};
}

[[noreturn]] void refuse(const std::string& message) { throw Failed{fail(message)}; }

constexpr int kMaxRank = 4;

struct Tensor {
  const void* data = nullptr;
  int type = kUndefined;
  int rank = 0;
  int64_t shape[kMaxRank] = {};
  bool present() const { return type != kUndefined; }
  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
};

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank; ++i) text += (i ? ", " : "") + std::to_string(t.shape[i]);
  return text + "]";
}

Tensor input(KernelContext* context, size_t index, const char* name) {
  Tensor t;
  size_t count = 0;
  check(entry<Status* (*)(const KernelContext*, size_t*)>(kKernelContextGetInputCount)(context, &count));
  if (index >= count) return t;
  const Value* value = nullptr;
  check(entry<Status* (*)(const KernelContext*, size_t, const Value**)>(kKernelContextGetInput)(context, index, &value));
  if (!value) return t;
  TensorInfo* info = nullptr;
  check(entry<Status* (*)(const Value*, TensorInfo**)>(kGetTensorTypeAndShape)(value, &info));
  size_t rank = 0;
  Status* status = entry<Status* (*)(const TensorInfo*, int*)>(kGetTensorElementType)(info, &t.type);
  if (!status) status = entry<Status* (*)(const TensorInfo*, size_t*)>(kGetDimensionsCount)(info, &rank);
  if (!status && rank <= kMaxRank) {
    status = entry<Status* (*)(const TensorInfo*, int64_t*, size_t)>(kGetDimensions)(info, t.shape, rank);
  }
  entry<void (*)(TensorInfo*)>(kReleaseTensorTypeAndShapeInfo)(info);
  check(status);
  if (rank > kMaxRank) refuse(std::string(name) + " has rank " + std::to_string(rank));
  t.rank = static_cast<int>(rank);
  void* data = nullptr;
  check(entry<Status* (*)(Value*, void**)>(kGetTensorMutableData)(const_cast<Value*>(value), &data));
  t.data = data;
  return t;
}

void* output(KernelContext* context, size_t index, const int64_t* shape, size_t rank) {
  Value* value = nullptr;
  check(entry<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(kKernelContextGetOutput)(
      context, index, shape, rank, &value));
  void* data = nullptr;
  check(entry<Status* (*)(Value*, void**)>(kGetTensorMutableData)(value, &data));
  return data;
}

void expect(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.present() && t.rank == static_cast<int>(shape.size());
  std::string text;
  int i = 0;
  for (int64_t n : shape) {
    same = same && t.shape[i] == n;
    text += (i++ ? ", " : "") + std::to_string(n);
  }
  if (!same) refuse(std::string(name) + " is " + shape_text(t) + ", expected [" + text + "]");
}

Integers integers(const Tensor& t, const char* name) {
  if (t.type != kInt32 && t.type != kInt64) refuse(std::string(name) + " must be int32 or int64");
  return {t.data, t.type == kInt64};
}

DType dtype_of(int type) { return type == kFloat ? DType::f32 : type == kFloat16 ? DType::f16 : DType::bf16; }

// Tasks on onnxruntime's own threads, so that a session's thread count is obeyed and no second set of threads competes.
struct Batch {
  const Call* call;
  int64_t tasks;
  const char* copy_from;  // slots that the call leaves alone, when the state goes to another buffer
  char* copy_to;
  int64_t slot_bytes, slots;
  const int64_t* owner;
};

void work(void* context, size_t index) {
  const Batch& b = *static_cast<const Batch*>(context);
  const int64_t i = static_cast<int64_t>(index);
  if (i < b.tasks) {
    run_tasks(*b.call, i, i + 1);
  } else {
    const int64_t slot = i - b.tasks;
    if (b.owner[slot] < 0) std::memcpy(b.copy_to + slot * b.slot_bytes, b.copy_from + slot * b.slot_bytes, b.slot_bytes);
  }
}

struct Kernel {
  float scale = 1.0f;
  bool chunk = false;
};

void compute(const Kernel& kernel, KernelContext* context) {
  thread_local Plan plan;
  const Tensor query = input(context, 0, "query");
  const Tensor key = input(context, 1, "key");
  const Tensor value = input(context, 2, "value");
  const Tensor beta = input(context, 3, "beta");
  const char* state_name = kernel.chunk ? "initial_state" : "state";
  const Tensor state = input(context, 4, state_name);
  const Tensor lengths = input(context, 5, "actual_seq_lengths");
  const Tensor indices = kernel.chunk ? Tensor{} : input(context, 6, "ssm_state_indices");
  const Tensor g = input(context, kernel.chunk ? 6 : 7, "g");
  const Tensor gk = kernel.chunk ? Tensor{} : input(context, 8, "gk");
  const Tensor accepted = kernel.chunk ? Tensor{} : input(context, 9, "num_accepted_tokens");

  if (query.rank != 3) refuse("query is " + shape_text(query) + ", expected [T, NK, DK]");
  if (value.rank != 3) refuse("value is " + shape_text(value) + ", expected [T, NV, DV]");
  if (state.rank != 4) refuse(std::string(state_name) + " is " + shape_text(state) + ", expected [slots, NV, DV, DK]");
  const int64_t t = query.shape[0], nk = query.shape[1], dk = query.shape[2], nv = value.shape[1], dv = value.shape[2];
  if (nk < 1 || nv < 1 || dk < 1 || dv < 1 || nv % nk != 0) {
    refuse("NV must be a multiple of NK and no size 0: query " + shape_text(query) + ", value " + shape_text(value));
  }
  expect(key, "key", {t, nk, dk});
  expect(value, "value", {t, nv, dv});
  expect(beta, "beta", {t, nv});
  expect(state, state_name, {state.shape[0], nv, dv, dk});
  if (g.present()) expect(g, "g", {t, nv});
  const bool gk_vector = gk.present() && gk.rank == 3;
  if (gk_vector) expect(gk, "gk", {t, nv, dk});
  if (gk.present() && !gk_vector) expect(gk, "gk", {t, nv});
  if (lengths.rank != 1) refuse("actual_seq_lengths is " + shape_text(lengths) + ", expected [B]");
  const int64_t b = lengths.shape[0];
  const Integers counts = integers(lengths, "actual_seq_lengths");

  std::string wrong;
  if (kernel.chunk) {
    if (state.shape[0] != b) expect(state, state_name, {b, nv, dv, dk});
    wrong = plan_chunk(plan, t, b, counts);
  } else {
    const bool rows = indices.rank == 2;
    if (rows) {
      expect(indices, "ssm_state_indices", {b, indices.shape[1]});
      if (indices.shape[1] < 1) refuse("ssm_state_indices is " + shape_text(indices) + ": a row needs a slot");
    } else {
      expect(indices, "ssm_state_indices", {t});
    }
    if (accepted.present()) expect(accepted, "num_accepted_tokens", {b});
    const Integers slots = integers(indices, "ssm_state_indices");
    const Integers depth = accepted.present() ? integers(accepted, "num_accepted_tokens") : Integers{};
    wrong = plan_recurrent(plan, t, state.shape[0], b, counts, slots, rows ? indices.shape[1] : 0,
                           accepted.present() ? &depth : nullptr, kMaxTokens);
  }
  if (!wrong.empty()) refuse(wrong);

  Call call;
  call.activation = dtype_of(query.type);
  call.state = dtype_of(state.type);
  call.query = query.data;
  call.key = key.data;
  call.value = value.data;
  call.beta = beta.data;
  call.g = static_cast<const float*>(g.data);
  call.gk = static_cast<const float*>(gk.data);
  call.gk_vector = gk_vector;
  call.state_in = state.data;
  call.out = output(context, 0, value.shape, 3);
  call.state_out = output(context, 1, state.shape, 4);
  call.nk = nk;
  call.nv = nv;
  call.dk = dk;
  call.dv = dv;
  call.scale = kernel.scale;
  call.sequences = b;
  call.start = plan.start.data();
  call.length = plan.length.data();
  call.read = plan.read.data();
  call.write = plan.write.data();

  Batch batch{&call, task_count(call), nullptr, nullptr, 0, 0, nullptr};
  if (call.state_out != call.state_in) {
    batch.copy_from = static_cast<const char*>(call.state_in);
    batch.copy_to = static_cast<char*>(call.state_out);
    batch.slot_bytes = nv * dv * dk * size_of(call.state);
    batch.slots = state.shape[0];
    batch.owner = plan.owner.data();
    const int64_t bytes = batch.slots * batch.slot_bytes;
    if (batch.copy_to < batch.copy_from + bytes && batch.copy_from < batch.copy_to + bytes) {
      refuse("the output state overlaps the input state without being the same buffer");
    }
  }
  const size_t total = static_cast<size_t>(batch.tasks + batch.slots);
  if (total == 0) return;
  check(entry<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(
      kKernelContextParallelFor)(context, work, total, 0, &batch));
}

const char* const kNames[] = {"RecurrentGatedDeltaRule", "ChunkGatedDeltaRule"};
constexpr int kTypes[] = {kFloat, kFloat16, kBFloat16};

struct Op : CustomOp {
  bool chunk;
  int activation, state_type;
};

const Op& self(const CustomOp* op) { return *static_cast<const Op*>(op); }

Status* create(const CustomOp* op, const Entry*, const KernelInfo* info, void** kernel) {
  auto* made = new (std::nothrow) Kernel;
  if (!made) return fail("out of memory", kFail);
  made->chunk = self(op).chunk;
  // Absent: 1, as the op's attribute says.
  Status* absent =
      entry<Status* (*)(const KernelInfo*, const char*, float*)>(kKernelInfoGetAttributeFloat)(info, "scale_value", &made->scale);
  if (absent) {
    made->scale = 1.0f;
    entry<void (*)(Status*)>(kReleaseStatus)(absent);
  }
  *kernel = made;
  return nullptr;
}

Status* compute_or_status(void* kernel, KernelContext* context) {
  const Kernel& k = *static_cast<const Kernel*>(kernel);
  try {
    compute(k, context);
  } catch (const Failed& failed) {
    return failed.status;
  } catch (const std::bad_alloc&) {
    return fail("out of memory", kFail);
  }
  return nullptr;
}

// Unknown sizes without a name would be written into the graph as -1, which onnxruntime then warns about at every run.
Status* sizes_known(const TensorInfo* info, bool& known) {
  size_t rank = 0;
  int64_t shape[kMaxRank];
  const char* names[kMaxRank] = {};
  known = false;
  Status* s = entry<Status* (*)(const TensorInfo*, size_t*)>(kGetDimensionsCount)(info, &rank);
  if (s || rank == 0 || rank > kMaxRank) return s;
  s = entry<Status* (*)(const TensorInfo*, int64_t*, size_t)>(kGetDimensions)(info, shape, rank);
  if (!s) s = entry<Status* (*)(const TensorInfo*, const char**, size_t)>(kGetSymbolicDimensions)(info, names, rank);
  if (s) return s;
  known = true;
  for (size_t i = 0; i < rank; ++i) known = known && (shape[i] >= 0 || (names[i] && *names[i]));
  return nullptr;
}

Status* infer_shapes(const CustomOp*, ShapeContext* context) {
  // out is like value, the state like the state that came in.
  for (size_t i = 0; i < 2; ++i) {
    const TensorInfo* info = nullptr;
    const size_t source = i == 0 ? 2 : 4;
    bool known = false;
    Status* s = entry<Status* (*)(const ShapeContext*, size_t, const TensorInfo**)>(kShapeContextGetInputTypeShape)(
        context, source, &info);
    if (!s) s = sizes_known(info, known);
    if (!s && known) {
      s = entry<Status* (*)(const ShapeContext*, size_t, const TensorInfo*)>(kShapeContextSetOutputTypeShape)(context, i,
                                                                                                            info);
    }
    if (s) return s;
  }
  return nullptr;
}

int input_type(const CustomOp* op, size_t i) {
  const Op& o = self(op);
  if (i < 4) return o.activation;
  if (i == 4) return o.state_type;
  if (i == 5 || (!o.chunk && (i == 6 || i == 9))) return kUndefined;  // i32 or i64: looked at when it runs
  return kFloat;
}

size_t may_inplace(int** inputs, int** outputs) {
  *inputs = static_cast<int*>(std::malloc(sizeof(int)));
  *outputs = static_cast<int*>(std::malloc(sizeof(int)));
  if (!*inputs || !*outputs) return 0;
  (*inputs)[0] = 4;
  (*outputs)[0] = 1;
  return 1;
}

void release_inplace(int* inputs, int* outputs) {
  std::free(inputs);
  std::free(outputs);
}

Op make(bool chunk, int activation, int state_type) {
  Op op{};
  op.version = kApiVersion;
  op.GetName = [](const CustomOp* o) { return kNames[self(o).chunk]; };
  op.GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // CPU
  op.GetInputType = input_type;
  op.GetInputTypeCount = [](const CustomOp* o) -> size_t { return self(o).chunk ? 7 : 10; };
  op.GetOutputType = [](const CustomOp* o, size_t i) { return i == 0 ? self(o).activation : self(o).state_type; };
  op.GetOutputTypeCount = [](const CustomOp*) -> size_t { return 2; };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.GetInputCharacteristic = [](const CustomOp* o, size_t i) -> int {
    return i < (self(o).chunk ? 6u : 7u) ? kRequired : kOptional;
  };
  op.GetOutputCharacteristic = [](const CustomOp*, size_t) -> int { return kRequired; };
  op.GetInputMemoryType = [](const CustomOp*, size_t) { return 0; };
  op.GetVariadicInputMinArity = op.GetVariadicOutputMinArity = [](const CustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = op.GetVariadicOutputHomogeneity = [](const CustomOp*) { return 1; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute_or_status;
  op.InferOutputShape = infer_shapes;
  op.GetStartVersion = [](const CustomOp*) { return 1; };
  op.GetEndVersion = [](const CustomOp*) { return 0x7fffffff; };
  op.GetMayInplace = may_inplace;
  op.ReleaseMayInplace = release_inplace;
  op.GetAliasMap = [](int** inputs, int** outputs) -> size_t {
    *inputs = *outputs = nullptr;
    return 0;
  };
  op.ReleaseAliasMap = release_inplace;
  op.chunk = chunk;
  op.activation = activation;
  op.state_type = state_type;
  return op;
}

Status* register_all(SessionOptions* options) {
  static Op ops[18];
  static CustomOpDomain* const domain = [] {
    CustomOpDomain* made = nullptr;
    Status* s = entry<Status* (*)(const char*, CustomOpDomain**)>(kCreateCustomOpDomain)("qwen_npu", &made);
    int n = 0;
    for (bool chunk : {false, true}) {
      for (int activation : kTypes) {
        for (int state_type : kTypes) {
          ops[n] = make(chunk, activation, state_type);
          if (!s) s = entry<Status* (*)(CustomOpDomain*, const CustomOp*)>(kCustomOpDomainAdd)(made, &ops[n]);
          ++n;
        }
      }
    }
    if (s) {
      entry<void (*)(Status*)>(kReleaseStatus)(s);
      return static_cast<CustomOpDomain*>(nullptr);
    }
    return made;
  }();
  if (!domain) return fail("the domain qwen_npu could not be created", kFail);
  return entry<Status* (*)(SessionOptions*, CustomOpDomain*)>(kAddCustomOpDomain)(options, domain);
}

}  // namespace
}  // namespace qwen_npu::ort

extern "C" QWEN_NPU_EXPORT qwen_npu::ort::Status* RegisterCustomOps(qwen_npu::ort::SessionOptions* options,
                                                                    const qwen_npu::ort::ApiBase* base) {
  using namespace qwen_npu::ort;
  const Entry* table = base->GetApi(kApiVersion);
  if (!table) {
    const Entry* oldest = base->GetApi(1);
    return reinterpret_cast<Status* (*)(int, const char*)>(oldest[kCreateStatus])(
        kFail, "qwen-npu-kernels needs onnxruntime 1.18 or newer");
  }
  api = table;
  return register_all(options);
}
