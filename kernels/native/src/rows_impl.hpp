// The row kernel, written once over a vector type `I` (an instruction set). Included by one source file per set, inside an
// anonymous namespace: nothing here may be shared between files compiled with different flags.
//
// Four rows of the state (a group) are handled together. One pass over a group does the update of one token (S = decay*S +
// d k^T, out = S q) and the dot product that the NEXT update needs (of the same rows with the next key, or of the next group
// with the first key), so that two independent sets of four chains hide the latency of the multiply-adds.

constexpr int kReadAhead = 4;  // groups of f32 rows; twice as many of 16-bit ones
constexpr int kWriteAhead = 1;

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

// Fetches, while the vectors at j of one group are worked on, a like part of the group some groups further on. Where slots
// are not in the near cache this is worth a third of the time. Measured: f32 rows do best side by side (one line of each),
// 16-bit rows one after another, and a prefetch for writing worst (it keeps the hardware's own from running ahead).
template <class I, class T, int Lanes>
inline void fetch_ahead(const Group<T, Lanes>& group, int64_t j, int groups) {
  if (!Lanes) return;
  const T* const ahead = group[0] + groups * kGroup * Lanes;
  if (sizeof(T) == 4) {
    if (j * I::W % 16) return;  // one line holds more than one vector
    for (int r = 0; r < kGroup; ++r) __builtin_prefetch(ahead + r * Lanes + j * I::W);
  } else {
    const char* const part = reinterpret_cast<const char*>(ahead + j * kGroup * I::W);
    for (int64_t byte = 0; byte < static_cast<int64_t>(kGroup * I::W * sizeof(T)); byte += 64) {
      __builtin_prefetch(part + byte);
    }
  }
}

// Single: one token, from the pool to the pool. That is decode, and the only case whose every branch is decided here. There
// 16-bit states are widened once: the dot product leaves the next group in `Head::group` for the update.
template <class I, class S, bool VectorDecay, int Lanes, bool Single>
struct HeadKernel {
  using V = typename I::V;
  static constexpr bool kStaged = Single && sizeof(S) == 2;

  static void run(const Head& h) {
    const int64_t full = Lanes ? Lanes / I::W : h.dk / I::W;
    const int tail = Lanes ? 0 : static_cast<int>(h.dk % I::W);
    const int64_t vectors = full + (tail != 0);
    const S* const source = static_cast<const S*>(h.source);
    const int tokens = Single ? 1 : h.tokens;

    V dot[kGroup];
    const Group<const S, Lanes> head_rows(source, 0, h.dv, h.dk);
    const Group<const float, Lanes> head_carried(h.carried, 0, h.dv, h.stride);
    for (int r = 0; r < kGroup; ++r) {
      dot[r] = I::zero();
      for (int64_t j = 0; j < vectors; ++j) {
        const V x = source ? load_at<I>(head_rows[r], j, full, tail) : I::load(head_carried[r] + j * I::W);
        if (kStaged) I::store(h.group + r * h.stride + j * I::W, x);
        dot[r] = I::fma(x, I::load(h.decayed + j * I::W), dot[r]);
      }
    }

    for (int64_t r0 = 0; r0 < h.dv; r0 += kGroup) {
      const int64_t after = r0 + kGroup < h.dv ? r0 + kGroup : r0;  // at the end: a dot product that nobody reads
      const Group<const S, Lanes> from(source, r0, h.dv, h.dk), next(source, after, h.dv, h.dk);
      const Group<float, Lanes> carry(h.carried ? h.carried : h.group, h.carried ? r0 : 0, h.carried ? h.dv : kGroup,
                                      h.stride);
      const Group<const float, Lanes> next_carried(h.carried, after, h.dv, h.stride);
      for (int t = 0; t < tokens; ++t) {
        const bool last = Single || t + 1 == tokens;
        const Group<S, Lanes> to(static_cast<S*>(h.slots[t]), r0, h.dv, h.dk);
        const bool from_pool = Single || (t == 0 && source);
        const bool keep = !Single && (!last || h.keep);
        const float* const key = h.key + t * h.stride;
        const float* const query = h.query + t * h.stride;
        const float* const decayed = last ? h.decayed : h.decayed + (t + 1) * h.stride;
        const float* const lane_decay = h.decay + t * h.stride;
        const float* const value = h.value + t * h.v_stride + r0;

        float sums[kGroup];
        I::sum4(dot, sums);
        V d[kGroup], out[kGroup];
        for (int r = 0; r < kGroup; ++r) {
          d[r] = I::set1((value[r] - sums[r]) * h.beta[t]);
          out[r] = dot[r] = I::zero();
        }
        V decay = VectorDecay ? I::zero() : I::set1(h.decay[t]);
        for (int64_t j = 0; j < vectors; ++j) {
          const V k = I::load(key + j * I::W);
          const V q = I::load(query + j * I::W);
          const V kd = I::load(decayed + j * I::W);
          if (VectorDecay) decay = I::load(lane_decay + j * I::W);
          if (Single || (last && source)) fetch_ahead<I>(next, j, sizeof(S) == 4 ? kReadAhead : 2 * kReadAhead);
          if (!Single && to) fetch_ahead<I>(to, j, kWriteAhead);
          V x[kGroup];
          // All rows are read before any is written: the last rows of a group may be one row several times.
          for (int r = 0; r < kGroup; ++r) {
            x[r] = from_pool && !kStaged ? load_at<I>(from[r], j, full, tail) : I::load(carry[r] + j * I::W);
          }
          if (kStaged) {
            for (int r = 0; r < kGroup; ++r) {
              const V y = load_at<I>(next[r], j, full, tail);
              I::store(carry[r] + j * I::W, y);
              dot[r] = I::fma(y, kd, dot[r]);
            }
          } else if (last && (Single || source)) {
            for (int r = 0; r < kGroup; ++r) dot[r] = I::fma(load_at<I>(next[r], j, full, tail), kd, dot[r]);
          } else if (last) {
            for (int r = 0; r < kGroup; ++r) dot[r] = I::fma(I::load(next_carried[r] + j * I::W), kd, dot[r]);
          }
          for (int r = 0; r < kGroup; ++r) {
            x[r] = I::fma(decay, x[r], I::mul(d[r], k));
            out[r] = I::fma(x[r], q, out[r]);
            if (!last) dot[r] = I::fma(x[r], kd, dot[r]);
          }
          if (Single || to) {
            for (int r = 0; r < kGroup; ++r) store_at<I>(to[r], j, full, tail, x[r]);
          }
          if (keep) {
            for (int r = 0; r < kGroup; ++r) I::store(carry[r] + j * I::W, x[r]);
          }
        }
        I::sum4(out, h.out + t * h.v_stride + r0);
      }
    }
  }
};

template <class I, class S, bool VectorDecay>
void head_of(const Head& h) {
  const bool single = h.tokens == 1 && h.source && h.slots[0] && !h.carried;
  if (h.dk == 128 && h.dv % kGroup == 0) {
    if (single) return HeadKernel<I, S, VectorDecay, 128, true>::run(h);
    return HeadKernel<I, S, VectorDecay, 128, false>::run(h);
  }
  if (single) return HeadKernel<I, S, VectorDecay, 0, true>::run(h);
  return HeadKernel<I, S, VectorDecay, 0, false>::run(h);
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
