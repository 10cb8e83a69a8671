// A pool of threads that wait for work: parallel_for(n, threads, f) calls f(0) … f(n−1).
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace gnc {

class Pool {
  public:
    // Calls f(i) for i = 0 … n−1 on at most `threads` threads, the caller's among them.
    void run(std::int64_t n, int threads, const std::function<void(std::int64_t)>& f) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (threads <= 1 || n <= 1 || !turn.owns_lock()) {  // a second caller does its work alone
            for (std::int64_t i = 0; i < n; ++i) f(i);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &f;
            size_ = n;
            next_.store(0);
            wanted_ = std::min<std::int64_t>(threads - 1, n - 1);
            while (workers_ < wanted_) {
                std::thread(&Pool::serve, this, workers_++).detach();
            }
            open_ = true;
            ++round_;
        }
        wake_.notify_all();
        drain();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            open_ = false;  // who has not woken by now need not come: there is nothing left to do
        }
        while (running_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    }

  private:
    void drain() {
        for (std::int64_t i; (i = next_.fetch_add(1)) < size_;) (*work_)(i);
    }

    void serve(std::int64_t me) {
        std::uint64_t seen = 0;
        for (;;) {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return open_ && round_ != seen && me < wanted_; });
                seen = round_;
                running_.fetch_add(1);
            }
            drain();
            running_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable wake_;
    const std::function<void(std::int64_t)>* work_ = nullptr;
    std::int64_t size_ = 0, workers_ = 0, wanted_ = 0;
    std::uint64_t round_ = 0;
    bool open_ = false;
    std::atomic<std::int64_t> next_{0}, running_{0};
};

// The pool lives until the process ends: its threads wait in it, so it is never destroyed.  After a
// fork the child has no threads but its own and needs a new pool.
inline void parallel_for(std::int64_t n, int threads,
                         const std::function<void(std::int64_t)>& f) {
    static std::mutex mutex;
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    Pool* mine;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (owner != getpid()) {
            pool = new Pool;
            owner = getpid();
        }
        mine = pool;
    }
    mine->run(n, threads, f);
}

}  // namespace gnc
