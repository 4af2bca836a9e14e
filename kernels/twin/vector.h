// The vector instructions of the subset, by repeats, blocks and lanes, with definedness and lineage of every lane.
//
// Lane l of repeat r stands in block l / (32 / sizeof(T)) of that repeat; a block stride of 0 or a repeat stride of 0
// reuses what is there. All sources of a repeat are read before its destination is written.
#pragma once

#include "queue.h"

namespace AscendC {

struct BinaryRepeatParams {
    twin::Checked<uint8_t> dstBlkStride{1}, src0BlkStride{1}, src1BlkStride{1};
    twin::Checked<uint8_t> dstRepStride{8}, src0RepStride{8}, src1RepStride{8};
    BinaryRepeatParams() = default;
    BinaryRepeatParams(twin::Checked<uint8_t> dst_block, twin::Checked<uint8_t> src0_block,
                       twin::Checked<uint8_t> src1_block, twin::Checked<uint8_t> dst_repeat,
                       twin::Checked<uint8_t> src0_repeat, twin::Checked<uint8_t> src1_repeat)
        : dstBlkStride(dst_block), src0BlkStride(src0_block), src1BlkStride(src1_block), dstRepStride(dst_repeat),
          src0RepStride(src0_repeat), src1RepStride(src1_repeat) {}
};

struct UnaryRepeatParams {
    twin::Checked<uint8_t> dstBlkStride{1}, srcBlkStride{1}, dstRepStride{8}, srcRepStride{8};
    UnaryRepeatParams() = default;
    UnaryRepeatParams(twin::Checked<uint8_t> dst_block, twin::Checked<uint8_t> src_block,
                      twin::Checked<uint8_t> dst_repeat, twin::Checked<uint8_t> src_repeat)
        : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat) {}
};

struct BrcbRepeatParams {
    twin::Checked<uint16_t> dstBlkStride{1}, dstRepStride{8};
    BrcbRepeatParams() = default;
    BrcbRepeatParams(twin::Checked<uint16_t> dst_block, twin::Checked<uint16_t> dst_repeat)
        : dstBlkStride(dst_block), dstRepStride(dst_repeat) {}
};

}  // namespace AscendC

namespace twin {

constexpr uint32_t most_lanes = 256;

struct Lanes {
    std::array<float, most_lanes> value;
    std::array<Tag, most_lanes> tag;
};

// One vector instruction while it runs.
class VectorCall {
  public:
    VectorCall(const char* name, Where where) : core_(core()), where_(where), now_(core_.begin(PIPE_OF_V, where)) {
        ++core_.launch.counts.vector_calls[name];
    }

    template <class T>
    void operand(const AscendC::LocalTensor<T>& tensor) {
        check_usable(core_, tensor.view(), PIPE_OF_V, where_);
        check_aligned(core_, tensor.view(), PIPE_OF_V, where_);
        require_type<T>(core_, PIPE_OF_V, where_);
    }

    // The count given with a mask of `lanes` at most; what the device would narrow or refuse becomes a finding.
    template <class T>
    bool shape(const Checked<uint64_t>& mask, const Checked<uint8_t>& repeats) {
        constexpr int64_t lanes = repeat_bytes / sizeof(T);
        bool fine = true;
        if (mask.given < 1 || mask.given > lanes) {
            soc_finding("mask " + std::to_string(mask.given) + " is not in 1.." + std::to_string(lanes), "mask");
            fine = false;
        }
        fits("repeat", repeats);
        count_instructions(repeats.value(), 1);
        return fine;
    }

    template <class Narrowed>
    void fits(const char* what, const Checked<Narrowed>& value) {
        if (!value.fits())
            soc_finding(std::string(what) + " " + std::to_string(value.given) + " is narrowed to " +
                            std::to_string(value.value()),
                        what);
    }

    // `count` elements by full repeats of 256 bytes and a last, shorter one.
    void flat_instructions(uint64_t count, uint64_t element_bytes) {
        const uint64_t lanes = repeat_bytes / element_bytes, full = count / lanes;
        count_instructions(full, (full + 254) / 255);
        if (count % lanes != 0) count_instructions(1, 1);
    }

    template <class T>
    void read(const AscendC::LocalTensor<T>& tensor, uint64_t offset_bytes, uint32_t lanes, uint32_t block_stride,
              Lanes& into) {
        walk<T>(tensor, offset_bytes, lanes, block_stride, [&](uint64_t offset, uint32_t first, uint32_t count) {
            const LocalView& view = tensor.view();
            const uint64_t byte = view.at + offset;
            const bool there = inside(core_, view, offset, uint64_t{count} * sizeof(T), PIPE_OF_V, where_) &&
                               core_.read(now_, *view.buffer, byte, uint64_t{count} * sizeof(T));
            for (uint32_t lane = 0; lane < count; ++lane) {
                const uint64_t at = byte + lane * sizeof(T);
                into.value[first + lane] = there ? Number<T>::load(&core_.ub[at]) : 0.0f;
                into.tag[first + lane] = there ? tags_joined(core_, at, sizeof(T)) : undefined_tag;
            }
        });
    }

    template <class T>
    void write(const AscendC::LocalTensor<T>& tensor, uint64_t offset_bytes, uint32_t lanes, uint32_t block_stride,
               const Lanes& from, AscendC::RoundMode mode = AscendC::RoundMode::CAST_RINT) {
        walk<T>(tensor, offset_bytes, lanes, block_stride, [&](uint64_t offset, uint32_t first, uint32_t count) {
            const LocalView& view = tensor.view();
            const uint64_t byte = view.at + offset;
            if (!inside(core_, view, offset, uint64_t{count} * sizeof(T), PIPE_OF_V, where_)) return;
            if (!core_.write(now_, *view.buffer, byte, uint64_t{count} * sizeof(T))) return;
            for (uint32_t lane = 0; lane < count; ++lane) {
                const uint64_t at = byte + lane * sizeof(T);
                Number<T>::store(&core_.ub[at], from.value[first + lane], mode);
                for (uint64_t cell = at / 2; cell < (at + sizeof(T)) / 2; ++cell)
                    core_.tags[cell] = from.tag[first + lane];
            }
        });
    }

    void sink_undefined(const LocalView& view, uint64_t offset, uint64_t bytes, const char* sink) {
        complain_undefined(core_, *view.buffer, view.at + offset, bytes, PIPE_OF_V, where_, sink);
    }

    void soc_finding(const std::string& text, const std::string& kind) {
        core_.report(Check::Soc, where_, PIPE_OF_V, core_.soc.name, 0, 0, text, kind);
    }
    const Soc& soc() const { return core_.soc; }

  private:
    void count_instructions(uint64_t repeats, uint64_t instructions) {
        core_.launch.counts.vector_instructions += instructions;
        core_.launch.counts.vector_repeats += repeats;
    }

    template <class T, class Run>
    static void walk(const AscendC::LocalTensor<T>&, uint64_t offset, uint32_t lanes, uint32_t block_stride, Run run) {
        if (block_stride == 1) return run(offset, 0u, lanes);
        constexpr uint32_t in_block = block_bytes / sizeof(T);
        for (uint32_t first = 0; first < lanes; first += in_block) {
            const uint64_t block = uint64_t{first / in_block} * block_stride * block_bytes;
            run(offset + block, first, std::min(in_block, lanes - first));
        }
    }

    Core& core_;
    Where where_;
    uint32_t now_;
};

template <class T, class Compute>
void binary(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
            const AscendC::LocalTensor<T>& src1, const Checked<uint64_t>& mask, const Checked<uint8_t>& repeats,
            const AscendC::BinaryRepeatParams& strides, bool accumulate, Where where, Compute compute) {
    VectorCall call(name, where);
    call.operand(dst);
    call.operand(src0);
    call.operand(src1);
    call.fits("dstBlkStride", strides.dstBlkStride);
    call.fits("src0BlkStride", strides.src0BlkStride);
    call.fits("src1BlkStride", strides.src1BlkStride);
    call.fits("dstRepStride", strides.dstRepStride);
    call.fits("src0RepStride", strides.src0RepStride);
    call.fits("src1RepStride", strides.src1RepStride);
    if (!call.shape<T>(mask, repeats)) return;
    const uint32_t lanes = static_cast<uint32_t>(mask.given);
    Lanes a, b, old;
    for (uint64_t repeat = 0; repeat < repeats.value(); ++repeat) {
        const uint64_t to = repeat * strides.dstRepStride.value() * block_bytes;
        call.read(src0, repeat * strides.src0RepStride.value() * block_bytes, lanes, strides.src0BlkStride.value(), a);
        call.read(src1, repeat * strides.src1RepStride.value() * block_bytes, lanes, strides.src1BlkStride.value(), b);
        if (accumulate) call.read(dst, to, lanes, strides.dstBlkStride.value(), old);
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            a.value[lane] = compute(accumulate ? old.value[lane] : 0.0f, a.value[lane], b.value[lane]);
            a.tag[lane] = join(a.tag[lane], b.tag[lane]);
            if (accumulate) a.tag[lane] = join(a.tag[lane], old.tag[lane]);
        }
        call.write(dst, to, lanes, strides.dstBlkStride.value(), a);
    }
}

// Flat calls: `count` elements in a row; sources and destination may have different types.
template <class D, class S, class Compute>
void unary_flat(const char* name, const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src,
                uint64_t count, Where where, AscendC::RoundMode mode, Compute compute) {
    VectorCall call(name, where);
    call.operand(dst);
    call.operand(src);
    call.flat_instructions(count, std::max(sizeof(D), sizeof(S)));
    Lanes a;
    for (uint64_t first = 0; first < count; first += 64) {
        const uint32_t lanes = static_cast<uint32_t>(std::min<uint64_t>(64, count - first));
        call.read(src, first * sizeof(S), lanes, 1, a);
        for (uint32_t lane = 0; lane < lanes; ++lane) a.value[lane] = compute(a.value[lane]);
        call.write(dst, first * sizeof(D), lanes, 1, a, mode);
    }
}

template <class T, class Compute>
void binary_flat(const char* name, const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src0,
                 const AscendC::LocalTensor<T>& src1, uint64_t count, Where where, Compute compute) {
    VectorCall call(name, where);
    call.operand(dst);
    call.operand(src0);
    call.operand(src1);
    call.flat_instructions(count, sizeof(T));
    Lanes a, b;
    for (uint64_t first = 0; first < count; first += 64) {
        const uint32_t lanes = static_cast<uint32_t>(std::min<uint64_t>(64, count - first));
        call.read(src0, first * sizeof(T), lanes, 1, a);
        call.read(src1, first * sizeof(T), lanes, 1, b);
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            a.value[lane] = compute(a.value[lane], b.value[lane]);
            a.tag[lane] = join(a.tag[lane], b.tag[lane]);
        }
        call.write(dst, first * sizeof(T), lanes, 1, a);
    }
}

// Which casts a chip has, from its documentation. Everything else is a finding, and is done all the same.
template <class D, class S>
bool cast_exists(const Soc& soc, AscendC::RoundMode mode) {
    using AscendC::RoundMode;
    const bool directed = mode == RoundMode::CAST_RINT || mode == RoundMode::CAST_FLOOR ||
                          mode == RoundMode::CAST_CEIL || mode == RoundMode::CAST_ROUND ||
                          mode == RoundMode::CAST_TRUNC;
    if constexpr (std::is_same_v<S, half> && std::is_same_v<D, float>) return mode == RoundMode::CAST_NONE;
    if constexpr (std::is_same_v<S, bfloat16_t> && std::is_same_v<D, float>)
        return soc.has_bfloat16 && mode == RoundMode::CAST_NONE;
    if constexpr (std::is_same_v<S, float> && std::is_same_v<D, half>)
        return mode == RoundMode::CAST_NONE || mode == RoundMode::CAST_ODD || (soc.has_bfloat16 && directed);
    if constexpr (std::is_same_v<S, float> && std::is_same_v<D, bfloat16_t>) return soc.has_bfloat16 && directed;
    return false;
}

}  // namespace twin

namespace AscendC {

// ---- by mask, repeats and strides ---------------------------------------------------------------------------------

template <class T>
void Mul(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
         twin::Checked<uint64_t> mask, twin::Checked<uint8_t> repeatTimes, const BinaryRepeatParams& strides,
         twin::Where where = twin::Where::here()) {
    twin::binary("Mul", dst, src0, src1, mask, repeatTimes, strides, false, where,
                 [](float, float a, float b) { return a * b; });
}

template <class T>
void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
         twin::Checked<uint64_t> mask, twin::Checked<uint8_t> repeatTimes, const BinaryRepeatParams& strides,
         twin::Where where = twin::Where::here()) {
    twin::binary("Add", dst, src0, src1, mask, repeatTimes, strides, false, where,
                 [](float, float a, float b) { return a + b; });
}

template <class T>
void Sub(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
         twin::Checked<uint64_t> mask, twin::Checked<uint8_t> repeatTimes, const BinaryRepeatParams& strides,
         twin::Where where = twin::Where::here()) {
    twin::binary("Sub", dst, src0, src1, mask, repeatTimes, strides, false, where,
                 [](float, float a, float b) { return a - b; });
}

// dst += src0 * src1; product and sum are rounded one after the other here, the chip may fuse them.
template <class T>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
               twin::Checked<uint64_t> mask, twin::Checked<uint8_t> repeatTimes, const BinaryRepeatParams& strides,
               twin::Where where = twin::Where::here()) {
    twin::binary("MulAddDst", dst, src0, src1, mask, repeatTimes, strides, true, where,
                 [](float old, float a, float b) { return old + a * b; });
}

template <class T>
void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, T scalar, twin::Checked<uint64_t> mask,
          twin::Checked<uint8_t> repeatTimes, const UnaryRepeatParams& strides,
          twin::Where where = twin::Where::here()) {
    const float factor = scalar;
    const BinaryRepeatParams both(strides.dstBlkStride, strides.srcBlkStride, strides.srcBlkStride,
                                  strides.dstRepStride, strides.srcRepStride, strides.srcRepStride);
    twin::binary("Muls", dst, src, src, mask, repeatTimes, both, false, where,
                 [factor](float, float a, float) { return a * factor; });
}

// The sum of the first `mask` elements of each repeat goes to dst[repeat * dstRepStride].
template <class T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::Checked<uint64_t> mask,
                    twin::Checked<uint8_t> repeatTimes, twin::Checked<uint16_t> dstRepStride,
                    twin::Checked<uint16_t> srcBlkStride, twin::Checked<uint16_t> srcRepStride,
                    twin::Where where = twin::Where::here()) {
    twin::VectorCall call("WholeReduceSum", where);
    call.operand(dst);
    call.operand(src);
    call.fits("dstRepStride", dstRepStride);
    call.fits("srcBlkStride", srcBlkStride);
    call.fits("srcRepStride", srcRepStride);
    if (!call.template shape<T>(mask, repeatTimes)) return;
    const uint32_t lanes = static_cast<uint32_t>(mask.given);
    twin::Lanes a;
    for (uint64_t repeat = 0; repeat < repeatTimes.value(); ++repeat) {
        const uint64_t from = repeat * srcRepStride.value() * twin::block_bytes;
        call.read(src, from, lanes, srcBlkStride.value(), a);
        twin::Tag tag = twin::plain_tag;
        bool defined = true;
        for (uint32_t lane = 0; lane < lanes; ++lane) {
            defined = defined && a.tag[lane] != twin::undefined_tag;
            tag = twin::join(a.tag[lane], tag);
        }
        if (!defined)
            call.sink_undefined(src.view(), from, uint64_t{lanes} * sizeof(T), "WholeReduceSum");
        for (uint32_t width = lanes; width > 1; width = (width + 1) / 2)  // by halves; the chip's order is not known
            for (uint32_t lane = 0; lane < width / 2; ++lane) a.value[lane] += a.value[lane + (width + 1) / 2];
        a.tag[0] = tag;
        call.write(dst, repeat * dstRepStride.value() * sizeof(T), 1, 1, a);
    }
}

// Each of 8 elements of a repeat fills one 32-byte block.
template <class T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, twin::Checked<uint8_t> repeatTimes,
          const BrcbRepeatParams& strides, twin::Where where = twin::Where::here()) {
    twin::VectorCall call("Brcb", where);
    call.operand(dst);
    call.operand(src);
    call.fits("dstBlkStride", strides.dstBlkStride);
    call.fits("dstRepStride", strides.dstRepStride);
    call.template shape<T>(1, repeatTimes);
    constexpr uint32_t in_block = twin::block_bytes / sizeof(T);
    twin::Lanes a, block;
    for (uint64_t repeat = 0; repeat < repeatTimes.value(); ++repeat) {
        call.read(src, repeat * 8 * sizeof(T), 8, 1, a);
        for (uint32_t element = 0; element < 8; ++element) {
            for (uint32_t lane = 0; lane < in_block; ++lane) {
                block.value[lane] = a.value[element];
                block.tag[lane] = a.tag[element];
            }
            const uint64_t blocks = repeat * strides.dstRepStride.value() + element * strides.dstBlkStride.value();
            call.write(dst, blocks * twin::block_bytes, in_block, 1, block);
        }
    }
}

// ---- by count -----------------------------------------------------------------------------------------------------

template <class T>
void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint32_t count,
         twin::Where where = twin::Where::here()) {
    twin::binary_flat("Add", dst, src0, src1, count, where, [](float a, float b) { return a + b; });
}

template <class T>
void Sub(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint32_t count,
         twin::Where where = twin::Where::here()) {
    twin::binary_flat("Sub", dst, src0, src1, count, where, [](float a, float b) { return a - b; });
}

template <class T>
void Mul(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint32_t count,
         twin::Where where = twin::Where::here()) {
    twin::binary_flat("Mul", dst, src0, src1, count, where, [](float a, float b) { return a * b; });
}

template <class T>
void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, T scalar, uint32_t count,
          twin::Where where = twin::Where::here()) {
    const float factor = scalar;
    twin::unary_flat("Muls", dst, src, count, where, RoundMode::CAST_RINT, [factor](float a) { return a * factor; });
}

template <class T>
void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, T scalar, uint32_t count,
          twin::Where where = twin::Where::here()) {
    const float term = scalar;
    twin::unary_flat("Adds", dst, src, count, where, RoundMode::CAST_RINT, [term](float a) { return a + term; });
}

template <class T>
void Exp(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count,
         twin::Where where = twin::Where::here()) {
    twin::unary_flat("Exp", dst, src, count, where, RoundMode::CAST_RINT, [](float a) { return std::exp(a); });
}

template <class D, class S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode mode, uint32_t count,
          twin::Where where = twin::Where::here()) {
    if (!twin::cast_exists<D, S>(twin::core().soc, mode))
        twin::core().report(twin::Check::Soc, where, twin::PIPE_OF_V, twin::core().soc.name, 0, 0,
                            std::string("no Cast from ") + twin::type_name<S>() + " to " + twin::type_name<D>() +
                                " with round mode " + std::to_string(static_cast<int>(mode)),
                            "cast");
    twin::unary_flat("Cast", dst, src, count, where, mode, [](float a) { return a; });
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, T scalar, uint32_t count, twin::Where where = twin::Where::here()) {
    uint8_t bytes[sizeof(T)];
    std::memcpy(bytes, &scalar, sizeof(T));
    twin::VectorCall call("Duplicate", where);
    call.operand(dst);
    call.flat_instructions(count, sizeof(T));
    twin::Lanes a;
    a.value.fill(twin::Number<T>::load(bytes));
    a.tag.fill(twin::plain_tag);
    for (uint64_t first = 0; first < count; first += 64)
        call.write(dst, first * sizeof(T), static_cast<uint32_t>(std::min<uint64_t>(64, count - first)), 1, a);
}

}  // namespace AscendC
