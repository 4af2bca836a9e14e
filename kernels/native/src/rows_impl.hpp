// The row kernel, written once over a vector type `I` (an instruction set). Included by one source file per set, inside an
// anonymous namespace: nothing here may be shared between files compiled with different flags.
//
// Four rows of the state (a group) are handled together. One pass over a group does the update of one token (S = decay*S +
// d k^T, out = S q) and the dot products that the pass after the next one needs. Passes alternate between two groups, so none
// waits for the one before it: a group's dot products have a whole pass's time to be summed over the lanes.
//
// A group is first read for its dot products, row after row: memory is read in its own order, which processors see and run
// ahead of by themselves. The update goes over the four rows side by side, long after they have arrived. Asking ahead pays for
// 16-bit rows, for slots that are only written, and for other rows where `Head::ahead` says so.

constexpr int64_t kLineBytes = 64;

// How far ahead. Several slots take rows in turn; each asks for little.
constexpr int64_t read_ahead_bytes(Ahead ahead) { return ahead == Ahead::first_cache ? 2048 : 32768; }
constexpr int64_t slot_ahead_bytes(Ahead ahead) { return ahead == Ahead::first_cache ? 2048 : 4096; }

// The four rows of a group in one array. Lanes: their length when known at compile time (and DV a multiple of four), so that
// one pointer is enough; else 0. Behind the last row comes the last row again: computed alike several times, stored alike.
template <class T, int Lanes>
struct Group {
  T* base;
  Group(T* array, int64_t first, int64_t, int64_t) : base(array ? array + first * Lanes : nullptr) {}
  T* operator[](int r) const { return base + r * Lanes; }
};

template <class T>
struct Group<T, 0> {
  T* row[kGroup];
  Group(T* array, int64_t first, int64_t rows, int64_t stride) {
    for (int r = 0; r < kGroup; ++r) row[r] = array ? array + (first + r < rows ? first + r : rows - 1) * stride : nullptr;
  }
  T* operator[](int r) const { return row[r]; }
};

// Asks for a part of what lies further on in the pool than the group, so that a pass asks for as much as it handles.
template <class I, Ahead ahead, class T, int Lanes>
inline void fetch_ahead(const Group<T, Lanes>& group, int64_t ahead_bytes, int64_t j) {
  if (!Lanes || ahead == Ahead::none) return;
  constexpr int64_t part_bytes = kGroup * I::W * sizeof(T);
  constexpr int locality = ahead == Ahead::first_cache ? 3 : 2;  // the compiler's numbers for the caches
  const char* const part = reinterpret_cast<const char*>(group[0]) + ahead_bytes + j * part_bytes;
  for (int64_t byte = 0; byte < part_bytes; byte += kLineBytes) __builtin_prefetch(part + byte, 0, locality);
}

// Whose dot products a pass computes: of its own rows after this token, of the group two further on before any, nobody's.
enum class Next { token, group, none };

// Where the rows go after the token: nowhere, back to the slot they were first read from, to another one.
enum class Slot { none, source, other };

// decode: one token, the state stays in its slot. call: tokens from slots to slots. blocks: of a long sequence, whose state may
// come from the block before and go on to the next. What is known when compiled is not asked for every group.
enum class Work { decode, call, blocks };

template <class I, class S, bool VectorDecay, int Lanes>
struct HeadKernel {
  using V = typename I::V;
  static constexpr bool kWiden = sizeof(S) == 2;  // 16-bit rows are widened once, into a copy

  // The vectors of a row; of the last one perhaps only a part counts.
  struct Row {
    int64_t full, vectors;
    int tail;

    explicit Row(const Head& h)
        : full(Lanes ? Lanes / I::W : h.dk / I::W),
          vectors(Lanes ? Lanes / I::W : (h.dk + I::W - 1) / I::W),
          tail(Lanes ? 0 : static_cast<int>(h.dk % I::W)) {}

    template <class T>
    V load(const T* row, int64_t j) const {
      return Lanes || j < full ? I::load(row + j * I::W) : I::load_part(row + j * I::W, tail);
    }
    template <class T>
    void store(T* row, int64_t j, V x) const {
      Lanes || j < full ? I::store(row + j * I::W, x) : I::store_part(row + j * I::W, x, tail);
    }
  };

  // A dot product: a chain of even and one of odd vectors, wherever it is computed, so that the same rows give the same bits.
  struct Dot {
    V even = I::zero(), odd = I::zero();
    V sum() const { return I::add(even, odd); }
  };

  // Copies in f32: of 16-bit rows, and of rows between tokens that no slot keeps unrounded.
  template <class T, Work work>
  static Group<T, Lanes> copies(const Head& h, int64_t r0) {
    if (work != Work::decode && h.carried) return {h.carried, r0, h.dv, h.stride};
    return {h.group, r0 % kCopiedRows, kCopiedRows, h.stride};
  }

  template <Work work>
  static Group<const float, Lanes> rows_before(const Head& h, int t, int64_t r0) {
    const void* const slot = t == 0 ? h.source : h.slots[t - 1];
    if (kWiden || (work != Work::decode && !slot)) return copies<const float, work>(h, r0);
    return {static_cast<const float*>(slot), r0, h.dv, h.dk};
  }

  // What the rows before token t are multiplied with. A decay that is a number comes in afterwards, in change_of.
  static const float* seen_with(const Head& h, int t) { return (VectorDecay ? h.decayed : h.key) + t * h.stride; }

  // dot: of the rows before token t, with seen_with. change: what the token adds to them, in units of its key.
  static void change_of(const Head& h, int t, int64_t r0, const V* dot, float* change) {
    const float* const value = h.value + t * h.v_stride + r0;
    const float decay = VectorDecay ? 1.0f : h.decay[t];
    float seen[kGroup], fresh[kGroup];
    I::sum4(dot, seen);
    // All four before the first is stored: the compiler cannot know that `change` and `value` do not overlap.
    for (int r = 0; r < kGroup; ++r) fresh[r] = (value[r] - decay * seen[r]) * h.beta[t];
    for (int r = 0; r < kGroup; ++r) change[r] = fresh[r];
  }

  // Reads the rows of a group before any token, for their dot products; widens 16-bit rows into their copies.
  template <Work work>
  struct Reader {
    const Row row;
    const bool widen;
    const Group<const float, Lanes> before;
    const Group<const S, Lanes> narrow;
    const Group<float, Lanes> copy;
    const float* const with;

    Reader(const Head& h, int64_t r0)
        : row(h),
          widen(kWiden && (work != Work::blocks || h.source)),
          before(rows_before<work>(h, 0, r0)),
          narrow(static_cast<const S*>(h.source), r0, h.dv, h.dk),
          copy(copies<float, work>(h, r0)),
          with(seen_with(h, 0)) {}

    [[gnu::always_inline]] V add(V sum, int r, int64_t j) const {
      const V x = widen ? row.load(narrow[r], j) : row.load(before[r], j);
      if (widen) I::store(copy[r] + j * I::W, x);
      return I::fma(x, I::load(with + j * I::W), sum);
    }

    // `count` vectors of row r from `first`, an even one, on.
    [[gnu::always_inline]] void add(Dot& dot, int r, int64_t first, int64_t count) const {
      for (int64_t j = first; j + 2 <= first + count; j += 2) {
        dot.even = add(dot.even, r, j);
        dot.odd = add(dot.odd, r, j + 1);
      }
      if (count % 2) dot.even = add(dot.even, r, first + count - 1);
    }
  };

  // The first two groups' dot products, which no pass before them could compute.
  static void start(const Head& h, int64_t r0, float* change) {
    const Reader<Work::blocks> reader(h, r0);
    V dot[kGroup];
    for (int r = 0; r < kGroup; ++r) {
      Dot sum;
      reader.add(sum, r, 0, reader.row.vectors);
      dot[r] = sum.sum();
    }
    change_of(h, 0, r0, dot, change);
  }

  // One token of one group. change: what the token adds; becomes that of the pass after the next one.
  template <Next next, Slot to, Work work, Ahead ahead>
  static void pass(const Head& h, int t, int64_t r0, float* change) {
    constexpr Ahead into = ahead == Ahead::none ? Ahead::second_cache : ahead;  // where rows are asked for anyway
    const Row row(h);
    const bool keep = next == Next::token ? kWiden || to == Slot::none : work == Work::blocks && h.keep;
    const Group<const float, Lanes> before = rows_before<work>(h, t, r0);
    const Group<float, Lanes> copy = copies<float, work>(h, r0);
    const Group<S, Lanes> slot(static_cast<S*>(h.slots[t]), r0, h.dv, h.dk);
    const float* const key = h.key + t * h.stride;
    const float* const query = h.query + t * h.stride;
    const float* const lane_decay = h.decay + t * h.stride;
    const V d[kGroup] = {I::set1(change[0]), I::set1(change[1]), I::set1(change[2]), I::set1(change[3])};
    const V decay = VectorDecay ? I::zero() : I::set1(h.decay[t]);
    V out[kGroup] = {I::zero(), I::zero(), I::zero(), I::zero()}, dot[kGroup];

    // x: the rows after the token, at j. All are read before any is written: the last of a group may be one several times.
    const auto update = [&](int64_t j, V* x) __attribute__((always_inline)) {
      if (to == Slot::other) fetch_ahead<I, into>(slot, slot_ahead_bytes(into), j);
      const V k = I::load(key + j * I::W);
      const V q = I::load(query + j * I::W);
      const V by = VectorDecay ? I::load(lane_decay + j * I::W) : decay;
      for (int r = 0; r < kGroup; ++r) x[r] = row.load(before[r], j);
      for (int r = 0; r < kGroup; ++r) {
        x[r] = I::fma(by, x[r], I::mul(d[r], k));
        out[r] = I::fma(x[r], q, out[r]);
      }
      for (int r = 0; r < kGroup && to != Slot::none; ++r) row.store(slot[r], j, x[r]);
      for (int r = 0; r < kGroup && keep; ++r) I::store(copy[r] + j * I::W, x[r]);
    };

    if (next == Next::token) {
      const float* const with = seen_with(h, t + 1);
      Dot sum[kGroup];
      for (int64_t j = 0; j < row.vectors; j += 2) {
        V x[kGroup];
        update(j, x);
        for (int r = 0; r < kGroup; ++r) sum[r].even = I::fma(x[r], I::load(with + j * I::W), sum[r].even);
        if (!Lanes && j + 1 == row.vectors) break;
        update(j + 1, x);
        for (int r = 0; r < kGroup; ++r) sum[r].odd = I::fma(x[r], I::load(with + (j + 1) * I::W), sum[r].odd);
      }
      for (int r = 0; r < kGroup; ++r) dot[r] = sum[r].sum();
      change_of(h, t + 1, r0, dot, change);
    }
    // A row of the group two further on beside a quarter of this one's columns; then what four do not divide.
    const int64_t quarter = next == Next::group ? row.vectors / kGroup : 0;
    if (next == Next::group) {
      constexpr Ahead rows_into = kWiden ? into : ahead;
      const Reader<work> reader(h, r0 + 2 * kGroup);
      for (int r = 0; r < kGroup; ++r) {
        Dot sum;
        for (int64_t j = 0; j < quarter; ++j) {
          V x[kGroup];
          fetch_ahead<I, rows_into>(reader.narrow, read_ahead_bytes(rows_into), r * quarter + j);
          reader.add(sum, r, j * kGroup, kGroup);
          update(r * quarter + j, x);
        }
        reader.add(sum, r, quarter * kGroup, row.vectors % kGroup);
        dot[r] = sum.sum();
      }
      change_of(h, 0, r0 + 2 * kGroup, dot, change);
    }
    for (int64_t j = quarter * kGroup; next != Next::token && j < row.vectors; ++j) {
      V x[kGroup];
      update(j, x);
    }
    I::sum4(out, h.out + t * h.v_stride + r0);
  }

  template <Next next, Work work, Ahead ahead>
  static void pass(const Head& h, int t, int64_t r0, float* change) {
    if (!h.slots[t]) return pass<next, Slot::none, work, ahead>(h, t, r0, change);
    if (h.slots[t] == h.source) return pass<next, Slot::source, work, ahead>(h, t, r0, change);
    return pass<next, Slot::other, work, ahead>(h, t, r0, change);
  }

  template <Work work, Ahead ahead>
  static void token(const Head& h, int t, int64_t r0, float* change) {
    if (t + 1 < h.tokens) return pass<Next::token, Work::call, ahead>(h, t, r0, change);
    if (r0 + 2 * kGroup < h.dv) return pass<Next::group, work, ahead>(h, t, r0, change);
    return pass<Next::none, work, ahead>(h, t, r0, change);
  }

  template <Work work, Ahead ahead = Ahead::none>
  static void tokens(const Head& h, float (*change)[kGroup]) {
    for (int64_t r0 = 0; r0 < h.dv; r0 += 2 * kGroup) {
      const int groups = r0 + kGroup < h.dv ? 2 : 1;
      for (int t = 0; t < h.tokens; ++t) {
        for (int i = 0; i < groups; ++i) token<work, ahead>(h, t, r0 + i * kGroup, change[i]);
      }
    }
  }

  template <Ahead ahead>
  static void decode(const Head& h, float (*change)[kGroup]) {
    constexpr Slot to = Slot::source;
    int64_t r0 = 0;
    for (; r0 + 2 * kGroup < h.dv; r0 += kGroup) pass<Next::group, to, Work::decode, ahead>(h, 0, r0, change[r0 / kGroup % 2]);
    for (; r0 < h.dv; r0 += kGroup) pass<Next::none, to, Work::decode, Ahead::none>(h, 0, r0, change[r0 / kGroup % 2]);
  }

  static void run(const Head& h) {
    float change[2][kGroup];
    for (int i = 0; i < 2 && i * kGroup < h.dv; ++i) start(h, i * kGroup, change[i]);
    if (h.carried) return tokens<Work::blocks>(h, change);
    if (h.tokens > 1 || h.slots[0] != h.source) {
      if (h.ahead == Ahead::first_cache) return tokens<Work::call, Ahead::first_cache>(h, change);
      return tokens<Work::call>(h, change);
    }
    if (h.ahead == Ahead::first_cache) return decode<Ahead::first_cache>(h, change);
    if (h.ahead == Ahead::second_cache) return decode<Ahead::second_cache>(h, change);
    return decode<Ahead::none>(h, change);
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
