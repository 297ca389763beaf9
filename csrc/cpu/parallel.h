// Parallel loops on the threads of torch's own OpenMP runtime, whose functions Python passes in. Linking it by name
// could load a second copy of the runtime, whose threads would compete for the same cores.
#pragma once

#include <algorithm>
#include <cstdint>

namespace megalite {

// The interface of libgomp, which LLVM's and Intel's runtimes offer too.
struct Runtime {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);
  int (*thread_num)();
  int (*num_threads)();
};

// Null until Python has set it; until then one thread does everything.
inline Runtime runtime{};

// Calls run(begin, end) for equal parts of [0, count), each of at least `grain`; results must not depend on the split.
// Always requests the same number of threads, as torch does: libgomp ends threads that a smaller team does not use.
template <typename Run>
void parallel_for(int64_t count, int64_t grain, int64_t threads, const Run& run) {
  if (count <= 0) return;
  if (count <= grain || threads <= 1 || runtime.parallel == nullptr) return run(0, count);
  struct Work {
    const Run& run;
    int64_t count, parts;
  } work{run, count, (count + grain - 1) / grain};
  const auto share = [](void* data) {
    const Work& w = *static_cast<const Work*>(data);
    const int64_t parts = std::min<int64_t>(runtime.num_threads(), w.parts), size = (w.count + parts - 1) / parts;
    const int64_t begin = runtime.thread_num() * size;
    if (begin < w.count) w.run(begin, std::min(w.count, begin + size));
  };
  runtime.parallel(share, &work, static_cast<unsigned>(threads), 0);
}

}  // namespace megalite
