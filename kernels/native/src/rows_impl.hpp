// The row kernel, written once over a vector type `I` (an instruction set). Included by one source file per set, inside an
// anonymous namespace: nothing here may be shared between files compiled with different flags.
//
// Four rows of the state are handled together. For each token the update of a group (S = decay*S + d k^T, out = S q) and the
// dot product that the NEXT update needs (of the same rows with the next key, or of the next group with the first key) run
// in one pass, so that two independent sets of four chains hide the latency of the multiply-adds.

template <class T>
struct Rows {
  T row[kGroup];
};

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

// Vectors: how many vectors a row has when known at compile time, else 0 (then the last may be partial).
// Single: one token, from the pool to the pool. That is decode, and the only case whose every branch is decided here.
template <class I, class S, bool VectorDecay, int Vectors, bool Single>
struct HeadKernel {
  using V = typename I::V;

  struct Step {
    const S* source[kGroup];        // rows to read, null in multi-token steps that read `carry`
    const float* carry[kGroup];
    S* slot[kGroup];                // rows to write, slot[0] null: none
    float* keep[kGroup];            // f32 rows to write, keep[0] null: none
    const S* next[kGroup];          // rows of the next group, null: the dot product is of the new state
    const float* next_carry[kGroup];
    bool next_self;
    const float *key, *query, *decay, *decayed;
  };

  static inline __attribute__((always_inline)) void step(const Step& s, const float* d, int64_t full, int tail, V* acc,
                                                         V* out) {
    const int64_t vectors = Vectors ? Vectors : full + (tail != 0);
    V dr[kGroup], o[kGroup], a[kGroup];
    for (int r = 0; r < kGroup; ++r) {
      dr[r] = I::set1(d[r]);
      o[r] = I::zero();
      a[r] = I::zero();
    }
    V decay = VectorDecay ? I::zero() : I::set1(*s.decay);
    for (int64_t j = 0; j < vectors; ++j) {
      const int64_t whole = Vectors ? Vectors : full;
      const V k = I::load(s.key + j * I::W);
      const V q = I::load(s.query + j * I::W);
      const V kd = I::load(s.decayed + j * I::W);
      if (VectorDecay) decay = I::load(s.decay + j * I::W);
      V x[kGroup];
      // All rows are read before any is written: the last rows of a group may be one row several times.
      for (int r = 0; r < kGroup; ++r) {
        x[r] = (Single || s.source[0]) ? load_at<I>(s.source[r], j, whole, tail) : I::load(s.carry[r] + j * I::W);
      }
      for (int r = 0; r < kGroup; ++r) {
        x[r] = I::fma(decay, x[r], I::mul(dr[r], k));
        o[r] = I::fma(x[r], q, o[r]);
      }
      if (Single || s.slot[0]) {
        for (int r = 0; r < kGroup; ++r) store_at<I>(s.slot[r], j, whole, tail, x[r]);
      }
      if (!Single && s.keep[0]) {
        for (int r = 0; r < kGroup; ++r) I::store(s.keep[r] + j * I::W, x[r]);
      }
      if (!Single && s.next_self) {
        for (int r = 0; r < kGroup; ++r) a[r] = I::fma(x[r], kd, a[r]);
      } else if (Single || s.next[0]) {
        for (int r = 0; r < kGroup; ++r) a[r] = I::fma(load_at<I>(s.next[r], j, whole, tail), kd, a[r]);
      } else {
        for (int r = 0; r < kGroup; ++r) a[r] = I::fma(I::load(s.next_carry[r] + j * I::W), kd, a[r]);
      }
    }
    for (int r = 0; r < kGroup; ++r) {
      acc[r] = a[r];
      out[r] = o[r];
    }
  }

  static void run(const Head& h) {
    const int64_t full = Vectors ? Vectors : h.dk / I::W;
    const int tail = Vectors ? 0 : static_cast<int>(h.dk % I::W);
    const int64_t vectors = full + (tail != 0);
    const S* source = static_cast<const S*>(h.source);
    const int64_t decay_stride = VectorDecay ? h.stride : 1;
    const bool many = h.tokens > 1 || h.carried;

    V acc[kGroup], out[kGroup];
    for (int r = 0; r < kGroup; ++r) {  // the first group's first dot product
      const int64_t row = r < h.dv ? r : h.dv - 1;
      V a = I::zero();
      for (int64_t j = 0; j < vectors; ++j) {
        const V x = source ? load_at<I>(source + row * h.dk, j, full, tail) : I::load(h.carried + row * h.stride + j * I::W);
        a = I::fma(x, I::load(h.decayed + j * I::W), a);
      }
      acc[r] = a;
    }

    for (int64_t r0 = 0; r0 < h.dv; r0 += kGroup) {
      const int64_t after = r0 + kGroup < h.dv ? r0 + kGroup : r0;  // behind the last group: a dot product nobody reads
      int64_t row[kGroup], next[kGroup];
      for (int r = 0; r < kGroup; ++r) {
        row[r] = r0 + r < h.dv ? r0 + r : h.dv - 1;
        next[r] = after + r < h.dv ? after + r : h.dv - 1;
      }
      for (int t = 0; t < h.tokens; ++t) {
        const bool last = t + 1 == h.tokens;
        float dot[kGroup], d[kGroup];
        I::sum4(acc, dot);
        const float* v = h.value + t * h.v_stride + r0;
        for (int r = 0; r < kGroup; ++r) d[r] = (v[r] - dot[r]) * h.beta[t];

        Step s;
        S* slot = static_cast<S*>(h.slots[t]);
        for (int r = 0; r < kGroup; ++r) {
          if (Single) {
            s.source[r] = source + row[r] * h.dk;
            s.slot[r] = slot + row[r] * h.dk;
            s.next[r] = source + next[r] * h.dk;
            continue;
          }
          float* carry = h.carried ? h.carried + row[r] * h.stride : h.group + r * h.stride;
          s.source[r] = t == 0 && source ? source + row[r] * h.dk : nullptr;
          s.carry[r] = carry;
          s.slot[r] = slot ? slot + row[r] * h.dk : nullptr;
          s.keep[r] = many && (!last || h.keep) ? carry : nullptr;
          s.next[r] = source ? source + next[r] * h.dk : nullptr;
          s.next_carry[r] = source ? nullptr : h.carried + next[r] * h.stride;
        }
        s.next_self = !last;
        s.key = h.key + t * h.stride;
        s.query = h.query + t * h.stride;
        s.decay = h.decay + t * decay_stride;
        s.decayed = last ? h.decayed : h.decayed + (t + 1) * h.stride;
        step(s, d, full, tail, acc, out);
        I::sum4(out, h.out + t * h.v_stride + r0);
      }
    }
  }
};

template <class I, class S, bool VectorDecay>
void head_of(const Head& h) {
  const bool single = h.tokens == 1 && h.source && h.slots[0] && !h.carried;
  if (h.dk == 128) {
    if (single) return HeadKernel<I, S, VectorDecay, 128 / I::W, true>::run(h);
    return HeadKernel<I, S, VectorDecay, 128 / I::W, false>::run(h);
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
