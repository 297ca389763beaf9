// Where torch's OpenMP runtime is: see parallel.h.

#include "../common/entry.h"
#include "parallel.h"

MEGALITE_ENTRY(void, use_threads, const void* parallel, const void* thread_num, const void* num_threads) {
  using megalite::Runtime;
  megalite::runtime = {
      reinterpret_cast<decltype(Runtime::parallel)>(parallel),
      reinterpret_cast<decltype(Runtime::thread_num)>(thread_num),
      reinterpret_cast<decltype(Runtime::num_threads)>(num_threads),
  };
}
