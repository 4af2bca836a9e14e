#include "plan.hpp"

namespace qwen_npu {
namespace {

std::string number(int64_t x) { return std::to_string(x); }

std::string lay_out(Plan& plan, int64_t tokens, int64_t sequences, Integers lengths, int64_t least, int64_t most) {
  plan.start.assign(sequences, 0);
  plan.length.assign(sequences, 0);
  plan.read.assign(sequences, 0);
  plan.write.assign(tokens, -1);
  int64_t sum = 0;
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t n = lengths.at(i);
    if (n < least || n > most) {
      return "sequence " + number(i) + ": actual_seq_lengths is " + number(n) + ", allowed " + number(least) + ".." +
             number(most);
    }
    plan.start[i] = sum;
    plan.length[i] = n;
    sum += n;
  }
  if (sum != tokens) {
    return "actual_seq_lengths add up to " + number(sum) + " but there are " + number(tokens) + " tokens";
  }
  return "";
}

}  // namespace

std::string plan_recurrent(Plan& plan, int64_t tokens, int64_t slots, int64_t sequences, Integers lengths,
                           Integers indices, int64_t row_width, const Integers* accepted, int64_t max_length) {
  const bool rows = row_width > 0;
  std::string wrong = lay_out(plan, tokens, sequences, lengths, 1, max_length);
  if (!wrong.empty()) return wrong;
  plan.owner.assign(slots, -1);
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t start = plan.start[i], length = plan.length[i];
    const int64_t width = rows ? row_width : length;
    const int64_t base = rows ? i * row_width : start;
    if (length > width) {
      return "sequence " + number(i) + ": " + number(length) + " tokens but a row of " + number(width) + " slots";
    }
    int64_t a = accepted ? accepted->at(i) : 1;
    if (a < 0 || a > width) {
      return "sequence " + number(i) + ": num_accepted_tokens is " + number(a) + ", allowed 0.." + number(width);
    }
    if (a == 0) a = 1;
    for (int64_t j = 0; j < width; ++j) {
      if (j >= length && j != a - 1) continue;  // a column that this call neither reads nor writes
      const int64_t slot = indices.at(base + j);
      if (slot < 0 || slot >= slots) {
        return "sequence " + number(i) + ": slot " + number(slot) + " at position " + number(j) + ", allowed 0.." +
               number(slots - 1);
      }
      if (j < length) {
        if (plan.owner[slot] >= 0 && plan.owner[slot] != i) {
          return "slot " + number(slot) + " is written by sequences " + number(plan.owner[slot]) + " and " + number(i);
        }
        plan.owner[slot] = i;
        plan.write[start + j] = slot;
      }
    }
    plan.read[i] = indices.at(base + a - 1);
  }
  for (int64_t i = 0; i < sequences; ++i) {
    const int64_t owner = plan.owner[plan.read[i]];
    if (owner >= 0 && owner != i) {
      return "sequence " + number(i) + " reads slot " + number(plan.read[i]) + ", which sequence " + number(owner) +
             " writes";
    }
  }
  return "";
}

std::string plan_chunk(Plan& plan, int64_t tokens, int64_t sequences, Integers lengths) {
  std::string wrong = lay_out(plan, tokens, sequences, lengths, 0, tokens);
  if (!wrong.empty()) return wrong;
  plan.owner.assign(sequences, -1);
  for (int64_t i = 0; i < sequences; ++i) {
    plan.read[i] = i;
    if (plan.length[i] > 0) {
      plan.owner[i] = i;
      plan.write[plan.start[i] + plan.length[i] - 1] = i;
    }
  }
  return "";
}

}  // namespace qwen_npu
