// GlobalTensor and LocalTensor: typed views that carry their identity, with the scalar accesses.
#pragma once

#include <type_traits>

#include "machine.h"

namespace twin {

// A view into UB: bytes [at, end) of the unified buffer, within one buffer, as of one generation of it.
struct LocalView {
    Buffer* buffer = nullptr;
    uint64_t at = 0, end = 0;
    uint32_t generation = 0;
};

// May the tensor be used now? Complains once for each operand of an instruction.
inline void check_usable(Core& core, const LocalView& view, Pipe pipe, Where where) {
    if (view.buffer == nullptr) core.hang(where, pipe, "empty tensor", "a tensor that no queue or buffer gave out");
    const Buffer& buffer = *view.buffer;
    if (buffer.state == Buffer::STATIC) return;
    if (buffer.generation != view.generation || buffer.state == Buffer::FREE)
        core.report(Check::Queue, where, pipe, buffer.name, view.at - buffer.start, view.end - buffer.start,
                    "used after FreeTensor", "stale tensor");
    else if (buffer.state == Buffer::ENQUEUED)
        core.report(Check::Queue, where, pipe, buffer.name, view.at - buffer.start, view.end - buffer.start,
                    "used between EnQue and DeQue", "enqueued tensor");
}

inline void check_aligned(Core& core, const LocalView& view, Pipe pipe, Where where) {
    if (view.at % block_bytes != 0)
        core.report(Check::Alignment, where, pipe, view.buffer->name, view.at - view.buffer->start,
                    view.at - view.buffer->start + 1, "an operand starts off a 32-byte boundary", "operand");
}

inline bool inside(Core& core, const LocalView& view, uint64_t offset, uint64_t bytes, Pipe pipe, Where where) {
    const uint64_t first = view.at + offset;
    const uint64_t last = first + bytes;
    if (last <= view.end && last <= core.soc.user_ub_bytes()) return true;
    core.report(Check::Bounds, where, pipe, view.buffer->name, first - view.buffer->start, last - view.buffer->start,
                last > view.end ? "beyond the tensor, which ends at byte " + std::to_string(view.end - view.buffer->start)
                                : "beyond the user's unified buffer",
                "beyond the tensor");
    return last <= core.soc.ub_bytes;
}

inline Tag tags_joined(const Core& core, uint64_t byte, uint64_t bytes) {
    Tag tag = core.tags[byte / 2];
    for (uint64_t cell = byte / 2 + 1; cell < (byte + bytes + 1) / 2; ++cell) tag = join(tag, core.tags[cell]);
    return tag;
}

inline void complain_undefined(Core& core, const Buffer& buffer, uint64_t byte, uint64_t bytes, Pipe pipe, Where where,
                               const char* sink) {
    core.report(Check::Undefined, where, pipe, buffer.name, byte - buffer.start, byte - buffer.start + bytes,
                std::string(sink) + " takes bytes that nothing defined", sink);
}

template <class T>
void require_type(Core& core, Pipe pipe, Where where) {
    if constexpr (std::is_same_v<T, bfloat16_t>)
        if (!core.soc.has_bfloat16)
            core.report(Check::Soc, where, pipe, "bfloat16", 0, 0, std::string(core.soc.name) + " has no bfloat16");
}

}  // namespace twin

namespace AscendC {

template <class T>
class LocalTensor {
  public:
    using PrimType = T;
    LocalTensor() = default;
    explicit LocalTensor(const twin::LocalView& view) : view_(view) {}

    LocalTensor operator[](uint64_t element) const {
        twin::LocalView moved = view_;
        moved.at += element * sizeof(T);
        return LocalTensor(moved);
    }
    template <class U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(view_);
    }
    uint32_t GetSize() const { return view_.at < view_.end ? static_cast<uint32_t>((view_.end - view_.at) / sizeof(T)) : 0; }

    T GetValue(uint32_t element, twin::Where where = twin::Where::here()) const {
        using namespace twin;
        Core& core = twin::core();
        const uint32_t now = core.begin(PIPE_OF_S, where);
        check_usable(core, view_, PIPE_OF_S, where);
        const uint64_t offset = uint64_t{element} * sizeof(T), byte = view_.at + offset;
        T value{};
        if (!inside(core, view_, offset, sizeof(T), PIPE_OF_S, where)) return value;
        core.read(now, *view_.buffer, byte, sizeof(T));
        if (tags_joined(core, byte, sizeof(T)) == undefined_tag)
            complain_undefined(core, *view_.buffer, byte, sizeof(T), PIPE_OF_S, where, "GetValue");
        std::memcpy(&value, &core.ub[byte], sizeof(T));
        return value;
    }
    void SetValue(uint32_t element, T value, twin::Where where = twin::Where::here()) const {
        using namespace twin;
        Core& core = twin::core();
        const uint32_t now = core.begin(PIPE_OF_S, where);
        check_usable(core, view_, PIPE_OF_S, where);
        const uint64_t offset = uint64_t{element} * sizeof(T), byte = view_.at + offset;
        if (!inside(core, view_, offset, sizeof(T), PIPE_OF_S, where)) return;
        core.write(now, *view_.buffer, byte, sizeof(T));
        std::memcpy(&core.ub[byte], &value, sizeof(T));
        for (uint64_t cell = byte / 2; cell < (byte + sizeof(T)) / 2; ++cell) core.tags[cell] = plain_tag;
    }
    const twin::LocalView& view() const { return view_; }

  private:
    twin::LocalView view_;
};

template <class T>
class GlobalTensor {
  public:
    using PrimType = T;
    // Elements. Without a size the tensor reaches as far as the memory that the address belongs to.
    void SetGlobalBuffer(T* address, uint64_t elements = 0) {
        gm_ = twin::core().launch.memory.find(reinterpret_cast<const uint8_t*>(address), &at_);
        end_ = gm_ == nullptr ? 0 : gm_->bytes();
        if (gm_ != nullptr && elements != 0) end_ = at_ + elements * sizeof(T);
    }
    GlobalTensor operator[](uint64_t element) const {
        GlobalTensor moved = *this;
        moved.at_ += element * sizeof(T);
        return moved;
    }
    uint64_t GetSize() const { return at_ < end_ ? (end_ - at_) / sizeof(T) : 0; }

    T GetValue(uint64_t element, twin::Where where = twin::Where::here()) const {
        using namespace twin;
        Core& core = twin::core();
        const uint32_t now = core.begin(PIPE_OF_S, where);
        T value{};
        uint64_t byte = at_ + element * sizeof(T);
        if (!reach(core, byte, sizeof(T), PIPE_OF_S, where)) return value;
        byte -= gm_->hidden;
        core.read_gm(now, *gm_, byte, sizeof(T));
        for (uint64_t cell = byte / 2; cell < (byte + sizeof(T)) / 2; ++cell)
            if (gm_->tags[cell] == undefined_tag)
                core.report(Check::Undefined, where, PIPE_OF_S, gm_->name, byte, byte + sizeof(T),
                            "GetValue takes bytes that nothing defined", "GetValue");
        std::memcpy(&value, &gm_->data[byte], sizeof(T));
        core.launch.counts.scalar_read_bytes[gm_->name] += sizeof(T);
        return value;
    }
    void SetValue(uint64_t element, T value, twin::Where where = twin::Where::here()) const {
        using namespace twin;
        Core& core = twin::core();
        const uint32_t now = core.begin(PIPE_OF_S, where);
        uint64_t byte = at_ + element * sizeof(T);
        if (!reach(core, byte, sizeof(T), PIPE_OF_S, where)) return;
        byte -= gm_->hidden;
        core.write_gm(now, *gm_, byte, sizeof(T), std::vector<Tag>((sizeof(T) + 1) / 2, plain_tag));
        std::memcpy(&gm_->data[byte], &value, sizeof(T));
        for (uint64_t cell = byte / 2; cell < (byte + sizeof(T)) / 2; ++cell) gm_->tags[cell] = plain_tag;
        core.launch.counts.scalar_written_bytes[gm_->name] += sizeof(T);
    }

    // Is [byte, byte + bytes) of the tensor's memory there? Complains if not. Bytes count from the tensor's start.
    bool reach(twin::Core& core, uint64_t byte, uint64_t bytes, twin::Pipe pipe, twin::Where where) const {
        using namespace twin;
        if (gm_ == nullptr) core.hang(where, pipe, "unset global tensor", "a global tensor without memory");
        const uint64_t end = std::min<uint64_t>(end_, gm_->bytes());
        if (byte + bytes > end || byte + bytes < byte) {
            core.report(Check::Bounds, where, pipe, gm_->name, byte, byte + bytes,
                        "beyond the global tensor, which ends at byte " + std::to_string(end),
                        "beyond the global tensor");
            return false;
        }
        if (byte >= gm_->hidden) return true;
        core.report(Check::Ownership, where, pipe, gm_->name, byte, byte + bytes,
                    "the part of the tensor before byte " + std::to_string(gm_->hidden) + " is nobody's in this call",
                    "hidden part");
        return false;
    }
    twin::GmTensor* gm() const { return gm_; }
    uint64_t at() const { return at_; }

  private:
    twin::GmTensor* gm_ = nullptr;
    uint64_t at_ = 0, end_ = 0;
};

}  // namespace AscendC
