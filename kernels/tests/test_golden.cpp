// The float64 answers of the op: our own reference agrees with them, and so does the kernel on the twin.
// Cases that 310P cannot take are refused by the host tiling.
#include "check.h"
#include "harness.h"

namespace {

const cases::Array& answer(const cases::Case& c, const char* key) { return c.at(key); }

void agrees(const cases::Case& c) {
    const reference::Answer ours = reference::answer_of(c);
    for (size_t i = 0; i < ours.out.size(); ++i)
        CHECK(std::abs(ours.out[i] - answer(c, "out64").real(i)) <= 1e-9, c.name + " out " + std::to_string(i));
    for (size_t i = 0; i < ours.state.size(); ++i)
        CHECK(std::abs(ours.state[i] - answer(c, "state64").real(i)) <= 1e-9, c.name + " state " + std::to_string(i));

    const bool taken = c.at("state").type == cases::F16 && c.at("query").type == cases::F16 &&
                       c.at("query").dims[2] % 16 == 0 && c.at("value").dims[2] % 16 == 0;
    for (const bool backward : {false, true}) {
        harness::Settings settings;
        for (uint32_t core = 8; backward && core > 0; --core) settings.core_order.push_back(core - 1);
        const harness::Result result = harness::run(harness::op_package(), c, twin::ascend310p(), settings);
        CHECK(result.refused == !taken, c.name + " " + result.reason);
        if (result.refused) {
            std::printf("%-26s refused: %s\n", c.name.c_str(), result.reason.c_str());
            return;
        }
        CHECK(result.findings.empty(), c.name + "\n" + result.findings.text());
        const reference::Distance out = reference::distance(result.out, ours.out);
        const reference::Distance state = reference::distance(result.state, ours.state);
        for (const reference::Distance& d : {out, state}) CHECK(d.within_published() && d.rounded_once(), c.name);
        if (!backward)
            std::printf("%-26s out: nrmse %.1e, max abs %.1e; state: nrmse %.1e, max abs %.1e; %zu of %zu not the "
                        "rounded answer\n",
                        c.name.c_str(), out.nrmse, out.max_abs, state.nrmse, state.max_abs, out.unlike + state.unlike,
                        out.elements + state.elements);
    }
}

}  // namespace

int main(int count, char** values) {
    for (int i = 1; i < count; ++i)
        for (const cases::Case& c : cases::load(values[i])) agrees(c);
    return check::done("golden");
}
