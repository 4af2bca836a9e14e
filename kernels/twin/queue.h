// TPipe, TQue and TBuf: who gets which piece of the unified buffer, and the order that queues give.
#pragma once

#include "tensor.h"

namespace AscendC {

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;
using TEventID = int32_t;

enum class HardEvent : uint8_t {
    MTE2_V, V_MTE2, MTE3_V, V_MTE3, V_S, S_V, MTE2_S, S_MTE2, MTE3_S, S_MTE3, MTE2_MTE3, MTE3_MTE2, MAX
};

}  // namespace AscendC

using pipe_t = int;
constexpr pipe_t PIPE_S = twin::PIPE_OF_S, PIPE_V = twin::PIPE_OF_V, PIPE_MTE2 = twin::PIPE_OF_MTE2,
                 PIPE_MTE3 = twin::PIPE_OF_MTE3, PIPE_ALL = twin::PIPES;

namespace AscendC {

template <HardEvent event>
void SetFlag(int64_t id, twin::Where where = twin::Where::here()) {
    twin::core().set_flag(static_cast<twin::Event>(event), id, where);
}

template <HardEvent event>
void WaitFlag(int64_t id, twin::Where where = twin::Where::here()) {
    twin::core().wait_flag(static_cast<twin::Event>(event), id, where);
}

template <pipe_t pipe>
void PipeBarrier() {
    twin::Core& core = twin::core();
    if constexpr (pipe == PIPE_ALL) {
        core.barrier_all();
        ++core.launch.counts.barriers["ALL"];
    } else {
        core.barrier(static_cast<twin::Pipe>(pipe));
        ++core.launch.counts.barriers[twin::pipe_name(static_cast<twin::Pipe>(pipe))];
    }
}

template <TPosition position, int32_t depth>
class TQue {
    static_assert(position == TPosition::VECIN || position == TPosition::VECOUT, "queues of the vector unit");

  public:
    template <class T>
    LocalTensor<T> AllocTensor(twin::Where where = twin::Where::here()) {
        using namespace twin;
        Core& core = twin::core();
        if (buffers_.empty()) core.hang(where, producer(), name_, "AllocTensor on a queue without buffers");
        for (size_t tried = 0; tried < buffers_.size(); ++tried) {
            Buffer& buffer = *buffers_[cursor_];
            cursor_ = (cursor_ + 1) % buffers_.size();  // round-robin, as the device takes them
            if (buffer.state != Buffer::FREE) continue;
            if (buffer.flag >= 0) core.wait_flag(way_back(), buffer.flag, where, true);
            buffer.flag = -1;
            buffer.state = Buffer::OCCUPIED;
            ++buffer.generation;
            core.poison(buffer);
            if (++live(core) > static_cast<int>(core.soc.live_tensors))
                core.report(Check::Queue, where, producer(), buffer.name, 0, buffer.bytes,
                            "more live tensors of one position than the chip allows", "live tensors");
            return LocalTensor<T>(view_of(buffer));
        }
        core.hang(where, producer(), name_, "AllocTensor with no free buffer");
    }

    template <class T>
    bool EnQue(const LocalTensor<T>& tensor, twin::Where where = twin::Where::here()) {
        using namespace twin;
        Core& core = twin::core();
        Buffer* buffer = mine(core, tensor.view(), where, "EnQue");
        if (buffer == nullptr) return false;
        if (buffer->state != Buffer::OCCUPIED) {
            wrong_state(core, *buffer, where, "EnQue", Buffer::OCCUPIED);
            return false;
        }
        if (static_cast<int32_t>(waiting_.size()) >= std::max<int32_t>(depth, 1))
            core.report(Check::Queue, where, producer(), buffer->name, 0, buffer->bytes,
                        "EnQue of more tensors than the queue is deep, " + std::to_string(depth), "too deep");
        buffer->state = Buffer::ENQUEUED;
        buffer->flag = core.free_flag(way_there());
        if (buffer->flag < 0) core.hang(where, producer(), buffer->name, "EnQue without a free flag id");
        core.set_flag(way_there(), buffer->flag, where, true);
        waiting_.push_back(buffer);
        return true;
    }

    template <class T>
    LocalTensor<T> DeQue(twin::Where where = twin::Where::here()) {
        using namespace twin;
        Core& core = twin::core();
        if (waiting_.empty()) core.hang(where, consumer(), name_, "DeQue on an empty queue");
        Buffer& buffer = *waiting_.front();
        waiting_.pop_front();
        core.wait_flag(way_there(), buffer.flag, where, true);
        buffer.flag = -1;
        buffer.state = Buffer::DEQUEUED;
        return LocalTensor<T>(view_of(buffer));
    }

    template <class T>
    void FreeTensor(const LocalTensor<T>& tensor, twin::Where where = twin::Where::here()) {
        using namespace twin;
        Core& core = twin::core();
        Buffer* buffer = mine(core, tensor.view(), where, "FreeTensor");
        if (buffer == nullptr) return;
        if (buffer->state != Buffer::DEQUEUED) {
            wrong_state(core, *buffer, where, "FreeTensor", Buffer::DEQUEUED);
            return;
        }
        buffer->state = Buffer::FREE;
        ++buffer->generation;
        --live(core);
        buffer->flag = core.free_flag(way_back());
        if (buffer->flag < 0) core.hang(where, consumer(), buffer->name, "FreeTensor without a free flag id");
        core.set_flag(way_back(), buffer->flag, where, true);
    }

    bool HasTensorInQue() const { return !waiting_.empty(); }
    bool VacantInQue() const { return waiting_.size() < buffers_.size(); }

    void take(int queue, std::string name, std::vector<twin::Buffer*> buffers) {
        queue_ = queue;
        name_ = std::move(name);
        buffers_ = std::move(buffers);
    }

  private:
    static constexpr bool inbound = position == TPosition::VECIN;
    static constexpr twin::Pipe producer() { return inbound ? twin::PIPE_OF_MTE2 : twin::PIPE_OF_V; }
    static constexpr twin::Pipe consumer() { return inbound ? twin::PIPE_OF_V : twin::PIPE_OF_MTE3; }
    static constexpr twin::Event way_there() { return inbound ? twin::Event::MTE2_V : twin::Event::V_MTE3; }
    static constexpr twin::Event way_back() { return inbound ? twin::Event::V_MTE2 : twin::Event::MTE3_V; }
    static int& live(twin::Core& core) { return core.live_tensors[inbound ? 0 : 1]; }

    static twin::LocalView view_of(twin::Buffer& buffer) {
        return twin::LocalView{&buffer, buffer.start, uint64_t{buffer.start} + buffer.bytes, buffer.generation};
    }
    twin::Buffer* mine(twin::Core& core, const twin::LocalView& view, twin::Where where, const char* call) const {
        if (view.buffer == nullptr) core.hang(where, producer(), name_, std::string(call) + " of an empty tensor");
        if (view.buffer->queue == queue_) {
            if (view.buffer->generation == view.generation) return view.buffer;
            core.report(twin::Check::Queue, where, producer(), view.buffer->name, 0, view.buffer->bytes,
                        std::string(call) + " of a tensor that was freed before", "stale tensor");
            return nullptr;
        }
        core.report(twin::Check::Queue, where, producer(), view.buffer->name, 0, view.buffer->bytes,
                    std::string(call) + " on " + name_ + ", which the tensor does not belong to", "wrong queue");
        return nullptr;
    }
    static void wrong_state(twin::Core& core, const twin::Buffer& buffer, twin::Where where, const char* call,
                            twin::Buffer::State wanted) {
        core.report(twin::Check::Queue, where, producer(), buffer.name, 0, buffer.bytes,
                    std::string(call) + " of a tensor that is " + twin::state_name(buffer.state) + ", not " +
                        twin::state_name(wanted),
                    "wrong state");
    }

    int queue_ = -1;
    std::string name_ = "queue without buffers";
    std::vector<twin::Buffer*> buffers_;
    std::deque<twin::Buffer*> waiting_;
    size_t cursor_ = 0;
};

template <TPosition position = TPosition::VECCALC>
class TBuf {
  public:
    template <class T>
    LocalTensor<T> Get(twin::Where where = twin::Where::here()) {
        return GetWithOffset<T>(buffer_ == nullptr ? 0 : buffer_->bytes / sizeof(T), 0, where);
    }
    template <class T>
    LocalTensor<T> Get(uint32_t elements, twin::Where where = twin::Where::here()) {
        return GetWithOffset<T>(elements, 0, where);
    }
    // `elements` of T from `offset_bytes` on. The device checks nothing here.
    template <class T>
    LocalTensor<T> GetWithOffset(uint32_t elements, uint32_t offset_bytes, twin::Where where = twin::Where::here()) {
        using namespace twin;
        Core& core = twin::core();
        if (buffer_ == nullptr) core.hang(where, PIPE_OF_S, "TBuf", "TBuf without InitBuffer");
        const uint64_t last = uint64_t{offset_bytes} + uint64_t{elements} * sizeof(T);
        if (last > buffer_->bytes)
            core.report(Check::Bounds, where, PIPE_OF_S, buffer_->name, offset_bytes, last,
                        "beyond the TBuf, which has " + std::to_string(buffer_->bytes) + " bytes", "beyond the TBuf");
        return LocalTensor<T>(LocalView{buffer_, uint64_t{buffer_->start} + offset_bytes, buffer_->start + last, 0});
    }
    void take(twin::Buffer* buffer) { buffer_ = buffer; }

  private:
    twin::Buffer* buffer_ = nullptr;
};

class TPipe {
  public:
    template <TPosition position, int32_t depth>
    bool InitBuffer(TQue<position, depth>& queue, twin::Checked<uint8_t> number, uint32_t bytes,
                    twin::Where where = twin::Where::here()) {
        twin::Core& core = twin::core();
        if (!number.fits()) narrowed(core, where, "number of buffers", number.given, 255);
        const std::string name =
            std::string(position == TPosition::VECIN ? "VECIN" : "VECOUT") + " queue of " + where.text();
        const int id = core.next_queue++;
        std::vector<twin::Buffer*> buffers;
        for (int index = 0; index < number.value(); ++index) {
            twin::Buffer& buffer = core.carve(name + " buffer " + std::to_string(index), bytes, where);
            buffer.state = twin::Buffer::FREE;
            buffer.queue = id;
            buffers.push_back(&buffer);
        }
        queue.take(id, name, std::move(buffers));
        return true;
    }
    template <TPosition position>
    bool InitBuffer(TBuf<position>& buffer, uint32_t bytes, twin::Where where = twin::Where::here()) {
        buffer.take(&twin::core().carve("TBuf of " + where.text(), bytes, where));
        return true;
    }
    template <HardEvent event>
    TEventID AllocEventID(twin::Where where = twin::Where::here()) {
        return twin::core().reserve_flag(static_cast<twin::Event>(event), where);
    }
    template <HardEvent event>
    void ReleaseEventID(TEventID id) {
        twin::core().release_flag(static_cast<twin::Event>(event), id);
    }
    TEventID FetchEventID(HardEvent event) {
        const int flag = twin::core().free_flag(static_cast<twin::Event>(event));
        return flag < 0 ? 0 : flag;
    }

  private:
    static void narrowed(twin::Core& core, twin::Where where, const char* what, int64_t given, int64_t most) {
        core.report(twin::Check::Soc, where, twin::PIPE_OF_S, what, 0, 0,
                    std::string(what) + " " + std::to_string(given) + " does not fit 0.." + std::to_string(most));
    }
};

}  // namespace AscendC
