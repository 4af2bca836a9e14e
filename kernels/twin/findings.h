// What the twin found: which rule, at which line of the kernel, in which buffer and bytes, on which pipe.
#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace twin {

// The numbers are those of the list of checks in kernels/rgdr/README.md.
enum class Check : uint8_t {
    Bounds = 1,
    Budget = 2,
    Alignment = 3,
    Undefined = 4,
    Order = 5,
    Queue = 6,
    Soc = 7,
    Cores = 8,
    Ownership = 9,
};

inline const char* check_name(Check check) {
    static const char* const names[] = {"",      "bounds", "budget", "alignment", "undefined",
                                        "order", "queue",  "soc",    "cores",     "ownership"};
    return names[static_cast<int>(check)];
}

enum Pipe : uint8_t { PIPE_OF_S = 0, PIPE_OF_V, PIPE_OF_MTE2, PIPE_OF_MTE3, PIPES };

inline const char* pipe_name(Pipe pipe) {
    static const char* const names[] = {"S", "V", "MTE2", "MTE3", "-"};
    return names[pipe];
}

// Where in the kernel a call stands; taken by default arguments, so that the kernel needs no change.
struct Where {
    const char* file = "";
    int line = 0;
    static constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return Where{file, line};
    }
    std::string text() const {
        std::string name = file;
        const size_t slash = name.rfind('/');
        if (slash != std::string::npos) name = name.substr(slash + 1);
        return name + ":" + std::to_string(line);
    }
};

struct Finding {
    Check check;
    Where where;
    std::string buffer;
    uint64_t first_byte;  // within the buffer; [first, last)
    uint64_t last_byte;
    Pipe pipe;
    int core;
    std::string text;
    uint64_t times = 1;

    std::string line() const {
        std::ostringstream out;
        out << "check " << static_cast<int>(check) << " (" << check_name(check) << ") at " << where.text() << ", core "
            << core << ", pipe " << pipe_name(pipe) << ", " << buffer << " bytes [" << first_byte << ", " << last_byte
            << "): " << text;
        if (times > 1) out << " (" << times << " times)";
        return out.str();
    }
};

// One entry for each rule, line, buffer and kind of message; the first occurrence gives the bytes.
class Findings {
  public:
    void add(Finding finding, const std::string& kind) {
        const Key key{finding.check, finding.where.line, finding.buffer, kind};
        auto [place, fresh] = index_.emplace(key, all_.size());
        if (fresh) all_.push_back(std::move(finding));
        else ++all_[place->second].times;
    }
    void add_all(const Findings& other) {
        for (const Finding& finding : other.all_) all_.push_back(finding);
    }
    bool empty() const { return all_.empty(); }
    size_t size() const { return all_.size(); }
    const std::vector<Finding>& all() const { return all_; }
    size_t count(Check check) const {
        size_t found = 0;
        for (const Finding& finding : all_) found += finding.check == check;
        return found;
    }
    std::string text() const {
        std::string out;
        for (const Finding& finding : all_) out += finding.line() + "\n";
        return out;
    }

  private:
    using Key = std::tuple<Check, int, std::string, std::string>;
    std::vector<Finding> all_;
    std::map<Key, size_t> index_;
};

}  // namespace twin
