// Entry points: plain C functions that Python calls by address (megalite/core/parts/kernels/entry.py). They include no header
// of torch or Python, so one binary serves every version of both. Callers check shapes, types and devices.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace megalite {

template <typename T>
constexpr char letter() {
  if constexpr (std::is_void_v<T>) {
    return 'v';
  } else if constexpr (std::is_pointer_v<T>) {
    return 'p';
  } else if constexpr (std::is_same_v<T, double>) {
    return 'd';
  } else {
    static_assert(std::is_same_v<T, int64_t>, "an entry point takes pointers, doubles and int64_t");
    return 'i';
  }
}

// Type codes of the result and the arguments. Python compares them with its own and refuses a library that differs,
// because it was built from other sources.
template <typename Result, typename... Args>
const char* signature(Result (*)(Args...)) {
  static constexpr char letters[] = {letter<Result>(), letter<Args>()..., '\0'};
  return letters;
}

template <typename T>
T word(const char* words, size_t at) {
  static_assert(sizeof(T) == 8);
  T value;
  std::memcpy(&value, words + 8 * at, 8);
  return value;
}

// Arguments arrive packed as 8-byte words in one string: ctypes would take 80 ns to convert each one.
template <typename Result, typename... Args>
Result call(Result (*entry)(Args...), const char* words) {
  return [&]<size_t... at>(std::index_sequence<at...>) {
    return entry(word<Args>(words, at)...);
  }(std::index_sequence_for<Args...>{});
}

}  // namespace megalite

#define MEGALITE_VISIBLE extern "C" __attribute__((visibility("default")))
#define MEGALITE_ENTRY(Result, name, ...)                                                                    \
  static Result entry_##name(__VA_ARGS__);                                                                   \
  MEGALITE_VISIBLE const char* megalite_##name##_signature() { return megalite::signature(entry_##name); }   \
  MEGALITE_VISIBLE Result megalite_##name(const char* words) { return megalite::call(entry_##name, words); } \
  static Result entry_##name(__VA_ARGS__)
