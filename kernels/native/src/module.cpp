// The Python module: NumPy arrays in, pointers out.
//
// `step` takes a whole call of the op, checks all of it and says whether it ran: a call that is wrong in any way, or out of
// the ordinary, it leaves alone, for Python to name the fault or to prepare it. Python's own way to the same checks costs
// five times as much once the state has driven the interpreter out of the near cache.
// `run` takes a call that Python has checked; what could still harm memory (sizes, slots, token ranges) is checked again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <initializer_list>
#include <string>

#include "core.hpp"
#include "plan.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace qwen_npu;
using namespace nb::literals;

namespace {

class Buffer {
 public:
  Buffer(nb::handle source, bool writable, const char* name) {
    if (source.is_none()) return;
    if (PyObject_GetBuffer(source.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) nb::raise_python_error();
    held_ = true;
    name_ = name;
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  void* data() const { return held_ ? view_.buf : nullptr; }
  int64_t bytes() const { return view_.len; }
  void expect(int64_t bytes) const {
    if (held_ && view_.len != bytes) {
      throw nb::value_error((std::string(name_) + " has " + std::to_string(view_.len) + " bytes, expected " +
                             std::to_string(bytes)).c_str());
    }
  }

 private:
  Py_buffer view_;
  bool held_ = false;
  const char* name_ = "";
};

void run_call(nb::handle query, nb::handle key, nb::handle value, nb::handle beta, nb::handle state_in,
              nb::handle state_out, nb::handle out, nb::handle g, nb::handle gk, nb::handle plan, int activation,
              int state, int64_t tokens, int64_t slots, int64_t nk, int64_t nv, int64_t dk, int64_t dv, int64_t sequences,
              float scale, int threads,
              bool gk_vector) {
  const Buffer q(query, false, "query"), k(key, false, "key"), v(value, false, "value"), b(beta, false, "beta");
  const Buffer from(state_in, false, "state"), to(state_out, true, "state"), o(out, true, "out");
  const Buffer log_decay(g, false, "g"), key_decay(gk, false, "gk"), p(plan, false, "plan");
  if (activation < 0 || activation > 2 || state < 0 || state > 2) throw nb::value_error("unknown dtype code");
  if (tokens < 0 || slots < 0 || sequences < 0 || nk < 1 || nv < 1 || dk < 1 || dv < 1 || nv % nk) {
    throw nb::value_error("sizes do not fit together");
  }
  Call call;
  call.activation = static_cast<DType>(activation);
  call.state = static_cast<DType>(state);
  const int64_t a = size_of(call.activation), pool = slots * nv * dv * dk * size_of(call.state);
  q.expect(tokens * nk * dk * a);
  k.expect(tokens * nk * dk * a);
  v.expect(tokens * nv * dv * a);
  b.expect(tokens * nv * a);
  o.expect(tokens * nv * dv * a);
  from.expect(pool);
  to.expect(pool);
  log_decay.expect(tokens * nv * 4);
  call.gk_vector = gk_vector;
  key_decay.expect(tokens * nv * 4 * (gk_vector ? dk : 1));
  p.expect((3 * sequences + tokens) * 8);
  const auto* numbers = static_cast<const int64_t*>(p.data());
  call.start = numbers;
  call.length = numbers + sequences;
  call.read = numbers + 2 * sequences;
  call.write = numbers + 3 * sequences;
  for (int64_t i = 0; i < sequences; ++i) {
    if (call.length[i] < 0 || call.start[i] < 0 || call.start[i] > tokens - call.length[i]) {
      throw nb::value_error("a sequence lies outside of the tokens");
    }
    if (call.length[i] > 0 && (call.read[i] < 0 || call.read[i] >= slots)) throw nb::value_error("read slot outside of the pool");
  }
  for (int64_t t = 0; t < tokens; ++t) {
    if (call.write[t] < -1 || call.write[t] >= slots) throw nb::value_error("write slot outside of the pool");
  }
  call.query = q.data();
  call.key = k.data();
  call.value = v.data();
  call.beta = b.data();
  call.g = static_cast<const float*>(log_decay.data());
  call.gk = static_cast<const float*>(key_decay.data());
  call.state_in = from.data();
  call.state_out = to.data();
  call.out = o.data();
  call.nk = nk;
  call.nv = nv;
  call.dk = dk;
  call.dv = dv;
  call.scale = scale;
  call.sequences = sequences;
  nb::gil_scoped_release released;
  run(call, threads > 0 ? threads : qwen_npu::threads());
}

constexpr int64_t kMaxTokens = 8;

// A NumPy array seen through the buffer protocol, if it is one in native byte order and C-contiguous.
class View {
 public:
  View(nb::handle source, bool writable) {
    if (source.is_none()) return;
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(source.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      return;
    }
    held_ = true;
    const char* f = view_.format ? view_.format : "B";
    if (f[0] && !f[1]) kind_ = f[0];
  }
  View(const View&) = delete;
  ~View() {
    if (held_) PyBuffer_Release(&view_);
  }

  bool held() const { return held_; }
  bool is(std::initializer_list<int64_t> shape) const {
    if (!held_ || view_.ndim != static_cast<int>(shape.size())) return false;
    int i = 0;
    for (int64_t n : shape) {
      if (view_.shape[i++] != n) return false;
    }
    return true;
  }
  int rank() const { return held_ ? view_.ndim : -1; }
  int64_t size(int axis) const { return view_.shape[axis]; }
  void* data() const { return held_ ? view_.buf : nullptr; }
  bool floats(DType& type) const {
    type = kind_ == 'f' ? DType::f32 : DType::f16;
    return kind_ == 'f' || kind_ == 'e';
  }
  bool f32() const { return kind_ == 'f'; }
  bool integers(Integers& numbers) const {
    if (kind_ != 'i' && kind_ != 'l' && kind_ != 'q') return false;
    if (view_.itemsize != 4 && view_.itemsize != 8) return false;
    numbers = {view_.buf, view_.itemsize == 8};
    return true;
  }
  bool apart_from(const View& other) const {
    const char* const a = static_cast<const char*>(data());
    const char* const b = static_cast<const char*>(other.data());
    return !held_ || !other.held_ || a + view_.len <= b || b + other.view_.len <= a;
  }

 private:
  Py_buffer view_;
  bool held_ = false;
  char kind_ = 0;
};

bool step(nb::handle query, nb::handle key, nb::handle value, nb::handle beta, nb::handle state, nb::handle lengths,
          nb::handle indices, nb::handle g, nb::handle gk, nb::handle accepted, float scale, nb::handle out) {
  thread_local Plan plan;
  const View q(query, false), k(key, false), v(value, false), b(beta, false), s(state, true), o(out, true);
  const View n(lengths, false), slots(indices, false), log_decay(g, false), key_decay(gk, false), depth(accepted, false);
  Call call;
  DType type;
  if (q.rank() != 3 || v.rank() != 3 || s.rank() != 4 || n.rank() != 1) return false;
  const int64_t t = q.size(0), nk = q.size(1), dk = q.size(2), nv = v.size(1), dv = v.size(2), sequences = n.size(0);
  if (nk < 1 || nv < 1 || dk < 1 || dv < 1 || nv % nk) return false;
  if (!k.is({t, nk, dk}) || !v.is({t, nv, dv}) || !b.is({t, nv}) || !s.is({s.size(0), nv, dv, dk}) || !o.is({t, nv, dv})) {
    return false;
  }
  if (!q.floats(call.activation) || !s.floats(call.state)) return false;
  for (const View* same : {&k, &v, &b, &o}) {
    if (!same->floats(type) || type != call.activation) return false;
  }
  if (!g.is_none() && (!log_decay.is({t, nv}) || !log_decay.f32())) return false;
  call.gk_vector = key_decay.is({t, nv, dk});
  if (!gk.is_none() && (!key_decay.f32() || !(call.gk_vector || key_decay.is({t, nv})))) return false;
  for (const View* other : {&q, &k, &v, &b, &s, &log_decay, &key_decay}) {
    if (!o.apart_from(*other)) return false;
  }
  Integers counts, places, depths;
  if (!n.integers(counts) || !slots.integers(places)) return false;
  const bool rows = slots.rank() == 2;
  if (rows ? slots.size(0) != sequences || slots.size(1) < 1 : !slots.is({t})) return false;
  if (!accepted.is_none() && (!depth.is({sequences}) || !depth.integers(depths))) return false;
  if (!std::isfinite(scale)) return false;
  const std::string wrong = plan_recurrent(plan, t, s.size(0), sequences, counts, places, rows ? slots.size(1) : 0,
                                           accepted.is_none() ? nullptr : &depths, kMaxTokens);
  if (!wrong.empty()) return false;
  call.query = q.data();
  call.key = k.data();
  call.value = v.data();
  call.beta = b.data();
  call.g = static_cast<const float*>(log_decay.data());
  call.gk = static_cast<const float*>(key_decay.data());
  call.state_in = call.state_out = s.data();
  call.out = o.data();
  call.nk = nk;
  call.nv = nv;
  call.dk = dk;
  call.dv = dv;
  call.scale = scale;
  call.sequences = sequences;
  call.start = plan.start.data();
  call.length = plan.length.data();
  call.read = plan.read.data();
  call.write = plan.write.data();
  nb::gil_scoped_release released;
  run(call, qwen_npu::threads());
  return true;
}

}  // namespace

NB_MODULE(_native, m) {
  m.def("run", run_call, "query"_a, "key"_a, "value"_a, "beta"_a, "state_in"_a, "state_out"_a, "out"_a, "g"_a.none(), "gk"_a.none(),
        "plan"_a, "activation"_a, "state"_a, "tokens"_a, "slots"_a, "nk"_a, "nv"_a, "dk"_a, "dv"_a, "sequences"_a,
        "scale"_a, "threads"_a, "gk_vector"_a);
  m.def("step", step, "query"_a, "key"_a, "value"_a, "beta"_a, "state"_a, "lengths"_a, "indices"_a, "g"_a.none(),
        "gk"_a.none(), "accepted"_a.none(), "scale"_a, "out"_a);
  m.def("set_threads", [](int count) {
    if (count < 0) throw nb::value_error("threads: 1 or more, or 0 for the default");
    set_threads(count);
  });
  m.def("threads", [] { return threads(); });
  m.def("instruction_set", [] { return std::string(instruction_set()); });
  m.def("select_instruction_set", [](const std::string& name) {
    if (!select_instruction_set(name.c_str())) throw nb::value_error(("this processor or build has no " + name).c_str());
  });
  m.def("read_modify_write", [](nb::handle data, float factor, int threads) {
    const Buffer buffer(data, true, "data");
    nb::gil_scoped_release released;
    read_modify_write(static_cast<float*>(buffer.data()), buffer.bytes() / 4, factor, threads);
  });
}
