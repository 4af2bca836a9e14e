// The machine under the API: cores, pipes and their order, unified buffer and global memory with their shadows.
//
// Instructions take effect at once, in program order. What the hardware may reorder is caught beside that, with a
// vector clock for each pipe: `known[q][p]` is the last instruction of pipe p that is surely done before what pipe q
// does next. It grows by flags, barriers and queues alone. Every two bytes of memory remember who wrote and read them
// last; an access that is not ordered behind those is a finding, whatever the values happen to be.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <unordered_map>

#include "counts.h"
#include "findings.h"
#include "numbers.h"
#include "soc.h"

namespace twin {

using Clock = std::array<uint32_t, PIPES>;

// What is known about two bytes: undefined, a constant, belonging to sequence (tag - first_sequence), or a mixture.
using Tag = uint16_t;
constexpr Tag undefined_tag = 0, plain_tag = 1, mixed_tag = 2, first_sequence = 3;

inline Tag join(Tag a, Tag b) {
    if (a == b || b == plain_tag) return a;
    if (a == undefined_tag || b == undefined_tag) return undefined_tag;
    return a == plain_tag ? b : mixed_tag;
}

struct Instruction {
    Where where;
    uint32_t index;  // within its pipe and core
    Pipe pipe;
    uint16_t core;
};

struct Cell {  // of two bytes; instruction ids, 0 = none
    uint32_t write = 0;
    std::array<uint32_t, PIPES> read{};
};

// Who may read and write a GM tensor, by unit (a slot of a pool, the rows of a token). -1 = nobody.
struct Ownership {
    uint64_t unit_bytes = 0;  // 0 = not owned, free to all
    std::vector<int> reader, writer;
    std::string unit;
};

struct GmTensor {
    std::string name;
    uint64_t hidden = 0;        // bytes in front of `data` that the tensor has but the twin does not hold; where there
                                // are such, findings count bytes from the first one held
    std::vector<uint8_t> data;
    std::vector<Tag> tags;      // by two bytes
    Ownership ownership;        // units are counted from the first byte held
    // Shadows of one launch.
    std::vector<Cell> cells;
    std::vector<uint64_t> reading_cores;   // a bit for each core, by cell
    std::vector<int16_t> block_writer;     // core, by 32 bytes
    std::vector<int16_t> line_writer;      // core of the last scalar store, by 64 bytes

    uint64_t bytes() const { return hidden + data.size(); }

    void forget_launch() {
        const size_t count = (data.size() + 1) / 2;
        cells.assign(count, Cell{});
        reading_cores.assign(count, 0);
        block_writer.assign(data.size() / block_bytes + 1, -1);
        line_writer.assign(data.size() / line_bytes + 1, -1);
    }
};

// Global memory: tensors by name. `defined` = false for outputs, which hold NaN until the kernel writes them.
class Memory {
  public:
    GmTensor& add(const std::string& name, const void* data, uint64_t bytes, bool defined = true) {
        auto tensor = std::make_unique<GmTensor>();
        tensor->name = name;
        tensor->data.assign(bytes, 0xff);
        if (data != nullptr && bytes != 0) std::memcpy(tensor->data.data(), data, bytes);
        tensor->tags.assign((bytes + 1) / 2, defined ? plain_tag : undefined_tag);
        tensors_.push_back(std::move(tensor));
        return *tensors_.back();
    }
    GmTensor* find(const uint8_t* address, uint64_t* offset) {
        for (auto& tensor : tensors_) {
            const uint8_t* base = tensor->data.data();
            if (!tensor->data.empty() && address >= base && address < base + tensor->data.size()) {
                *offset = static_cast<uint64_t>(address - base);
                return tensor.get();
            }
        }
        return nullptr;
    }
    void forget_launch() {
        for (auto& tensor : tensors_) tensor->forget_launch();
    }

  private:
    std::vector<std::unique_ptr<GmTensor>> tensors_;
};

// A piece of UB that InitBuffer handed out.
struct Buffer {
    enum State : uint8_t { STATIC, FREE, OCCUPIED, ENQUEUED, DEQUEUED };
    std::string name;
    uint32_t start = 0, bytes = 0;
    State state = STATIC;
    uint32_t generation = 0;  // grows with each AllocTensor and FreeTensor
    int queue = -1;
    int flag = -1;            // event id that the queue holds for it
};

inline const char* state_name(Buffer::State state) {
    static const char* const names[] = {"static", "free", "occupied", "enqueued", "dequeued"};
    return names[state];
}

enum class Event : uint8_t {
    MTE2_V, V_MTE2, MTE3_V, V_MTE3, V_S, S_V, MTE2_S, S_MTE2, MTE3_S, S_MTE3, MTE2_MTE3, MTE3_MTE2, COUNT
};

struct EventPipes {
    Pipe from, to;
    const char* name;
};

inline EventPipes event_pipes(Event event) {
    static const EventPipes table[] = {
        {PIPE_OF_MTE2, PIPE_OF_V, "MTE2_V"}, {PIPE_OF_V, PIPE_OF_MTE2, "V_MTE2"},
        {PIPE_OF_MTE3, PIPE_OF_V, "MTE3_V"}, {PIPE_OF_V, PIPE_OF_MTE3, "V_MTE3"},
        {PIPE_OF_V, PIPE_OF_S, "V_S"},       {PIPE_OF_S, PIPE_OF_V, "S_V"},
        {PIPE_OF_MTE2, PIPE_OF_S, "MTE2_S"}, {PIPE_OF_S, PIPE_OF_MTE2, "S_MTE2"},
        {PIPE_OF_MTE3, PIPE_OF_S, "MTE3_S"}, {PIPE_OF_S, PIPE_OF_MTE3, "S_MTE3"},
        {PIPE_OF_MTE2, PIPE_OF_MTE3, "MTE2_MTE3"}, {PIPE_OF_MTE3, PIPE_OF_MTE2, "MTE3_MTE2"}};
    return table[static_cast<int>(event)];
}

// The core stands still for ever; what follows on it is not run.
struct Hang : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Options {
    bool automatic_vector_barriers = false;  // false: strict, every dependence on V needs its barrier
    std::vector<uint32_t> core_order;        // empty: 0, 1, 2 ..
    uint64_t expected_ub_bytes = 0;          // what the host tiling computed; 0 = not checked
};

struct Launch {
    Launch(const Soc& soc, Memory& memory, uint32_t block_dim, Options options)
        : soc(soc), memory(memory), block_dim(block_dim), options(std::move(options)) {
        log.push_back(Instruction{});  // id 0 is nobody
    }
    const Soc& soc;
    Memory& memory;
    uint32_t block_dim;
    Options options;
    Findings findings;
    Counts counts;
    std::vector<Instruction> log;
};

class Core;
inline thread_local Core* current_core = nullptr;

class Core {
  public:
    Core(Launch& launch, uint32_t id)
        : launch(launch), soc(launch.soc), id(id), ub(soc.ub_bytes, 0xff), cells(soc.ub_bytes / 2),
          tags(soc.ub_bytes / 2, undefined_tag) {}

    Launch& launch;
    const Soc& soc;
    const uint32_t id;
    std::vector<uint8_t> ub;  // starts as NaN
    std::vector<Cell> cells;
    std::vector<Tag> tags;
    std::deque<Buffer> buffers;
    uint32_t next_free = 0;  // byte of UB
    int next_queue = 0;
    std::array<int, 2> live_tensors{};  // VECIN, VECOUT

    // ---- findings -------------------------------------------------------------------------------------------------

    void report(Check check, Where where, Pipe pipe, const std::string& buffer, uint64_t first, uint64_t last,
                const std::string& text, const std::string& kind = "") {
        launch.findings.add(
            Finding{check, where, buffer, first, last, pipe, static_cast<int>(id), text, 1}, kind.empty() ? text : kind);
    }

    [[noreturn]] void hang(Where where, Pipe pipe, const std::string& buffer, const std::string& text) {
        report(Check::Queue, where, pipe, buffer, 0, 0, text + ": the device hangs here", "hang");
        throw Hang(text);
    }

    // ---- order ----------------------------------------------------------------------------------------------------

    uint32_t begin(Pipe pipe, Where where) {
        const bool in_order = pipe == PIPE_OF_S || (pipe == PIPE_OF_V && launch.options.automatic_vector_barriers);
        if (in_order) known_[pipe][pipe] = issued_[pipe];
        launch.log.push_back(Instruction{where, ++issued_[pipe], pipe, static_cast<uint16_t>(id)});
        return static_cast<uint32_t>(launch.log.size() - 1);
    }

    void barrier(Pipe pipe) { known_[pipe][pipe] = issued_[pipe]; }

    void barrier_all() {
        for (auto& row : known_) row = issued_;
    }

    Clock done_on(Pipe pipe) const {
        Clock done = known_[pipe];
        done[pipe] = issued_[pipe];
        return done;
    }

    void learn(Pipe pipe, const Clock& done) {
        for (int other = 0; other < PIPES; ++other)
            known_[pipe][other] = std::max(known_[pipe][other], done[other]);
    }

    bool ordered(uint32_t earlier, Pipe pipe) const {
        if (earlier == 0) return true;
        const Instruction& done = launch.log[earlier];
        return done.core == id && known_[pipe][done.pipe] >= done.index;
    }

    // ---- flags ----------------------------------------------------------------------------------------------------

    void set_flag(Event event, int64_t flag, Where where, bool by_queue = false) {
        const EventPipes pipes = event_pipes(event);
        if (flag < 0 || flag > max_flag_id) {
            report(Check::Queue, where, pipes.from, std::string("flag ") + pipes.name, 0, 0,
                   "flag id " + std::to_string(flag) + " is not in 0..7");
            return;
        }
        Flag& slot = flags_[static_cast<int>(event)][flag];
        if (slot.set)
            report(Check::Queue, where, pipes.from, std::string("flag ") + pipes.name, 0, 0,
                   "flag " + std::to_string(flag) + " set a second time before the wait (first at " +
                       slot.where.text() + ")");
        slot.set = true;
        slot.by_queue = by_queue;
        slot.where = where;
        slot.done = done_on(pipes.from);
    }

    void wait_flag(Event event, int64_t flag, Where where, bool by_queue = false) {
        const EventPipes pipes = event_pipes(event);
        if (flag < 0 || flag > max_flag_id) {
            report(Check::Queue, where, pipes.to, std::string("flag ") + pipes.name, 0, 0,
                   "flag id " + std::to_string(flag) + " is not in 0..7");
            return;
        }
        Flag& slot = flags_[static_cast<int>(event)][flag];
        if (!slot.set)
            hang(where, pipes.to, std::string("flag ") + pipes.name,
                 "wait for flag " + std::to_string(flag) + ", which nobody set");
        if (slot.by_queue && !by_queue)
            report(Check::Queue, where, pipes.to, std::string("flag ") + pipes.name, 0, 0,
                   "flag " + std::to_string(flag) + " belongs to a queue (set at " + slot.where.text() + ")");
        slot.set = false;
        learn(pipes.to, slot.done);
        if (by_queue) ++launch.counts.queue_waits;
        else ++launch.counts.flag_waits[pipes.name];
    }

    int free_flag(Event event) const {
        for (int flag = 0; flag <= static_cast<int>(max_flag_id); ++flag) {
            const Flag& slot = flags_[static_cast<int>(event)][flag];
            if (!slot.set && !slot.reserved) return flag;
        }
        return -1;
    }

    int reserve_flag(Event event, Where where) {
        const int flag = free_flag(event);
        if (flag < 0) {
            report(Check::Queue, where, event_pipes(event).from, std::string("flag ") + event_pipes(event).name, 0, 0,
                   "no flag id left");
            return 0;
        }
        flags_[static_cast<int>(event)][flag].reserved = true;
        return flag;
    }

    void release_flag(Event event, int64_t flag) {
        if (flag >= 0 && flag <= max_flag_id) flags_[static_cast<int>(event)][flag].reserved = false;
    }

    // ---- unified buffer -------------------------------------------------------------------------------------------

    // The next `bytes` of UB. They hold NaN, whatever lay there.
    Buffer& carve(const std::string& name, uint32_t bytes, Where where) {
        const uint64_t rounded = (uint64_t{bytes} + block_bytes - 1) / block_bytes * block_bytes;
        if (uint64_t{next_free} + rounded > soc.user_ub_bytes())
            report(Check::Budget, where, PIPES, name, next_free, next_free + rounded,
                   "the unified buffer ends at byte " + std::to_string(soc.user_ub_bytes()), "over budget");
        if (buffers.size() >= max_buffers)
            report(Check::Budget, where, PIPES, name, 0, 0, "more than 64 buffers", "too many buffers");
        Buffer buffer;
        buffer.name = name;
        buffer.start = next_free;
        buffer.bytes = static_cast<uint32_t>(rounded);
        next_free += static_cast<uint32_t>(rounded);
        launch.counts.ub_bytes = std::max<uint64_t>(launch.counts.ub_bytes, next_free);
        buffers.push_back(buffer);
        return buffers.back();
    }

    void poison(const Buffer& buffer) {
        const uint32_t end = std::min(buffer.start + buffer.bytes, soc.ub_bytes);
        if (buffer.start >= end) return;
        std::fill(ub.begin() + buffer.start, ub.begin() + end, 0xff);
        std::fill(tags.begin() + buffer.start / 2, tags.begin() + end / 2, undefined_tag);
    }

    // One contiguous run of UB read by instruction `now`. False: there is no memory to read.
    bool read(uint32_t now, const Buffer& buffer, uint64_t byte, uint64_t bytes) {
        if (byte + bytes > soc.ub_bytes) return false;
        const Pipe pipe = launch.log[now].pipe;
        uint32_t fine = 0;
        for (uint64_t cell = byte / 2; cell < (byte + bytes + 1) / 2; ++cell) {
            Cell& at = cells[cell];
            if (at.write != fine) {
                if (at.write == now) {
                    report(Check::Order, launch.log[now].where, pipe, buffer.name, byte - buffer.start,
                           byte - buffer.start + bytes, "a repeat reads what an earlier repeat of it wrote", "repeat");
                } else if (!ordered(at.write, pipe)) {
                    race(now, at.write, "reads", "wrote", buffer.name, cell * 2 - buffer.start);
                }
                fine = at.write;
            }
            at.read[pipe] = now;
        }
        return true;
    }

    bool write(uint32_t now, const Buffer& buffer, uint64_t byte, uint64_t bytes) {
        if (byte + bytes > soc.ub_bytes) return false;
        const Pipe pipe = launch.log[now].pipe;
        uint32_t fine = 0;
        Clock fine_reads{};
        for (uint64_t cell = byte / 2; cell < (byte + bytes + 1) / 2; ++cell) {
            Cell& at = cells[cell];
            if (at.write != fine) {
                if (at.write == now) {
                    report(Check::Order, launch.log[now].where, pipe, buffer.name, byte - buffer.start,
                           byte - buffer.start + bytes, "two repeats of it write the same bytes", "repeat");
                } else if (!ordered(at.write, pipe)) {
                    race(now, at.write, "writes", "wrote", buffer.name, cell * 2 - buffer.start);
                }
                fine = at.write;
            }
            for (int other = 0; other < PIPES; ++other) {
                const uint32_t reader = at.read[other];
                if (reader == fine_reads[other] || reader == now) continue;
                if (!ordered(reader, pipe)) race(now, reader, "writes", "reads", buffer.name, cell * 2 - buffer.start);
                fine_reads[other] = reader;
            }
            at.write = now;
            at.read = {};
        }
        return true;
    }

    void race(uint32_t now, uint32_t earlier, const char* does, const char* did, const std::string& buffer,
              uint64_t byte) {
        const Instruction& one = launch.log[now];
        const Instruction& other = launch.log[earlier];
        report(Check::Order, one.where, one.pipe, buffer, byte, byte + 2,
               std::string(does) + " what " + pipe_name(other.pipe) + " " + did + " at " + other.where.text() +
                   ", and nothing orders the two",
               std::string(does) + other.where.text());
    }

    // ---- global memory --------------------------------------------------------------------------------------------

    // One contiguous run of a GM tensor read by `now`; the run lies inside the tensor.
    void read_gm(uint32_t now, GmTensor& gm, uint64_t byte, uint64_t bytes) {
        const Pipe pipe = launch.log[now].pipe;
        uint32_t fine = 0;
        for (uint64_t cell = byte / 2; cell < (byte + bytes + 1) / 2; ++cell) {
            Cell& at = gm.cells[cell];
            if (at.write != fine) {
                if (launch.log[at.write].core != id) other_core(now, at.write, "reads", "wrote", gm, cell * 2);
                else if (!ordered(at.write, pipe)) race(now, at.write, "reads", "wrote", gm.name, cell * 2);
                fine = at.write;
            }
            at.read[pipe] = now;
            gm.reading_cores[cell] |= uint64_t{1} << id;
        }
        for_units(gm, byte, bytes, [&](uint64_t unit, uint64_t first, uint64_t last) {
            if (owner_of(gm.ownership.reader, unit) < 0)
                report(Check::Ownership, launch.log[now].where, pipe, gm.name, first, last,
                       "reads " + gm.ownership.unit + " " + std::to_string(unit) +
                           ", which no sequence of this call may read",
                       "read of a foreign unit");
        });
    }

    void write_gm(uint32_t now, GmTensor& gm, uint64_t byte, uint64_t bytes, const std::vector<Tag>& lineage) {
        const Pipe pipe = launch.log[now].pipe;
        const Where where = launch.log[now].where;
        uint32_t fine = 0;
        Clock fine_reads{};
        const uint64_t others = ~(uint64_t{1} << id);
        for (uint64_t cell = byte / 2; cell < (byte + bytes + 1) / 2; ++cell) {
            Cell& at = gm.cells[cell];
            if (at.write != fine) {
                if (launch.log[at.write].core != id) other_core(now, at.write, "writes", "wrote", gm, cell * 2);
                else if (!ordered(at.write, pipe)) race(now, at.write, "writes", "wrote", gm.name, cell * 2);
                fine = at.write;
            }
            if (gm.reading_cores[cell] & others)
                report(Check::Cores, where, pipe, gm.name, cell * 2, cell * 2 + 2, "writes what another core reads",
                       "write over another core's read");
            for (int other = 0; other < PIPES; ++other) {
                const uint32_t reader = at.read[other];
                if (reader == fine_reads[other] || launch.log[reader].core != id) continue;
                if (!ordered(reader, pipe)) race(now, reader, "writes", "reads", gm.name, cell * 2);
                fine_reads[other] = reader;
            }
            at.write = now;
            at.read = {};
        }
        claim_blocks(gm, byte, bytes, pipe, where);
        for_units(gm, byte, bytes, [&](uint64_t unit, uint64_t first, uint64_t last) {
            const int owner = owner_of(gm.ownership.writer, unit);
            if (owner < 0) {
                report(Check::Ownership, where, pipe, gm.name, first, last,
                       "writes " + gm.ownership.unit + " " + std::to_string(unit) +
                           ", which no sequence of this call may write",
                       "write of a foreign unit");
                return;
            }
            for (uint64_t at = first; at < last; at += 2) {
                const Tag tag = lineage[(at - byte) / 2];
                if (tag >= mixed_tag && tag != first_sequence + owner) {
                    report(Check::Ownership, where, pipe, gm.name, first, last,
                           gm.ownership.unit + " " + std::to_string(unit) + " of sequence " + std::to_string(owner) +
                               " gets values of " +
                               (tag == mixed_tag ? "several sequences"
                                                 : "sequence " + std::to_string(tag - first_sequence)),
                           "foreign values");
                    break;
                }
            }
        });
    }

    // ---- the end of a core ----------------------------------------------------------------------------------------

    void finish() {
        for (const Buffer& buffer : buffers)
            if (buffer.state == Buffer::OCCUPIED || buffer.state == Buffer::ENQUEUED ||
                buffer.state == Buffer::DEQUEUED)
                report(Check::Queue, Where{"end of kernel", 0}, PIPES, buffer.name, 0, buffer.bytes,
                       std::string("leaked: still ") + state_name(buffer.state), "leak");
        for (int event = 0; event < static_cast<int>(Event::COUNT); ++event)
            for (const Flag& flag : flags_[event])
                if (flag.set && !flag.by_queue)
                    report(Check::Queue, flag.where, event_pipes(static_cast<Event>(event)).from,
                           std::string("flag ") + event_pipes(static_cast<Event>(event)).name, 0, 0,
                           "set, and nobody waits for it");
        const uint64_t expected = launch.options.expected_ub_bytes;
        if (expected != 0 && expected != next_free)
            report(Check::Budget, Where{"end of kernel", 0}, PIPES, "unified buffer", 0, next_free,
                   "the kernel carved up " + std::to_string(next_free) + " bytes, the host tiling computed " +
                       std::to_string(expected));
    }

    static int owner_of(const std::vector<int>& owners, uint64_t unit) {
        return unit < owners.size() ? owners[unit] : -1;
    }

  private:
    struct Flag {
        bool set = false, by_queue = false, reserved = false;
        Where where;
        Clock done{};
    };

    void other_core(uint32_t now, uint32_t earlier, const char* does, const char* did, GmTensor& gm, uint64_t byte) {
        const Instruction& other = launch.log[earlier];
        if (earlier == 0) return;
        report(Check::Cores, launch.log[now].where, launch.log[now].pipe, gm.name, byte, byte + 2,
               std::string(does) + " what core " + std::to_string(other.core) + " " + did + " at " +
                   other.where.text() + "; cores have no order",
               std::string(does) + " another core's bytes");
    }

    void claim_blocks(GmTensor& gm, uint64_t byte, uint64_t bytes, Pipe pipe, Where where) {
        for (uint64_t block = byte / block_bytes; block * block_bytes < byte + bytes; ++block) {
            int16_t& writer = gm.block_writer[block];
            if (writer >= 0 && writer != static_cast<int16_t>(id))
                report(Check::Cores, where, pipe, gm.name, block * block_bytes, (block + 1) * block_bytes,
                       "core " + std::to_string(writer) + " writes inside the same 32-byte block", "shared block");
            writer = static_cast<int16_t>(id);
            int16_t& line = gm.line_writer[block * block_bytes / line_bytes];
            if (line >= 0 && line != static_cast<int16_t>(id))
                report(Check::Cores, where, pipe, gm.name, block * block_bytes, (block + 1) * block_bytes,
                       "core " + std::to_string(line) + " stores scalars inside the same 64-byte line", "shared line");
        }
        if (pipe != PIPE_OF_S) return;
        const uint64_t line = byte / line_bytes;
        for (uint64_t block = line * 2; block < line * 2 + 2 && block < gm.block_writer.size(); ++block)
            if (gm.block_writer[block] >= 0 && gm.block_writer[block] != static_cast<int16_t>(id))
                report(Check::Cores, where, pipe, gm.name, line * line_bytes, (line + 1) * line_bytes,
                       "core " + std::to_string(gm.block_writer[block]) +
                           " writes inside the same 64-byte line as this scalar store",
                       "shared line");
        gm.line_writer[line] = static_cast<int16_t>(id);
    }

    template <class Visit>
    static void for_units(const GmTensor& gm, uint64_t byte, uint64_t bytes, Visit visit) {
        const uint64_t unit_bytes = gm.ownership.unit_bytes;
        if (unit_bytes == 0) return;
        for (uint64_t at = byte; at < byte + bytes;) {
            const uint64_t unit = at / unit_bytes;
            const uint64_t end = std::min((unit + 1) * unit_bytes, byte + bytes);
            visit(unit, at, end);
            at = end;
        }
    }

    std::array<Clock, PIPES> known_{};
    Clock issued_{};
    std::array<std::array<Flag, max_flag_id + 1>, static_cast<int>(Event::COUNT)> flags_;
};

// Runs `kernel` once for each core, one after the other, in the order asked for.
inline Launch run(const Soc& soc, Memory& memory, uint32_t block_dim, Options options,
                  const std::function<void()>& kernel) {
    Launch launch(soc, memory, block_dim, std::move(options));
    memory.forget_launch();
    std::vector<uint32_t> order = launch.options.core_order;
    for (uint32_t core = 0; order.size() < block_dim; ++core)
        if (std::find(order.begin(), order.end(), core) == order.end()) order.push_back(core);
    for (const uint32_t id : order) {
        if (id >= block_dim) continue;
        Core core(launch, id);
        current_core = &core;
        try {
            kernel();
            core.finish();
        } catch (const Hang&) {
        }
        current_core = nullptr;
    }
    return launch;
}

inline Core& core() {
    if (current_core == nullptr) throw std::logic_error("a device call outside of twin::run");
    return *current_core;
}

}  // namespace twin
