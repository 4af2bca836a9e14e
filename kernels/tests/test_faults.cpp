// Each of the nine checks: a small kernel with the fault is found, and the same kernel done right is not.
#include <functional>

#include "check.h"
#include "kernel_operator.h"

namespace {

using namespace AscendC;
using twin::Check;

constexpr uint32_t kCount = 64;  // floats in the tensors of most of these kernels

// Runs `kernel` with three tensors of floats: two to read, one to write.
struct Bench {
    twin::Memory memory;
    twin::GmTensor *a, *b, *out;
    explicit Bench(uint32_t count = kCount) {
        std::vector<float> values(count);
        for (uint32_t i = 0; i < count; ++i) values[i] = static_cast<float>(i) + 1.0f;
        a = &memory.add("a", values.data(), count * sizeof(float));
        b = &memory.add("b", values.data(), count * sizeof(float));
        out = &memory.add("out", nullptr, count * sizeof(float), false);
    }
    twin::Launch run(const std::function<void(Bench&)>& kernel, const twin::Soc& soc = twin::ascend310p(),
                     uint32_t cores = 1, twin::Options options = {}) {
        return twin::run(soc, memory, cores, options, [&] { kernel(*this); });
    }
    GlobalTensor<float> tensor(twin::GmTensor* gm) const {
        GlobalTensor<float> global;
        global.SetGlobalBuffer(reinterpret_cast<float*>(gm->data.data()), gm->data.size() / sizeof(float));
        return global;
    }
    double value(uint32_t index) const { return twin::Number<float>::load(&out->data[index * 4]); }
};

// Right: exactly no finding. Wrong: this check is among the findings, with the pipe and buffer named.
void expect(const char* what, Check check, const twin::Launch& right, const twin::Launch& wrong,
            const std::string& named, const std::string& pipe) {
    CHECK(right.findings.empty(), std::string(what) + " done right:\n" + right.findings.text());
    if (!CHECK(wrong.findings.count(check) > 0, std::string(what) + " is not found:\n" + wrong.findings.text())) return;
    bool told = false;
    for (const twin::Finding& finding : wrong.findings.all())
        told = told || (finding.check == check && finding.line().find(named) != std::string::npos &&
                        finding.line().find("pipe " + pipe) != std::string::npos &&
                        (finding.where.line > 0 || finding.where.file == std::string("end of kernel")));
    CHECK(told, std::string(what) + " does not name " + named + " on " + pipe + ":\n" + wrong.findings.text());
}

struct Queues {
    TPipe pipe;
    TQue<TPosition::VECIN, 2> in;
    TQue<TPosition::VECOUT, 2> out;
    TBuf<TPosition::VECCALC> work;
    explicit Queues(uint32_t bytes = kCount * 4, uint32_t work_bytes = kCount * 4) {
        pipe.InitBuffer(in, 2, bytes);
        pipe.InitBuffer(out, 2, bytes);
        pipe.InitBuffer(work, work_bytes);
    }
    LocalTensor<float> load(const GlobalTensor<float>& from, uint32_t count) {
        LocalTensor<float> tensor = in.AllocTensor<float>();
        DataCopy(tensor, from, count);
        in.EnQue(tensor);
        return in.DeQue<float>();
    }
    void store(const GlobalTensor<float>& to, LocalTensor<float> tensor, uint32_t count) {
        out.EnQue(tensor);
        tensor = out.DeQue<float>();
        DataCopy(to, tensor, count);
        out.FreeTensor(tensor);
    }
};

// out = 2 * a, the kernel that most faults are seeded into.
void doubled(Bench& bench, uint32_t count, uint32_t stored) {
    Queues q;
    LocalTensor<float> x = q.load(bench.tensor(bench.a), kCount);
    LocalTensor<float> y = q.out.AllocTensor<float>();
    Muls(y, x, 2.0f, count);
    q.in.FreeTensor(x);
    q.store(bench.tensor(bench.out), y, stored);
}

void bounds() {
    const auto right = Bench().run([](Bench& b) { doubled(b, kCount, kCount); });
    expect("beyond a queue's buffer", Check::Bounds, right,
           Bench().run([](Bench& b) { doubled(b, kCount + 8, kCount); }), "VECIN queue", "V");
    expect("beyond a global tensor", Check::Bounds, right, Bench().run([](Bench& b) {
        Queues q(2 * kCount * 4);
        LocalTensor<float> x = q.load(b.tensor(b.a), kCount + 8);
        q.in.FreeTensor(x);
    }), "a bytes", "MTE2");
    // By identity: behind `a` there is more memory, but it is not a's.
    expect("beyond a global tensor, into another", Check::Bounds, right, Bench().run([](Bench& b) {
        Queues q;
        LocalTensor<float> x = q.load(b.tensor(b.a)[(b.b->data.data() - b.a->data.data()) / 4], kCount);
        q.in.FreeTensor(x);
    }), "a bytes", "MTE2");
    const auto carved = [](uint32_t elements, uint32_t offset) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work;
            pipe.InitBuffer(work, 256);
            LocalTensor<float> x = work.GetWithOffset<float>(elements, offset);
            Duplicate(x, 1.0f, elements);
        });
    };
    expect("beyond a TBuf: offset in bytes, size in elements", Check::Bounds, carved(32, 128), carved(64, 128), "TBuf",
           "S");
    const auto part = [](uint32_t count) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work;
            pipe.InitBuffer(work, 512);
            Duplicate(work.GetWithOffset<float>(64, 0), 1.0f, count);
        });
    };
    expect("beyond a LocalTensor, inside its TBuf", Check::Bounds, part(64), part(72), "TBuf", "V");
    const auto user = [](uint32_t bytes) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> big, last;
            pipe.InitBuffer(big, 248 * 1024 - bytes);
            pipe.InitBuffer(last, 256);
            Duplicate(last.Get<float>(), 1.0f, 64);
        });
    };
    expect("beyond the user's part", Check::Bounds, user(256), user(224), "unified buffer", "V");
}

void budget() {
    const auto carve = [](uint32_t bytes, uint64_t expected) {
        twin::Options options;
        options.expected_ub_bytes = expected;
        return Bench().run(
            [=](Bench&) {
                TPipe pipe;
                TBuf<TPosition::VECCALC> work;
                pipe.InitBuffer(work, bytes);
            },
            twin::ascend910b(), 1, options);
    };
    expect("more than the chip has", Check::Budget, carve(184 * 1024, 0), carve(184 * 1024 + 1, 0), "TBuf", "-");
    expect("host and kernel disagree", Check::Budget, carve(1024, 1024), carve(1056, 1024), "the host tiling computed",
           "-");
    const auto buffers = [](uint32_t count) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            std::vector<TBuf<TPosition::VECCALC>> all(count);
            for (auto& one : all) pipe.InitBuffer(one, 32);
        });
    };
    expect("65 buffers", Check::Budget, buffers(64), buffers(65), "more than 64", "-");
}

void alignment() {
    const auto from = [](uint32_t element) {
        return Bench().run([=](Bench& b) {
            Queues q(512);
            LocalTensor<float> x = q.load(b.tensor(b.a), kCount);
            LocalTensor<float> y = q.out.AllocTensor<float>();
            Muls(y, x[element], 2.0f, 48);
            q.in.FreeTensor(x);
            q.store(b.tensor(b.out), y, 48);
        });
    };
    expect("an operand off its boundary", Check::Alignment, from(8), from(7), "VECIN queue", "V");
    // Rows of 28 floats, stored as 28: the copy reaches 4 floats into the neighbour row.
    const auto rows = [](uint32_t count) {
        return Bench(256).run([=](Bench& b) {
            Queues q(512);
            for (uint32_t row = 0; row < 2; ++row) {
                LocalTensor<float> y = q.out.AllocTensor<float>();
                Duplicate(y, 1.0f, 32);
                q.store(b.tensor(b.out)[row * 64], y, count);
            }
        });
    };
    expect("a store rounded up", Check::Alignment, rows(24), rows(28), "out bytes [112, 128)", "MTE3");
    const auto place = [](uint32_t element) {
        return Bench().run([=](Bench& b) {
            TPipe pipe;
            TQue<TPosition::VECIN, 1> in;
            pipe.InitBuffer(in, 1, 512);
            LocalTensor<float> x = in.AllocTensor<float>();
            DataCopy(x[element], b.tensor(b.a)[4], 32);  // global memory need not be aligned
            in.EnQue(x);
            in.FreeTensor(in.DeQue<float>());
        });
    };
    expect("a copy to an unaligned place", Check::Alignment, place(8), place(4), "VECIN queue", "MTE2");
}

void undefined() {
    const auto right = Bench().run([](Bench& b) { doubled(b, kCount, kCount); });
    expect("a store of lanes nobody computed", Check::Undefined, right,
           Bench().run([](Bench& b) { doubled(b, kCount - 16, kCount); }), "VECOUT queue", "MTE3");
    // Undefined lanes may be computed with; what counts is where they end.
    const auto reduce = [](uint32_t loaded) {
        Bench bench;
        auto launch = bench.run([=](Bench& b) {
            Queues q;
            LocalTensor<float> x = q.load(b.tensor(b.a), loaded);
            LocalTensor<float> y = q.out.AllocTensor<float>();
            LocalTensor<float> w = q.work.Get<float>();
            Muls(w, x, 1.0f, kCount);
            PipeBarrier<PIPE_V>();
            Duplicate(y, 0.0f, 8);
            PipeBarrier<PIPE_V>();
            WholeReduceSum(y, w, 64, 1, 1, 1, 8);
            q.in.FreeTensor(x);
            q.store(b.tensor(b.out), y, 8);
        });
        return std::make_pair(std::move(launch), bench.value(0));
    };
    const auto sound = reduce(64), tainted = reduce(56);
    expect("a sum over lanes nobody loaded", Check::Undefined, sound.first, tainted.first, "TBuf", "V");
    CHECK(sound.second == 64.0 * 65.0 / 2.0);
    CHECK(std::isnan(tainted.second), "poison shows in the numbers too");
    const auto scalar = [](uint32_t element) {
        return Bench().run([=](Bench& b) {
            Queues q;
            LocalTensor<float> x = q.load(b.tensor(b.a), 32);
            const TEventID id = q.pipe.FetchEventID(HardEvent::MTE2_S);
            SetFlag<HardEvent::MTE2_S>(id);
            WaitFlag<HardEvent::MTE2_S>(id);
            (void)x.GetValue(element);
            q.in.FreeTensor(x);
        });
    };
    expect("GetValue of what nothing defined", Check::Undefined, scalar(31), scalar(32), "GetValue", "S");
    // A buffer that comes round again does not hold its old contents.
    const auto again = [](bool fill) {
        return Bench().run([=](Bench& b) {
            TPipe pipe;
            TQue<TPosition::VECOUT, 1> out;
            pipe.InitBuffer(out, 1, 256);
            for (int round = 0; round < 2; ++round) {
                LocalTensor<float> y = out.AllocTensor<float>();
                if (round == 0 || fill) Duplicate(y, 1.0f, 64);
                out.EnQue(y);
                y = out.DeQue<float>();
                DataCopy(b.tensor(b.out), y, 64);
                PipeBarrier<PIPE_MTE3>();
                out.FreeTensor(y);
            }
        });
    };
    expect("stale contents of a queue's buffer", Check::Undefined, again(true), again(false), "VECOUT", "MTE3");
}

void order() {
    // GM to UB with a barrier of the copy pipe where a flag to V belongs.
    const auto copied = [](bool flag) {
        return Bench().run([=](Bench& b) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work;
            pipe.InitBuffer(work, 256);
            LocalTensor<float> x = work.Get<float>();
            DataCopy(x, b.tensor(b.a), kCount);
            if (flag) {
                SetFlag<HardEvent::MTE2_V>(0);
                WaitFlag<HardEvent::MTE2_V>(0);
            } else {
                PipeBarrier<PIPE_MTE2>();
            }
            Exp(x, x, kCount);
        });
    };
    expect("a barrier in place of a flag", Check::Order, copied(true), copied(false), "what MTE2 wrote", "V");
    const auto dependent = [](bool barrier, bool automatic) {
        twin::Options options;
        options.automatic_vector_barriers = automatic;
        return Bench().run(
            [=](Bench&) {
                TPipe pipe;
                TBuf<TPosition::VECCALC> work;
                pipe.InitBuffer(work, 256);
                Duplicate(work.Get<float>(), 1.0f, 64);
                if (barrier) PipeBarrier<PIPE_V>();
                Exp(work.Get<float>(), work.Get<float>(), 64);
            },
            twin::ascend310p(), 1, options);
    };
    expect("a missing V barrier", Check::Order, dependent(true, false), dependent(false, false), "what V wrote", "V");
    CHECK(dependent(false, true).findings.empty(), "automatic barriers");
    // Two stores to one place.
    const auto stores = [](bool barrier, bool automatic) {
        twin::Options options;
        options.automatic_vector_barriers = automatic;
        return Bench().run(
            [=](Bench& b) {
                Queues q;
                for (int round = 0; round < 2; ++round) {
                    LocalTensor<float> y = q.out.AllocTensor<float>();
                    Duplicate(y, 1.0f, 64);
                    q.store(b.tensor(b.out), y, 64);
                    if (barrier) PipeBarrier<PIPE_MTE3>();
                }
            },
            twin::ascend310p(), 1, options);
    };
    expect("unordered stores", Check::Order, stores(true, false), stores(false, false), "what MTE3 wrote", "MTE3");
    CHECK(stores(false, true).findings.count(Check::Order) > 0, "automatic barriers are those of V only");
    const auto scalar = [](bool flag) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work;
            pipe.InitBuffer(work, 256);
            Duplicate(work.Get<float>(), 1.0f, 64);
            if (flag) {
                SetFlag<HardEvent::V_S>(0);
                WaitFlag<HardEvent::V_S>(0);
            }
            (void)work.Get<float>().GetValue(0);
        });
    };
    expect("a scalar read before V is done", Check::Order, scalar(true), scalar(false), "what V wrote", "S");
    const auto repeat = [](uint32_t stride) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work;
            pipe.InitBuffer(work, 1024);
            LocalTensor<float> x = work.Get<float>();
            Duplicate(x, 1.0f, 256);
            PipeBarrier<PIPE_V>();
            Mul(x[stride * 8], x, x, 64, 2, BinaryRepeatParams(1, 1, 1, 8, 8, 8));
        });
    };
    expect("a repeat that feeds the next", Check::Order, repeat(0), repeat(8), "an earlier repeat", "V");
    // Without the way back of a queue, the next copy overwrites what V still reads.
    const auto reuse = [](bool flag) {
        return Bench().run([=](Bench& b) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work, sum;
            pipe.InitBuffer(work, 256);
            pipe.InitBuffer(sum, 512);
            for (int round = 0; round < 2; ++round) {
                DataCopy(work.Get<float>(), b.tensor(b.a), kCount);
                SetFlag<HardEvent::MTE2_V>(0);
                WaitFlag<HardEvent::MTE2_V>(0);
                Muls(sum.Get<float>()[round * 64], work.Get<float>(), 1.0f, 64);
                if (flag) {
                    SetFlag<HardEvent::V_MTE2>(0);
                    WaitFlag<HardEvent::V_MTE2>(0);
                }
            }
        });
    };
    expect("overwritten while V reads", Check::Order, reuse(true), reuse(false), "V reads", "MTE2");
}

void queues_and_flags() {
    const auto flags = [](const std::function<void()>& wrong) {
        return Bench().run([=](Bench&) { wrong(); });
    };
    const auto right = flags([] {
        SetFlag<HardEvent::S_V>(7);
        WaitFlag<HardEvent::S_V>(7);
    });
    expect("set twice", Check::Queue, right, flags([] {
        SetFlag<HardEvent::S_V>(1);
        SetFlag<HardEvent::S_V>(1);
        WaitFlag<HardEvent::S_V>(1);
    }), "second time", "S");
    expect("never waited for", Check::Queue, right, flags([] { SetFlag<HardEvent::S_V>(1); }), "nobody waits", "S");
    expect("never set", Check::Queue, right, flags([] { WaitFlag<HardEvent::S_V>(1); }), "hangs", "V");
    expect("id 8", Check::Queue, right, flags([] { SetFlag<HardEvent::S_V>(8); }), "0..7", "S");

    const auto queue = [](const std::function<void(Queues&, Bench&)>& body) {
        return Bench().run([=](Bench& b) {
            Queues q;
            body(q, b);
        });
    };
    const auto sound = queue([](Queues& q, Bench& b) { q.in.FreeTensor(q.load(b.tensor(b.a), kCount)); });
    expect("leaked", Check::Queue, sound, queue([](Queues& q, Bench& b) { q.load(b.tensor(b.a), kCount); }), "leaked",
           "-");
    expect("no free buffer", Check::Queue, sound, queue([](Queues& q, Bench&) {
        for (int i = 0; i < 3; ++i) q.in.AllocTensor<float>();
    }), "hangs", "MTE2");
    expect("nothing to take out", Check::Queue, sound, queue([](Queues& q, Bench&) { q.in.DeQue<float>(); }), "hangs",
           "V");
    expect("freed to another queue", Check::Queue, sound, queue([](Queues& q, Bench& b) {
        LocalTensor<float> x = q.load(b.tensor(b.a), kCount);
        q.out.FreeTensor(x);
        q.in.FreeTensor(x);
    }), "does not belong", "V");
    expect("freed without having been in the queue", Check::Queue, sound, queue([](Queues& q, Bench&) {
        q.in.FreeTensor(q.in.AllocTensor<float>());
    }), "not dequeued", "MTE2");
    expect("freed twice", Check::Queue, sound, queue([](Queues& q, Bench& b) {
        LocalTensor<float> x = q.load(b.tensor(b.a), kCount);
        q.in.FreeTensor(x);
        q.in.FreeTensor(x);
    }), "freed before", "MTE2");
    expect("enqueued twice", Check::Queue, sound, queue([](Queues& q, Bench& b) {
        LocalTensor<float> x = q.load(b.tensor(b.a), kCount);
        q.in.EnQue(x);
        q.in.FreeTensor(x);
    }), "not occupied", "MTE2");
    expect("used after it was freed", Check::Queue, sound, queue([](Queues& q, Bench& b) {
        LocalTensor<float> x = q.load(b.tensor(b.a), kCount);
        q.in.FreeTensor(x);
        Muls(q.work.Get<float>(), x, 1.0f, 64);
    }), "after FreeTensor", "V");
    expect("used while enqueued", Check::Queue, sound, queue([](Queues& q, Bench& b) {
        LocalTensor<float> x = q.in.AllocTensor<float>();
        DataCopy(x, b.tensor(b.a), kCount);
        q.in.EnQue(x);
        Muls(q.work.Get<float>(), x, 1.0f, 64);
        q.in.FreeTensor(q.in.DeQue<float>());
    }), "between EnQue and DeQue", "V");
    const auto deep = [](uint32_t count) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TQue<TPosition::VECOUT, 2> out;
            pipe.InitBuffer(out, 3, 256);
            for (uint32_t i = 0; i < count; ++i) {
                LocalTensor<float> y = out.AllocTensor<float>();
                Duplicate(y, 1.0f, 64);
                out.EnQue(y);
            }
            for (uint32_t i = 0; i < count; ++i) out.FreeTensor(out.DeQue<float>());
        });
    };
    expect("too deep", Check::Queue, deep(2), deep(3), "deep", "V");
    const auto live = [](uint32_t count, const twin::Soc& soc) {
        return Bench().run(
            [=](Bench&) {
                TPipe pipe;
                TQue<TPosition::VECIN, 8> in;
                pipe.InitBuffer(in, count, 256);
                std::vector<LocalTensor<float>> all;
                for (uint32_t i = 0; i < count; ++i) all.push_back(in.AllocTensor<float>());
                for (auto& one : all) {
                    in.EnQue(one);
                    in.FreeTensor(in.DeQue<float>());
                }
            },
            soc);
    };
    expect("five live tensors on 910B", Check::Queue, live(4, twin::ascend910b()), live(5, twin::ascend910b()),
           "live tensors", "MTE2");
    CHECK(live(5, twin::ascend310p()).findings.empty(), "310P allows eight");
    // Buffers come round-robin: with a cursor that takes the first free one this write-after-write would not exist.
    Bench bench;
    const auto cursor = bench.run([](Bench&) {
        TPipe pipe;
        TQue<TPosition::VECOUT, 2> out;
        pipe.InitBuffer(out, 2, 256);
        LocalTensor<float> first = out.AllocTensor<float>();
        const uint64_t place = first.view().at;
        out.EnQue(first);
        out.FreeTensor(out.DeQue<float>());
        LocalTensor<float> second = out.AllocTensor<float>();
        CHECK(second.view().at != place);
        out.EnQue(second);
        out.FreeTensor(out.DeQue<float>());
    });
    CHECK(cursor.findings.empty(), cursor.findings.text());
}

void soc() {
    const auto padded = [](const twin::Soc& chip) {
        return Bench().run(
            [](Bench& b) {
                Queues q;
                LocalTensor<float> x = q.in.AllocTensor<float>();
                DataCopyPad(x, b.tensor(b.a), DataCopyExtParams(1, 20, 0, 0, 0),
                            DataCopyPadExtParams<float>(true, 0, 3, 0.0f));
                q.in.EnQue(x);
                q.in.FreeTensor(q.in.DeQue<float>());
            },
            chip);
    };
    expect("DataCopyPad on 310P", Check::Soc, padded(twin::ascend910b()), padded(twin::ascend310p()), "DataCopyPad",
           "MTE2");
    const auto casted = [](const twin::Soc& chip, auto narrow, RoundMode mode) {
        return Bench().run(
            [=](Bench&) {
                TPipe pipe;
                TBuf<TPosition::VECCALC> a, b;
                pipe.InitBuffer(a, 256);
                pipe.InitBuffer(b, 256);
                Duplicate(a.Get<float>(), 1.0f, 64);
                PipeBarrier<PIPE_V>();
                Cast(b.Get<decltype(narrow)>(), a.Get<float>(), mode, 64);
            },
            chip);
    };
    expect("bfloat16 on 310P", Check::Soc, casted(twin::ascend910b(), bfloat16_t{}, RoundMode::CAST_RINT),
           casted(twin::ascend310p(), bfloat16_t{}, RoundMode::CAST_RINT), "bfloat16", "V");
    expect("a cast that 310P lacks", Check::Soc, casted(twin::ascend310p(), half{}, RoundMode::CAST_ODD),
           casted(twin::ascend310p(), half{}, RoundMode::CAST_FLOOR), "no Cast from float to half", "V");
    expect("a cast that 910B lacks", Check::Soc, casted(twin::ascend910b(), bfloat16_t{}, RoundMode::CAST_TRUNC),
           casted(twin::ascend910b(), bfloat16_t{}, RoundMode::CAST_NONE), "no Cast from float to bfloat16", "V");
    const auto masked = [](uint64_t mask, uint32_t repeats, uint32_t stride) {
        return Bench().run([=](Bench&) {
            TPipe pipe;
            TBuf<TPosition::VECCALC> work, to;
            pipe.InitBuffer(work, 66 * 1024);
            pipe.InitBuffer(to, 66 * 1024);
            Duplicate(work.Get<float>(), 1.0f, 16384);
            PipeBarrier<PIPE_V>();
            LocalTensor<float> x = work.Get<float>();
            Mul(to.Get<float>(), x, x, mask, repeats, BinaryRepeatParams(1, 1, 1, 8, stride, stride));
        });
    };
    expect("mask 0", Check::Soc, masked(1, 2, 8), masked(0, 2, 8), "mask 0", "V");
    expect("mask 65 of fp32", Check::Soc, masked(64, 2, 8), masked(65, 2, 8), "mask 65", "V");
    expect("256 repeats", Check::Soc, masked(64, 255, 8), masked(64, 256, 8), "repeat 256", "V");
    expect("a repeat stride of 256 blocks", Check::Soc, masked(8, 2, 255), masked(8, 2, 256), "narrowed to 0", "V");
    const auto copied = [](uint32_t blocks, uint32_t gap) {
        return Bench(8192 * 8).run([=](Bench& b) {
            TPipe pipe;
            TQue<TPosition::VECIN, 1> in;
            pipe.InitBuffer(in, 1, 160 * 1024);
            LocalTensor<float> x = in.AllocTensor<float>();
            DataCopy(x, b.tensor(b.a), DataCopyParams(blocks, 1, gap, 0));
            in.EnQue(x);
            in.FreeTensor(in.DeQue<float>());
        });
    };
    expect("4096 blocks in a copy", Check::Soc, copied(4095, 0), copied(4096, 0), "blockCount 4096", "MTE2");
    expect("a gap of 65536 blocks", Check::Soc, copied(1, 65535), copied(1, 65536), "srcStride 65536", "MTE2");
}

void cores() {
    // Two cores, 24 floats each, next to each other: apart if the first starts on a block, else they share one.
    const auto shared = [](uint32_t first) {
        return Bench(128).run(
            [=](Bench& b) {
                Queues q(512);
                LocalTensor<float> y = q.out.AllocTensor<float>();
                Duplicate(y, 1.0f, 32);
                q.store(b.tensor(b.out)[first + GetBlockIdx() * 24], y, 24);
            },
            twin::ascend310p(), 2);
    };
    expect("one 32-byte block, disjoint bytes", Check::Cores, shared(0), shared(4), "same 32-byte block", "MTE3");
    const auto same = [](uint32_t step) {
        return Bench(128).run(
            [=](Bench& b) {
                Queues q(512);
                LocalTensor<float> y = q.out.AllocTensor<float>();
                Duplicate(y, 1.0f, 32);
                q.store(b.tensor(b.out)[GetBlockIdx() * step], y, 16);
            },
            twin::ascend310p(), 2);
    };
    expect("the same bytes", Check::Cores, same(16), same(8), "what core 0 wrote", "MTE3");
    const auto scalar = [](uint32_t step) {
        return Bench(128).run([=](Bench& b) { b.tensor(b.out).SetValue(GetBlockIdx() * step, 1.0f); },
                              twin::ascend310p(), 2);
    };
    expect("scalar stores in one 64-byte line", Check::Cores, scalar(16), scalar(8), "64-byte line", "S");
    const auto reads = [](bool own) {
        Bench bench(128);
        return bench.run(
            [=](Bench& b) {
                Queues q(512);
                const uint64_t at = GetBlockIdx() * 32, from = own ? at : 32 - at;
                LocalTensor<float> x = q.load(b.tensor(b.a)[from], 32);
                LocalTensor<float> y = q.out.AllocTensor<float>();
                Muls(y, x, 2.0f, 32);
                q.in.FreeTensor(x);
                q.store(b.tensor(b.a)[at], y, 32);
            },
            twin::ascend310p(), 2);
    };
    expect("one core writes what another reads", Check::Cores, reads(true), reads(false), "another core", "MTE3");
    // And the order of the cores does change the answer there, while it does not where cores are apart.
    const auto bits = [](bool own, std::vector<uint32_t> order) {
        Bench bench(128);
        twin::Options options;
        options.core_order = std::move(order);
        bench.run(
            [=](Bench& b) {
                Queues q(512);
                const uint64_t at = GetBlockIdx() * 32, from = own ? at : 32 - at;
                LocalTensor<float> x = q.load(b.tensor(b.a)[from], 32);
                LocalTensor<float> y = q.out.AllocTensor<float>();
                Muls(y, x, 2.0f, 32);
                q.in.FreeTensor(x);
                q.store(b.tensor(b.a)[at], y, 32);
            },
            twin::ascend310p(), 2, options);
        return bench.a->data;
    };
    CHECK(bits(true, {0, 1}) == bits(true, {1, 0}));
    CHECK(bits(false, {0, 1}) != bits(false, {1, 0}));
}

// A pool of four slots of 16 floats; sequence 0 reads slot 0 and writes slot 1, sequence 1 keeps slot 2, slot 3 is nobody's.
void ownership() {
    const auto move = [](uint32_t from, uint32_t to, uint32_t mixed_with = 99) {
        Bench bench;
        bench.a->ownership = twin::Ownership{64, {0, -1, 1, -1}, {-1, 0, 1, -1}, "slot"};
        return bench.run([=](Bench& b) {
            Queues q;
            LocalTensor<float> x = q.load(b.tensor(b.a)[from * 16], 16);
            LocalTensor<float> y = q.out.AllocTensor<float>();
            if (mixed_with != 99) {
                LocalTensor<float> other = q.load(b.tensor(b.a)[mixed_with * 16], 16);
                Add(y, x, other, 16);
                q.in.FreeTensor(other);
            } else {
                Muls(y, x, 2.0f, 16);
            }
            q.in.FreeTensor(x);
            q.store(b.tensor(b.a)[to * 16], y, 16);
        });
    };
    expect("a slot outside the pool", Check::Bounds, move(0, 1), move(0, 4), "a bytes", "MTE3");
    expect("a slot that is nobody's", Check::Ownership, move(0, 1), move(0, 3), "slot 3", "MTE3");
    expect("a read slot that is nobody's", Check::Ownership, move(2, 2), move(3, 2), "slot 3", "MTE2");
    expect("another sequence's values in a slot", Check::Ownership, move(0, 1), move(0, 2), "values of sequence 0",
           "MTE3");
    expect("values of two sequences in one", Check::Ownership, move(0, 1), move(0, 1, 2), "several sequences", "MTE3");
    expect("the read slot is no write slot", Check::Ownership, move(0, 1), move(0, 0), "slot 0", "MTE3");
}

}  // namespace

int main() {
    bounds();
    budget();
    alignment();
    undefined();
    order();
    queues_and_flags();
    soc();
    cores();
    ownership();
    return check::done("faults");
}
