// The row kernel, written once over a vector type `I` (an instruction set). Included by one source file per set, inside an
// anonymous namespace: nothing here may be shared between files compiled with different flags.
//
// Four rows of the state (a group) are handled together. One pass over a group does the update of one token (S = decay*S +
// d k^T, out = S q) and the dot products that the pass after the next one needs. Passes alternate between two groups, so none
// waits for the one before it: a group's dot products have a whole pass's time to be summed over the lanes.

constexpr int64_t kFetchAheadBytes = 16384;
constexpr int64_t kLineBytes = 64;
constexpr int kToSecondCache = 2;  // the compiler's number for it

template <class I, class S>
inline typename I::V load_at(const S* row, int64_t j, int64_t full, int tail) {
  if (j < full) return I::load(row + j * I::W);
  return I::load_part(row + j * I::W, tail);
}

template <class I, class S>
inline void store_at(S* row, int64_t j, int64_t full, int tail, typename I::V x) {
  if (j < full) {
    I::store(row + j * I::W, x);
  } else {
    I::store_part(row + j * I::W, x, tail);
  }
}

// The four rows of a group in one array. Lanes: their length when known at compile time (and DV a multiple of four), so that
// one pointer is enough; else 0. Behind the last row comes the last row again: computed alike several times, stored alike.
template <class T, int Lanes>
struct Group {
  T* base;
  Group(T* array, int64_t first, int64_t, int64_t) : base(array ? array + first * Lanes : nullptr) {}
  explicit operator bool() const { return base != nullptr; }
  T* operator[](int r) const { return base + r * Lanes; }
};

template <class T>
struct Group<T, 0> {
  T* row[kGroup];
  Group(T* array, int64_t first, int64_t rows, int64_t stride) {
    for (int r = 0; r < kGroup; ++r) row[r] = array ? array + (first + r < rows ? first + r : rows - 1) * stride : nullptr;
  }
  explicit operator bool() const { return row[0] != nullptr; }
  T* operator[](int r) const { return row[r]; }
};

// Asks, while the vectors at j of one group are worked on, for a like part of what lies further on in the pool. In the order
// of memory: asked for side by side over four rows, main memory gives half as much.
template <class I, class T, int Lanes>
inline void fetch_ahead(const Group<T, Lanes>& group, int64_t j) {
  if (!Lanes) return;
  constexpr int64_t part_bytes = kGroup * I::W * sizeof(T);
  const char* const part = reinterpret_cast<const char*>(group[0]) + kFetchAheadBytes + j * part_bytes;
  for (int64_t byte = 0; byte < part_bytes; byte += kLineBytes) __builtin_prefetch(part + byte, 0, kToSecondCache);
}

// Whose dot products a pass computes: those of its own rows after this token, or of the group two further on before any.
enum class Next { token, group };

// decode: one token, the state stays in its slot. call: tokens from slots to slots. blocks: of a long sequence, whose state
// may come from the block before and go on to the next. What is known when compiled is not asked for every group.
enum class Work { decode, call, blocks };

template <class I, class S, bool VectorDecay, int Lanes>
struct HeadKernel {
  using V = typename I::V;
  static constexpr bool kWiden = sizeof(S) == 2;  // 16-bit rows are widened once, into a copy

  // Copies in f32: of 16-bit rows, and of rows between tokens that no slot keeps unrounded.
  template <class T, Work work>
  static Group<T, Lanes> copies(const Head& h, int64_t r0) {
    if (work != Work::decode && h.carried) return {h.carried, r0, h.dv, h.stride};
    return {h.group, r0 % (2 * kGroup), 2 * kGroup, h.stride};
  }

  template <Work work>
  static Group<const float, Lanes> rows_before(const Head& h, int t, int64_t r0) {
    const void* const slot = t == 0 ? h.source : h.slots[t - 1];
    if (kWiden || (work != Work::decode && !slot)) return copies<const float, work>(h, r0);
    return {static_cast<const float*>(slot), r0, h.dv, h.dk};
  }

  // dot: of the rows before token t with its decayed key. change: what the token adds to them, in units of its key.
  static void change_of(const Head& h, int t, int64_t r0, const V* dot, float* change) {
    const float* const value = h.value + t * h.v_stride + r0;
    float seen[kGroup];
    I::sum4(dot, seen);
    for (int r = 0; r < kGroup; ++r) change[r] = (value[r] - seen[r]) * h.beta[t];
  }

  // The first two groups' dot products, which no pass before them could compute.
  static void start(const Head& h, int64_t r0, float* change) {
    const int64_t full = Lanes ? Lanes / I::W : h.dk / I::W;
    const int tail = Lanes ? 0 : static_cast<int>(h.dk % I::W);
    const bool widen = kWiden && h.source;
    const Group<const S, Lanes> narrow(static_cast<const S*>(h.source), r0, h.dv, h.dk);
    const Group<const float, Lanes> before = rows_before<Work::blocks>(h, 0, r0);
    const Group<float, Lanes> copy = copies<float, Work::blocks>(h, r0);
    V dot[kGroup];
    for (int r = 0; r < kGroup; ++r) {
      dot[r] = I::zero();
      for (int64_t j = 0; j < full + (tail != 0); ++j) {
        const V x = widen ? load_at<I>(narrow[r], j, full, tail) : load_at<I>(before[r], j, full, tail);
        if (widen) I::store(copy[r] + j * I::W, x);
        dot[r] = I::fma(x, I::load(h.decayed + j * I::W), dot[r]);
      }
    }
    change_of(h, 0, r0, dot, change);
  }

  // One token of one group. change: what the token adds; becomes that of the pass after the next one.
  // stored: a slot takes the rows after the token.
  template <Next next, bool stored, Work work>
  static void pass(const Head& h, int t, int64_t r0, float* change) {
    const int64_t full = Lanes ? Lanes / I::W : h.dk / I::W;
    const int tail = Lanes ? 0 : static_cast<int>(h.dk % I::W);
    const int64_t after = r0 + 2 * kGroup < h.dv ? r0 + 2 * kGroup : r0;  // at the end: dot products that nobody reads
    const int next_t = next == Next::token ? t + 1 : 0;
    const bool from_pool = work != Work::blocks || h.source;
    const bool widen = kWiden && from_pool;
    const bool keep = next == Next::token ? kWiden || !stored : work == Work::blocks && h.keep;
    const bool fetch_slot = stored && work != Work::decode && h.slots[t] != h.source;

    const Group<const float, Lanes> before = rows_before<work>(h, t, r0), next_before = rows_before<work>(h, 0, after);
    const Group<const S, Lanes> next_narrow(static_cast<const S*>(h.source), after, h.dv, h.dk);
    const Group<float, Lanes> copy = copies<float, work>(h, r0), next_copy = copies<float, work>(h, after);
    const Group<S, Lanes> slot(static_cast<S*>(h.slots[t]), r0, h.dv, h.dk);
    const float* const key = h.key + t * h.stride;
    const float* const query = h.query + t * h.stride;
    const float* const lane_decay = h.decay + t * h.stride;
    const float* const next_decayed = h.decayed + next_t * h.stride;

    const V zero = I::zero();
    const V d[kGroup] = {I::set1(change[0]), I::set1(change[1]), I::set1(change[2]), I::set1(change[3])};
    V dot[kGroup] = {zero, zero, zero, zero}, out[kGroup] = {zero, zero, zero, zero};
    V decay = VectorDecay ? I::zero() : I::set1(h.decay[t]);
    for (int64_t j = 0; j < full + (tail != 0); ++j) {
      const V k = I::load(key + j * I::W);
      const V q = I::load(query + j * I::W);
      const V kd = I::load(next_decayed + j * I::W);
      if (VectorDecay) decay = I::load(lane_decay + j * I::W);
      if (next == Next::group && from_pool) fetch_ahead<I>(next_narrow, j);
      if (fetch_slot) fetch_ahead<I>(slot, j);
      
      V x[kGroup];
      // All rows are read before any is written: the last rows of a group may be one row several times.
      for (int r = 0; r < kGroup; ++r) x[r] = load_at<I>(before[r], j, full, tail);
      if (next == Next::group) {
        for (int r = 0; r < kGroup; ++r) {
          const V y = widen ? load_at<I>(next_narrow[r], j, full, tail) : load_at<I>(next_before[r], j, full, tail);
          if (widen) I::store(next_copy[r] + j * I::W, y);
          dot[r] = I::fma(y, kd, dot[r]);
        }
      }
      for (int r = 0; r < kGroup; ++r) {
        x[r] = I::fma(decay, x[r], I::mul(d[r], k));
        out[r] = I::fma(x[r], q, out[r]);
        if (next == Next::token) dot[r] = I::fma(x[r], kd, dot[r]);
      }
      if (stored) {
        for (int r = 0; r < kGroup; ++r) store_at<I>(slot[r], j, full, tail, x[r]);
      }
      if (keep) {
        for (int r = 0; r < kGroup; ++r) I::store(copy[r] + j * I::W, x[r]);
      }
    }
    change_of(h, next_t, next == Next::token ? r0 : after, dot, change);
    I::sum4(out, h.out + t * h.v_stride + r0);
  }

  template <Next next, Work work>
  static void pass(const Head& h, int t, int64_t r0, float* change) {
    if (h.slots[t]) return pass<next, true, work>(h, t, r0, change);
    return pass<next, false, work>(h, t, r0, change);
  }

  static void pass(const Head& h, int t, int64_t r0, float* change) {
    if (t + 1 < h.tokens) return pass<Next::token, Work::call>(h, t, r0, change);
    if (h.carried) return pass<Next::group, Work::blocks>(h, t, r0, change);
    return pass<Next::group, Work::call>(h, t, r0, change);
  }

  static void run(const Head& h) {
    float change[2][kGroup];
    for (int i = 0; i < 2 && i * kGroup < h.dv; ++i) start(h, i * kGroup, change[i]);
    if (h.tokens == 1 && h.source && h.slots[0] == h.source && !h.carried) {
      for (int64_t r0 = 0; r0 < h.dv; r0 += kGroup) pass<Next::group, true, Work::decode>(h, 0, r0, change[r0 / kGroup % 2]);
      return;
    }
    for (int64_t r0 = 0; r0 < h.dv; r0 += 2 * kGroup) {
      const int groups = r0 + kGroup < h.dv ? 2 : 1;
      for (int t = 0; t < h.tokens; ++t) {
        for (int i = 0; i < groups; ++i) pass(h, t, r0 + i * kGroup, change[i]);
      }
    }
  }
};

template <class I, class S, bool VectorDecay>
void head_of(const Head& h) {
  if (h.dk == 128 && h.dv % kGroup == 0) return HeadKernel<I, S, VectorDecay, 128>::run(h);
  return HeadKernel<I, S, VectorDecay, 0>::run(h);
}

template <class I, class S>
void head_of(const Head& h, bool vector_decay) {
  if (vector_decay) return head_of<I, S, true>(h);
  return head_of<I, S, false>(h);
}

template <class I>
void head_of(const Head& h, DType state, bool vector_decay) {
  if (state == DType::f32) return head_of<I, float>(h, vector_decay);
  if (state == DType::f16) return head_of<I, Half>(h, vector_decay);
  return head_of<I, Brain>(h, vector_decay);
}

template <class I, class S>
void widen_of(const S* source, float* target, int64_t count, float factor) {
  const typename I::V f = I::set1(factor);
  int64_t i = 0;
  for (; i + I::W <= count; i += I::W) I::store(target + i, I::mul(I::load(source + i), f));
  const int tail = static_cast<int>(count - i);
  if (tail) I::store_part(target + i, I::mul(I::load_part(source + i, tail), f), tail);
}

template <class I>
void widen_of(DType from, const void* source, float* target, int64_t count, float factor) {
  if (from == DType::f32) return widen_of<I>(static_cast<const float*>(source), target, count, factor);
  if (from == DType::f16) return widen_of<I>(static_cast<const Half*>(source), target, count, factor);
  return widen_of<I>(static_cast<const Brain*>(source), target, count, factor);
}

template <class I, class S>
void narrow_of(const float* source, S* target, int64_t count) {
  int64_t i = 0;
  for (; i + I::W <= count; i += I::W) I::store(target + i, I::load(source + i));
  const int tail = static_cast<int>(count - i);
  if (tail) I::store_part(target + i, I::load_part(source + i, tail), tail);
}

template <class I>
void narrow_of(DType to, const float* source, void* target, int64_t count) {
  if (to == DType::f32) return narrow_of<I>(source, static_cast<float*>(target), count);
  if (to == DType::f16) return narrow_of<I>(source, static_cast<Half*>(target), count);
  return narrow_of<I>(source, static_cast<Brain*>(target), count);
}

template <class I>
void scale_of(float* data, int64_t count, float factor) {
  const typename I::V f = I::set1(factor);
  int64_t i = 0;
  for (; i + 4 * I::W <= count; i += 4 * I::W) {
    for (int u = 0; u < 4; ++u) I::store(data + i + u * I::W, I::mul(I::load(data + i + u * I::W), f));
  }
  for (; i < count; ++i) data[i] *= factor;
}
