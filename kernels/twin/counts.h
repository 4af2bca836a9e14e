// What one launch did, counted: instructions, waits, barriers, bytes. No time is derived from it.
#pragma once

#include <cstdint>
#include <map>
#include <sstream>
#include <string>

#include "findings.h"

namespace twin {

struct Counts {
    uint64_t vector_instructions = 0;             // as the hardware issues them: at most 255 repeats each
    uint64_t vector_repeats = 0;                  // of 256 bytes at most
    std::map<std::string, uint64_t> vector_calls; // by name of the call
    std::map<std::string, uint64_t> flag_waits;   // by event, e.g. "V_S"
    std::map<std::string, uint64_t> barriers;     // by pipe, "ALL" for all of them
    uint64_t queue_waits = 0;                     // AllocTensor and DeQue: order between a copy pipe and V
    std::map<std::string, uint64_t> read_bytes;   // MTE2, by GM tensor
    std::map<std::string, uint64_t> written_bytes;       // MTE3, by GM tensor
    std::map<std::string, uint64_t> scalar_read_bytes;   // S, GM GetValue, by GM tensor
    std::map<std::string, uint64_t> scalar_written_bytes;
    uint64_t copies_in = 0, copies_out = 0;
    uint64_t ub_bytes = 0;                        // most that any core asked of the pipe

    static uint64_t sum(const std::map<std::string, uint64_t>& parts) {
        uint64_t total = 0;
        for (const auto& [name, value] : parts) total += value;
        return total;
    }

    // Everything after which S stands still until V has caught up.
    uint64_t vector_to_scalar_waits() const {
        const auto flags = flag_waits.find("V_S");
        const auto all = barriers.find("ALL");
        return (flags == flag_waits.end() ? 0 : flags->second) + (all == barriers.end() ? 0 : all->second);
    }

    std::string json() const {
        std::ostringstream out;
        const auto object = [&](const char* key, const std::map<std::string, uint64_t>& parts) {
            out << ", \"" << key << "\": {";
            const char* comma = "";
            for (const auto& [name, value] : parts) {
                out << comma << "\"" << name << "\": " << value;
                comma = ", ";
            }
            out << "}";
        };
        out << "{\"vector_instructions\": " << vector_instructions << ", \"vector_repeats\": " << vector_repeats
            << ", \"vector_to_scalar_waits\": " << vector_to_scalar_waits() << ", \"queue_waits\": " << queue_waits
            << ", \"copies_in\": " << copies_in << ", \"copies_out\": " << copies_out << ", \"ub_bytes\": " << ub_bytes
            << ", \"mte2_bytes\": " << sum(read_bytes) << ", \"mte3_bytes\": " << sum(written_bytes)
            << ", \"scalar_bytes\": " << sum(scalar_read_bytes) + sum(scalar_written_bytes);
        object("vector_calls", vector_calls);
        object("flag_waits", flag_waits);
        object("barriers", barriers);
        object("read_bytes", read_bytes);
        object("written_bytes", written_bytes);
        object("scalar_read_bytes", scalar_read_bytes);
        object("scalar_written_bytes", scalar_written_bytes);
        out << "}";
        return out.str();
    }
};

}  // namespace twin
