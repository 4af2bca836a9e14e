#include "threads.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace qwen_npu {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr int kMaxWorkers = 63;
constexpr auto kLinger = std::chrono::microseconds(100);  // how long a worker spins for the next call

// A job is open while the caller still hands out tasks. Workers join an open job by raising `word`; the caller closes it
// and waits only for those that joined, so a worker that was slow to wake up is never waited for.
//
// Each member begins with its own share of the tasks, the same in every call of this size: what it left in its processor's
// cache is there again.
class Pool {
 public:
  void run(int64_t tasks, int threads, TaskBody body, void* context) {
    std::unique_lock<std::mutex> mine(caller_, std::try_to_lock);
    if (threads > kMaxWorkers + 1) threads = kMaxWorkers + 1;
    if (threads > tasks) threads = static_cast<int>(tasks);
    if (threads <= 1 || !mine.owns_lock()) {
      for (int64_t i = 0; i < tasks; ++i) body(context, i);
      return;
    }
    while (workers_ < threads - 1) {
      std::thread(&Pool::work, this, workers_).detach();
      ++workers_;
    }
    body_ = body;
    context_ = context;
    for (int i = 0; i < threads; ++i) {
      shares_[i].next.store(tasks * i / threads, std::memory_order_relaxed);
      shares_[i].end = tasks * (i + 1) / threads;
    }
    helpers_.store(threads - 1, std::memory_order_relaxed);
    word_.fetch_or(kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(sleep_); }
      wake_.notify_all();
    }
    drain(0);
    word_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; word_.load(std::memory_order_acquire) != 0; ++spins) {
      relax();
      if (spins > 20000) std::this_thread::yield();
    }
  }

 private:
  static constexpr uint32_t kOpen = 0x80000000u;

  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // Takes the tasks of its own share, then what is left of the others'.
  void drain(int member) {
    const int members = helpers_.load(std::memory_order_relaxed) + 1;
    for (int turn = 0; turn < members; ++turn) {
      Share& share = shares_[(member + turn) % members];
      for (;;) {
        const int64_t i = share.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= share.end) break;
        body_(context_, i);
      }
    }
  }

  bool join(int id) {
    uint32_t seen = word_.load(std::memory_order_acquire);
    while (seen & kOpen) {
      if (word_.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) {
        // The job's fields may be read now: the caller waits for us.
        if (id < helpers_.load(std::memory_order_relaxed)) return true;
        leave();
        return false;
      }
    }
    return false;
  }

  void leave() { word_.fetch_sub(1, std::memory_order_acq_rel); }

  void work(int id) {
    auto idle_since = std::chrono::steady_clock::now();
    for (;;) {
      if ((word_.load(std::memory_order_relaxed) & kOpen) && join(id)) {
        drain(id + 1);
        leave();
        idle_since = std::chrono::steady_clock::now();
        continue;
      }
      for (int i = 0; i < 64; ++i) relax();
      if (std::chrono::steady_clock::now() - idle_since < kLinger) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      // Woken once, it spins again even if that call is over: on a busy machine it wakes up late, for the next one.
      if (!(word_.load(std::memory_order_seq_cst) & kOpen)) wake_.wait(lock);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      idle_since = std::chrono::steady_clock::now();
    }
  }

  std::mutex caller_;
  int workers_ = 0;
  TaskBody body_ = nullptr;
  void* context_ = nullptr;
  Share shares_[kMaxWorkers + 1];
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<int> helpers_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never destroyed: its threads may still run while static objects of the process are torn down.
Pool& pool() {
  static Pool* one = new Pool;
  return *one;
}

std::atomic<int> chosen{0};

}  // namespace

void parallel_for(int64_t tasks, int threads, TaskBody body, void* context) { pool().run(tasks, threads, body, context); }

int default_threads() {
  static const int count = [] {
    if (const char* text = std::getenv("QWEN_NPU_THREADS")) {
      const int value = std::atoi(text);
      if (value >= 1) return value;
    }
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
    const unsigned hardware = std::thread::hardware_concurrency();
    return hardware ? static_cast<int>(hardware) : 1;
  }();
  return count;
}

void set_threads(int threads) { chosen.store(threads, std::memory_order_relaxed); }

int threads() {
  const int value = chosen.load(std::memory_order_relaxed);
  return value > 0 ? value : default_threads();
}

}  // namespace qwen_npu
