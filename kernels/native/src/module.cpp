// The Python module: NumPy arrays in, pointers out. Shapes and dtypes were checked in Python; what could still harm memory
// (sizes, slots, token ranges) is checked here again.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "core.hpp"
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

}  // namespace

NB_MODULE(_native, m) {
  m.def("run", run_call, "query"_a, "key"_a, "value"_a, "beta"_a, "state_in"_a, "state_out"_a, "out"_a, "g"_a.none(), "gk"_a.none(),
        "plan"_a, "activation"_a, "state"_a, "tokens"_a, "slots"_a, "nk"_a, "nv"_a, "dk"_a, "dv"_a, "sequences"_a,
        "scale"_a, "threads"_a, "gk_vector"_a);
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
