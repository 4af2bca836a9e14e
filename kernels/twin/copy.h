// Copies between global memory and the unified buffer, in 32-byte blocks, and the padded ones that only some chips have.
#pragma once

#include "queue.h"

namespace AscendC {

// Lengths and gaps in units of 32 bytes; a gap reaches from the end of a block to the start of the next.
struct DataCopyParams {
    twin::Checked<uint16_t> blockCount{1}, blockLen{0}, srcStride{0}, dstStride{0};
    DataCopyParams() = default;
    DataCopyParams(twin::Checked<uint16_t> count, twin::Checked<uint16_t> length, twin::Checked<uint16_t> src_gap,
                   twin::Checked<uint16_t> dst_gap)
        : blockCount(count), blockLen(length), srcStride(src_gap), dstStride(dst_gap) {}
};

// Lengths in bytes; the gap on the GM side in bytes, on the UB side in units of 32 bytes.
struct DataCopyExtParams {
    twin::Checked<uint16_t> blockCount{1};
    twin::Checked<uint32_t> blockLen{0}, srcStride{0}, dstStride{0}, rsv{0};
    DataCopyExtParams() = default;
    DataCopyExtParams(twin::Checked<uint16_t> count, twin::Checked<uint32_t> length, twin::Checked<uint32_t> src_gap,
                      twin::Checked<uint32_t> dst_gap, twin::Checked<uint32_t> reserved)
        : blockCount(count), blockLen(length), srcStride(src_gap), dstStride(dst_gap), rsv(reserved) {}
};

template <class T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;
    T paddingValue{};
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

}  // namespace AscendC

namespace twin {

// One copy instruction while it runs.
class Copy {
  public:
    Copy(Pipe pipe, Where where) : core_(core()), where_(where), pipe_(pipe), now_(core_.begin(pipe, where)) {
        ++(pipe == PIPE_OF_MTE2 ? core_.launch.counts.copies_in : core_.launch.counts.copies_out);
    }
    Core& machine() { return core_; }

    template <class T>
    void operand(const AscendC::LocalTensor<T>& tensor) {
        check_usable(core_, tensor.view(), pipe_, where_);
        check_aligned(core_, tensor.view(), pipe_, where_);
        require_type<T>(core_, pipe_, where_);
    }

    template <class Narrowed>
    void fits(const char* what, const Checked<Narrowed>& value, int64_t most) {
        if (value.given < 0 || value.given > most)
            core_.report(Check::Soc, where_, pipe_, what, 0, 0,
                         std::string(what) + " " + std::to_string(value.given) + " is not in 0.." +
                             std::to_string(most),
                         what);
    }

    // A copy moves whole blocks. Bytes that were not asked for are named, and moved.
    uint64_t whole_blocks(const std::string& buffer, uint64_t at, uint64_t bytes) {
        const uint64_t rounded = (bytes + block_bytes - 1) / block_bytes * block_bytes;
        if (rounded != bytes)
            core_.report(Check::Alignment, where_, pipe_, buffer, at + bytes, at + rounded,
                         "a copy of " + std::to_string(bytes) + " bytes is rounded up to " + std::to_string(rounded) +
                             " and reaches its neighbour",
                         "rounded");
        return rounded;
    }

    template <class T>
    void in(const AscendC::LocalTensor<T>& dst, uint64_t to, const AscendC::GlobalTensor<T>& src, uint64_t from,
            uint64_t bytes) {
        const LocalView& view = dst.view();
        uint64_t source = src.at() + from;
        const bool there = src.reach(core_, source, bytes, pipe_, where_);
        if (!inside(core_, view, to, bytes, pipe_, where_)) return;
        const uint64_t target = view.at + to;
        if (!core_.write(now_, *view.buffer, target, bytes) || !there) return;
        GmTensor& gm = *src.gm();
        source -= gm.hidden;
        core_.read_gm(now_, gm, source, bytes);
        std::memcpy(&core_.ub[target], &gm.data[source], bytes);
        for (uint64_t byte = 0; byte < bytes; byte += 2) {
            Tag tag = gm.tags[(source + byte) / 2];
            if (tag == plain_tag && gm.ownership.unit_bytes != 0) {
                const int owner = Core::owner_of(gm.ownership.reader, (source + byte) / gm.ownership.unit_bytes);
                if (owner >= 0) tag = static_cast<Tag>(first_sequence + owner);
            }
            core_.tags[(target + byte) / 2] = tag;
        }
        core_.launch.counts.read_bytes[gm.name] += bytes;
    }

    template <class T>
    void out(const AscendC::GlobalTensor<T>& dst, uint64_t to, const AscendC::LocalTensor<T>& src, uint64_t from,
             uint64_t bytes) {
        const LocalView& view = src.view();
        uint64_t target = dst.at() + to;
        const bool there = dst.reach(core_, target, bytes, pipe_, where_);
        if (!inside(core_, view, from, bytes, pipe_, where_)) return;
        const uint64_t source = view.at + from;
        if (!core_.read(now_, *view.buffer, source, bytes) || !there) return;
        std::vector<Tag> lineage(core_.tags.begin() + source / 2, core_.tags.begin() + (source + bytes) / 2);
        for (uint64_t cell = 0; cell < lineage.size(); ++cell) {
            if (lineage[cell] != undefined_tag) continue;
            uint64_t last = cell;
            while (last < lineage.size() && lineage[last] == undefined_tag) ++last;
            complain_undefined(core_, *view.buffer, source + cell * 2, (last - cell) * 2, pipe_, where_,
                               "a store to global memory");
            break;
        }
        GmTensor& gm = *dst.gm();
        target -= gm.hidden;
        core_.write_gm(now_, gm, target, bytes, lineage);
        std::memcpy(&gm.data[target], &core_.ub[source], bytes);
        // What is in memory is data again; whose it is says the ownership of the place.
        for (uint64_t cell = 0; cell < lineage.size(); ++cell)
            gm.tags[target / 2 + cell] = lineage[cell] == undefined_tag ? undefined_tag : plain_tag;
        core_.launch.counts.written_bytes[gm.name] += bytes;
    }

  private:
    Core& core_;
    Where where_;
    Pipe pipe_;
    uint32_t now_;
};

inline void check_params(Copy& copy, const AscendC::DataCopyParams& params) {
    copy.fits("blockCount", params.blockCount, 4095);
    copy.fits("blockLen", params.blockLen, 65535);
    copy.fits("srcStride", params.srcStride, 65535);
    copy.fits("dstStride", params.dstStride, 65535);
}

inline bool has_padded_copy(Core& core, Pipe pipe, Where where) {
    if (core.soc.has_padded_copy) return true;
    core.report(Check::Soc, where, pipe, core.soc.name, 0, 0, std::string(core.soc.name) + " has no DataCopyPad",
                "DataCopyPad");
    return false;
}

}  // namespace twin

namespace AscendC {

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count,
              twin::Where where = twin::Where::here()) {
    twin::Copy copy(twin::PIPE_OF_MTE2, where);
    copy.operand(dst);
    copy.in(dst, 0, src, 0, copy.whole_blocks(dst.view().buffer->name, 0, uint64_t{count} * sizeof(T)));
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count,
              twin::Where where = twin::Where::here()) {
    twin::Copy copy(twin::PIPE_OF_MTE3, where);
    copy.operand(src);
    const std::string name = dst.gm() == nullptr ? "unset global tensor" : dst.gm()->name;
    copy.out(dst, 0, src, 0, copy.whole_blocks(name, dst.at(), uint64_t{count} * sizeof(T)));
}

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
              twin::Where where = twin::Where::here()) {
    twin::Copy copy(twin::PIPE_OF_MTE2, where);
    copy.operand(dst);
    twin::check_params(copy, params);
    const uint64_t bytes = uint64_t{params.blockLen.value()} * twin::block_bytes;
    for (uint64_t block = 0; block < params.blockCount.value(); ++block)
        copy.in(dst, block * (bytes + params.dstStride.value() * twin::block_bytes), src,
                block * (bytes + params.srcStride.value() * twin::block_bytes), bytes);
}

template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              twin::Where where = twin::Where::here()) {
    twin::Copy copy(twin::PIPE_OF_MTE3, where);
    copy.operand(src);
    twin::check_params(copy, params);
    const uint64_t bytes = uint64_t{params.blockLen.value()} * twin::block_bytes;
    for (uint64_t block = 0; block < params.blockCount.value(); ++block)
        copy.out(dst, block * (bytes + params.dstStride.value() * twin::block_bytes), src,
                 block * (bytes + params.srcStride.value() * twin::block_bytes), bytes);
}

// In: each block starts on 32 bytes of UB and is filled up on the right. Out: exactly blockLen bytes each.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& padding, twin::Where where = twin::Where::here()) {
    twin::Copy copy(twin::PIPE_OF_MTE2, where);
    copy.operand(dst);
    if (!twin::has_padded_copy(copy.machine(), twin::PIPE_OF_MTE2, where)) return;
    copy.fits("blockCount", params.blockCount, 4095);
    copy.fits("rightPadding", twin::Checked<uint8_t>(padding.rightPadding * sizeof(T)), 32);
    const uint64_t bytes = params.blockLen.value();
    const uint64_t rounded = (bytes + twin::block_bytes - 1) / twin::block_bytes * twin::block_bytes;
    for (uint64_t block = 0; block < params.blockCount.value(); ++block) {
        const uint64_t to = block * (rounded + params.dstStride.value() * twin::block_bytes);
        copy.in(dst, to, src, block * (bytes + params.srcStride.value()), bytes);
        twin::Core& core = copy.machine();
        for (uint64_t pad = bytes; padding.isPad && pad < rounded; pad += sizeof(T)) {
            const uint64_t byte = dst.view().at + to + pad;
            if (byte + sizeof(T) > core.soc.ub_bytes) break;
            std::memcpy(&core.ub[byte], &padding.paddingValue, sizeof(T));
            for (uint64_t cell = byte / 2; cell < (byte + sizeof(T)) / 2; ++cell) core.tags[cell] = twin::plain_tag;
        }
    }
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params,
                 twin::Where where = twin::Where::here()) {
    twin::Copy copy(twin::PIPE_OF_MTE3, where);
    copy.operand(src);
    if (!twin::has_padded_copy(copy.machine(), twin::PIPE_OF_MTE3, where)) return;
    copy.fits("blockCount", params.blockCount, 4095);
    const uint64_t bytes = params.blockLen.value();
    const uint64_t rounded = (bytes + twin::block_bytes - 1) / twin::block_bytes * twin::block_bytes;
    for (uint64_t block = 0; block < params.blockCount.value(); ++block)
        copy.out(dst, block * (bytes + params.dstStride.value()), src,
                 block * (rounded + params.srcStride.value() * twin::block_bytes), bytes);
}

}  // namespace AscendC
