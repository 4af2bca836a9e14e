// Named arrays, and the flat file that carries cases to the runner and results back (written and read in Python by
// qwen_npu/rgdr/twin.py). Little-endian: "QNTWIN1\0", count; each case: name, count; each array: name, type, rank,
// dims (int64), bytes. Text is a length and its bytes; counts, lengths, type and rank are uint32.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.h"

namespace cases {

enum Type : uint32_t { F16 = 0, BF16, F32, F64, I32, I64, U8 };

inline size_t type_bytes(Type type) {
    static const size_t sizes[] = {2, 2, 4, 8, 4, 8, 1};
    return sizes[type];
}

struct Array {
    Type type = F32;
    std::vector<int64_t> dims;
    std::vector<uint8_t> bytes;

    Array() = default;
    Array(Type type, std::vector<int64_t> dims) : type(type), dims(std::move(dims)), bytes(size() * type_bytes(type)) {}
    size_t size() const {
        size_t count = 1;
        for (const int64_t dim : dims) count *= static_cast<size_t>(dim);
        return count;
    }
    double real(size_t index) const {
        const uint8_t* at = bytes.data() + index * type_bytes(type);
        switch (type) {
            case F16: return twin::Number<half>::load(at);
            case BF16: return twin::Number<bfloat16_t>::load(at);
            case F32: return twin::Number<float>::load(at);
            case F64: {
                double value;
                std::memcpy(&value, at, sizeof value);
                return value;
            }
            default: return static_cast<double>(integer(index));
        }
    }
    int64_t integer(size_t index) const {
        const uint8_t* at = bytes.data() + index * type_bytes(type);
        if (type == I64) {
            int64_t value;
            std::memcpy(&value, at, sizeof value);
            return value;
        }
        if (type != I32) throw std::runtime_error("not an array of integers");
        int32_t value;
        std::memcpy(&value, at, sizeof value);
        return value;
    }
    void set(size_t index, double value) {
        uint8_t* at = bytes.data() + index * type_bytes(type);
        switch (type) {
            case F16: return twin::Number<half>::store(at, static_cast<float>(value));
            case BF16: return twin::Number<bfloat16_t>::store(at, static_cast<float>(value));
            case F32: return twin::Number<float>::store(at, static_cast<float>(value));
            case F64: std::memcpy(at, &value, sizeof value); return;
            default: set_integer(index, static_cast<int64_t>(value));
        }
    }
    void set_integer(size_t index, int64_t value) {
        uint8_t* at = bytes.data() + index * type_bytes(type);
        if (type == I64) {
            std::memcpy(at, &value, sizeof value);
        } else {
            const int32_t small = static_cast<int32_t>(value);
            std::memcpy(at, &small, sizeof small);
        }
    }
};

// query, key, value, beta, state, lengths, indices; may hold g, gk, accepted, scale, pad_slot and expectations.
struct Case {
    std::string name;
    std::map<std::string, Array> arrays;
    bool has(const std::string& key) const { return arrays.count(key) != 0; }
    const Array& at(const std::string& key) const {
        const auto found = arrays.find(key);
        if (found == arrays.end()) throw std::runtime_error("case " + name + " has no array " + key);
        return found->second;
    }
};

namespace detail {

inline void put(std::ostream& out, uint32_t value) { out.write(reinterpret_cast<const char*>(&value), sizeof value); }
inline void put(std::ostream& out, const std::string& text) {
    put(out, static_cast<uint32_t>(text.size()));
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
}
inline uint32_t get_number(std::istream& in) {
    uint32_t value = 0;
    in.read(reinterpret_cast<char*>(&value), sizeof value);
    return value;
}
inline std::string get_text(std::istream& in) {
    const uint32_t length = get_number(in);
    if (!in || length > (1u << 24)) throw std::runtime_error("damaged case file");
    std::string text(length, '\0');
    in.read(text.data(), length);
    return text;
}
constexpr char magic[8] = {'Q', 'N', 'T', 'W', 'I', 'N', '1', '\0'};

}  // namespace detail

inline void save(const std::string& path, const std::vector<Case>& all) {
    std::ofstream out(path, std::ios::binary);
    out.write(detail::magic, sizeof detail::magic);
    detail::put(out, static_cast<uint32_t>(all.size()));
    for (const Case& one : all) {
        detail::put(out, one.name);
        detail::put(out, static_cast<uint32_t>(one.arrays.size()));
        for (const auto& [key, array] : one.arrays) {
            detail::put(out, key);
            detail::put(out, static_cast<uint32_t>(array.type));
            detail::put(out, static_cast<uint32_t>(array.dims.size()));
            out.write(reinterpret_cast<const char*>(array.dims.data()),
                      static_cast<std::streamsize>(array.dims.size() * sizeof(int64_t)));
            out.write(reinterpret_cast<const char*>(array.bytes.data()),
                      static_cast<std::streamsize>(array.bytes.size()));
        }
    }
    out.flush();
    if (!out) throw std::runtime_error("cannot write " + path);
}

inline std::vector<Case> load(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    char found[sizeof detail::magic] = {};
    in.read(found, sizeof found);
    if (!in || std::memcmp(found, detail::magic, sizeof found) != 0)
        throw std::runtime_error(path + " is no case file");
    std::vector<Case> all(detail::get_number(in));
    for (Case& one : all) {
        one.name = detail::get_text(in);
        for (uint32_t left = detail::get_number(in); left > 0; --left) {
            const std::string key = detail::get_text(in);
            Array array;
            array.type = static_cast<Type>(detail::get_number(in));
            array.dims.resize(detail::get_number(in));
            in.read(reinterpret_cast<char*>(array.dims.data()),
                    static_cast<std::streamsize>(array.dims.size() * sizeof(int64_t)));
            array.bytes.resize(array.size() * type_bytes(array.type));
            in.read(reinterpret_cast<char*>(array.bytes.data()), static_cast<std::streamsize>(array.bytes.size()));
            if (!in) throw std::runtime_error(path + " is cut short");
            one.arrays[key] = std::move(array);
        }
    }
    return all;
}

}  // namespace cases
